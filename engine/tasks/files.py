"""Problems read from a parquet or jsonl file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ..errors import UserError
from .problem import Problem


def read_problems(path: str, key: str, prompt_key: str, answer_key: str) -> list[Problem]:
    """Return all rows of ``path`` as problems; their entries keep all columns.

    Args:
        key: the configuration key that names the file, for error messages.
        prompt_key, answer_key: columns of the prompt and of the reference answer.

    Raises:
        UserError: the file is missing, unreadable, empty, of another kind, or lacks a column.
    """
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
    return [problem_of(row, f"'{path}'", file.stem, number, prompt_key, answer_key) for number, row in enumerate(rows)]


def problem_of(row: dict[str, Any], where: str, task: str, number: int, prompt_key: str, answer_key: str) -> Problem:
    """Return a row of ``where`` as a problem; `find_answer` finds the column of its reference answer.

    Args:
        where: names the source in error messages.
        task, number: make the problem's id, ``task/number``; a text in the row's column ``task`` is its task instead.

    Raises:
        UserError: the row lacks a column, or its prompt is neither a text nor a conversation.
    """
    answer = find_answer(row, answer_key)
    for option, column, found in (
        ("data.prompt_key", prompt_key, prompt_key in row),
        ("data.answer_key", answer_key, answer is not None),
    ):
        if not found:
            raise UserError(
                f"Row {number} of {where} has no column '{column}' ({option}); it has {', '.join(sorted(row))}."
            )
    assert answer is not None
    text, messages = row[prompt_key], tuple[dict[str, str], ...]()
    if isinstance(text, list):
        messages = _messages(text, f"Row {number} of {where}", prompt_key)
        text = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"Row {number} of {where} has no text in column '{prompt_key}' (data.prompt_key).")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(
            f"Row {number} of {where} holds half a character (a lone surrogate) in column '{prompt_key}'; mend it."
        )
    own = row.get("task")
    return Problem(
        f"{task}/{number}", own if isinstance(own, str) and own else task, text, row | {"answer": answer[1]}, messages
    )


def _messages(found: list[Any], where: str, prompt_key: str) -> tuple[dict[str, str], ...]:
    """Return the messages of a conversation, reduced to roles and contents."""
    for m in found:
        if not isinstance(m, dict) or not all(isinstance(m.get(key), str) for key in ("role", "content")):
            raise UserError(
                f"{where} holds in column '{prompt_key}' (data.prompt_key) a list that is no conversation; each "
                "message needs texts 'role' and 'content'."
            )
    if not found or found[-1]["role"] == "assistant":
        raise UserError(
            f"{where} holds in column '{prompt_key}' (data.prompt_key) a conversation in which it is not the model's "
            "turn; end it with a message of another role than 'assistant'."
        )
    return tuple({"role": m["role"], "content": m["content"]} for m in found)


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
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The prompts file '{file}' ({key}) cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
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
