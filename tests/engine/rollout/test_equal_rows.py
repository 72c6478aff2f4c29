"""Branches that have sampled the same tokens are one row: every bit is that of rows apart, for fewer rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.rollout import NativeEngine, SamplingParams
from rolltree.engine.rollout.native.equal_rows import EqualRows

from .test_drafts import ACTIONS, PROGRAMS, assert_same, come_between, finished, misread
from .test_native_engine import PROMPTS, assert_all_free, engine
from .test_recurrent_rollouts import model as recurrent_model
from .test_windows import SIZES, assert_equal

SHARP = SamplingParams(n=6, max_new_tokens=14, temperature=0.1)
"""Many responses of the tiny model begin alike with these, and some are equal to the end."""


def apart(native: NativeEngine) -> NativeEngine:
    native.loop.merges = False
    return native


def rows_of(native: NativeEngine) -> list[int]:
    """Record the number of rows of each step from now on."""
    rows, assemble = list[int](), native.loop.scheduler._assemble

    def counted(*args: Any) -> Any:
        step = assemble(*args)
        rows.append(len(step.sample_rows))
        return step

    native.loop.scheduler._assemble = counted  # type: ignore[method-assign, assignment]
    return rows


def paths(tree: TokenTree) -> list[list[int]]:
    return [tree.token_id[tree.response_rows(leaf)].tolist() for leaf in range(tree.num_leaves)]


@pytest.mark.parametrize("sizes", [*SIZES, {"kv_tokens": 64, "host_kv_tokens": 256}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0])
def test_the_bits_are_those_of_rows_apart(sizes: dict[str, int], temperature: float) -> None:
    params = SamplingParams(
        n=6, max_new_tokens=14, temperature=temperature, top_p=0.95, top_logprobs=2, kept_tokens=True
    )
    made = []
    for native in (apart(engine(**sizes)), engine(**sizes)):
        rows = rows_of(native)
        trees = native.generate(PROMPTS, params, seeds=range(len(PROMPTS)))
        made.append((trees, sum(rows), native.stats["flop"], native.stats["sampled_tokens"]))
        assert not native.loop.equal
        assert_all_free(native)
    (before, rows_before, flop_before, tokens_before), (after, rows_after, flop_after, tokens_after) = made
    assert_equal(after, before)
    assert tokens_after == tokens_before
    assert (rows_after < 0.9 * rows_before) == (temperature < 1)
    assert (flop_after < 0.95 * flop_before) == (temperature < 1)


@pytest.mark.slow
@settings(max_examples=24, deadline=None)
@given(
    program=st.sampled_from(list(PROGRAMS)),
    temperature=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 10**6),
    actions=ACTIONS,
    sizes=st.sampled_from(SIZES),
)
def test_anything_may_come_between(
    program: str, temperature: float, seed: int, actions: list[str], sizes: dict[str, int]
) -> None:
    """Aborts, preemption, new weights and other requests, while branches are one row."""
    params = SamplingParams(n=4, max_new_tokens=16, temperature=temperature)
    plain, native = apart(engine()), engine(**sizes)
    expected = finished(plain, plain.submit(PROMPTS[:3], params, PROGRAMS[program], seeds=[seed, seed + 1, seed + 2]))
    requests = native.submit(PROMPTS[:3], params, PROGRAMS[program], seeds=[seed, seed + 1, seed + 2])
    for action in actions:
        come_between(native, requests, action, seed)
        native.cache.tree.check()
    assert_same(finished(native, requests), expected, 0.0)
    assert_all_free(native)
    misread.clear()


def test_a_dropped_leader_leaves_its_keys_to_a_follower() -> None:
    """Running, and while it waits for keys."""
    for waits in (False, True):
        native = engine()
        (request,) = native.submit(PROMPTS[:1], SHARP, seeds=[0])
        while not native.loop.equal:
            native.step()
        if waits:
            native.loop.preempt_all()
        leaders = [b for b in request.sampling.values() if native.loop.equal.of(b.slot)]
        gone = [leaders[0].id, native.loop.equal.of(leaders[0].slot)[-1].id]
        for name in gone:
            native.loop._prune(request, name)
        finished(native, [request])
        (expected,) = apart(engine()).generate(PROMPTS[:1], SHARP, seeds=[0])
        assert request.tree is not None
        every = {(leaf,): path for leaf, path in enumerate(paths(expected))}
        assert paths(request.tree) == [path for name, path in every.items() if name not in gone]
        assert_all_free(native)


def test_rows_stay_apart_where_something_is_kept_for_each() -> None:
    for native in (NativeEngine(recurrent_model("qwen3_5")), engine(window=4)):
        (request,) = native.submit([[5, 6, 7]], SHARP, seeds=[0])
        while not request.done:
            native.step()
            assert not native.loop.equal


def test_other_seeds_or_a_late_division_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = apart(engine()).generate(PROMPTS[:3], SHARP, seeds=range(3))

    def same_seeds(self: EqualRows, slots: Any, samples: Any) -> Any:
        return slots.repeat(samples)

    with monkeypatch.context() as patch:
        patch.setattr(EqualRows, "owners", same_seeds)
        with pytest.raises(AssertionError):
            assert_equal(engine().generate(PROMPTS[:3], SHARP, seeds=range(3)), expected)
