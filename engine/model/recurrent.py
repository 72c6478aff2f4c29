"""Recurrent layers of Transformers on packed trees: gated delta rule, Kimi's delta rule, Mamba-2, short convolutions.

A mixer's forward is left as it is. It calls functions of its module for what sees more than one token at once (a causal
convolution, a chunked scan), and `install` replaces these by ones that take the tree's path while a decoder layer runs
with the keyword argument ``recurrence``, and call the original otherwise. The decoder layer, not the model, sets the
context: activation checkpointing computes a layer again with its keyword arguments, in whichever thread runs the
backward pass. A layer whose mixer did not call our functions raises an error instead of mixing siblings.
"""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from rolltree.kernels.tree_recurrence import tree_convolution, tree_recurrence

from ..batches.recurrence import Recurrence
from ..errors import UserError
from .fused_layers import replace_forward

RECURRENT = re.compile(
    r"Mamba|Rwkv|Recurrent|GatedDelta|DeltaAttention|(?<!Kimi)LinearAttention|Lightning|ShortConv|Retention|Hyena|LSTM"
)
"""Names of the classes of layers that carry a state from token to token; KimiLinearAttention is latent attention."""

MAMBA = ("causal_conv1d_fn", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined")
DELTA = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
MIXERS = {
    "Qwen3_5GatedDeltaNet": DELTA,
    "Qwen3_5MoeGatedDeltaNet": DELTA,
    "Qwen3NextGatedDeltaNet": DELTA,
    "OlmoHybridGatedDeltaNet": DELTA,
    "KimiLinearDeltaAttention": ("causal_conv1d_fn", "chunk_kimi_delta_attention"),
    "NemotronHMamba2Mixer": MAMBA,
    "GraniteMoeHybridMambaLayer": MAMBA,
    "BambaMixer": MAMBA,
    "FalconH1Mixer": MAMBA,
    "Lfm2ShortConv": ("causal_conv1d_fn",),
    "Lfm2MoeShortConv": ("causal_conv1d_fn",),
}
"""Classes of mixers that compute trees, and the functions of their module that see more than one token."""

FAMILIES = [
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "olmo_hybrid",
    "kimi_linear",
    "nemotron_h",
    "granitemoehybrid",
    "bamba",
    "falcon_h1",
    "lfm2",
    "lfm2_moe",
]
"""``model_type`` of the configurations whose mixers these are."""


@dataclass
class _Running:
    """The decoder layer that runs, with the recurrence of its rows."""

    recurrence: Recurrence
    layer: int
    used: set[str] = field(default_factory=set)  # functions that took the tree's path


_running: ContextVar[_Running | None] = ContextVar("rolltree_recurrence", default=None)
_mixers: set[type[nn.Module]] = set()  # classes whose modules and decoder layers are prepared
_recurrent: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def install(model: nn.Module, what: str | None = None) -> bool:
    """Prepare the classes of a model's recurrent layers, once for the process; return True if it has such layers.

    Args:
        what: names the model in the error; its class by default.

    Raises:
        UserError: a recurrent layer has no functions that trees can take.
    """
    decoder: nn.Module = getattr(model, "get_decoder", lambda: model)()
    if decoder not in _recurrent:
        _recurrent[decoder] = _prepare(decoder, what or type(model).__name__)
    return _recurrent[decoder]


def unfit(model: nn.Module) -> list[str]:
    """Return the names of the model's recurrent classes that cannot be computed on trees."""
    return sorted({_name(m) for m in model.modules() if _is_mixer(m) and not _fits(m)})


def scanned(model: nn.Module) -> list[str]:
    """Return the names of the model's recurrent classes that scan chunks of tokens, not those that only convolve."""
    return sorted({_name(m) for m in model.modules() if len(MIXERS.get(_name(m), ())) > 1})


def _prepare(decoder: nn.Module, what: str) -> bool:
    wrong = unfit(decoder)
    if wrong:
        raise UserError(f"'{what}' has layers that cannot be tree-masked ({', '.join(wrong)}); use another model.")
    has_mixers = False
    for layer in decoder.modules():
        mixers = [child for child in layer.children() if _name(child) in MIXERS]
        for mixer in mixers:
            cls = next(c for c in type(mixer).__mro__ if c.__name__ in MIXERS)
            module = sys.modules[cls.__module__]
            if cls not in _mixers:
                for name in MIXERS[cls.__name__]:
                    _replace(module, name)
                _mixers.add(cls)
        if mixers:
            has_mixers = True
            _wrap(next(c for c in type(layer).__mro__ if c.__module__ == module.__name__))
    return has_mixers


def _name(module: nn.Module) -> str:
    """Return the class's name in Transformers, which sharding may have subclassed."""
    return next((c.__name__ for c in type(module).__mro__ if c.__module__.startswith("transformers.models.")), "")


def _fits(module: nn.Module) -> bool:
    name = _name(module)
    home = next((sys.modules[c.__module__] for c in type(module).__mro__ if c.__name__ == name), None)
    return all(hasattr(home, function) for function in MIXERS.get(name, ("",)))


def _is_mixer(module: nn.Module) -> bool:
    """Tell a mixer from its norm, and from a decoder layer or a model that are named after the mixers within them."""
    return _named(module) and not any(_named(m) for m in module.modules() if m is not module)


def _named(module: nn.Module) -> bool:
    name = _name(module)
    return RECURRENT.search(name) is not None and "Norm" not in name


def _replace(module: Any, name: str) -> None:
    original, tree = getattr(module, name), FUNCTIONS[name]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        running = _running.get()
        if running is None:
            return original(*args, **kwargs)
        running.used.add(name)
        return tree(running, *args, **kwargs)

    setattr(module, name, call)


def _wrap(cls: Any) -> None:
    """Make a decoder layer's class set the context; do so once."""
    if not hasattr(cls.forward, "of_trees"):
        replace_forward(cls, functools.partial(_in_context, cls.__name__))


def _in_context(name: str, original: Any) -> Any:
    """Return the forward of the class ``name`` that sets the context."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, recurrence: Recurrence | None = None, **kwargs: Any) -> Any:
        mixer: Any = next((child for child in self.children() if isinstance(child, tuple(_mixers))), None)
        if mixer is None:
            return original(self, *args, **kwargs)
        if recurrence is None:
            if kwargs.get("subtree_end") is not None or kwargs.get("kv_store") is not None:
                raise ValueError(f"{name} has a recurrent layer and computes trees only with `recurrence`.")
            return original(self, *args, **kwargs)
        running = _Running(recurrence, mixer.layer_idx)
        token = _running.set(running)
        try:
            out = original(self, *args, **kwargs)
        finally:
            _running.reset(token)
        missed = set(MIXERS[_name(mixer)]) - running.used - {"mamba2_split_conv1d_scan_combined"}
        if missed:
            raise RuntimeError(
                f"{_name(mixer)} did not call {', '.join(sorted(missed))}, so it did not compute the tree; load the "
                "model without use_kernels."
            )
        return out

    forward.of_trees = True  # type: ignore[attr-defined]
    return forward


# -- the functions, on trees -------------------------------------------------------------------------------------------


def _convolution(
    running: _Running,
    hidden_states: Tensor,  # [1, D, T]
    weight: Tensor,  # [D, K]
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:  # [1, D, T]
    x = _wide(hidden_states[0].T)
    shape = (weight.shape[1] - 1, weight.shape[0])
    recurrence, layer = running.recurrence, running.layer
    history = recurrence.initial(layer, "inputs", shape, x)
    w, b = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    out, ends = tree_convolution(x, w, b, recurrence.plan, history=history)
    out = recurrence.keep(layer, "inputs", ends, out)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.T[None].to(hidden_states.dtype)


def _delta_rule(
    running: _Running,
    query: Tensor,  # [1, T, G, Dk]
    key: Tensor,
    value: Tensor,  # [1, T, H, Dv]
    g: Tensor,  # [1, T, H] or [1, T, H, Dk]
    beta: Tensor,  # [1, T, H]
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    q, k = _wide(query[0]), _wide(key[0])
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    out = _scan(running, q, k, value[0], g[0], beta[0], query.shape[-1] ** -0.5, query.dtype)
    return out[None].to(query.dtype), None


def _mamba(
    running: _Running,
    hidden_states: Tensor,  # [1, T, H, P]
    dt: Tensor,  # [1, T, H]
    A: Tensor,  # [H]
    B: Tensor,  # [1, T, G, N]
    C: Tensor,
    *_: Any,
    D: Tensor | None = None,  # [H]
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **__: Any,
) -> Tensor:  # [1, T, H, P]
    if z is not None:
        raise ValueError("mamba2_chunk_scan on trees takes no gate z; compute the gate after it.")
    x, step = _wide(hidden_states[0]), _wide(dt[0])
    if dt_bias is not None:
        step = step + dt_bias
    if dt_softplus:
        step = F.softplus(step)
    step = step.clamp(*dt_limit)
    out = _scan(running, C[0], B[0], x * step[..., None], step * A, None, 1.0, hidden_states.dtype)
    if D is not None:
        out = out + x * D[:, None]
    return out[None].to(hidden_states.dtype)


def _scan(
    running: _Running,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    decay, beta = _wide(decay), None if beta is None else _wide(beta)
    q, k, v = (x.to(dtype) if _in_half(dtype, x.device) else _wide(x) for x in (q, k, v))
    recurrence, layer = running.recurrence, running.layer
    needs = next((x for x in (v, k, decay, beta) if x is not None and x.requires_grad), decay)
    initial = recurrence.initial(layer, "state", (v.shape[1], k.shape[-1], v.shape[-1]), needs)
    out, ends = tree_recurrence(q, k, v, decay, beta, recurrence.plan, initial=initial, scale=scale)
    return recurrence.keep(layer, "state", ends, out)


def _in_half(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products are of rows in the model's dtype: in bfloat16 on a GPU, whose tensor cores take them.
    States and decays are float32 there too."""
    return dtype == torch.bfloat16 and device.type == "cuda"


def _separately(*_: Any, **__: Any) -> None:
    """Return None, with which a mixer takes its separate steps in place of mamba-ssm's fused kernel."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba,
    "mamba2_split_conv1d_scan_combined": _separately,
}
"""The functions that replace those of a mixer's module on trees, by name."""
