"""Rollouts as parquet, one row a leaf path, with every column its tree carries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UserError
from .columns import COLUMNS, Array
from .concat import side_by_side
from .schema import CALLS, IDENTITY
from .segment import LeafStatus, Segment, Text
from .tree import TokenTree


def write_rollouts(
    path: Path,
    step: int,
    trees: Sequence[TokenTree],
    responses: Sequence[Sequence[str]],
    every: Sequence[TokenTree] | None = None,
) -> None:
    """Write ``trees`` as parquet, one row a leaf path.

    ``node_ids`` names the tree node of each response token: leaves share a prefix as far as their node ids agree.
    Routes are lists of all layers' experts, a layer after the other; ``prompt_routes`` holds those of the prompt.
    A reward that is NaN (its verifier failed) is null. Rows of pictures have token ids of their own in ``prompt_ids``
    (`media.Picture.ids`); ``pictures``, in files with any, has the digests of their content. ``thumbnails``, in files
    with any, has small encoded pictures in the row of a tree's first leaf, and null in the others. Files of agents'
    episodes have their seconds, ``episode_s``, and ``calls`` in the row of the leaf with the last answer.

    Args:
        trees: with ``meta`` keys ``prompt_id, task, prompt_text`` and the reward ``rewards["reward"]``; with the key
            ``thumbnails`` for those of the prompt's pictures.
        responses: text of each leaf of each tree, in leaf-index order.
        every: the trees of all files of the step, where ``trees`` are a part of them: all files have the same columns.
    """
    schema = _schema(trees if every is None else every)
    table = _table(schema, step, trees, responses) if trees else schema.empty_table()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(table, temporary, compression="zstd")
    temporary.replace(path)


def read_texts(path: Path) -> Iterator[Text]:
    """The texts of the responses in a file of `write_rollouts`; a shared prefix is yielded once."""
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


def read_rollouts(path: Path) -> list[TokenTree]:
    """Return the trees of a file of `write_rollouts`, with their recorded columns, rewards, and ``meta``.

    Columns of nodes and paths, such as credit, and routes are left out.

    Raises:
        UserError: the file cannot be read, was not written by `write_rollouts`, or has responses of one group with
            different prompts.
    """
    try:
        table = pq.read_table(path)
        lacking = [name for name in IDENTITY.names if name not in table.column_names]
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"'{path}' cannot be read as parquet ({type(error).__name__}).") from error
    if lacking:
        raise UserError(f"'{path}' has no column '{lacking[0]}'; name a file of a run's directory `rollouts`.")
    trees: list[list[dict[str, Any]]] = []
    for row in table.to_pylist():
        if row["leaf"] == 0:
            trees.append([])
        trees[-1].append(row)
    if mixed := [rows[0] for rows in trees if any(row["prompt_ids"] != rows[0]["prompt_ids"] for row in rows)]:
        raise UserError(
            f"'{path}' has responses to '{mixed[0]['prompt_id']}' under different prompts, which it does not tell "
            "apart; record groups with `rolltree rollout --record` instead."
        )
    return [_tree(rows) for rows in trees]


def _tree(rows: Sequence[dict[str, Any]]) -> TokenTree:
    """Make the tree of a group from the rows of its leaves."""
    recorded = [name for name in rows[0] if name in COLUMNS and COLUMNS[name].per == "token" and not COLUMNS[name].axes]
    segments, parents, places = [Segment.prompt(rows[0]["prompt_ids"])], [-1], {}
    leaves = []
    for row in rows:
        above, ids = 0, np.asarray(row["node_ids"], np.int64)
        cuts = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)] if len(ids) else [0]
        for begin, end in pairwise(cuts):
            node = int(ids[begin])
            if node not in places:
                places[node] = len(segments)
                parents.append(above)
                values = {name: np.asarray(row[name][begin:end], COLUMNS[name].dtype) for name in recorded}
                segments.append(Segment(np.asarray(row["response_ids"][begin:end], np.int32), values))
            above = places[node]
        leaves.append(above)
    tree = TokenTree.from_nodes(parents, segments, leaves, [LeafStatus[row["status"].upper()] for row in rows])
    for name in rows[0]:
        if name in COLUMNS and COLUMNS[name].per == "leaf" and name not in ("status", "advantage"):
            tree.set(name, [row[name] for row in rows])
        elif name == "reward" or name.startswith("reward/"):
            rewards = [np.nan if row[name] is None else row[name] for row in rows]
            tree.rewards[name.removeprefix("reward/")] = np.asarray(rewards, np.float32)
    if "verifier" in tree.rewards:  # shaped when it was trained; a replay shapes it again
        tree.rewards["reward"] = tree.rewards.pop("verifier")
    tree.meta |= {name: rows[0][name] for name in ("prompt_id", "task", "prompt_text")}
    return tree


def _schema(trees: Sequence[TokenTree]) -> pa.Schema:
    schema = IDENTITY
    if any(tree.pictures for tree in trees):
        schema = schema.append(pa.field("pictures", pa.list_(pa.string())))
    if any("timeline" in tree.meta for tree in trees):
        schema = schema.append(pa.field("episode_s", pa.float64())).append(pa.field("calls", CALLS))
    if any("thumbnails" in tree.meta for tree in trees):
        schema = schema.append(pa.field("thumbnails", pa.list_(pa.binary())))
    for name in dict.fromkeys(name for tree in trees for name in tree.names if name != "status"):
        kind = pa.from_numpy_dtype(np.dtype(COLUMNS[name].dtype))
        if COLUMNS[name].axes:
            kind = pa.list_(kind, next(_flat(getattr(t, name)).shape[1] for t in trees if name in t.names))
            schema = schema.append(pa.field(f"prompt_{name}", pa.list_(kind)))
        schema = schema.append(pa.field(name, kind if COLUMNS[name].per == "leaf" else pa.list_(kind)))
    for name in dict.fromkeys(name for tree in trees for name in tree.rewards if name != "reward"):
        schema = schema.append(pa.field(f"reward/{name}", pa.float32()))
    return schema


def _table(schema: pa.Schema, step: int, trees: Sequence[TokenTree], texts: Sequence[Sequence[str]]) -> pa.Table:
    leaves = [tree.num_leaves for tree in trees]
    all_of = side_by_side(trees)
    paths = all_of.all_path_rows
    prompt = all_of.position[paths] < np.repeat(all_of.leaf_prompt, all_of.path_length)
    rows = paths[~prompt]
    node = np.repeat(np.arange(all_of.num_nodes), all_of.length)
    node_id = np.concatenate([np.arange(tree.num_nodes, dtype=np.int32) for tree in trees])
    offsets = _offsets(all_of.response_length)

    def per_token(values: Array, offsets: pa.Array = offsets) -> pa.ListArray:  # [P, ...]
        of_each = pa.array(values.reshape(-1))
        if values.ndim > 1:
            of_each = pa.FixedSizeListArray.from_arrays(of_each, _flat(values).shape[1])
        return pa.ListArray.from_arrays(offsets, of_each)

    def per_leaf(name: str) -> list[str]:
        return [tree.meta[name] for tree in trees for _ in range(tree.num_leaves)]

    def values_of(name: str) -> pa.Array:
        values = all_of.columns[name]
        match COLUMNS[name].per:
            case "leaf":
                return pa.array(values)
            case "path":
                return per_token(values)
            case "node":
                return per_token(values[node[rows]])
        return per_token(values[rows])

    columns: dict[str, Any] = {
        "step": pa.array(np.full(sum(leaves), step)),
        "prompt_id": per_leaf("prompt_id"),
        "task": per_leaf("task"),
        "leaf": pa.array(np.concatenate([np.arange(n) for n in leaves])),
        "prompt_text": per_leaf("prompt_text"),
        "response_text": [text for of_tree in texts for text in of_tree],
        "prompt_ids": per_token(all_of.token_id[paths[prompt]], _offsets(all_of.leaf_prompt)),
        "response_ids": per_token(all_of.token_id[rows]),
        "node_ids": per_token(node_id[node[rows]]),
        "pictures": [[p.digest for p in tree.pictures] for tree in trees for _ in range(tree.num_leaves)],
        "thumbnails": [
            tree.meta.get("thumbnails") if leaf == 0 else None for tree in trees for leaf in range(tree.num_leaves)
        ],
        "episode_s": [None if times is None else times["seconds"] for tree in trees for times in _timeline(tree)],
        "calls": [None if times is None else times["calls"] for tree in trees for times in _timeline(tree)],
        "status": [LeafStatus(status).name.lower() for tree in trees for status in tree.status.tolist()],
    }
    for name in schema.names:
        if name == "reward" or name.startswith("reward/"):
            columns[name] = _reward(trees, name.removeprefix("reward/"))
        elif name.startswith("prompt_") and name not in columns:
            values = all_of.columns[name.removeprefix("prompt_")]
            columns[name] = per_token(values[paths[prompt]], _offsets(all_of.leaf_prompt))
        elif name not in columns:
            columns[name] = values_of(name)
    return pa.table({name: _cast(columns[name], kind) for name, kind in _fields(schema)}, schema=schema)


def _reward(trees: Sequence[TokenTree], name: str) -> pa.Array:
    """Return a named reward of every leaf, null where its tree has none."""
    of_trees = [tree.rewards.get(name, np.full(tree.num_leaves, np.nan, np.float32)) for tree in trees]
    values = np.concatenate(of_trees)
    return pa.array(values, mask=np.isnan(values))


def _timeline(tree: TokenTree) -> Iterator[dict[str, Any] | None]:
    """Yield for each leaf the times of the episode whose last answer it has; None for any other."""
    times = tree.meta.get("timeline", [])
    for number, answer in zip(tree.episode.tolist(), tree.answer.tolist(), strict=True):
        yield times[number] if answer and 0 <= number < len(times) else None


def _flat(values: Array) -> Array:  # [n, ...] -> [n, w]
    return values.reshape(len(values), -1)


def _offsets(lengths: Array) -> pa.Array:
    return pa.array(np.append(0, np.cumsum(lengths)), pa.int32())


def _fields(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    return ((field.name, field.type) for field in schema)


def _cast(column: Any, kind: pa.DataType) -> pa.Array:
    return column.cast(kind) if isinstance(column, pa.Array) else pa.array(column, kind)
