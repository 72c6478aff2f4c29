"""A padded batch of TRL's as packed trees: every prompt once, however many completions it has."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...data.batch import TreeBatch, pack
from ...data.tree import TokenTree
from ..transformers import MASK_STUB
from .fused_head import Scored


class Packed(NamedTuple):
    """Packed trees, and which of their tokens are the completions'."""

    batch: TreeBatch
    scored: Scored
    valid: Tensor  # [B, C] bool: the completions' tokens; M of them, in this order in ``scored``

    @property
    def model_inputs(self) -> dict[str, Any]:
        b = self.batch
        given: dict[str, Any] = {"input_ids": b.input_ids[None], "position_ids": b.position_ids[None]}
        given |= {"attention_mask": MASK_STUB.to(b.input_ids.device), "subtree_end": b.subtree_end}
        if b.cu_seqlens is not None:
            given |= {"cu_seq_lens_q": b.cu_seqlens, "max_length_q": b.longest}
        return {**given, "scored": self.scored}

    def padded(self, values: Tensor) -> Tensor:  # [M] -> [B, C], 0 where padding is
        return values.new_zeros(self.valid.shape).masked_scatter(self.valid, values)


def pack_completions(
    input_ids: Tensor,  # [B, P + C]: prompts padded on the left, completions on the right
    attention_mask: Tensor,  # [B, P + C]
    completion: int,  # C
) -> Packed:
    """The trees of a batch's prompts and completions.

    Raises:
        ValueError: a prompt is not padded on the left, or a completion not on the right.
    """
    device = input_ids.device
    ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy() != 0
    P = ids.shape[1] - completion
    prompt, response = mask[:, :P].sum(1), mask[:, P:].sum(1)
    columns = np.arange(ids.shape[1])
    if (mask != ((columns >= P - prompt[:, None]) & (columns < P + response[:, None]))).any():
        raise ValueError("Trees need prompts padded on the left and completions on the right; pass tree=False.")
    trees, members = TokenTree.forest(
        [row[P - n : P].tolist() for row, n in zip(ids, prompt, strict=True)],
        [row[P : P + n].tolist() for row, n in zip(ids, response, strict=True)],
    )
    (batch,) = pack(trees, max_tokens=sum(tree.num_tokens for tree in trees), device=device)
    predictor: list[Any] = [None] * len(ids)
    first = 0
    for tree, index in zip(batch.trees, batch.tree_index, strict=True):
        for leaf, sample in enumerate(members[index]):
            predictor[sample] = tree.parent_row[tree.response_rows(leaf)].astype(np.int64) + first
        first += tree.num_tokens
    row, place = np.unique(np.concatenate(predictor), return_inverse=True)
    valid = attention_mask[:, P:].bool()
    scored = Scored(
        torch.from_numpy(row).to(device),
        torch.from_numpy(place.reshape(-1)).to(device),
        input_ids[:, P:][valid],
        batch.copies,
    )
    return Packed(batch, scored, valid)
