"""Rollout trees for the explorer: rows of ``rollouts/*.parquet`` (one a leaf path) back into segments.

A row's ``node_ids`` name the tree node of each response token, so leaves share a segment exactly as far as their node
ids agree; the tree is the trie of those lists, with runs of tokens between branchings as its segments.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

MAX_STEPS = 25
TREES_PER_STEP = 4
MAX_TOKENS = 80_000
"""Bounds on what is embedded, so that the page stays light; what is left out is counted and said."""

LEAF_COLUMNS = ("step", "prompt_id", "task", "leaf", "prompt_text", "response_text", "advantage", "reward", "status")
TOKEN_COLUMNS = ("response_ids", "node_ids", "behaviour_logprob", "loss_mask", "policy_version", "entropy")
"""Read where present; the second ones are lists, one entry a response token. ``entropy`` is optional: the explorer
offers it as a colour only where it was recorded."""

Row = dict[str, Any]
TokenTexts = Callable[[Sequence[int]], list[str]]
"""Texts of the tokens of one response."""


def explorer_data(files: Sequence[Path], token_texts: TokenTexts | None, missing: list[str]) -> dict[str, Any]:
    """What the page embeds: ``{"trees": [...], "note": sentence}``.

    A tree is ``{step, prompt, task, id, reward, nodes}``; a node ``{parent, tokens, text, logp, entropy, version, mask,
    advantage, leaves}``, where ``leaves`` are the responses that end there.
    """
    trees: list[dict[str, Any]] = []
    tokens = total = 0
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
        for rows in (groups or [])[:TREES_PER_STEP]:
            tree = build_tree(rows, token_texts)
            size = sum(len(node["tokens"]) for node in tree["nodes"])
            if tokens + size <= MAX_TOKENS:
                tokens += size
                trees.append(tree)
    if flat:
        missing.append(
            "The rollouts have no column node_ids, so each response is drawn whole, shared prefixes repeated."
        )
    note = f"All {total} recorded trees are here."
    if len(trees) < total:
        steps = len({tree["step"] for tree in trees})
        note = f"{len(trees)} of {total} recorded trees are embedded ({steps} steps, at most {TREES_PER_STEP} a step); "
        note += f"the other {total - len(trees)} are left out to keep the page light and are in rollouts/*.parquet."
    return {"trees": trees, "note": note}


def build_tree(rows: Sequence[Row], token_texts: TokenTexts | None) -> dict[str, Any]:
    """One prompt's leaves as a tree of segments, depth-first, parents before children; node 0 is the prompt."""
    first = rows[0]
    rewards = [r["reward"] for r in rows if _finite(r.get("reward")) is not None]
    nodes: list[dict[str, Any]] = [{"parent": -1, "tokens": [], "text": [first.get("prompt_text") or ""], "leaves": []}]
    texts = [_texts(row, token_texts) for row in rows]
    keys = [list(row.get("node_ids") or [leaf] * len(_ids(row))) for leaf, row in enumerate(rows)]
    for begin, end, members, parent in _segments(keys):
        row, text = rows[members[0]], texts[members[0]]
        ending = [_leaf(rows[m]) for m in members if len(keys[m]) == end]
        if end == begin:  # an empty response ends at the prompt
            nodes[parent]["leaves"] += ending
            continue
        node = {"parent": parent, "tokens": _ids(row)[begin:end], "text": text[begin:end], "leaves": ending}
        for name, column in (("logp", "behaviour_logprob"), ("entropy", "entropy")):
            node[name] = [_finite(v, 4) for v in (row.get(column) or [])[begin:end]]
        node["version"] = sorted(set((row.get("policy_version") or [])[begin:end]))
        node["mask"] = [int(v) for v in (row.get("loss_mask") or [])[begin:end]]
        advantages = [a for m in members if (a := _finite(rows[m].get("advantage"))) is not None]
        node["advantage"] = round(math.fsum(advantages) / len(advantages), 4) if advantages else None
        nodes.append(node)
    return {
        "step": first.get("step"),
        "id": str(first.get("prompt_id")),
        "task": first.get("task") or "",
        "reward": round(math.fsum(rewards) / len(rewards), 4) if rewards else None,
        "leaves": len(rows),
        "nodes": nodes,
    }


def _segments(keys: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, list[int], int]]:
    """``(begin, end, leaves below, parent)`` of each segment, depth-first and numbered from 1 as they come.

    A run ends where its leaves part or where one of them ends. Leaves that are empty yield one empty segment.
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
    """The rows of each prompt, leaves in order; prompts as they come in the file."""
    parquet = pq.ParquetFile(file)
    rows = parquet.read(
        columns=[c for c in (*LEAF_COLUMNS, *TOKEN_COLUMNS) if c in parquet.schema_arrow.names]
    ).to_pylist()
    by_prompt: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        by_prompt[row["prompt_id"]].append(row)
    return [sorted(group, key=lambda r: r.get("leaf") or 0) for group in by_prompt.values()]


def _count_groups(file: Path) -> int:
    return len(pq.read_table(file, columns=["prompt_id"]).column(0).unique())


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` of ``range(count)``, evenly spread, first and last included."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def tokenizer_texts(candidates: Sequence[Path], missing: list[str]) -> TokenTexts | None:
    """Token texts by the first tokenizer.json among ``candidates``; without one the explorer shows token ids."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        missing.append("No tokenizer.json was found (export/ or model.path), so tokens are shown by their ids.")
        return None
    try:
        tokenizer = Tokenizer.from_file(str(found))
    except Exception as error:  # tokenizers raises bare Exception
        missing.append(f"The tokenizer {found.name} cannot be read ({error}), so tokens are shown by their ids.")
        return None

    def texts(ids: Sequence[int]) -> list[str]:
        stream = DecodeStream(skip_special_tokens=False)
        out = []
        for token in ids:
            try:
                out.append(stream.step(tokenizer, token) or "")  # None: the middle of a character
            except Exception:  # an id the tokenizer does not know (padded vocabularies): bare Exception as well
                out.append(f"⟨{token}⟩")
        return out

    return texts
