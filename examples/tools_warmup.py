"""Makes the small model that `tools_cpu.toml` starts from: a Qwen3 decoder with a chat template, trained for some
minutes on conversations that call the calculator, and then on a mixture in which three in ten do so and the others
answer at once, mostly wrongly. The model can then call the calculator but prefers to answer at once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rolltree.engine import TokenTree
from rolltree.engine.chat.messages import added_ids
from rolltree.engine.parts.resolve import import_object
from rolltree.engine.programs.chat.toolbox import calculator
from rolltree.engine.prompts.prompts import held_out
from rolltree.engine.prompts.sources import PromptSource
from rolltree.engine.settings import TrainConfig
from rolltree.engine.tasks import GymProblems

SEED = 1234
CALLS_ALONE = 30_000  # conversations before the mixture begins
CALL_SHARE = 0.3
RIGHT_SHARE = 0.1  # correct share of the answers given at once
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool><tool_call></tool_call>\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
teach = import_object(f"{Path(__file__).with_name('arithmetic_warmup.py')}:teach")


def create(config: TrainConfig, directory: Path) -> None:
    """Write a Hugging Face directory; problems held out by `config.evaluation` are never trained on."""
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer(config)
    source = PromptSource(config.data, tokenizer, SEED, held_out(config.data, config.evaluation.problems, tokenizer))
    teach(tokenizer, conversations(source, tokenizer), directory)


def make_tokenizer(config: TrainConfig) -> PreTrainedTokenizerFast:
    """Return a tokenizer for the problems of `config` and conversations about them."""
    problems = GymProblems(config.data.tasks, [SEED])
    corpus = []
    for k in range(2000):
        entry = problems[k].entry
        corpus.append(f"{problems[k].text}{call(entry)}\n<|tool|>{entry['answer']}\n<|assistant|>Answer: 1\n")
        corpus.append("<tool>calculator</tool><tool_call></tool_call>\n<|user|>")
    return tokenizer_of(corpus)


def tokenizer_of(corpus: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer in which every digit is a separate token, and set its chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[^\d]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=["<|pad|>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    made.chat_template = TEMPLATE
    return made


def call(entry: dict) -> str:
    expression = entry["metadata"]["expression"]
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def conversations(source: PromptSource, tokenizer: PreTrainedTokenizerFast) -> Iterator[TokenTree]:
    """Yield prompts without end, each with one conversation; the tool's messages are not trained on."""
    rng = random.Random(SEED)

    def turn(text: str) -> list[int]:
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    for number in itertools.count():
        (prompt,) = source.next(1)
        answer = int(prompt.entry["answer"])
        if number < CALLS_ALONE or rng.random() < CALL_SHARE:
            result = calculator(prompt.entry["metadata"]["expression"])
            parts = turn(call(prompt.entry)), added_ids(tokenizer, [{"role": "tool", "content": result}])
            response, learned = [*parts[0], *parts[1]], [*[True] * len(parts[0]), *[False] * len(parts[1])]
        else:
            answer += 0 if rng.random() < RIGHT_SHARE else rng.randrange(1, 200)
            response, learned = [], []
        last = turn(f"Answer: {answer}")
        yield TokenTree.from_sequences(
            prompt.token_ids, [[*response, *last]], loss_masks=[[*learned, *[True] * len(last)]]
        )
