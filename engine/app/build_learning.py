"""From a configuration to what learns: objectives, loss terms, credit, roles and the critic."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolltree.kernels import Objective
from rolltree.kernels.policy_loss import WITHOUT_REFERENCE

from ..data.columns import COLUMNS
from ..errors import UserError
from ..loop.parts import LearningParts
from ..methods.credit import ADVANTAGES, CreditFunction
from ..methods.schedules import Schedule, find_schedule
from ..methods.selections import PAIRINGS, SELECTIONS
from ..methods.shaping import SHAPINGS, Shaping
from ..model.loading import choose_device, load_model
from ..model.roles import Role
from ..parts.calling import ask
from ..parts.resolve import resolve
from ..settings import TrainConfig
from ..train.critic import Critic
from ..train.terms import LossTerm, PairTerm, Selection, TokenTerm

FROM_ROLES = {"ref_logprob": "reference", "teacher_logprob": "teacher", "value": "critic"}
"""Fields of objectives, and the role that scores them."""


def learning_parts(config: TrainConfig, model: PreTrainedModel) -> LearningParts:
    """Make what `Learner` learns with.

    Raises:
        UserError: a part is not known, cannot be loaded, or needs what the run does not have.
    """
    loop, trainer = config.loop, config.trainer
    return LearningParts(
        model=model,
        optimizer=trainer.optimizer(),
        credit=credit(config),
        credit_name=config.algorithm.advantage,
        shapings=shapings(config),
        terms=loss_terms(config),
        lr_scale=find_schedule("trainer.lr_scale", trainer.lr_scale, trainer.lr_scale_options),
        temperature_scale=find_schedule(
            "loop.temperature_scale", loop.temperature_scale, loop.temperature_scale_options
        ),
        length_scale=find_schedule("loop.length_scale", loop.length_scale, loop.length_scale_options),
        roles=roles(config, model),
        critic=critic(config),
        temperature=config.rollout.temperature,
        updates_per_step=trainer.updates_per_step,
        max_tokens=trainer.max_tokens,
        drop_zero_variance=config.algorithm.drop_zero_variance,
        self_check=trainer.self_check,
    )


def corrects(config: TrainConfig) -> bool:
    """Whether the loss is corrected for the lag of what it learns from."""
    return config.loop.staleness > 0 and config.loop.correction != "none"


def rescores(config: TrainConfig) -> bool:
    """Whether the policy scores the rollouts before it is updated; a batch's only update begins with that policy."""
    asked = config.algorithm.old_logprob == "recompute"
    return asked or (corrects(config) and config.trainer.updates_per_step > 1)


def credit(config: TrainConfig) -> CreditFunction:
    """How rewards become credit: `algorithm.advantage`.

    Raises:
        UserError: there is no such estimator, file or function, or it has no such option.
    """
    algorithm = config.algorithm
    if (algorithm.advantage == "gae") != (config.roles.critic is not None):
        raise UserError('algorithm.advantage = "gae" and [roles.critic] need each other; give the run both or neither.')
    found: CreditFunction = resolve(
        "algorithm.advantage", algorithm.advantage, algorithm.advantage_options, known=ADVANTAGES, inputs=("trees",)
    )
    return found


def objective(
    config: TrainConfig, key: str, name: str, options: dict[str, Any], select: str | None = None
) -> Objective:
    """The objective that ``key`` names.

    Raises:
        UserError: an unknown name or option, or one that needs what the run does not have.
    """
    chosen = ask(f"{key} = '{name}'", Objective.preset, name, **options)
    assert isinstance(chosen, Objective)
    if corrects(config):
        chosen = corrected(chosen, config)
    for field, why in chosen.needs_fields.items():
        if field == "token_weight":
            if select is None:
                raise UserError(f"{key} = '{name}' learns from chosen tokens; say which with `select` ({why}).")
            continue
        if field == "proximal_logprob" and not rescores(config):
            raise UserError(
                f"{key} = '{name}' needs the policy's own log-probs before the update ({why}); set "
                'algorithm.old_logprob to "recompute".'
            )
        role = FROM_ROLES.get(field)
        if role is not None and getattr(config.roles, role) is None:
            raise UserError(f"{key} = '{name}' needs {field} ({why}); give the run a [roles.{role}].")
        if role is None and field not in COLUMNS:
            raise UserError(
                f"{key} = '{name}' needs {field} ({why}), which a run does not have; choose another objective or leave "
                "the option out."
            )
    return chosen


def corrected(objective: Objective, config: TrainConfig) -> Objective:
    """Decoupled (Hilton et al. 2021): ratios against the policy before the update, weights exp(proximal - behaviour).

    Where ratios are those of sequences, so are the weights: geometric means. An objective with a correction of its own
    keeps it, as does one that does not look at old log-probs. Where nobody has scored the policy before the update, it
    is the current one: all ratios are 1, which no bounds exclude.
    """
    loop, level = config.loop, objective.mismatch_level
    if objective.mismatch == "none" and objective.needs_old and "token_weight" not in objective.needs_fields:
        if objective.ratio_level in ("sequence", "sequence_token"):
            level = "geometric"
        with suppress(ValueError):  # it weighs by the sampler's log-probs itself
            objective = replace(
                objective, mismatch=loop.correction, mismatch_level=level, mismatch_cap=loop.correction_cap
            )
    if objective.mismatch == "none" or rescores(config):
        return objective
    return replace(objective, ratio_base="current", dynamic_clip=False)


def loss_terms(config: TrainConfig) -> list[tuple[LossTerm, Schedule]]:
    """The summands of the loss, `algorithm.objective` first, each with its weight.

    Raises:
        UserError: a part is not known, or needs what the run does not have.
    """
    algorithm = config.algorithm
    main = TokenTerm(
        objective(config, "algorithm.objective", algorithm.objective, algorithm.objective_options, algorithm.select),
        select=_selection("algorithm.select", algorithm.select, algorithm.select_options),
        length_limit=config.rollout.max_new_tokens,
    )
    weight = find_schedule("algorithm.weight", algorithm.weight, algorithm.weight_options)
    terms: list[tuple[LossTerm, Schedule]] = [(main, weight)]
    for term in algorithm.terms:
        key = f"algorithm.terms.{term.name}"
        weight = find_schedule(f"{key}.weight", term.weight, term.weight_options)
        if term.pairs is not None:
            choose = resolve(f"{key}.pairs", term.pairs, term.pairs_options, known=PAIRINGS, inputs=("tree",))
            if term.loss_options.get("kind", "sigmoid") not in WITHOUT_REFERENCE and config.roles.reference is None:
                raise UserError(f"{key} compares with a reference; give the run a [roles.reference].")
            terms.append((PairTerm(choose, term.name, term.loss_options), weight))
            continue
        assert term.objective is not None
        of_tokens = TokenTerm(
            objective(config, f"{key}.objective", term.objective, term.objective_options, term.select),
            term.name,
            _selection(f"{key}.select", term.select, term.select_options),
            config.rollout.max_new_tokens,
        )
        terms.append((of_tokens, weight))
    names = [term.name for term, _ in terms]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"Two loss terms are called '{min(twice)}'; give each in [[algorithm.terms]] a name of its own."
        )
    return terms


def shapings(config: TrainConfig) -> list[tuple[str, Shaping]]:
    """What is done with rewards before they become credit, each with the words that name it.

    Raises:
        UserError: there is no such function, or it has no such option.
    """
    key = "reward.shaping"
    return [
        (f"{key} '{given.name}'", resolve(key, given.name, given.options, known=SHAPINGS, inputs=("tree",)))
        for given in config.reward.shaping
    ]


def _selection(key: str, name: str | None, options: dict[str, Any]) -> Selection | None:
    if name is None:
        return None
    found: Selection = resolve(key, name, options, known=SELECTIONS, inputs=("tree",))
    return found


def roles(config: TrainConfig, model: PreTrainedModel) -> list[Role]:
    """The models that score log-probs for the loss.

    Raises:
        UserError: one cannot be loaded or has another vocabulary or other parameters than the policy.
    """
    found = []
    if rescores(config):
        found.append(Role("proximal_logprob", model))
    if (reference := config.roles.reference) is not None:
        if reference.path is None:
            weights = Role.snapshot(model)
        else:
            weights = _weights(reference.path, "roles.reference.path", model)
        found.append(
            Role(
                "ref_logprob",
                model,
                weights,
                reset_every=reference.reset_every,
                ema=reference.ema,
                initial=reference.path is None,
            )
        )
    if config.roles.teacher is not None:
        teacher = (
            load_model(config.roles.teacher.path, dtype=model.dtype, device=model.device).eval().requires_grad_(False)
        )
        if len(teacher.get_output_embeddings().weight) != len(model.get_output_embeddings().weight):
            raise UserError(
                f"roles.teacher.path = '{config.roles.teacher.path}' has another vocabulary than the policy; choose a "
                "teacher with the policy's tokenizer."
            )
        found.append(Role("teacher_logprob", teacher))
    return found


def _weights(path: str, key: str, model: PreTrainedModel) -> dict[str, Tensor]:
    other = load_model(path, dtype=model.dtype)
    weights = Role.snapshot(other)
    ours = {name: p.shape for name, p in model.named_parameters()}
    if {name: w.shape for name, w in weights.items()} != ours:
        raise UserError(f"{key} = '{path}' is a model of another shape than the policy; give one of the same.")
    return weights


def critic(config: TrainConfig) -> Critic | None:
    """The critic of `[roles.critic]`, if there is one."""
    chosen = config.roles.critic
    if chosen is None:
        return None
    device = choose_device(config.model.device)
    model = load_model(chosen.path or config.model.path, dtype=getattr(torch, config.model.dtype), device=device)
    return Critic(model, config.trainer.optimizer(chosen.lr), clip=chosen.clip)
