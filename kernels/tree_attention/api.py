"""Public entry of tree attention: checks its arguments and calls the custom op."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import Arguments
from .op import tree_attention_op

MAX_HEAD_DIM = 256


def tree_attention(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,  # [T, Hkv, D]
    subtree_end: Tensor,  # [P + T] int32
    *,
    scale: float | None = None,
    position: Tensor | None = None,  # [P + T] int
    window: int | None = None,
    softcap: float | None = None,
    prefix_kv: tuple[Tensor, Tensor] | None = None,  # [P, Hkv, D] each
) -> Tensor:
    """Attention over trees packed in depth-first order, with exact gradients of q, k and v.

    Row i sees key j iff ``j <= i < subtree_end[j]``: the path from its root to itself. Trees packed back to back, and
    plain sequences (``subtree_end`` = the sequence's end), are separated by the same rule.

    A tree too large for one call is computed in pieces, in the same depth-first order: ``prefix_kv`` are the keys and
    values of the P tokens of earlier pieces that this one still sees. They count as rows 0 to P - 1, these tokens as
    rows P to P + T - 1, and ``subtree_end`` and ``position`` are of all P + T. Gradients flow to the prefix too.

    Args:
        q: queries [T, Hq, D], float32, bfloat16 or float16 (float64 runs on the reference); any strides as long as the
            last dimension is contiguous.
        k: keys [T, Hkv, D], Hkv a divisor of Hq; query head h reads key head ``h // (Hq / Hkv)``.
        v: values [T, Hkv, D].
        subtree_end: [P + T] int32, exclusive end of each token's subtree. Any values are a mask by the rule above, and
            none is used as an index; a row that sees no key gives 0.
        scale: factor of the scores; ``D ** -0.5`` if None.
        position: [P + T] depth of each token along its path; needed with ``window`` only.
        window: key j is also hidden once ``position[i] - position[j] >= window`` (sliding-window layers).
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        prefix_kv: keys and values [P, Hkv, D] of rows before these, of the dtype of k; P = 0 if None.

    Returns:
        [T, Hq, D], contiguous, in q's dtype.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit together.
        BackendError: the named backend does not take these arguments.
    """
    check = Arguments("tree_attention", "q", q)
    _check(check, q, k, v, subtree_end, prefix_kv)
    check.softcap(softcap)
    check.window(window)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    check.number("scale", scale)
    if window is None:
        position = None
    elif position is None:
        check.require(False, "a window is measured in positions; give position in the shape of subtree_end")
    else:
        position = check.integers("position", position, subtree_end.shape, " like subtree_end")
        position = position.to(torch.int32).contiguous()
    if prefix_kv is not None:
        k, v = torch.cat([prefix_kv[0], k]), torch.cat([prefix_kv[1], v])
    return tree_attention_op(q, k, v, subtree_end.contiguous(), position, float(scale), window, softcap)[0]


def _check(
    check: Arguments, q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor, prefix: tuple[Tensor, Tensor] | None
) -> None:
    T, heads, D = check.floats("q", q, ("T", "Hq", "D")).shape
    check.floats("k", k, (T, "Hkv", D), " like q")
    check.floats("v", v, k.shape, " like k")
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    check.require(
        k.shape[1] > 0 and heads % max(k.shape[1], 1) == 0,
        f"the query heads must be a multiple of the key heads, not {shapes}",
    )
    check.require(0 < D <= MAX_HEAD_DIM, f"the head dimension must be 1 to {MAX_HEAD_DIM}, not {D}")
    check.require(
        k.dtype == q.dtype and v.dtype == q.dtype,
        f"q, k and v must have one dtype, not {q.dtype}, {k.dtype}, {v.dtype}",
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.last_contiguous(name, x)
    N = T
    if prefix is not None:
        if not isinstance(prefix, tuple | list) or len(prefix) != 2:
            check.wrong_type("prefix_kv", "a pair of tensors [P, Hkv, D]", prefix)
        keys, values = (check.floats("prefix_kv", t, ("P", *k.shape[1:]), " like k", (k.dtype,)) for t in prefix)
        check.require(
            len(keys) == len(values), f"prefix_kv has {len(keys)} keys and {len(values)} values; give one of each"
        )
        N += len(keys)
    check.integers("subtree_end", subtree_end, (N,), ", one for each key with the prefix's")
    check.require(subtree_end.dtype == torch.int32, f"subtree_end must be int32, got {subtree_end.dtype}")
