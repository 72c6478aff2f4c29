"""Stored trees read as the trees that they stand for, and fetch these only where a token is read."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from rolltree.engine import LeafStatus, Origin, TokenTree
from rolltree.engine.data.episodes import Episodes
from rolltree.engine.data.segment import Segment
from rolltree.engine.data.stored import Counted, Sampled, StoredTexts, StoredTree, TreeOf
from rolltree.engine.fleet.workers import GoneError
from rolltree.engine.loop.describe import describe
from rolltree.engine.prompts.archive import Archive
from rolltree.engine.record.metrics import Sums

from ..agents.test_credit import groups


class Held:
    """A stored value that counts how often it is read; None is gone."""

    def __init__(self, value: Any) -> None:
        self.value, self.reads = value, 0

    def get(self) -> Any:
        self.reads += 1
        if self.value is None:
            raise GoneError("its node has ended")
        return self.value


def sampled(seed: int = 0) -> TokenTree:
    """A tree with branches, an empty response, an observation, and tokens of two versions."""
    random = np.random.default_rng(seed)

    def run(count: int, **given: Any) -> Segment:
        ids = random.integers(3, 50, count).tolist()
        logprobs = random.normal(size=count).astype(np.float32)
        return Segment.make(ids, behaviour_logprob=logprobs, policy_version=random.integers(2, 4, count), **given)

    tree = TokenTree.from_nodes(
        [-1, 0, 1, 1, 0, 4],
        [Segment.prompt([1, 2, 3]), run(5), run(7), run(2), run(3, origin=Origin.INJECTED, loss_mask=False), run(4)],
        [2, 3, 5, 0],
        [LeafStatus.STOP, LeafStatus.LENGTH, LeafStatus.STOP, LeafStatus.STOP],
    )
    tree.meta["errors"] = {1: "it failed"}
    return tree


def stored(tree: TokenTree) -> tuple[StoredTree, Held]:
    """Return a tree as it arrives from another process, and what was left there."""
    held = Held(Sampled(pickle.loads(pickle.dumps(tree)), [f"text {i}" for i in range(tree.num_leaves)]))
    arrived = pickle.loads(pickle.dumps(StoredTree.of(tree)))
    arrived.place(TreeOf(held))
    return arrived, held


def assert_same(one: TokenTree, other: TokenTree) -> None:
    assert list(one.columns) == list(other.columns)
    assert list(one.rewards) == list(other.rewards)
    assert one.meta == other.meta
    arrays = [name for name in TokenTree.__dataclass_fields__ if isinstance(getattr(other, name), np.ndarray)]
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in arrays]
    pairs += [(name, one.columns[name], other.columns[name]) for name in other.columns]
    pairs += [(name, one.rewards[name], other.rewards[name]) for name in other.rewards]
    for name, mine, wanted in pairs:
        assert mine.dtype == wanted.dtype, name
        np.testing.assert_array_equal(mine, wanted, err_msg=name)


HERE = (
    "num_nodes", "num_tokens", "sampled_tokens", "num_leaves", "prompt_length", "logical_tokens", "node_position",
    "path_length", "response_length", "loss_length", "loss_tokens", "status", "advantage", "group",
    "episode", "answer", "trained", "leaf_prompt", "leaf_node", "pictures",
)  # fmt: skip
THERE = ("token_id", "position", "parent_row", "subtree_end", "columns", "loss_mask", "behaviour_logprob", "value")


@pytest.mark.parametrize("seed", range(3))
def test_what_is_here_is_read_without_fetching(seed: int) -> None:
    tree = sampled(seed)
    ours, held = stored(tree)
    for name in HERE:
        np.testing.assert_array_equal(getattr(ours, name), getattr(tree, name), err_msg=name)
    for mine, wanted in zip(Counted.of(ours), Counted.of(tree), strict=True):
        np.testing.assert_array_equal(mine, wanted)
    rows = [tree.response_rows(leaf) for leaf in range(tree.num_leaves)]
    versions = [tree.policy_version[row][tree.loss_mask[row]] for row in rows]
    bounds = [[v.min(), v.max()] if len(v) else [0, -1] for v in versions]
    assert Counted.of(ours).versions.tolist() == bounds
    assert list(ours.names) == list(tree.names)
    assert Episodes(ours).tree is ours
    assert (type(ours), held.reads) == (StoredTree, 0)


@pytest.mark.parametrize("name", THERE)
def test_reading_a_token_makes_it_the_ordinary_tree(name: str) -> None:
    tree = sampled()
    ours, held = stored(tree)
    getattr(ours, name)
    assert (type(ours), held.reads) == (TokenTree, 1)
    assert_same(ours, tree)
    ours.columns["policy_version"][:] = 7  # what was received can be written
    ours.set("value", 1.0)
    assert held.reads == 1


def test_what_is_written_here_stays_when_the_tokens_come() -> None:
    """Against the tree that was written directly: values of leaves, rewards, metadata, and columns of other processes
    in the order in which they were written."""
    tree, (ours, held) = sampled(), stored(sampled())
    left = Held([{}, {"ref_logprob": np.arange(tree.num_tokens, dtype=np.float32)}])
    for of in (tree, ours):
        of.set("group", 5)
        of.rewards["reward"] = np.array([1, 0, np.nan, 1], np.float32)
        of.status[np.isnan(of.rewards["reward"])] = LeafStatus.FAILED
        of.meta["prompt_id"] = "p"
    tree.set("ref_logprob", left.value[1]["ref_logprob"])
    tree.set("advantage", [0.5, 1, 2, 3])
    tree.rewards["shaped"] = np.zeros(4, np.float32)
    ours.write({"ref_logprob": None, "advantage": tree.advantage}, {"shaped": tree.rewards["shaped"]}, left, 1)
    assert ours.advantage.tolist() == [0.5, 1, 2, 3]
    assert (held.reads, left.reads) == (0, 0)
    assert_same(ours.whole(), tree)
    assert type(ours) is StoredTree  # a copy for another process leaves it as it is
    assert_same(ours, tree)
    assert "it failed" in ours.meta["errors"].values()


def test_a_tree_that_is_gone_still_has_what_is_here() -> None:
    ours, held = stored(sampled())
    held.value = None
    with pytest.raises(GoneError):
        _ = ours.token_id
    assert type(ours) is StoredTree
    assert ours.response_length.tolist() == sampled().response_length.tolist()
    with pytest.raises(AttributeError, match="no attribute or column 'tokenid'"):
        _ = ours.tokenid


def test_an_archive_holds_the_whole_tree_and_the_texts() -> None:
    tree = sampled()
    ours, held = stored(tree)
    archive = Archive()
    packed = archive.pack([ours, StoredTexts(held, 4)])
    again, texts = Archive(archive.tensors).unpack(packed)
    assert_same(again, tree)
    assert texts == ["text 0", "text 1", "text 2", "text 3"]
    assert type(ours) is StoredTree


def test_texts_are_fetched_once_and_by_each_process_for_itself() -> None:
    held = Held(Sampled(sampled(), ["a", "b"]))
    texts = StoredTexts(held, 2)
    assert (len(texts), held.reads) == (2, 0)
    assert list(texts) == ["a", "b"]
    assert (texts[1], held.reads) == ("b", 1)
    sent = StoredTexts(Held(Sampled(sampled(), ["x" * 10_000, "b"])), 2)
    assert sent[0][0] == "x"
    copy = sent.__reduce__()
    assert "x" * 10_000 not in repr(copy)
    assert copy[0](*copy[1])._fetched is None


def test_episodes_of_a_stored_tree_need_no_tokens() -> None:
    """Metrics of agents, and the trees that curricula and callbacks get."""
    chains, _, _ = groups(4)
    there = [stored(tree) for tree in chains]
    ours, theirs = Sums(), Sums()
    for tree, (mine, _) in zip(chains, there, strict=True):
        for of in (tree, mine):
            of.rewards["reward"] = np.arange(of.num_leaves, dtype=np.float32)
            of.set("group", 3)
        wanted, got = Episodes(tree), Episodes(mine)
        np.testing.assert_array_equal(got.place, wanted.place)
        for name in ("response_length", "sampled_tokens", "status", "group"):
            np.testing.assert_array_equal(getattr(got.tree, name), getattr(wanted.tree, name), err_msg=name)
        np.testing.assert_array_equal(got.tree.rewards["reward"], wanted.tree.rewards["reward"])
    describe(chains, 12, theirs)
    describe([mine for mine, _ in there], 12, ours)
    assert ours.means() == theirs.means()
    assert [held.reads for _, held in there] == [0] * len(chains)
    for tree, (mine, _) in zip(chains, there, strict=True):
        assert_same(Episodes(mine).tree.whole(), Episodes(tree).tree)


def test_what_is_told_does_not_grow_with_the_responses() -> None:
    def told(length: int) -> int:
        tree = TokenTree.from_sequences([1, 2], [[7 + i] * length for i in range(16)])
        return len(pickle.dumps(StoredTree.of(tree)))

    assert told(2048) < told(16) + 200 < 6000
