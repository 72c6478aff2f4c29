"""Where compiled kernels are kept between processes, by the versions of what they are made from."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton", "torch")


@functools.cache
def directory() -> Path:
    """``$ROLLTREE_CACHE_DIR`` or ``~/.cache/rolltree``, and below it a folder for these versions of Python and of all
    `PACKAGES`: another version finds nothing there and compiles anew."""
    root = os.environ.get("ROLLTREE_CACHE_DIR") or Path.home() / ".cache" / "rolltree"
    return Path(root) / "kernels" / hashlib.sha256(repr(versions()).encode()).hexdigest()[:16]


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
    """Have flash-attn 4 keep its kernels in `directory`, unless its own variables say where; before its import."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(directory() / "flash"))


def use_for_quack() -> None:
    """Have quack keep its kernels in `directory`, unless its own variables say where; before its import."""
    os.environ.setdefault("QUACK_CACHE_DIR", str(directory() / "quack"))
