"""The check of a whole run's bits: a run with `model.batch_invariant` passes, and one bit that differs fails it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from rolltree.bench.jobs import next_runs, run_bits
from rolltree.bench.jobs.next_runs import STEPS, recorded_bits, write_job
from rolltree.bench.runs.gpu_next import Decoding
from rolltree.bench.schema import Context
from rolltree.engine import UserError
from rolltree.engine.app.cli import main as rolltree
from rolltree.engine.train import checkpoint

from ..kernels.on_device import needs_known_order

pytestmark = needs_known_order

CPU = torch.device("cpu")
TOKENS = 2 * 2 * 12
EQUAL = {way: {"tokens": TOKENS, "differing": 0} for way in ("trees", "pieces", "sequences")}


@pytest.fixture(scope="module")
def measured() -> Decoding:
    return Decoding(CPU, True, Context.of(CPU))


def trained(measured: Decoding, folder: Path, invariant: bool) -> Path:
    assert rolltree(["train", str(write_job(measured, folder, invariant))]) == 0
    return folder / "runs" / "next"


@pytest.fixture(scope="module")
def run(measured: Decoding, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(measured, tmp_path_factory.mktemp("exact"), True)


def rollouts(run: Path, step: int = STEPS) -> Path:
    return run / "rollouts" / f"step_{step:06d}.parquet"


@pytest.fixture
def stored(run: Path) -> Any:
    """The table of the last step's rollouts; the file is as before afterwards."""
    before = rollouts(run).read_bytes()
    yield pq.read_table(rollouts(run))
    rollouts(run).write_bytes(before)


def rewrite(run: Path, table: pa.Table, name: str, row: int, place: int, value: float) -> None:
    values = table[name].to_pylist()
    values[row][place] = value
    field = table.schema.field(name)
    changed = table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
    pq.write_table(changed, rollouts(run))


def last_bit(value: float) -> float:
    return float((np.float32(value).view(np.int32) ^ np.int32(1)).view(np.float32))


@pytest.mark.slow
def test_another_process_finds_the_bits_that_the_run_has_recorded(run: Path) -> None:
    assert recorded_bits(run) == EQUAL


@pytest.mark.parametrize("change", [last_bit, lambda value: float("nan")], ids=["last bit", "nan"])
def test_one_stored_bit(run: Path, stored: pa.Table, change: Any) -> None:
    value = stored["behaviour_logprob"][1][5].as_py()
    rewrite(run, stored, "behaviour_logprob", 1, 5, change(value))
    assert run_bits.compared(run, STEPS) == {way: {"tokens": TOKENS, "differing": 1} for way in EQUAL}
    rewrite(run, stored, "behaviour_logprob", 1, 5, value)
    assert run_bits.compared(run, STEPS) == EQUAL


def test_a_changed_token_changes_what_follows_it(run: Path, stored: pa.Table) -> None:
    token = stored["response_ids"][0][6].as_py()
    rewrite(run, stored, "response_ids", 0, 6, token ^ 1)
    found = run_bits.compared(run, STEPS)
    assert all(0 < counts["differing"] <= 12 - 6 for counts in found.values())


def test_one_bit_of_a_weight(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = checkpoint.read_tensors

    def flipped(directory: Path) -> dict[str, Tensor]:
        tensors = read(directory)
        tensors["weight.model.norm.weight"].view(torch.int32)[3] ^= 1
        return tensors

    monkeypatch.setattr(checkpoint, "read_tensors", flipped)
    assert all(counts["differing"] > 0 for counts in run_bits.compared(run, STEPS).values())


@pytest.fixture
def with_other_weights(run: Path) -> Any:
    """A run in which the weights of the last step stand for those of the last but two."""
    link = run / "checkpoints" / f"step_{STEPS - 2:06d}"
    link.symlink_to(run / "checkpoints" / f"step_{STEPS:06d}")
    yield run
    link.unlink()


def test_weights_of_another_step_are_refused(with_other_weights: Path) -> None:
    run = with_other_weights
    with pytest.raises(UserError, match=rf"weights of updates \[{STEPS - 2}\], .* has those of update {STEPS}"):
        run_bits.compared(run, STEPS - 1)
    assert run_bits.main([str(run), "--step", str(STEPS - 1)]) == 2


@pytest.mark.slow
def test_another_process_refuses_them_too(with_other_weights: Path) -> None:
    with pytest.raises(RuntimeError, match=r"loop\.staleness = 0"):
        recorded_bits(with_other_weights, STEPS - 1)


@pytest.mark.slow
def test_a_run_without_the_key_has_other_bits(measured: Decoding, tmp_path: Path) -> None:
    """Padded sequences add up attention in another order; so the check can fail on a whole run."""
    run = trained(measured, tmp_path, False)
    found = run_bits.compared(run, STEPS)
    assert found["sequences"]["tokens"] == TOKENS
    assert found["sequences"]["differing"] > 0
    assert run_bits.main([str(run), "--step", str(STEPS)]) == run_bits.DIFFERENT
    assert recorded_bits(run) == found


def test_a_line_fails_where_bits_differ(measured: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the key; without it they are told."""
    steps = [{"step": step, "timing_s/step": 2.0, "timing_s/checkpoint": 0.5} for step in range(STEPS + 1)]

    def made(command: list[str]) -> int:
        directory = Path(command[1]).parent / "runs" / "next"
        directory.mkdir(parents=True)
        (directory / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        return 0

    monkeypatch.setattr(next_runs, "rolltree", made)
    found = EQUAL | {"pieces": {"tokens": TOKENS, "differing": 2}}
    monkeypatch.setattr(next_runs, "recorded_bits", lambda run: found)
    (_, exact), (_, other) = next_runs.whole_runs(measured)
    with pytest.raises(AssertionError, match=f"2 of {TOKENS} log-probs have other bits as pieces"):
        exact()
    rows, summary = other()
    assert "1500 ms a step" in summary
    assert {(row.case, row.metric): row.value for row in rows} == {
        ("small run", "time_ms"): 1500.0,
        **{
            (f"small run, bits as {way}", name): count
            for way, counts in found.items()
            for name, count in counts.items()
        },
    }
    found.clear()
    found.update(EQUAL)
    assert "0 of 48 log-probs have other bits as trees" in exact()[1]
