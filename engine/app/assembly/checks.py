"""Checks of a configuration before a run starts, and the columns of its data that checkpoints keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from ...methods.advantages import ADVANTAGES
from ...methods.curricula import CURRICULA
from ...methods.groups import GROUP_CALLBACKS
from ...parts.context import asked
from ...parts.resolve import import_object, options_of
from ...programs import PROGRAMS, RolloutProgram
from ...prompts.entries import Entries
from ...settings import TrainConfig
from ...settings.capabilities import MODELS, PARTS, TRAINING, Model, Part, refuse
from . import preflight
from .methods import Methods
from .sampling import rollout_program


def check_training(config: TrainConfig) -> RolloutProgram:
    """Check what forbids a training with these keys, and return its rollout program, which is made.

    Raises:
        UserError: keys do not go together in a training, or with the program; or there is no such program.
    """
    refuse(TRAINING, config)
    program = rollout_program(config.rollout)
    check_program(config, program, gives_older=program.gives_older)
    return program


def check_program(config: TrainConfig, program: RolloutProgram, *, gives_older: bool = False) -> None:
    """Check that the run's policies and credit name roles that the program plays.

    Args:
        gives_older: the run trains on tokens of older policies that the program returns.

    Raises:
        UserError: they do not, or sampling leaves tokens out where older policies' tokens are trained on.
    """
    name, roles = config.rollout.program, tuple(program.roles)
    refuse(PARTS, Part(config, "rollout.program", name, gives_older=gives_older, roles=roles))


def check_lengths(config: TrainConfig, positions: int | None, demonstration: int = 0) -> None:
    """Check that the longest prompt and response fit in the model's context.

    Args:
        positions: longest sequence of the model, in tokens; None if it has no limit.
        demonstration: length of the longest demonstration, in tokens.

    Raises:
        UserError: they do not fit.
    """
    refuse(MODELS, Model(config, positions, demonstration))


def check_split(config: TrainConfig, model: PreTrainedConfig) -> None:
    """Check that `trainer.tensor` can split a model of this configuration.

    Raises:
        UserError: it cannot.
    """
    heads = tuple(getattr(model, f"num_{kind}_heads", 0) for kind in ("attention", "key_value"))
    refuse(MODELS, Model(config, model_type=model.model_type, heads=heads))


def tried_methods(config: TrainConfig) -> Methods:
    """Make the functions and loss terms of a run, and try a copy of them on made-up groups.

    Raises:
        UserError: a part does not exist or fails, or the parts do not fit each other.
    """
    methods = Methods.make(config)
    preflight.try_methods(methods)
    return methods


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
    parts: list[tuple[str | None, Mapping[str, Callable[..., Any]], Mapping[str, Any]]] = [
        (config.algorithm.advantage, ADVANTAGES, config.algorithm.advantage_options),
        (config.data.curriculum, CURRICULA, config.data.curriculum_options),
        (config.loop.callback, GROUP_CALLBACKS, config.loop.callback_options),
        (config.rollout.program, PROGRAMS, config.rollout.program_options),
    ]
    values: list[Any] = []
    for name, shipped, options in parts:
        defaults = options_of(shipped[name]) if name is not None and name in shipped else {}
        values += {**defaults, **options}.values()
    return values


def _asks_entry(name: str) -> bool:
    """Return whether the user's function, or a method of the class, has an argument ``entry``."""
    part = import_object(name)
    functions = (
        [method for _, method in inspect.getmembers(part, inspect.isfunction)] if inspect.isclass(part) else [part]
    )
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
    names: list[Any] = [*config.reward.verifiers, *programs]
    names += [*config.reward.options.values(), *config.rollout.program_options.values()]
    names += [value for part in config.reward.parts for value in part.options.values()]
    return any(isinstance(name, str) and ":" in name for name in names)
