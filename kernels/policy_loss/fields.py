"""Per-token inputs of `policy_loss`, and sums along the paths of a tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..checks import Arguments
from .objective import aggregation_weight


@dataclass(frozen=True)
class PathIndex:
    """Which targets lie on which leaf's path, for targets in depth-first order.

    Target i is on the path of target j iff ``i <= j < target_end[i]``. For flat sequences ``target_end`` is the end of
    the own sequence and ``leaf_target`` its last target. On a tree a leaf may learn from the end of its path alone,
    what comes before being its prompt: from the target after ``leaf_start`` on.
    """

    target_end: Tensor  # [M] int: end of the subtree of targets
    leaf_target: Tensor  # [L] int: last target of the leaf's path; -1: the leaf has none
    leaf_length: Tensor  # [L]: masked logical tokens of the path
    leaf_weight: Tensor | None  # [L]: w_l, contains the aggregation iff the fields do; None: differs within a leaf
    leaf_advantage: Tensor | None  # [L]; None: differs within a leaf
    sequence: Tensor | None = None  # [M] int: the leaf of each target, for flat sequences; None: a tree
    leaf_start: Tensor | None = None  # [L] int: last target before the leaf's own; -1, or None for all: there is none

    def check(self, check: Arguments, M: int) -> None:
        """Shapes, and that every target and leaf named exists, among ``M`` targets on the device of ``check``.

        Raises:
            ValueError, IndexError: they do not; see `Arguments`.
        """
        end = check.integers("paths.target_end", self.target_end, (M,), " like the targets")
        L = len(check.integers("paths.leaf_target", self.leaf_target, ("L",)))
        check.numbers("paths.leaf_length", self.leaf_length, (L,), ", one a leaf")
        for name in ("leaf_weight", "leaf_advantage"):
            if (value := getattr(self, name)) is not None:
                check.floats(f"paths.{name}", value, (L,), ", one a leaf")
        place = torch.arange(M, device=end.device)
        message = f"paths.target_end must lie after its target and at most at {M}"
        check.look(message, end, lambda: (end > place) & (end <= M), on_device=True)
        check.index("paths.leaf_target", self.leaf_target, M, low=-1)
        if self.sequence is not None:
            check.integers("paths.sequence", self.sequence, (M,), " like the targets")
            check.index("paths.sequence", self.sequence, L)
        if self.leaf_start is not None:
            check.integers("paths.leaf_start", self.leaf_start, (L,), ", one a leaf")
            check.index("paths.leaf_start", self.leaf_start, M, low=-1)

    def sum(self, values: Tensor) -> Tensor:
        """``[M] -> [L]``: sum of ``values`` along each leaf's path, in fp64 inside. Differentiable."""
        result: Tensor = _PathSum.apply(values, self.target_end.long(), self.leaf_target.long(), self.leaf_start)
        return result

    def spread(self, values: Tensor) -> Tensor:
        """``[L] -> [M]``, the adjoint of ``sum``: at each target the sum of ``values`` over the leaves below it."""
        return _spread(values, self.target_end.long(), self.leaf_target.long(), self.leaf_start)


class _PathSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, target_end: Tensor, leaf_target: Tensor, leaf_start: Tensor | None) -> Tensor:
        ctx.save_for_backward(target_end, leaf_target, leaf_start)
        x = values.double()
        # +x enters at the target, -x where its subtree ends; the running sum at target j is then the sum over j's path.
        # Sorted accumulation (index_put), not atomic: the order of the sum is fixed.
        steps = torch.cat([x, x.new_zeros(1)]).index_put((target_end,), -x, accumulate=True)
        along = torch.cat([steps.cumsum(0)[:-1], x.new_zeros(1)])
        total = along[leaf_target]  # -1 takes the zero
        if leaf_start is not None:
            total = total - along[leaf_start.long()]
        return total.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _spread(grads[0], *ctx.saved_tensors), None, None, None


def _spread(values: Tensor, target_end: Tensor, leaf_target: Tensor, leaf_start: Tensor | None) -> Tensor:
    total = _below(values.double(), target_end, leaf_target, leaf_start)
    if leaf_start is not None:  # a sum of nothing is 0, not what rounding leaves of a leaf that came and went
        some = _below((values != 0).double(), target_end, leaf_target, leaf_start)
        total = torch.where(some > 0, total, 0)
    return total.to(values.dtype)


def _below(values: Tensor, target_end: Tensor, leaf_target: Tensor, leaf_start: Tensor | None) -> Tensor:
    M = len(target_end)
    at_leaf = values.new_zeros(M + 1).index_put((leaf_target,), values, accumulate=True)
    if leaf_start is not None:
        at_leaf = at_leaf.index_put((leaf_start.long(),), -values, accumulate=True)
    before = torch.cat([at_leaf.new_zeros(1), at_leaf[:M].cumsum(0)])  # -1 fell into the slot left out
    return before[target_end] - before[:M]


@dataclass(frozen=True)
class PolicyFields:
    """Constants of the loss, one value a target (a token to learn from); none of them takes a gradient.

    ``aggregation`` names the aggregation that adv_pos, adv_neg and weight already contain (trees fold it when they
    merge tokens); None: not folded yet, `policy_loss` does it.
    """

    adv_pos: Tensor  # [M] S_pos >= 0
    adv_neg: Tensor  # [M] S_neg <= 0
    weight: Tensor  # [M] S_1: for plain tokens the number of leaves that share it
    mask: Tensor | None = None  # [M] bool: False: no part of loss or metrics
    old_logprob: Tensor | None = None  # [M] policy before the update; None: ratio 1
    ref_logprob: Tensor | None = None  # [M] reference policy
    behaviour_logprob: Tensor | None = None  # [M] as sampled; NaN where not recorded
    teacher_logprob: Tensor | None = None  # [M] for distillation
    clip_low: Tensor | None = None  # [M] bounds of the ratio itself, instead of 1 - eps_low
    clip_high: Tensor | None = None  # [M]
    pass_rate: Tensor | None = None  # [M] of the target's prompt, for "nft"
    segment: Tensor | None = None  # [M] int: label of each segment, constant along it, for ratio_level "segment"
    all_weight: Tensor | None = None  # [M] weight of what does not depend on advantages; None: `weight`
    pos_weight: Tensor | None = None  # [M] weight of the leaves of positive advantage, for clip fractions
    neg_weight: Tensor | None = None  # [M] of negative advantage; both or none: in proportion to adv_pos and -adv_neg
    proximal_logprob: Tensor | None = None  # [M] proximal policy, where old_logprob is another's: decoupled PPO
    token_weight: Tensor | None = (
        None  # [M] times the surrogate: a selection of tokens (0: not chosen), weights of data
    )
    paths: PathIndex | None = None
    aggregation: str | None = None

    def __post_init__(self) -> None:
        check = Arguments("PolicyFields", "adv_pos", self.adv_pos)
        M = len(check.floats("adv_pos", self.adv_pos, ("M",)))
        for name in PER_TARGET:
            value = getattr(self, name)
            if value is None:
                continue
            if name == "mask":
                check.mask(name, value, (M,), " like adv_pos")
            elif name == "segment":
                check.integers(name, value, (M,), " like adv_pos")
            else:
                check.floats(name, value, (M,), " like adv_pos")
            if value.requires_grad:
                check.require(False, f"{name} is a constant of the loss but requires grad; detach it")

    def tensors(self) -> tuple[list[Tensor], str]:
        """The tensors there are and their names, for `from_tensors`: ops of torch take no objects."""
        values = {name: getattr(self, name) for name in PER_TARGET}
        if self.paths is not None:
            values |= {f.name: getattr(self.paths, f.name) for f in dataclasses.fields(self.paths)}
        given = {name: t for name, t in values.items() if t is not None}
        return list(given.values()), " ".join(given)

    @staticmethod
    def from_tensors(tensors: Sequence[Tensor], names: str, aggregation: str | None) -> PolicyFields:
        given: dict[str, Any] = dict(zip(names.split(), tensors, strict=True))
        values: dict[str, Any] = {name: given.get(name) for name in PER_TARGET}
        index: dict[str, Any] = {f.name: given.get(f.name) for f in dataclasses.fields(PathIndex)}
        paths = None if index["target_end"] is None else PathIndex(**index)
        return PolicyFields(**values, paths=paths, aggregation=aggregation)

    def to(self, dtype: torch.dtype) -> PolicyFields:
        """With all floating-point values in ``dtype``."""
        tensors, names = self.tensors()
        cast = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
        return PolicyFields.from_tensors(cast, names, self.aggregation)

    def take(self, index: Tensor) -> PolicyFields:
        """These targets ``[P] int64`` alone, without the paths they lie on."""
        return self._each(lambda t: t.index_select(0, index), None)

    def slice(self, first: int, last: int) -> PolicyFields:
        """Targets ``first .. last - 1``, which must be whole paths where paths matter; other leaves become empty."""
        paths = self.paths
        if paths is not None:
            inside = (paths.leaf_target >= first) & (paths.leaf_target < last)
            paths = replace(
                paths,
                target_end=paths.target_end[first:last] - first,
                sequence=None if paths.sequence is None else paths.sequence[first:last],
                leaf_target=torch.where(inside, paths.leaf_target - first, -1),
                leaf_start=_shifted(paths.leaf_start, inside, first),
                leaf_length=torch.where(inside, paths.leaf_length, 0),
            )
        return self._each(lambda t: t[first:last], paths)

    def _each(self, change: Callable[[Tensor], Tensor], paths: PathIndex | None) -> PolicyFields:
        values = {name: getattr(self, name) for name in PER_TARGET}
        changed: dict[str, Any] = {name: None if t is None else change(t) for name, t in values.items()}
        return PolicyFields(**changed, paths=paths, aggregation=self.aggregation)

    @staticmethod
    def flat(
        advantage: Tensor,  # [M], or [S] together with cu_seqlens
        *,
        old_logprob: Tensor | None = None,  # [M]
        ref_logprob: Tensor | None = None,  # [M]
        behaviour_logprob: Tensor | None = None,  # [M]
        proximal_logprob: Tensor | None = None,  # [M]
        teacher_logprob: Tensor | None = None,  # [M]
        token_weight: Tensor | None = None,  # [M]
        clip_low: Tensor | None = None,  # [M]
        clip_high: Tensor | None = None,  # [M]
        pass_rate: Tensor | None = None,  # [M]
        segment: Tensor | None = None,  # [M] int
        mask: Tensor | None = None,  # [M] bool
        weight: Tensor | None = None,  # [M] or [S]
        cu_seqlens: Tensor | None = None,  # [S + 1] int: boundaries of the sequences, from 0 to M
    ) -> PolicyFields:
        """Fields of flat sequences, laid end to end. ``cu_seqlens`` is needed for sequence-level ratios and means.

        Without any ``[M]`` tensor to tell M, it is read from ``cu_seqlens``, which waits for the device.

        Raises:
            ValueError: shapes, dtypes or devices do not fit, or cu_seqlens does not rise from 0 to M.
        """
        check = Arguments("PolicyFields.flat", "advantage", advantage)
        check.floats("advantage", advantage, ("M",))
        if weight is not None:
            check.floats("weight", weight, ("M",))
        of_targets: dict[str, Any] = {
            "mask": mask,
            "old_logprob": old_logprob,
            "ref_logprob": ref_logprob,
            "behaviour_logprob": behaviour_logprob,
            "proximal_logprob": proximal_logprob,
            "teacher_logprob": teacher_logprob,
            "token_weight": token_weight,
            "clip_low": clip_low,
            "clip_high": clip_high,
            "pass_rate": pass_rate,
            "segment": segment,
        }
        for name, t in of_targets.items():
            if t is not None:
                check.tensor(name, t, ("M",))
        if mask is not None:
            check.mask("mask", mask)
        if cu_seqlens is None:
            if weight is not None:
                check.floats("weight", weight, advantage.shape, " like advantage")
            return PolicyFields(*_signed(advantage, weight), **of_targets)
        cu = check.integers("cu_seqlens", cu_seqlens, ("S + 1",)).long()
        S = len(cu) - 1
        given = next((t for t in of_targets.values() if t is not None), None)
        per_sequence = len(advantage) == S
        M = len(given) if given is not None else int(cu[-1]) if per_sequence and len(cu) else len(advantage)
        cu = check.boundaries(cu, M)
        check.require(
            len(advantage) in (S, M), f"advantage must be [{M}], or [{S}] with cu_seqlens, got [{len(advantage)}]"
        )
        check.require(
            weight is None or len(weight) in (S, M),
            f"weight must be [{M}], or [{S}] with cu_seqlens, got {weight is not None and list(weight.shape)}",
        )
        sequence = torch.searchsorted(cu[1:], torch.arange(M, device=cu.device), right=True)
        leaf_weight = torch.ones_like(advantage[:S]) if weight is None else weight if len(weight) == S else None
        leaf_advantage = advantage if per_sequence else None
        if weight is not None:
            weight = weight[sequence] if len(weight) == S else weight
        pos, neg, one = _signed(advantage[sequence] if per_sequence else advantage, weight)
        counted = torch.ones_like(one) if mask is None else mask.to(one.dtype)
        before = torch.cat([counted.new_zeros(1, dtype=torch.float64), counted.double().cumsum(0)])
        paths = PathIndex(
            target_end=cu[1:][sequence],
            leaf_target=torch.where(cu[1:] > cu[:-1], cu[1:] - 1, -1),
            leaf_length=(before[cu[1:]] - before[cu[:-1]]).to(one.dtype),
            leaf_weight=leaf_weight,
            leaf_advantage=leaf_advantage,
            sequence=sequence,
        )
        return PolicyFields(pos, neg, one, **of_targets, paths=paths)

    def folded(self, aggregation: str) -> PolicyFields:
        """These fields with ``aggregation`` folded into the weights.

        Raises:
            ValueError: another aggregation is folded in already, or sequences are needed and not known.
        """
        if self.aggregation == aggregation:
            return self
        if self.aggregation is not None:
            raise ValueError(
                f"policy_loss: the fields contain aggregation '{self.aggregation}', the objective wants "
                f"'{aggregation}'; build the fields for this objective."
            )
        if aggregation != "seq_mean_token_mean":  # every other one weighs each leaf by 1
            return replace(self, aggregation=aggregation)
        paths = self.paths
        if paths is None:
            raise ValueError(f"policy_loss: aggregation '{aggregation}' needs sequences; give cu_seqlens to flat().")
        leaf = aggregation_weight(aggregation, paths.leaf_length)
        at_end = leaf.new_zeros(len(self.adv_pos) + 1)
        at_end[paths.leaf_target.long()] = leaf  # leaf_target -1 falls into the slot after the last target
        token = at_end[paths.target_end.long() - 1]
        leaf_weight = None if paths.leaf_weight is None else paths.leaf_weight * leaf
        return replace(
            self,
            adv_pos=self.adv_pos * token,
            adv_neg=self.adv_neg * token,
            weight=self.weight * token,
            paths=replace(paths, leaf_weight=leaf_weight),
            aggregation=aggregation,
        )


PER_TARGET = tuple(f.name for f in dataclasses.fields(PolicyFields) if f.name not in ("paths", "aggregation"))
OPTIONAL = PER_TARGET[3:]


def _shifted(start: Tensor | None, inside: Tensor, first: int) -> Tensor | None:
    return None if start is None else torch.where(inside & (start >= first), start - first, -1)


def _signed(advantage: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.ones_like(advantage) if weight is None else weight
    return weight * advantage.clamp(min=0), weight * advantage.clamp(max=0), weight
