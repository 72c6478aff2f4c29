"""Log-probs of given continuations: trees of prompts and continuations, prefilled without a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ..data.batch import pack
from ..data.tree import TokenTree
from ..model.decoder import batch_logprob

Array = npt.NDArray[Any]


def score(
    model: PreTrainedModel,
    prompts: Sequence[Array],  # each [P] int32
    continuations: Sequence[Sequence[Sequence[int]]],
    *,
    max_tokens: int,
) -> list[list[Array]]:
    """See `NativeEngine.score`."""
    asked = [i for i, some in enumerate(continuations) if len(some)]
    trees = [TokenTree.from_sequences(prompts[i].tolist(), continuations[i]) for i in asked]
    found: list[list[Array]] = [[] for _ in prompts]
    device = model.get_output_embeddings().weight.device
    for batch in pack(trees, max_tokens=max_tokens, device=device, in_pieces=True):
        with torch.no_grad():
            logprob = batch_logprob(model, batch).logprob.cpu()
        for index, leaves in zip(batch.tree_index, batch.to_leaves(logprob), strict=True):
            found[asked[index]] = [values.numpy() for values in leaves]
    return found
