"""Builds the further policies of a run, ``[models.NAME]``: a model, an engine and the parts of a learner each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import UserError
from ...learn.learner import Learner
from ...learn.learning import LearningParts
from ...learn.policies import Policies
from ...methods.papers import OWN_SELECTION
from ...methods.schedules import find_schedule, zero_steps
from ...model.loading import load_tokenizer
from ...record.metrics import Stopwatch
from ...rollout import RolloutEngine
from ...rollout.others import Others, Player
from ...settings import TrainConfig
from ...settings.capabilities import MODELS, OF_KEYS, Model, refuse
from .checks import check_lengths, tried_methods
from .methods import Methods
from .sampling import load_policy, make_engine

OF_TRAINER = {"lr", "lr_warmup_steps", "lr_scale", "lr_scale_options", "max_grad_norm"}
"""The keys of a further policy that take the place of those in `[trainer]`."""


@dataclass(frozen=True)
class Policy:
    """A further policy: its configuration as if it were the only one, its model, and the engine that samples it."""

    config: TrainConfig
    model: PreTrainedModel
    engine: RolloutEngine


def further_policies(
    config: TrainConfig, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Policy]:
    """Load the policies of ``[models.NAME]``, by name, and let ``engine`` ask theirs for the roles that they play.

    Raises:
        UserError: one cannot be loaded, or has another tokenizer or too few positions.
    """
    policies: dict[str, Policy] = {}
    players: dict[str, Player] = {}
    for number, (name, roles) in enumerate(roles_of(config).items(), start=1):
        alone = of_policy(config, name)
        check_same_tokens(config, name, tokenizer)
        model = load_policy(alone)
        policies[name] = Policy(alone, model, make_engine(alone, model, tokenizer))
        check_lengths(alone, policies[name].engine.longest)
        players[name] = Player(number, policies[name].engine, roles)
    if players:
        engine.loop.others = Others(players)
    return policies


def make_policies(
    first: LearningParts, others: Mapping[str, LearningParts], watch: Stopwatch, note: Callable[[str], object]
) -> Policies:
    """Make the learners of a run of several policies."""
    return Policies(Learner(first, watch, note), {name: Learner(parts, watch, note) for name, parts in others.items()})


def of_policy(config: TrainConfig, name: str) -> TrainConfig:
    """Return the configuration of a run in which the policy called ``name`` is the only one."""
    policy = config.models[name]
    algorithm: dict[str, Any] = {} if policy.terms is None else {"terms": policy.terms}
    if policy.objective is not None:
        algorithm |= {
            "objective": policy.objective,
            "objective_options": policy.objective_options or {},
            "select": OWN_SELECTION.get(policy.objective),
            "select_options": {},
        }
    model = {key: value for key in ("path", "dtype") if (value := getattr(policy, key)) is not None}
    trainer = policy.model_dump(include=OF_TRAINER, exclude_none=True)
    return config.model_copy(
        update={
            "models": {},
            "model": config.model.model_copy(update=model),
            "trainer": config.trainer.model_copy(update=trainer),
            "algorithm": config.algorithm.model_copy(update=algorithm),
        }
    )


def resting(config: TrainConfig) -> list[str]:
    """Return a sentence for each policy whose learning rate is 0 at steps of the run, as far as its schedule tells."""
    steps, sentences = config.trainer.steps, []
    for name in (None, *config.models):
        trainer = config.trainer if name is None else of_policy(config, name).trainer
        inherits = name is None or config.models[name].lr_scale is None
        key = "trainer.lr_scale" if inherits else f"models.{name}.lr_scale"
        zero = zero_steps(find_schedule(key, trainer.lr_scale, trainer.lr_scale_options), steps)
        if not zero:
            continue
        when = [_between(first, last, steps) for first, last in zero]
        whose = "" if name is None else f" of the policy '{name}'"
        sentences.append(
            f"The learning rate{whose} is 0 {' and '.join(when)} ({key}), so nothing is learnt there; change the "
            "schedule or trainer.steps."
        )
    return sentences


def _between(first: int, last: int, steps: int) -> str:
    if last == steps:
        return f"from step {first} on"
    return f"at step {first}" if first == last else f"at steps {first} to {last}"


def policies_methods(config: TrainConfig) -> dict[str, Methods]:
    """Make the functions and loss terms of further policies, by name, and try those that have some of their own.

    Raises:
        UserError: a part does not exist or fails, or the parts do not fit each other.
    """
    methods: dict[str, Methods] = {}
    for name, policy in config.models.items():
        alone = of_policy(config, name)
        if policy.objective is None and policy.terms is None:
            methods[name] = Methods.make(alone)
            continue
        try:
            refuse(OF_KEYS, alone)
            methods[name] = tried_methods(alone)
        except UserError as error:
            raise UserError(f"`models.{name}`, as if it were the only policy: {error}") from error
    return methods


def roles_of(config: TrainConfig) -> dict[str, tuple[str, ...]]:
    """Return the roles that each further policy plays, by its name."""
    return {name: policy.roles or (name,) for name, policy in config.models.items()}


def check_same_tokens(config: TrainConfig, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a further policy reads the tokens that the first one samples.

    Raises:
        UserError: its tokenizer has other tokens.
    """
    path = of_policy(config, name).model.path
    other = load_tokenizer(path)
    same = other.get_vocab() == tokenizer.get_vocab() and other.eos_token_id == tokenizer.eos_token_id
    refuse(MODELS, Model(config, key=f"models.{name}.path", path=path, same_tokens=same))
