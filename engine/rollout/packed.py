"""Weights as they travel to engines in other processes: buckets of parts of tensors, or of the elements that changed.

Every process that trains packs the parts that it has, so none needs a whole tensor.

After an update most weights of a bf16 model have the bits that they had before: the change is smaller than half of
their last place. Mukherjee et al. 2025 (arXiv 2505.11711) find 5 to 30 % of them changed after a whole run. An engine
that holds the last weights then needs the changed elements and their places alone, and gets exactly the new weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..data.columns import Array

BUCKET_BYTES = 64 << 20
"""Size of a bucket of weights; larger parts are cut by rows."""


class Part(NamedTuple):
    """A rectangular part of a parameter, or all of it.

    Attributes:
        name: the parameter's in the model.
        tensor: the part.
        first: index of its first element in the whole parameter, a number for each dimension.
        shape: the whole parameter's.
    """

    name: str
    tensor: Tensor
    first: tuple[int, ...]
    shape: tuple[int, ...]


class Packed(NamedTuple):
    """A `Part`, or some of its elements: NumPy has no bfloat16, so bytes travel.

    Attributes:
        name: the parameter's in the model.
        data: bytes [n] uint8 of the elements.
        dtype: the parameter's, by PyTorch's name.
        first: index of the part's first element in the whole parameter.
        size: the part's shape.
        shape: the whole parameter's.
        places: indices [k] of the elements in the flattened part; None for all of them.
    """

    name: str
    data: Array
    dtype: str
    first: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]
    places: Array | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.places is None else self.places.nbytes)

    @property
    def region(self) -> tuple[slice, ...]:
        """The part's place in the whole parameter."""
        return tuple(slice(begin, begin + count) for begin, count in zip(self.first, self.size, strict=True))

    @property
    def kind(self) -> torch.dtype:
        """The parameter's dtype."""
        kind: torch.dtype = getattr(torch, self.dtype)
        return kind

    @property
    def bits(self) -> str:
        """NumPy's integers of an element's size."""
        return f"i{self.kind.itemsize}"


class Patch(NamedTuple):
    """New elements of the ``region`` of a tensor: ``values`` [k] at ``places`` [k] int64 of the flattened region, or
    all of them in order."""

    region: tuple[slice, ...]
    values: Tensor
    places: Tensor | None


class Changes(NamedTuple):
    """The elements of a tensor of ``shape`` that changed."""

    patches: list[Patch]
    shape: torch.Size

    def apply(self, tensor: Tensor) -> None:
        """Write the changes to ``tensor``, rounded to its precision."""
        for region, values, places in self.patches:
            part, new = tensor[region], values.to(tensor.device, tensor.dtype)
            if places is None:
                part.copy_(new.view(part.shape))
            else:
                part.put_(places.to(tensor.device), new)


class Bucket(Protocol):
    """A reference to an element of `pack_weights`."""

    def get(self) -> Sequence[Packed]: ...


def cut(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield parts in pieces of at most `BUCKET_BYTES`, or of one row; nothing for those without elements."""
    for part in parts:
        tensor = part.tensor
        if tensor.dim() == 0:
            yield part
        elif tensor.numel():
            rows = max(1, BUCKET_BYTES // tensor[:1].nbytes)
            for begin in range(0, len(tensor), rows):
                yield part._replace(tensor=tensor[begin : begin + rows], first=(part.first[0] + begin, *part.first[1:]))


def pack_weights(parts: Iterable[Part]) -> Iterator[list[Packed]]:
    """Yield copies of parts in buckets of about `BUCKET_BYTES`."""
    bucket: list[Packed] = []
    size = 0
    for name, tensor, first, shape in cut(parts):
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if bucket and size + len(flat) > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        bucket.append(Packed(name, flat.numpy().copy(), dtype, first, tuple(tensor.shape), shape))
        size += len(flat)
    if bucket:
        yield bucket


def pack_changes(before: Sequence[Packed], after: Sequence[Packed]) -> list[Packed]:
    """Return what turns ``before`` into ``after``, to the bit; a part that is smaller whole, or new, is whole."""
    former = {(old.name, old.first): old for old in before}
    changes: list[Packed] = []
    for new in after:
        old = former.get((new.name, new.first))
        changes.append(new)
        if old is not None and (old.dtype, old.size, old.shape) == (new.dtype, new.size, new.shape):
            values = new.data.view(new.bits)
            places = np.flatnonzero(old.data.view(new.bits) != values)
            places = places.astype(np.uint32 if len(values) <= 2**32 else np.int64)
            sparse = new._replace(data=values[places].view(np.uint8), places=places)
            if sparse.nbytes < new.nbytes:
                changes[-1] = sparse
    return changes


def unpack_weights(buckets: Iterable[Sequence[Packed]]) -> dict[str, Tensor]:
    """Return whole tensors by name, put together from their parts, which are copied.

    Raises:
        ValueError: a part is missing, or there twice.
    """
    wholes: dict[str, tuple[Array, torch.dtype]] = {}
    filled: Counter[str] = Counter()
    for bucket in buckets:
        for packed in bucket:
            if packed.name not in wholes:
                wholes[packed.name] = np.empty(packed.shape, packed.bits), packed.kind
            wholes[packed.name][0][packed.region] = packed.data.view(packed.bits).reshape(packed.size)
            filled[packed.name] += math.prod(packed.size)
    _check_whole(filled, {name: whole.size for name, (whole, _) in wholes.items()})
    return {name: torch.from_numpy(whole).view(kind) for name, (whole, kind) in wholes.items()}


def unpack_changes(buckets: Iterable[Sequence[Packed]]) -> dict[str, Changes]:
    """Return the changes of tensors by name, copied, because the arrays may be shared by processes.

    Raises:
        ValueError: a part is missing, or there twice.
    """
    changes: dict[str, Changes] = {}
    filled: Counter[str] = Counter()
    for bucket in buckets:
        for packed in bucket:
            values = torch.from_numpy(np.array(packed.data.view(packed.bits))).view(packed.kind)
            places = None if packed.places is None else torch.from_numpy(packed.places.astype(np.int64))
            of_tensor = changes.setdefault(packed.name, Changes([], torch.Size(packed.shape)))
            of_tensor.patches.append(Patch(packed.region, values, places))
            filled[packed.name] += math.prod(packed.size)
    _check_whole(filled, {name: change.shape.numel() for name, change in changes.items()})
    return changes


def _check_whole(filled: Counter[str], sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if filled[name] != size:
            raise ValueError(
                f"The parts of '{name}' that were sent have {filled[name]} of {size} elements; this is a defect of "
                "rolltree, please report it."
            )
