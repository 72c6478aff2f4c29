"""Evaluation: which part of a reward tells whether an answer is right, and the means beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine import TokenTree, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.loop.evaluation import Evaluation
from rolltree.engine.parts.context import Context
from rolltree.engine.prompts.prompts import Prompt
from rolltree.engine.rewards import RewardItem, RewardResult, Rewards
from rolltree.engine.rewards.parts import RewardParts, rightness_of, task_names
from rolltree.engine.rollout import SamplingParams
from rolltree.engine.settings import RewardPartConfig

from ...support.serving import tokenizer
from ...support.tiny import tiny_job

toml = tiny_job(
    rollout={"program": "flat", "program_options": None},
    trainer={"steps": 1, "prompts_per_step": 2},
    evaluation={"problems": 4, "every": 1},
)


class Given(Rewards):
    """Gives each response the value of its problem's column ``name``; None fails."""

    def __init__(self, name: str) -> None:
        self.name = name

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        values = [item.entry[self.name] for item in items]
        return [RewardResult(value, "it failed" if value is None else None) for value in values]


class Shown:
    def phase(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def evaluation(self, *given: Any) -> None:
        self.given = given


def part(name: str, weight: float = 1.0, **more: Any) -> RewardPartConfig:
    return RewardPartConfig(name=name, verifier="program", weight=weight, **more)


def evaluate(
    rewards: Rewards, parts: Sequence[RewardPartConfig], *rows: dict[str, Any]
) -> tuple[dict[str, float], Any]:
    tree = TokenTree.from_sequences([65], [[66, 67]])
    sampler: Any = type("", (), {"generate": lambda self, jobs: [tree] * len(jobs)})()
    problems = [Prompt(f"p{n}", row.get("task"), "Q", [65], row, "Q") for n, row in enumerate(rows)]
    console: Any = Shown()
    rightness = rightness_of(parts, task_names(()))
    evaluation = Evaluation(problems, SamplingParams(), 0, sampler, tokenizer(), console, rightness)
    found = evaluation.run(3, rewards)
    return {key: value for key, value in found.items() if key.startswith(("eval/acc", "eval/rew"))}, console.given


RIGHT, WRONG = {"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0}


@pytest.mark.parametrize(
    ("parts", "accuracy"),
    [
        ([part("right"), part("form")], 0.5),
        ([part("right", 0.8), part("form", 0.2)], 0.5),
        ([part("right"), part("form", -0.1)], 0.5),
        ([part("form"), part("right")], 0.25),  # without a condition the first part is the one
        ([part("form", when_right="right"), part("right")], 0.5),
    ],
)
def test_accuracy_is_of_the_part_that_judges_rightness(parts: list[RewardPartConfig], accuracy: float) -> None:
    rewards = RewardParts([(one, Given(one.name)) for one in parts], task_names(()), Context())
    rows = [RIGHT, {"right": 1.0, "form": None}, WRONG, {"right": 0.5, "form": 0.5}]
    found, shown = evaluate(rewards, parts, *rows)
    by = "form" if parts[0].name == "form" and parts[0].when_right is None else "right"
    assert found["eval/accuracy"] == accuracy
    assert found["eval/reward/right"] == pytest.approx(2.5 / 4)
    assert shown[:4] == (3, accuracy, 4, [by])
    assert shown[4] == found["eval/reward"]


def test_each_task_has_its_own_part() -> None:
    parts = [part("right", when="a"), part("form"), part("tests", when="b")]
    rewards = RewardParts([(one, Given(one.name)) for one in parts], task_names(()), Context())
    rows = [RIGHT | {"task": "a"}, WRONG | {"task": "b", "tests": 0.25}]
    found, shown = evaluate(rewards, parts, *rows)
    assert found["eval/accuracy"] == 1.0  # of "b" the first part is "form"
    means = {"right": 1.0, "form": 0.5, "tests": 0.25}
    assert found == {"eval/accuracy": 1.0, "eval/reward": 1.125} | {f"eval/reward/{k}": v for k, v in means.items()}
    assert shown[3] == ["right", "form"]


def test_without_parts_the_reward_tells_it() -> None:
    found, shown = evaluate(Given("right"), (), RIGHT, {"right": 0.5}, {"right": None}, {"right": 2.0})
    assert found == {"eval/accuracy": 0.5, "eval/reward": pytest.approx(3.5 / 3)}
    assert shown[3] == []
    none, _ = evaluate(Given("right"), (), {"right": None})
    assert none == {"eval/accuracy": 0.0}


def test_held_out_answers_end_where_sampled_ones_do(toml: Path) -> None:
    """With every letter a text that ends a response, each held-out answer has one token."""
    every_letter = json.dumps([chr(n) for n in range(1, 256)])
    run = build(load_config(toml, [f"--rollout.stop={every_letter}"]), console=Console())
    run.run()
    lengths = {row["eval/response_length"] for row in run.log.rows() if "eval/response_length" in row}
    assert lengths == {1.0}
