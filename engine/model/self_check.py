"""Does a model compute packed trees as it computes flat sequences? Asked once, of real rollouts, before training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from ..data.pack import pack
from ..data.tree import TokenTree
from .decoder import batch_logprob

MOST_TOKENS = 4096  # of the flat sample
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
REDUCED = 0.1  # of bf16 and fp16, whose own rounding moves log-probs by some hundredths


@torch.no_grad()
def tree_error(model: PreTrainedModel, trees: Sequence[TokenTree]) -> float | None:
    """Mean absolute difference of the log-probs of some responses, computed as a tree and as a padded batch.

    A few leaves of the first tree that shares anything, so it costs about one small forward. None: no tree shares
    anything, or the shared ones are too long to look at cheaply.
    """
    sample = _sample(trees)
    if sample is None:
        return None
    training = model.training
    model.eval()
    (packed,) = pack([sample], max_tokens=sample.num_tokens, device=model.device)
    shared = packed.to_leaves(batch_logprob(model, packed).logprob)[0]
    most = int(sample.path_length.max())
    total, count = 0.0, 0
    for batch in pack([sample], max_tokens=max(most, MOST_TOKENS), device=model.device, flat=True):
        alone = batch.to_leaves(batch_logprob(model, batch).logprob)
        for leaf, (values,) in zip(batch.leaf_index, alone, strict=True):
            difference = (values - shared[int(leaf[0])]).abs()
            total, count = total + float(difference.sum()), count + len(values)
    model.train(training)
    return total / count if count else None


def trees_fit(error: float | None, dtype: torch.dtype) -> bool:
    """Whether an error of :func:`tree_error` is within what rounding explains; NaN is not."""
    return error is None or (math.isfinite(error) and error <= TOLERANCE.get(dtype, REDUCED))


def _sample(trees: Sequence[TokenTree]) -> TokenTree | None:
    for tree in sorted(trees, key=lambda t: t.num_tokens):
        order = np.argsort(tree.path_length, kind="stable")
        few = order[np.cumsum(tree.path_length[order]) <= MOST_TOKENS]
        if len(few) >= 2 and tree.logical_tokens > tree.num_tokens:
            kept = np.ones(tree.num_leaves, bool)
            kept[few] = False
            return tree.without_leaves(kept)
    return None
