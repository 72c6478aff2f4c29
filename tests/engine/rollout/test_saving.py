"""Unfinished requests through a checkpoint's JSON and tensors: another engine takes them up where they were."""

from __future__ import annotations

import copy
import json
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest

from rolltree.engine.data.segment import LeafStatus, Origin
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.programs import Fork, GroupState, Reward, RolloutProgram, make_program
from rolltree.engine.prompts.archive import Archive, NotKeptError
from rolltree.engine.rollout import SamplingParams
from rolltree.engine.rollout.records import sample_dtype
from rolltree.engine.rollout.saving import request_state, restore_request

from .test_native_engine import PROMPTS, TREEPO, engine, responses


class Rewarded(RolloutProgram):
    """Rewards every four sampled tokens."""

    segment_tokens = 4

    def decide(self, group: GroupState, finished: Any) -> Any:
        for segment in finished:
            if segment.status is None:
                yield Reward(segment.branch, float(segment.token_ids[0]), at=segment.length)
                yield Fork(segment.branch, 1)


PROGRAMS: dict[str, RolloutProgram] = {
    "flat": make_program("flat"),
    "treepo": TREEPO,
    "rewinds": make_program("spo_chain", chains=2, samples=1, cut_after=4),
    "state of its own": make_program("latr", lookahead=4),
    "rewards of turns": Rewarded(),
}


def through_json(value: Any) -> Any:
    archive = Archive()
    text = json.dumps(archive.pack(value))
    return Archive({name: tensor.clone() for name, tensor in archive.tensors.items()}).unpack(json.loads(text))


@pytest.mark.parametrize("name", PROGRAMS)
def test_another_engine_goes_on_to_the_same_end(name: str) -> None:
    program, params = PROGRAMS[name], SamplingParams(n=4, max_new_tokens=16, ignore_eos=True)
    expected = engine().generate(PROMPTS[:3], params, program, seeds=[1, 2, 3])
    for steps in (3, 9, 14):
        first = engine()
        requests = first.submit(PROMPTS[:3], params, program, seeds=[1, 2, 3])
        for _ in range(steps):
            first.step()
        going = [request for request in requests if not request.done]
        assert going, "all have ended; the test shows nothing"
        first.abort(going)
        states = [through_json(request_state(request, program)) for request in going]
        second = engine()
        second.policy_version = 5
        fresh = second.submit([r.prompt for r in going], params, program, seeds=[r.seed for r in going])
        second.abort(fresh)
        for request, state in zip(fresh, states, strict=True):
            restore_request(request, state)
        second.submit(fresh)
        while not all(request.done for request in fresh):
            second.step()
        for request, old in zip(fresh, going, strict=True):
            assert request.error is None
            assert request.tree is not None
            tree = expected[requests.index(old)]
            assert responses(request.tree) == responses(tree)
            np.testing.assert_array_equal(request.tree.token_reward, tree.token_reward)
            assert np.isfinite(tree.token_reward).any() == isinstance(program, Rewarded)
            for got, wanted in zip(request.tree.flatten(), tree.flatten(), strict=True):
                np.testing.assert_allclose(got.behaviour_logprob, wanted.behaviour_logprob, rtol=1e-6, atol=1e-6)
                versions = got.policy_version[got.loss_mask]
                assert (np.diff(versions) >= 0).all()
                assert set(versions.tolist()) <= {0, 5}
        assert any((r.tree.policy_version == 5).any() for r in fresh if r.tree)
        assert any((r.tree.policy_version == 0).any() for r in fresh if r.tree)


def test_values_come_back_as_they_were() -> None:
    records = np.zeros(3, sample_dtype(2))
    records["token"], records["top_raw"], records["logprob"] = [1, 2, 3], 0.5, np.nan
    tree = TokenTree.from_sequences([1, 2], [[3, 4], [3, 5]], behaviour_logprobs=[[-1, -2], [-1, -3]])
    tree.rewards["reward"] = np.array([0.0, np.nan], np.float32)
    tree.meta["errors"] = {1: "why"}
    value = {
        (1, 2): [None, True, 3, 0.1, "text", LeafStatus.LENGTH, Origin.INJECTED],
        "containers": (frozenset({1}), {2}, deque([3]), Counter("aab"), [], {}),
        7: {"records": records, "empty": records[:0], "ints": np.arange(4), "scalar": np.float32(0.1)},
        "tree": tree,
    }
    back = through_json(copy.deepcopy(value))
    assert list(back) == list(value)
    assert back[(1, 2)] == value[(1, 2)]
    assert [type(v) for v in back[(1, 2)]] == [type(v) for v in value[(1, 2)]]
    assert back["containers"] == value["containers"]
    for name, array in value[7].items():
        assert back[7][name].dtype == array.dtype
        assert back[7][name].tobytes() == array.tobytes()
    got = back["tree"]
    assert responses(got) == responses(tree)
    assert got.meta == tree.meta
    np.testing.assert_array_equal(got.rewards["reward"], tree.rewards["reward"])
    np.testing.assert_array_equal(got.behaviour_logprob, tree.behaviour_logprob)


@pytest.mark.parametrize("value", [object(), [1, {2: print}], np.array(["a"]), np.zeros(1, [("a", "i4")]), 1j])
def test_what_cannot_be_kept_is_refused(value: Any) -> None:
    with pytest.raises(NotKeptError, match="cannot be kept"):
        Archive().pack(value)
