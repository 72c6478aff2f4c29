"""A loss term of the user's: a class that computes a loss of packed log-probs, see docs/extending.md.

The class has a method ``loss`` that names what it reads among `INPUTS`; all else is optional:

- ``prepare(trees)`` is called once a step, before trees are packed, and may set columns of the trees;
- ``normalizer(trees)`` returns the divisor of the update's sum; without it, the counted tokens of all responses;
- ``extra``: names of token columns that hold ids to score besides the target, -1 for none;
- ``whole_trees = True``: the loss relates responses of one tree, which several ranks then do not divide.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolltree.kernels import LogprobTerm, Objective, PolicyFields, PolicyLossOutput
from rolltree.kernels.linear_logprob import STATISTICS

from ..batches.batch import TreeBatch
from ..data.columns import Array, find_column
from ..data.tree import TokenTree
from ..errors import UserError
from ..parts.calling import call
from ..parts.context import OF_TREES, Context, asked
from .terms import TokenTerm

INPUTS = ("logprob", "fields", "columns", "paths", *STATISTICS)
"""The arguments that a term's method ``loss`` may name."""
STEP = ("step", "metrics")
"""The values of the run that it may name too."""
FIELDS = Objective.preset("reinforce")
"""Decides what the fields hold: sums over the leaves that share a target, without any mean."""


@dataclass(frozen=True)
class UserTerm:
    """A term whose loss the user's class computes.

    Args:
        what: the term's place in the configuration, for messages.
        instance: the one of the user's class.
        tokens: the tokens that it counts, with its selection and its name.
        context: the run's values, for what its methods ask.

    Raises:
        UserError: the class has no method ``loss``, or that names an unknown argument.
    """

    what: str
    instance: Any
    tokens: TokenTerm
    context: Context

    def __post_init__(self) -> None:
        function = getattr(self.instance, "loss", None)
        if not callable(function):
            raise UserError(f"{self.what} must be a class with a method loss; see docs/extending.md.")
        parameters = inspect.signature(function).parameters.values()
        unknown = [p.name for p in parameters if p.name not in (*INPUTS, *STEP) and p.default is p.empty]
        if unknown or not parameters:
            named = f"names '{unknown[0]}', which a run does not have" if unknown else "takes no argument"
            raise UserError(f"{self.what}: its method loss {named}; it may name {', '.join((*INPUTS, *STEP))}.")
        if "extra_logprob" in self.inputs and not self.extra:
            raise UserError(f"{self.what}: its loss reads extra_logprob; name the columns of ids in `extra`.")

    @property
    def name(self) -> str:
        return self.tokens.name

    def now(self) -> UserTerm:
        return self

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names in `INPUTS` that the loss reads."""
        return tuple(name for name in inspect.signature(self.instance.loss).parameters if name in INPUTS)

    @property
    def extra(self) -> tuple[str, ...]:
        return tuple(getattr(self.instance, "extra", ()))

    @property
    def whole_trees(self) -> bool:
        return bool(getattr(self.instance, "whole_trees", False))

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        self.tokens.prepare(trees)
        if hasattr(self.instance, "prepare"):
            self.context.call(self.what, self.instance.prepare, trees, offers=OF_TREES)
        for name in self.extra:
            try:
                column = find_column(name)
            except ValueError as error:
                raise UserError(f"{self.what}: {error}") from error
            if not (column.per == "token" and column.to_device):
                raise UserError(f"{self.what}: the column '{name}' of ids must be per token, and to_device.")
            for tree in trees:
                if name not in tree.columns:
                    tree.set(name, column.fill)

    whole_batch = True  # a user's loss may read all of it

    def extent(self, tree: TokenTree) -> Array:  # [L]
        return np.where(self.tokens.lengths(tree) > 0, tree.response_length, 0)

    def has_gradient(self, tree: TokenTree) -> bool:
        return bool(self.extent(tree).any())

    def keep_means(self, tree: TokenTree, part: TokenTree, kept: Array) -> None:
        """Do nothing: its trees are whole."""

    def normalizer(self, trees: Sequence[TokenTree], demonstrations: Sequence[TokenTree] = ()) -> float:
        if not hasattr(self.instance, "normalizer"):
            return self.tokens.normalizer(trees, demonstrations)
        seen = trees if self.tokens.select is None else [*trees, *demonstrations]
        number = call(self.what, self.instance.normalizer, seen)
        if not (isinstance(number, int | float) and 0 <= number < float("inf")):
            raise UserError(f"{self.what}: its normalizer must return a finite number of at least 0, not {number!r}.")
        return float(number)

    def on(self, batch: TreeBatch, normalizer: float, on_policy: bool, weight: float) -> LogprobTerm:
        if self.whole_trees:
            batch.check_whole(self.name)
        select = None if self.tokens.select is None else self.name
        old = None if on_policy else self.tokens.compared_with(batch)
        fields = batch.fields(FIELDS, old_logprob=old, select=select)
        mask = batch.loss_mask if fields.mask is None else fields.mask
        loss = partial(
            self._loss,
            fields=_only(fields, mask),
            columns=batch.columns,
            mask=mask,
            normalizer=normalizer,
            share=normalizer / batch.of if batch.trees else 0.0,
            on_policy=on_policy,
        )
        ids = [batch.columns[name].long() for name in self.extra]
        want = tuple(name for name in STATISTICS if name in self.inputs)
        return LogprobTerm(loss, mask, weight, self.name, want, torch.stack(ids, 1) if ids else None)

    def _loss(
        self,
        logprob: Tensor,  # [M]
        *,
        fields: PolicyFields,
        columns: Mapping[str, Tensor],
        mask: Tensor,  # [M]
        normalizer: float,
        share: float,  # of the normaliser, so that those of all micro-batches add up to it
        on_policy: bool,
        **statistics: Tensor,  # [M], and extra_logprob [M, K]
    ) -> PolicyLossOutput:
        logprob = torch.where(mask, logprob, 0)
        for name, values in statistics.items():
            kept = mask if values.dim() == 1 else mask[:, None]
            statistics[name] = torch.where(kept, values, 0)
        if on_policy:
            fields = replace(fields, old_logprob=logprob.detach())
        inputs = {"logprob": logprob, "fields": fields, "columns": columns, "paths": fields.paths, **statistics}
        asks = self.context.values(asked(self.instance.loss, STEP))
        answer = call(self.what, self.instance.loss, **{name: inputs[name] for name in self.inputs}, **asks)
        total, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
        if not isinstance(total, Tensor) or total.shape != ():
            raise UserError(f"{self.what}: its loss must return a tensor of one number, not {_shown(total)}.")
        if not isinstance(metrics, Mapping):
            raise UserError(f"{self.what}: the metrics of its loss must be a dict, not {_shown(metrics)}.")
        double = torch.float64
        loss = {"loss": (total.detach().to(double), torch.full((), share, dtype=double, device=total.device))}
        sums = {name: _pair(self.what, name, value, total) for name, value in metrics.items()}
        return PolicyLossOutput(
            total / normalizer if normalizer else total * 0, {f"{self.name}/{k}": v for k, v in (loss | sums).items()}
        )


def _only(fields: PolicyFields, mask: Tensor) -> PolicyFields:
    """Return the fields with zeros outside of ``mask``; None for log-probs that some counted token does not have."""
    kept: dict[str, Any] = {}
    for name in (*WEIGHTS, *LOGPROBS):
        values = getattr(fields, name)
        if values is not None:
            complete = name in WEIGHTS or not bool(values[mask].isnan().any())
            kept[name] = torch.where(mask, values, 0) if complete else None
    return replace(fields, **kept)


WEIGHTS = ("adv_pos", "adv_neg", "weight", "pos_weight", "neg_weight", "token_weight")
LOGPROBS = ("old_logprob", "ref_logprob", "behaviour_logprob", "teacher_logprob", "proximal_logprob")


def _pair(what: str, name: Any, value: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a metric's sum and count, in fp64."""
    try:
        total, count = value
        pair = [
            torch.as_tensor(x, dtype=torch.float64, device=like.device).detach().reshape(()) for x in (total, count)
        ]
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{what}: the metric '{name}' of its loss must be a pair (sum, count) of numbers.") from error
    return pair[0], pair[1]


def _shown(value: Any) -> str:
    return f"one of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
