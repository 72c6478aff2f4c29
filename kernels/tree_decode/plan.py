"""What one step of decode attention reads: the pages of each node and the rows below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK = 512
"""Keys of a node that are summed up together; counted from its first, whoever else reads it."""


@dataclass(frozen=True)
class DecodePlan:
    """Nodes of the KV tree and the query rows that have them on their path; made once a step, used by every layer.

    Rows are sorted depth-first, so the rows of a node are contiguous; nodes come parents first. A row is one query
    token: a decoding sequence has one, a prefill chunk several consecutive ones. All tensors are contiguous int32 on
    the device of the queries; K is the number of nodes, N of rows.
    """

    page_indptr: Tensor  # [K + 1] node n owns page_ids[page_indptr[n] : page_indptr[n + 1]]
    page_ids: Tensor  # [*]
    node_offset: Tensor  # [K] slots to skip in the node's first page
    node_length: Tensor  # [K] keys of the node
    node_position: Tensor  # [K] position of its first key
    row_begin: Tensor  # [K] first row that has the node on its path
    row_end: Tensor  # [K] one past the last
    query_position: Tensor  # [N] a row sees keys at positions up to its own
    partials: int | None = None
    """At least the number of (row, chunk of `CHUNK` keys of a node on its path). A backend that needs it and is not
    told counts on the device, and waits for that once a plan."""

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
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "partials"}

    @staticmethod
    def count_partials(
        node_length: npt.NDArray[Any], row_begin: npt.NDArray[Any], row_end: npt.NDArray[Any]
    ) -> int:  # all [K]
        return int(((row_end - row_begin).astype(np.int64) * -(-node_length // CHUNK)).sum())

    @staticmethod
    def from_host(
        arrays: Sequence[npt.NDArray[Any]],  # int32, the tensors above in order
        device: torch.device,
    ) -> DecodePlan:
        """The plan of arrays on the host, whose partial results are counted there."""
        partials = DecodePlan.count_partials(arrays[3], arrays[5], arrays[6])
        names = [f.name for f in fields(DecodePlan)]  # the tensors, then the count
        tensors: list[Any] = [torch.from_numpy(x).to(device) for x in arrays]
        return DecodePlan(**dict(zip(names, [*tensors, partials], strict=True)))
