"""``x weight^T + bias`` with the same bits for a row whatever the other rows are, and its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch
from ..checks import Arguments
from ..linear_logprob.head import few_rows
from .cancelling import cancelling

DTYPES = (torch.float32, torch.bfloat16)
Product = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def linear(
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
) -> Tensor:  # [..., N]
    """Compute ``x weight^T + bias``, each row with the same bits whatever the number of rows.

    On a CPU csrc/cpu/products/few_rows.cpp multiplies up to `few_rows` rows. More rows are the library's where its
    product of this width and depth was found to have the same bits (`library_agrees`), and its own elsewhere. On a
    GPU kernels of Triton multiply any number of rows, in tiles whose bits were compared (`triton.agreeing`). Gradients
    are products of the library, whose bits may depend on the number of rows.

    Args:
        x: [..., K] float32 or bfloat16; copied where it is not contiguous.
        weight: [N, K], of the same dtype; copied where it is not contiguous.
        bias: [N], of the same dtype.

    Raises:
        ValueError, TypeError: a shape, dtype or device that does not fit.
        BackendError: the C++ kernels are not built, Triton is not installed, or a backend is named that this op lacks.
    """
    check = Arguments("linear", "x", x)
    check.floats("x", x, dtypes=DTYPES)
    check.require(x.dim() > 0, "x must be [..., K], got a number")
    check.floats("weight", weight, ("N", x.shape[-1]), " like x", (x.dtype,))
    if bias is not None:
        check.floats("bias", bias, (len(weight),), " like weight", (x.dtype,))
    product = dispatch.choose("linear", PRODUCTS, x.device)
    if not torch.is_grad_enabled():  # autograd's part takes the host as long as a small product
        return _by_rows(x, weight, bias, product)
    out: Tensor = _Linear.apply(x, weight, bias, product)
    return out


def _by_rows(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    rows, added = x.reshape(-1, x.shape[-1]).contiguous(), None if bias is None else bias.contiguous()
    return product(rows, weight.contiguous(), added).view(*x.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _by_rows(x, weight, bias, product)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = dys[0].reshape(-1, len(weight))
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dx = (dy @ weight).view(x.shape) if need_x else None
        dweight = dy.T @ x.reshape(-1, x.shape[-1]) if need_weight else None
        return dx, dweight, dy.sum(0) if need_bias else None, None


def _on_a_cpu(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # [M, K], [N, K], [N] -> [M, N]
    if len(rows) > few_rows() and library_agrees(len(weight), weight.shape[1], weight.dtype, bias is not None):
        return F.linear(rows, weight, bias)
    return _own(rows, weight, bias)


def _own(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = rows.new_empty(len(rows), len(weight))
    if out.numel():
        torch.ops.rolltree_cpu.linear(rows, weight, bias, out)
    return out


PRODUCTS: dict[str, Product] = {"cpu": _on_a_cpu, "triton": dispatch.imported(__package__, "triton", "linear")}
"""Backends, for contiguous operands: [M, K], [N, K], [N] -> [M, N]."""


def compare_tiles(weight: Tensor) -> None:
    """Compare the tiles of products with a weight ``[N, K]`` on its GPU, before a step is captured as a CUDA graph."""
    from .tiles import order_of
    from .triton import agreeing

    width, depth = weight.shape
    agreeing(order_of(width, depth, weight.dtype), depth, weight.dtype, weight.device)


def library_agrees(width: int, depth: int, dtype: torch.dtype, biased: bool) -> bool:
    """Return whether torch's products of more than `few_rows` rows with a weight ``[width, depth]`` have the bits of
    csrc/cpu/products/few_rows.cpp, as two products of random numbers have shown; their first use costs these."""
    return _agrees(width, depth, dtype, biased, torch.get_num_threads())


@functools.cache
def _agrees(width: int, depth: int, dtype: torch.dtype, biased: bool, threads: int) -> bool:
    most = few_rows()
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        rows, weight, added = cancelling(3 * most + 5, width, depth, dtype, torch.device("cpu"))
        bias = added if biased else None
        invariant = _own(rows, weight, bias)
        return all(torch.equal(F.linear(rows[:n], weight, bias), invariant[:n]) for n in (most + 1, len(rows)))
