"""Rows stay on disk: each is read as it is, wherever the blocks that are read end."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolltree.engine import UserError
from rolltree.engine.errors import BadRowError, RunError
from rolltree.engine.tasks import files, parquet, stored, texts
from rolltree.engine.tasks.files import read_file
from rolltree.engine.tasks.sequences import Rows
from rolltree.engine.tasks.stored import Spool

from .reading import content

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ODD: list[dict[str, Any]] = [
    {"prompt": [{"role": "assistant", "content": None, "tool_calls": [CALL]}], "n": 1},
    {"prompt": [{"role": "assistant", "content": [{"type": "text", "text": "\u00e4"}]}], "n": 1.0},
    {"prompt": [{"tool_calls": [{"function": {"arguments": {"a": [1, "x", None]}}}]}], "n": "1"},
    {"prompt": "a\u2028b\u0085c\x1d\U0001f600", "n": 10**30, "more": {}, "": []},
    {"prompt": "]}, {[", "n": True, "more": [[], [1, [2.5e-7]]]},
]


def lines(rows: list[Any], end: str = "\n") -> str:
    return "".join(json.dumps(row, ensure_ascii=n % 2 == 0) + end for n, row in enumerate(rows))


def opened(folder: Path, name: str, raw: str | bytes) -> Rows:
    (folder / name).write_bytes(raw.encode() if isinstance(raw, str) else raw)
    return read_file(folder / name, name, "data.path", Spool())


def in_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (files, stored, texts):
        monkeypatch.setattr(module, "BLOCK", size)


TEXTS = {
    "lines": ("jsonl", lines(ODD)),
    "without an end": ("jsonl", lines(ODD).rstrip("\n")),
    "blank lines": ("jsonl", "\n \n" + lines(ODD, "\n\r\n\u00a0\n\n") + "\t"),
    "carriage returns": ("jsonl", lines(ODD, "\r\n")),
    "indented": ("jsonl", "  " + lines(ODD, "\n  ")),
    "marks": ("jsonl", "\ufeff" + lines(ODD, "\n\ufeff")),
    "lines named json": ("json", lines(ODD)),
    "array": ("json", json.dumps(ODD)),
    "array over lines": ("json", "\ufeff\n" + json.dumps(ODD, indent=2, ensure_ascii=False) + "\n"),
    "array without blanks": ("json", json.dumps(ODD, separators=(",", ":"), ensure_ascii=False)),
}  # fmt: skip


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("kind", TEXTS)
def test_rows_are_what_the_json_says(kind: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_blocks(monkeypatch, block)
    form, text = TEXTS[kind]
    for name, raw in {f"a.{form}": text.encode(), f"a.{form}.gz": gzip.compress(text.encode())}.items():
        found = opened(tmp_path, name, raw)
        assert repr(list(found)) == repr([found[i] for i in range(len(found))]) == repr(ODD)
        assert found[-1] == ODD[-1]


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_rows_of_csv_may_have_line_breaks(
    end: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_blocks(monkeypatch, block)
    rows = [
        {"prompt": '1,\n2 "+"\r\n\u00e4', "answer": ""},
        {"prompt": "", "answer": " 07"},
        {"prompt": "x", "answer": "\u2028"},
    ]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["prompt", "answer"], lineterminator=end)
    writer.writeheader()
    for row in rows:
        writer.writerow(row)
        text.write(end)
    found = opened(tmp_path, "a.csv", "\ufeff" + end + text.getvalue())
    assert list(found) == rows == [found[i] for i in range(3)]


def test_parquet_keeps_types_and_reads_small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that are stored as numbers of a dictionary's entries have another dictionary in each row group."""
    monkeypatch.setattr(parquet, "READ_AT_ONCE", 2000)
    count = 3000
    words = pa.array([f"w{n % 7}" for n in range(count)]).dictionary_encode()
    columns = {
        "prompt": words,
        "many": pa.array([[f"x{n % 5}", None] for n in range(count)], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        "of": [{"a": n, "b": [{"c": b"\x00" * (n % 3)}]} for n in range(count)],
        "at": pa.array(range(count), pa.timestamp("ns", tz="Europe/Berlin")),
        "long": ["y" * 5000 if n % 1000 == 0 else None for n in range(count)],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=500)
    found = read_file(tmp_path / "a.parquet", "a", "data.path", Spool())
    expected = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert list(found) == expected
    assert [found[i] for i in range(0, count, 37)] == expected[::37]
    assert len(found._batch(1)) < 100


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_file_that_changes_later_is_refused(name: str, tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "answer": "1"} for n in range(5)]
    found = opened(tmp_path, name, content(name, rows))
    assert found[4] == rows[4]
    (tmp_path / name).write_bytes(content(name, [*rows, *rows]))
    with pytest.raises(RunError, match=r"a\..* was changed or removed after its rows were counted; restore it"):
        found[4]
    (tmp_path / name).unlink()
    with pytest.raises(RunError, match="was changed or removed"):
        list(found)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": ', "Line 4 of 'a.jsonl' (data.path) is not JSON"),
        (b"[1]", "Line 4 of 'a.jsonl' (data.path) is not a JSON object"),
        (b'{"prompt": "\xff"}', "Line 4 of 'a.jsonl' (data.path) is not in UTF-8"),
        (b"[" * 100_000, "Line 4 of 'a.jsonl' (data.path) is not JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "Line 4 of 'a.jsonl' (data.path) is not JSON"),
    ],
)
def test_a_row_that_cannot_be_read_leaves_the_others(line: bytes, says: str, tmp_path: Path) -> None:
    found = opened(tmp_path, "a.jsonl", b'{"a": 1}\n\n{"a": 2}\n' + line + b'\n{"a": 3}\n')
    assert [found[0], found[1], found[3]] == [{"a": 1}, {"a": 2}, {"a": 3}]
    with pytest.raises(BadRowError) as caught:
        found[2]
    assert str(caught.value).startswith(says)
    assert [isinstance(row, BadRowError) for row in found.scan()] == [False, False, True, False]
    with pytest.raises(UserError):
        list(found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[{"a": 1} {"a": 2}]', "is not a JSON array: Expecting ',' or ']' after item 0"),
        ('[{"a": 1}', "Expecting ',' or ']' after item 0"),
        ('[{"a": 1},', "Expecting value in item 1"),
        ('[{"a": 1},]', "Expecting value in item 1"),
        ('[{"a": 1}] {"a": 2}', "Expecting nothing after its end"),
        ('[{"a": 1}, {"a": ' + "9" * 5000 + "}]", "in item 1"),
        ('[{"a": 1}, "b"]', "Item 1 of the array in"),
    ],
)
def test_an_array_is_read_to_its_end(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (1, 1 << 20):
        in_blocks(monkeypatch, block)
        with pytest.raises(UserError) as caught:
            opened(tmp_path, "a.json", text)
        assert says in str(caught.value)
