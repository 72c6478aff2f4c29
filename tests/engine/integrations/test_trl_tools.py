"""Tools and environments inside TRL's own loop: the turns between the calls are sampled by the native engine."""

from __future__ import annotations

import string
from importlib.resources import files
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rolltree.engine.integrations.trl.rollouts import Rollouts

from .trl_tiny import grpo, save_model

pytest.importorskip("jmespath", reason="TRL reads tool calls with jmespath: pip install rolltree[trl]")

from datasets import Dataset

CALL = '<tool_call>\n{"name": "NAME", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'
TURNS = [CALL, CALL.replace('"b"', '"c"'), "I know no tool<|im_end|>", CALL]  # the second names a wrong argument


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: the first.
        b: the second.

    Returns:
        Their product.
    """
    return a * b


class Counting:
    def reset(self, **_: Any) -> None:
        self.count = 0

    def multiply(self, a: int, b: int) -> int:
        """
        Multiplies two integers, and counts.

        Args:
            a: the first.
            b: the second.

        Returns:
            Their product.
        """
        self.count += 1
        return a * b


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Of characters, with Qwen3's chat template."""
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<unk>"]
    words = [*special, "<tool_call>", "</tool_call>", "<think>", "</think>", *string.printable]
    characters = Tokenizer(models.WordLevel({w: i for i, w in enumerate(dict.fromkeys(words))}, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<|endoftext|>", eos_token="<|im_end|>", unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"], padding_side="left",
    )  # fmt: skip
    made.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    made.chat_template = files("trl").joinpath("chat_templates/qwen3.jinja").read_text()
    return made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tools")
    made = chat_tokenizer()
    path = save_model(directory, vocab_size=len(made), max_position_embeddings=2048)
    made.save_pretrained(directory)
    return path


def scripted(engine: Rollouts, trainer: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """The engine's completions replaced by a script, as a tiny model calls no tools."""
    sampled, _ = GENERATE(engine, trainer, prompts)  # which must serve turns of different lengths
    assert len(sampled) == len(prompts)
    calls = [text.replace("NAME", "multiply") for text in TURNS]
    texts = calls * 2 if len(prompts) == 8 else ["Done!<|im_end|>"] * len(prompts)
    ids = trainer._tokenizer(texts)["input_ids"]
    return ids, [[-2.0] * len(some) for some in ids]


GENERATE = Rollouts.generate


@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_tools(path: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(Rollouts, "generate", scripted)
    given = {"tools": [multiply]} if kind == "tools" else {"environment_factory": Counting}
    prompts = [[{"role": "user", "content": f"What is {i}?"}] for i in range(4)]
    trainer = given | {"train_dataset": Dataset.from_dict({"prompt": prompts * 4}), "reward_funcs": by_place}
    options = {"max_completion_length": 400, "learning_rate": 0.1}
    ours = grpo(path, {}, trainer, **options)
    logged = ours.state.log_history[0]
    assert logged["tools/call_frequency"] == pytest.approx(3 / 4)
    assert logged["tools/failure_frequency"] == pytest.approx(1 / 3)
    if kind == "environment":
        assert [environment.count for environment in ours.environments[:4]] == [1, 0, 0, 1]


def by_place(completions: list[Any], **_: Any) -> list[float]:
    return [float(i % 4) for i, _ in enumerate(completions)]
