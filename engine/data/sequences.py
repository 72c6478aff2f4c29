"""Sequences into the nodes of a tree: what `TokenTree.from_sequences` is given, checked, and its prefixes merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from . import checks
from .columns import COLUMNS, Array, find_column
from .prefix import prefix_tree
from .segment import LeafStatus, Origin


class Nodes(NamedTuple):
    """Nodes in an order that puts parents first, with their tokens end to end."""

    parent: Array  # [K]
    length: Array  # [K]
    token_id: Array  # [T]
    leaf_node: Array  # [L]
    leaf_prompt: Array  # [L]
    columns: dict[str, Array]


class Merged(NamedTuple):
    nodes: Nodes
    summed: dict[str, Array]  # [P] of every response token: columns whose values add up where tokens are one


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
    """See `TokenTree.from_sequences`.

    Raises:
        ValueError: as there.
    """
    count = checks.count("responses", responses)
    if count == 0:
        raise ValueError("from_sequences needs at least one response; give token ids of each in `responses`.")
    check_count("advantages", advantages, count)
    check_count("statuses", statuses, count)
    status = checks.codes("statuses", [LeafStatus.STOP] * count if statuses is None else statuses, LeafStatus)
    ids = [checks.token_ids(f"responses[{i}]", response) for i, response in enumerate(responses)]
    lengths = np.array([len(r) for r in ids])
    as_logprobs = partial(checks.numbers, nan=True)
    logprob = _per_token("behaviour_logprobs", behaviour_logprobs, lengths, np.float32(np.nan), as_logprobs)
    mask = _per_token("loss_masks", loss_masks, lengths, np.True_, checks.flags)
    one = np.ndim(cast("npt.ArrayLike", policy_version)) == 0
    per_response = None if one else cast("Seq[npt.ArrayLike]", policy_version)
    fallback = checks.integers("policy_version", policy_version if one else 0)
    version = _per_token("policy_version", per_response, lengths, fallback, checks.integers)
    response = np.concatenate([*ids, np.zeros(0, np.int32)])

    root, prompts = _prompts(prompt, count)
    context = np.array([len(p) for p in prompts]) - len(root)
    # sequences from the common prompt on: the rest of their prompt, then their response
    total = lengths + context
    ends = np.cumsum(total)
    within = np.arange(total.sum()) - np.repeat(ends - total, total)
    of_prompt = within < np.repeat(context, total)

    def column(of_response: Array, of_prompts: npt.ArrayLike) -> Array:
        values = np.empty(len(within), of_response.dtype)
        values[of_prompt], values[~of_prompt] = of_prompts, of_response
        return values

    rest = np.concatenate([p[len(root) :] for p in prompts] + [np.zeros(0, np.int32)])
    given = {
        "loss_mask": mask,
        "origin": np.where(mask, Origin.SAMPLED, Origin.OBSERVATION).astype(np.int8),
        "behaviour_logprob": logprob,
        "policy_version": version,
    }
    others: dict[str, Array] = {}
    for name, values in columns.items():
        declared = find_column(name)
        if name in given or name in ("status", "advantage") or declared.per == "node":
            raise ValueError(f"from_sequences: the column '{name}' cannot be given in `columns`.")
        check_count(name, values, count)
        if declared.per == "leaf":
            others[name] = declared.array(cast("npt.ArrayLike", values), count, "from_sequences")
            continue
        entries = [
            declared.array(v, n, f"from_sequences, response {i}")
            for i, (v, n) in enumerate(zip(values, lengths, strict=True))
        ]
        (others if declared.per == "path" else given)[name] = np.concatenate(entries)
    ids_in_order = column(response, rest)
    full = {name: column(values, COLUMNS[name].fill) for name, values in given.items()}
    equal = [full[name] for name in given if COLUMNS[name].merge == "equal" and name != "origin"]
    nodes = prefix_tree(ids_in_order, equal, total, context)
    length = nodes.end - nodes.begin
    source = np.repeat(nodes.begin - (np.cumsum(length) - length), length) + np.arange(length.sum())
    length[0] = len(root)
    made = {name: np.concatenate([COLUMNS[name].filled(len(root)), values[source]]) for name, values in full.items()}
    nodes_columns = made | others | {"status": status}
    if advantages is not None:
        nodes_columns["advantage"] = COLUMNS["advantage"].array(
            checks.numbers("advantages", advantages), count, "from_sequences"
        )
    return Merged(
        Nodes(
            nodes.parent,
            length,
            np.concatenate([root, ids_in_order[source]]),
            nodes.leaf_node,
            len(root) + context,
            nodes_columns,
        ),
        {name: values for name, values in given.items() if COLUMNS[name].merge == "sum"},
    )


def _prompts(prompt: Seq[int] | Seq[Seq[int]], count: int) -> tuple[Array, list[Array]]:
    """The longest common prompt, and every response's own."""
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
    if values is not None and (entries := checks.count(name, values)) != count:
        raise ValueError(f"{name} has {entries} entries for {count} responses; give one a response.")


def _per_token(
    name: str,
    values: Seq[npt.ArrayLike] | None,
    lengths: Array,
    default: Any,  # a numpy scalar of the dtype of the column
    checked: Callable[[str, object], Array],
) -> Array:  # [sum(lengths)]
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
