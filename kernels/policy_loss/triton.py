"""The fused elementwise policy loss in Triton: `elements.losses`, the text that PyTorch runs, compiled.

`compiled` gives a formula's text to Triton's compiler, with Triton's functions under the names of `elementwise`. So a
formula is written once; this file has those functions, the loads and the stores.

One pass: at most fourteen reads of 4 bytes an element, one or two writes. A program adds up its block and writes
partial sums of loss and metrics; a second, fixed-order sum over blocks finishes them. No atomics.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .elements import ESTIMATORS, Elements, Kind, Sums, losses
from .surrogates import SURROGATES, Spec

BLOCK = 1024
_ROWS = tl.constexpr(len(Sums._fields))


@triton.jit
def _abs(x):
    return tl.abs(x)


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _log(x):
    return tl.log(x)


@triton.jit
def _sigmoid(x):
    return tl.sigmoid(x)


@triton.jit
def _zeros_like(x):
    return tl.zeros_like(x)


@triton.jit
def _where(condition, yes, no):
    return tl.where(condition, yes, no)


@triton.jit
def _isfinite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def _minimum(x, high):
    return tl.where(x > high, high, x)


@triton.jit
def _clamp(x, low, high):
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def _expm1(x):
    """Return e^x - 1 without cancellation for small x, where the series to x^7 is exact to rounding."""
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))))
    return tl.where(tl.abs(x) < 0.5, series, tl.exp(x) - 1)


FUNCTIONS = {
    "abs": _abs, "exp": _exp, "expm1": _expm1, "log": _log, "sigmoid": _sigmoid, "sign": _sign, "where": _where,
    "minimum": _minimum, "clamp": _clamp, "isfinite": _isfinite, "zeros_like": _zeros_like,
}  # fmt: skip


@functools.cache
def compiled(formula: Callable[..., Any]) -> Any:
    """Return the `triton.jit` function with the text of ``formula``, which uses the functions of `elementwise` alone.

    A name of `elementwise` becomes Triton's function, a number a constant, a function the same one compiled, and a
    named tuple stays itself. Of annotations, ``Tensor`` becomes Triton's, and one that is no named tuple an argument
    known at compile time.

    Raises:
        ValueError: the formula uses another name.
    """
    assert isinstance(formula, FunctionType)
    globals_ = formula.__globals__
    meaning: dict[str, Any] = {"__name__": formula.__module__, "__builtins__": __builtins__, "tl": tl}
    for name in {*formula.__annotations__.values(), *formula.__code__.co_names}:
        value = globals_.get(name)
        if name in FUNCTIONS:
            meaning[name] = FUNCTIONS[name]
        elif isinstance(value, type) and issubclass(value, tuple):
            meaning[name] = value
        elif name in formula.__annotations__.values():
            meaning[name] = tl.tensor if value is Tensor else tl.constexpr
        elif isinstance(value, FunctionType):
            meaning[name] = compiled(value)
        elif isinstance(value, int | float):
            meaning[name] = tl.constexpr(value)
        elif name in globals_:
            raise ValueError(f"{formula.__name__} uses {name}, which kernels/policy_loss/elementwise.py does not have.")
    same = FunctionType(formula.__code__, meaning, formula.__name__)
    same.__module__, same.__qualname__ = formula.__module__, formula.__qualname__
    return triton.jit(same)


_losses = compiled(losses)
UNALIGNED = (*Elements._fields, "d_logprob", "d_entropy", "partial")
"""A chunk of targets begins anywhere, so one kernel serves all alignments."""


@triton.jit
def _load(
    i, live, logprob, adv_pos, adv_neg, weight, all_weight, log_ratio, low, high, extra, old_logprob, ref_logprob,
    behaviour_logprob, entropy, pos_weight, neg_weight,
):  # fmt: skip
    """Load the elements ``i``. Those that are not live are never read, so their values cannot reach the sums; their
    weights are 0."""
    return Elements(
        logprob=tl.load(logprob + i, mask=live, other=0.0),
        adv_pos=tl.load(adv_pos + i, mask=live, other=0.0),
        adv_neg=tl.load(adv_neg + i, mask=live, other=0.0),
        weight=tl.load(weight + i, mask=live, other=0.0),
        all_weight=None if all_weight is None else tl.load(all_weight + i, mask=live, other=0.0),
        log_ratio=None if log_ratio is None else tl.load(log_ratio + i, mask=live, other=0.0),
        low=None if low is None else tl.load(low + i, mask=live, other=0.0),
        high=None if high is None else tl.load(high + i, mask=live, other=1.0),
        extra=None if extra is None else tl.load(extra + i, mask=live, other=0.0),
        old_logprob=None if old_logprob is None else tl.load(old_logprob + i, mask=live, other=0.0),
        ref_logprob=None if ref_logprob is None else tl.load(ref_logprob + i, mask=live, other=0.0),
        behaviour_logprob=None if behaviour_logprob is None else tl.load(behaviour_logprob + i, mask=live, other=0.0),
        entropy=None if entropy is None else tl.load(entropy + i, mask=live, other=0.0),
        pos_weight=None if pos_weight is None else tl.load(pos_weight + i, mask=live, other=0.0),
        neg_weight=None if neg_weight is None else tl.load(neg_weight + i, mask=live, other=0.0),
    )


@triton.jit(do_not_specialize=["M", "blocks"], do_not_specialize_on_alignment=UNALIGNED)
def _terms(
    logprob, adv_pos, adv_neg, weight, all_weight, log_ratio, low, high, extra,  # [M] fp32; None where absent
    old_logprob, ref_logprob, behaviour_logprob, entropy, pos_weight, neg_weight,  # likewise
    mask,  # [M] uint8
    d_logprob, d_entropy,  # [M] fp32, out
    partial,  # [len(Sums), blocks] fp32, out
    M, blocks,
    eps_low, eps_high, clip_ratio_c, tau_pos, tau_neg, beta, kl_coef, entropy_coef, mismatch_low, mismatch_cap,
    SURROGATE: tl.constexpr, SIGNED: tl.constexpr, OF_ALL: tl.constexpr, BOUNDED: tl.constexpr, KL: tl.constexpr,
    STRAIGHT_THROUGH: tl.constexpr, KL_IMPORTANCE: tl.constexpr, MISMATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < M
    live = inside
    if mask is not None:
        live = live & (tl.load(mask + i, mask=inside, other=0) != 0)
    x = _load(
        i, live, logprob, adv_pos, adv_neg, weight, all_weight, log_ratio, low, high, extra, old_logprob, ref_logprob,
        behaviour_logprob, entropy, pos_weight, neg_weight,
    )  # fmt: skip
    n = Spec(eps_low, eps_high, clip_ratio_c, tau_pos, tau_neg, beta, kl_coef, entropy_coef, mismatch_low, mismatch_cap)
    grad, by_entropy, sums = _losses(
        x, n, SURROGATE, SIGNED, OF_ALL, BOUNDED, KL, STRAIGHT_THROUGH, KL_IMPORTANCE, MISMATCH
    )
    tl.store(d_logprob + i, tl.where(live, grad, 0.0), mask=inside)
    if entropy is not None:
        tl.store(d_entropy + i, by_entropy, mask=inside)
    for row in tl.static_range(_ROWS):
        values = sums[row]
        if len(values.shape) == 1:  # otherwise one number for all
            values = tl.sum(values, 0)
        tl.store(partial + row * blocks + block, values)


def terms(x: Elements, kind: Kind, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like `elements.terms`, in fp32."""
    M = len(x.logprob)
    blocks = triton.cdiv(M, BLOCK)
    d_logprob = torch.empty_like(x.logprob, memory_format=torch.contiguous_format)
    d_entropy = d_logprob.new_empty(0 if x.entropy is None else M)
    partial = d_logprob.new_empty(len(Sums._fields), blocks)
    surrogate = SURROGATES[kind.surrogate]
    mask = None if x.mask is None else x.mask.view(torch.uint8)
    if M:
        _terms[(blocks,)](
            *(None if t is None else t.contiguous() for t in x._replace(mask=mask)),
            d_logprob,
            d_entropy,
            partial,
            M,
            blocks,
            *spec,
            SURROGATE=compiled(surrogate.formula),
            SIGNED=surrogate.signed,
            OF_ALL=surrogate.of_all,
            BOUNDED=surrogate.bounded,
            KL=compiled(ESTIMATORS[kind.kl.removesuffix("+")]),
            STRAIGHT_THROUGH=kind.kl.endswith("+"),
            KL_IMPORTANCE=kind.kl_importance,
            MISMATCH=kind.mismatch,
            BLOCK=BLOCK,
            enable_fp_fusion=True,
        )
    sums = partial.sum(1, dtype=torch.float64)
    return sums[0].to(d_logprob.dtype), d_logprob, d_entropy, sums[1:].clone()
