"""The reward of a role that judges: whether its verdict agrees with another part of the reward."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..chat.reasoning import without_reasoning
from ..errors import UserError
from .interface import RewardItem, RewardResult, Rewards


class Verdict(Rewards):
    """RL Tango (arXiv 2505.15034): 1 where the last verdict of the text agrees with the part ``of``, else 0.

    The verdict is in the text after the reasoning. A text without one, or that was cut off, has the reward 0 and counts
    as unparsed.

    Args:
        of: name of the part of `reward.parts` that judges what the verdict is about.
        pattern: regular expression of a verdict; its first group is what the verdict says. The form is inferred.
        says_right: what it says, in any case of letters, where the part ``of`` is to be at least ``right``.
        right: least value of the part ``of`` that counts as right.

    Raises:
        UserError: ``pattern`` is no regular expression with a group.
    """

    def __init__(
        self,
        of: str,
        pattern: str = r"(?i)verdict:\s*(correct|incorrect)",
        says_right: str = "correct",
        right: float = 1.0,
    ) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise UserError(f"The pattern of the verifier 'verdict' is no regular expression: {error}.") from None
        if not self._pattern.groups:
            raise UserError("The pattern of the verifier 'verdict' needs a group for what the verdict says.")
        self.reads_part, self._says_right, self._right = of, says_right.casefold(), right

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [self._judge(item) for item in items]

    def _judge(self, item: RewardItem) -> RewardResult:
        if item.judged is None:
            return RewardResult(None, f"the part '{self.reads_part}' has no value to compare the verdict with")
        if not item.ended:
            return RewardResult(0.0, None, unparsed="cut_off")
        said = self._pattern.findall(without_reasoning(item.response_text))
        if not said:
            return RewardResult(0.0, None, unparsed="no_verdict")
        last = said[-1][0] if isinstance(said[-1], tuple) else said[-1]
        agrees = (last.casefold() == self._says_right) == (item.judged >= self._right)
        return RewardResult(float(agrees), None)
