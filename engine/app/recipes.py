"""Recipes: published methods by name, as the keys of a run's TOML that differ from its defaults.

A recipe is the file ``engine/recipes/NAME.toml``. Its first comment is its documentation, in labelled paragraphs:

- ``papers:`` papers that the recipe follows, separated by ``;``, each with its arXiv number where it was looked up;
- ``formula:`` the mechanism in one or two lines;
- ``differs:`` from the recipe `grpo`;
- ``source:`` of the formula and the numbers;
- ``inferred:`` (optional) what no source states;
- ``needs:`` (optional) keys that the run's own file must give;
- ``equal:`` (optional) another recipe that behaves alike, and why.

A number of updates a step is a share of the batch (`Updates`), so that every recipe fits a run of a few prompts.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import ValidationError

from ..errors import UserError
from ..settings.algorithm import DemonstrationsConfig
from ..settings.training import TrainerSection

FOLDER = Path(__file__).parents[1] / "recipes"
LABEL = re.compile(r"(papers|formula|differs|source|inferred|needs|equal): ")
PAPER = re.compile(r"(?P<name>.+?)(?: (?P<number>\d{4}\.\d{4,5}))?")


class Updates(int):
    """A recipe's `trainer.updates_per_step`, K: papers mean mini-batches of a K-th of the batch, whatever its size, so
    a batch of fewer than K prompts has an update for each prompt."""

    def of(self, prompts: int) -> int:
        return min(int(self), prompts)


@dataclass(frozen=True)
class Paper:
    """A paper that a recipe follows."""

    name: str
    number: str | None
    """Its arXiv number, if it was looked up."""

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name} (arXiv {self.number})"


@dataclass(frozen=True)
class Recipe:
    """A published method as keys of a configuration."""

    name: str
    keys: dict[str, Any]
    """The TOML file's tables."""
    about: dict[str, str]
    """The paragraphs of its first comment, by label."""

    @property
    def papers(self) -> tuple[Paper, ...]:
        """The papers that it follows, the one that defines the method first."""
        matches = (PAPER.fullmatch(paper.strip()) for paper in self.about["papers"].split(";"))
        return tuple(Paper(m["name"], m["number"]) for m in matches if m is not None)

    @property
    def toml(self) -> str:
        """Return the file's text without its first comment."""
        lines = (FOLDER / f"{self.name}.toml").read_text(encoding="utf-8").splitlines()
        return "\n".join(line for line in lines if not line.startswith("#")).strip()


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_recipe(name: str) -> Recipe:
    """Return the recipe called ``name``.

    Raises:
        UserError: there is none.
    """
    names = recipe_names()
    if name not in names:
        near = difflib.get_close_matches(name[:100], names, n=3, cutoff=0.4)
        which = f"the nearest are {', '.join(near)}" if len(near) > 1 else f"did you mean '{near[0]}'" if near else ""
        raise UserError(
            f"There is no recipe '{name[:100]}'; {which or 'choose another'} (`rolltree methods` lists all)."
        )
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    keys = tomllib.loads(text)
    if "updates_per_step" in keys.get("trainer", {}):
        keys["trainer"]["updates_per_step"] = Updates(keys["trainer"]["updates_per_step"])
    return Recipe(name, keys, _about(text))


def _about(text: str) -> dict[str, str]:
    about: dict[str, str] = {}
    label = ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        said = line.removeprefix("#").strip()
        if (match := LABEL.match(said)) is not None:
            label, said = match[1], said[match.end() :]
        about[label] = f"{about[label]} {said}" if label in about else said
    return about


def needs(data: Mapping[str, Any], error: ValidationError) -> str:
    """Return a sentence about what the recipe of a run leaves to it, if the run's tables lack a key; else ""."""
    if not isinstance(recipe := data.get("recipe"), str) or all(e["type"] != "missing" for e in error.errors()):
        return ""
    about = read_recipe(recipe).about.get("needs")
    return f" The recipe '{recipe}' needs {about}." if about else ""


def combined(recipe: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``recipe`` with those of ``overrides`` over them.

    Tables are combined key by key, and lists of tables by their ``name``: a table of the recipe's name is combined with
    it, others follow; an empty list takes them away. If ``overrides`` replaces a part (a key that has
    ``<key>_options``, or `reward.verifier`, which has `reward.options`), the recipe's options of the old part do not
    apply to the new one.
    """
    result = dict(recipe)
    for key, value in overrides.items():
        old = recipe.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = combined(old, value)
        elif _named_tables(old) and _named_tables(value):
            result[key] = _by_name(old, value)
        else:
            result[key] = value
    for part, options in _parts(recipe):
        if part in overrides and overrides[part] != recipe[part] and options in recipe:
            result.pop(options)
            if options in overrides:
                result[options] = overrides[options]
    return result


def with_updates(data: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a run with the number of updates that its batch allows, if they have the recipe's own."""
    trainer = data.get("trainer")
    if not isinstance(trainer, Mapping) or not isinstance(updates := trainer.get("updates_per_step"), Updates):
        return data
    demonstrations = data.get("demonstrations", [])
    tables = [
        table
        for table in (demonstrations if isinstance(demonstrations, list) else [demonstrations])
        if isinstance(table, Mapping)
    ]
    default = DemonstrationsConfig.model_fields["per_step"].default
    prompts = trainer.get("prompts_per_step", TrainerSection.model_fields["prompts_per_step"].default)
    sizes = [prompts, *(table.get("per_step", default) for table in tables)]
    if not all(isinstance(size, int) for size in sizes) or (most := max(sizes[0], sum(sizes[1:]))) < 1:
        return data  # a mistake, which the check of the configuration names
    return data | {"trainer": {**trainer, "updates_per_step": updates.of(most)}}


def _parts(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key that names a part, with the key of its options."""
    for key in table:
        yield key, "options" if key == "verifier" else f"{key}_options"


def _named_tables(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and value != [] and all(isinstance(t, Mapping) and "name" in t for t in value)


def _by_name(old: list[Mapping[str, Any]], overrides: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    waiting = [dict(item) for item in overrides]
    result = []
    for item in old:
        override = next((other for other in waiting if other["name"] == item["name"]), None)
        if override is not None:
            waiting.remove(override)
        result.append(combined(item, override or {}))
    return result + waiting


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a recipe with their values; a part's options are one key, and so is a list."""
    for key, value in table.items():
        if isinstance(value, Mapping) and not key.endswith("options") and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
