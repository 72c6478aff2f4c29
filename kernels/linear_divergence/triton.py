"""Row kernels of the Triton backend; `reference` and `kinds` define them.

``_totals``: one program a row of both tiles, read twice, blockwise: for the maxima and sums of weights of either model
(`linear_logprob.triton._row_sums`), then for the summands of the divergence and its slopes. Reads 16 V bytes a row.

``_gradient``: one program a row and block of columns, elementwise given the log-sum-exps and the sum of slopes. Reads
8 V bytes a row and writes 4 V, or 2 V in half precision.

Nothing is contracted, for the reason that `linear_logprob.triton` gives. NaN and +inf make their own row NaN; -inf is a
logit of probability zero, and a summand whose probability is zero is zero.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..linear_logprob.triton import ROW_MULTIPLE, _launch, _row_stride, _row_sums, _scaled
from .chunked import RowLogits

__all__ = ["ROW_MULTIPLE", "divergence"]

FORWARD_KL: tl.constexpr = tl.constexpr(0)
REVERSE_KL: tl.constexpr = tl.constexpr(1)
JSD: tl.constexpr = tl.constexpr(2)
SKEW_FORWARD_KL: tl.constexpr = tl.constexpr(3)
TOTAL_VARIATION: tl.constexpr = tl.constexpr(5)

UNALIGNED = (
    "temperature", "teacher_temperature", "factor", "divergence", "entropy", "teacher_entropy", "student_shift",
    "student_log", "teacher_shift", "teacher_log", "slope_sum",
)  # fmt: skip
"""Arguments with one number a row: a chunk of rows begins anywhere, and one kernel has to serve all alignments."""


@triton.jit
def _times(probability, logarithm):
    return tl.where(probability == 0.0, 0.0, probability * logarithm)


@triton.jit
def _weight(d):
    """Return exp(d), 0 below -100; NaN stays NaN."""
    none = d <= -100.0
    return tl.where(none, 0.0, tl.exp(tl.where(none, 0.0, d)))


@triton.jit
def _of_kl(a, b, log_ratio):
    """Return b - a + a log (a / b), a summand of KL(a || b) that is not negative: differences of a and b add up to 0.

    Without them summands of almost equal distributions, which are of the size of log (a / b), would cancel to the size
    of its square. There it is a times e^x - 1 - x, x = log (b / a), by a series whose terms do not cancel.
    """
    near = tl.abs(log_ratio) < 1.0
    x = tl.where(near, -log_ratio, 0.0)
    terms = 1.0 + x * (1.0 / 11)
    for k in tl.static_range(8):
        terms = 1.0 + terms * x * (1.0 / (10 - k))
    return tl.where(near, a * (terms * x * x * 0.5), (b - a) + _times(a, log_ratio))


@triton.jit
def _summand(log_p, log_q, share, KIND: tl.constexpr):
    """Return the summand of the divergence, the slope q dphi/dq without its constant, and q."""
    p = _weight(log_p)
    q = _weight(log_q)
    gap = log_q - log_p
    phi = q
    slope = q
    if KIND == FORWARD_KL:
        phi = _of_kl(p, q, -gap)
        slope = -p
    elif KIND == REVERSE_KL:
        phi = _of_kl(q, p, gap)
        slope = _times(q, gap)
    elif KIND == TOTAL_VARIATION:
        d = q - p
        phi = 0.5 * tl.abs(d)
        slope = tl.where(d > 0.0, 0.5 * q, tl.where(d < 0.0, -0.5 * q, d))
    else:
        # log m over the larger of the two, whose share of m is at least the smaller share
        more = gap > 0.0
        size = tl.where(more, gap, -gap)
        part = tl.where(more, 1.0 - share, share)
        over = part + (1.0 - part) * _weight(-size)
        log_m = tl.log(tl.where(over < 1e-37, 1e-37, over))
        p_of_m = tl.where(more, -size - log_m, -log_m)  # log (p / m)
        q_of_m = tl.where(more, -log_m, -size - log_m)
        m = share * p + (1.0 - share) * q
        over_m = tl.where(q == 0.0, 0.0, q / tl.where(m == 0.0, 1.0, m))
        if KIND == JSD:
            phi = share * _of_kl(p, m, p_of_m) + (1.0 - share) * _of_kl(q, m, q_of_m)
            slope = (1.0 - share) * _times(q, q_of_m)
        elif KIND == SKEW_FORWARD_KL:
            phi = _of_kl(p, m, p_of_m)
            slope = -(1.0 - share) * p * over_m
        else:
            phi = _of_kl(q, m, q_of_m)
            slope = _times(q, q_of_m) - (1.0 - share) * q * over_m
    return phi, slope, q


@triton.jit
def _block(logits, stride, bias, columns, V, inverse, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Return z of a block of a row, -inf beyond the vocabulary, and dz/du without the factor 1 / temperature."""
    inside = columns < V
    u = tl.where(inside, tl.load(logits + columns, mask=columns < stride, other=0.0), 0.0)
    z, slope = _scaled(u, bias, columns, inside, inverse, softcap, HAS_BIAS, HAS_SOFTCAP)
    return tl.where(inside, z, float("-inf")), slope


@triton.jit(
    do_not_specialize=["temperature_stride", "teacher_temperature_stride"], do_not_specialize_on_alignment=UNALIGNED
)
def _totals(
    logits,  # [C, V] fp32
    stride,  # of a row, V or more; the elements between belong to the tile
    bias,  # [V]
    temperature,  # [C]
    temperature_stride,
    softcap,
    teacher_logits,  # [C, V] fp32
    teacher_stride,
    teacher_bias,  # [V]
    teacher_temperature,  # [C]
    teacher_temperature_stride,
    teacher_softcap,
    divergence,  # [C], out, like all that follow
    entropy,  # [C]
    teacher_entropy,  # [C]
    student_shift,  # [C]: the largest z
    student_log,  # [C]: log of the sum of exp(z - the largest)
    teacher_shift,  # [C]
    teacher_log,  # [C]
    slope_sum,  # [C]
    V,
    share,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEACHER_BIAS: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    teacher_logits += row * teacher_stride
    inverse = 1.0 / tl.load(temperature + row * temperature_stride)
    of_teacher = 1.0 / tl.load(teacher_temperature + row * teacher_temperature_stride)

    most, e_sum, ed_sum, _squares = _row_sums(
        logits, stride, bias, V, inverse, softcap, HAS_BIAS, HAS_SOFTCAP, True, False, BLOCK
    )
    q_shift = tl.where(most == float("-inf"), 0.0, most)
    q_log = tl.log(e_sum)
    tl.store(entropy + row, q_log - ed_sum / e_sum)
    most, e_sum, ed_sum, _squares = _row_sums(
        teacher_logits, teacher_stride, teacher_bias, V, of_teacher, teacher_softcap, TEACHER_BIAS, TEACHER_SOFTCAP,
        True, False, BLOCK,
    )  # fmt: skip
    p_shift = tl.where(most == float("-inf"), 0.0, most)
    p_log = tl.log(e_sum)
    tl.store(teacher_entropy + row, p_log - ed_sum / e_sum)

    phi_sum = tl.full((), 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for begin in range(0, V, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        z, _z_slope = _block(logits, stride, bias, columns, V, inverse, softcap, HAS_BIAS, HAS_SOFTCAP)
        z_p, _z_p_slope = _block(
            teacher_logits, teacher_stride, teacher_bias, columns, V, of_teacher, teacher_softcap, TEACHER_BIAS,
            TEACHER_SOFTCAP,
        )  # fmt: skip
        phi, slope, _q = _summand((z_p - p_shift) - p_log, (z - q_shift) - q_log, share, KIND)
        inside = columns < V
        phi_sum += tl.sum(tl.where(inside, phi, 0.0), 0)
        total += tl.sum(tl.where(inside, slope, 0.0), 0)
    tl.store(divergence + row, phi_sum)
    tl.store(slope_sum + row, total)
    tl.store(student_shift + row, q_shift)
    tl.store(student_log + row, q_log)
    tl.store(teacher_shift + row, p_shift)
    tl.store(teacher_log + row, p_log)


@triton.jit(
    do_not_specialize=["temperature_stride", "teacher_temperature_stride"], do_not_specialize_on_alignment=UNALIGNED
)
def _gradient(
    logits,  # [C, V] fp32
    stride,
    bias,  # [V]
    temperature,  # [C]
    temperature_stride,
    softcap,
    teacher_logits,  # [C, V] fp32
    teacher_stride,
    teacher_bias,  # [V]
    teacher_temperature,  # [C]
    teacher_temperature_stride,
    teacher_softcap,
    factor,  # [C]
    student_shift,  # [C]; see `_totals`
    student_log,  # [C]
    teacher_shift,  # [C]
    teacher_log,  # [C]
    slope_sum,  # [C]
    out,  # [C, V]; may be logits
    out_stride,
    V,
    share,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEACHER_BIAS: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inverse = 1.0 / tl.load(temperature + row * temperature_stride)
    of_teacher = 1.0 / tl.load(teacher_temperature + row * teacher_temperature_stride)
    z, dz = _block(logits + row * stride, stride, bias, columns, V, inverse, softcap, HAS_BIAS, HAS_SOFTCAP)
    z_p, _ = _block(
        teacher_logits + row * teacher_stride, teacher_stride, teacher_bias, columns, V, of_teacher, teacher_softcap,
        TEACHER_BIAS, TEACHER_SOFTCAP,
    )  # fmt: skip
    log_q = (z - tl.load(student_shift + row)) - tl.load(student_log + row)
    log_p = (z_p - tl.load(teacher_shift + row)) - tl.load(teacher_log + row)
    _, slope, q = _summand(log_p, log_q, share, KIND)
    g = (slope - q * tl.load(slope_sum + row)) * (tl.load(factor + row) * inverse) * dz
    tl.store(out + row * out_stride + columns, g.to(out.dtype.element_ty), mask=columns < out_stride)


def _launch_gradient(V: int) -> dict[str, Any]:
    """Return the launch of `_gradient`: half the columns of the row kernels, as two heads with caps spill with all."""
    launch = _launch(V)
    return launch | {"BLOCK": max(1, launch["BLOCK"] // 2)}


def divergence(
    student: RowLogits,
    teacher: RowLogits,
    kind: int,
    share: float,
    factor: Tensor,  # [C]
    divergence: Tensor,  # [C]
    entropy: Tensor,  # [C]
    teacher_entropy: Tensor,  # [C]
    out: Tensor,  # [C, V], or [0, V]
) -> None:
    """Like `reference.divergence`."""
    C, V = student.logits.shape
    both = [
        argument
        for logits, bias, temperature, softcap in (student, teacher)
        for argument in (logits, _row_stride(logits), bias, temperature, temperature.stride(0), softcap)
    ]
    constants = {
        "KIND": kind,
        "HAS_BIAS": len(student.bias) > 0,
        "HAS_SOFTCAP": student.softcap != 0,
        "TEACHER_BIAS": len(teacher.bias) > 0,
        "TEACHER_SOFTCAP": teacher.softcap != 0,
        **_launch(V),
    }
    of_rows = factor.new_empty(5, C).unbind()
    _totals[(C,)](*both, divergence, entropy, teacher_entropy, *of_rows, V, share, **constants)
    if len(out):
        constants |= _launch_gradient(V)
        grid = (C, triton.cdiv(V, constants["BLOCK"]))
        _gradient[grid](*both, factor, *of_rows, out, _row_stride(out), V, share, **constants)
