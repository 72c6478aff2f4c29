"""Cases of verl's, SkyRL's, AReaL's and torchtitan's suites for advantages and buffers, written anew;
docs/outside_suites.md lists them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rolltree.engine.data.segment import Origin
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.loop.budget import Budget, StalenessError
from rolltree.engine.loop.buffer import Buffer
from rolltree.engine.methods.advantages import ADVANTAGES
from rolltree.engine.methods.estimators import gae, reinforce_pp
from rolltree.engine.prompts.group import Group, State
from rolltree.engine.prompts.prompts import Prompt


def group(rewards: Any) -> TokenTree:
    tree = TokenTree.from_sequences([1], [[10 + i] for i in range(len(rewards))])
    tree.rewards["reward"] = np.asarray(rewards, np.float32)
    return tree


def tokens(rewards: Any, values: Any = None, mask: Any = None) -> TokenTree:
    """One response whose tokens have rewards and values of their own."""
    tree = TokenTree.from_sequences([1], [list(range(10, 10 + len(rewards)))])
    tree.rewards["reward"] = np.zeros(1, np.float32)
    tree.set("token_reward", np.asarray(rewards, np.float32))
    if values is not None:
        tree.set("value", np.array([np.nan, *values], np.float32))  # one for the prompt's token too
    if mask is not None:
        tree.loss_mask[1:] = mask
        tree.origin[1:] = np.where(mask, Origin.SAMPLED, tree.origin[0])
    return tree


# -- verl, tests/trainer/ppo/test_core_algos_on_cpu.py; SkyRL, tests/backends/skyrl_train/utils/test_ppo_utils.py ------


@pytest.mark.parametrize(
    ("name", "rewards", "want"),
    [
        ("group_mean", [6.0, 3.0], [1.5, -1.5]),
        ("group_mean", [9.0, 12.0], [-1.5, 1.5]),
        ("rloo", [6.0, 3.0], [3.0, -3.0]),
        ("rloo", [9.0, 12.0], [-3.0, 3.0]),
        ("rloo", [1.0], [1.0]),  # as verl; SkyRL gives a group of one 0
        ("maxrl", [6.0, 3.0], [1.5 / 4.5, -1.5 / 4.5]),
        ("maxrl", [9.0, 12.0], [-1.5 / 10.5, 1.5 / 10.5]),
    ],
)
def test_advantages_of_groups_by_hand(name: str, rewards: Any, want: Any) -> None:
    np.testing.assert_allclose(ADVANTAGES[name]([group(rewards)]).values[0], want, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["rloo", "group_norm"])
def test_groups_of_unequal_size_are_independent(name: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    groups = [draw.normal(size=draw.integers(2, 9)).astype(np.float32) for _ in range(10)]
    found = ADVANTAGES[name]([group(rewards) for rewards in groups]).values
    for rewards, own in zip(groups, found, strict=True):
        r = rewards.astype(np.float64)
        others = [(r.sum() - x) / (len(r) - 1) for x in r]
        want = r - others if name == "rloo" else (r - r.mean()) / (r.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(own, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("gamma", "lam", "want"),
    [(1.0, 1.0, [6.0, 5.0, 3.0]), (0.5, 1.0, [2.75, 3.5, 3.0]), (1.0, 0.5, [3.625, 4.25, 3.0])],
)
def test_returns_of_gae_by_hand(gamma: float, lam: float, want: Any) -> None:
    tree = tokens([1.0, 2.0, 3.0], [0.5, 1.0, 1.5])
    gae([tree], gamma=gamma, lam=lam)
    np.testing.assert_allclose(tree.value_target[-3:], want, atol=1e-6)


def test_returns_to_go_by_hand() -> None:
    """REINFORCE++ whitens the returns 2.75, 3.5 and 3."""
    returns = np.array([2.75, 3.5, 3.0])
    want = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(reinforce_pp([tokens([1.0, 2.0, 3.0])], gamma=0.5).values[0], want, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_values_of_observations_change_nothing(seed: int) -> None:
    draw = np.random.default_rng(seed)
    gamma, lam = draw.uniform(size=2)
    mask = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0], bool)
    rewards = np.array([0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1.0, 0, 0])
    found = []
    for _ in range(2):
        values = np.where(mask, [0, 0, 4, 5, 6, 0, 0, 7, 9, 0, 0], draw.uniform(-100, 100, len(mask)))
        tree = tokens(rewards, values, mask)
        credit = gae([tree], gamma=gamma, lam=lam, whiten=False).values[0]
        found.append((credit[mask], tree.value_target[-len(mask) :][mask]))
    np.testing.assert_array_equal(*(f[0] for f in found))
    np.testing.assert_array_equal(*(f[1] for f in found))
    value, reward = np.array([4.0, 5, 6, 7, 9]), np.array([0.1, 0.1, 0.1, 0.1, 1.0])
    after, want = 0.0, []
    for t in reversed(range(5)):  # observations are passed over: the next sampled token follows
        after = reward[t] + gamma * (value[t + 1] if t < 4 else 0.0) - value[t] + gamma * lam * after
        want.append(after)
    np.testing.assert_allclose(found[0][0], want[::-1], rtol=1e-5, atol=1e-5)


# -- AReaL, tests/test_staleness_manager.py; torchtitan, experiments/rl/tests/test_async_controller.py -----------------


def admit(buffer: Buffer, count: int) -> list[Group]:
    return buffer.admit([Prompt(str(i), "", "", [1], {}, "") for i in range(count)])


def move(buffer: Buffer, groups: list[Group], *states: State) -> None:
    for group_ in groups:
        for state in states:
            buffer.to(group_, state)


READY = (State.SAMPLING, State.JUDGING, State.READY)


def test_room_is_the_capacity_of_the_staleness() -> None:
    """AReaL's (S + version + 1) * batch - running - accepted, counted from the open groups."""
    buffer = Buffer(Budget(batch=4, staleness=2))
    assert buffer.room == 12
    running = admit(buffer, 3)
    assert buffer.room == 9
    move(buffer, admit(buffer, 5), *READY)  # finished ones count as running ones do
    assert buffer.room == 4
    assert Buffer(Budget(batch=4, staleness=2, window=0.5)).room == 8  # less W, which AReaL does not have
    for version in range(1, 4):
        move(buffer, [g for g in running if g.state is State.QUEUED], *READY)
        if len(buffer.open) < 12:
            move(buffer, admit(buffer, buffer.room), *READY)
        batch = buffer.batch()
        assert batch is not None
        buffer.end_step(batch)
        assert buffer.room == (2 + version + 1) * 4 - buffer.admitted


def test_a_dropped_group_makes_room_and_an_admitted_surplus_is_refused() -> None:
    buffer = Buffer(Budget(batch=2, staleness=1))
    first, *_ = admit(buffer, 4)
    assert buffer.room == 0
    with pytest.raises(ValueError, match="no room for 1 groups"):
        admit(buffer, 1)
    buffer.drop(first, "untrainable")
    assert buffer.room == 1
    assert buffer.dropped == {"untrainable": 1}


def test_a_batch_that_was_taken_keeps_its_room_until_it_is_trained() -> None:
    buffer = Buffer(Budget(batch=2, staleness=1))
    move(buffer, admit(buffer, 4), *READY)
    batch = buffer.batch()
    assert batch is not None
    assert buffer.room == 0
    buffer.end_step(batch)
    assert buffer.room == 2


def test_younger_groups_overtake_within_the_window_alone() -> None:
    """Half of the four slots beyond a batch may overtake: two groups pass the stuck one, a third waits."""
    buffer = Buffer(Budget(batch=1, staleness=4, window=0.5))
    stuck, *others = admit(buffer, 3)
    move(buffer, [stuck], State.SAMPLING)
    move(buffer, others, *READY)
    for expected in others:
        assert buffer.batch() == [expected]
        buffer.end_step([expected])
    move(buffer, admit(buffer, 1), *READY)
    assert buffer.batch() is None
    move(buffer, [stuck], State.JUDGING, State.READY)
    assert buffer.batch() == [stuck]


@pytest.mark.parametrize(("staleness", "steps", "stale"), [(3, 3, False), (3, 4, True), (4, 4, False), (4, 5, True)])
def test_stale_groups_are_refused_when_they_are_trained(staleness: int, steps: int, stale: bool) -> None:
    budget = Budget(batch=1, staleness=staleness)
    if not stale:
        assert budget.check(0, 0, steps) == steps
        return
    with pytest.raises(StalenessError, match="a lag above"):
        budget.check(0, 0, steps)
