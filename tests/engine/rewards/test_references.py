"""Reference answers that are no text, the columns they come from, and the check of all of them before a run."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolltree.engine.errors import UserError
from rolltree.engine.rewards import RewardItem, RewardPool, check_references
from rolltree.engine.rewards.references import reference_text
from rolltree.engine.settings import Place, RewardConfig
from rolltree.engine.tasks import read_problems
from rolltree.engine.tasks.rows import find_answer


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("72", "72"),
        (" yes\n", "yes"),
        (72, "72"),
        (72.0, "72"),
        (0.6, "0.6"),
        (-1e22, "-10000000000000000000000"),
        (1e-7, "0.0000001"),
        (True, "True"),
        (np.float64(72.0), "72"),
        (np.int64(72), "72"),
        (np.array(["72"]), "72"),
        (["72"], "72"),
        ([[72.0]], "72"),
        (("72",), "72"),
        (Decimal("72.50"), "72.5"),
        (Fraction(1, 3), "1/3"),
        ({"style": "rule", "ground_truth": "72"}, "72"),
        ({"ground_truth": [72.0]}, "72"),
    ],
)
def test_values_have_a_text_by_rule(answer: Any, text: str) -> None:
    assert reference_text(answer) == text


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "None"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (np.float32("nan"), "nan"),
        ("", "empty"),
        (" \n", "empty"),
        ([], "list of 0"),
        (["72", "73"], "list of 2"),
        (np.array([1, 2]), "list of 2"),
        ([None], "None"),
        ({"target": "72"}, "dict of target"),
        ({"ground_truth": None}, "None"),
        (b"72", "type bytes"),
        ({72}, "type set"),
    ],
)
def test_values_without_one_text_are_refused(answer: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        reference_text(answer)


def settings(verifier: str, **config: Any) -> RewardConfig:
    options = {"pattern": r"(-?[\d.]+)"} if verifier == "regex" else {}
    return RewardConfig(verifier=verifier, workers=1, **({"options": options, "timeout_s": 60.0} | config))


@pytest.mark.parametrize("verifier", ["math", "exact", "regex"])
def test_right_answers_to_references_that_are_no_text_are_paid(verifier: str) -> None:
    with RewardPool(settings(verifier)) as pool:
        for answer in (72, 72.0, ["72"], {"style": "rule", "ground_truth": "72"}, Decimal("72.0"), "72"):
            right, wrong = pool.score([RewardItem(f"Answer: {said}", {"answer": answer}) for said in (72, 73)])
            assert (right.value, wrong.value) == (1, 0), answer
        (missing,) = pool.score([RewardItem("Answer: 72", {"answer": None})])
    assert missing.value is None
    assert "None" in str(missing.reason)


@pytest.mark.parametrize(
    ("row", "key", "found"),
    [
        ({"answer": 3, "solution": 4}, "answer", ("answer", 3)),
        ({"reward_model": {"style": "rule", "ground_truth": "3"}}, "answer", ("reward_model.ground_truth", "3")),
        ({"reward_model": {"ground_truth": "3"}}, "reward_model", ("reward_model.ground_truth", "3")),
        ({"reward_model": {"ground_truth": "3"}}, "reward_model.ground_truth", ("reward_model.ground_truth", "3")),
        ({"extra_info": {"a": {"b": 3}}}, "extra_info.a.b", ("extra_info.a.b", 3)),
        ({"a.b": 3, "a": {"b": 4}}, "a.b", ("a.b", 3)),
        ({"solution": "3"}, "answer", None),
        ({"solution": "3"}, "solution", ("solution", "3")),
        ({"solution": "3"}, "target", None),
        ({"reward_model": {"style": "rule"}}, "answer", None),
        ({"answer": None}, "answer", ("answer", None)),
    ],
)
def test_answers_of_verl_are_understood_and_no_others_are_guessed(row: dict[str, Any], key: str, found: Any) -> None:
    assert find_answer(row, key) == found


def test_files_of_verl_and_trl_are_read_and_usual_names_suggested(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1 + 1?"}]
    verl = {"prompt": chat, "reward_model": {"style": "rule", "ground_truth": "2"}, "data_source": "x"}
    pq.write_table(pa.Table.from_pylist([verl]), tmp_path / "verl.parquet")
    (tmp_path / "trl.jsonl").write_text(json.dumps({"prompt": chat, "solution": "so $2$"}))
    for name, key, answer in (("verl.parquet", "answer", "2"), ("trl.jsonl", "solution", "so $2$")):
        place = Place(str(tmp_path / name), "data.path")
        read = read_problems(place, "prompt", key)
        assert [problem.entry["answer"] for problem in read.rows] == [answer]
        assert ("answers in 'reward_model.ground_truth'" in read.said) == (key == "answer")
        usual = "solution" if key == "solution" else "reward_model.ground_truth"
        with pytest.raises(UserError, match=f"no column 'target' .*; set data.answer_key = \"{usual}\"\\.$"):
            read_problems(place, "prompt", "target")
    with pytest.raises(UserError, match=r'no column \'answer\' .*; set data.answer_key = "solution"\.$'):
        read_problems(place, "prompt", "answer")


def checked(pool: RewardPool, verifier: str, answers: list[Any], **config: Any) -> str:
    rows = [(f"d/{row}", {"answer": answer}) for row, answer in enumerate(answers)]
    return check_references(pool, settings(verifier, **config), rows)


@pytest.mark.parametrize("verifier", ["math", "exact", "regex"])
def test_a_run_with_a_missing_answer_does_not_start(verifier: str) -> None:
    with RewardPool(settings(verifier)) as pool:
        for answer in (None, math.nan, "", ["1", "2"], {"a": 1}):
            with pytest.raises(UserError, match="The row of 'd/2' cannot be judged"):
                checked(pool, verifier, ["1", "2", answer])


@pytest.mark.slow
def test_answers_that_cannot_be_read_are_counted_and_stop_a_run_above_a_limit() -> None:
    many = ["1"] * 98 + ["\\frac{1}{2"] * 2
    with RewardPool(settings("math")) as pool:
        note = checked(pool, "math", many)
        assert note.startswith("2 of 100 problems cannot be judged, such as 'd/98': math-verify cannot read")
        assert "\\frac{1}{2" in note.encode().decode("unicode_escape") or "frac" in note
        with pytest.raises(UserError, match=r"3 of 101 problems.*reward\.max_unreadable = 0\.02"):
            checked(pool, "math", [*many, "\\max"])
        assert checked(pool, "math", [*many, "\\max"], max_unreadable=0.5)
        assert checked(pool, "math", ["1", "\\sqrt{2}", "x=3", "yes", "(A)"]) == ""
    with RewardPool(settings("code")) as pool:
        with pytest.raises(UserError, match=r"1 of 1 problems.*not a list of tests"):
            checked(pool, "code", [3])
        with pytest.raises(UserError, match=r"1 of 2 problems.*'d/1'.*is not valid Python"):
            checked(pool, "code", [["assert True"], ["assert True", "def f(:"]])
        assert checked(pool, "code", [["assert True"], '{"inputs": ["1"], "outputs": ["2"]}']) == ""
