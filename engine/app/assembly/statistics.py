"""Finds the columns of the policy's statistics that a run's parts read, and makes the passes that write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from ...data.statistics import DIVERGENCE, OF_IDS, STATISTIC, columns_read
from ...methods.advantages import ADVANTAGES
from ...methods.curricula import CURRICULA
from ...methods.losses import LOSSES
from ...methods.selections import PAIRINGS, SELECTIONS
from ...methods.shaping import SHAPINGS
from ...model.divergence import Divergence
from ...model.roles import Role
from ...model.statistics import PolicyStatistics
from ...settings import TrainConfig
from ...settings.capabilities import PARTS, Part, refuse
from ...train.terms import LossTerm, TokenTerm

Named = tuple[str, str | None, Mapping[str, Callable[..., Any]]]
"""A key of the configuration, the name that it gives, and the shipped parts of its kind."""


def read_columns(config: TrainConfig) -> list[str]:
    """Return the columns of the policy's statistics that the run's parts read, each once.

    Raises:
        UserError: as for `columns_read`; or a part reads the divergence from a reference that the run does not have.
    """
    named: list[Named] = [
        ("algorithm.advantage", config.algorithm.advantage, ADVANTAGES),
        ("data.curriculum", config.data.curriculum, CURRICULA),
    ]
    named += [("reward.shaping", shaping.name, SHAPINGS) for shaping in config.reward.shaping]
    return _columns(config, [*named, *_of_terms(config)])


def given_columns(config: TrainConfig) -> list[str]:
    """Return the columns of the policy's statistics that the run's loss terms read of demonstrations, each once.

    Raises:
        UserError: as for `read_columns`.
    """
    return _columns(config, _of_terms(config)) if config.demonstrations else []


def given_roles(
    columns: Sequence[str],
    model: PreTrainedModel,
    parts: Sequence[Any],
    reference: Role | None,
    terms: Sequence[LossTerm],
) -> list[Role]:
    """Return the passes over demonstrations: of the policy's statistics in ``columns``, and of the reference if one of
    ``terms`` may compare given tokens with it. Arguments and errors as for `statistics`."""
    passes = statistics(columns, model, parts, reference)
    if reference is not None and any(map(_may_compare_given, terms)):
        passes.append(reference)
    return passes


def _may_compare_given(term: LossTerm) -> bool:
    if isinstance(term, TokenTerm):
        return term.select is not None and "ref_logprob" in term.objective.needs_fields
    return True


def _of_terms(config: TrainConfig) -> list[Named]:
    named: list[Named] = [("algorithm.select", config.algorithm.select, SELECTIONS)]
    for term in config.algorithm.terms:
        key = f"algorithm.terms.{term.name}"
        named += [(f"{key}.select", term.select, SELECTIONS), (f"{key}.loss", term.loss, LOSSES)]
        named.append((f"{key}.pairs", term.pairs, PAIRINGS))
    return named


def _columns(config: TrainConfig, named: Iterable[Named]) -> list[str]:
    read: dict[str, None] = {}
    for key, name, shipped in named:
        columns = columns_read(key, name, shipped)
        refuse(PARTS, Part(config, key, str(name), divergence=DIVERGENCE if DIVERGENCE in columns else ""))
        read |= dict.fromkeys(columns)
    return list(read)


def statistics(
    columns: Sequence[str], model: PreTrainedModel, parts: Sequence[Any], reference: Role | None
) -> list[Role]:
    """Return the passes that write ``columns`` of the policy's statistics; none if there are none.

    Args:
        parts: the estimator and the shapings, whose method ``prepare`` may set columns of ids.
        reference: needed for the divergence.

    Raises:
        UserError: a part reads what the policy does not compute.
    """
    ids = {column: column.removeprefix(OF_IDS) for column in columns if column.startswith(OF_IDS)}
    statistic_of = {column: STATISTIC[column] for column in columns if column in STATISTIC}
    prepare = [part.prepare for part in parts if ids and hasattr(part, "prepare")]
    passes: list[Role] = [PolicyStatistics(model, statistic_of, ids, prepare)] if statistic_of or ids else []
    if DIVERGENCE in columns:
        assert reference is not None
        passes.append(Divergence(model, reference))
    return passes
