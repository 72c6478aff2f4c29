"""The modelled table: that the files are the model's, and that its blocks are those of the kernels."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from rolltree.bench import modelled, modelled_decode, modelled_drafts, workloads
from rolltree.kernels.linear_logprob import exponentials


def test_the_files_are_what_the_model_says_and_name_it() -> None:
    rows = modelled.rows(modelled.predictions())
    written = [json.loads(line) for line in (modelled.FOLDER / "model.jsonl").read_text().splitlines()]
    assert written == rows
    assert (modelled.FOLDER / "table.md").read_text() == modelled.table(rows)
    assert {row["kind"] for row in rows} == {"model"}
    assert all(0 < row["best_ms"] <= row["worst_ms"] for row in rows)


def test_the_tables_have_every_case_of_every_backend_on_both_gpus() -> None:
    rows = modelled.rows(modelled.predictions())
    found = {(row["op"], row["case"], row["backend"], row["direction"], row["gpu"]) for row in rows}
    heads = {f"N=8192 H={H} V={V} bf16" for H in (1024, 2048, 4096) for V in (49152, 131072, 151936)}
    directions = ("forward", "forward+backward")
    expected = set(itertools.product(["head"], heads, ["triton", "cute"], directions, modelled.MEMORY))
    expected |= set(itertools.product(["head"], heads, ["three bare products"], directions[1:], modelled.MEMORY))
    trees = {case for op, case, *_ in found if op == "tree_attention"}
    assert [sum(word in case for case in trees) for word in ("28x1024", "segments", "conversations")] == [1, 1, 1]
    directions = ("forward", "backward")
    expected |= set(itertools.product(["tree_attention"], trees, ["flash", "triton"], directions, modelled.MEMORY))
    assert found == expected
    assert set(modelled.MEMORY) == {"H100", "H200"}


@pytest.mark.parametrize("H", [1024, 2048, 4096])
def test_the_first_products_tiles_are_in_the_order_of_their_time(H: int) -> None:
    """The epilogue of 192 columns spills, but runs under the other warp group's products; that of 256, which spills
    nothing, runs after its own; 128 columns hide it too, and read a quarter more of the operands for a column."""

    def clocks(tile: int) -> float:  # for a column, by machine code
        products, epilogue = H * exponentials.ROWS * tile / 2048, modelled._epilogue("exponentials", tile)
        in_turns = max(products, (products + epilogue) / 2)
        return (in_turns if tile <= exponentials.PINGPONG else products + epilogue) / tile

    least = H * exponentials.ROWS / 2048
    assert clocks(192) == clocks(128) == least
    assert 1.05 * least < clocks(256) < 1.35 * least
    assert exponentials.TILES[0] == 192


def test_blocks_are_counted_as_the_mask_has_them() -> None:
    end = workloads.group(400, 300, 2).subtree_end
    row, key = np.arange(1000)[:, None], np.arange(1000)[None, :]
    seen = np.zeros((1024, 1024), dtype=bool)
    seen[:1000, :1000] = (key <= row) & (row < end)
    blocks = seen.reshape(8, 128, 8, 128)
    full = blocks.all((1, 3))
    assert full.sum() > 0
    assert modelled._blocks(end) == (full.sum(), (blocks.any((1, 3)) & ~full).sum())


def test_the_model_of_drafts() -> None:
    memory = modelled.MEMORY["H200"]
    assert (modelled.FOLDER / "drafts.md").read_text() == modelled_drafts.table()
    assert "not measured" in modelled_drafts.table().splitlines()[0]
    assert modelled_drafts.best(1, 4096, 0.0, memory) == (0, 1.0, 1.0)  # nothing is right
    assert modelled_drafts.tokens_a_step(3, 0.5) == 1 + 0.5 + 0.25 + 0.125
    # few rows wait for the weights: a query more costs nothing; many are bound by FLOP: each costs its share
    few, many = ([modelled_drafts.step_seconds(rows, 4096, k, memory) for k in (4, 5)] for rows in (1, 1024))
    assert few[1] == few[0]
    assert abs((many[1] - modelled_drafts.HOST) / (many[0] - modelled_drafts.HOST) - 6 / 5) < 1e-9


def test_the_model_of_decoding() -> None:
    rows = modelled.rows(modelled_decode.predictions())
    written = [json.loads(line) for line in (modelled.FOLDER / "decode.jsonl").read_text().splitlines()]
    assert written == rows
    assert (modelled.FOLDER / "decode.md").read_text() == modelled_decode.table(rows)
    assert {row["kind"] for row in rows} == {"model"}
    assert all(0 < row["best_ms"] <= row["worst_ms"] for row in rows)
    rate = modelled.STREAM_SHARE * modelled.MEMORY["H100"]
    nodes = modelled_decode.shared(4096, 2048, 16, 16)
    unique = 16 * (4096 + 16 * 2048) * 2 * 2 * 8 * 128
    step = modelled_decode.triton(nodes, 128)
    assert step.reading[0].unique == unique
    # 512 keys of 2 x 128 bf16 for each key head; the prefix is read once for its 32 queries
    assert sum(item.times for item in step.reading[0].items) == 8 * (16 * 8 + 256 * 4)
    assert sum(item.keys * item.times for item in step.reading[0].items) * 4 * 128 == unique
    best, _ = modelled_decode.seconds(step, 128, modelled.MEMORY["H100"])
    assert best == unique / rate + 2 * modelled_decode.LAUNCH  # many keys: the memory's rate alone


def test_a_tile_of_more_queries_reads_a_node_once() -> None:
    nodes = modelled_decode.shared(4096, 128, 64, 1)
    tiles = {rows: modelled_decode._flash(nodes, 128, rows, 512).reading[0].items for rows in (64, 128)}
    read = {rows: sum(item.keys * item.times for item in items) for rows, items in tiles.items()}
    assert read[64] - read[128] == 8 * 4096
