"""Recipes: defaults < recipe < file < flags, key by key; the record of a run holds what they resolved to."""

from __future__ import annotations

import json
import runpy
import tomllib
from pathlib import Path

import pytest

from rolltree.engine import UserError, load_config
from rolltree.engine.app import recipes
from rolltree.engine.app.cli import main
from rolltree.engine.app.config import resolved_toml, training_config
from rolltree.engine.app.dry_run import recipe_line
from rolltree.engine.app.keys import config_keys
from rolltree.engine.app.recipes import combined, flat, read_recipe, recipe_names
from rolltree.engine.app.stages import load_stages

FILE = """
name = "demo"
recipe = "mine"
[model]
path = "m"
[data]
tasks = [{ name = "chain_sum" }]
[trainer]
lr = 1e-3
"""
MINE = """# papers: A Paper 2501.00001; Another
# formula: a
#   b
# differs: nothing
# source: here

[rollout]
n = 16
program = "treepo"
program_options = { segment_tokens = 64, branch = 2 }

[algorithm]
objective = "dapo"
objective_options = { eps_high = 0.4, kl_coef = 0.1 }
terms = [{ name = "one", objective = "sft", select = "injected", weight = 0.5 }]

[roles.reference]

[trainer]
lr = 1e-5
steps = 7

[[reward.shaping]]
name = "overlong"
options = { longest = 10, buffer = 5 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recipes with one, `mine`."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "mine.toml").write_text(MINE)
    monkeypatch.setattr(recipes, "FOLDER", folder)
    return folder


def write(folder: Path, text: str = FILE) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_each_key_has_the_value_of_the_last_that_gives_it(folder, tmp_path):
    config = load_config(write(tmp_path), ["--trainer.steps", "9"])
    assert config.recipe == "mine"
    assert config.rollout.temperature == 1.0  # a default
    assert (config.rollout.n, config.rollout.program) == (16, "treepo")  # the recipe's
    assert config.trainer.lr == 1e-3  # the file's over the recipe's
    assert config.trainer.steps == 9  # the flag's over the recipe's
    assert config.roles.reference is not None


def test_a_flag_names_a_recipe_too_and_replaces_the_files(folder, tmp_path):
    (folder / "other.toml").write_text("[rollout]\nn = 3\n")
    assert load_config(write(tmp_path), ["--recipe", "other"]).rollout.n == 3
    assert load_config(write(tmp_path), ["--recipe", "other"]).algorithm.terms == ()
    without = write(tmp_path, FILE.replace('recipe = "mine"', ""))
    assert load_config(without, ["--recipe=mine"]).rollout.n == 16
    assert load_config(without).rollout.n == 8


def test_options_of_a_part_are_combined_key_by_key(folder, tmp_path):
    text = FILE + "[algorithm]\nobjective_options = { kl_coef = 0.2, beta = 3.0 }\n"
    config = load_config(write(tmp_path, text), ["--algorithm.objective_options.beta", "4.0"])
    assert config.algorithm.objective_options == {"eps_high": 0.4, "kl_coef": 0.2, "beta": 4.0}


@pytest.mark.parametrize("as_flag", [True, False])
def test_options_of_a_part_that_is_replaced_do_not_apply_to_the_new_one(folder, tmp_path, as_flag):
    text = FILE if as_flag else FILE + '[algorithm]\nobjective = "gspo"\n'
    config = load_config(write(tmp_path, text), ["--algorithm.objective=gspo"] if as_flag else [])
    assert config.algorithm.objective_options == {}
    assert config.rollout.program_options == {"segment_tokens": 64, "branch": 2}
    same = load_config(write(tmp_path), ["--algorithm.objective=dapo"])
    assert same.algorithm.objective_options == {"eps_high": 0.4, "kl_coef": 0.1}
    given = load_config(write(tmp_path), ["--algorithm.objective=gspo", "--algorithm.objective_options={eps_low=0.1}"])
    assert given.algorithm.objective_options == {"eps_low": 0.1}


def test_lists_of_tables_are_combined_by_name(folder, tmp_path):
    shaping = '[[reward.shaping]]\nname = "gated"\noptions = { gate = "x" }\n'
    shaping += '[[reward.shaping]]\nname = "overlong"\noptions = { buffer = 3 }\n'
    terms = (
        '[[algorithm.terms]]\nname = "two"\npairs = "best_and_worst"\n[[algorithm.terms]]\nname = "one"\nweight = 2.0\n'
    )
    config = load_config(write(tmp_path, FILE + shaping + terms))
    assert [(s.name, s.options) for s in config.reward.shaping] == [
        ("overlong", {"longest": 10, "buffer": 3}),
        ("gated", {"gate": "x"}),
    ]
    assert [(t.name, t.objective, t.select, t.weight) for t in config.algorithm.terms] == [
        ("one", "sft", "injected", 2.0),
        ("two", None, None, 1.0),
    ]


def test_a_name_given_twice_is_two_tables():
    found = combined({"terms": [{"name": "a", "x": 1}]}, {"terms": [{"name": "a", "y": 2}, {"name": "a", "y": 3}]})
    assert found["terms"] == [{"name": "a", "x": 1, "y": 2}, {"name": "a", "y": 3}]


def test_an_empty_list_of_the_file_takes_the_recipes_tables_away(folder, tmp_path):
    assert load_config(write(tmp_path), ["--reward.shaping=[]"]).reward.shaping == ()


def test_combining_changes_neither_table():
    recipe, given = {"a": {"b": 1, "c": [1]}}, {"a": {"b": 2}}
    assert combined(recipe, given) == {"a": {"b": 2, "c": [1]}}
    assert (recipe, given) == ({"a": {"b": 1, "c": [1]}}, {"a": {"b": 2}})


@pytest.mark.parametrize(
    ("flags", "updates"),
    [
        ([], 16),
        (["--trainer.prompts_per_step=16"], 16),
        (["--trainer.prompts_per_step=4"], 4),
        (["--trainer.prompts_per_step=1"], 1),
        (["--trainer.prompts_per_step=4", "--trainer.updates_per_step=2"], 2),
        (["--trainer.prompts_per_step=4", '--demonstrations=[{path="d.jsonl"}]'], 8),
    ],
)
def test_a_recipes_updates_are_shares_of_the_batch(tmp_path: Path, flags: list[str], updates: int) -> None:
    config = load_config(write(tmp_path), ["--recipe=dapo", *flags])
    assert config.trainer.updates_per_step == updates
    assert ("16)" in recipe_line(config)) == (updates < 16)
    again = load_config(write(tmp_path, resolved_toml(config)))
    assert again.trainer.updates_per_step == updates


def test_a_stages_updates_are_shares_of_its_own_batch(tmp_path: Path) -> None:
    stages = 'recipe = "lite_ppo"\n' + FILE.replace('recipe = "mine"', "")
    stages += "[[stages]]\nname = 'a'\ntrainer = { prompts_per_step = 4 }\n[[stages]]\nname = 'b'\nrecipe = 'dapo'\n"
    stages += "[[stages]]\nname = 'c'\ntrainer = { updates_per_step = 3 }\n"
    path = write(tmp_path, stages)
    assert [config.trainer.updates_per_step for config in load_stages(path)] == [4, 16, 3]
    flags = ["--trainer.prompts_per_step=5"]
    assert [config.trainer.updates_per_step for config in load_stages(path, flags)] == [5, 5, 3]


def test_what_a_recipe_leaves_to_the_run_is_said_where_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lacks `reward.parts.verifier`; add it. The recipe 'azr' needs .*name solved"):
        load_config(write(tmp_path), ["--recipe=azr"])
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path), ["--recipe=azr", "--trainer.lr=-1", "--reward.parts=[]"])
    assert "needs" not in str(caught.value)


def test_updates_that_a_file_gives_are_not_changed(tmp_path: Path) -> None:
    flags = ["--recipe=dapo", "--trainer.prompts_per_step=4", "--trainer.updates_per_step=16"]
    with pytest.raises(UserError, match="set the first to 4 or less, or the second to 16 or more"):
        load_config(write(tmp_path), flags)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dappo", "There is no recipe 'dappo'; the nearest are dppo, dapo"),
        ("Grpo", "grpo"),
        ("", "There is no recipe ''; choose another"),
        ("../settings", "There is no recipe '../settings'"),
        ("x" * 5000, "There is no recipe 'xxx"),
    ],
)
def test_an_unknown_recipe_is_one_sentence(tmp_path, name, said):
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path), ["--recipe", name])
    assert said in str(caught.value)
    assert str(caught.value).endswith(".")
    assert len(str(caught.value)) < 300


def test_a_recipe_that_is_no_text_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="`recipe` = 3"):
        load_config(write(tmp_path, FILE.replace('recipe = "mine"', "recipe = 3")))


def test_the_record_of_a_run_does_not_depend_on_the_recipe(folder, tmp_path):
    config = load_config(write(tmp_path), ["--algorithm.objective_options.eps_high=0.3"])
    record = write(tmp_path, resolved_toml(config))
    assert "recipe 'mine'" in record.read_text()
    (folder / "mine.toml").write_text(MINE + '[loop]\ncallback = "dynamic_sampling"\n')  # a key that was left out
    again = load_config(record)
    assert training_config(again) == training_config(config)
    assert load_config(write(tmp_path)).loop.callback == "dynamic_sampling"
    assert training_config(config)["algorithm.objective_options"] == {"eps_high": 0.3, "kl_coef": 0.1}
    assert "recipe" not in training_config(config)


def test_the_plan_says_which_keys_are_the_recipes_and_which_were_changed(folder, tmp_path):
    config = load_config(write(tmp_path), ["--algorithm.objective_options.eps_high=0.3", "--rollout.n=16"])
    kept, changed = recipe_line(config).split("; ")
    assert "algorithm.objective," in kept
    assert "reward.shaping" in kept
    assert "rollout.n" in kept
    assert "algorithm.objective_options" not in kept
    assert changed == "changed: algorithm.objective_options, trainer.lr"


@pytest.mark.check(but=71)
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_says_what_it_is(name):
    recipe = read_recipe(name)
    assert {"papers", "formula", "differs", "source"} <= recipe.about.keys(), recipe.about
    assert all(recipe.about.values())
    assert all(paper.name and len(paper.name) < 120 for paper in recipe.papers)
    text = (recipes.FOLDER / f"{name}.toml").read_text()
    assert len(text.splitlines()) <= 32
    assert max(map(len, text.splitlines())) <= 120
    assert "recipe" not in recipe.keys
    assert not {"name", "output_dir", "seed"} & recipe.keys.keys()
    assert recipe.keys.get("model", {}).keys() <= {"lora"}  # which model is the run's own
    if "inferred" not in recipe.about:
        assert "[inf]" not in text
    assert tomllib.loads(recipe.toml) == recipe.keys


@pytest.mark.check(but=34)
@pytest.mark.parametrize("name", recipe_names())
def test_every_key_of_a_recipe_is_one_of_the_configuration(name):
    known = {key.key for key in config_keys()}
    recipe = read_recipe(name)
    assert recipe.keys
    for key, _ in flat(recipe.keys):
        of_policy = key.startswith("models.")  # tables of any name
        assert key in known or of_policy or key in ("roles.reference", "roles.critic"), key


def test_papers_are_read_with_and_without_numbers(folder):
    papers = read_recipe("mine").papers
    assert [(paper.name, paper.number) for paper in papers] == [("A Paper", "2501.00001"), ("Another", None)]
    assert [str(paper) for paper in papers] == ["A Paper (arXiv 2501.00001)", "Another"]
    assert read_recipe("mine").about["formula"] == "a b"


def test_a_paper_has_one_number():
    numbers: dict[str, set[str]] = {}
    for name in recipe_names():
        for paper in read_recipe(name).papers:
            if paper.number is not None:
                numbers.setdefault(paper.name, set()).add(paper.number)
    assert {name: found for name, found in numbers.items() if len(found) > 1} == {}


def test_a_configuration_with_a_recipe_is_json(folder, tmp_path):
    assert json.dumps(load_config(write(tmp_path)).model_dump(mode="json"))


def lines(capsys, *arguments: str) -> list[str]:
    assert main(["methods", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_methods_of_a_name_prints_formula_source_and_recipe(capsys):
    said = "\n".join(lines(capsys, "gspo"))
    assert "recipe gspo" in said
    assert "GSPO (arXiv 2507.18071)" in said
    assert "formula: -min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A)" in said
    assert "source: the paper, section 5.1" in said
    assert 'objective = "gspo"' in said
    assert "objective gspo (algorithm.objective)" in said  # the part of the same name


def test_methods_of_a_part_names_its_options_and_its_recipes(capsys):
    said = "\n".join(lines(capsys, "overlong"))
    assert "overlong (reward.shaping.name)" in said
    assert "options: longest, buffer=None" in said
    assert "recipes: dapo, high_entropy" in said
    assert "recipes: online_dpo" in "\n".join(lines(capsys, "best_and_worst"))
    assert "advantage: virtual_max" in "\n".join(lines(capsys, "ngrpo"))


def test_methods_of_an_unknown_name_is_one_sentence(capsys):
    assert main(["methods", "dapoo"]) == 2
    assert "There is no method 'dapoo'; the nearest are dapo," in capsys.readouterr().err
    assert main(["methods", "dapo", "--papers"]) == 2


def test_papers_are_listed_with_their_recipes(capsys):
    found = lines(capsys, "--papers")
    assert any(line.startswith("dapo ") and line.endswith("DAPO (arXiv 2503.14476)") for line in found)
    assert len(found) == sum(len(read_recipe(name).papers) for name in recipe_names())


def test_methods_lists_every_recipe_and_part(capsys):
    found = lines(capsys)
    for name in [*recipe_names(), "token_entropy_mask", "virtual_max", "serial_exits", "towards", "mcts", "top_up"]:
        assert any(line.startswith(f"  {name} ") for line in found), name


def test_the_page_of_the_methods_is_what_the_recipes_say():
    page = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "methods.py"))
    assert page["PAGE"].read_text(encoding="utf-8") == page["page"](), "run python docs/methods.py"
