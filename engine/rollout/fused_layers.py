"""Decoder layers on a CPU, with single passes between their products.

A layer's norms, rotary embedding and cache writes are some forty operators in Transformers, each a pass over rows
that are few and short when decoding. Here they are three calls of `rolltree.kernels.decoder_layer` which keep every
rounding, so what is sampled stays the same to the last bit. Products are the layer's own modules, with what adapters
make of them. The `Runner` uses it where nothing compiles the layers, and only while it runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rolltree.kernels.decoder_layer import add_rms_norm_, rotate_and_store_
from rolltree.kernels.tree_decode import tree_decode_attention

from .kv_cache import KvCache
from .layers import layer_number

FAMILIES = ("llama.modeling_llama.Llama", "qwen2.modeling_qwen2.Qwen2", "qwen3.modeling_qwen3.Qwen3")
"""Of Transformers, whose layers are computed as here."""


class FusedLayers:
    """The layers of a decoder, which `substituted` lets run fused; those it does not know run as they are."""

    def __init__(self, decoder: nn.Module, cache: KvCache) -> None:
        names = {f"transformers.models.{family}DecoderLayer" for family in FAMILIES}
        layers = [m for m in decoder.modules() if f"{type(m).__module__}.{type(m).__qualname__}" in names]
        self._layers = [(layer, n) for layer in layers if (n := layer_number(layer)) is not None]
        self._cache = cache

    @contextmanager
    def substituted(self) -> Iterator[None]:
        """Meanwhile calls of the layers that bring the engine's cache run fused; others, of a trainer in another
        thread, as ever."""
        try:
            for layer, number in self._layers:
                layer._compiled_call_impl = partial(self._call, layer, number)
            yield
        finally:
            for layer, _ in self._layers:
                layer._compiled_call_impl = None

    def _call(self, layer: Any, number: int, hidden: Tensor, **kwargs: Any) -> Tensor:
        if kwargs.get("kv_store") is not self._cache or not _fits(layer, hidden, kwargs["position_embeddings"]):
            return layer._call_impl(hidden, **kwargs)
        return self._forward(layer, number, hidden[0], *(part[0] for part in kwargs["position_embeddings"]))[None]

    def _forward(self, layer: Any, number: int, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [N, H], [N, D]
        attention, mlp, after = layer.self_attn, layer.mlp, layer.post_attention_layernorm
        step = self._cache.layer(number)
        x = add_rms_norm_(residual, None, layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon)
        q, k, v = (
            product(x).view(len(x), -1, attention.head_dim)
            for product in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        norms: dict[str, Any] = {}
        if hasattr(attention, "q_norm"):
            norms = {"q_weight": attention.q_norm.weight, "k_weight": attention.k_norm.weight}
            norms["eps"] = attention.q_norm.variance_epsilon
        rotate_and_store_(q, k, v, cos, sin, step.slots, step.k, step.v, **norms)
        window = getattr(attention, "sliding_window", None)
        seen, _ = tree_decode_attention(q, step.k, step.v, step.plan, scale=attention.scaling, window=window)
        x = add_rms_norm_(residual, attention.o_proj(seen.flatten(1)), after.weight, after.variance_epsilon)
        return residual.add_(mlp.down_proj(F.silu(mlp.gate_proj(x), inplace=True).mul_(mlp.up_proj(x))))


def _fits(layer: Any, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> bool:
    """Whether the layer is what Transformers made, computes in fp32, and nobody listens to a part passed over."""
    attention, norm = layer.self_attn, type(layer.input_layernorm)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if hasattr(attention, "q_norm"):
        norms += [attention.q_norm, attention.k_norm]
    parts = [layer, attention, layer.mlp, layer.mlp.act_fn, *norms]
    return (
        hidden.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and layer.mlp.gate_proj.weight.dtype == torch.float32
        and norm.__module__ == type(layer).__module__
        and all(type(other) is norm for other in norms)
        and isinstance(layer.mlp.act_fn, nn.SiLU) | (type(layer.mlp.act_fn).__name__ == "SiLUActivation")
        and position_embeddings[0].shape[-1] == attention.head_dim
        and not any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    )
