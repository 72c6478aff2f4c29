"""`linear_logprob` over chunks of rows: no ``[N, V]`` tensor, one driver for every backend.

A chunk is one GEMM into a tile of fp32 logits, then a *row kernel* that reads the tile once:

* forward: log-sum-exp, entropy, sum of squared probabilities and the logits at the targets;
* backward: the GEMM again, then the gradient of the logits, written over them, then two GEMMs (2 + 6 f NHV FLOP in all,
  where f is the share of rows that have a gradient: a CPU leaves the others out; on a GPU that would take a wait).

All backends' row kernels have one signature (`RowKernels`), so the loop is tested where there is no GPU. Per chunk the
tile costs 4 C V bytes written by the GEMM and read once (twice and written once in the backward), and the fp32 weight
gradient is read and written once: chunks are as large as the byte budget allows.

A vocabulary no wider than the hidden state (toy models) makes the GEMM cheap to keep instead: then the forward returns
the logits, which take no more memory than ``hidden`` in fp32, and the backward does not recompute them.

Several targets of one row: targets are grouped by row (CSR), and the softmax part of the gradient is computed once per
row.

Precision: logits stay in fp32, the weight gradient is summed in fp32. fp32 cannot hold the log-sum-exp of large logits
to the accuracy that ``p = exp(z - lse)`` needs, so the forward keeps its rounding error (``correction``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .. import dispatch
from . import frozen
from .head import Head, HeadGradient
from .targets import Targets


class RowInputs(NamedTuple):
    """Logits of C rows, and the targets that are scored in them."""

    logits: Tensor  # [C, V] fp32 (or fp64; a caller's own also bf16, fp16), without bias
    bias: Tensor  # [V] or [0], in the accumulation dtype like temperature
    temperature: Tensor  # [C], any stride
    softcap: float  # 0: none
    start: Tensor  # [C + 1] int64: the targets of row i are start[i] .. start[i + 1]
    target: Tensor  # [M] int64; only those of these rows are read


class Tiled(Protocol):
    """Kernels of a backend that read tiles of logits."""

    @property
    def ROW_MULTIPLE(self) -> int: ...  # noqa: N802  # elements; see `new_tiles`


class RowKernels(Tiled, Protocol):
    """Kernels of a backend that read a tile of logits once. Absent inputs and outputs are empty tensors.

    ``reference`` defines ``statistics(rows, logprob, logsumexp, correction, entropy, sum_p2)``, which fills the tensors
    after ``rows``, and ``gradient(rows, logsumexp, correction, grad_logprob, constant, per_log, per_p, out)``, which
    fills ``out``.
    """

    @property
    def statistics(self) -> Callable[..., None]: ...
    @property
    def gradient(self) -> Callable[..., None]: ...


@dataclass(frozen=True)
class CompiledRowKernels:
    """Row kernels of csrc/cpu/linear_logprob.cpp, or for half-precision logits of csrc/cuda/linear_logprob.cu."""

    statistics: Callable[..., None]
    gradient: Callable[..., None]
    ROW_MULTIPLE: int = 1  # rows of a tile lie end to end


COMPILED = {
    library: CompiledRowKernels(
        dispatch.compiled_op(library, "logit_statistics"), dispatch.compiled_op(library, "logit_gradient")
    )
    for library in ("cpu", "cuda")
}


def forward(
    rows: RowKernels,
    hidden: Tensor,  # [N, H]
    head: Head,
    targets: Targets,
    temperature: Tensor,  # [N], in the accumulation dtype
    softcap: float,
    want_entropy: bool,
    want_sum_p2: bool,
    frozen_head: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Like `reference.forward`."""
    N, V, accumulator = len(hidden), len(head.weight), temperature.dtype
    logprob = hidden.new_empty(len(targets.target), dtype=accumulator)
    logsumexp = hidden.new_empty(N, dtype=accumulator)
    correction = torch.empty_like(logsumexp)
    entropy = hidden.new_empty(N if want_entropy else 0, dtype=accumulator)
    sum_p2 = hidden.new_empty(N if want_sum_p2 else 0, dtype=accumulator)
    kept = hidden.new_empty((0, V) if frozen_head else kept_shape(hidden, head.weight), dtype=accumulator)
    C = chunk_rows(N, V, hidden.device)
    tile, d_tile = new_tiles(rows, head, 0 if len(kept) else C)
    if frozen_head:
        direction = torch.empty_like(hidden)
        towards, constant = frozen.direction_coefficients(targets, logprob)
        none = logprob[:0]
    for c in chunks(N, C):
        logits = head.logits(hidden[c], kept[c] if len(kept) else tile[: c.stop - c.start])
        start = targets.start[c.start : c.stop + 1]
        inputs = RowInputs(logits, head.bias, temperature[c], softcap, start, targets.target)
        rows.statistics(inputs, logprob, logsumexp[c], correction[c], entropy[c], sum_p2[c])
        if frozen_head:
            d_logits = d_tile[: c.stop - c.start]
            rows.gradient(inputs, logsumexp[c], correction[c], towards, constant[c], none, none, d_logits)
            head.to_hidden(d_logits, direction[c])
    return logprob, logsumexp, correction, entropy, sum_p2, direction if frozen_head else kept


def backward(
    rows: RowKernels,
    hidden: Tensor,  # [N, H]
    head: Head,
    targets: Targets,
    temperature: Tensor,  # [N], in the accumulation dtype
    softcap: float,
    logsumexp: Tensor,  # [N]
    correction: Tensor,  # [N]
    entropy: Tensor,  # [N] or [0]
    sum_p2: Tensor,  # [N] or [0]
    kept: Tensor,  # [N, V] logits from the forward, or [0, 0]
    grad_logprob: Tensor,  # [M], in row order
    grad_logsumexp: Tensor,  # [N]
    grad_entropy: Tensor,  # [N] or [0]
    grad_sum_p2: Tensor,  # [N] or [0]
    need_hidden: bool,
    need: HeadGradient,
    dtype: torch.dtype | None = None,  # of hidden's gradient; None: that of hidden
) -> Tensor:
    """Return the gradient of hidden ``[N, H]``, or ``[0]``; those of the head are added to ``need``."""
    N, V = len(hidden), len(head.weight)
    constant, per_log, per_p = coefficients(entropy, sum_p2, grad_logsumexp, grad_entropy, grad_sum_p2)
    d_hidden = hidden.new_zeros(hidden.shape if need_hidden else 0, dtype=dtype or hidden.dtype)

    on_cpu = hidden.device.type == "cpu"  # any other device would have to be waited for
    alive = rows_with_gradient(targets, grad_logprob, constant, per_log, per_p) if on_cpu else None
    of_alive = d_hidden
    if alive is not None:
        targets, place = targets.of_rows(alive)
        grad_logprob = grad_logprob[place]
        temperature, logsumexp, correction, constant, hidden = (
            t[alive] for t in (temperature, logsumexp, correction, constant, hidden)
        )
        per_log, per_p, kept = (t[alive] if len(t) else t for t in (per_log, per_p, kept))
        of_alive, N = torch.empty_like(hidden, dtype=d_hidden.dtype), len(alive)

    C = chunk_rows(N, V, hidden.device)
    tile, d_tile = new_tiles(rows, head, C)
    for c in chunks(N, C):
        n = c.stop - c.start
        d_logits, start = d_tile[:n], targets.start[c.start : c.stop + 1]
        logits = kept[c] if len(kept) else head.logits(hidden[c], tile[:n])
        inputs = RowInputs(logits, head.bias, temperature[c], softcap, start, targets.target)
        coefficient = constant[c], per_log[c], per_p[c]
        rows.gradient(inputs, logsumexp[c], correction[c], grad_logprob, *coefficient, d_logits)
        if need_hidden:
            head.to_hidden(d_logits, of_alive[c])
        need.add(d_logits, hidden[c])
    if need_hidden and alive is not None:
        d_hidden.index_copy_(0, alive, of_alive)
    return d_hidden


def new_tiles(rows: Tiled, head: Head, C: int) -> tuple[Tensor, Tensor]:
    """Return tiles ``[C, V]`` for logits, in the accumulation dtype, and for their gradient, in the operands'.

    They are one tensor where the dtypes are the same. Rows begin at multiples of ``rows.ROW_MULTIPLE`` elements, so an
    odd V has strides that row kernels and GEMMs prefer.
    """
    V = len(head.weight)
    tile = new_tile(rows, head.bias, C, V)
    return tile, tile if head.dtype == head.accumulator else new_tile(rows, head.bias, C, V, head.dtype)


def new_tile(rows: Tiled, like: Tensor, C: int, V: int, dtype: torch.dtype | None = None) -> Tensor:  # [C, V]
    """Return a tile whose rows begin at multiples of ``rows.ROW_MULTIPLE`` elements, of the device of ``like``."""
    stride = -(-V // rows.ROW_MULTIPLE) * rows.ROW_MULTIPLE
    return like.new_empty((C, stride), dtype=dtype)[:, :V]


def rows_with_gradient(
    targets: Targets,
    grad_logprob: Tensor,  # [M], in row order
    constant: Tensor,  # [N]
    per_log: Tensor,  # [N] or [0]
    per_p: Tensor,  # [N] or [0]
) -> Tensor | None:
    """Return rows ``[K] int64`` with a gradient that is not zero; None if leaving out the others would not pay.

    Waits for the device.
    """
    alive = constant != 0
    for t in (per_log, per_p):
        alive = alive | (t != 0) if len(t) else alive
    if targets.one_a_row:
        alive = alive | (grad_logprob != 0)
    else:
        before = torch.cat([alive.new_zeros(1, dtype=torch.int64), (grad_logprob != 0).cumsum(0)])
        alive = alive | (before[targets.start[1:]] > before[targets.start[:-1]])
    rows = alive.nonzero().flatten()
    return rows if len(rows) < WORTH_SELECTING * len(alive) else None


WORTH_SELECTING = 0.95
"""Below this share of rows, leaving the others out saves more time than gathering costs."""


def coefficients(
    entropy: Tensor,  # [N] or [0], like all but grad_logsumexp
    sum_p2: Tensor,
    grad_logsumexp: Tensor,  # [N]
    grad_entropy: Tensor,
    grad_sum_p2: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``c, b, q`` of the softmax part ``p (c - b log p + q p)`` of the gradient.

    From dlse = p, dH = -p (log p + H) and dsum_p2 = 2 p (p - sum_p2). Where a gradient is zero, NaN in a row does not
    reach the result.
    """
    constant = grad_logsumexp
    if len(grad_entropy):
        constant = constant - torch.where(grad_entropy == 0, 0, grad_entropy * entropy)
    if len(grad_sum_p2):
        constant = constant - torch.where(grad_sum_p2 == 0, 0, 2 * grad_sum_p2 * sum_p2)
    return constant, grad_entropy, 2 * grad_sum_p2


def kept_shape(hidden: Tensor, weight: Tensor) -> tuple[int, int]:
    """Return the shape of the logits that the forward keeps for the backward; (0, 0): none."""
    return (hidden.shape[0], weight.shape[0]) if weight.shape[0] <= weight.shape[1] else (0, 0)


def chunk_rows(N: int, V: int, device: torch.device, tiles: int = 1) -> int:
    """Return the rows of a chunk: as many as the byte budget of its ``tiles`` allows, near-equal over the chunks.

    The weight gradient moves 8 V H bytes per chunk of C rows against 2 C V H FLOP, so C / 4 FLOP a byte: a GPU needs
    2048 rows to hide that, a CPU 256 and preferably 1024. On a CPU a tile that stays in the cache is better than a
    larger one. Multiples of 128 rows suit GEMMs.
    """
    on_gpu = max(2048, 2**28 // V)  # 1 GiB
    on_cpu = max(256, min(2**25 // V, max(1024, 2**18 // V)))  # 1 MiB where that is 1024 rows, at most 128 MiB
    on_cpu = on_cpu // tiles
    most = on_gpu if device.type == "cuda" else on_cpu
    count = max(1, -(-N // most))
    size = -(-N // count)
    return size if count == 1 else -(-size // 128) * 128


def chunks(N: int, size: int) -> list[slice]:
    """Return the slices of N rows in chunks of ``size``."""
    return [slice(i, min(i + size, N)) for i in range(0, N, max(size, 1))]
