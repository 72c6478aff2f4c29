"""Memory that a step frees is there for the next one."""

from __future__ import annotations

import platform

import pytest

from ..forks import Forks

FAULTS = """
import resource, torch
from rolltree.engine.freed_memory import keep_freed_memory

if how == "kept":
    assert keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(1 << 20) for _ in range(16)]  # 64 MiB, 16,384 pages
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print([faults() for _ in range(4)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_pages_are_kept(torch_forks: Forks) -> None:
    def faults(how: str) -> int:
        code, printed = torch_forks.run(f"how = {how!r}\n{FAULTS}")
        assert code == 0, printed
        return int(printed)

    assert faults("kept") < 100
    # where a small block happens to lie behind the large ones, malloc keeps them anyway, in every second process or so
    assert any(faults("default") > 1000 for _ in range(12)), "malloc keeps them by itself now: keep_freed_memory can go"
