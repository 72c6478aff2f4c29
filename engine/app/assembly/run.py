"""Builds a run from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ...errors import UserError
from ...fleet.fleet import Fleet
from ...fleet.hosted import HostedRewards
from ...fleet.publication import Trained, TrainedModel
from ...fleet.ranks import Ranks
from ...fleet.workers import Workers
from ...learn.learner import Learner
from ...learn.learning import Learning
from ...loop.callback import CallbackRule
from ...loop.checkpoints import Keeping
from ...loop.evaluation import Evaluation
from ...loop.orchestrator import Orchestrator, RunOptions
from ...loop.policy_handle import Policy
from ...loop.replay_store import ReplayStore
from ...loop.sampling import SamplingParts
from ...methods.groups import KEEPS
from ...methods.schedules import scheduled
from ...model.loading import load_tokenizer
from ...parts.context import OF_TREES, Context
from ...parts.resolve import resolve
from ...programs import RolloutProgram
from ...prompts.demonstrations import Demonstrations
from ...prompts.prompts import Prompt, held_out
from ...prompts.sources import PromptSource
from ...record import directory
from ...record.metrics import Stopwatch
from ...record.progress import Progress
from ...rewards import Rewards, check_references
from ...rewards.interface import FromProgram
from ...rollout import RolloutEngine
from ...settings import TrainConfig
from ...train import checkpoint
from ..config import resolved_toml, training_config
from ..stages import EXPORT
from . import preflight
from .checks import check_lengths, check_training, kept_entries, tried_methods
from .learning import learning_parts, stateful
from .methods import Methods
from .policies import Policy as FurtherPolicy
from .policies import further_policies, make_policies, policies_methods, resting
from .rows import Entry, check_answers, check_rows, known_entries
from .sampling import (
    budget,
    callback_rule,
    check_backend,
    check_hints,
    greedy_params,
    load_policy,
    make_engine,
    make_model_directory,
    make_run_rewards,
    over_sampling,
    prompts_of,
    publication,
    rightness,
    sampled_model,
    sampling_parts,
    with_tools,
)
from .workers import make_fleet, make_ranks, make_reward_hosts, make_workers

MakeLearner = Callable[[Stopwatch, Callable[[str], object]], Learning]


def build(
    config: TrainConfig,
    *,
    console: Progress,
    resume: bool = False,
    replay: Path | None = None,
    check_data: bool = False,
) -> Orchestrator:
    """Make a training run, for ``build(config, console=...).run()``.

    Args:
        config: the configuration, see `load_config`.
        console: shows the run's progress.
        resume: continue from the newest checkpoint in the run's directory.
        replay: file of recorded groups (`rolltree rollout --record`) to learn from instead of sampling.
        check_data: try every row of `data.path`, not only a sample.

    Raises:
        UserError: the directory holds another run, there is nothing to resume, or a part of the configuration names
            something that does not exist or cannot be used.
    """
    parts = _Parts.of(config, replay)
    saved = _saved(config, resume=resume)
    _note_rest(config, console.note)
    with ExitStack() as started:
        workers = _workers(config, started)  # before a model is made, which may take minutes
        policy = _Policy.load(config, workers, console)
        context = Context(policy.tokenizer)
        offered = with_tools(config, parts.program)
        problems, source, demonstrations = _prompts(offered, policy.tokenizer, context, console)
        rewards = _rewards(config, parts.program, policy, context)
        trained, learner = _learner(parts, policy)
        sampling = _sampling(config, parts.program, policy, source, rewards, context)
        sends = publication(config, sampling, trained, console.note, own_weights=not policy.sampled_itself)
        rule = _rule(config, source, context)
        store = replay_store(config, policy.tokenizer, context)
        _check_made(config, policy, sampling, problems, demonstrations)
        _note_rows(source, console.note, every=check_data)
        policy.wait()
        orchestrator = Orchestrator(
            run_options(config),
            sampling=sampling,
            publication=sends,
            budget=budget(config),
            learner=learner,
            evaluation=_evaluation(config, sampling, problems, console),
            rewards=rewards,
            check_rewards=_reference_check(config, rewards, *known_entries(source, problems, every=check_data)),
            demonstrations=demonstrations,
            console=console,
            rule=rule,
            over_sampling=over_sampling(config.loop),
            saved=saved,
            replay=replay,
            store=store,
            context=context,
            workers=workers,
            stateful=_stateful(store, sampling, rule),
        )
        started.pop_all()
    return orchestrator


@dataclass(frozen=True)
class _Parts:
    """The parts of a run that need no model, made and checked.

    Attributes:
        methods: functions and loss terms of the first policy.
        others: those of further policies, by name.
    """

    methods: Methods
    others: Mapping[str, Methods]
    program: RolloutProgram

    @classmethod
    def of(cls, config: TrainConfig, replay: Path | None) -> _Parts:
        parts = cls(tried_methods(config), policies_methods(config), check_training(config))
        check_backend(config.rollout)
        if config.models and replay is not None:
            raise UserError(
                f"Recorded groups are of one policy, and the run trains `models.{next(iter(config.models))}` too; "
                "leave --replay or [models] out."
            )
        return parts


def _saved(config: TrainConfig, *, resume: bool) -> checkpoint.Checkpoint | None:
    """Return the newest checkpoint of the run if it goes on; None if it begins, in a directory without another run."""
    if resume:
        return checkpoint.load_latest(config.run_dir / "checkpoints", training_config(config))
    directory.check_directory(config.run_dir)
    return None


def _sampling(
    config: TrainConfig,
    program: RolloutProgram,
    policy: _Policy,
    source: PromptSource,
    rewards: Rewards,
    context: Context,
) -> SamplingParts:
    """Return what samples, which parts that ask for ``policy`` see in ``context``."""
    engines = {name: further.engine for name, further in policy.others.items()}
    journal = config.run_dir / directory.EPISODES
    sampling = sampling_parts(config, program, policy.sampler, policy.tokenizer, source, rewards, engines, journal)
    context.policy = _handle(config, sampling, context)
    return sampling


def _workers(config: TrainConfig, started: ExitStack) -> Workers | None:
    """Return what starts the run's other processes, if it has some; ``started`` ends them."""
    workers = make_workers(config)
    return None if workers is None else started.enter_context(closing(workers))


def _rule(config: TrainConfig, source: PromptSource, context: Context) -> CallbackRule | None:
    rule = callback_rule(config.loop, context)
    check_hints(None if rule is None else rule.function, source)
    return rule


def _note_rest(config: TrainConfig, note: Callable[[str], object]) -> None:
    """Tell where nothing is learnt."""
    for sentence in resting(config):
        note(sentence)


def _note_rows(source: PromptSource, note: Callable[[str], object], *, every: bool) -> None:
    """Tell of rows that cannot be used; arguments and errors as for `check_rows`."""
    for sentence in check_rows(source, note, every=every):
        note(f"{sentence.rstrip('.')}.")


def _evaluation(config: TrainConfig, sampling: SamplingParts, problems: list[Prompt], console: Progress) -> Evaluation:
    is_right = rightness(config, sampling.program)
    every, params = config.evaluation.every, greedy_params(config)
    targets = config.evaluation.targets
    return Evaluation(problems, params, every, sampling.sampler, sampling.tokenizer, console, is_right, targets)


def _stateful(store: ReplayStore | None, sampling: SamplingParts, rule: CallbackRule | None) -> dict[str, Any]:
    """Return the parts beside the learner whose state checkpoints hold, by their keys."""
    return stateful(
        {
            "replay": store,
            "rollout.program": sampling.program.shared,
            "data.curriculum": sampling.source.curriculum,
            "loop.callback": None if rule is None else rule.function,
        }
    )


@dataclass(frozen=True)
class _Policy:
    """The policy, what samples it, and what trains it elsewhere.

    Attributes:
        model: the module that this process trains; None if ranks train it.
        sampler: the engine of this process, or those of others.
        ranks: the processes that train; None if this one does.
        hosted: the reward hosts; None if this process judges.
        others: the further policies, by name.
    """

    model: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    sampler: Fleet | RolloutEngine
    ranks: Ranks | None
    hosted: HostedRewards | None
    others: Mapping[str, FurtherPolicy]

    @classmethod
    def load(cls, config: TrainConfig, workers: Workers | None, console: Progress) -> _Policy:
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
            sampler: Fleet | RolloutEngine = make_fleet(config, workers, console.note, hosted)
            ranks = make_ranks(config, workers, console.note) if several else None
        else:
            assert model is not None
            sampler = make_engine(config, sampled_model(config, model), tokenizer)
        others = {}
        if isinstance(sampler, RolloutEngine):
            others = further_policies(config, sampler, tokenizer)
        return cls(model, tokenizer, sampler, ranks, hosted, others)

    def wait(self) -> None:
        """Wait for the ranks that train, if there are any."""
        if self.ranks is not None:
            self.ranks.ready()

    @property
    def sampled_itself(self) -> bool:
        """The sampler computes with the module that is trained."""
        return self.model is not None and getattr(self.sampler, "model", None) is self.model


def _prompts(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, context: Context, console: Progress
) -> tuple[list[Prompt], PromptSource, Demonstrations]:
    """Return the held-out problems, the source of the run's prompts, and the demonstrations."""
    problems = held_out(config.data, config.evaluation.problems, tokenizer)
    source, demonstrations = prompts_of(config, tokenizer, problems, kept_entries(config), context)
    check_answers(config, source)
    if config.demonstrations and not config.data.is_empty:
        console.note(f"{demonstrations.overlap(config.data, source, problems)}.")
    return problems, source, demonstrations


def _rewards(config: TrainConfig, program: RolloutProgram, policy: _Policy, context: Context) -> Rewards:
    if not config.judges:
        return FromProgram()  # of nothing, so that no verifier is started
    if policy.hosted is not None:
        return policy.hosted
    return make_run_rewards(config, program, policy.sampler, policy.tokenizer, context)


def _learner(parts: _Parts, policy: _Policy) -> tuple[Trained, MakeLearner]:
    """Return the trained policy, for comparison with the sampler, and what makes the object that trains it."""
    if (ranks := policy.ranks) is not None:
        return ranks, lambda watch, note: ranks
    assert policy.model is not None
    for methods in (parts.methods, *parts.others.values()):
        methods.context.tokenizer = policy.tokenizer
    first = learning_parts(parts.methods, policy.model, own_weights=not policy.sampled_itself)
    others = {name: learning_parts(parts.others[name], further.model) for name, further in policy.others.items()}
    make = partial(make_policies, first, others) if others else partial(Learner, first)
    return TrainedModel(policy.model), make


def _handle(config: TrainConfig, sampling: SamplingParts, context: Context) -> Policy:
    """Return the policy as callbacks and sources of the user's see it."""
    return Policy(
        sampling.sampler,
        sampling.tokenizer,
        sampling.params,
        context,
        config.seed,
        chat=config.data.chat,
        answered_by=sampling.program_name if sampling.program.answers_held_out else None,
    )


def _check_made(
    config: TrainConfig,
    policy: _Policy,
    sampling: SamplingParts,
    problems: list[Prompt],
    demonstrations: Demonstrations,
) -> None:
    """Check prompts and program against the model and its tokenizer."""
    check_lengths(config, policy.sampler.longest, demonstrations.longest)
    if (model := policy.model) is not None:
        preflight.check_shown(problems, model, config)
        if (rows := sampling.source.rows) is not None:
            rows.check_each(lambda prompt: preflight.check_shown([prompt], model, config))
    preflight.check_prompts(sampling.program, problems, sampling.source)
    preflight.check_program(
        sampling.program,
        sampling.program_name,
        sampling.params.n,
        policy.tokenizer,
        policy.sampler.end_token_ids,
        sampling.source.peek(preflight.TRIED) if config.trainer.prompts_per_step else [],
    )


def _reference_check(
    config: TrainConfig, rewards: Rewards, entries: Iterable[Entry], further: Iterable[Mapping[str, Any]]
) -> Callable[[], str]:
    tasks, all_known = config.data.tasks, config.data.path is not None
    return partial(check_references, rewards, config.reward, entries, tasks, all_known=all_known, further=further)


def run_options(config: TrainConfig) -> RunOptions:
    """Return the run's directory, length, checkpoints and limits of failures."""
    return RunOptions(
        name=config.name,
        directory=config.run_dir,
        steps=config.trainer.steps,
        toml=resolved_toml(config),
        document=config.model_dump(mode="json", exclude_none=True),
        trackers=config.trackers,
        max_bad_steps=config.trainer.max_bad_steps,
        max_failed_steps=config.reward.max_failed_steps,
        max_batch_rows=config.rollout.max_batch_rows,
        keeping=Keeping(
            every=config.checkpoint.every,
            keep=config.checkpoint.keep,
            best=config.checkpoint.best,
            trained=training_config(config),
            remembered_tokens=config.rollout.drafts.remembered if config.rollout.drafts.rows else 0,
        ),
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
    keep = resolve("replay.keep", replay.keep, options, parts=KEEPS, inputs=("tree",), context=context, offers=OF_TREES)
    return ReplayStore(
        replay, config.run_dir / "replay", config.seed, keep, tokenizer, count=config.replayed,
        rescored=config.rescores,
    )  # fmt: skip


def check_stages(configs: Sequence[TrainConfig], *, resume: bool) -> None:
    """Check what later stages need before the first one runs.

    Raises:
        UserError: a part of one does not exist or fails, or its directory holds another run.
    """
    for config in configs[1:]:
        tried_methods(config)
        policies_methods(config)
        if not resume:
            directory.check_directory(config.run_dir)


def is_finished(config: TrainConfig) -> bool:
    """Return whether a stage has taken its last step and exported its model."""
    last = checkpoint.latest(config.run_dir / "checkpoints")
    steps = 0 if last is None else int(last.name.rpartition("_")[2])
    return steps >= config.trainer.steps and (config.run_dir / EXPORT).is_dir()
