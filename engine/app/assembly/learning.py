"""Builds the learning parts of a run from its configuration: objectives, loss terms, credit, roles and the critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from rolltree.kernels import Objective
from rolltree.kernels.policy_loss import WITHOUT_REFERENCE

from ...data.columns import COLUMNS
from ...errors import UserError
from ...learn.extrapolation import Trajectory
from ...learn.learning import LearningParts
from ...methods.advantages import ADVANTAGES
from ...methods.credit import CreditFunction
from ...methods.losses import LOSSES
from ...methods.schedules import Schedule, find_schedule, scheduled
from ...methods.selections import PAIRINGS, SELECTIONS
from ...methods.shaping import SHAPINGS, Shaping
from ...model.invariant.install import is_invariant
from ...model.loading import choose_device, load_model
from ...model.lora import Alone, Merged, has_lora
from ...model.roles import Role, SampledRole
from ...model.sharding import shard
from ...parts.calling import ask
from ...parts.context import OF_TREES, Changing, Context, now
from ...parts.resolve import options_of, resolve
from ...programs import make_program
from ...settings import AlgorithmConfig, ReferenceConfig, TermConfig, TrainConfig
from ...train.critic import Critic
from ...train.group import ALONE, Group
from ...train.terms import LossTerm, PairTerm, Selection, TokenTerm
from ...train.user_term import FIELDS, UserTerm
from .sampling import adapter_alone
from .statistics import given_roles, read_columns, statistics

TERMS = "algorithm.terms."
"""Beginning of the keys of loss terms."""
FROM_ROLES = {"ref_logprob": "reference", "teacher_logprob": "teacher", "value": "critic"}
"""Fields of objectives, each with the role that scores it."""


def learning_parts(
    config: TrainConfig,
    model: PreTrainedModel,
    group: Group = ALONE,
    context: Context | None = None,
    *,
    own_weights: bool = False,
) -> LearningParts:
    """Make the parts that `Learner` uses, with every model sharded over ``group``.

    Args:
        context: the run's values that the functions ask for. Default: new ones without a tokenizer.
        own_weights: the sampler has a model of its own.

    Raises:
        UserError: a part is unknown, cannot be loaded, or needs something that the run does not have.
    """
    loop, trainer = config.loop, config.trainer
    adapter = Alone if adapter_alone(config) else Merged
    context = context or Context()
    spread = spreading(config, group, model.device.type)
    spread(model)
    estimator, shaped, terms = credit(config, context), shapings(config, context), loss_terms(config, context)
    scoring = roles(config, model, spread)
    reference = next((role for role in scoring if role.column == "ref_logprob"), None)
    prepared = [estimator, *(shaping for _, shaping in shaped)]
    functions: dict[str, Any] = {"algorithm.advantage": estimator, **dict(shaped)}
    functions |= {f"{TERMS}{term.name}": getattr(term, "instance", None) for term, _ in terms}
    return LearningParts(
        model=model,
        optimizer=trainer.optimizer(),
        credit=estimator,
        credit_name=config.algorithm.advantage,
        shapings=shaped,
        terms=terms,
        lr_scale=find_schedule("trainer.lr_scale", trainer.lr_scale, trainer.lr_scale_options),
        temperature_scale=find_schedule(
            "loop.temperature_scale", loop.temperature_scale, loop.temperature_scale_options
        ),
        length_scale=find_schedule("loop.length_scale", loop.length_scale, loop.length_scale_options),
        roles=[*statistics(read_columns(config), model, prepared, reference), *scoring],
        given_roles=given_roles(config, model, prepared, reference, [term for term, _ in terms]),
        critic=critic(config, group, spread),
        temperature=config.rollout.temperature,
        updates_per_step=trainer.updates_per_step,
        epochs=trainer.epochs,
        max_tokens=trainer.max_tokens,
        drop_zero_variance=config.algorithm.drop_zero_variance,
        self_check=trainer.self_check,
        score_early=loop.score_early,
        replay_routes=config.model.replay_routes,
        notes=[*inert(config), *spared(config)],
        group=group,
        context=context,
        weights=adapter if own_weights and has_lora(model) else None,
        trajectory=trajectory(config),
        stateful=stateful(functions),
    )


def trajectory(config: TrainConfig) -> Trajectory | None:
    """Return the empty trajectory of a run with `model.lora.extrapolate`; None without."""
    chosen = None if config.model.lora is None else config.model.lora.extrapolate
    return None if chosen is None else Trajectory(**dict(chosen), seed=config.seed)


Spread = Callable[[PreTrainedModel], object]


def spreading(config: TrainConfig, group: Group, device: str) -> Spread:
    """Return the function that shards a model over the devices of ``group``, which are of one type.

    It does nothing for a process that trains alone.
    """

    def spread(model: PreTrainedModel) -> None:
        if group.count > 1:
            mesh = init_device_mesh(device, (group.count,))
            shard(model, mesh=mesh, reshard_after_forward=config.trainer.reshard)

    return spread


def corrects(config: TrainConfig) -> bool:
    """Return whether the loss is corrected for the lag between sampler and policy."""
    return config.loop.staleness > 0 and config.loop.correction != "none"


def mixes_policies(config: TrainConfig) -> bool:
    """Return whether a group may hold tokens that an older policy sampled, at any staleness."""
    return (
        config.replay is not None or make_program(config.rollout.program, **config.rollout.program_options).gives_older
    )


def rescores(config: TrainConfig) -> bool:
    """Return whether the policy scores the rollouts before it is updated.

    The correction of the lag needs this only with several updates a step: the first starts from that same policy.
    """
    asked = config.algorithm.old_logprob == "recompute"
    return asked or (corrects(config) and config.trainer.updates > 1)


def samples_alike(config: TrainConfig) -> bool:
    """Return whether the log-probs that the sampler records are, to the last bit, those of the policy before the
    update."""
    rollout = config.rollout
    return (
        config.model.batch_invariant
        and config.loop.staleness == 0
        and config.loop.train_context != "plain"
        and not mixes_policies(config)
        and not (rollout.top_p < 1 or rollout.top_k or rollout.min_p)
    )


def spared(config: TrainConfig) -> list[str]:
    """Return a sentence about the pass for old log-probs, if the sampler's are copied instead."""
    if not (rescores(config) and samples_alike(config)):
        return []
    return [
        '`algorithm.old_logprob` = "recompute" takes the sampler\'s log-probs, which have the same bits '
        "(`model.batch_invariant`): the pass is saved."
    ]


def credit(config: TrainConfig, context: Context | None = None) -> CreditFunction:
    """Return the advantage estimator that `algorithm.advantage` names.

    Raises:
        UserError: there is no such estimator, file or function, or it has no such option.
    """
    algorithm = config.algorithm
    if algorithm.advantage == "gae" and config.roles.critic is None:
        raise UserError('algorithm.advantage = "gae" needs a critic; give the run a [roles.critic].')
    key, context = "algorithm.advantage", context or Context()
    options = scheduled(context, "advantage", f"{key}_options", algorithm.advantage_options)
    found: CreditFunction = resolve(
        key, algorithm.advantage, options, parts=ADVANTAGES, inputs=("trees",), context=context, offers=OF_TREES
    )
    return found


def objective(
    config: TrainConfig, key: str, name: str, options: dict[str, Any], select: str | None = None
) -> Objective:
    """Make the objective ``name``, with the correction of the lag if the run has one.

    Args:
        key: key of the configuration that gives it, for messages.
        name: preset of `Objective`.
        options: fields of the objective to change, some of which may change with the step.
        select: the selection given with it, if any.

    Raises:
        UserError: unknown name or option, or the objective needs something that the run does not have.
    """
    chosen = ask(f"{key} = '{name}'", Objective.preset, name, **now(options))
    assert isinstance(chosen, Objective)
    if corrects(config):
        chosen = corrected(chosen, config)
    for field, why in chosen.needs_fields.items():
        if field == "token_weight":
            if select is None:
                raise UserError(f"{key} = '{name}' trains on chosen tokens; choose them with `select` ({why}).")
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
    """Add the decoupled correction (Hilton et al. 2021): ratios against the policy before the update, and weights
    exp(proximal - behaviour).

    The weights of sequence-level ratios are sequence-level too (geometric means). An objective that has its own
    correction, or uses no old log-probs, stays as it is. If the policy before the update is not scored, the current
    policy replaces it: all ratios are then 1 and none is clipped.
    """
    loop, level = config.loop, objective.mismatch_level
    if objective.mismatch == "none" and objective.needs_old and "token_weight" not in objective.needs_fields:
        if objective.ratio_level in ("sequence", "sequence_token"):
            level = "geometric"
        with suppress(ValueError):  # raised if the objective itself weights by the sampler's log-probs
            objective = replace(
                objective, mismatch=loop.correction, mismatch_level=level, mismatch_cap=loop.correction_cap
            )
    if objective.mismatch == "none" or rescores(config):
        return objective
    return replace(objective, ratio_base="current", dynamic_clip=False)


def inert(config: TrainConfig) -> list[str]:
    """Return a sentence for each loss term whose ratio is 1 in every update, about the part of it that never acts.

    Ratios are 1 where one update a step follows from the policy that sampled, and where the correction of the lag
    replaces the old policy by the current one.
    """
    sampled = config.trainer.prompts_per_step > 0
    if not sampled or config.trainer.updates > 1 or mixes_policies(config) or config.loop.train_context == "plain":
        return []
    lag = config.loop.staleness > 0
    if lag and (config.loop.correction == "none" or config.algorithm.old_logprob == "recompute"):
        return []
    found = []
    for term, _ in loss_terms(config):
        if not isinstance(term, TokenTerm):
            continue
        asked = _named_objective(config, term.name)
        parts = [what for acts, what in _of_ratio(asked) if acts]
        if not parts:
            continue
        why = (
            f"loop.correction = '{config.loop.correction}' compares with the policy before the step's one update"
            if lag
            else "the step's one update starts from the policy that sampled"
        )
        remedy = 'or loop.correction to "none", to compare with the sampler' if lag else "to let them act"
        found.append(
            f"Loss term '{term.name}': {why}, so every ratio is 1 and its {' and '.join(parts)} never act; set "
            f"trainer.updates_per_step or trainer.epochs to 2 or more {remedy}."
        )
    return found


def _named_objective(config: TrainConfig, term: str) -> Objective:
    """Return the objective of a term as it is configured, without the correction of the lag."""
    given: Any = config.algorithm
    if term != "actor":
        given = next(other for other in config.algorithm.terms if other.name == term)
    options = scheduled(Context(), term, "objective_options", given.objective_options)
    return Objective.preset(given.objective, **now(options))


def _of_ratio(asked: Objective) -> list[tuple[bool, str]]:
    """Return the parts of an objective that have an effect only where the ratio is not 1."""
    reads, rule = asked.formula.reads, asked.rule
    if asked.ratio_base in ("self", "current") or not asked.needs_old:
        return []
    return [
        (asked.formula.bounded or asked.dynamic_clip or asked.clip_ratio_c is not None, "bounds of the ratio"),
        (asked.ratio_level != "token", f"ratios of the {asked.ratio_level.partition('_')[0]}"),
        (bool(reads & {"tau_pos", "tau_neg"}), "gate"),
        (rule is not None and rule.reads_ratio, "weights of ratios"),
    ]


def _of_tokens(
    config: TrainConfig, key: str, given: AlgorithmConfig | TermConfig, name: str, context: Context
) -> TokenTerm:
    """Return the term that ``given`` describes under ``key``."""
    assert given.objective is not None
    options = scheduled(context, name, f"{key}.objective_options", given.objective_options)
    make = partial(objective, config, f"{key}.objective", given.objective, select=given.select)
    changes = [option for option, value in options.items() if isinstance(value, Changing)]
    if "kl_coef" in changes:  # a reference is needed in every step, also where the coefficient begins at 0
        make(options=options | {"kl_coef": 1e-9})

    def changed() -> Objective:
        try:
            return make(options=options)
        except UserError as error:
            raise UserError(f"At step {context.step}, {error}") from error

    return TokenTerm(
        make(options=options),
        name,
        _selection(f"{key}.select", given.select, given.select_options, name, context),
        config.rollout.max_new_tokens,
        changed if changes else None,
    )


def loss_terms(config: TrainConfig, context: Context | None = None) -> list[tuple[LossTerm, Schedule]]:
    """Return the terms of the loss, `algorithm.objective` first, each with its weight.

    Raises:
        UserError: a part is unknown, or needs something that the run does not have.
    """
    algorithm, context = config.algorithm, context or Context()
    main = _of_tokens(config, "algorithm", algorithm, "actor", context)
    weight = find_schedule("algorithm.weight", algorithm.weight, algorithm.weight_options)
    terms: list[tuple[LossTerm, Schedule]] = [(main, weight)]
    for term in algorithm.terms:
        key = f"algorithm.terms.{term.name}"
        weight = find_schedule(f"{key}.weight", term.weight, term.weight_options)
        if term.pairs is not None:
            options = scheduled(context, f"{term.name}.pairs", f"{key}.pairs_options", term.pairs_options)
            choose = resolve(
                f"{key}.pairs", term.pairs, options, parts=PAIRINGS, inputs=("tree",), context=context, offers=OF_TREES
            )
            if term.loss_options.get("kind", "sigmoid") not in WITHOUT_REFERENCE and config.roles.reference is None:
                raise UserError(f"{key} needs a reference policy; give the run a [roles.reference].")
            of_loss = scheduled(context, term.name, f"{key}.loss_options", term.loss_options)
            terms.append((PairTerm(choose, term.name, of_loss), weight))
            continue
        if term.loss is not None:
            select = _selection(f"{key}.select", term.select, term.select_options, term.name, context)
            options = scheduled(context, term.name, f"{key}.loss_options", term.loss_options)
            own = resolve(f"{key}.loss", term.loss, options, parts=LOSSES)
            counted = TokenTerm(FIELDS, term.name, select)
            terms.append((UserTerm(f"{key}.loss = '{term.loss}'", own, counted, context), weight))
            continue
        terms.append((_of_tokens(config, key, term, term.name, context), weight))
    names = [term.name for term, _ in terms]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"Two loss terms are called '{min(twice)}'; give each in [[algorithm.terms]] a name of its own."
        )
    return terms


def shapings(config: TrainConfig, context: Context | None = None) -> list[tuple[str, Shaping]]:
    """Return the functions that shape rewards, each with its name for messages.

    A shipped one that has an option ``longest`` takes `rollout.max_new_tokens` for it by default.

    Raises:
        UserError: there is no such function, or it has no such option.
    """
    key, found, context = "reward.shaping", [], context or Context()
    for given in config.reward.shaping:
        options = scheduled(context, f"shaping.{Path(given.name).name}", f"{key}.options", given.options)
        if given.name in SHAPINGS and "longest" in options_of(SHAPINGS[given.name], ("tree",)):
            options = {"longest": config.rollout.max_new_tokens} | options
        shaping = resolve(
            key, given.name, options, parts=SHAPINGS, inputs=("tree",), options_key=f"{key}.options", context=context,
            offers=OF_TREES,
        )  # fmt: skip
        found.append((f"{key} '{given.name}'", shaping))
    return found


def _selection(key: str, name: str | None, options: dict[str, Any], term: str, context: Context) -> Selection | None:
    if name is None:
        return None
    options = scheduled(context, f"{term}.select", f"{key}_options", options)
    found: Selection = resolve(key, name, options, parts=SELECTIONS, inputs=("tree",), context=context, offers=OF_TREES)
    return found


def roles(config: TrainConfig, model: PreTrainedModel, spread: Spread) -> list[Role]:
    """Load the models that score log-probs for the loss, each sharded by ``spread`` as ``model`` is.

    Raises:
        UserError: one cannot be loaded, or its vocabulary or parameters differ from the policy's.
    """
    found = []
    if rescores(config):
        role = SampledRole if samples_alike(config) else Role
        found.append(role("proximal_logprob", model, replays_routes=True))
    if config.roles.reference is not None:
        found.append(_reference(config.roles.reference, model, spread))
    if config.roles.teacher is not None:
        teacher = (
            load_model(
                config.roles.teacher.path, dtype=model.dtype, device=model.device, batch_invariant=is_invariant(model)
            )
            .eval()
            .requires_grad_(False)
        )
        if len(teacher.get_output_embeddings().weight) != len(model.get_output_embeddings().weight):
            raise UserError(
                f"roles.teacher.path = '{config.roles.teacher.path}' has another vocabulary than the policy; choose a "
                "teacher with the policy's tokenizer."
            )
        spread(teacher)
        found.append(Role("teacher_logprob", teacher))
    return found


def _reference(reference: ReferenceConfig, model: PreTrainedModel, spread: Spread) -> Role:
    """Make the reference policy: with an adapter, the model without it, unless the reference follows the policy."""
    column, path = "ref_logprob", reference.path
    follows = reference.reset_every > 0 or reference.ema is not None
    if has_lora(model) and path is None and not follows:
        return Role(column, model, adapted=False)
    if has_lora(model) and path is not None:
        if follows:
            raise UserError(
                "roles.reference.path cannot become the policy of [model.lora], whose weights it does not have; leave "
                "reset_every and ema out, or the path."
            )
        other = load_model(path, dtype=model.dtype, device=model.device, batch_invariant=is_invariant(model))
        other.eval().requires_grad_(False)
        spread(other)
        return Role(column, other)
    weights = Role.snapshot(model) if path is None else _weights(path, "roles.reference.path", model, spread)
    return Role(column, model, weights, reset_every=reference.reset_every, ema=reference.ema, initial=path is None)


def _weights(path: str, key: str, model: PreTrainedModel, spread: Spread) -> dict[str, Tensor]:
    other = load_model(path, dtype=model.dtype)
    ours = {name: p.shape for name, p in model.named_parameters()}
    if {name: p.shape for name, p in other.named_parameters()} != ours:
        raise UserError(f"{key} = '{path}' has other parameter shapes than the policy; give a model with the same.")
    spread(other)
    return Role.snapshot(other)


def critic(config: TrainConfig, group: Group, spread: Spread) -> Critic | None:
    """Load the critic of `[roles.critic]`, sharded by ``spread`` over ``group``; None if the run has none."""
    chosen = config.roles.critic
    if chosen is None:
        return None
    device = choose_device(config.model.device)
    model = load_model(
        chosen.path or config.model.path,
        dtype=getattr(torch, config.model.dtype),
        device=device,
        batch_invariant=config.model.batch_invariant,
    )
    return Critic(model, config.trainer.optimizer(chosen.lr), clip=chosen.clip, group=group, spread=spread)


def stateful(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the ``named`` objects that exchange their state with checkpoints."""
    return {
        key: part for key, part in named.items() if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
    }
