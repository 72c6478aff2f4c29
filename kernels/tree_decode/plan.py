"""What one step of decode attention reads: the pages of each node and the rows below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checks import Arguments

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

    extent: tuple[int, int] | None = field(init=False, default=None)
    """Pages that the keys lie in, and the least size of a page that holds them; None: made on a device, not known."""

    def __post_init__(self) -> None:
        check = Arguments("DecodePlan", "page_indptr", self.page_indptr)
        K = len(check.tensor("node_length", self.node_length, ("K",)))
        for name, tensor in self.tensors().items():
            sizes: dict[str, int | str] = {"page_indptr": K + 1, "page_ids": "*", "query_position": "N"}
            size = sizes.get(name, K)
            check.tensor(name, tensor, (size,))
            fits = tensor.dtype == torch.int32 and tensor.is_contiguous()
            check.require(fits, f"{name} must be a contiguous int32 vector, not {tensor.dtype} {tensor.stride()}")
        if check.device.type == "cpu" and not torch.compiler.is_compiling():
            object.__setattr__(self, "extent", extent_of([t.numpy() for t in self.tensors().values()]))

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("partials", "extent")}

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
        extent = extent_of(arrays)  # before a GPU follows them
        partials = DecodePlan.count_partials(arrays[3], arrays[5], arrays[6])
        names = [f.name for f in fields(DecodePlan)]  # the tensors, then the count
        tensors: list[Any] = [torch.from_numpy(x).to(device) for x in arrays]
        plan = DecodePlan(**dict(zip(names, [*tensors, partials], strict=False)))
        object.__setattr__(plan, "extent", extent)
        return plan


def extent_of(arrays: Sequence[npt.NDArray[Any]]) -> tuple[int, int]:
    """See `DecodePlan.extent`.

    Raises:
        ValueError: the numbers name pages, rows or keys that cannot be.
    """
    indptr, ids, offset, length, _, begin, end, query = arrays
    owned = np.diff(indptr)
    for good, message in (
        (indptr[0] >= 0 and indptr[-1] <= len(ids) and (owned >= 0).all(), "page_indptr must rise, up to page_ids"),
        (not len(ids) or ids.min() >= 0, "page_ids must not be negative"),
        (not len(length) or min(offset.min(), length.min()) >= 0, "node_offset and node_length must not be negative"),
        (not len(begin) or begin.min() >= 0, "row_begin must not be negative"),
        ((begin <= end).all(), "row_end must not be below row_begin"),
        (not len(end) or end.max() <= len(query), f"row_end must be at most the {len(query)} rows"),
        (not (length[owned == 0] > 0).any(), "a node with keys must have pages"),
    ):
        if not good:
            raise ValueError(f"DecodePlan: {message}.")
    used, ids = length > 0, ids[indptr[0] : indptr[-1]]
    page = int((-(-(offset[used].astype(np.int64) + length[used]) // owned[used])).max(initial=1))
    return int(ids.max(initial=-1)) + 1, page
