"""The tables of figures in README.md, from the recorded rows: ``python -m rolltree.bench.readme`` writes them.

A table stands between ``<!-- bench FOLDER/OP -->`` and ``<!-- end -->``; a test fails where the rows say otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .schema import REPOSITORY, Row, read
from .table import UNITS

README = REPOSITORY / "README.md"
RESULTS = REPOSITORY / "bench" / "results"
BLOCK = re.compile(r"(<!-- bench (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(rows: Sequence[Row]) -> str:
    """One line for each case, direction and provider: time with its spread, ceiling, peak memory, speedup."""
    lines = ["| case | | time | p20 to p80 | ceiling | memory | speedup |", "|---|---|---|---|---|---|---|"]
    by_line: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        by_line.setdefault((row.case, row.direction, row.provider), {})[row.metric] = row
    for (case, direction, provider), of in by_line.items():
        time = of["time_ms"]
        memory, speedup = of.get("peak_memory_mib"), of.get("speedup")
        ceiling = "" if time.ceiling is None else f"{_number(time.ceiling)} ms"
        ratio = ""
        if speedup is not None:
            limit = "" if speedup.ceiling is None else f" of {speedup.ceiling:.2f}"
            ratio = f"{speedup.value:.2f} x{limit} ({speedup.p20:.2f} to {speedup.p80:.2f})"
        cells = (
            case if direction == "step" else f"{case}, {direction}",
            provider,
            f"{_number(time.value)} ms",
            f"{_number(time.p20)} to {_number(time.p80)}",
            ceiling,
            "" if memory is None else f"{_number(memory.value)} {UNITS['peak_memory_mib']}",
            ratio,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rewritten(text: str) -> str:
    """``text`` with every table as the recorded rows have it."""

    def table(match: re.Match[str]) -> str:
        return match[1] + markdown(read(RESULTS / f"{match[2]}.jsonl")) + match[3]

    return BLOCK.sub(table, text)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main(path: Path = README) -> None:
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
