"""Builds the parts of a run from its configuration; `Orchestrator` runs them."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..errors import UserError
from ..loop import preflight
from ..loop.budget import Budget
from ..loop.entries import Entries
from ..loop.fleet import Fleet
from ..loop.hosted import HostedRewards
from ..loop.judging import decode
from ..loop.learner import Learner
from ..loop.parts import EvaluationParts, LearningParts, Parts, RunOptions, SamplingParts, Trained
from ..loop.publication import TrainedModel
from ..loop.ranks import Rank, Ranks
from ..loop.replay_store import ReplayStore
from ..loop.runtime import Progress
from ..loop.sources import Demonstrations, PromptSource, held_out
from ..loop.workers import Role, Workers
from ..methods.groups import GROUP_CALLBACKS, KEEPS, GroupCallback, HintLadder
from ..methods.schedules import scheduled
from ..model import routes
from ..model.loading import choose_device, load_model, load_tokenizer
from ..model.lora import add_lora, has_lora, plain_copy
from ..model.pictures import placeholders
from ..parts.calling import call
from ..parts.context import OF_TREES, Context, asked
from ..parts.resolve import import_object, resolve
from ..programs import RolloutProgram, make_program
from ..rewards import ProgramVerifier, Rewards, check_references, make_rewards
from ..rollout import DraftConfig, EngineConfig, NativeEngine, RolloutEngine, SamplingParams
from ..rollout.host import Host
from ..rollout.questions import Questions
from ..rollout.sampler import LocalSampler
from ..settings import RolloutConfig, TrainConfig
from ..tasks import Problem
from ..train import checkpoint
from ..train.group import Group
from .build_learning import FROM_ROLES, corrects, credit, learning_parts, loss_terms, mixes_policies, rescores, shapings
from .build_statistics import read_columns
from .config import resolved_toml, training_config


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
    check_old_logprobs(config)
    check_ranks(config)
    kept = training_config(config)
    checkpoints = config.run_dir / "checkpoints"
    saved = checkpoint.load_latest(checkpoints, kept) if resume else None
    if not resume:
        preflight.check_directory(config.run_dir)
    set_seed(config.seed)
    console.phase("loading the model")
    if config.model.create is not None and not Path(config.model.path).exists():
        console.note(f"'{config.model.path}' does not exist yet: {config.model.create} makes it first.")
    make_model_directory(config)
    several = config.trainer.ranks > 1
    model = None if several else load_policy(config)
    tokenizer = load_tokenizer(config.model.path)
    with ExitStack() as started:
        workers = make_workers(config)
        hosted: HostedRewards | None = None
        ranks: Ranks | None = None
        if workers is not None:
            started.enter_context(closing(workers))
            hosted = make_reward_hosts(config, workers) if config.reward.hosts else None
        if workers is not None and config.rollout.engines:
            sampler: Fleet | RolloutEngine = make_fleet(config, workers, hosted)
            ranks = make_ranks(config, workers, console.note) if several else None
        else:
            assert model is not None
            sampler = make_engine(config, sampled_model(config, model), tokenizer)
        problems = held_out(config.data, config.evaluation.problems, tokenizer)
        context = Context(tokenizer)
        source = PromptSource(config.data, tokenizer, config.seed, problems, kept_entries(config), context)
        rewards = make_run_rewards(config, sampler, tokenizer, context) if hosted is None else hosted
        own: dict[str, Any] = {}
        if ranks is None:
            assert model is not None
            trained: Trained = TrainedModel(model)
            merges = getattr(sampler, "model", None) is not model
            learning = learning_parts(config, model, context=Context(tokenizer), merges=merges)
            learner: Any = partial(Learner, learning)
            own = learning_state(learning)
        else:
            trained, learner = ranks, lambda watch, note: ranks
        sampling = sampling_parts(config, trained, sampler, tokenizer, source, rewards, context)
        check_hints(sampling.callback, source)
        store = replay_store(config, tokenizer, context)
        check_lengths(config, sampler.longest)
        if model is not None:
            preflight.check_placeholders([*source.known, *problems], placeholders(model))
        preflight.check_program(
            sampling.program,
            sampling.program_name,
            sampling.params.n,
            tokenizer,
            sampler.end_token_ids,
            source.peek(preflight.TRIED),
        )
        if ranks is not None:
            ranks.ready()
        started.pop_all()
    known = [*source.known, *problems]
    demonstrations = config.demonstrations
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
        demonstrations=None
        if demonstrations is None
        else Demonstrations(demonstrations, config.data, tokenizer, config.seed),
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
            | own
        ),
    )


def learning_state(learning: LearningParts) -> dict[str, Any]:
    """Return the parts of a learner that may have a state, by their keys."""
    terms = {f"algorithm.terms.{term.name}": getattr(term, "own", None) for term, _ in learning.terms}
    return {"algorithm.advantage": learning.credit} | dict(learning.shapings) | terms


def stateful(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the ``named`` objects that exchange their state with checkpoints."""
    return {
        key: part for key, part in named.items() if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
    }


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


def sampling_parts(
    config: TrainConfig,
    trained: Trained,
    sampler: RolloutEngine | Fleet,
    tokenizer: PreTrainedTokenizerBase,
    source: PromptSource,
    rewards: Rewards,
    context: Context,
) -> SamplingParts:
    """Make the parts with which `Controller` samples and judges.

    Args:
        trained: the policy that is trained.
        sampler: the engine of this process, or the engines of others, which sample on their own during updates.
        context: the run's values, for what the callback asks.

    Raises:
        UserError: the program or the callback is unknown or refuses its options.
    """
    loop = config.loop
    here = isinstance(sampler, RolloutEngine)
    on_cpu = here and config.rollout.backend == "native" and choose_device(config.model.device).type == "cpu"
    same = isinstance(trained, TrainedModel) and getattr(sampler, "model", None) is trained.model
    program = rollout_program(config.rollout).with_verifier(ProgramVerifier(rewards))
    return SamplingParts(
        sampler=LocalSampler(sampler, program) if isinstance(sampler, RolloutEngine) else sampler,
        tokenizer=tokenizer,
        source=source,
        program=program,
        program_name=config.rollout.program,
        params=sampling_params(config.rollout),
        budget=budget(config),
        seed=config.seed,
        callback=group_callback(config, context),
        callback_name=loop.callback,
        trains_plain=loop.train_context == "plain",
        max_dropped_batches=loop.max_dropped_batches,
        on_failure=config.reward.on_failure,
        overlaps=loop.overlaps(on_cpu=on_cpu),
        on_cpu=on_cpu,
        keep_keys=loop.keep_keys,
        colocated=config.placement.layout == "colocated",
        trained=None if same or not config.trainer.self_check else trained,
    )


def prepare_model(config: TrainConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and its tokenizer; `model.create` first makes the directory if it does not exist."""
    make_model_directory(config)
    return load_policy(config), load_tokenizer(config.model.path)


def make_model_directory(config: TrainConfig) -> None:
    """Let `model.create` make the model's directory if it does not exist."""
    path = Path(config.model.path)
    if config.model.create is not None and not path.exists():
        what = f"model.create = '{config.model.create}'"
        unfinished = path.with_name(f"{path.name}.tmp")  # renamed when complete: a killed run leaves no partial model
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            call(what, import_object(config.model.create), config, unfinished)
            if not unfinished.is_dir():
                raise UserError(
                    f"{what} made no directory '{unfinished}'; it must write a model to its second argument."
                )
            unfinished.rename(path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def load_policy(config: TrainConfig) -> PreTrainedModel:
    """Load the model that is trained."""
    model: PreTrainedModel = load_model(
        config.model.path,
        dtype=getattr(torch, config.model.dtype),
        device=choose_device(config.model.device),
        train_tower=config.model.train_tower,
    )
    if (lora := config.model.lora) is not None:
        add_lora(model, **lora.model_dump())
    if config.model.replay_routes:
        routes.install(model)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def check_backend(config: RolloutConfig) -> None:
    """Check that `rollout.backend` can be used.

    Raises:
        UserError: the configuration asks for vLLM, which is not installed, or for it and the native backend's drafts.
    """
    if config.backend == "vllm" and config.drafts.rows:
        raise UserError(
            "rollout.drafts applies to the native backend only; set rollout.drafts.rows to 0, and give vLLM its own "
            "speculative_config in rollout.vllm_options."
        )
    if config.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError("rollout.backend is 'vllm', which is not installed; install it, or set it to 'native'.")


def make_engine(
    config: TrainConfig, model: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase
) -> RolloutEngine:
    """Make a rollout engine of the run; vLLM loads the model itself.

    Raises:
        UserError: vLLM is asked for but not installed.
    """
    rollout = config.rollout
    if rollout.backend == "native":
        assert model is not None
        own = EngineConfig(
            kv_tokens=rollout.kv_tokens,
            max_batch_rows=rollout.max_batch_rows,
            kept_states=rollout.kept_states,
            record_routes=config.model.replay_routes,
            compile=rollout.compile,
            drafts=DraftConfig(**rollout.drafts.model_dump()) if rollout.drafts.rows else None,
        )
        return NativeEngine(model, tokenizer, own)
    check_backend(rollout)
    from ..rollout.vllm.engine import VllmEngine

    longest = config.data.max_prompt_tokens + max(rollout.max_new_tokens, config.evaluation.max_new_tokens or 0)
    options = {"dtype": config.model.dtype, "max_model_len": longest, "max_num_seqs": rollout.max_batch_rows}
    options |= {"enable_sleep_mode": True} if config.placement.layout == "colocated" else {}
    return VllmEngine(config.model.path, tokenizer, **(options | rollout.vllm_options))


def check_workers(config: TrainConfig) -> None:
    """Check that other processes can be started if the run asks for them.

    Raises:
        UserError: Ray is not installed.
    """
    asked = {"rollout.engines": config.rollout.engines, "reward.hosts": config.reward.hosts}
    for key, count in asked.items():
        if count and importlib.util.find_spec("ray") is None:
            raise UserError(
                f"{key} = {count} needs Ray, which is not installed; install rolltree[ray], or set it to 0."
            )


def make_workers(config: TrainConfig) -> Workers | None:
    """Return what starts the run's other processes, with room for them in Ray; None if it has none.

    Raises:
        UserError: Ray is not installed, cannot be started or has no room for them.
    """
    check_workers(config)
    needs: dict[Role, tuple[Mapping[str, float], int]] = {}
    if config.rollout.engines:
        needs["engine"] = config.placement.per_engine or _usual_resources(config), config.rollout.engines
    if config.trainer.ranks > 1:
        needs["rank"] = per_rank(config), config.trainer.ranks
    if config.reward.hosts:
        needs["reward"] = {"CPU": float(config.reward.workers)}, config.reward.hosts
    if not needs:
        return None
    from ..integrations.ray import RayWorkers

    return RayWorkers(needs, config.placement.cluster)


def per_rank(config: TrainConfig) -> Mapping[str, float]:
    """Return Ray's resources of a rank."""
    return config.placement.per_rank or _usual_resources(config)


def _usual_resources(config: TrainConfig) -> Mapping[str, float]:
    on_cpu = choose_device(config.model.device).type == "cpu"
    return {"CPU": 1.0} if on_cpu else {"GPU": 1.0, "CPU": 4.0}


def make_fleet(config: TrainConfig, workers: Workers, hosted: HostedRewards | None = None) -> Fleet:
    """Start the run's engines in other processes, without waiting for them.

    Args:
        hosted: answers the rollout programs that judge; None if each engine's process has a verifier for them.
    """
    check_backend(config.rollout)
    placement = config.placement
    return Fleet(
        workers,
        config.rollout.engines,
        engine_host,
        config,
        hang_s=placement.hang_s,
        restarts=placement.restarts,
        judge=None if hosted is None else partial(hosted.ask, "score"),
    )


def make_reward_hosts(config: TrainConfig, workers: Workers) -> HostedRewards:
    """Start the run's reward hosts, without waiting for them."""
    placement = config.placement
    return HostedRewards(
        config.reward, config.data.tasks, workers, hang_s=placement.hang_s, restarts=placement.restarts
    )


def make_ranks(config: TrainConfig, workers: Workers, note: Callable[[str], object]) -> Ranks:
    """Start the run's ranks in other processes, without waiting for them."""
    return Ranks(
        workers,
        config.trainer.ranks,
        training_rank,
        config,
        max_tokens=config.trainer.max_tokens,
        timeout_s=config.trainer.timeout_s,
        restarts=config.placement.restarts,
        note=note,
    )


def training_rank(config: TrainConfig, index: int, count: int, max_tokens: int) -> Rank:
    """Make rank ``index`` of ``count`` with micro-batches of ``max_tokens``; called in the rank's process."""
    host = None
    if config.placement.cluster:
        from ..integrations.ray import node_address

        host = node_address()
    trainer = config.trainer.model_copy(update={"max_tokens": max_tokens})
    return Rank(
        partial(_rank_parts, config.model_copy(update={"trainer": trainer})),
        index,
        count,
        timeout_s=trainer.timeout_s,
        threads=max(1, round(per_rank(config).get("CPU", 1))),
        host=host,
    )


def _rank_parts(config: TrainConfig, group: Group) -> LearningParts:
    set_seed(config.seed)
    context = Context(load_tokenizer(config.model.path))
    parts = learning_parts(config, load_policy(config), group, context)
    if with_state := stateful(learning_state(parts)):
        raise UserError(
            f"'{next(iter(with_state))}' has a state, which checkpoints do not hold with trainer.ranks = "
            f"{group.count}; set it to 1, or leave its state_dict out."
        )
    return parts


def engine_host(config: TrainConfig) -> Host:
    """Make an engine of a run, with its rollout program and the verifier that this may use, and the thread that steps
    it; called in the engine's process."""
    tokenizer = load_tokenizer(config.model.path)
    model = None
    if config.rollout.backend == "native":
        model = load_model(
            config.model.path, dtype=getattr(torch, config.model.dtype), device=choose_device(config.model.device)
        )
        model.requires_grad_(False).eval()
    engine = make_engine(config, model, tokenizer)
    program = rollout_program(config.rollout)
    if config.reward.hosts:
        asked = Questions()
        return Host(engine, program.with_verifier(asked), partial(decode, tokenizer), asked=asked)
    verifier = ProgramVerifier(make_rewards(config.reward, config.data.tasks), starts=True)
    return Host(engine, program.with_verifier(verifier), partial(decode, tokenizer))


def sampled_model(config: TrainConfig, model: PreTrainedModel) -> PreTrainedModel:
    """Return the model that samples: the trained one, or a copy if sampling and training overlap."""
    if config.rollout.backend != "native" or not config.loop.overlaps(on_cpu=model.device.type == "cpu"):
        return model
    copied = plain_copy(model) if has_lora(model) else copy.deepcopy(model)
    return copied.requires_grad_(False)


def group_callback(config: TrainConfig, context: Context) -> GroupCallback | None:
    """Return the function that decides about judged groups; None if the run has none.

    Raises:
        UserError: there is no such callback, file or function, or it has no such option.
    """
    loop = config.loop
    if loop.callback is None:
        return None
    options = scheduled(context, "callback", "loop.callback_options", loop.callback_options)
    found: GroupCallback = resolve(
        "loop.callback", loop.callback, options, known=GROUP_CALLBACKS, inputs=("tree",), context=context,
        offers=OF_TREES,
    )  # fmt: skip
    return found


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


def check_hints(callback: GroupCallback | None, source: PromptSource) -> None:
    """Make the prompts with hints of all known problems, so that none is too long or lacks a column after hours.

    Raises:
        UserError: one cannot be made.
    """
    if isinstance(callback, HintLadder):
        for own in source.known or source.peek(preflight.TRIED):
            for text in callback.hinted(own.problem, own.entry):
                source.prompt(Problem(own.id, own.task, text, own.entry))


def budget(config: TrainConfig) -> Budget:
    """Return the limits on the number of open groups and on their lag."""
    loop = config.loop
    return Budget(config.trainer.prompts_per_step - config.replayed, loop.staleness, loop.window, loop.over_sampling)


def sampling_params(config: RolloutConfig) -> SamplingParams:
    return SamplingParams(
        n=config.n,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_new_tokens=config.max_new_tokens,
        stop=tuple(config.stop),
    )


def greedy_params(config: TrainConfig) -> SamplingParams:
    """Return the sampling of the evaluation: the most likely token, one answer a problem."""
    longest = config.evaluation.max_new_tokens or config.rollout.max_new_tokens
    return SamplingParams(n=1, temperature=0.0, max_new_tokens=longest)


def rollout_program(config: RolloutConfig) -> RolloutProgram:
    return make_program(config.program, **config.program_options)


def make_run_rewards(
    config: TrainConfig, sampler: RolloutEngine | Fleet, tokenizer: PreTrainedTokenizerBase, context: Context
) -> Rewards:
    """Make the verifier of responses, `reward.verifier` or `reward.parts`; its processes start when it is entered as a
    context.

    Raises:
        UserError: the verifier cannot be used.
    """

    def score(prompts: list[str], continuations: list[str]) -> list[Any]:
        ids = [tokenizer(text, add_special_tokens=not config.data.chat)["input_ids"] for text in prompts]
        wanted = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in continuations]
        found = sampler.score(ids, [[some] if some else [] for some in wanted])
        return [some[0] if some else [] for some in found]

    return make_rewards(config.reward, config.data.tasks, score, context)


def check_old_logprobs(config: TrainConfig) -> None:
    """Reject top-p, top-k and min-p if the loss uses the sampler's log-probs, which must be over the full softmax.

    Raises:
        UserError: sampling excludes tokens, and the loss uses the sampler's log-probs.
    """
    rollout = config.rollout
    why = f"`trainer.updates_per_step` = {config.trainer.updates_per_step}"
    if corrects(config):
        why = f"`loop.staleness` = {config.loop.staleness} with loop.correction = '{config.loop.correction}'"
    elif config.replay is not None:
        why = "`replay`"
    elif mixes_policies(config):
        why = f"`rollout.program` = '{rollout.program}', which may return tokens of older policies,"
    elif config.loop.train_context == "plain":
        why = "`loop.train_context` = 'plain'"
    elif config.trainer.updates_per_step == 1:
        return
    if rollout.top_p < 1 or rollout.top_k or rollout.min_p:
        raise UserError(
            f"{why} uses the sampler's log-probs, which top_p, top_k and min_p change; leave these out of "
            "[rollout] or set it back."
        )


def check_ranks(config: TrainConfig) -> None:
    """Check that another process samples if several train, and that these train no adapter.

    Raises:
        UserError: none does, or they do.
    """
    if config.trainer.ranks > 1 and config.model.lora is not None:
        raise UserError(
            f"`trainer.ranks` = {config.trainer.ranks}, and one process trains the adapter of [model.lora]; set "
            "trainer.ranks to 1, or leave [model.lora] out."
        )
    if config.trainer.ranks > 1 and not config.rollout.engines:
        raise UserError(
            f"`trainer.ranks` = {config.trainer.ranks} needs engines in other processes, because no rank has the whole "
            "model to sample with; set rollout.engines to at least 1, or trainer.ranks to 1."
        )


def check_lengths(config: TrainConfig, positions: int | None) -> None:
    """Check that the longest prompt and response fit in the model's context.

    Args:
        positions: longest sequence of the model, in tokens; None if it has no limit.

    Raises:
        UserError: they do not fit.
    """
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
    given = config.demonstrations
    demonstration = None if given is None else preflight.made_up_demonstration(given.logprob_key is not None)
    preflight.check_terms([term for term, _ in loss_terms(config)], *of_credit, demonstration)


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
    for value in [*data.curriculum_options.values(), *config.loop.callback_options.values()]:
        read |= {name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)}
    return Entries(read, all_read=all_read).kept


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
