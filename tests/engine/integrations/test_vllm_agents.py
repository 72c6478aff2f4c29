"""Agents whose calls the real vLLM samples, on the CPU: `make vllm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from rolltree.engine.agents.records import EpisodeRecord, SampledCall
from rolltree.engine.data.segment import LeafStatus
from rolltree.engine.rollout import NativeEngine

from ...support import serving
from ...support.agents import agent, job, sampler
from ...support.conversations import TEMPLATE
from ..agents.calls import sampled_tokens

pytestmark = pytest.mark.vllm
STREAMS = """
async def solve(task, client):
    messages, chunks = list(task["messages"]), 0
    for turn in range(3):
        asked = client.chat.completions.create(model="m", messages=messages, max_tokens=20, stream=turn < 2)
        if turn < 2:
            text = ""
            async for chunk in await asked:
                text += chunk.choices[0].delta.content or ""
                chunks += 1
        else:
            text = (await asked).choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
    return {"reward": 1.0, "chunks": chunks}
"""


def made(directory: Path) -> tuple[Any, NativeEngine]:
    """vLLM's engine, and one of the same model that scores."""
    from rolltree.engine.rollout.vllm.engine import VllmEngine

    config, words = serving.model().config, serving.tokenizer()
    config.head_dim = 32  # as vLLM's kernels for the CPU take it
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    words.chat_template = "#" + TEMPLATE
    model.save_pretrained(directory)
    words.save_pretrained(directory)
    words.name_or_path = str(directory)
    engine = VllmEngine(
        str(directory), words, raw_logprobs=True, dtype="float32", enforce_eager=True, max_model_len=512,
        kv_cache_memory_bytes=1 << 27,
    )  # fmt: skip
    return engine, NativeEngine(model, words)


def test_the_same_server_answers_by_vllm(tmp_path: Path) -> None:
    """Whole and streamed; what is recorded is what vLLM sampled, in one sequence, and what the model says."""
    engine, scores = made(tmp_path / "model")
    seen: list[Any] = []
    asked = job(scores, n=3, max_new_tokens=300, allowed_token_ids=None)
    with sampler(engine, agent=agent(tmp_path, STREAMS)) as agents:
        step = agents.inner.step

        def watched(seconds: float) -> Any:
            done = step(seconds)
            seen.extend(flight.tree for flight in done)
            return done

        agents.inner.step = watched  # type: ignore[method-assign]
        (flight,) = agents.submit([asked])
        while not flight.done:
            agents.step(0.05)
    tree = flight.tree
    assert tree is not None, flight.error
    assert "errors" not in tree.meta, tree.meta["errors"]
    assert (tree.num_leaves, tree.meta["agent"]["calls"]) == (3, 9)
    sampled = EpisodeRecord(tuple(SampledCall(one, number=i) for i, one in enumerate(seen)), LeafStatus.STOP)
    wanted = sorted((token, logprob) for _, token, logprob, _ in sampled_tokens([sampled]))
    rows = np.flatnonzero(tree.loss_mask)
    assert sorted((int(tree.token_id[r]), float(tree.behaviour_logprob[r])) for r in rows) == wanted
    assert min(named["chunks"] for named in tree.meta["given_named"].values()) > 4, "text came while it was sampled"
    for leaf in range(3):
        path = tree.path_rows(leaf)
        ids, mask = tree.token_id[path].tolist(), tree.loss_mask[path]
        ((known,),) = scores.score([ids[:1]], [[ids[1:]]])
        np.testing.assert_allclose(tree.behaviour_logprob[path][mask], known[mask[1:]], atol=1e-4)
