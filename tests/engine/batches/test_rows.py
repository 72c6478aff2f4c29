"""Rows: one a distinct prefix of ids, whatever was recorded of the tokens; never more than TRL's packer has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine import CostModel, TokenTree, pack
from rolltree.engine.batches.rows import Rows, concat_rows, distinct_rows, rows_of_all
from rolltree.engine.data.concat import side_by_side

from ..data.test_tree import groups
from .test_equal_prefixes import apart

Samples = list[tuple[list[int], list[int]]]
"""Prompt and response of each."""


def prefixes(samples: Samples) -> set[tuple[int, ...]]:
    """All prefixes of the samples' ids."""
    return {tuple((p + r)[:n]) for p, r in samples for n in range(1, len(p + r) + 1)}


def prefix_of_tokens(tree: TokenTree, number: int) -> list[tuple[int, ...]]:
    """The ids on the path to each token, by its predecessors; the prompt's last one is the tree's own."""
    found: list[tuple[int, ...]] = []
    for row, above in enumerate(tree.parent_row.tolist()):
        last = row == tree.prompt_length - 1
        found.append((*(found[above] if above >= 0 else ()), 1000 + number if last else int(tree.token_id[row])))
    return found


def check(rows: Rows, *trees: TokenTree) -> None:
    """The laws of `Rows`, against prefixes written out."""
    written = [prefix for number, tree in enumerate(trees) for prefix in prefix_of_tokens(tree, number)]
    row_of: dict[tuple[int, ...], int] = {}
    for token, prefix in enumerate(written):
        assert row_of.setdefault(prefix, int(rows.of_token[token])) == rows.of_token[token]
    assert sorted(row_of.values()) == list(range(rows.num_rows))  # different prefixes have different rows
    assert [written[token] for token in rows.token] == sorted(row_of, key=row_of.__getitem__)
    for prefix, row in row_of.items():
        assert rows.position[row] == len(prefix) - 1
        seen = [j for j in range(rows.num_rows) if j <= row < rows.end[j]]
        assert seen == [row_of[prefix[:n]] for n in range(1, len(prefix) + 1)]


@settings(max_examples=60, deadline=None)
@given(groups(), st.booleans())
def test_rows_are_the_distinct_prefixes(group, nodes_apart):
    responses, logprobs, masks = group
    if nodes_apart:
        tree = apart([7, 8], responses, logprobs or [[-1.0] * len(r) for r in responses], masks, [0.0] * len(responses))
    else:
        tree = TokenTree.from_sequences([7, 8], responses, behaviour_logprobs=logprobs, loss_masks=masks)
    check(distinct_rows(tree), tree)
    assert distinct_rows(tree).num_rows == len(prefixes([([7, 8], r) for r in responses]))


@settings(max_examples=50, deadline=None)
@given(groups())
def test_without_equal_siblings_rows_are_the_tokens(group):
    """A tree whose equal tokens were recorded alike is therefore packed as if there were no rows."""
    responses, _, _ = group
    tree = TokenTree.from_sequences([7, 8], responses)
    rows = distinct_rows(tree)
    np.testing.assert_array_equal(rows.of_token, np.arange(tree.num_tokens))
    np.testing.assert_array_equal(rows.end, tree.subtree_end)
    np.testing.assert_array_equal(rows.position, tree.position)


def test_trees_of_a_batch_keep_rows_of_their_own():
    trees = [apart([1, 2], [[3, 4], [3, 5]], [[-1.0, -1.0], [-1.5, -1.0]], [[1, 1]] * 2, [1, -1]) for _ in range(2)]
    one = distinct_rows(trees[0])
    both = concat_rows([one, one])
    np.testing.assert_array_equal(side_by_side(trees).token_id[both.token], np.tile([1, 2, 3, 4, 5], 2))
    assert one.num_rows == 5
    np.testing.assert_array_equal(both.of_token, np.concatenate([one.of_token, one.of_token + 5]))
    np.testing.assert_array_equal(both.position, np.tile(one.position, 2))
    np.testing.assert_array_equal(both.end, np.concatenate([one.end, one.end + 5]))


Prompts = list[list[int]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=6), st.lists(st.lists(st.integers(0, 1)), min_size=1)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_rows_of_several_trees_are_distinct_prefixes_below_their_prompts(
    groups: list[tuple[list[int], Prompts]],
) -> None:
    trees = [TokenTree.from_sequences(prompt, responses) for prompt, responses in groups]
    check(rows_of_all(trees), *trees)


def test_routes_tell_beginnings_apart() -> None:
    """Other experts of the prompt give what follows other hidden states; unknown ones are as all unknown."""
    trees = [TokenTree.from_sequences([7, 8, 9], [[1], [2]]) for _ in range(4)]
    for tree, expert in zip(trees[:3], (3, 3, 4), strict=True):
        tree.set("routes", np.full((tree.num_tokens, 2, 1), expert, np.int16))
    rows = rows_of_all(trees)
    of_trees = [set(of_tree) for of_tree in rows.of_token.reshape(4, 5)]
    assert len(of_trees[0] & of_trees[1]) == 2  # all but the last of the prompt
    assert not of_trees[0] & of_trees[2] | of_trees[0] & of_trees[3] | of_trees[2] & of_trees[3]


def beginnings(lengths: list[int], groups: int, own: int = 6) -> list[TokenTree]:
    """Trees of two responses, the beginnings of whose prompts take turns; ``own`` tokens of a prompt follow them."""
    begins = [[50 + k] * length for k, length in enumerate(lengths)]
    return [
        TokenTree.from_sequences([*begins[i % len(begins)], *range(10 * i, 10 * i + own)], [[1, 2], [1, 3]])
        for i in range(groups)
    ]


def test_a_beginning_of_several_prompts_is_computed_once_and_counts_once() -> None:
    trees = beginnings([20, 30], groups=8)
    apart_rows = sum(distinct_rows(tree).num_rows for tree in trees)
    (batch,) = pack(trees, max_tokens=1000)
    assert batch.num_tokens == 50 + 8 * 9 < apart_rows == 8 * (25 + 9)
    assert batch.copies.sum() == sum(tree.logical_tokens for tree in trees)  # as a flat batch would hold them
    halves = pack(trees, max_tokens=30 + 4 * 9)  # no room for both beginnings
    assert [batch.num_tokens for batch in halves] == [66, 56]
    assert [{i % 2 for i in batch.tree_index} for batch in halves] == [{1}, {0}]


def test_a_short_beginning_is_not_shared_nor_that_of_plain_sequences() -> None:
    trees = beginnings([1], groups=8, own=20)
    (batch,) = pack(trees, max_tokens=1000)
    assert batch.num_tokens == 8 * 24
    (batch,) = pack(beginnings([20], groups=8), max_tokens=1000, flat=True)
    assert batch.num_tokens == 16 * 28
    chains = [tree.chain(0) for tree in beginnings([20], groups=8)]
    (batch,) = pack(chains, max_tokens=1000)
    assert batch.num_tokens == 20 + 8 * 8
    assert batch.cu_seqlens is None
    cost = CostModel(token=1.0, attention=0.0, scored=0.0)
    (batch,) = pack(chains, max_tokens=1000, unshare=cost)
    assert batch.num_tokens == 8 * 28
    assert batch.cu_seqlens is not None


# -- TRL's packer ------------------------------------------------------------------------------------------------------


def rows_of_trl(samples: Samples) -> int:
    """Tokens that TRL's `TreeRow` forwards for the samples in one row."""
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    row = packing.TreeRow()
    for prompt, response in samples:
        ids = torch.tensor(prompt + response)
        mask = torch.tensor([0] * len(prompt) + [1] * len(response))
        row.add({
            "input_ids": ids, "completion_mask": mask, "old_log_probs": torch.zeros(len(ids)), "advantage": 1.0,
            "group_id": tuple(prompt),
        })  # fmt: skip
    return len(row.pack()["input_ids"])


def sampled(seed: int, *, groups: int, n: int, prompt: int, stem: int, ids: int) -> Samples:
    """Groups whose responses go along with an earlier one up to a random point; ``ids`` in the vocabulary."""
    rng = np.random.default_rng(seed)
    found: Samples = []
    for group in range(groups):
        start = [ids + group, *rng.integers(0, ids, prompt).tolist()]  # no two prompts begin alike
        responses: list[list[int]] = []
        for i in range(n):
            kept = responses[int(rng.integers(i))] if i else []
            cut = int(rng.integers(min(len(kept), stem) + 1))
            responses.append(kept[:cut] + rng.integers(0, ids, int(rng.integers(1, 24))).tolist())
        found += [(start, response) for response in responses]
    return found


def trees_of(samples: Samples, eps: float, seed: int = 0) -> list[TokenTree]:
    """A tree for each prompt, with log-probs that are a function of the prefix but for an error of ``eps``."""
    rng = np.random.default_rng(seed)
    found = []
    for prompt in dict.fromkeys(tuple(p) for p, _ in samples):
        responses = [r for p, r in samples if tuple(p) == prompt]
        exact = [np.array([-1 - (hash(tuple(r[: i + 1])) % 97) / 97 for i in range(len(r))]) for r in responses]
        logprobs = [(e + eps * rng.normal(size=len(e))).astype(np.float32) for e in exact]
        advantages = rng.normal(size=len(responses))
        found.append(
            TokenTree.from_sequences(list(prompt), responses, behaviour_logprobs=logprobs, advantages=advantages)
        )
    return found


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize(
    "shape",
    [
        {"groups": 12, "n": 8, "prompt": 12, "stem": 20, "ids": 50},  # shared for long
        {"groups": 6, "n": 16, "prompt": 5, "stem": 4, "ids": 3},  # equal by chance, at every depth
        {"groups": 1, "n": 64, "prompt": 30, "stem": 12, "ids": 9},
        {"groups": 5, "n": 1, "prompt": 9, "stem": 0, "ids": 50},  # nothing is shared
    ],
    ids=lambda shape: f"{shape['groups']}x{shape['n']}",
)
def test_never_more_rows_than_trls_packer(shape: dict[str, int], eps: float) -> None:
    for seed in range(3):
        samples = sampled(seed, **shape)
        trees = trees_of(samples, eps)
        (batch,) = pack(trees, max_tokens=100_000)
        assert batch.num_tokens == len(prefixes(samples)) <= rows_of_trl(samples)
        records = sum(tree.num_tokens for tree in trees)
        shares = shape["stem"] > 0
        assert (records > batch.num_tokens) == (shares and eps > 0)
        assert batch.loss_tokens == sum(len(response) for _, response in samples)


def test_a_system_prompt_of_several_prompts_is_shared_as_trls_packer_shares_it() -> None:
    """Samples of any prompts, whose trees `TokenTree.forest` makes by their first token."""
    system = list(range(100, 140))
    rng = np.random.default_rng(0)
    samples = [(system + p, r) for p, r in sampled(8, groups=6, n=4, prompt=5, stem=9, ids=30)]
    samples += [([99, 98], [int(t), 1, 2]) for t in rng.integers(0, 3, 7)]
    order = rng.permutation(len(samples))
    samples = [samples[i] for i in order]
    logprobs = [rng.normal(-1, 1, len(r)) for _, r in samples]
    trees, _ = TokenTree.forest([p for p, _ in samples], [r for _, r in samples], behaviour_logprobs=logprobs)
    (batch,) = pack(trees, max_tokens=100_000)
    assert batch.num_tokens == len(prefixes(samples)) <= rows_of_trl(samples)


def test_turns_of_a_conversation_are_the_rows_of_trls_packer() -> None:
    """Every turn a sample whose prompt is all before it; the turn's answer was recorded by its own sample alone."""
    rng = np.random.default_rng(3)
    samples: Samples = []
    for _ in range(6):
        context = [1, 2, 3]
        for _ in range(4):
            answer = rng.integers(0, 4, 5).tolist()
            samples += [(list(context), answer), (list(context), [*answer[:2], 9, 9])]
            context += [*answer, *rng.integers(0, 4, 2).tolist()]
    logprobs = [rng.normal(-1, 1, len(r)) for _, r in samples]
    tree = TokenTree.from_sequences([p for p, _ in samples], [r for _, r in samples], behaviour_logprobs=logprobs)
    check(distinct_rows(tree), tree)
    (batch,) = pack([tree], max_tokens=100_000)
    assert batch.num_tokens == len(prefixes(samples)) <= rows_of_trl(samples)
    assert batch.num_tokens < tree.num_tokens


# -- batches -----------------------------------------------------------------------------------------------------------


def test_targets_keep_their_records_and_share_a_row() -> None:
    """Two responses [3, 4] and [3, 5]; the sampler said of the first token -1 to one and -1.25 to the other."""
    tree = apart([1, 2], [[3, 4], [3, 5]], [[-1.0, -2.0], [-1.25, -3.0]], [[1, 1], [0, 1]], [1.0, -2.0])
    (batch,) = pack([tree], max_tokens=10)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 3]
    assert batch.subtree_end.tolist() == [5, 5, 5, 4, 5]
    assert batch.copies.tolist() == [2, 2, 2, 1, 1]
    assert batch.target.tolist() == [3, 4, 3, 5]
    assert batch.row.tolist() == [1, 2, 1, 2]
    assert batch.head_row.tolist() == [1, 2]
    assert batch.loss_mask.tolist() == [True, True, False, True]
    assert batch.behaviour_logprob is not None
    assert batch.behaviour_logprob.tolist() == [-1.0, -2.0, -1.25, -3.0]
    assert not batch.mixed  # each target is of one leaf, though their row is of both
    values = batch.to_leaves(torch.arange(4))
    assert [leaf.tolist() for leaf in values[0]] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("max_tokens", [24, 40, 77])
def test_the_budget_counts_rows(max_tokens: int) -> None:
    samples = sampled(5, groups=3, n=12, prompt=3, stem=8, ids=3)
    trees = trees_of(samples, 1e-6)
    records = sum(tree.num_tokens for tree in trees)
    batches = pack(trees, max_tokens=max_tokens, in_pieces=True)
    assert sum(batch.num_tokens for batch in batches) == len(prefixes(samples)) < 0.9 * records
    for batch in batches:
        sizes = [p.end - p.begin for p in batch.pieces] or [batch.num_tokens]
        assert max(sizes) <= max_tokens
        assert sum(sizes) == batch.num_tokens
        if batch.pieces:
            covered = torch.cat([p.target for p in batch.pieces]).sort().values
            assert covered.tolist() == list(range(len(batch.target)))
    if max_tokens < 32:
        return  # a path is longer
    parts = pack(trees, max_tokens=max_tokens)
    assert max(batch.num_tokens for batch in parts) <= max_tokens
    leaves = []
    for batch in parts:
        held = [([*s.prompt[:-1], 100 + k], s.response) for k, part in enumerate(batch.trees) for s in part.flatten()]
        assert batch.num_tokens == len(prefixes(held))
        leaves += [(i, leaf) for i, kept in zip(batch.tree_index, batch.leaf_index, strict=True) for leaf in kept]
    assert sorted(leaves) == [(i, leaf) for i, tree in enumerate(trees) for leaf in range(tree.num_leaves)]


def test_cost_counts_rows() -> None:
    samples = sampled(6, groups=1, n=8, prompt=3, stem=8, ids=20)
    cost = CostModel(token=1e3, attention=10.0, scored=1.0)
    (exact,), (other,) = trees_of(samples, 0.0), trees_of(samples, 1e-6)
    assert other.num_tokens > exact.num_tokens
    assert cost.shared(other) == cost.shared(exact) < cost.flat(exact) == cost.flat(other)


def test_plain_sequences_share_nothing() -> None:
    """Neither padded ones nor those of a tree that saves too little."""
    responses = [[2, *range(10, 30)], [2, *range(30, 50)]]
    tree = TokenTree.from_sequences([1], responses, behaviour_logprobs=[[-1.0] * 21, [-1.5] * 21])
    cost = CostModel(token=1.0, attention=0.0, scored=0.0)
    assert pack([tree], max_tokens=100)[0].num_tokens == 42
    for options in ({"flat": True}, {"unshare": cost}):
        (batch,) = pack([tree], max_tokens=100, **options)
        assert batch.num_tokens == 44
        assert batch.cu_seqlens is not None
        assert batch.cu_seqlens.tolist() == [0, 22, 44]
