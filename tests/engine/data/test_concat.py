"""Trees side by side say of themselves what each says alone."""

from __future__ import annotations

import numpy as np
import pytest

from rolltree.engine import TokenTree
from rolltree.engine.data.concat import join, side_by_side


def some_trees(seed: int) -> list[TokenTree]:
    random = np.random.default_rng(seed)
    trees = []
    for _ in range(int(random.integers(1, 6))):
        count = int(random.integers(1, 7))
        prompt = random.integers(1, 4, int(random.integers(1, 5))).tolist()
        responses = [random.integers(1, 3, int(random.integers(0, 8))).tolist() for _ in range(count)]
        # turns of conversations: prompts of their own, which may hold what another answered
        prompts = [prompt + responses[0][: int(random.integers(0, 3))] for _ in range(count)]
        tree = TokenTree.from_sequences(
            prompts if random.random() < 0.5 else prompt,
            responses,
            advantages=random.normal(size=count).tolist(),
            loss_masks=[random.random(len(response)) < 0.7 for response in responses],
        )
        if random.random() < 0.5:
            tree.set("node_advantage", random.normal(size=tree.num_nodes))
        trees.append(tree)
    return trees


@pytest.mark.parametrize("seed", range(30))
def test_what_each_tree_says_is_said_of_its_part(seed):
    trees = some_trees(seed)
    joined = side_by_side(trees)
    rows, nodes, leaves = 0, 0, 0
    paths = iter(np.split(joined.all_path_rows, np.cumsum(joined.path_length)[:-1]))
    responses = iter(np.split(joined.path_tokens, np.cumsum(joined.response_length)[:-1]))
    for tree in trees:
        of_rows = slice(rows, rows + tree.num_tokens)
        of_nodes = slice(nodes, nodes + tree.num_nodes)
        of_leaves = slice(leaves, leaves + tree.num_leaves)
        first_row = np.where(tree.parent_row < 0, 0, rows)
        first_node = np.where(tree.parent < 0, 0, nodes)
        for want, got in (
            (tree.token_id, joined.token_id[of_rows]),
            (tree.position, joined.position[of_rows]),
            (tree.parent_row + first_row, joined.parent_row[of_rows]),
            (tree.subtree_end + rows, joined.subtree_end[of_rows]),
            (tree.response_leaves, joined.response_leaves[of_rows]),
            (tree.loss_mask, joined.loss_mask[of_rows]),
            (tree.parent + first_node, joined.parent[of_nodes]),
            (tree.start + rows, joined.start[of_nodes]),
            (tree.length, joined.length[of_nodes]),
            (tree.first_leaf + leaves, joined.first_leaf[of_nodes]),
            (tree.last_leaf + leaves, joined.last_leaf[of_nodes]),
            (tree.node_position, joined.node_position[of_nodes]),
            (tree.node_advantage, joined.node_advantage[of_nodes]),
            (tree.leaf_node + nodes, joined.leaf_node[of_leaves]),
            (tree.leaf_order + leaves, joined.leaf_order[of_leaves]),
            (tree.path_length, joined.path_length[of_leaves]),
            (tree.response_length, joined.response_length[of_leaves]),
            (tree.loss_length, joined.loss_length[of_leaves]),
            (tree.advantage, joined.advantage[of_leaves]),
        ):
            np.testing.assert_array_equal(got, want)
        for leaf in range(tree.num_leaves):
            np.testing.assert_array_equal(next(paths), tree.path_rows(leaf) + rows)
            np.testing.assert_array_equal(next(responses), tree.response_rows(leaf) + rows)
        rows, nodes, leaves = rows + tree.num_tokens, nodes + tree.num_nodes, leaves + tree.num_leaves
    assert (rows, nodes, leaves) == (joined.num_tokens, joined.num_nodes, joined.num_leaves)


def test_what_programs_counted_is_added_up():
    trees = [TokenTree.from_sequences([1], [[2], [3]]) for _ in range(3)]
    trees[0].meta["counts"], trees[2].meta["counts"] = {"cut": 0, "a": 2}, {"cut": 3}
    assert join(trees).meta["counts"] == {"cut": 3, "a": 2}
    assert "counts" not in join([trees[1], trees[1]]).meta
