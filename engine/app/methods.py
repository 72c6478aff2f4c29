"""Prints recipes, papers and the parts that a configuration may name (``rolltree methods``)."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from rolltree.kernels.policy_loss import ALIASES, PRESETS, RECONSTRUCTED
from rolltree.kernels.policy_loss.rules import RULES
from rolltree.kernels.policy_loss.surrogates import SURROGATES

from ..errors import UserError
from ..methods.advantages import ADVANTAGES
from ..methods.curricula import CURRICULA
from ..methods.groups import GROUP_CALLBACKS, KEEPS
from ..methods.losses import LOSSES
from ..methods.other_names import OTHER_NAMES
from ..methods.papers import OWN_ADVANTAGE, OWN_SELECTION
from ..methods.schedules import SCHEDULES
from ..methods.selections import PAIRINGS, SELECTIONS
from ..methods.shaping import SHAPINGS
from ..parts.resolve import NEEDED, options_of
from ..programs import PROGRAMS
from ..rewards.code.verifier import CodeVerifier
from ..rewards.group_judges import JUDGES
from ..rewards.make import OWN
from ..rewards.verifiers import BUILT_IN, TaskVerifier
from .recipes import Recipe, flat, read_recipe, recipe_names


class Kind(NamedTuple):
    """The parts that one key of the configuration names."""

    title: str
    keys: tuple[str, ...]
    """Keys of the configuration that name one, dotted, without the names of lists' tables."""
    parts: Mapping[str, Callable[..., Any]]
    inputs: tuple[str, ...]
    """The arguments that the run fills in."""


KINDS = (
    Kind("advantages", ("algorithm.advantage",), ADVANTAGES, ("trees",)),
    Kind("shaping of rewards", ("reward.shaping.name",), SHAPINGS, ("tree",)),
    Kind(
        "schedules",
        (
            "algorithm.weight", "algorithm.terms.weight", "trainer.lr_scale", "loop.temperature_scale",
            "loop.length_scale", "loop.over_sampling",
        ),
        SCHEDULES, ("step", "metrics"),
    ),
    Kind("selections", ("algorithm.select", "algorithm.terms.select"), SELECTIONS, ("tree",)),
    Kind("losses of terms", ("algorithm.terms.loss",), LOSSES, ()),
    Kind("pairs of preference losses", ("algorithm.terms.pairs",), PAIRINGS, ("tree",)),
    Kind("curricula", ("data.curriculum",), CURRICULA, ()),
    Kind("group callbacks", ("loop.callback",), GROUP_CALLBACKS, ("tree",)),
    Kind("groups of the replay store", ("replay.keep",), KEEPS, ("tree",)),
    Kind("rollout programs", ("rollout.program",), PROGRAMS, ()),
    Kind(
        "verifiers",
        ("reward.verifier", "reward.parts.verifier"),
        {"task": TaskVerifier, **BUILT_IN, "code": CodeVerifier, **JUDGES, **OWN},
        (),
    ),
)  # fmt: skip
SAME_IN_RUNS = {
    ("decoupled_ppo", "rollout_is"): 'with algorithm.old_logprob = "recompute", which it needs',
    ("on_policy_pg", "reinforce"): "in gradients, as every ratio is that of the policy to itself",
}
"""Objectives that a run cannot tell apart, and why: with recomputed log-probs the first two compare with the policy
before the step and weigh by the sampler's."""
RUN_GIVES = ("config", "score", "tasks")
"""Arguments of verifiers that are no options."""
OBJECTIVE_KEYS = ("algorithm.objective", "algorithm.terms.objective")


def method_lines() -> Iterator[str]:
    """Yield recipes and the parts that a configuration may name, each with the first line of its documentation."""
    yield "recipes (recipe)"
    for name in recipe_names():
        yield f"  {name:21} {read_recipe(name).papers[0]}"
    yield f"objectives ({OBJECTIVE_KEYS[0]})"
    for name in PRESETS:
        yield f"  {name:21} {_objective(name)}"
    for kind in KINDS:
        yield f"{kind.title} ({', '.join(kind.keys)})"
        for name, part in kind.parts.items():
            options = _options(part, kind.inputs)
            yield f"  {name:21} {_paragraph(part)}{f' [{options}]' if options else ''}"
    yield "other names"
    for name, served in OTHER_NAMES.items():
        yield f"  {name:21} {served}"


def paper_lines() -> Iterator[str]:
    """Yield every paper that a recipe follows, in alphabetical order, with the recipe."""
    pairs = [(str(paper), name) for name in recipe_names() for paper in read_recipe(name).papers]
    for paper, name in sorted(pairs, key=lambda pair: (pair[0].casefold(), pair[1])):
        yield f"{name:21} {paper}"


def about(name: str) -> Iterator[str]:
    """Yield what is known of the recipe or part called ``name``: all of that name, with the recipes that use it.

    Raises:
        UserError: nothing has that name.
    """
    sections: list[Iterator[str]] = []
    if name in recipe_names():
        sections.append(_about_recipe(read_recipe(name)))
    if name in PRESETS:
        sections.append(_about_objective(name))
    sections += [_about_part(kind, name) for kind in KINDS if name in kind.parts]
    if name in OTHER_NAMES:
        sections.append(iter([name, *_wrapped("here", OTHER_NAMES[name])]))
    if not sections:
        names = [*recipe_names(), *PRESETS, *(part for kind in KINDS for part in kind.parts), *OTHER_NAMES]
        near = list(dict.fromkeys(difflib.get_close_matches(name[:100], names, n=3, cutoff=0.4)))
        hint = f"the nearest are {', '.join(near)}" if len(near) > 1 else f"did you mean '{near[0]}'" if near else ""
        raise UserError(f"There is no method '{name[:100]}'; {hint or '`rolltree methods` lists all'}.")
    for i, lines in enumerate(sections):
        if i:
            yield ""
        yield from lines


def _about_recipe(recipe: Recipe) -> Iterator[str]:
    yield f"recipe {recipe.name}"
    yield from _wrapped("papers", "; ".join(map(str, recipe.papers)))
    for label in ("formula", "differs", "source", "inferred", "needs", "equal"):
        if label in recipe.about:
            yield from _wrapped(label, recipe.about[label])
    yield ""
    yield from textwrap.indent(recipe.toml, "  ").splitlines()
    named = [(kind, value) for kind in KINDS for value in _named(recipe, kind.keys) if value in kind.parts]
    if named:
        yield ""
    for kind, part in named:
        yield from _wrapped(f"{kind.keys[0]} = {part}", _paragraph(kind.parts[part]))


def _about_objective(name: str) -> Iterator[str]:
    yield f"objective {name} (algorithm.objective)"
    preset = PRESETS[name]
    yield from _wrapped("settings", _objective(name))
    for (one, other), why in SAME_IN_RUNS.items():
        if name in (one, other):
            yield from _wrapped("equal", f"{one} is {other} {why}")
    formulas: list[Callable[..., Any]] = []
    if preset.surrogate in RULES:
        formulas.append(RULES[preset.surrogate].function)
    if preset.surrogate in SURROGATES:
        formulas.append(SURROGATES[preset.surrogate].formula)
    for formula in formulas:
        yield from _wrapped("formula", " ".join((inspect.getdoc(formula) or "").split()))
    if name in OWN_ADVANTAGE:
        yield from _wrapped("advantage", f"{OWN_ADVANTAGE[name]}, unless algorithm.advantage is given")
    if name in OWN_SELECTION:
        yield from _wrapped("selection", f"{OWN_SELECTION[name]}, unless `select` is given")
    yield from _used(name, OBJECTIVE_KEYS)


def _about_part(kind: Kind, name: str) -> Iterator[str]:
    yield f"{name} ({kind.keys[0]})"
    yield from textwrap.indent(inspect.getdoc(kind.parts[name]) or "", "  ").splitlines()
    if options := _options(kind.parts[name], kind.inputs):
        yield from _wrapped("options", options)
    yield from _used(name, kind.keys)


def _used(name: str, keys: tuple[str, ...]) -> Iterator[str]:
    users = [recipe.name for recipe in _recipes() if name in _named(recipe, keys)]
    if users:
        yield from _wrapped("recipes", ", ".join(users))


@cache
def _recipes() -> list[Recipe]:
    return [read_recipe(name) for name in recipe_names()]


def _named(recipe: Recipe, keys: tuple[str, ...]) -> list[Any]:
    """Return the values that a recipe gives ``keys``, within lists of tables too."""
    values: list[Any] = []
    for key, value in flat(recipe.keys):
        for table in value if isinstance(value, list) else []:
            if isinstance(table, dict):
                values += [table[k] for k in table if f"{key}.{k}" in keys]
        if key in keys:
            values.append(value)
    return [value for value in values if isinstance(value, str)]


def _objective(name: str) -> str:
    """Describe a preset on one line."""
    if name in ALIASES:
        other, how = ALIASES[name]
        return f"{other} {how}"
    preset = PRESETS[name]
    needs = ", ".join(preset.needs_fields)
    with_fields = f", needs {needs}" if needs else ""
    inferred = f"; inferred: {', '.join(RECONSTRUCTED[name])}" if name in RECONSTRUCTED else ""
    return f"{preset.surrogate}, {preset.ratio_level} ratio, {preset.aggregation}{with_fields}{inferred}"


def _options(part: Callable[..., Any], inputs: tuple[str, ...]) -> str:
    shown = {key: value for key, value in options_of(part, inputs).items() if key not in RUN_GIVES}
    return ", ".join(key if value is NEEDED else f"{key}={value!r}" for key, value in shown.items())


def _paragraph(thing: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring on one line."""
    return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"{label}: {text}", 110, initial_indent="  ", subsequent_indent="    ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
