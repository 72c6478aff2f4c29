"""The plan of a step of decode attention: the pages of each node and the rows below it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checks import Arguments
from .items import FIELDS
from .schedule import HAS_NUMPY, Nodes, Schedule, Work, columns_of, count_partials

if TYPE_CHECKING:
    from .items import Array

ALIGNED = 32  # columns that share a vector begin at multiples of this many int32, 128 bytes


@dataclass(frozen=True)
class DecodePlan:
    """Nodes of the KV tree and the query rows that have them on their path; made once a step, used by every layer.

    Rows and nodes are in depth-first order, so the rows of a node are contiguous, and among those of its parent. A row
    is one query token: a decoding sequence has one, a prefill chunk several consecutive ones. All tensors are
    contiguous int32 on the device of the queries; K is the number of nodes, N of rows.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or (on a CPU) names pages, rows or keys that cannot
            exist.
        ImportError: numpy is not installed.
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
    """Made by `from_host` and `of_columns`. A backend that needs a number of query heads a key head that it lacks makes
    the schedule itself: it copies the plan to the host, and waits for that once a plan.
    """

    extent: tuple[int, int] | None = field(init=False, default=None)
    """Number of pages that the keys lie in, and the least size of a page that holds them; None: not known, so not
    checked."""

    def __post_init__(self) -> None:
        if not HAS_NUMPY:
            raise ImportError("DecodePlan is made by numpy, which is not installed; pip install numpy.")
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
        return {name: getattr(self, name) for name in TENSORS}

    def work(self, group: int) -> Work:
        """Return the items for ``group`` query heads a key head, as far as the plan has them."""
        if self.schedule is None:
            return Work(None, None, 0)
        items = self.schedule.items.get(group)
        slots = None if self.schedule.slots is None else self.schedule.slots.get(group)
        return Work(self.schedule.partial_begin, items, self.schedule.partials, self.schedule.parent, slots)

    def located(self, page: int) -> DecodePlan:
        """Return the plan of a step with the slots of its items' keys, in pages of ``page``, so that backend
        ``invariant`` does not find them in each layer; the plan itself if it has no such items."""
        schedule = self.schedule
        if schedule is None or schedule.parent is None:
            return self
        from .invariant import slots_of_items

        nodes = Nodes(**self.tensors())
        slots = {group: slots_of_items(nodes, items, schedule.parent, page) for group, items in schedule.items.items()}
        plan = object.__new__(DecodePlan)
        vars(plan).update(vars(self), schedule=schedule._replace(slots=slots))
        return plan

    @staticmethod
    def from_host(
        arrays: Sequence[Array],  # int32, the tensors of a plan in order
        device: torch.device,
        groups: Iterable[int] = (),
        by_path: bool = False,
    ) -> DecodePlan:
        """Make the plan of arrays on the host, with one copy to ``device``.

        Args:
            arrays: int32, in the order of the tensors of a plan.
            device: where the queries are.
            groups: numbers of query heads a key head to make schedules for.
            by_path: the schedules are those of backend ``invariant``.

        Raises:
            ValueError: the arrays name pages, rows or keys that cannot exist.
        """
        import numpy as np

        columns = host_columns(arrays, groups, by_path)
        places, length = lay_out({name: len(column) for name, column in columns.items()})
        host = np.zeros(length, np.int32)
        for name, column in columns.items():
            host[places[name]] = column
        vector = torch.from_numpy(host).to(device)
        begin = columns.get("partial_begin")
        partials = count_partials(arrays[3], arrays[5], arrays[6]) if begin is None else int(begin[-1])
        plan = DecodePlan.of_columns({name: vector[place] for name, place in places.items()}, partials)
        plan.__post_init__()
        if plan.extent is None:  # values on a GPU are not checked; on the host they still can be
            object.__setattr__(plan, "extent", extent_of(arrays))
        return plan

    @staticmethod
    def of_columns(columns: Mapping[str, Tensor], partials: int) -> DecodePlan:
        """Make the plan of the columns that `host_columns` names, on the device, with room for ``partials`` partials.

        The caller guarantees that they fit: nothing is checked, now or when the plan is used.
        """
        items = {int(name[5:]): columns[name].view(-1, FIELDS) for name in columns if name.startswith("items")}
        plan = object.__new__(DecodePlan)
        vars(plan).update({name: columns[name] for name in TENSORS}, extent=None)
        if items:
            schedule = Schedule(columns["partial_begin"], items, partials, columns.get("parent"))
        vars(plan)["schedule"] = schedule if items else None
        return plan


def extent_of(arrays: Sequence[Array]) -> tuple[int, int]:
    """Return `DecodePlan.extent`.

    Raises:
        ValueError: the numbers name pages, rows or keys that cannot exist.
    """
    import numpy as np

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


TENSORS = tuple(f.name for f in fields(DecodePlan) if f.name not in ("schedule", "extent"))


def host_columns(arrays: Sequence[Array], groups: Iterable[int], by_path: bool = False) -> dict[str, Array]:
    """Return the int32 vectors of a plan and of its schedule for ``groups`` by name, the longest one last."""
    named = dict(zip(TENSORS, arrays, strict=True))
    page_ids = named.pop("page_ids")
    groups = list(groups)
    schedule = columns_of(arrays, groups, by_path) if groups else {}
    return {**named, **schedule, "page_ids": page_ids}


def lay_out(sizes: Mapping[str, int]) -> tuple[dict[str, slice], int]:
    """Return the places of columns in one vector, each aligned to 128 bytes, and its length."""
    places, at = {}, 0
    for name, size in sizes.items():
        places[name] = slice(at, at + size)
        at += -(-size // ALIGNED) * ALIGNED
    return places, at
