"""S-GRPO (arXiv 2505.07686): one response and early exits from it, a serial group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..data.segment import LeafStatus
from .program import Action, Given, GroupState, Rewind, RolloutProgram, SegmentReport


class SGRPO(RolloutProgram):
    """S-GRPO (arXiv 2505.07686), a serial group: one whole response and ``n - 1`` early exits from its thought.

    At random positions of the thought, without repetition, ``exit_text`` is inserted (it is not trained on), and an
    answer is sampled after it.

    Args:
        exit_text: text that ends the thought; the words of the default are inferred.
        think_end: exits come before this text if the response contains it.

    Raises:
        ValueError: exit_text is empty.
    """

    rewinds = True

    def __init__(self, exit_text: str = "\nTime is up. Answer now.\n</think>\n\n", think_end: str = "</think>") -> None:
        if not exit_text:
            raise ValueError("s_grpo needs an exit_text that ends the thought.")
        self.exit_text, self.think_end = exit_text, think_end

    def start(self, group: GroupState) -> int:
        if self.tokenizer is None:
            raise ValueError("s_grpo puts a text into responses, so the engine needs a tokenizer.")
        self._exit = Given(self.tokenizer.encode(self.exit_text, add_special_tokens=False))
        return 1

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if len(segment.branch) > 1 or segment.status is LeafStatus.FAILED:
                continue
            rng = np.random.default_rng(group.seed & 0xFFFFFFFFFFFFFFFF)
            points = np.arange(1, self._thought(segment.response_ids.tolist()))
            for cut in np.sort(rng.permutation(points)[: group.width - 1]).tolist():
                yield Rewind(segment.branch, cut, 1, self._exit)

    def _thought(self, response: list[int]) -> int:
        """Return the number of response tokens before the thought ends."""
        assert self.tokenizer is not None
        if self.think_end not in self.tokenizer.decode(response):
            return len(response)
        least, most = 0, len(response)
        while least < most:  # search for the shortest prefix that holds the text
            middle = (least + most) // 2
            if self.think_end in self.tokenizer.decode(response[:middle]):
                most = middle
            else:
                least = middle + 1
        return max(least - 1, 1)
