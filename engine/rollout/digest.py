"""Digests of weights, by which a run checks that a sampler holds what was sent to it.

The digest of a tensor is a sum over its elements, modulo 2^64, of a hash of the element's bits and its position. It
therefore depends on every bit and on the order of the elements. Computing it reads the tensor once, and processes that
have parts of a tensor add up what theirs contribute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .packed import Part, cut

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


def part_digests(parts: Iterable[Part], dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
    """Return what parts contribute to the digests of parameters in the precisions ``dtypes``, by name; `whole_digest`
    adds up those of all parts. Parameters that ``dtypes`` does not name are left out."""
    shares: dict[str, list[int]] = {}
    for name, tensor, first, shape in cut(parts):
        if name in dtypes:
            held = tensor.detach().to(dtypes[name])
            shares.setdefault(name, []).append(int(_sum(held) if held.shape == shape else _share(held, first, shape)))
    return {name: whole_digest(of_parts) for name, of_parts in shares.items()}


def whole_digest(shares: Iterable[int]) -> int:
    """Return the digest of a tensor from the contributions of its parts."""
    return (sum(shares) + 2**63) % 2**64 - 2**63


def _sum(tensor: Tensor) -> Tensor:  # -> [] int64
    bits = _bits(tensor)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    position = torch.arange(1, min(len(bits), CHUNK) + 1, device=bits.device) * FACTORS[0]
    for begin in range(0, len(bits), CHUNK):
        part = bits[begin : begin + CHUNK].to(torch.int64)  # the weights themselves if they have 64 bits
        total = total * FACTORS[1] + _hashed(part, position[: len(part)]).sum()
    return total


def _share(tensor: Tensor, first: Sequence[int], shape: Sequence[int]) -> Tensor:  # -> [] int64
    """Return the sum of `_sum` of a tensor of ``shape`` over the elements of its part ``tensor``."""
    bits = _bits(tensor)
    powers = [1]
    for _ in range(1, -(-math.prod(shape) // CHUNK)):
        powers.append(whole_digest([powers[-1] * FACTORS[1]]))
    of_chunk = torch.tensor(powers[::-1], device=bits.device)
    share = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, len(bits), CHUNK):
        part = bits[begin : begin + CHUNK].to(torch.int64)
        place = _places(torch.arange(begin, begin + len(part), device=bits.device), tensor.shape, first, shape)
        hashed = _hashed(part, (place % CHUNK + 1) * FACTORS[0])
        share = share + (hashed * of_chunk[place // CHUNK]).sum()
    return share


def _bits(tensor: Tensor) -> Tensor:  # -> [N] integers
    return tensor.contiguous().view(-1).view(BITS[tensor.element_size()])


def _hashed(bits: Tensor, position: Tensor) -> Tensor:  # [N], [N] int64
    mixed = bits ^ position
    mixed ^= mixed >> 31
    mixed *= FACTORS[1]
    mixed ^= mixed >> 31
    return mixed * FACTORS[0]


def _places(of_part: Tensor, size: Sequence[int], first: Sequence[int], shape: Sequence[int]) -> Tensor:  # [N] int64
    """Return the places in a flattened tensor of ``shape`` of elements of its part, given their places in the part."""
    merged = [(1, 0, 1)]  # size, first and whole; from the last dimension, and those within a part's rows are one
    for dimension in zip(reversed(size), reversed(first), reversed(shape), strict=True):
        count, _, whole = merged[-1]
        if count == whole:
            merged[-1] = dimension[0] * whole, dimension[1] * whole, dimension[2] * whole
        else:
            merged.append(dimension)
    places, stride, rest = torch.zeros_like(of_part), 1, of_part
    for count, begin, whole in merged[:-1]:
        places += (rest % count + begin) * stride
        rest, stride = rest // count, stride * whole
    return places + (rest + merged[-1][1]) * stride
