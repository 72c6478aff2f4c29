"""A Hugging Face decoder on packed trees: hidden states and log-probabilities."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rolltree.kernels import LogprobOutput

from ..data.batch import TreeBatch
from ..data.pieces import PieceStore, depth_first
from ..data.recurrence import recurrence_of
from . import attention, recurrent
from .head import decoder_of, target_logprob


class Decoded(NamedTuple):
    """The decoder's outputs for packed tokens."""

    hidden: Tensor  # [T, H]
    router_loss: Tensor | None  # [], for a mixture of experts with output_router_logits in its config


def decode(model: PreTrainedModel, batch: TreeBatch, store: PieceStore | None = None) -> Decoded:
    """Return the final hidden states of the batch's tokens, or of those of one piece.

    The experts' load balancing loss counts a token once for every leaf below it, as in the flat batch.

    Args:
        store: keys and values of the piece to compute, for a batch that is computed in pieces.

    Raises:
        ValueError: the model was not loaded with ``attn_implementation="rolltree"``, or the batch is in pieces and
            ``store`` is None.
    """
    if batch.pieces and store is None:
        raise ValueError(
            "The batch holds a tree larger than its budget, to be computed in pieces; use backward, or pack without "
            "in_pieces."
        )
    implementation = model.config._attn_implementation
    if implementation != attention.NAME and batch.padded is None:
        raise ValueError(
            f"The model's attention is '{implementation}'; load it with attn_implementation='rolltree' or call "
            "model.set_attn_implementation('rolltree')."
        )
    rows = slice(None) if store is None else slice(store.piece.begin, store.piece.end)
    ids, positions, copies = (t[rows] for t in (batch.input_ids, batch.position_ids, batch.copies))
    decoder: nn.Module = decoder_of(model)
    inputs: dict[str, Any]
    context: AbstractContextManager[None] = nullcontext()
    if batch.padded is not None:
        ids, copies = (_padded(t, batch) for t in (ids, copies))
        inputs = {"input_ids": ids.view(batch.padded), "attention_mask": copies.view(batch.padded)}
    else:
        tree = attention.Tree(batch.subtree_end, positions, None, batch.cu_seqlens, batch.longest)
        if store is not None:
            tree = attention.Tree(None, positions, store)
        mask = attention.tree_mask(tree)
        context = attention.computing(mask)
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": mask}
        inputs |= attention.keywords(decoder, tree)
        if recurrent.install(model):
            inputs["recurrence"] = recurrence_of(batch) if store is None else store.recurrence
    routed = getattr(model.config, "output_router_logits", False) and torch.is_grad_enabled()
    if routed:
        inputs["output_router_logits"] = True
    with context:
        output = decoder(**inputs, use_cache=False)
    hidden = output.last_hidden_state.flatten(0, 1)
    if batch.padded is not None:
        hidden = hidden.index_select(0, batch.place)
    if not routed:
        return Decoded(hidden, None)
    balance = _balancing(model)
    # its attention mask weighs each token
    router_loss = balance(output.router_logits, model.num_experts, model.num_experts_per_tok, copies.view(1, -1))
    return Decoded(hidden, model.router_aux_loss_coef * router_loss)


def _balancing(model: PreTrainedModel) -> Callable[..., Tensor]:
    """Return Transformers' load balancing loss for the model, which adapters or FSDP may have wrapped or subclassed."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = (getattr(sys.modules[cls.__module__], "load_balancing_loss_func", None) for cls in type(inner).__mro__)
    return next(function for function in found if function is not None)


def _padded(values: Tensor, batch: TreeBatch) -> Tensor:  # [T] -> [B S], 0 where padding is
    assert batch.padded is not None
    return values.new_zeros(batch.padded[0] * batch.padded[1]).index_copy(0, batch.place, values)


def unchecked_logprob(
    model: PreTrainedModel, batch: TreeBatch, temperature: float | Tensor = 1.0, want: Sequence[str] = ()
) -> LogprobOutput:
    """Compute `batch_logprob` for a model that needs no check, or that a check runs."""
    if batch.pieces:
        return _logprob_of_pieces(model, batch, temperature, want)
    return target_logprob(
        model, decode(model, batch).hidden, batch.target, batch.head_row, batch.head_index, temperature, want
    )


def _logprob_of_pieces(
    model: PreTrainedModel, batch: TreeBatch, temperature: float | Tensor, want: Sequence[str]
) -> LogprobOutput:
    found: dict[str, Tensor] = {}

    def use(store: PieceStore, decoded: Decoded) -> None:
        p = store.piece
        own = temperature[p.target] if isinstance(temperature, Tensor) else temperature
        out = target_logprob(model, decoded.hidden, batch.target[p.target], p.head_row, p.head_index, own, want)
        for name, values in out._asdict().items():
            if values is not None:
                found.setdefault(name, values.new_empty(len(batch.target)))[p.target] = values

    (tree,) = batch.trees
    run = partial(decode, model, batch)
    depth_first(tree, batch.pieces, batch.input_ids.device, run=run, use=use, gradients=False)
    return LogprobOutput(found["logprob"], found["logsumexp"], found.get("entropy"), found.get("sum_p2"), None)
