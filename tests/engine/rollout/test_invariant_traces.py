"""With `model.batch_invariant` no bit of a log-prob depends on what was computed beside it, before it or how often."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.model.invariant.check import differing
from rolltree.engine.model.invariant.install import make_invariant
from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams
from rolltree.kernels.libraries import load_library

from ...support.fresh import once_a_test
from .test_drafts import ACTIONS, PROGRAMS, Told, Watched, assert_same, come_between, drafting, finished
from .test_native_engine import PROMPTS, letters, model

pytestmark = pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")


@once_a_test
def exact(name: str) -> Any:
    found = copy.deepcopy(model(name))
    found.set_attn_implementation("rolltree")
    return make_invariant(found)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["qwen3", "llama"]),
    program=st.sampled_from(list(PROGRAMS)),
    wrong=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 10**6),
    actions=ACTIONS,
    pages=st.sampled_from([1, 4, 7, 16]),
    sizes=st.sampled_from(
        [
            {},
            {"kv_tokens": 130},
            {"kv_tokens": 130, "host_kv_tokens": 4096},
            {"max_prefill_tokens": 5},
            {"max_batch_rows": 3},
        ]
    ),
)
def test_no_bit_depends_on_what_comes_between(
    name: str, program: str, wrong: float, seed: int, actions: list[str], pages: int, sizes: dict[str, int]
) -> None:
    params = SamplingParams(n=3, max_new_tokens=16)
    watched, prompts = Watched(), PROMPTS[seed % 3 : seed % 3 + 3]
    seeds = [seed + i for i in range(len(prompts))]
    native = drafting(NativeEngine(exact(name), letters(), EngineConfig(page_size=4, kv_tokens=4096)), watched)
    expected = finished(native, native.submit(prompts, params, PROGRAMS[program], seeds=seeds))
    config = EngineConfig(**{"kv_tokens": 4096, **sizes, "page_size": pages})
    native = drafting(NativeEngine(exact(name), letters(), config), Told(watched.known, wrong, seed=seed))
    requests = native.submit(prompts, params, PROGRAMS[program], seeds=seeds)
    for action in actions:
        come_between(native, requests, action, seed)
    assert_same(finished(native, requests), expected, 0)
    trees = [request.tree for request in requests if request.tree is not None]
    assert sum(np.isfinite(tree.behaviour_logprob).sum() for tree in trees) > 30
    assert differing(exact(name), trees) is None
