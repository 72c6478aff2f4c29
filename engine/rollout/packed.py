"""Weights as they travel to engines in other processes: buckets of whole tensors, or of the elements that changed.

After an update most weights of a bf16 model have the bits that they had before: the change is smaller than half of
their last place. Mukherjee et al. 2025 (arXiv 2505.11711) find 5 to 30 % of them changed after a whole run. An engine
that holds the last weights then needs the changed elements and their places alone, and gets exactly the new weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..data.columns import Array

BUCKET_BYTES = 64 << 20
"""Size of a bucket of weights; a larger tensor has one of its own."""


class Packed(NamedTuple):
    """A tensor, or some of its elements: NumPy has no bfloat16, so bytes travel.

    Attributes:
        data: bytes [n] uint8 of the elements.
        dtype: the tensor's, by PyTorch's name.
        shape: the tensor's.
        places: indices [k] of the elements in the flattened tensor; None for all of them.
    """

    data: Array
    dtype: str
    shape: tuple[int, ...]
    places: Array | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.places is None else self.places.nbytes)


class Changes(NamedTuple):
    """New elements of a tensor of ``shape``: ``values`` [k] at ``places`` [k] int64 of the flattened tensor."""

    places: Tensor
    values: Tensor
    shape: torch.Size


class Bucket(Protocol):
    """A reference to an element of `pack_weights`."""

    def get(self) -> Mapping[str, Packed]: ...


def pack_weights(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Packed]]:
    """Yield copies of tensors in buckets of about `BUCKET_BYTES`."""
    bucket: dict[str, Packed] = {}
    size = 0
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if bucket and size + len(flat) > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        bucket[name] = Packed(flat.numpy().copy(), dtype, tuple(tensor.shape))
        size += len(flat)
    if bucket:
        yield bucket


def pack_changes(before: Mapping[str, Packed], after: Mapping[str, Packed]) -> dict[str, Packed]:
    """Return what turns ``before`` into ``after``, to the bit; a tensor that is smaller whole, or new, is whole."""
    changes: dict[str, Packed] = {}
    for name, new in after.items():
        old = before.get(name)
        changes[name] = new
        if old is not None and (old.dtype, old.shape) == (new.dtype, new.shape):
            bits = f"u{getattr(torch, new.dtype).itemsize}"
            values = new.data.view(bits)
            places = np.flatnonzero(old.data.view(bits) != values)
            places = places.astype(np.uint32 if len(values) <= 2**32 else np.int64)
            sparse = Packed(values[places].view(np.uint8), new.dtype, new.shape, places)
            if sparse.nbytes < new.nbytes:
                changes[name] = sparse
    return changes


def unpack_weights(bucket: Mapping[str, Packed]) -> Iterator[tuple[str, Tensor | Changes]]:
    """Yield the names and tensors of a bucket, copied, because the arrays may be shared by processes."""
    for name, (data, dtype, shape, places) in bucket.items():
        kind = getattr(torch, dtype)
        values = torch.from_numpy(np.array(data)).view(kind) if len(data) else torch.empty(0, dtype=kind)
        if places is None:
            yield name, values.reshape(shape)
        else:
            yield name, Changes(torch.from_numpy(places.astype(np.int64)), values, torch.Size(shape))
