"""The file trace.json: a timeline of a run for Perfetto (ui.perfetto.dev) or chrome://tracing.

The events are those of the step's account (`Stopwatch`): each part of a step once, on the track of the learner; the
engine's decode steps on the track of the sampler, neighbours joined; and calls of the verifier on their own track.
Readers require that events of one thread are nested or follow each other, and reserve thread 0, so concurrent calls are
on threads of their own.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

TRACKS = ("learner", "sampler", "verifier")
PROCESS = 1
"""Process id of the run and thread id of the learner, its main thread; threads of other tracks count from there."""
JOINED_S = 0.01
"""Seconds below which two events of one name on one track are joined, because decode steps take milliseconds."""


class Trace:
    """Events in the order of their ends; any thread may add some. A resumed run continues the same file.

    Args:
        path: file that `flush` writes, an array of Chrome's trace events without the closing bracket, as readers allow.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = time.time() - time.perf_counter()  # one clock for all processes of a run
        self._lock = threading.Lock()
        self._open: dict[str, tuple[str, float, float]] = {}  # by track, the event that may still be extended
        self._ends: dict[str, list[int]] = {track: [] for track in TRACKS}  # end of each thread's last event
        self._lines: list[str] = []
        self._begun = False

    def add(self, track: str, name: str, begin: float, end: float) -> None:
        """Add the event ``name`` from ``begin`` to ``end``, in seconds of `time.perf_counter`."""
        with self._lock:
            last = self._open.get(track)
            if last is not None and last[0] == name and begin - last[2] < JOINED_S:
                self._open[track] = (name, min(last[1], begin), max(last[2], end))
                return
            self._close(track)
            self._open[track] = (name, begin, end)

    def flush(self) -> None:
        """Write the events so far."""
        with self._lock:
            for track in list(self._open):
                self._close(track)
            lines, self._lines = self._lines, []
        if not self._begun:
            self._begin()
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def _begin(self) -> None:
        """Begin a new file, or continue that of a killed run, cutting off an incomplete last line."""
        self._begun = True
        there = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("ab") as file:
            file.truncate(there.rfind(b"\n") + 1)
            file.write((("" if b"\n" in there else "[\n") + _named("process_name", PROCESS, "rolltree")).encode())

    def _close(self, track: str) -> None:
        if (event := self._open.pop(track, None)) is None:
            return
        name, *times = event
        begin, end = (round(1e6 * (at + self._offset)) for at in times)  # microseconds
        ends = self._ends[track]
        thread = next((i for i, last in enumerate(ends) if last <= begin), len(ends))
        tid = 1 + TRACKS.index(track) + thread * len(TRACKS)
        if thread == len(ends):
            ends.append(end)
            self._lines.append(_named("thread_name", tid, f"{track} {thread + 1}" if thread else track))
        ends[thread] = end
        what = {"name": name, "ph": "X", "pid": PROCESS, "tid": tid, "ts": begin, "dur": end - begin}
        self._lines.append(json.dumps(what) + ",\n")


def _named(what: str, tid: int, name: str) -> str:
    return json.dumps({"name": what, "ph": "M", "pid": PROCESS, "tid": tid, "args": {"name": name}}) + ",\n"
