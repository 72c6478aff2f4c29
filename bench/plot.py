"""``rolltree bench plot FILES``: draws recorded rows and curves as PNG files and one HTML page.

It draws the times of every op as bars with their 20th to 80th percentiles and the ceiling as a line; a roofline of the
rows that count FLOP and bytes, under the limits that the op `ceilings` measured on the same device; and the held-out
accuracy of every job over seconds and over tokens.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .jobs.job import Point, apart, of_seeds
from .schema import RECORDS, Row, rows_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, GREY, RED = "#3b82f6", "#9ca3af", "#ef4444"
CURVES = ".curves.jsonl"
OURS = "rolltree"
"""Occurs in the names of this project's own providers."""
Drawn = tuple[str, "Figure"]  # a file's name without ending, and its figure


def main(argv: Sequence[str]) -> int:
    """Draw, and return 0, or 2 if the command line or a file is wrong."""
    parser = argparse.ArgumentParser(prog="rolltree bench plot", description="Draw recorded rows and curves.")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a file of rows or curves, or a folder of them"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/plots"), metavar="DIR", help="default %(default)s")
    args = parser.parse_args(argv)
    try:
        written = draw(args.files, args.out)
    except ValueError as error:
        print(f"rolltree bench: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"rolltree bench: plots need {error.name}; install rolltree[plots].", file=sys.stderr)
        return 2
    print(*written, sep="\n")
    return 0


def draw(files: Sequence[Path], out: Path) -> list[Path]:
    """Draw ``files`` into the folder ``out`` and return the paths written, the page first.

    Raises:
        ValueError: a file is missing or holds something else, or there is nothing to draw.
    """
    rows, points = read(files)
    drawn = [*bars(rows), *rooflines(rows), *curves(points)]
    if not drawn:
        raise ValueError(f"There is nothing to draw in {', '.join(map(str, files))}; give files with times or curves.")
    out.mkdir(parents=True, exist_ok=True)
    written, parts = [out / "bench.html"], []
    for name, figure in drawn:
        written.append(out / f"{name}.png")
        figure.savefig(written[-1], dpi=100)
        vector = io.StringIO()
        figure.savefig(vector, format="svg", metadata={"Date": None})
        parts.append(f"<h2>{html.escape(name)}</h2>\n{vector.getvalue()[vector.getvalue().index('<svg') :]}")
    written[0].write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>rolltree bench</title>'
        "<style>body{font-family:sans-serif;max-width:70em;margin:auto}svg{max-width:100%;height:auto}</style>\n"
        + "\n".join(parts),
        encoding="utf-8",
    )
    return written


def read(files: Sequence[Path]) -> tuple[list[Row], list[Point]]:
    """Return the last row of each figure, and the points of each provider's last run of a job.

    Raises:
        ValueError: a file is missing, or a line is neither a row nor a point.
    """
    rows: dict[Any, Row] = {}
    points: dict[Any, list[Point]] = {}
    for path in files:
        if not path.exists():
            raise ValueError(f"There is no '{path}'; give files or folders of `rolltree bench --out`.")
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
            if file.name.endswith(CURVES):
                for line in file.read_text(encoding="utf-8").splitlines():
                    point = Point(**json.loads(line))
                    run = point.device, point.case, point.provider
                    points[run] = [*(points.get(run, []) if point.step else []), point]  # a run starts with step 0
            elif not file.name.endswith(RECORDS):
                for row in rows_at(file):
                    rows[row.device, row.op, row.case, row.direction, row.provider, row.metric] = row
    return list(rows.values()), [point for run in points.values() for point in run]


def bars(rows: Sequence[Row]) -> Iterator[Drawn]:
    """Yield a figure of times for each op, with a panel for each case and direction and a bar for each provider."""
    for (device, op), of_op in _by(("device", "op"), [r for r in rows if r.metric == "time_ms"]):
        panels = list(_by(("case", "direction"), of_op))
        heights = [0.6 + 0.25 * len(of_panel) for _, of_panel in panels]
        figure, axes = _panels(len(panels), 1, (9, sum(heights) + 0.5), heights)
        figure.suptitle(f"{op}, {device}", fontsize=9)
        for axis, ((case, direction), of_panel) in zip(axes, panels, strict=True):
            value = [r.value for r in of_panel]
            spread = [[r.value - r.p20 for r in of_panel], [r.p80 - r.value for r in of_panel]]
            colour = [BLUE if OURS in r.provider else GREY for r in of_panel]
            axis.barh([r.provider for r in of_panel], value, xerr=spread, color=colour, capsize=2)
            for r in of_panel:
                if r.ceiling is not None:
                    axis.axvline(r.ceiling, color=RED, linewidth=1, label="ceiling")
            if (handles := axis.get_legend_handles_labels())[0]:
                axis.legend(handles[0][:1], handles[1][:1], fontsize=7)
            axis.invert_yaxis()
            axis.set_title(f"{case}, {direction}, ms", fontsize=8, loc="left")
        yield _name(op, device), figure


def rooflines(rows: Sequence[Row]) -> Iterator[Drawn]:
    """Yield a figure for each device: FLOP a second over FLOP a byte."""
    timed = [r for r in rows if r.metric == "time_ms"]
    for (device,), of_device in _by(("device",), timed):
        measured = [r for r in of_device if r.flop and r.bytes and r.op != "ceilings"]
        if not measured:
            continue
        figure, (axis,) = _panels(1, 1, (9, 6), [1])
        for (op, provider), group in _by(("op", "provider"), measured):
            x, y = [r.flop / r.bytes for r in group], [r.flop / r.value / 1e6 for r in group]
            axis.plot(x, y, "o" if OURS in provider else "x", label=f"{op}, {provider}")
        limits = [r for r in of_device if r.op == "ceilings"]
        flops = max((r.flop / r.value / 1e6 for r in limits if r.flop), default=None)
        rate = max((r.bytes / r.value / 1e6 for r in limits if r.bytes), default=None)
        if flops is not None and rate is not None:
            intensities = [r.flop / r.bytes for r in measured]
            x = sorted([min(intensities) / 2, flops / rate, max(intensities) * 2])
            label = f"product {flops:.3g} GFLOP/s, copy {rate:.3g} GB/s"
            axis.plot(x, [min(rate * i, flops) for i in x], color=RED, linewidth=1, label=label)
        axis.set(xscale="log", yscale="log", xlabel="FLOP / byte", ylabel="GFLOP/s")
        axis.legend(fontsize=7)
        figure.suptitle(f"roofline, {device}", fontsize=9)
        yield _name("roofline", device), figure


def curves(points: Sequence[Point]) -> Iterator[Drawn]:
    """Yield a figure for each job: held-out accuracy, a line for each provider and seed."""
    jobs: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        jobs.setdefault((point.device, apart(point.case)[0]), []).append(point)
    for (device, job), of_job in jobs.items():
        figure, axes = _panels(1, 2, (11, 4.5), [1])
        for colour, ((provider,), of_provider) in enumerate(_by(("provider",), of_job)):
            style = "-" if provider.startswith(OURS) else "--"
            label = provider  # of the first seed's line alone
            for _, line in _by(("case",), sorted(of_provider, key=lambda p: p.step)):
                accuracy = [100 * p.accuracy for p in line]
                options: dict[str, Any] = {"marker": ".", "color": f"C{colour}", "label": label}
                axes[0].plot([p.seconds for p in line], accuracy, style, **options)
                axes[1].plot([p.tokens for p in line], accuracy, style, **options)
                label = "_"
        axes[0].set(xlabel="seconds of training", ylabel=f"% of {of_job[0].problems} held-out problems")
        axes[1].set(xlabel="tokens sampled")
        axes[0].legend(fontsize=8)
        name = of_seeds(job, list(dict.fromkeys(apart(point.case)[1] for point in of_job)))
        figure.suptitle(f"{name}\n{device}", fontsize=8)
        yield _name("job", name, device), figure


def _panels(rows: int, columns: int, size: tuple[float, float], heights: Sequence[float]) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure  # draws without a window system

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"height_ratios": list(heights)})
    return figure, [axis for row in axes for axis in row]


def _by(names: Sequence[str], things: Sequence[Any]) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    """Yield the groups of equal attributes in the order of their first members."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for thing in things:
        groups.setdefault(tuple(getattr(thing, name) for name in names), []).append(thing)
    yield from groups.items()


def _name(*parts: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", " ".join(parts).lower()).strip("-")
