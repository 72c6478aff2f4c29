"""Digests of weights, by which a run checks that a sampler holds what was sent to it.

The digest of a tensor is a sum over its elements, modulo 2^64, of a hash of the element's bits and its position. It
therefore depends on every bit and on the order of the elements. Computing it reads the tensor once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by element size in bytes."""
CHUNK = 1 << 20  # elements; bounds the memory for their int64 form
FACTORS = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64  # of SplitMix64 (Steele et al. 2014)


class Held(NamedTuple):
    """The digest of a weight in the precision in which it is held."""

    dtype: torch.dtype
    digest: int


def digests(weights: Mapping[str, Tensor]) -> dict[str, Held]:
    """Return the digest of each tensor; the host waits once for each device."""
    sums = {name: _sum(tensor.detach()) for name, tensor in weights.items()}
    held: dict[str, Held] = {}
    for device in {value.device for value in sums.values()}:
        here = [name for name, value in sums.items() if value.device == device]
        values = torch.stack([sums[name] for name in here]).tolist()
        held |= {name: Held(weights[name].dtype, value) for name, value in zip(here, values, strict=True)}
    return {name: held[name] for name in weights}


def _sum(tensor: Tensor) -> Tensor:  # -> [] int64
    bits = tensor.contiguous().view(-1).view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    position = torch.arange(1, min(len(bits), CHUNK) + 1, device=bits.device) * FACTORS[0]
    for begin in range(0, len(bits), CHUNK):
        part = bits[begin : begin + CHUNK].to(torch.int64)  # the weights themselves if they have 64 bits
        mixed = part ^ position[: len(part)]
        mixed ^= mixed >> 31
        mixed *= FACTORS[1]
        mixed ^= mixed >> 31
        total = total * FACTORS[1] + (mixed * FACTORS[0]).sum()
    return total
