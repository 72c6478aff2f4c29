"""trace.json: what a run was doing when, for Perfetto (ui.perfetto.dev) or chrome://tracing.

The events are those of the step's account (`Stopwatch`): each part of a step once, on the track of the learner; the
engine's decode steps on the track of the sampler, neighbours joined; and calls of the verifier on their own.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

TRACKS = ("learner", "sampler", "verifier")
JOINED_S = 0.01
"""Events of one name on one track with less between them are one: decode steps take milliseconds."""


class Trace:
    """Events in the order they end; any thread may add some. A resumed run goes on in the same file.

    Args:
        path: written by `flush`, an array of Chrome's trace events that is never closed, which readers allow for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = time.time() - time.perf_counter()  # one clock for all processes of a run
        self._lock = threading.Lock()
        self._open: dict[str, tuple[str, float, float]] = {}  # of each track, the event that may still grow
        self._lines: list[str] = []

    def add(self, track: str, name: str, begin: float, end: float) -> None:
        """``name`` went on from ``begin`` to ``end``, seconds of `time.perf_counter`."""
        with self._lock:
            last = self._open.get(track)
            if last is not None and last[0] == name and begin - last[2] < JOINED_S:
                self._open[track] = (name, last[1], end)
                return
            self._close(track)
            self._open[track] = (name, begin, end)

    def flush(self) -> None:
        """Write what there is."""
        with self._lock:
            for track in list(self._open):
                self._close(track)
            lines, self._lines = self._lines, []
        new = not self.path.exists()
        with self.path.open("a", encoding="utf-8") as file:
            if new:
                file.write("[\n")
                for number, track in enumerate(TRACKS):
                    named = {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": track}}
                    file.write(json.dumps(named) + ",\n")
            file.writelines(lines)

    def _close(self, track: str) -> None:
        if (event := self._open.pop(track, None)) is not None:
            name, begin, end = event
            microseconds = {"ts": round(1e6 * (begin + self._offset)), "dur": round(1e6 * (end - begin))}
            what = {"name": name, "ph": "X", "pid": 1, "tid": TRACKS.index(track), **microseconds}
            self._lines.append(json.dumps(what) + ",\n")
