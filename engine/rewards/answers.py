r"""Finds the answer that a response marks as its own.

Candidates come in a fixed order, and a verifier takes the first that it can read:

1. ``<answer>...</answer>``, ``\boxed{...}`` (``\fbox``; braces balanced), a line ``Answer: ...``, the line below a
   heading ``Answer``, and ``#### ...`` on the last line. The last in the text comes first.
2. A sentence "the answer is ...", and ``#### ...`` before a number or formula on any other line; the last comes first.

A response with reasoning (``<think>...</think>``, see `chat/reasoning.py`) answers with the text after it; one whose
reasoning is not closed, or that nothing follows, has no answer. An empty mark does not count. ``Answer`` is recognised
in the languages of `WORDS` and `SAID`, in any case, with or without Markdown's emphasis. Adjacent boxes
(``\boxed{2} or \boxed{3}``) are one answer with several parts.

Imports nothing of rolltree, like `verifiers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from .loading import load_file

WORDS = "|".join(
    (
        r"answers?", "antwort", r"r[ée]ponse", "respuesta", "resposta", "risposta", "ответ", "答案", "答え", "答",
        "解答", "回答", "정답", "답", "jawaban", "cevap", "đáp án", "jibu", "odpowied[źz]", "antwoord", "उत्तर",
        "الجواب", "الإجابة", "উত্তর", "คำตอบ", "సమాధానం", "відповідь", "svar", "vastaus", "απάντηση", "răspuns", "válasz",
        "(?:最终|最終|最后|最後の?|正确|正確)(?:的)?(?:答案|答え|回答)",
    )
)  # fmt: skip
"""The word "answer" before a colon, in many languages."""
SAID = "|".join(
    (
        r"(?<!\w)answers?(?!\w)[^.:=\n]{0,60}?(?<!\w)(?:is|are|equals|will be|would be|must be|comes out to)(?!\w)",
        r"(?<!\w)(?:correct|right|best)\s+(?:option|choice|statement)\s+is(?!\w)",
        r"(?<!\w)antwort\s+(?:ist|lautet|beträgt)(?!\w)", r"(?<!\w)antwoord\s+is(?!\w)",
        r"(?<!\w)odpowied[źz]\s+to(?!\w)", r"(?<!\w)r[ée]ponse(?:\s+finale)?\s+est(?!\w)",
        r"(?<!\w)respuesta(?:\s+final)?\s+es(?!\w)", r"(?<!\w)resposta(?:\s+final)?\s+é(?!\w)",
        r"(?<!\w)risposta(?:\s+finale)?\s+è(?!\w)", r"ответ\s*[—–-]", "答案[是为為]", "答えは", "정답은", "답은",
        r"jawabannya adalah", r"jibu ni", r"คำตอบคือ", r"উত্তর হল", r"đáp án là", r"उत्तर है",
    )
)  # fmt: skip
"""The words before an answer in a sentence, in many languages."""

_reasoning = load_file("rolltree_reasoning", Path(__file__).parents[1] / "chat" / "reasoning.py")
without_reasoning: Callable[[str], str] = _reasoning.without_reasoning
"""Returns the text of a response after its reasoning."""
_TAGGED = re.compile(r"<((?:final[_ -]?)?answer)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_DASH = r"^[ \t#*_>-]*(?:final[ \t]+)?answer[*_]*[ \t]+(?:[—–→]|->?|=>?)(?=\s)"
_LINE = re.compile(rf"(?<![^\W_])(?<!<)(?:{WORDS})[*_\s]{{0,4}}[:：]|{_DASH}", re.IGNORECASE | re.MULTILINE)
_HEADING = re.compile(
    rf"^[ \t]*(?:#{{1,6}}[ \t]*|[*_]{{2}})[*_]*(?:the[ \t]+)?(?:final[ \t]+)?(?:{WORDS})[*_ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_BOX = re.compile(r"\\(?:f?boxed|fbox|framebox)(?![a-zA-Z])[ \t]*")
_HASHES = re.compile(r"(?<!#)####(?!#)")
_SENTENCE = re.compile(rf"(?:{SAID})[ \t]*[:：]?", re.IGNORECASE)
_VALUE = re.compile(r"[*_]*(?!\d+[.):]\s)(?:[-+−]?[$€£¥]?\s?[-+−]?\.?\d|\$|\\[(\[a-zA-Z]|[-+−]?[√π∞(\[{])")
_TOGETHER = re.compile(r"\s*\$?[\s,;]*(?:(?:and|or|und|oder|et|ou|y|o|和|或)\b|[,;、])?[\s,;]*\$?\s*", re.IGNORECASE)
_ABBREVIATED = r"(?<!\b[MD]r)(?<!\b[MS]t)(?<!\bMrs)(?<!\bM[sx])(?<!\bNo)(?<!\bProf)"
"""Looks back for no abbreviation whose full stop ends no sentence."""
_EMPHASIS = re.compile(r"(?<![\w*)}\]\\])(?<!\d\s)(\*{1,3}|__|`)(?=[^\s*])([^*\n]*?[^\s*])\1(?![\w*])")
_PICTURES = re.compile("[\u2600-\u27bf\ufe0f\u200b-\u200d\u2060\ufeff\U0001f000-\U0001faff]")
"""Emoji, check marks and characters without width."""
_OPEN = ("$$", "\\["), ("$$", "\\]")


def extract_answer(text: str) -> str | None:
    """Return the answer that a response marks: the first candidate, trimmed; None if nothing is marked."""
    return next(candidates(text), None)


def candidates(text: str) -> Iterator[str]:
    """Yield possible answers in ``text``, the most reliable first."""
    text = without_reasoning(text).replace("\r\n", "\n").replace("\r", "\n")
    strong = [(match.start(), match[2]) for match in _TAGGED.finditer(text)]
    strong += [(match.start(), _line_after(text, match.end())) for match in _LINE.finditer(text)]
    strong += [(match.start(), _line_after(text, match.end())) for match in _HEADING.finditer(text)]
    strong += _boxes(text)
    weak = [(match.start(), _sentence_after(text, match.end())) for match in _SENTENCE.finditer(text)]
    for match in _HASHES.finditer(text):
        line = _line_after(text, match.end())
        if not text[match.end() :].strip().partition("\n")[2].strip():
            strong.append((match.start(), line))
        elif _VALUE.match(text[match.end() :].lstrip(" \t")):
            weak.append((match.start(), line))
    for found in (strong, weak):
        for _, answer in sorted(found, key=lambda mark: mark[0], reverse=True):
            if (answer := answer.strip()).strip("*_ "):
                yield answer


def last_line(text: str) -> str:
    """Return the last line that is not empty; a formula set off by ``\\[`` or ``$$`` counts as one line.

    Fences of Markdown are no lines.
    """
    text = re.sub(r"^[ \t]*(?:```|~~~)\w*[ \t]*$", "", without_reasoning(text), flags=re.MULTILINE).rstrip()
    for opening, closing in (("\\[", "\\]"), ("$$", "$$")):
        if text.rstrip(".").endswith(closing) and (start := text.rfind(opening, 0, text.rfind(closing))) >= 0:
            return text[start:]
    return text.rpartition("\n")[2]


def tidy(answer: str) -> str:
    r"""Return ``answer`` without emphasis and pictures, and ``$``, quotation marks and a full stop around it."""
    previous, answer = None, _EMPHASIS.sub(r"\2", _PICTURES.sub("", answer))
    while previous != answer:
        previous = answer
        answer = answer.strip().strip("*_`").strip()
        answer = re.sub(r"(?<!\\right)(?<!\\left)(?<!\\)[.,;:。，；]+$|\\\\$|(?<=\d)[.,][-–—]+$", "", answer)
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ('"', '"'), ("“", "”")):
            inside = answer[len(opening) : -len(closing)]
            around = (
                len(answer) >= len(opening) + len(closing) and answer.startswith(opening) and answer.endswith(closing)
            )
            if around and not re.search(r"(?<!\\)" + re.escape(closing), inside):
                answer = inside
    return answer


def closing_brace(text: str, start: int) -> int:
    """Return the index of the brace that closes one opened before ``start``; -1 if none does."""
    depth = 1
    for index in range(start, len(text)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
        if depth == 0:
            return index
    return -1


def _boxes(text: str) -> list[tuple[int, str]]:
    """Return position and content of each answer in boxes; adjacent boxes are one answer."""
    found: list[tuple[int, int, str]] = []  # begin, end, content
    for match in _BOX.finditer(text):
        if text[match.end() : match.end() + 1] == "{":
            if (end := closing_brace(text, match.end() + 1)) < 0:
                continue
            content, end = text[match.end() + 1 : end], end + 1
        elif token := re.compile(r"[^\s{}$a-zA-Z][^\s$]*|[a-zA-Z](?=[\s.,$]|$)").match(text, match.end()):
            content, end = token[0], token.end()
        else:
            continue
        if found and _TOGETHER.fullmatch(text, found[-1][1], match.start()):
            begin, _, before = found.pop()
            content = before if before.strip() == content.strip() else f"{before}, {content}"
            found.append((begin, end, content))
        else:
            found.append((match.start(), end, content))
    return [(begin, content) for begin, _, content in found if not _BOX.search(content)]


def _line_after(text: str, start: int) -> str:
    """Return the rest of the line, or the next line that is not empty; a displayed formula is returned whole."""
    rest = text[start:].lstrip("*_ \t").lstrip()
    for opening, closing in zip(*_OPEN, strict=True):
        if rest.startswith(opening) and (end := rest.find(closing, len(opening))) >= 0:
            return rest[: end + len(closing)]
    return re.split(r"</(?:final[_ -]?)?answer>|\n", rest, maxsplit=1, flags=re.IGNORECASE)[0]


def _sentence_after(text: str, start: int) -> str:
    """Return the rest of the sentence, up to a full stop before white space or the end of the line."""
    return re.split(rf"{_ABBREVIATED}[.!?](?=\s|$)|。", _line_after(text, start), maxsplit=1)[0]
