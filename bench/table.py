"""Benchmark rows as text."""

from __future__ import annotations

from collections.abc import Sequence

from .schema import Row

UNITS = {"time_ms": "ms", "peak_memory_mib": "MiB", "speedup": "x", "share": "", "accuracy": ""}
HEADER = ("op", "case", "direction", "provider", "median", "p20 to p80", "ceiling", "share of ceiling")


def table(rows: Sequence[Row]) -> str:
    """Return a line for each row; the share of the ceiling is 100 % if the figure reaches the limit."""
    lines = [HEADER] + [_cells(row) for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    unit = UNITS[row.metric]
    share = ceiling = "-"
    if row.ceiling is not None:
        ceiling = f"{_number(row.ceiling)} {unit}"
        share = f"{100 * (row.value / row.ceiling if row.metric == 'speedup' else row.ceiling / row.value):.0f} %"
    spread = f"{_number(row.p20)} to {_number(row.p80)}"
    return (
        row.op,
        row.case,
        row.direction,
        row.provider,
        f"{_number(row.value)} {unit}".rstrip(),
        spread,
        ceiling,
        share,
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
