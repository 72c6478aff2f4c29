"""TOML -> overrides -> checked models, and the sentence for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltree.engine.app.config import load_config, resolved_toml
from rolltree.engine.app.keys import config_keys
from rolltree.engine.errors import UserError
from rolltree.engine.settings import TrainConfig

GOOD = """
name = "demo"
[model]
path = "models/small"
create = "warmup.py:make"
[data]
max_prompt_tokens = 64
[[data.tasks]]
name = "basic_arithmetic"
weight = 2.0
options = { min_terms = 2, note = "ü" }
[rollout]
n = 4
program_options = { segment_tokens = 8 }
[trainer]
lr = 1e-3
betas = [0.9, 0.98]
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(tmp_path, GOOD)


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def sentence(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert caught.value.exit_code == 2
    return message


def test_file_and_defaults(good: Path) -> None:
    config = load_config(good)
    assert (config.trainer.lr, config.trainer.betas, config.rollout.n) == (1e-3, (0.9, 0.98), 4)
    assert config.rollout.temperature == 1.0
    assert config.data.tasks[0].options == {"min_terms": 2, "note": "ü"}
    assert config.run_dir == Path("runs/demo")


def test_callables_are_found_from_the_toml_files_directory(good: Path) -> None:
    config = load_config(good, ["--reward.verifier", "here.py:check"])
    assert config.model.create == f"{good.parent}/warmup.py:make"
    assert config.reward.verifier == f"{Path.cwd()}/here.py:check"


def test_overrides_of_every_form_and_type(good: Path) -> None:
    overrides = ["--trainer.lr", "1e-6", "--seed=7", "--algorithm.drop_zero_variance", "false", "--name", "42"]
    overrides += ["--trainer.betas", "[0.5, 0.9]", "--rollout.program_options.depth", "3", "--output_dir=a=b"]
    overrides += ["--data.tasks", '[{name = "chain_sum"}]', "--data.template", "Solve {prompt}", "--seed", "8"]
    config = load_config(good, overrides)
    assert (config.trainer.lr, config.seed, config.name, config.output_dir) == (1e-6, 8, "42", "a=b")
    assert config.algorithm.drop_zero_variance is False
    assert config.trainer.betas == (0.5, 0.9)
    assert config.rollout.program_options == {"segment_tokens": 8, "depth": 3}
    assert [t.name for t in config.data.tasks] == ["chain_sum"]
    assert config.data.template == "Solve {prompt}"
    assert load_config(good, [("seed", "3")]).seed == 3
    assert (
        load_config(good, ["--rollout.program_options.day", "2026-01-02"]).rollout.program_options["day"]
        == "2026-01-02"
    )


def test_resolved_toml_reads_back_to_an_equal_configuration(good: Path, tmp_path: Path) -> None:
    config = load_config(good, ["--rollout.top_k", "20", "--data.template", 'a "quoted"\n\t\\ {prompt}'])
    again = load_config(write(tmp_path, resolved_toml(config)))
    assert again == config
    assert "top_p = 1.0" in resolved_toml(config)
    assert "min_p" not in resolved_toml(config)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("lr = 1e-3", "lrr = 1e-3"), ["there is no key `trainer.lrr`", "nearest is `trainer.lr`", "config.toml"]),
        (("[trainer]", "[optimizer]"), ["there is no key `optimizer`"]),
        (("[rollout]", "[rollout]\nlr = 1"), ["`rollout.lr`", "nearest is `trainer.lr`"]),
        (("weight = 2.0", "wieght = 2.0"), ["`data.tasks.wieght`", "nearest is `data.tasks.weight`"]),
        (('path = "models/small"', ""), ["lacks `model.path`"]),
        (("[model]", "[modell]"), ["there is no key `modell`", "nearest is `model.path`", "1 more mistake"]),
        (("lr = 1e-3", "lr = -1.0"), ["`trainer.lr` = -1.0 is not allowed", "greater than 0"]),
        (("lr = 1e-3", "lr = inf"), ["`trainer.lr`", "finite"]),
        (("lr = 1e-3", 'lr = "fast"'), ['`trainer.lr` = "fast" is not allowed', "number"]),
        (("n = 4", "n = 0"), ["`rollout.n` = 0 is not allowed", "greater than 0"]),
        (("n = 4", "n = 4.0"), ["`rollout.n` = 4.0", "integer"]),
        (("n = 4", "n = true"), ["`rollout.n` = true", "integer"]),
        (("betas = [0.9, 0.98]", "betas = [0.9, 1.0]"), ["`trainer.betas` = 1.0", "less than 1"]),
        (("[rollout]", '[model2]\n[reward]\non_failure = "skip"\n[rollout]'), ["model2"]),
        (("[rollout]", '[reward]\non_failure = "skip"\n[rollout]'), ['= "skip"', "'drop', 'zero' or 'raise'"]),
        (("[rollout]", '[reward]\nverifier = "maths"\n[rollout]'), ['= "maths"', "task, math, exact"]),
        (("[data]", '[data]\ntemplate = "no place"'), ["`data.template`", "{prompt}"]),
        (('name = "demo"', 'name = "../x"'), ['`name` = "../x"', "plain name"]),
        (("[model]\n", "data = 3\n[model]\n"), ["config.toml", "line"]),  # a table defined twice: broken TOML
        (("n = 4", "n = "), ["not valid TOML", "line 13"]),
    ],
)
def test_every_mistake_is_one_sentence(tmp_path: Path, change: tuple[str, str], expected: list[str]) -> None:
    old, new = change
    assert old in GOOD
    message = sentence(write(tmp_path, GOOD.replace(old, new, 1)))
    for part in expected:
        assert part in message, message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--trainer.lrr", "1"], ["--trainer.lrr", "`trainer.lr`"]),
        (["--lr", "1"], ["--lr is not a key", "`trainer.lr`"]),
        (["--tempurature", "1"], ["`rollout.temperature`"]),
        (["--trainer", "1"], ["--trainer is not a key"]),
        (["--trainer.lr"], ["--trainer.lr needs a value"]),
        (["--trainer.lr", "-1"], ["--trainer.lr: `trainer.lr` = -1 is not allowed", "greater than 0"]),
        (["--trainer.lr", "tiny"], ['--trainer.lr: `trainer.lr` = "tiny"']),
        (["--data.tasks.0.name", "x"], ["whole list"]),
        (["stray"], ["'stray' stands alone"]),
        (["--rollout.engines", "-1"], ["`rollout.engines` = -1 is not allowed", "integer from 0 to 4096, or a table"]),
        (["--rollout.engines", "two"], ['`rollout.engines` = "two"', "or a table such as { least = 2, most = 64 }"]),
        (["--rollout.engines", "true"], ["`rollout.engines` = true", "integer from 0 to 4096"]),
        (["--rollout.engines", "{least=3,most=2}"], ["`least` = 3 exceeds `most` = 2; exchange them"]),
        (["--rollout.engines", "{least=0,most=2}"], ["`rollout.engines`: `least` must be an integer from 1 to 4096"]),
        (["--rollout.engines", "{least=1,most=5000}"], ["`most` must be an integer from 1 to 4096"]),
        (["--rollout.engines", "{least=1,most=2.5}"], ["`most` must be an integer"]),
        (["--rollout.engines", "{least=1}"], ["the keys `least` and `most`, such as"]),
        (["--rollout.engines", "{least=1,most=2,more=3}"], ["the keys `least` and `most`"]),
        (["--rollout.engines.most", "2"], ["--rollout.engines.most is not a key", "`rollout.engines`"]),
    ],
)
def test_every_wrong_override_is_one_sentence(good: Path, overrides: list[str], expected: list[str]) -> None:
    message = sentence(good, *overrides)
    for part in expected:
        assert part in message, message


@pytest.mark.parametrize(
    ("text", "bounds"), [("3", (None, 3)), ("{least=2,most=5}", (2, 5)), ("{least=2,most=2}", (2, 2))]
)
def test_engines_are_a_number_or_a_range(good: Path, text: str, bounds: tuple[int | None, int]) -> None:
    config = load_config(good, [f"--rollout.engines={text}"])
    assert (config.rollout.least_engines, config.rollout.most_engines) == bounds
    good.write_text(resolved_toml(config))
    assert load_config(good) == config


def test_a_file_may_begin_with_a_byte_order_mark(good: Path) -> None:
    plain = load_config(good)
    good.write_bytes(b"\xef\xbb\xbf" + good.read_bytes())
    assert load_config(good) == plain
    good.write_bytes(b"\xef\xbb\xbf" + good.read_bytes())
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(good)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "There is no configuration file" in sentence(tmp_path / "absent.toml")
    assert "cannot be read: Is a directory" in sentence(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b'name = "x"\n\xff\xfe')
    assert "line 2 is not UTF-8 text" in sentence(binary)


def test_every_key_is_documented() -> None:
    keys = list(config_keys())
    assert not [k.key for k in keys if not k.doc]
    assert {"trainer.lr", "data.tasks.name", "seed"} <= {k.key for k in keys}
    assert next(k for k in keys if k.key == "model.dtype").type == '"float32" | "bfloat16"'


def test_models_check_themselves_in_python_too() -> None:
    with pytest.raises(ValueError, match="none of them is given"):
        TrainConfig.model_validate({"name": "x", "model": {"path": "m"}, "data": {}})
