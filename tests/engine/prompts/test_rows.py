"""Rows become prompts when they are drawn: the same ones in the same order, bad ones as `data.on_bad_row` says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rolltree.engine.app.cli import main
from rolltree.engine.errors import BadRowError, UserError
from rolltree.engine.prompts import rows as training
from rolltree.engine.prompts.prompts import Prompt, held_out, make_prompts
from rolltree.engine.prompts.sources import PromptSource
from rolltree.engine.settings import DataConfig
from rolltree.engine.tasks import problems as places
from rolltree.engine.tasks import read_problems

from ...support.tiny import tiny_job
from ..tasks.reading import write
from .test_sources import ROWS as OWN_SOURCE
from .test_sources import jsonl, numbered
from .test_sources import tokenizer as tokenizer

LONG = "x" * 70


def stream(tokens: Any, held: int = 0, given: Any = (), **data: Any) -> PromptSource:
    config = DataConfig.model_validate({"max_prompt_tokens": 64} | data)
    problems = held_out(config, held, tokens)
    return PromptSource(config, tokens, 3, problems, demonstrations=given)


def texts(prompts: Any) -> list[str]:
    return [prompt.problem for prompt in prompts]


def doubled(count: int) -> list[dict[str, str]]:
    """Return rows of which every fifth is one of the last again."""
    rows = numbered(count)
    return [rows[count - 1 - n // 5] if n % 5 == 0 else row for n, row in enumerate(rows)]


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("form", ["jsonl", "parquet", "json", "csv.gz"])
def test_draws_have_the_order_of_all_rows_in_memory(
    form: str, disjoint: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = doubled(60)
    write(tmp_path, {f"p.{form}": rows})
    given = {"problem 11", "problem 12"}
    found = stream(tokenizer, 7, given, path=f"{tmp_path}/p.{form}", disjoint=disjoint)
    held = {row["prompt"] for row in rows[-7:]} | (given if disjoint else set())
    left = [row for row in rows if row["prompt"] not in held]
    assert found.demonstrated == 2
    assert len(found.known) == len(left) < 53
    order = [k for turn in range(3) for k in np.random.default_rng([3, turn]).permutation(len(left)).tolist()]
    drawn = [prompt for count in (1, 20, 3, 90) for prompt in found.next(count)]
    assert [(prompt.problem, prompt.entry) for prompt in drawn] == [(left[k]["prompt"], left[k]) for k in order[:114]]
    assert list(found.known) == [found.known[k] for k in range(len(left))]
    config = DataConfig(path=f"{tmp_path}/p.{form}", max_prompt_tokens=64)
    place = config.place
    assert place is not None
    every = make_prompts(read_problems(place, "prompt", "answer").rows, config, tokenizer)
    of = {prompt.id: prompt for prompt in every}
    assert drawn == [of[prompt.id] for prompt in drawn]


def test_only_a_sample_and_what_is_drawn_is_rendered(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(problems: Any, *given: Any) -> list[Prompt]:
        made.extend(problem.id for problem in problems)
        return make_prompts(problems, *given)

    monkeypatch.setattr(training, "make_prompts", counted)
    rows = numbered(5000)
    rows[17] = {"prompt": LONG, "answer": "1"}
    rows[4321].pop("answer")
    source = stream(tokenizer, 2, path=jsonl(tmp_path / "p.jsonl", rows))
    assert len(made) == places.SAMPLE
    assert {"p/0", "p/4997"} <= set(made)
    drawn = source.next(50)
    assert made[places.SAMPLE :] == [prompt.id for prompt in drawn]
    notes: list[str] = []
    with pytest.raises(UserError, match=r"2 of 4998 rows of .*p\.jsonl' \(data\.path\) to train on cannot be used"):
        source.rows.check_all(notes.append)
    assert "'p/17' is 70 tokens long" in notes[0]
    assert "Row 4321 of" in notes[1]
    assert len(notes) == 2


def bad_rows(count: int, kinds: str = "jltc") -> list[Any]:
    """Return rows of which every tenth is bad: no JSON, too long, no text, without a column."""
    bad = {"j": "{", "l": {"prompt": LONG, "answer": "1"}, "t": {"prompt": " ", "answer": "1"}, "c": {"prompt": "a"}}
    return [bad[kinds[n // 10 % len(kinds)]] if n % 10 == 5 else row for n, row in enumerate(numbered(count))]


CURRICULUM = """
class Order:
    def order(self, store):
        return sorted(store.problems, key=lambda k: (store.problems[k].taken, int(k.rpartition("/")[2])))

class Gate:
    def gate(self, problem):
        return not problem.text.endswith("7")
"""


@pytest.mark.parametrize("curriculum", [None, "Order", "Gate"])
def test_skipped_rows_are_counted_and_a_step_loses_nothing(
    curriculum: str | None, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SAMPLE", 2)
    (tmp_path / "mine.py").write_text(CURRICULUM)
    path = jsonl(tmp_path / "p.jsonl", bad_rows(80))
    data = {"path": path, "on_bad_row": "skip", "curriculum": curriculum and f"{tmp_path}/mine.py:{curriculum}"}
    source = stream(tokenizer, 3, **data)
    assert texts(source._held_out) == ["problem 77", "problem 78", "problem 79"]
    assert source.rows.bad == []
    peeked = source.peek(30)
    assert not source.skipped
    first = source.next(30)
    assert first == peeked
    assert len({prompt.id for prompt in first}) == 30
    states = []
    for _ in range(4):
        states.append(json.loads(json.dumps({k: v for k, v in source.state_dict().items() if k != "taken"})))
        states[-1]["taken"] = copy.deepcopy(source.state_dict().get("taken"))
        drawn = source.next(31)
        assert len(drawn) == 31
        again = stream(tokenizer, 3, **data)
        again.load_state_dict(copy.deepcopy(states[-1]))
        assert again.next(31) == drawn
        assert again.state_dict() == source.state_dict()
    if curriculum is None:
        passes = 154 / 69
        assert 8 * int(passes) <= len(source.skipped) <= 8 * (int(passes) + 1)
        assert len(set(source.skipped)) == 8
        assert any("Line 6 of" in said for said in source.skipped)
        assert any("'p/15' is 70 tokens long" in said for said in source.skipped)
    assert all(not prompt.problem.startswith("x") for prompt in drawn)


@pytest.mark.parametrize("kind", "jltc")
def test_a_bad_row_ends_the_run_unless_it_is_to_be_skipped(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SAMPLE", 2)
    path = jsonl(tmp_path / "p.jsonl", bad_rows(20, kind))
    source = stream(tokenizer, path=path)
    with pytest.raises(BadRowError, match=r"Line 6 of|p/5|Row 5 of|Line 16|p/15|Row 15 of"):
        source.next(20)
    assert source.state_dict()["cursor"] == 0
    monkeypatch.setattr(places, "SAMPLE", 1024)
    with pytest.raises(BadRowError):
        stream(tokenizer, path=path)
    assert len(stream(tokenizer, path=path, on_bad_row="skip").rows.bad) == 2


def test_a_file_of_bad_rows_is_not_drawn_from_for_ever(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "p.jsonl", ["{"] * 5)
    with pytest.raises(UserError, match=r"None of the rows of '.*' that were tried can be used: Line 1 of"):
        stream(tokenizer, path=path, on_bad_row="skip")
    (tmp_path / "mine.py").write_text(CURRICULUM + OWN_SOURCE.replace('"answer"', '"wrong"'))
    monkeypatch.setattr("rolltree.engine.prompts.sources.GIVE_UP", 9)
    source = stream(tokenizer, source=f"{tmp_path}/mine.py:Rows", on_bad_row="skip")
    with pytest.raises(UserError, match=r"The last 9 rows of the data cannot be used, .* because of this: Row 8"):
        source.next(1)


def test_checks_see_the_sample_and_what_is_drawn(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(prompt: Prompt) -> None:
        if prompt.entry["answer"] in ("4", "0"):
            raise UserError(f"no {prompt.id}.")

    monkeypatch.setattr(places, "SAMPLE", 2)
    path = jsonl(tmp_path / "p.jsonl", numbered(9))
    with pytest.raises(BadRowError, match="no p/0"):
        stream(tokenizer, path=path).rows.check_each(check)
    source = stream(tokenizer, path=path, on_bad_row="skip")
    source.rows.check_each(check)
    assert (texts(source.rows.tried), source.rows.bad) == (["problem 8"], ["no p/0."])
    assert {prompt.entry["answer"] for prompt in source.next(14)} == set("1235678")
    assert sorted(source.skipped) == ["no p/0.", "no p/0.", "no p/4.", "no p/4."]


# -- runs --------------------------------------------------------------------------------------------------------------


ROWS: list[dict[str, str]] = [{"prompt": f"{a} + 2 =", "answer": str(a)} for a in range(40)]
ROWS[11]["prompt"] = "1 + " * 60
ROWS[23].pop("answer")
toml = tiny_job({"p.jsonl": ROWS})


def options(toml: Path, tmp_path: Path, *more: str) -> list[str]:
    keys = {
        "data.tasks": "[]", "data.path": f"{toml.parent}/p.jsonl", "output_dir": tmp_path, "evaluation.problems": 2,
        "evaluation.every": 0, "checkpoint.every": 1, "checkpoint.keep": 9, "trainer.steps": 4,
        "trainer.prompts_per_step": 12, "seed": 1,  # bad rows are not among the first
        "rollout.program": "flat", "rollout.program_options": "{}", "algorithm.advantage": "group_norm",
    }  # fmt: skip
    return ["train", str(toml), *(f"--{key}={value}" for key, value in keys.items()), *more]


@pytest.mark.check
def test_the_plan_tells_of_bad_rows(
    toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SAMPLE", 2)
    plan = options(toml, tmp_path, "--dry-run")
    assert main(plan) == 0
    assert "prompts            40 rows of" in (said := capsys.readouterr().out)
    assert "\nrows    " not in said
    assert main([*plan, "--check-data"]) == 2
    assert "2 of 38 rows of" in capsys.readouterr().err
    assert main([*plan, "--check-data", "--data.on_bad_row=skip"]) == 0
    said = capsys.readouterr().out
    assert said.count("\nrows               ") == 3
    assert "The prompt 'p/11' is" in said
    assert "Row 23 of" in said
    generated = [key for key in plan if not key.startswith(("--data.path", "--data.tasks"))]
    assert main([*generated, "--check-data"]) == 2
    assert "--check-data tries the rows of data.path, and the run has none" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_skips_and_counts(
    toml: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    without_report: None,
) -> None:
    monkeypatch.setattr(places, "SAMPLE", 2)
    assert main(options(toml, tmp_path)) == 2
    assert "p/11" in (said := capsys.readouterr().err) or "Row 23 of" in said
    assert main([*options(toml, tmp_path, "--data.on_bad_row=skip"), "--name=skips"]) == 0
    said = capsys.readouterr()
    assert "A row is skipped (data.on_bad_row). " in said.out + said.err
    rows = map(json.loads, (tmp_path / "skips" / "metrics.jsonl").read_text().splitlines())
    assert sum(row.get("data/skipped_rows", 0) for row in rows) >= 2
