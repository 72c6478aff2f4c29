"""Roles: other models that score the policy's trees, such as a reference, a teacher, the policy before an update.

A role of the policy's own architecture is only a set of weights: its tensors are swapped with the policy's parameters
while it scores, so that only the weights are in memory twice. Between uses they can be kept on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..batches.batch import TreeBatch
from ..batches.device import to_device
from ..data.columns import Array
from ..data.tree import TokenTree
from .logprob import batch_logprob
from .lora import has_lora, without_adapter
from .sharding import local, named_shards


class Role:
    """Scores the log-probs of trees' tokens into a column.

    Args:
        column: the token column of the scores, such as ``ref_logprob``.
        model: the model that computes; the policy itself for a role that has only weights of its own.
        weights: the role's weights by parameter name, of the policy's shapes, or of its shards' (`snapshot`); None:
            those of ``model``.
        reset_every: after every so many updates of the policy its weights are copied; 0: never.
        ema: share of the old weights that is kept at every update of the policy; None: the weights do not change.
        initial: the weights are the policy's at the start of the run, so a checkpoint must hold them.
        adapted: compute with the adapter of ``model``, if it has one.
        replays_routes: the role is the policy itself, and computes with the recorded experts if the policy does.
            Another model's log-probs are those of its own routers' choice.
        scores: write log-probs into ``column``; False: only its hidden states are read (`distillation`).
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
        adapted: bool = True,
        replays_routes: bool = False,
        scores: bool = True,
    ) -> None:
        self.scores = scores
        self.column, self.model, self.replays_routes = column, model, replays_routes
        self.weights = None if weights is None else dict(weights)
        self.reset_every, self.ema, self.initial, self.adapted = reset_every, ema, initial, adapted
        self.seen = 0  # updates of the policy

    @property
    def fixed(self) -> bool:
        """True if no update of the policy changes the role's weights."""
        if self.weights is None:
            return not any(p.requires_grad for p in self.model.parameters()) or not self.adapted
        return self.reset_every == 0 and self.ema is None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `score` writes."""
        return (self.column,) if self.scores else ()

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        """Set columns of ``trees`` that `score` reads, before they are packed."""
        return

    @staticmethod
    def snapshot(model: PreTrainedModel, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return a copy of the model's parameters on ``device``; of a sharded model the copy of this rank's shards.

        Of a model with an adapter, whose other weights stay, it is a copy of the adapter's parameters.
        """
        named = {name: p for name, p in named_shards(model).items() if p.requires_grad or not has_lora(model)}
        return {name: local(p.detach()).to(device, copy=True) for name, p in named.items()}

    def score(
        self, trees: Sequence[TokenTree], batches: Sequence[TreeBatch], *, temperature: float
    ) -> list[PreTrainedModel]:
        """Write the log-prob of every response token of ``batches`` into the role's column.

        Each row of a batch, a distinct prefix, is scored once, even if several responses sampled it independently.
        Costs one forward without gradient, 2 N H V FLOP of it in the head.

        Args:
            trees: from which ``batches`` were packed.
            temperature: divides the logits of tokens that do not have one of their own.

        Returns:
            The models that have computed the batches; none if the scores were there.
        """
        if not self.scores:
            return []
        device = self.model.device
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad(), self.computing():
            for waiting in batches:
                routed = waiting if self.replays_routes else waiting.without_routes()
                batch, temperatures = routed.to(device), to_device(waiting.temperatures(temperature), device)
                logprob = batch_logprob(self.model, batch, temperature=temperatures).logprob
                write_column(trees, batch, self.column, logprob)
        self.model.train(was_training)
        return [self.model]

    def follow(self, policy: PreTrainedModel) -> None:
        """Update the role's weights after an update of ``policy``, as ``reset_every`` and ``ema`` say."""
        self.seen += 1
        if self.weights is None:
            return
        now = {name: local(p.detach()) for name, p in named_shards(policy).items() if name in self.weights}
        if self.reset_every and self.seen % self.reset_every == 0:
            self.weights = {name: p.to(self.weights[name].device, copy=True) for name, p in now.items()}
        elif self.ema is not None:
            for name, p in now.items():
                self.weights[name].lerp_(p.to(self.weights[name].device), 1 - self.ema)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Put the role's weights in place of those of ``model`` in a with-block."""
        others = nullcontext() if self.weights is None else swapped(self.model, self.weights)
        with others, nullcontext() if self.adapted else without_adapter(self.model):
            yield


class SampledRole(Role):
    """The policy before an update, where the log-probs that the sampler recorded have the bits of its own."""

    def score(
        self, trees: Sequence[TokenTree], batches: Sequence[TreeBatch], *, temperature: float
    ) -> list[PreTrainedModel]:
        """Copy the sampler's log-probs of trees that have one for every token in the loss; score all if one lacks
        some, such as a demonstration or an answer drawn greedily."""
        if not all(_sampled(tree) for tree in trees):
            return super().score(trees, batches, temperature=temperature)
        for tree in trees:
            tree.set(self.column, tree.behaviour_logprob.copy())
        return []


def _sampled(tree: TokenTree) -> bool:
    """Return whether all tokens in the loss were drawn at random, and their log-probs recorded."""
    in_loss, temperature = tree.loss_mask, tree.columns.get("temperature")
    drawn = temperature is None or bool((temperature[in_loss] != 0).all())
    return drawn and not bool(np.isnan(tree.behaviour_logprob[in_loss]).any())


@contextmanager
def swapped(model: PreTrainedModel, weights: dict[str, Tensor]) -> Iterator[None]:
    """Put ``weights`` in place of the parameters of ``model`` in a with-block.

    Nothing is copied within one device, unless the model is sharded: FSDP knows shards by their memory.
    """
    parameters = {name: p for name, p in named_shards(model).items() if name in weights}
    if any(isinstance(p, DTensor) for p in parameters.values()):
        with _copied(model, weights):
            yield
        return
    before = {name: p.data for name, p in parameters.items()}
    for name, p in parameters.items():
        p.data = weights[name].to(p.device)
    try:
        yield
    finally:
        for name, p in parameters.items():
            p.data = before[name]


@contextmanager
def _copied(model: PreTrainedModel, weights: dict[str, Tensor]) -> Iterator[None]:
    """Copy ``weights``, this rank's, into the shards of ``model`` in a with-block."""
    shards = {name: local(p.detach()) for name, p in named_shards(model).items() if name in weights}
    before = {name: part.clone() for name, part in shards.items()}
    for name, part in shards.items():
        part.copy_(weights[name])
    try:
        yield
    finally:
        named_shards(model)  # what is gathered has the role's weights
        for name, part in shards.items():
            part.copy_(before[name])


def write_column(trees: Sequence[TokenTree], batch: TreeBatch, column: str, values: Tensor) -> None:
    """Write ``values [M]``, one per target of ``batch``, into the token column ``column`` of ``trees``.

    A batch without trees, with which a rank waits for others, has targets that are no tree's.
    """
    counts = [part.num_tokens - part.prompt_length for part in batch.trees]
    for number, part in enumerate(values[: sum(counts)].split(counts)):
        write_part(trees, batch, number, column, part)


def write_part(trees: Sequence[TokenTree], batch: TreeBatch, number: int, column: str, values: Tensor) -> None:
    """Write ``values``, one per target of the tree ``number`` of ``batch``, into the column of ``trees``.

    A batch's parts are trees of this list or some leaves of them; leaf and position identify a token in both.
    """
    tree, part, leaves = trees[batch.tree_index[number]], batch.trees[number], batch.leaf_index[number]
    first = part.prompt_length
    if column not in tree.columns:
        tree.set(column, np.nan)
    rows = _path_rows(part, np.arange(part.num_leaves), first)
    host = values.detach().float().cpu().numpy()
    tree.columns[column][_path_rows(tree, leaves, first)] = host[rows - first]


def _path_rows(tree: TokenTree, leaves: Array, first: int) -> Array:
    """Return the rows from position ``first`` on of the paths to ``leaves``, one leaf after the other."""
    whole = len(leaves) == tree.num_leaves
    rows = tree.all_path_rows if whole else np.concatenate([tree.path_rows(leaf) for leaf in leaves.tolist()])
    return rows[tree.position[rows] >= first]
