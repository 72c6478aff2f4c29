"""The definition in plain PyTorch, operator by operator like the decoders of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..low_rank.reference import add_low_rank
from ..tree_decode import reference as attention
from ..tree_decode.schedule import Nodes, Work
from .weights import PRODUCTS, Adapted, DecoderParts, LayerWeights


def add_rms_norm(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:  # [N, H] -> [N, H]
    if x is not None:
        residual += x
    return _rms_norm(residual, weight, eps)


def rotate_and_store(
    q: Tensor,  # [N, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    q_weight: Tensor | None,  # [D]
    k_weight: Tensor | None,  # [D]
    eps: float,
    cos: Tensor,  # [N, D]
    sin: Tensor,  # [N, D]
    slots: Tensor,  # [N] int64
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
) -> None:
    q.copy_(_rotated(q, q_weight, eps, cos, sin))
    k_pages.view(-1, *k.shape[1:]).index_copy_(0, slots, _rotated(k, k_weight, eps, cos, sin))
    v_pages.view(-1, *v.shape[1:]).index_copy_(0, slots, v)


def decoder(
    model: DecoderParts,
    input_ids: Tensor,  # [N] int32
    cos: Tensor,  # [T, D]
    sin: Tensor,  # [T, D]
    turns: Tensor | None,  # [N] int32
    slots: Tensor,  # [N] int32
    nodes: Nodes,
    work: Work,  # not used here
    adapted: Adapted | None,
) -> Tensor:  # [N, H]
    residual = F.embedding(input_ids, model.embedding)
    if turns is not None:
        cos, sin = cos[turns], sin[turns]
    for n, (w, (k_pages, v_pages), window) in enumerate(zip(model.layers, model.pages, model.windows, strict=True)):
        product = partial(_product, w, n, adapted)
        _layer(residual, w, product, cos, sin, slots.long(), k_pages, v_pages, nodes, model.eps, model.scale, window)
    return _rms_norm(residual, model.norm, model.eps)


def _layer(
    residual: Tensor,  # [N, H]
    w: LayerWeights,
    product: Callable[[str, Tensor], Tensor],
    cos: Tensor,  # [N, D]
    sin: Tensor,  # [N, D]
    slots: Tensor,  # [N] int64
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    nodes: Nodes,
    eps: float,
    scale: float,
    window: int | None,
) -> None:
    N, D = cos.shape
    x = _rms_norm(residual, w.input_norm, eps)
    q, k, v = (product(name, x).view(N, -1, D) for name in "qkv")
    rotate_and_store(q, k, v, w.q_norm, w.k_norm, eps, cos, sin, slots, k_pages, v_pages)
    seen, _ = attention.tree_decode(q, k_pages, v_pages, nodes, Work(None, None, 0), scale, window, None)
    x = add_rms_norm(residual, product("o", seen.flatten(1)), w.mlp_norm, eps)
    residual += product("down", F.silu(product("gate", x)) * product("up", x))


def _product(w: LayerWeights, layer: int, adapted: Adapted | None, name: str, x: Tensor) -> Tensor:
    out = F.linear(x, getattr(w, name), getattr(w, f"{name}_bias", None))
    if adapted is not None:
        add_low_rank(out, x, adapted.adapters.layers[layer][PRODUCTS.index(name)], adapted.runs)
    return out


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float() if x.dtype == torch.bfloat16 else x  # bf16 is normed in fp32, and rounded before the weight
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotated(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    if weight is not None:
        x = _rms_norm(x, weight, eps)
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
