"""The losses by the client's names, as terms of the kernels on the targets of a micro-batch.

The formulas are those of the service's documentation (https://tinker-docs.thinkingmachines.ai/tinker/losses), sums over
all positions of all data: p is the model's probability of the target, q the one in ``logprobs``, A ``advantages`` and
r = p / q.

    cross_entropy        -w log p                               objective "reinforce", whose advantage is w
    importance_sampling  -r A                                   "unclipped"
    ppo                  -min(r A, clip(r, low, high) A)        "ppo"
    cispo                -sg(clip(r, low, high)) A log p        "cispo"
    dro                  -A log p + beta / 2 (log r)^2          "dro"
    gspo                 -min(s A, clip(s, low, high) A),       a term of its own: s has the value of the mean of the
                         s = sg(mean ratio) p / sg(p)           tokens that a mask marks, on all tokens
    custom               a graph of the client's                `graph`

``stable_reinforce`` is refused: its formula, and what the service records for it at sampling, are not published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rolltree.kernels import LogprobTerm, Objective, PolicyFields, PolicyLossOutput, Term

from .faults import FaultError
from .graph import Graph
from .wire import Array, Batch, Datum

AnyTerm = Term | LogprobTerm
POLICY = ("target_tokens", "logprobs", "advantages")
BOUNDS = ("clip_low_threshold", "clip_high_threshold")
STABLE = (
    "loss_fn 'stable_reinforce' is not served, because its formula is not published; use importance_sampling, ppo, "
    "cispo or gspo."
)


class Loss(Protocol):
    """A loss of the data of a request."""

    def check(self, i: int, datum: Datum) -> None:
        """Raise FaultError if datum ``i`` lacks an input, or has one that does not fit."""

    def term(self, data: Sequence[Datum]) -> AnyTerm:
        """Return the term on the targets of ``data``, one datum after the other."""

    def metrics(self) -> dict[str, float]:
        """Return the numbers that the terms so far have recorded, by ``name:reduction``."""


@dataclass(frozen=True)
class Named:
    """A loss that is an objective of the kernels, or GSPO.

    Args:
        name: the client's name.
        needs: inputs of each datum, in the shape of its targets.
        may: inputs that a datum may have besides.
        surrogate: of the objective; None: GSPO.
        defaults: the keys of ``loss_fn_config`` with their defaults; None: the key must be given.
    """

    name: str
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    surrogate: str | None = None
    defaults: Mapping[str, float | None] = field(default_factory=dict)

    def check(self, i: int, datum: Datum) -> None:
        where = f"data[{i}].loss_fn_inputs"
        if missing := [key for key in self.needs if key not in datum.inputs]:
            raise FaultError(f"{where} has no '{missing[0]}', which {self.name} needs.")
        if unknown := [key for key in datum.inputs if key not in (*self.needs, *self.may)]:
            raise FaultError(f"{where} has '{unknown[0]}', which {self.name} does not read; leave it out.")
        if self.name != "cross_entropy" and datum.target.ndim > 1:
            raise FaultError(f"{where}['target_tokens'] has several ids a position, which only cross_entropy takes.")
        for key, values in datum.inputs.items():
            if values.shape != datum.target.shape:
                raise FaultError(
                    f"{where}['{key}'] has the shape {list(values.shape)}; give one number for each target, "
                    f"{list(datum.target.shape)}."
                )
        if self.name == "gspo" and not datum.inputs["sequence_ratio_mask"].any():
            raise FaultError(f"{where}['sequence_ratio_mask'] marks no token, so gspo has no ratio.")

    def with_config(self, config: Mapping[str, float | str]) -> Loss:
        """Return the loss with the request's configuration.

        Raises:
            FaultError: a key is unknown, missing or out of range.
        """
        for key, value in config.items():
            if key not in self.defaults:
                keys = ", ".join(self.defaults) or "none"
                raise FaultError(f"loss_fn_config has '{key}', and {self.name} has these keys: {keys}.")
            if isinstance(value, str) or not np.isfinite(value):
                raise FaultError(f"loss_fn_config['{key}'] is {value!r}; give a finite number.")
        chosen: dict[str, float] = {}
        for key, default in self.defaults.items():
            if key in config:
                value = config[key]
            elif default is not None:
                value = default
            else:
                raise FaultError(f"{self.name} needs loss_fn_config['{key}'], for which it has no default.")
            chosen[key] = float(value)
        if chosen.get("beta", 0.0) < 0:
            raise FaultError(f"loss_fn_config['beta'] is {chosen['beta']}; give 0 or more.")
        low, high = (chosen.get(key, 0.0) for key in BOUNDS)
        if not 0 <= low <= high:
            raise FaultError(f"loss_fn_config has the bounds {low} and {high} of the ratio; give 0 <= low <= high.")
        return _Configured(self, chosen)


@dataclass(frozen=True)
class _Configured:
    kind: Named
    config: Mapping[str, float]

    def check(self, i: int, datum: Datum) -> None:
        self.kind.check(i, datum)

    def metrics(self) -> dict[str, float]:
        return {}

    def term(self, data: Sequence[Datum]) -> AnyTerm:
        kind, config = self.kind, self.config
        if kind.name == "cross_entropy":
            weight = _joined(data, "weights", 1.0)
            return Term(PolicyFields.flat(weight), Objective(surrogate="reinforce", aggregation="token_sum"), 1.0)
        old, advantage = _joined(data, "logprobs", 0.0), _joined(data, "advantages", 0.0)
        bounds = [_joined(data, key, config[key]) for key in BOUNDS if key in kind.defaults]
        if kind.surrogate is None:
            lengths = torch.tensor([datum.target.size for datum in data])
            loss = partial(
                gspo,
                old=old,
                advantage=advantage,
                counted=_joined(data, "sequence_ratio_mask", 0.0) != 0,
                low=bounds[0],
                high=bounds[1],
                datum=torch.arange(len(data)).repeat_interleave(lengths),
            )
            return LogprobTerm(loss, torch.ones_like(advantage, dtype=torch.bool))
        low, high = bounds or (None, None)
        fields = PolicyFields.flat(advantage, old_logprob=old, clip_low=low, clip_high=high)
        surrogate, beta = kind.surrogate, config.get("beta", 0.1)
        if surrogate == "dro" and beta == 0:  # which no objective of the penalty takes
            surrogate, beta = "reinforce", 0.1
        return Term(fields, Objective(surrogate=surrogate, beta=beta, aggregation="token_sum"), 1.0)


def _joined(data: Sequence[Datum], key: str, default: float) -> Tensor:  # [M] float32
    parts: list[Array] = []
    for datum in data:
        values = datum.inputs.get(key)
        parts.append(np.full(datum.target.size, default, np.float32) if values is None else values.reshape(-1))
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))


def gspo(
    logprob: Tensor,  # [M]
    *,
    old: Tensor,  # [M]
    advantage: Tensor,  # [M]
    counted: Tensor,  # [M] bool, the tokens of the ratio
    low: Tensor,  # [M]
    high: Tensor,  # [M]
    datum: Tensor,  # [M] int64, the datum of each token
) -> PolicyLossOutput:
    """Compute GSPO-token (Zheng et al. 2025): the ratio of a sequence with the derivative of each of its tokens."""
    held = logprob.detach()
    sums = held.new_zeros(int(datum[-1]) + 1, 2).index_add(
        0, datum, torch.stack([(held - old) * counted, counted.to(held.dtype)], 1)
    )
    ratio = torch.exp((sums[:, 0] / sums[:, 1])[datum] + logprob - held)
    loss = -torch.minimum(ratio * advantage, torch.clamp(ratio, low, high) * advantage).sum()
    return PolicyLossOutput(loss, {})


@dataclass
class Custom:
    """A loss that the client has traced, datum by datum.

    Args:
        graph: the loss.
        count: data of the whole request, for the metrics that are means.
    """

    graph: Graph
    count: int
    sums: dict[str, float] = field(default_factory=dict)

    def check(self, i: int, datum: Datum) -> None:
        self.graph.check(i, datum)

    def metrics(self) -> dict[str, float]:
        return {name: total / self.count if name.endswith(":mean") else total for name, total in self.sums.items()}

    def term(self, data: Sequence[Datum]) -> AnyTerm:
        size = sum(datum.target.size for datum in data)
        return LogprobTerm(partial(self._loss, data=data), torch.ones(size, dtype=torch.bool))

    def _loss(self, logprob: Tensor, *, data: Sequence[Datum]) -> PolicyLossOutput:  # [M]
        total, first = logprob.new_zeros(()), 0
        for datum in data:
            of_datum = logprob[first : first + datum.target.size].view(datum.target.shape)
            first += datum.target.size
            loss, metrics = self.graph.run(of_datum, datum)
            total = total + loss
            for name, value in metrics.items():
                self.sums[name] = self.sums.get(name, 0.0) + value
        return PolicyLossOutput(total, {})


LOSSES = {
    loss.name: loss
    for loss in (
        Named("cross_entropy", ("target_tokens",), ("weights",)),
        Named("importance_sampling", POLICY, (), "unclipped"),
        Named("ppo", POLICY, BOUNDS, "ppo", dict(zip(BOUNDS, (0.8, 1.2), strict=True))),
        Named("cispo", POLICY, BOUNDS, "cispo", dict(zip(BOUNDS, (0.0, 4.0), strict=True))),
        Named("dro", POLICY, (), "dro", {"beta": None}),
        Named(
            "gspo", (*POLICY, "sequence_ratio_mask"), BOUNDS, None,
            dict(zip(BOUNDS, (1 - 3e-4, 1 + 4e-4), strict=True)),  # of the paper; the service's are not published
        ),
    )
}  # fmt: skip
"""The losses with a name, with the defaults of the service's documentation."""


def loss_of(batch: Batch, graphs: Mapping[str, Graph]) -> Loss:
    """Return the loss of a request, whose data are checked.

    Args:
        graphs: the client's traced losses by their ids.

    Raises:
        FaultError: there is no such loss, or configuration or data do not fit it.
    """
    if batch.loss == "stable_reinforce":
        raise FaultError(STABLE)
    if batch.loss == "custom":
        loss: Loss = Custom(_graph(batch, graphs), len(batch.data))
    elif batch.loss in LOSSES:
        loss = LOSSES[batch.loss].with_config(batch.config)
    else:
        raise FaultError(f"There is no loss_fn '{batch.loss}'; there are {', '.join(LOSSES)} and custom.")
    for i, datum in enumerate(batch.data):
        loss.check(i, datum)
    return loss


def _graph(batch: Batch, graphs: Mapping[str, Graph]) -> Graph:
    name = batch.config.get("loss_id")
    if not isinstance(name, str) or name not in graphs or len(batch.config) > 1:
        raise FaultError("loss_fn 'custom' needs loss_fn_config with the loss_id of create_custom_loss, and no more.")
    return graphs[name]
