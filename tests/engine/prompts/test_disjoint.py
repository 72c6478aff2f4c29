"""Prompts of demonstrations: how many a run shares with them, and `data.disjoint`, which leaves them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rolltree.engine import UserError, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.app.dry_run import plan_lines
from rolltree.engine.app.stages import load_stages
from rolltree.engine.prompts import sources
from rolltree.engine.prompts.demonstrations import Demonstrations
from rolltree.engine.prompts.prompts import Prompt, held_out
from rolltree.engine.prompts.sources import PromptSource
from rolltree.engine.settings import DataConfig, DemonstrationsConfig

from ...support.tiny import GIVEN, tiny_job
from .test_sources import jsonl, numbered
from .test_sources import tokenizer as of_bytes  # noqa: F401  (a fixture)

NARROW = ({"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}},)


@pytest.fixture(scope="module")
def tokenizer(of_bytes: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:  # noqa: F811
    of_bytes.eos_token = "!"
    return of_bytes


def given_file(folder: Path, prompts: list[str]) -> str:
    return jsonl(folder / "given.jsonl", [{"prompt": prompt, "response": "one"} for prompt in prompts])


def compare(
    tokens: PreTrainedTokenizerFast, demonstrations: str, *, held: int = 0, **data: Any
) -> tuple[PromptSource, str, list[Prompt]]:
    """Return the stream of prompts, the sentence about demonstrations in a file, and held-out problems."""
    config = DataConfig.model_validate(data)
    problems = held_out(config, held, tokens)
    given = Demonstrations([DemonstrationsConfig(path=demonstrations)], config, tokens, 0)
    stream = PromptSource(config, tokens, 0, problems, demonstrations=given.prompts)
    return stream, given.overlap(config, stream, problems), problems


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.problem for prompt in prompts]


@pytest.mark.parametrize("disjoint", [False, True])
def test_problems_are_compared_by_their_text_before_the_template(tmp_path, tokenizer, disjoint):
    rows = numbered(12)
    rows[4]["prompt"] = "  problem 4\n"
    path = jsonl(tmp_path / "p.jsonl", rows)
    shared = ["problem 1", "problem 4", " problem 7 ", "problem 11", "Problem 2", "problem", "problem 30"]
    stream, said, held = compare(
        tokenizer, given_file(tmp_path, shared), held=3, path=path, template="Solve {prompt}!", disjoint=disjoint
    )
    assert texts(held) == ["problem 9", "problem 10", "problem 11"]  # held-out problems stay as they are
    want = [r["prompt"] for i, r in enumerate(rows) if i < 9 and not (disjoint and i in (1, 4, 7))]
    for _ in range(3):
        assert sorted(texts(stream.next(len(want)))) == sorted(want)
    assert said.startswith("3 of 9 training problems and 1 of 3 held-out problems have the text of a prompt in '")
    assert said.endswith(
        "data.disjoint leaves out the 3 of training"
        if disjoint
        else "set data.disjoint to true to leave out the 3 of training"
    )


def test_where_nothing_is_shared_nothing_is_proposed(tmp_path, tokenizer):
    _, said, _ = compare(tokenizer, given_file(tmp_path, ["else"]), path=jsonl(tmp_path / "p.jsonl", numbered(4)))
    assert said.startswith("0 of 4 training problems and 0 of 0 held-out problems")
    assert "set data.disjoint" not in said


def test_where_nothing_is_left_one_sentence_says_so(tmp_path, tokenizer):
    path, every = jsonl(tmp_path / "p.jsonl", numbered(4)), given_file(tmp_path, [f"problem {i}" for i in range(3)])
    assert texts(compare(tokenizer, every, path=path, disjoint=True)[0].next(2)) == ["problem 3"] * 2
    with pytest.raises(UserError, match=r"are held out or have a prompt of demonstrations \(data.disjoint\); lower"):
        compare(tokenizer, every, held=1, path=path, disjoint=True)


def test_generated_problems_are_passed_over_as_they_come(tmp_path, tokenizer):
    config = DataConfig.model_validate({"tasks": NARROW})
    every = texts(PromptSource(config, tokenizer, 0).next(60))
    left_out = set(every[3:40:4])
    want = [text for text in every if text not in left_out]
    assert len(want) < 55
    path = given_file(tmp_path, sorted(f" {text}" for text in left_out))
    stream, said, _ = compare(tokenizer, path, held=5, tasks=NARROW, disjoint=True)
    held = texts(held_out(config, 5, tokenizer))
    want = [text for text in want if text not in held]
    first = texts(stream.next(20))
    state = json.loads(json.dumps(stream.state_dict()))
    assert first + texts(stream.next(20)) == want[:40]
    again, _, _ = compare(tokenizer, path, held=5, tasks=NARROW, disjoint=True)
    again.load_state_dict(state)
    assert texts(again.next(20)) == want[20:40]
    count = sum(text in left_out for text in held)
    assert said.startswith(f"{count} of 5 held-out problems have the text of a prompt in")
    assert said.endswith("not known before they come; those that come are left out (data.disjoint)")


def test_a_generator_of_nothing_else_is_one_sentence(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(sources, "GIVE_UP", 50)
    every = set(texts(PromptSource(DataConfig.model_validate({"tasks": NARROW}), tokenizer, 0).next(60)))
    stream, _, _ = compare(tokenizer, given_file(tmp_path, sorted(every)), tasks=NARROW, disjoint=True)
    with pytest.raises(UserError, match=r"data.tasks generates no problems that are not held out or prompts of demons"):
        stream.next(1)


CURRICULA = """
class Backwards:
    def order(self, store):
        return sorted(store.problems, reverse=True)

class Odd:
    def gate(self, problem):
        return problem.text.endswith(("1", "3", "5", "7", "9"))

class Rows:
    def __init__(self):
        self.number = -1
    def next(self, count):
        self.number += count
        return [{"prompt": f"problem {self.number % 6}", "answer": "1"}]
"""


@pytest.mark.parametrize(
    ("data", "want"),
    [
        ({"path": "p.jsonl", "curriculum": "Backwards"}, {0, 2, 3, 5}),
        ({"path": "p.jsonl", "curriculum": "Odd"}, {3, 5}),
        ({"source": "Rows"}, {0, 2, 3, 5}),
    ],
)
def test_curricula_and_sources_choose_among_the_others(tmp_path, tokenizer, data, want):
    (tmp_path / "mine.py").write_text(CURRICULA)
    jsonl(tmp_path / "p.jsonl", numbered(6))
    found = {k: f"{tmp_path}/{v}" if k == "path" else f"{tmp_path}/mine.py:{v}" for k, v in data.items()}
    stream, _, _ = compare(tokenizer, given_file(tmp_path, ["problem 1", "problem 4"]), disjoint=True, **found)
    chosen = texts(stream.next(24))
    assert set(chosen) == {f"problem {number}" for number in want}


def test_an_order_of_generated_problems_skips_them_too(tmp_path, tokenizer):
    (tmp_path / "mine.py").write_text(CURRICULA)
    chosen = {"tasks": NARROW, "curriculum": f"{tmp_path}/mine.py:Backwards"}
    every = set(texts(PromptSource(DataConfig.model_validate(chosen), tokenizer, 0).next(20)))
    left_out = sorted(every)[::2]
    stream, _, _ = compare(tokenizer, given_file(tmp_path, left_out), disjoint=True, **chosen)
    assert not set(texts(stream.next(40))) & set(left_out)


def test_other_demonstrations_are_noticed_when_a_stream_continues(tmp_path, tokenizer):
    path = jsonl(tmp_path / "p.jsonl", numbered(6))
    state = compare(tokenizer, given_file(tmp_path, ["problem 1"]), path=path, disjoint=True)[0].state_dict()
    changed, _, _ = compare(tokenizer, given_file(tmp_path, ["problem 2"]), path=path, disjoint=True)
    with pytest.raises(UserError, match="other training rows"):
        changed.load_state_dict(state)


# -- runs --------------------------------------------------------------------------------------------------------------


PROBLEMS = [{"prompt": f"{a} + 2 =", "answer": str(a)} for a in range(4, 16)]
toml = tiny_job(
    {"problems.jsonl": PROBLEMS, "given.jsonl": GIVEN}, data={"tasks": None, "path": "FOLDER/problems.jsonl"}
)


def test_a_run_samples_none_of_them_and_says_so_first(toml, tmp_path):
    given = f"--demonstrations={{path='{toml.parent}/given.jsonl',per_step=0}}"
    options = ["--evaluation.problems=2", given, f"--output_dir={tmp_path}"]
    console, notes = Console(), list[str]()
    console.note = notes.append
    parts = build(load_config(toml, [*options, "--data.disjoint=true"]), console=console)
    asked = texts(parts.sampling.source.next(40))
    assert set(asked) == {f"{a} + 2 =" for a in range(6, 14)}  # 4 and 5 have demonstrations, 14 and 15 are held out
    assert parts.demonstrations.next() == []
    said = "2 of 10 training problems and 0 of 2 held-out problems have the text of a prompt in '"
    (note,) = (note for note in notes if note.startswith(said))
    assert note.endswith("data.disjoint leaves out the 2 of training.")
    line = next(line for line in plan_lines(load_config(toml, options)) if line.startswith("demonstrations"))
    assert said in line
    assert line.endswith("set data.disjoint to true to leave out the 2 of training")


def test_the_second_stage_of_sft_grpo_is_disjoint_from_the_first(toml):
    staged = toml.with_name("staged.toml")
    staged.write_text(
        'recipe = "sft_grpo"\n' + toml.read_text() + f'\n[demonstrations]\npath = "{toml.parent}/given.jsonl"\n'
    )
    first, second = load_stages(staged)
    assert (first.recipe, second.recipe) == ("sft", "grpo")
    ((one,), (two,)) = first.demonstrations, second.demonstrations
    assert one.path == two.path
    assert (one.per_step, two.per_step) == (8, 0)
    assert (first.data.disjoint, second.data.disjoint) == (False, True)
