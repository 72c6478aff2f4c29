"""Makes the small model of `harbor_cpu.toml`: it runs the command of any task, and its own a third of the time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from rolltree.engine import TokenTree
from rolltree.engine.chat.messages import added_ids
from rolltree.engine.parts.resolve import import_object
from rolltree.engine.prompts.sources import PromptSource
from rolltree.engine.settings import TrainConfig

SEED = 1234
TASKS = Path(__file__).with_name("harbor_tasks")
COMMANDS = {path.parts[-3]: path.read_text().splitlines()[-1] for path in sorted(TASKS.glob("*/solution/solve.sh"))}
OWN_SHARE = 0.25
"""Share of the conversations with the command of the task, besides those of any task."""
STEPS = 100
teach, tokenizer_of = (
    import_object(f"{Path(__file__).with_name(file)}:{name}")
    for file, name in (("arithmetic_warmup.py", "teach"), ("tools_warmup.py", "tokenizer_of"))
)


def create(config: TrainConfig, directory: Path) -> None:
    """Write a Hugging Face directory."""
    torch.manual_seed(SEED)
    asked = [path.read_text() for path in sorted(TASKS.glob("*/instruction.md"))]
    corpus = [f"<tool>shell</tool><tool_call></tool_call>\n<|user|>{text}" for text in asked]
    corpus += [f"{call(command)}\n<|tool|>\n<|assistant|>Done\n" for command in COMMANDS.values()]
    tokenizer = tokenizer_of(100 * corpus)
    data = config.data.model_copy(update={"tools": ({"harbor": True},)})  # the environment's own
    teach(tokenizer, conversations(PromptSource(data, tokenizer, SEED, []), tokenizer), directory, steps=STEPS)


def call(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': command}})}</tool_call>"


def conversations(source: PromptSource, tokenizer: PreTrainedTokenizerFast) -> Iterator[TokenTree]:
    """Yield prompts without end, each with one conversation; the tool's messages are not trained on."""
    rng, end = random.Random(SEED), tokenizer.eos_token_id
    last = [*tokenizer("Done")["input_ids"], end]
    answer = added_ids(tokenizer, [{"role": "tool", "content": ""}])
    while True:
        (prompt,) = source.next(1)
        own = COMMANDS[prompt.entry["name"]]
        command = own if rng.random() < OWN_SHARE else rng.choice([*COMMANDS.values()])
        first = [*tokenizer(call(command))["input_ids"], end]
        learned = [True] * len(first) + [False] * len(answer) + [True] * len(last)
        yield TokenTree.from_sequences(prompt.token_ids, [[*first, *answer, *last]], loss_masks=[learned])
