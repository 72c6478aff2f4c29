"""A row of data as a problem: its prompt, its reference answer and its pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .images import Image, image_of, read_images
from .problem import Problem

USUAL = {
    "prompt_key": ("prompt", "question", "problem", "messages", "instruction", "input", "query"),
    "answer_key": ("answer", "solution", "ground_truth", "reward_model.ground_truth", "final_answer", "target"),
    "response_key": ("response", "completion", "answer", "solution", "output", "generation"),
    "image_key": ("image", "images"),
}
"""Names that columns often have, by the key that names the column; errors suggest them, and none is read unasked."""
VERL = "reward_model.ground_truth"
"""Place of the reference answer in verl's files, which the default of `data.answer_key` includes."""


def find_answer(row: Mapping[str, Any], key: str) -> tuple[str, Any] | None:
    """Return the column that holds a row's reference answer, and its value; None if there is none.

    ``key`` may go into dicts (``reward_model.ground_truth``). Rows without the column ``answer``, the default, may keep
    it where verl's files have it (``reward_model.ground_truth``). A dict with ``ground_truth`` is what that holds.
    """
    for name in (key, VERL) if key == "answer" else (key,):
        value: Any = row
        for part in (name,) if name in row else name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                break
            value = value[part]
        else:
            if isinstance(value, Mapping) and "ground_truth" in value:
                name, value = f"{name}.ground_truth", value["ground_truth"]
            return name, value
    return None


def problem_of(
    row: dict[str, Any],
    where: str,
    name: str,
    number: int,
    prompt_key: str,
    answer_key: str,
    image_key: str | None = None,
    *,
    folder: Path | None = None,
    task: str | None = None,
    options: tuple[str, str] = ("data.prompt_key", "data.answer_key"),
    has: str = "it has",
) -> Problem:
    """Return a row of ``where`` as a problem; `find_answer` finds the column of its reference answer.

    Args:
        where: names the source in error messages.
        name, number: make the problem's id, ``name/number``.
        folder: paths of pictures are relative to it.
        task: of a row without a text in the column ``task``. Default: ``name``.
        options: keys of the configuration that name the columns of the prompt and of the answer.
        has: introduces the row's columns in an error message.

    Raises:
        UserError: the row lacks a column, its prompt is neither a text nor a conversation, or a picture is none.
    """
    answer = find_answer(row, answer_key)
    for option, column, present in (
        (options[0], prompt_key, prompt_key in row),
        (options[1], answer_key, answer is not None),
        ("data.image_key", image_key, image_key is None or image_key in row),
    ):
        if not present:
            columns = ", ".join(sorted(row)) or "none"
            raise UserError(
                f"Row {number} of {where} has no column '{column}' ({option}); {has} "
                f"{columns}{_suggestion(row, option, prompt_key)}."
            )
    assert answer is not None
    text, messages = row[prompt_key], tuple[dict[str, Any], ...]()
    of_row, named = f"Row {number} of {where}", f"column '{prompt_key}' ({options[0]})"
    images: list[Image] = []
    if image_key is not None:
        images = read_images(row[image_key], folder, f"{of_row} in column '{image_key}' (data.image_key)")
    if isinstance(text, list):
        messages, images = _messages(text, f"{of_row} holds in {named}", images, folder)
        text = "\n".join(f"{m['role']}: {_spoken(m)}" for m in messages)
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{of_row} has no text in {named}.")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f"{of_row} holds half a character (a lone surrogate) in column '{prompt_key}'; mend it.")
    named_task = row.get("task")
    return Problem(
        f"{name}/{number}",
        named_task if isinstance(named_task, str) and named_task else task or name,
        text,
        row | {"answer": answer[1]},
        messages,
        tuple(images),
    )


def _suggestion(row: Mapping[str, Any], option: str, prompt_key: str) -> str:
    """Return the part of an error message that suggests a column for ``option``; empty if none has a usual name."""
    table, _, key = option.rpartition(".")
    there = []
    for name in USUAL[key]:
        answer = find_answer(row, name)
        if name != prompt_key and answer is not None and answer[0].startswith(name):
            of_talks = table == "demonstrations" and name == "messages"
            there.append(f'{table}.messages_key = "messages"' if of_talks else f'{option} = "{name}"')
    return f"; set {' or '.join(there)}" if there else ""


def _spoken(message: Mapping[str, Any]) -> str:
    """Return what a message says as one text: its content, and its calls where it has some."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part.get("text", "[picture]") for part in content)
    return content + (json.dumps(message["tool_calls"], default=str) if message.get("tool_calls") else "")


def _messages(
    conversation: list[Any], column: str, images: list[Image], folder: Path | None
) -> tuple[tuple[dict[str, Any], ...], list[Image]]:
    """Return the messages of a conversation, with all that they hold, and its pictures in their order.

    A part ``{"type": "image"}`` has a picture under ``image``, or takes the next one of ``images``. If no part is a
    picture, the first message of the user begins with all of them, as in TRL.
    """
    for m in conversation:
        speaks = isinstance(m, dict) and (isinstance(m.get("content"), str | list) or _may_be_silent(m))
        if not speaks or not isinstance(m.get("role"), str):
            raise UserError(
                f"{column} a list that is no conversation; each message needs a text 'role', and a 'content' that is a "
                "text or a list of parts."
            )
    left, used, messages = list(images), list[Image](), []
    for m in conversation:
        content = m.get("content") or ""
        if isinstance(content, list):
            content = [_part(part, column, left, used, folder) for part in content]
        messages.append({key: value for key, value in m.items() if value is not None} | {"content": content})
    if left and not used:
        first = next((m for m in messages if m["role"] == "user"), None)
        if first is None:
            raise UserError(f"{column} no message of the user that could show its {len(left)} pictures.")
        said = first["content"]
        words = [{"type": "text", "text": said}] if isinstance(said, str) else said
        first["content"] = [*({"type": "image"} for _ in left), *words]
        left, used = [], left
    if left:
        raise UserError(f"{column} fewer parts of the type image than the row has pictures; {len(left)} are left over.")
    if not conversation or conversation[-1]["role"] == "assistant":
        raise UserError(
            f"{column} a conversation in which it is not the model's turn; end it with a message of another role than "
            "'assistant'."
        )
    if used:  # templates of models that take pictures expect parts everywhere
        for m in messages:
            if isinstance(m["content"], str):
                m["content"] = [{"type": "text", "text": m["content"]}]
    return tuple(messages), used


def _may_be_silent(message: Mapping[str, Any]) -> bool:
    """Return True for a message of the assistant without content, which calls, thinks or says nothing."""
    return message.get("role") == "assistant" and message.get("content") is None


def _part(part: Any, column: str, left: list[Image], used: list[Image], folder: Path | None) -> dict[str, str]:
    """Return a part of a message without its picture, which moves to ``used``."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind != "image":
        raise UserError(f"{column} a message with a part that is neither a text nor an image; leave it out.")
    if part.get("image") is not None:
        used.append(image_of(part["image"], folder, column))
    elif left:
        used.append(left.pop(0))
    else:
        raise UserError(f"{column} an image part without a picture; give it under 'image', or in data.image_key.")
    return {"type": "image"}
