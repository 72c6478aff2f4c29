"""One page on several runs: curves in common plots, tables of final values and times, settings that differ."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import figures
from .run_data import RunData, read_run
from .writing import html, plotly_js, script_json, template, write_page

COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#a78bfa", "#14b8a6", "#ec4899", "#a16207")
ABSENT = "–"


class Named(NamedTuple):
    """A run with its name and colour on the page."""

    name: str
    run: RunData
    colour: str


def write_comparison(run_dirs: Sequence[Path], target: Path) -> Path:
    """Write one page on the runs in ``run_dirs`` to ``target`` and return ``target``.

    Raises:
        UserError: a directory is not that of a run.
        RunError: the page cannot be written.
    """
    runs = _named([read_run(path) for path in run_dirs])
    drawn = [(curve, _figure(curve, runs)) for curve in _curves()]
    shown = [(curve, figure) for curve, figure in drawn if figure is not None]
    missing = [f"{run.name}: {sentence}" for run in runs for sentence in run.run.missing if "parquet" not in sentence]
    if absent := [curve.title.lower() for curve, figure in drawn if figure is None]:
        missing.append(f"Recorded by none of the runs: {', '.join(absent)}.")
    missing += [
        f"{run.name}: rollout/sampled_tokens was not recorded, so it has no curves over sampled tokens."
        for run in runs
        if run.run.rows and not run.run.series("rollout/sampled_tokens")[1]
    ]
    page = template("compare.html.j2").render(
        runs=runs,
        missing=missing,
        curves=[(curve, html(figure, f"plot-{number}")) for number, (curve, figure) in enumerate(shown)],
        axes_json=script_json({axis: [_xs(curve, runs, at) for curve, _ in shown] for axis, at in AXES.items()}),
        values=_table(runs, VALUES),
        times=_times(runs),
        settings=differing([run.run.config for run in runs]),
        plotly_js=plotly_js() if shown else "",
    )
    write_page(target, page)
    return target


def _named(runs: Sequence[RunData]) -> list[Named]:
    """Name each run: its own name, or its path if another run has the same name."""
    names = [str(run.config.get("name") or run.run_dir.resolve().name) for run in runs]
    often = Counter(names)
    names = [name if often[name] == 1 else str(run.run_dir) for name, run in zip(names, runs, strict=True)]
    return [Named(*named) for named in zip(names, runs, itertools.cycle(COLOURS), strict=False)]


# -- curves ------------------------------------------------------------------------------------------------------------


def _curves() -> list[figures.Curve]:
    """Return the curves of the page: held-out accuracy first, then those of a single run's report."""
    accuracy = figures.Curve(
        "Held-out accuracy", "Greedy answers to problems that are never trained on.",
        (("eval/accuracy", "accuracy", ""),), percent=True,
    )  # fmt: skip
    return [accuracy, *figures.CURVES]


def _steps(run: RunData) -> dict[int, float]:
    return {int(row["step"]): row["step"] for row in run.rows}


def _sums(run: RunData, key: str) -> dict[int, float]:
    """Return the cumulative sum of metric ``key`` at each step; empty if it was never recorded."""
    if not run.series(key)[1]:
        return {}
    added = itertools.accumulate(row.get(key, 0.0) for row in run.rows)
    return {int(row["step"]): value for row, value in zip(run.rows, added, strict=True)}


AXES: dict[str, Callable[[RunData], dict[int, float]]] = {
    "step": _steps,
    "seconds": lambda run: _sums(run, "timing_s/step"),
    "sampled tokens": lambda run: _sums(run, "rollout/sampled_tokens"),
    "FLOP": lambda run: {int(row["step"]): row["perf/flop_so_far"] for row in run.rows if "perf/flop_so_far" in row},
}
"""The horizontal axes to choose from: functions from a run to the axis's value at each step."""


def _xs(curve: figures.Curve, runs: Sequence[Named], at: Callable[[RunData], dict[int, float]]) -> list[list[Any]]:
    """Return the x values of each run's line; None for points whose value is unknown."""
    key = curve.lines[0][0]
    lines = [(run.run.series(key)[0], at(run.run)) for run in runs]
    return [
        [None if (x := x_of_step.get(step)) is None else round(x, 3) for step in steps] for steps, x_of_step in lines
    ]


def _figure(curve: figures.Curve, runs: Sequence[Named]) -> figures.Figure | None:
    traces = []
    for run in runs:
        steps, values = run.run.series(curve.lines[0][0])
        traces.append(
            {
                "type": "scatter", "x": steps, "y": figures.running_mean(values) or values, "name": run.name,
                "mode": "lines" if len(values) > 1 else "markers", "line": {"color": run.colour, "width": 2},
                "hovertemplate": f"%{{x}}: %{{y:{'.1%' if curve.percent else '.4~g'}}}",
            }
        )  # fmt: skip
    if not any(trace["y"] for trace in traces):
        return None
    return figures.styled(traces, {"showlegend": False}, percent=curve.percent, height=230)


# -- tables ------------------------------------------------------------------------------------------------------------


def _last(run: RunData, key: str) -> float | None:
    values = run.series(key)[1]
    return values[-1] if values else None


def _end(run: RunData, key: str) -> float | None:
    """Return the mean over the last tenth of the recorded values; None if there are none."""
    values = run.series(key)[1]
    tail = values[-max(1, len(values) // 10) :]
    return math.fsum(tail) / len(tail) if tail else None


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


VALUES: tuple[tuple[str, Callable[[RunData], float | None], Callable[[float], str]], ...] = (
    ("steps", lambda run: run.rows[-1]["step"] if run.rows else None, lambda v: f"{v:.0f}"),
    ("held-out accuracy, first", lambda run: next(iter(run.series("eval/accuracy")[1]), None), _percent),
    ("held-out accuracy, last", lambda run: _last(run, "eval/accuracy"), _percent),
    ("held-out accuracy, best", lambda run: max(run.series("eval/accuracy")[1], default=None), _percent),
    ("reward, last tenth", lambda run: _end(run, "reward/mean"), lambda v: f"{v:.3f}"),
    ("entropy, last tenth", lambda run: _end(run, "actor/entropy"), lambda v: f"{v:.3f}"),
    ("response length, last tenth", lambda run: _end(run, "response_length/mean"), lambda v: f"{v:.1f}"),
    ("time", lambda run: run.total("timing_s/step") or None, figures.duration),
    ("seconds a step, median", lambda run: _median(run, "timing_s/step"), lambda v: f"{v:.3f}"),
    ("sampled tokens", lambda run: run.total("rollout/sampled_tokens") or None, figures.short),
    ("FLOP without evaluations", lambda run: _last(run, "perf/flop_so_far"), figures.short),
    ("FLOP of evaluations", lambda run: run.total("perf/flop_evaluated") or None, figures.short),
    ("tokens on all paths", lambda run: figures.logical_tokens(run) or None, figures.short),
    ("MFU, last tenth", lambda run: _end(run, "perf/mfu/actor"), _percent),
)
"""Rows of the table of final values: name, function from a run to the value, and its format."""


def _median(run: RunData, key: str) -> float | None:
    values = sorted(value for step, value in zip(*run.series(key), strict=True) if step > 0)
    return values[len(values) // 2] if values else None


def _table(runs: Sequence[Named], rows: Sequence[tuple[str, Any, Any]]) -> list[tuple[str, list[str]]]:
    """Return the rows for which at least one run has a value."""
    entries = [(name, [of(run.run) for run in runs], text) for name, of, text in rows]
    return [
        (n, [ABSENT if v is None else text(v) for v in vs]) for n, vs, text in entries if any(v is not None for v in vs)
    ]


def _times(runs: Sequence[Named]) -> list[tuple[str, list[str]]]:
    """Return the mean seconds of each part of a step, and of the whole step."""

    def row(name: str, key: str) -> tuple[str, Any, Any]:
        return name, lambda run: run.total(key) / figures.training_steps(run) or None, lambda v: f"{v:.3f}"

    parts = [row(name, f"timing_s/{key}") for key, name, _ in figures.ACCOUNT]
    return _table(runs, [*parts, row("the step", "timing_s/step")])


def differing(configs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the dotted keys whose values differ between the configurations, with their values; names are left out."""
    flat = [dict(_flat("", config)) for config in configs]
    keys = sorted({key for values in flat for key in values} - {"name", "output_dir"})
    rows = [(key, [json.dumps(v[key], ensure_ascii=False) if key in v else ABSENT for v in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(prefix: str, table: dict[str, Any]) -> list[tuple[str, Any]]:
    out = []
    for key, value in table.items():
        out += _flat(f"{prefix}{key}.", value) if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return out
