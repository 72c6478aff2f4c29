"""Rebuilds rollout trees for the explorer from the rows of ``rollouts/*.parquet``, one row for each leaf path.

A row's ``node_ids`` name the tree node of each response token, so leaves share a segment exactly as far as their node
ids agree; the tree is the trie of those lists, with runs of tokens between branchings as its segments.
"""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...data.columns import COLUMNS
from ...data.parting import Begun, parting
from ...data.schema import IDENTITY
from .time_lines import time_line

MAX_STEPS = 25
TREES_PER_STEP = 4
MAX_TOKENS = 80_000
"""Limits on the embedded trees, which keep the page small; the page gives the number of trees left out."""

FIRST = ("advantage", "behaviour_logprob", "entropy")
"""Columns that the explorer lists first; the others follow in alphabetical order."""

SHOWN = ("loss_mask", "thumbnails", "episode_s", "calls")
"""Columns beyond those of every file that the page shows by themselves, not as values of tokens."""

AROUND = 40
"""Tokens that are shown before the place where prompts part."""

Row = dict[str, Any]
TokenTexts = Callable[[Sequence[int]], list[str]]
"""Function from the token ids of one response to the text of each token."""


def explorer_data(files: Sequence[Path], token_texts: TokenTexts | None, missing: list[str]) -> dict[str, Any]:
    """Return the data that the page embeds: ``{"trees": [...], "columns": {name: meaning}, "note": sentence}``.

    A tree is ``{step, id, task, reward, leaves, nodes, episodes, parting}``: ``episodes`` are of `time_line`, and
    ``parting`` is None or tells where the prompts of episodes differ, ``{shared, of, before, here, there}`` in tokens
    and texts. A node is ``{parent, tokens, text, mask, values, leaves}``: ``leaves`` are the responses that end there,
    and ``values`` has for each column of numbers in the file one entry per token, or a single number; both are means
    over the responses below the node. The first node of a tree may have ``pictures``: URLs that hold the data of
    thumbnails, empty for pictures that could not be read.

    Args:
        files: ``rollouts/*.parquet``.
        token_texts: decodes tokens; None: token ids are shown.
        missing: receives a sentence for everything that cannot be shown.
    """
    trees: list[dict[str, Any]] = []
    total = 0
    chosen = set(_spread(len(files), MAX_STEPS))
    flat = False
    for index, file in enumerate(files):
        try:
            groups = _groups(file) if index in chosen else None
            total += _count_groups(file) if groups is None else len(groups)
        except (OSError, ValueError, KeyError) as error:  # pyarrow's errors are ValueErrors and OSErrors
            missing.append(f"rollouts/{file.name} cannot be read ({' '.join(str(error).split())[:120]}).")
            continue
        flat |= any("node_ids" not in rows[0] for rows in groups or [])
        trees += _trees(groups or [], token_texts, MAX_TOKENS - _size(trees))
    if flat:
        missing.append(
            "The rollouts have no column node_ids, so each response is drawn whole, shared prefixes repeated."
        )
    note = f"All {total} recorded trees are here."
    if len(trees) < total:
        steps = len({tree["step"] for tree in trees})
        note = f"{len(trees)} of {total} recorded trees are embedded ({steps} steps, at most {TREES_PER_STEP} a step); "
        note += f"the other {total - len(trees)} are left out to keep the page light and are in rollouts/*.parquet."
    return {"trees": trees, "columns": columns_of(trees), "note": note}


def step_trees(file: Path, token_texts: TokenTexts | None, most: int) -> list[dict[str, Any]]:
    """Return trees of a step, as `explorer_data` has them, of at most ``most`` tokens.

    Raises:
        OSError, ValueError, KeyError: the file cannot be read.
    """
    return _trees(_groups(file), token_texts, most)


def columns_of(trees: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the columns with values in the trees, and their meanings."""
    recorded = {name for tree in trees for node in tree["nodes"] for name in node["values"]}
    names = [*(name for name in FIRST if name in recorded), *sorted(recorded.difference(FIRST))]
    return {name: COLUMNS[name].meaning if name in COLUMNS else name for name in names}


def _trees(groups: Sequence[list[Row]], token_texts: TokenTexts | None, most: int) -> list[dict[str, Any]]:
    """Return the trees of the first groups, without those with which they would have more than ``most`` tokens."""
    trees: list[dict[str, Any]] = []
    for rows in groups[:TREES_PER_STEP]:
        left = most - _size(trees)
        if max(len(_ids(row)) for row in rows) <= left:
            tree = build_tree(rows, token_texts)
            trees += [tree] if _size([tree]) <= left else []
    return trees


def _size(trees: Sequence[dict[str, Any]]) -> int:
    return sum(len(node["tokens"]) for tree in trees for node in tree["nodes"])


def build_tree(rows: Sequence[Row], token_texts: TokenTexts | None) -> dict[str, Any]:
    """Build the tree of one prompt's leaves: segments depth-first, parents before children; node 0 is the prompt."""
    first = rows[0]
    alone = {("episode", e) if (e := r.get("episode", -1)) >= 0 else i: r for i, r in enumerate(rows)}  # each once
    rewards = [r["reward"] for r in alone.values() if _finite(r.get("reward")) is not None]
    nodes: list[dict[str, Any]] = [
        {"parent": -1, "tokens": [], "text": [first.get("prompt_text") or ""], "values": {}, "leaves": []}
    ]
    if first.get("thumbnails"):
        nodes[0]["pictures"] = [_url(content) for content in first["thumbnails"]]
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if _is_value(name)]
    texts = [_texts(row, token_texts) for row in rows]
    keys = [list(row.get("node_ids") or [leaf] * len(_ids(row))) for leaf, row in enumerate(rows)]
    for begin, end, members, parent in _segments(keys):
        row, text = rows[members[0]], texts[members[0]]
        ending = [_leaf(rows[m]) for m in members if len(keys[m]) == end]
        if end == begin:  # an empty response ends at the prompt
            nodes[parent]["leaves"] += ending
            continue
        node = {"parent": parent, "tokens": _ids(row)[begin:end], "text": text[begin:end], "leaves": ending}
        node["mask"] = [int(v) for v in (row.get("loss_mask") or [])[begin:end]]
        means = {name: _below([rows[m].get(name) for m in members], begin, end) for name in columns}
        node["values"] = {name: values for name, values in means.items() if values is not None}
        nodes.append(node)
    return {
        "step": first.get("step"),
        "id": str(first.get("prompt_id")),
        "task": first.get("task") or "",
        "reward": round(math.fsum(rewards) / len(rewards), 4) if rewards else None,
        "leaves": len(rows),
        "nodes": nodes,
        "episodes": [time_line(row) for row in rows if row.get("calls") is not None],
        "parting": _parting(rows, token_texts),
    }


def _parting(rows: Sequence[Row], token_texts: TokenTexts | None) -> dict[str, Any] | None:
    """Return where the prompts of the episodes part, with the text there of two of them."""
    calls = {row["episode"]: row["calls"] for row in rows if row.get("calls") is not None}
    begun: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for row in rows:
        if _ids(row) and row.get("call") and row["episode"] in calls:
            begun[row["episode"]].append((row["call"][0], row["prompt_ids"]))
    first = parting(Begun(prompts, calls[episode]) for episode, prompts in begun.items())
    if first is None:
        return None

    def text(ids: Sequence[int]) -> str:
        return "".join(token_texts(ids) if token_texts else (f"⟨{i}⟩" for i in ids))

    at = first.shared
    before = text(first.prompt[max(0, at - AROUND) : at].tolist())
    here, there = (text(ids[at : at + AROUND // 2].tolist()) for ids in (first.prompt, first.other))
    return {"shared": at, "of": len(first.prompt), "before": before, "here": here, "there": there}


def _url(content: bytes) -> str:
    """Return a URL that holds a thumbnail's data; empty for an empty one."""
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}" if content else ""


def _is_value(name: str) -> bool:
    """Return whether a column of the file has values to show, other than those that the page always shows."""
    declared = COLUMNS.get(name.removeprefix("prompt_"))
    if declared is not None and declared.axes:
        return False
    return name.startswith("reward/") or name not in (*IDENTITY.names, *SHOWN, "pictures")


def _below(columns: Sequence[Any], begin: int, end: int) -> list[float | None] | float | None:
    """Return means over the responses below a node: one per token of list columns, one number of number columns; None
    if no value is known."""
    if not any(isinstance(values, list) for values in columns):
        return _mean([values for values in columns if isinstance(values, int | float)])
    cut = [values[begin:end] for values in columns if isinstance(values, list)]
    means = [_mean(values) for values in zip(*cut, strict=True)]
    return means if any(v is not None for v in means) else None


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return round(math.fsum(finite) / len(finite), 4) if finite else None


def _segments(keys: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, list[int], int]]:
    """Yield ``(begin, end, leaves below, parent)`` of each segment, depth-first and numbered from 1 in this order.

    A segment ends where its leaves diverge or one of them ends. Empty leaves yield one empty segment.
    """
    count = 0
    stack: list[tuple[int, list[int], int]] = []

    def branch(begin: int, members: list[int], parent: int) -> None:
        ways: dict[int, list[int]] = defaultdict(list)
        for m in members:
            if len(keys[m]) > begin:
                ways[keys[m][begin]].append(m)
        stack.extend((begin, way, parent) for way in reversed(ways.values()))

    empty = [m for m, key in enumerate(keys) if not key]
    if empty:
        yield 0, 0, empty, 0
    branch(0, list(range(len(keys))), 0)
    while stack:
        begin, members, parent = stack.pop()
        shortest = min(len(keys[m]) for m in members)
        end = begin + 1
        node = keys[members[0]][begin]
        while end < shortest and all(keys[m][end] == node for m in members):
            end += 1
        yield begin, end, members, parent
        count += 1
        branch(end, members, count)


def _leaf(row: Row) -> dict[str, Any]:
    status = row.get("status")
    return {
        "leaf": row.get("leaf"),
        "reward": _finite(row.get("reward"), 4),
        "advantage": _finite(row.get("advantage"), 4),
        "status": "" if status is None else str(status),
    }


def _texts(row: Row, token_texts: TokenTexts | None) -> list[str]:
    ids = _ids(row)
    return token_texts(ids) if token_texts else [f"⟨{i}⟩" for i in ids]


def _ids(row: Row) -> list[int]:
    return row.get("response_ids") or []


def _finite(value: Any, digits: int | None = None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value if digits is None else round(float(value), digits)


def _groups(file: Path) -> list[list[Row]]:
    """Return the rows of each prompt, leaves in order; the prompts have the order of the file."""
    parquet = pq.ParquetDataset(file)  # a file, or a folder of several
    kinds = dict(zip(parquet.schema.names, parquet.schema.types, strict=True))
    numbers = [name for name, kind in kinds.items() if _is_value(name) and _is_number(kind)]
    rows = parquet.read(columns=[name for name in kinds if name in (*IDENTITY.names, *SHOWN, *numbers)]).to_pylist()
    by_prompt: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        by_prompt[row["prompt_id"]].append(row)
    return [sorted(group, key=lambda r: r.get("leaf") or 0) for group in by_prompt.values()]


def _is_number(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_list(kind) else kind
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _count_groups(file: Path) -> int:
    return len(pq.read_table(file, columns=["prompt_id"]).column(0).unique())


def _spread(count: int, most: int) -> list[int]:
    """Choose at most ``most`` numbers of ``range(count)``, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def tokenizer_texts(candidates: Sequence[Path], missing: list[str]) -> TokenTexts | None:
    """Load the first tokenizer.json among ``candidates``; None if there is none that can be read."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from ...chat.detokenize import Detokenizer
    from ...chat.marks import marks_of

    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        missing.append("No tokenizer.json was found (export/ or model.path), so tokens are shown by their ids.")
        return None
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(file)))
    except Exception as error:  # tokenizers raises bare Exception
        missing.append(f"The tokenizer {file.name} cannot be read ({error}), so tokens are shown by their ids.")
        return None

    vocabulary = set(tokenizer.get_vocab().values())

    def texts(ids: Sequence[int]) -> list[str]:
        detokenizer = Detokenizer(tokenizer, marks_of(tokenizer).every)
        # The text of a character stands at the token that ends it. Vocabularies are padded: an id may have no token.
        return [detokenizer.add([token])[0] if token in vocabulary else f"⟨{token}⟩" for token in ids]

    return texts
