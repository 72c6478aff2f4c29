"""Rows as a run reads them from its configuration, and bytes of files to read."""

from __future__ import annotations

import csv
import gzip
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from rolltree.engine.app.assembly.sampling import prompts_of
from rolltree.engine.app.config import load_config
from rolltree.engine.prompts.demonstrations import Demonstrations
from rolltree.engine.prompts.prompts import Prompt, held_out
from rolltree.engine.prompts.sources import PromptSource


@dataclass
class Read:
    source: PromptSource
    held: list[Prompt]
    given: Demonstrations

    @property
    def pairs(self) -> list[tuple[str, Any]]:
        """Prompts and answers, in the order of the rows."""
        return [(prompt.problem, prompt.entry["answer"]) for prompt in self.source.known]

    @property
    def ids(self) -> list[str]:
        return [prompt.id for prompt in self.source.known]


def read(toml: Path, tokenizer: PreTrainedTokenizerBase, *keys: str, held: int = 0) -> Read:
    """Read what a configuration names as `rolltree train` does, with or without --dry-run."""
    every = f"--evaluation.every={int(held > 0)}"
    config = load_config(toml, ["--data.tasks=[]", f"--evaluation.problems={held}", every, *keys])
    problems = held_out(config.data, config.evaluation.problems, tokenizer)
    source, given = prompts_of(config, tokenizer, problems, None)
    return Read(source, problems, given)


def sums(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(first, first + count)]


def pairs(rows: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(row["prompt"], row["answer"]) for row in rows]


def content(name: str, rows: list[dict[str, Any]]) -> bytes:
    """Return the bytes of a file of rows in the form that its name has."""
    if name.endswith(".gz"):
        return gzip.compress(content(name.removesuffix(".gz"), rows))
    if name.endswith(".zst"):
        return bytes(pa.compress(content(name.removesuffix(".zst"), rows), codec="zstd", asbytes=True))
    if name.endswith(".parquet"):
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), file)
        return file.getvalue()
    if name.endswith(".csv"):
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    if name.endswith(".json"):
        return json.dumps(rows, indent=1).encode()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(folder: Path, files: dict[str, list[dict[str, Any]]]) -> None:
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content(name, rows))
