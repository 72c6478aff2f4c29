"""Loads the compiled kernels that this machine can run."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch

from . import machine

_log = logging.getLogger("rolltree.kernels")
VECTOR_BYTES = {"avx512": 64, "avx2": 32, "default": 16}
"""Bytes of a vector, by the instruction set that a library was built for: its op ``vector_bytes`` tells."""


@functools.cache
def load_library(name: str) -> bool:
    """Load the compiled ops (``torch.ops.rolltree_cpu`` or ``rolltree_cuda``); return False if they are not built."""
    here = Path(__file__).parent
    machine.settings()  # C++ takes an unknown value for none
    if not machine.has(f"_{name}"):
        return False
    if name == "cuda":
        libraries = [here / "_cuda.so"] if torch.cuda.is_available() and (here / "_cuda.so").exists() else []
    else:
        libraries = cpu_libraries(here)
        if not libraries and (others := sorted(path.name for path in here.glob("_cpu_*.so"))):
            log_once(f"{', '.join(others)} is for another machine; build rolltree here, or with ROLLTREE_CPU_ISA=all.")
    for library in libraries:
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            log_once(f"{library.name} was built but cannot be loaded ({error}); rebuild it with this torch.")
            return False
        return True
    return False


def cpu_libraries(folder: Path) -> list[Path]:
    """Return the CPU libraries in ``folder`` whose instruction set this machine has, the best one first."""
    return [path for level in machine.cpu_levels() if (path := folder / f"_cpu_{level}.so").exists()]


@functools.cache
def log_once(message: str) -> None:
    """Log ``message`` as a warning the first time it comes up in this process."""
    _log.warning(message)
