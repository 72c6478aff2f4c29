"""Model directories that are not whole: refused in one sentence, never filled up with random numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from rolltree.engine import load_model, load_tokenizer
from rolltree.engine.errors import UserError

TINY = dict(
    vocab_size=11,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    eos_token_id=0,
    bos_token_id=None,
)
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=request.param)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(directory: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def sentence(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_model(directory)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert str(directory) in message
    return message


def test_a_whole_directory_loads_bit_for_bit(directory: Path) -> None:
    model = load_model(directory)
    saved = load_file(directory / "model.safetensors")
    assert ("lm_head.weight" in saved) != model.config.tie_word_embeddings
    for name, tensor in saved.items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.check(but=7)
@pytest.mark.parametrize(
    ("edit", "needle"),
    [
        (lambda t: t.pop(UP), f"'{UP}' is missing"),
        (lambda t: t.pop("model.embed_tokens.weight"), "'model.embed_tokens.weight' is missing"),
        (lambda t: t.pop("model.norm.weight"), "'model.norm.weight' is missing"),
        (lambda t: [t.pop(k) for k in list(t) if ".1." in k], "more are wrong"),
        (lambda t: t.update({UP: torch.zeros(3, 3)}), f"'{UP}' is [3, 3] and not [24, 16]"),
        (lambda t: t.update({UP: t[UP].T.contiguous()}), f"'{UP}' is [16, 24] and not [24, 16]"),
        (lambda t: t.update({UP.replace("1", "2"): t[UP].clone()}), "has no place"),
        (lambda t: t[UP].fill_(float("nan")), f"'{UP}' holds numbers that are not finite"),
        (lambda t: t[UP][0].fill_(float("inf")), f"'{UP}' holds numbers that are not finite"),
    ],
)
def test_wrong_tensors_are_named(directory: Path, edit: Callable[[dict[str, Tensor]], object], needle: str) -> None:
    change(directory, edit)
    assert needle in sentence(directory)


def test_an_untied_head_must_be_there(directory: Path) -> None:
    tied = json.loads((directory / "config.json").read_text())["tie_word_embeddings"]
    change(directory, lambda t: t.pop("lm_head.weight", None))
    if tied:
        load_model(directory)
    else:
        assert "'lm_head.weight' is missing" in sentence(directory)


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_weights_cut_short(directory: Path, keep: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "cannot be loaded" in sentence(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "wide"},
        {"hidden_size": -1},
        {"num_attention_heads": 0},
        {"model_type": "unheard"},
        {"hidden_act": "none"},
        {"vocab_size": 12},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3},
        {"rope_parameters": 3},
    ],
)
def test_a_configuration_of_another_model(directory: Path, change: dict[str, object]) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    sentence(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00"])
def test_a_configuration_that_is_none(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    sentence(directory)


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for text in ("", "{", "[]", '{"model": 3}'):
        (tmp_path / "model" / "tokenizer.json").write_text(text)
        with pytest.raises(UserError, match=r"tokenizer in .* cannot be loaded: .*\.$"):
            load_tokenizer(tmp_path / "model")
