"""The modelled table: that the files are the model's, and that its blocks are those of the kernels."""

from __future__ import annotations

import json

import numpy as np

from rolltree.bench import modelled

from ..kernels.trees import ancestors_mask, random_trees


def test_the_files_are_what_the_model_says_and_name_it() -> None:
    rows = modelled.rows()
    written = [json.loads(line) for line in (modelled.FOLDER / "model.jsonl").read_text().splitlines()]
    assert written == rows
    assert (modelled.FOLDER / "table.md").read_text() == modelled.table(rows)
    assert {row["kind"] for row in rows} == {"model"}
    assert all(0 < row["best_ms"] <= row["worst_ms"] for row in rows)


def test_blocks_are_counted_as_the_mask_has_them() -> None:
    end, _, parents = random_trees(1000, 3, close=0.004, restart=0.001)
    seen = np.zeros((1024, 1024), dtype=bool)
    seen[:1000, :1000] = ancestors_mask(parents).numpy()
    blocks = seen.reshape(8, 128, 8, 128)
    full = blocks.all((1, 3))
    assert full.sum() > 0
    assert modelled._blocks(end.numpy()) == (full.sum(), (blocks.any((1, 3)) & ~full).sum())
