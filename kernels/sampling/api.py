"""Public sampling op; :mod:`.reference` holds the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import Arguments
from ..dispatch import choose, compiled_op, imported
from .reference import sample_reference


class SampleOutput(NamedTuple):
    """One draw for each row."""

    token: Tensor  # [N] int64, -1 for a failed row
    logprob: Tensor  # [N] float32, of the token under the distribution it was drawn from
    raw_logprob: Tensor  # [N] float32, of the token under softmax(logits)
    entropy: Tensor  # [N] float32, of softmax(logits / temperature), nats
    last_kept: Tensor  # [N] int64, the last token that the filters left, in their order; -1 for a failed row


def sample_tokens(
    logits: Tensor,  # [N, V] bfloat16, float16 or float32
    *,
    temperature: float | Tensor,  # [N] float32
    top_k: int | Tensor | None = None,  # [N] int32
    top_p: float | Tensor | None = None,  # [N] float32
    min_p: float | Tensor | None = None,  # [N] float32
    seed: Tensor,  # [N] int64
    step: Tensor,  # [N] int64
) -> SampleOutput:
    """Draw one token a row from its filtered, temperature-scaled distribution.

    Filters apply in the order of Hugging Face and vLLM, each to the tokens that the one before kept: temperature, top_k
    (the k largest logits), top_p (the most likely tokens before which less than ``top_p`` of the mass lies), min_p
    (tokens at least ``min_p`` times as likely as the best). Equal logits are ranked by index, lower first; the best
    token is always kept.

    The draw is Gumbel-max over Philox4x32-10 noise of (seed, step, vocabulary index) and depends on nothing else: not
    on the other rows, the batch size, the device or the backend. Backends use bit-equal noise; two tokens whose scores
    differ by a rounding error (about 1e-6 relative) may still be ordered differently by two backends. Not
    differentiable. `kept_tokens` lists the tokens that the filters kept. Parameters that are tensors are not read on
    the host: on a GPU such a call waits for nothing, and can be captured in a CUDA graph. (Gumbel-max: Maddison et al.
    2014; Philox: Salmon et al. 2011)

    Args:
        logits: [N, V] bfloat16, float16 or float32; last dimension contiguous, rows at any stride. ``-inf`` forbids a
            token.
        temperature: a number, or [N]; 0 draws greedily: the first largest logit, ``logprob`` 0 and ``entropy`` 0.
        top_k: a number of tokens, or [N]; no limit where it is below 1.
        top_p: a share of the mass, or [N]; no limit where it is 1 or more.
        min_p: a share of the best token's probability, or [N]; no limit where it is 0.
        seed, step: [N] int64 of any values; a request keeps its seed and counts its tokens in ``step``.

    Returns:
        SampleOutput. A row fails alone: where a logit is NaN or +inf, none is finite, the temperature is infinite, or
        temperature, top_p or min_p is negative or NaN, its token is -1 and its other values are NaN.

    Raises:
        ValueError, TypeError: a shape, dtype, device or scalar that does not fit.
    """
    check = Arguments("sample_tokens", "logits", logits)
    check.floats("logits", logits, ("N", "V"), dtypes=(torch.bfloat16, torch.float16, torch.float32))
    rows, V = logits.shape
    check.require(V > 0, lambda: f"logits must be [N, V] with V > 0, got {list(logits.shape)}")
    check.last_contiguous("logits", logits)
    parameters = (
        _per_row(check, "temperature", temperature, rows, torch.float32),
        None if top_k is None else _per_row(check, "top_k", top_k, rows, torch.int32, most=V),
        None if top_p is None else _per_row(check, "top_p", top_p, rows, torch.float32),
        None if min_p is None else _per_row(check, "min_p", min_p, rows, torch.float32),
        _per_row(check, "seed", seed, rows, torch.int64),
        _per_row(check, "step", step, rows, torch.int64),
    )
    # Outside of a compiler the op's own function is called: the dispatcher takes longer than a small draw.
    if torch.compiler.is_compiling():
        return SampleOutput(*_sample_op(logits, *parameters))
    with torch.no_grad():
        return sample_rows(logits, *parameters)


def sample_rows(
    logits: Tensor,  # [N, V] bfloat16, float16 or float32
    temperature: Tensor,  # [N] float32
    top_k: Tensor | None,  # [N] int32
    top_p: Tensor | None,  # [N] float32
    min_p: Tensor | None,  # [N] float32
    seed: Tensor,  # [N] int64
    step: Tensor,  # [N] int64
) -> SampleOutput:
    """Sample like `sample_tokens` from arguments that are known to be right; they are not checked.

    Dtypes and shapes are those above, all on one device and contiguous; no gradient may be recorded.
    """
    return SampleOutput(*_sample(logits, temperature, top_k, top_p, min_p, seed, step))


def kept_tokens(logits: Tensor, last_kept: Tensor) -> tuple[Tensor, Tensor]:  # [N, V], [N] int64
    """Return the ids that each row was sampled from, for ``kept`` of `linear_logprob`. Waits for a GPU.

    Args:
        logits: [N, V], those given to `sample_tokens`.
        last_kept: [N] int64, of its output.

    Returns:
        CSR of int64: ``indptr [N + 1]`` and ``ids [nnz]``, rising within a row. A failed row has none.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
        IndexError: a token is out of range (CPU only; on a GPU the program stops).
    """
    check = Arguments("kept_tokens", "logits", logits)
    check.floats("logits", logits, ("N", "V"))
    check.integers("last_kept", last_kept, (len(logits),), ", one a row")
    check.index("last_kept", last_kept, logits.shape[1], low=-1, remedy="give those of `sample_tokens`")
    last_kept = last_kept.long()
    last = last_kept[:, None]
    least = logits.gather(1, last.clamp(min=0))
    index = torch.arange(logits.shape[1], device=logits.device)
    kept = ((logits > least) | ((logits == least) & (index <= last))) & (last >= 0)
    indptr = torch.zeros(len(logits) + 1, dtype=torch.int64, device=logits.device)
    torch.cumsum(kept.sum(1), 0, out=indptr[1:])
    return indptr, kept.nonzero()[:, 1]


def _sample(
    logits: Tensor,  # shapes and dtypes as in `sample_rows`
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor,
    step: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = choose("sample_tokens", _BACKENDS, logits.device)
    drawn: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = run(logits, temperature, top_k, top_p, min_p, seed, step)
    return drawn


_sample_op = torch.library.custom_op("rolltree::sample_tokens", _sample, mutates_args=())


@_sample_op.register_fake
def _(logits: Tensor, temperature: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
    *_, seed, _ = rest
    assert seed is not None
    return torch.empty_like(seed), *(torch.empty_like(temperature) for _ in range(3)), torch.empty_like(seed)


_compiled = compiled_op("cpu", "sample_tokens")


def _sample_cpu(logits: Tensor, temperature: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
    """Like `sample_reference` in csrc/cpu/sampling.cpp, which fills tensors: the stable ABI makes them more slowly."""
    seed = rest[-2]
    assert seed is not None
    token, last_kept = torch.empty_like(seed), torch.empty_like(seed)
    out = token, *(torch.empty_like(temperature) for _ in range(3)), last_kept
    _compiled(logits, temperature, *rest, out)
    return out


_BACKENDS: dict[str, Callable[..., Any]] = {
    "triton": imported(__package__, "triton", "sample_triton"),
    "cpu": _sample_cpu,
    "reference": sample_reference,
}


def _per_row(
    check: Arguments, name: str, value: float | Tensor, rows: int, dtype: torch.dtype, most: float | None = None
) -> Tensor:
    """Return ``value`` as a contiguous [rows] tensor, at most ``most``. Values of tensors are not checked: a row with a
    bad one fails alone."""
    if isinstance(value, Tensor):
        (check.numbers if dtype.is_floating_point else check.integers)(name, value, (rows,))
        if most is not None and value.dtype == torch.int64:  # also values beyond int32
            value = value.clamp(0, most)
    else:
        if dtype == torch.int64:
            check.wrong_type(name, f"an int64 tensor of {rows} values", value)
        if dtype.is_floating_point:
            check.number(name, value, least=0, expected="finite and at least 0")
        else:
            check.size(name, value)
        value = torch.full((rows,), value if most is None else min(value, most), dtype=dtype, device=check.device)
    return value.to(dtype).contiguous()
