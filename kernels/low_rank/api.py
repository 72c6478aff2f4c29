"""Public entry of the low-rank products of rows with different adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .. import dispatch
from ..checks import Arguments
from . import reference
from .adapters import DTYPES, Adapters
from .runs import Runs


def _cpu(out: Tensor, x: Tensor, adapters: Adapters, runs: Runs) -> None:
    """Like `reference.add_low_rank` in csrc/cpu/products/low_rank.cpp."""
    if x.dtype == torch.float16:
        return reference.add_low_rank(out, x, adapters, runs)
    torch.ops.rolltree_cpu.add_low_rank(out, x, adapters.matrices, adapters.scales, runs.numbers)
    return None


_BACKENDS: Mapping[str, Callable[..., None]] = {
    "triton": dispatch.imported(__package__, "triton", "add_low_rank"),
    "cpu": _cpu,
    "reference": reference.add_low_rank,
}


def add_low_rank_(
    out: Tensor,  # [N, M]
    x: Tensor,  # [N, K]
    adapters: Adapters,
    runs: Runs,
) -> None:
    """Add ``scale (x a^T) b^T`` of each row's adapter to the row of ``out``, in place.

    Rows without an adapter, or whose adapter has no part in the product, do not change. Sums are fp32; results are
    rounded to the dtype after each of the two products, after the scale and after the sum, as peft's modules round. A
    row's result does not depend on the other rows or on their order, except on the reference. It has no gradient. (Hu
    et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1; rows of many adapters: Chen et al. 2023,
    https://arxiv.org/abs/2310.18547)

    Args:
        out: [N, M] float32, bfloat16 or float16 (float64 runs on the reference), contiguous: products with the base's
            weight.
        x: [N, K], of the same dtype, contiguous.
        adapters: of this product.
        runs: the rows of each.

    Raises:
        ValueError, TypeError: a shape, dtype or device that does not fit, rows that are not contiguous, or a run
            outside of the rows or of the adapters.
    """
    check = Arguments("add_low_rank_", "out", out)
    if not isinstance(adapters, Adapters):
        check.wrong_type("adapters", "Adapters", adapters)
    if not isinstance(runs, Runs):
        check.wrong_type("runs", "Runs", runs)
    width, depth = adapters.shape
    check.floats("out", out, ("N", width), " like adapters", DTYPES)
    check.floats("x", x, (len(out), depth), " like out and adapters", (out.dtype,))
    check.require(adapters.dtype == out.dtype, f"adapters are {adapters.dtype} and rows {out.dtype}")
    check.require(adapters.device == out.device, f"adapters are on {adapters.device} and rows on {out.device}")
    check.require(out.is_contiguous() and x.is_contiguous(), "out and x must be contiguous")
    check.require(runs.rows == len(out), lambda: f"runs are of {runs.rows} rows, and there are {len(out)}")
    last = 0
    for begin, end, number in runs:
        fits = last <= begin <= end <= runs.rows and 0 <= number < len(adapters.of)
        check.require(fits, f"the run of rows {begin} to {end} of adapter {number} is not in order or not there")
        last = end
    if adapters.most_rank and runs.numbers:
        run = _BACKENDS["reference"] if out.dtype == torch.float64 else None
        (run or dispatch.choose("add_low_rank_", _BACKENDS, out.device))(out, x, adapters, runs)
