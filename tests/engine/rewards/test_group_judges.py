"""Judges of groups: in the killable pool, on the trees of a run, and those that are shipped against their rules."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltree.engine import load_config
from rolltree.engine.rewards import RewardItem, RewardPool, RewardResult
from rolltree.engine.rewards.group_judges import AgainstOne, AnswerShare, Majority, Pairwise
from rolltree.engine.settings import RewardConfig

from ...support.real_step import Steps, take_steps
from ...support.tiny import NO_METHOD, tiny_job

JUDGES = """
import os, sys, time

def longest(texts, entry):
    if "hang" in texts:
        time.sleep(600)
    if "die" in texts:
        os._exit(3)
    if "exit" in texts:
        sys.exit("no more")
    if "few" in texts:
        return [1.0]
    if "many" in texts:
        return [0.5] * (len(texts) + 1)
    if "none" in texts:
        return None
    most = max(map(len, texts))
    found = [{"reward": float(len(t) == most), "of": len(texts), "entry": entry["x"]} for t in texts]
    return [None if t == "skip" else float("nan") if t == "nan" else v for t, v in zip(texts, found)]

def first_letters(texts, entry):
    return [float(texts.index(t)) + 10 * len(texts) for t in texts]

def longer(a, b, entry):
    return 0.5 if len(a) == len(b) else float(len(a) > len(b))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("judges")
    (path / "judges.py").write_text(JUDGES)
    return path


@pytest.fixture(scope="module")
def pool(folder):
    config = RewardConfig(verifier=f"{folder}/judges.py:longest", group=True, workers=2, timeout_s=2.0)
    with RewardPool(config) as started:
        yield started


def group(number: int, *texts: str, x: float = 1.0) -> list[RewardItem]:
    return [RewardItem(text, {"x": x}, group=number) for text in texts]


def values(results: list[RewardResult]) -> list[Any]:
    return [r.value for r in results]


def test_a_judge_sees_one_group_whole(pool) -> None:
    items = group(1, "a", "bbb", "cc", x=2.0) + group(2, "dd", "d") + group(3, "e")
    found = pool.score(items)
    assert values(found) == [0, 1, 0, 1, 0, 1]
    assert [r.named["of"] for r in found] == [3, 3, 3, 2, 2, 1]
    assert [r.named["entry"] for r in found] == [2, 2, 2, 1, 1, 1]
    alone = pool.score([RewardItem("a", {"x": 1.0}), RewardItem("bb", {"x": 1.0})])  # of no group: two groups
    assert [(r.value, r.named["of"]) for r in alone] == [(1, 1), (1, 1)]


@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("hang", "timeout"),
        ("die", "died"),
        ("exit", "SystemExit: no more"),
        ("few", "ValueError: the judge returned 1 values for 3 responses"),
        ("many", "ValueError: the judge returned 4 values for 3 responses"),
        ("none", "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_judge_that_fails_fails_for_its_group_alone(pool, word, said) -> None:
    found = pool.score(group(1, "a", "bb") + group(2, "a", word, "b") + group(3, "cc", "c") + group(4, "f", "ff"))
    assert values(found) == [0, 1, None, None, None, 1, 0, 0, 1]
    assert {r.reason.partition(" (")[0] for r in found[2:5]} == {said}
    assert all(r.reason is None for r in [*found[:2], *found[5:]])


def test_single_values_may_be_skipped_or_wrong(pool) -> None:
    found = pool.score(group(1, "aaaa", "skip", "nan"))
    assert values(found) == [1, None, None]
    assert [r.skipped for r in found] == [None, "no_verdict", None]
    assert "not finite" in found[2].reason


def test_a_verifier_of_single_responses_is_called_with_each(folder) -> None:
    (folder / "single.py").write_text("def length(text, entry):\n    return len(text)\n")
    with RewardPool(RewardConfig(verifier=f"{folder}/single.py:length", workers=1)) as single:
        assert values(single.score(group(1, "a", "bb") + group(2, "ccc"))) == [1, 2, 3]


# -- shipped judges ----------------------------------------------------------------------------------------------------


def said(answer: object) -> str:
    return f"So.\nAnswer: {answer}"


def test_the_majority_is_the_reference() -> None:
    found = Majority()([said(3), said("**5**"), "no idea", said(5), said(3), said("5.")], {"answer": "3"})
    assert found == [0, 1, {"reward": 0.0, "unparsed": "no_answer"}, 1, 0, 1]
    assert Majority()([said(2), said(1), said(1), said(2)], {}) == [1, 0, 0, 1]  # the first of equals
    assert Majority()(["x", "y"], {}) == [{"reward": 0.0, "unparsed": "no_answer"}] * 2
    assert Majority()([said(1)], {}) == [{"reward": None, "skipped": "alone"}]


def test_the_share_of_an_answer_is_its_reward_within_the_bounds() -> None:
    texts = [said(1), said(2), said(1), "none"]
    assert AnswerShare()(texts, {}) == [0.5, 0.25, 0.5, {"reward": 0.0, "unparsed": "no_answer"}]
    entropy = -(0.5 * np.log(0.5) + 2 * 0.25 * np.log(0.25))
    assert AnswerShare(low=entropy - 0.01, high=entropy + 0.01)(texts, {})[0] == 0.5
    for bounds in ({"low": entropy + 0.01}, {"high": entropy - 0.01}):
        assert AnswerShare(**bounds)(texts, {}) == [{"reward": None, "skipped": "entropy"}] * 4


def test_pairs_are_compared_once_and_wins_are_shared() -> None:
    seen = []

    def longer(a, b, entry):
        seen.append((a, b))
        return 0.5 if len(a) == len(b) else float(len(a) > len(b))

    assert Pairwise(longer)(["a", "bbb", "cc", "dd"], {}) == [0, 1, 0.5, 0.5]
    assert len(seen) == 6
    found = AgainstOne(longer)(["a", "bbb", "cc"], {})
    drawn = found.index({"reward": None, "skipped": "reference"})
    lengths = [1, 3, 2]
    assert [v for i, v in enumerate(found) if i != drawn] == [
        1.0 if n > lengths[drawn] else -1.0 for i, n in enumerate(lengths) if i != drawn
    ]
    with pytest.raises(ValueError, match="a number from 0 to 1, and it returned 7"):
        Pairwise(lambda *_: 7)(["a", "b"], {})


def test_options_come_through_the_pool(folder) -> None:
    config = RewardConfig(verifier="pairwise", options={"compare": f"{folder}/judges.py:longer"}, workers=1)
    with RewardPool(config) as started:
        assert values(started.score(group(1, "a", "bbb", "cc") + group(2, "d"))) == [0, 1, 0.5, None]


# -- in a run ----------------------------------------------------------------------------------------------------------


toml = tiny_job({"mine.py": JUDGES}, reward={"verifier": None}, **NO_METHOD)


def take(toml: Path, directory: Path, *flags: str) -> Steps:
    common = (
        "--trainer.prompts_per_step=4",
        "--rollout.n=3",
        "--trainer.max_tokens=4096",
        "--trainer.self_check=false",
    )
    return take_steps(
        toml, directory, *common, *flags, unset=("rollout.program", "rollout.program_options", "algorithm.advantage")
    )


def test_groups_that_grow_are_judged_anew_and_whole(toml, tmp_path) -> None:
    """`until_unequal` samples more; the judge's verdicts are on all responses then."""
    judge = ("--reward.verifier=" + f"{toml.parent}/mine.py:first_letters", "--reward.group=true")
    grow = f"{toml.parent}/grow.py:once"
    (toml.parent / "grow.py").write_text(
        "def once(tree):\n    from rolltree.engine.methods.groups import More\n"
        "    return None if tree.meta['attempt'] else More(2)\n"
    )
    steps = take(toml, tmp_path, *judge, f"--loop.callback={grow}")
    for tree in steps.trees:
        assert tree.num_leaves == 5
        decode = steps.orchestrator.tokenizer.decode
        texts = [decode(tree.token_id[tree.response_rows(k)], skip_special_tokens=True) for k in range(5)]
        np.testing.assert_array_equal(tree.rewards["reward"], [50 + texts.index(text) for text in texts])


@pytest.mark.methods
@pytest.mark.parametrize("name", ["ttrl", "empo", "pref_grpo", "brpo"])
def test_recipes_with_judges_of_groups(toml, tmp_path, name) -> None:
    flags = {
        "pref_grpo": (f"--reward.options.compare={toml.parent}/mine.py:longer",),
        "brpo": (f"--reward.options.compare={toml.parent}/mine.py:longer",),
    }.get(name, ())
    steps = take(toml, tmp_path, f"--recipe={name}", *flags, "--reward.max_failed_steps=2")
    decode = steps.orchestrator.tokenizer.decode
    judged = 0
    for tree in steps.judged:
        texts = [decode(tree.token_id[tree.response_rows(k)], skip_special_tokens=True) for k in range(tree.num_leaves)]
        R, lengths = tree.rewards["reward"], [len(text) for text in texts]
        if name == "pref_grpo":
            want = [
                np.mean([(a > b) + 0.5 * (a == b) for j, b in enumerate(lengths) if j != i])
                for i, a in enumerate(lengths)
            ]
            np.testing.assert_allclose(R, want)
        elif name == "brpo":
            (drawn,) = np.flatnonzero(np.isnan(R))
            want = [1.0 if n > lengths[drawn] else -1.0 for n in lengths]
            np.testing.assert_array_equal(np.delete(R, drawn), np.delete(want, drawn))
            kept = np.flatnonzero(~np.isnan(R))
            np.testing.assert_array_equal(tree.advantage[kept], R[kept])
        elif name == "ttrl":  # the random model marks no answer
            assert set(R.tolist()) <= {0.0, 1.0}
        else:
            assert np.isnan(R).all() or max(Counter(R.tolist()).values()) >= 1
        judged += 1
    assert judged == 4


@pytest.mark.slow
def test_a_hanging_judge_is_counted_and_its_group_left_out(toml, tmp_path) -> None:
    (toml.parent / "slow.py").write_text(
        "import time\n\ndef slow(texts, entry):\n"
        "    if sum(map(ord, texts[0])) % 2:\n        time.sleep(600)\n"
        "    return [float(len(t) % 2) for t in texts]\n"
    )
    judge = (f"--reward.verifier={toml.parent}/slow.py:slow", "--reward.group=true", "--reward.timeout_s=0.5")
    steps = take(toml, tmp_path, *judge, "--trainer.prompts_per_step=6")
    decode = steps.orchestrator.tokenizer.decode
    hung = 0
    for tree in steps.judged:
        text = decode(tree.token_id[tree.response_rows(0)], skip_special_tokens=True)
        slow = bool(sum(map(ord, text)) % 2)
        assert np.isnan(tree.rewards["reward"]).tolist() == [slow] * 3
        hung += slow
    assert 0 < hung < 6
    assert steps.rows[0]["reward/failed_timeout"] == 3 * hung
    assert len(steps.trees) == 6 - hung


def test_a_part_may_judge_groups(toml) -> None:
    parts = "--reward.parts=[{name='vote',verifier='majority'}]"
    assert json.loads(
        load_config(toml, [parts, "--evaluation.every=0", "--evaluation.problems=0"]).reward.model_dump_json()
    )["parts"]
