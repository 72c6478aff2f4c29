"""Keeps compiled kernels between processes, by the versions of the packages that they are made from."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .libraries import log_once

VERSIONS = "versions.json"  # in the folder of the kernels: the versions they were made under
PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton", "torch")


def directory() -> Path:
    """Return ``$ROLLTREE_CACHE_DIR`` or ``~/.cache/rolltree``, and in it the folder for these versions of Python and of
    all `PACKAGES`. Another version finds nothing there and compiles anew.
    """
    root = os.environ.get("ROLLTREE_CACHE_DIR") or Path.home() / ".cache" / "rolltree"
    return Path(root) / "kernels" / hashlib.sha256(repr(versions()).encode()).hexdigest()[:16]


def why_not_kept() -> str | None:
    """Return why kernels cannot be written to `directory`, in the system's words, or None."""
    try:
        directory().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory()):
            return None
    except OSError as error:
        return error.strerror or str(error)


@functools.cache
def used() -> Path:
    """Return `directory`, or if that cannot be written a copy of it until the process ends.

    Packages lock and replace entries, so they must be able to write what they read. Logs once if it returns a copy, or
    if only other versions' kernels are there.
    """
    cache = directory()
    if not cache.exists() and (others := _other_versions(cache.parent)):
        log_once(f"The kernels in {cache.parent} are of other versions and are compiled anew: {others}.")
    if (reason := why_not_kept()) is None:
        (cache / VERSIONS).write_text(json.dumps(versions()))
        return cache
    copy = Path(tempfile.mkdtemp(prefix="rolltree-kernels-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    if cache.is_dir():
        shutil.copytree(cache, copy, dirs_exist_ok=True)
    log_once(
        f"Kernels that are compiled are lost when the process ends: {cache} cannot be written ({reason}); set "
        "ROLLTREE_CACHE_DIR to a folder that can."
    )
    return copy


def _other_versions(root: Path) -> str:
    """Return how the versions of the newest folder in ``root`` differ from these; "" if there is none."""
    try:
        newest = max(root.glob(f"*/{VERSIONS}"), key=lambda file: file.stat().st_mtime, default=None)
        there = json.loads(newest.read_text()) if newest else {}
    except (OSError, ValueError):
        return ""
    ours = versions() if there else {}
    differ = [name for name in ours | there if ours.get(name) != there.get(name)]
    return ", ".join(f"{name} {there.get(name, 'missing')} there, {ours.get(name, 'missing')} here" for name in differ)


def versions() -> dict[str, str]:
    """Return the version of Python and of each of `PACKAGES` that is installed."""
    installed = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def use_for_flash() -> None:
    """Make flash-attn 4 keep its kernels in `used`, unless its own variables say where; call it before its import."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(used() / "flash"))
