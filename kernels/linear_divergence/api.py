"""`linear_divergence`: the divergence between two heads' distributions, from hidden states, without logits in memory.

`linear_topk_divergence` is the same for a teacher of whom only K log-probs a row are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import Arguments
from ..forward_gradients import INPUTS, check_in_forward
from ..libraries import log_once
from ..linear_logprob import HeadLora
from ..linear_logprob.api import accumulator_of, check_accumulator, of_rows, prepare_head
from ..linear_policy_loss.terms import LARGEST_IN_HALF
from ..policy_loss.api import normalized
from .kinds import Kind, kind_of
from .op import AccumulatedDivergence, AccumulatedTopK, linear_divergence_op, linear_topk_divergence_op


class DivergenceOutput(NamedTuple):
    """The loss, and values of the M pairs in nats, without gradient; NaN for pairs that were left out."""

    loss: Tensor  # [], in the accumulation dtype (fp32; fp64 for fp64 inputs), differentiable
    divergence: Tensor  # [M]
    entropy: Tensor  # [M], the student's
    teacher_entropy: Tensor | None  # [M]; None where only K log-probs of the teacher are known


def linear_divergence(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    teacher_hidden: Tensor,  # [N_t, H_t]
    teacher_weight: Tensor,  # [V_t, H_t]
    *,
    kind: str = "forward_kl",
    beta: float | None = None,
    alpha: float | None = None,
    weights: Tensor | None = None,  # [M]
    mask: Tensor | None = None,  # [M] bool
    normalizer: float | Tensor = 1.0,
    row: Tensor | None = None,  # [M] int
    teacher_row: Tensor | None = None,  # [M] int
    bias: Tensor | None = None,  # [V]
    teacher_bias: Tensor | None = None,  # [V_t]
    temperature: float | Tensor = 1.0,  # or [N]
    teacher_temperature: float | Tensor | None = None,  # or [N_t]
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    lora: HeadLora | None = None,
    weight_grad: Tensor | None = None,  # [V, H]
    in_forward: bool = False,
) -> DivergenceOutput:
    """Compute ``sum_m weights[m] D(teacher, student)_m / normalizer``, D summed over the whole vocabulary.

    Pair m compares row ``row[m]`` of the student with row ``teacher_row[m]`` of the teacher, which may stand at another
    position, as where the teacher reads a longer prompt. Nothing is copied for that. Logits of both exist for a chunk
    of rows at a time, in fp32, and are formed once: gradients of hidden and the head are made in the forward and
    returned by the one backward that is allowed. The teacher gets none. FLOP: 2 N H V + 2 N H_t V, and 4 N H V with
    gradients (2 with a frozen head); N counts the pairs whose weight is not 0.

    Args:
        hidden: ``[N, H]`` bf16, fp16, fp32 or fp64; weight and bias have the same dtype (autocast casts all to its
            own).
        weight: ``[V, H]``, the student's head.
        teacher_hidden: ``[N_t, H_t]``, of any width and dtype, but fp64 only where hidden is; it must not require a
            gradient.
        teacher_weight: ``[V_t, H_t]``, of its dtype; may be a parameter, and gets no gradient. Where one vocabulary is
            padded further than the other, both distributions are over the ids that the shorter one has; the further
            rows of the longer head are left out and get no gradient, and that is logged once.
        kind: of `kinds`: ``forward_kl`` KL(p || q) of teacher p and student q, ``reverse_kl`` KL(q || p), ``jsd``,
            ``skew_forward_kl``, ``skew_reverse_kl``, ``total_variation``.
        beta: of ``jsd``: m = beta p + (1 - beta) q, as in GKD and TRL; 0 is the forward KL and 1 the reverse KL.
            Default 0.5.
        alpha: of the skewed KLs, as in DistiLLM; 0 is the KL. Default 0.1.
        weights: ``[M]``, finite. A pair of weight 0 reaches no product, so its rows may hold anything. On a GPU the
            choice waits for the device once, unless ``weights`` and ``mask`` are on the host.
        mask: ``[M]``; False is a weight of 0.
        normalizer: the global denominator of the loss. Default 1.
        row: ``[M]``, row of the student of each pair; default ``arange(N)``, then M = N. A row may have several pairs.
        teacher_row: ``[M]``, row of the teacher of each pair; default ``arange(N_t)``, then M = N_t.
        bias, teacher_bias: ``[V]`` and ``[V_t]``.
        temperature: a number, or ``[N]``, one a row of hidden; positive, applied after softcap. It scales no loss.
        teacher_temperature: a number, or ``[N_t]``, one a row of the teacher; default: that of the pair's student.
        softcap, teacher_softcap: ``softcap * tanh(logits / softcap)`` before the temperature.
        lora: a low-rank adapter of the student's head; weight + scale b a is never formed.
        weight_grad: ``[V, H]``, an fp32 accumulator (Megatron's ``main_grad``): the backward adds weight's gradient to
            it and leaves ``weight.grad`` alone.
        in_forward: add to ``weight_grad`` in the forward, chunk by chunk. The loss must then be differentiated once and
            as it is, with a factor of 1. Not in fp16.

    Returns:
        See `DivergenceOutput`. The divergence is inf where a distribution that is averaged over has a token to which
        the other gives a logit of -inf.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message names which.
        IndexError: a row of a pair that counts is out of range (CPU only; on a GPU the program stops).
        RuntimeError: a second backward.

    Source: GKD (Agarwal et al. 2024, arXiv:2306.13649), DistiLLM (Ko et al. 2024, arXiv:2402.03898).
    """
    check = Arguments("linear_divergence", "hidden", hidden)
    hidden, weight, bias, lora = prepare_head(check, hidden, weight, bias, softcap, lora)
    check.constant("teacher_hidden", teacher_hidden)
    teacher_hidden, teacher_weight, teacher_bias, _ = prepare_head(
        check, teacher_hidden, teacher_weight, teacher_bias, teacher_softcap, None, "teacher_"
    )
    both = {hidden.dtype, teacher_hidden.dtype}
    check.require(
        len(both) == 1 or torch.float64 not in both,
        f"teacher_hidden is {teacher_hidden.dtype} and hidden {hidden.dtype}; fp64 goes with fp64, so cast one of them",
    )
    compared, dtype = kind_of(check, kind, beta, alpha), accumulator_of(hidden)
    pairs, of_teacher = _pairs(check, "row", row, hidden), _pairs(check, "teacher_row", teacher_row, teacher_hidden)
    if pairs != of_teacher:
        check.require(
            False, f"{pairs} rows of hidden and {of_teacher} of teacher_hidden; pair them by row, teacher_row"
        )
    check.scale_of_rows("temperature", temperature, len(hidden))
    if teacher_temperature is not None:
        check.scale_of_rows("teacher_temperature", teacher_temperature, len(teacher_hidden))
        teacher_temperature = of_rows(teacher_temperature, dtype, teacher_hidden)
    head = _Head(weight, bias, lora, weight_grad, in_forward)
    head.check(check, dtype)
    V = min(len(weight), len(teacher_weight))
    if len(weight) != len(teacher_weight):
        log_once(f"linear_divergence: vocabularies of {len(weight)} and {len(teacher_weight)} are compared on {V} ids.")
    teacher_bias = None if teacher_bias is None else teacher_bias.detach()[:V]
    teacher = teacher_hidden, teacher_weight.detach()[:V], teacher_bias, teacher_temperature, teacher_softcap or 0.0
    scaled = of_rows(temperature, dtype, hidden), softcap or 0.0
    factor = _weights(check, weights, mask, pairs, dtype)
    compute = AccumulatedDivergence.apply if in_forward else linear_divergence_op
    out = _compute(
        check, compute, hidden, head.of(V), (*scaled, *teacher, _long(row), _long(teacher_row)), factor, compared,
        normalizer,
    )  # fmt: skip
    return DivergenceOutput(*out)


def linear_topk_divergence(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    ids: Tensor,  # [M, K] int
    teacher_logprob: Tensor,  # [M, K]
    *,
    rest: bool,
    kind: str = "forward_kl",
    beta: float | None = None,
    alpha: float | None = None,
    weights: Tensor | None = None,  # [M]
    mask: Tensor | None = None,  # [M] bool
    normalizer: float | Tensor = 1.0,
    row: Tensor | None = None,  # [M] int
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,  # or [N]
    softcap: float | None = None,
    lora: HeadLora | None = None,
    weight_grad: Tensor | None = None,  # [V, H]
    in_forward: bool = False,
) -> DivergenceOutput:
    """Compute `linear_divergence` from a teacher's log-probs of K ids a row, as servers return them.

    Both distributions are over the whole vocabulary; D is summed over the K ids. With ``rest`` all other ids are one
    further class, of probability 1 - sum_k p_k: D is then a divergence between distributions, at most that of the whole
    vocabulary. Without it D is a partial sum, which may be negative. FLOP: 2 N H V, and 4 N H V with gradients.

    Args:
        ids: ``[M, K]`` vocabulary ids, each once a row; -1 stands for none.
        teacher_logprob: ``[M, K]``, in nats, at the temperature at which the student is compared; their probabilities
            add up to at most 1 in a row. Where ids are -1 it may hold anything.
        rest: count the other ids as one class. Probabilities of the rest below the resolution of the sum (1.2e-7 in
            fp32) count as that.
        hidden, weight, kind, beta, alpha, weights, mask, normalizer, row, bias, temperature, softcap, lora,
            weight_grad, in_forward: as in `linear_divergence`.

    Returns:
        See `DivergenceOutput`.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: as `linear_divergence`; and, on a CPU, an id that a row names
            twice, or probabilities of more than 1 in all.
    """
    check = Arguments("linear_topk_divergence", "hidden", hidden)
    hidden, weight, bias, lora = prepare_head(check, hidden, weight, bias, softcap, lora)
    compared, dtype = kind_of(check, kind, beta, alpha), accumulator_of(hidden)
    pairs = _pairs(check, "row", row, hidden)
    check.integers("ids", ids, (pairs, "K"), " by the rows")
    check.require(ids.shape[1] > 0, "ids must have at least one column")
    check.floats("teacher_logprob", teacher_logprob, ids.shape, " like ids")
    check.constant("teacher_logprob", teacher_logprob)
    check.scale_of_rows("temperature", temperature, len(hidden))
    head = _Head(weight, bias, lora, weight_grad, in_forward)
    head.check(check, dtype)
    scaled = of_rows(temperature, dtype, hidden), softcap or 0.0
    factor = _weights(check, weights, mask, pairs, dtype)
    compute = AccumulatedTopK.apply if in_forward else linear_topk_divergence_op
    arguments = *scaled, ids.long(), teacher_logprob, bool(rest), _long(row)
    loss, divergence, entropy = _compute(check, compute, hidden, head, arguments, factor, compared, normalizer)
    return DivergenceOutput(loss, divergence, entropy, None)


class _Head(NamedTuple):
    """The student's head, and what becomes of its gradient."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    lora: HeadLora | None
    weight_grad: Tensor | None  # [V, H]
    in_forward: bool

    def check(self, check: Arguments, dtype: torch.dtype) -> None:
        check_accumulator(check.op, self.weight, self.weight_grad, dtype)
        if self.in_forward:
            check_in_forward(check, self.weight, self.weight_grad)

    def of(self, V: int) -> _Head:
        """Return the head of the first V ids."""
        if len(self.weight) == V:
            return self
        weight, bias, lora, weight_grad, in_forward = self
        return _Head(
            weight[:V],
            None if bias is None else bias[:V],
            None if lora is None else lora._replace(b=lora.b[:V]),
            None if weight_grad is None else weight_grad[:V],
            in_forward,
        )


def _compute(
    check: Arguments,
    compute: Callable[..., tuple[Tensor, ...]],
    hidden: Tensor,
    head: _Head,
    arguments: tuple[Any, ...],
    weights: Tensor,  # [M]
    kind: Kind,
    normalizer: float | Tensor,
) -> tuple[Tensor, ...]:
    """Return the loss, and the values of the pairs."""
    check.normalizer(normalizer)
    lora_a, lora_b, lora_scale = (None, None, 0.0) if head.lora is None else head.lora
    inputs = hidden, head.weight, head.bias, lora_a, lora_b
    need = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs]
    scale: float | Tensor = 1.0
    if head.in_forward:
        weights, normalizer = normalized(weights, normalizer), 1.0
    elif hidden.dtype == torch.float16 and len(weights):
        scale = _half_scale(weights)
        weights = weights * scale
    with torch.autocast(hidden.device.type, enabled=False):
        total, *values = compute(
            *inputs, lora_scale, *arguments, weights, kind.name, kind.share, need, head.weight_grad
        )  # fmt: skip
    return normalized(total / scale, normalizer) if not head.in_forward else total, *values[:-INPUTS]


def _half_scale(weights: Tensor) -> Tensor:
    """Return the power of two ``[]`` by which the largest weight gets the size of `LARGEST_IN_HALF`, so that gradients
    fit fp16 whatever the weights are."""
    largest = weights.abs().amax()
    return torch.exp2(torch.log2(LARGEST_IN_HALF / torch.where(largest == 0, 1, largest)).floor())


def _weights(
    check: Arguments, weights: Tensor | None, mask: Tensor | None, pairs: int, dtype: torch.dtype
) -> Tensor:  # [M]
    """Return the checked weights, 0 where ``mask`` is False, on the device where they were given."""
    shape = (pairs,)
    if weights is None:
        weights = torch.ones(pairs, dtype=dtype, device="cpu" if mask is None else mask.device)
    else:
        of_weights = Arguments(check.op, "weights", weights)
        of_weights.numbers("weights", weights, shape, " by the pairs of rows")
        of_weights.constant("weights", weights)
        weights = weights.to(dtype)
    if mask is not None:
        Arguments(check.op, "weights", weights).mask("mask", mask, shape, " by the pairs of rows")
        weights = torch.where(mask, weights, 0)
    check.require(
        weights.device in (check.device, torch.device("cpu")),
        f"weights and mask are on {weights.device}; move them to {check.device} or the host",
    )
    every = weights
    Arguments(check.op, "weights", weights).look("weights must be finite", every, lambda: every.isfinite())
    return weights


def _pairs(check: Arguments, name: str, row: Tensor | None, rows: Tensor) -> int:
    """Return the number of pairs that ``row``, or one for each of ``rows``, makes."""
    return len(rows) if row is None else len(check.integers(name, row, ("M",)))


def _long(row: Tensor | None) -> Tensor | None:
    # a view, since compilers take no tensor twice, which both models' rows may be
    return None if row is None else row.long().contiguous().view(-1)
