"""Keeps values that are not finite on the paths that hold them, for every backend, on a CPU.

A block's products also multiply keys that a row does not see, by 0, and 0 times NaN or inf is NaN. So rows that are not
finite are zeros in the products, and what sees them becomes NaN afterwards. A row without a gradient gives none, finite
or not. On a GPU to look for such rows would make the host wait: there they reach the other rows of their block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .reference import Scoring, sees

ELEMENTS_AT_ONCE = 2**24
Pair = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]


def forward(run: Callable[..., Pair], q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Pair:
    """Return ``run(q, k, v, scoring)``, see `reference.tree_attention_forward`, with NaN where a row sees one."""
    if _finite(q, k, v):
        return run(q, k, v, scoring)
    of_rows, of_keys = _rows(q), _rows(k) | _rows(v)
    out, lse = run(_zeroed(q, of_rows), _zeroed(k, of_keys), _zeroed(v, of_keys), scoring)
    spoiled = of_rows | _any_seen(scoring, of_keys, len(q))
    return out.masked_fill(spoiled[:, None, None], torch.nan), lse.masked_fill(spoiled, torch.nan)


def backward(
    run: Callable[..., Three],
    grad_out: Tensor,  # [T, Hq, D]
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    out: Tensor,  # [T, Hq, D]
    lse: Tensor,  # [Hq, T]
    scoring: Scoring,
) -> Three:
    """Return ``run`` of the same arguments, see `reference.tree_attention_backward`, with NaN where `forward` has it.

    A key gets NaN from a row that is not finite and has a gradient, and a row from what it sees.
    """
    if _finite(grad_out, q, k, v):
        return run(grad_out, q, k, v, out, lse, scoring)
    of_keys = _rows(k) | _rows(v)
    left_out = lse.isnan().any(0) | _rows(grad_out)
    lse, out = lse.masked_fill(left_out, 0), _zeroed(out, left_out)
    k, v = _zeroed(k, of_keys), _zeroed(v, of_keys)
    dq, dk, dv = run(_zeroed(grad_out, left_out), _zeroed(q, left_out), k, v, out, lse, scoring)
    spoiled = left_out & (grad_out != 0).flatten(1).any(1)
    keys = _any_seeing(scoring, spoiled, len(k))[:, None, None]
    dq = dq.masked_fill(spoiled[:, None, None], torch.nan)
    return dq, dk.masked_fill(keys, torch.nan), dv.masked_fill(keys, torch.nan)


def _finite(*tensors: Tensor) -> bool:
    """Return whether all values are finite; False also where a sum of them is too large."""
    return all(bool(t.sum(dtype=None if t.dtype == torch.float64 else torch.float32).isfinite()) for t in tensors)


def _rows(t: Tensor) -> Tensor:  # [T, H, D] -> [T] bool
    return ~t.isfinite().flatten(1).all(1)


def _zeroed(t: Tensor, rows: Tensor) -> Tensor:
    return t.masked_fill(rows[:, None, None], 0)


def _any_seen(scoring: Scoring, keys: Tensor, rows: int) -> Tensor:  # [N] bool -> [T] bool
    """Return whether each of the last ``rows`` rows sees one of ``keys``."""
    seen = [part.any(1) for _, part in _parts(scoring, keys.nonzero().flatten(), rows)]
    return torch.cat(seen) if seen else keys[:0]


def _any_seeing(scoring: Scoring, rows: Tensor, keys: int) -> Tensor:  # [T] bool -> [N] bool
    """Return whether one of ``rows`` sees each key."""
    seeing = rows.new_zeros(keys)
    for of, part in _parts(scoring, torch.arange(keys), len(rows)):
        seeing |= part[rows[of]].any(0)
    return seeing


def _parts(scoring: Scoring, keys: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the rows, and which of ``keys`` each sees."""
    first = len(scoring.subtree_end) - rows
    size = max(1, ELEMENTS_AT_ONCE // max(len(keys), 1))
    for begin in range(0, rows, size):
        end = min(begin + size, rows)
        yield slice(begin, end), sees(scoring, torch.arange(first + begin, first + end), keys)
