"""Columns: declared once, then carried by every builder, splitter, batch and file."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rolltree.engine import LeafStatus, Segment, TokenTree, pack
from rolltree.engine.data import columns
from rolltree.engine.data.columns import Column, declare
from rolltree.engine.data.store import write_rollouts
from rolltree.kernels import Objective

PER = {"token": "t_token", "node": "t_node", "leaf": "t_leaf", "path": "t_path"}


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    monkeypatch.setattr(columns, "COLUMNS", columns.COLUMNS)
    for per, name in PER.items():
        monkeypatch.setitem(columns.COLUMNS, name, Column(name, np.float32, per, "of a test", to_device=True))
    summed = Column("t_sum", np.float32, "token", "of a test", merge="sum")
    monkeypatch.setitem(columns.COLUMNS, "t_sum", summed)
    monkeypatch.setitem(columns.COLUMNS, "t_first", Column("t_first", np.float32, "token", "of a test", merge="first"))


RESPONSES = [[5, 6, 7], [5, 6, 8, 8], [5], [3, 4]]


def tree():
    made = TokenTree.from_sequences(
        [1, 2],
        RESPONSES,
        advantages=[1.0, -1.0, 0.5, 0.0],
        columns={"t_path": [[10, 11, 12], [20, 21, 22, 23], [30], [40, 41]], "t_leaf": [1.0, 2.0, 3.0, 4.0]},
    )
    made.set("t_token", 100 * made.token_id)
    made.set("t_node", np.arange(made.num_nodes))
    made.rewards["reward"] = np.zeros(4, np.float32)
    made.meta |= {"prompt_id": "p", "task": "t", "prompt_text": ""}
    return made


def check(made: TokenTree, leaves: list[int]) -> None:
    """Every column goes with its token, leaf or path."""
    np.testing.assert_array_equal(made.t_token, 100 * made.token_id)
    np.testing.assert_array_equal(made.t_leaf, [leaf + 1 for leaf in leaves])
    expected = [10 * (leaf + 1) + place for leaf in leaves for place in range(len(RESPONSES[leaf]))]
    np.testing.assert_array_equal(made.t_path, expected)
    np.testing.assert_array_equal(made.token_id[made.path_tokens], [t for leaf in leaves for t in RESPONSES[leaf]])


def test_splitters_carry_them():
    whole = tree()
    check(whole, [0, 1, 2, 3])
    part = whole.without_leaves(np.array([True, False, False, True]))
    assert part is not None
    check(part, [1, 2])
    for leaf in range(4):
        chain = whole.chain(leaf)
        check(chain, [leaf])
        of = {
            int(row): int(node)
            for node in range(whole.num_nodes)
            for row in range(whole.start[node], whole.start[node] + whole.length[node])
        }
        path = [of[int(r)] for r in whole.path_rows(leaf)]
        np.testing.assert_array_equal(np.repeat(chain.t_node, chain.length), path)


def test_batches_bring_them_to_the_device():
    whole = tree()
    other = TokenTree.from_sequences([9], [[5], [6]])
    (batch,) = pack([whole, other], max_tokens=100)
    assert set(PER.values()) <= set(batch.columns)
    assert batch.columns["t_token"].tolist()[: whole.num_tokens - 2] == (100 * whole.token_id[2:]).tolist()
    assert batch.columns["t_leaf"].tolist() == [whole.t_leaf[i] for i in whole.leaf_order] + [0, 0]
    assert batch.path_target is not None
    ids = batch.target[batch.path_target].tolist()
    assert ids == [t for i in whole.leaf_order for t in RESPONSES[i]] + [5, 6]
    assert len(batch.columns["t_path"]) == len(ids)
    moved = batch.to("meta")
    assert {values.device.type for values in moved.columns.values()} == {"meta"}


def test_a_token_column_with_a_hole_in_the_loss_is_not_known():
    whole = tree()
    values = np.ones(whole.num_tokens)
    whole.set("t_token", np.where(whole.loss_mask, values, np.nan))
    assert "t_token" in pack([whole], max_tokens=100)[0].columns
    whole.t_token[-1] = np.nan
    assert "t_token" not in pack([whole], max_tokens=100)[0].columns


def test_files_hold_them(tmp_path):
    whole = tree()
    write_rollouts(tmp_path / "a.parquet", 1, [whole], [["", "", "", ""]])
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    for leaf, row in enumerate(rows):
        assert row["t_path"] == [10 * (leaf + 1) + place for place in range(len(RESPONSES[leaf]))]
        assert row["t_token"] == [100 * t for t in RESPONSES[leaf]]
        assert row["t_leaf"] == leaf + 1


def test_merging():
    equal = {"t_token": [[0, 1, 2], [0, 9, 2]]}
    split = TokenTree.from_sequences([1], [[5, 6, 7], [5, 6, 8]], columns=equal)
    assert split.num_tokens == 1 + 1 + 2 + 2  # they part where the column differs
    first = TokenTree.from_sequences([1], [[5, 6, 7], [5, 6, 8]], columns={"t_first": [[0, 1, 2], [0, 9, 2]]})
    assert first.num_tokens == 1 + 2 + 1 + 1
    assert first.t_first[2] == 1
    summed = TokenTree.from_sequences([1], [[5, 6, 7], [5, 6, 8]], columns={"t_sum": [[1, 1, 2], [1, 9, 2]]})
    assert summed.t_sum.tolist() == [0, 2, 10, 2, 2]


def test_segments_carry_them():
    made = TokenTree.from_nodes(
        [-1, 0],
        [Segment.prompt([1]), Segment.make([2, 3], origin=1, t_token=[4.0, 5.0])],
        [1],
        [LeafStatus.STOP],
    )
    assert made.t_token.tolist() == [0, 4, 5]
    with pytest.raises(ValueError, match="needs 2 values"):
        Segment.make([2, 3], t_token=[1.0])
    with pytest.raises(ValueError, match="one value a leaf"):
        Segment.make([2, 3], t_leaf=1.0)


def test_what_nobody_set_reads_as_its_fill_and_is_not_written_to():
    made = TokenTree.from_sequences([1], [[2]])
    assert np.isnan(made.value).all()
    with pytest.raises(ValueError, match="read-only"):
        made.value[0] = 1.0
    with pytest.raises(AttributeError, match="no attribute or column 'valeu'"):
        _ = made.valeu


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("valeu", 1.0, "did you mean 'value'"),
        ("value", [1.0], "needs 2 values"),
        ("value", 1e39, "does not hold"),
        ("policy_version", 2**32 + 5, "does not hold"),
        ("policy_version", 0.5, "does not hold"),
        ("value", "high", "must be numbers"),
        ("value", -np.inf, "does not hold"),
        ("advantage", np.nan, "does not hold"),
    ],
)
def test_mistakes_are_named(name, values, said):
    with pytest.raises(ValueError, match=said):
        TokenTree.from_sequences([1], [[2]]).set(name, values)


def test_a_name_is_declared_once():
    with pytest.raises(ValueError, match="declared already"):
        declare(Column("value", np.int32, "leaf", "another"))


@pytest.mark.parametrize("name", ["behaviour_logprob", "advantage"])
def test_a_column_of_another_process_is_the_same(name: str):
    """The fill of a column may be NaN, which equals nothing and is no longer the same object."""
    sent = pickle.loads(pickle.dumps(columns.COLUMNS[name]))
    assert declare(sent) is sent
    with pytest.raises(ValueError, match="declared already"):
        declare(dataclasses.replace(sent, fill=7.0))


@pytest.mark.parametrize("kind", ["token", "node", "path"])
def test_credit_of_tokens_nodes_and_paths_equals_flat(kind):
    """The sums of a shared token are those of its copies in a flat batch."""
    rng = np.random.default_rng(0)
    whole = tree()
    count = {"token": whole.num_tokens, "node": whole.num_nodes, "path": whole.response_length.sum()}[kind]
    whole.set(f"{kind}_advantage", rng.normal(size=count))
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        objective = Objective.preset("grpo", aggregation=aggregation)
        (batch,) = pack([whole], max_tokens=100)
        flat = pack([whole], max_tokens=100, flat=True)
        shared = batch.fields(objective)
        place = {int(i): at for at, i in enumerate(whole.leaf_order)}
        rows = batch.path_target.tolist()
        sums = {
            name: torch.zeros(len(shared.weight))
            for name in ("adv_pos", "adv_neg", "weight", "pos_weight", "neg_weight")
        }
        cuts = np.cumsum([0] + [len(RESPONSES[i]) for i in whole.leaf_order])
        for one in flat:
            fields = one.fields(objective)
            begin = 0
            for (leaf,) in one.leaf_index:
                own = rows[cuts[place[int(leaf)]] : cuts[place[int(leaf)] + 1]]
                for name in sums:
                    values = getattr(fields, name)
                    if values is None:  # a chain is never mixed: all its weight has the credit's sign
                        sign = fields.adv_pos > 0 if name == "pos_weight" else fields.adv_neg < 0
                        values = fields.weight * sign
                    sums[name][own] += values[begin : begin + len(own)]
                begin += len(own)
        for name, expected in sums.items():
            torch.testing.assert_close(getattr(shared, name), expected, rtol=1e-6, atol=1e-6)
