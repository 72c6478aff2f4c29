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
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
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
_TAG = re.compile(r"<(/?)((?:final[_ -]?)?answer)>", re.IGNORECASE)
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
_EMPHASIS = re.compile(r"(?<![\w*)}\]\\])(?<!\d\s)(\*{1,3}|__|`)(?=[^\s*])([^*\n]{0,1000}?[^\s*])\1(?![\w*])")
_PICTURES = re.compile("[\u2600-\u27bf\ufe0f\u200b-\u200d\u2060\ufeff\U0001f000-\U0001faff]")
"""Emoji, check marks and characters without width."""
_OPEN = ("$$", "\\["), ("$$", "\\]")
_BARE = re.compile(r"[^\s{}$a-zA-Z]|[a-zA-Z](?=[\s.,$]|$)")
_SKIPPED = re.compile(r"[*_ \t]*\s*")
_LINE_END = re.compile(r"</(?:final[_ -]?)?answer>|\n", re.IGNORECASE)
_SPACE, _BLANKS = re.compile(r"\s*"), re.compile(r"[ \t]*")
MOST = 32
"""Marks of one kind that are read in a response; earlier ones are none of its answer."""
LAYERS = 50
"""Layers of emphasis and quotation marks that are taken off an answer."""
APART = 100
"""Characters between two boxes that may belong together."""


def extract_answer(text: str) -> str | None:
    """Return the answer that a response marks: the first candidate, trimmed; None if nothing is marked."""
    return next(candidates(text), None)


def candidates(text: str) -> Iterator[str]:
    """Yield possible answers in ``text``, the most reliable first: of each kind, the last `MOST` marks."""
    text = without_reasoning(text).replace("\r\n", "\n").replace("\r", "\n")
    strong: list[tuple[int, Callable[[], str]]] = [*_tagged(text), *_boxes(text)]
    strong += [(match.start(), partial(_line_after, text, match.end())) for match in _LINE.finditer(text)]
    strong += [(match.start(), partial(_line_after, text, match.end())) for match in _HEADING.finditer(text)]
    weak: list[tuple[int, Callable[[], str]]] = [
        (match.start(), partial(_sentence_after, text, match.end())) for match in _SENTENCE.finditer(text)
    ]
    last_break = text.rfind("\n", 0, len(text.rstrip()))
    for match in _HASHES.finditer(text):
        line = match.start(), partial(_line_after, text, match.end())
        if _SPACE.match(text, match.end()).end() > last_break:  # type: ignore[union-attr]  # it matches anywhere
            strong.append(line)
        elif _VALUE.match(text, _BLANKS.match(text, match.end()).end()):  # type: ignore[union-attr]
            weak.append(line)
    for marks in (strong, weak):
        for _, content in sorted(marks, key=lambda mark: mark[0], reverse=True)[:MOST]:
            if (answer := content().strip()).strip("*_ "):
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
    answer = _EMPHASIS.sub(r"\2", _PICTURES.sub("", answer))
    for _ in range(LAYERS):
        previous = answer
        answer = _without_stop(answer.strip().strip("*_`").strip())
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ('"', '"'), ("“", "”")):
            inside = answer[len(opening) : -len(closing)]
            around = (
                len(answer) >= len(opening) + len(closing) and answer.startswith(opening) and answer.endswith(closing)
            )
            if around and not re.search(r"(?<!\\)" + re.escape(closing), inside):
                answer = inside
        if answer == previous:
            break
    return answer


def _without_stop(answer: str) -> str:
    r"""Return ``answer`` without the punctuation, TeX's line break (``\\``) or dash of a price (``5,-``) at its end."""
    body = answer.rstrip(".,;:。，；")
    if stops := answer[len(body) :]:
        return body + stops[:1] if body.endswith(("\\", "\\left", "\\right")) else body
    if answer.endswith("\\\\"):
        return answer[:-2]
    price = answer.rstrip("-–—")
    return price[:-1] if price != answer and re.search(r"\d[.,]$", price[-2:]) else answer


def closing_brace(text: str, start: int) -> int:
    """Return the index of the brace that closes one opened before ``start``; -1 if none does."""
    depth = 1
    for index in range(start, len(text)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
        if depth == 0:
            return index
    return -1


def _tagged(text: str) -> Iterator[tuple[int, Callable[[], str]]]:
    """Yield position and content of each answer in tags; a tag that is not closed is none."""
    closed: dict[str, list[re.Match[str]]] = {}
    for tag in _TAG.finditer(text):
        if tag[1]:
            closed.setdefault(tag[2].casefold(), []).append(tag)
    after = 0
    for tag in _TAG.finditer(text):
        closing = closed.get(tag[2].casefold(), [])
        place = bisect_left(closing, tag.end(), key=lambda other: other.start())
        if not tag[1] and tag.start() >= after and place < len(closing):
            yield tag.start(), partial(_slice, text, tag.end(), closing[place].start())
            after = closing[place].end()


def _boxes(text: str) -> Iterator[tuple[int, Callable[[], str]]]:
    """Yield position and content of each answer in boxes; adjacent boxes are one answer."""
    closers, stops = _closing_braces(text), [match.start() for match in re.finditer(r"[\s$]|\Z", text)]
    begins = [match.start() for match in _BOX.finditer(text)]
    boxes: list[tuple[int, int, list[tuple[int, int]], bool]] = []  # begin, end, contents, a box within
    for match in _BOX.finditer(text):
        start = match.end()
        if text[start : start + 1] == "{":
            if (stop := closers.get(start, -1)) < 0:
                continue
            start, end = start + 1, stop + 1
        elif token := _BARE.match(text, start):
            stop = end = (
                token.end() if token[0].isascii() and token[0].isalpha() else stops[bisect_left(stops, start + 1)]
            )
        else:
            continue
        place = bisect_left(begins, start)
        nests = place < len(begins) and begins[place] < stop
        together = boxes and 0 <= match.start() - boxes[-1][1] <= APART
        if together and _TOGETHER.fullmatch(text, boxes[-1][1], match.start()):
            begin, _, before, nested = boxes.pop()
            boxes.append((begin, end, [*before, (start, stop)][-MOST:], nested or nests))
        else:
            boxes.append((match.start(), end, [(start, stop)], nests))
    for begin, _, contents, nests in boxes:
        if not nests:
            yield begin, partial(_joined, text, contents)


def _closing_braces(text: str) -> dict[int, int]:
    """Return the place of the brace that closes each brace which is opened; escaped ones are none."""
    closers, opened = dict[int, int](), list[int]()
    for match in re.finditer(r"(?<!\\)[{}]", text):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            closers[opened.pop()] = match.start()
    return closers


def _slice(text: str, start: int, stop: int) -> str:
    return text[start:stop]


def _joined(text: str, contents: list[tuple[int, int]]) -> str:
    """Return the contents of adjacent boxes as one answer."""
    (start, stop), *others = contents
    joined = text[start:stop]
    for start, stop in others:
        if joined.strip() != text[start:stop].strip():
            joined = f"{joined}, {text[start:stop]}"
    return joined


def _line_after(text: str, start: int) -> str:
    """Return the rest of the line, or the next line that is not empty; a displayed formula is returned whole."""
    start = _SKIPPED.match(text, start).end()  # type: ignore[union-attr]  # it matches anywhere
    for opening, closing in zip(*_OPEN, strict=True):
        if text.startswith(opening, start) and (end := text.find(closing, start + len(opening))) >= 0:
            return text[start : end + len(closing)]
    stop = _LINE_END.search(text, start)
    return text[start:] if stop is None else text[start : stop.start()]


def _sentence_after(text: str, start: int) -> str:
    """Return the rest of the sentence, up to a full stop before white space or the end of the line."""
    return re.split(rf"{_ABBREVIATED}[.!?](?=\s|$)|。", _line_after(text, start), maxsplit=1)[0]
