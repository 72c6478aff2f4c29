"""The features of the machine that decide which path runs: each is one function here, read nowhere else.

Each can be forced by an environment variable, so that tests run on one machine what others run; `rolltree doctor`
prints the variables of :data:`SETTINGS` with the present values. A variable takes features away, or names a feature
that is emulated. A feature that the machine lacks and nothing emulates is an error: its path would end in a crash.

The C++ kernels ask ``csrc/cpu/machine.h`` in the same manner, and the sandbox ``engine/sandbox/sandbox.py``. setup.py
reads this file by its path, so it imports nothing of rolltree, and torch only where it is asked.

A new path begins here: a function, a line of `SETTINGS`, and a case of tests/paths.py.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU_LEVELS = ("avx512", "avx2", "default")
"""Instruction sets that the CPU kernels are built for, the best first; only x86-64 has others than ``default``."""
PARTS = ("_cpu", "_cuda", "_host", "triton", "compiler")
"""Parts of an installation that a machine may lack: compiled libraries, a package, a C++ compiler."""
EMULATED_CAPABILITY = (9, 0)
"""The GPU whose tiles Triton's interpreter uses, which can use those of any."""


class MachineError(ValueError):
    """An environment variable asks for what this machine lacks, or for what nobody knows."""


def platform_refused() -> str:
    """Return why rolltree is not installed on this platform, one sentence with the remedy, or nothing.

    setup.py ends with the sentence, and `rolltree doctor` prints it.
    """
    if sys.platform == "win32":
        return "rolltree does not run on Windows itself; install it in WSL 2, which is Linux."
    if sys.maxsize < 2**32:
        return "This Python is 32-bit, which neither torch nor rolltree's compiled parts are; use a 64-bit Python."
    if sys.byteorder == "big":
        machine = platform.machine()
        return f"{machine} is big-endian, and rolltree's compiled parts are little-endian; use x86-64 or aarch64."
    return ""


def platform_state() -> str:
    """Return the name of this platform and what is known of it; docs/versions.md says more."""
    name = f"{platform.system()} on {platform.machine()}"
    if platform_refused():
        return f"{name}: refused"
    if sys.platform == "linux" and is_x86():
        return f"{name}: tested"
    if sys.platform == "linux" and platform.machine() == "aarch64":
        return f"{name}: compiles; a part of its tests was run, in an emulator"
    return f"{name}: not tested"


def cpu_level() -> str:
    """Return the best of `CPU_LEVELS` that this processor has and ``ROLLTREE_CPU_LEVEL`` permits.

    Torch knows what the processor has, less what ``ATEN_CPU_CAPABILITY`` takes from torch's own kernels.
    """
    import torch

    capability = torch.backends.cpu.get_cpu_capability().lower()
    has = next((level for level in CPU_LEVELS if capability.startswith(level)), "default")
    return _lowered("ROLLTREE_CPU_LEVEL", CPU_LEVELS, has)


def cpu_levels() -> tuple[str, ...]:
    """Return the instruction sets whose kernels this machine runs, the best first."""
    return CPU_LEVELS[CPU_LEVELS.index(cpu_level()) :]


def is_x86() -> bool:
    """Return whether `CPU_LEVELS` differ on this processor."""
    return platform.machine() in ("x86_64", "AMD64")


def has(part: str) -> bool:
    """Return whether ``part`` of `PARTS` may be used: ``ROLLTREE_WITHOUT``, names with commas, takes parts away.

    Whether a compiled part is there is seen when it is loaded.
    """
    if part in _without():
        return False
    if part == "triton":
        return importlib.util.find_spec("triton") is not None
    return part != "compiler" or shutil.which(compiler()) is not None


def compiler() -> str:
    """Return the name of the C++ compiler; `has` tells whether it is there."""
    return os.environ.get("CXX", "g++")


def interpreting() -> bool:
    """Return whether Triton kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def gpu_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability by which kernels for ``device`` are chosen.

    ``ROLLTREE_GPU_CAPABILITY`` lowers it, such as 8.0. On a CPU, where Triton's interpreter runs the kernels, it is
    `EMULATED_CAPABILITY` or whatever the variable names.
    """
    chosen = _asked_capability()
    if device.type != "cuda":
        return chosen or EMULATED_CAPABILITY
    real = real_gpu_capability(device)
    if chosen is not None and chosen > real:
        raise MachineError(
            f"ROLLTREE_GPU_CAPABILITY is {_dotted(chosen)}, and {device} has {_dotted(real)}; it can only be lowered."
        )
    return chosen or real


def real_gpu_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, for which compilers are told to compile."""
    import torch

    return torch.cuda.get_device_capability(device)


def gpu_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of ``device`` among which work is divided; 1 on a CPU."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def amx_asked() -> str:
    """Return ``ROLLTREE_AMX``: ``off``, ``emulate`` (plain C++ with the same sums), or ``""``, as the processor has it.

    The processor is asked in ``csrc/cpu/machine.h``.
    """
    return _one_of("ROLLTREE_AMX", ("off", "emulate"))


def bf16_asked() -> str:
    """Return ``ROLLTREE_BF16``: ``widen``, two fp32 products for a pair of bf16, or ``""``, as the processor has it: by
    AVX-512 BF16's dot products, with the same sums. Tiles come first where there are any.

    The processor is asked in ``csrc/cpu/machine.h``.
    """
    return _one_of("ROLLTREE_BF16", ("widen",))


def few_rows_asked() -> str:
    """Return ``ROLLTREE_FEW_ROWS``, how many rows the kernels' own products take: ``many``, ``few``, or ``""``.

    Which of them is faster depends on the maker of the processor, which ``csrc/cpu/machine.h`` asks.
    """
    return _one_of("ROLLTREE_FEW_ROWS", ("many", "few"))


def settings() -> dict[str, str]:
    """Return the present value of each variable of `SETTINGS`, in words.

    Raises:
        MachineError: a variable asks for what this machine lacks, or for what nobody knows.
    """
    return {name: value() for name, value in SETTINGS.items()}


def _one_of(variable: str, allowed: Sequence[str]) -> str:
    chosen = os.environ.get(variable, "")
    if chosen and chosen not in allowed:
        raise MachineError(f"{variable} is '{chosen}'; it must be {' or '.join(allowed)}, or not set.")
    return chosen


def _lowered(variable: str, levels: Sequence[str], best: str) -> str:
    """Return ``best``, or the lower one of ``levels`` (the best first) that the variable names."""
    chosen = _one_of(variable, levels) or best
    if levels.index(chosen) < levels.index(best):
        there = ", ".join(levels[levels.index(best) :])
        raise MachineError(f"{variable} is '{chosen}', which this machine lacks; it has {there}.")
    return chosen


def _without() -> tuple[str, ...]:
    named = os.environ.get("ROLLTREE_WITHOUT", "")
    names = tuple(name.strip() for name in named.split(",") if name.strip())
    if unknown := [name for name in names if name not in PARTS]:
        raise MachineError(f"ROLLTREE_WITHOUT names '{unknown[0]}'; it knows {', '.join(PARTS)}.")
    return names


def _asked_capability() -> tuple[int, int] | None:
    chosen = os.environ.get("ROLLTREE_GPU_CAPABILITY", "")
    if not chosen:
        return None
    major, _, minor = chosen.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise MachineError(f"ROLLTREE_GPU_CAPABILITY is '{chosen}'; it must be a number such as 8.0.")
    return int(major), int(minor)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


SETTINGS: Mapping[str, Callable[[], str]] = {
    "ROLLTREE_CPU_LEVEL": cpu_level,
    "ROLLTREE_AMX": lambda: amx_asked() or "as the processor has it",
    "ROLLTREE_BF16": lambda: bf16_asked() or "as the processor has it",
    "ROLLTREE_FEW_ROWS": lambda: few_rows_asked() or "as the processor has it",
    "ROLLTREE_GPU_CAPABILITY": lambda: _dotted(chosen) if (chosen := _asked_capability()) else "as the GPU has it",
    "ROLLTREE_WITHOUT": lambda: ", ".join(_without()) or "nothing",
    "TRITON_INTERPRET": lambda: "on: kernels run on the CPU, slowly, for tests" if interpreting() else "off",
}
"""Environment variables that force a path, each with its present value in words."""
