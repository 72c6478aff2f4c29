"""The keys of an open episode are the last to go: others' prompts do not drop them, and they go once it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams

from ...support.agents import make_engine
from .test_door import CHAT, Open, group

FACT = {"role": "user", "content": "So it is. " * 12}


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    made = make_engine()
    return NativeEngine(made.model, made.tokenizer, EngineConfig(page_size=4, kv_tokens=720))


def others(engine: NativeEngine, count: int = 12) -> None:
    """Prompts of others that fill the cache more than once, one after the other."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        prompt = rng.integers(3, 60, 150).tolist()
        engine.generate([prompt], SamplingParams(n=1, max_new_tokens=2))


def found(engine: NativeEngine, ids: list[int]) -> int:
    """Return the number of the tokens whose keys are cached, without the last one, which is computed in any case."""
    tree = engine.cache.tree
    before = tree.reused
    tree.release(tree.insert(engine.policy_version << 16, np.array(ids, np.int32)))
    return int(tree.reused - before)


def call(opened: Open, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Make a call; the conversation with its answer, and all its tokens."""
    opened.paused = False
    with opened.client() as client:
        answer = client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    assert answer.status_code == 200, answer.text
    opened.pause()
    said = answer.json()["choices"][0]["message"]["content"]
    ids = opened.episodes[0].calls[-1].tree.token_id.tolist()
    return [*messages, {"role": "assistant", "content": said}], ids


@pytest.mark.parametrize("kept", [True, False])
def test_an_open_episode_finds_its_keys_after_others(engine: NativeEngine, tmp_path: Path, kept: bool) -> None:
    engine.forget_prefixes()
    with group(engine, tmp_path, params={"max_new_tokens": 600}) as opened:
        messages, ids = call(opened, [FACT])
        assert len(ids) > 100
        opened.made.step(0.0)
        if not kept:
            opened.made.inner.let_go([opened.episodes[0].number])
        others(engine)
        assert found(engine, ids) == (len(ids) - 1 if kept else 0)
        engine.reset_stats()
        call(opened, [*messages, {"role": "user", "content": "Go on."}])
        assert (engine.stats["prefix_hit_tokens"] >= len(ids) - 1) == kept
        engine.cache.tree.check()
        opened.paused = False
        opened.end()
    others(engine)
    assert found(engine, ids) == 0, "an episode that has ended keeps nothing"


def test_keys_of_older_weights_are_not_kept(engine: NativeEngine, tmp_path: Path) -> None:
    engine.forget_prefixes()
    with group(engine, tmp_path, params={"max_new_tokens": 600}) as opened:
        _, ids = call(opened, [FACT])
        old = engine.policy_version
        opened.made.load(None, old + 1, keep_keys=False)
        others(engine)
        engine.policy_version = old
        assert found(engine, ids) == 0
        opened.paused = False
        opened.end()


def test_open_episodes_give_way_where_nothing_else_can(engine: NativeEngine, tmp_path: Path) -> None:
    """Prompts that need the whole cache together are answered."""
    engine.forget_prefixes()
    with group(engine, tmp_path, params={"max_new_tokens": 600}) as opened:
        _, ids = call(opened, [FACT])
        prompts = [[first, *(list(range(3, 60)) * 6)] for first in (1, 2)]
        trees = engine.generate(prompts, SamplingParams(n=1, max_new_tokens=2))
        assert sum(tree.num_tokens for tree in trees) > 680
        assert found(engine, ids) < len(ids) - 1
        engine.cache.tree.check()
        opened.paused = False
        opened.end()
