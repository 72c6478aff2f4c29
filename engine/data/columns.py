"""Columns: all values that a tree carries in addition to its structure, each declared once.

A tree, its builders and splitters, the packed batch, the parquet files, `PolicyFields` and the tree explorer all derive
from these declarations, so a new value is one line here, the code that fills it and the code that reads it. A tree
holds the columns that were set; any other reads as its ``fill``.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import checks

Array = npt.NDArray[Any]

Per = Literal["token", "node", "leaf", "path"]


@dataclass(frozen=True)
class Column:
    """One declared value.

    A ``path`` column has a value for every response token of every leaf, leaf after leaf, so a shared token may have
    another value for each of its leaves. The others have one a token, node or leaf of the tree.
    """

    name: str
    dtype: npt.DTypeLike
    per: Per
    meaning: str
    fill: float = 0
    merge: Literal["equal", "first", "sum"] = "equal"
    """Rule for a token that two sequences share: require equal values, keep the first value, or add them."""
    to_device: bool = False
    """Training reads it, so `TreeBatch.columns` holds it."""
    axes: int = 0
    """Further axes of each value, of any size."""

    def __post_init__(self) -> None:
        kind = np.dtype(self.dtype)
        if self.merge == "equal" and self.per == "token" and (kind.itemsize > 4 or kind == np.float16):
            raise ValueError(
                f"The column '{self.name}' must be of at most 32 bits, or float32, to be compared: {kind}."
            )

    def array(self, values: npt.ArrayLike, length: int, what: str) -> Array:  # [length, ...]
        """``values`` (one for all, or ``length`` of them) as this column's type.

        Raises:
            ValueError: another number of values, or a value the type does not hold; infinity never is one, and NaN only
                of tokens, or where it is the fill.
        """
        raw = checks.array_of(f"{what}: the column '{self.name}'", values)
        if raw.ndim == self.axes:
            raw = np.broadcast_to(raw, (length, *raw.shape))
        if raw.ndim != 1 + self.axes or len(raw) != length:
            raise ValueError(f"{what}: the column '{self.name}' needs {length} values, got shape {raw.shape}.")
        kind = np.dtype(self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            out = raw.astype(kind)
        unknown = self.per == "token" or np.isnan(self.fill)  # NaN says so
        exact = out == raw if kind.kind != "f" else np.isfinite(out) | (np.isnan(raw) & unknown)
        if not exact.all():
            worst = raw[~exact][0]
            raise ValueError(f"{what}: the column '{self.name}' is {kind}, which does not hold {worst!r}.")
        return out

    def filled(self, length: int, like: Array | None = None) -> Array:  # [length, ...]
        """Return ``length`` times the fill, with the further axes of the values ``like``."""
        axes = (0,) * self.axes if like is None else like.shape[1:]
        return np.full((length, *axes), self.fill, self.dtype)

    def joined(self, parts: Sequence[Array | None], lengths: Sequence[int]) -> Array:  # [sum(lengths), ...]
        """Return ``parts`` one after the other; one that is None counts as ``length`` times the fill.

        Raises:
            ValueError: the further axes of the parts differ in size.
        """
        present = [part for part in parts if part is not None]
        if len({part.shape[1:] for part in present}) > 1:
            shapes = " and ".join(sorted({str(list(part.shape[1:])) for part in present}))
            raise ValueError(
                f"Values of the column '{self.name}' have the shapes {shapes}; they are of several models."
            )
        like = present[0] if present else None
        return np.concatenate(
            [self.filled(n, like) if part is None else part for part, n in zip(parts, lengths, strict=True)]
        )


COLUMNS: dict[str, Column] = {}
"""The declared columns by name."""


def declare(column: Column) -> Column:
    """Register ``column``.

    Raises:
        ValueError: another column has its name.
    """
    declared = COLUMNS.setdefault(column.name, column)
    fills_are_equal = declared.fill == column.fill or (np.isnan(declared.fill) and np.isnan(column.fill))
    if not fills_are_equal or replace(declared, fill=0) != replace(column, fill=0):
        raise ValueError(f"The column '{column.name}' is declared already, as {declared}.")
    return column


def find_column(name: str) -> Column:
    """The column declared as ``name``.

    Raises:
        ValueError: there is none.
    """
    if name in COLUMNS:
        return COLUMNS[name]
    near = difflib.get_close_matches(name, COLUMNS, 1)
    hint = f"did you mean '{near[0]}'" if near else f"declared are {', '.join(COLUMNS)}"
    raise ValueError(f"There is no column '{name}'; {hint}, or declare it with rolltree.engine.data.columns.declare.")


TOP_IDS, TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"
"""The columns that a teacher on a server writes: tokens that could stand at a token's place, and their log-probs."""

for _column in (
    Column("loss_mask", np.bool_, "token", "the policy is trained on it"),
    Column("origin", np.int8, "token", "where it came from, an Origin"),
    Column(
        "behaviour_logprob",
        np.float32,
        "token",
        "log-probability under the distribution it was sampled from",
        fill=np.nan,
        to_device=True,
    ),
    Column(
        "proximal_logprob",
        np.float32,
        "token",
        "log-probability under the policy at the start of the update",
        fill=np.nan,
        merge="first",
        to_device=True,
    ),
    Column("pass_rate", np.float32, "token", "mean reward of its prompt's responses", to_device=True, merge="first"),
    Column("ref_logprob", np.float32, "token", "of the reference", fill=np.nan, merge="first", to_device=True),
    Column("teacher_logprob", np.float32, "token", "of the teacher", fill=np.nan, merge="first", to_device=True),
    Column(
        TOP_IDS,
        np.int32,
        "token",
        "likeliest tokens [K] of the teacher, -1: none",
        fill=-1,
        merge="first",
        to_device=True,
        axes=1,
    ),
    Column(TOP_LOGPROBS, np.float32, "token", "log-probs [K] of these", merge="first", to_device=True, axes=1),
    Column("policy_version", np.int32, "token", "optimiser steps behind the policy that sampled it"),
    Column("entropy", np.float32, "token", "of the distribution it was sampled from", fill=np.nan, merge="first"),
    Column("model", np.int8, "token", "number of the policy that sampled it; 0: that of [model]"),
    Column("role", np.int8, "token", "place of the role that it was sampled in among `meta['roles']`"),
    Column("call", np.int32, "token", "number from 1 of the agent's call that sampled or read it", merge="first"),
    Column("demonstration_weight", np.float32, "token", "weight that a demonstration's file gives it", fill=1),
    Column("temperature", np.float32, "token", "temperature it was sampled at", fill=np.nan, to_device=True),
    Column(
        "routes", np.int16, "token", "experts [layers, k] that computed it when sampling, -1: unknown", fill=-1, axes=2
    ),
    Column("token_reward", np.float32, "path", "reward of what ends with it, added to its response's", fill=np.nan),
    Column(
        "value", np.float32, "token", "return the critic expects before it", fill=np.nan, merge="first", to_device=True
    ),
    Column("value_target", np.float32, "path", "return the critic is to expect before it", to_device=True),
    Column("group", np.int64, "leaf", "number of the group that it was sampled in"),
    Column("status", np.int8, "leaf", "how the response ended, a LeafStatus"),
    Column(
        "other_prompt",
        np.int16,
        "leaf",
        "the group's attempt whose prompt sampled it, where it is trained under another one; 0: it is not",
    ),
    Column("episode", np.int32, "leaf", "number in its group of the agent's episode that it is part of", fill=-1),
    Column("answer", np.bool_, "leaf", "it ends with the last answer of its episode", fill=1),
    Column("trained", np.bool_, "leaf", "an update counts it; credit reads it in any case", fill=1),
    Column("advantage", np.float32, "leaf", "credit of a whole response", to_device=True),
    Column("node_advantage", np.float32, "node", "credit of a node's tokens, instead of their leaves'", to_device=True),
    Column("token_advantage", np.float32, "token", "credit of a token, instead of its leaves'", to_device=True),
    Column("path_advantage", np.float32, "path", "credit of a token as part of each response", to_device=True),
):
    declare(_column)
