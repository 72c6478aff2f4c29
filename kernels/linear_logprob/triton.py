"""Row kernels of the Triton backend; `reference` defines them.

``_statistics``: one program a row; the row is read once, blockwise, with running maximum m and sums of exp(z - m),
(z - m) exp(z - m) and exp(z - m)^2, rescaled when m grows. The maximum starts at -inf, not at 0: rows of logits that
are all below -100 would vanish otherwise. Then the row's targets are gathered, 16 at a time. Reads 4 V bytes a row.

``_gradient``: one program a row and block of columns, elementwise given the log-sum-exp. The one-hot parts of the row's
targets are added in registers, so several targets of one row (or one target twice) need no atomics. Reads 4 V bytes a
row and writes as many in the dtype of the result.

``_statistics`` with KEEP: the exponentials of the row are stored in the same pass, exp(z - base), for `exponentials`.

A row of a tile begins at a multiple of ``ROW_MULTIPLE`` elements whatever V is, and is loaded and stored to its end, so
that an odd vocabulary costs no vector access: Triton specialises on multiples of 16, and GEMMs want 8.

Nothing is contracted (``enable_fp_fusion=False``): if one kernel rounded the product by 1 / temperature and the other
did not, p would not be exp(z - lse) of one z, an error of up to half a unit in the last place of z.

NaN and +inf make their own row NaN; -inf is a logit of probability zero. Rows without any gradient are written as zeros
whatever their logits are.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .chunked import RowInputs

MAX_BLOCK = 4096
ROW_MULTIPLE = 16
SHARES_ROWS = True  # see `statistics`
RANGE = tl.constexpr(30.0)
"""The largest difference of a logit and the base: e^30 times a vocabulary, and its square, are within bf16's range."""
UNALIGNED = (
    "temperature", "start", "target", "logprob", "logsumexp", "correction", "entropy", "sum_p2", "grad_logprob",
    "constant", "per_log", "per_p", "base",
)  # fmt: skip
"""Arguments with one number a row: a chunk of rows begins anywhere, and one kernel has to serve all alignments."""


@triton.jit
def _scaled(u, bias, columns, inside, inverse_temperature, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Return z = softcap(u + bias) / temperature, and dz/du without the factor 1 / temperature."""
    u = u.to(tl.float32)
    slope = tl.full(u.shape, 1.0, tl.float32)
    if HAS_BIAS:
        u += tl.load(bias + columns, mask=inside, other=0.0)
    if HAS_SOFTCAP:
        # tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|): neither overflows nor needs a device library
        decay = tl.exp(-2.0 * tl.abs(u / softcap))
        tanh = (1.0 - decay) / (1.0 + decay)
        tanh = tl.where(u < 0, -tanh, tanh)
        slope = 1.0 - tanh * tanh
        u = softcap * tanh
    return u * inverse_temperature, slope


@triton.jit
def _row_sums(
    logits, stride, bias, V, inverse_temperature, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, SUM_P2: tl.constexpr, BLOCK: tl.constexpr,
    out=None, out_stride=0, base=0.0,
):  # fmt: skip
    """Return the largest of a row's scaled logits z, and the sums of e = exp(d), e d and e^2 with d = z - the largest;
    the last two are 0 where they are not needed. Store exp(z - base) in ``out`` if given."""
    most = tl.full((), float("-inf"), tl.float32)
    e_sum = tl.full((), 0.0, tl.float32)  # of e = exp(d), d = z - most
    ed_sum = tl.full((), 0.0, tl.float32)  # of e d
    e2_sum = tl.full((), 0.0, tl.float32)  # of e^2
    for begin in range(0, V, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < V
        z, _ = _scaled(
            tl.where(inside, tl.load(logits + columns, mask=columns < stride, other=0.0), 0.0),
            bias,
            columns,
            inside,
            inverse_temperature,
            softcap,
            HAS_BIAS,
            HAS_SOFTCAP,
        )
        z = tl.where(inside, z, float("-inf"))
        if out is not None:
            tl.store(out + columns, tl.exp(z - base).to(out.dtype.element_ty), mask=columns < out_stride)
        larger = tl.maximum(most, tl.max(z, 0))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        step = most - shift
        fresh = step <= -100.0  # the sums so far vanish relative to the new maximum
        step = tl.where(fresh, 0.0, step)
        rescale = tl.where(fresh, 0.0, tl.exp(step))
        d = z - shift
        none = d <= -100.0  # false for NaN, which has to propagate
        d = tl.where(none, 0.0, d)
        e = tl.where(none, 0.0, tl.exp(d))
        if ENTROPY:
            ed_sum = rescale * (ed_sum + step * e_sum) + tl.sum(e * d, 0)
        if SUM_P2:
            e2_sum = rescale * rescale * e2_sum + tl.sum(e * e, 0)
        e_sum = rescale * e_sum + tl.sum(e, 0)
        most = larger
    return most, e_sum, ed_sum, e2_sum


@triton.jit
def _base_of(
    logits, bias, target, first, last, V, inverse, HAS_BIAS: tl.constexpr, TARGETS: tl.constexpr
):  # fmt: skip
    """Return the largest scaled logit of a row's targets, 0 if that is not finite."""
    base = tl.full((), float("-inf"), tl.float32)
    for begin in range(first, last, TARGETS):
        place = begin + tl.arange(0, TARGETS)
        y = tl.load(target + place, mask=place < last, other=-1)
        inside = (y >= 0) & (y < V)
        u = tl.load(logits + y, mask=inside, other=float("-inf"))
        z, _ = _scaled(u, bias, y, inside, inverse, 0.0, HAS_BIAS, False)
        base = tl.maximum(base, tl.max(z, 0))
    return tl.where(tl.abs(base) < float("inf"), base, 0.0)


@triton.jit
def _stored_again(
    logits, stride, bias, V, inverse, base, most, e_sum, out, out_stride, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the base of a row's exponentials. Where another logit exceeds it by more than `RANGE`, they are stored
    once more, relative to the largest; where a sum is not finite, zeros are."""
    sound = e_sum == e_sum
    if tl.where(sound, most - base, float("inf")) > RANGE:
        base = tl.where(sound, most, 0.0)
        for begin in range(0, V, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            inside = columns < V
            u = tl.where(inside, tl.load(logits + columns, mask=columns < stride, other=0.0), 0.0)
            z, _ = _scaled(u, bias, columns, inside, inverse, 0.0, HAS_BIAS, False)
            e = tl.where(sound, tl.where(inside, tl.exp(z - base), 0.0), 0.0)
            tl.store(out + columns, e.to(out.dtype.element_ty), mask=columns < out_stride)
    return base


@triton.jit(do_not_specialize=["temperature_stride"], do_not_specialize_on_alignment=UNALIGNED)
def _statistics(
    logits,  # [C, V] fp32, bf16 or fp16
    stride,  # of a row, V or more; the elements between belong to the tile
    bias,  # [V]
    temperature,  # [C]
    temperature_stride,
    start,  # [C + 1]
    target,  # [M]
    logprob,  # [M]
    logsumexp,  # [C]
    correction,  # [C]
    entropy,  # [C]
    sum_p2,  # [C]
    base,  # [C], or None without `out`
    out,  # [C, V], or None: exponentials are not stored
    out_stride,
    V, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, SUM_P2: tl.constexpr,
    BLOCK: tl.constexpr, TARGETS: tl.constexpr,
    EACH: tl.constexpr,  # rows that have the same logits, one after the other
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row // EACH * stride
    inverse = 1.0 / tl.load(temperature + row * temperature_stride)

    first = tl.load(start + row)
    last = tl.load(start + row + 1)
    if out is None:
        most, e_sum, ed_sum, e2_sum = _row_sums(
            logits, stride, bias, V, inverse, softcap, HAS_BIAS, HAS_SOFTCAP, ENTROPY, SUM_P2, BLOCK
        )
    else:
        reference = _base_of(logits, bias, target, first, last, V, inverse, HAS_BIAS, TARGETS)
        out += row * out_stride
        most, e_sum, ed_sum, e2_sum = _row_sums(
            logits, stride, bias, V, inverse, softcap, HAS_BIAS, HAS_SOFTCAP, ENTROPY, SUM_P2, BLOCK,
            out, out_stride, reference,
        )  # fmt: skip
        reference = _stored_again(
            logits, stride, bias, V, inverse, reference, most, e_sum, out, out_stride, HAS_BIAS, BLOCK
        )  # fmt: skip
        tl.store(base + row, reference)
    shift = tl.where(most == float("-inf"), 0.0, most)
    log_sum = tl.log(e_sum)
    rounded = shift + log_sum
    tl.store(logsumexp + row, rounded)
    tl.store(correction + row, (shift - rounded) + log_sum)
    if ENTROPY:
        tl.store(entropy + row, log_sum - ed_sum / e_sum)
    if SUM_P2:
        tl.store(sum_p2 + row, e2_sum / (e_sum * e_sum))

    for begin in range(first, last, TARGETS):
        place = begin + tl.arange(0, TARGETS)
        present = place < last
        y = tl.load(target + place, mask=present, other=0)
        in_vocabulary = present & (y >= 0) & (y < V)
        u = tl.load(logits + y, mask=in_vocabulary, other=float("nan"))
        z, _ = _scaled(u, bias, y, in_vocabulary, inverse, softcap, HAS_BIAS, HAS_SOFTCAP)
        tl.store(logprob + place, (z - shift) - log_sum, mask=present)


@triton.jit(do_not_specialize=["temperature_stride"], do_not_specialize_on_alignment=UNALIGNED)
def _gradient(
    logits,  # [C, V] fp32, bf16 or fp16
    stride,
    bias,  # [V]
    temperature,  # [C]
    temperature_stride,
    start,  # [C + 1]
    target,  # [M]
    logsumexp,  # [C]
    correction,  # [C]
    grad_logprob,  # [M]
    constant,  # [C]
    per_log,  # [C]
    per_p,  # [C]
    out,  # [C, V]; may be logits
    out_stride,
    V,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PER_LOG: tl.constexpr,
    PER_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    first = tl.load(start + row)
    last = tl.load(start + row + 1)
    c = tl.load(constant + row)
    onehot = tl.full((BLOCK,), 0.0, tl.float32)
    size = tl.abs(c)
    for place in range(first, last):
        a = tl.load(grad_logprob + place)
        onehot += tl.where(columns == tl.load(target + place), a, 0.0)
        c -= a
        size += tl.abs(a)
    b = 0.0
    q = 0.0
    if PER_LOG:
        b = tl.load(per_log + row)
        size += tl.abs(b)
    if PER_P:
        q = tl.load(per_p + row)
        size += tl.abs(q)

    inverse = 1.0 / tl.load(temperature + row * temperature_stride)
    u = tl.where(inside, tl.load(logits + row * stride + columns, mask=columns < stride, other=0.0), 0.0)
    z, slope = _scaled(u, bias, columns, inside, inverse, softcap, HAS_BIAS, HAS_SOFTCAP)
    logp = (z - tl.load(logsumexp + row)) - tl.load(correction + row)
    none = logp <= -100.0
    logp = tl.where(none, 0.0, logp)
    p = tl.where(none, 0.0, tl.exp(logp))
    g = (onehot + p * (c - b * logp + q * p)) * (slope * inverse)
    g = tl.where(size == 0.0, 0.0, g)
    tl.store(out + row * out_stride + columns, g.to(out.dtype.element_ty), mask=columns < out_stride)


def statistics(
    rows: RowInputs,
    logprob: Tensor,  # [M]
    logsumexp: Tensor,  # [C]
    correction: Tensor,  # [C]
    entropy: Tensor,  # [C] or [0]
    sum_p2: Tensor,  # [C] or [0]
) -> None:
    """Like `reference.statistics`; C may be a multiple of the rows of logits. Each is then scored several times, by
    programs that follow each other and find it in the cache."""
    _launch_statistics(rows, (logprob, logsumexp, correction, entropy, sum_p2), None, None)


def exponentials(
    rows: RowInputs,  # without softcap
    logprob: Tensor,  # [M]
    logsumexp: Tensor,  # [C]
    correction: Tensor,  # [C]
    entropy: Tensor,  # [C]
    base: Tensor,  # [C]
    out: Tensor,  # [C, V]
) -> None:
    """Like `reference.exponentials`; the other results are those of `statistics`, bit by bit."""
    _launch_statistics(rows, (logprob, logsumexp, correction, entropy, entropy[:0]), base, out)


def _launch_statistics(
    rows: RowInputs, results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], base: Tensor | None, out: Tensor | None
) -> None:
    logprob, logsumexp, correction, entropy, sum_p2 = results
    logits, bias, temperature, softcap, start, target = rows
    C, V = len(logsumexp), logits.shape[1]
    _statistics[(C,)](
        logits,
        _row_stride(logits),
        bias,
        temperature,
        temperature.stride(0),
        start,
        target,
        logprob,
        logsumexp,
        correction,
        entropy,
        sum_p2,
        base,
        out,
        0 if out is None else _row_stride(out),
        V,
        softcap,
        HAS_BIAS=len(bias) > 0,
        HAS_SOFTCAP=softcap != 0,
        ENTROPY=len(entropy) > 0,
        SUM_P2=len(sum_p2) > 0,
        TARGETS=16,
        EACH=C // max(len(logits), 1),
        **_launch(V),
    )


def gradient(
    rows: RowInputs,
    logsumexp: Tensor,  # [C]
    correction: Tensor,  # [C]
    grad_logprob: Tensor,  # [M]
    constant: Tensor,  # [C]
    per_log: Tensor,  # [C] or [0]
    per_p: Tensor,  # [C] or [0]
    out: Tensor,  # [C, V]
) -> None:
    """Like `reference.gradient`."""
    logits, bias, temperature, softcap, start, target = rows
    C, V = logits.shape
    launch = _launch(V)
    _gradient[(C, triton.cdiv(V, launch["BLOCK"]))](
        logits,
        _row_stride(logits),
        bias,
        temperature,
        temperature.stride(0),
        start,
        target,
        logsumexp,
        correction,
        grad_logprob,
        constant,
        per_log,
        per_p,
        out,
        _row_stride(out),
        V,
        softcap,
        HAS_BIAS=len(bias) > 0,
        HAS_SOFTCAP=softcap != 0,
        PER_LOG=len(per_log) > 0,
        PER_P=len(per_p) > 0,
        **launch,
    )


def _row_stride(tile: Tensor) -> int:
    """Return the stride of rows. A single row may be a part of another tensor, whose stride says nothing about it,
    unless it is that of a tile (`chunked.new_tile`): then the row is read to its end like each of several."""
    stride, V = tile.stride(0), tile.shape[1]
    room = tile.untyped_storage().nbytes() // tile.itemsize - tile.storage_offset()
    of_a_tile = stride == triton.cdiv(V, ROW_MULTIPLE) * ROW_MULTIPLE <= room
    return stride if len(tile) > 1 or of_a_tile else V


def _launch(V: int) -> dict[str, Any]:
    """Return block, warps and options as a function of V alone, so that a row's result does not depend on the batch."""
    block = min(MAX_BLOCK, triton.next_power_of_2(V))
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 512)), "enable_fp_fusion": False}
