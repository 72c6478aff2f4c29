"""Output whose reader has ended, that cannot be encoded, or that a terminal would obey."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from rolltree.engine.app.console import Console, Terminal
from rolltree.engine.app.printable import printable


def run(*arguments: str, read: int | None = None, **environment: str) -> tuple[int, str, str]:
    """The exit code, what was read of standard output (``read`` bytes, then it is closed), and standard error."""
    command = [sys.executable, "-m", "rolltree.engine.app.cli", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment}
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        out = process.stdout.read() if read is None else process.stdout.read(read)
        process.stdout.close()
        said = process.stderr.read()
        return process.wait(), out.decode("latin-1"), said.decode("latin-1")


@pytest.mark.slow
@pytest.mark.parametrize(("unbuffered", "read"), [("", 0), ("1", 0)])
def test_a_closed_pipe_ends_a_listing_in_silence(unbuffered: str, read: int) -> None:
    code, _, said = run("methods", read=read, PYTHONUNBUFFERED=unbuffered)
    assert (code, said) == (141, "")


def test_what_the_terminal_cannot_encode_is_escaped(tmp_path: Path) -> None:
    toml = tmp_path / "é你.toml"
    toml.write_text("name = 3\n")
    code, _, said = run("train", str(toml), "--dry-run", PYTHONIOENCODING="latin-1:strict", PYTHONUTF8="0")
    assert code == 2
    assert "é\\u4f60.toml" in said
    assert "UnicodeEncodeError" not in said


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext ü 你 🙂", "plain\n\ttext ü 你 🙂"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\rb", "a\\rb"),
        ("\x00\x08\x7f", "\\x00\\x08\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("abc\u202edef", "abc\\u202edef"),
        ("", ""),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(text: str, shown: str) -> None:
    assert printable(text) == shown
    out = io.StringIO()
    console = Console(RichConsole(file=out, width=200))
    console.note(text)
    console.finish([text])
    assert out.getvalue() == f"{shown}\n".expandtabs() * 2


class Gone(io.StringIO):
    """A terminal or pipe that breaks after its first line."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        if self.getvalue():
            raise OSError(self._number, os.strerror(self._number))
        return super().write(text)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE])
def test_a_run_goes_on_after_its_reader_has_ended(number: int, terminal: bool) -> None:
    out = Gone(number)
    console = Console(Terminal(file=out, force_terminal=terminal, width=200))
    for line in ("first", "second", "third"):
        console.note(line)
    console.start(3)
    console.step(1, {})
    console.phase("x")
    console.finish(["done"])
    assert "first" in out.getvalue()
    assert "second" not in out.getvalue()


def test_a_full_disk_is_told() -> None:
    console = Console(RichConsole(file=Gone(errno.ENOSPC)))
    console.note("first")
    with pytest.raises(OSError, match="No space"):
        console.note("second")
