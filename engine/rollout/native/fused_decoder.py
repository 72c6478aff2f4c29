"""A decoder as one call of `rolltree.kernels.decoder_layer`: on a CPU, and in the steps that a GPU replays.

A layer is some fifty operators in Transformers, each a pass over rows that are few and short when decoding; on a GPU it
is ten kernels. Adapters of rows are part of the call. If something else replaces a linear layer, such as an adapter
that all rows compute with, the linear layers run as the model's own modules and only the operations between them are
fused. Modules are only read, because the trainer uses them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rolltree.kernels.decoder_layer import (
    Adapted,
    Decoder,
    DecoderAdapters,
    LayerWeights,
    add_rms_norm_,
    rotate_and_store_,
)
from rolltree.kernels.linear import library_agrees
from rolltree.kernels.tree_decode import tree_decode_attention

from ...model.invariant.install import is_invariant
from .adapters import RowAdapters, Tables
from .cache.kv_cache import KvCache
from .step_buffer import StepVector

FAMILIES = (
    "llama.modeling_llama.Llama",
    "mistral.modeling_mistral.Mistral",
    "qwen2.modeling_qwen2.Qwen2",
    "qwen3.modeling_qwen3.Qwen3",
)
"""Transformers' model families whose decoders this module computes."""

STEADY = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angle at a position does not depend on the length of the sequences."""


@dataclass
class Snapshot:
    """State of a decoder that its fused form depends on."""

    parts: tuple[tuple[dict[str, Any], ...], tuple[str, ...], tuple[Any, ...]]
    """Containers, names and contents: the slots in which modules and weights were found and may be replaced."""
    hooks: list[dict[Any, Any]]
    """Hook tables of the modules whose forward is bypassed, and lists of merged adapters; they must stay empty."""
    weights: list[Tensor]
    """Parameters whose dtype or contiguity may have changed since the snapshot."""
    dtype: torch.dtype | None
    """The dtype of all weights; None if the decoder is not supported."""
    supported: bool
    """True if this module computes the decoder."""
    layers: list[LayerWeights] | None
    """Weights of the layers; None if a linear layer is not plain: an adapter that is on, hooks or an unsupported
    bias."""

    def holds(self) -> bool:
        """Return True if nothing in the snapshot has changed."""
        places, names, parts = self.parts
        return (
            all(map(is_, map(dict.get, places, names), parts))  # some hundred, every step
            and all(map(Tensor.is_contiguous, self.weights))
            and set(map(attrgetter("dtype"), self.weights)) <= {self.dtype}
            and not any(self.hooks)
        )


class FusedDecoder:
    """The decoder of a model, over the pages of ``cache``.

    Args:
        positions: number of positions that the tables of rotations have from the first step on; graphs read the same
            ones again for later positions.
    """

    def __init__(self, decoder: Any, cache: KvCache, adapters: RowAdapters, positions: int = 1) -> None:
        self._decoder, self._cache, self._adapters, self._positions = decoder, cache, adapters, positions
        self._invariant = is_invariant(decoder)
        self._snapshot: Snapshot | None = None
        self._whole: tuple[Snapshot, Any, Decoder] | None = None
        """The snapshot and the pages from which the decoder as one call was built, and the decoder."""
        self._adapted: tuple[Snapshot, Tables, DecoderAdapters] | None = None
        self._table: tuple[tuple[Any, ...], Tensor, Tensor, Tensor] | None = None
        """Key of the table, cosines and sines of all positions [P, D] each, and the frequencies."""

    def run(self, vector: StepVector) -> Tensor | None:  # [N, H]
        """Return the last hidden states of a step; None if the decoder has to run unfused."""
        if self._snapshot is None or not self._snapshot.holds():
            self._snapshot = _snapshot(self._decoder)
        if not self._snapshot.supported or torch.is_autocast_enabled(self._snapshot.weights[0].device.type):
            return None
        if self._invariant and self._snapshot.layers is None:
            return None  # modules are computed as in training
        decoder, input_ids, positions = self._decoder, vector.view("input_ids"), vector.view("query_position")
        cos, sin, turns = self._turns(input_ids, positions, max(vector.positions, self._positions))
        if cos.shape[1] != decoder.layers[0].self_attn.head_dim:
            return None
        if not self._cache.ready:
            for layer in decoder.layers:
                attention = layer.self_attn
                keys = cos.new_empty((0, attention.config.num_key_value_heads, attention.head_dim))
                self._cache.make_pages(attention.layer_idx, keys, attention.num_key_value_groups)
        if self._snapshot.layers is not None:
            adapted = None if vector.runs is None else Adapted(self._of_rows(self._snapshot), vector.runs)
            return self._as_one(self._snapshot).run(
                input_ids, cos, sin, vector.view("slots"), vector.plan, turns, adapted
            )
        vector.begin(self._cache)
        if turns is not None:
            cos, sin = cos.index_select(0, turns), sin.index_select(0, turns)
        hidden = F.embedding(input_ids, decoder.embed_tokens.weight)
        with self._adapters.computing(vector.runs):
            for layer in decoder.layers:
                hidden = self._with_modules(layer, hidden, cos, sin)
        return add_rms_norm_(hidden, None, decoder.norm.weight, decoder.norm.variance_epsilon)

    def let_go_of_pages(self) -> None:
        """Drop what holds the pages, whose memory would not be freed otherwise."""
        self._whole = None

    def _as_one(self, snapshot: Snapshot) -> Decoder:
        pages = self._cache.pages
        if self._whole is None or self._whole[0] is not snapshot or self._whole[1] is not pages:
            assert snapshot.layers is not None
            decoder = self._decoder
            whole = Decoder(
                decoder.embed_tokens.weight,
                snapshot.layers,
                decoder.norm.weight,
                [pages[layer.self_attn.layer_idx] for layer in decoder.layers],
                eps=decoder.norm.variance_epsilon,
                scale=decoder.layers[0].self_attn.scaling,
                windows=[_window(layer) for layer in decoder.layers],
                library=not self._invariant or _library_agrees(snapshot.layers),
            )
            self._whole = snapshot, pages, whole
        return self._whole[2]

    def _of_rows(self, snapshot: Snapshot) -> DecoderAdapters:
        tables = self._adapters.tables
        if self._adapted is None or self._adapted[0] is not snapshot or self._adapted[1] is not tables:
            layers = [[tables.of(product, product.weight) for product in _products(la)] for la in self._decoder.layers]
            self._adapted = snapshot, tables, DecoderAdapters(layers)
        return self._adapted[2]

    def _turns(self, input_ids: Tensor, position_ids: Tensor, positions: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return cosines and sines [*, D] for rows [N] with positions below ``positions``, and each row's index into
        them. They are computed once for every position if they depend on it alone; otherwise for each row (index
        None)."""
        rotary = self._decoder.rotary_emb
        of_family = type(rotary).__module__ == type(self._decoder).__module__ and "forward" not in vars(rotary)
        if not of_family or rotary._forward_hooks or rotary._forward_pre_hooks or rotary.rope_type not in STEADY:
            like = F.embedding(input_ids, self._decoder.embed_tokens.weight)
            cos, sin = rotary(like[None], position_ids[None].long())
            return cos[0].contiguous(), sin[0].contiguous(), None
        frequencies: Tensor = rotary.inv_freq
        version = None if frequencies.is_inference() else frequencies._version
        made_of = id(frequencies), version, rotary.attention_scaling
        if self._table is None or self._table[0] != made_of or len(self._table[1]) < positions:
            every = torch.arange(1 << (positions - 1).bit_length(), device=frequencies.device)
            cos, sin = rotary(self._decoder.embed_tokens.weight[None], every[None])
            self._table = made_of, cos[0].contiguous(), sin[0].contiguous(), frequencies
        return self._table[1], self._table[2], position_ids

    def _with_modules(self, layer: Any, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [N, H], [N, D]
        attention, mlp, after = layer.self_attn, layer.mlp, layer.post_attention_layernorm
        step = self._cache.layer(attention.layer_idx)
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
        seen, _ = tree_decode_attention(q, step.k, step.v, step.plan, scale=attention.scaling, window=_window(layer))
        x = add_rms_norm_(residual, attention.o_proj(seen.flatten(1)), after.weight, after.variance_epsilon)
        return residual.add_(mlp.down_proj(F.silu(mlp.gate_proj(x), inplace=True).mul_(mlp.up_proj(x))))


def most_positions(model: Any, cache: KvCache) -> int:
    """Return the number of positions that rows may have: those of the model, as far as the cache has room for them."""
    room = int(cache.tree.num_pages) * int(cache.tree.page_size)
    return min(getattr(model.config.get_text_config(), "max_position_embeddings", None) or room, room)


def _library_agrees(layers: list[LayerWeights]) -> bool:
    """Return whether the library's products have the bits of own ones; on a GPU they are not compared."""
    if layers[0].q.device.type != "cpu":
        return False
    products = [(w, b) for la in layers for w, b in ((la.q, la.q_bias), (la.k, la.k_bias), (la.v, la.v_bias))]
    products += [(w, None) for la in layers for w in (la.o, la.gate, la.up, la.down)]
    return all(library_agrees(len(w), w.shape[1], w.dtype, b is not None) for w, b in products)


def _window(layer: Any) -> int | None:
    attention = layer.self_attn
    if type(attention).__name__ == "MistralAttention":  # it has no window of its own
        return getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", None)


def _snapshot(decoder: Any) -> Snapshot:
    """Snapshot the decoder: its layers, and whether it is an unmodified Transformers model without hooks, of one
    dtype, fp32 or bf16."""
    named = f"{type(decoder).__module__}.{type(decoder).__qualname__}"
    family = next((f for f in FAMILIES if named == f"transformers.models.{f}Model"), None)
    if family is None:
        return Snapshot(((), (), ()), [], [], None, False, None)
    passed_over = [decoder, decoder.embed_tokens, decoder.norm, *_passed_over(decoder.layers)]
    products = [product for layer in decoder.layers for product in _products(layer)]
    parts = [(p._modules, name, part) for p in (*passed_over, decoder.layers) for name, part in p._modules.items()]
    settings = ("scaling", "sliding_window")  # constants of the decoder as one call
    parts += [(vars(la.self_attn), name, vars(la.self_attn).get(name)) for la in decoder.layers for name in settings]
    parts += [(vars(decoder.config), "sliding_window", vars(decoder.config).get("sliding_window"))]
    off = [p for p in products if hasattr(p, "lora_A") and p.disable_adapters]
    bases = [p.base_layer if p in off else p for p in products]
    weighted = [m for m in (*passed_over, *bases) if m._parameters]
    parts += [(m._parameters, name, part) for m in weighted for name, part in m._parameters.items()]
    parts += [(of, name, of.get(name)) for p in off for of, name in _switches(p)]
    hooks = [hooks for m in passed_over for hooks in (m._forward_hooks, m._forward_pre_hooks)]
    bypassed = [hooks for p in (*off, *bases) for hooks in (p._forward_hooks, p._forward_pre_hooks)]
    bypassed += [p.merged_adapters for p in off]
    plain = all(type(p) is nn.Linear for p in bases) and not any(bypassed)
    weights = [w for m in weighted for w in m._parameters.values() if w is not None] if plain else decoder.parameters()
    weights = list(weights)
    supported = not any(hooks) and _is_plain(decoder, f"transformers.models.{family}", weights)
    biased = any(p.bias is not None for layer in decoder.layers for p in _products(layer)[4:]) if plain else False
    layers = [_weights(layer) for layer in decoder.layers] if supported and plain and not biased else None
    if layers is not None:  # otherwise linear layers run as modules and may have hooks
        hooks += bypassed
    places, names, contents = zip(*parts, strict=True)
    weights = weights if supported else []
    dtype = weights[0].dtype if supported else None
    return Snapshot((places, names, contents), hooks, weights, dtype, supported, layers)


def _passed_over(layers: Any) -> Iterator[Any]:
    """Yield the modules of the layers whose forward is bypassed."""
    for layer in layers:
        yield from (layer, layer.self_attn, layer.mlp, layer.mlp.act_fn)
        yield from _norms(layer)


def _norms(layer: Any) -> list[Any]:
    attention = layer.self_attn
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    return norms + ([attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else [])


def _products(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    of_attention = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*of_attention, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _switches(product: Any) -> list[tuple[dict[str, Any], str]]:
    """Return where a layer of peft keeps whether its adapters are off, and what it computes then."""
    return [(vars(product), "_disable_adapters"), (product._modules, "base_layer")]


def _is_plain(decoder: Any, family: str, weights: list[Tensor]) -> bool:
    norm = type(decoder.norm)
    norms = [decoder.norm, *(norm for layer in decoder.layers for norm in _norms(layer))]
    first = decoder.layers[0]
    return (
        type(decoder.embed_tokens) is nn.Embedding
        and decoder.embed_tokens.max_norm is None
        and f"{norm.__module__}.{norm.__qualname__}" == f"{family}RMSNorm"
        and all(type(n) is norm and n.variance_epsilon == decoder.norm.variance_epsilon for n in norms)
        and all(f"{type(la).__module__}.{type(la).__qualname__}" == f"{family}DecoderLayer" for la in decoder.layers)
        and all(
            isinstance(la.mlp.act_fn, nn.SiLU) or type(la.mlp.act_fn).__name__ == "SiLUActivation"
            for la in decoder.layers
        )
        and all(la.self_attn.scaling == first.self_attn.scaling for la in decoder.layers)
        and {weight.dtype for weight in weights} in ({torch.float32}, {torch.bfloat16})
        and all(weight.is_contiguous() for weight in weights)
    )


def _weights(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    norms: dict[str, Any] = {"q_norm": None, "k_norm": None}
    if hasattr(attention, "q_norm"):
        norms = {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
    named = ((name, getattr(attention, f"{name}_proj")) for name in "qkvo")
    tensors = {key: value for name, p in named for key, value in ((name, p.weight), (f"{name}_bias", p.bias))}
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        **tensors,
        **norms,
    )
