"""Pictures from a data file to a run that trains on them, and what a data file may get wrong."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.smolvlm.processing_smolvlm import _prompt_single_image

from rolltree.engine import TokenTree, load_config
from rolltree.engine.app.assembly.preflight import check_shown
from rolltree.engine.app.cli import main
from rolltree.engine.app.report.trees import build_tree
from rolltree.engine.data.media import FIRST_ID, PromptMedia
from rolltree.engine.data.store import read_rollouts
from rolltree.engine.errors import UserError
from rolltree.engine.model import processor
from rolltree.engine.prompts.prompts import held_out, make_prompts, pictures_of
from rolltree.engine.prompts.sources import PromptSource
from rolltree.engine.record.rollout_files import texts_of, write_step
from rolltree.engine.rollout.native.pictures import Shown
from rolltree.engine.settings import DataConfig
from rolltree.engine.tasks import problem_of, read_problems

from ...support.picture_models import IMAGE, make_models
from ...support.picture_run import SHOWN, encoded, metrics, write_run
from ...support.tiny import write_job


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of `write_run`, with a run of two steps in it."""
    directory = tmp_path_factory.mktemp("pictures")
    assert main(["train", str(write_run(directory))]) == 0
    return directory


@pytest.fixture(scope="module")
def tokenizer(home: Path) -> Any:
    return AutoTokenizer.from_pretrained(home / "model")


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def changed(home: Path, export: Path) -> set[str]:
    """The parts of the model, "visual" and the rest, that an export has other weights of."""
    before, after = weights(home / "model"), weights(export)
    assert before.keys() == after.keys()
    return {"visual" if "visual" in key else "text" for key in before if not torch.equal(before[key], after[key])}


@pytest.mark.check
def test_a_run_trains_the_decoder_and_its_sampler_agrees(home: Path) -> None:
    rows = [row for row in metrics(home) if "training/rollout_probs_diff_mean" in row]
    assert len(rows) == 2
    assert all(row["training/rollout_probs_diff_mean"] < 1e-6 for row in rows)
    assert any(row["actor/grad_norm"] > 0 for row in rows)
    export = home / "runs" / "tiny" / "export"
    assert changed(home, export) == {"text"}
    assert AutoImageProcessor.from_pretrained(export).merge_size == 2
    (found, *_) = pq.read_table(home / "runs" / "tiny" / "rollouts" / "step_000001.parquet").to_pylist()
    assert max(found["prompt_ids"]) >= FIRST_ID
    assert len(found["pictures"]) == 1
    assert not {120, 123} & set(found["response_ids"])


@pytest.mark.slow
def test_wrong_positions_show_in_the_metrics(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PromptMedia.rotary_of
    monkeypatch.setattr(PromptMedia, "rotary_of", lambda self, begin, count: right(self, begin, count) * 0 + begin)
    args = ["--output_dir", str(tmp_path), "--trainer.steps", "1", "--trainer.self_check", "false"]
    assert main(["train", str(home / "tiny.toml"), *args]) == 0
    (row,) = (json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()[1:])
    assert row["training/rollout_probs_diff_mean"] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_pictures_that_attend_both_ways(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of Gemma agrees with its sampler; with one-way pictures in the engine it would not."""
    args = ["train", str(write_run(tmp_path, name)), "--trainer.steps", "1", "--evaluation.problems", "0"]
    longest = 16 if name == "gemma3" else 88
    args += ["--evaluation.every", "0", "--data.max_prompt_tokens", str(longest)]
    args += ["--trainer.max_tokens", str(longest + 8)]  # a sequence fits, a tree does not
    assert main(args) == 0
    prompts = [
        row["prompt_ids"] for row in pq.read_table(tmp_path / "runs/tiny/rollouts/step_000001.parquet").to_pylist()
    ]
    rows = {sum(token >= FIRST_ID for token in ids) for ids in prompts}
    assert rows == {4} if name == "gemma3" else all(40 < n <= 70 for n in rows)
    for ids in prompts:
        shown = [n for n, token in enumerate(ids) if token >= FIRST_ID]
        assert (ids[shown[0] - 1], ids[shown[-1] + 1]) == (121, 122)
    (row,) = (row for row in metrics(tmp_path) if "training/rollout_probs_diff_mean" in row)
    assert row["training/rollout_probs_diff_mean"] < 1e-6
    if name == "gemma3":  # tests of the engine show the same mistake
        return
    monkeypatch.setattr(Shown, "with_runs", lambda self, *args: self)
    assert main([*args, "--name", "wrong", "--trainer.self_check", "false"]) == 0
    lines = (tmp_path / "runs" / "wrong" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("training/rollout_probs_diff_mean", 0.0) for line in lines) > 1e-4


@pytest.mark.check
def test_a_run_of_smolvlm_has_the_prompts_of_transformers_processor(tmp_path: Path) -> None:
    args = ["train", str(write_run(tmp_path, "smolvlm")), "--trainer.steps", "1", "--evaluation.problems", "0"]
    assert main([*args, "--evaluation.every", "0"]) == 0
    (row,) = (row for row in metrics(tmp_path) if "training/rollout_probs_diff_mean" in row)
    assert row["training/rollout_probs_diff_mean"] < 1e-6
    tokens = _prompt_single_image(4, "<fake_token_around_image>", " <|image_pad|> ", "<global-img>")
    expected = AutoTokenizer.from_pretrained(tmp_path / "model")(tokens)["input_ids"]
    assert expected == [124, 125, 120, 120, 120, 120, 124]
    for row in pq.read_table(tmp_path / "runs/tiny/rollouts/step_000001.parquet").to_pylist():
        ids = [120 if token >= FIRST_ID else token for token in row["prompt_ids"]]
        assert any(ids[n : n + 7] == expected for n in range(len(ids)))
    config = tmp_path / "model" / "preprocessor_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"do_image_splitting": True}))
    with pytest.raises(
        UserError, match=r"cuts pictures into parts \(do_image_splitting\), which is not supported; set"
    ):
        processor.PictureProcessor(str(tmp_path / "model"))


# -- the report -------------------------------------------------------------------------------------------------------


def decoded(content: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), np.float32)


def test_the_report_shows_the_pictures_of_its_prompts(home: Path) -> None:
    rows = pq.read_table(home / "problems.parquet").to_pylist()
    page = (home / "runs" / "tiny" / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="trees">(.*?)</script>', page, re.S)
    assert found
    trees = json.loads(found[1])
    assert len(trees) == 6
    for tree in trees:
        own = int(tree["id"].rpartition("/")[2])
        (url,) = tree["nodes"][0]["pictures"]
        shown = decoded(base64.b64decode(url.removeprefix("data:image/jpeg;base64,")))
        there = {
            number: np.abs(shown - decoded(row["image"]["bytes"])).mean()
            for number, row in enumerate(rows)
            if decoded(row["image"]["bytes"]).shape == shown.shape
        }
        assert min(there, key=lambda number: there[number]) == own
        assert there.pop(own) < 12
        assert all(far > 40 for far in there.values())  # pictures of noise
        assert not any("pictures" in node for node in tree["nodes"][1:])


def test_rollouts_have_small_pictures_of_the_first_prompts(home: Path, tmp_path: Path) -> None:
    """A large picture is made small, one that is gone is empty, and later prompts have none."""
    tall = Image.fromarray(np.random.default_rng(2).integers(0, 256, (600, 300, 3), dtype=np.uint8))
    tall.save(tmp_path / "tall.png")
    images: list[tuple[Any, ...]] = [("tall.png",), ("gone.png", "tall.png"), (), ("tall.png",), ("tall.png",)]
    trees = read_rollouts(home / "runs" / "tiny" / "rollouts" / "step_000001.parquet")
    batch: list[Any] = []
    for number, names in enumerate(images):
        tree = TokenTree.from_sequences([1, 2], [[3], [4]])
        tree.rewards["reward"], tree.meta = np.zeros(2, np.float32), trees[0].meta | {"prompt_id": str(number)}
        prompt = SimpleNamespace(images=tuple(str(tmp_path / name) for name in names))
        batch.append(SimpleNamespace(tree=tree, prompt=prompt, texts=["a", "b"]))
    pictures = [group.prompt.images for group in batch]
    write_step(tmp_path, 7, [group.tree for group in batch], [group.texts for group in batch], pictures)
    (file,) = (tmp_path / "rollouts").iterdir()
    written = [row["thumbnails"] for row in pq.read_table(file).to_pylist()]
    assert [[len(content) > 0 for content in found or []] for found in written[::2]] == [
        [True], [False, True], [], [True], [],
    ]  # fmt: skip
    assert written[1::2] == [None] * 5
    assert decoded(written[0][0]).shape == (128, 64, 3)
    assert [text.tokens.tolist() for text in texts_of(tmp_path, 7)[:2]] == [[3], [4]]
    assert texts_of(tmp_path, 6) == []
    pages = build_tree(pq.read_table(file).to_pylist()[2:4], None)
    assert [bool(url) for url in pages["nodes"][0]["pictures"]] == [False, True]


# -- data files --------------------------------------------------------------------------------------------------------


def prompts_of(rows: list[dict[str, Any]], tokenizer: Any, folder: Path, **keys: Any) -> list[Any]:
    config = DataConfig.model_validate({"path": "x.parquet", "chat": True} | keys)
    named = config.prompt_key, config.answer_key, config.image_key
    problems = [problem_of({"answer": "w9"} | row, "'x'", "x", n, *named, folder=folder) for n, row in enumerate(rows)]
    return make_prompts(problems, config, tokenizer)


def test_all_forms_of_a_picture_give_the_same_prompt(tokenizer: Any, tmp_path: Path) -> None:
    """A path, bytes, Hugging Face's dict, an object of Pillow, and parts of a message; independently expanded ids."""
    content = encoded(np.random.default_rng(1))
    (tmp_path / "a.png").write_bytes(content)
    forms = [
        "a.png",
        content,
        {"bytes": content, "path": None},
        {"bytes": None, "path": "a.png"},
        Image.open(tmp_path / "a.png"),
        [content],
    ]
    rows: list[dict[str, Any]] = [{"prompt": "w7 w8", "image": form} for form in forms]
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "w7 w8"}]
    rows.append({"prompt": [{"role": "user", "content": parts}], "image": content})
    rows.append({"prompt": [{"role": "user", "content": "w7 w8"}], "image": content})
    rows.append({"prompt": [{"role": "user", "content": [{**parts[0], "image": "a.png"}, parts[1]]}], "image": None})
    made = prompts_of(rows, tokenizer, tmp_path, image_key="image")
    image = AutoImageProcessor.from_pretrained(tokenizer.name_or_path)(images=[Image.open(tmp_path / "a.png")])
    count = int(np.prod(image["image_grid_thw"])) // 4
    for prompt in made:
        (picture,) = pictures_of(prompt, tokenizer)
        np.testing.assert_array_equal(picture.inputs["pixel_values"], np.asarray(image["pixel_values"]))
        assert prompt.token_ids == [100, 121, *picture.ids, 122, 7, 8, 101]
        assert len(picture.ids) == count
        assert prompt.token_ids == made[0].token_ids
    (text,) = prompts_of(
        [{"prompt": f"w7 {SHOWN} w8", "image": content}], tokenizer, tmp_path, image_key="image", chat=False
    )
    assert text.token_ids == [7, 121, *picture.ids, 122, 8]


def test_vllm_takes_pictures_of_qwen_alone(tokenizer: Any, tmp_path: Path) -> None:
    toml = write_job(tmp_path)
    content = encoded(np.random.default_rng(1))
    shown, plain = (
        prompts_of([{"prompt": "w7"} | more], tokenizer, tmp_path, image_key=key)
        for more, key in (({"image": content}, "image"), ({}, None))
    )
    for name in ("qwen3_vl", "gemma3"):
        model, _ = make_models(name)
        for prompts, backend in ((shown, "native"), (plain, "vllm"), (shown, "vllm")):
            config = load_config(toml, [f"--rollout.backend={backend}"])
            if (name, prompts, backend) == ("gemma3", shown, "vllm"):
                with pytest.raises(UserError, match="of Qwen's models only, not of Gemma3ForConditionalGeneration"):
                    check_shown(prompts, model, config)
            else:
                check_shown(prompts, model, config)


def test_pictures_of_equal_text_are_different_problems(home: Path, tokenizer: Any) -> None:
    data = DataConfig.model_validate({"path": str(home / "problems.parquet"), "chat": True, "image_key": "image"})
    held = held_out(data, 4, tokenizer)
    source = PromptSource(data, tokenizer, 0, held)
    assert len(source.known) == 5
    seen = [{t for t in prompt.token_ids if t >= FIRST_ID} for prompt in [*held, *source.known]]
    assert len({min(ids) for ids in seen}) == 9
    digests = source.state_dict()["digests"]
    rows = pq.read_table(home / "problems.parquet").to_pylist()
    assert len({problem.identity for problem in read_problems(data.place, "prompt", "answer", "image").rows}) == len(
        rows
    )
    assert digests == PromptSource(data, tokenizer, 1, held).state_dict()["digests"]


def test_a_picture_in_use_is_held_once(home: Path, tokenizer: Any) -> None:
    content = encoded(np.random.default_rng(1))
    made = prompts_of([{"prompt": w, "image": content} for w in ("w7", "w8")], tokenizer, home, image_key="image")
    (first,), (second,) = (pictures_of(prompt, tokenizer) for prompt in made)
    assert first is second


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": f"{SHOWN} w7", "image": b"x"}, "prompt 'x/0' cannot be used: Pillow cannot read a picture"),
        (
            {"prompt": f"{SHOWN} {SHOWN} w7"},
            "prompt 'x/0' cannot be used: The prompt has 2 placeholders .* for 1 pictures",
        ),
        ({"prompt": "w7"}, "prompt 'x/0' cannot be used: The prompt has 0 placeholders"),
        ({"prompt": "w7 " + "<|image_pad|>" * 3}, "prompt 'x/0' cannot be used: The prompt has 3 placeholders"),
        ({"prompt": "w7", "image": 5}, "Row 0 of 'x' in column 'image' .* holds a int for a picture"),
        ({"prompt": "w7", "image": "none.png"}, "Row 0 of 'x' in column 'image' .* names the picture '.*none.png'"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]}, "an image part without a"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "neither a text nor an image"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": b"x"}]}]},
            "fewer parts of the type image",
        ),
        (
            {"prompt": [{"role": "system", "content": "w7"}, {"role": "tool", "content": "w7"}]},
            "no message of the user",
        ),
    ],
)
def test_what_a_row_gets_wrong_names_the_row(row: dict[str, Any], why: str, tokenizer: Any, tmp_path: Path) -> None:
    own = {"image": encoded(np.random.default_rng(1))} | row
    chat = isinstance(row["prompt"], list)
    with pytest.raises(UserError, match=why):
        prompts_of([own], tokenizer, tmp_path, image_key="image", chat=chat)


def test_a_placeholder_without_a_picture_ends_a_run_before_its_first_step(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"w7 {SHOWN} w{n}", "answer": "w9"} for n in range(10, 19)]
    (home / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    toml = (home / "tiny.toml").read_text().replace('image_key = "image"\nchat = true\n', "")
    (home / "text.toml").write_text(toml.replace("problems.parquet", "text.jsonl"))
    assert main(["train", str(home / "text.toml"), "--name", "text"]) != 0
    assert f"holds token {IMAGE}, which stands for a picture" in " ".join(capsys.readouterr().err.split())


def test_a_file_that_changes_is_noticed(tokenizer: Any, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    (tmp_path / "a.png").write_bytes(encoded(draw))
    (prompt,) = prompts_of([{"prompt": "w7", "image": "a.png"}], tokenizer, tmp_path, image_key="image")
    assert len(pictures_of(prompt, tokenizer)) == 1
    (tmp_path / "a.png").write_bytes(encoded(draw))
    with pytest.raises(UserError, match="A picture of the prompt 'x/0' has changed"):
        pictures_of(prompt, tokenizer)
    (tmp_path / "a.png").unlink()
    with pytest.raises(UserError, match="The pictures of the prompt 'x/0' cannot be read"):
        pictures_of(prompt, tokenizer)


def test_models_and_tools_that_are_missing(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = tmp_path / "without"
    shutil.copytree(home / "model", without)
    (without / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match="has no image processor that can be loaded"):
        processor.PictureProcessor(str(without))
    config = json.loads((without / "config.json").read_text())
    (without / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "hidden_size": config["text_config"]["hidden_size"]})
    )
    with pytest.raises(UserError, match=r"need a model of the types qwen2_5_vl, .*smolvlm, and .* type qwen3;"):
        processor.PictureProcessor(str(without))
    monkeypatch.setattr(processor.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"Pillow, which is not installed; install rolltree\[pictures\]"):
        processor.PictureProcessor(str(home / "model"))
