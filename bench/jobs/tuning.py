"""Sizes for the recipes of ``rolltree bench curves``: each recipe is tried with every setting of one grid.

The seeds of the tries are others than those that are reported. A setting is chosen by its runs alone: the one with
which most runs reach the last of the configuration's `evaluation.targets` and hold it, then the one that reaches it
with the fewest FLOP; where no run of a recipe does, by the target before it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from rolltree.engine.errors import UserError
from rolltree.engine.record.spent import crossing

from .job import Point, readings

Setting = dict[str, str]
"""Values of keys of the configuration."""
FILE = "tuned.json"


def grid(options: Sequence[str]) -> list[Setting]:
    """Return every combination of the values of options ``KEY=VALUE,VALUE``.

    Raises:
        UserError: an option has another form.
    """
    axes = []
    for option in options:
        key, equals, values = option.partition("=")
        if not (key and equals and all(values.split(","))):
            raise UserError(f"--tune takes KEY=VALUE,VALUE, as in trainer.lr=4e-5,6e-5, and got '{option}'.")
        axes.append([(key, value) for value in values.split(",")])
    return [dict(choice) for choice in itertools.product(*axes)]


def flags(setting: Mapping[str, str]) -> list[str]:
    return [part for key, value in setting.items() for part in (f"--{key}", value)]


def said(setting: Mapping[str, str]) -> str:
    """Return the setting as a part of a case's name."""
    return ", ".join(f"{key} {value}" for key, value in setting.items())


def score(runs: Sequence[Sequence[Point]], targets: Sequence[float]) -> tuple[float, ...]:
    """Return the rank of a setting by its runs, the lowest best: for each target, the last first, how many runs miss
    it, and the mean FLOP to it of those that do not."""
    rank: list[float] = []
    for target in sorted(targets, reverse=True):
        then = [at.flop for run in runs if (at := crossing(readings(run), target, ended=True)) is not None]
        rank += [len(runs) - len(then), mean(then) if then else 0.0]
    return tuple(rank)


def choose(tries: Mapping[str, Mapping[str, Sequence[Sequence[Point]]]], targets: Sequence[float]) -> dict[str, str]:
    """Return the best setting, as :func:`said` gives it, of each recipe; ``tries`` has runs by recipe and setting."""
    return {recipe: min(of, key=lambda name: score(of[name], targets)) for recipe, of in tries.items()}


def write(settings: Mapping[str, Setting], directory: Path) -> Path:
    """Write the settings of the recipes, with those that the file already has of others, and return its path."""
    path = directory / FILE
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**before, **settings}, indent=2) + "\n", encoding="utf-8")
    return path


def read(path: Path, recipes: Sequence[str]) -> dict[str, Setting]:
    """Return the settings of ``recipes``.

    Raises:
        UserError: the file cannot be read, or lacks a recipe.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' has no settings that --tune has written: {error}.") from None
    if missing := [recipe for recipe in recipes if recipe not in settings]:
        raise UserError(f"'{path}' has no setting for {', '.join(missing)}; tune them first, with --tune.")
    return {recipe: settings[recipe] for recipe in recipes}
