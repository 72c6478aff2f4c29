"""``attn_implementation="rolltree"`` for every decoder of Hugging Face Transformers: importing this registers it.

The registered attention function serves three calls, told apart by keyword arguments of the model's ``forward``:

* ``subtree_end=[T]`` (with ``input_ids`` and ``position_ids`` ``[1, T]``): packed trees, :func:`tree_attention`; where
  ``cu_seq_lens_q`` and ``max_length_q`` say that they are plain sequences, a `varlen` kernel if there is one;
* ``kv_store=...``: the rollout engine's cache, which stores the new keys and values and attends over its pages;
* neither: an ordinary batch, computed as ``attn_implementation="sdpa"`` would.

A model builds its mask before it knows which of the three this is, so the registered mask function defers: the mask of
an ordinary batch is made when its first layer asks for it, and a tree never gets a ``T x T`` mask at all.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rolltree.kernels import tree_attention

from . import varlen

NAME = "rolltree"

MASK_STUB = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""Passed as ``attention_mask``, it keeps a model from preparing any mask: four dimensions mean "already prepared"."""


class KVStore(Protocol):
    """What the rollout engine hands to the model as ``kv_store``."""

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [N, Hq, D]
        key: Tensor,  # [N, Hkv, D]
        value: Tensor,  # [N, Hkv, D]
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:  # [N, Hq, D]
        """Store the new keys and values of layer ``layer_idx``, then attend over every row's path."""
        ...


class DeferredMask:
    """Arguments of ``sdpa_mask``, evaluated once and only for an ordinary batch."""

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._made = False
        self._mask: Tensor | None = None

    def make(self) -> Tensor | None:
        if not self._made:
            self._mask, self._made = sdpa_mask(**self._arguments), True
        return self._mask

    def contiguous(self) -> Tensor | None:
        """Return the mask itself: ``generate`` makes masks ahead of the forward pass where the cache is static."""
        made = self.make()
        return None if made is None else made.contiguous()


def _mask(*args: Any, **kwargs: Any) -> Tensor | DeferredMask | None:
    if args:
        raise TypeError(
            "Transformers now passes mask arguments by position; this version of rolltree does not know them."
        )
    if getattr(kwargs.get("config"), "attn_logit_softcapping", None) is not None:
        kwargs["allow_is_causal_skip"] = False  # no mask would mean SDPA's own causal one, and SDPA has no softcap
    offset = kwargs.get("q_offset", 0)
    # keys from before: no tree; and the offset of a static cache is a tensor that the first layer changes in place
    if isinstance(offset, Tensor) or offset or kwargs.get("kv_length") != kwargs.get("q_length"):
        mask: Tensor | None = sdpa_mask(**kwargs)
        return mask
    return DeferredMask(**kwargs)


def _attention(
    module: nn.Module,
    query: Tensor,  # [B, Hq, S, D]
    key: Tensor,  # [B, Hkv, S, D]
    value: Tensor,  # [B, Hkv, S, D]
    attention_mask: Tensor | DeferredMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    subtree_end: Tensor | None = None,  # [T] int32
    kv_store: KVStore | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if subtree_end is None and kv_store is None:
        return _ordinary(module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, kwargs)
    if dropout:
        raise ValueError("Attention dropout is not supported on trees; set attention_dropout=0 in the model's config.")
    if kwargs.get("s_aux") is not None:
        raise ValueError("Attention sinks are not supported on trees yet; use a model without them.")
    if query.shape[0] != 1:
        raise ValueError(f"Packed trees are one row of tokens; input_ids has a batch of {query.shape[0]}, pass [1, T].")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, H, D]; the gradient of x[0] is a copy
    if torch.is_autocast_enabled(q.device.type):  # as it casts what `sdpa` is given
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if kv_store is not None:
        out = kv_store.attend(module.layer_idx, q, k, v, scaling, sliding_window, softcap)  # type: ignore[arg-type]
    else:
        position = None
        if sliding_window is not None:
            position = kwargs.get("position_ids")
            if position is None:
                raise ValueError(
                    f"{type(module).__name__} has a sliding window but passes no position_ids to attention."
                )
            position = position.reshape(-1)
        assert subtree_end is not None
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        plain = varlen.kernel() if cu_seqlens is not None and varlen.fits(q, softcap) else None
        if cu_seqlens is not None and plain is not None:
            out = plain(q, k, v, cu_seqlens, kwargs["max_length_q"], scaling, sliding_window)
        else:
            out = tree_attention(
                q, k, v, subtree_end, scale=scaling, position=position, window=sliding_window, softcap=softcap
            )
    return out[None], None


def _ordinary(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | DeferredMask | None,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    made = mask.make() if isinstance(mask, DeferredMask) else mask
    if softcap is None:
        return sdpa_attention_forward(
            module, query, key, value, made, dropout=dropout, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    # SDPA knows no softcap; every model that has one brings an eager function, which wants an additive mask
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if made is None:
        queries, keys = query.shape[2], key.shape[2]
        made = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)[None, None]
    if made.dtype == torch.bool:
        made = torch.zeros_like(made, dtype=query.dtype).masked_fill(~made, torch.finfo(query.dtype).min)
    return eager(module, query, key, value, made, dropout=dropout, scaling=scaling, softcap=softcap, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
