"""Stages: what each stage's run has of the file, the recipes and the flags; and runs one after another by the CLI."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rolltree.engine import UserError, load_config
from rolltree.engine.app.cli import main
from rolltree.engine.app.recipes import read_recipe, recipe_names
from rolltree.engine.app.stages import load_stages

from ...support.tiny import GIVEN, NO_METHOD, beside, write_job

FILE = """
name = "s"
output_dir = "out"
[model]
path = "m"
create = "make.py:make"
[data]
tasks = [{ name = "chain_sum" }]
[rollout]
n = 6
[trainer]
lr = 1e-3
prompts_per_step = 4
[[stages]]
name = "a"
recipe = "sft"
demonstrations = { path = "given.jsonl" }
trainer = { steps = 3 }
[[stages]]
name = "b"
recipe = "two_grpo"
trainer = { steps = 4, lr = 2e-3 }
"""


def write(folder: Path, text: str = FILE) -> Path:
    path = folder / "stages.toml"
    path.write_text(text)
    return path


def test_a_stage_has_the_keys_of_the_file_of_its_recipe_and_its_own(tmp_path: Path) -> None:
    a, b = load_stages(write(tmp_path))
    assert (a.name, b.name) == ("s_a", "s_b")
    assert (a.recipe, b.recipe) == ("sft", "two_grpo")
    assert (a.trainer.steps, b.trainer.steps) == (3, 4)
    assert (a.trainer.lr, b.trainer.lr) == (1e-3, 2e-3)
    assert (a.rollout.n, b.rollout.n) == (6, 2)  # a recipe of the stage is over the file
    assert (a.trainer.prompts_per_step, b.trainer.prompts_per_step) == (0, 4)
    assert [table.path for table in a.demonstrations] == ["given.jsonl"]
    assert b.demonstrations == ()
    assert [term.name for term in a.algorithm.terms] == ["sft"]
    assert b.algorithm.terms == ()
    assert (a.model.path, b.model.path) == ("m", "out/s_a/export")
    assert a.model.create is not None
    assert b.model.create is None
    assert a.stages == b.stages == ()


def test_flags_are_over_all_stages(tmp_path: Path) -> None:
    a, b = load_stages(write(tmp_path), ["--trainer.lr=5e-4", "--name=other", "--rollout.n=3"])
    assert (a.name, b.name) == ("other_a", "other_b")
    assert b.model.path == "out/other_a/export"
    assert {c.trainer.lr for c in (a, b)} == {5e-4}
    assert {c.rollout.n for c in (a, b)} == {3}


def test_a_file_adds_to_the_stages_of_a_recipe_by_their_names(tmp_path: Path) -> None:
    head = FILE.partition("[[stages]]")[0].replace('name = "s"', 'name = "s"\nrecipe = "light_r1"')
    given = "".join(
        f'[[stages]]\nname = "{n}"\ndemonstrations = {{ path = "{n}.jsonl" }}\n' for n in ("sft_1", "sft_2")
    )
    found = load_stages(write(tmp_path, head + given))
    assert [c.name for c in found] == ["s_sft_1", "s_sft_2", "s_dpo", "s_rl"]
    assert [c.recipe for c in found] == ["sft", "sft", "online_dpo", "grpo"]
    assert [[table.path for table in c.demonstrations] for c in found] == [["sft_1.jsonl"], ["sft_2.jsonl"], [], []]
    assert [c.algorithm.objective for c in found[2:]] == ["reinforce", "grpo"]


@pytest.mark.parametrize("name", [n for n in recipe_names() if "stages" in read_recipe(n).keys])
def test_every_stage_of_a_recipe_is_a_configuration(tmp_path: Path, name: str) -> None:
    stages: Any = read_recipe(name).keys["stages"]
    head = FILE.partition("[[stages]]")[0].replace('name = "s"', f'name = "s"\nrecipe = "{name}"')
    head += '[demonstrations]\npath = "given.jsonl"\n' if re.search('demonstrations|"sft"', json.dumps(stages)) else ""
    found = load_stages(write(tmp_path, head))
    assert [c.name for c in found] == [f"s_{stage['name']}" for stage in stages]
    assert [c.recipe for c in found] == [stage["recipe"] for stage in stages]
    for stage in found:
        keys = read_recipe(str(stage.recipe)).keys["algorithm"]
        assert stage.algorithm.objective == keys.get("objective", stage.algorithm.objective)
        assert [term.name for term in stage.algorithm.terms] == [term["name"] for term in keys.get("terms", [])]


REFUSED = {
    'name = "b"': ('name = "a"', "two of `stages` are called 'a'"),
    'name = "b"\n': ("", "each with a `name`"),
    'recipe = "two_grpo"': ('model = { path = "x" }', "has `model.path`, which all stages have in common"),
    "trainer = { steps = 4, lr = 2e-3 }": ('output_dir = "x"', "has `output_dir`"),
    "lr = 2e-3 }": ("lrr = 2e-3 }", "there is no key `trainer.lrr`; the nearest is `trainer.lr`"),
    '"two_grpo"': ('"light_r1"', "has the recipe 'light_r1', which has stages itself"),
}


@pytest.mark.parametrize("old", REFUSED)
def test_what_a_stage_cannot_have_is_one_sentence(tmp_path: Path, old: str) -> None:
    new, said = REFUSED[old]
    assert FILE.count(old) == 1
    with pytest.raises(UserError, match=said):
        load_stages(write(tmp_path, FILE.replace(old, new)))


def test_only_train_runs_stages(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has stages, which only `rolltree train` runs"):
        load_config(write(tmp_path))


# -- runs --------------------------------------------------------------------------------------------------------------

STAGES = """
[[stages]]
name = "teach"
recipe = "sft"
demonstrations = { path = "FOLDER/given.jsonl", per_step = 4 }
trainer = { steps = 2, lr = 1e-2 }
rollout = { n = 1 }

[[stages]]
name = "reward"
recipe = "dr_grpo"
trainer = { steps = 2, updates_per_step = 2 }
"""


METHODLESS = NO_METHOD | {"evaluation": {"problems": 0, "every": None}}


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_job(tmp_path_factory.mktemp("stages"), {"given.jsonl": GIVEN}, **METHODLESS)
    beside(path, "plain")
    path.write_text(path.read_text() + STAGES.replace("FOLDER", str(path.parent)))
    return path


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def test_a_mistake_in_a_later_stage_is_found_before_the_first_runs(toml: Path, tmp_path: Path, capsys: Any) -> None:
    wrong = toml.with_name("wrong.toml")
    wrong.write_text(toml.read_text().replace('recipe = "dr_grpo"', 'recipe = "opd"'))
    assert main(["train", str(wrong), f"--output_dir={tmp_path}"]) == 2
    assert "needs teacher_logprob" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.methods
def test_stages_run_one_after_another_and_are_resumed(toml: Path, tmp_path: Path, capsys: Any) -> None:
    """Each stage is the run that a file of its own describes, from the export of the one before, bit for bit."""
    command = ["train", str(toml), f"--output_dir={tmp_path}"]
    assert main(command) == 0
    assert "Stage 2 of 2: tiny_reward" in capsys.readouterr().out
    plain = ["train", str(toml.with_name("plain.toml")), f"--output_dir={tmp_path}"]
    first = [
        "--recipe=sft", "--name=one", "--trainer.steps=2", "--trainer.lr=1e-2", "--rollout.n=1",
        f"--demonstrations={{path='{toml.parent}/given.jsonl',per_step=4}}",
    ]  # fmt: skip
    second = ["--recipe=dr_grpo", "--name=two", "--trainer.steps=2", "--trainer.updates_per_step=2"]
    assert main([*plain, *first]) == 0
    assert main([*plain, *second, f"--model.path={tmp_path}/one/export"]) == 0
    assert same(weights(tmp_path / "tiny_teach"), weights(tmp_path / "one"))
    assert same(weights(tmp_path / "tiny_reward"), weights(tmp_path / "two"))
    assert not same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    rows = [json.loads(line) for line in (tmp_path / "tiny_reward" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    capsys.readouterr()
    assert main(command) == 2
    assert "already holds a run" in capsys.readouterr().err
    whole = weights(tmp_path / "tiny_reward")
    shutil.rmtree(tmp_path / "tiny_reward")
    assert main([*command, "--resume"]) == 0
    said = capsys.readouterr().out
    assert said.count("It has finished already.") == 1
    assert same(weights(tmp_path / "tiny_reward"), whole)
    shutil.rmtree(tmp_path / "tiny_reward" / "export")  # as if it had been killed before its end
    assert main([*command, "--resume"]) == 0
    assert same(weights(tmp_path / "tiny_reward"), whole)
