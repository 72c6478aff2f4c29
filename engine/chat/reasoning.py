"""The marks between which models write their reasoning, and the text after it.

Imports nothing of rolltree: the verifiers' processes (`engine/rewards/worker.py`) load this file alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)
"""Pairs of marks: Qwen's, DeepSeek's and others', Seed's, Kimi's, Magistral's, Cohere's, Gemma 4's."""
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
"""Marks of the messages of gpt-oss; its ``<|call|>`` and ``<|return|>`` end a turn."""

_OPENING = re.compile("^[ \t]*(?:" + "|".join(re.escape(begin) for begin, _ in TAGS) + ")", re.I | re.MULTILINE)
_CLOSING = re.compile("|".join(re.escape(end) for _, end in TAGS), re.I)
HEADER = re.compile(
    r"(?:<\|start\|>(?P<role>[^<]*))?(?P<to>\s*to=[^<]*)?(?:<\|channel\|>(?P<channel>[^<]*))?"
    r"(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_ENDED = re.compile(r"<\|(?:end|call|return)\|>")
_BODY_END = re.compile(r"<\|(?:end|call|return|start|channel)\|>")
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


@dataclass(frozen=True)
class HarmonyMessage:
    """A message in the form of gpt-oss; ``begin`` is where its header begins, ``body`` and ``end`` enclose what it
    says."""

    begin: int
    body: int
    end: int
    channel: str
    recipient: str | None
    """The function that it calls; None where it is no call."""


def harmony_messages(text: str) -> Iterator[HarmonyMessage]:
    """Yield the messages of a text in the form of gpt-oss, in their order; none where it has no header."""
    at = 0
    while (head := _header(text, at)) is not None:
        ended = _BODY_END.search(text, head.end())
        at = len(text) if ended is None else ended.start()
        whole = " ".join(filter(None, head.group("role", "to", "channel")))
        called = RECIPIENT.search(whole)
        recipient = None if called is None or called[1] == "assistant" else called[1]
        channel = (head["channel"] or "").split(maxsplit=1)
        yield HarmonyMessage(head.start(), head.end(), at, channel[0] if channel else "", recipient)


def _header(text: str, at: int) -> re.Match[str] | None:
    """Return the next header; what is no part of it, such as the end of a message, is passed over."""
    message = text.find("<|message|>", at)
    if message < 0:
        return None
    ended = [at, *(match.end() for match in _ENDED.finditer(text, at, message))]
    return HEADER.search(text, ended[-1])


def without_reasoning(text: str) -> str:
    """Return the text of a response after its reasoning.

    Reasoning ends with the last closing mark; one that begins a line after it and is not closed goes on to the end.
    Of messages in the form of gpt-oss the last one counts that is neither reasoning nor a call. The text is empty where
    nothing follows the reasoning, and the whole text where nothing marks any.
    """
    messages = list(harmony_messages(text))
    if any(message.channel for message in messages):
        said = [m for m in messages if m.channel != "analysis" and m.recipient is None]
        return text[said[-1].body : said[-1].end] if said else ""
    closings = list(_CLOSING.finditer(text))
    text = text[closings[-1].end() :] if closings else text
    opening = _OPENING.search(text)
    return text if opening is None else text[: opening.start()]
