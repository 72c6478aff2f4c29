"""The folder of compiled kernels: named by versions, and when it cannot be written."""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from rolltree.kernels import kernel_cache
from rolltree.kernels.libraries import log_once


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("ROLLTREE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is taken away again
        monkeypatch.delenv(name)
    kernel_cache.used.cache_clear()
    log_once.cache_clear()
    yield tmp_path / "cache"
    kernel_cache.used.cache_clear()


def unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder that cannot be written, as one of another user's or on a read-only file system; root may write to
    any."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)


def test_every_version_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    installed = dict.fromkeys(kernel_cache.PACKAGES, "1.0")

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(kernel_cache, "version", version)
    folders = {kernel_cache.directory()}
    assert folders == {kernel_cache.directory()}
    for name in kernel_cache.PACKAGES:
        installed[name] = "1.1"
        folders.add(kernel_cache.directory())
        del installed[name]
        folders.add(kernel_cache.directory())
    assert len(folders) == 1 + 2 * len(kernel_cache.PACKAGES)
    assert {path.parent for path in folders} == {folder / "kernels"}


def test_kernels_of_other_versions_are_named(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = {"python": "3.11", "triton": "3.9.0"}
    monkeypatch.setattr(kernel_cache, "versions", lambda: here)
    for _ in range(2):  # its own are nothing to speak of
        kernel_cache.used()
        kernel_cache.used.cache_clear()
    assert not caplog.records
    here = {"python": "3.12", "triton": "3.9.0", "quack-kernels": "0.6.5"}
    assert kernel_cache.used() == kernel_cache.directory()
    assert [r.message for r in caplog.records] == [
        f"The kernels in {folder / 'kernels'} are of other versions and are compiled anew: python 3.11 there, 3.12 "
        "here, quack-kernels missing there, 0.6.5 here."
    ]
    for file in folder.glob(f"*/*/{kernel_cache.VERSIONS}"):
        file.write_text("{cut of")
    here = {"python": "3.13"}
    kernel_cache.used.cache_clear()
    assert kernel_cache.used() == kernel_cache.directory()
    assert len(caplog.records) == 1


def test_flash_attn_keeps_its_kernels_there(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cache.use_for_flash()
    environment = kernel_cache.os.environ
    assert environment["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert environment["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(kernel_cache.directory() / "flash")


def test_a_folder_that_cannot_be_written_is_read_from_a_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(kernel_cache.atexit, "register", lambda f, *args, **options: at_exit.append((f, args, options)))
    kernel = kernel_cache.directory() / "flash" / "a.o"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"machine code")
    unwritable(monkeypatch)
    used = kernel_cache.used()
    assert used != kernel_cache.directory()
    assert (used / "flash" / "a.o").read_bytes() == b"machine code"
    assert kernel_cache.used() == used
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{kernel_cache.directory()} cannot be written (Read-only file system); set ROLLTREE" in record.message
    ((remove, arguments, options),) = at_exit
    remove(*arguments, **options)
    assert not used.exists()


def test_a_file_in_its_place(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("not a folder")
    used = kernel_cache.used()
    assert used.is_dir()
    assert not any(used.iterdir())
    assert "cannot be written (Not a directory)" in caplog.text
    shutil.rmtree(used)
