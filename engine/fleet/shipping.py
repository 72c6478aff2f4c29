"""Weights on their way to engines: each process stores the parts that it has, and references go to the engines.

    rank: its parts -> buckets -> store      driver: references -> engines: buckets -> whole tensors -> model
         '--- against the last buckets -> what changed

With one trainer its process has all parts; with several ranks each stores its shards, and the run's process sees
references alone. A process holds one bucket of 64 MB at a time besides what is stored. Buckets stay stored until those
of the next version are there, for engines that start meanwhile and for the comparison.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..model.sharding import local, region
from ..rollout.digest import part_digests
from ..rollout.packed import Packed, Part, pack_changes, pack_weights
from ..rollout.sampler import WeightSource
from .workers import Reference


class Shipment(NamedTuple):
    """References to stored weights, or to one process's parts of them.

    Attributes:
        whole: the buckets.
        changes: buckets of what changed since the version that was asked for; None if that is not known.
        nbytes: size of ``whole`` in bytes.
        sent_nbytes: size of ``changes``, or of ``whole`` without it.
    """

    whole: list[Reference]
    changes: list[Reference] | None
    nbytes: int
    sent_nbytes: int

    @classmethod
    def joined(cls, shares: Sequence[Shipment]) -> Shipment:
        """Return the shipment of all processes' parts."""
        changes: list[Reference] | None = []
        for share in shares:
            changes = None if changes is None or share.changes is None else changes + share.changes
        return cls(
            [bucket for share in shares for bucket in share.whole],
            changes,
            sum(share.nbytes for share in shares),
            sum(share.nbytes if changes is None else share.sent_nbytes for share in shares),
        )


class Shipper:
    """Stores the parts of the weights that this process has.

    Args:
        put: stores a value for all workers; see `Workers.put`.
    """

    def __init__(self, put: Callable[[Any], Reference]) -> None:
        self._put = put
        self._last: tuple[int, list[Reference]] | None = None  # the newest version and its buckets

    def ship(self, parts: Iterable[Part], version: int, since: int | None) -> Shipment:
        """Store ``parts``, one bucket after the other.

        Args:
            since: version of the weights that engines have; with those of another one, or None, nothing is compared.
        """
        before = self._last[1] if self._last is not None and self._last[0] == since else None
        whole, changes = list[Reference](), list[Reference]()
        nbytes = sent_nbytes = 0
        for number, bucket in enumerate(pack_weights(parts)):
            whole.append(self._put(bucket))
            sent = bucket
            if before is not None:
                sent = pack_changes(before[number].get(), bucket)
                changes.append(self._put(sent))
            nbytes += _size(bucket)
            sent_nbytes += _size(sent)
        self._last = version, whole
        return Shipment(whole, None if before is None else changes, nbytes, sent_nbytes)


def _size(bucket: Sequence[Packed]) -> int:
    return sum(packed.nbytes for packed in bucket)


def owned(tensors: Mapping[str, Tensor], rank: int = 0, ranks: int = 1) -> Iterator[Part]:
    """Yield the parts of parameters that this process publishes, so that all processes together publish each element
    once: its shard, of which several ranks with the same one the first, and every ``ranks``-th whole tensor.

    All ranks must go through it, because a tensor that is computed when it is read may be gathered.
    """
    for number, (name, tensor) in enumerate(tensors.items()):
        if not isinstance(tensor, DTensor):
            if number % ranks == rank:
                yield Part(name, tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))
            continue
        copies = [dim for dim, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
        if not any(tensor.device_mesh.get_local_rank(dim) for dim in copies):
            first = tuple(begin for begin, _ in region(tensor))
            yield Part(name, local(tensor.detach()), first, tuple(tensor.shape))


class Elsewhere(ABC):
    """A `WeightSource` of weights that other processes have; its tensors have no values (device "meta")."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Return all parameters by their names in the model, without values."""

    @abstractmethod
    def ship(self, version: int, since: int | None) -> Shipment:
        """Let the processes store their parts; see `Shipper.ship`."""

    @abstractmethod
    def ship_again(self, version: int) -> Shipment | None:
        """Let the processes store all of their parts once more; called from any thread.

        Returns:
            None if they do other work now, or have weights of another version.
        """

    @abstractmethod
    def digests(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
        """Return the digests of the parameters that ``dtypes`` names, in these precisions."""


def ship(weights: WeightSource, shipper: Shipper, version: int, since: int | None) -> Shipment:
    """Store ``weights`` where they are: by ``shipper`` if this process has them."""
    if isinstance(weights, Elsewhere):
        return weights.ship(version, since)
    return shipper.ship(owned(weights.tensors()), version, since)


def digests_of(weights: WeightSource, dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
    """Return the digests of the parameters that ``dtypes`` names, in these precisions, computed where they are."""
    if isinstance(weights, Elsewhere):
        return weights.digests(dtypes)
    return part_digests(owned(weights.tensors()), dtypes)
