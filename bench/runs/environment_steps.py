"""A whole step of training in OpenEnv's environment that waits: rolltree's, and that of TRL's `environment_factory`.

Both have the same model, server, prompt, optimiser and rewards, and the official clients; a model is made to write the
calls, of one token each. TRL calls the tools of one episode after the other, and trains each episode with its prompt.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.methods.credit import give_credit
from rolltree.engine.methods.estimators import group_norm
from rolltree.engine.programs import EnvironmentTurns

from ..runner import Calls
from .rl_step import learn

STEPS = 3
END = "<|im_end|>"
LEARNING_RATE = 1e-6


def of_rolltree(episodes: int, seconds: float, letters: int, address: str) -> Calls:
    tokenizer, forced = _tokenizer(seconds)
    model = _model(len(tokenizer), forced.end)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine = NativeEngine(model, tokenizer, EngineConfig(kv_tokens=131_072))
    program = EnvironmentTurns("openenv", {"url": address}, max_turns=STEPS + 1)
    tools, messages = list(program.tools), _messages(letters)
    prompt: Any = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    params = SamplingParams(n=episodes, max_new_tokens=800, prefix_allowed_tokens_fn=forced.allowed)

    def step() -> None:
        model.eval()
        (tree,) = engine.generate([prompt], params, program, contexts=[{"messages": messages, "tools": tools}])
        _check([tokenizer.decode(path.response) for path in tree.flatten()])
        tree.rewards["reward"] = np.arange(episodes, dtype=np.float32) % 3
        give_credit(group_norm, "group_norm", [tree])
        learn(model, optimizer, [tree])
        engine.update_weights()

    return {"step": step}


def of_trl(episodes: int, seconds: float, letters: int, address: str) -> Calls:
    from datasets import Dataset
    from openenv.core.generic_client import GenericEnvClient
    from trl import GRPOConfig, GRPOTrainer

    class Waits:
        """As the examples of TRL's documentation: a client each, and its steps as tools."""

        def __init__(self) -> None:
            self._client = GenericEnvClient(address).sync()

        def reset(self, **row: Any) -> None:
            self._client.reset()

        def step(self, seconds: float, place: str) -> str:
            """Waits.

            Args:
                seconds: How long.
                place: Where.
            """
            return str(self._client.step({"seconds": seconds, "place": place}).observation["text"])

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        _check([json.dumps(completion) for completion in completions])
        return [float(number % 3) for number in range(len(completions))]

    tokenizer, forced = _tokenizer(seconds)
    model: Any = _model(len(tokenizer), forced.end)
    rows = [{"prompt": _messages(letters)}] * episodes
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory, per_device_train_batch_size=episodes, num_generations=episodes,
            max_completion_length=800, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
            disable_tqdm=True, learning_rate=LEARNING_RATE,
        )  # fmt: skip
        trainer: Any = GRPOTrainer(
            model, reward, config, Dataset.from_list(rows), processing_class=tokenizer, environment_factory=Waits
        )
    generate = model.generate
    model.generate = lambda *args, **named: generate(*args, **named, logits_processor=LogitsProcessorList([forced]))
    trainer.current_gradient_accumulation_steps = 1
    optimizer = trainer.create_optimizer()

    def step() -> None:
        trainer._buffered_inputs = None  # makes the trainer sample again
        trainer.training_step(trainer.model.train(), rows, None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step}


class _Forced(LogitsProcessor):
    """Allows `STEPS` calls and an answer, each a token, and the end of a turn after each."""

    def __init__(self, call: int, answer: int, end: int) -> None:
        self.call, self.answer, self.end = call, answer, end

    def allowed(self, ids: Any) -> list[int]:
        """Return the tokens that may follow those of an episode."""
        row = np.asarray(ids)
        if len(row) and row[-1] in (self.call, self.answer):
            return [self.end]
        return [self.call if (row == self.call).sum() < STEPS else self.answer]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        for row, ids in zip(forced, input_ids, strict=True):
            row[self.allowed(ids)] = 0.0
        return forced


def _tokenizer(seconds: float) -> tuple[PreTrainedTokenizerFast, _Forced]:
    """Return a tokenizer of bytes with the template of Qwen2.5 and a token for the call, and what forces the calls."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    call = json.dumps({"name": "step", "arguments": {"seconds": seconds, "place": "here"}})
    call, answer = f"<tool_call>\n{call}\n</tool_call>", "Done."
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token="<|endoftext|>")
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.add_tokens([call, answer])
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer, _Forced(*tokenizer.convert_tokens_to_ids([call, answer, END]))


def _model(vocabulary: int, end: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, eos_token_id=end, pad_token_id=end,
            bos_token_id=None,
        )
    )  # fmt: skip


def _messages(letters: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "Wait. " * (letters // 6)}]


def _check(texts: list[str]) -> None:
    """Raise a ValueError where an episode has not waited at each of its steps."""
    if (waited := {text.count("waited") for text in texts}) != {STEPS}:
        raise ValueError(f"Episodes have waited {waited} times.")
