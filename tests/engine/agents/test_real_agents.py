"""Agents of the registry, unmodified: what is recorded is what was sampled, bit for bit, and all of it is trained.

They lie in an environment of their own: `make agents`. A random model chooses between texts in the form that each agent
reads, so that it calls tools, errs and ends; its choices have their real log-probs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from rolltree.engine import LeafStatus
from rolltree.engine.agents.records import EpisodeRecord, SampledCall
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.rollout import EngineConfig, NativeEngine
from rolltree.engine.rollout.sampler import Job

from ...support import serving
from ...support.agents import job, sampler
from ...support.conversations import TEMPLATE
from ...support.tiny import ROOT
from .calls import sampled_tokens

pytestmark = [pytest.mark.agents, pytest.mark.timeout(1800)]
PYTHON = ROOT / "build" / "agents" / "bin" / "python"
MODEL = os.environ.get("ROLLTREE_AGENT_MODEL")
EPISODES = int(os.environ.get("ROLLTREE_EPISODES", "50"))


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALL, SUBMIT = call("calculator", expression="6*7"), "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TOOLS = ["It is 42.", f"Hm.\n{CALL}", CALL, CALL + CALL]
CODE = ["<code>\nprint(calculator('6*7'))\n</code>", "<code>\nfinal_answer(42)\n</code>", "no code"]
BASH = [f"```mswea_bash_command\n{command}\n```" for command in ("echo hi", SUBMIT)]
AGENTS = [
    ("anthropic_loop", ["whole"], TOOLS), ("anthropic_loop", ["stream"], TOOLS),
    ("openai_agents", ["responses", "whole"], TOOLS), ("openai_agents", ["responses", "stream"], TOOLS),
    ("openai_agents", ["chat", "whole"], TOOLS), ("openai_agents", ["chat", "stream"], TOOLS),
    ("pydantic_agent", ["chat"], TOOLS), ("pydantic_agent", ["responses"], TOOLS),
    ("pydantic_agent", ["messages"], TOOLS),
    ("mini_swe", ["tools"], [call("bash", command="echo hi"), call("bash", command=SUBMIT)]),
    ("mini_swe", ["text"], [*BASH, "bad"]),
    ("smol_agent", ["code"], CODE), ("smol_agent", ["tools"], TOOLS),
]  # fmt: skip
REWRITE = ("smol_agent", "mini_swe text")
"""Agents that rewrite their own history: smolagents tells calls in words and adds its end of code; mini-swe-agent
leaves out answers without a command."""


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    words, config = serving.tokenizer(), serving.model().config
    words.chat_template = "#" + TEMPLATE
    config.max_position_embeddings = 32768
    return NativeEngine(Qwen3ForCausalLM(config).eval(), words, EngineConfig(page_size=16, kv_tokens=131072))


def one_of(words: Any, texts: Sequence[str]) -> Callable[[Any], Any]:
    """Allow the tokens that continue one of ``texts``."""
    ids = [[*words(text)["input_ids"], words.eos_token_id] for text in texts]

    def allowed(response: Any) -> Any:
        said = response.tolist()
        return np.array(
            sorted({text[len(said)] for text in ids if text[: len(said)] == said and len(text) > len(said)})
        )

    return allowed


def episodes(
    engine: NativeEngine, asked: Job, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[TokenTree, int]:
    """The tree of a group of which no episode failed, and the number of its calls.

    What is trained is checked to be what the engine has sampled: ids, log-probs and all tokens before them.
    """
    seen: list[Any] = []
    with sampler(engine, **options) as made:
        step = made.inner.step

        def watched(seconds: float) -> Any:
            done = step(seconds)
            seen.extend(flight.tree for flight in done)
            return done

        monkeypatch.setattr(made.inner, "step", watched)
        (flight,) = made.submit([asked])
        while not flight.done:
            made.step(0.05)
    tree = flight.tree
    assert tree is not None, flight.error
    assert "errors" not in tree.meta, tree.meta["errors"]
    sampled = EpisodeRecord(tuple(SampledCall(one, number=i) for i, one in enumerate(seen)), LeafStatus.STOP)
    wanted = [(token, logprob, before) for _, token, logprob, before in sampled_tokens([sampled])]
    trained = []
    for leaf in range(tree.num_leaves):
        rows = tree.path_rows(leaf)
        for place in range(int(tree.leaf_prompt[leaf]), len(rows)):
            if tree.loss_mask[rows[place]]:
                before = tuple(tree.token_id[rows[:place]].tolist())
                trained.append((int(tree.token_id[rows[place]]), float(tree.behaviour_logprob[rows[place]]), before))
    assert sorted(trained) == sorted(wanted)
    assert tree.meta["counts"] == {"aborted_calls": 0}
    return tree, len(seen)


@pytest.mark.parametrize(("name", "words", "texts"), AGENTS, ids=[f"{name} {' '.join(w)}" for name, w, _ in AGENTS])
def test_an_agent_that_nobody_here_wrote(
    engine: NativeEngine, name: str, words: list[str], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [str(PYTHON), str(Path(__file__).parents[2] / "support" / "real_agents" / f"{name}.py"), *words]
    monkeypatch.delenv("PYTHONPATH", raising=False)
    asked = job(
        engine, EPISODES, max_new_tokens=30000, allowed_token_ids=None,
        prefix_allowed_tokens_fn=one_of(engine.tokenizer, texts),
    )  # fmt: skip
    tree, calls = episodes(engine, asked, monkeypatch, command=command, episodes=4)
    assert tree.meta["agent"]["calls"] == calls >= EPISODES
    if not f"{name} {' '.join(words)}".startswith(REWRITE):
        assert tree.num_leaves == EPISODES, "each episode is one sequence"


@pytest.mark.skipif(MODEL is None, reason="ROLLTREE_AGENT_MODEL names no directory of a model with a chat template")
@pytest.mark.parametrize(
    ("name", "words"), [("anthropic_loop", ["stream", "talk"]), ("openai_agents", ["chat", "talk"])]
)
def test_a_model_of_ones_own(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words, unconstrained, in a talk of three turns; the log-probs are those of Transformers too."""
    assert MODEL is not None
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    command = [str(PYTHON), str(Path(__file__).parents[2] / "support" / "real_agents" / f"{name}.py"), *words]
    monkeypatch.delenv("PYTHONPATH", raising=False)
    engine = NativeEngine(model, tokenizer, EngineConfig(kv_tokens=16384))
    asked = job(engine, 4, max_new_tokens=4000, allowed_token_ids=None)
    tree, calls = episodes(engine, asked, monkeypatch, command=command, episodes=4, call_tokens=32)
    assert (calls, tree.num_leaves) == (12, 4)
    plain = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager").eval()
    for leaf in range(4):
        rows = tree.path_rows(leaf)
        ids, mask = torch.from_numpy(tree.token_id[rows]).long(), tree.loss_mask[rows]
        with torch.no_grad():
            logprob = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(tree.behaviour_logprob[rows][mask], logprob[mask[1:]].numpy(), atol=1e-3)
    print(f"{calls} calls, {int(tree.loss_mask.sum())} tokens sampled and trained")
