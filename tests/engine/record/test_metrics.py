"""Sums and counts, the account of a step's time, metrics.jsonl and the rollouts file."""

import json
import math
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rolltree.engine.data.segment import LeafStatus, Segment
from rolltree.engine.data.store import write_rollouts
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.record.metrics import Idle, MetricsLog, Stopwatch, Sums


def test_means_are_of_sums_not_of_means():
    sums = Sums()
    sums.add("loss", torch.tensor(3.0), torch.tensor(1))
    sums.add("loss", torch.tensor(1.0, dtype=torch.float64), 3)
    sums.add("reward", 4.0, 8)
    sums.add_values("length", np.array([1, 2, 6], np.int32))
    sums.add("clip/low", torch.tensor(0.0), torch.tensor(0))  # nothing was measured
    sums.count("dropped")
    sums.count("dropped", 2)
    sums.count("failed", 0)
    sums.maximum("diff", 0.25)
    sums.maximum("diff", torch.tensor(0.5))
    sums.maximum("diff", 0.125)
    assert sums.means() == {"loss": 1.0, "reward": 0.5, "length": 3.0, "dropped": 3, "failed": 0, "diff": 0.5}


def test_no_measure_no_means():
    assert Sums().means() == {}


def test_stopwatch_parts_sum_to_the_step():
    now = iter([0.0, 1.0, 3.5, 4.0, 5.0, 7.0, 10.0])
    watch = Stopwatch(clock=lambda: next(now))
    with watch.part("gen"):
        pass
    with pytest.raises(KeyError), watch.part("reward"):
        raise KeyError  # a part that fails is timed too
    watch_read = watch.read()
    assert watch_read["timing_s/gen"] == 2.5
    assert watch_read["timing_s/reward"] == 1.0
    assert watch_read["timing_s/other"] == 3.5
    assert watch_read["timing_s/step"] == 7.0
    assert math.fsum(v for k, v in watch_read.items() if k != "timing_s/step") == watch_read["timing_s/step"]
    assert watch.read()["timing_s/step"] == 3.0  # what follows is the next account's


def test_idle_seconds_by_cause():
    """A full step has 8 rows; 10 steps of 1 s in all sampled 20 tokens, and 2 s of them waited for tools."""
    idle, times = Idle(rows=8), {"timing_s/gen": 4.0, "timing_s/reward": 1.5}
    idle.read(times, Counter(us=3_000_000, steps=5, row_steps=40))
    found = idle.read(times, Counter(us=13_000_000, steps=15, row_steps=60, call_wait_us=2_000_000))
    assert found == {
        "perf/sampling_s": 10.0,
        "perf/overlapped_s": 6.0,
        "perf/idle/rewards": 1.5,
        "perf/idle/tools": 2.0,
        "perf/idle/tail": pytest.approx(8.0 * 0.75),
    }
    assert set(idle.read(times, Counter(us=13_000_000, steps=15, row_steps=60)).values()) == {0.0, 1.5}


def test_a_sampler_that_waits_for_agents_says_why():
    idle, times = Idle(rows=8), {"timing_s/gen": 4.0, "timing_s/reward": 0.0}
    idle.read(times, Counter(us=1, agent_start_us=500_000, agent_tools_us=0))
    found = idle.read(times, Counter(us=1, agent_start_us=500_000, agent_tools_us=3_000_000))
    assert (found["perf/idle/agents_start"], found["perf/idle/agents_tools"]) == (0.0, 3.0)


def test_log_is_json_lines_in_order(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(0, {"eval/accuracy": 0.1 + 0.2})
    log.append(1, {"actor/grad_norm": math.nan, "a": math.inf, "b": 1.0})
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert rows == [
        {"step": 0, "eval/accuracy": 0.30000000000000004},
        {"step": 1, "actor/grad_norm": None, "a": None, "b": 1.0},
    ]
    assert next(iter(rows[1])) == "step"


def test_rewind_keeps_a_copy_of_what_it_drops(tmp_path):
    log, aside = MetricsLog(tmp_path / "metrics.jsonl"), tmp_path / "aside" / "metrics.jsonl"
    for step in range(4):
        log.append(step, {"a": step / 3})
    whole = log.path.read_text()
    assert log.rewind(3, aside) == {0, 1, 2, 3}
    assert not aside.exists()  # nothing to drop
    log.path.write_text(whole + '{"step": 4, "a": 0.')  # killed while writing
    assert log.rewind(2, aside) == {0, 1, 2}
    assert log.path.read_text() == "".join(whole.splitlines(keepends=True)[:3])
    assert aside.read_text() == whole + '{"step": 4, "a": 0.'
    log.append(3, {"a": 1.0})
    assert log.path.read_text() == whole
    assert log.rewind(9, aside) == {0, 1, 2, 3}  # its row is not there yet


def test_rewind_names_a_broken_line(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.path.write_text('{"step": 0}\n{"stop": 1}\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"Line 2 of .*metrics\.jsonl"):
        log.rewind(2, tmp_path / "aside")
    assert not MetricsLog(tmp_path / "none.jsonl").rewind(0, tmp_path / "aside")


def test_rollouts_round_trip(tmp_path):
    tree = TokenTree.from_nodes(
        [-1, 0, 1, 1, 0],
        [
            Segment.prompt([7, 8]),
            Segment.sampled([1, 2], [-0.5, -0.25], policy_version=3),
            Segment.sampled([3], [-1.0], policy_version=3),
            Segment.sampled([4, 5], [-2.0, -0.125], policy_version=4),
            Segment.sampled([], []),
        ],
        [3, 4, 2],
        [LeafStatus.STOP, LeafStatus.FAILED, LeafStatus.LENGTH],
    )
    tree.meta.update(prompt_id="p0", task="sum", prompt_text="1+1=")
    tree.rewards["reward"] = np.array([1.0, np.nan, 0.0], np.float32)
    tree.advantage[:] = [0.5, 0.0, -0.5]
    path = tmp_path / "rollouts" / "step_000002.parquet"
    write_rollouts(path, 2, [tree, tree], [["a", "", "c"]] * 2)
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == 6
    flat = tree.flatten()
    for row, text, sequence in zip(rows, ["a", "", "c"], flat, strict=False):
        assert (row["step"], row["prompt_id"], row["task"], row["prompt_text"]) == (2, "p0", "sum", "1+1=")
        assert row["response_text"] == text
        assert row["prompt_ids"] == [7, 8]
        assert row["response_ids"] == sequence.response
        assert row["behaviour_logprob"] == sequence.behaviour_logprob.tolist()
        assert row["loss_mask"] == sequence.loss_mask.tolist()
        assert row["policy_version"] == sequence.policy_version.tolist()
        assert row["advantage"] == sequence.advantage
    assert [r["leaf"] for r in rows[:3]] == [0, 1, 2]
    assert [r["status"] for r in rows[:3]] == ["stop", "failed", "length"]
    assert [r["reward"] for r in rows[:3]] == [1.0, None, 0.0]
    a, _, c = (r["node_ids"] for r in rows[:3])
    assert a[:2] == c[:2]  # the shared node
    assert set(a[2:]).isdisjoint(c[2:])
    assert not list(path.parent.glob("*.tmp"))


def test_rollouts_of_a_step_without_trees(tmp_path):
    write_rollouts(tmp_path / "step.parquet", 1, [], [])
    assert pq.read_table(tmp_path / "step.parquet").num_rows == 0
