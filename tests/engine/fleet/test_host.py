"""An engine that a thread steps: jobs that begin together, weights that come while it samples, states that are kept."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.fleet.host import Host
from rolltree.engine.fleet.shipping import owned
from rolltree.engine.programs import Flat, TreePO
from rolltree.engine.rollout import NativeEngine, SamplingParams
from rolltree.engine.rollout.digest import digests
from rolltree.engine.rollout.local import LocalSampler
from rolltree.engine.rollout.packed import pack_changes, pack_weights
from rolltree.engine.rollout.sampler import Job

from ...support.serving import make_engine, model

PARAMS = SamplingParams(n=3, max_new_tokens=12, ignore_eos=True)
JOBS = [Job([5 + i, 6, 7], PARAMS, seed=100 + i) for i in range(4)]


class Stored:
    """A bucket that is fetched when ``here`` is set."""

    def __init__(self, bucket: Any) -> None:
        self.bucket, self.here = bucket, threading.Event()

    def get(self) -> Any:
        assert self.here.wait(30)
        return self.bucket


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(make_engine(), texts=lambda trees: [[str(leaf) for leaf in range(t.num_leaves)] for t in trees])
    yield made
    made.stop()


def changed() -> Qwen3ForCausalLM:
    other = model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    return other


def answers(host: Host, jobs: list[Job], first: int = 0, **options: Any) -> list[TokenTree]:
    numbered = dict(enumerate(jobs, first))
    host.run(numbered, **options)
    return [host.result(number).result(30).tree for number in numbered]


def assert_same(one: TokenTree, other: TokenTree) -> None:
    assert one.token_id.tolist() == other.token_id.tolist()
    np.testing.assert_array_equal(one.behaviour_logprob, other.behaviour_logprob)


def test_jobs_of_one_call_begin_together_as_in_this_process(host: Host) -> None:
    """Log-probs to the bit, which depend on the batch."""
    local = LocalSampler(make_engine(), "flat")
    flights = local.submit(JOBS)
    while not all(flight.done for flight in flights):
        local.step(0.0)
    for tree, flight in zip(answers(host, JOBS), flights, strict=True):
        assert flight.tree is not None
        assert_same(tree, flight.tree)
    assert host.health().tally["steps"] == local.tally["steps"]


def test_results_have_texts(host: Host) -> None:
    host.run({7: JOBS[0]})
    assert host.result(7).result(30).texts == ["0", "1", "2"]


def test_a_job_waits_for_its_weights_and_is_sampled_by_them(host: Host) -> None:
    other = changed()
    buckets = [Stored(bucket) for bucket in pack_weights(owned(dict(other.named_parameters())))]
    host.run({1: Job([5, 6], PARAMS, seed=1, version=1)})
    result, loaded = host.result(1), host.load(buckets, 1)
    (before,) = answers(host, [JOBS[0]], 2)  # the engine samples while the weights are fetched
    assert before.policy_version[before.loss_mask].max() == 0
    assert not result.done()
    buckets[0].here.set()
    assert loaded.result(30) == 1
    tree = result.result(30).tree
    assert set(tree.policy_version[tree.loss_mask].tolist()) == {1}
    for leaf in range(tree.num_leaves):
        path = [5, 6, *tree.token_id[tree.response_rows(leaf)].tolist()]
        with torch.no_grad():
            expected = other(torch.tensor([path])).logits[0].log_softmax(-1)
        known = [expected[i - 1, path[i]].item() for i in range(2, len(path))]
        np.testing.assert_allclose(tree.behaviour_logprob[tree.response_rows(leaf)], known, atol=2e-5)


def test_weights_are_swapped_in_unfinished_responses(host: Host) -> None:
    stored = [Stored(bucket) for bucket in pack_weights(owned(dict(changed().named_parameters())))]
    loaded = host.load(stored, 3)
    host.run({1: Job([5, 6], SamplingParams(n=2, max_new_tokens=400, ignore_eos=True), seed=1)})
    while host.health().tally["steps"] < 5:
        time.sleep(0.001)
    stored[0].here.set()
    loaded.result(30)
    tree = host.result(1).result(60).tree
    for leaf in range(tree.num_leaves):
        versions = tree.policy_version[tree.response_rows(leaf)]
        assert set(versions.tolist()) == {0, 3}
        assert (np.diff(versions) >= 0).all()


def test_an_unfinished_job_is_kept_and_goes_on_elsewhere(host: Host) -> None:
    long = Job([5, 6], SamplingParams(n=2, max_new_tokens=400, ignore_eos=True), seed=1)
    (whole,) = answers(host, [long])
    before = host.health().tally["steps"]
    host.run({1: long, 2: JOBS[1], 3: Job([9], PARAMS, version=5)}, True)
    host.run({4: long})
    while host.health().tally["steps"] < before + 5:
        time.sleep(0.001)
    kept, waiting = host.kept([4, 3]).result(30)
    assert waiting == (None, None)
    assert kept.state is not None
    other = Host(make_engine())
    (resumed,) = answers(other, [Job(long.prompt, long.params, long.seed, kept=kept.state)])
    steps = other.health().tally["steps"]
    assert steps < 400  # the tokens before are not sampled again
    assert resumed.token_id.tolist() == whole.token_id.tolist()
    assert host.result(4).result(30).tree.token_id.tolist() == whole.token_id.tolist()  # it went on
    other.stop()


def test_what_is_kept_stays_as_it_was_while_the_job_goes_on() -> None:
    """A process sends the state after its engine has made further steps."""
    host = Host(make_engine(), TreePO(segment_tokens=3, max_depth=60, init=2))
    host.run({1: Job([5, 6], SamplingParams(n=4, max_new_tokens=180, ignore_eos=True), seed=1)})
    result, kept = host.result(1), []
    while not result.done():
        states = host.kept([1]).result(30)
        kept.append((states, pickle.dumps(states)))
    assert result.result(30).tree.num_leaves == 4
    assert sum(states[0].state is not None for states, _ in kept) > 5
    assert all(pickle.dumps(states) == before for states, before in kept)
    host.stop()


class Locked(Flat):
    def start(self, group: Any) -> int:
        self.lock = threading.Lock()
        return super().start(group)


def test_a_state_that_cannot_travel_is_none_and_the_job_goes_on() -> None:
    host = Host(make_engine(), Locked())
    host.run({1: Job([5, 6], SamplingParams(n=2, max_new_tokens=300, ignore_eos=True), seed=1)})
    while host.health().tally["steps"] < 3:
        time.sleep(0.001)
    assert host.kept([1]).result(30) == [(None, "state")]
    assert host.result(1).result(60).tree.num_leaves == 2
    host.stop()


def test_dropped_jobs_are_no_more(host: Host) -> None:
    host.run({1: Job([5], SamplingParams(n=2, max_new_tokens=480, ignore_eos=True)), 2: Job([6], PARAMS, version=5)})
    results = [host.result(1), host.result(2)]
    host.drop([1, 2]).result(30)
    assert all(result.cancelled() for result in results)
    assert not host.engine.loop.busy


def test_a_job_that_cannot_be_served_is_refused_alone(host: Host) -> None:
    host.run({1: Job([5] * 600, PARAMS)})
    host.run({2: JOBS[0]})
    with pytest.raises(ValueError, match="positions"):
        host.result(1).result(30)
    assert host.result(2).result(30).tree.num_leaves == 3


def test_an_error_of_a_step_fails_its_jobs_and_the_thread_goes_on(host: Host, monkeypatch) -> None:
    def broken(*args: Any) -> Any:
        raise FloatingPointError("a mistake of the engine")

    (expected,) = answers(host, [JOBS[0]])
    with monkeypatch.context() as patch:
        patch.setattr(host.engine.loop.runner, "run", broken)
        host.run({1: JOBS[0]})
        with pytest.raises(FloatingPointError, match="a mistake of the engine"):
            host.result(1).result(30)
        assert "a mistake of the engine" in (host.health().failing or "")
    (again,) = answers(host, [JOBS[0]], 2)
    assert_same(again, expected)
    assert host.health().failing is None


def test_health_tells_of_a_step_that_does_not_end(host: Host, monkeypatch) -> None:
    go_on, right = threading.Event(), host.engine.loop.runner.run
    assert host.health().idle_s == 0.0
    monkeypatch.setattr(host.engine.loop.runner, "run", lambda *args: go_on.wait(30) and right(*args))
    host.run({1: JOBS[0]})
    while host.health().idle_s < 0.1:
        time.sleep(0.01)
    go_on.set()
    host.result(1).result(30)
    while host.health().idle_s:
        time.sleep(0.01)


def test_an_engine_applies_changes_to_the_weights_that_they_are_of(host: Host) -> None:
    old, new = dict(make_engine().model.named_parameters()), dict(changed().named_parameters())
    name = next(iter(new))
    mixed = {key: tensor.detach().clone() for key, tensor in old.items()}
    mixed[name][0] = new[name][0]
    ((before,), (after,)) = (list(pack_weights(owned(weights))) for weights in (old, mixed))
    stored = Stored(pack_changes(before, after))
    stored.here.set()
    assert host.load([stored], 1, since=0).result(30) == 1
    assert host.digests().result(30) == digests(mixed)
    with pytest.raises(RuntimeError, match="version 1 and was sent the changes since version 0"):
        host.load([stored], 2, since=0).result(30)
    assert host.digests().result(30) == digests(mixed)


def test_held_out_problems_get_plain_answers() -> None:
    engine: NativeEngine = make_engine()
    host = Host(engine, "treepo")
    (tree,) = answers(host, [JOBS[0]], held_out=True)
    (plain,) = make_engine().generate([JOBS[0].prompt], PARAMS, seeds=[JOBS[0].seed])
    assert tree.token_id.tolist() == plain.token_id.tolist()
    host.stop()
