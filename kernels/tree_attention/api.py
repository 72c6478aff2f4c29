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
    subtree_end: Tensor,  # [T] int32
    *,
    scale: float | None = None,
    position: Tensor | None = None,  # [T] int
    window: int | None = None,
    softcap: float | None = None,
    prefix_kv: object | None = None,
) -> Tensor:
    """Attention over trees packed in depth-first order, with exact gradients of q, k and v.

    Row i sees key j iff ``j <= i < subtree_end[j]``: the path from its root to itself. Trees packed back to back, and
    plain sequences (``subtree_end`` = the sequence's end), are separated by the same rule.

    Args:
        q: queries [T, Hq, D]; any strides as long as the last dimension is contiguous.
        k: keys [T, Hkv, D], Hkv a divisor of Hq; query head h reads key head ``h // (Hq / Hkv)``.
        v: values [T, Hkv, D].
        subtree_end: [T] int32, exclusive end of each token's subtree; its values are not checked.
        scale: factor of the scores; ``D ** -0.5`` if None.
        position: [T] depth of each token along its path; needed with ``window`` only.
        window: key j is also hidden once ``position[i] - position[j] >= window`` (sliding-window layers).
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        prefix_kv: keys and values of rows before these; not built yet.

    Returns:
        [T, Hq, D], contiguous, in q's dtype (float32, bfloat16, float16; float64 runs on the reference).

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit together.
        NotImplementedError: ``prefix_kv`` is given.
    """
    if prefix_kv is not None:
        raise NotImplementedError("tree_attention cannot take prefix_kv yet; pack the whole tree in one batch.")
    _check(q, k, v, subtree_end)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if softcap is not None and not softcap > 0:
        raise ValueError(f"tree_attention: softcap must be positive, not {softcap}; leave it None for no cap.")
    if window is None:
        position = None
    elif window < 1:
        raise ValueError(f"tree_attention: window must be at least 1, not {window}; leave it None for no window.")
    elif position is None or position.shape != subtree_end.shape:
        raise ValueError("tree_attention: a window is measured in positions; give position with shape [T].")
    else:
        position = position.to(torch.int32).contiguous()
    return tree_attention_op(q, k, v, subtree_end.contiguous(), position, float(scale), window, softcap)[0]


def _check(q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or k.shape[::2] != q.shape[::2]:
        raise ValueError(f"tree_attention takes q [T, Hq, D] and k, v [T, Hkv, D], not {shapes}.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"tree_attention: the query heads must be a multiple of the key heads, not {shapes}.")
    if not 0 < q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"tree_attention: the head dimension must be 1 to {MAX_HEAD_DIM}, not {q.shape[2]}.")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"tree_attention takes q, k, v all float32, bfloat16 or float16, not {q.dtype}, {k.dtype}, {v.dtype}."
        )
    if subtree_end.shape != q.shape[:1] or subtree_end.dtype != torch.int32:
        raise ValueError(
            f"tree_attention takes subtree_end [T] in int32, not {list(subtree_end.shape)} in {subtree_end.dtype}."
        )
    if not q.device == k.device == v.device == subtree_end.device:
        raise ValueError("tree_attention: q, k, v and subtree_end must be on one device.")
    if any(x.shape[2] > 1 and x.stride(2) != 1 for x in (q, k, v)):
        raise ValueError("tree_attention: the last dimension of q, k and v must be contiguous; call .contiguous().")
