"""Compiles Triton kernels ahead of time for GPUs that are not there, and reads what the machine code uses.

``python tests/kernels/aot/harness.py [op ...] [--arch 90] [--json]`` prints one line a kernel and architecture:
registers, stack (where spilled registers go), shared memory, wgmma. Each module beside this file lists its kernels in
``CASES: list[AotCase]``. TRITON_INTERPRET must not be set: the interpreter replaces the compiler.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a block may ask for
OPS = sorted(p.stem for p in HERE.glob("*.py") if p.stem not in ("__init__", "harness"))


@dataclass(frozen=True)
class AotCase:
    """One kernel with the arguments that one launch of it would have.

    ``signature`` maps every run-time argument to its type (``"*bf16"``, ``"i32"``, ``"fp32"``); ``constexprs`` maps the
    others to their values (None for an absent pointer). Pointers are taken as aligned to 16 bytes, as torch's allocator
    gives them; an integer that a launch would see as a multiple of 16 is written ``"i32:16"``.
    """

    name: str
    fn: Any  # a triton.jit function, autotuned or not
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    needs_wgmma: bool = False
    archs: tuple[int, ...] = tuple(SHARED_LIMIT)  # those it is launched on


@dataclass(frozen=True)
class AotResult:
    case: str
    arch: int
    registers: int = 0
    stack: int = 0  # bytes a thread; spilled registers live here
    shared: int = 0  # bytes a block
    wgmma: bool = False
    error: str = ""  # what is wrong with it, "" if nothing

    def line(self) -> str:
        head = f"{self.case:<44} sm_{self.arch:<4}"
        numbers = f"{self.registers:>4} regs {self.stack:>5} B stack {self.shared / 1024:>6.1f} KiB shared"
        return f"{head} {numbers} {'wgmma' if self.wgmma else '-':<6} {self.error or 'ok'}"


def cases(op: str) -> list[AotCase]:
    return importlib.import_module(f"tests.kernels.aot.{op}").CASES


def compile_case(case: AotCase, arch: int) -> AotResult:
    """Compile for ``sm_<arch>`` and check: no spills, shared memory within the limit, wgmma where promised (sm_90)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = case.fn
    while not hasattr(fn, "arg_names") or hasattr(fn, "configs") or hasattr(fn, "values"):
        fn = fn.fn  # below @triton.autotune and @triton.heuristics
    try:
        missing = set(fn.arg_names) ^ (case.signature.keys() | case.constexprs.keys())
        if missing:
            raise ValueError(f"arguments named only by the kernel or only by the case: {', '.join(sorted(missing))}")
        types = {a: case.signature.get(a, "constexpr").partition(":") for a in fn.arg_names}
        aligned = [i for i, a in enumerate(fn.arg_names) if types[a][0].startswith("*") or types[a][2] == "16"]
        source = ASTSource(
            fn,
            {a: t[0] for a, t in types.items()},
            {(fn.arg_names.index(a),): v for a, v in case.constexprs.items()},
            {(i,): [["tt.divisibility", 16]] for i in aligned},
        )
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        return AotResult(case.name, arch, error=f"does not compile: {type(error).__name__}: {error}")
    registers, stack = resource_usage(kernel.asm["cubin"])
    shared, wgmma = kernel.metadata.shared, "wgmma.mma_async" in kernel.asm["ptx"]
    problems = [f"spills {stack} bytes of registers a thread"] if stack else []
    if shared > SHARED_LIMIT[arch]:
        problems.append(f"needs {shared} bytes of shared memory, sm_{arch} has {SHARED_LIMIT[arch]}")
    if case.needs_wgmma and arch == 90 and not wgmma:
        problems.append("does not use wgmma")
    return AotResult(case.name, arch, registers, stack, shared, wgmma, "; ".join(problems))


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread, as cuobjdump reads them from the machine code."""
    from triton.backends import nvidia

    tool = Path(next(iter(nvidia.__path__)), "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    use = {name: max(map(int, re.findall(rf"\b{name}:(\d+)", text))) for name in ("REG", "STACK", "LOCAL")}
    return use["REG"], use["STACK"] + use["LOCAL"]


def _compile_by_index(op: str, index: int, arch: int) -> AotResult:
    return compile_case(cases(op)[index], arch)


def compile_all(ops: list[str], archs: list[int]) -> list[AotResult]:
    """Every case of ``ops`` for every architecture, compiled in parallel processes."""
    jobs = [(op, i, arch) for op in ops for i, case in enumerate(cases(op)) for arch in archs if arch in case.archs]
    workers = max(1, min(len(jobs), len(os.sched_getaffinity(0))))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(_compile_by_index, *zip(*jobs, strict=True))) if jobs else []


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for GPUs that are not there.")
    parser.add_argument("ops", nargs="*", help=f"which of: {', '.join(OPS)} (default: all)")
    parser.add_argument("--arch", type=int, action="append", choices=sorted(SHARED_LIMIT), help="default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set; unset it, the interpreter replaces the compiler.")
    if unknown := set(args.ops) - set(OPS):
        parser.error(f"no case module named {', '.join(sorted(unknown))} in {HERE.name}/")
    results = compile_all(args.ops or OPS, args.arch or sorted(SHARED_LIMIT))
    if args.json:
        print(json.dumps([asdict(r) for r in results]))
    else:
        print("\n".join(r.line() for r in results))
    return 1 if any(r.error for r in results) else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[2]))  # run as a script, the repository root is not on the path
    sys.exit(main())
