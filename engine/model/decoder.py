"""A Hugging Face decoder on packed trees: hidden states and log-probabilities."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rolltree.kernels import LogprobOutput

from ..batches.batch import TreeBatch, recurrence_of
from ..batches.pieces import Piece, PieceStore, depth_first
from . import attention, recurrent, routes
from .both_ways import Block
from .head import decoder_of, target_logprob, target_statistics
from .invariant.install import is_invariant
from .pictures import Features, both_ways, embedded, encode, family_of, not_touching, rotary_input


class Decoded(NamedTuple):
    """The decoder's outputs for packed tokens."""

    hidden: Tensor  # [T, H]
    router_loss: Tensor | None  # [], for a mixture of experts with output_router_logits in its config


def decode(
    model: PreTrainedModel, batch: TreeBatch, store: PieceStore | None = None, features: Features | None = None
) -> Decoded:
    """Return the final hidden states of the batch's tokens, or of those of one piece.

    Where the batch has routes, every token goes to the experts recorded (`routes`).

    The experts' load balancing loss counts a token once for every leaf below it, as in the flat batch.

    Args:
        store: keys and values of the piece to compute, for a batch that is computed in pieces.
        features: the vision tower's output for the batch's pictures, if it is known; its pieces share one.

    Raises:
        ValueError: the model was not loaded with ``attn_implementation="rolltree"``, the batch is in pieces and
            ``store`` is None, or it has pictures that the model does not take.
    """
    if batch.pieces and store is None:
        raise ValueError("The batch holds a tree that is computed in pieces; use backward, or pack without in_pieces.")
    if batch.padded is not None and is_invariant(model):
        batch = replace(batch, padded=None)  # attention of padded batches has another order of sums
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
        tree = attention.Tree(
            batch.subtree_end, positions, None, batch.cu_seqlens, batch.longest, _blocks(model, batch)
        )
        if store is not None:
            tree = attention.Tree(None, positions, store)
        mask = attention.tree_mask(tree)
        context = attention.computing(mask)
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": mask}
        inputs |= attention.keywords(decoder, tree)
        if batch.media is not None:
            del inputs["input_ids"]
            inputs |= _with_pictures(decoder, batch, rows, features or encode_pictures(model, batch))
        if recurrent.install(model):
            inputs["recurrence"] = recurrence_of(batch) if store is None else store.recurrence
    if batch.routes is not None:
        recorded = batch.routes[rows] if batch.padded is None else _padded(batch.routes, batch)
        inputs["routes"] = routes.replay(model, recorded)
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


def encode_pictures(model: PreTrainedModel, batch: TreeBatch) -> Features | None:
    """Run the model's vision tower on the distinct pictures of ``batch``; None if it has none.

    Raises:
        ValueError: the model takes no pictures, or these were made for another model.
    """
    media = batch.media
    if media is None:
        return None
    if family_of(model).grid != (media.rotary is not None):
        raise ValueError(
            f"The pictures were made for another model than {type(model).__name__}; make them with its processor."
        )
    return encode(model, media.inputs, media.sizes)


def picture_inputs(model: PreTrainedModel, batch: TreeBatch) -> dict[str, Any]:
    """Return the decoder's arguments for a batch with pictures, in place of ``input_ids`` and ``position_ids``.

    Raises:
        ValueError: as `encode_pictures`.
    """
    inputs = {"position_ids": batch.position_ids[None]}
    return inputs | _with_pictures(decoder_of(model), batch, slice(None), encode_pictures(model, batch))


def _with_pictures(decoder: nn.Module, batch: TreeBatch, rows: slice, features: Features | None) -> dict[str, Any]:
    """Return the decoder's arguments in place of ``input_ids``, and its positions if they are not the depth."""
    media = batch.media
    assert media is not None
    assert features is not None
    ids = batch.input_ids[rows]
    begin, end = rows.start or 0, rows.stop or len(batch.input_ids)
    which = slice(*(int(n) for n in torch.searchsorted(media.row, torch.tensor([begin, end]).to(media.row))))
    inputs = embedded(decoder, ids, media.row[which] - begin, media.source[which], features)
    if media.rotary is not None:
        inputs["position_ids"] = rotary_input(batch.position_ids[rows], media.rotary[:, rows])
    return inputs


def _blocks(model: PreTrainedModel, batch: TreeBatch) -> tuple[Block, ...]:
    """Return the rows of pictures that attend to each other in both directions."""
    layers = None if batch.media is None else both_ways(model)
    if batch.media is None or layers is None:
        return ()
    if batch.pieces:
        raise ValueError(
            f"The pictures of {type(model).__name__} attend in both directions, which trees in pieces do not support; "
            "raise max_tokens."
        )
    every = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
    blocks = tuple(
        Block(begin, end, ((every < end) & (batch.subtree_end > begin)).nonzero()[:, 0], layers == "sliding")
        for begin, end in batch.media.spans
    )
    above = {int(seen[begin - end - 1]) for begin, end, seen, _ in blocks if len(seen) > end - begin}
    not_touching(model, any(block.end - 1 in above for block in blocks))
    return blocks


def _balancing(model: PreTrainedModel) -> Callable[..., Tensor]:
    """Return Transformers' load balancing loss for the model, which adapters or FSDP may have wrapped or subclassed."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    functions = (getattr(sys.modules[cls.__module__], "load_balancing_loss_func", None) for cls in type(inner).__mro__)
    return next(function for function in functions if function is not None)


def _padded(values: Tensor, batch: TreeBatch) -> Tensor:  # [T, ...] -> [B S, ...], 0 where padding is
    assert batch.padded is not None
    places = batch.padded[0] * batch.padded[1]
    return values.new_zeros(places, *values.shape[1:]).index_copy(0, batch.place, values)


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
    def score(hidden: Tensor, target: Tensor, p: Piece, temperature: float | Tensor) -> dict[str, Tensor | None]:
        return target_logprob(model, hidden, target, p.head_row, p.head_index, temperature, want)._asdict()

    scores = _collected(model, batch, temperature, score)
    return LogprobOutput(scores["logprob"], scores["logsumexp"], scores.get("entropy"), scores.get("sum_p2"), None)


def target_hidden(model: PreTrainedModel, batch: TreeBatch) -> Tensor:  # [M, H]
    """Return the final hidden state that predicts each target of ``batch``, for use without gradients.

    Raises:
        ValueError: as for `decode`.
    """
    if not batch.pieces:
        return decode(model, batch).hidden.index_select(0, batch.head_row)[batch.head_index]

    def rows(hidden: Tensor, target: Tensor, p: Piece, temperature: float | Tensor) -> dict[str, Tensor]:
        return {"hidden": hidden.index_select(0, p.head_row)[p.head_index]}

    return _collected(model, batch, 1.0, rows)["hidden"]


def statistics_of_pieces(
    model: PreTrainedModel,
    batch: TreeBatch,
    temperature: float | Tensor,  # or [M]
    want: Sequence[str],
    extra_ids: Tensor | None,  # [M, K]
) -> dict[str, Tensor]:
    """Compute `target_statistics` of a batch in pieces, without gradients."""

    def score(hidden: Tensor, target: Tensor, p: Piece, temperature: float | Tensor) -> dict[str, Tensor]:
        ids = None if extra_ids is None else extra_ids[p.target]
        return target_statistics(model, hidden, target, p.head_row, p.head_index, temperature, want, ids)

    return _collected(model, batch, temperature, score)


def _collected(
    model: PreTrainedModel,
    batch: TreeBatch,
    temperature: float | Tensor,  # or [M]
    score: Callable[[Tensor, Tensor, Piece, float | Tensor], Mapping[str, Tensor | None]],
) -> dict[str, Tensor]:
    """Run the batch piece by piece, and put together the scores ``[M, ...]`` of each piece's targets.

    Args:
        score: called with hidden states, targets, the piece and its temperature.
    """
    scores: dict[str, Tensor] = {}

    def use(store: PieceStore, decoded: Decoded) -> None:
        p = store.piece
        piece_temperature = temperature[p.target] if isinstance(temperature, Tensor) else temperature
        for name, values in score(decoded.hidden, batch.target[p.target], p, piece_temperature).items():
            if values is not None:
                everything = scores.setdefault(name, values.new_empty(len(batch.target), *values.shape[1:]))
                everything[p.target] = values

    (tree,) = batch.trees
    run = partial(decode, model, batch, features=encode_pictures(model, batch))
    depth_first(tree, batch.pieces, batch.input_ids.device, run=run, use=use, gradients=False)
    return scores
