"""Builds the parts of a run from its configuration; `Orchestrator` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, set_seed

from ..errors import UserError
from ..loop import preflight
from ..loop.fleet import Fleet
from ..loop.learner import Learner
from ..loop.parts import EvaluationParts, Parts, RunOptions, Trained
from ..loop.policy_handle import Policy
from ..loop.prompts import held_out
from ..loop.publication import TrainedModel
from ..loop.ranks import Ranks
from ..loop.replay_store import ReplayStore
from ..loop.runtime import Progress
from ..methods.groups import KEEPS
from ..methods.schedules import scheduled
from ..model.loading import load_tokenizer
from ..model.pictures import placeholders
from ..parts.context import OF_TREES, Context
from ..parts.resolve import resolve
from ..rewards import Rewards, check_references
from ..rewards.interface import FromProgram
from ..rollout import RolloutEngine
from ..settings import TrainConfig
from ..train import checkpoint
from .build_checks import (
    check_early_scores,
    check_learning,
    check_lengths,
    check_old_logprobs,
    check_ranks,
    kept_entries,
)
from .build_learning import learning_parts, rescores, stateful
from .build_policies import check_policies, further_policies, make_policies, roles_of
from .build_sampling import (
    check_backend,
    check_hints,
    greedy_params,
    load_policy,
    make_engine,
    make_model_directory,
    make_run_rewards,
    prompts_of,
    rollout_program,
    sampled_model,
    sampling_parts,
)
from .build_workers import make_fleet, make_ranks, make_reward_hosts, make_workers
from .config import resolved_toml, training_config
from .stages import EXPORT


def build(config: TrainConfig, *, console: Progress, resume: bool = False, replay: Path | None = None) -> Parts:
    """Make the parts of a training run.

    Args:
        config: the configuration, see `load_config`.
        console: shows the run's progress.
        resume: continue from the newest checkpoint in the run's directory.
        replay: file of recorded groups (`rolltree rollout --record`) to learn from instead of sampling.

    Returns:
        The parts, for `Orchestrator(parts).run()`.

    Raises:
        UserError: the directory holds another run, there is nothing to resume, or a part of the configuration names
            something that does not exist or cannot be used.
    """
    check_learning(config)
    check_policies(config)
    check_old_logprobs(config)
    check_ranks(config)
    check_early_scores(config)
    roles_of(config, rollout_program(config.rollout))
    if config.models and replay is not None:
        raise UserError(
            f"Recorded groups are of one policy, and the run trains `models.{next(iter(config.models))}` too; leave "
            "--replay or [models] out."
        )
    kept = training_config(config)
    checkpoints = config.run_dir / "checkpoints"
    saved = checkpoint.load_latest(checkpoints, kept) if resume else None
    if not resume:
        preflight.check_directory(config.run_dir)
    check_backend(config.rollout)
    with ExitStack() as started:
        workers = make_workers(config)  # before a model is made, which may take minutes
        if workers is not None:
            started.enter_context(closing(workers))
        set_seed(config.seed)
        console.phase("loading the model")
        if config.model.create is not None and not Path(config.model.path).exists():
            console.note(f"'{config.model.path}' does not exist yet: {config.model.create} makes it first.")
        make_model_directory(config)
        several = config.trainer.ranks > 1
        model = None if several else load_policy(config)
        tokenizer = load_tokenizer(config.model.path)
        ranks: Ranks | None = None
        hosted = make_reward_hosts(config, workers) if workers is not None and config.reward.hosts else None
        if workers is not None and config.rollout.engines:
            sampler: Fleet | RolloutEngine = make_fleet(config, workers, hosted)
            ranks = make_ranks(config, workers, console.note) if several else None
        else:
            assert model is not None
            sampler = make_engine(config, sampled_model(config, model), tokenizer)
        policies = {}
        if isinstance(sampler, RolloutEngine):
            policies = further_policies(config, rollout_program(config.rollout), sampler, tokenizer)
        problems = held_out(config.data, config.evaluation.problems, tokenizer)
        context = Context(tokenizer)
        source, demonstrations = prompts_of(config, tokenizer, problems, kept_entries(config), context)
        if config.demonstrations and not config.data.is_empty:
            console.note(f"{demonstrations.overlap(config.data, source, problems)}.")
        if not config.judges:
            rewards: Rewards = FromProgram()  # of nothing, so that no verifier is started
        else:
            rewards = make_run_rewards(config, sampler, tokenizer, context) if hosted is None else hosted
        if ranks is None:
            assert model is not None
            trained: Trained = TrainedModel(model)
            merges = getattr(sampler, "model", None) is not model
            learning = learning_parts(config, model, context=Context(tokenizer), merges=merges)
            learner: Any = partial(Learner, learning)
            others = {name: policy.learning(tokenizer) for name, policy in policies.items()}
            if others:
                learner = partial(make_policies, learning, others)
        else:
            trained, learner = ranks, lambda watch, note: ranks
        engines = {name: policy.engine for name, policy in policies.items()}
        sampling = sampling_parts(config, trained, sampler, tokenizer, source, rewards, context, engines)
        context.policy = Policy(sampling, tokenizer, context, config.seed, chat=config.data.chat)
        check_hints(sampling.callback, source)
        store = replay_store(config, tokenizer, context)
        check_lengths(config, sampler.longest, demonstrations.longest)
        if model is not None:
            preflight.check_placeholders([*source.known, *problems], placeholders(model))
            preflight.check_pictures([*source.known, *problems], model, config.rollout.backend)
        preflight.check_program(
            sampling.program,
            sampling.program_name,
            sampling.params.n,
            tokenizer,
            sampler.end_token_ids,
            source.peek(preflight.TRIED) if config.trainer.prompts_per_step else [],
        )
        if ranks is not None:
            ranks.ready()
        started.pop_all()
    known = [*source.known, *problems]
    return Parts(
        options=run_options(config, kept),
        sampling=sampling,
        learner=learner,
        evaluation=EvaluationParts(problems, greedy_params(config), config.evaluation.every),
        rewards=rewards,
        check_rewards=partial(
            check_references,
            rewards,
            config.reward,
            [(p.id, p.entry) for p in known],
            config.data.tasks,
            all_known=config.data.path is not None,
        ),
        demonstrations=demonstrations,
        console=console,
        saved=saved,
        replay=replay,
        store=store,
        context=context,
        workers=workers,
        stateful=stateful(
            {
                "replay": store,
                "rollout.program": sampling.program.shared,
                "data.curriculum": source.curriculum,
                "loop.callback": sampling.callback,
            }
        ),
    )


def run_options(config: TrainConfig, trained: dict[str, Any]) -> RunOptions:
    """Return the run's directory, length, checkpoints and limits of failures."""
    return RunOptions(
        name=config.name,
        directory=config.run_dir,
        steps=config.trainer.steps,
        toml=resolved_toml(config),
        document=config.model_dump(mode="json", exclude_none=True),
        trained=trained,
        trackers=config.trackers,
        save_every=config.checkpoint.every,
        keep=config.checkpoint.keep,
        best=config.checkpoint.best,
        max_bad_steps=config.trainer.max_bad_steps,
        max_failed_steps=config.reward.max_failed_steps,
        max_batch_rows=config.rollout.max_batch_rows,
        remembered_tokens=config.rollout.drafts.remembered if config.rollout.drafts.rows else 0,
    )


def replay_store(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, context: Context) -> ReplayStore | None:
    """Return the store of groups to train on again; None if the run has none.

    Raises:
        UserError: `replay.keep` names no function, or a file of `replay.paths` cannot be used.
    """
    replay = config.replay
    if replay is None:
        return None
    options = scheduled(context, "replay", "replay.keep_options", replay.keep_options)
    keep = resolve("replay.keep", replay.keep, options, known=KEEPS, inputs=("tree",), context=context, offers=OF_TREES)
    return ReplayStore(
        replay, config.run_dir / "replay", config.seed, keep, tokenizer, count=config.replayed,
        rescored=rescores(config),
    )  # fmt: skip


def check_stages(configs: Sequence[TrainConfig], *, resume: bool) -> None:
    """Check what later stages need before the first one runs.

    Raises:
        UserError: a part of one does not exist or fails, or its directory holds another run.
    """
    for config in configs[1:]:
        check_learning(config)
        check_policies(config)
        if not resume:
            preflight.check_directory(config.run_dir)


def is_finished(config: TrainConfig) -> bool:
    """Return whether a stage has taken its last step and exported its model."""
    last = checkpoint.latest(config.run_dir / "checkpoints")
    steps = 0 if last is None else int(last.name.rpartition("_")[2])
    return steps >= config.trainer.steps and (config.run_dir / EXPORT).is_dir()
