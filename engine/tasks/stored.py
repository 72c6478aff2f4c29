"""Bytes of rows on disk, read where they are needed: those of a data file, or unpacked into a temporary file."""

from __future__ import annotations

import hashlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import RunError, UserError

BLOCK = 1 << 22
"""Bytes that are read at once where all are read."""


class Stored(ABC):
    """A sequence of bytes on disk, of which none are held.

    Attributes:
        size: number of bytes.
    """

    size: int

    @abstractmethod
    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from ``begin`` to before ``end``."""

    def blocks(self, end: int | None = None) -> Iterator[bytes]:
        """Yield all bytes, or those before ``end``, in order."""
        end = self.size if end is None else end
        for begin in range(0, end, BLOCK):
            yield self.read(begin, min(begin + BLOCK, end))

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes in order; each piece but the last ends with a line feed."""
        kept: list[bytes] = []
        for block in self.blocks():
            cut = block.rfind(b"\n") + 1
            if cut:
                yield b"".join([*kept, block[:cut]])
                kept = []
            if block[cut:]:
                kept.append(block[cut:])
        if kept:
            yield b"".join(kept)

    def digest(self) -> bytes:
        """Return a hash of all bytes."""
        digest = hashlib.blake2b(digest_size=16)
        for block in self.blocks():
            digest.update(block)
        return digest.digest()


class DataFile(Stored):
    """A file that the user keeps; it must not change while it is read.

    Args:
        shown: the file as the user gave it, for error messages.
        key: the configuration key that names the file, for error messages.

    Raises:
        UserError: it cannot be read.
        RunError: at a read, the file has changed since.
    """

    def __init__(self, file: Path, shown: str, key: str) -> None:
        self._file, self._what = file.resolve(), f"The prompts file '{shown}' ({key})"
        try:
            with self._file.open("rb") as opened:
                self._seen = _seen(opened.fileno())
        except OSError as error:
            raise UserError(f"{self._what} cannot be read: {error}.") from error
        self.size = self._seen[0]

    def read(self, begin: int, end: int) -> bytes:
        with suppress(OSError), self._file.open("rb", buffering=0) as opened:
            content = os.pread(opened.fileno(), end - begin, begin)
            if len(content) == end - begin and _seen(opened.fileno()) == self._seen:
                return content
        raise RunError(f"{self._what} was changed or removed after its rows were counted; restore it and begin again.")


def _seen(descriptor: int) -> tuple[int, int]:
    stat = os.fstat(descriptor)
    return stat.st_size, stat.st_mtime_ns


class Spool:
    """A temporary file without a name, for what is unpacked; it is gone with the process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="rolltree-rows-")  # noqa: SIM115  (closed with the object)
        self.size = 0

    def write(self, raw: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            UserError: there is no room for them.
        """
        try:
            self._file.write(raw)
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"The rows of the data cannot be unpacked into '{tempfile.gettempdir()}': {error.strerror}; make room "
                "there, or name another folder by the variable TMPDIR."
            ) from error
        self.size += len(raw)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from ``begin`` to before ``end``."""
        return os.pread(self._file.fileno(), end - begin, begin)


class Unpacked(Stored):
    """Return what was appended to a spool from ``begin`` on."""

    def __init__(self, spool: Spool, begin: int) -> None:
        self._spool, self._begin, self.size = spool, begin, spool.size - begin

    def read(self, begin: int, end: int) -> bytes:
        return self._spool.read(self._begin + begin, self._begin + end)
