"""Records of a run: metrics as sums and counts, the times of each step's parts, and metrics.jsonl.

A mean of means is wrong if the parts differ in size, so every metric is accumulated as (sum, count) and divided once,
at the end of a step. Names follow verl's and TRL's spelling.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batches.device import fetch
from ..data.columns import Array
from ..errors import UserError
from ..train.phases import HEAD, MODEL, OPTIMIZER, Span

Number = float | Tensor

TIMED_PARTS = (
    "prompts",
    "gen",
    "reward",
    "pack",
    "old_log_prob",
    *(MODEL, HEAD, OPTIMIZER),
    "update_critic",
    "sync",
    "dump_rollout_generations",
    "eval",
    "checkpoint",
)
"""Parts of ``timing_s/step``; ``other`` is the rest, so that the parts sum to the step."""


class Sums:
    """Named sums and counts. Tensors stay on their device until :meth:`means` fetches all of them at once."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[Number, Number]] = {}
        self._counts: dict[str, float] = {}
        self._maxima: dict[str, Number] = {}

    def add(self, name: str, total: Number, count: Number = 1) -> None:
        """Add ``total``, a sum over ``count`` values."""
        old_total, old_count = self._totals.get(name, (0.0, 0.0))
        self._totals[name] = (old_total + total, old_count + count)

    def add_values(self, name: str, values: Array) -> None:
        """Add each of ``values``."""
        self.add(name, float(np.sum(values, dtype=np.float64)), values.size)

    def count(self, name: str, number: float = 1) -> None:
        """Count ``number`` occurrences; `means` returns their number, also if it is 0."""
        self._counts[name] = self._counts.get(name, 0.0) + number

    def maximum(self, name: str, value: Number) -> None:
        """Keep the largest ``value`` under ``name``; `means` returns it unchanged."""
        old = self._maxima.get(name)
        if old is None:
            self._maxima[name] = value
        elif isinstance(old, Tensor) or isinstance(value, Tensor):
            self._maxima[name] = torch.maximum(torch.as_tensor(old), torch.as_tensor(value))
        else:
            self._maxima[name] = max(old, value)

    def take(self, other: Sums, prefix: str) -> None:
        """Add all that ``other`` holds, its names after ``prefix``; no name may be there already."""
        self._totals |= {f"{prefix}{name}": pair for name, pair in other._totals.items()}
        self._counts |= {f"{prefix}{name}": count for name, count in other._counts.items()}
        self._maxima |= {f"{prefix}{name}": value for name, value in other._maxima.items()}

    def become(self, other: Sums) -> None:
        """Take over all that ``other`` holds, in place of what this one holds."""
        self._totals, self._counts, self._maxima = other._totals, other._counts, other._maxima

    def means(self) -> dict[str, float]:
        """Return sum / count of each name, the occurrences and the maxima; a name with count 0 is left out."""
        values: list[Number] = [v for pair in self._totals.values() for v in pair]
        numbers = fetch([*values, *self._maxima.values()])
        out = {}
        for i, name in enumerate(self._totals):
            total, count = numbers[2 * i : 2 * i + 2]
            if count != 0:
                out[name] = total / count
        return out | self._counts | dict(zip(self._maxima, numbers[len(values) :], strict=True))


class Stopwatch:
    """Accounts for the seconds since :meth:`restart`: named parts, and ``other`` for the rest.

    Args:
        clock: returns the time in seconds.
        told: called with the name, the beginning and the end of each part, when the account is read.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        told: Callable[[str, float, float], object] = lambda name, begin, end: None,
    ) -> None:
        self._clock, self._told = clock, told
        self.restart()

    def restart(self) -> None:
        """Discard the account and begin a new one now."""
        self._begin = self._clock()
        self._spans: list[Span] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block as part ``name``; parts do not nest."""
        begin = self._clock()
        try:
            yield
        finally:
            self._spans.append(Span(name, begin, self._clock()))

    def read(self, within: Sequence[Span] = ()) -> dict[str, float]:
        """Return ``timing_s/<part>``, ``timing_s/other`` and their sum ``timing_s/step``, and begin the next account.

        Args:
            within: spans of the device's work, in order. They take precedence over the host's parts: a GPU finishes
                an update while the host does something else, and those seconds belong to the update.
        """
        end = self._clock()
        whole, self._begin = (self._begin, end), end
        spans, self._spans = self._spans, []
        parts = dict.fromkeys(TIMED_PARTS, 0.0)
        for name, begin, until in overlaid(spans, within):
            parts[name] += until - begin
            self._told(name, begin, until)
        step = whole[1] - whole[0]
        parts["other"] = step - math.fsum(parts.values())
        return {f"timing_s/{name}": seconds for name, seconds in (parts | {"step": step}).items()}


def overlaid(under: Sequence[Span], over: Sequence[Span]) -> list[Span]:
    """Return ``over`` and the parts of ``under`` that it does not cover, in order of time.

    The spans of each argument are ordered and do not overlap.
    """
    out, waiting = [], deque(over)
    for name, begin, end in under:
        while waiting and waiting[0].begin < end:
            above = waiting[0]
            if begin < above.begin:
                out.append(Span(name, begin, above.begin))
            begin = max(begin, above.end)
            if above.end > end:
                break  # it also covers the next spans
            out.append(waiting.popleft())
        if begin < end:
            out.append(Span(name, begin, end))
    return [*out, *waiting]


AGENTS = ("start", "tools")
"""Why a sampler waits for agents."""


class Idle:
    """Idle time of the device while a run sampled, by cause.

    Args:
        rows: number of rows of a full decode step.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._before: Counter[str] = Counter()

    def read(self, times: Mapping[str, float], work: Counter[str]) -> dict[str, float]:
        """Return the seconds by cause since the last call, the share of the weights that engines were sent, and the
        number of engines in other processes.

        Args:
            times: result of `Stopwatch.read`.
            work: microseconds of all decode steps so far, with the `Steering.counts` of these steps; with engines in
                other processes, the bytes of all published weights, those that were sent, and the engines that began
                and ceased to serve; and with agents, the microseconds in which none of them waited for the sampler.
        """
        since = work - self._before
        self._before = work.copy()
        sampled = since["us"] / 1e6
        tools = min(sampled, since["call_wait_us"] / 1e6)
        full = since["steps"] * self._rows
        bytes_ = since["weight_bytes"]
        sent = {"perf/weights_sent": since["sent_weight_bytes"] / bytes_} if bytes_ else {}
        agents = {cause: since[f"agent_{cause}_us"] / 1e6 for cause in AGENTS if f"agent_{cause}_us" in work}
        if "engines_joined" in work:
            sent["perf/engines"] = work["engines_joined"] - work["engines_left"]
        return sent | {
            **{f"perf/idle/agents_{cause}": seconds for cause, seconds in agents.items()},
            "perf/sampling_s": sampled,
            "perf/overlapped_s": max(0.0, sampled - times["timing_s/gen"]),
            "perf/idle/rewards": times["timing_s/reward"],
            "perf/idle/tools": tools,
            "perf/idle/tail": (sampled - tools) * (1 - since["row_steps"] / full) if full else 0.0,
        }


class MetricsLog:
    """The file ``metrics.jsonl``: one JSON object for each step, steps ascending; a non-finite number is null."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the row of ``step``."""
        row: dict[str, Any] = {"step": step}
        row |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps(row, allow_nan=False) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def rows(self) -> list[dict[str, float]]:
        """Return the rows, without values that are not finite."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return [{name: v for name, v in json.loads(line).items() if v is not None} for line in lines]

    def rewind(self, step: int, aside: Path) -> set[int]:
        """Drop the rows after ``step``; if there are any, first copy the whole file to ``aside``.

        Returns:
            The steps whose rows remain.

        Raises:
            UserError: a row up to ``step`` cannot be read.
        """
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        kept, steps = 0, set()
        *lines, _ = text.split("\n")  # after the last newline there may be part of a line, if the writer was killed
        for number, line in enumerate(lines, start=1):
            try:
                row_step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"Line {number} of '{self.path}' is not a step's JSON object; repair or remove the line to resume."
                ) from None
            if row_step > step:
                break
            kept += len(line) + 1
            steps.add(row_step)
        if kept < len(text):
            aside.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(text, encoding="utf-8")
            replace_file(self.path, text[:kept].encode())
        return steps


def replace_file(path: Path, content: bytes) -> None:
    """Write ``path`` so that a crash leaves either the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
