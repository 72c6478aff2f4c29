"""Tools and environments inside TRL's own loop: the turns between the calls are sampled by the native engine."""

from __future__ import annotations

import string
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rolltree.engine.integrations.trl import RolltreeGRPOTrainer
from rolltree.engine.integrations.trl.rollouts import Rollouts

from .trl_tiny import grpo, make_grpo, save_model, train

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
    """Return a tokenizer of characters with Qwen3's chat template."""
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


GENERATE = Rollouts.generate
Script = Callable[[Rollouts, Any, list[list[int]]], tuple[list[list[int]], list[list[float]]]]


def scripted(turns: list[str], calls: list[int] | None = None) -> Script:
    """The engine's completions replaced by ``turns`` of a group, as a tiny model calls no tools; further turns end it.

    ``calls`` is given the number of prompts of every call.
    """

    def generate(
        engine: Rollouts, trainer: Any, prompts: list[list[int]], *pictures: Any
    ) -> tuple[list[Any], list[list[float]]]:
        sampled, _ = GENERATE(engine, trainer, prompts, *pictures)  # which must serve turns of different lengths
        assert len(sampled) == len(prompts)
        if calls is not None:
            calls.append(len(prompts))
        texts = turns * (8 // len(turns)) if len(prompts) == 8 else ["Done!<|im_end|>"] * len(prompts)
        ids = trainer._tokenizer(texts)["input_ids"]
        return ids, [[-2.0] * len(some) for some in ids]

    return generate


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_tools(path: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    turns = [text.replace("NAME", "multiply") for text in TURNS]
    monkeypatch.setattr(Rollouts, "generate", scripted(turns))
    given = {"tools": [multiply]} if kind == "tools" else {"environment_factory": Counting}
    prompts = [[{"role": "user", "content": f"What is {i}?"}] for i in range(4)]
    trainer = given | {"train_dataset": Dataset.from_dict({"prompt": prompts * 4}), "reward_funcs": by_place}
    steps = 2 if kind == "environment" else 1  # an environment is reset for the second
    ours = grpo(path, {}, trainer, **OPTIONS | {"max_steps": steps})
    logged = ours.state.log_history[0]
    assert logged["tools/call_frequency"] == pytest.approx(3 / 4)
    assert logged["tools/failure_frequency"] == pytest.approx(1 / 3)
    if kind == "environment":
        assert [environment.count for environment in ours.environments[:4]] == [1, 0, 0, 1]


def conversations(count: int = 16) -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"What is {i % 4}?"}] for i in range(count)]})


OPTIONS = {"max_completion_length": 240, "learning_rate": 0.1, "max_steps": 1}


@pytest.mark.slow
def test_malformed_calls_are_answers(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without a name, in a tag of another name, or that are no JSON call no tool and get no answer."""
    arguments = '{"arguments": {"a": 3, "b": 4}}'
    turns = [
        f"<tool_call>\n{arguments}\n</tool_call><|im_end|>",
        f"<toolcall>\n{arguments}\n</toolcall><|im_end|>",
        CALL.replace('"a"', "a").replace("NAME", "multiply"),
        "I know no tool<|im_end|>",
    ]
    calls: list[int] = []
    monkeypatch.setattr(Rollouts, "generate", scripted(turns, calls))
    trainer = {"tools": [multiply], "train_dataset": conversations(), "reward_funcs": by_place}
    ours = grpo(path, {}, trainer, **OPTIONS)
    assert calls == [8], "one turn"
    assert ours.state.log_history[0]["tools/call_frequency"] == 0
    assert any(not w.equal(ours.before[name]) for name, w in ours.model.named_parameters())


class Echo:
    """Has a reward of its own: the words that were shouted."""

    def reset(self, **given: Any) -> str:
        assert "environment" not in given
        self.words = 0
        return "Echo."

    def shout(self, text: str) -> str:
        """
        Shouts a text.

        Args:
            text: what to shout.

        Returns:
            The text in capitals.
        """
        self.words += 1
        return text.upper()

    def get_reward(self) -> float:
        return float(self.words)


SHOUT = '<tool_call>\n{"name": "shout", "arguments": {"text": "hi"}}\n</tool_call><|im_end|>'


@pytest.mark.slow
def test_several_environments(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout has the tools of its own environment alone; one that owns a reward has that beside the others'."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    of_each = [CALL.replace("NAME", "multiply"), "no<|im_end|>", SHOUT, SHOUT]  # of the first prompt two, of the second
    turns = [*of_each[:2], *of_each[1::-1], *of_each[2:], "no<|im_end|>", CALL.replace("NAME", "multiply")]
    monkeypatch.setattr(Rollouts, "generate", scripted(turns))
    rows = {"prompt": conversations(16)["prompt"], "environment": ["count", "echo"] * 8}
    trainer = {
        "environment_factory": {"count": Counting, "echo": Echo},
        "train_dataset": Dataset.from_dict(rows),
        "reward_funcs": by_place,
    }
    ours = grpo(path, {}, trainer, shuffle_dataset=False, **OPTIONS)
    assert [tool.__name__ for tool in ours._env_tools["count"]] == ["multiply"]
    logged = ours.state.log_history[0]
    assert logged["tools/call_frequency"] == pytest.approx(5 / 8)
    assert logged["tools/failure_frequency"] == pytest.approx(1 / 5)  # an echo that is asked to multiply
    assert logged["rewards/Echo/mean"] == pytest.approx(2 / 4)
    assert any(not w.equal(ours.before[name]) for name, w in ours.model.named_parameters())


@pytest.mark.slow
def test_an_environment_with_its_own_problems_and_rewards(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No dataset and no reward function: prompts are what `reset` says."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(Rollouts, "generate", scripted([SHOUT, "no<|im_end|>", "no<|im_end|>", SHOUT]))
    trainer = {"environment_factory": Echo, "train_dataset": None, "reward_funcs": None}
    ours = grpo(path, {}, trainer, **OPTIONS)
    assert ours.reward_func_names == ["Echo"]
    assert ours.state.log_history[0]["rewards/Echo/mean"] == pytest.approx(1 / 2)
    assert any(not w.equal(ours.before[name]) for name, w in ours.model.named_parameters())


def test_an_environment_that_nobody_knows(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rows = {"prompt": conversations(16)["prompt"], "environment": ["unknown"] * 16}
    trainer = {"environment_factory": {"count": Counting}, "train_dataset": Dataset.from_dict(rows)}
    with pytest.raises(ValueError, match="not among the environments"):
        grpo(path, {}, trainer | {"reward_funcs": by_place}, **OPTIONS)


@pytest.mark.check(but=5)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reward_funcs": None}, "No reward source"),
        ({"train_dataset": None}, "`train_dataset` is required"),
        ({"environment_factory": {"a": Counting, "b": Echo}, "train_dataset": None}, "requires a `train_dataset`"),
        ({"environment_factory": Counting, "train_dataset": None, "options": {"max_steps": -1}}, "max_steps"),
        ({"reward_funcs": [len, len], "reward_processing_classes": [None]}, "must match"),
        ({"options": {"loss_type": "none of them"}}, "Unknown loss type: none of them"),
    ],
)
def test_what_trl_refuses_is_refused_as_by_trl(
    path: str, given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    arguments = {"reward_funcs": by_place, "train_dataset": conversations()} | given
    options = OPTIONS | arguments.pop("options", {})
    with pytest.raises(ValueError, match=said):
        train(make_grpo(path, arguments, RolltreeGRPOTrainer, **options), None)


def by_place(completions: list[Any], **_: Any) -> list[float]:
    return [float(i % 4) for i, _ in enumerate(completions)]
