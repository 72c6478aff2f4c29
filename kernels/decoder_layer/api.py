"""Public entry of the passes between a decoder layer's products.

Both change tensors in place, as their names say, and have no gradient: they are for generation. Their arithmetic is
that of :mod:`.reference`, rounding by rounding; what they save is passes over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .. import dispatch
from ..checks import Arguments
from . import cpu, reference

_ADD_RMS_NORM: Mapping[str, Callable[..., Tensor]] = {"cpu": cpu.add_rms_norm, "reference": reference.add_rms_norm}
_ROTATE_AND_STORE: Mapping[str, Callable[..., None]] = {
    "cpu": cpu.rotate_and_store,
    "reference": reference.rotate_and_store,
}
DTYPES = (torch.float32, torch.float64)
LONGEST_HEAD = 1024


def add_rms_norm_(
    residual: Tensor,  # [N, H] float32
    x: Tensor | None,  # [N, H]
    weight: Tensor,  # [H]
    eps: float,
) -> Tensor:  # [N, H]
    """``residual += x`` where there is an ``x``; the sum's RMSNorm: ``weight * sum / sqrt(mean(sum^2) + eps)``.

    A row's result does not depend on the other rows. (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. 4)

    Raises:
        ValueError, TypeError: a shape, dtype, device or number that does not fit, or rows that are not contiguous.
    """
    check = Arguments("add_rms_norm_", "residual", residual)
    N, H = check.floats("residual", residual, ("N", "H"), dtypes=DTYPES).shape
    check.floats("weight", weight, (H,), " like residual", (residual.dtype,))
    given = {"residual": residual, "weight": weight}
    if x is not None:
        given["x"] = check.floats("x", x, (N, H), " like residual", (residual.dtype,))
    _contiguous(check, given)
    run = _choose("add_rms_norm_", _ADD_RMS_NORM, residual)
    return run(residual, x, weight, check.number("eps", eps, least=0.0))


def rotate_and_store_(
    q: Tensor,  # [N, Hq, D] float32
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    cos: Tensor,  # [N, D]
    sin: Tensor,  # [N, D]
    slots: Tensor,  # [N] int64
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    *,
    q_weight: Tensor | None = None,  # [D]
    k_weight: Tensor | None = None,  # [D]
    eps: float = 0.0,
) -> None:
    """Turn queries by their positions in place; write keys, turned alike, and values to their slots of the pages.

    With ``x = (low, high)``, its halves, the turned head is ``x * cos + (-high, low) * sin``. Heads go through RMSNorm
    before where weights are given. (Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. 34, with pairs D/2 apart)

    Args:
        slots: the place of each row, page times its size plus the place within; where two rows have the same one,
            which of them stays is not said.

    Raises:
        ValueError, TypeError: a shape, dtype, device or number that does not fit, a tensor that is not contiguous, or
            slots outside of the pages.
    """
    check = Arguments("rotate_and_store_", "q", q)
    N, _, D = check.floats("q", q, ("N", "Hq", "D"), dtypes=DTYPES).shape
    check.require(
        D % 2 == 0 and D <= LONGEST_HEAD, f"heads must be even and of at most {LONGEST_HEAD} numbers, not {D}"
    )
    same = (q.dtype,)
    _, heads, _ = check.floats("k", k, (N, "Hkv", D), " like q", same).shape
    P, page, _, _ = check.floats("k_pages", k_pages, ("P", "page", heads, D), " like k", same).shape
    given = {"q": q, "k": k, "k_pages": k_pages}
    for name, tensor, shape, like in (
        ("v", v, (N, heads, D), " like k"),
        ("v_pages", v_pages, (P, page, heads, D), " like k_pages"),
        ("cos", cos, (N, D), " like q"),
        ("sin", sin, (N, D), " like q"),
        ("q_weight", q_weight, (D,), " like q"),
        ("k_weight", k_weight, (D,), " like q"),
    ):
        if tensor is not None or not name.endswith("weight"):
            given[name] = check.floats(name, tensor, shape, like, same)
    given["slots"] = check.tensor("slots", slots, (N,))
    check.require(slots.dtype == torch.int64, f"slots must be int64, got {slots.dtype}")
    _contiguous(check, given)
    if N and slots.device.type == "cpu":
        least, most = (int(value) for value in slots.aminmax())
        check.require(least >= 0 and most < P * page, f"slots must be in 0..{P * page - 1}, got {least}..{most}")
    run = _choose("rotate_and_store_", _ROTATE_AND_STORE, q)
    run(q, k, v, q_weight, k_weight, check.number("eps", eps, least=0.0), cos, sin, slots, k_pages, v_pages)


def _choose(op: str, table: Mapping[str, dispatch.Fn], first: Tensor) -> dispatch.Fn:
    # Only the reference has float64; it exists for checks.
    return table["reference"] if first.dtype == torch.float64 else dispatch.choose(op, table, first.device)


def _contiguous(check: Arguments, given: Mapping[str, Tensor]) -> None:
    for name, tensor in given.items():
        if not tensor.is_contiguous():
            check.require(False, f"{name} must be contiguous, got strides {list(tensor.stride())}")
