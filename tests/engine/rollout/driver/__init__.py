"""A stand-in for CUDA's driver, whose addresses and memory are the host's; see driver.cpp."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolltree.engine.rollout.native.cache.addresses import Driver, PageMemory, Range

UNIT = 2 << 20
CAN_BUILD = shutil.which("g++") is not None and find_spec("triton") is not None
"""Triton has NVIDIA's header."""


def build(folder: Path) -> Path:
    """Return the library."""
    import triton

    header = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library, source = folder / "libcuda.so.1", Path(__file__).with_name("driver.cpp")
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{header}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return library


class StandIn:
    """The library and what tests ask of it: memory of at most ``limit`` bytes, whose mapping may not be ``offered``."""

    def __init__(self, path: Path, limit: int = 1 << 30, *, offered: bool = True) -> None:
        self.library: Any = ctypes.CDLL(str(path))
        self.library.begin.argtypes = ctypes.c_size_t, ctypes.c_int
        self.library.set_limit.argtypes = (ctypes.c_size_t,)
        for name in ("ranges", "bytes"):
            getattr(self.library, name).restype = ctypes.c_size_t
        for name in ("first_broken", "failed_call"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.begin(limit, offered)

    def memory(self) -> PageMemory:
        """Return new memory."""
        return PageMemory(Driver(self.library, torch.device("cpu")))

    @property
    def held(self) -> tuple[int, int]:
        """Ranges of addresses, and bytes of memory, that are not given back."""
        return self.library.ranges(), self.library.bytes()

    @property
    def broken(self) -> str:
        """The first rule that was broken; empty for none."""
        return str(self.library.first_broken().decode())

    @property
    def failed(self) -> str:
        """The call that failed because it had to; empty for none."""
        return str(self.library.failed_call().decode())


class _OnHost:
    def __init__(self, part: Range) -> None:
        self._part, self.__array_interface__ = part, part.__cuda_array_interface__


def over_host(part: Range, device: torch.device) -> Tensor:  # [bytes] uint8
    """As `addresses.over`, on the host."""
    return torch.from_numpy(np.asarray(_OnHost(part)))
