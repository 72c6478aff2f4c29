"""Registers ``attn_implementation="rolltree"`` for every decoder of Hugging Face Transformers when imported.

The registered attention function serves three kinds of calls:

* packed trees, :func:`tree_attention`; batches of plain sequences laid end to end take a `varlen` kernel if one fits;
* a ``kv_store``: the rollout engine's cache, which stores the new keys and values and attends over its pages;
* an ordinary batch, computed as Transformers would, or by batch-invariant layers as sequences laid end to end.

A call of the first two kinds has a `Tree`. Not every layer hands keyword arguments or the mask on to its attention, so
the tree travels in three ways, and the first one found counts:

* the ``attention_mask`` of `tree_mask`, which recomputation under activation checkpointing gets back in any thread;
* the context of the forward, `computing`;
* keyword arguments of ``forward`` (``subtree_end=[T]`` or ``kv_store=...``), all that compiled layers see.

A prepared mask without a tree is an error: a layer that gets one would attend to every token.

A model builds its mask before the kind of call is known, so the registered mask function defers: the mask of an
ordinary batch is made when its first layer uses it, and a tree never gets a ``T x T`` mask.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rolltree.kernels import tree_attention
from rolltree.kernels.tree_attention.api import padded

from ..batches.kv_store import AttentionRule, KVStore
from . import varlen
from .both_ways import Block, attend_both_ways
from .invariant.functions import within_fixed_order
from .invariant.sequences import laid_end_to_end
from .masks import NAME, DeferredMask, deferred

SLIDING_MASK = "create_sliding_window_causal_mask"
"""The function that a model's module imports if it may prepare the mask of a sliding window."""


class Tree(NamedTuple):
    """The structure that the attention of one forward follows: packed tokens, or the store that knows them."""

    subtree_end: Tensor | None = None  # [T] int32
    position: Tensor | None = None  # [T], depth of each token along its path
    kv_store: KVStore | None = None
    cu_seqlens: Tensor | None = None  # [B + 1] int32, for plain sequences laid end to end
    longest: int = 0  # of these sequences
    blocks: tuple[Block, ...] = ()  # none of which a branch cuts


_current: ContextVar[Tree | None] = ContextVar("rolltree_tree", default=None)


def tree_mask(tree: Tree, device: torch.device | str = "cpu") -> Tensor:  # [1, 1, 1, 1] bool
    """Return an ``attention_mask`` that carries ``tree``: four dimensions keep a model from preparing any mask."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    mask.tree = tree  # type: ignore[attr-defined]
    return mask


def keywords(decoder: nn.Module, tree: Tree) -> dict[str, Any]:
    """Return ``tree`` as keyword arguments of ``decoder``, for layers that are compiled; none if it takes none."""
    cls: Any = type(decoder)
    if tree.blocks or not _takes_keywords(cls):  # keywords cannot say which rows attend in both directions
        return {}
    arguments: dict[str, Any] = {"subtree_end": tree.subtree_end, "kv_store": tree.kv_store}
    if tree.cu_seqlens is not None:
        arguments |= {"cu_seq_lens_q": tree.cu_seqlens, "max_length_q": tree.longest}
    return {name: value for name, value in arguments.items() if value is not None}


@functools.cache
def _takes_keywords(cls: Any) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(cls.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


@contextmanager
def computing(mask: Tensor) -> Iterator[None]:
    """Let attention within the block have the tree of ``mask``, whatever layers hand on to it."""
    token = _current.set(mask.tree)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _current.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,  # [B, Hq, S, D]
    key: Tensor,  # [B, Hkv, S, D]
    value: Tensor,  # [B, Hkv, S, Dv]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    tree, batch = _tree(module, attention_mask, kwargs), len(query)
    if tree is not None:
        query = _tuned(module, query, tree)
    elif within_fixed_order() and getattr(module, "is_causal", True):
        tree = Tree(*laid_end_to_end(module, attention_mask, batch))
        query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
        attention_mask = None
    else:
        return _ordinary(module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, kwargs)
    _require_supported(module, query, key, attention_mask, dropout, kwargs)
    window, chunk = _reach(module, sliding_window)
    width = value.shape[-1]
    if width != query.shape[-1]:  # kernels and pages have one width
        query, key, value = (padded(x, max(width, query.shape[-1])) for x in (query, key, value))
        scaling = key.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, H, D]; the gradient of x[0] is a copy
    if torch.is_autocast_enabled(q.device.type):  # autocast casts the inputs of `sdpa` too
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    rule = AttentionRule(scaling, window, softcap, kwargs.get("s_aux"), chunk)
    if tree.kv_store is not None:
        out = tree.kv_store.attend(module.layer_idx, q, k, v, rule)  # type: ignore[arg-type]
    else:
        out = _packed(module, q, k, v, tree, rule)
        out = attend_both_ways(out, q, k, v, tree.blocks, rule)
    return (out if out.shape[-1] == width else out[..., :width]).unflatten(0, (batch, -1)), None


def _packed(
    module: nn.Module,
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,  # [T, Hkv, D]
    tree: Tree,
    rule: AttentionRule,
) -> Tensor:  # [T, Hq, D]
    position = None
    if rule.window is not None or rule.chunk is not None:
        if tree.position is None:
            raise ValueError(f"{type(module).__name__} has a sliding window but passes no position_ids to attention.")
        position = tree.position.reshape(-1)
    assert tree.subtree_end is not None
    usable = tree.cu_seqlens is not None and varlen.fits(q, rule.softcap) and not within_fixed_order()
    plain = varlen.kernel() if usable else None
    if tree.cu_seqlens is not None and plain is not None and rule.sink is None and rule.chunk is None:
        return plain(q, k, v, tree.cu_seqlens, tree.longest, rule.scale, rule.window)
    return tree_attention(
        q,
        k,
        v,
        tree.subtree_end,
        scale=rule.scale,
        position=position,
        window=rule.window,
        chunk=rule.chunk,
        softcap=rule.softcap,
        sink=rule.sink,
    )


def _tree(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> Tree | None:
    """Return the tree that the call belongs to; None for an ordinary batch.

    Raises:
        ValueError: the mask is a tree's, and there is no tree.
    """
    if not torch.compiler.is_compiling():
        tree: Tree | None = getattr(mask, "tree", None)
        if tree is not None:
            return tree
        if (tree := _current.get()) is not None and getattr(module, "is_causal", True):
            if _is_prepared(mask):
                mask.tree = tree  # type: ignore[union-attr]  # a part that the model cut out; recomputing needs it
            return tree
    subtree_end, kv_store = kwargs.get("subtree_end"), kwargs.get("kv_store")
    if subtree_end is not None or kv_store is not None:
        return Tree(
            subtree_end,
            kwargs.get("position_ids"),
            kv_store,
            kwargs.get("cu_seq_lens_q"),
            kwargs.get("max_length_q", 0),
        )
    if _is_prepared(mask):
        raise ValueError(
            f"{type(module).__name__} got the prepared mask of a tree and no tree: its model hands neither mask nor "
            "keyword arguments on where layers are recomputed or compiled; leave that out, or train on plain sequences."
        )
    return None


def _is_prepared(mask: Tensor | None) -> bool:
    """Return whether ``mask`` has the form of `tree_mask`."""
    return mask is not None and not isinstance(mask, DeferredMask) and tuple(mask.shape) == (1, 1, 1, 1)


def _require_supported(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, dropout: float, kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    if dropout:
        raise ValueError("Attention dropout is not supported on trees; set attention_dropout=0 in the model's config.")
    if query.shape[0] != 1:
        raise ValueError(f"Packed trees are one row of tokens; input_ids has a batch of {query.shape[0]}, pass [1, T].")
    sparse = [n for n in ("indices", "block_indices") if kwargs.get(n) is not None]
    ready_mask = mask is not None and not isinstance(mask, DeferredMask) and not _is_prepared(mask)
    if ready_mask and mask.dtype == torch.bool and torch.compiler.is_compiling():
        raise ValueError(
            f"{name} got the mask that its compiled model has made; compile the layers alone, or pass "
            "attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool) to the model."
        )
    biased = ready_mask or kwargs.get("position_bias") is not None
    what = "sparse attention that learns its index" if sparse else "attention biases" if biased else None
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        what = "attention in both directions"
    elif query.shape[2] != key.shape[2]:
        what = f"attention to {key.shape[2]} keys of {query.shape[2]} tokens"
    if what is not None:
        raise ValueError(f"{name} has {what}, which is not supported on trees; train on plain sequences.")


def _reach(module: Any, window: int | None) -> tuple[int | None, int | None]:
    """Return the layer's sliding window and its chunk; layers may leave both to the mask that their model prepares."""
    config = getattr(module, "config", None)
    if window is not None or getattr(module, "sliding_window", config) is None:
        return window, None  # before anything that differs between layers, as compiled layers share one program
    kinds = getattr(config, "layer_types", None)
    if kinds is None and hasattr(sys.modules[type(module).__module__], SLIDING_MASK):
        return getattr(config, "sliding_window", None), None
    layer = getattr(module, "layer_idx", None)
    if kinds is None or layer is None or layer >= len(kinds):
        return None, None
    if kinds[layer] == "chunked_attention":
        return None, config.attention_chunk_size  # type: ignore[union-attr]
    return (getattr(config, "sliding_window", None) if kinds[layer] == "sliding_attention" else None), None


def _tuned(module: Any, query: Tensor, tree: Tree) -> Tensor:  # [1, Hq, T, D]
    """Return queries that Llama 4 has scaled by the row of each token, scaled by its position instead."""
    if getattr(module, "use_rope", True) or not getattr(module, "attn_temperature_tuning", False):
        return query
    position = tree.position
    if position is None:
        raise ValueError(f"{type(module).__name__} scales queries by positions, and the tree has none.")
    rows = torch.arange(query.shape[2], device=query.device)
    by_position, by_row = (
        torch.log1p(torch.floor((at.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for at in (position.reshape(-1), rows)
    )
    return (query * (by_position / by_row)[:, None]).to(query.dtype)


def _ordinary(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    full = mask.make() if isinstance(mask, DeferredMask) else mask
    if softcap is None and kwargs.get("s_aux") is None:
        return sdpa_attention_forward(
            module, query, key, value, full, dropout=dropout, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    # SDPA has no softcap and no sinks; a model with one has an eager function, which takes an additive mask
    if softcap is not None:
        kwargs["softcap"] = softcap
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if full is None:
        queries, keys = query.shape[2], key.shape[2]
        full = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)[None, None]
    if full.dtype == torch.bool:
        full = torch.zeros_like(full, dtype=query.dtype).masked_fill(~full, torch.finfo(query.dtype).min)
    return eager(module, query, key, value, full, dropout=dropout, scaling=scaling, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, deferred)
