"""Problems read from a parquet or jsonl file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ..errors import UserError
from .images import Image, image_of, read_images
from .problem import Problem


def read_problems(path: str, key: str, prompt_key: str, answer_key: str, image_key: str | None = None) -> list[Problem]:
    """Return all rows of ``path`` as problems; their entries keep all columns.

    Args:
        key: the configuration key that names the file, for error messages.
        prompt_key, answer_key: columns of the prompt and of the reference answer.
        image_key: column of the pictures, if there is one; their paths are relative to the file's folder.

    Raises:
        UserError: the file is missing, unreadable, empty, of another kind, or lacks a column.
    """
    keys, file = (prompt_key, answer_key, image_key), Path(path)
    rows = read_file(path, key)
    return [problem_of(row, f"'{path}'", file.stem, n, *keys, folder=file.parent) for n, row in enumerate(rows)]


def read_file(path: str, key: str) -> list[dict[str, Any]]:
    """Return all rows of ``path``; arguments and errors as for `read_problems`."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"There is no prompts file '{path}' ({key}); give a .parquet or .jsonl file.")
    if file.suffix == ".parquet":
        rows = _parquet(file, key)
    elif file.suffix in (".jsonl", ".json"):
        rows = _jsonl(file, key)
    else:
        raise UserError(f"The prompts file '{path}' ({key}) is neither .parquet nor .jsonl; convert it to one of them.")
    if not rows:
        raise UserError(f"The prompts file '{path}' ({key}) has no rows.")
    return rows


def problem_of(
    row: dict[str, Any],
    where: str,
    task: str,
    number: int,
    prompt_key: str,
    answer_key: str,
    image_key: str | None = None,
    *,
    folder: Path | None = None,
) -> Problem:
    """Return a row of ``where`` as a problem; `find_answer` finds the column of its reference answer.

    Args:
        where: names the source in error messages.
        task, number: make the problem's id, ``task/number``; a text in the row's column ``task`` is its task instead.

    Raises:
        UserError: the row lacks a column, its prompt is neither a text nor a conversation, or a picture is none.
    """
    answer = find_answer(row, answer_key)
    for option, column, found in (
        ("data.prompt_key", prompt_key, prompt_key in row),
        ("data.answer_key", answer_key, answer is not None),
        ("data.image_key", image_key, image_key is None or image_key in row),
    ):
        if not found:
            raise UserError(
                f"Row {number} of {where} has no column '{column}' ({option}); it has {', '.join(sorted(row))}."
            )
    assert answer is not None
    text, messages = row[prompt_key], tuple[dict[str, Any], ...]()
    of_row = f"Row {number} of {where}"
    images: list[Image] = []
    if image_key is not None:
        images = read_images(row[image_key], folder, f"{of_row} in column '{image_key}' (data.image_key)")
    if isinstance(text, list):
        messages, images = _messages(text, of_row, prompt_key, images, folder)
        text = "\n".join(f"{m['role']}: {_spoken(m['content'])}" for m in messages)
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"Row {number} of {where} has no text in column '{prompt_key}' (data.prompt_key).")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(
            f"Row {number} of {where} holds half a character (a lone surrogate) in column '{prompt_key}'; mend it."
        )
    own = row.get("task")
    return Problem(
        f"{task}/{number}",
        own if isinstance(own, str) and own else task,
        text,
        row | {"answer": answer[1]},
        messages,
        tuple(images),
    )


def _spoken(content: str | list[dict[str, str]]) -> str:
    """Return a message's content as one text."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "[picture]") for part in content)


def _messages(
    found: list[Any], where: str, prompt_key: str, images: list[Image], folder: Path | None
) -> tuple[tuple[dict[str, Any], ...], list[Image]]:
    """Return the messages of a conversation, reduced to roles and contents, and its pictures in their order.

    A part ``{"type": "image"}`` has a picture under ``image``, or takes the next one of ``images``. If no part is a
    picture, the first message of the user begins with all of them, as in TRL.
    """
    column = f"{where} holds in column '{prompt_key}' (data.prompt_key)"
    for m in found:
        if not isinstance(m, dict) or not all(
            isinstance(m.get(k), t) for k, t in (("role", str), ("content", str | list))
        ):
            raise UserError(
                f"{column} a list that is no conversation; each message needs a text 'role', and a 'content' that is a "
                "text or a list of parts."
            )
    left, used, messages = list(images), list[Image](), []
    for m in found:
        content = m["content"]
        if isinstance(content, list):
            content = [_part(part, column, left, used, folder) for part in content]
        messages.append({"role": m["role"], "content": content})
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
    if not found or found[-1]["role"] == "assistant":
        raise UserError(
            f"{where} holds in column '{prompt_key}' (data.prompt_key) a conversation in which it is not the model's "
            "turn; end it with a message of another role than 'assistant'."
        )
    if used:  # templates of models that take pictures expect parts everywhere
        for m in messages:
            if isinstance(m["content"], str):
                m["content"] = [{"type": "text", "text": m["content"]}]
    return tuple(messages), used


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


def _parquet(file: Path, key: str) -> list[dict[str, Any]]:
    try:
        return pq.read_table(file).to_pylist()
    except Exception as error:  # also for a value without a Python type
        why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"The prompts file '{file}' ({key}) is not a readable parquet file: {why}.") from error


def _jsonl(file: Path, key: str) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # splitlines would cut at U+2028 inside a string too
    except UnicodeDecodeError as error:
        raise UserError(f"The prompts file '{file}' ({key}) is not in UTF-8: {error}; save it in UTF-8.") from error
    except OSError as error:
        raise UserError(f"The prompts file '{file}' ({key}) cannot be read: {error}.") from error
    for number, line in enumerate((line.removeprefix("\ufeff") for line in lines), 1):  # of files that were joined
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise UserError(f"Line {number} of '{file}' ({key}) is not JSON: {why.rstrip('.')}.") from error
        if not isinstance(row, dict):
            raise UserError(f"Line {number} of '{file}' ({key}) is not a JSON object; give one object a line.")
        rows.append(row)
    return rows


def find_answer(row: Mapping[str, Any], key: str) -> tuple[str, Any] | None:
    """Return the column that holds a row's reference answer, and its value; None if there is none.

    ``key`` may go into dicts (``reward_model.ground_truth``). Rows without the column ``answer``, the default, may keep
    it where verl has it (``reward_model.ground_truth``) or as TRL's ``solution``. A dict with ``ground_truth`` is what
    that holds.
    """
    for name in (key, "reward_model.ground_truth", "solution") if key == "answer" else (key,):
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
