"""Parts of the user's own, beside the TOML that names them, in a run: program, prompt source, shaping, schedules."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rolltree.engine import Orchestrator, UserError, load_config
from rolltree.engine.app.assembly.methods import loss_terms
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.assembly.sampling import prepare_model
from rolltree.engine.app.console import Console
from rolltree.engine.app.report import write_report
from rolltree.engine.methods.schedules import at_step, cosine
from rolltree.engine.prompts.prompts import held_out
from rolltree.engine.prompts.sources import PromptSource

from ...support.tiny import tiny_job

JUDGES = """
def judge(text, entry):
    return {"reward": float(len(text) % 3 == 0), "format": float(len(text) % 2), "length": len(text)}


def steps(text, entry):
    middle = len(text) // 2
    spans = [(0, middle, 0.5), (middle, len(text), -1.0)] if middle else []
    return {"reward": 0.0, "spans": spans}
"""

PARTS = '''
import numpy as np
from rolltree.engine.programs import RolloutProgram


class OneMore(RolloutProgram):
    def __init__(self, extra: int = 1):
        self.extra = extra

    def start(self, group):
        return group.width + self.extra

    def decide(self, group, finished):
        return ()


class Counting:
    """Sums whose size follows how well the last ones went."""

    def __init__(self, first: int, step: int = 1):
        self.number, self.step, self.seen = first, step, 0

    def next(self, count):
        numbers = range(self.number, self.number + count)
        rows = [{"question": f"{k} + 1 =", "answer": str(k + 1), "responses": 2 + k % 3} for k in numbers]
        self.number += count
        return rows

    def observe(self, trees):
        self.seen += len(trees)

    def state_dict(self):
        return {"number": self.number, "seen": self.seen}

    def load_state_dict(self, state):
        self.number, self.seen = state["number"], state["seen"]


def doubled(tree, *, by: float):
    return by * tree.rewards["reward"]


def ramp(step, metrics, *, top: float):
    return min(step, top) + metrics.get("actor/entropy", 0.0) * 0


def broken(step, metrics):
    return float("nan")
'''

toml = tiny_job(
    {"parts.py": PARTS, "judges.py": JUDGES},
    data={
        "tasks": None, "source": "parts.py:Counting", "source_options": {"first": 3}, "prompt_key": "question",
    },
    rollout={"program": "parts.py:OneMore", "program_options": {"extra": 2}},
    reward={
        "verifier": "judges.py:judge",
        "shaping": [
            {"name": "gated", "options": {"gate": "format"}}, {"name": "parts.py:doubled", "options": {"by": 2.0}},
        ],
    },
    algorithm={"advantage": "group_mean", "weight": "parts.py:ramp", "weight_options": {"top": 2}},
    trainer={"lr_scale": "cosine", "lr_scale_options": {"end": 4}},
    evaluation={"problems": 0, "every": None},
)  # fmt: skip


def run(toml: Path, directory: Path, *overrides: str) -> Orchestrator:
    config = load_config(toml, ["--trainer.steps=2", "--checkpoint.every=1", f"--output_dir={directory}", *overrides])
    orchestrator = build(config, console=Console())
    orchestrator.run()
    return orchestrator


def rows(of: Orchestrator) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (of.options.directory / "metrics.jsonl").read_text().splitlines()][1:]


def rollouts(of: Orchestrator, step: int) -> list[dict[str, Any]]:
    return pq.read_table(of.options.directory / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


@pytest.mark.check
def test_a_run_of_own_parts(toml: Path, tmp_path: Path) -> None:
    whole = run(toml, tmp_path / "whole")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rollouts(whole, 1):
        groups.setdefault(row["prompt_id"], []).append(row)
    assert [group[0]["prompt_text"] for group in groups.values()] == [f"{3 + k} + 1 =\n" for k in range(6)]
    for group in groups.values():
        assert len(group) == 6  # four and the program's two
        for row in group:
            length = len(row["response_text"])
            assert (row["reward/format"], row["reward/length"]) == (length % 2, length)
            assert row["reward/verifier"] == (length % 3 == 0)
            assert row["reward"] == 2 * (length % 3 == 0) * (length % 2)
        mean = sum(row["reward"] for row in group) / 6
        assert [row["advantage"] for row in group] == pytest.approx([row["reward"] - mean for row in group], abs=1e-6)
    assert [row["actor/lr"] for row in rows(whole)] == pytest.approx([1e-3 * cosine(k, {}, end=4) for k in (1, 2)])
    assert whole.source._stream._source.seen == 12


@pytest.mark.check
def test_rewards_of_spans_reach_the_loss_and_the_report(toml: Path, tmp_path: Path) -> None:
    done = run(
        toml, tmp_path, "--trainer.steps=1", f"--reward.verifier={toml.parent}/judges.py:steps", "--reward.shaping=[]",
        "--algorithm.advantage=process", "--algorithm.drop_zero_variance=false",
    )  # fmt: skip
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rollouts(done, 1):
        groups.setdefault(row["prompt_id"], []).append(row)
    for group in groups.values():
        steps = [[0.5, -1.0] if len(row["response_text"]) > 1 else [] for row in group]
        known = [value for of_row in steps for value in of_row]
        mean = sum(known) / len(known)
        spread = (sum((value - mean) ** 2 for value in known) / (len(known) - 1)) ** 0.5 + 1e-6
        for row, of_row in zip(group, steps, strict=True):
            rewards = [None if math.isnan(v) else v for v in row["token_reward"]]
            ends = [i for i, v in enumerate(rewards) if v is not None]
            if [rewards[i] for i in ends] != of_row:  # one token completes both halves
                assert [rewards[i] for i in ends] == [sum(of_row)]
                continue
            for i, credit in enumerate(row["path_advantage"]):
                following = [(value - mean) / spread for end, value in zip(ends, of_row, strict=True) if end >= i]
                assert credit == pytest.approx(sum(following), abs=1e-4)
    assert rows(done)[-1]["actor/grad_norm"] > 0
    assert '"token_reward":"reward of what ends with it' in write_report(done.options.directory).read_text()


@pytest.mark.check
def test_groups_are_as_large_as_their_prompts_ask(toml: Path, tmp_path: Path) -> None:
    done = run(toml, tmp_path, "--data.n_key=responses", "--rollout.program=flat", "--rollout.program_options={}")
    for step in (1, 2):
        sizes: Counter[str] = Counter(row["prompt_text"] for row in rollouts(done, step))
        asked = range(6 * step - 3, 6 * step + 3)
        assert sizes == {f"{k} + 1 =\n": 2 + k % 3 for k in asked}
    assert rows(done)[0]["reward/mean"] == pytest.approx(np.mean([row["reward/verifier"] for row in rollouts(done, 1)]))
    for wrong in ("question", "nothing"):
        with pytest.raises(UserError, match=rf"in column '{wrong}' \(data.n_key\); give an integer"):
            run(toml, tmp_path / wrong, f"--data.n_key={wrong}")
    with pytest.raises(UserError, match="begins with 0 branches"):
        run(toml, tmp_path / "none", "--data.n_key=responses", "--rollout.program_options={extra=-2}")


def test_a_source_gives_no_held_out_problem_and_peeks_without_drawing(toml: Path, tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text('{"question": "4 + 1 =", "answer": "5"}\n')
    config = load_config(toml, [f"--data.eval_path={held}", "--evaluation.problems=1"])
    _, tokenizer = prepare_model(config)
    source = PromptSource(config.data, tokenizer, 0, held_out(config.data, config.evaluation.problems, tokenizer))
    peeked = source.peek(3)
    assert [p.problem for p in peeked] == [f"{n} + 1 =" for n in (3, 5, 6)]
    assert source.next(3) == peeked


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--data.source_options={frist=3}"], "data.source = .* has no option 'frist'; did you mean 'first'"),
        (["--data.source_options={}"], "needs the option 'first'"),
        (["--data.source=Counting"], "is not known; use one of games, verifiers, openenv, or name your own"),
        (["--reward.shaping=[{name='gate', options={gate='format'}}]"], "did you mean 'gated'"),
        (["--reward.shaping=[{name='gated', options={gat='format'}}]"], "no option 'gat'; did you mean 'gate'"),
        (["--reward.shaping=[{name='weighted', options={weights={absent=1.0}}}]"], "every response a reward 'abs"),
        (["--algorithm.weight=cosin"], "did you mean 'cosine'"),
        (["--algorithm.weight=cosine", "--algorithm.weight_options={last=1.0}"], "needs the option 'end'"),
        (["--algorithm.weight=2.0", "--algorithm.weight_options={end=1}"], "weight_options needs a function"),
    ],
)  # fmt: skip
def test_mistakes_are_named(toml: Path, tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(toml, tmp_path, *overrides)


def test_a_schedule_that_answers_no_number(toml: Path) -> None:
    broken = toml.with_name("parts.py")
    config = load_config(toml, [f"--algorithm.weight={broken}:broken", "--algorithm.weight_options={}"])
    (_, weight), *_ = loss_terms(config)
    with pytest.raises(UserError, match="must return a finite number; at step 3 it is nan"):
        at_step(weight, 3)
