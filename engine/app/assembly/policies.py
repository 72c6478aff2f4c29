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
from ...parts.context import Context
from ...programs import RolloutProgram
from ...record.metrics import Stopwatch
from ...rollout import RolloutEngine
from ...rollout.others import Others, Player
from ...settings import TrainConfig
from .checks import check_learning, check_lengths
from .learning import learning_parts
from .sampling import load_policy, make_engine

OF_TRAINER = {"lr", "lr_warmup_steps", "lr_scale", "lr_scale_options", "max_grad_norm"}
"""The keys of a further policy that take the place of those in `[trainer]`."""


@dataclass(frozen=True)
class Policy:
    """A further policy: its configuration as if it were the only one, its model, and the engine that samples it."""

    config: TrainConfig
    model: PreTrainedModel
    engine: RolloutEngine

    def learning(self, tokenizer: PreTrainedTokenizerBase) -> LearningParts:
        return learning_parts(self.config, self.model, context=Context(tokenizer))


def further_policies(
    config: TrainConfig, program: RolloutProgram, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Policy]:
    """Load the policies of ``[models.NAME]``, by name, and let ``engine`` ask theirs for the roles that they play.

    Raises:
        UserError: one cannot be loaded, has another tokenizer or too few positions, or plays no role of its own.
    """
    found: dict[str, Policy] = {}
    players: dict[str, Player] = {}
    for number, (name, roles) in enumerate(roles_of(config, program).items(), start=1):
        own = of_policy(config, name)
        check_same_tokens(name, own.model.path, tokenizer)
        model = load_policy(own)
        found[name] = Policy(own, model, make_engine(own, model, tokenizer))
        check_lengths(own, found[name].engine.longest)
        players[name] = Player(number, found[name].engine, roles)
    if players:
        engine.loop.others = Others(players)
    return found


def make_policies(
    first: LearningParts, others: Mapping[str, LearningParts], watch: Stopwatch, note: Callable[[str], object]
) -> Policies:
    """Make the learners of a run of several policies."""
    return Policies(Learner(first, watch, note), {name: Learner(own, watch, note) for name, own in others.items()})


def of_policy(config: TrainConfig, name: str) -> TrainConfig:
    """Return the configuration of a run in which the policy called ``name`` is the only one."""
    own, given = config.models[name], config.algorithm
    algorithm: dict[str, Any] = {} if own.terms is None else {"terms": own.terms}
    if own.objective is not None:
        algorithm |= {
            "objective": own.objective,
            "objective_options": own.objective_options or {},
            "select": OWN_SELECTION.get(own.objective),
            "select_options": {},
        }
    model = {key: value for key in ("path", "dtype") if (value := getattr(own, key)) is not None}
    trainer = own.model_dump(include=OF_TRAINER, exclude_none=True)
    return config.model_copy(
        update={
            "models": {},
            "model": config.model.model_copy(update=model),
            "trainer": config.trainer.model_copy(update=trainer),
            "algorithm": given.model_copy(update=algorithm),
        }
    )


def resting(config: TrainConfig) -> list[str]:
    """Return a sentence for each policy whose learning rate is 0 at steps of the run, as far as its schedule tells."""
    steps, found = config.trainer.steps, []
    for name in (None, *config.models):
        own = config if name is None else of_policy(config, name)
        trainer, inherits = own.trainer, name is None or config.models[name].lr_scale is None
        key = "trainer.lr_scale" if inherits else f"models.{name}.lr_scale"
        zero = zero_steps(find_schedule(key, trainer.lr_scale, trainer.lr_scale_options), steps)
        if not zero:
            continue
        when = [_between(first, last, steps) for first, last in zero]
        of = "" if name is None else f" of the policy '{name}'"
        found.append(
            f"The learning rate{of} is 0 {' and '.join(when)} ({key}), so nothing is learnt there; change the schedule "
            "or trainer.steps."
        )
    return found


def _between(first: int, last: int, steps: int) -> str:
    if last == steps:
        return f"from step {first} on"
    return f"at step {first}" if first == last else f"at steps {first} to {last}"


def check_policies(config: TrainConfig) -> None:
    """Try the objective and the loss terms that further policies have of their own, as `check_learning` does.

    Raises:
        UserError: a part does not exist or fails, or the parts do not fit each other.
    """
    for name, own in config.models.items():
        if own.objective is not None or own.terms is not None:
            try:
                check_learning(of_policy(config, name))
            except UserError as error:
                raise UserError(f"`models.{name}`, as if it were the only policy: {error}") from error


def roles_of(config: TrainConfig, program: RolloutProgram) -> dict[str, tuple[str, ...]]:
    """Return the roles that each further policy plays, by its name.

    Raises:
        UserError: a policy plays a role that the program does not have, the first role, or another policy's; or the
            credit names a role that the program does not have.
    """
    known, what = list(program.roles), f"rollout.program = '{config.rollout.program}'"
    which = f"its roles are {', '.join(known)}" if known else "it has one role"
    found: dict[str, tuple[str, ...]] = {}
    for name, own in config.models.items():
        found[name] = own.roles or (name,)
        for role in found[name]:
            if role not in known:
                raise UserError(f"`models.{name}` plays the role '{role}', which {what} does not have; {which}.")
            if role == known[0]:
                raise UserError(
                    f"`models.{name}` plays the role '{role}', in which {what} begins and which [model] plays; choose "
                    f"among {', '.join(known[1:])}."
                )
            if taken := [other for other in found if other != name and role in found[other]]:
                raise UserError(f"`models.{taken[0]}` and `models.{name}` both play the role '{role}'; leave one out.")
    credited = config.algorithm.advantage_options.get("rewards") if config.algorithm.advantage == "by_role" else None
    for role in credited or ():
        if role not in known:
            raise UserError(
                f"algorithm.advantage_options.rewards names the role '{role}', which {what} does not have; {which}."
            )
    return found


def check_same_tokens(name: str, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a further policy reads the tokens that the first one samples.

    Raises:
        UserError: its tokenizer has other tokens.
    """
    theirs = load_tokenizer(path)
    if theirs.get_vocab() != tokenizer.get_vocab() or theirs.eos_token_id != tokenizer.eos_token_id:
        raise UserError(
            f"`models.{name}.path` = '{path}' has another tokenizer than model.path; policies of one run sample into "
            "the same trees, so give it a model with the same."
        )
