"""Makes the learning parts of a run: its models that score, its critic, and what `Learner` needs besides `Methods`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from rolltree.kernels import Objective

from ...learn.extrapolation import Trajectory
from ...learn.learning import LearningParts
from ...methods.schedules import find_schedule, scheduled
from ...model.invariant.install import is_invariant
from ...model.loading import choose_device, load_model
from ...model.lora import Alone, Merged, has_lora
from ...model.roles import Role, SampledRole
from ...model.sharding import DATA, TENSOR, shard, split
from ...model.teachers.several import Teachers
from ...parts.context import Context, now
from ...programs import make_program
from ...settings import AlgorithmConfig, LoraConfig, ReferenceConfig, TeacherConfig, TermConfig, TrainConfig
from ...settings.capabilities import MODELS, Model, refuse
from ...train.critic import Critic
from ...train.group import ALONE, Group
from .checks import check_split
from .methods import Methods
from .sampling import adapter_alone
from .statistics import given_roles, statistics
from .teachers import TeacherOf, served, teacher_scores


def learning_parts(
    methods: Methods, model: PreTrainedModel, group: Group = ALONE, *, own_weights: bool = False
) -> LearningParts:
    """Make the parts that `Learner` uses, with every model sharded over ``group``.

    Args:
        own_weights: the sampler has a model of its own.

    Raises:
        UserError: a part cannot be loaded, or does not go with the policy.
    """
    config, context = methods.config, methods.context
    loop, trainer = config.loop, config.trainer
    adapter = Alone if adapter_alone(config) else Merged
    group = replace(group, tensor=trainer.tensor)
    spread = spreading(config, group, model.device.type)
    spread(model)
    scoring = roles(config, model, group, spread, methods)
    early = not loop.score_early or any(role.fixed and role.columns for role in scoring)
    refuse(MODELS, Model(config, scores_early=early))
    reference = next((role for role in scoring if role.column == "ref_logprob"), None)
    prepared = [methods.credit, *(shaping for _, shaping in methods.shapings)]
    terms = [term for term, _ in methods.terms]
    methods.teacher.role = next((role for role in scoring if role.column == "teacher_logprob"), None)
    return LearningParts(
        model=model,
        optimizer=trainer.optimizer(),
        credit=methods.credit,
        credit_name=config.algorithm.advantage,
        shapings=methods.shapings,
        terms=methods.terms,
        lr_scale=find_schedule("trainer.lr_scale", trainer.lr_scale, trainer.lr_scale_options),
        temperature_scale=find_schedule(
            "loop.temperature_scale", loop.temperature_scale, loop.temperature_scale_options
        ),
        length_scale=find_schedule("loop.length_scale", loop.length_scale, loop.length_scale_options),
        roles=[*statistics(methods.columns, model, prepared, reference), *scoring],
        given_roles=given_roles(
            methods.given_columns, model, prepared, reference, terms if config.demonstrations else []
        ),
        critic=critic(config, group, spread),
        temperature=config.rollout.temperature,
        updates_per_step=trainer.updates_per_step,
        epochs=trainer.epochs,
        max_tokens=trainer.max_tokens,
        drop_zero_variance=config.algorithm.drop_zero_variance,
        cut=config.algorithm.cut,
        self_check=trainer.self_check,
        score_early=loop.score_early,
        replay_routes=config.model.replay_routes,
        notes=[*inert(config), *spared(config)],
        group=group,
        context=context,
        weights=adapter if own_weights and has_lora(model) else None,
        trajectory=trajectory(config.model.lora, config.seed),
        stateful=stateful(methods.functions),
    )


def trajectory(lora: LoraConfig | None, seed: int) -> Trajectory | None:
    """Return the empty trajectory of a run with `model.lora.extrapolate`; None without."""
    chosen = None if lora is None else lora.extrapolate
    return None if chosen is None else Trajectory(**dict(chosen), seed=seed)


Spread = Callable[[PreTrainedModel], object]


def spreading(config: TrainConfig, group: Group, device: str) -> Spread:
    """Return the function that shards a model over the devices of ``group``, which are of one type.

    It does nothing for a process that trains alone, and raises as `check_split`.
    """
    if group.count == 1:
        return lambda model: None
    reshard = config.trainer.reshard
    if group.tensor == 1:
        mesh = init_device_mesh(device, (group.count,))
        return lambda model: shard(model, mesh=mesh, reshard_after_forward=reshard)
    rows = init_device_mesh(device, (group.shares, group.tensor), mesh_dim_names=(DATA, TENSOR))

    def spread(model: PreTrainedModel) -> None:
        check_split(config, model.config)
        split(model, rows[TENSOR])
        shard(model, mesh=rows[DATA], reshard_after_forward=reshard)

    return spread


def mixes_policies(config: TrainConfig) -> bool:
    """Return whether a group may hold tokens that an older policy sampled, at any staleness."""
    return (
        config.replay is not None or make_program(config.rollout.program, **config.rollout.program_options).gives_older
    )


def samples_alike(config: TrainConfig) -> bool:
    """Return whether the log-probs that the sampler records are, to the last bit, those of the policy before the
    update."""
    return (
        config.model.batch_invariant
        and config.loop.staleness == 0
        and config.loop.train_context != "plain"
        and not mixes_policies(config)
        and not config.filters_tokens
    )


def spared(config: TrainConfig) -> list[str]:
    """Return a sentence about the pass for old log-probs, if the sampler's are copied instead."""
    if not (config.rescores and samples_alike(config)):
        return []
    return [
        '`algorithm.old_logprob` = "recompute" takes the sampler\'s log-probs, which have the same bits '
        "(`model.batch_invariant`): the pass is saved."
    ]


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
    why = (
        f"loop.correction = '{config.loop.correction}' compares with the policy before the step's one update"
        if lag
        else "the step's one update starts from the policy that sampled"
    )
    remedy = 'or loop.correction to "none", to compare with the sampler' if lag else "to let them act"
    sentences = []
    terms: list[tuple[str, AlgorithmConfig | TermConfig]] = [("actor", config.algorithm)]
    terms += [(term.name, term) for term in config.algorithm.terms]
    for name, table in terms:
        parts = [part for acts, part in _of_ratio(_as_configured(name, table)) if acts] if table.objective else []
        if parts:
            sentences.append(
                f"Loss term '{name}': {why}, so every ratio is 1 and its {' and '.join(parts)} never act; set "
                f"trainer.updates_per_step or trainer.epochs to 2 or more {remedy}."
            )
    return sentences


def _as_configured(name: str, table: AlgorithmConfig | TermConfig) -> Objective:
    """Return the objective of the term ``name``, without the correction of the lag."""
    assert table.objective is not None
    options = scheduled(Context(), name, "objective_options", table.objective_options)
    return Objective.preset(table.objective, **now(options))


def _of_ratio(chosen: Objective) -> list[tuple[bool, str]]:
    """Return the parts of an objective that have an effect only where the ratio is not 1."""
    reads, rule = chosen.formula.reads, chosen.rule
    if chosen.ratio_base in ("self", "current") or not chosen.needs_old:
        return []
    return [
        (chosen.formula.bounded or chosen.dynamic_clip or chosen.clip_ratio_c is not None, "bounds of the ratio"),
        (chosen.ratio_level != "token", f"ratios of the {chosen.ratio_level.partition('_')[0]}"),
        (bool(reads & {"tau_pos", "tau_neg"}), "gate"),
        (rule is not None and rule.reads_ratio, "weights of ratios"),
    ]


def roles(config: TrainConfig, model: PreTrainedModel, group: Group, spread: Spread, methods: Methods) -> list[Role]:
    """Load the models that score log-probs for the loss, each sharded over ``group`` by ``spread`` as ``model`` is.

    Raises:
        UserError: one cannot be loaded, or its vocabulary or parameters differ from the policy's.
    """
    scoring = []
    if config.rescores:
        role = SampledRole if samples_alike(config) else Role
        scoring.append(role("proximal_logprob", model, replays_routes=True))
    if config.roles.reference is not None:
        scoring.append(_reference(config, config.roles.reference, model, spread))
    if config.roles.has("teacher"):
        scoring.append(_teacher(config, model, group, spread, methods))
    return scoring


def _teacher(config: TrainConfig, model: PreTrainedModel, group: Group, spread: Spread, methods: Methods) -> Role:
    """Load the teacher of the run, or its teachers."""
    scores, chosen = teacher_scores(config, methods), config.roles.teacher
    if chosen is not None and chosen.path is None and chosen.url is None:
        return _reference(config, chosen, model, spread, "teacher_logprob", scores)

    def load(key: str, path: str) -> Role:
        teacher = _beside(path, model)
        same = len(teacher.get_output_embeddings().weight) == len(model.get_output_embeddings().weight)
        refuse(MODELS, Model(config, key=f"{key}.path", path=path, same_vocabulary=same))
        spread(teacher)
        return Role("teacher_logprob", teacher, scores=scores)

    loaded = {
        key: served(teacher, model, methods.context, group, scores=scores)
        if teacher.path is None
        else load(key, teacher.path)
        for key, teacher in config.roles.all_teachers.items()
    }
    if chosen is not None:
        return loaded["roles.teacher"]
    named = {key.rpartition(".")[2]: role for key, role in loaded.items()}
    return Teachers(named, TeacherOf(config.roles, methods.context), scores=scores, shared=group.count > 1)


def _beside(path: str, model: PreTrainedModel) -> PreTrainedModel:
    """Load a model that is not trained, with the number type and on the device of ``model``."""
    loaded = load_model(path, dtype=model.dtype, device=model.device, batch_invariant=is_invariant(model))
    return loaded.eval().requires_grad_(False)


def _reference(
    config: TrainConfig,
    reference: ReferenceConfig | TeacherConfig,
    model: PreTrainedModel,
    spread: Spread,
    column: str = "ref_logprob",
    scores: bool = True,
) -> Role:
    """Make the reference policy, or a teacher of the policy's weights: with an adapter, the model without it, unless
    the role follows the policy."""
    path = reference.path
    follows = reference.reset_every > 0 or reference.ema is not None
    if has_lora(model) and path is None and not follows:
        return Role(column, model, adapted=False, scores=scores)
    if has_lora(model) and path is not None:
        other = _beside(path, model)
        spread(other)
        return Role(column, other)
    weights = Role.snapshot(model) if path is None else _weights(config, path, model, spread)
    return Role(
        column, model, weights, reset_every=reference.reset_every, ema=reference.ema, initial=path is None,
        scores=scores,
    )  # fmt: skip


def _weights(config: TrainConfig, path: str, model: PreTrainedModel, spread: Spread) -> dict[str, Tensor]:
    other = load_model(path, dtype=model.dtype)
    shapes, other_shapes = ({name: p.shape for name, p in each.named_parameters()} for each in (model, other))
    refuse(MODELS, Model(config, key="roles.reference.path", path=path, same_shapes=shapes == other_shapes))
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
