"""Public entry of tree attention: checks its arguments and calls the custom op."""

from __future__ import annotations

import torch
from torch import Tensor

from .op import tree_attention_op

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
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
        q: queries [T, Hq, D]; any strides as long as the last dimension is contiguous.
        k: keys [T, Hkv, D], Hkv a divisor of Hq; query head h reads key head ``h // (Hq / Hkv)``.
        v: values [T, Hkv, D].
        subtree_end: [P + T] int32, exclusive end of each token's subtree; its values are not checked.
        scale: factor of the scores; ``D ** -0.5`` if None.
        position: [P + T] depth of each token along its path; needed with ``window`` only.
        window: key j is also hidden once ``position[i] - position[j] >= window`` (sliding-window layers).
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        prefix_kv: keys and values [P, Hkv, D] of rows before these, of the dtype of k; P = 0 if None.

    Returns:
        [T, Hq, D], contiguous, in q's dtype (float32, bfloat16, float16; float64 runs on the reference).

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit together.
    """
    _check(q, k, v, subtree_end, prefix_kv)
    if prefix_kv is not None:
        k, v = torch.cat([prefix_kv[0], k]), torch.cat([prefix_kv[1], v])
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if softcap is not None and not softcap > 0:
        raise ValueError(f"tree_attention: softcap must be positive, not {softcap}; leave it None for no cap.")
    if window is None:
        position = None
    elif window < 1:
        raise ValueError(f"tree_attention: window must be at least 1, not {window}; leave it None for no window.")
    elif position is None or position.shape != subtree_end.shape:
        raise ValueError(
            "tree_attention: a window is measured in positions; give position in the shape of subtree_end."
        )
    else:
        position = position.to(torch.int32).contiguous()
    return tree_attention_op(q, k, v, subtree_end.contiguous(), position, float(scale), window, softcap)[0]


def _check(q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor, prefix: tuple[Tensor, Tensor] | None) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or k.shape[::2] != q.shape[::2]:  # same T, same D
        raise ValueError(f"tree_attention takes q [T, Hq, D] and k, v [T, Hkv, D], not {shapes}.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"tree_attention: the query heads must be a multiple of the key heads, not {shapes}.")
    if not 0 < q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"tree_attention: the head dimension must be 1 to {MAX_HEAD_DIM}, not {q.shape[2]}.")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"tree_attention takes q, k, v all float32, bfloat16 or float16, not {q.dtype}, {k.dtype}, {v.dtype}."
        )
    before = 0
    if prefix is not None:
        if any(
            t.dim() != 3 or t.shape[1:] != k.shape[1:] or t.dtype != k.dtype or t.device != k.device for t in prefix
        ):
            raise ValueError(
                f"tree_attention takes prefix_kv [P, Hkv, D] like k {list(k.shape)} ({k.dtype}, {k.device}), not "
                f"{' and '.join(f'{list(t.shape)} ({t.dtype}, {t.device})' for t in prefix)}."
            )
        before = len(prefix[0])
        if len(prefix[1]) != before:
            raise ValueError(
                f"tree_attention: prefix_kv has {before} keys and {len(prefix[1])} values; give one of each."
            )
    if subtree_end.shape != (before + len(q),) or subtree_end.dtype != torch.int32:
        raise ValueError(
            f"tree_attention takes subtree_end [{before + len(q)}] in int32, one for each key with the prefix's, not "
            f"{list(subtree_end.shape)} in {subtree_end.dtype}."
        )
    if not q.device == k.device == v.device == subtree_end.device:
        raise ValueError("tree_attention: q, k, v and subtree_end must be on one device.")
    if any(x.shape[2] > 1 and x.stride(2) != 1 for x in (q, k, v)):
        raise ValueError("tree_attention: the last dimension of q, k and v must be contiguous; call .contiguous().")
