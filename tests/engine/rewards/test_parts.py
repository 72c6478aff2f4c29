"""Several verifiers in one run: weights, tasks, names, failures of one part, refusals, and a run."""

from __future__ import annotations

import io
import json
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console as RichConsole

from rolltree.engine.app.assembly.checks import kept_entries
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.config import load_config, resolved_toml
from rolltree.engine.app.console import Console
from rolltree.engine.data.segment import LeafStatus
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.methods.advantages import gdpo
from rolltree.engine.parts.context import Context
from rolltree.engine.rewards import RewardItem, RewardResult, Rewards, check_references, make_rewards
from rolltree.engine.rewards.parts import RewardParts, task_names
from rolltree.engine.rewards.verdicts import put_rewards
from rolltree.engine.settings import Place, RewardConfig, RewardPartConfig
from rolltree.engine.tasks import read_problems

from ...support.tiny import CONFIG, tiny_job

MINE = """
import os, time

def length(text, entry, unit=1.0):
    return unit * len(text)

def moody(text, entry):
    if text == "hang":
        time.sleep(60)
    if text == "raise":
        raise ValueError("no")
    if text == "die":
        os._exit(3)
    if text == "skip":
        return {"reward": None, "skipped": "unsure"}
    if text == "form":
        return {"reward": 0.5, "unparsed": "no_form", "spans": [(0, 2, 4.0)], "vowels": 1.0}
    return 3.0

def huge(text, entry):
    return 3e38

def odd(text, entry):
    return float(len(text) % 2)

def third(text, entry):
    return float(len(text) % 3 == 0)
"""

SHAPING = """
import json, pathlib

def recorded(tree):
    row = {"task": tree.meta["task"], "id": tree.meta["prompt_id"]}
    row |= {name: [float(v) for v in values] for name, values in tree.rewards.items()}
    with (pathlib.Path(__file__).parent / "seen.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\\n")
    return tree.rewards["reward"]
"""


def parts(folder: Path) -> list[dict[str, Any]]:
    return [
        {"name": "size", "verifier": f"{folder}/mine.py:length", "options": {"unit": 2.0}, "weight": 0.25},
        {"name": "right", "verifier": "exact", "weight": 4, "when": "sum"},
        {"name": "mood", "verifier": f"{folder}/mine.py:moody", "weight": -1.0, "when": ["word", "text"]},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> RewardConfig:
    return RewardConfig.model_validate({"parts": parts(folder), "workers": 1, "timeout_s": 1.0})


@pytest.fixture(scope="module")
def rewards(config: RewardConfig) -> Iterator[Rewards]:
    with make_rewards(config) as rewards:
        yield rewards


def item(text: str, task: Any, answer: str = "12") -> RewardItem:
    return RewardItem(text, {"answer": answer} | ({} if task is None else {"task": task}))


def test_the_reward_is_the_weighted_sum_of_the_parts_that_judge_a_task(rewards: Rewards) -> None:
    given = [item("Answer: 12", "sum"), item("Answer: 1", "sum"), item("fine", "word"), item("fine", "text")]
    given += [item("Answer: 12", "other")]
    found = rewards.score(given)
    assert [r.value for r in found] == [0.25 * 20 + 4, 0.25 * 18, 0.25 * 8 - 3, 0.25 * 8 - 3, 0.25 * 20]
    expected = [(20, 1, None), (18, 0, None), (8, None, 3), (8, None, 3), (20, None, None)]
    for result, values in zip(found, expected, strict=True):
        assert list(result.named) == ["size", "right", "mood"]
        assert [None if math.isnan(v) else v for v in result.named.values()] == list(values)
        assert result.reason is None
        assert result.skipped is None


@pytest.mark.check
def test_one_part_fails_or_skips_and_the_values_of_the_others_stay(rewards: Rewards) -> None:
    texts = ["hang", "fine", "raise", "die", "skip", "form", "fine"]
    found = rewards.score([item(text, "word") for text in texts])
    assert [r.value for r in found] == [None, -1, None, None, None, 0.25 * 8 - 0.5, -1]
    assert [found[i].reason for i in (0, 3)] == ["timeout", "died"]
    assert "ValueError: no" in str(found[2].reason)
    assert (found[4].reason, found[4].skipped) == (None, "unsure")
    assert (found[5].unparsed, found[5].spans, found[5].named["mood.vowels"]) == ("no_form", [(0, 2, -4.0)], 1.0)
    tree = TokenTree.from_sequences([1, 2], [[3]] * 7)
    put_rewards(tree, found, str)
    nan = np.nan
    assert np.array_equal(tree.rewards["mood"], [nan, 3, nan, nan, nan, 0.5, 3], equal_nan=True)
    size = [2.0 * len(text) for text in texts]
    assert tree.rewards["size"].tolist() == size
    assert np.isnan(tree.rewards["right"]).all()
    failed = [LeafStatus(s) == LeafStatus.FAILED for s in tree.status]
    assert failed == [True, False, True, True, False, False, False]


def test_sums_that_leave_fp32_are_failures(folder: Path) -> None:
    two = [{"name": name, "verifier": f"{folder}/mine.py:huge"} for name in ("a", "b")]
    with make_rewards(RewardConfig.model_validate({"parts": two, "workers": 1})) as rewards:
        (found,) = rewards.score([item("x", None)])
    assert found.value is None
    assert "which is not finite in fp32" in str(found.reason)


def test_a_problem_that_no_part_judges_has_no_verdict_and_is_counted_before_a_run(config: RewardConfig) -> None:
    some = config.model_copy(update={"parts": config.parts[1:]})
    rows = [(str(n), item("", task).entry) for n, task in enumerate(["sum", "word", "text", "other", None])]
    with make_rewards(some) as rewards:
        found = rewards.score([item("Answer: 12", "sum"), item("a", "other"), item("a", None)])
        whys = rewards.check([entry for _, entry in rows])
        with pytest.raises(UserError, match=r"2 of 5 problems .* '3': no part of reward.parts judges the task 'other'"):
            check_references(rewards, some, rows, all_known=True)
    assert [r.value for r in found] == [4, None, None]
    assert found[1].reason == whys[3] == "no part of reward.parts judges the task 'other'"
    assert found[2].reason == whys[4] == "no part of reward.parts judges rows without a task"
    assert whys[:3] == [None] * 3


def test_rows_are_checked_by_the_parts_that_judge_them(config: RewardConfig, rewards: Rewards) -> None:
    tasks = ["sum", "word", "text"]
    rows = [(task, {"answer": "" if task == "word" else "1", "task": task}) for task in tasks]
    assert check_references(rewards, config, rows, all_known=True) == ""  # `exact` does not judge the empty answer
    bad = [(task, {"answer": "" if task == "sum" else "1", "task": task}) for task in tasks]
    with pytest.raises(UserError, match=r"row of 'sum' cannot be judged by the part 'right' \(reward.parts\)"):
        check_references(rewards, config, bad, all_known=True)
    with pytest.raises(
        UserError, match=r"the part 'mood' .* names the task 'text', which no row .* they have sum, wor"
    ):
        check_references(rewards, config, rows[:2], all_known=True)
    with pytest.raises(UserError, match=r"the part 'right' .* names the task 'sum', .* no column 'task'"):
        check_references(rewards, config, [("0", {"answer": "1"})], all_known=True)
    assert check_references(rewards, config, rows[:2]) == ""  # of a source, whose rows are not known


def test_gdpo_leaves_out_what_does_not_judge_a_group() -> None:
    trees = [TokenTree.from_sequences([1], [[2], [3], [4]]) for _ in range(2)]
    for tree, right in zip(trees, ([1, 0, 0], [np.nan] * 3), strict=True):
        tree.rewards["size"] = np.array([1, 2, 3], np.float32)
        tree.rewards["right"] = np.array(right, np.float32)
    first, second = gdpo(trees, weights={"size": 1.0, "right": 2.0}, whiten=False).values
    size, right = np.array([-1, 0, 1]) / (1 + 1e-6), np.array([2, -1, -1]) / 3 / (math.sqrt(1 / 3) + 1e-6)
    assert first == pytest.approx(size + 2 * right)
    assert second == pytest.approx(size)


CHAIN_SUM, *_ = CONFIG["data"]["tasks"]
SPELL = {"name": "spell_backward", "options": {"min_word_len": 3, "max_word_len": 4}}
toml = tiny_job(
    {"mine.py": MINE, "shaping.py": SHAPING},
    data={"tasks": [CHAIN_SUM, SPELL]},
    reward={
        "verifier": None,
        "parts": [
            {"name": "odd", "verifier": "mine.py:odd", "weight": 0.5},
            {"name": "third", "verifier": "mine.py:third", "weight": 3.0, "when": "chain_sum"},
            {"name": "late", "verifier": "mine.py:length", "options": {"unit": 0.01}, "when_wrong": "odd"},
        ],
        "shaping": [{"name": "shaping.py:recorded"}],
    },
    evaluation={"problems": 2, "every": None},
)


@pytest.mark.check
def test_a_run_learns_from_the_sum_and_credit_reads_the_parts(toml: Path, tmp_path: Path) -> None:
    given = ["--algorithm.advantage=gdpo", "--algorithm.advantage_options={weights={odd=1.0,third=2.0}}"]
    config = load_config(toml, [f"--output_dir={tmp_path}", "--trainer.steps=2", *given])
    build(config, console=Console(RichConsole(file=io.StringIO(), width=200))).run()
    files = sorted((config.run_dir / "rollouts").iterdir())
    leaves = [leaf for file in files for leaf in pq.read_table(file).to_pylist()]
    tasks = [leaf["task"] for leaf in leaves]
    assert {"chain_sum", "spell_backward"} == set(tasks)

    def value(leaf: dict[str, Any]) -> tuple[float, float]:
        size = len(leaf["response_text"])
        return float(size % 2), float(size % 3 == 0) if leaf["task"] == "chain_sum" else math.nan

    expected = {}
    for leaf in leaves:
        odd, third = value(leaf)
        late = 0 if odd else 0.01 * len(leaf["response_text"])  # it judges what `odd` calls wrong
        assert leaf["reward"] == pytest.approx(0.5 * odd + (0 if math.isnan(third) else 3 * third) + late), leaf
        expected.setdefault((leaf["task"], leaf["prompt_id"]), []).append((odd, third))
    assert len({value(leaf) for leaf in leaves}) >= 4, "too few kinds of verdicts; the test shows nothing"
    seen = [json.loads(line) for line in (toml.parent / "seen.jsonl").read_text().splitlines()]
    assert len(seen) == len(expected) == 12
    for row in seen:
        odd, third = map(list, zip(*expected[row["task"], row["id"]], strict=True))
        assert row["odd"] == odd
        assert [math.isnan(late) for late in row["late"]] == [bool(o) for o in odd]
        assert np.array_equal(row["third"], third, equal_nan=True)
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:] if row["step"])


def test_the_resolved_configuration_reads_back(toml: Path, tmp_path: Path) -> None:
    config = load_config(toml)
    path = tmp_path / "again.toml"
    path.write_text(resolved_toml(config))
    assert load_config(path) == config
    assert [p.tasks for p in config.reward.parts] == [(), ("chain_sum",), ()]


def test_columns_that_a_part_reads_are_kept(toml: Path) -> None:
    given = ["--data.tasks=[]", f"--data.path={toml.parent}/rows.jsonl", "--loop.staleness=1"]
    for verifier, kept in (("exact", False), ("mine.py:odd", True)):
        config = load_config(toml, [*given, f"--reward.parts=[{{name='a', verifier='{verifier}'}}]"])
        keep = kept_entries(config)
        assert keep is not None
        row = {"prompt": "a", "answer": "1", "task": "t", "extra": 1j}
        if kept:
            with pytest.raises(UserError, match="'extra'"):
                keep(row, "Row 3")
        else:
            assert keep(row, "Row 3") == {"prompt": "a", "answer": "1", "task": "t"}


ONE = "{name='a', verifier='exact'}"


@pytest.mark.parametrize(
    ("given", "needle"),
    [
        (["--reward.parts=[{name='reward', verifier='exact'}]"], "a reward of this name already"),
        (["--reward.parts=[{name='verifier', verifier='exact'}]"], "a reward of this name already"),
        (["--reward.parts=[{name='a.b', verifier='exact'}]"], "pattern"),
        (["--reward.parts=[{name='a', verifier='exakt'}]"], "it must be one of task, math"),
    ],
)
def test_a_name_that_no_part_has_is_refused(toml: Path, given: Sequence[str], needle: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(toml, given)
    assert needle in str(error.value)
    assert str(error.value).count("\n") == 0


@pytest.mark.parametrize(
    ("part", "needle"),
    [({"verifier": "exact", "options": {"no": 1}}, "no option 'no'"), ({"verifier": "judge"}, "judge")],
)
def test_a_part_that_cannot_be_used_is_named(part: dict[str, Any], needle: str) -> None:
    config = RewardConfig.model_validate({"parts": [{"name": "a", **part}], "workers": 1})
    with pytest.raises(UserError, match=rf"The part 'a' \(reward.parts\) cannot be used: .*{needle}"):
        make_rewards(config).__enter__()


class Told(Rewards):
    """Gives the values that are told for texts, and remembers what it read."""

    def __init__(self, values: dict[str, float | None]) -> None:
        self.values, self.read = values, list[str]()

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        self.read += [one.response_text for one in items]
        values = [self.values[one.response_text] for one in items]
        return [RewardResult(value, "broken" if value is None else None) for value in values]


def conditional(*given: dict[str, Any], values: Sequence[dict[str, float | None]]) -> RewardParts:
    parts = [RewardPartConfig(verifier="exact", **part) for part in given]
    return RewardParts([(p, Told(v)) for p, v in zip(parts, values, strict=True)], task_names(()), Context())


@pytest.mark.parametrize(("condition", "asked"), [("when_wrong", ["b", "c"]), ("when_right", ["a"])])
def test_a_part_may_judge_only_what_another_calls_wrong_or_right(condition: str, asked: list[str]) -> None:
    """The part that waits may stand first; it is never asked about the others, nor where the first one failed."""
    rule = {"a": 1.0, "b": 0.0, "c": 0.5, "d": None}
    rewards = conditional(
        {"name": "model", condition: "rule", "weight": 0.25}, {"name": "rule"},
        values=[dict.fromkeys("abcd", 0.8), rule],
    )  # fmt: skip
    found = rewards.score([RewardItem(text, {}) for text in "abcd"])
    assert rewards._parts[0][1].read == asked
    for text, result in zip("abcd", found, strict=True):
        own = rule[text]
        assert result.value == (None if own is None else pytest.approx(own + (0.2 if text in asked else 0.0)))
        assert math.isnan(result.named["model"]) == (text not in asked)


def test_conditions_that_cannot_hold_are_refused() -> None:
    values: list[dict[str, float | None]] = [{}, {}]
    with pytest.raises(UserError, match="waits for the part 'rul', and there is none"):
        conditional({"name": "model", "when_wrong": "rul"}, {"name": "rule"}, values=values)
    with pytest.raises(UserError, match="waits for the part 'rule', and there is none of that name that waits for no"):
        conditional({"name": "model", "when_wrong": "rule"}, {"name": "rule", "when_right": "model"}, values=values)
    with pytest.raises(UserError, match="on tasks that this does not judge"):
        conditional({"name": "model", "when_wrong": "rule"}, {"name": "rule", "when": "sum"}, values=values)
    conditional({"name": "model", "when_wrong": "rule", "when": "sum"}, {"name": "rule", "when": "sum"}, values=values)


class Watched(Rewards):
    """Gives a reward of 1, and remembers the threads that asked."""

    def __init__(self, in_turn: bool, note: str) -> None:
        self.in_turn, self.note, self.asked, self.closed = in_turn, note, list[int](), False

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        self.asked.append(threading.get_ident())
        return [RewardResult(1.0, None)] * len(items)

    def close(self) -> None:
        self.closed = True


def test_parts_that_need_the_engine_are_asked_by_its_thread() -> None:
    policy, other, idle = Watched(True, "a"), Watched(False, "b"), Watched(False, "b")
    three = [(RewardPartConfig(name=name, verifier="exact"), some) for name, some in (("p", policy), ("o", other))]
    three.append((RewardPartConfig(name="i", verifier="exact", when="never"), idle))
    with RewardParts(three, task_names(()), Context()) as rewards:
        assert (rewards.in_turn, rewards.note) == (True, "a; b")
        assert [r.value for r in rewards.score([item("x", None)] * 2)] == [2, 2]
    assert policy.asked == [threading.get_ident()]
    assert len(other.asked) == 1
    assert other.asked != policy.asked
    assert idle.asked == []
    assert [some.closed for some in (policy, other, idle)] == [True] * 3
    assert not RewardParts(three[1:], task_names(()), Context()).in_turn


def test_rows_of_a_file_have_the_task_of_their_column(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1", "task": "sum"}, {"prompt": "b", "answer": "2"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_problems(Place(str(tmp_path / "rows.jsonl"), "data.path"), "prompt", "answer").rows
    assert [(p.id, p.task) for p in found] == [("rows/0", "sum"), ("rows/1", "rows")]
