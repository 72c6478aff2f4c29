"""The buffer under any order of finishing, dropping and beginning anew: no group too old, lost or trained twice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rolltree.engine.loop.budget import Budget, StalenessError
from rolltree.engine.loop.buffer import AFTER, Buffer
from rolltree.engine.prompts.group import Group, State

UNREADY = (State.QUEUED, State.SAMPLING, State.JUDGING)


def prompts(count: int) -> list:
    return [SimpleNamespace(id=str(i)) for i in range(count)]


def admit(buffer: Buffer) -> list[Group]:
    return buffer.admit(prompts(buffer.room))


def make_ready(buffer: Buffer, group: Group) -> None:
    order = (State.QUEUED, State.SAMPLING, State.JUDGING, State.READY)
    for state in order[order.index(group.state) + 1 :]:
        buffer.to(group, state)


class Loop(RuleBasedStateMachine):
    """A trainer and a sampler that take turns in any order, with failures."""

    @initialize(batch=st.integers(1, 5), staleness=st.integers(0, 4), window=st.floats(0, 0.99), over=st.floats(1, 3))
    def begin(self, batch: int, staleness: int, window: float, over: float) -> None:
        self.budget = Budget(batch, staleness, window, over)
        self.buffer = Buffer(self.budget)
        self.training: list[Group] | None = None
        self.seen: dict[int, Group] = {}
        self.trained: list[int] = []

    @rule()
    def fill(self) -> None:
        for group in admit(self.buffer):
            assert group.ticket not in self.seen
            self.seen[group.ticket] = group

    @precondition(lambda self: self.buffer.among(*UNREADY))
    @rule(which=st.randoms())
    def finish(self, which) -> None:
        make_ready(self.buffer, which.choice(self.buffer.among(*UNREADY)))

    @precondition(lambda self: self.buffer.among(State.SAMPLING, State.JUDGING))
    @rule(which=st.randoms())
    def begin_anew(self, which) -> None:
        self.buffer.to(which.choice(self.buffer.among(State.SAMPLING, State.JUDGING)), State.QUEUED)

    @precondition(lambda self: self.buffer.among(*UNREADY, State.READY))
    @rule(which=st.randoms())
    def drop(self, which) -> None:
        self.buffer.drop(which.choice(self.buffer.among(*UNREADY, State.READY)), "some reason")

    @precondition(lambda self: self.training is None)
    @rule()
    def take(self) -> None:
        open_before = dict(self.buffer.open)
        self.training = self.buffer.batch()
        if self.training is None:
            return
        taken = [group.ticket for group in self.training]
        assert taken == sorted(taken)
        assert len(taken) == self.budget.batch
        for group in self.training:
            assert 0 <= self.buffer.steps - group.started <= self.budget.staleness
        left = [g for t, g in open_before.items() if g.state is not State.TRAINING]
        if self.budget.staleness:
            for group in left:
                if group.state in UNREADY:
                    passed = sum(t > group.ticket for t in [*self.trained, *taken])
                    assert passed == group.overtaken <= self.budget.overtaking

    @precondition(lambda self: self.training is not None)
    @rule()
    def end(self) -> None:
        self.buffer.end_step(self.training)
        self.trained += [group.ticket for group in self.training]
        self.training = None
        assert self.budget.staleness or not self.buffer.open

    @invariant()
    def nothing_is_lost_or_there_twice(self) -> None:
        if not hasattr(self, "buffer"):
            return
        assert len(set(self.trained)) == len(self.trained)
        ended = {t for t, g in self.seen.items() if g.state in (State.DONE, State.DROPPED)}
        assert set(self.buffer.open) | ended == set(self.seen)
        assert not set(self.buffer.open) & ended
        assert {t for t, g in self.seen.items() if g.state is State.DONE} == set(self.trained)
        assert self.buffer.dropped.total() == sum(g.state is State.DROPPED for g in self.seen.values())
        assert len(self.buffer.open) <= self.budget.capacity


def test_any_order_of_events() -> None:
    run_state_machine_as_test(Loop, settings=settings(max_examples=30, stateful_step_count=40, deadline=None))


@given(
    batch=st.integers(1, 6),
    staleness=st.integers(0, 4),
    window=st.floats(0, 0.99),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_a_run_never_stalls(batch: int, staleness: int, window: float, order) -> None:
    """Where every open group is ready there is a batch, however slow some are."""
    buffer = Buffer(Budget(batch, staleness, window))
    lags = []
    while buffer.steps < 12:
        admit(buffer)
        while (taken := buffer.batch()) is None:
            unready = buffer.among(*UNREADY)
            assert unready, "all are ready and there is no batch"
            make_ready(buffer, order.choice(unready))
        lags += [buffer.steps - group.started for group in taken]
        buffer.end_step(taken)
    assert max(lags) <= staleness


def test_tasks_keep_their_shares_though_one_is_slow() -> None:
    """Every third group takes three steps longer; of what is trained it is a third all the same."""
    buffer = Buffer(Budget(batch=6, staleness=4, window=0.5))
    slow_trained = trained = 0
    while buffer.steps < 40:
        admit(buffer)
        for group in buffer.among(*UNREADY):
            if group.ticket % 3 or buffer.steps - group.started >= 3:
                make_ready(buffer, group)
        if (taken := buffer.batch()) is None:
            make_ready(buffer, buffer.among(*UNREADY)[0])
            continue
        slow_trained += sum(group.ticket % 3 == 0 for group in taken)
        trained += len(taken)
        buffer.end_step(taken)
    assert abs(slow_trained - trained / 3) <= buffer.budget.capacity / 3 + 1


def test_the_documented_example() -> None:
    buffer = Buffer(Budget(batch=4, staleness=1, window=0.5))
    groups = admit(buffer)
    assert [group.ticket for group in groups] == [0, 1, 2, 3, 4, 5]
    for ticket in (0, 1, 2, 4):
        make_ready(buffer, groups[ticket])
    first = buffer.batch()
    assert [group.ticket for group in first] == [0, 1, 2, 4]
    buffer.end_step(first)
    groups += admit(buffer)
    assert [(group.ticket, group.started) for group in groups[6:]] == [(6, 1), (7, 1), (8, 1), (9, 1)]
    for ticket in (5, 6, 7, 8):
        make_ready(buffer, groups[ticket])
    assert buffer.batch() is None
    make_ready(buffer, groups[3])
    second = buffer.batch()
    assert [group.ticket for group in second] == [3, 5, 6, 7]
    assert [buffer.steps - group.started for group in second] == [1, 1, 0, 0]


def test_the_bound_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose: more groups than the budget allows make one of them too old."""
    monkeypatch.setattr(Budget, "capacity", property(lambda self: (self.staleness + 2) * self.batch))
    buffer = Buffer(Budget(batch=2, staleness=1))
    for _ in range(2):
        for group in admit(buffer):
            make_ready(buffer, group)
        buffer.end_step(buffer.batch() or [])
    with pytest.raises(StalenessError, match=r"admitted after 0 steps and would be trained after 2"):
        buffer.batch()


def test_states_follow_one_another() -> None:
    buffer = Buffer(Budget(batch=1))
    (group,) = admit(buffer)
    for state in set(State) - AFTER[State.QUEUED]:
        with pytest.raises(ValueError, match="cannot become"):
            buffer.to(group, state)
    buffer.drop(group, "why")
    assert (group.state, group.reason, buffer.dropped["why"]) == (State.DROPPED, "why", 1)
    with pytest.raises(ValueError, match="cannot become"):
        buffer.to(group, State.QUEUED)
    with pytest.raises(ValueError, match="no room"):
        buffer.admit(prompts(2))


def test_room_is_the_capacity_of_the_staleness() -> None:
    """(S + version + 1) * batch less what was admitted; a taken batch keeps its room until it is trained."""
    buffer = Buffer(Budget(batch=4, staleness=2))
    groups = admit(buffer)
    assert len(groups) == 12
    for version in range(1, 4):
        for group in buffer.among(*UNREADY):
            make_ready(buffer, group)
        batch = buffer.batch()
        assert batch is not None
        assert buffer.room == 0
        buffer.end_step(batch)
        assert buffer.room == (2 + version + 1) * 4 - buffer.admitted == 4
        admit(buffer)
    buffer.drop(next(iter(buffer.open.values())), "untrainable")
    assert buffer.room == 1
    assert Buffer(Budget(batch=4, staleness=2, window=0.5)).room == 8


def test_younger_groups_overtake_within_the_window_alone() -> None:
    """Half of the four slots beyond a batch may overtake: two groups pass the stuck one, a third waits."""
    buffer = Buffer(Budget(batch=1, staleness=4, window=0.5))
    stuck, *others = buffer.admit(prompts(3))
    for group in others:
        make_ready(buffer, group)
    for expected in others:
        assert buffer.batch() == [expected]
        buffer.end_step([expected])
    make_ready(buffer, *buffer.admit(prompts(1)))
    assert buffer.batch() is None
    make_ready(buffer, stuck)
    assert buffer.batch() == [stuck]
