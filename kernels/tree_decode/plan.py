"""What one step of decode attention reads: the pages of each node and the rows below it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .schedule import FIELDS, Schedule, count_partials, items_of, partials_of_rows

Array = npt.NDArray[Any]
ALIGNED = 32  # int32 between the beginnings of columns that share a vector: 128 bytes


@dataclass(frozen=True)
class DecodePlan:
    """Nodes of the KV tree and the query rows that have them on their path; made once a step, used by every layer.

    Rows and nodes are in depth-first order, so the rows of a node are contiguous, and among those of its parent. A row
    is one query token: a decoding sequence has one, a prefill chunk several consecutive ones. All tensors are
    contiguous int32 on the device of the queries; K is the number of nodes, N of rows.
    """

    page_indptr: Tensor  # [K + 1] node n owns page_ids[page_indptr[n] : page_indptr[n + 1]]
    page_ids: Tensor  # [*]
    node_offset: Tensor  # [K] slots to skip in the node's first page
    node_length: Tensor  # [K] keys of the node
    node_position: Tensor  # [K] position of its first key
    row_begin: Tensor  # [K] first row that has the node on its path
    row_end: Tensor  # [K] one past the last
    query_position: Tensor  # [N] a row sees keys at positions up to its own
    schedule: Schedule | None = None
    """Made by `from_host` and `of_columns`. A backend that needs one for query heads a key head that it lacks makes it
    itself: it copies the plan to the host, and waits for that once a plan."""

    def __post_init__(self) -> None:
        for name, tensor in self.tensors().items():
            if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(f"DecodePlan.{name} must be a contiguous int32 vector, not {tensor.dtype}.")
        nodes = self.node_length.numel()
        for name in ("node_offset", "node_position", "row_begin", "row_end"):
            if getattr(self, name).numel() != nodes:
                raise ValueError(f"DecodePlan.{name} has {getattr(self, name).numel()} entries for {nodes} nodes.")
        if self.page_indptr.numel() != nodes + 1:
            raise ValueError(f"DecodePlan.page_indptr has {self.page_indptr.numel()} entries for {nodes} nodes.")

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in TENSORS}

    @staticmethod
    def from_host(
        arrays: Sequence[Array],  # int32, the tensors above in order
        device: torch.device,
        groups: Iterable[int] = (),
    ) -> DecodePlan:
        """The plan of arrays on the host, and its schedule for each of these query heads a key head; one copy."""
        columns = host_columns(arrays, groups)
        places, length = lay_out({name: len(column) for name, column in columns.items()})
        host = np.zeros(length, np.int32)
        for name, column in columns.items():
            host[places[name]] = column
        vector = torch.from_numpy(host).to(device)
        partials = count_partials(arrays[3], arrays[5], arrays[6])
        return DecodePlan.of_columns({name: vector[place] for name, place in places.items()}, partials)

    @staticmethod
    def of_columns(columns: Mapping[str, Tensor], partials: int) -> DecodePlan:
        """The plan of what `host_columns` names, on the device, with room for ``partials`` partials."""
        plan = {name: columns[name] for name in TENSORS}
        items = {int(name[5:]): columns[name].view(-1, FIELDS) for name in columns if name.startswith("items")}
        return DecodePlan(**plan, schedule=Schedule(columns["partial_begin"], items, partials) if items else None)


TENSORS = tuple(f.name for f in fields(DecodePlan) if f.name != "schedule")


def host_columns(arrays: Sequence[Array], groups: Iterable[int]) -> dict[str, Array]:
    """The vectors of a plan and of its schedule for ``groups`` by name, the longest one last; int32."""
    named = dict(zip(TENSORS, arrays, strict=True))
    page_ids = named.pop("page_ids")
    if groups := list(groups):
        named["partial_begin"], before = partials_of_rows(
            named["node_length"], named["row_begin"], named["row_end"], len(named["query_position"])
        )
        named |= {f"items{group}": items_of(arrays, before, group).ravel() for group in groups}
    return {**named, "page_ids": page_ids}


def lay_out(sizes: Mapping[str, int]) -> tuple[dict[str, slice], int]:
    """Places of columns in one vector, each aligned to 128 bytes, and its length."""
    places, at = {}, 0
    for name, size in sizes.items():
        places[name] = slice(at, at + size)
        at += -(-size // ALIGNED) * ALIGNED
    return places, at
