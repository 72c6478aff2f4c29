"""The attack on verifiers by what responses hold: each is judged in bounded time, wrong where nothing can be read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltree.engine.rewards import RewardItem, RewardPool, RewardResult, make_rewards
from rolltree.engine.rewards.policy import PolicyScorer
from rolltree.engine.rewards.verdict import Verdict
from rolltree.engine.settings import RewardConfig, TaskConfig

from ..engine.rewards.test_remote import Moody, serving
from ..support.odd_texts import odd_texts

ANSWERS: dict[str, list[Any]] = {
    "exact": ["7", "Paris", 7, 0.5],
    "math": [
        "7", r"\frac{1}{3}", "x^2+1", "yes", "B", r"\{1, 2\}", "[0, 1)", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        "5 cm", "2^{20000}", "7" * 5000, "x < 3", "1, 2", r"12\%", r"\sqrt{2}", "Paris", 0.5, 10**4400,
    ],
    "regex": ["7", 7],
    "code": [
        [{"input": "", "output": "7"}],
        {"fn_name": "f", "inputs": [[1]], "outputs": [7.5]},
        ["assert f(1) == 7"],
        "from solution import f\n\ndef test_a():\n    assert f(1) == 7\n",
    ],
    "majority": ["7"],
    "answer_share": ["7"],
    "pairwise": ["7"],
    "against_one": ["7"],
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"regex": {"pattern": r"(?i)answer:?\s*(\S+)"}, "code": {"test_s": 1.0}}
TASKS = ("chain_sum", "countdown", "polynomial_equations", "sudoku", "simple_integration", "base_conversion")
LIMIT_S = 8.0


def failures(texts: list[str], found: list[RewardResult]) -> list[tuple[str, str | None]]:
    """Return the beginnings of the texts that have no verdict, and why."""
    judged = [v.skipped is not None or (v.value is not None and math.isfinite(v.value)) for v in found]
    pairs = zip(texts, found, judged, strict=True)
    return [(ascii(text[:60]), verdict.reason) for text, verdict, good in pairs if not good]


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", ANSWERS)
def test_no_response_fails_a_verifier(name: str, cases: int, tmp_path: Path) -> None:
    (tmp_path / "compare.py").write_text("def compare(a, b, entry):\n    return float(len(a) > len(b))\n")
    compares = name in ("pairwise", "against_one")
    options = {"compare": f"{tmp_path}/compare.py:compare"} if compares else OPTIONS.get(name, {})
    config = RewardConfig(verifier=name, workers=1, timeout_s=LIMIT_S, options=options)
    texts, answers = odd_texts(cases), ANSWERS[name]
    if not config.by_group:
        items = [RewardItem(text, {"answer": answers[i % len(answers)]}) for i, text in enumerate(texts)]
    else:  # the odd one is compared with another that is not
        pairs = [(text, i) for i, odd in enumerate(texts) for text in (odd, "Answer: 7")]
        texts = [text for text, _ in pairs]
        items = [RewardItem(text, {"answer": "7"}, group=i) for text, i in pairs]
    with RewardPool(config) as pool:
        assert failures(texts, pool.score(items)) == []


@pytest.mark.slow
def test_no_response_fails_a_task(cases: int) -> None:
    gym = pytest.importorskip("reasoning_gym")
    entries = [dict(gym.create_dataset(task, seed=3, size=1)[0]) | {"task_index": i} for i, task in enumerate(TASKS)]
    texts = odd_texts(cases)
    items = [RewardItem(text, entries[i % len(entries)]) for i, text in enumerate(texts)]
    tasks = [TaskConfig(name=task) for task in TASKS]
    with RewardPool(RewardConfig(verifier="task", workers=1, timeout_s=LIMIT_S), tasks) as pool:
        assert failures(texts, pool.score(items)) == []


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(Moody().app) as url:
        yield url


@pytest.mark.check
@pytest.mark.parametrize("name", ["judge", "rubric", "reward_model"])
def test_every_response_reaches_a_judge(server: str, name: str, cases: int) -> None:
    options: dict[str, Any] = {"base_url": server if name == "reward_model" else f"{server}/v1", "model": "m"}
    options |= {"lowest": 0.0, "highest": 10.0} if name == "rubric" else {}
    texts = odd_texts(cases)
    with make_rewards(RewardConfig(verifier=name, timeout_s=60.0, options=options)) as rewards:
        found = rewards.score([RewardItem(text, {"answer": "7", "rubric": ["is right"]}) for text in texts])
    assert failures(texts, found) == []


def test_verdicts_and_marks_are_found_in_every_response(cases: int) -> None:
    def score(prompts: list[str], continuations: list[str]) -> list[Any]:
        assert all(text.encode() for text in prompts)
        return [np.zeros(1, np.float32)] * len(prompts)

    texts = odd_texts(cases)
    items = [RewardItem(text, {"answer": "7"}, judged=1.0) for text in texts]
    assert failures(texts, Verdict("right").score(items)) == []
    assert failures(texts, PolicyScorer(score, mark="Answer:").score(items)) == []
    assert failures(texts, PolicyScorer(score).score(items)) == []
