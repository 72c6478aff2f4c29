"""Runs of agents by a tiny random model: what samples them, and jobs for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rolltree.engine.agents.sampler import AgentSampler
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.programs import AgentCalls
from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.local import LocalSampler
from rolltree.engine.rollout.sampler import Job

from . import serving
from .conversations import TEMPLATE

QUESTION = [{"role": "user", "content": "Six times seven?"}]


def make_engine() -> NativeEngine:
    words = serving.tokenizer()
    words.chat_template = "#" + TEMPLATE
    return NativeEngine(serving.model(), words, EngineConfig(page_size=4, kv_tokens=16384))


def job(engine: NativeEngine, n: int = 2, seed: int = 7, **params: Any) -> Job:
    words = engine.tokenizer
    assert words is not None
    prompt: Any = words.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=True, return_dict=False)
    allowed = [*words("abc")["input_ids"], words.eos_token_id]
    given = {"max_new_tokens": 160, "allowed_token_ids": allowed} | params
    context = {"messages": QUESTION, "tools": (), "answer": "42"}
    return Job(prompt, SamplingParams(n=n, **given), seed, context)


@contextmanager
def sampler(engine: NativeEngine, **options: Any) -> Iterator[AgentSampler]:
    program = AgentCalls(**options)
    made = AgentSampler(LocalSampler(engine, program), program, engine.tokenizer)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def agent(folder: Path, text: str, name: str = "solve") -> str:
    """A file with an agent, as the configuration names it."""
    (folder / "agent.py").write_text(text)
    return f"{folder / 'agent.py'}:{name}"


def run(engine: NativeEngine, asked: Job, **options: Any) -> TokenTree:
    """The tree of one group."""
    with sampler(engine, **options) as made:
        made.submit([asked])
        done: list[Any] = []
        while not done:
            done = made.step(0.05)
    (flight,) = done
    assert flight.tree is not None, flight.error
    return flight.tree  # type: ignore[no-any-return]
