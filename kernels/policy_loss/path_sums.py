"""Sums over runs and paths, each of its own values alone, in fp64 and in a fixed order.

Differences of one running sum would need fewer passes, but a single -inf, NaN or huge value would then change the sums
of all later paths. So runs are reduced one by one, and paths of a tree, which overlap, are cut into blocks of 1, 2,
4, ... targets that paths share: a path of n targets is one block for each bit of n.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SegmentSum:
    """Sums values over runs of equal labels: ``[M] -> [M]``, at each element the sum over its run."""

    def __init__(self, label: Tensor) -> None:  # [M]
        M = len(label)
        place = torch.arange(M, device=label.device)
        begins = torch.ones(M, dtype=torch.bool, device=label.device)
        begins[1:] = label[1:] != label[:-1]
        self.first = torch.where(begins, place, 0).cummax(0).values if M else place
        last = torch.where(begins.roll(-1), place, M).flip(0).cummin(0).values.flip(0) if M else place
        self.length = torch.where(begins, last + 1 - place, 0)  # of the run that begins at an element, 0: none does

    def __call__(self, values: Tensor) -> Tensor:
        sums = torch.segment_reduce(values.double(), "sum", lengths=self.length, unsafe=True)
        return sums[self.first].to(values.dtype)


class PathSum:
    """Sums ``[M] -> [L]`` over the last targets of each leaf's path, and their adjoint.

    The time is M times the logarithm of the longest path; nothing waits for a GPU, which takes M for its length.
    """

    def __init__(self, target_end: Tensor, leaf_target: Tensor, leaf_start: Tensor | None) -> None:  # see `PathIndex`
        self.size, self.leaves = len(target_end), len(leaf_target)
        jump, depth = previous(target_end)
        M, none = len(jump), jump.new_tensor([len(jump)])
        jump, depth = torch.cat([jump, none]), torch.cat([depth, none * 0])
        at = torch.where(leaf_target < 0, M, leaf_target)
        count = depth[at]
        if leaf_start is not None:
            count = count - torch.where(leaf_target < 0, 0, depth[torch.where(leaf_start < 0, M, leaf_start)])
        longest = int(count.max()) if count.device.type == "cpu" and len(count) else M
        self.blocks: list[tuple[Tensor, Tensor, Tensor]] = []  # for each size: next block, place and use by a leaf
        for k in range(longest.bit_length()):
            used = (count >> k) & 1 == 1
            self.blocks.append((jump, at, used))
            at, jump = torch.where(used, jump[at], at), jump[jump]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums ``[L]`` of ``values [M]``."""
        block = torch.cat([values.double(), values.new_zeros(1, dtype=torch.float64)])
        total = block.new_zeros(self.leaves)
        for jump, at, used in self.blocks:
            total = torch.where(used, total + block[at], total)
            block = block + block[jump]
        return total.to(values.dtype)

    def spread(self, values: Tensor) -> Tensor:
        """Return ``[M]``: at each target the sum of ``values [L]`` over the leaves whose sums it is in."""
        block = values.new_zeros(self.size + 1, dtype=torch.float64)
        for jump, at, used in reversed(self.blocks):
            # index_put sorts instead of adding atomically, so the order of the sum is fixed.
            block = block.index_put((jump,), block, accumulate=True)
            block = block.index_put((at,), torch.where(used, values.double(), 0), accumulate=True)
        return block[:-1].to(values.dtype)


def previous(target_end: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target before each of ``[M]`` on its path, M for the first, and how many the path has up to it."""
    M = len(target_end)
    place = torch.arange(M, device=target_end.device)
    ended = place.new_zeros(M + 1).index_put((target_end.long(),), torch.ones_like(place), accumulate=True)
    depth = place + 1 - ended.cumsum(0)[:M]
    key, order = (depth * M + place).sort()
    before = torch.searchsorted(key, (depth - 1) * M + place) - 1
    return torch.where(depth > 1, order[before.clamp(min=0)], M), depth
