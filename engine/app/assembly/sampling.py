"""Builds what samples and judges: model, engine, program, sampling parameters, rewards and callback of a run."""

from __future__ import annotations

import copy
import importlib.util
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import UserError
from ...fleet.fleet import Fleet
from ...fleet.publication import Publication, Trained
from ...loop.budget import Budget
from ...loop.callback import CallbackRule
from ...loop.sampling import SamplingParts
from ...methods.groups import GROUP_CALLBACKS, GroupCallback, HintLadder
from ...methods.schedules import Schedule, at_step, find_schedule, scheduled
from ...model import routes
from ...model.invariant.install import make_invariant
from ...model.loading import choose_device, load_model, load_tokenizer
from ...model.lora import add_lora
from ...parts.calling import call
from ...parts.context import OF_TREES, SAMPLING, Context
from ...parts.resolve import import_object, resolve
from ...programs import AgentCalls, RolloutProgram, make_program
from ...prompts.demonstrations import Demonstrations
from ...prompts.prompts import Prompt
from ...prompts.sources import PromptSource
from ...rewards import ProgramVerifier, Rewards, make_rewards
from ...rewards.parts import rightness_of, task_names
from ...rollout import DraftConfig, EngineConfig, NativeEngine, RolloutEngine, SamplingParams
from ...rollout.equal_bits import check_sampler
from ...rollout.local import LocalSampler
from ...rollout.sampler import Sampler
from ...settings import LoopConfig, LoraConfig, RolloutConfig, TrainConfig
from ...tasks import Problem
from ...train.checkpointing import checkpoint_layers
from . import preflight


def sampling_parts(
    config: TrainConfig,
    program: RolloutProgram,
    sampler: RolloutEngine | Fleet,
    tokenizer: PreTrainedTokenizerBase,
    source: PromptSource,
    rewards: Rewards,
    others: Mapping[str, RolloutEngine] = MappingProxyType({}),
    journal: Path | None = None,
) -> SamplingParts:
    """Make the parts with which `Controller` samples and judges.

    Args:
        sampler: the engine of this process, or the engines of others, which sample on their own during updates.
        others: the engines of further policies, by name.
        journal: file that tells of agents' episodes under way.

    Raises:
        UserError: a run of agents lacks a package or has no such agent.
    """
    here = isinstance(sampler, RolloutEngine)
    on_cpu = here and config.rollout.backend == "native" and choose_device(config.model.device).type == "cpu"
    program = program.with_verifier(ProgramVerifier(rewards))
    samples: Sampler = LocalSampler(sampler, program) if isinstance(sampler, RolloutEngine) else sampler
    if isinstance(program, AgentCalls):
        samples = _agents(samples, program, tokenizer, journal)
    return SamplingParts(
        sampler=samples,
        tokenizer=tokenizer,
        source=source,
        program=program,
        program_name=config.rollout.program,
        params=sampling_params(config.rollout),
        seed=config.seed,
        on_failure=config.reward.on_failure,
        overlaps=config.loop.overlaps(on_cpu=on_cpu),
        on_cpu=on_cpu,
        colocated=config.placement.layout == "colocated",
        counted=isinstance(samples, LocalSampler) and not rewards.in_turn,
        others={name: LocalSampler(engine, "flat") for name, engine in others.items()},
    )


def _agents(inner: Sampler, program: AgentCalls, tokenizer: PreTrainedTokenizerBase, journal: Path | None) -> Sampler:
    """Return the sampler of episodes, whose calls ``inner`` samples.

    Raises:
        UserError: the server's packages are not installed, or there is no such agent.
    """
    if missing := next((name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None), None):
        raise UserError(f'rollout.program = "agent" needs {missing}, which is not installed; install rolltree[serve].')
    from ...agents.sampler import AgentSampler

    try:
        return AgentSampler(inner, program, tokenizer, journal)
    except ValueError as error:
        raise UserError(f'rollout.program = "agent": {error}') from error


def publication(
    config: TrainConfig, parts: SamplingParts, trained: Trained, note: Callable[[str], object], *, own_weights: bool
) -> Publication:
    """Make what sends the policy to the sampler of ``parts``.

    Args:
        trained: the policy that is trained.
        own_weights: the sampler has a copy of the weights, which is compared with ``trained``.
    """
    return Publication(
        parts.sampler,
        note,
        trained=trained if own_weights and config.trainer.self_check else None,
        others=parts.others,
        keep_keys=config.loop.keep_keys,
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
    of_model = config.model
    model: PreTrainedModel = load_model(
        of_model.path,
        dtype=getattr(torch, of_model.dtype),
        device=choose_device(of_model.device),
        train_tower=of_model.train_tower,
    )
    if of_model.lora is not None:
        add_lora(model, **of_model.lora.model_dump(exclude={"extrapolate"}))
    if of_model.replay_routes:
        routes.install(model)
    if of_model.gradient_checkpointing:
        by_memory = of_model.gradient_checkpointing == "auto"
        checkpoint_layers(model, config.trainer.max_tokens if by_memory else None)
    return make_invariant(model) if of_model.batch_invariant else model


def check_backend(config: RolloutConfig) -> None:
    """Check that `rollout.backend` can be used.

    Raises:
        UserError: the configuration asks for vLLM, which is not installed.
    """
    is_ours = not config.python or Path(config.python).absolute() == Path(sys.executable)
    if config.backend == "vllm" and is_ours and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "rollout.backend is 'vllm', which is not installed; install rolltree[vllm], or set it to 'native'."
        )


def make_engine(
    config: TrainConfig, model: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase
) -> RolloutEngine:
    """Make a rollout engine of the run; vLLM loads the model itself.

    Raises:
        UserError: vLLM is asked for but not installed, or `model.batch_invariant` does not hold.
    """
    rollout = config.rollout
    if rollout.backend == "native":
        assert model is not None
        engine = EngineConfig(
            kv_tokens=rollout.kv_tokens,
            max_batch_rows=rollout.max_batch_rows,
            kept_states=rollout.kept_states,
            record_routes=config.model.replay_routes,
            keep_pages=rollout.keep_pages,
            window=rollout.window,
            compile=rollout.compile,
            drafts=DraftConfig(**rollout.drafts.model_dump()) if rollout.drafts.rows else None,
        )
        if config.model.batch_invariant:
            check_sampler(model)
        return NativeEngine(model, tokenizer, engine)
    check_backend(rollout)
    from ...rollout.vllm.engine import VllmEngine

    longest = config.longest_sequence
    options = {"dtype": config.model.dtype, "max_model_len": longest, "max_num_seqs": rollout.max_batch_rows}
    options |= {"enable_sleep_mode": True} if config.placement.layout == "colocated" else {}
    if config.model.lora is not None and adapter_alone(config):
        options |= {"adapter": vllm_adapter(config.model.lora)}
    return VllmEngine(config.model.path, tokenizer, **(options | rollout.vllm_options))


def adapter_alone(config: TrainConfig) -> bool:
    """Return whether a sampler with weights of its own computes with the policy's LoRA adapter, not with merged
    weights: vLLM does unless the adapter has a part in the head, or `rollout.vllm_options` disables it."""
    lora, rollout = config.model.lora, config.rollout
    if lora is None or rollout.backend == "native":
        return lora is not None
    return "lm_head" not in lora.targets and bool(rollout.vllm_options.get("enable_lora", True))


def vllm_adapter(lora: LoraConfig) -> Any:
    """Return the adapter as vLLM takes it."""
    from ...rollout.vllm.adapter import Adapter

    return Adapter(lora.rank, lora.alpha / (lora.rank**0.5 if lora.rslora else lora.rank))


def sampled_model(config: TrainConfig, model: PreTrainedModel) -> PreTrainedModel:
    """Return the model that samples: the trained one, or a copy if sampling and training overlap."""
    if config.rollout.backend != "native" or not config.loop.overlaps(on_cpu=model.device.type == "cpu"):
        return model
    return copy.deepcopy(model).requires_grad_(False)


def callback_rule(loop: LoopConfig, context: Context) -> CallbackRule | None:
    """Return the group callback with what its answers may do; None without one. Raises as `group_callback`."""
    function = group_callback(loop, context)
    if function is None or loop.callback is None:
        return None
    return CallbackRule(function, loop.callback, loop.train_context == "plain", loop.max_dropped_batches)


def group_callback(loop: LoopConfig, context: Context) -> GroupCallback | None:
    """Return the function that decides about judged groups; None if the run has none.

    Raises:
        UserError: there is no such callback, file or function, or it has no such option.
    """
    if loop.callback is None:
        return None
    options = scheduled(context, "callback", "loop.callback_options", loop.callback_options)
    callback: GroupCallback = resolve(
        "loop.callback", loop.callback, options, parts=GROUP_CALLBACKS, inputs=("tree",), context=context,
        offers=(*OF_TREES, *SAMPLING),
    )  # fmt: skip
    return callback


def check_hints(callback: GroupCallback | None, source: PromptSource) -> None:
    """Make the prompts with hints of the rows that are tried and of those that are drawn, or of the first generated
    problems, so that none is too long or lacks a column when it is given.

    Raises:
        UserError: one cannot be made.
    """
    if not isinstance(callback, HintLadder):
        return

    def check(prompt: Prompt) -> None:
        for text in callback.hinted(prompt.problem, prompt.entry):
            source.prompt(Problem(prompt.id, prompt.task, text, prompt.entry))

    if source.rows is not None:
        source.rows.check_each(check)
        return
    for prompt in source.peek(preflight.TRIED):
        check(prompt)


def prompts_of(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Prompt],
    entries: Callable[[Mapping[str, Any], str], dict[str, Any]] | None,
    context: Context | None = None,
) -> tuple[PromptSource, Demonstrations]:
    """Return the stream of training prompts, and the run's demonstrations, with which it is compared.

    Args:
        problems: those held out.
        entries, context: as for `PromptSource`.

    Raises:
        UserError: as for `PromptSource` and `Demonstrations`.
    """
    demonstrations = Demonstrations(config.demonstrations, config.data, tokenizer, config.seed)
    source = PromptSource(config.data, tokenizer, config.seed, problems, entries, context, demonstrations.prompts)
    return source, demonstrations


def with_tools(config: TrainConfig, program: RolloutProgram) -> TrainConfig:
    """Return the configuration with the tools that the program itself offers among those of `data.tools`."""
    data = config.data.model_copy(update={"tools": (*config.data.tools, *program.tools)})
    return config.model_copy(update={"data": data})


def budget(config: TrainConfig) -> Budget:
    """Return the limits on the number of open groups and on their lag in the first step."""
    loop, batch = config.loop, config.trainer.prompts_per_step - config.replayed
    return Budget(batch, loop.staleness, loop.window, at_step(over_sampling(loop), 1))


def over_sampling(loop: LoopConfig) -> Schedule:
    return find_schedule("loop.over_sampling", loop.over_sampling, loop.over_sampling_options)


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
    """Return the sampling of the evaluation: the most likely token, one answer a problem; texts that end a response do
    so here too."""
    longest = config.evaluation.max_new_tokens or config.rollout.max_new_tokens
    return SamplingParams(n=1, temperature=0.0, max_new_tokens=longest, stop=tuple(config.rollout.stop))


def rollout_program(config: RolloutConfig) -> RolloutProgram:
    return make_program(config.program, **config.program_options)


def rightness(config: TrainConfig, program: RolloutProgram) -> Callable[[Mapping[str, Any]], str | None]:
    """Return a function of a problem's entry that returns the part of the reward which tells whether an answer is
    right; None: the reward does."""
    return rightness_of(config.reward.parts, task_names(config.data.tasks), program.roles)


def make_run_rewards(
    config: TrainConfig,
    program: RolloutProgram,
    sampler: RolloutEngine | Fleet,
    tokenizer: PreTrainedTokenizerBase,
    context: Context,
) -> Rewards:
    """Make the verifier of responses, `reward.verifier` or `reward.parts`; its processes start when it is entered as a
    context.

    Raises:
        UserError: the verifier cannot be used.
    """

    def score(prompts: list[str], continuations: list[str]) -> list[Any]:
        ids = [tokenizer(text, add_special_tokens=not config.data.chat)["input_ids"] for text in prompts]
        answers = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in continuations]
        logprobs = sampler.score(ids, [[answer] if answer else [] for answer in answers])
        return [of_prompt[0] if of_prompt else [] for of_prompt in logprobs]

    return make_rewards(config.reward, config.data.tasks, score, context, program.roles)
