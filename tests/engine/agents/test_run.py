"""A whole run whose sampler returns episodes: every part of the loop takes them.

The sampler is the run's own. Two responses that it sampled become the calls of one episode: the first one two calls,
the second one a call that asks again. So every log-prob is exact, and each episode has two chains.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rolltree.engine import LeafStatus, Orchestrator, TokenTree, load_config
from rolltree.engine.agents.records import EpisodeRecord, Failure, SampledCall
from rolltree.engine.agents.tree import episode_tree
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.rollout.sampler import Flight

from ...support.tiny import write_job
from ..loop.test_run import documented_metrics


def part(tree: TokenTree, leaf: int, cut: int, begin: int, end: int, number: int) -> SampledCall:
    """Some of a response as a call that read what was before."""
    chain = tree.chain(leaf)
    ids, first = chain.token_id.tolist(), int(chain.leaf_prompt[0])
    rows = slice(first + begin, first + end)
    columns = {name: [chain.columns[name][rows]] for name in ("entropy", "temperature")}
    made = TokenTree.from_sequences(
        ids[: first + begin],
        [ids[rows]],
        behaviour_logprobs=[chain.behaviour_logprob[rows]],
        policy_version=[chain.policy_version[rows]],
        columns=columns,
        statuses=[LeafStatus(int(tree.status[leaf]))],
    )
    return SampledCall(made, number=number)


class Episodic:
    """The run's sampler, whose trees become those of episodes of two chains."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, seconds: float) -> list[Flight]:
        flights: list[Flight] = self.inner.step(seconds)
        for flight in flights:
            if flight.tree is not None:
                flight.tree, flight.texts = episodes_of(flight.tree), None
        return flights


def episodes_of(tree: TokenTree) -> TokenTree:
    records = []
    for number in range(tree.num_leaves // 2):
        a, b = 2 * number, 2 * number + 1
        lengths = tree.response_length
        cut = int(lengths[a]) // 2
        calls = [
            part(tree, a, cut, 0, cut, 0),
            part(tree, a, cut, cut, int(lengths[a]), 1),
            part(tree, b, cut, 0, int(lengths[b]), 2),
        ]
        failure = Failure("raised", "it crashed") if tree.token_id[tree.response_rows(b)[0]] % 7 == 0 else None
        status = LeafStatus(int(tree.status[b])) if failure is None else LeafStatus.FAILED
        records.append(EpisodeRecord(tuple(calls), status, failure=failure))
    return episode_tree(tree.token_id[: tree.prompt_length].tolist(), records)


def run(directory: Path, name: str, *flags: str) -> Orchestrator:
    toml = directory / "tiny.toml"
    fixed = ["--rollout.program=flat", "--rollout.program_options={}", "--algorithm.advantage=group_norm"]
    fixed += ["--rollout.n=6", "--evaluation.problems=0", "--evaluation.every=0", f"--name={name}"]
    config = load_config(toml, [*fixed, "--algorithm.objective=grpo", "--checkpoint.every=1", *flags])
    made = build(config, console=Console())
    made.controller.sampler = Episodic(made.controller.sampler)  # type: ignore[assignment]
    made.run()
    return made


def rows(directory: Path, name: str) -> list[dict[str, float]]:
    lines = (directory / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("episodes")).parent


@pytest.mark.slow
def test_every_part_of_a_run_takes_episodes(directory: Path) -> None:
    done = run(directory, "whole", "--trainer.steps=3")
    page = re.compile("|".join(documented_metrics()))
    written = rows(directory, "whole")[1:]
    assert {name for row in written for name in row if name != "step" and not page.fullmatch(name)} == set()
    for row in written:
        assert row["training/rollout_probs_diff_mean"] < 1e-5
        assert row["agent/calls"] == pytest.approx(3)
        assert row["agent/branches"] == pytest.approx(2)
        assert row["agent/shared_ratio"] > 1
    assert sum(row["rollout/failed"] for row in written) > 0
    assert any(row.get("actor/grad_norm", 0) > 0 for row in written)
    table = pq.read_table(done.options.directory / "rollouts" / "step_000001.parquet").to_pylist()
    assert len(table) == 6 * 6  # leaves
    for group in {row["prompt_id"] for row in table}:
        mine = [row for row in table if row["prompt_id"] == group]
        assert sorted({row["episode"] for row in mine}) == [0, 1, 2]
        rewards = {}
        for row in mine:
            rewards.setdefault(row["episode"], set()).add(row["reward"])
            assert (row["status"] == "failed") == (row["reward"] is None)
        assert all(len(some) == 1 for some in rewards.values())
        known = [next(iter(some)) for some in rewards.values() if None not in some]
        if len(known) > 1:
            mean, sd = np.mean(known), np.std(known, ddof=1)
            for row in (row for row in mine if row["reward"] is not None):
                assert row["advantage"] == pytest.approx((row["reward"] - mean) / (sd + 1e-6), abs=1e-4)
    failed = sum(row["status"] == "failed" and row["answer"] for row in table)
    assert rows(directory, "whole")[1]["rollout/failed"] == failed
