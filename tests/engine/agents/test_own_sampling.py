"""Agents that send a sampling of their own: a temperature of 0 is told, and the run's may be kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltree.engine.loop.describe import describe
from rolltree.engine.programs import AgentCalls
from rolltree.engine.record.metrics import Sums
from rolltree.engine.rollout import NativeEngine

from ...support.agents import agent, job, run, sampler

OWN = """
def solve(task, client):
    for more in {sent}:
        got = client.chat.completions.with_raw_response.create(
            model="m", messages=task["messages"], max_tokens=8, extra_body={{"ignore_eos": True}} | more)
        assert got.headers.get("x-rolltree-ignored") == {ignored!r}, got.headers
    return 1.0
"""
ZERO, WARM = {"temperature": 0}, {"temperature": 0.5}


def metrics(tree: Any) -> dict[str, float]:
    tree.rewards["reward"] = np.ones(tree.num_leaves, np.float32)
    sums = Sums()
    describe([tree], 160, sums)
    return dict(sums.means())


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("sent", "greedy", "warned"), [([ZERO, ZERO], 8, True), ([ZERO, WARM], 4, False), ([WARM], 0, False)]
)
def test_a_temperature_of_0_is_told(
    engine: NativeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, sent: Any, greedy: int, warned: bool
) -> None:
    named = agent(tmp_path, OWN.format(sent=sent, ignored=None))
    with sampler(engine, agent=named) as made, caplog.at_level(logging.WARNING):
        trees = made.generate([job(engine, n=4, temperature=1.0), job(engine, n=4, temperature=1.0)])
    said = [record.getMessage() for record in caplog.records if "temperature 0" in record.getMessage()]
    assert len(said) == warned, "once a run"
    assert all(f"'{named}'" in text and 'sampling = "run"' in text for text in said)
    for tree in trees:
        assert "errors" not in tree.meta, tree.meta["errors"]
        assert metrics(tree).get("agent/greedy_calls", 0) == greedy
    held_out = run(engine, job(engine, n=1, temperature=0.0), agent=named)
    assert "agent/greedy_calls" not in metrics(held_out)


def test_the_runs_sampling_is_kept(engine: NativeEngine, tmp_path: Path) -> None:
    """And what is no sampling, such as a length, is the call's."""
    sent = [{**ZERO, "top_p": 0.1, "top_k": 1, "min_p": 0.9}]
    named = agent(tmp_path, OWN.format(sent=sent, ignored="temperature, top_p, top_k, min_p"))
    asked = job(engine, n=4, temperature=0.75)
    tree = run(engine, asked, agent=named, sampling="run")
    assert "errors" not in tree.meta, tree.meta["errors"]
    assert len({tuple(leaf.response) for leaf in tree.flatten()}) > 1
    assert (tree.temperature[tree.loss_mask] == np.float32(0.75)).all()
    assert "agent/greedy_calls" not in metrics(tree)
    unset = run(engine, asked, agent=agent(tmp_path, OWN.format(sent=[{}], ignored=None)))
    assert [leaf.response for leaf in tree.flatten()] == [leaf.response for leaf in unset.flatten()]


def test_another_word_for_the_sampling_is_refused() -> None:
    with pytest.raises(ValueError, match='sampling = "call" or "run"'):
        AgentCalls(agent="a.py:f", sampling="greedy")  # type: ignore[arg-type]
