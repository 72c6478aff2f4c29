"""Per-token inputs of `policy_loss`, and the weight that its aggregation gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..checks import Arguments
from .path_index import PathIndex


@dataclass(frozen=True)
class PolicyFields:
    """Constants of the loss, one value a target (a token to learn from); none of them takes a gradient.

    ``aggregation`` names the aggregation that adv_pos, adv_neg and weight already contain (trees fold it in when they
    merge tokens). None: not yet; `policy_loss` folds it in.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a field requires a gradient.
    """

    adv_pos: Tensor  # [M] S_pos >= 0
    adv_neg: Tensor  # [M] S_neg <= 0
    weight: Tensor  # [M] S_1: for plain tokens the number of leaves that share it
    mask: Tensor | None = None  # [M] bool: False: no part of loss or metrics
    old_logprob: Tensor | None = None  # [M] policy that ratios are against; None: ratio 1
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
    proximal_logprob: Tensor | None = None  # [M] policy before the update, for ratio_base "proximal"
    token_weight: Tensor | None = None  # [M] factor of the surrogate: 0 leaves a token out, others weigh data
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
            check.constant(name, value)

    def tensors(self) -> tuple[list[Tensor], str]:
        """Return the tensors that are given and their names, for `from_tensors`: ops of torch take no objects."""
        values = {name: getattr(self, name) for name in PER_TARGET}
        if self.paths is not None:
            values |= {f.name: getattr(self.paths, f.name) for f in dataclasses.fields(self.paths)}
        present = {name: t for name, t in values.items() if t is not None}
        return list(present.values()), " ".join(present)

    @staticmethod
    def from_tensors(tensors: Sequence[Tensor], names: str, aggregation: str | None) -> PolicyFields:
        """Return the fields that `tensors` was called on, with ``aggregation``."""
        present: dict[str, Any] = dict(zip(names.split(), tensors, strict=True))
        values: dict[str, Any] = {name: present.get(name) for name in PER_TARGET}
        index: dict[str, Any] = {f.name: present.get(f.name) for f in dataclasses.fields(PathIndex)}
        paths = None if index["target_end"] is None else PathIndex(**index)
        return PolicyFields(**values, paths=paths, aggregation=aggregation)

    def to(self, dtype: torch.dtype) -> PolicyFields:
        """Return these fields with all floating-point values in ``dtype``."""
        tensors, names = self.tensors()
        cast = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
        return PolicyFields.from_tensors(cast, names, self.aggregation)

    def take(self, index: Tensor) -> PolicyFields:
        """Return the fields of the targets ``index [P] int64``, without paths."""
        return self._each(lambda t: t.index_select(0, index), None)

    def slice(self, first: int, last: int) -> PolicyFields:
        """Return the fields of targets ``first .. last - 1``, which must be whole paths where paths matter.

        The other leaves become empty.
        """
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
                pair_target=_inside(paths.pair_target, first, last),
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
        """Return the fields of flat sequences, laid end to end.

        Args:
            advantage: ``[M]``, one a target, or ``[S]``, one a sequence, together with ``cu_seqlens``.
            weight: factor of every term of the loss, one a target or a sequence; 1 if None.
            cu_seqlens: boundaries of the sequences; needed for ratios and means of sequences. If no ``[M]`` tensor is
                given, M is read from it, which waits for the device and does not go through torch.compile.
            old_logprob, ref_logprob, behaviour_logprob, proximal_logprob, teacher_logprob, token_weight, clip_low,
                clip_high, pass_rate, segment, mask: fields of that name, one value a target.

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
        first = next((t for t in of_targets.values() if t is not None), None)
        per_sequence = len(advantage) == S
        if first is None and per_sequence and torch.compiler.is_compiling():
            check.require(False, "under torch.compile the number of targets is not read from cu_seqlens; give mask")
        M = len(first) if first is not None else int(cu[-1]) if per_sequence and len(cu) else len(advantage)
        cu = check.boundaries(cu, M)
        for name, values in (("advantage", advantage), ("weight", weight)):
            size = M if values is None else len(values)
            check.require(  # `in` takes two sizes that a compiler does not know to be equal for different
                size == S or size == M,  # noqa: SIM109
                lambda name=name, size=size: f"{name} must be [{M}], or [{S}] with cu_seqlens, got [{size}]",  # type: ignore[misc]
            )
        return _of_sequences(advantage, weight, cu, M, of_targets)

    def folded(self, aggregation: str) -> PolicyFields:
        """Return these fields with ``aggregation`` folded into the weights.

        Raises:
            ValueError: another aggregation is folded in already, or the aggregation needs sequences that are not known.
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


def _inside(target: Tensor | None, first: int, last: int) -> Tensor | None:
    return None if target is None else torch.where((target >= first) & (target < last), target - first, -1)


def _of_sequences(
    advantage: Tensor,  # [M] or [S]
    weight: Tensor | None,  # [M] or [S]
    cu: Tensor,  # [S + 1] int64
    M: int,
    of_targets: dict[str, Any],
) -> PolicyFields:
    """Return the fields of ``M`` targets of sequences; what has one value a sequence goes into their paths too."""
    S = len(cu) - 1
    sequence = torch.searchsorted(cu[1:], torch.arange(M, device=cu.device), right=True)
    leaf_weight = torch.ones_like(advantage[:S]) if weight is None else weight if len(weight) == S else None
    leaf_advantage = advantage if len(advantage) == S else None
    if weight is not None:
        weight = weight[sequence] if len(weight) == S else weight
    pos, neg, one = _signed(advantage if leaf_advantage is None else advantage[sequence], weight)
    mask = of_targets["mask"]
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


def _signed(advantage: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.ones_like(advantage) if weight is None else weight
    return weight * advantage.clamp(min=0), weight * advantage.clamp(max=0), weight


def aggregation_weight(aggregation: str, leaf_length: Tensor) -> Tensor:
    """Return the weight of a leaf's tokens ``[L]``: 1 / leaf_length for ``seq_mean_token_mean``, otherwise 1.

    A leaf without tokens to learn from has weight 0 in the former. Dtype of ``leaf_length``, fp32 for integers.

    Args:
        aggregation: as in `Objective`.
        leaf_length: ``[L]``, tokens of each leaf that count.
    """
    length = leaf_length if leaf_length.is_floating_point() else leaf_length.float()
    if aggregation == "seq_mean_token_mean":
        return torch.where(length > 0, 1 / length.clamp(min=1), 0)
    return torch.ones_like(length)
