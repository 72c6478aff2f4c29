"""Finds the columns of the policy's statistics that a run's parts read, and makes the pass that writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..data.statistics import OF_IDS, STATISTIC, columns_read
from ..methods.advantages import ADVANTAGES
from ..methods.budgets import CURRICULA
from ..methods.losses import LOSSES
from ..methods.selections import PAIRINGS, SELECTIONS
from ..methods.shaping import SHAPINGS
from ..model.roles import Role
from ..model.statistics import PolicyStatistics
from ..settings import TrainConfig


def read_columns(config: TrainConfig) -> list[str]:
    """Return the columns of the policy's statistics that the run's parts read, each once.

    Raises:
        UserError: as for `columns_read`.
    """
    algorithm = config.algorithm
    named: list[tuple[str, str | None, Mapping[str, Callable[..., Any]]]] = [
        ("algorithm.advantage", algorithm.advantage, ADVANTAGES),
        ("algorithm.select", algorithm.select, SELECTIONS),
        ("data.curriculum", config.data.curriculum, CURRICULA),
    ]
    named += [("reward.shaping", shaping.name, SHAPINGS) for shaping in config.reward.shaping]
    for term in algorithm.terms:
        key = f"algorithm.terms.{term.name}"
        named += [(f"{key}.select", term.select, SELECTIONS), (f"{key}.loss", term.loss, LOSSES)]
        named.append((f"{key}.pairs", term.pairs, PAIRINGS))
    return list(dict.fromkeys(column for one in named for column in columns_read(*one)))


def statistics(config: TrainConfig, model: PreTrainedModel, parts: Sequence[Any]) -> list[Role]:
    """Return the policy's pass that writes what the run's parts read; none if they read nothing.

    Args:
        parts: the estimator and the shapings, whose method ``prepare`` may set columns of ids.

    Raises:
        UserError: a part reads what the policy does not compute.
    """
    columns = read_columns(config)
    if not columns:
        return []
    ids = {column: column.removeprefix(OF_IDS) for column in columns if column.startswith(OF_IDS)}
    own = {column: STATISTIC[column] for column in columns if column not in ids}
    prepare = [part.prepare for part in parts if ids and hasattr(part, "prepare")]
    return [PolicyStatistics(model, own, ids, prepare)]
