"""A step as one vector of int32, so that a single asynchronous copy transfers it to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltree.kernels import SampleOutput, dispatch
from rolltree.kernels.advance import Turns, advance
from rolltree.kernels.low_rank import Runs
from rolltree.kernels.low_rank.runs import tiles_of
from rolltree.kernels.tree_decode import DecodePlan
from rolltree.kernels.tree_decode import schedule as schedules
from rolltree.kernels.tree_decode.items import CHUNK, FIELDS
from rolltree.kernels.tree_decode.plan import host_columns, lay_out

from ...model.both_ways import Block
from .assembly import Step
from .cache.kv_cache import KvCache
from .draws import DTYPES, DeviceSamples, Draws
from .windows import MOST_STEPS, rising_places

Array = npt.NDArray[Any]
_ZERO: Array = np.zeros(1, np.int32)


class StepVector:
    """Room for steps of ``rows`` rows, ``partials`` partial results of attention and ``samples`` samples.

    Token ids, slots, the plan of attention with its schedule and the sampling parameters are views of the vector that
    stay the same from step to step. Rows, nodes and samples beyond a step's own are padding: such rows read no key and
    write to a spare slot that is never read.

    Args:
        pages: number of page ids.
        groups: query heads for each key head, over all layers.
        head_rows: number of rows whose logits are computed; 0 if that is every row, with one sample each.
        rotary: steps have rotary positions besides the depth.
        adapted: rows have adapters.
        window: most steps that the rows take before the host looks (`Windows`); each row is then sampled once.

    Attributes:
        runs: the rows of the present step that have adapters; None if none has.
        head_runs: the same of the rows whose logits are computed.
    """

    runs: Runs | None
    head_runs: Runs | None

    def __init__(
        self,
        rows: int,
        partials: int,
        pages: int,
        groups: Sequence[int],
        device: torch.device,
        *,
        samples: int,
        head_rows: int = 0,
        rotary: bool = False,
        adapted: bool = False,
        window: int = 1,
    ) -> None:
        self.sizes = rows, partials, samples, head_rows, adapted, window
        self.pages = pages
        self._groups = groups
        self._by_path = dispatch.named("invariant", device)
        nodes = partials  # `count_partials` are at least as many as nodes that a row reads, and as work items
        words = {name: samples * (dtype.itemsize // 4) for name, dtype in DTYPES.items()}
        sizes: dict[str, int] = {
            **dict.fromkeys(("input_ids", "slots", "query_position"), rows),
            **({"rotary": 3 * rows} if rotary else {}),
            **words,
            **({"sample_rows": head_rows, "head_row": samples} if head_rows else {}),
            **({"tiles": 3 * rows, "head_tiles": 3 * head_rows} if adapted else {}),
            "page_indptr": nodes + 1,
            **dict.fromkeys(("node_offset", "node_length", "node_position", "row_begin", "row_end"), nodes),
            **({"parent": nodes} if self._by_path else {}),
            **({"turn": 1, "unread": 1, "next_slots": window * rows} if window > 1 else {}),
            **({"rising": rows * (2 + 3 * rotary + len(groups))} if window > 1 else {}),
            "partial_begin": rows + 1,
            **{f"items{group}": (1 + partials) * FIELDS for group in groups},
            "page_ids": pages,
        }
        if not groups:
            sizes = {name: size for name, size in sizes.items() if name not in ("partial_begin", "parent")}
        places, length = lay_out(sizes)
        self._host = torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        host = self._host.numpy()
        self._columns = {name: host[place] for name, place in places.items()}
        self._begins = {name: place.start for name, place in places.items()}
        self._taken: Mapping[str, Array] = {}
        self._views = {name: self._device[place] for name, place in places.items()}
        self.plan = DecodePlan.of_columns(self._views, partials)
        self.draws = {name: self._views[name].view(dtype) for name, dtype in DTYPES.items()}
        """Parameters of the samples, see `Draws.columns`."""
        self.positions = 0
        """Largest position of a row plus one."""
        self._turns: Turns | None = None
        if window > 1:
            numbers = torch.zeros((window, 4, rows), device=device)
            rising, turn, ids, slots = (self._views[name] for name in ("rising", "turn", "input_ids", "slots"))
            next_slots = self._views["next_slots"].view(window, rows)
            self._turns = Turns(self._device, rising, turn, ids, slots, next_slots, self.draws["step"], numbers)

    @staticmethod
    def of(
        step: Step,
        draws: Draws,
        cache: KvCache,
        device: torch.device,
        adapter: Array | None = None,  # [N] int64
        *,
        least: int = 1,
        before: StepVector | None = None,
    ) -> StepVector:
        """Return a vector with the step, padded only to ``least`` rows, pages and nodes: compilers treat a size of one
        as another program. The vector ``before`` is reused if its sizes fit. ``adapter`` is as in `load`."""
        rows, pages, nodes = (max(len(values), least) for values in (step.input_ids, *step.plan[1:3]))
        scheduled = device.type == "cuda" or dispatch.named("invariant", device)
        groups = cache.groups if scheduled else ()  # a CPU iterates over nodes without a schedule
        partials = max(count_partials(step, device), nodes) if groups else nodes
        window = MOST_STEPS if step.steps > 1 else 1
        sizes = rows, partials, len(draws.slots), len(step.sample_rows), adapter is not None, window
        if before is None or before.sizes != sizes or before.pages < pages:
            pages += pages // 4  # branches need further pages after some steps
            before = StepVector(
                rows,
                partials,
                pages,
                groups,
                device,
                samples=sizes[2],
                head_rows=sizes[3],
                rotary=step.rotary is not None,
                adapted=sizes[4],
                window=window,
            )
        before.load(step, draws, cache.spare_slot, adapter)
        return before

    def load(self, step: Step, draws: Draws, spare_slot: int, adapter: Array | None) -> None:
        """Copy a step's numbers into the vector and start its transfer to the device.

        Args:
            adapter: [N] int64, places of the rows' adapters as `RowAdapters.places` returns them.
        """
        columns = host_columns((*step.plan, step.position_ids), self._groups, self._by_path)
        values: dict[str, Array] = {
            "input_ids": step.input_ids,
            "slots": step.kv_slots,
            **draws.columns,
            "sample_rows": step.sample_rows,
            "head_row": draws.head_row,
            **columns,
        }
        if self._turns is not None:
            values |= self._next(step, columns, spare_slot)
        if step.rotary is not None:  # padding is at the end of each of the three rows
            values["rotary"] = np.pad(step.rotary, ((0, 0), (0, self.sizes[0] - len(step.input_ids)))).ravel()
        self.runs = self.head_runs = None
        if adapter is not None:
            self.runs = self._runs(adapter, self.sizes[0], "tiles", values)
            self.head_runs = self.runs
            values["head_tiles"] = np.zeros(0, np.int32)
            if len(step.sample_rows) < len(adapter):
                of_samples = adapter[step.sample_rows]
                self.head_runs = self._runs(of_samples, len(of_samples), "head_tiles", values)
        for name, column in self._columns.items():
            new = values[name]
            if new is self._taken.get(name):
                continue  # unchanged since the previous step
            if name in DTYPES:
                new = np.ascontiguousarray(new).view(np.int32)
            column[: len(new)] = new
            if len(new) < len(column) and name != "page_ids":  # no node refers to page ids beyond the step's own
                last = name in ("page_indptr", "partial_begin")
                column[len(new) :] = new[-1] if last else spare_slot if name == "slots" else 0
        self._taken = values
        self.positions = int(step.position_ids.max()) + 1
        if self._device is not self._host:
            used = self._begins["page_ids"] + len(columns["page_ids"])
            self._device[:used].copy_(self._host[:used], non_blocking=True)

    def _next(self, step: Step, columns: Mapping[str, Array], spare_slot: int) -> dict[str, Array]:
        """Return the numbers by which the rows move on; padding stays where it is."""
        next_slots = np.full((self.sizes[5], self.sizes[0]), spare_slot)
        if step.next_slots is not None:
            next_slots[: step.steps - 1, : len(step.input_ids)] = step.next_slots
        rising = np.full(len(self._columns["rising"]), self._begins["unread"])
        places = rising_places(step.plan, columns, self._begins, rotary=self.sizes[0] * (step.rotary is not None))
        rising[: len(places)] = places
        self._taken = {}  # the device has changed the columns since
        return {"turn": _ZERO, "unread": _ZERO, "next_slots": next_slots.ravel(), "rising": rising}

    def advance(self, out: SampleOutput) -> DeviceSamples:
        """Make the rows those of the next step, and return the samples of all steps so far; the host waits for
        nothing."""
        assert self._turns is not None
        advance(self._turns, *out[:4])
        self.positions += 1
        return DeviceSamples(out, self._turns.numbers)

    def _runs(self, adapter: Array, rows: int, name: str, values: dict[str, Array]) -> Runs:
        """Return the runs of ``rows`` rows, the last of which may be padding, with their tiles on the device."""
        runs = Runs.of(adapter)
        values[name] = tiles_of(runs).ravel()
        return Runs(rows, runs.numbers, self._views[name].view(-1, 3))

    def view(self, name: str) -> Tensor:
        """Return a column on the device."""
        return self._views[name]

    def begin(self, cache: KvCache, blocks: tuple[Block, ...] = ()) -> tuple[Tensor, Tensor, Tensor | None]:
        """Begin the step in the cache; return ids and depths [rows] int64, and the rotary positions [3, rows] int64 if
        they are not the depths."""
        cache.begin_step(self.view("slots").long(), self.plan, blocks)
        rotary = self.view("rotary").long().view(3, -1) if "rotary" in self._views else None
        return self.view("input_ids").long(), self.view("query_position").long(), rotary


def count_partials(step: Step, device: torch.device) -> int:
    """Return a number of partial results that the step's attention on ``device`` does not exceed, nor do its nodes."""
    _, _, _, lengths, _, begins, ends = step.plan
    if dispatch.named("invariant", device):  # every row's keys end at its own position at the latest
        return max(int((step.position_ids // CHUNK + 1).sum()), len(lengths))
    return schedules.count_partials(lengths, begins, ends)
