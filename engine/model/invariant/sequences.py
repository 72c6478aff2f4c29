"""Ordinary batches of batch-invariant models, whose attention is that of trees: padded batches have another order of
sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..masks import DeferredMask


def laid_end_to_end(module: nn.Module, mask: Tensor | None, batch: int) -> tuple[Tensor, Tensor]:
    """Return ``subtree_end [B S] int32`` and positions [B S] of an ordinary batch [B, S] whose sequences follow each
    other; the layers of a model share one ``mask`` and what was found.

    Raises:
        ValueError: the keys of earlier calls are in a cache, or a row sees others than those of its path.
    """
    name = type(module).__name__
    if not isinstance(mask, DeferredMask):
        raise ValueError(
            f"{name} of a batch-invariant model computes whole sequences only; pass use_cache=False, or sample by "
            "NativeEngine."
        )
    if mask.end_to_end is not None:
        return mask.end_to_end
    whole_mask = mask.make(skip=False)
    assert whole_mask is not None
    seen = whole_mask.expand(batch, -1, -1, -1)[:, 0]  # [B, S, S]: row, key
    at = torch.arange(seen.shape[1], device=seen.device)
    ends = torch.maximum((seen * (at + 1)[:, None]).amax(1), at + 1)  # [B, S]; padding sees itself
    path = (at <= at[:, None]) & (at[:, None] < ends[:, None])
    if not (seen == path)[seen.diagonal(dim1=1, dim2=2)].all():
        raise ValueError(f"{name} got a mask that is not causal; batch-invariant models compute causal attention only.")
    of_rows = ends + len(at) * torch.arange(batch, device=seen.device)[:, None]
    mask.end_to_end = of_rows.flatten().int(), at.expand(batch, -1).flatten()
    return mask.end_to_end
