"""Rollouts as parquet, one row a leaf path, with every column its tree carries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .columns import COLUMNS, Array
from .segment import LeafStatus, Text
from .tree import TokenTree

IDENTITY = pa.schema(
    {
        "step": pa.int32(),
        "prompt_id": pa.string(),
        "task": pa.string(),
        "leaf": pa.int32(),
        "prompt_text": pa.string(),
        "response_text": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "node_ids": pa.list_(pa.int32()),
        "reward": pa.float32(),
        "status": pa.string(),
    }
)
"""What every file has; the trees' columns follow, lists with an entry a response token, or one value a leaf."""


def write_rollouts(path: Path, step: int, trees: Sequence[TokenTree], responses: Sequence[Sequence[str]]) -> None:
    """Write ``trees`` as parquet, one row a leaf path.

    ``node_ids`` names the tree node of each response token, so leaves share a prefix as far as their node ids agree.
    A reward that is NaN (its verifier failed) is null.

    Args:
        trees: with ``meta`` keys ``prompt_id, task, prompt_text`` and the reward ``rewards["reward"]``.
        responses: text of each leaf of each tree, in leaf-index order.
    """
    schema = _schema(trees)
    tables = [_table(schema, step, tree, texts) for tree, texts in zip(trees, responses, strict=True)]
    table = pa.concat_tables(tables) if tables else schema.empty_table()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(table, temporary, compression="zstd")
    temporary.replace(path)


def read_texts(path: Path) -> Iterator[Text]:
    """What the responses of a file of `write_rollouts` say; what several share, once."""
    table = pq.read_table(path, columns=["prompt_id", "prompt_ids", "response_ids", "node_ids"])
    seen: set[int] = set()
    prompt_id = None
    for row in table.to_pylist():
        if row["prompt_id"] != prompt_id:
            prompt_id = row["prompt_id"]
            seen.clear()
        response, nodes = (np.asarray(row[name], np.int32) for name in ("response_ids", "node_ids"))
        shared = next((i for i, node in enumerate(nodes.tolist()) if node not in seen), len(nodes))
        seen.update(nodes.tolist())
        yield Text(np.asarray(row["prompt_ids"], np.int32), response[:shared], response[shared:])


def _schema(trees: Sequence[TokenTree]) -> pa.Schema:
    schema = IDENTITY
    for name in dict.fromkeys(name for tree in trees for name in tree.columns if name != "status"):
        kind = pa.from_numpy_dtype(np.dtype(COLUMNS[name].dtype))
        schema = schema.append(pa.field(name, kind if COLUMNS[name].per == "leaf" else pa.list_(kind)))
    for name in dict.fromkeys(name for tree in trees for name in tree.rewards if name != "reward"):
        schema = schema.append(pa.field(f"reward/{name}", pa.float32()))
    return schema


def _table(schema: pa.Schema, step: int, tree: TokenTree, texts: Sequence[str]) -> pa.Table:
    leaves = tree.num_leaves
    rows = tree.path_tokens
    offsets = pa.array(np.concatenate([[0], np.cumsum(tree.response_length)]), pa.int32())
    node = np.repeat(np.arange(tree.num_nodes), tree.length)[rows]

    def per_token(values: Array) -> pa.ListArray:  # [P]
        return pa.ListArray.from_arrays(offsets, pa.array(values))

    def values_of(name: str) -> Any:
        values, per = getattr(tree, name), COLUMNS[name].per
        if per == "leaf":
            return pa.array(values)
        return per_token(values if per == "path" else values[node if per == "node" else rows])

    columns: dict[str, Any] = {
        "step": pa.array(np.full(leaves, step)),
        "prompt_id": [tree.meta["prompt_id"]] * leaves,
        "task": [tree.meta["task"]] * leaves,
        "leaf": pa.array(np.arange(leaves)),
        "prompt_text": [tree.meta["prompt_text"]] * leaves,
        "response_text": list(texts),
        "prompt_ids": [tree.token_id[tree.path_rows(leaf)[: tree.leaf_prompt[leaf]]] for leaf in range(leaves)],
        "response_ids": per_token(tree.token_id[rows]),
        "node_ids": per_token(node.astype(np.int32)),
        "status": [LeafStatus(int(status)).name.lower() for status in tree.status],
    }
    for name in schema.names:
        if name == "reward" or name.startswith("reward/"):
            reward = tree.rewards.get(name.removeprefix("reward/"), np.full(leaves, np.nan, np.float32))
            columns[name] = pa.array(reward, mask=np.isnan(reward))
        elif name not in columns:
            columns[name] = values_of(name)
    return pa.table({name: _cast(columns[name], kind) for name, kind in _fields(schema)}, schema=schema)


def _fields(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    return ((field.name, field.type) for field in schema)


def _cast(column: Any, kind: pa.DataType) -> pa.Array:
    return column.cast(kind) if isinstance(column, pa.Array) else pa.array(column, kind)
