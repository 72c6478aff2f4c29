"""Segments and sequences: the runs of tokens that trees are built from, and the samples that `flatten` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy.typing as npt

from . import checks
from .columns import Array, find_column


class Origin(IntEnum):
    """The origin of a token."""

    PROMPT = 0
    SAMPLED = 1
    OBSERVATION = 2  # a tool's answer
    INJECTED = 3  # a hint or a teacher's token


class LeafStatus(IntEnum):
    """The way a response ended."""

    STOP = 0
    LENGTH = 1
    ABORTED = 2
    FAILED = 3


class Text(NamedTuple):
    """A run of tokens that a policy sampled."""

    prompt: Array  # [P] int32
    before: Array  # [B] int32, the response's tokens before it
    tokens: Array  # [T] int32


@dataclass(frozen=True)
class Segment:
    """A run of tokens with values of token columns; build one with :meth:`make`."""

    token_ids: Array  # [n] int32
    columns: Mapping[str, Array]  # name -> [n]

    def __len__(self) -> int:
        return len(self.token_ids)

    @staticmethod
    def make(token_ids: npt.ArrayLike, **columns: npt.ArrayLike) -> Segment:
        """A segment; the value of a column is one number for every token or ``[n]``.

        Raises:
            ValueError: a column is not declared or not of tokens, or has another number of values.
        """
        ids = checks.token_ids("token_ids", token_ids)
        arrays = {}
        for name, values in columns.items():
            column = find_column(name)
            if column.per != "token":
                raise ValueError(f"A segment holds columns of tokens, and '{name}' has one value a {column.per}.")
            arrays[name] = column.array(values, len(ids), "Segment.make")
        return Segment(ids, arrays)

    @staticmethod
    def prompt(token_ids: npt.ArrayLike) -> Segment:
        """Prompt tokens: not trained on, no behaviour log-probability."""
        return Segment.make(token_ids, origin=Origin.PROMPT)

    @staticmethod
    def sampled(token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, policy_version: npt.ArrayLike = 0) -> Segment:
        """Tokens the policy sampled, with their log-probability under the sampling distribution."""
        return Segment.make(
            token_ids,
            origin=Origin.SAMPLED,
            loss_mask=True,
            behaviour_logprob=logprobs,
            policy_version=policy_version,
        )


@dataclass(frozen=True)
class Sequence:
    """One root-to-leaf path, the sample of a trainer without trees."""

    prompt: list[int]
    response: list[int]
    behaviour_logprob: Array  # [len(response)] float32
    loss_mask: Array  # [len(response)] bool
    policy_version: Array  # [len(response)] int32
    advantage: float
    status: LeafStatus
