"""Models beside the policy, which score its trees into columns: a reference, a teacher, the policy before an update.

A role of the policy's own architecture is a set of weights and no second model: its tensors change places with the
policy's parameters while it scores, so that nothing but the weights is in memory twice, and they may wait on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batch import TreeBatch
from ..data.columns import Array
from ..data.pack import pack
from ..data.tree import TokenTree
from .decoder import batch_logprob


class Role:
    """A named model that scores the log-probs of trees' tokens.

    Args:
        column: where its scores go, such as ``ref_logprob``.
        model: what computes; the policy itself for a role that has only weights of its own.
        weights: the role's, by parameter name, of the policy's shapes; None: those of ``model``.
        reset_every: updates after which the weights become the policy's again; 0: never.
        ema: share of the old weights kept at every update of the policy; None: they stay.
        initial: the weights are the policy's as the run began, so that a checkpoint must hold them.
    """

    def __init__(
        self,
        column: str,
        model: PreTrainedModel,
        weights: Mapping[str, Tensor] | None = None,
        *,
        reset_every: int = 0,
        ema: float | None = None,
        initial: bool = False,
    ) -> None:
        self.column, self.model = column, model
        self.weights = None if weights is None else dict(weights)
        self.reset_every, self.ema, self.initial = reset_every, ema, initial
        self.seen = 0  # updates of the policy

    @staticmethod
    def snapshot(model: PreTrainedModel, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """A copy of the model's parameters."""
        return {name: p.detach().to(device, copy=True) for name, p in model.named_parameters()}

    def score(self, trees: Sequence[TokenTree], *, max_tokens: int, temperature: float, flat: bool = False) -> None:
        """Write the log-prob of every response token into the role's column; 2 NHV of head and one forward.

        Each distinct prefix is scored once, even if several responses sampled it independently; with ``flat`` every
        response is scored on its own.
        """
        device = self.model.device
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad(), self._swapped():
            for waiting in pack(trees, max_tokens=max_tokens, in_pieces=not flat, flat=flat):
                batch = waiting.to(device)
                write_column(
                    trees, batch, self.column, batch_logprob(self.model, batch, temperature=temperature).logprob
                )
        self.model.train(was_training)

    def follow(self, policy: PreTrainedModel) -> None:
        """The policy has been updated."""
        self.seen += 1
        if self.weights is None:
            return
        if self.reset_every and self.seen % self.reset_every == 0:
            self.weights = {
                name: p.detach().to(self.weights[name].device, copy=True) for name, p in policy.named_parameters()
            }
        elif self.ema is not None:
            for name, p in policy.named_parameters():
                self.weights[name].lerp_(p.detach().to(self.weights[name].device), 1 - self.ema)

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        with nullcontext() if self.weights is None else swapped(self.model, self.weights):
            yield


@contextmanager
def swapped(model: PreTrainedModel, weights: dict[str, Tensor]) -> Iterator[None]:
    """``model`` with ``weights`` in its parameters' place; on one device nothing is copied."""
    theirs = {name: p.data for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data = weights[name].to(p.device)
    try:
        yield
    finally:
        for name, p in model.named_parameters():
            p.data = theirs[name]


def write_column(trees: Sequence[TokenTree], batch: TreeBatch, column: str, values: Tensor) -> None:
    """Write ``values [M]``, one a target of ``batch``, into the token column ``column`` of ``trees``.

    The batch's parts are trees of this list or some leaves of them; leaf and position identify a token in both.
    """
    host = values.detach().float().cpu().numpy()
    begin = 0
    for index, part, leaves in zip(batch.tree_index, batch.trees, batch.leaf_index, strict=True):
        tree, first = trees[index], part.prompt_length
        count = part.num_tokens - first
        if column not in tree.columns:
            tree.set(column, np.nan)
        rows = _path_rows(part, np.arange(part.num_leaves), first)
        tree.columns[column][_path_rows(tree, leaves, first)] = host[begin : begin + count][rows - first]
        begin += count


def _path_rows(tree: TokenTree, leaves: Array, first: int) -> Array:
    """Tokens from position ``first`` on to each of ``leaves``, leaf after leaf."""
    whole = len(leaves) == tree.num_leaves
    rows = tree.all_path_rows if whole else np.concatenate([tree.path_rows(leaf) for leaf in leaves.tolist()])
    return rows[tree.position[rows] >= first]
