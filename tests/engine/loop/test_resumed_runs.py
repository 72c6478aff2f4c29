"""Runs of many kinds go on from a checkpoint as if they had never stopped: metrics, rollouts, state and weights alike.

Each row of `CASES` is a configuration whose state is of a kind of its own, and what of it must be in the checkpoint.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from rolltree.engine import Orchestrator

from ...support import moe_models, picture_run, recurrent_models
from ...support.resumed import stop_and_resume
from ...support.tiny import GIVEN, NO_METHOD, as_toml, write_job
from ..agents.test_run import Episodic
from .test_policies_run import write_two

MINE = """
import random
from rolltree.engine.methods.groups import Drop

def odd(text, entry):
    return float(sum(map(ord, text)) % 2)

def seldom(text, entry):
    return float(sum(map(ord, text)) % 6 == 0)

def by_level(text, entry):
    return {"easy": 1.0, "hard": 0.0}.get(entry["level"], odd(text, entry))

def half(text, entry):  # half of the problems have equal rewards
    return odd(text, entry) if sum(map(ord, entry["question"])) % 2 else 0.0

def asks(tree, policy):
    "Drops a group if the policy says so, whose answer follows from a seed of its own."
    ((said,),) = policy.generate([tree.meta["prompt_text"]], max_new_tokens=4)
    return Drop("said") if sum(map(ord, said)) % 3 == 0 else None

class Counting:
    "Prompts that count on, of which the sum of all rewards is a part, with groups of two to four responses."
    def __init__(self, first):
        self.seen, self.right = first, 0.0
    def next(self, count):
        self.seen += count
        made = range(self.seen - count, self.seen)
        return [{"prompt": f"{k} + {int(self.right)} =", "answer": "1", "n": 2 + k % 3} for k in made]
    def observe(self, trees):
        self.right += sum(float(tree.rewards["reward"].sum()) for tree in trees)
    def state_dict(self):
        return {"seen": self.seen, "right": self.right}
    def load_state_dict(self, state):
        self.seen, self.right = state["seen"], state["right"]

class Growing:
    "Credit that grows with the number of times it was asked."
    def __init__(self):
        self.calls = 0
    def __call__(self, trees):
        self.calls += 1
        return [(tree.rewards["reward"] - tree.rewards["reward"].mean()) * self.calls for tree in trees]
    def state_dict(self):
        return {"calls": self.calls}
    def load_state_dict(self, state):
        self.calls = state["calls"]

class Least:
    "Problems that were taken least, each with as many responses as it has digits more than one."
    def __init__(self):
        self.seen = []
    def order(self, store):
        return sorted(store.problems, key=lambda name: (store.problems[name].taken, -len(self.seen), name))
    def wanted(self, problem):
        return 2 + len(problem.id) % 2
    def observe(self, group):
        self.seen.append(group.problem.id)
"""
FLAT = ("--rollout.program=flat", "--rollout.program_options={}", "--algorithm.advantage=group_norm")
FAST = ("--trainer.lr=0.05", "--trainer.max_tokens=4096")
LATE = ("--loop.staleness=1", "--loop.overlap=false")
LORA = "--model.lora={rank=4, alpha=8.0%s}"
LEVELS = ("easy", "hard", "mixed")
ROWS = [
    {
        "prompt": f"{a} + 3 =", "answer": str(a + 3), "level": LEVELS[a % 3],
        "h1": f"add {a}", "h2": "" if a % 5 == 0 else f"{a} + 3", "h3": f"it is {a + 3}",
    }
    for a in range(24)
]  # fmt: skip
BAD_ROWS = [{"prompt": "1 + " * 60 if a == 11 else f"{a} + 2 =", "answer": str(a)} for a in range(40)]
OF_FILE: dict[str, Any] = {"tasks": None, "path": "FOLDER/rows.jsonl"}


def dated(folder: Path) -> Path:
    """Write a run over columns of types that JSON does not have."""
    columns: dict[str, Any] = {
        "prompt": ["a", "b", "c"], "answer": ["1", "2", "3"], "added": [datetime.date(2026, 1, 1)] * 3,
        "price": [Decimal("1.5")] * 3, "image": [b"\x00"] * 3, "took": [datetime.timedelta(seconds=1)] * 3,
        "made": pa.array([1, 2, 3], pa.timestamp("ns", tz="Europe/Berlin")),
        "at": pa.array([datetime.datetime(2026, 1, 1)] * 3, pa.timestamp("us", tz="UTC")),
    }  # fmt: skip
    toml = write_job(folder, data={"tasks": None, "path": "FOLDER/dated.parquet"})
    pq.write_table(pa.table(columns), folder / "dated.parquet")
    return toml


def of_family(make: Callable[..., Any], family: str) -> Callable[[Path], Path]:
    """Return a function that writes a run with a model of another family."""

    def write(folder: Path) -> Path:
        toml = write_job(folder)
        words = AutoTokenizer.from_pretrained(folder / "model")
        ids = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
        make(family, vocab_size=len(words), **ids).save_pretrained(folder / "model")
        return toml

    return write


def shards(folder: Path) -> Path:
    """Write a run over three files of a folder."""
    toml = write_job(folder, data={"tasks": None, "path": "FOLDER/set/*.jsonl"})
    (folder / "set").mkdir()
    for n in range(3):
        rows = [f'{{"prompt": "{10 * n + a} + 1 =", "answer": "1"}}\n' for a in range(3)]
        (folder / "set" / f"{n}.jsonl").write_text("".join(rows))
    return toml


def job(files: Mapping[str, Any] | None = None, **tables: Any) -> Callable[[Path], Path]:
    """Return a function that writes a run with ``mine.py``."""
    return lambda folder: write_job(folder, {"mine.py": MINE, **(files or {})}, **tables)


def open_groups(state: dict[str, Any]) -> bool:
    return len(state["groups"]) > 0


def part(name: str) -> Callable[[dict[str, Any]], bool]:
    """Return a function that tells whether a part of this name has a state."""
    return lambda state: any(name in key and value for key, value in state["parts"].items())


def episodes(run: Orchestrator) -> None:
    run.controller.sampler = Episodic(run.controller.sampler)  # type: ignore[assignment]


def late_group(run: Orchestrator) -> None:
    """Leave a group of a step after the checkpoint, as a run that was killed while it wrote it."""
    if (replay := run.options.directory / "replay").exists():
        (replay / "000000099.safetensors").write_bytes(b"cut off")


@dataclass(frozen=True)
class Case:
    """A run: what writes it, its flags, and what its checkpoint must hold; stopped after a step of all ``steps``."""

    flags: tuple[str, ...]
    write: Callable[[Path], Path] = field(default_factory=job)
    shows: Callable[[dict[str, Any]], object] = lambda state: True
    after: int = 1
    steps: int = 3
    wrap: Callable[[Orchestrator], object] = lambda run: None


CASES: dict[str, Case] = {
    "open groups": Case(LATE, shows=open_groups),
    "lora, a reference that follows": Case(
        (LORA % "", *FAST, "--roles.reference={ema=0.5}", "--algorithm.objective_options={kl_coef=0.1}")
    ),
    "replay": Case(
        (
            *FLAT, *FAST, "--algorithm.objective=ppo", "--trainer.prompts_per_step=4", "--replay.share=0.5",
            "--replay.weight=0.5", "--replay.groups=3", "--reward.shaping=[{name='overlong'}]",
        ),
        job(reward={"verifier": "mine.py:odd"}), part("replay"), after=2, steps=4, wrap=late_group,
    ),
    "over-sampling": Case(
        (
            "--loop.callback=dynamic_sampling", "--trainer.prompts_per_step=4", "--loop.over_sampling=valid_share",
            "--loop.over_sampling_options={target=1.2,decay=0.75,most=2.4}",
        ),
        job(reward={"verifier": "mine.py:half"}), after=2, steps=4,
    ),
    "two prompts": Case(
        ("--recipe=scaf_grpo", "--trainer.prompts_per_step=6", "--rollout.n=3", "--loop.callback_options={columns="
         "['h1','h2','h3'],patience=1}"),
        job({"rows.jsonl": ROWS[:8]}, data=OF_FILE, reward={"verifier": "mine.py:seldom"}, **NO_METHOD),
        part("loop.callback"), after=2, steps=4,
    ),
    "two policies": Case((), write_two, after=1),
    "critic": Case((*FLAT[:2], *FAST, "--roles.critic={}", "--algorithm.advantage=gae")),
    "bit for bit in batches": Case(("--model.batch_invariant=true", "--trainer.updates_per_step=2", *FAST)),
    "policy asked": Case(
        (*FLAT, "--trainer.prompts_per_step=3"),
        job(loop={"callback": "mine.py:asks"}),
    ),
    "own parts": Case(
        ("--trainer.lr_scale=cosine", "--trainer.lr_scale_options={end=4}"),
        job(
            data={"tasks": None, "source": "mine.py:Counting", "source_options": {"first": 3}, "n_key": "n"},
            rollout=NO_METHOD["rollout"], algorithm={"objective": "ppo", "advantage": "mine.py:Growing"},
        ),
        part("algorithm.advantage"),
    ),
    "curriculum": Case(
        (
            "--data.curriculum=ucb", "--trainer.max_tokens=4096", *FLAT,
            f"--data.curriculum_options={as_toml({'by': 'level', 'window': 2, 'c': 0.3, 'temperature': 0.2})}",
        ),
        job({"rows.jsonl": ROWS}, data=OF_FILE, reward={"verifier": "mine.py:by_level"}), after=2, steps=4,
    ),
    "own curriculum": Case(
        (*FLAT, "--trainer.prompts_per_step=2"),
        job({"rows.jsonl": ROWS}, data={**OF_FILE, "curriculum": "mine.py:Least"}, reward={"verifier": "mine.py:odd"}),
    ),
    "all parts that remember": Case(
        (
            "--recipe=gvm", "--algorithm.objective=ppo", "--algorithm.advantage=cumulative", *FAST,
            "--data.curriculum_options={n=4,pilot=2,alpha=0.5,most=6}",
            "--reward.shaping=[{name='exploration',options={pattern='(\\S)'}}]", "--replay.share=0.25",
            "--replay.keep=unequal", "--replay.prefer=1.0", "--loop.callback=hint_ladder",
            "--loop.callback_options={columns=['answer'],patience=1}", "--loop.train_context=plain",
            "--trainer.prompts_per_step=8", "--algorithm.select=sampled",
        ),
        job({"rows.jsonl": ROWS[:12]}, data=OF_FILE, reward={"verifier": "mine.py:odd"}, **NO_METHOD),
        part("reward.shaping"), after=3, steps=5,
    ),
    "demonstrations": Case(
        (
            *FLAT, "--trainer.prompts_per_step=0", "--data.tasks=[]",
            '--algorithm.terms=[{name="sft",objective="sft",select="demonstrated"}]',
        ),
        job({"a.jsonl": GIVEN[:5]}, demonstrations=[
            {"name": name, "path": "FOLDER/a.jsonl", "per_step": count} for name, count in (("a", 2), ("b", 3))
        ]),
        lambda state: state["demonstrations"], after=2, steps=4,
    ),
    "weights extrapolated": Case(
        (LORA % ",extrapolate={every=1,horizon=1,scale=3.0,epochs=4,lr=2e-3}", *FAST), after=2, steps=4
    ),
    "episodes": Case((*FLAT, *LATE, "--algorithm.objective=grpo", "--rollout.n=6"), shows=open_groups, wrap=episodes),
    "pictures and their tower": Case(
        (*LATE, "--model.train_tower=true"), picture_run.write_run, open_groups,
    ),
    "routes": Case((*LATE, "--model.replay_routes=true"), of_family(moe_models.make, "qwen3_moe"), open_groups),
    "recurrent layers": Case(
        (*LATE, "--rollout.kept_states=4"), of_family(recurrent_models.make, "qwen3_5"), open_groups
    ),
    "columns of many types": Case((*LATE, "--trainer.prompts_per_step=2"), dated, open_groups),
    "bad rows skipped": Case(
        ("--data.on_bad_row=skip", *FLAT, "--trainer.prompts_per_step=12", "--seed=1"),
        job({"rows.jsonl": BAD_ROWS}, data=OF_FILE), after=2, steps=4,
    ),
    "several files": Case((*FLAT, "--trainer.prompts_per_step=2"), shards, steps=2),
}  # fmt: skip
QUICK = ("open groups",)
"""Cases of `make test`."""
SLOW = (
    "over-sampling", "two prompts", "two policies", "bit for bit in batches", "policy asked", "own parts",
    "demonstrations", "weights extrapolated", "episodes", "columns of many types", "bad rows skipped", "several files",
    "lora, a reference that follows", "critic",  # which tests/engine/fleet/test_ranks.py resumes
    "curriculum", "own curriculum",  # "all parts that remember" has one
)  # fmt: skip
"""Cases of `make slow`; `make check` has the others."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.check)
        for name in CASES
    ],
)
def test_a_resumed_run_ends_as_one_that_never_stopped(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    toml = case.write(tmp_path / "job")
    whole, resumed = stop_and_resume(
        toml, tmp_path, *case.flags, after=case.after, steps=case.steps, wrap=case.wrap, shows=case.shows
    )
    assert whole.step == resumed.step == case.steps
    assert whole.learner.updates > 0
