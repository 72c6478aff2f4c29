"""Log-probs of given tokens: trees of prompts and continuations are prefilled without a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...batches.cost import Work
from ...batches.pack import pack
from ...data.tree import TokenTree
from ...model.decoder import decode
from ...model.logprob import batch_logprob
from ..records import sample_dtype

Array = npt.NDArray[Any]
ROWS = 256  # rows whose logits are in memory at once


def score(
    model: PreTrainedModel,
    prompts: Sequence[Array],  # each [P] int32
    continuations: Sequence[Sequence[Sequence[int]]],
    *,
    max_tokens: int,
) -> tuple[list[list[Array]], Work]:
    """Return the log-probs of `RolloutEngine.score`, computed in micro-batches of ``max_tokens`` tokens, and what was
    computed."""
    scored = [i for i, of_prompt in enumerate(continuations) if len(of_prompt)]
    trees = [TokenTree.from_sequences(prompts[i].tolist(), continuations[i]) for i in scored]
    logprobs: list[list[Array]] = [[] for _ in prompts]
    device = model.get_output_embeddings().weight.device
    batches = pack(trees, max_tokens=max_tokens, device=device, in_pieces=True)
    for batch in batches:
        with torch.no_grad():
            logprob = batch_logprob(model, batch).logprob.cpu()
        for index, leaves in zip(batch.tree_index, batch.to_leaves(logprob), strict=True):
            logprobs[scored[index]] = [values.numpy() for values in leaves]
    return logprobs, Work.of(batches)


def prompt_logprobs(
    model: PreTrainedModel,
    logits_of: Callable[[Tensor], Tensor],  # [N, H] -> [N, V] fp32
    ids: Array,  # [P] int32
    top: int,
) -> Array:  # [P - 1] records
    """Compute `RolloutEngine.prompt_logprobs` with ``top`` likeliest tokens at each position."""
    records = np.zeros(len(ids) - 1, sample_dtype(top))
    records["token"] = ids[1:]
    if not len(records):
        return records
    tree = TokenTree.from_sequences(ids[:1].tolist(), [ids[1:].tolist()])
    device = model.get_output_embeddings().weight.device
    (batch,) = pack([tree], max_tokens=len(ids), device=device)
    hidden = decode(model, batch).hidden
    target = torch.from_numpy(ids[1:].astype(np.int64)).to(device)
    for begin in range(0, len(records), ROWS):
        rows = slice(begin, min(begin + ROWS, len(records)))
        logits = logits_of(hidden[rows])
        logsumexp = logits.logsumexp(-1, keepdim=True)
        records["raw_logprob"][rows] = (logits.gather(1, target[rows, None]) - logsumexp)[:, 0].cpu().numpy()
        likeliest = logits.topk(top, dim=-1)
        records["top_id"][rows] = likeliest.indices.cpu().numpy()
        records["top_raw"][rows] = (likeliest.values - logsumexp).cpu().numpy()
    records["logprob"] = records["entropy"] = np.nan
    return records
