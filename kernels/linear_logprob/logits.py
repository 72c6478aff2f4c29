"""`logprob_from_logits`: log-probabilities for trainers that have the logits already.

The row kernels of `linear_logprob` on the caller's ``[N, V]`` instead of a tile: one read forward; backward one read
and one write. Nothing of that size is allocated but the gradient, and with ``inplace_backward`` not even that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..checks import Arguments, check_first_derivative
from . import chunked
from .api import OUTPUTS, LogprobOutput, check_targets, contiguous_targets, of_rows
from .op import BACKENDS, backend_of, check_values, row_kernels
from .targets import group_by_row


def logprob_from_logits(
    logits: Tensor,  # [N, V]
    target: Tensor,  # [M] int
    *,
    row: Tensor | None = None,  # [M] int
    temperature: float | Tensor = 1.0,  # or [N]
    softcap: float | None = None,
    want: Sequence[str] = (),
    inplace_backward: bool = False,
) -> LogprobOutput:
    """Score tokens under ``softmax(softcap(logits) / temperature)``, computed in fp32 (fp64 for fp64 logits).

    Gradients flow from every output to the logits, in their dtype.

    Args:
        logits: ``[N, V]`` bf16, fp16, fp32 or fp64, contiguous.
        target: ``[M]`` vocabulary ids. On a CPU out-of-range ids raise; on a GPU their log-prob is NaN.
        row: ``[M]``, row of each target; default ``arange(N)``, then M = N.
        temperature, softcap, want: as in `linear_logprob`.
        inplace_backward: write the gradient over the logits, which saves ``[N, V]``. The logits hold their gradient
            from then on: a second backward raises, and so does any other whose graph saved them.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message names which.
        IndexError: a target or row is out of range (CPU only; on a GPU a wrong row stops the program).
        RuntimeError: in backward, the logits were overwritten since: by an earlier in-place backward or by the caller.
    """
    Arguments("logprob_from_logits", "logits", logits).names("want", want, OUTPUTS)
    _check_arguments(logits, target, row, temperature, softcap, inplace_backward)
    accumulator = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprob, logsumexp, _, entropy, sum_p2 = _logprob_from_logits(
        logits,
        *contiguous_targets(target, row),
        of_rows(temperature, accumulator, logits),
        softcap or 0.0,
        "entropy" in want,
        "sum_p2" in want,
        inplace_backward,
    )
    return LogprobOutput(
        logprob, logsumexp, entropy if "entropy" in want else None, sum_p2 if "sum_p2" in want else None, None
    )


def score_rows(
    logits: Tensor,  # [N, V] float32
    target: Tensor,  # [N] int64
    temperature: Tensor,  # [N] or [N, S] float32
) -> Tensor:  # like temperature
    """Return the log-prob of one target a row, NaN for -1, with the bits that `linear_logprob` has of the same logits.

    With S temperatures a row Triton's kernels read the logits from memory once. Nothing is checked, and no gradient is
    recorded; neither does it wait for the device.
    """
    N, V = logits.shape
    rows = row_kernels(backend_of("linear_logprob", logits))
    if V % rows.ROW_MULTIPLE:
        logits = chunked.new_tile(rows, logits, N, V).copy_(logits)
    if temperature.dim() == 2 and not getattr(rows, "SHARES_ROWS", False):
        return torch.stack([score_rows(logits, target, column) for column in temperature.unbind(1)], 1)
    new, count = temperature.new_empty, temperature.numel()
    start, logprob = torch.arange(count + 1, device=logits.device), new(temperature.shape)
    target = target if count == N else target.repeat_interleave(count // N, output_size=count)
    inputs = chunked.RowInputs(logits, new(0), temperature.reshape(-1), 0.0, start, target)
    rows.statistics(inputs, logprob.view(-1), new(count), new(count), new(0), new(0))
    return logprob


def _row_kernels(logits: Tensor) -> chunked.RowKernels:
    """Return the row kernels of the op: CUDA C++ for half-precision logits on a GPU, where they are built.

    There bench/results/h200/logprob_from_logits.jsonl (8,192 x 151,936 bf16 on an H200) has 0.911 ms forward and 2.41
    with backward, and Triton 1.003 and 2.82. Logits in fp32 stay with Triton: no row says which is faster.
    """
    half = logits.dtype in (torch.bfloat16, torch.float16)
    unfit = {} if half else {"cuda": f"its kernels take bfloat16 and float16, and the logits are {logits.dtype}"}
    return row_kernels(backend_of("logprob_from_logits", logits, ("cuda", *BACKENDS), unfit))


def _check_arguments(
    logits: Tensor,
    target: Tensor,
    row: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    inplace_backward: bool,
) -> None:
    check = Arguments("logprob_from_logits", "logits", logits)
    check.floats("logits", logits, ("N", "V"))
    check.require(logits.shape[1] > 0, lambda: f"logits must be [N, V] with V > 0, got {list(logits.shape)}")
    check.require(
        logits.is_contiguous(),
        lambda: f"logits must be contiguous, got strides {logits.stride()}; call .contiguous() on them",
    )
    check_targets(check, target, row, len(logits))
    check.scale_of_rows("temperature", temperature, len(logits))
    check.softcap(softcap)
    if inplace_backward:
        check.require(
            not (logits.is_leaf and logits.requires_grad),
            "inplace_backward would overwrite logits that are a leaf of the graph; leave it out",
        )
        check.require(
            not torch.compiler.is_compiling(), "inplace_backward does not go through torch.compile; leave it out there"
        )


@torch.library.custom_op("rolltree::logprob_from_logits", mutates_args=())
def _logprob_from_logits(
    logits: Tensor,  # [N, V]
    target: Tensor,  # [M] int64
    row: Tensor | None,  # [M] int64
    temperature: Tensor,  # [N], in the accumulation dtype
    softcap: float,  # 0: none
    want_entropy: bool,
    want_sum_p2: bool,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(logprob [M], logsumexp [N], correction [N], entropy [N], sum_p2 [N])``; empty where not wanted."""
    N, V = logits.shape
    check_values("logprob_from_logits", logits, target, row, temperature, V)
    new = temperature.new_empty
    targets = group_by_row(target, row, N)
    logprob = new(len(target))
    of_rows = [new(N), new(N), new(N if want_entropy else 0), new(N if want_sum_p2 else 0)]
    inputs = chunked.RowInputs(logits, new(0), temperature, softcap, targets.start, targets.target)
    _row_kernels(logits).statistics(inputs, logprob, *of_rows)
    if targets.order is not None:
        logprob = torch.empty_like(logprob).index_copy_(0, targets.order, logprob)
    logsumexp, correction, entropy, sum_p2 = of_rows
    return logprob, logsumexp, correction, entropy, sum_p2


@_logprob_from_logits.register_fake
def _(
    logits: Tensor, target: Tensor, row: Tensor | None, temperature: Tensor, softcap: float, *want: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    want_entropy, want_sum_p2, _ = want
    N, new = logits.shape[0], temperature.new_empty
    return new(target.shape[0]), new(N), new(N), new(N if want_entropy else 0), new(N if want_sum_p2 else 0)


def _gradient(
    logits: Tensor,  # [N, V]
    target: Tensor,  # [M] int64
    row: Tensor | None,  # [M] int64
    temperature: Tensor,  # [N]
    softcap: float,
    logsumexp: Tensor,  # [N]
    correction: Tensor,  # [N]
    entropy: Tensor,  # [N] or [0]
    sum_p2: Tensor,  # [N] or [0]
    grad_logprob: Tensor,  # [M]
    grad_logsumexp: Tensor,  # [N]
    grad_entropy: Tensor,  # [N] or [0]
    grad_sum_p2: Tensor,  # [N] or [0]
) -> Tensor:
    """Return the gradient of the logits ``[N, V]``."""
    out = torch.empty_like(logits)
    grads = grad_logprob, grad_logsumexp, grad_entropy, grad_sum_p2
    _fill_gradient(out, logits, target, row, temperature, softcap, (logsumexp, correction, entropy, sum_p2), grads)
    return out


def _gradient_in_place(*arguments: Any) -> None:
    logits, target, row, temperature, softcap, *rest = arguments
    _fill_gradient(logits, logits, target, row, temperature, softcap, rest[:4], rest[4:])


def _fill_gradient(
    out: Tensor,  # [N, V], out; may be logits
    logits: Tensor,  # [N, V]
    target: Tensor,  # [M] int64
    row: Tensor | None,  # [M] int64
    temperature: Tensor,  # [N]
    softcap: float,
    statistics: Sequence[Tensor],  # logsumexp, correction, entropy, sum_p2
    grads: Sequence[Tensor],  # of logprob, logsumexp, entropy, sum_p2
) -> None:
    logsumexp, correction, entropy, sum_p2 = statistics
    grad_logprob, *others = grads
    targets = group_by_row(target, row, len(logits))
    if targets.order is not None:
        grad_logprob = grad_logprob[targets.order]
    coefficients = chunked.coefficients(entropy, sum_p2, *others)
    absent = temperature.new_empty(0)
    inputs = chunked.RowInputs(logits, absent, temperature, softcap, targets.start, targets.target)
    _row_kernels(logits).gradient(inputs, logsumexp, correction, grad_logprob, *coefficients, out)


_SCHEMA = torch.library.infer_schema(_gradient, mutates_args=())
_backward = torch.library.custom_op(
    "rolltree::logprob_from_logits_backward", _gradient, mutates_args=(), schema=_SCHEMA
)
_backward_in_place = torch.library.custom_op(
    "rolltree::logprob_from_logits_backward_",
    _gradient_in_place,
    mutates_args=("logits",),
    schema=_SCHEMA.replace("Tensor logits", "Tensor(a!) logits").replace("-> Tensor", "-> ()"),
)
_backward.register_fake(lambda logits, *_: torch.empty_like(logits))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.softcap, ctx.want_entropy, ctx.want_sum_p2, ctx.inplace = inputs
    _, logsumexp, correction, entropy, sum_p2 = output
    ctx.overwritten, ctx.backend = False, dispatch.current_override()
    ctx.save_for_backward(*tensors, logsumexp, correction, entropy, sum_p2)
    ctx.mark_non_differentiable(correction)
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    check_first_derivative("logprob_from_logits")
    if ctx.overwritten:
        raise RuntimeError(
            "logprob_from_logits: the logits already hold their gradient from the first backward; "
            "leave inplace_backward out to run backward twice."
        )
    logits, target, row, temperature, logsumexp, correction, entropy, sum_p2 = ctx.saved_tensors
    grad_logprob, grad_logsumexp, _, grad_entropy, grad_sum_p2 = grads

    def or_absent(grad: Tensor | None, absent: Tensor) -> Tensor:
        return absent if grad is None else grad.contiguous()

    rest = (
        target,
        row,
        temperature,
        ctx.softcap,
        logsumexp,
        correction,
        entropy,
        sum_p2,
        or_absent(grad_logprob, logsumexp.new_zeros(target.shape)),
        or_absent(grad_logsumexp, torch.zeros_like(logsumexp)),
        or_absent(grad_entropy if ctx.want_entropy else None, logsumexp.new_empty(0)),
        or_absent(grad_sum_p2 if ctx.want_sum_p2 else None, logsumexp.new_empty(0)),
    )
    with dispatch.restored_backend(ctx.backend):
        if ctx.inplace:
            d_logits = logits.detach()  # shares the version counter, so another graph that saved the logits raises
            _backward_in_place(d_logits, *rest)
            ctx.overwritten = True
        else:
            d_logits = _backward(logits, *rest)
    return d_logits, None, None, None, None, None, None, None


_logprob_from_logits.register_autograd(_autograd_backward, setup_context=_setup_context)
