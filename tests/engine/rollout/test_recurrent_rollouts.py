"""Hybrids in the native engine: answers of Transformers' generate, and log-probs of its plain forward, whatever happens
to the states of their recurrent layers on the way."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine import batch_logprob, pack
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.programs import RolloutProgram, TreePO
from rolltree.engine.rollout import DraftConfig, EngineConfig, NativeEngine, Request, SamplingParams
from rolltree.engine.rollout.native.cache.states import StateCache, StateStep

from ...support.fresh import copied, once_a_test
from ...support.recurrent_models import FAMILIES, VOCAB, flat, make
from .test_native_engine import assert_all_free, responses

QUICK = ("qwen3_5", "nemotron_h", "lfm2")
EVERY = [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES]
rng = np.random.default_rng(0)
PROMPTS: list[list[int]] = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 17, 33)]
PROMPTS.append([*PROMPTS[2][:11], 5, 6])  # leaves another in its middle
SEEDS = list(range(len(PROMPTS)))
PARAMS = SamplingParams(n=3, max_new_tokens=13, ignore_eos=True)
TREEPO = TreePO(segment_tokens=4, max_depth=5, branch=2, init=2)
REWINDING = TreePO(segment_tokens=3, max_depth=6)
STOPPING = SamplingParams(n=6, max_new_tokens=13, stop_token_ids=range(VOCAB // 2))
WRONG = 2e-3  # least difference that an error makes: 200 times what is allowed (LFM2 remembers two inputs, weakly)
TIGHT = {"kv_tokens": 64, "max_prefill_tokens": 5}


@once_a_test
def model(family: str) -> Any:
    return make(family)


def engine(family: str = "nemotron_h", net: Any = None, **sizes: Any) -> NativeEngine:
    config = EngineConfig(**{"page_size": 4, "kv_tokens": 4096, **sizes})
    return NativeEngine(model(family) if net is None else net, config=config)


@copied
def expected(program: RolloutProgram | str = "flat", params: SamplingParams = PARAMS) -> list[list[list[int]]]:
    """Responses of an engine with room for everything."""
    return [responses(tree) for tree in engine().generate(PROMPTS, params, program, seeds=SEEDS)]


def off(net: Any, trees: Sequence[TokenTree]) -> float:
    """The largest difference of a recorded log-prob from the plain forward of its sequence."""
    with torch.no_grad():
        right = torch.cat(flat(net, trees)).numpy()
    found = np.concatenate([leaf.behaviour_logprob for tree in trees for leaf in tree.flatten()])
    return float(np.abs(found - right).max())


def finish(native: NativeEngine, requests: Sequence[Request]) -> list[TokenTree]:
    while not all(request.done for request in requests):
        native.step()
    assert [request.error for request in requests] == [None] * len(requests)
    return [request.tree for request in requests if request.tree is not None]


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("family", EVERY)
def test_greedy_equals_transformers_generate(family: str) -> None:
    net = model(family)
    params = SamplingParams(n=2, temperature=0, max_new_tokens=16, ignore_eos=True)
    whole, chunked = (
        engine(family, max_prefill_tokens=chunk).generate(PROMPTS, params, seeds=SEEDS) for chunk in (2048, 3)
    )
    net.set_attn_implementation("eager")
    for prompt, tree, other in zip(PROMPTS, whole, chunked, strict=True):
        ids = torch.tensor([prompt])
        answer = net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        for leaf in [*tree.flatten(), *other.flatten()]:
            assert leaf.response == answer[0, len(prompt) :].tolist()
    net.set_attn_implementation("rolltree")


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize("family", EVERY)
def test_log_probs_are_those_of_the_trainer_and_of_plain_transformers(family: str) -> None:
    """Trees that fork at segment ends and go back to them; and with preemptions."""
    native = engine(family, **TIGHT)
    trees = native.generate(PROMPTS, PARAMS, TREEPO, seeds=SEEDS)
    assert native.stats["preemptions"] > 0
    native = engine(family, max_prefill_tokens=8)
    trees += native.generate(PROMPTS, STOPPING, REWINDING, seeds=SEEDS)
    assert native.stats["rewinds"] > 0
    assert off(model(family), trees) < 1e-5
    (batch,) = pack(trees, max_tokens=1 << 16)
    with torch.no_grad():
        of_trainer = batch.to_leaves(batch_logprob(model(family), batch).logprob)
    for index, leaves in zip(batch.tree_index, of_trainer, strict=True):
        for leaf, values in zip(trees[index].flatten(), leaves, strict=True):
            np.testing.assert_allclose(leaf.behaviour_logprob, values.numpy(), rtol=0, atol=1e-5)
    assert_all_free(native)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["flat", TREEPO], ids=["flat", "treepo"])
def test_a_sample_depends_neither_on_the_batch_nor_on_sizes_nor_on_preemption(program: RolloutProgram | str) -> None:
    for sizes in (
        {"max_batch_rows": 3},
        TIGHT | {"kept_states": 0},
        TIGHT | {"host_kv_tokens": 4096},
        {"kept_states": 1, "page_size": 16},
    ):
        native = engine(**sizes)
        trees = native.generate(PROMPTS, PARAMS, program, seeds=SEEDS)
        assert [responses(tree) for tree in trees] == expected(program), sizes
        assert (native.stats["preemptions"] > 0) == ("kv_tokens" in sizes)
        assert native.stats["state_evictions"] > 0 or "kept_states" not in sizes
        assert_all_free(native)
    (alone,) = engine().generate(PROMPTS[3:4], PARAMS, program, seeds=SEEDS[3:4])
    assert responses(alone) == expected(program)[3]


@pytest.mark.slow(but=2)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("program", ["flat", TREEPO], ids=["flat", "treepo"])
@pytest.mark.parametrize("sizes", [{}, {"kept_states": 0, "kv_tokens": 120}], ids=["roomy", "tight"])
def test_aborted_requests_go_on_to_the_same_end(program: RolloutProgram | str, sizes: dict[str, int]) -> None:
    native, draw = engine(max_prefill_tokens=8, **sizes), np.random.default_rng(0)
    requests = native.submit(PROMPTS, PARAMS, program, seeds=SEEDS)
    aborted = 0
    while not all(request.done for request in requests):
        native.step()
        if draw.random() < 0.3:
            some = [request for request in requests if not request.done and draw.random() < 0.7]
            aborted += len(native.abort(some))
            native.step()
            if draw.random() < 0.3:
                native.forget_prefixes()
            native.submit(some)
    assert aborted > 10
    assert [responses(tree) for tree in finish(native, requests)] == expected(program)
    assert_all_free(native)


@pytest.mark.parametrize("family", QUICK)
def test_new_weights_in_the_middle_of_responses(family: str) -> None:
    """Each token has the log-prob of the weights that sampled it: no state of the old ones is left."""
    old, new = copy.deepcopy(model(family)), copy.deepcopy(model(family))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.05)
    native = engine(net=copy.deepcopy(old))
    requests = native.submit(PROMPTS, PARAMS, TREEPO, seeds=SEEDS)
    for _ in range(9):
        native.step()
    native.update_weights(dict(new.named_parameters()), version=1)
    trees = finish(native, requests)
    with torch.no_grad():
        right = [torch.cat(flat(net, trees)).numpy() for net in (old, new)]
    leaves = [leaf for tree in trees for leaf in tree.flatten()]
    version = np.concatenate([leaf.policy_version for leaf in leaves])
    found = np.concatenate([leaf.behaviour_logprob for leaf in leaves])
    assert set(version.tolist()) == {0, 1}
    assert np.abs(found - np.where(version == 1, right[1], right[0])).max() < 1e-5
    computed = native.stats["prefill_tokens"]
    native.update_weights(keep_kv=True)
    assert native.stats["prefill_tokens"] == computed


def test_prompts_that_are_known_begin_with_their_states() -> None:
    native = engine()
    (first,) = native.generate([PROMPTS[3]], PARAMS, seeds=[3])
    assert native.stats["prefill_tokens"] == len(PROMPTS[3])
    (again,) = native.generate([PROMPTS[3]], PARAMS, seeds=[3])
    assert native.stats["prefill_tokens"] == 1
    assert responses(again) == responses(first) == expected()[3]
    turn = again.flatten()[2]
    conversation = turn.prompt + turn.response + [5, 6, 7]
    (second,) = native.generate([conversation], PARAMS, seeds=[9])
    assert native.stats["prefill_tokens"] == 4  # the last response token and the new ones
    assert responses(second) == responses(engine().generate([conversation], PARAMS, seeds=[9])[0])
    native.forget_prefixes()
    (forgotten,) = native.generate([conversation], PARAMS, seeds=[9])
    assert native.stats["prefill_tokens"] == len(conversation)
    assert responses(forgotten) == responses(second)


def test_a_kept_state_is_not_overwritten_by_an_only_child() -> None:
    native = engine()
    native.generate([PROMPTS[3]], SamplingParams(n=1, max_new_tokens=5, ignore_eos=True))
    trees = native.generate([[*PROMPTS[3], 5, 6, 7]], PARAMS)
    assert native.stats["prefill_tokens"] == 3
    assert off(model("nemotron_h"), trees) < 1e-5


def test_a_lost_state_costs_only_the_tokens_since_the_last_one() -> None:
    """Keys of a rewound path are held; its states are made again from those of the segments that are kept."""
    counts = {}
    for kept in (0, 64):
        native = engine(kept_states=kept)
        trees = native.generate(PROMPTS, STOPPING, REWINDING, seeds=SEEDS)
        assert off(model("nemotron_h"), trees) < 1e-5
        counts[kept] = native.stats["prefill_tokens"]
    prompts = sum(map(len, PROMPTS))
    assert counts[64] <= prompts + native.stats["rewinds"] + native.stats["forks"] + 11  # what two prompts share
    assert counts[0] > 2 * counts[64]


def test_states_in_memory_are_those_of_branches_and_of_the_budget() -> None:
    native = engine(kept_states=5)
    native.generate([PROMPTS[3]], SamplingParams(n=16, max_new_tokens=13, ignore_eos=True))
    assert 16 < native.stats["peak_states"] <= 16 + 5 + 2  # the step that forks has the prompt's own two
    assert {len(pool) for pool in native.cache.states._pools.values()} <= set(range(17, 48))
    native.sleep()
    assert not native.cache.states._pools
    native.wake()
    assert responses(native.generate([PROMPTS[3]], PARAMS, seeds=[3])[0]) == expected()[3]


# -- what these tests would show -------------------------------------------------------------------------------------


def broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    compose = StateCache.compose

    def wrong(self: StateCache, *args: Any) -> StateStep:
        step: StateStep = change(compose(self, *args))
        return step

    monkeypatch.setattr(StateCache, "compose", wrong)


def own_slots(step: StateStep) -> StateStep:
    """Children read the empty slots that they write, not their parent's."""
    if step.segments is None:
        return step._replace(read=step.write)
    given = step.segments.initial >= 0
    return step._replace(read=step.write[given])


def without_states(step: StateStep) -> StateStep:
    """Tokens that are computed again begin with no state."""
    return step if step.segments is None else step._replace(read=np.zeros_like(step.read))


def alone(step: StateStep) -> StateStep:
    """Prefilled tokens do not see those before them in the same step."""
    if step.segments is None:
        return step
    parent, initial = step.segments.parent, step.segments.initial
    given = np.arange(len(step.read), len(step.read) + int((parent >= 0).sum()))
    first = initial.copy()
    first[parent >= 0] = given
    segments = step.segments._replace(parent=np.full_like(parent, -1), initial=first)
    # the plan takes given states in the order of the segments that begin with them
    read = np.append(step.read, np.zeros(len(given), np.int64))
    return step._replace(segments=segments, read=read)


@pytest.mark.slow(but=4)
@pytest.mark.check(but=2)
@pytest.mark.parametrize("family", QUICK)
@pytest.mark.parametrize("change", [own_slots, without_states, alone])
def test_a_wrong_state_shows_in_the_log_probs(family: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, change)
    native = engine(family, max_prefill_tokens=8)
    assert off(model(family), native.generate(PROMPTS, PARAMS, TREEPO, seeds=SEEDS)) > WRONG


@pytest.mark.parametrize("family", QUICK)
def test_a_request_that_resumes_without_its_state_shows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for lost in (False, True):
        native = engine(family)
        requests = native.submit(PROMPTS, PARAMS, seeds=SEEDS)
        for _ in range(6):
            native.step()
        native.abort(requests)
        if lost:
            broken(monkeypatch, without_states)
        native.submit(requests)
        native.step()
        monkeypatch.undo()
        found[lost] = off(model(family), finish(native, requests))
    assert found[False] < 1e-5
    assert found[True] > WRONG


def test_a_running_branch_without_a_state_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    native = engine()
    divide = native.loop.rows.divide

    def forgetting(slot: int, branches: Any) -> None:
        divide(slot, branches)
        native.loop.rows.state[[branch.slot for branch in branches]] = 0

    monkeypatch.setattr(native.loop.rows, "divide", forgetting)
    with pytest.raises(RuntimeError, match="A running branch has no recurrent state"):
        native.generate(PROMPTS, PARAMS)


def test_what_hybrids_cannot_do_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match="has recurrent layers, which the native engine cannot compile"):
        engine(compile=True)
    with caplog.at_level(logging.WARNING):
        native = engine(drafts=DraftConfig(8))
    (record,) = caplog.records
    assert "NemotronHForCausalLM has recurrent layers, so no tokens are drafted." in record.message
    assert [responses(tree) for tree in native.generate(PROMPTS, PARAMS, seeds=SEEDS)] == expected()
    assert native.stats["drafted_tokens"] == 0
    with pytest.raises(ValueError, match="kept_states is -1"):
        engine(kept_states=-1)
