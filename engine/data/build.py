"""Builds the arrays of a tree from sequences or nodes.

`TokenTree.from_sequences` uses them in this order: `merge` checks the sequences, `prefix_tree` finds their
common prefixes in time linear in their tokens, and `order.order_nodes` puts the nodes into depth-first order.

Two response tokens merge only where their ids and all columns that must be equal agree, bit for bit: a token of a tree
has one record. A token that is only *context* of a sequence, its prompt, needs only the id: it is not in the loss of
that sequence, and its record stays that of the other one (a prompt too, or an earlier turn's response).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, NamedTuple, cast

import numba
import numpy as np
import numpy.typing as npt

from . import checks
from .columns import COLUMNS, Array, find_column
from .segment import LeafStatus, Origin


class Nodes(NamedTuple):
    """Nodes in an order that puts parents first, with their tokens concatenated."""

    parent: Array  # [K]
    length: Array  # [K]
    token_id: Array  # [T]
    leaf_node: Array  # [L]
    leaf_prompt: Array  # [L]
    columns: dict[str, Array]


class Merged(NamedTuple):
    """The merged nodes, and the columns whose values are added where tokens merge."""

    nodes: Nodes
    summed: dict[str, Array]  # name -> [P], one value a response token of each sequence


def merge(
    prompt: Seq[int] | Seq[Seq[int]],
    responses: Seq[Seq[int]],
    advantages: Seq[float] | None,
    behaviour_logprobs: Seq[npt.ArrayLike] | None,
    loss_masks: Seq[npt.ArrayLike] | None,
    policy_version: int | Seq[npt.ArrayLike],
    statuses: Seq[LeafStatus] | None,
    columns: Mapping[str, Seq[npt.ArrayLike]],
) -> Merged:
    """Check the arguments of `TokenTree.from_sequences` and merge their common prefixes.

    Raises:
        ValueError: as `TokenTree.from_sequences`.
    """
    count = checks.count("responses", responses)
    if count == 0:
        raise ValueError("from_sequences needs at least one response; give token ids of each in `responses`.")
    check_count("advantages", advantages, count)
    check_count("statuses", statuses, count)
    status = checks.codes("statuses", [LeafStatus.STOP] * count if statuses is None else statuses, LeafStatus)
    ids = [checks.token_ids(f"responses[{i}]", response) for i, response in enumerate(responses)]
    lengths = np.array([len(r) for r in ids])
    token_columns = _records(lengths, behaviour_logprobs, loss_masks, policy_version)
    others = {"status": status}
    for name, values in columns.items():
        (token_columns if find_column(name).per == "token" else others)[name] = _given_column(
            name, values, lengths, token_columns
        )
    if advantages is not None:
        numbers = checks.numbers("advantages", advantages)
        others["advantage"] = COLUMNS["advantage"].array(numbers, count, "from_sequences")
    root, prompts = _prompts(prompt, count)
    return Merged(
        _merged_nodes(root, prompts, ids, token_columns, others),
        {name: values for name, values in token_columns.items() if COLUMNS[name].merge == "sum"},
    )


def _records(
    lengths: Array,
    behaviour_logprobs: Seq[npt.ArrayLike] | None,
    loss_masks: Seq[npt.ArrayLike] | None,
    policy_version: int | Seq[npt.ArrayLike],
) -> dict[str, Array]:
    """Return the columns that every response token has, [P] each, in the order of the responses."""
    as_logprobs = partial(checks.numbers, nan=True)
    logprob = _per_token("behaviour_logprobs", behaviour_logprobs, lengths, np.float32(np.nan), as_logprobs)
    mask = _per_token("loss_masks", loss_masks, lengths, np.True_, checks.flags)
    if policy_version is None:
        checks.refuse("policy_version is None; give the version of the policy that sampled the tokens")
    one = np.isscalar(policy_version) or getattr(policy_version, "ndim", 1) == 0
    per_response = None if one else cast("Seq[npt.ArrayLike]", policy_version)
    fallback = checks.integers("policy_version", policy_version if one else 0)
    return {
        "loss_mask": mask,
        "origin": np.where(mask, Origin.SAMPLED, Origin.OBSERVATION).astype(np.int8),
        "behaviour_logprob": logprob,
        "policy_version": _per_token("policy_version", per_response, lengths, fallback, checks.integers),
    }


def _given_column(name: str, values: Seq[npt.ArrayLike], lengths: Array, recorded: Collection[str]) -> Array:
    """Return a column of the caller's: a value a leaf, or one a response token."""
    declared = find_column(name)
    if name in recorded or name in ("status", "advantage") or declared.per == "node" or declared.axes:
        raise ValueError(f"from_sequences: the column '{name}' cannot be given in `columns`.")
    check_count(name, values, len(lengths))
    if declared.per == "leaf":
        return declared.array(cast("npt.ArrayLike", values), len(lengths), "from_sequences")
    entries = zip(values, lengths, strict=True)
    return np.concatenate([declared.array(v, n, f"from_sequences, response {i}") for i, (v, n) in enumerate(entries)])


def _merged_nodes(
    root: Array, prompts: Seq[Array], ids: Seq[Array], token_columns: dict[str, Array], others: dict[str, Array]
) -> Nodes:
    """Return the nodes of sequences that begin with ``root``; ``token_columns`` are those of their response tokens."""
    lengths, context = np.array([len(r) for r in ids]), np.array([len(p) for p in prompts]) - len(root)
    # each sequence after the common prompt: the rest of its own prompt, then its response
    total = lengths + context
    ends = np.cumsum(total)
    within = np.arange(total.sum()) - np.repeat(ends - total, total)
    of_prompt = within < np.repeat(context, total)

    def column(of_response: Array, of_prompts: npt.ArrayLike) -> Array:
        values = np.empty(len(within), of_response.dtype)
        values[of_prompt], values[~of_prompt] = of_prompts, of_response
        return values

    rest = np.concatenate([p[len(root) :] for p in prompts] + [np.zeros(0, np.int32)])
    ids_in_order = column(np.concatenate([*ids, np.zeros(0, np.int32)]), rest)
    full = {name: column(values, COLUMNS[name].fill) for name, values in token_columns.items()}
    equal = [full[name] for name in token_columns if COLUMNS[name].merge == "equal" and name != "origin"]
    nodes = prefix_tree(ids_in_order, equal, total, context)
    length = nodes.end - nodes.begin
    source = np.repeat(nodes.begin - (np.cumsum(length) - length), length) + np.arange(length.sum())
    length[0] = len(root)
    merged = {name: np.concatenate([COLUMNS[name].filled(len(root)), values[source]]) for name, values in full.items()}
    token_ids = np.concatenate([root, ids_in_order[source]])
    return Nodes(nodes.parent, length, token_ids, nodes.leaf_node, len(root) + context, merged | others)


def _prompts(prompt: Seq[int] | Seq[Seq[int]], count: int) -> tuple[Array, list[Array]]:
    """The longest prefix that all prompts share, and the prompt of every response."""
    several = checks.count("prompt", prompt) > 0 and np.ndim(cast("Any", prompt[0])) == 1
    if not several:
        root = checks.token_ids("prompt", prompt)
        if len(root) == 0:
            raise ValueError("A TokenTree needs a prompt of at least one token; `prompt` is empty.")
        return root, [root] * count
    check_count("prompt", prompt, count)
    prompts = [checks.token_ids(f"prompt[{i}]", p) for i, p in enumerate(cast("Seq[Seq[int]]", prompt))]
    root = prompts[0]
    for other in prompts:
        shortest = min(len(root), len(other))
        differ = np.flatnonzero(root[:shortest] != other[:shortest])
        root = root[: differ[0] if len(differ) else shortest]
    if len(root) == 0:
        raise ValueError(
            "The prompts share no first token, so they are no one tree; TokenTree.forest makes a tree of each kind."
        )
    return root, prompts


def check_count(name: str, values: Seq[Any] | None, count: int) -> None:
    """Raise ValueError unless ``values`` has one entry a response."""
    if values is not None and (entries := checks.count(name, values)) != count:
        raise ValueError(f"{name} has {entries} entries for {count} responses; give one a response.")


def _per_token(
    name: str,
    values: Seq[npt.ArrayLike] | None,
    lengths: Array,
    default: Any,  # numpy scalar of the column's dtype
    checked: Callable[[str, object], Array],
) -> Array:  # [sum(lengths)]
    """The values of every response's tokens, concatenated: given as one a response or one a token, checked."""
    dtype = default.dtype
    if values is None:
        return np.full(int(lengths.sum()), default, dtype)
    check_count(name, values, len(lengths))
    columns = []
    for i, (value, length) in enumerate(zip(values, lengths, strict=True)):
        column = checked(f"{name}[{i}]", value)
        if column.ndim == 0:
            column = np.full(length, column, dtype)
        if column.shape != (length,):
            raise ValueError(f"{name}[{i}] has shape {column.shape} for a response of {length} tokens.")
        columns.append(column)
    return np.concatenate(columns) if columns else np.zeros(0, dtype)


class PrefixTree(NamedTuple):
    """The trie of sequences. Node 0 is the empty root; children are numbered in the order in which they are reached."""

    parent: Array  # [K] int64, -1 for the root
    begin: Array  # [K] int64, where the node's tokens begin among the concatenated ones
    end: Array  # [K] int64, exclusive
    leaf_node: Array  # [S] int64, the node at which each sequence ends


def prefix_tree(
    ids: Array,  # [n] int32, the sequences concatenated
    equal: Seq[Array],  # columns [n] of at most 32 bits that must agree, bit for bit
    lengths: Array,  # [S] int64
    context: Array,  # [S] int64, tokens at the start of each sequence that are its prompt
) -> PrefixTree:
    """The tree of the sequences' common prefixes, in time linear in their tokens."""
    ends = np.cumsum(lengths, dtype=np.int64)
    # Short prompts first: a token that is context of one sequence and response of another takes the response's record.
    order = np.argsort(context, kind="stable")
    parent, begin, end, rank, leaf_node = _insert(
        ids, _bits(equal, len(ids)), ends - lengths, ends, context.astype(np.int64), order
    )
    by_rank = np.argsort(rank, kind="stable")
    number = np.empty_like(by_rank)
    number[by_rank] = np.arange(len(by_rank))
    above = parent[by_rank]
    return PrefixTree(
        np.where(above < 0, -1, number[np.maximum(above, 0)]), begin[by_rank], end[by_rank], number[leaf_node]
    )


def _bits(columns: Seq[Array], count: int) -> Array:  # [columns, n] int32
    """The columns as integers that are equal where the values are, bit for bit."""
    out = np.empty((len(columns), count), np.int32)
    for row, values in zip(out, columns, strict=True):
        row[:] = values.view(np.int32) if values.dtype == np.float32 else values
    return out


@numba.njit(cache=True)
def key_slot(keys: Array, node: int, token: int) -> Any:
    """The place of the key (node, token) in an open-addressing table whose size is a power of two; enters it if new."""
    key = (np.int64(node) << np.int64(32)) | (np.int64(token) & np.int64(0xFFFFFFFF))
    hashed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    at = np.int64(hashed >> np.uint64(20)) & (len(keys) - 1)
    while keys[at] != -1 and keys[at] != key:
        at = (at + 1) & (len(keys) - 1)
    keys[at] = key
    return at


@numba.njit(cache=True)
def _common(ids: Array, equal: Array, a: int, a_end: int, b: int, b_end: int, response: int) -> int:
    """The number of tokens from ``a`` and ``b`` on that merge; those of b from ``response`` on are its response."""
    n = 0
    while a + n < a_end and b + n < b_end and ids[a + n] == ids[b + n]:
        if b + n >= response:
            for values in equal:
                if values[a + n] != values[b + n]:
                    return n
        n += 1
    return n


@numba.njit(cache=True)
def _insert(
    ids: Array, equal: Array, begins: Array, ends: Array, context: Array, order: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Insert the sequences one by one: parent, begin, end, rank among siblings and the node at which each ends."""
    sequences = len(begins)
    most = 2 * sequences + 1
    parent, begin, end = np.full(most, -1, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64)
    rank, leaf_node = np.zeros(most, np.int64), np.zeros(sequences, np.int64)
    sibling = np.full(most, -1, np.int64)  # the next child of the same parent that begins with the same id
    size = 4
    while size < 4 * most:
        size *= 2
    keys, first_child = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    nodes = 1
    for s in order:
        node, at, stop = 0, begins[s], ends[s]
        response = at + context[s]
        while at < stop:
            slot = key_slot(keys, node, ids[at])
            best, shared = -1, 0
            child = first_child[slot]
            while child >= 0:
                n = _common(ids, equal, begin[child], end[child], at, stop, response)
                if n > shared:
                    best, shared = child, n
                child = sibling[child]
            new = nodes
            if best < 0:
                parent[new], begin[new], end[new], rank[new] = node, at, stop, new
                sibling[new], first_child[slot] = first_child[slot], new
                nodes += 1
                node, at = new, stop
            elif begin[best] + shared == end[best]:
                node, at = best, at + shared
            else:  # the branch lies inside a run: its upper part becomes a node in the run's place
                parent[new], begin[new], end[new], rank[new] = node, begin[best], begin[best] + shared, rank[best]
                sibling[new] = sibling[best]
                if first_child[slot] == best:
                    first_child[slot] = new
                else:
                    before = first_child[slot]
                    while sibling[before] != best:
                        before = sibling[before]
                    sibling[before] = new
                nodes += 1
                parent[best], sibling[best] = new, -1
                begin[best] += shared
                first_child[key_slot(keys, new, ids[begin[best]])] = best
                node, at = new, at + shared
        leaf_node[s] = node
    return parent[:nodes], begin[:nodes], end[:nodes], rank[:nodes], leaf_node
