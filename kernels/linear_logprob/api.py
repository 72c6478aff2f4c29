"""`linear_logprob`: log-probabilities of given tokens from hidden states, without the logits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import Arguments
from .head import HeadLora
from .kept import kept_logprob
from .op import linear_logprob_op
from .parallel import sharded
from .targets import MoreTargets

OUTPUTS = ("entropy", "sum_p2")


class LogprobOutput(NamedTuple):
    """Scores in fp32 (fp64 for fp64 inputs); None where not wanted."""

    logprob: Tensor  # [M], nats
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
    kept: tuple[Tensor, Tensor] | None = None,  # indptr [N + 1] int, ids [nnz] int
    tp_group: Any = None,
    lora: HeadLora | None = None,
    weight_grad: Tensor | None = None,  # [V, H]
) -> LogprobOutput:
    """Score tokens under ``softmax(softcap(hidden @ weight.T + bias) / temperature)``.

    Target m is token ``target[m]`` in row ``row[m]`` of ``hidden``; a row may have any number of targets, in any order.
    Logits exist only for a chunk of rows at a time, in fp32, never rounded to half precision. Gradients flow from every
    output to hidden, weight, bias and adapter; those of the head are summed in fp32.

    Where only hidden needs a gradient (a frozen head) the forward keeps ``(weight[target] - E_p weight) / temperature``
    and the backward of ``logprob`` is a product by rows: 4 NHV FLOP in all. Otherwise the backward recomputes the
    logits of the rows that have a gradient.

    Args:
        hidden: ``[N, H]`` bf16, fp16, fp32 or fp64; weight and bias have the same dtype (autocast casts all to its
            own).
        weight: ``[V, H]``.
        target: ``[M]`` vocabulary ids. On a CPU out-of-range ids raise; on a GPU, where checking would wait for the
            device, their log-prob is NaN.
        row: ``[M]``, row of each target; default ``arange(N)``, then M = N.
        bias: ``[V]``.
        temperature: a number, or ``[N]``, one per row; positive. Applied after softcap. It takes no gradient.
        softcap: ``softcap * tanh(logits / softcap)`` before the temperature.
        want: outputs besides ``logprob`` and ``logsumexp``: a subset of ``("entropy", "sum_p2")``.
        extra_ids: ``[N, K]``, K more ids to score in every row; -1 means none: its log-prob is NaN and takes no
            gradient.
        kept: the ids that each row was sampled from, as CSR (indptr ``[N + 1]``, ids ``[nnz]``): the softmax is over
            these alone, and so is the work. Every target must be among them. Does not combine with tp_group or lora.
        tp_group: a process group over which the vocabulary is split: weight and bias are this rank's shard (shards in
            rank order, of any sizes), hidden, target and the loss the same on all ranks. Every call then asks all ranks
            for their sizes; `VocabShards.gather` does that once, so give its result instead. Gradients of hidden are
            summed over the ranks. Does not combine with lora.
        lora: a low-rank adapter of the head; weight + scale b a is never formed.
        weight_grad: ``[V, H]``, an accumulator in fp32 (Megatron's ``main_grad``): the backward adds weight's gradient
            to it, chunk by chunk, and leaves ``weight.grad`` alone. ``weight`` must still require a gradient. Does not
            combine with kept.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message names which.
        IndexError: a target, row or id is out of range (CPU only; on a GPU a wrong row stops the program).
    """
    options = {"kept": kept, "tp_group": tp_group, "lora": lora, "weight_grad": weight_grad}
    together = [name for name, option in options.items() if option is not None]
    if len(together) > 1 and together not in (["lora", "weight_grad"], ["tp_group", "weight_grad"]):
        raise ValueError(f"linear_logprob: {together[0]} does not combine with {together[1]}.")
    Arguments("linear_logprob", "hidden", hidden).names("want", want, OUTPUTS)
    hidden, weight, bias, lora, temperature = prepare(
        "linear_logprob", hidden, weight, target, row, bias, temperature, softcap, lora
    )
    check_accumulator("linear_logprob", weight, weight_grad, temperature.dtype)
    vocabulary = len(weight) if tp_group is None else None
    more = None if extra_ids is None else MoreTargets(extra_ids, target, row, len(hidden), vocabulary)
    a, b, scale = (None, None, 0.0) if lora is None else lora
    trainable = any(t is not None and t.requires_grad for t in (weight, bias, a, b))
    frozen_head = torch.is_grad_enabled() and hidden.requires_grad and not trainable
    targets = contiguous_targets(target, row) if more is None else (more.target, more.row)
    outputs = ("entropy" in want, "sum_p2" in want)
    with torch.autocast(hidden.device.type, enabled=False):
        if kept is not None:
            logprob, logsumexp, entropy, sum_p2 = kept_logprob(
                hidden, weight, bias, *targets, temperature, softcap or 0.0, kept
            )
        elif tp_group is None:
            logprob, logsumexp, _, entropy, sum_p2, _ = linear_logprob_op(
                hidden,
                weight,
                bias,
                a,
                b,
                scale,
                *targets,
                temperature,
                softcap or 0.0,
                *outputs,
                frozen_head,
                weight_grad,
            )
        else:
            logprob, logsumexp, entropy, sum_p2 = sharded(
                hidden, weight, bias, *targets, temperature, softcap or 0.0, *outputs, weight_grad, tp_group
            )
    logprob, extra_logprob = (logprob, None) if more is None else more.split(logprob)
    return LogprobOutput(
        logprob, logsumexp, entropy if outputs[0] else None, sum_p2 if outputs[1] else None, extra_logprob
    )


def check_accumulator(op: str, weight: Tensor, weight_grad: Tensor | None, dtype: torch.dtype) -> None:
    """Check the accumulator of weight's gradient.

    Raises:
        ValueError: gradients of ``weight`` in ``dtype`` cannot be added to ``weight_grad``.
    """
    if weight_grad is not None:
        check = Arguments(op, "weight", weight)
        check.floats("weight_grad", weight_grad, weight.shape, " like weight", (dtype,))
        expanded = any(step == 0 and n > 1 for n, step in zip(weight_grad.shape, weight_grad.stride(), strict=True))
        check.require(not expanded, "weight_grad is expanded, and sums need memory of their own; call .clone() on it")


def prepare(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    row: Tensor | None,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    lora: HeadLora | None,
) -> tuple[Tensor, Tensor, Tensor | None, HeadLora | None, Tensor]:
    """Return checked inputs, in autocast's dtype where that is on, and temperature ``[N]`` in the accumulation dtype.

    Raises:
        ValueError: see `linear_logprob`; the message begins with ``op``.
    """
    check = Arguments(op, "hidden", hidden)
    hidden, weight, bias, lora = prepare_head(check, hidden, weight, bias, softcap, lora)
    check_targets(check, target, row, len(hidden))
    check.scale_of_rows("temperature", temperature, len(hidden))
    return hidden, weight, bias, lora, of_rows(temperature, accumulator_of(hidden), hidden)


def prepare_head(
    check: Arguments,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    lora: HeadLora | None,
    prefix: str = "",
) -> tuple[Tensor, Tensor, Tensor | None, HeadLora | None]:
    """Return checked hidden states and head, in autocast's dtype where that is on; ``prefix`` begins the names of the
    arguments.

    Raises:
        ValueError: see `linear_logprob`.
    """
    _check_head(check, hidden, weight, bias, lora, prefix)
    check.softcap(softcap, prefix + "softcap")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        lora = None if lora is None else HeadLora(lora.a.to(dtype), lora.b.to(dtype), lora.scale)
    a, b = (None, None) if lora is None else lora[:2]
    for name, t in (("weight", weight), ("bias", bias), ("lora.a", a), ("lora.b", b)):
        if t is not None:
            check.require(
                t.dtype == hidden.dtype,
                f"{prefix}{name} is {t.dtype} and {prefix}hidden {hidden.dtype}; cast one of them",
            )
    return hidden, weight, None if bias is None else bias.contiguous(), lora


def accumulator_of(hidden: Tensor) -> torch.dtype:
    """Return the dtype of sums: fp32, fp64 for fp64 inputs."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def of_rows(temperature: float | Tensor, dtype: torch.dtype, rows: Tensor) -> Tensor:
    """Return the temperature as ``[N]`` of ``dtype``, on the device of ``rows [N, ...]``."""
    if not isinstance(temperature, Tensor):
        temperature = torch.full((), temperature, dtype=dtype, device=rows.device)
    return temperature.to(rows.device, dtype).expand(len(rows))


def contiguous_targets(target: Tensor, row: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return targets and rows as the row kernels read them: int64, contiguous."""
    return target.long().contiguous(), None if row is None else row.long().contiguous()


def check_targets(check: Arguments, target: Tensor, row: Tensor | None, rows: int) -> None:
    """Check shapes and dtypes of ``target [M]`` and ``row [M]`` or None; the op checks their values."""
    M = len(check.integers("target", target, ("M",)))
    if row is None:
        check.require(rows == M, lambda: f"{M} targets for {rows} rows; give row= to place them otherwise")
    else:
        check.integers("row", row, (M,), " like target")


def _check_head(
    check: Arguments, hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: HeadLora | None, prefix: str
) -> None:
    check.floats(prefix + "hidden", hidden, ("N", "H"))
    H = hidden.shape[1]
    check.floats(prefix + "weight", weight, ("V", H), f" to fit {prefix}hidden")
    V = len(weight)
    check.require(V > 0, f"{prefix}weight must have at least one row")
    if bias is not None:
        check.floats(prefix + "bias", bias, (V,), f" to fit {prefix}weight")
    if lora is not None:
        a, b, scale = lora
        check.floats("lora.a", a, ("r", H), " to fit hidden")
        check.floats("lora.b", b, (V, len(a)), " to fit weight and lora.a")
        check.number("lora.scale", scale)
