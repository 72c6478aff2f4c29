"""The text of one choice that a stream may send: all that further tokens, a stop text or a call cannot take back."""

from __future__ import annotations

from collections.abc import Sequence

from ..programs.chat.tool_calls import before_calls
from ..programs.chat.tool_formats import ToolFormat
from .detokenize import Detokenizer


class Streamed:
    """The part of one choice that a stream has sent.

    Args:
        detokenizer: of this choice alone.
        stop: texts that end the answer and are cut from it.
        calls: the form of the calls that end what may be sent before the answer is complete; None if none are read.

    Attributes:
        sent: the text.
        tokens: number of tokens whose log-probs were sent.
        offset: characters of these tokens, each decoded on its own.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], calls: ToolFormat | None) -> None:
        self._detokenizer, self._stop, self._calls = detokenizer, stop, calls
        self._held = max((len(text) for text in stop), default=1) - 1  # may be the beginning of a stop text
        self._sent: list[str] = []
        self._seen = 0
        self._unsent = ""
        self._ended = False
        self.tokens = 0
        self.offset = 0

    @property
    def sent(self) -> str:
        return "".join(self._sent)

    @property
    def seen(self) -> int:
        """Number of tokens that were read."""
        return self._seen

    @property
    def begun(self) -> bool:
        return bool(self._sent)

    @property
    def first(self) -> bool:
        """True if the text that `add` returned last is the first."""
        return len(self._sent) == 1

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text to send after the next tokens, "" for none."""
        self._seen += len(tokens)
        if self._ended:
            return ""
        text = self._unsent + self._detokenizer.add(tokens)
        new = self._certain(text)
        self._unsent = text[len(new) :]
        if new:
            self._sent.append(new)
        return new

    def _certain(self, text: str) -> str:
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        self._ended = bool(ends)
        text = text[: min(ends)] if ends else text[: max(len(text) - self._held, 0)]
        if self._calls is None:
            return text
        self._ended |= any(mark in text for mark in self._calls.marks)
        return before_calls(text, self._calls)
