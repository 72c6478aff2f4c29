"""Where compiled kernels are kept between processes, by the versions of what they are made from."""

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

from .dispatch import log_once

VERSIONS = "versions.json"  # beside the kernels: what they were made under
PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton", "torch")


def directory() -> Path:
    """``$ROLLTREE_CACHE_DIR`` or ``~/.cache/rolltree``, and below it a folder for these versions of Python and of all
    `PACKAGES`: another version finds nothing there and compiles anew."""
    root = os.environ.get("ROLLTREE_CACHE_DIR") or Path.home() / ".cache" / "rolltree"
    return Path(root) / "kernels" / hashlib.sha256(repr(versions()).encode()).hexdigest()[:16]


def why_not_kept() -> str | None:
    """Why kernels cannot be written to `directory`, in the system's words, or None."""
    try:
        directory().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory()):
            return None
    except OSError as error:
        return error.strerror or str(error)


@functools.cache
def used() -> Path:
    """`directory`, or where that cannot be written a copy of it until the process ends: packages lock and replace
    entries, so what they read they must be able to write. Says so once, and where only other versions' kernels are."""
    wanted = directory()
    if not wanted.exists() and (others := _other_versions(wanted.parent)):
        log_once(f"The kernels in {wanted.parent} are of other versions and are compiled anew: {others}.")
    if (reason := why_not_kept()) is None:
        (wanted / VERSIONS).write_text(json.dumps(versions()))
        return wanted
    copy = Path(tempfile.mkdtemp(prefix="rolltree-kernels-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    if wanted.is_dir():
        shutil.copytree(wanted, copy, dirs_exist_ok=True)
    log_once(
        f"Kernels that are compiled are lost when the process ends: {wanted} cannot be written ({reason}); set "
        "ROLLTREE_CACHE_DIR to a folder that can."
    )
    return copy


def _other_versions(root: Path) -> str:
    """In what the newest folder of ``root`` was made under other versions than these; "" if there is none."""
    try:
        newest = max(root.glob(f"*/{VERSIONS}"), key=lambda file: file.stat().st_mtime, default=None)
        theirs = json.loads(newest.read_text()) if newest else {}
    except (OSError, ValueError):
        return ""
    ours = versions() if theirs else {}
    differ = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} {theirs.get(name, 'missing')} there, {ours.get(name, 'missing')} here" for name in differ)


def versions() -> dict[str, str]:
    """Version of Python and of each of `PACKAGES` that is installed."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def use_for_flash() -> None:
    """Have flash-attn 4 keep its kernels in `used`, unless its own variables say where; before its import."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(used() / "flash"))
