"""Packs the sequences of a trainer's flat batch as trees, for trainers that lay out their batches themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batches.batch import TreeBatch, recurrence_of
from ..batches.pack import pack
from ..data.media import FIRST_ID, Picture
from ..data.tree import TokenTree
from ..model.attention import Tree, tree_mask
from ..model.loading import LAYER_KINDS, TREE_LAYERS
from ..model.recurrent import RECURRENT


class Packed(NamedTuple):
    """Inputs of a model with the attention "rolltree", and the row of each token in them."""

    inputs: dict[str, Any]
    rows: list[npt.NDArray[np.int64]]  # for each sequence the packed rows [n] of its tokens
    copies: Tensor  # [T] int64, number of occurrences of each packed token in a flat batch
    batch: TreeBatch


def packed(
    sequences: Sequence[npt.NDArray[Any]],  # [n] token ids each, n >= 1
    device: torch.device | str,
    *,
    recurrent: bool = False,
    pictures: Sequence[Picture] = (),
) -> Packed:
    """Pack sequences as trees, each shared prefix once.

    Args:
        recurrent: the model has recurrent layers, which need the segments of the trees.
        pictures: those whose rows the sequences hold (`media.expand`).

    Raises:
        ValueError: a sequence has no token, or holds a row of another picture.
    """
    whole: list[Any] = list(sequences)
    begin, rest = [ids[:1] for ids in whole], [ids[1:] for ids in whole]
    words: dict[str, Any] = {"loss_masks": [ids < FIRST_ID for ids in rest]} if pictures else {}  # pictures are in none
    trees, members = TokenTree.forest(begin, rest, pictures=pictures, **words)
    (batch,) = pack(trees, max_tokens=sum(tree.num_tokens for tree in trees), device=device)
    rows: dict[int, npt.NDArray[np.int64]] = {}
    first = 0
    for tree, index in zip(batch.trees, batch.tree_index, strict=True):
        paths = np.split(tree.all_path_rows + first, np.cumsum(tree.path_length)[:-1])
        rows.update(zip(members[index].tolist(), paths, strict=True))
        first += tree.num_tokens
    inputs: dict[str, Any] = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
    mask = tree_mask(Tree(batch.subtree_end, batch.position_ids, None, batch.cu_seqlens, batch.longest), device)
    inputs |= {"attention_mask": mask, "subtree_end": batch.subtree_end}
    if batch.cu_seqlens is not None:
        inputs |= {"cu_seq_lens_q": batch.cu_seqlens, "max_length_q": batch.longest}
    if recurrent:
        inputs["recurrence"] = recurrence_of(batch)
    return Packed(inputs, [rows[i] for i in range(len(sequences))], batch.copies, batch)


def odd_layers(model: PreTrainedModel) -> list[str]:
    """Return the kinds of the model's layers that cannot be computed on trees."""
    config = model.config.get_text_config()
    kinds = {kind for name in LAYER_KINDS for kind in getattr(config, name, None) or ()} - set(TREE_LAYERS)
    kinds = kinds or {type(m).__name__ for m in model.modules() if RECURRENT.search(type(m).__name__)}
    return sorted(kinds)
