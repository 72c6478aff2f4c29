"""Memory that a step frees is there for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from rolltree.engine.freed_memory import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(1 << 20) for _ in range(16)]  # 64 MiB, 16,384 pages
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print([faults() for _ in range(4)][-1])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_pages_are_kept() -> None:
    def faults(how: str) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, timeout=60
        )
        return int(ran.stdout)

    assert faults("kept") < 100
    # where a small block happens to lie behind the large ones, malloc keeps them anyway, in every second process or so
    assert any(faults("default") > 1000 for _ in range(12)), "malloc keeps them by itself now: keep_freed_memory can go"
