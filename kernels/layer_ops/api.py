"""Public entries of a layer's passes: they check their arguments and call the custom ops.

Each rounds where the modules of Transformers round, and computes in float32 in between; gradients are rounded once.
"""

from __future__ import annotations

from torch import Tensor

from ..checks import Arguments
from .op import gated, is_plain, norm, rms_norm_op, rotate_op, silu_mul_op, turned


def rms_norm(
    x: Tensor,  # [..., H]
    weight: Tensor,  # [H]
    eps: float,
) -> Tensor:  # [..., H]
    """Compute RMSNorm: ``weight * round(x / sqrt(mean(x^2) + eps))``, the mean over the last dimension and in float32.

    The backward pass keeps one number a row besides ``x``. A row's result and gradient do not depend on the other rows;
    the gradient of ``weight`` is summed in a fixed order, whatever the number of threads. (Zhang and Sennrich 2019,
    https://arxiv.org/abs/1910.07467, eq. 4)

    Args:
        x: [..., H] float32, bfloat16 or float16 (float64 runs on the reference); copied where it is not contiguous.
        weight: [H], of the same dtype.
        eps: at least 0.

    Returns:
        [..., H], contiguous, in x's dtype. It can be differentiated once.

    Raises:
        ValueError, TypeError: a shape, dtype, device or number that does not fit.
    """
    check = Arguments("rms_norm", "x", x)
    check.floats("x", x)
    check.require(x.dim() > 0 and x.shape[-1] > 0, lambda: f"x must be [..., H], got {list(x.shape)}")
    check.floats("weight", weight, (x.shape[-1],), " like x", (x.dtype,))
    run = norm if is_plain(x, weight) else rms_norm_op
    return run(x, weight, check.number("eps", eps, least=0.0))[0]


def rotate(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hkv, T, D]
    cos: Tensor,  # [B or 1, T, D]
    sin: Tensor,  # [B or 1, T, D]
) -> tuple[Tensor, Tensor]:  # like q, like k
    """Rotate queries and keys: with ``x = (low, high)``, the halves of a head, ``x cos + (-high, low) sin``.

    The gradient rotates back by the same angles, so nothing else is kept. (Su et al. 2021,
    https://arxiv.org/abs/2104.09864, eq. 34, with pairs D/2 apart)

    Args:
        q: [B, Hq, T, D] float32, bfloat16 or float16 (float64 runs on the reference), D even, of any strides: rows of
            heads ``[B, T, H, D]`` come transposed, and the result has the same layout.
        k: [B, Hkv, T, D], of the same dtype.
        cos, sin: [B or 1, T, D], of the same dtype, one row a position; they have no gradient.

    Raises:
        ValueError, TypeError: a shape, dtype or device that does not fit, or cos or sin require a gradient.
    """
    check = Arguments("rotate", "q", q)
    B, _, T, D = check.floats("q", q, ("B", "Hq", "T", "D")).shape
    check.require(D % 2 == 0, lambda: f"heads must be of an even number of numbers, not {D}")
    check.floats("k", k, (B, "Hkv", T, D), " like q", (q.dtype,))
    for name, of in (("cos", cos), ("sin", sin)):
        check.floats(name, of, ("B", T, D), " like q", (q.dtype,))
        check.require(
            of.shape[0] in (1, B),
            lambda name=name, of=of: f"{name} must be of 1 or {B} sequences, not {of.shape[0]}",  # type: ignore[misc]
        )
        check.require(not of.requires_grad, f"{name} takes no gradient; detach it")
    check.require(len(cos) == len(sin), lambda: f"cos is of {len(cos)} sequences and sin of {len(sin)}; give as many")
    return (turned if is_plain(q, k, cos, sin) else rotate_op)(q, k, cos, sin)


def silu_mul(
    gate: Tensor,  # [...]
    up: Tensor,  # [...]
) -> Tensor:  # [...]
    """Compute the gated unit of SwiGLU: ``round(gate / (1 + e^-gate)) * up``.

    The backward pass keeps gate and up alone. (Shazeer 2020, https://arxiv.org/abs/2002.05202, eq. 6)

    Args:
        gate, up: float32, bfloat16 or float16 (float64 runs on the reference), of one shape and dtype; copied where
            they are not contiguous.

    Returns:
        Of their shape, contiguous. It can be differentiated once.

    Raises:
        ValueError, TypeError: a shape, dtype or device that does not fit.
    """
    check = Arguments("silu_mul", "gate", gate)
    check.floats("gate", gate)
    check.floats("up", up, gate.shape, " like gate", (gate.dtype,))
    return (gated if is_plain(gate, up) else silu_mul_op)(gate, up)
