"""Rubrics: a stand-in for a server scores each criterion, and what it says is the reward of a run."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI, Request, Response

from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.config import load_config
from rolltree.engine.app.console import Console
from rolltree.engine.errors import UserError
from rolltree.engine.rewards import RewardItem, RewardResult, Rewards, make_rewards
from rolltree.engine.settings import RewardConfig

from ...support.tiny import NO_METHOD, write_job
from .test_remote import serving


class Grader:
    """Scores ``criterion|response``: "is X" by whether the response holds X, "x Y" by Y itself."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.running = self.most = 0
        self.asked: list[str] = []
        self.app.post("/v1/chat/completions")(self.chat)

    async def chat(self, request: Request) -> Any:
        text = (await request.json())["messages"][-1]["content"]
        self.asked.append(text)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.02)
        self.running -= 1
        criterion, _, response = text.partition("|")
        if criterion == "broken":
            return Response("{}", status_code=400)
        kind, _, value = criterion.partition(" ")
        said = {"is": f"Score: {float(value in response)}", "x": f"Score: {value}"}.get(kind, "hm")
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


@pytest.fixture(scope="module")
def grader() -> Iterator[tuple[Grader, str]]:
    made = Grader()
    with serving(made.app) as url:
        yield made, f"{url}/v1"


def rubric(url: str, **options: Any) -> Rewards:
    given = {"base_url": url, "model": "m", "prompt": "{criterion}|{response}", "retries": 0, **options}
    return make_rewards(RewardConfig(verifier="rubric", timeout_s=20.0, options=given))


def item(criteria: Any, text: str = "a b") -> RewardItem:
    return RewardItem(text, {"rubric": criteria}, problem="p", prompt="q")


def one(text: str, weight: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"criterion": text, "weight": weight, **more}


def test_the_reward_is_the_weighted_sum(grader: tuple[Grader, str]) -> None:
    with rubric(grader[1]) as rewards:
        found = rewards.score(
            [
                item([one("is a", 3), one("is c", 1), one("x 0.25", 2), one("is b", -1)]),
                item(json.dumps(["is a", {"criterion": "is c", "weight": None, "veto": None}])),
                item(np.array([one("x 0.4", 2), one("x 1", 0)], dtype=object)),
            ]
        )
    assert [verdict.value for verdict in found] == pytest.approx([(3 + 0 + 0.5 - 1) / 6, 1 / 2, 0.4])
    assert [verdict.named for verdict in found] == [{"criteria_met": 0.5}, {"criteria_met": 0.5}, {"criteria_met": 0.5}]
    assert all(verdict.reason is None for verdict in found)


def test_a_veto_takes_the_reward_away_and_saturation_bends_it(grader: tuple[Grader, str]) -> None:
    good, bad = one("is a", 3), one("is c", 1, veto=True)
    with rubric(grader[1]) as rewards:
        found = rewards.score([
            item([good, bad]), item([good, bad], "a c"), item([good, one("x 0.5", 1, veto=True)]),
            item([one("is z"), one("is a", -2), bad]),
        ])  # fmt: skip
    assert [verdict.value for verdict in found] == pytest.approx([0.0, 1.0, 3.5 / 4, -2 / 2])
    with rubric(grader[1], met=0.6) as rewards:
        assert rewards.score([item([good, one("x 0.5", 1, veto=True)])])[0].value == 0
    with rubric(grader[1], saturation=2.0) as rewards:
        found = rewards.score([item([one("x 0.3")]), item([one("x 1")]), item([one("is z"), one("is a", -1)])])
    want = [(1 - math.exp(-0.6)) / (1 - math.exp(-2)), 1.0, -1.0]
    assert [verdict.value for verdict in found] == pytest.approx(want)


def test_a_criterion_without_a_verdict_leaves_the_response_without_one(grader: tuple[Grader, str]) -> None:
    with rubric(grader[1]) as rewards:
        silent, broken, right, none = rewards.score(
            [item(["is a", "silent"]), item(["broken"]), item(["is a"]), RewardItem("a", {})]
        )
    assert silent == RewardResult(None, "criterion 2: ValueError: the judge gave no score, but 'hm'")
    assert broken.value is None
    assert str(broken.reason).startswith("criterion 1: BadRequestError")
    assert right.value == 1
    assert none == RewardResult(None, "ValueError: the column 'rubric' has no list of criteria")
    with make_rewards(
        RewardConfig(verifier="rubric", timeout_s=0.001, options={"base_url": grader[1], "model": "m", "retries": 0})
    ) as rewards:
        assert rewards.score([item(["is a"])])[0] == RewardResult(None, "timeout")


def test_criteria_are_asked_at_the_same_time_up_to_the_limit(grader: tuple[Grader, str]) -> None:
    server, url = grader
    server.most, before = 0, len(server.asked)
    with rubric(url, at_once=5) as rewards:
        rewards.score([item([f"x 0.{k}" for k in range(1, 9)]), item(["is a"])])
    assert server.most == 5
    assert len(server.asked) == before + 9


def test_what_a_criterion_says_is_not_filled_in(grader: tuple[Grader, str]) -> None:
    with rubric(grader[1], prompt="{criterion}|{response}") as rewards:
        (found,) = rewards.score([item(["is {response}"], "has {criterion} and {response}")])
    assert found.value == 1
    assert grader[0].asked[-1] == "is {response}|has {criterion} and {response}"


def test_rubrics_are_read_before_a_run(grader: tuple[Grader, str]) -> None:
    wrong = [
        ([], "no list of criteria"), ("{", "no JSON"), ([3], "criterion 1 is neither"), ([{"weight": 1}], "no text in"),
        (["a", one("b", math.inf)], "criterion 2 has a weight that is no"), ([one("a", 1, vetos=True)], "'vetos'"),
        ([one("a", 1, veto=1)], "neither true nor false"), ([one("a", -1)], "no criterion has a weight above 0"),
    ]  # fmt: skip
    with rubric(grader[1]) as rewards:
        fine, *found = rewards.check([{"rubric": ["a"]}, *({"rubric": given} for given, _ in wrong)])
    assert fine is None
    assert [said in str(why) for why, (_, said) in zip(found, wrong, strict=True)] == [True] * len(wrong), found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt": "{response}"}, "where the criterion is inserted"), ({"met": 0}, "met above 0"),
        ({"saturation": -1}, "saturation of at least 0"), ({"colunm": "c"}, "did you mean 'column'"),
    ],
)  # fmt: skip
def test_options_of_a_rubric_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        rubric("http://127.0.0.1:9", **options)


@pytest.mark.methods
@pytest.mark.parametrize("recipe", ["rubicon", "dr_sci"])
def test_a_run_is_rewarded_by_rubrics(grader: tuple[Grader, str], tmp_path: Path, recipe: str) -> None:
    problems = tmp_path / "problems.parquet"
    toml = write_job(tmp_path, data={"tasks": None, "path": str(problems)}, reward={"verifier": None}, **NO_METHOD)
    rows = [
        {
            "prompt": f"{a} + 1 =", "answer": str(a + 1), "task": "open" if a % 2 else "verifiable",
            "rubric": [one("is e", 2.0, veto=False), one("x 0.75", 1.0, veto=False), one("is o", -1.0, veto=False)],
        }
        for a in range(16)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), problems)
    server = f"base_url='{grader[1]}',model='m',prompt='{{criterion}}|{{response}}'"
    options = f"--reward.options={{{server}}}"
    if recipe == "dr_sci":
        options = f"--reward.parts=[{{name='rubric',options={{{server}}}}},{{name='answer',verifier='exact'}}]"
    flags = [
        f"--recipe={recipe}", options, f"--output_dir={tmp_path}/runs", "--trainer.steps=1", "--rollout.n=6",
        "--evaluation.problems=0", "--evaluation.every=0", "--trainer.prompts_per_step=8",
    ]  # fmt: skip
    made = build(load_config(toml, flags), console=Console())
    made.run()
    found = pq.read_table(made.options.directory / "rollouts" / "step_000001.parquet").to_pylist()
    assert len(found) == 48
    seen = set()
    for row in found:
        text, is_open = row["response_text"], row["task"] == "open"
        total = (2 * ("e" in text) + 0.75 - ("o" in text)) / 3
        if recipe == "rubicon":
            total = (1 - math.exp(-total)) / (1 - math.exp(-1)) if total > 0 else total
        elif not is_open:
            total = 0.0  # a random model has no answer
        assert row["reward"] == pytest.approx(total, abs=1e-6)
        seen.add(round(total, 3))
    assert len(seen) >= 3
