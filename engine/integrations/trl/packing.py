"""Model inputs for a padded batch, as it is or as trees, and the rows that predict its completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...data.media import Picture, distinct, expand
from ..trees import packed as trees_of
from .fused_head import Scored


class Batch(NamedTuple):
    """Inputs of the model, and the rows that predict the completions' tokens."""

    inputs: dict[str, Any]
    row: Tensor  # [B, C] int64: index of the flattened hidden state that predicts the token
    valid: Tensor  # [B, C] bool: tokens of completions, False for padding
    target: Tensor  # [B, C] int64
    copies: Tensor | None  # [T] int64: occurrences of each packed token in a flat batch; None: the batch is flat

    def scored(self, mask: Tensor) -> Scored:
        """Return the tokens of ``mask [B, C]`` to score, each distinct row once."""
        row, place = self.row[mask].unique(return_inverse=True)
        return Scored(row, place, self.target[mask], self.copies)


def padded(input_ids: Tensor, attention_mask: Tensor, completion: int, pictures: dict[str, Any]) -> Batch:
    """Return the flat batch; arguments as for :func:`packed`, ``pictures`` as arguments of the model."""
    B, S = input_ids.shape
    row = torch.arange(B * S, device=input_ids.device).view(B, S)[:, S - completion - 1 : -1]
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, **pictures}
    return Batch(inputs, row, attention_mask[:, S - completion :].bool(), input_ids[:, S - completion :], None)


def packed(
    input_ids: Tensor,  # [B, P + C]: prompts padded on the left, completions on the right
    attention_mask: Tensor,  # [B, P + C]
    completion: int,  # C
    *,
    recurrent: bool = False,
    pictures: Sequence[Sequence[Picture]] = (),
    placeholder: int = -1,
) -> Batch:
    """Return the batch as trees, each prompt once for all its completions.

    Args:
        recurrent: the model has recurrent layers.
        pictures: those of each sample's prompt; empty: there are none.
        placeholder: the token id that stands for a row of a picture in prompts.

    Raises:
        ValueError: a prompt is empty or not padded on the left, a completion not on the right, or a prompt has another
            number of placeholders than its pictures have rows.
    """
    device = input_ids.device
    ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy() != 0
    P = ids.shape[1] - completion
    prompt, response = mask[:, :P].sum(1), mask[:, P:].sum(1)
    columns = np.arange(ids.shape[1])
    in_place = mask == ((columns >= P - prompt[:, None]) & (columns < P + response[:, None]))
    if not in_place.all() or not prompt.all():
        raise ValueError("Trees need prompts, padded on the left, and completions on the right; pass tree=False.")
    sequences: list[Any] = [row[m] for row, m in zip(ids, mask, strict=True)]
    for sample, shown in enumerate(pictures):
        begin, whole = prompt[sample], sequences[sample]
        sequences[sample] = np.array([*expand(whole[:begin], shown, placeholder), *whole[begin:]])
    every = distinct([picture for shown in pictures for picture in shown])
    trees = trees_of(sequences, device, recurrent=recurrent, pictures=every)
    row = np.zeros((len(ids), completion), np.int64)
    for sample, (rows, n) in enumerate(zip(trees.rows, prompt, strict=True)):
        row[sample, : response[sample]] = rows[n - 1 : -1]
    valid = attention_mask[:, P:].bool()
    if trees.batch.media is not None:
        trees.inputs["pictures"] = trees.batch
    return Batch(trees.inputs, torch.from_numpy(row).to(device), valid, input_ids[:, P:], trees.copies)
