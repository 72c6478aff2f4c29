"""`linear_logprob`: log-probabilities of given tokens from hidden states, without the logits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .extra import MoreTargets
from .head import HeadLora
from .kept import kept_logprob
from .op import linear_logprob_op
from .parallel import sharded

OUTPUTS = ("entropy", "sum_p2")


class LogprobOutput(NamedTuple):
    """All in fp32 (fp64 for fp64 inputs); None where not wanted."""

    logprob: Tensor  # [M]
    logsumexp: Tensor  # [N]
    entropy: Tensor | None  # [N], nats
    sum_p2: Tensor | None  # [N], in (0, 1]
    extra_logprob: Tensor | None


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

    Target m is token ``target[m]`` in row ``row[m]`` of ``hidden``; a row may have any number of targets, in any
    order. Logits exist only for a chunk of rows at a time, in fp32, never rounded to half precision. Gradients flow
    from every output to hidden, weight, bias and adapter; those of the head are summed in fp32.

    Where only hidden needs a gradient (a frozen head) the forward keeps ``(weight[target] - E_p weight) / temperature``
    and the backward of ``logprob`` is a product by rows: 4 NHV FLOP in all. Otherwise the backward recomputes the
    logits of the rows that have a gradient.

    Args:
        hidden: bf16, fp16, fp32 or fp64; weight and bias have the same dtype (autocast casts all to its own).
        target: vocabulary ids. On a CPU out-of-range ids raise; on a GPU, where checking would wait for the device,
            their log-prob is NaN.
        row: row of each target; default ``arange(N)``, then M = N.
        temperature: a number, or one per row; positive. Applied after softcap. Constant: takes no gradient.
        softcap: ``softcap * tanh(logits / softcap)`` before the temperature.
        want: what to return besides ``logprob`` and ``logsumexp``: a subset of ``("entropy", "sum_p2")``.
        extra_ids: K more ids to score in every row; -1 stands for none there: its log-prob is NaN and takes no
            gradient.
        kept: the ids that each row was sampled from, as CSR: the softmax is over these alone, and so is the work. Every
            target must be among them. Does not combine with tp_group or lora.
        tp_group: a process group over which the vocabulary is split: weight and bias are this rank's shard (shards in
            rank order, of any sizes), hidden, target and the loss the same on all ranks. Every call then asks all ranks
            for their sizes; `VocabShards.gather` does that once, give its result instead. Gradients of hidden are
            summed over the ranks. Does not combine with lora.
        lora: a low-rank adapter of the head; weight + scale b a is never formed.
        weight_grad: an accumulator in fp32 (Megatron's ``main_grad``): the backward adds weight's gradient to it, chunk
            by chunk, and leaves ``weight.grad`` alone. ``weight`` must require a gradient all the same. Does not
            combine with tp_group or kept.

    Raises:
        ValueError: shapes, dtypes or options do not fit; the message names which.
        IndexError: a target or row is out of range (CPU only).
    """
    given = {"kept": kept, "tp_group": tp_group, "lora": lora, "weight_grad": weight_grad}
    together = [name for name, option in given.items() if option is not None]
    if len(together) > 1 and together != ["lora", "weight_grad"]:
        raise ValueError(f"linear_logprob: {together[0]} does not combine with {together[1]}.")
    if unknown := set(want) - set(OUTPUTS):
        raise ValueError(f"linear_logprob: want names {', '.join(sorted(unknown))}; it knows {', '.join(OUTPUTS)}.")
    hidden, weight, bias, lora, temperature = prepare(
        "linear_logprob", hidden, weight, target, row, bias, temperature, softcap, lora
    )
    check_accumulator("linear_logprob", weight, weight_grad, temperature.dtype)
    more = None if extra_ids is None else MoreTargets(extra_ids, target, row, len(hidden))
    a, b, scale = (None, None, 0.0) if lora is None else lora
    trainable = any(t is not None and t.requires_grad for t in (weight, bias, a, b))
    frozen_head = torch.is_grad_enabled() and hidden.requires_grad and not trainable
    targets = (target.long(), None if row is None else row.long()) if more is None else (more.target, more.row)
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
                hidden, weight, bias, *targets, temperature, softcap or 0.0, *outputs, tp_group
            )
    logprob, extra_logprob = (logprob, None) if more is None else more.split(logprob)
    return LogprobOutput(
        logprob, logsumexp, entropy if outputs[0] else None, sum_p2 if outputs[1] else None, extra_logprob
    )


def check_accumulator(op: str, weight: Tensor, weight_grad: Tensor | None, dtype: torch.dtype) -> None:
    """Raises ValueError where gradients of ``weight`` in ``dtype`` cannot be added to ``weight_grad``."""
    if weight_grad is not None and (weight_grad.shape != weight.shape or weight_grad.dtype != dtype):
        raise ValueError(
            f"{op}: weight_grad must be {list(weight.shape)} {dtype}, got "
            f"{list(weight_grad.shape)} {weight_grad.dtype}."
        )


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
    """Checked inputs: of autocast's dtype where that is on, temperature ``[N]`` in the accumulation dtype.

    Raises:
        ValueError: see `linear_logprob`; the message begins with ``op``.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        lora = None if lora is None else HeadLora(lora.a.to(dtype), lora.b.to(dtype), lora.scale)
    _check_shapes(op, hidden, weight, target, row, bias, temperature, softcap, lora)
    accumulator = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if not isinstance(temperature, Tensor):
        temperature = torch.full((), temperature, dtype=accumulator, device=hidden.device)
    return hidden, weight, bias, lora, temperature.to(accumulator).expand(len(hidden))


def _check_shapes(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    row: Tensor | None,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    lora: HeadLora | None,
) -> None:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{op}: {message}.")

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
            f"{len(target)} targets for {len(hidden)} rows; give row= to place them otherwise",
        )
    else:
        require(row.shape == target.shape, f"row must be [{len(target)}] like target, got {shape(row)}")
        require(not row.is_floating_point(), f"row must hold integers, got {row.dtype}")
    if bias is not None:
        require(bias.shape == weight.shape[:1], f"bias must be [{len(weight)}], got {shape(bias)}")
        require(bias.dtype == weight.dtype, f"bias is {bias.dtype} and weight {weight.dtype}; cast one of them")
    if lora is not None:
        rank = lora.a.shape[0]
        require(
            lora.a.shape == (rank, hidden.shape[1]) and lora.b.shape == (len(weight), rank),
            f"lora must be a [r, {hidden.shape[1]}] and b [{len(weight)}, r], got {shape(lora.a)} and {shape(lora.b)}",
        )
        require(
            lora.a.dtype == lora.b.dtype == weight.dtype,
            f"lora is {lora.a.dtype} and {lora.b.dtype}, weight {weight.dtype}; cast them alike",
        )
    if isinstance(temperature, Tensor):
        require(
            temperature.dim() == 0 or temperature.shape == hidden.shape[:1],
            f"temperature must be a number or [{len(hidden)}], got {shape(temperature)}",
        )
        require(not temperature.requires_grad, "temperature takes no gradient; detach it")
    else:
        require(temperature > 0, f"temperature must be positive, got {temperature}")
    require(softcap is None or softcap > 0, f"softcap must be positive or None, got {softcap}")
