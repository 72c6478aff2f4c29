"""The model of the loop: cases that can be worked out by hand, the real loop's counts, and the files."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolltree.bench import long_tail, modelled, modelled_loop
from rolltree.bench.loop import SETTINGS, SYNCHRONOUS, Inputs
from rolltree.bench.modelled_sampling import Array, Batch, Load, Loop
from rolltree.engine.loop.budget import Budget, StalenessError
from rolltree.engine.settings import LoopConfig


class Seconds:
    """One a step, and ``update``."""

    def __init__(self, update: float = 0.0) -> None:
        self.of_update, self.loads = update, list[tuple[Load, int]]()

    def steps(self, load: Load, count: int) -> Array:
        self.loads.append((load, count))
        return np.ones(count)

    def update(self, groups: Sequence[Sequence[int]]) -> float:
        return self.of_update


def run(lengths: Callable[[int], Sequence[int]], update: float = 0.0, *, prompts: int, rows: int, **given: Any) -> Loop:
    """With prompts of one token."""
    beside = given.pop("beside", False)
    return Loop(Batch(prompts, 1, rows, lengths), LoopConfig(**given), Seconds(update), beside=beside)


@pytest.mark.parametrize("given", SETTINGS.values(), ids=SETTINGS)
def test_equal_lengths_leave_no_row_idle_and_nothing_to_gain(given: dict[str, Any]) -> None:
    loop = run(lambda ticket: [100, 100], 50.0, prompts=2, rows=4, **given)
    updates = loop.run(6)
    # where it overlaps, in turns
    assert [b.seconds - a.seconds for a, b in itertools.pairwise(updates[1:])] == [150.0] * 4
    if not loop._overlaps:
        assert [update.steps for update in updates] == [100 * k for k in range(1, 7)]
    assert all(update.row_steps == 4 * update.steps for update in updates)


def test_one_long_response_leaves_known_rows_idle() -> None:
    """S = 0: 40 steps for 10 + 10 + 10 + 40 tokens. S = 1: a second group's rows run beside the long one."""
    (update,) = run(lambda ticket: [10, 10, 10, 40], 5.0, prompts=1, rows=4).run(1)
    assert (update.seconds, update.steps, update.row_steps) == (45.0, 40, 70)
    assert 1 - update.row_steps / (4 * update.steps) == 0.5625
    updates = run(lambda ticket: [10, 10, 10, 40], prompts=1, rows=5, staleness=1, overlap=False).run(6)
    # a group begins as the three short ones of that before it end: two groups in the 40 steps of a long response
    assert [update.steps for update in updates] == [40, 50, 80, 90, 120, 130]
    assert updates[5].row_steps - updates[3].row_steps == 2 * 70


@pytest.mark.parametrize(("how", "seconds"), [({}, 20), ({"staleness": 1}, 20), ({"staleness": 1, "beside": True}, 10)])
def test_an_update_beside_the_sampling(how: dict[str, Any], seconds: int) -> None:
    """Ten steps and an update of ten seconds: one after the other, at half speed each, or in the same ten seconds."""
    updates = run(lambda ticket: [10], 10.0, prompts=1, rows=1, **how).run(12)
    assert (updates[-1].seconds - updates[1].seconds) / 10 == seconds
    assert {update.row_steps / update.steps for update in updates} == {1.0}


def test_loads_are_what_the_rows_have() -> None:
    """Prompts of 5 tokens, at most 4 beside the rows in a step: a group begins with the second step."""
    costs = Seconds()
    Loop(Batch(1, 5, 8, lambda ticket: [3, 2], prefill=4), LoopConfig(), costs).run(1)
    assert costs.loads == [
        (Load(0, 4, 0, 8), 1),
        (Load(2, 1, 5, 2 * 5 + 4), 1),  # the last token of the prompt sees four keys before it, and half of itself
        (Load(2, 0, 5 + 2, 2 * 5 + 2), 1),
        (Load(1, 0, 5 + 2, 5 + 2), 1),
    ]


def test_keys_of_older_weights_are_computed_again() -> None:
    """At the first update the second group has 2 x 10 tokens and its prompt; kept keys need nothing."""
    lengths = {0: [10, 10], 1: [30, 30]}
    for keep, again in ((False, 1 + 2 * 10), (True, 0)):
        loop = run(lambda t: lengths.get(t, [1, 1]), prompts=1, rows=4, staleness=1, overlap=False, keep_keys=keep)
        first, second = loop.run(2)
        assert (first.steps, first.recomputed, second.steps) == (10, again, 30)
        assert (second.tokens, second.stale, second.lags) == (60, 20, (1,))


@pytest.mark.parametrize("given", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("beside", [False, True])
def test_no_token_is_lost_and_no_group_is_too_old(given: dict[str, Any], beside: bool) -> None:
    def lengths(ticket: int) -> list[int]:
        return modelled_loop.log_normal(3, 20, 300, ticket)

    loop = run(lengths, 35.0, prompts=4, rows=10, beside=beside, **given)
    updates = loop.run(25)
    learned = sum(update.tokens for update in updates)
    unfinished = sum(loop.sampler.tokens(group) for group in loop.buffer.open.values())
    assert learned + unfinished == loop.sampler.row_steps
    assert all(0 <= update.stale <= update.tokens for update in updates)
    assert max(lag for update in updates for lag in update.lags) <= given.get("staleness", 0)
    trained = loop.buffer.admitted - len(loop.buffer.open)
    assert trained == 25 * 4
    assert loop.buffer.dropped.total() == 0


def test_the_budget_of_a_run_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "capacity", property(lambda self: 4 * self.batch))
    with pytest.raises(StalenessError):
        run(lambda ticket: [10], prompts=1, rows=4, staleness=1, overlap=False).run(9)


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 1024, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 512}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


@pytest.mark.parametrize("name", [SYNCHRONOUS, "rolltree S=1, partial rollouts (APRIL)", "rolltree S=4"])
def test_the_real_loop_takes_as_many_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's case of `rolltree bench loop`, but for the model: the same lengths, steps and rows.

    Steps agree exactly at S = 0; above, the controller samples one more while the last group of a batch is judged.
    """
    prompts, prompt, width, median, longest, rows = 4, 32, 4, 16, 256, 32
    monkeypatch.setattr(long_tail._Verdicts, "in_turn", True)  # else it takes as many steps as the judges need time for
    real = long_tail.Loop(Inputs(tiny, prompts, prompt, width, median, longest, rows, 1), name, **SETTINGS[name])

    def lengths(ticket: int) -> list[int]:
        block, index = divmod(ticket, prompts)
        seeds = np.random.SeedSequence([0, block + 1]).generate_state(prompts, np.uint64).astype(np.int64)
        drawn = np.random.default_rng(abs(int(seeds[index]))).lognormal(np.log(median), 1.0, width)
        segment = long_tail.LongTail.segment_tokens
        return [min(longest, segment * math.ceil(min(length, longest) / segment)) for length in drawn]

    model = Loop(Batch(prompts, prompt, rows, lengths), LoopConfig(**SETTINGS[name]), Seconds(), on_cpu=True)
    updates = 6
    expected = model.run(updates)[-1]
    for _ in range(updates):
        real.update()
    counts = real.engine.loop.counts
    assert expected.steps <= counts["steps"] <= expected.steps + (updates if name != SYNCHRONOUS else 0)
    idle = 1 - expected.row_steps / (expected.steps * rows)
    assert real.x.idle[name] == pytest.approx(idle, abs=0 if name == SYNCHRONOUS else 0.01)
    lags = [lag for update in expected and model.updates for lag in update.lags]
    assert max(lags) <= SETTINGS[name].get("staleness", 0)


def written() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (modelled.FOLDER / "loop.jsonl").read_text().splitlines()]


def check(case: modelled_loop.Case) -> None:
    there = [row for row in written() if (row["case"], row["gpu"]) == (str(case), case.gpu)]
    assert there == modelled_loop.rows(modelled_loop.predictions(case))


def test_a_case_of_the_file_is_what_the_model_says() -> None:
    check(modelled_loop.CASES[0])


@pytest.mark.slow
def test_the_file_is_what_the_model_says() -> None:
    for case in modelled_loop.CASES:
        check(case)


def test_the_table_is_the_files_and_names_the_model() -> None:
    rows = written()
    assert (modelled.FOLDER / "loop.md").read_text() == modelled_loop.table(rows)
    assert {row["kind"] for row in rows} == {"model"}
    assert "not measured" in modelled_loop.table(rows).splitlines()[0]
    expected = [(str(case), case.gpu) for case in modelled_loop.CASES]
    assert list(dict.fromkeys((row["case"], row["gpu"]) for row in rows)) == expected
    for case, gpu in expected:
        of = [row for row in rows if (row["case"], row["gpu"]) == (case, gpu)]
        assert {row["setting"] for row in of} == set(modelled_loop.ALL)
        assert sum(row["speedup"] == 1 for row in of if row["setting"] == SYNCHRONOUS) == 1
        assert all(0 <= row["idle"] < 1 and row["dropped"] == 0 for row in of)
