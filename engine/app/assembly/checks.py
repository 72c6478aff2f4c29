"""Checks of a configuration before a run starts, and the columns of its data that checkpoints keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UserError
from ...methods.advantages import ADVANTAGES
from ...methods.curricula import CURRICULA
from ...methods.groups import GROUP_CALLBACKS
from ...parts.context import asked
from ...parts.resolve import import_object, options_of
from ...programs import PROGRAMS
from ...prompts.entries import Entries
from ...settings import TrainConfig
from . import preflight
from .learning import FROM_ROLES, corrects, credit, loss_terms, mixes_policies, shapings
from .statistics import given_columns, read_columns


def check_old_logprobs(config: TrainConfig) -> None:
    """Reject top-p, top-k and min-p if the loss uses the sampler's log-probs, which must be over the full softmax.

    Raises:
        UserError: sampling excludes tokens, and the loss uses the sampler's log-probs.
    """
    rollout = config.rollout
    key = "updates_per_step" if config.trainer.updates_per_step > 1 else "epochs"
    why = f"`trainer.{key}` = {getattr(config.trainer, key)}"
    if corrects(config):
        why = f"`loop.staleness` = {config.loop.staleness} with loop.correction = '{config.loop.correction}'"
    elif config.replay is not None:
        why = "`replay`"
    elif mixes_policies(config):
        why = f"`rollout.program` = '{rollout.program}', which may return tokens of older policies,"
    elif config.loop.train_context == "plain":
        why = "`loop.train_context` = 'plain'"
    elif config.trainer.updates == 1:
        return
    if rollout.top_p < 1 or rollout.top_k or rollout.min_p:
        raise UserError(
            f"{why} uses the sampler's log-probs, which top_p, top_k and min_p change; leave these out of "
            "[rollout] or set it back."
        )


def check_ranks(config: TrainConfig) -> None:
    """Check that another process samples if several train.

    Raises:
        UserError: none does.
    """
    if config.trainer.ranks > 1 and not config.rollout.engines:
        raise UserError(
            f"`trainer.ranks` = {config.trainer.ranks} needs engines in other processes, because no rank has the whole "
            "model to sample with; set rollout.engines to at least 1, or trainer.ranks to 1."
        )


def check_early_scores(config: TrainConfig) -> None:
    """Check that something can be scored before a batch is complete, as `loop.score_early` asks.

    Raises:
        UserError: nothing can.
    """
    if not config.loop.score_early:
        return
    roles = config.roles
    fixed = roles.reference is not None and roles.reference.reset_every == 0 and roles.reference.ema is None
    colocated = config.placement.layout == "colocated"
    for wrong, why in (
        (not fixed and roles.teacher is None, "a reference or a teacher of fixed weights in [roles]"),
        (config.trainer.ranks > 1, "trainer.ranks = 1, because several ranks score a batch together"),
        (bool(config.models), "a run of one policy, without [models]"),
        (
            colocated,
            'placement.layout = "split", because colocated engines keep the memory while they sample',
        ),
        (
            config.loop.staleness > 0 and not isinstance(config.loop.temperature_scale, float),
            "a loop.temperature_scale that does not change, because the step that will train a group is not known",
        ),
    ):
        if wrong:
            raise UserError(f"loop.score_early needs {why}; change it, or leave loop.score_early out.")


def check_lengths(config: TrainConfig, positions: int | None, given: int = 0) -> None:
    """Check that the longest prompt and response fit in the model's context.

    Args:
        positions: longest sequence of the model, in tokens; None if it has no limit.
        given: length of the longest demonstration, in tokens.

    Raises:
        UserError: they do not fit.
    """
    if given > (most := min(config.trainer.max_tokens, positions or given)):
        limit = "trainer.max_tokens" if most == config.trainer.max_tokens else "the model's positions"
        raise UserError(
            f"The longest demonstration has {given} tokens, over {limit}, {most}; leave it out"
            + (", or raise trainer.max_tokens." if most == config.trainer.max_tokens else ".")
        )
    if not config.judges:
        return
    answer = max(config.rollout.max_new_tokens, config.evaluation.max_new_tokens or 0)
    longest = config.data.max_prompt_tokens + answer
    if positions is not None and longest > positions:
        raise UserError(
            f"The longest sequence (data.max_prompt_tokens + max_new_tokens = {longest} tokens) is longer than the "
            f"model's {positions} positions; lower data.max_prompt_tokens or rollout.max_new_tokens."
        )


def check_learning(config: TrainConfig) -> None:
    """Try credit and loss terms on two made-up groups of the size that will be sampled.

    Raises:
        UserError: a part does not exist or fails, or the parts do not fit each other.
    """
    columns = [column for column, role in FROM_ROLES.items() if getattr(config.roles, role) is not None]
    columns += read_columns(config)
    estimator = credit(config)  # first, as its file may declare the columns that terms read
    of_credit = estimator, config.algorithm.advantage, config.rollout.n, columns
    shapings(config)
    scored = given_columns(config) + (["ref_logprob"] if config.roles.reference is not None else [])
    given = [preflight.made_up_demonstration(table, scored) for table in config.demonstrations]
    preflight.check_terms([term for term, _ in loss_terms(config)], *of_credit, given)


def kept_entries(
    config: TrainConfig, *, recorded: bool = False
) -> Callable[[Mapping[str, Any], str], dict[str, Any]] | None:
    """Return `Entries.kept` of a run's prompts; None where nothing keeps their entries.

    Args:
        recorded: the groups are written to a file.
    """
    if config.loop.staleness == 0 and config.replay is None and not recorded:
        return None
    data = config.data
    all_read = _user_code_reads(config) or bool(data.tasks) or data.source == "verifiers"
    read = {data.prompt_key, data.answer_key, data.n_key or data.answer_key, data.image_key or data.answer_key}
    for value in _options(config):
        read |= {name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)}
    read |= {"solution"} if config.rollout.program == "hints" else set()
    return Entries(read, all_read=all_read).kept


def _options(config: TrainConfig) -> list[Any]:
    """Return options of the parts that read entries, with the defaults of shipped ones: some are names of columns."""
    named: list[tuple[str | None, Mapping[str, Callable[..., Any]], Mapping[str, Any]]] = [
        (config.algorithm.advantage, ADVANTAGES, config.algorithm.advantage_options),
        (config.data.curriculum, CURRICULA, config.data.curriculum_options),
        (config.loop.callback, GROUP_CALLBACKS, config.loop.callback_options),
        (config.rollout.program, PROGRAMS, config.rollout.program_options),
    ]
    defaults = (options_of(known[name]) if name is not None and name in known else {} for name, known, _ in named)
    of_parts = ({**own, **given} for own, (_, _, given) in zip(defaults, named, strict=True))
    return [value for options in of_parts for value in options.values()]


def _asks_entry(name: str) -> bool:
    """Return whether the user's function, or a method of the class, has an argument ``entry``."""
    found = import_object(name)
    functions = [one for _, one in inspect.getmembers(found, inspect.isfunction)] if inspect.isclass(found) else [found]
    return any(asked(function, ("entry",)) for function in functions)


def _user_code_reads(config: TrainConfig) -> bool:
    """Return whether a function or class of the user's (``file.py:name``) receives entries."""
    programs = [config.rollout.program, config.data.curriculum, config.loop.callback, *config.data.tools]
    algorithm = config.algorithm
    learning = [algorithm.advantage, algorithm.select, *(shaping.name for shaping in config.reward.shaping)]
    learning += [name for term in algorithm.terms for name in (term.loss, term.select, term.pairs)]
    learning.append(None if config.replay is None else config.replay.keep)
    if any(_asks_entry(name) for name in learning if name is not None and ":" in name):
        return True
    named: list[Any] = [*config.reward.verifiers, *programs]
    named += [*config.reward.options.values(), *config.rollout.program_options.values()]
    named += [value for part in config.reward.parts for value in part.options.values()]
    return any(isinstance(name, str) and ":" in name for name in named)
