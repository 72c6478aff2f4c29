"""Faults that users of other trainers met with agents, by the number of the public report, through the run's server.

Two are in `test_sampler`: NeMo-RL 2176 (given messages of the assistant were trained), by words that are put into the
model's mouth, and the review of UniRL 214 (an outage was taken for an answer), by an outage.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from rolltree.engine import LeafStatus
from rolltree.engine.rollout import EngineConfig, NativeEngine
from rolltree.kernels import Objective

from ...support import serving
from ...support.agents import agent, job, run, sampler
from ...support.conversations import TEMPLATE
from .test_real_agents import one_of
from .test_streams import PATHS, Heard, body, stepped
from .test_tree import losses


def merging() -> NativeEngine:
    """An engine whose tokenizer writes "ab" as one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*alphabet, "ab"])}, [("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", clean_up_tokenization_spaces=False)
    words.chat_template = "#" + TEMPLATE
    config = serving.model().config
    config.vocab_size, config.eos_token_id, config.pad_token_id = 258, 257, 257
    return NativeEngine(Qwen3ForCausalLM(config).eval(), words, EngineConfig(page_size=4, kv_tokens=4096))


THREE_TURNS = """
async def solve(task, client):
    messages = list(task["messages"])
    for _ in range(3):
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=16)
        said = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "ab"}]
    return 1.0
"""


def test_sampled_ids_are_not_read_back_from_their_text(tmp_path: Path) -> None:
    """trl 5224: a turn's text has other ids when it is tokenised again. trl 5144: then masks are longer than ids."""
    engine = merging()
    words: Any = engine.tokenizer
    letters = words.convert_tokens_to_ids(["a", "b"])
    asked = job(engine, n=2, allowed_token_ids=letters, max_new_tokens=300)
    with sampler(engine, agent=agent(tmp_path, THREE_TURNS)) as made:
        (flight,) = made.submit([asked])
        episodes = list(made._groups[flight].episodes)
        while not flight.done:
            made.step(0.05)
    tree, again = flight.tree, 0
    assert tree is not None, flight.error
    for episode in episodes:
        first, second, third = (call.tree for call in episode.calls)
        for before, after in ((first, second), (second, third)):
            ids = before.token_id.tolist()
            assert after.token_id[: len(ids)].tolist() == ids
            sampled = ids[int(before.leaf_prompt[0]) :]
            again += words(words.decode(sampled), add_special_tokens=False)["input_ids"] != sampled
            assert after.token_id[len(ids) : int(after.leaf_prompt[0])].tolist().count(256) == 1  # the user's "ab"
    assert again > 0, "no text would have had other ids"
    assert tree.num_leaves == 2
    assert tree.loss_mask.sum() == sum(len(c.tree.token_id) - c.tree.leaf_prompt[0] for e in episodes for c in e.calls)
    tree.set("advantage", [1.0, -1.0])
    loss, gradient = losses(engine.model, [tree], Objective.preset("grpo"))
    assert np.isfinite(loss)
    assert float(gradient.norm()) > 0


COMPACTS = """
async def solve(task, client):
    async def ask(messages):
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=12)
        return answer.choices[0].message.content

    system = {"role": "system", "content": "Be brief."}
    messages = [system, *task["messages"]]
    for _ in range(2):
        messages += [{"role": "assistant", "content": await ask(messages)}, {"role": "user", "content": "on"}]
    summary = await ask([*messages, {"role": "user", "content": "Sum it up."}])
    messages = [system, {"role": "user", "content": "So far: " + summary}]
    for _ in range(2):
        messages += [{"role": "assistant", "content": await ask(messages)}, {"role": "user", "content": "on"}]
    return 1.0
"""


def test_compaction_is_a_branch_whose_summary_is_trained_where_it_was_sampled(
    engine: NativeEngine, tmp_path: Path
) -> None:
    """SkyRL 1959: what follows a compaction continues nothing; its summary was sampled before it and is given after."""
    tree = run(engine, job(engine, n=1, max_new_tokens=400), agent=agent(tmp_path, COMPACTS))
    words: Any = engine.tokenizer
    assert tree.num_leaves == 2, "the calls before the compaction are one sequence, and those after it"
    assert tree.call[tree.loss_mask].max() == 5
    before, after = (tree.path_rows(leaf) for leaf in range(2))
    common = int(np.argmax(before[: len(after)] != after[: len(before)]))
    assert "<system>Be brief.<end>\n<user>" in words.decode(tree.token_id[before[:common]])
    summary = [row for row in before if tree.loss_mask[row] and tree.call[row] == 3]
    assert summary
    assert not set(summary) & set(after.tolist()), "it is trained in one sequence"
    told = words.decode(tree.token_id[[row for row in summary if tree.token_id[row] != words.eos_token_id]])
    given = words.decode(tree.token_id[after[: int(tree.leaf_prompt[1])]])
    assert f"So far: {told}" in given
    assert not tree.loss_mask[after[: int(tree.leaf_prompt[1])]].any()


SLOW = """
import asyncio

async def solve(task, client):
    await client.chat.completions.create(model="m", messages=task["messages"], max_tokens=4)
    await asyncio.sleep(0.5)
    return 1.0
"""


@pytest.mark.slow
def test_time_limits_do_not_count_waiting_for_a_turn(engine: NativeEngine, tmp_path: Path) -> None:
    """verifiers 831: what waited in a queue was timed out before it had begun."""
    tree = run(engine, job(engine, n=4), agent=agent(tmp_path, SLOW), episodes=1, timeout_s=1.2)
    assert "errors" not in tree.meta
    assert tree.meta["given_rewards"] == dict.fromkeys(range(4), 1.0)
    assert tree.meta["agent"]["tool_s"] >= 4 * 0.5
    assert tree.meta["agent"]["tool_s"] < 4 * 1.2


LATE = """
import time

def solve(task, client):
    client.chat.completions.create(model="m", messages=task["messages"], max_tokens=4)
    time.sleep({seconds})
    open({flag!r}, "a").write("x")
    try:
        client.with_options(max_retries=0).chat.completions.create(model="m", messages=task["messages"], max_tokens=4)
    except Exception as error:
        open({flag!r}, "a").write(str(error.status_code))
    return 1.0
"""


@pytest.mark.slow
def test_an_episode_over_its_time_is_one_failure_and_no_second_try(engine: NativeEngine, tmp_path: Path) -> None:
    """agent-lightning 218: a rollout over its time was queued again, and the group lost. What comes late counts for
    nothing, and later groups are not touched."""
    flag = tmp_path / "flag"
    text = LATE.format(seconds=1.0, flag=str(flag))
    with sampler(engine, agent=agent(tmp_path, text), timeout_s=0.5) as made:
        flights = made.submit([job(engine, n=2, seed=1)])
        done: list[Any] = []
        while not done:
            done = made.step(0.05)
        assert done == flights
        tree = flights[0].tree
        assert tree is not None
        assert tree.status.tolist() == [LeafStatus.FAILED] * 2
        assert tree.meta["agent"] | {"call_tokens": 0, "tool_s": 0} == {
            "calls": 2, "call_tokens": 0, "tool_s": 0, "failed_timeout": 2,
        }  # fmt: skip
        deadline = time.monotonic() + 10
        while not flag.exists() or flag.read_text().count("410") < 2:
            assert made.step(0.05) == []
            assert time.monotonic() < deadline
        assert tree.meta["agent"]["calls"] == 2
        assert "given_rewards" not in tree.meta
        assert not made._door.episodes
        assert not made._groups
        made.program.timeout_s = 30.0
        (later,) = made.submit([job(engine, n=1, seed=2)])
        while not later.done:
            made.step(0.05)
        assert later.tree is not None
        assert set(later.tree.meta["given_rewards"].values()) == {1.0}


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_repeats_no_character(engine: NativeEngine, tmp_path: Path, path: str) -> None:
    """sglang 31598: a character whose bytes came one by one was told twice."""
    text = "A 世ab 世界 é😀世a."
    only = {
        "prefix_allowed_tokens_fn": one_of(engine.tokenizer, [text]),
        "allowed_token_ids": None,
        "ignore_eos": False,
    }
    with stepped(engine, tmp_path, **only) as opened:
        heard = Heard(opened, path, body(path, 100))
        pieces = set()

        def over() -> bool:
            opened.made.step(0.0)
            time.sleep(0.002)
            pieces.add(heard.text)
            return heard.over.is_set()

        deadline = time.monotonic() + 20
        while not over():
            assert time.monotonic() < deadline
        opened.paused = False
        opened.end()
    assert heard.text == text
    assert all(text.startswith(piece) for piece in pieces)
    assert len(pieces) > 3
