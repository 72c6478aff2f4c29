"""What a machine has decides which path runs; each feature can be taken away, and none is pretended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rolltree.kernels import machine, tree_attention, use_backend
from rolltree.kernels.libraries import VECTOR_BYTES, cpu_libraries, load_library
from rolltree.kernels.machine import MachineError

ROOT = Path(__file__).parents[2]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
READERS = {
    "kernels/machine.py": None,
    "csrc/cpu/machine.cpp": None,
    "engine/sandbox/filters.py": {"platform.machine", "byteorder"},  # numbers of system calls
    "engine/app/doctor.py": {"platform.machine", "get_device_properties"},  # what it prints
    "engine/learn/utilization.py": {"get_device_properties"},  # which GPU the driver is asked about
    "bench/gpu.py": {"get_device_properties", 'environ.items() if k != "TRITON_INTERPRET'},  # what it prints; starts
    "bench/gpu_first.py": {'environ["TRITON_INTERPRET'},  # sets it for a rehearsal
    "bench/schema.py": {"platform.machine", "cpuinfo"},  # the name of the machine, which results have
    "bench/timing.py": {"get_device_properties"},  # how much memory empties the cache between timings
    "csrc/cpu/vectors.h": {"__AVX"},  # what the compiler was told
    "csrc/cpu/products/few_rows_dots.cpp": {"__AVX"},  # the same; whether it is called is decided in machine.h
}
"""Files that ask the machine what it is, and what they may ask; None: everything."""
QUESTIONS = re.compile(
    r"get_cpu_capability|get_device_capability|get_device_properties|platform\.machine|byteorder|uname|cpuinfo|cpuid|__builtin_cpu"
    r"|amx_tile_supported|getDeviceProp|cudaDevAttr|std::getenv|__AVX"
    r"|\benviron\b[^:\n]*(?:ROLLTREE_(?:AMX|BF16|CPU_LEVEL|FEW_ROWS|GPU_CAPABILITY|WITHOUT)|TRITON_INTERPRET)"
)


def sources() -> Iterator[Path]:
    for folder in ("kernels", "engine", "bench", "csrc"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".cpp", ".h", ".cu", ".cuh"})


def code_of(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".py":
        return re.sub(r'"""(?:.|\n)*?"""|#.*', "", text)
    return re.sub(r"//.*", "", text)


def test_only_named_files_ask_the_machine() -> None:
    asked = {str(p.relative_to(ROOT)): set(QUESTIONS.findall(code_of(p))) for p in sources()}
    others = {name: found for name, found in asked.items() if found and name not in READERS}
    assert not others
    for name, may in READERS.items():
        assert asked[name]
        assert may is None or asked[name] <= may, name


HERE = {"platform": "linux", "maxsize": 2**63 - 1, "byteorder": "little"}


@pytest.mark.parametrize(
    ("other", "processor", "refused", "state"),
    [
        ({}, "x86_64", "", "tested"),
        ({}, "aarch64", "", "compiles; a part of its tests was run, in an emulator"),
        ({}, "riscv64", "", "not tested"),
        ({"platform": "darwin"}, "x86_64", "", "not tested"),
        ({"platform": "win32"}, "AMD64", "does not run on Windows itself; install it in WSL 2", "refused"),
        ({"maxsize": 2**31 - 1}, "armv7l", "This Python is 32-bit", "refused"),
        ({"byteorder": "big"}, "s390x", "s390x is big-endian", "refused"),
    ],
)
def test_a_platform_runs_or_is_refused_in_one_sentence(
    other: dict[str, object], processor: str, refused: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "sys", SimpleNamespace(**HERE | other))
    monkeypatch.setattr(machine.platform, "machine", lambda: processor)
    said = machine.platform_refused()
    assert said.count(". ") == 0
    assert said.endswith("." if refused else "")
    assert refused in said
    assert bool(said) == bool(refused)
    assert machine.platform_state() == f"{machine.platform.system()} on {processor}: {state}"


def test_a_level_is_only_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.delenv("ROLLTREE_CPU_LEVEL", raising=False)
    assert machine.cpu_levels() == ("avx2", "default")
    monkeypatch.setenv("ROLLTREE_CPU_LEVEL", "default")
    assert machine.cpu_levels() == ("default",)
    monkeypatch.setenv("ROLLTREE_CPU_LEVEL", "avx512")
    with pytest.raises(MachineError, match=r"'avx512', which this machine lacks; it has avx2, default\."):
        machine.cpu_level()
    monkeypatch.setenv("ROLLTREE_CPU_LEVEL", "avx1024")
    with pytest.raises(MachineError, match="'avx1024'; it must be avx512 or avx2 or default"):
        machine.cpu_level()


def test_the_library_is_the_one_of_the_level() -> None:
    built = cpu_libraries(Path(machine.__file__).parent)
    assert load_library("cpu") == bool(built and machine.has("_cpu"))
    if not load_library("cpu"):
        pytest.skip("the C++ kernels are not built, or not for this level")
    level = built[0].stem.removeprefix("_cpu_")
    assert level in machine.cpu_levels()
    assert torch.ops.rolltree_cpu.vector_bytes() == VECTOR_BYTES[level]
    assert torch.ops.rolltree_cpu.tiles() == {"off": 0, "emulate": 1}.get(
        machine.amx_asked(), torch.ops.rolltree_cpu.tiles()
    )


@pytest.mark.slow
@pytest.mark.parametrize("level", machine.cpu_levels())
def test_a_forced_level_loads_the_other_library(level: str) -> None:
    folder = Path(machine.__file__).parent
    if not (folder / f"_cpu_{level}.so").exists():
        pytest.skip(f"_cpu_{level}.so is not built (ROLLTREE_CPU_ISA=all builds it)")
    program = (
        "import torch; from rolltree.kernels.libraries import load_library; load_library('cpu'); "
        "print(torch.ops.rolltree_cpu.vector_bytes(), torch.ops.rolltree_cpu.tiles())"
    )
    forced = {"ROLLTREE_CPU_LEVEL": level, "ROLLTREE_AMX": "emulate", "ROLLTREE_WITHOUT": ""}
    environment = os.environ | forced
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [str(VECTOR_BYTES[level]), "1"]


def test_a_part_that_is_taken_away_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLTREE_WITHOUT", "_cpu, triton")
    assert not load_library.__wrapped__("cpu")
    assert not machine.has("triton")
    assert machine.has("_host")
    q = torch.zeros(1, 1, 16)
    with use_backend("triton"), pytest.raises(RuntimeError, match="triton is not installed"):
        tree_attention(q, q, q, torch.tensor([1], dtype=torch.int32))
    monkeypatch.setenv("ROLLTREE_WITHOUT", "_gpu")
    with pytest.raises(MachineError, match=r"names '_gpu'; it knows _cpu, _cuda, _host, triton, compiler\."):
        machine.has("_cpu")


def test_a_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.delenv("ROLLTREE_WITHOUT", raising=False)
    assert machine.has("compiler")
    monkeypatch.setenv("ROLLTREE_WITHOUT", "compiler")
    assert not machine.has("compiler")
    monkeypatch.delenv("ROLLTREE_WITHOUT")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not machine.has("compiler")


def test_a_gpu_is_only_lowered_and_the_interpreter_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.delenv("ROLLTREE_GPU_CAPABILITY", raising=False)
    assert machine.gpu_capability(GPU) == machine.gpu_capability(CPU) == (9, 0)
    monkeypatch.setenv("ROLLTREE_GPU_CAPABILITY", "8.0")
    assert machine.gpu_capability(GPU) == machine.gpu_capability(CPU) == (8, 0)
    monkeypatch.setenv("ROLLTREE_GPU_CAPABILITY", "10.0")
    assert machine.gpu_capability(CPU) == (10, 0)
    with pytest.raises(MachineError, match=r"is 10\.0, and cuda:0 has 9\.0; it can only be lowered"):
        machine.gpu_capability(GPU)
    monkeypatch.setenv("ROLLTREE_GPU_CAPABILITY", "hopper")
    with pytest.raises(MachineError, match=r"is 'hopper'; it must be a number such as 8\.0"):
        machine.gpu_capability(CPU)


@pytest.mark.parametrize(
    ("variable", "known"),
    [("ROLLTREE_AMX", "off or emulate"), ("ROLLTREE_BF16", "widen"), ("ROLLTREE_FEW_ROWS", "many or few")],
)
def test_what_nobody_knows_is_refused_before_a_library_is_loaded(
    variable: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "on")
    with pytest.raises(MachineError, match=f"{variable} is 'on'; it must be {known}, or not set"):
        load_library.__wrapped__("cpu")
