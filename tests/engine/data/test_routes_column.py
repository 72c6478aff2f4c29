"""The column of routes: where tokens with other experts are others, and through everything that moves columns."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rolltree.engine.app.report.trees import explorer_data
from rolltree.engine.batches.distribute import distribute
from rolltree.engine.batches.equal_prefixes import share_equal_prefixes
from rolltree.engine.batches.pack import pack
from rolltree.engine.batches.rows import distinct_rows, numbered
from rolltree.engine.data.concat import join, side_by_side
from rolltree.engine.data.segment import LeafStatus, Segment
from rolltree.engine.data.store import write_rollouts
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.prompts.archive import Archive

LAYERS, K = 2, 3


def routes_of(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((n, LAYERS, 300)).argsort(-1)[..., :K]


def apart(routes: list[np.ndarray], responses: list[list[int]]) -> TokenTree:
    """Responses sampled one by one after a prompt of two tokens, with the routes of each."""
    segments = [
        Segment.make(r, origin=1, loss_mask=True, behaviour_logprob=-1.0, routes=own)
        for r, own in zip(responses, routes, strict=True)
    ]
    prompt = Segment.make([7, 8], routes=routes_of(2, 9))
    return TokenTree.from_nodes(
        [-1, *[0] * len(segments)],
        [prompt, *segments],
        [*range(1, 1 + len(segments))],
        [LeafStatus.STOP] * len(segments),
    )


def test_equal_ids_share_a_row_only_with_equal_routes() -> None:
    same, other = routes_of(3), routes_of(3)
    other[1, 1, 2] += 1  # one expert of one layer
    tree = apart([same, same.copy(), other], [[3, 4, 5]] * 3)
    rows = distinct_rows(tree)
    assert rows.num_rows == 2 + 3 + 2
    of_leaf = [rows.of_token[tree.response_rows(leaf)].tolist() for leaf in range(3)]
    assert of_leaf[0] == of_leaf[1]
    assert of_leaf[2][0] == of_leaf[0][0]
    assert not set(of_leaf[2][1:]) & set(of_leaf[0])  # what follows was computed from another hidden state
    del tree.columns["routes"]
    assert distinct_rows(tree).num_rows == 2 + 3


def test_equal_prefixes_merge_only_with_equal_routes() -> None:
    same, other = routes_of(3), routes_of(3)
    other[1, 0, 0] += 1
    tree = share_equal_prefixes(apart([same, same.copy(), other], [[3, 4, 5]] * 3))
    assert tree.num_tokens == 2 + 3 + 2
    for leaf, own in enumerate((same, same, other)):
        np.testing.assert_array_equal(tree.routes[tree.response_rows(leaf)], own)


def test_numbers_are_equal_where_all_values_are() -> None:
    ids, routes = np.array([1, 1, 2, 1, 1], np.int32), routes_of(5)
    routes[[1, 2]] = routes[0]
    assert numbered(ids, routes).tolist() == [0, 0, 1, 2, 3]
    assert numbered(ids, np.zeros((5, 0, 0), np.int16)).tolist() == [0, 0, 1, 0, 0]


def test_every_operation_on_trees_moves_the_routes_with_the_tokens() -> None:
    own = [routes_of(4, 1), routes_of(2, 2), routes_of(3, 3)]
    tree = apart(own, [[3, 4, 5, 6], [4, 4], [5, 6, 7]])

    def check(found: TokenTree, leaves: list[int]) -> None:
        for leaf, source in enumerate(leaves):
            rows = found.path_rows(leaf)
            np.testing.assert_array_equal(found.routes[rows], np.concatenate([routes_of(2, 9), own[source]]))

    check(tree, [0, 1, 2])
    kept = tree.without_leaves(np.array([False, True, False]))
    assert kept is not None
    check(kept, [0, 2])
    check(tree.chain(2), [2])
    check(join([tree, tree]), [0, 1, 2, 0, 1, 2])
    check(side_by_side([tree, kept]), [0, 1, 2, 0, 2])
    archive = Archive()
    text = json.dumps(archive.pack(tree))
    check(Archive(dict(archive.tensors)).unpack(json.loads(text)), [0, 1, 2])
    for batches in (
        pack([tree], max_tokens=7, replay_routes=True),
        distribute([tree, tree], 2, _cost(), max_tokens=64, replay_routes=True)[1],
    ):
        for batch in batches:
            assert batch.routes is not None
            want = side_by_side(batch.trees)
            np.testing.assert_array_equal(batch.routes.numpy(), want.routes[: len(batch.routes)])
    (batch,) = pack([tree], max_tokens=64)
    assert batch.routes is None


def _cost():
    from rolltree.engine.batches.cost import CostModel

    return CostModel(1.0, 1.0, 1.0)


def test_tokens_without_a_record_are_unknown_and_models_are_not_mixed() -> None:
    bare = TokenTree.from_sequences([7, 8], [[3, 4]])
    both = side_by_side([bare, apart([routes_of(2)], [[5, 6]])])
    assert (both.routes[:4] == -1).all()
    assert (both.routes[4:] >= 0).all()
    other = apart([routes_of(2)], [[5, 6]])
    other.set("routes", np.zeros((4, 5, 1), int))
    with pytest.raises(ValueError, match=r"shapes \[2, 3\] and \[5, 1\]; they are of several models"):
        side_by_side([apart([routes_of(2)], [[5, 6]]), other])


def test_what_cannot_be_routes_is_refused() -> None:
    tree = TokenTree.from_sequences([7, 8], [[3, 4]])
    with pytest.raises(ValueError, match="Routes are to be replayed, and rollouts have no column 'routes'"):
        pack([tree], max_tokens=64, replay_routes=True)
    with pytest.raises(ValueError, match="'routes' needs 4 values, got shape"):
        tree.set("routes", np.zeros((3, 2, 2), int))
    with pytest.raises(ValueError, match=r"int16, which does not hold .*40000"):
        tree.set("routes", np.full((4, 2, 2), 40000))
    with pytest.raises(ValueError, match="'routes' cannot be given"):
        TokenTree.from_sequences([7], [[3]], columns={"routes": [np.zeros((1, 2, 2), int)]})
    given = replace(tree, columns=dict(tree.columns))
    given.set("origin", 3)  # demonstrations have no routes
    (batch,) = pack([given, apart([routes_of(2)], [[5, 6]])], max_tokens=64, replay_routes=True)
    assert batch.routes is not None
    assert batch.routes[:4].eq(torch.tensor(-1)).all()


def test_files_of_rollouts_hold_the_routes_of_prompts_and_responses(tmp_path) -> None:
    own = [routes_of(2, 1), routes_of(1, 2)]
    tree = apart(own, [[3, 4], [5]])
    tree.rewards["reward"] = np.zeros(2, np.float32)
    tree.meta |= {"prompt_id": "a", "task": "", "prompt_text": ""}
    bare = TokenTree.from_sequences([1], [[2]])
    bare.rewards["reward"], bare.meta = np.zeros(1, np.float32), dict(tree.meta)
    path = tmp_path / "rollouts" / "1.parquet"
    write_rollouts(path, 1, [tree, bare], [["x", "y"], ["z"]])
    rows = pq.read_table(path).to_pylist()
    for row, routes in zip(rows, own, strict=False):
        np.testing.assert_array_equal(np.array(row["routes"]), routes.reshape(len(routes), -1))
        np.testing.assert_array_equal(np.array(row["prompt_routes"]), routes_of(2, 9).reshape(2, -1))
    assert rows[2]["routes"] == [[-1] * LAYERS * K]
    data = explorer_data([path], None, [])
    assert not {"routes", "prompt_routes"} & data["columns"].keys()
