"""`linear_logprob`: log-probabilities of given tokens from hidden states, without the logits in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from . import chunked, cpu, cuda, reference
from .extra import MorePairs

OUTPUTS = ("entropy", "sum_p2")


class LogprobOutput(NamedTuple):
    """All in fp32 (fp64 for fp64 inputs); None where not wanted."""

    logprob: Tensor  # [M]
    logsumexp: Tensor  # [N]
    entropy: Tensor | None  # [N], nats
    sum_p2: Tensor | None  # [N], in (0, 1]
    extra_logprob: Tensor | None  # [N, K]


def linear_logprob(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [M] int
    *,
    row: Tensor | None = None,  # [M] int
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,  # or [N]
    softcap: float | None = None,
    want: Sequence[str] = (),
    extra_ids: Tensor | None = None,  # [N, K] int
    kept: Any = None,
    tp_group: Any = None,
) -> LogprobOutput:
    """Score tokens under ``softmax(softcap(hidden @ weight.T + bias) / temperature)``.

    A pair m scores token ``target[m]`` in row ``row[m]`` of ``hidden``; a row may have any number of pairs, in any
    order. Logits exist only for a chunk of rows at a time, in fp32, never rounded to half precision. Gradients flow
    from every output to hidden, weight and bias; the weight gradient is summed in fp32.

    Args:
        hidden: bf16, fp16, fp32 or fp64; weight and bias have the same dtype (autocast casts all to its own).
        target: vocabulary ids. On a CPU out-of-range ids raise; on a GPU, where checking would wait for the device,
            their log-prob is NaN.
        row: row of each pair; default ``arange(N)``, then M = N.
        temperature: a number, or one per row; positive. Applied after softcap. Constant: takes no gradient.
        softcap: ``softcap * tanh(logits / softcap)`` before the temperature.
        want: what to return besides ``logprob`` and ``logsumexp``: a subset of ``("entropy", "sum_p2")``.
        extra_ids: K more ids to score in every row; -1 stands for none there: its log-prob is NaN and takes no
            gradient.
        kept: not built yet.
        tp_group: a process group over which the vocabulary is split: weight and bias are this rank's shard (shards in
            rank order, of any sizes), hidden, target and the loss the same on all ranks. Every call then asks all ranks
            for their sizes; `VocabShards.gather` does that once, give its result instead. Gradients of hidden are
            summed over the ranks.

    Raises:
        ValueError: shapes, dtypes or options do not fit; the message names which.
        IndexError: a target or row is out of range (CPU only).
        NotImplementedError: an option that is not built yet was given.
    """
    if kept is not None:
        raise NotImplementedError("linear_logprob: the option kept is not built yet; leave it out.")
    if unknown := set(want) - set(OUTPUTS):
        raise ValueError(f"linear_logprob: want names {', '.join(sorted(unknown))}; it knows {', '.join(OUTPUTS)}.")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    _check_shapes(hidden, weight, target, row, bias, temperature, softcap)
    more = None if extra_ids is None else MorePairs(extra_ids, target, row, len(hidden))
    accumulator = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if not isinstance(temperature, Tensor):
        temperature = torch.full((), temperature, dtype=accumulator, device=hidden.device)
    temperature = temperature.to(accumulator).expand(len(hidden))
    arguments = (
        hidden,
        weight,
        *((target.long(), None if row is None else row.long()) if more is None else (more.target, more.row)),
        bias,
        temperature,
        softcap or 0.0,
        "entropy" in want,
        "sum_p2" in want,
    )
    with torch.autocast(device, enabled=False):
        if tp_group is None:
            logprob, logsumexp, _, entropy, sum_p2, _ = _linear_logprob(*arguments)
        else:
            from .parallel import sharded  # not at the top: it is made of the ops below

            logprob, logsumexp, entropy, sum_p2 = sharded(*arguments, tp_group)
    logprob, extra_logprob = (logprob, None) if more is None else more.split(logprob)
    return LogprobOutput(
        logprob, logsumexp, entropy if "entropy" in want else None, sum_p2 if "sum_p2" in want else None, extra_logprob
    )


def _check_shapes(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    row: Tensor | None,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
) -> None:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"linear_logprob: {message}.")

    def shape(t: Tensor) -> list[int]:
        return list(t.shape)

    require(hidden.dim() == 2, f"hidden must be [N, H], got {shape(hidden)}")
    require(
        weight.dim() == 2 and weight.shape[1] == hidden.shape[1],
        f"weight must be [V, {hidden.shape[1]}] to fit hidden, got {shape(weight)}",
    )
    require(len(weight) > 0, "weight must have at least one row")
    require(
        hidden.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        f"hidden must be bf16, fp16, fp32 or fp64, got {hidden.dtype}",
    )
    require(weight.dtype == hidden.dtype, f"weight is {weight.dtype} and hidden {hidden.dtype}; cast one of them")
    require(target.dim() == 1, f"target must be [M], got {shape(target)}")
    require(not target.is_floating_point(), f"target must hold integers, got {target.dtype}")
    if row is None:
        require(
            len(target) == len(hidden),
            f"{len(target)} targets for {len(hidden)} rows; give row= to pair them otherwise",
        )
    else:
        require(row.shape == target.shape, f"row must be [{len(target)}] like target, got {shape(row)}")
        require(not row.is_floating_point(), f"row must hold integers, got {row.dtype}")
    if bias is not None:
        require(bias.shape == weight.shape[:1], f"bias must be [{len(weight)}], got {shape(bias)}")
        require(bias.dtype == weight.dtype, f"bias is {bias.dtype} and weight {weight.dtype}; cast one of them")
    if isinstance(temperature, Tensor):
        require(
            temperature.dim() == 0 or temperature.shape == hidden.shape[:1],
            f"temperature must be a number or [{len(hidden)}], got {shape(temperature)}",
        )
        require(not temperature.requires_grad, "temperature takes no gradient; detach it")
    else:
        require(temperature > 0, f"temperature must be positive, got {temperature}")
    require(softcap is None or softcap > 0, f"softcap must be positive or None, got {softcap}")


@torch.library.custom_op("rolltree::linear_logprob", mutates_args=())
def _linear_logprob(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [M] int64
    row: Tensor | None,  # [M] int64
    bias: Tensor | None,  # [V]
    temperature: Tensor,  # [N]
    softcap: float,
    want_entropy: bool,
    want_sum_p2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if hidden.device.type == "cpu":
        _check_range("target", target, len(weight))
        if row is not None:
            _check_range("row", row, len(hidden))
    run = dispatch.choose("linear_logprob", _backends(_FORWARD, hidden), hidden.device)
    return run(hidden, weight, target, row, bias, temperature, softcap, want_entropy, want_sum_p2)


def _check_range(name: str, index: Tensor, end: int, op: str = "linear_logprob") -> None:
    if len(index) and (index.min() < 0 or index.max() >= end):
        raise IndexError(
            f"{op}: {name} must be in 0..{end - 1}, got {index.min().item()}..{index.max().item()}; "
            "leave out pairs that are not to be scored."
        )


@_linear_logprob.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    row: Tensor | None,
    bias: Tensor | None,
    temperature: Tensor,
    softcap: float,
    want_entropy: bool,
    want_sum_p2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    N, new = hidden.shape[0], temperature.new_empty
    return (
        new(target.shape[0]),
        new(N),
        new(N),
        new(N if want_entropy else 0),
        new(N if want_sum_p2 else 0),
        new(chunked.kept_shape(hidden, weight)),
    )


@torch.library.custom_op("rolltree::linear_logprob_backward", mutates_args=())
def _linear_logprob_backward(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [M] int64
    row: Tensor | None,  # [M] int64
    bias: Tensor | None,  # [V]
    temperature: Tensor,  # [N]
    softcap: float,
    logsumexp: Tensor,  # [N]
    correction: Tensor,  # [N]
    entropy: Tensor,  # [N], or [0]
    sum_p2: Tensor,  # [N], or [0]
    logits: Tensor,  # [N, V] or [0, 0]
    grad_logprob: Tensor,  # [M]
    grad_logsumexp: Tensor,  # [N]
    grad_entropy: Tensor,  # [N], or [0]
    grad_sum_p2: Tensor,  # [N], or [0]
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    run = dispatch.choose("linear_logprob", _backends(_BACKWARD, hidden), hidden.device)
    return run(
        hidden,
        weight,
        target,
        row,
        bias,
        temperature,
        softcap,
        logsumexp,
        correction,
        entropy,
        sum_p2,
        logits,
        grad_logprob,
        grad_logsumexp,
        grad_entropy,
        grad_sum_p2,
        need_hidden,
        need_weight,
        need_bias,
    )


@_linear_logprob_backward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    row: Tensor | None,
    bias: Tensor | None,
    temperature: Tensor,
    softcap: float,
    logsumexp: Tensor,
    correction: Tensor,
    entropy: Tensor,
    sum_p2: Tensor,
    logits: Tensor,
    grad_logprob: Tensor,
    grad_logsumexp: Tensor,
    grad_entropy: Tensor,
    grad_sum_p2: Tensor,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(hidden) if need_hidden else hidden.new_empty(0),
        torch.empty_like(weight) if need_weight else weight.new_empty(0),
        weight.new_empty(weight.shape[0] if need_bias else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.softcap, _, _ = inputs
    _, logsumexp, correction, entropy, sum_p2, logits = output
    ctx.save_for_backward(*tensors, logsumexp, correction, entropy, sum_p2, logits)
    ctx.mark_non_differentiable(correction, logits)
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, target, row, bias, temperature, logsumexp, correction, entropy, sum_p2, logits = ctx.saved_tensors
    grad_logprob, grad_logsumexp, _, grad_entropy, grad_sum_p2, _ = grads
    need_hidden, need_weight, _, _, need_bias = ctx.needs_input_grad[:5]

    def given(grad: Tensor | None, absent: Tensor) -> Tensor:
        return absent if grad is None else grad.contiguous()

    d_hidden, d_weight, d_bias = _linear_logprob_backward(
        hidden,
        weight,
        target,
        row,
        bias,
        temperature,
        ctx.softcap,
        logsumexp,
        correction,
        entropy,
        sum_p2,
        logits,
        given(grad_logprob, logsumexp.new_zeros(target.shape)),
        given(grad_logsumexp, torch.zeros_like(logsumexp)),
        given(grad_entropy, logsumexp.new_empty(0))[: len(entropy)],
        given(grad_sum_p2, logsumexp.new_empty(0))[: len(sum_p2)],
        need_hidden,
        need_weight,
        need_bias,
    )
    return (
        d_hidden if need_hidden else None,
        d_weight if need_weight else None,
        None,
        None,
        d_bias if need_bias else None,
        None,
        None,
        None,
        None,
    )


_linear_logprob.register_autograd(_autograd_backward, setup_context=_setup_context)


def _row_kernels(backend: str) -> chunked.RowKernels:
    if backend == "triton":
        from . import triton  # not at the top: triton need not be installed

        return triton
    return {"cpu": cpu, "cuda": cuda}[backend]


def _with_rows(driver: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return lambda *args: driver(_row_kernels(backend), *args)


_FORWARD: dict[str, Callable[..., Any]] = {b: _with_rows(chunked.forward, b) for b in ("cuda", "triton", "cpu")}
_FORWARD["reference"] = reference.forward
_BACKWARD: dict[str, Callable[..., Any]] = {b: _with_rows(chunked.backward, b) for b in ("cuda", "triton", "cpu")}
_BACKWARD["reference"] = reference.backward


def _backends(table: dict[str, Callable[..., Any]], hidden: Tensor) -> dict[str, Callable[..., Any]]:
    """The backends that know hidden's dtype: fp64 is for checking gradients, which GPU row kernels do not serve."""
    if hidden.dtype == torch.float64:
        return {b: f for b, f in table.items() if b not in ("cuda", "triton")}
    return table
