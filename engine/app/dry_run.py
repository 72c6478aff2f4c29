"""The plan of a run (``rolltree train --dry-run``)."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rolltree.kernels import Objective
from rolltree.kernels.libraries import load_library

from ..chat.ends import end_token_ids, unlisted_end
from ..errors import BadRowError
from ..methods.groups import GroupCallback
from ..model.loading import check_model_dir, choose_device, load_tokenizer, read_config
from ..parts.resolve import import_object
from ..plan.sizes import read_sizes
from ..programs import RolloutProgram
from ..prompts.curriculum import Curriculum
from ..prompts.prompts import held_out, read_rows
from ..record import directory
from ..rewards import ProgramVerifier, RewardPool, Rewards, check_references, make_rewards
from ..rewards.interface import FromProgram
from ..settings import RewardPartConfig, TrainConfig
from ..tasks import GymProblems, Problems
from ..tasks.problems import spread
from ..train.terms import TokenTerm
from .assembly import preflight
from .assembly.checks import check_lengths, check_split, check_training, kept_entries, tried_methods
from .assembly.learning import inert, spared
from .assembly.methods import Methods
from .assembly.policies import check_same_tokens, of_policy, policies_methods, resting, roles_of
from .assembly.rows import Entry, check_answers, check_rows, known_entries
from .assembly.sampling import (
    budget,
    check_backend,
    check_hints,
    group_callback,
    prompts_of,
    rightness,
    with_tools,
)
from .assembly.workers import check_workers
from .recipes import Updates, flat, read_recipe

Judged = tuple[Iterable[Entry], Iterable[Mapping[str, Any]]]
"""Problems that the verifiers read for the plan, and the rows of the other ones."""


def plan_lines(config: TrainConfig, *, check_data: bool = False) -> Iterator[str]:
    """Yield the plan of a run line by line. Everything that the configuration names is tried if that writes nothing.

    Args:
        check_data: try every row of `data.path`, not only a sample.

    Raises:
        UserError: the run itself would raise it.
    """
    tried = _Tried.of(config)
    yield "# plan"
    yield from _place_lines(config)
    problems, compared = yield from _data_lines(config, tried, check_data)
    if config.demonstrations:
        each = ", ".join(f"{table.per_step} of {table.place}" for table in config.demonstrations)
        yield f"demonstrations     {each} a step{compared}"
    yield from _judge_lines(config, tried, problems)
    yield from _sampling_lines(config)
    yield from _update_lines(config, tried.objective)
    yield from _loop_lines(config, tried.program)


@dataclass(frozen=True)
class _Tried:
    """Parts of a run that are made for the plan."""

    methods: Methods
    program: RolloutProgram
    rewards: Rewards
    callback: GroupCallback | None

    @classmethod
    def of(cls, config: TrainConfig) -> _Tried:
        methods = tried_methods(config)
        policies_methods(config)
        program = check_training(config)
        rewards: Rewards = FromProgram()
        if config.judges:
            alone = config.reward.model_copy(update={"workers": 1})
            rewards = make_rewards(alone, config.data.tasks, roles=program.roles)
        check_backend(config.rollout)
        check_workers(config)
        callback = group_callback(config.loop, methods.context)
        if config.data.curriculum is not None:
            Curriculum(config.data)
        directory.check_writable(config.run_dir)
        return cls(methods, program.with_verifier(ProgramVerifier(rewards)), rewards, callback)

    @property
    def objective(self) -> Objective:
        """The objective of the first loss term."""
        term = self.methods.terms[0][0]
        assert isinstance(term, TokenTerm)
        return term.objective


def _place_lines(config: TrainConfig) -> Iterator[str]:
    device = choose_device(config.model.device)
    if config.recipe is not None:
        yield f"recipe             {recipe_line(config)}"
    holds = directory.holds_a_run(config.run_dir)
    taken = "holds a run: it would need --resume or another name" if holds else "would be made"
    yield f"run directory      {config.run_dir} ({taken})"
    compiled = [name for name in ("cpu", "cuda") if load_library(name)]
    yield f"device             {device}; compiled backends: {', '.join(compiled) or 'none, see `rolltree doctor`'}"


def _data_lines(config: TrainConfig, tried: _Tried, check_data: bool) -> Generator[str, None, tuple[Judged, str]]:
    """Yield the lines of models; return the problems in files, and how demonstrations overlap with them."""
    path = Path(config.model.path)
    if config.model.create is not None and not path.exists():
        import_object(config.model.create)
        yield f"model              {path} does not exist yet; {config.model.create} would make it"
        return (yield from _problems_without_model(config, check_data)), ""
    if not path.exists() and str(path).count("/") == 1:
        yield f"model              {path} from the hub, fetched when the run starts"
        return (yield from _problems_without_model(config, check_data)), ""
    yield from _model_lines(config, path)
    tokenizer = load_tokenizer(path)
    if sentence := unlisted_end(tokenizer, *_configurations(path)):
        yield f"turns              {sentence}"
    for name, roles in roles_of(config).items():
        alone = of_policy(config, name)
        yield f"policy             {name} plays {', '.join(roles)}, with a learning rate of {alone.trainer.lr:g}"
        yield from _model_lines(alone, Path(alone.model.path))
        check_same_tokens(config, name, tokenizer)
    offered = with_tools(config, tried.program)
    problems = held_out(offered.data, config.evaluation.problems, tokenizer)
    source, demonstrations = prompts_of(offered, tokenizer, problems, kept_entries(config))
    check_answers(config, source)
    if source.rows is not None:
        held = f"{len(problems)} held out{_of_place(config)}"
        yield f"prompts            {source.said}; {len(source.rows)} to train on, {held}"
    overlap = "" if config.data.is_empty else f"; {demonstrations.overlap(config.data, source, problems)}"
    check_hints(tried.callback, source)
    rollout, ends = config.rollout, end_token_ids(tokenizer, *_configurations(path))
    prompts = source.peek(preflight.TRIED) if config.trainer.prompts_per_step else []
    preflight.check_prompts(tried.program, problems, source)
    preflight.check_program(tried.program, rollout.program, rollout.n, tokenizer, ends, prompts)
    notes = list[str]()
    for line in chain(check_rows(source, notes.append, every=check_data), notes):
        yield f"rows               {line.rstrip('.')}"
    return known_entries(source, problems, every=check_data), overlap


def _of_place(config: TrainConfig) -> str:
    """Return where held-out problems come from, if that is not where the others do."""
    return f" of {place}" if (place := config.data.eval_place) is not None and config.evaluation.problems else ""


def _problems_without_model(config: TrainConfig, check_data: bool) -> Generator[str, None, Judged]:
    entries, further = list[Iterator[Entry]](), list[Iterator[Entry]]()
    places = {"prompts": config.data.place, "held-out problems": config.data.eval_place}
    for what, place in places.items():
        if place is not None:
            read = read_rows(config.data, place)
            entries.append(_entries(read.rows, None if check_data else spread(len(read.rows))))
            further.append(_entries(read.rows, [] if check_data else None))
            yield f"{what:<19}{read.said}"
    if config.data.tasks:
        GymProblems(config.data.tasks, [config.seed])
    return chain(*entries), (entry for _, entry in chain(*further))


def _entries(problems: Problems, numbers: Sequence[int] | None) -> Iterator[Entry]:
    """Yield the ids and rows of some problems, or of all; rows that are none are passed over: a run tells of them."""
    for number in range(len(problems)) if numbers is None else numbers:
        with suppress(BadRowError):
            problem = problems[number]
            yield problem.id, problem.entry


def _judge_lines(config: TrainConfig, tried: _Tried, judged: Judged) -> Iterator[str]:
    with tried.rewards as pool:
        where = f", in {config.reward.workers} processes" if isinstance(pool, RewardPool) else ""
        where += f", at each of {config.reward.hosts} reward hosts" if config.reward.hosts else ""
        parts = [f"{_shown(part.weight)} x {part.name} ({_judged_by(part)})" for part in config.reward.parts]
        judges = " + ".join(parts) or config.reward.verifier
        yield f"verifier           {f'{judges}{where}' if config.judges else 'none, as nothing is judged'}"
        for note in filter(None, (pool.note, tried.program.note)):
            yield f"containment        {note}"
        entries, further = judged
        all_known = config.data.path is not None
        note = check_references(pool, config.reward, entries, config.data.tasks, all_known=all_known, further=further)
        if note:
            yield f"reference answers  {note}"


def _sampling_lines(config: TrainConfig) -> Iterator[str]:
    rollout, trainer = config.rollout, config.trainer
    sampled = trainer.prompts_per_step * rollout.n
    yield (
        f"a step             {trainer.prompts_per_step} prompts x {rollout.n} responses by '{rollout.program}', at "
        f"most {sampled * rollout.max_new_tokens} new tokens, decoded {min(sampled, rollout.max_batch_rows)} at a time"
    )
    cluster = config.placement.cluster or "this machine"
    if rollout.most_engines:
        least = "" if rollout.least_engines is None else f"{rollout.least_engines} to "
        sleeping = ", asleep during updates" if config.placement.layout == "colocated" else ""
        yield f"engines            {least}{rollout.most_engines} processes of Ray on {cluster}{sleeping}"
    if trainer.ranks > 1:
        each = f", {trainer.tensor} of them on each micro-batch" if trainer.tensor > 1 else ""
        yield f"ranks              {trainer.ranks} processes of Ray that train together{each}"
    if config.reward.hosts:
        yield f"reward hosts       {config.reward.hosts} processes of Ray on {cluster}"


def _update_lines(config: TrainConfig, main: Objective) -> Iterator[str]:
    rollout, trainer = config.rollout, config.trainer
    prompts = trainer.prompts_per_step
    packed = prompts * (rollout.n * rollout.max_new_tokens + config.data.max_prompt_tokens)
    passes = f" in {trainer.epochs} passes over the batch" if trainer.epochs > 1 else ""
    yield (
        f"update             {main.surrogate} loss, {main.aggregation}; at most "
        f"{math.ceil(packed / trainer.max_tokens)} micro-batches of {trainer.max_tokens} packed tokens, "
        f"{trainer.updates} optimiser step(s){passes}"
    )
    for sentence in inert(config):
        yield f"never acts         {sentence}"
    for sentence in resting(config):
        yield f"learning rate      {sentence}"
    for sentence in spared(config):
        yield f"old log-probs      {sentence}"


def _loop_lines(config: TrainConfig, program: RolloutProgram) -> Iterator[str]:
    loop = config.loop
    held = budget(config).capacity
    on_cpu = choose_device(config.model.device).type == "cpu"
    copies = config.rollout.backend == "native" and loop.overlaps(on_cpu=on_cpu)
    with_copy = ", with a copy of the weights" if copies else ""
    corrected = f"; correction of the lag: {loop.correction}" if config.corrects_lag else ""
    first = "" if isinstance(loop.over_sampling, float) else " in the first step"
    yield f"loop               staleness {loop.staleness}, at most {held} open groups{first}{with_copy}{corrected}"
    best = config.checkpoint.best
    keeps_best = (
        "" if best is None else f", kept where {best.removeprefix('-')} is {'lowest' if best[0] == '-' else 'highest'}"
    )
    yield f"steps              {config.trainer.steps}, a checkpoint every {config.checkpoint.every}{keeps_best}"
    every = f"before, every {config.evaluation.every} steps" if config.evaluation.every else "before"
    right_by = _right_by(config, program)
    yield f"evaluation         {config.evaluation.problems} held-out problems, {every} and after{right_by}"


def _right_by(config: TrainConfig, program: RolloutProgram) -> str:
    """Return which parts of the reward tell whether an answer is right, if the reward has parts."""
    of_files = [{}, *({"task": task} for part in config.reward.parts for task in part.tasks)]
    entries = [{"task_index": i} for i in range(len(config.data.tasks))] or of_files
    names = dict.fromkeys(filter(None, map(rightness(config, program), entries)))
    return "; eval/accuracy is by " + " and ".join(f"'{name}'" for name in names) if names else ""


def _shown(weight: Any) -> str:
    return f"{weight:g}" if isinstance(weight, int | float) else "a scheduled weight"


def _judged_by(part: RewardPartConfig) -> str:
    return f"{part.verifier} for {', '.join(part.tasks)}" if part.tasks else part.verifier


def recipe_line(config: TrainConfig) -> str:
    """Return the keys that a run has from its recipe, and those of the recipe that the file or a flag changed."""
    assert config.recipe is not None
    keys: dict[bool, list[str]] = {True: [], False: []}
    for key, value in flat(read_recipe(config.recipe).keys):
        configured: Any = config.model_dump(mode="json")
        for part in key.split("."):
            configured = (configured or {}).get(part)
        held = _holds(configured, value)
        instead = f" ({configured} instead of {value})" if isinstance(value, Updates) and not held else ""
        keys[held].append(key + instead)
    changed = f"; changed: {', '.join(sorted(keys[False]))}" if keys[False] else ""
    return f"{config.recipe}: {', '.join(sorted(keys[True]))}{changed}"


def _holds(configured: Any, of_recipe: Any) -> bool:
    """Return whether ``configured`` has all values of ``of_recipe``; it may have more keys and more tables."""
    if isinstance(of_recipe, dict):
        return isinstance(configured, dict) and all(_holds(configured.get(k), value) for k, value in of_recipe.items())
    if isinstance(of_recipe, list) and all(isinstance(table, dict) for table in of_recipe):
        tables = configured if isinstance(configured, list) else None
        return tables is not None and all(any(_holds(t, table) for t in tables) for table in of_recipe)
    return bool(configured == of_recipe)


def _model_lines(config: TrainConfig, path: Path) -> Iterator[str]:
    check_model_dir(path)
    sizes = read_sizes(path, config.model.lora)
    check_lengths(config, sizes.positions)
    check_split(config, read_config(path))
    state = sizes.training_bytes(config.model.dtype)
    kv = sizes.key_bytes(config.model.dtype) * config.rollout.kv_tokens
    yield f"model              {path}: {sizes.kind}, {sizes.parameters / 1e6:.2f} M parameters, {config.model.dtype}"
    if (lora := config.model.lora) is not None and sizes.adapter is not None:
        yield f"adapter            LoRA of rank {lora.rank}, {sizes.adapter / 1e6:.2f} M trained parameters"
    yield (
        f"memory             {_size(state)} weights, gradients and optimiser; {_size(kv)} KV cache of "
        f"{config.rollout.kv_tokens} tokens; activations come on top"
    )


def _configurations(path: Path) -> list[dict[str, Any]]:
    """Return the configurations of a model's directory that list end-of-sequence tokens, as the sampler reads them."""
    files = [path / name for name in ("generation_config.json", "config.json") if (path / name).is_file()]
    tables = [json.loads(file.read_text()) for file in files]
    return [*tables, *(table.get("text_config", {}) for table in tables)]


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
