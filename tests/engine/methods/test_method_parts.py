"""Shapings, selections, callbacks and schedules that recipes name, against formulas on trees made by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from rolltree.engine import load_config
from rolltree.engine.app.assembly.methods import Methods
from rolltree.engine.data.segment import LeafStatus, Origin, Segment
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.methods.advantages import ADVANTAGES
from rolltree.engine.methods.groups import More, top_up
from rolltree.engine.methods.priors import Values
from rolltree.engine.methods.schedules import towards
from rolltree.engine.methods.selections import PAIRINGS, SELECTIONS
from rolltree.engine.methods.shaping import SHAPINGS

RESPONSES = [[10, 11], [10, 12, 13, 12, 13, 12, 13], [10, 12, 14], [20], [20, 21, 22, 23]]
REWARDS = [1.0, 0.0, 1.0, 0.0, 1.0]


def tree_of(responses=RESPONSES, rewards=REWARDS):
    tree = TokenTree.from_sequences(
        [1, 2], responses, behaviour_logprobs=[np.log(np.linspace(0.85, 0.95, len(r))) for r in responses]
    )
    tree.rewards["reward"] = np.asarray(rewards, np.float32)
    return tree


def test_overlong_takes_a_fifth_of_the_longest_response_by_default():
    lengths = [len(r) for r in RESPONSES]
    want = [r - min(max((n - 8) / 2, 0), 1) for r, n in zip(REWARDS, lengths, strict=True)]
    np.testing.assert_allclose(SHAPINGS["overlong"](tree_of(), longest=10), want)
    assert SHAPINGS["overlong"](tree_of(), longest=7)[1] == -1


def test_lengths_default_to_the_runs(tmp_path):
    (tmp_path / "c.toml").write_text(
        'name = "a"\n[model]\npath = "m"\n[data]\ntasks = [{ name = "chain_sum" }]\n[rollout]\nmax_new_tokens = 8\n'
        '[[reward.shaping]]\nname = "overlong"\n[[reward.shaping]]\nname = "concise"\noptions = { longest = 100 }\n'
    )
    (_, first), (_, second) = Methods.make(load_config(tmp_path / "c.toml")).shapings
    np.testing.assert_allclose(first(tree_of()), SHAPINGS["overlong"](tree_of(), longest=8, buffer=1))
    ones = tree_of(rewards=[1.0] * 5)
    np.testing.assert_allclose(second(ones), [2 - len(r) / 100 for r in RESPONSES])


def test_cosine_length():
    def of(reward, length):
        first, last = (1.0, 0.5) if reward >= 1 else (-1.0, -0.5)
        return last + (first - last) * (1 + math.cos(math.pi * min(length / 5, 1))) / 2

    want = [of(r, len(ids)) for r, ids in zip(REWARDS, RESPONSES, strict=True)]
    np.testing.assert_allclose(SHAPINGS["cosine_length"](tree_of(), longest=5), want)


def test_repetition():
    def grams(ids):
        return [tuple(ids[i : i + 2]) for i in range(len(ids) - 1)]

    want = [
        r - 0.5 * (1 - len(set(grams(ids))) / len(grams(ids)) if grams(ids) else 0)
        for r, ids in zip(REWARDS, RESPONSES, strict=True)
    ]
    assert min(want) < -0.2
    np.testing.assert_allclose(SHAPINGS["repetition"](tree_of(), size=2, most=0.5), want)


def test_concise_waits_until_every_response_is_right():
    np.testing.assert_allclose(SHAPINGS["concise"](tree_of(), longest=10), REWARDS)
    want = [1 + 0.5 * (1 - len(r) / 10) for r in RESPONSES]
    np.testing.assert_allclose(SHAPINGS["concise"](tree_of(rewards=[1.0] * 5), longest=10, share=0.5), want)


def test_difficulty_length():
    want = [r - 0.5 * 0.6 * len(ids) / 10 for r, ids in zip(REWARDS, RESPONSES, strict=True)]
    np.testing.assert_allclose(SHAPINGS["difficulty_length"](tree_of(), longest=10), want, rtol=1e-6)


def test_noise_backward_is_unbiased():
    """E[R' | right] = 1 and E[R' | wrong] = 0 for a verifier with these rates of errors."""
    wrong, right = SHAPINGS["noise_backward"](
        tree_of(RESPONSES[:2], [0.0, 1.0]), false_positives=0.2, false_negatives=0.3
    )
    assert 0.7 * right + 0.3 * wrong == pytest.approx(1)
    assert 0.2 * right + 0.8 * wrong == pytest.approx(0)


@pytest.mark.parametrize("rewards", list(itertools.product([0.0, 1.0], repeat=4)))
def test_serial_exits(rewards):
    """Leaves: the whole response, and exits after 4, 1 and 3 of its tokens."""
    thought, end = [5, 6, 7, 8, 9], [99]
    tree = _serial(thought, end)
    tree.rewards["reward"] = np.asarray(rewards, np.float32)
    order, want, k = [2, 3, 1, 0], [0.0] * 4, 0
    for leaf in order:
        if rewards[leaf] >= 1:
            want[leaf] = 2.0**-k
            k += 1
    np.testing.assert_allclose(SHAPINGS["serial_exits"](tree), want)


def _serial(thought, end):
    parents, segments, leaves = [-1, 0], [Segment.prompt([0]), Segment.make(thought[:1])], []
    for token in thought[1:]:
        parents.append(len(parents) - 1)
        segments.append(Segment.make([token]))
    whole = len(parents) - 1
    for cut in (4, 1, 3):
        parents.append(cut)
        segments.append(Segment.make(end, origin=Origin.INJECTED))
        leaves.append(len(parents) - 1)
    return TokenTree.from_nodes(parents, segments, [whole, *leaves], [LeafStatus.STOP] * 4)


def steps_of(tree, *steps):
    """Rewards of steps: one list of (place, reward) for each leaf."""
    values, first = np.full(int(tree.response_length.sum()), np.nan), 0
    for leaf, some in enumerate(steps):
        for place, reward in some:
            values[first + place] = reward
        first += int(tree.response_length[leaf])
    tree.set("token_reward", values)
    return tree


STEPS = ([(1, 0.9)], [(0, 0.2), (3, 0.8), (6, 0.4)], [(2, 0.1)], [], [(1, 0.6), (3, 0.7)])


def test_step_differences_telescope():
    tree = steps_of(tree_of(), *STEPS)
    np.testing.assert_allclose(SHAPINGS["step_differences"](tree), REWARDS)
    want = steps_of(
        tree_of(), [(1, 0.9)], [(0, 0.2 - 0.8), (3, 0.8 - 0.4), (6, 0.4)], [(2, 0.1)], [], [(1, 0.6 - 0.7), (3, 0.7)]
    )
    np.testing.assert_allclose(tree.token_reward, want.token_reward, rtol=1e-5)


def test_clip_steps():
    tree = steps_of(tree_of(), *STEPS)
    np.testing.assert_allclose(SHAPINGS["clip_steps"](tree, threshold=0.5), REWARDS)
    want = steps_of(tree_of(), *([(place, min(r - 0.5, 0)) for place, r in some] for some in STEPS))
    np.testing.assert_allclose(tree.token_reward, want.token_reward, rtol=1e-5)


def test_unlikely_tokens():
    tree = tree_of()
    found = SELECTIONS["unlikely"](tree, below=0.9)
    for leaf in range(5):
        rows = tree.response_rows(leaf)
        np.testing.assert_array_equal(found[rows], tree.behaviour_logprob[rows] < math.log(0.9))
    assert not found[: tree.prompt_length].any()


def test_random_tokens_are_a_share_that_depends_on_the_group_alone():
    many = [list(range(k, k + 400)) for k in range(1000, 9000, 400)]
    tree = tree_of(many, [0.0] * len(many))
    tree.set("group", 7)
    found = SELECTIONS["random_share"](tree, share=0.2)
    assert not found[: tree.prompt_length].any()
    assert 0.18 < found.sum() / tree.sampled_tokens < 0.22
    np.testing.assert_array_equal(found, SELECTIONS["random_share"](tree, share=0.2))
    tree.columns["group"] += 1
    assert (found != SELECTIONS["random_share"](tree, share=0.2)).any()


@pytest.mark.parametrize("rewards", [REWARDS, [0.1, 0.9, 0.5, 0.4, 0.8], [0.0, 0.0, 0.0, 0.0, 1.0], [1.0] * 5])
@pytest.mark.parametrize("keep", [1, 2, 3, 5, 9])
def test_most_varied_has_the_largest_variance_of_all_subsets(rewards, keep):
    chosen = SELECTIONS["most_varied"](tree_of(rewards=rewards), keep=keep)
    keep = min(keep, 5)
    assert chosen.sum() == keep
    best = max(np.var([rewards[i] for i in some]) for some in itertools.combinations(range(5), keep))
    assert np.var(np.array(rewards)[chosen]) == pytest.approx(best)
    kept = [rewards[i] for i in range(5) if chosen[i]]
    spread = np.std(kept, ddof=1) if keep > 1 else 0
    want = [(rewards[i] - np.mean(kept)) / (spread + 1e-6) if chosen[i] and keep > 1 else 0.0 for i in range(5)]
    (found,) = ADVANTAGES["pods"]([tree_of(rewards=rewards)], keep=keep).values
    np.testing.assert_allclose(found, want, atol=1e-6)


@pytest.mark.parametrize(
    ("keep", "want"),
    [
        (2, [0, 1]),  # the right one of mean 0.9, the wrong one of mean 1.4 / 3
        (3, [0, 1, 4]),  # one more right one: that of mean 0.65 before that of 0.1
        (4, [0, 1, 3, 4]),  # the wrong one without steps comes last
        (5, [0, 1, 2, 3, 4]),
        (9, [0, 1, 2, 3, 4]),
    ],
)
def test_consistent_responses(keep, want):
    found = SELECTIONS["consistent"](steps_of(tree_of(), *STEPS), keep=keep)
    np.testing.assert_array_equal(np.flatnonzero(found), want)


def test_consistent_fills_up_with_the_side_that_has_responses():
    tree = steps_of(tree_of(rewards=[1.0, 1.0, 1.0, 1.0, 0.0]), *STEPS)
    np.testing.assert_array_equal(np.flatnonzero(SELECTIONS["consistent"](tree, keep=4)), [0, 1, 2, 4])


class Words:
    """A tokenizer whose tokens hold parts of tags."""

    def decode(self, ids):
        text = {10: "<think", 11: "> a", 12: " b", 13: " c</think> d", 14: "</", 15: "think>", 16: " e", 17: "< "}
        return "".join(text[int(i)] for i in ids)


def test_tokens_between_two_texts_and_the_others():
    """Tags are split over tokens, which share their text with thoughts and actions, and with other responses."""
    sampled = lambda *ids: Segment.sampled(list(ids), [-1.0] * len(ids))  # noqa: E731
    nodes = [
        (-1, Segment.prompt([1])),
        (0, sampled(10, 11)), (1, sampled(13, 16)), (1, sampled(12, 14)), (3, sampled(15, 16)), (3, sampled(17, 16)),
        (0, sampled(16, 10, 14)),
        (0, Segment.make([10, 11, 12, 14, 15, 16], origin=Origin.INJECTED)),
    ]  # fmt: skip
    tree = TokenTree.from_nodes([n[0] for n in nodes], [n[1] for n in nodes], [2, 4, 5, 6, 7], [LeafStatus.STOP] * 5)
    tree.rewards["reward"] = np.array([1, 0, 1, 0, 1], np.float32)
    words = Words()
    of = lambda **options: SELECTIONS["between"](tree, words, **options)  # noqa: E731
    rows = [tree.response_rows(leaf) for leaf in range(5)]
    inside = [[0, 1, 1, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1], [0, 0, 0], [0] * 6]
    # "</" ends the thought of the second response, and belongs to that of the third, which shares it
    want = np.zeros(tree.num_tokens, bool)
    for leaf, own in enumerate(inside):
        want[rows[leaf]] = own
    live = tree.origin == Origin.SAMPLED
    np.testing.assert_array_equal(of(), want)
    np.testing.assert_array_equal(of(inside=False), live & ~want)
    right = np.zeros(tree.num_tokens, bool)
    right[np.concatenate([rows[0], rows[2]])] = True
    np.testing.assert_array_equal(of(least=1.0), want & right)
    np.testing.assert_array_equal(of(least=1.0, inside=False), live & right & ~want)
    given = np.zeros(tree.num_tokens, bool)
    given[rows[4]] = [False, True, True, False, False, False]
    np.testing.assert_array_equal(of(given=True), given)
    first = np.zeros(tree.num_tokens, bool)
    first[rows[1][:3]] = first[rows[0][:3]] = first[rows[2]] = first[rows[3]] = True
    np.testing.assert_array_equal(of(begin=""), first)
    with pytest.raises(UserError, match="in `begin` or in `end`"):
        of(begin="", end="")


def test_batch_std():
    trees = [tree_of(), tree_of(rewards=[0.0, 0.0, 0.0, 0.5, 1.0])]
    every = [r for tree in trees for r in tree.rewards["reward"].tolist()]
    sd = math.sqrt(sum((r - sum(every) / 10) ** 2 for r in every) / 9)
    for tree, found in zip(trees, ADVANTAGES["batch_std"](trees).values, strict=True):
        rewards = tree.rewards["reward"].tolist()
        np.testing.assert_allclose(found, [(r - sum(rewards) / 5) / (sd + 1e-6) for r in rewards], rtol=1e-6)


@pytest.mark.parametrize("right", range(9))
def test_top_up_makes_the_sum_of_advantages_that_of_the_middle(right):
    """`group_norm` with the population's sd: |A| sums to 2 n sqrt(p (1 - p)), which is n at p = 1/2."""
    rewards = [1.0] * right + [0.0] * (8 - right)
    tree = tree_of([[k] for k in range(10, 18)], rewards)
    tree.meta["attempt"] = 1
    answer = top_up(tree, most=100)
    p = max(right / 8, 1 / 16)
    if right >= 3:  # less than half a response is missing
        assert answer is None
        return
    assert isinstance(answer, More)
    total = 8 + answer.n
    assert 2 * total * math.sqrt(p * (1 - p)) == pytest.approx(8, abs=1)
    limited = top_up(tree, most=1)
    assert limited is None
    tree.meta["attempt"] = 2
    assert top_up(tree) is None


def test_towards_moves_by_a_step_and_stays_within_its_bounds():
    options = {"metric": "h", "target": 0.2, "own": "c", "initial": 0.01, "step": 0.005}
    assert towards(1, {}, **options) == 0.01
    assert towards(2, {"c": 0.01, "h": 0.2}, **options) == pytest.approx(0.015)
    assert towards(2, {"c": 0.01, "h": 0.3}, **options) == pytest.approx(0.005)
    assert towards(2, {"c": 0.001, "h": 0.3}, **options) == 0
    assert towards(2, {"c": 0.01, "h": 0.1}, **options, high=0.012) == 0.012


def test_siblings_are_pairs_of_responses_that_part_where_the_value_does():
    """From the root the best child is the lone right answer; at the node of two continuations they are the pair."""
    tree = TokenTree.from_nodes(
        [-1, 0, 0, 1, 1, 2, 2],
        [Segment.prompt([1]), *(Segment.make([k], behaviour_logprob=-1.0) for k in range(2, 8))],
        [3, 4, 5, 6],
        [LeafStatus.STOP] * 4,
    )  # leaves 0 and 1 below node 1, leaves 2 and 3 below node 2
    for rewards, gap, expected in (
        ([1, 0, 1, 1], 0.0, [(2, 1), (0, 1)]),  # V of node 1 is 1/2, of node 2 is 1: the worst below the worse one
        ([1, 0, 1, 1], 0.6, [(0, 1)]),
        ([0, 1, 1, 0], 0.0, [(1, 0), (2, 3)]),  # both nodes have the value 1/2
        ([1, 1, 1, 1], 0.0, []),
        ([0.2, 0.4, 0.1, 0.0], 0.0, [(1, 3), (1, 0), (2, 3)]),
    ):
        tree.rewards["reward"] = np.asarray(rewards, np.float32)
        assert PAIRINGS["siblings"](tree, gap=gap) == expected
    tree.rewards["reward"] = np.asarray([1, np.nan, 0, 0], np.float32)
    assert PAIRINGS["siblings"](tree) == []


def test_predictions_follow_from_the_steps_before_in_any_order_of_judging():
    """Restored amid a step, a prediction still does not see the step's own groups."""
    groups = [("a", "2 + 3 =", 1.0, 1), ("b", "2 + 4 =", 0.0, 1), ("b", "2 + 4 =", 0.5, 1), ("c", "7 - 4 =", 0.25, 1)]
    found = []
    for order in (groups, groups[::-1]):
        values = Values()
        for group in order:
            values.add(*group)
        assert values.predict("2 + 3 =", 1) is None
        values.add("a", "2 + 3 =", 0.0, 2)
        restored = Values()
        restored.load_state_dict(values.state_dict())
        found += [values.predict("2 + 3 =", 2), restored.predict("2 + 3 =", 2)]
        assert restored.predict("2 + 3 =", 3) < found[-1]
    assert len(set(found)) == 1
    assert 0.5 < found[0] < 1
