"""Tables and figures of `rolltree bench curves`: recipes at equal sampled tokens and at equal seconds.

Between two evaluations accuracy is taken to be linear. The tokens and the seconds at which recipes are compared are the
most that every run of the campaign has reached, and a quarter of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Literal

from rolltree.engine.record.spent import crossing

from ..schema import Row
from .curves import BASE
from .job import Point, readings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Axis = Literal["tokens", "seconds"]
AXES: tuple[Axis, ...] = ("tokens", "seconds")
TARGETS = (0.5, 0.75, 0.9)
"""Accuracies of a campaign whose configuration names none."""
TUNED = "grpo_tuned"
"""The recipe with which FLOP and seconds to a target are compared."""
DISTILLED = "opd"
"""The recipe with which tokens to a target are compared; a campaign that has it is about distillation."""
LAST = 5
"""Evaluations at the end of a run of which distillation shows the mean."""
PARTS = (0.25, 1.0)
"""Shares of the most tokens and seconds at which recipes are compared."""
LABELS = {"tokens": "thousand tokens sampled", "seconds": "seconds of one core"}
SCALES = {"tokens": 1e-3, "seconds": 1.0}
SEED = re.compile(r", seed \d+$")
SHOWN = (
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/grad_norm",
    "filter/zero_variance_groups",
    "tree/token_ratio",
    "response_length/mean",
)
"""Metrics of the table of what recipes do."""
BLUE, GREY = "#3b82f6", "#6b7280"
Run = tuple[str, str]  # case, which has the seed, and recipe
Cost = tuple[str, str, float]  # a field of `Spent`, the head of its column, and the scale there
GFLOP_AND_SECONDS: tuple[Cost, ...] = (("flop", "GFLOP to {:g} %", 1e-9), ("seconds", "seconds", 1.0))
TOKENS: tuple[Cost, ...] = (("tokens", "thousand tokens to {:g} %", 1e-3),)


def campaigns(points: Sequence[Point]) -> dict[str, dict[Run, list[Point]]]:
    """Return the runs of each campaign, by its name, with their points in the order of steps."""
    by_campaign: dict[str, dict[Run, list[Point]]] = {}
    for point in sorted(points, key=lambda point: point.step):
        runs = by_campaign.setdefault(SEED.sub("", point.case), {})
        runs.setdefault((point.case, point.provider), []).append(point)
    return by_campaign


def reached(runs: dict[Run, list[Point]], axis: Axis) -> float:
    """Return the most tokens or seconds that every run has reached."""
    return min(getattr(points[-1], axis) for points in runs.values())


def accuracy_at(points: Sequence[Point], axis: Axis, x: float) -> float:
    """Return the accuracy of a run after ``x`` tokens or seconds.

    Raises:
        ValueError: the run ended before.
    """
    before = points[0]
    for point in points:
        low, high = getattr(before, axis), getattr(point, axis)
        if high >= x:
            share = (x - low) / (high - low) if high > low else 1.0
            return before.accuracy + share * (point.accuracy - before.accuracy)
        before = point
    raise ValueError(f"{points[-1].provider} ended after {getattr(points[-1], axis):g} {axis}, before {x:g}.")


def at(runs: dict[Run, list[Point]], axis: Axis, x: float) -> dict[str, dict[str, float]]:
    """Return each recipe's accuracy after ``x`` tokens or seconds, by case."""
    accuracies: dict[str, dict[str, float]] = {}
    for (case, recipe), points in runs.items():
        accuracies.setdefault(recipe, {})[case] = accuracy_at(points, axis, x)
    return accuracies


def markdown(points: Sequence[Point]) -> str:
    """Return a table of each campaign: a line for each recipe, the best at the fewest tokens first."""
    return "\n".join(_table(name, runs) for name, runs in campaigns(points).items())


def _table(name: str, runs: dict[Run, list[Point]]) -> str:
    limits = {axis: reached(runs, axis) for axis in AXES}
    heads = [name, "seeds"]
    for axis in AXES:
        for part in PARTS:
            x = limits[axis] * part
            heads += [f"{x / 1e3:.3g} k tokens" if axis == "tokens" else f"{x:.3g} s", f"against {BASE}"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    columns = [at(runs, axis, limits[axis] * part) for axis in AXES for part in PARTS]
    for recipe in sorted(columns[0], key=lambda recipe: -mean(columns[0][recipe].values())):
        cells = [recipe, str(len(columns[0][recipe]))]
        for accuracy in columns:
            cells += [_spread([100 * v for v in accuracy[recipe].values()]), _difference(accuracy, recipe)]
        lines.append(f"| {' | '.join(cells)} |")
    first = [points[0].accuracy for points in runs.values()]
    problems = next(iter(runs.values()))[0].problems
    sentence = (
        f"Per cent of {problems} held-out problems, {100 * mean(first):.1f} before training: the mean over "
        "seeds, and the lowest and highest in brackets; differences are of runs with the same seed."
    )
    all_points = [point for points in runs.values() for point in points]
    on = (
        " and ".join(sorted({value for point in all_points if (value := of(point))}))
        for of in (lambda p: p.device, lambda p: f"torch {p.versions['torch']}", lambda p: p.commit)
    )
    return "\n".join([*lines, "", sentence, "Measured on {}, {}, commit {}.".format(*on)]) + "\n"


def _spread(values: Sequence[float], sign: str = "", digits: int = 1) -> str:
    low, middle, high = (f"{value:{sign}.{digits}f}" for value in (min(values), mean(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def _difference(accuracies: dict[str, dict[str, float]], recipe: str) -> str:
    """Return the difference to `BASE` in points, over the seeds that both have; empty for `BASE`."""
    if recipe == BASE:
        return ""
    both = [case for case in accuracies[recipe] if case in accuracies.get(BASE, {})]
    return _spread([100 * (accuracies[recipe][case] - accuracies[BASE][case]) for case in both], "+") if both else ""


def targets(points: Sequence[Point]) -> str:
    """Return a table of each campaign whose FLOP were counted, but for those of distillation: for each of its targets
    the GFLOP, and the seconds of a core, at which the runs of a recipe reached and held it, and ratios to those of
    `TUNED` with the same seed."""
    counted = campaigns([point for point in points if point.flop is not None])
    return "\n".join(
        _targets(name, runs, TUNED, GFLOP_AND_SECONDS) for name, runs in counted.items() if not _distilled(runs)
    )


def distilled(points: Sequence[Point]) -> str:
    """Return a table of each campaign of distillation: for each of its targets the tokens at which the runs of a recipe
    reached and held it, ratios to those of `DISTILLED` with the same seed, and the accuracy at the end."""
    return "\n".join(
        _targets(name, runs, DISTILLED, TOKENS, at_end=True)
        for name, runs in campaigns(points).items()
        if _distilled(runs)
    )


def _distilled(runs: dict[Run, list[Point]]) -> bool:
    return any(recipe == DISTILLED for _, recipe in runs)


def _targets(name: str, runs: dict[Run, list[Point]], base: str, shown: Sequence[Cost], at_end: bool = False) -> str:
    """Return what each recipe of a campaign took to the targets; ``at_end``: and its mean accuracy at the end."""
    heads, shares = [name, "seeds"], next(iter(runs.values()))[0].targets or TARGETS
    for target in shares:
        for _, head, _ in shown:
            heads += [head.format(100 * target), f"against {base}"]
    heads += [f"last {LAST} evaluations"] if at_end else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    spent = {
        (recipe, case, target): crossing(readings(of_run), target, ended=True)
        for (case, recipe), of_run in runs.items()
        for target in shares
    }
    for recipe in dict.fromkeys(recipe for _, recipe in runs):
        cases = [case for case, of_recipe in runs if of_recipe == recipe]
        cells = [recipe, str(len(cases))]
        for target in shares:
            then = {case: at for case in cases if (at := spent[recipe, case, target]) is not None}
            of_base = {case: at for case in then if (at := spent.get((base, case, target))) is not None}
            few = "" if len(then) == len(cases) else f", {len(then)} of {len(cases)}"
            for field, _, scale in shown:
                values = [scale * getattr(at, field) for at in then.values()]
                ratios = [getattr(then[case], field) / getattr(at, field) for case, at in of_base.items()]
                cells.append(f"{_spread(values)}{few}" if values else "not reached")
                cells.append(_spread(ratios, digits=2) if ratios and recipe != base else "")
        if at_end:
            ends = [mean(point.accuracy for point in runs[case, recipe][-LAST:]) for case in cases]
            cells.append(f"{_spread([100 * end for end in ends])} %")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def actions(rows: Sequence[Row], metrics: Sequence[str] = SHOWN) -> str:
    """Return a table of each campaign, with a line for each recipe: the mean over its runs of their recorded medians of
    ``metrics``; none where no run has one."""
    tables = []
    for name in dict.fromkeys(SEED.sub("", row.case) for row in rows):
        lines = [f"| {name} | {' | '.join(f'`{metric}`' for metric in metrics)} |", "|---" * (len(metrics) + 1) + "|"]
        of_campaign = [row for row in rows if SEED.sub("", row.case) == name]
        for recipe in dict.fromkeys(row.provider for row in of_campaign):
            cells = [recipe]
            for metric in metrics:
                values = [row.value for row in of_campaign if (row.provider, row.metric) == (recipe, metric)]
                cells.append(f"{mean(values):.3g}" if values else "")
            lines.append(f"| {' | '.join(cells)} |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def figures(points: Sequence[Point]) -> Iterator[tuple[str, Figure]]:
    """Yield figures of each campaign over tokens and over seconds, each after its name."""
    for name, runs in campaigns(points).items():
        for axis in AXES:
            yield f"{name}_{axis}", figure(runs, axis)


def figure(runs: dict[Run, list[Point]], axis: Axis) -> Figure:
    """Return a panel for each recipe: its runs in colour over those of `BASE`."""
    from matplotlib.figure import Figure

    others = [recipe for recipe in dict.fromkeys(recipe for _, recipe in runs) if recipe != BASE]
    columns = min(4, len(others))
    rows = -(-len(others) // columns)
    canvas = Figure(figsize=(2.6 * columns, 2.1 * rows + 0.3), layout="constrained")
    panels = list(canvas.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for panel in panels[len(others) :]:
        panel.set_visible(False)
    for panel in panels[len(others) - columns : len(others)]:
        panel.tick_params(labelbottom=True)  # the lowest of its column
    limit = reached(runs, axis)
    for panel, recipe in zip(panels, others, strict=False):
        for which, colour in ((BASE, GREY), (recipe, BLUE)):
            for x, y in _lines(runs, which, axis, limit):
                panel.plot(x, y, color=colour, linewidth=1)
        panel.set_title(recipe, fontsize=9)
        panel.tick_params(labelsize=7)
    grey = f" ({BASE}: grey)" if any(recipe == BASE for _, recipe in runs) else ""
    canvas.supxlabel(LABELS[axis] + grey, fontsize=9)
    canvas.supylabel("% of held-out problems", fontsize=9)
    return canvas


def _lines(
    runs: dict[Run, list[Point]], recipe: str, axis: Axis, limit: float
) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the curve of each run of ``recipe`` up to ``limit``."""
    for (_, name), points in runs.items():
        if name == recipe:
            curve = [(getattr(p, axis), p.accuracy) for p in points if getattr(p, axis) < limit]
            curve.append((limit, accuracy_at(points, axis, limit)))
            yield [SCALES[axis] * x for x, _ in curve], [100 * y for _, y in curve]
