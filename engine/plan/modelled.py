"""A model of a rollout engine's decode steps, and of their time on a GPU. It computes nothing and measures nothing.

`EngineModel` follows the rows of a full batch: it starts requests and computes missing keys in chunks as the scheduler
of the native engine does, with pages enough for all. Until a response ends every running row samples in every step, so
steps need not be stepped through one by one. `DeviceModel` gives the seconds of such steps, and of an update, for a
model's shape and a memory's rate; `MeasuredRates` those that a run has measured. `rolltree.engine.plan.simulate` builds
on both.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

NEVER = 1 << 62
CLOCK, SMS = 1.755e9, 132
PEAK = 2 * 2048 * SMS * CLOCK
"""FLOP/s of an H100 or H200, dense bf16: 2048 multiply-adds a clock of a multiprocessor."""
MEMORY = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes/s, by their data sheets."""
CAPACITY = {"H100": 80e9, "H200": 141e9}
"""Bytes, by their data sheets."""
GEMM_SHARE = 0.70  # of PEAK in a decode step's products; an assumption
STREAM_SHARE = 0.90  # of the memory's rate in a decode step; an assumption
MFU = 0.40  # of PEAK in an update; an assumption
HOST = 150e-6  # seconds of a step that the host adds and no graph replay hides; an assumption


class Load(NamedTuple):
    """The work of one decode step."""

    rows: int
    """Rows that sample a token."""
    prefill: int
    """Tokens whose keys are computed in the same step."""
    keys: int
    """Keys that are read; those of a shared prompt count once."""
    visible: int
    """Pairs of a query and a key that it attends to."""


@dataclass(frozen=True)
class Batch:
    """A batch of groups for an engine to sample."""

    prompt: int
    """Tokens of each prompt."""
    rows: int
    """Rows of the full batch."""
    lengths: Callable[[int], Sequence[int]]
    """Returns the lengths in tokens of the responses to the group with a ticket."""
    prefill: int = 2048
    """Tokens whose keys are computed in one step, at most."""


@dataclass(eq=False)
class _Response:
    request: _Request
    index: int
    length: int
    done: int = 0
    """Tokens it had when it last started or stopped running."""
    since: int = NEVER
    """Step at which it started running; `NEVER` while it does not run."""

    def tokens(self, step: int) -> int:
        return self.done + max(0, step - self.since)


@dataclass(eq=False)
class _Request:
    ticket: int
    responses: list[_Response]
    left: int
    """Unfinished responses."""
    running: int = 0


@dataclass
class _Fill:
    """Missing keys: of a new prompt, after which all its responses start, or of one response that resumes."""

    request: _Request
    response: _Response | None
    missing: int
    position: int = 0
    """Keys before them."""


class EngineModel:
    """The rows of an engine that samples groups.

    Attributes:
        steps: decode steps taken.
        row_steps: rows that sampled, summed over the steps.
        recomputed: keys that were computed again.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.steps = self.row_steps = self.recomputed = 0
        self._queue: deque[int] = deque()
        self._open: dict[int, _Request] = {}  # by ticket, including finished ones until `forget`
        self._waiting: deque[_Fill] = deque()  # oldest first
        self._ends: list[tuple[int, int, int]] = []  # heap of running responses: step, ticket, index
        self._unfinished = 0
        self._row_keys = 0  # keys of running rows, without their prompts
        self._prompts = 0  # prompts of running rows

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._unfinished)

    def add(self, ticket: int) -> None:
        """Queue the group with ``ticket``; tickets ascend."""
        self._queue.append(ticket)

    def tokens(self, ticket: int) -> int:
        """Return the number of tokens sampled for a group so far."""
        request = self._open.get(ticket)
        return 0 if request is None else sum(response.tokens(self.steps) for response in request.responses)

    def forget(self, ticket: int) -> list[int]:
        """Drop a finished group and return the lengths of its responses."""
        return [response.length for response in self._open.pop(ticket).responses]

    def forget_keys(self) -> None:
        """Drop all keys, as new weights do: running responses wait until theirs are computed again."""
        running = sorted((ticket, index) for _, ticket, index in self._ends)
        fills = {fill.request.ticket: fill for fill in self._waiting if fill.response is None}
        halted = [(fill.request, fill.response) for fill in self._waiting if fill.response is not None]
        for ticket, index in running:
            request = self._open[ticket]
            response = request.responses[index]
            response.done, response.since = response.tokens(self.steps), NEVER
            request.running = 0
            halted.append((request, response))
        self._ends.clear()
        self._row_keys = self._prompts = 0
        halted.sort(key=lambda pair: (pair[0].ticket, pair[1].index))
        again, seen = [], set()
        for request, response in halted:
            first = request not in seen
            seen.add(request)
            missing = response.done + first * self.batch.prompt
            self.recomputed += missing
            again.append(_Fill(request, response, missing, 0 if first else self.batch.prompt))
        again += [_Fill(fill.request, None, self.batch.prompt) for fill in fills.values()]
        self._waiting = deque(sorted(again, key=lambda fill: fill.request.ticket))

    def next(self) -> tuple[Load, int]:
        """Return what the next step computes, and the number of such steps until a row ends.

        The engine must be `busy`; `advance` then takes the steps.
        """
        while self._queue and (self._unfinished + self._width() <= self.batch.rows or not self._unfinished):
            ticket = self._queue.popleft()
            lengths = self.batch.lengths(ticket)
            request = _Request(ticket, [], len(lengths))
            request.responses = [_Response(request, i, length) for i, length in enumerate(lengths)]
            self._open[ticket] = request
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
            rows,
            prefill,
            self._row_keys + self._prompts * self.batch.prompt,
            self._row_keys + rows * self.batch.prompt + visible,
        )
        return load, 1 if filling else self._ends[0][0] - self.steps

    def _width(self) -> int:
        return len(self.batch.lengths(self._queue[0]))

    def _run(self, response: _Response) -> None:
        request = response.request
        response.since = self.steps
        self._prompts += request.running == 0
        request.running += 1
        self._row_keys += response.done
        end = self.steps + response.length - response.done
        heapq.heappush(self._ends, (end, request.ticket, response.index))

    def advance(self, count: int) -> list[int]:
        """Take ``count`` steps, at most as many as `next` returned; return the tickets of groups that finished."""
        rows = len(self._ends)
        self.steps += count
        self.row_steps += count * rows
        self._row_keys += count * rows
        finished = []
        while self._ends and self._ends[0][0] == self.steps:
            _, ticket, index = heapq.heappop(self._ends)
            request = self._open[ticket]
            response = request.responses[index]
            response.done, response.since = response.length, NEVER
            self._row_keys -= response.length
            self._unfinished -= 1
            request.left -= 1
            request.running -= 1
            self._prompts -= request.running == 0
            if request.left == 0:
                finished.append(ticket)
        return finished


@dataclass(frozen=True)
class Shape:
    """A model's sizes, in bf16."""

    weights: float
    """Parameters that a token's products read."""
    layers: int
    heads: int
    key_heads: int
    dim: int
    """Width of a head."""

    @property
    def key_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * 2 * self.key_heads * self.dim * self.layers

    @property
    def pair(self) -> int:
        """FLOP of a query and a key."""
        return 4 * self.dim * self.heads * self.layers


class Times(Protocol):
    """Seconds of an engine's steps and of the trainer's updates."""

    def steps(self, load: Load, count: int) -> float:
        """Return the seconds of ``count`` decode steps: the first has ``load``, and each further one one more key a
        row."""
        ...

    def update(self, groups: Sequence[Sequence[int]]) -> float:
        """Return the seconds of one device's update on ``groups``, given the lengths of their responses."""
        ...


@dataclass(frozen=True)
class DeviceModel:
    """`Times` of one GPU by its arithmetic.

    A decode step takes `HOST` seconds and the larger of

    - its bytes at `STREAM_SHARE` of the memory's rate: the weights once, the keys and values of a prompt once for each
      group, those of sampled tokens once for each row;
    - its FLOP at `GEMM_SHARE` of `PEAK`: 2 for each weight and row, and `Shape.pair` for each query and key.

    An update takes three times the FLOP of a forward pass, a prompt's once for each group, at `MFU` of `PEAK`.
    """

    shape: Shape
    memory: float
    """Bytes/s."""
    prompt: int
    """Tokens of each prompt."""

    def steps(self, load: Load, count: int) -> float:
        """See `Times.steps`. Bytes and FLOP both grow linearly, so the sum has a closed form."""
        stream, compute = STREAM_SHARE * self.memory, GEMM_SHARE * PEAK
        size = (2 * self.shape.weights + load.keys * self.shape.key_bytes) / stream
        flop = (load.rows + load.prefill) * 2 * self.shape.weights + load.visible * self.shape.pair
        by_bytes = size, load.rows * self.shape.key_bytes / stream
        by_flop = flop / compute, load.rows * self.shape.pair / compute
        return _sum_of_larger(by_bytes, by_flop, count) + HOST * count

    def update(self, groups: Sequence[Sequence[int]]) -> float:
        """See `Times.update`."""
        tokens = sum(self.prompt + sum(lengths) for lengths in groups)
        visible = sum(self.prompt**2 / 2 + sum(n * (self.prompt + n / 2) for n in lengths) for lengths in groups)
        return 3 * (2 * self.shape.weights * tokens + self.shape.pair * visible) / (MFU * PEAK)


def _sum_of_larger(a: tuple[float, float], b: tuple[float, float], count: int) -> float:
    """Return the sum over i < ``count`` of the larger of a[0] + a[1] i and b[0] + b[1] i."""

    def total(line: tuple[float, float], begin: int, end: int) -> float:
        return (end - begin) * (line[0] + line[1] * (begin + end - 1) / 2)

    if a[0] < b[0] or (a[0] == b[0] and a[1] < b[1]):
        a, b = b, a  # a is the larger one at the beginning
    if a[1] >= b[1]:
        return total(a, 0, count)
    crossing = (a[0] - b[0]) / (b[1] - a[1])
    first = min(count, math.floor(crossing) + 1)
    return total(a, 0, first) + total(b, first, count)


@dataclass(frozen=True)
class MeasuredRates:
    """`Times` that a run has measured: each decode step takes the mean, and an update is proportional to its tokens."""

    step_s: float
    """Seconds of a decode step."""
    token_s: float
    """Seconds of an update for each token of prompt and response, on one device."""
    prompt: int
    """Tokens of each prompt."""

    def steps(self, load: Load, count: int) -> float:
        """See `Times.steps`."""
        return self.step_s * count

    def update(self, groups: Sequence[Sequence[int]]) -> float:
        """See `Times.update`; as in metrics, a prompt's tokens count for every response."""
        return self.token_s * sum(self.prompt * len(lengths) + sum(lengths) for lengths in groups)
