"""A run of conversations from its TOML, by a tiny random model with a chat template."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .tiny import write_job

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }},{% endfor %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = '''
import asyncio
import os
import random

from rolltree.engine.programs import Observation


class Guess:
    """It is never right."""

    def reset(self, *, seed=None, options=None):
        self.rng = random.Random(seed)
        return f"Guess {self.rng.randrange(10)}", {}

    def step(self, action):
        return "no", self.rng.random(), False, False, {}


class Steady:
    """A third turn and later ones wait until there is a file; the environment knows which turn it is."""

    def __init__(self, context, flag):
        self.seed, self.flag, self.turns = int(context["seed"]), flag, 0

    async def step(self, messages):
        while self.turns and self.seed >= 6 and not os.path.exists(self.flag):
            await asyncio.sleep(0.01)
        self.turns += 1
        assert self.turns == sum(message["role"] == "assistant" for message in messages)
        return Observation([{"role": "user", "content": "on"}], reward=random.random())

    def state_dict(self):
        return {"turns": self.turns}

    def load_state_dict(self, state):
        self.turns = state["turns"]


class Forgetful(Steady):
    state_dict = None


class Leisurely(Steady):
    """Some that the next but one update needs wait in their second turn for the next one's row in the metrics."""

    def __init__(self, context, log):
        super().__init__(context, os.devnull)
        self.log = log

    def rows(self):
        return open(self.log).read().count("\\n")

    async def step(self, messages):
        before, patience = self.rows(), 300
        while self.turns == 1 and self.seed > 6 and self.seed % 6 in (3, 4) and self.rows() == before and patience:
            patience -= 1
            await asyncio.sleep(0.01)
        return await super().step(messages)


def hinted(number: int) -> str:
    """Gives a hint.

    Args:
        number: Which.
    """
    return f"hint {number}"


def bare(number):
    return ""
'''


def write_conversations(directory: Path) -> Path:
    """The model, ``parts.py`` with environments, and the configuration, whose path is returned."""
    toml = write_job(
        directory, {"parts.py": PARTS},
        data={
            "template": None, "tasks": None, "source": "games", "source_options": {"make": "parts.py:Guess"},
            "chat": True,
        },
        rollout={
            "program": "environment", "max_new_tokens": 60,
            "program_options": {
                "environment": "game", "environment_options": {"make": "parts.py:Guess"}, "max_turns": 2, "ways": [2],
                "turn_tokens": 12,
            },
        },
        reward={"verifier": "program", "workers": None}, evaluation={"problems": 0, "every": None},
    )  # fmt: skip
    words = AutoTokenizer.from_pretrained(directory / "model")
    words.chat_template = TEMPLATE.replace("<end>", words.eos_token)
    words.save_pretrained(directory / "model")
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    with torch.no_grad():
        model.get_input_embeddings().weight[words.eos_token_id] *= 100  # so that it ends its turns
    model.save_pretrained(directory / "model")
    return toml
