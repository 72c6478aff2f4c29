"""The model of the engine: cases worked out by hand, the real engine's counts, and seconds by a formula of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolltree.bench.runs.rl_step import LongTail
from rolltree.engine import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.plan.modelled import (
    GEMM_SHARE,
    HOST,
    MFU,
    PEAK,
    STREAM_SHARE,
    Batch,
    DeviceModel,
    EngineModel,
    Load,
    MeasuredRates,
    Shape,
)


def model(
    lengths: Callable[[int], Sequence[int]], groups: int, *, prompt: int = 1, rows: int = 8, **given: int
) -> EngineModel:
    engine = EngineModel(Batch(prompt, rows, lengths, **given))
    for ticket in range(groups):
        engine.add(ticket)
    return engine


def run(engine: EngineModel) -> tuple[list[tuple[Load, int]], list[int]]:
    """Run until nothing is left; return the loads with their counts, and the tickets in the order they finished."""
    loads, finished = [], []
    while engine.busy:
        loads.append(engine.next())
        finished += engine.advance(loads[-1][1])
    return loads, finished


def test_one_long_response_leaves_known_rows_idle() -> None:
    """40 steps for 10 + 10 + 10 + 40 tokens; the next group starts only when its rows are free."""
    engine = model(lambda ticket: [10, 10, 10, 40], 1, rows=4)
    assert run(engine)[1] == [0]
    assert (engine.steps, engine.row_steps) == (40, 70)
    engine = model(lambda ticket: [10, 10, 10, 40], 2, rows=5)
    assert run(engine)[1] == [0, 1]
    assert (engine.steps, engine.row_steps) == (50, 140)


def test_loads_are_what_the_rows_have() -> None:
    """Prompts of 5 tokens, at most 4 of them in a step: the responses start with the second step."""
    assert run(model(lambda ticket: [3, 2], 1, prompt=5, prefill=4))[0] == [
        (Load(0, 4, 0, 8), 1),
        (
            Load(2, 1, 5, 2 * 5 + 4),
            1,
        ),  # the last token of the prompt attends to four keys before it, and half of itself
        (Load(2, 0, 5 + 2, 2 * 5 + 2), 1),
        (Load(1, 0, 5 + 2, 5 + 2), 1),
    ]


def test_forgotten_keys_are_computed_again_before_the_responses_resume() -> None:
    engine = model(lambda ticket: [10, 30], 1, prompt=7)
    engine.next()
    engine.advance(4)
    assert engine.tokens(0) == 2 * 4
    engine.forget_keys()
    assert engine.recomputed == 7 + 2 * 4
    load, count = engine.next()
    assert (load.rows, load.prefill, count) == (2, 7 + 2 * 4, 1)
    assert engine.advance(1) == []
    assert run(engine)[1] == [0]
    assert (engine.steps, engine.row_steps) == (30, 40)
    assert engine.forget(0) == [10, 30]


def test_no_token_is_lost_whenever_keys_are_forgotten() -> None:
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 40, 3).tolist() for _ in range(20)]
    engine = model(lengths.__getitem__, len(lengths), prompt=9, rows=10, prefill=16)
    finished = []
    while engine.busy:
        load, count = engine.next()
        assert load.rows <= 10
        assert load.prefill <= 16
        finished += engine.advance(int(rng.integers(1, count + 1)))
        if rng.random() < 0.3:
            engine.forget_keys()
    assert sorted(finished) == list(range(20))
    assert [engine.forget(ticket) for ticket in finished] == [lengths[ticket] for ticket in finished]
    assert engine.row_steps == sum(map(sum, lengths))


@pytest.mark.parametrize("rows", [8, 24, 64])
def test_the_real_engine_takes_as_many_steps(rows: int) -> None:
    """The same lengths through `NativeEngine`: the same decode steps, and the same rows in them."""
    groups, prompt, width, median, longest = 12, 20, 4, 12, 80
    torch.manual_seed(0)
    sizes = {"vocab_size": 211, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 512}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    net = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    real = NativeEngine(net, config=EngineConfig(kv_tokens=1 << 15, max_batch_rows=rows, max_prefill_tokens=64))
    params = SamplingParams(n=width, max_new_tokens=longest, ignore_eos=True)
    prompts = np.random.default_rng(0).integers(0, 211, (groups, prompt)).tolist()
    real.generate(prompts, params, LongTail(median, longest), seeds=range(groups))

    def lengths(ticket: int) -> list[int]:
        drawn = np.random.default_rng(ticket).lognormal(np.log(median), 1.0, width)
        segment = LongTail.segment_tokens
        return [min(longest, segment * math.ceil(min(length, longest) / segment)) for length in drawn]

    engine = model(lengths, groups, prompt=prompt, rows=rows, prefill=64)
    run(engine)
    assert (engine.steps, engine.row_steps) == (real.stats["steps"], real.loop.counts["row_steps"])


def test_seconds_follow_from_bytes_and_operations() -> None:
    shape, memory = Shape(1e9, 10, 8, 4, 64), 1e12
    device = DeviceModel(shape, memory, 100)
    few, many = Load(1, 0, 50, 60), Load(4096, 512, 1000, 50000)
    key_bytes, pair = 2 * 2 * 4 * 64 * 10, 4 * 64 * 8 * 10
    expected = [(2e9 + (50 + i) * key_bytes) / (STREAM_SHARE * memory) + HOST for i in range(3)]
    assert device.steps(few, 3) == pytest.approx(sum(expected))  # few rows wait for the weights
    expected = [(4608 * 2e9 + (50000 + 4096 * i) * pair) / (GEMM_SHARE * PEAK) + HOST for i in range(3)]
    assert device.steps(many, 3) == pytest.approx(sum(expected))  # many rows are bound by operations
    visible = 100 * 100 / 2 + sum(sum(100 + i + 0.5 for i in range(n)) for n in (30, 50))
    assert device.update([[30, 50]]) == pytest.approx(3 * (2e9 * (100 + 80) + pair * visible) / (MFU * PEAK))


@pytest.mark.parametrize("seed", range(40))
def test_many_steps_take_the_sum_of_single_ones(seed: int) -> None:
    """The closed form against a loop; some cases change from one limit to the other within the steps."""
    rng = np.random.default_rng(seed)
    shape = Shape(float(rng.uniform(1e6, 1e8)), 4, 8, int(rng.integers(1, 9)), 64)
    device = DeviceModel(shape, float(rng.uniform(1e10, 1e13)), 10)
    rows, count = int(rng.integers(0, 300)), int(rng.integers(1, 3000))
    load = Load(rows, int(rng.integers(0, 500)), int(rng.integers(0, 10**6)), int(rng.integers(0, 10**6)))
    tokens = 2 * shape.weights * (rows + load.prefill)
    single = [
        max(
            (2 * shape.weights + (load.keys + i * rows) * shape.key_bytes) / (STREAM_SHARE * device.memory),
            (tokens + (load.visible + i * rows) * shape.pair) / (GEMM_SHARE * PEAK),
        )
        + HOST
        for i in range(count)
    ]
    assert device.steps(load, count) == pytest.approx(math.fsum(single), rel=1e-12)


def test_measured_rates_multiply() -> None:
    rates = MeasuredRates(step_s=0.5, token_s=2.0, prompt=3)
    assert rates.steps(Load(7, 0, 0, 0), 4) == 2.0
    assert rates.update([[1, 2], [5]]) == 2.0 * (3 + 1 + 3 + 2 + 3 + 5)
