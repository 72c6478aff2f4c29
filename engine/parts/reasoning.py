"""The text of a verdict after the reasoning of the model that wrote it."""

from __future__ import annotations

import re

_REASONING_MARK = re.compile(
    r"(?P<begin><)(?P<end>/?)(?P<name>think|thinking|thought|reasoning)>|(?P<begin2>\[)(?P<end2>/?)THINK\]"
    r"|(?P<begin3>◁)(?P<end3>/?)think▷",
    re.IGNORECASE,
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)[^<]*(?:<\|constrain\|>[^<]*)?(?:<\|message\|>|$)")


def after_reasoning(text: str) -> str:
    """Return the text after a model's reasoning: all of it without reasoning, "" if nothing follows or it is open.

    A reasoning's end without a beginning has its beginning in the prompt. Of gpt-oss's channels the last one counts,
    and holds the answer if its name is ``final``.
    """
    if channels := list(_CHANNEL.finditer(text)):
        last = channels[-1]
        found = re.split(r"<\|[a-z_]+\|>", text[last.end() :], maxsplit=1)[0] if last[1] == "final" else ""
        return found if found.strip() else ""
    opened, start = "", 0
    for mark in _REASONING_MARK.finditer(text):
        kind = mark["begin"] or mark["begin2"] or mark["begin3"]
        kind += (mark["name"] or "").casefold()
        closes = bool(mark["end"] or mark["end2"] or mark["end3"])
        if closes and opened in ("", kind):
            opened, start = "", mark.end()
        elif not closes:
            opened = opened or kind
    return "" if opened or not text[start:].strip() else text[start:]
