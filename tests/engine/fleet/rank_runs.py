"""Learners on forked gloo ranks: updates of a tiny model on given trees, for comparison with those of one process."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import peft
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from rolltree.engine import load_config
from rolltree.engine.app.assembly.learning import learning_parts
from rolltree.engine.app.assembly.methods import Methods
from rolltree.engine.app.assembly.sampling import make_engine, prepare_model, rollout_program, sampling_params
from rolltree.engine.batches import distribute as distributing
from rolltree.engine.data.segment import LeafStatus, Origin, Segment
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.learn import micro_batches
from rolltree.engine.learn.learner import Learner
from rolltree.engine.model import sharding
from rolltree.engine.prompts.sources import PromptSource
from rolltree.engine.record.metrics import Stopwatch, Sums
from rolltree.engine.train import checkpoint
from rolltree.engine.train import gradients as gradients_module
from rolltree.engine.train.group import ALONE, Group

from ...kernels.on_device import known_order
from ...support.ranks import run_ranks

BOUND = 2e-5
ABSOLUTE = ("loss", "kl", "chosen", "rejected", "margins")
"""Metrics whose names have one of these as their end or in it are compared absolutely, as their sums cancel: rewards of
pairs are differences of log-probs, 1e-3 and less with rounding errors of 4e-8."""


@dataclass(frozen=True)
class Case:
    """A configuration of the tiny run, and the groups of each step."""

    options: tuple[str, ...]
    groups: int = 5
    tied: bool = True
    lora: bool = False
    given: int = 0
    """Demonstrations of each step."""
    micro_batches_of: int = 0
    """One process takes the micro-batches of so many ranks, for a loss that depends on them; 0: its own."""


OWN = "a loss of the user's, of statistics of the head"
ADAPTER = "an adapter of the run, a reference without it"
FOLLOWED = "an adapter and a reference that follows it"
CASES = {
    "tokens, two updates": Case(("--trainer.updates_per_step=2", "--trainer.max_tokens=96"), groups=7),
    "sequences, a reference that moves, untied": Case(
        (
            "--algorithm.objective=gspo",
            "--algorithm.objective_options={kl_coef=0.1,entropy_coef=0.01}",
            "--roles.reference={ema=0.9}",
        ),
        tied=False,
    ),
    "critic, fewer trees than ranks": Case(
        ("--algorithm.objective=ppo", "--algorithm.advantage=gae", "--roles.critic={lr=1e-3}"), groups=1
    ),
    "adapters, of the head too": Case(("--algorithm.drop_zero_variance=false",), lora=True, tied=False),
    ADAPTER: Case(
        (
            "--model.lora={rank=4,alpha=8.0}",
            "--trainer.reshard=false",
            "--roles.reference={}",
            "--algorithm.objective_options={kl_coef=0.1}",
            "--trainer.updates_per_step=2",
        ),
        groups=7,
    ),
    FOLLOWED: Case(
        ("--model.lora={rank=4}", "--roles.reference={ema=0.9}", "--algorithm.objective_options={kl_coef=0.1}")
    ),
    OWN: Case(
        (
            "--trainer.max_tokens=96",
            '--algorithm.terms=[{name="own",loss="mine.py:Own",select="mine.py:some",weight=0.5}]',
        ),
        groups=7,
    ),
    "a mean of batches, chosen tokens": Case(
        (
            "--algorithm.objective=bnpo",
            "--trainer.max_tokens=96",
            '--algorithm.terms=[{name="chosen",objective="dapo",select="mine.py:some",weight=0.5}]',
        ),
        micro_batches_of=2,
    ),
    "a moving teacher's distributions, fewer trees than ranks": Case(
        (
            '--algorithm.terms=[{name="distill",divergence="jsd"}]',
            "--roles.teacher={ema=0.5}",
            "--trainer.updates_per_step=2",
        ),
        groups=3,
    ),
    "distributions of a teacher of its own": Case(
        (
            "--algorithm.weight=0",
            '--algorithm.terms=[{name="distill",divergence="forward_kl"},{name="policy",objective="dapo",weight=0.5}]',
            "--roles.teacher={path='FOLDER/model'}",
            "--trainer.max_tokens=96",
        ),
        tied=False,
    ),
    "pairs, recomputed log-probs": Case(
        (
            '--algorithm.terms=[{name="dpo",pairs="every_unequal",weight=0.5},{name="calm",objective="sft",select="calm"}]',
            "--roles.reference={reset_every=2}",
            "--algorithm.old_logprob=recompute",
            "--demonstrations={path='theirs.jsonl'}",
            "--trainer.epochs=2",
        ),
        given=3,
    ),
}
SMALL = ("--model.batch_invariant=true", "--trainer.max_tokens=96", "--trainer.max_grad_norm=0.01")
EXACT = {
    "equal bits, two updates": Case((*SMALL, "--trainer.updates_per_step=2"), groups=7),
    "equal bits, bf16": Case((*SMALL, "--model.dtype=bfloat16", "--algorithm.drop_zero_variance=false"), groups=7),
    "equal bits, untied, a critic": Case(
        (*SMALL, "--algorithm.objective=ppo", "--algorithm.advantage=gae", "--roles.critic={lr=1e-3}"), tied=False
    ),
    "equal bits, an adapter": Case((*SMALL, "--model.lora={rank=4,alpha=8.0}"), groups=7),
}
"""Cases in which two ranks learn the bits of one process; gradients are clipped by their norm."""
if known_order:
    CASES |= EXACT
FIXED = ("--algorithm.advantage=group_norm", "--trainer.max_grad_norm=1e9")
USER = """
import numpy as np

def some(tree):
    return (np.arange(tree.num_tokens) % 3 != 0).astype(np.float32)

class Own:

    def loss(self, logprob, fields, entropy, sum_p2, mean_logprob):
        gap = mean_logprob - logprob
        total = (fields.weight * (gap.square() - entropy + 0.3 * sum_p2)).sum()
        return total, {"gap": (gap.sum(), fields.weight.sum())}
"""


@dataclass
class Result:
    """Metrics of each step; weights, and gradients of the last update, by name."""

    rows: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def sampled(toml: Path, steps: int, groups: int) -> list[list[Any]]:
    """Return groups of each step, sampled by the initial model, with random rewards."""
    config = load_config(toml)
    model, tokenizer = prepare_model(config)
    engine, source = make_engine(config, model, tokenizer), PromptSource(config.data, tokenizer, config.seed, [])
    random, out = np.random.default_rng(0), []
    for step in range(steps):
        trees = engine.generate(
            [prompt.token_ids for prompt in source.next(groups)],
            sampling_params(config.rollout),
            rollout_program(config.rollout),
            seeds=list(range(100 * step, 100 * step + groups)),
        )
        for number, tree in enumerate(trees):
            tree.rewards["reward"] = random.integers(0, 2, tree.num_leaves).astype(np.float32)
            tree.rewards["reward"][:2] = 0, 1  # every group has a gradient
            tree.set("group", step * groups + number)
        out.append(trees)
    return out


def demonstration(step: int, number: int) -> TokenTree:
    ids = np.random.default_rng([step, number]).integers(3, 20, 12).tolist()
    segments = [Segment.prompt(ids[:4]), Segment.make(ids[4:], origin=Origin.INJECTED)]
    return TokenTree.from_nodes([-1, 0], segments, [1], [LeafStatus.STOP])


def make(toml: Path, case: Case, group: Group, *options: str) -> Learner:
    folder = str(toml.parent)
    given = [option.replace("mine.py", f"{folder}/mine.py").replace("FOLDER", folder) for option in case.options]
    config = load_config(toml, [*FIXED, *given, *options])
    model, tokenizer = prepare_model(config)
    methods = Methods.make(config)
    methods.context.tokenizer = tokenizer
    torch.manual_seed(3)
    if not case.tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.01)
    if case.lora:
        adapted = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = peft.get_peft_model(model, adapted)
    return Learner(learning_parts(methods, model, group), Stopwatch(), lambda sentence: None)


def learn(learner: Learner, trees: Sequence[list[Any]], case: Case, first: int = 0) -> Result:
    """Make the updates of the steps after ``first``."""
    rows, gradients = [], {}
    trainer = learner.trainer
    applied = trainer._apply

    def spy() -> None:
        for (name, _), master in zip(trainer._named, trainer._masters, strict=True):
            if master.grad is not None:
                gradients[name] = full(master.grad)
        applied()

    with mock.patch.object(trainer, "_apply", spy):
        for step, of_step in list(enumerate(trees, start=1))[first:]:
            sums = Sums()
            given = [demonstration(step, number) for number in range(case.given)]
            learner.update(copy.deepcopy(of_step[: case.groups]), given, step, sums)
            rows.append(sums.means())
    named = zip(trainer._named, trainer._masters, strict=True)
    return Result(rows, {name: full(master) for (name, _), master in named}, gradients)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def alone(toml: Path, trees: Sequence[list[Any]], case: Case, *options: str) -> Result:
    """Learn in this process."""
    learner = make(toml, case, ALONE, *options)
    if not case.micro_batches_of:
        return learn(learner, trees, case)

    def as_ranks(trees: list[Any], *, max_tokens: int, **_: Any) -> list[Any]:
        shares = distributing.distribute(trees, case.micro_batches_of, learner.batches.cost, max_tokens=max_tokens)
        return [batch for batches in shares for batch in batches if batch.trees]

    with mock.patch.object(micro_batches, "pack", as_ranks):
        return learn(learner, trees, case)


def on_ranks(work: Callable[..., Any], directory: Path, count: int, *arguments: Any) -> list[Any]:
    """Return ``work(group, *arguments)`` of every rank."""
    store = directory / f"store-{len(list(directory.glob('store-*')))}"
    run_ranks(_joined, (work, str(store), count, arguments), count)
    return [pickle.loads(Path(f"{store}.{rank}").read_bytes()) for rank in range(count)]


def _joined(rank: int, work: Callable[..., Any], store: str, count: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    found = work(Group.joined(), *arguments)
    Path(f"{store}.{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def of_cases(
    group: Group, toml: Path, trees: Sequence[list[Any]], names: Sequence[str], cases: Mapping[str, Case] = CASES
) -> dict[str, Result]:
    return {name: learn(make(toml, cases[name], group), trees, cases[name]) for name in names}


RESUMED = ("sequences, a reference that moves, untied", "critic, fewer trees than ranks", FOLLOWED)
"""Cases with weights of roles, or of a critic, in the checkpoint."""


RESUMED_CASES = {name: CASES[name] for name in RESUMED}


def saving(
    group: Group, toml: Path, trees: Sequence[list[Any]], directory: Path, cases: Mapping[str, Case] = RESUMED_CASES
) -> dict[str, Result]:
    """Learn two steps, save a checkpoint as a run does, and learn the rest."""
    found = {}
    for name, case in cases.items():
        learner, where = make(toml, case, group), directory / name
        learn(learner, trees[:2], case)
        if group.rank == 0:
            checkpoint.save(
                where,
                2,
                learner=lambda path, learner=learner: learner.save(group.gather(path)[0]),
                tensors={},
                state={},
                trained={},
                keep=1,
            )
        else:
            learner.save(group.gather(None)[0])
        found[name] = learn(learner, trees, case, 2)
    return found


def resuming(
    group: Group, toml: Path, trees: Sequence[list[Any]], directory: Path, cases: Mapping[str, Case] = RESUMED_CASES
) -> dict[str, Result]:
    """Learn the steps after those in the checkpoints of `saving`."""
    found = {}
    for name, case in cases.items():
        learner, saved = make(toml, case, group), checkpoint.load(directory / name / "step_000002")
        learner.load(saved.learner, saved.state["learner"])
        found[name] = learn(learner, trees, case, 2)
    return found


def differences(one: Result, other: Result) -> dict[str, float]:
    """Return by name what differs by more than it may: relative differences of weights and gradients by their norm."""
    bad = {}
    for kind in ("weights", "gradients"):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            error = float((theirs[name] - tensor).norm() / tensor.norm().clamp(min=1e-12))
            if not error <= BOUND:
                bad[f"{kind} {name}"] = error
    for a, b in zip(one.rows, other.rows, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            scale = 1.0 if name.endswith(ABSOLUTE) or "kl" in name else max(abs(value), 1e-3)
            error = 0.0 if math.isnan(value) and math.isnan(b[name]) else abs(b[name] - value) / scale
            if not error <= BOUND and not name.startswith("perf/"):
                bad[name] = max(error, bad.get(name, 0.0))
    return bad


# -- wrong code --------------------------------------------------------------------------------------------------------


def _averaged(gradient: torch.Tensor, weight: DTensor) -> torch.Tensor:
    mean = DTensor.from_local(gradient, weight.device_mesh, [Partial("avg")])
    return mean.redistribute(placements=weight.placements)


def _sharded_with_means(model: Any, **options: Any) -> None:
    sharding.shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)


def _same_share(costs: list[float], ranks: int) -> list[list[int]]:
    return [_assigned(costs, ranks)[0]] * ranks


def _of_own(batch: Any) -> Any:
    """A filler whose selection is not emptied."""
    return replace(_silent(batch), columns=batch.columns)


_silent, _assigned = distributing._silent, distributing.assigned
HEAD = (gradients_module, "added", _averaged)
MUTANTS: dict[str, tuple[str, list[tuple[Any, str, Any]]]] = {
    "gradients averaged": (
        "tokens, two updates",
        [("rolltree.engine.app.assembly.learning", "shard", _sharded_with_means), HEAD],
    ),
    "gradients of an adapter averaged": (
        ADAPTER,
        [("rolltree.engine.app.assembly.learning", "shard", _sharded_with_means)],
    ),
    "the head's gradient averaged": ("sequences, a reference that moves, untied", [HEAD]),
    "one share for all": ("tokens, two updates", [(distributing, "assigned", _same_share)]),
    "metrics not summed": ("tokens, two updates", [(Group, "added", lambda group, sums: dict(sums))]),
    "fillers count": ("critic, fewer trees than ranks", [(distributing, "_silent", lambda batch: batch)]),
    "fillers keep their selection": ("a mean of batches, chosen tokens", [(distributing, "_silent", _of_own)]),
    "scores not exchanged": (
        "sequences, a reference that moves, untied",
        [(Group, "gather", lambda group, value: [value] * group.count)],
    ),
}
"""Wrong code by its name: a case that it must fail, and what it replaces."""
LATE = ("metrics not summed", "scores not exchanged")
"""Wrong code that shows up in the second step: in the first all ratios are 1, and the reference is the policy."""


def of_mutants(group: Group, toml: Path, trees: Sequence[list[Any]], names: Sequence[str]) -> dict[str, Result]:
    found = {}
    for name in names:
        case, replaced = MUTANTS[name]
        with contextlib.ExitStack() as stack:
            for owner, attribute, wrong in replaced:
                target = f"{owner}.{attribute}" if isinstance(owner, str) else None
                patch = mock.patch(target, wrong) if target else mock.patch.object(owner, attribute, wrong)
                stack.enter_context(patch)
            steps = 2 if name in LATE else 1
            found[name] = learn(make(toml, CASES[case], group), trees[:steps], CASES[case])
    return found
