"""A run's loop on a clock of its own: which group is sampled and trained when. Nothing is computed, costs are given.

`Buffer` and `Budget` decide, as in a run. The sampler starts requests and computes missing keys in chunks as the native
engine's scheduler does, with pages enough for all, and every group is judged at once. Until a response or an update
ends, all running rows sample in every step, so that steps need not be gone through one by one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rolltree.engine.loop.budget import Budget
from rolltree.engine.loop.buffer import Buffer, Group, State
from rolltree.engine.loop.sources import Prompt
from rolltree.engine.settings import LoopConfig

Array = npt.NDArray[np.float64]
PROMPT = Prompt("", "", "", [], {}, "")
NEVER = 1 << 62


class Load(NamedTuple):
    """Of a decode step."""

    rows: int
    """That sample."""
    prefill: int
    """Tokens beside them whose keys are computed."""
    keys: int
    """That are read: a prompt's once for all its rows."""
    visible: int
    """Pairs of a query and a key that it sees."""


class Costs(Protocol):
    def steps(self, load: Load, count: int) -> Array:
        """Seconds of each of ``count`` steps, [count]: the first with ``load``, then with one key a row more each."""

    def update(self, groups: Sequence[Sequence[int]]) -> float:
        """Seconds of an update on ``groups``, given the lengths of their responses."""


@dataclass(frozen=True)
class Batch:
    """What an update and its sampling look like."""

    prompts: int
    """Groups of an update."""
    prompt: int
    """Tokens of each."""
    rows: int
    """Of the decoder's full batch."""
    lengths: Callable[[int], Sequence[int]]
    """Tokens of the responses to the group of a ticket."""
    prefill: int = 2048
    """Tokens computed beside the rows in a step at most."""


@dataclass(eq=False)
class _Response:
    request: _Request
    index: int
    length: int
    done: int = 0
    """Tokens it had when it last began or ceased to run."""
    since: int = NEVER
    """The sampler's clock when it began to run; `NEVER`: it does not."""

    def tokens(self, clock: int) -> int:
        return self.done + max(0, clock - self.since)


@dataclass(eq=False)
class _Request:
    group: Group
    responses: list[_Response]
    left: int
    """Responses that are unfinished."""
    running: int = 0


@dataclass
class _Fill:
    """Keys that are missing, of a new prompt whose responses begin with it, or of a response that goes on."""

    request: _Request
    response: _Response | None
    missing: int
    position: int = 0
    """Keys before them."""


class Sampler:
    """The decoder's rows.

    Attributes:
        steps, row_steps: decode steps, and rows that sampled, summed over them.
        recomputed: keys computed again.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.steps = self.row_steps = self.recomputed = 0
        self.most_keys = 0
        self._queue: deque[Group] = deque()
        self._open: dict[int, _Request] = {}  # by ticket, finished ones until they are forgotten
        self._waiting: deque[_Fill] = deque()  # the oldest first
        self._ends: list[tuple[int, int, int]] = []  # of running responses: clock, ticket, index
        self._unfinished = 0
        self._own = 0  # keys of running rows but for their prompts
        self._prompts = 0  # that running rows have

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._unfinished)

    def add(self, group: Group) -> None:
        self._queue.append(group)

    def tokens(self, group: Group) -> int:
        """Sampled for it so far."""
        request = self._open.get(group.ticket)
        return 0 if request is None else sum(response.tokens(self.steps) for response in request.responses)

    def forget(self, group: Group) -> list[int]:
        """The lengths of a finished group."""
        return [response.length for response in self._open.pop(group.ticket).responses]

    def forget_keys(self) -> None:
        """The weights are other ones: what runs waits until its keys are computed again."""
        running = sorted((ticket, index) for _, ticket, index in self._ends)
        fills = {fill.request.group.ticket: fill for fill in self._waiting if fill.response is None}
        halted = [(fill.request, fill.response) for fill in self._waiting if fill.response is not None]
        for ticket, index in running:
            request = self._open[ticket]
            response = request.responses[index]
            response.done, response.since = response.tokens(self.steps), NEVER
            request.running = 0
            halted.append((request, response))
        self._ends.clear()
        self._own = self._prompts = 0
        halted.sort(key=lambda pair: (pair[0].group.ticket, pair[1].index))
        again, seen = [], set()
        for request, response in halted:
            first = request not in seen
            seen.add(request)
            missing = response.done + first * self.batch.prompt
            self.recomputed += missing
            again.append(_Fill(request, response, missing, 0 if first else self.batch.prompt))
        again += [_Fill(fill.request, None, self.batch.prompt) for fill in fills.values()]
        self._waiting = deque(sorted(again, key=lambda fill: fill.request.group.ticket))

    def next(self) -> tuple[Load, int]:
        """What the next step computes, and how many such steps there are until a row ends; `advance` says that so many
        have been taken. There must be something to do."""
        while self._queue and (self._unfinished + self._width() <= self.batch.rows or not self._unfinished):
            group = self._queue.popleft()
            lengths = self.batch.lengths(group.ticket)
            request = _Request(group, [], len(lengths))
            request.responses = [_Response(request, i, length) for i, length in enumerate(lengths)]
            self._open[group.ticket] = request
            self._unfinished += len(lengths)
            self._waiting.append(_Fill(request, None, self.batch.prompt))
        filling = bool(self._waiting)
        prefill = visible = 0
        while self._waiting and prefill < self.batch.prefill:
            fill = self._waiting[0]
            part = min(fill.missing, self.batch.prefill - prefill)
            prefill += part
            visible += part * (2 * fill.position + part) // 2
            fill.missing, fill.position = fill.missing - part, fill.position + part
            if fill.missing:
                break
            self._waiting.popleft()
            for response in fill.request.responses if fill.response is None else [fill.response]:
                self._run(response)
        rows = len(self._ends)
        load = Load(
            rows, prefill, self._own + self._prompts * self.batch.prompt, self._own + rows * self.batch.prompt + visible
        )
        self.most_keys = max(self.most_keys, load.keys)
        return load, 1 if filling else self._ends[0][0] - self.steps

    def _width(self) -> int:
        return len(self.batch.lengths(self._queue[0].ticket))

    def _run(self, response: _Response) -> None:
        request = response.request
        response.since = self.steps
        self._prompts += request.running == 0
        request.running += 1
        self._own += response.done
        end = self.steps + response.length - response.done
        heapq.heappush(self._ends, (end, request.group.ticket, response.index))

    def advance(self, count: int) -> list[Group]:
        """``count`` steps have been taken; the groups whose last response has ended."""
        rows = len(self._ends)
        self.steps += count
        self.row_steps += count * rows
        self._own += count * rows
        finished = []
        while self._ends and self._ends[0][0] == self.steps:
            _, ticket, index = heapq.heappop(self._ends)
            request = self._open[ticket]
            response = request.responses[index]
            response.done, response.since = response.length, NEVER
            self._own -= response.length
            self._unfinished -= 1
            request.left -= 1
            request.running -= 1
            self._prompts -= request.running == 0
            if request.left == 0:
                finished.append(request.group)
        return finished


@dataclass(frozen=True)
class Update:
    """One that has ended, and what had happened until then."""

    seconds: float
    steps: int
    row_steps: int
    recomputed: int
    tokens: int
    """That it learned from."""
    stale: int
    """Of these, sampled by weights older than those it updated."""
    lags: tuple[int, ...]


class Loop:
    """A run of ``batch`` by the settings ``loop``.

    Args:
        beside: an update and the sampling beside it go on as fast as each alone; else each at half its speed.
    """

    def __init__(self, batch: Batch, loop: LoopConfig, costs: Costs, *, on_cpu: bool = False, beside: bool = False):
        self.batch, self.costs = batch, costs
        self.buffer = Buffer(Budget(batch.prompts, loop.staleness, loop.window, loop.over_sampling))
        self.sampler = Sampler(batch)
        self.seconds = 0.0
        self.updates: list[Update] = []
        self._overlaps, self._keeps, self._beside = loop.overlaps(on_cpu=on_cpu), loop.keep_keys, beside
        self._training: list[Group] = []
        self._owed = 0.0  # seconds that the update under way still takes, alone
        self._stale: dict[int, int] = {}  # tokens by ticket that were sampled by older weights
        self._learned: tuple[int, int, tuple[int, ...]] = (0, 0, ())

    def run(self, updates: int) -> list[Update]:
        """Until so many have ended."""
        while self.buffer.steps < updates:
            self._advance()
        return self.updates

    def _advance(self) -> None:
        if not self._training and (batch := self.buffer.batch()) is not None:
            self._begin_update(batch)
        for group in self.buffer.admit([PROMPT] * max(0, self.buffer.room)):
            self.buffer.to(group, State.SAMPLING)
            self.sampler.add(group)
        if self._training and not (self._overlaps and self.sampler.busy):
            self.seconds += self._owed
            self._end_update()
            return
        load, count = self.sampler.next()
        each = self.costs.steps(load, count)
        ends = np.cumsum(each)
        if self._training:  # the weights change between two steps
            count = min(count, int(np.searchsorted(ends, self._owed)) + 1)
        took = float(ends[count - 1])
        if self._training:
            took += 0.0 if self._beside else min(took, self._owed)
            self._owed -= float(ends[count - 1])
        self.seconds += took
        for group in self.sampler.advance(count):
            self.buffer.to(group, State.JUDGING)
            self.buffer.to(group, State.READY)
        if self._training and self._owed <= 0:
            self._end_update()

    def _begin_update(self, batch: list[Group]) -> None:
        stale = sum(self._stale.pop(group.ticket, 0) for group in batch)
        lengths = [self.sampler.forget(group) for group in batch]
        lags = tuple(self.buffer.steps - group.started for group in batch)
        self._learned = sum(map(sum, lengths)), stale, lags
        self._training, self._owed = batch, self.costs.update(lengths)

    def _end_update(self) -> None:
        self.buffer.end_step(self._training)
        self._training = []
        self._stale = {ticket: self.sampler.tokens(group) for ticket, group in self.buffer.open.items()}
        if not self._keeps:
            self.sampler.forget_keys()
        work = self.sampler.steps, self.sampler.row_steps, self.sampler.recomputed
        self.updates.append(Update(self.seconds, *work, *self._learned))
