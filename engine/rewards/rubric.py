"""A rubric as the reward: a chat model on a server is asked about each criterion of the problem by itself."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..settings import RewardConfig
from .interface import RewardItem, RewardResult
from .remote import Judge, filled

CRITERION = """Problem:
{problem}

Response:
{response}

Criterion:
{criterion}

How far does the response meet this criterion? Reason briefly, then end with "Score: " and a number from 0 (not at all)
to 1 (fully)."""


class Criterion(NamedTuple):
    """One criterion of a problem's rubric."""

    text: str
    weight: float
    veto: bool


@dataclass(frozen=True)
class CriterionItem(RewardItem):
    """A response to judge by one criterion."""

    criterion: str = ""


class Rubric(Judge):
    """Rubric rewards (Rubicon, arXiv 2508.12790; Dr. SCI, arXiv 2602.08321): a chat model scores a response by each
    criterion of the problem, from 0 to 1, and the reward is ``sum_k w_k s_k`` over the sum of the positive weights.

    With a criterion of ``veto`` that is not met the reward is 0, whatever the others are, or the sum if that is less.
    The named reward ``criteria_met`` is the share of criteria that are met. The criteria of a response are asked about
    at the same time; if one has no verdict, the response has none.

    The column holds a list of criteria, or JSON of one; a criterion is a table with ``criterion``, the text, and
    perhaps ``weight`` (1; negative for a flaw) and ``veto`` (false), or a text alone.

    Inferred: the question, the division by the sum of weights, what counts as met, and the form of the saturation.

    Args:
        column: of the problem's row.
        prompt: the question; ``{criterion}`` is replaced too, and has to be in it.
        met: least score at which a criterion is met.
        saturation: diminishing returns: a sum R above 0 becomes ``(1 - exp(-k R)) / (1 - exp(-k))``, k this number; 0:
            none.
        lowest, highest: range of the scores in the server's answers.
        judge: the further arguments of `Judge` and `RemoteRewards`; ``yes`` and ``no`` make a yes-or-no question.

    Raises:
        UserError: an argument is invalid, or as for `Judge`.
    """

    def __init__(
        self,
        config: RewardConfig,
        column: str = "rubric",
        prompt: str = CRITERION,
        met: float = 0.5,
        saturation: float = 0.0,
        lowest: float = 0.0,
        highest: float = 1.0,
        **judge: Any,
    ) -> None:
        what = f"reward.verifier = '{config.verifier}'"
        if "{criterion}" not in prompt:
            raise UserError(f"{what} needs a prompt with {{criterion}}, where the criterion is inserted.")
        if not (0 < met <= 1 and 0 <= saturation < math.inf):
            raise UserError(f"{what} needs met above 0 and up to 1, and saturation of at least 0.")
        self._column, self._met, self._saturation = column, met, saturation
        super().__init__(config, prompt, lowest=lowest, highest=highest, **judge)

    def check(self, entries: Sequence[dict[str, Any]]) -> list[str | None]:
        reasons: list[str | None] = []
        for entry in entries:
            try:
                criteria_of(entry, self._column)
                reasons.append(None)
            except ValueError as error:
                reasons.append(str(error))
        return reasons

    async def _one(self, item: RewardItem) -> RewardResult:
        try:
            criteria = criteria_of(item.entry, self._column)
        except ValueError as error:
            return RewardResult(None, f"ValueError: {error}")
        item_fields = {field.name: getattr(item, field.name) for field in fields(RewardItem)}
        criterion_items = [CriterionItem(**item_fields, criterion=criterion.text) for criterion in criteria]
        verdicts = await asyncio.gather(*map(super()._one, criterion_items))
        scores: list[float] = []
        for number, verdict in enumerate(verdicts, start=1):
            if verdict.value is None:
                timed_out = verdict.reason == "timeout"
                return RewardResult(None, "timeout" if timed_out else f"criterion {number}: {verdict.reason}")
            scores.append(verdict.value)
        met = sum(score >= self._met for score in scores) / len(scores)
        return RewardResult(self._combined(criteria, scores), None, {"criteria_met": met})

    def _combined(self, criteria: Sequence[Criterion], scores: Sequence[float]) -> float:
        pairs = list(zip(criteria, scores, strict=True))
        total = sum(c.weight * score for c, score in pairs) / sum(max(c.weight, 0.0) for c in criteria)
        if self._saturation and total > 0:
            total = math.expm1(-self._saturation * total) / math.expm1(-self._saturation)
        vetoed = any(c.veto and score < self._met for c, score in pairs)
        return min(total, 0.0) if vetoed else total

    def _question(self, item: RewardItem) -> str:
        return filled(self._prompt, item, criterion=item.criterion if isinstance(item, CriterionItem) else "")


def criteria_of(entry: Mapping[str, Any], column: str) -> list[Criterion]:
    """Return the criteria in a column of a problem's row.

    Raises:
        ValueError: the column is missing, or is no list of criteria with a positive weight among theirs.
    """
    cell = entry.get(column)
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError as error:
            raise ValueError(f"the column '{column}' is a text that is no JSON: {error}") from None
    cell = cell.tolist() if isinstance(cell, np.ndarray) else cell
    if not isinstance(cell, list | tuple) or not cell:
        raise ValueError(f"the column '{column}' has no list of criteria")
    criteria = [_criterion(one, number) for number, one in enumerate(cell, start=1)]
    if not any(criterion.weight > 0 for criterion in criteria):
        raise ValueError("no criterion has a weight above 0")
    return criteria


def _criterion(entry: Any, number: int) -> Criterion:
    table = {"criterion": entry} if isinstance(entry, str) else entry
    if not isinstance(table, Mapping):
        raise ValueError(f"criterion {number} is neither a table nor a text")
    if unknown := sorted(map(str, set(table) - {"criterion", "weight", "veto"})):
        raise ValueError(f"criterion {number} has '{unknown[0]}'; it may have criterion, weight and veto")
    text, weight, veto = table.get("criterion"), table.get("weight"), table.get("veto")
    weight, veto = 1.0 if weight is None else weight, False if veto is None else veto  # parquet fills up with None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"criterion {number} has no text in 'criterion'")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"criterion {number} has a weight that is no number")
    if not isinstance(veto, bool):
        raise ValueError(f"criterion {number} has a veto that is neither true nor false")
    return Criterion(text.strip(), float(weight), veto)
