"""The plan of a run (``rolltree train --dry-run``) and the list of its parts (``rolltree methods``)."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from rolltree.kernels.dispatch import load_library
from rolltree.kernels.policy_loss import ALIASES, PRESETS, RECONSTRUCTED

from ..errors import UserError
from ..loop import preflight
from ..loop.sources import PromptSource, held_out
from ..methods.advantages import ADVANTAGES
from ..methods.groups import GROUP_CALLBACKS
from ..methods.schedules import SCHEDULES
from ..methods.selections import PAIRINGS, SELECTIONS
from ..methods.shaping import SHAPINGS
from ..model.loading import check_model_dir, choose_device, load_tokenizer
from ..parts.calling import failure
from ..parts.resolve import NEEDED, import_object, options_of
from ..programs import PROGRAMS
from ..rewards import ProgramVerifier, RewardPool, check_references, make_rewards
from ..rollout.sampling_params import eos_token_ids
from ..settings import TrainConfig
from ..tasks import GymProblems, read_problems
from .build import (
    budget,
    check_backend,
    check_learning,
    check_lengths,
    check_old_logprobs,
    check_workers,
    group_callback,
    kept_entries,
    rollout_program,
)
from .build_learning import corrects, inert, objective

BYTES = {"float32": 4, "bfloat16": 2}


def plan_lines(config: TrainConfig) -> Iterator[str]:
    """Yield the plan of a run line by line. Everything that the configuration names is tried if that writes nothing.

    Raises:
        UserError: the run itself would raise it.
    """
    check_learning(config)
    algorithm = config.algorithm
    main = objective(config, "algorithm.objective", algorithm.objective, algorithm.objective_options, algorithm.select)
    rewards = make_rewards(config.reward.model_copy(update={"workers": 1}), config.data.tasks)
    program = rollout_program(config.rollout).with_verifier(ProgramVerifier(rewards))
    check_old_logprobs(config)
    check_backend(config.rollout)
    check_workers(config)
    group_callback(config)
    preflight.check_writable(config.run_dir)
    device = choose_device(config.model.device)
    rollout, trainer = config.rollout, config.trainer
    yield "# plan"
    found = preflight.holds_a_run(config.run_dir)
    taken = "holds a run: it would need --resume or another name" if found else "would be made"
    yield f"run directory      {config.run_dir} ({taken})"
    compiled = [name for name in ("cpu", "cuda") if load_library(name)]
    yield f"device             {device}; compiled backends: {', '.join(compiled) or 'none, see `rolltree doctor`'}"
    path = Path(config.model.path)
    known: list[tuple[str, dict[str, Any]]] = []  # (id, entry) of problems in files
    if config.model.create is not None and not path.exists():
        import_object(config.model.create)
        yield f"model              {path} does not exist yet; {config.model.create} would make it"
        for key in ("path", "eval_path"):
            if (file := getattr(config.data, key)) is not None:
                read = read_problems(file, f"data.{key}", config.data.prompt_key, config.data.answer_key)
                known += [(problem.id, problem.entry) for problem in read]
        if config.data.tasks:
            GymProblems(config.data.tasks, [config.seed])
    elif path.exists() or str(path).count("/") != 1:
        yield from _model_lines(config, path)
        tokenizer = load_tokenizer(path)
        problems = held_out(config.data, config.evaluation.problems, tokenizer)
        source = PromptSource(config.data, tokenizer, config.seed, problems, kept_entries(config))
        prompts = source.peek(preflight.TRIED)
        preflight.check_program(program, rollout.program, rollout.n, tokenizer, _ends(path, tokenizer), prompts)
        known = [(prompt.id, prompt.entry) for prompt in [*source.known, *problems]]
    else:
        yield f"model              {path} from the hub, fetched when the run starts"
    with rewards as pool:
        where = f", in {config.reward.workers} processes" if isinstance(pool, RewardPool) else ""
        yield f"verifier           {config.reward.verifier}{where}"
        for note in filter(None, (pool.note, program.note)):
            yield f"containment        {note}"
        if note := check_references(pool, config.reward, known):
            yield f"reference answers  {note}"
    sampled = trainer.prompts_per_step * rollout.n
    most = sampled * rollout.max_new_tokens
    yield (
        f"a step             {trainer.prompts_per_step} prompts x {rollout.n} responses by '{rollout.program}', at "
        f"most {most} new tokens, decoded {min(sampled, rollout.max_batch_rows)} at a time"
    )
    if rollout.engines:
        cluster = config.placement.cluster or "this machine"
        yield f"engines            {rollout.engines} processes of Ray on {cluster}"
    packed = most + trainer.prompts_per_step * config.data.max_prompt_tokens
    yield (
        f"update             {main.surrogate} loss, {main.aggregation}; at most "
        f"{math.ceil(packed / trainer.max_tokens)} micro-batches of {trainer.max_tokens} packed tokens, "
        f"{trainer.updates_per_step} optimiser step(s)"
    )
    for sentence in inert(config):
        yield f"never acts         {sentence}"
    held = budget(config).capacity
    on_cpu = choose_device(config.model.device).type == "cpu"
    copies = rollout.backend == "native" and config.loop.overlaps(on_cpu=on_cpu)
    copied = ", with a copy of the weights" if copies else ""
    corrected = f"; correction of the lag: {config.loop.correction}" if corrects(config) else ""
    yield (f"loop               staleness {config.loop.staleness}, at most {held} open groups{copied}{corrected}")
    yield f"steps              {trainer.steps}, a checkpoint every {config.checkpoint.every}"
    every = f"before, every {config.evaluation.every} steps" if config.evaluation.every else "before"
    yield f"evaluation         {config.evaluation.problems} held-out problems, {every} and after"


def _model_lines(config: TrainConfig, path: Path) -> Iterator[str]:
    check_model_dir(path)
    try:
        hf = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf)
    except Exception as error:
        raise UserError(f"The model '{path}' cannot be loaded: {failure(error)}.") from error
    parameters = sum(p.numel() for p in model.parameters())
    weight = BYTES[config.model.dtype]
    state = parameters * (weight * 2 + 8 + (0 if weight == 4 else 8))
    text = hf.get_text_config()
    check_lengths(config, getattr(text, "max_position_embeddings", None))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv = 2 * text.num_hidden_layers * heads * size * weight * config.rollout.kv_tokens
    kind = f"{type(model).__name__}, {parameters / 1e6:.2f} M parameters, {config.model.dtype}"
    yield f"model              {path}: {kind}"
    yield (
        f"memory             {_size(state)} weights, gradients and optimiser; {_size(kv)} KV cache of "
        f"{config.rollout.kv_tokens} tokens; activations come on top"
    )


def _ends(path: Path, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the end-of-sequence tokens of a model's directory, found as the sampler finds them."""
    files = [path / name for name in ("generation_config.json", "config.json") if (path / name).is_file()]
    given = [json.loads(file.read_text()) for file in files]
    return eos_token_ids(*given, *(some.get("text_config", {}) for some in given), tokenizer)


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


def method_lines() -> Iterator[str]:
    """Yield the parts that a configuration may name, each with the first line of its docstring."""
    yield "objectives (algorithm.objective)"
    for name, preset in PRESETS.items():
        if name in ALIASES:
            other, how = ALIASES[name]
            yield f"  {name:18} {other} {how}"
            continue
        needs = ", ".join(preset.needs_fields)
        with_fields = f", needs {needs}" if needs else ""
        inferred = f"; inferred: {', '.join(RECONSTRUCTED[name])}" if name in RECONSTRUCTED else ""
        yield f"  {name:18} {preset.surrogate}, {preset.ratio_level} ratio, {preset.aggregation}{with_fields}{inferred}"
    yield "advantages (algorithm.advantage)"
    for name, function in ADVANTAGES.items():
        yield _method_line(name, function, ("trees",))
    yield "shaping of rewards (reward.shaping.name)"
    for name, shaping in SHAPINGS.items():
        yield _method_line(name, shaping, ("tree",))
    yield "schedules (algorithm.weight, algorithm.terms.weight, trainer.lr_scale)"
    for name, schedule in SCHEDULES.items():
        yield _method_line(name, schedule, ("step", "metrics"))
    yield "selections (algorithm.select, algorithm.terms.select)"
    for name, selection in SELECTIONS.items():
        yield _method_line(name, selection, ("tree",))
    yield "pairs of preference losses (algorithm.terms.pairs)"
    for name, pairing in PAIRINGS.items():
        yield _method_line(name, pairing, ("tree",))
    yield "group callbacks (loop.callback)"
    for name, callback in GROUP_CALLBACKS.items():
        yield _method_line(name, callback, ("tree",))
    yield "rollout programs (rollout.program)"
    for name, program in PROGRAMS.items():
        yield _method_line(name, program, ())


def _method_line(name: str, part: Callable[..., Any], inputs: tuple[str, ...]) -> str:
    known = options_of(part, inputs).items()
    options = ", ".join(key if value is NEEDED else f"{key}={value!r}" for key, value in known)
    return f"  {name:18} {_first_line(part)}{f' [{options}]' if options else ''}"


def _first_line(thing: Callable[..., Any]) -> str:
    return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")
