"""Writes configuration.md, every key of a run's TOML file and what does not go together, from `engine/settings/`:
``python docs/configuration.py``."""

from __future__ import annotations

import re
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rolltree.engine.settings import TrainConfig
from rolltree.engine.settings.capabilities import STAGES, Row

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

A run is one TOML file; each key can also be given on the command line (`--trainer.lr 3e-6`). An unknown key is an
error that names the nearest one. `rolltree train CONFIG --dry-run` prints the resolved file, with defaults, and what
it would do. Where a key names a part (`file.py:function`), the path is relative to the TOML file.

This page is generated from `engine/settings/`. Its [last part](#what-does-not-go-together) lists what is refused.
"""
TOGETHER = """## What does not go together

Each row is a refusal with its reason and its remedy; capital letters stand for what the run has there. `--dry-run`
tells all rows that refuse a run at the first stage where one does, and a run one of them and the number of the others.
"""


def reference() -> str:
    """The page."""
    sections = [("", TrainConfig, False)]
    lines = [HEAD]
    while sections:
        path, model, listed = sections.pop(0)
        below, rows = [], []
        for name, field in model.model_fields.items():
            inner, many = section_of(field.annotation)
            if inner is not None:
                below.append((f"{path}.{name}{any_name(field.annotation)}".lstrip("."), inner, many))
                continue
            cells = (
                f"`{name}`",
                spelled(field.annotation),
                default(field),
                (field.description or "").replace("\n", " "),
            )
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        title = "Top level" if not path else f"`[[{path}]]`" if listed else f"`[{path}]`"
        if rows:
            lines += [f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]
        sections = below + sections
    lines.append(TOGETHER)
    for stage, refusals in STAGES.items():
        lines += [f"### Refused {stage}", "", "| feature | with | refused because |", "|---|---|---|"]
        lines += [*map(together, refusals), ""]
    return "\n".join(lines)


def together(row: Row[Any]) -> str:
    """The row of the table about two things that do not go together."""
    cells = row.feature, row.other, "; ".join(filter(None, (row.why, row.remedy)))
    named = (re.sub(r"\{(\w+)\}", lambda word: word[1].upper(), cell).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(named)} |"


def section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model of a table or of a list of tables, and whether it is a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    listed = typing.get_origin(annotation) in (tuple, list)
    for argument in typing.get_args(annotation):
        if isinstance(argument, type) and issubclass(argument, BaseModel):
            return argument, listed
    return None, False


def any_name(annotation: Any) -> str:
    """The part of a heading after the name of a key that holds tables by their names."""
    return ".NAME" if typing.get_origin(annotation) is dict else ""


def spelled(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin is typing.Annotated:
        return spelled(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return " or ".join(spelled(a) for a in arguments if a is not type(None))
    if origin in (list, tuple):
        kinds = dict.fromkeys(spelled(a) for a in arguments if a is not Ellipsis)
        return f"list of {' and '.join(kinds)}"
    return {str: "text", bool: "true or false", int: "integer", float: "number"}.get(annotation, "table")


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, dict):
        return "`{}`"
    return f"`{list(value) if isinstance(value, tuple | list) else value}`"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
