"""Which tokens of a padded batch are scored, and where the model computes what predicts them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..trees import packed as trees_of
from .fused_head import Scored


class Batch(NamedTuple):
    """What the model is called with, and which of its rows predict the completions' tokens."""

    inputs: dict[str, Tensor | int]
    row: Tensor  # [B, C] int64: of the flattened hidden states, the one that predicts the token
    valid: Tensor  # [B, C] bool: the completions' tokens, of which others may be scored
    target: Tensor  # [B, C] int64
    copies: Tensor | None  # [T] int64: how often a flat batch would hold each token; None: it is one

    def scored(self, mask: Tensor) -> Scored:
        """The tokens of ``mask [B, C]``, each distinct row once."""
        row, place = self.row[mask].unique(return_inverse=True)
        return Scored(row, place, self.target[mask], self.copies)


def padded(input_ids: Tensor, attention_mask: Tensor, completion: int) -> Batch:
    """The batch as it is; arguments as for :func:`packed`."""
    B, S = input_ids.shape
    row = torch.arange(B * S, device=input_ids.device).view(B, S)[:, S - completion - 1 : -1]
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
    return Batch(inputs, row, attention_mask[:, S - completion :].bool(), input_ids[:, S - completion :], None)


def packed(
    input_ids: Tensor,  # [B, P + C]: prompts padded on the left, completions on the right
    attention_mask: Tensor,  # [B, P + C]
    completion: int,  # C
) -> Batch:
    """The trees of the batch: every prompt once, however many completions it has.

    Raises:
        ValueError: a prompt is empty or not padded on the left, or a completion not on the right.
    """
    device = input_ids.device
    ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy() != 0
    P = ids.shape[1] - completion
    prompt, response = mask[:, :P].sum(1), mask[:, P:].sum(1)
    columns = np.arange(ids.shape[1])
    in_place = mask == ((columns >= P - prompt[:, None]) & (columns < P + response[:, None]))
    if not in_place.all() or not prompt.all():
        raise ValueError("Trees need prompts, padded on the left, and completions on the right; pass tree=False.")
    trees = trees_of([row[m] for row, m in zip(ids, mask, strict=True)], device)
    row = np.zeros((len(ids), completion), np.int64)
    for sample, (rows, n) in enumerate(zip(trees.rows, prompt, strict=True)):
        row[sample, : response[sample]] = rows[n - 1 : -1]
    valid = attention_mask[:, P:].bool()
    return Batch(trees.inputs, torch.from_numpy(row).to(device), valid, input_ids[:, P:], trees.copies)
