"""Reads the turns of a model: sampled tokens, or their text, as reasoning, content and calls of tools.

What opens as a call and is none stays part of what the turn says. A model's thinking calls nothing: calls are looked
for after its end, where the turn has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from .call_reading import Found, Malformed, Schemas, ToolCall
from .marks import Ids, Span, marks_of, without
from .reasoning import TAGS
from .splitting import CLOSINGS, splitter
from .tool_formats import FORMATS, ToolFormat

HERMES, HARMONY, LLAMA = FORMATS["hermes"], FORMATS["harmony"], FORMATS["llama"]


class Turn(NamedTuple):
    """A turn of the model.

    Attributes:
        reasoning: what the model thinks between marks that are special tokens; "" otherwise.
        content: all else that is no call, without special tokens; without the white space at its end where there are
            calls. Thinking between ordinary marks is a part of it.
        calls: calls of offered tools.
        malformed: texts that open as a call and are none, each with its place among all calls.
    """

    reasoning: str
    content: str
    calls: list[ToolCall]
    malformed: list[tuple[int, Malformed]]


def read_ids(
    tokenizer: PreTrainedTokenizerBase,
    ids: Ids,
    tools: Collection[str] | Schemas = (),
    form: ToolFormat | None = None,
    most: int | None = None,
    *,
    thinks: bool = False,
    until: int | None = None,
) -> Turn:
    """Return what sampled tokens say and call.

    Args:
        tools: those that may be called: their names, or the JSON schemas of their parameters by name, which give
            arguments their types.
        form: of the calls; None: the turn calls nothing.
        most: number of calls after which others stay text; None: any number.
        thinks: the prompt has begun the reasoning; see `begins_reasoning`.
        until: length of their text (`Marks.turn`) that counts; None: all of it.
    """
    marks = marks_of(tokenizer)
    text = marks.turn(ids)
    spans = marks.spans(ids, text)
    if until is not None:
        text, spans = text[:until], [span for span in spans if span[1] <= until]
    splits = splitter(marks.harmony or form is HARMONY, thinks=thinks)
    parts = list(splits.add(text, spans, last=True))
    reasoning = "".join(part.text for part in parts if part.reasons)
    said, hidden = "", []
    for part in parts:
        if not part.reasons:
            if part.mark:
                hidden.append((len(said), len(said) + len(part.text)))
            said += part.text
    turn = _read(said, tools, form, most, hidden)
    if splits.thinks and not turn.calls:  # a turn that does not end its thinking may call for all that
        late = _read(reasoning, tools, form, most, ())
        after = len(turn.malformed)  # the places of those that follow
        turn = turn._replace(
            calls=late.calls, malformed=[*turn.malformed, *((n + after, m) for n, m in late.malformed)]
        )
    return turn._replace(reasoning=reasoning)


def read_turn(text: str, tools: Collection[str] | Schemas, form: ToolFormat = HERMES, most: int | None = None) -> Turn:
    """Return what the text of a turn says and calls, as `read_ids` reads tokens; its marks are ordinary text."""
    return _read(text, tools, form, most, ())


def _read(
    text: str, tools: Collection[str] | Schemas, form: ToolFormat | None, most: int | None, hidden: Collection[Span]
) -> Turn:
    """Read a text without reasoning between special tokens; ``hidden`` are marks that are not told."""
    said, removed = Turn("", "", [], []), list[Span]()
    for number, located in enumerate(() if form is None else _found(text, tools, form)):
        if isinstance(located.call, Malformed):
            said.malformed.append((number, located.call))
        elif most is None or len(said.calls) < most:
            said.calls.append(located.call)
            removed.append((max(located.begin, removed[-1][1] if removed else 0), located.end))
    hidden = [span for span in hidden if not any(begin <= span[0] < end for begin, end in removed)]
    content = without(text, sorted([*removed, *hidden]))
    return said._replace(content=content.rstrip() if said.calls else content)


def begins_reasoning(tokenizer: PreTrainedTokenizerBase, prompt: str) -> bool:
    """Return True if the text of a prompt ends with a mark that begins reasoning and is a special token."""
    kept = set(marks_of(tokenizer).kept.values())
    return any(begin in kept and prompt.rstrip().endswith(begin) for begin, _ in TAGS)


def ends_reasoning(tokenizer: PreTrainedTokenizerBase, ids: Ids) -> bool:
    """Return True if a mark that ends reasoning and is a special token is among ``ids``."""
    kept = marks_of(tokenizer).kept
    return any(kept.get(int(i)) in CLOSINGS for i in ids)


def _found(text: str, tools: Collection[str] | Schemas, form: ToolFormat) -> Iterator[Found]:
    thought = min((at + len(end) for _, end in TAGS if (at := text.find(end)) >= 0), default=0)
    schemas = tools if isinstance(tools, dict) else {name: {} for name in tools}
    for located in form.find(text[thought:], schemas):
        yield Found(located.begin + thought, located.end + thought, located.call)
