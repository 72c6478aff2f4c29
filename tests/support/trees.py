"""Random packed trees for the attention tests."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def random_trees(
    tokens: int, seed: int, *, close: float = 0.05, restart: float = 0.01
) -> tuple[Tensor, Tensor, list[int]]:
    """``tokens`` tokens in depth-first order.

    Before each token the path is cut back to a random depth with probability ``close``, and a new tree starts with
    probability ``restart``. Returns subtree_end [T] int32, depth [T] int32 and each token's parent (-1: root).
    """
    rng = random.Random(seed)
    path: list[int] = []
    end, depth, parents = [tokens] * tokens, [0] * tokens, [-1] * tokens
    for token in range(tokens):
        keep = len(path)
        if path and rng.random() < close:
            keep = rng.randrange(1, len(path) + 1)
        if rng.random() < restart:
            keep = 0
        while len(path) > keep:
            end[path.pop()] = token
        depth[token] = len(path)
        parents[token] = path[-1] if path else -1
        path.append(token)
    return torch.tensor(end, dtype=torch.int32), torch.tensor(depth, dtype=torch.int32), parents


def ancestors_mask(parents: list[int]) -> Tensor:
    """[T, T] bool from the parent pointers alone: whether j is i or one of its ancestors."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            seen[token] |= seen[parent]
    return seen
