"""Records of sampled tokens, and the seeds of branches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def child_seed(
    seed: npt.ArrayLike,  # [...] int64
    index: npt.ArrayLike,  # [...] int64
) -> Array:  # [...] int64
    """Return the seed of a branch's child ``index``: a step of splitmix64, whose mixing function is a bijection.

    A seed is a hash of the path of indices from the prompt, so a sample never depends on the rest of the batch.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        z = np.asarray(seed, np.int64).astype(np.uint64)
        z = _mix(z) + (np.asarray(index, np.int64).astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return _mix(z).astype(np.int64)


def parent_seed(child: int) -> int:
    """Return the seed whose child 0 has the seed ``child``: the inverse of `child_seed`."""
    golden = int(_GOLDEN)
    return (_unmix((_unmix(child % 2**64) - golden) % 2**64) + 2**63) % 2**64 - 2**63


def _unmix(z: int) -> int:
    z ^= z >> 31 ^ z >> 62
    z = z * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    z ^= z >> 27 ^ z >> 54
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return z ^ z >> 30 ^ z >> 60


def _mix(z: Array) -> Array:  # [...] uint64
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@cache
def sample_dtype(top: int) -> np.dtype[Any]:
    """Return the dtype of a token's record, with room for its ``top`` likeliest alternatives."""
    return np.dtype(
        [
            ("token", np.int32),
            ("logprob", np.float32),  # under the distribution it was sampled from
            ("raw_logprob", np.float32),  # under softmax(logits)
            ("entropy", np.float32),  # of softmax(logits / temperature)
            ("version", np.int32),  # of the policy
            ("kept", np.int32),  # i: the token was drawn from Request.kept[i - 1]; 0: not recorded
            ("top_id", np.int32, (top,)),
            ("top_logprob", np.float32, (top,)),  # under softmax(logits / temperature)
            ("top_raw", np.float32, (top,)),  # under softmax(logits)
        ]
    )


def join(parts: Sequence[Array]) -> Array:  # records
    """Concatenate records, with room for as many likeliest tokens as any of them has."""
    joined = np.zeros(sum(map(len, parts)), sample_dtype(max((p["top_id"].shape[1] for p in parts), default=0)))
    begin = 0
    for part in parts:
        rows = joined[begin : begin + len(part)]
        for name in joined.dtype.names or ():
            (rows[name][:, : part[name].shape[1]] if name.startswith("top") else rows[name])[...] = part[name]
        begin += len(part)
    return joined


def top_logprobs(records: Array) -> list[dict[int, float]]:  # [n]
    """Return each record's likeliest tokens under softmax(logits); the sampled token keeps its own ``raw_logprob``."""
    likeliest = []
    columns = (records[name].tolist() for name in ("top_id", "top_raw", "token", "raw_logprob"))
    for ids, logprobs, token, raw_logprob in zip(*columns, strict=True):
        of_ids = zip(ids, logprobs, strict=True)
        likeliest.append({id_: raw_logprob if id_ == token else value for id_, value in of_ids})
    return likeliest


def unsampled(tokens: npt.ArrayLike, version: int = 0, logprobs: npt.ArrayLike = np.nan) -> Array:  # [n] records
    """Return records of tokens that were not sampled, or that a program chose among likely ones."""
    ids = np.asarray(tokens, np.int32).reshape(-1)
    records = np.zeros(len(ids), sample_dtype(0))
    records["token"], records["version"] = ids, version
    records["logprob"] = records["raw_logprob"] = logprobs
    records["entropy"] = np.nan
    return records
