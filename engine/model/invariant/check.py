"""Finds out whether a model's tokens have the same bits wherever they are computed, and if not, which layer is why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rolltree.kernels.linear_logprob.head import few_rows

from ...batches.batch import TreeBatch
from ...batches.pack import pack
from ...data.columns import Array
from ...data.tree import TokenTree
from ...errors import UserError
from ..decoder import unchecked_logprob
from ..head import decoder_of
from ..self_check import usual_tokens

LENGTH, RESPONSES, TOKENS = 60, 4, 9
"""Tokens of a prompt at most, responses to each, and tokens of a response in a sample."""
PIECE = 50
"""Rows of a piece of a tree."""
ROWS_ON_A_GPU = 256
"""Rows that are more than a tile's (kernels/linear/triton.py)."""
DECODING = "decoding"
"""The answer of `differing` where only the sampler's log-probs are others."""


def sample_prompts(model: PreTrainedModel) -> list[list[int]]:
    """Return prompts of random tokens, with more rows in all than an own product has on a CPU, or a tile on a GPU."""
    usual = usual_tokens(model.config)
    draw = np.random.default_rng(0)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LENGTH + TOKENS
    longest = max(min(LENGTH, positions - TOKENS), 1)
    rows = few_rows() if model.device.type == "cpu" else ROWS_ON_A_GPU
    lengths = [max(longest - i % 7, 1) for i in range(rows // longest + 1)]
    return [usual[draw.integers(len(usual), size=n)].tolist() for n in lengths]


def given_trees(model: PreTrainedModel) -> list[TokenTree]:
    """Return trees of random tokens that no sampler has recorded."""
    usual = usual_tokens(model.config)
    draw = np.random.default_rng(1)
    responses = usual[draw.integers(len(usual), size=(RESPONSES, TOKENS))].tolist()
    return [TokenTree.from_sequences(prompt, responses) for prompt in sample_prompts(model)]


@torch.no_grad()
def differing(model: PreTrainedModel, trees: Sequence[TokenTree]) -> str | None:
    """Return where the log-probs of sampled tokens first have other bits: the class of a layer, or `DECODING`; None if
    they are the same as trees, in pieces, as sequences alone (the first and the last response of each tree), and as the
    sampler recorded them at temperature 1."""
    was_training = model.training
    model.eval()
    try:
        whole = _values(model, trees, pack(trees, max_tokens=1 << 20, device=model.device))
        alone = {
            (index, leaf): _values(model, [chain], pack([chain], max_tokens=1 << 20, device=model.device))[0, 0]
            for index, tree in enumerate(trees)
            for leaf in {0, tree.num_leaves - 1}
            for chain in [tree.chain(leaf)]
        }
        pieces = _values(model, trees, pack(trees, max_tokens=PIECE, in_pieces=True, device=model.device))
        if not (_equal(alone, whole) and _equal(pieces, whole)):
            return _first_layer(model, trees) or "attention"
        return DECODING if _unequal(trees, whole, all_of_loss=False).differing else None
    finally:
        model.train(was_training)


def check_invariant(model: PreTrainedModel, trees: Sequence[TokenTree]) -> None:
    """Check that `differing` finds nothing in sampled ``trees``.

    Raises:
        UserError: it does.
    """
    if (where := differing(model, trees)) is not None:
        raise UserError(
            f"model.batch_invariant does not hold for {type(model).__name__}: {where} gives a token other bits among "
            "other rows; leave the key out, or use another model."
        )


class Compared(NamedTuple):
    """Sampled tokens, and how many of them have a recorded log-prob of other bits; a shared token counts once."""

    tokens: int
    differing: int


@torch.no_grad()
def rescored(model: PreTrainedModel, trees: Sequence[TokenTree], batches: Sequence[TreeBatch]) -> Compared:
    """Compare what a sampler recorded for ``trees`` at temperature 1 with what ``model`` computes in ``batches``, which
    `pack` made of them."""
    was_training = model.training
    model.eval()
    try:
        return _unequal(trees, _values(model, trees, batches), all_of_loss=True)
    finally:
        model.train(was_training)


Values = dict[tuple[int, int], Array]  # log-probs of a response, by tree and leaf


def _unequal(trees: Sequence[TokenTree], values: Values, *, all_of_loss: bool) -> Compared:
    """Compare recorded log-probs; with ``all_of_loss`` tokens in the loss without any count too, as differing."""
    compared, differing = ([np.zeros(tree.num_tokens, bool) for tree in trees] for _ in range(2))
    for (index, leaf), computed in values.items():
        tree = trees[index]
        if "behaviour_logprob" not in tree.columns:
            continue
        rows = tree.response_rows(leaf)
        recorded = tree.behaviour_logprob[rows]
        drawn = ~np.isnan(recorded) | (all_of_loss & tree.loss_mask[rows])  # the others were given
        compared[index][rows] |= drawn
        differing[index][rows] |= drawn & (recorded.view(np.int32) != computed.view(np.int32))
    return Compared(*(int(sum(mask.sum() for mask in masks)) for masks in (compared, differing)))


def _equal(first: Values, others: Values) -> bool:
    return all(np.array_equal(values, others[key]) for key, values in first.items())


def _values(model: PreTrainedModel, trees: Sequence[TokenTree], batches: Sequence[TreeBatch]) -> Values:
    by_leaf: Values = {}
    for batch in batches:
        leaves = batch.to_leaves(unchecked_logprob(model, batch).logprob.cpu())
        for index, which, values in zip(batch.tree_index, batch.leaf_index, leaves, strict=True):
            for leaf, of_leaf in zip(which, values, strict=True):
                by_leaf[index, int(leaf)] = of_leaf.numpy()
    return by_leaf


def _first_layer(model: PreTrainedModel, trees: Sequence[TokenTree]) -> str | None:
    """Return the class of the first module that gives a sequence other bits among others than alone, from the same
    input; None if none does."""
    among = pack(trees, max_tokens=1 << 20, device=model.device)[0]
    tree = trees[among.tree_index[0]]
    paths = ((leaf, tree.token_id[tree.path_rows(leaf)]) for leaf in range(tree.num_leaves))
    ids = among.input_ids.cpu().numpy()
    first = next(leaf for leaf, path in paths if np.array_equal(ids[: len(path)], path))  # rows are depth-first
    (alone,) = pack([tree.chain(first)], max_tokens=1 << 20, device=model.device)
    with _calls(model) as shared:
        unchecked_logprob(model, among)
    with _calls(model) as single_calls:
        unchecked_logprob(model, alone)
    by_name = {call.name: call for call in single_calls}
    for call in shared:
        single_call = by_name.get(call.name)
        if single_call is None or not call.same(single_call, "inputs", among.num_tokens, alone.num_tokens):
            continue
        if not call.same(single_call, "output", among.num_tokens, alone.num_tokens):
            return call.kind
    return None


class _Call(NamedTuple):
    """The inputs and outputs of a module."""

    name: str
    kind: str  # its class
    inputs: list[Tensor]
    output: list[Tensor]

    def same(self, alone: _Call, field: str, among_rows: int, alone_rows: int) -> bool:
        """Return whether all tensors of rows begin with the bits of those of the sequence alone."""
        for tensor, other in zip(getattr(self, field), getattr(alone, field), strict=False):
            rows, first = _by_rows(tensor, among_rows), _by_rows(other, alone_rows)
            if rows is not None and first is not None and not torch.equal(rows[: len(first)], first):
                return False
        return True


@contextmanager
def _calls(model: PreTrainedModel) -> Iterator[list[_Call]]:
    """Collect the calls of all modules of the decoder in the order in which they end."""
    calls: list[_Call] = []

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
        out = output if isinstance(output, tuple) else (output,)
        calls.append(_Call(name, type(module).__name__, inputs, [t for t in out if isinstance(t, Tensor)]))

    handles = [
        module.register_forward_hook(
            lambda module, args, kwargs, output, name=name: keep(name, module, args, kwargs, output), with_kwargs=True
        )
        for name, module in decoder_of(model).named_modules()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _by_rows(output: Tensor, rows: int) -> Tensor | None:
    """Return a tensor with its rows first; None if it is not of rows."""
    at = next((dim for dim in range(min(output.dim(), 2)) if output.shape[dim] == rows), None)
    return None if at is None else output.movedim(at, 0)
