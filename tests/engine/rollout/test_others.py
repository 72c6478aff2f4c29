"""Branches that another policy samples: forks there and back, ends of segments, prunes, aborts, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine.data.segment import LeafStatus, Origin
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.programs import (
    Action,
    Finish,
    Fork,
    Given,
    GroupState,
    Prune,
    Rewind,
    RolloutProgram,
    SegmentReport,
)
from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.local import LocalSampler
from rolltree.engine.rollout.others import Others, Player
from rolltree.engine.rollout.sampler import Job

from ...support.fresh import once_a_test
from .test_native_engine import MODELS, PROMPTS, SIZES, assert_all_free, letters, model

PARAMS = SamplingParams(n=4, max_new_tokens=24, temperature=0.8, ignore_eos=True)
ROLES = ("writer", "reader", "judge")


@once_a_test
def second() -> Any:
    torch.manual_seed(99)
    cls, config, own = MODELS["qwen3"]
    return cls(config(**SIZES, **own)).eval()


def engines(roles: Sequence[str] = ("reader",), **sizes: int) -> tuple[NativeEngine, NativeEngine]:
    """Return an engine that asks another one for ``roles``."""
    kept = {"page_size": 4, "kv_tokens": 4096, **sizes}
    first, other = (NativeEngine(net, letters(), EngineConfig(**kept)) for net in (model("qwen3"), second()))
    first.loop.others = Others({"other": Player(1, other, roles)})
    return first, other


class InTurns(RolloutProgram):
    """Segments of the roles in turn: the first asks for ``ways`` branches of each next one."""

    roles = ROLES

    def __init__(self, turns: Sequence[tuple[str, int, int]], begun: int = 1, append: bool = False) -> None:
        self.turns, self.begun, self.append = list(turns), begun, append
        self.segment_tokens = 4
        self.reports: list[SegmentReport] = []

    def start(self, group: GroupState) -> int:
        return self.begun

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        self.reports += finished
        for segment in finished:
            if segment.status is not None:
                continue
            if segment.depth > len(self.turns):
                yield Finish(segment.branch)
                continue
            role, ways, tokens = self.turns[segment.depth - 1]
            yield Fork(segment.branch, ways, Given([50]) if self.append else None, tokens, role=role)


def check(tree: TokenTree, roles: Sequence[str] = ("reader",)) -> int:
    """Check who sampled each token, by plain forwards of both models; return the number of the other's tokens."""
    theirs = 0
    for leaf in range(tree.num_leaves):
        rows = tree.path_rows(leaf)
        ids = torch.from_numpy(tree.token_id[rows].astype(np.int64))
        known = []
        for net in (model("qwen3"), second()):
            with torch.no_grad():
                every = (net(ids[None]).logits[0, :-1] / 0.8).log_softmax(-1)
            known.append(every.gather(1, ids[1:, None])[:, 0].numpy())
        sampled = (tree.origin[rows] == Origin.SAMPLED)[1:]
        for policy, logprob in enumerate(known):
            mine = sampled & (tree.model[rows][1:] == policy)
            assert np.allclose(logprob[mine], tree.behaviour_logprob[rows][1:][mine], atol=1e-5)
        names = np.array(ROLES)[tree.role[rows][1:]]
        assert ((tree.model[rows][1:] == 1) == (np.isin(names, roles) & sampled)).all()
        theirs += int((tree.model[rows] == 1).sum())
    return theirs


CASES: dict[str, tuple[Callable[[], InTurns], int]] = {
    "there": (lambda: InTurns([("reader", 1, 5)]), 1),
    "there in several branches": (lambda: InTurns([("reader", 3, 5)]), 3),
    "there and back": (lambda: InTurns([("reader", 2, 5), ("writer", 2, 3), ("reader", 1, 4)], begun=2), 8),
    "twice in one role": (lambda: InTurns([("reader", 2, 3), ("reader", 1, 3), ("reader", 2, 3)]), 4),
    "after given tokens": (lambda: InTurns([("reader", 2, 5), ("writer", 1, 5)], append=True), 2),
    "another role of one's own": (lambda: InTurns([("judge", 2, 5), ("reader", 1, 5)]), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_each_policy_samples_its_roles(name: str) -> None:
    make, leaves = CASES[name]
    first, other = engines()
    trees = first.generate(PROMPTS[:3], PARAMS, make(), seeds=[1, 2, 3])
    for tree in trees:
        assert tree.num_leaves == leaves
        assert check(tree) > 0
        assert tree.meta["roles"] == list(ROLES)
        asked = [role for role, _, _ in make().turns]
        for leaf in range(leaves):
            rows = tree.response_rows(leaf)
            played = [ROLES[role] for role in tree.role[rows][tree.origin[rows] == Origin.SAMPLED]]
            assert [role for role, _ in groupby(played)] == [role for role, _ in groupby(["writer", *asked])]
    assert_all_free(first)
    assert_all_free(other)
    # the samples of a prompt do not depend on the batch, nor on the number of steps that others take
    (alone,) = engines()[0].generate([PROMPTS[1]], PARAMS, make(), seeds=[2])
    assert [leaf.response for leaf in alone.flatten()] == [leaf.response for leaf in trees[1].flatten()]
    if leaves > 1:
        assert len({tuple(leaf.response) for leaf in trees[1].flatten()}) > 1, "branches have one seed"


def test_segments_of_one_role_have_different_random_numbers() -> None:
    """The other engine counts positions from its prompt, so a second segment must not repeat the first one's draws."""
    first, _ = engines()
    with torch.no_grad():
        program = InTurns([("reader", 1, 8), ("reader", 1, 8)])
        (tree,) = first.generate(
            [PROMPTS[2]], SamplingParams(n=1, max_new_tokens=30, temperature=50.0, ignore_eos=True), program
        )
    rows = tree.response_rows(0)
    theirs = tree.token_id[rows][tree.model[rows] == 1]
    assert len(theirs) == 16
    assert (theirs[:8] != theirs[8:]).any()  # at this temperature all tokens are alike, and the draw alone decides


def test_reports_say_how_segments_ended() -> None:
    first, _ = engines()
    params = SamplingParams(n=1, max_new_tokens=12, temperature=0.8, ignore_eos=True)
    program = InTurns([("reader", 1, 5), ("reader", 2, 99)])
    requests = first.submit([PROMPTS[0]], params, program, seeds=[4])
    while not requests[0].done:
        first.step()
    reports = requests[0].program.reports
    assert [(r.depth, r.length, r.status) for r in reports] == [
        (1, 4, None), (2, 9, None), (3, 12, LeafStatus.LENGTH), (3, 12, LeafStatus.LENGTH),
    ]  # fmt: skip
    assert [len(r.token_ids) for r in reports] == [4, 5, 3, 3]
    assert reports[2].boundaries == (0, 4, 9)
    assert all(np.isfinite(r.logprobs).all() and np.isfinite(r.entropies).all() for r in reports)


class Stops(InTurns):
    segment_stop_token_ids = tuple(range(40, 120))


def test_the_other_policy_stops_where_the_program_says() -> None:
    first, _ = engines()
    requests = first.submit(PROMPTS[:2], PARAMS, Stops([("reader", 4, 20)]), seeds=[5, 6])
    while not all(request.done for request in requests):
        first.step()
    ended = [r for request in requests for r in request.program.reports if r.depth == 2 and r.length < 24]
    assert ended
    assert all(r.status is None and int(r.token_ids[-1]) in Stops.segment_stop_token_ids for r in ended)


class Prunes(InTurns):
    """Discards the branches that are away as soon as another one has ended."""

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if segment.depth == 1 and segment.branch[0] == 0:
                yield Fork(segment.branch, 2, None, 15, role="reader")
            elif segment.depth == 1:
                yield Fork(segment.branch, 1, None, 2)
            elif segment.branch[0] == 1:
                yield Finish(segment.branch)
                yield Prune((0,))


def test_a_branch_that_is_away_can_be_pruned() -> None:
    first, other = engines()
    (tree,) = first.generate([PROMPTS[0]], PARAMS, Prunes([], begun=2))
    assert tree.num_leaves == 1
    assert not tree.model.any()
    assert not other.loop.busy
    assert_all_free(first)
    assert_all_free(other)


@pytest.mark.parametrize("steps", [5, 7, 9, 12])
def test_aborted_and_saved_requests_go_on_to_the_same_tokens(steps: int) -> None:
    make, _ = CASES["there and back"]
    whole = [tree.flatten() for tree in engines()[0].generate(PROMPTS[:2], PARAMS, make(), seeds=[1, 2])]
    first, other = engines()
    sampler = LocalSampler(first, make())
    flights = sampler.submit([Job(PROMPTS[i], PARAMS, seed=i + 1) for i in range(2)])
    for _ in range(steps):
        sampler.step(0)
    away = [b for request in first.loop.requests for b in request.sampling.values() if b.away is not None]
    kept = sampler.kept(flights)
    sampler.drop(flights)
    assert not other.loop.busy
    assert_all_free(first)
    assert_all_free(other)
    again, _ = engines()
    sampler = LocalSampler(again, make())
    flights = sampler.submit([Job(PROMPTS[i], PARAMS, seed=i + 1, kept=kept[i].state) for i in range(2)])
    while not all(flight.done for flight in flights):
        sampler.step(0)
    for flight, leaves in zip(flights, whole, strict=True):
        assert flight.tree is not None
        assert [leaf.response for leaf in flight.tree.flatten()] == [leaf.response for leaf in leaves]
        assert check(flight.tree) > 0
    if steps == 7:
        assert away, "no branch was away when it was saved; the test shows nothing"


class Unknown(InTurns):
    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            yield Rewind(segment.branch, 1, role="nobody")


def test_an_unknown_role_and_a_failing_policy_end_the_request() -> None:
    first, other = engines()
    with pytest.raises(RuntimeError, match="gives a branch the role 'nobody'; its roles are writer, reader, judge"):
        first.generate([PROMPTS[0]], PARAMS, Unknown([]))
    assert_all_free(first)

    def broken(*_: Any) -> Any:
        raise OSError("gone")

    other.loop.runner.run = broken
    with pytest.raises(OSError, match="gone"):
        first.generate([PROMPTS[0]], PARAMS, InTurns([("reader", 2, 5)]))
    assert_all_free(first)


def test_without_other_policies_all_roles_are_one_s_own() -> None:
    first = NativeEngine(model("qwen3"), letters(), EngineConfig(page_size=4, kv_tokens=4096))
    (tree,) = first.generate([PROMPTS[0]], PARAMS, InTurns([("reader", 2, 5), ("judge", 1, 5)]))
    assert "model" not in tree.columns
    assert set(tree.role[tree.origin == Origin.SAMPLED].tolist()) == {0, 1, 2}


def test_little_room_for_keys_changes_no_token() -> None:
    make, _ = CASES["there and back"]
    tight, roomy = engines(kv_tokens=120)[0], engines()[0]
    found = [
        [
            leaf.response
            for tree in engine.generate(PROMPTS[:3], PARAMS, make(), seeds=[1, 2, 3])
            for leaf in tree.flatten()
        ]
        for engine in (tight, roomy)
    ]
    assert found[0] == found[1]
