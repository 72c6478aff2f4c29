"""Two sets of rows beside each other: what became better, worse, or stayed within the noise of both.

A figure has changed when the ranges from the 20th to the 80th percentile of the two do not overlap and the medians
differ by more than `MARGIN`. Times of two runs differ with the machine's mood as well: what peers' times did between
them, whose code is the same, is told beside the verdicts. Speedups were taken interleaved within a run, so they need
no such care.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .schema import Row, read

MARGIN = 0.03
"""Least relative change of a median that counts."""
OURS = "rolltree"
"""Is in the names of this project's own providers."""
BIGGER_IS_BETTER = ("speedup", "accuracy")
RECORDS = (".outcomes.jsonl", ".curves.jsonl")
"""Files beside the rows of a run that hold no rows."""


class Verdict(NamedTuple):
    """One figure in both sets."""

    row: Row  # the newer
    before: float
    change: float  # of the median, relative; positive is better
    word: str  # "better", "worse", "same"


def rows_at(path: Path) -> list[Row]:
    """The rows of a file, or of all ``*.jsonl`` in a folder.

    Raises:
        ValueError: there are none, or a line is no row.
    """
    files = sorted(f for f in path.glob("*.jsonl") if not f.name.endswith(RECORDS)) if path.is_dir() else [path]
    if not path.exists() or not files:
        raise ValueError(f"'{path}' holds no benchmark rows; give a .jsonl file or a folder of them.")
    return [row for file in files for row in read(file)]


def compare(old: Sequence[Row], new: Sequence[Row]) -> list[Verdict]:
    """Verdicts on the figures that are in both, the last of each where there are several.

    Raises:
        ValueError: the sets are of different devices, or have no figure in common.
    """
    devices = {row.device for row in old}, {row.device for row in new}
    if devices[0] != devices[1]:
        names = (" and ".join(sorted(found)) for found in devices)
        raise ValueError("The rows are of different devices ({} against {}); compare like with like.".format(*names))
    before = {_key(row): row for row in old}
    found = [_judge(before[key], row) for key, row in {_key(row): row for row in new}.items() if key in before]
    if not found:
        raise ValueError("The two have no figure in common; run the same ops and cases.")
    return found


def drift(verdicts: Iterable[Verdict]) -> float | None:
    """By how much the times of peers changed between the sets: the median of new / old; None without peers."""
    ratios = [v.row.value / v.before for v in verdicts if v.row.metric == "time_ms" and not _own(v.row)]
    return statistics.median(ratios) if ratios else None


def report(verdicts: Sequence[Verdict]) -> str:
    """What changed, a line each, and what the rest did."""
    lines = [
        f"{v.word:>6} {100 * v.change:+6.1f} %  {v.row.op}  {v.row.case}  {v.row.direction}  {v.row.provider}  "
        f"{v.row.metric} {v.before:.4g} -> {v.row.value:.4g}"
        for v in sorted(verdicts, key=lambda v: v.change)
        if v.word != "same"
    ]
    same = sum(v.word == "same" for v in verdicts)
    lines.append(f"{same} of {len(verdicts)} figures are the same within their noise and {100 * MARGIN:.0f} %.")
    if (moved := drift(verdicts)) is not None:
        lines.append(f"Peers' times are {moved:.2f} x what they were: that much is the machine.")
    return "\n".join(lines)


def worse(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Figures of this project that became worse."""
    return [v for v in verdicts if v.word == "worse" and _own(v.row)]


def _own(row: Row) -> bool:
    return OURS in row.provider


def _key(row: Row) -> tuple[str, ...]:
    return row.op, row.case, row.provider, row.direction, row.metric


def _judge(old: Row, new: Row) -> Verdict:
    gain = new.value / old.value - 1 if old.value else 0.0
    change = gain if new.metric in BIGGER_IS_BETTER else -gain
    apart = new.p20 > old.p80 or new.p80 < old.p20
    moved = apart and abs(gain) > MARGIN
    return Verdict(new, old.value, change, "same" if not moved else "better" if change > 0 else "worse")
