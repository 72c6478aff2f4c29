"""Public entry of tree attention: checks its arguments and calls the custom op."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import Arguments
from .op import tree_attention_op

MAX_HEAD_DIM = 512


def tree_attention(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,  # [T, Hkv, Dv]
    subtree_end: Tensor,  # [P + T] int32
    *,
    scale: float | None = None,
    position: Tensor | None = None,  # [P + T] int
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,  # [Hq]
    prefix_kv: tuple[Tensor, Tensor] | None = None,  # [P, Hkv, D], [P, Hkv, Dv]
) -> Tensor:
    """Attention over trees packed in depth-first order, with exact gradients of q, k, v and sink.

    Row i sees key j iff ``j <= i < subtree_end[j]``: the path from its root to itself. Trees packed back to back, and
    plain sequences (``subtree_end`` = the sequence's end), are separated by the same rule.

    A tree too large for one call is computed in pieces, in the same depth-first order: ``prefix_kv`` are the keys and
    values of the P tokens of earlier pieces that this one still sees. They count as rows 0 to P - 1, these tokens as
    rows P to P + T - 1, and ``subtree_end`` and ``position`` are of all P + T. Gradients flow to the prefix too.

    Args:
        q: queries [T, Hq, D], float32, bfloat16 or float16 (float64 runs on the reference); any strides as long as the
            last dimension is contiguous.
        k: keys [T, Hkv, D], Hkv a divisor of Hq; query head h reads key head ``h // (Hq / Hkv)``.
        v: values [T, Hkv, Dv]. Where Dv differs from D, the narrower are padded with zeros for the kernels.
        subtree_end: [P + T] int32, exclusive end of each token's subtree. Any values are a mask by the rule above, and
            none is used as an index; a row that sees no key gives 0.
        scale: factor of the scores; ``D ** -0.5`` if None.
        position: [P + T] depth of each token along its path; needed with ``window`` or ``chunk`` only.
        window: key j is also hidden once ``position[i] - position[j] >= window`` (sliding-window layers).
        chunk: key j is also hidden unless ``position[i] // chunk == position[j] // chunk`` (chunked attention); does
            not combine with ``window``.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sink: [Hq] float, a logit per query head that takes part in the softmax and adds nothing to the output.
        prefix_kv: keys and values [P, Hkv, D] and [P, Hkv, Dv] of rows before these, of the dtype of k; P = 0 if None.

    Returns:
        [T, Hq, Dv], contiguous, in q's dtype.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit together.
        BackendError: the named backend does not take these arguments.
    """
    check = Arguments("tree_attention", "q", q)
    _check(check, q, k, v, subtree_end, prefix_kv)
    check_sink(check, sink, q.shape[1])
    check.softcap(softcap)
    check.window(window)
    if chunk is not None:
        check.size("chunk", chunk, least=1)
        check.require(window is None, "window and chunk do not combine; give one of them")
    if scale is None:
        scale = q.shape[-1] ** -0.5
    check.number("scale", scale)
    if window is None and chunk is None:
        position = None
    elif position is None:
        check.require(False, "a window or chunk is measured in positions; give position in the shape of subtree_end")
    else:
        position = check.integers("position", position, subtree_end.shape, " like subtree_end")
        position = position.to(torch.int32).contiguous()
        if chunk is not None:  # a window of one chunk, in positions counted in chunks
            position, window = position // chunk, 1
    if prefix_kv is not None:
        k, v = torch.cat([prefix_kv[0], k]), torch.cat([prefix_kv[1], v])
    width, values = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (padded(x, width) for x in (q, k, v))
    out = tree_attention_op(q, k, v, subtree_end.contiguous(), position, float(scale), window, softcap, sink)[0]
    return out if values == width else out[..., :values].contiguous()


def padded(x: Tensor, width: int) -> Tensor:
    """Return ``x`` with zeros after the last dimension up to ``width``: they change no score, and give zeros."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _check(
    check: Arguments, q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor, prefix: tuple[Tensor, Tensor] | None
) -> None:
    T, heads, D = check.floats("q", q, ("T", "Hq", "D")).shape
    check.floats("k", k, (T, "Hkv", D), " like q")
    check.floats("v", v, (*k.shape[:2], "Dv"), " like k")
    check.require(
        k.shape[1] > 0 and heads % max(k.shape[1], 1) == 0,
        lambda: (
            "the query heads must be a multiple of the key heads, not "
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        ),
    )
    for size in (D, v.shape[2]):
        check.require(
            0 < size <= MAX_HEAD_DIM,
            lambda size=size: f"the head dimension must be 1 to {MAX_HEAD_DIM}, not {size}",  # type: ignore[misc]
        )
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
        keys, values = (
            check.floats("prefix_kv", t, ("P", *like.shape[1:]), f" like {name}", (k.dtype,))
            for t, name, like in zip(prefix, "kv", (k, v), strict=True)
        )
        check.require(
            len(keys) == len(values),
            lambda: f"prefix_kv has {len(keys)} keys and {len(values)} values; give one of each",
        )
        N += len(keys)
    check.integers("subtree_end", subtree_end, (N,), ", one for each key with the prefix's")
    check.require(subtree_end.dtype == torch.int32, f"subtree_end must be int32, got {subtree_end.dtype}")


def check_sink(check: Arguments, sink: Tensor | None, heads: int) -> None:
    """Check that ``sink`` is None or a float for each of ``heads`` query heads."""
    if sink is not None:
        check.floats("sink", sink, (heads,), ", one for each query head")
