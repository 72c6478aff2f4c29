"""Compiles Triton kernels ahead of time for GPUs that are not there, and reads their machine code.

``python -m tests.kernels.aot.harness [op ...] [--arch 90] [--json]`` prints one line a kernel and architecture:
registers, stack, shared memory, CTAs an SM; and one for each main loop on sm_90 and sm_100 (`machine_code`). Each
module beside this file lists its kernels in ``CASES: list[AotCase]``. TRITON_INTERPRET must not be set: the interpreter
replaces the compiler.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import machine_code

HERE = Path(__file__).parent
RESULTS = HERE.parents[2] / "bench" / "results"
STATIC = RESULTS / "static-sm_90"
READ = (90, 100)  # architectures whose machine code is read
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a block may ask for
OPS = sorted(p.stem for p in HERE.glob("*.py") if p.stem not in ("__init__", "harness", "machine_code"))


SAMPLE = (
    "advance",
    "decode merge D128",
    "decode partial D64 bf16",
    "decode slots of pages of 16",
    "divergence jsd V=151936",
    "gradient fp32 bf16 options V=151936",
    "linear 4096x12288 bf16",
    "low rank inner bf16",
    "mamba scan D128 V64 bf16",
    "norm gradient 128 bf16",
    "ppo k3 mask",
    "sample scan bf16",
    "statistics fp32 V=151936",
    "store 16/8 D128 bf16 normed",
    "tree forward D64 bf16",
)
"""Cases that the default tests compile, for sm_90; `make aot` compiles all."""


@dataclass(frozen=True)
class AotCase:
    """One kernel with the arguments that one launch of it would have.

    ``signature`` maps every run-time argument to its type (``"*bf16"``, ``"i32"``, ``"fp32"``); ``constexprs`` maps the
    others to their values (None for an absent pointer). Pointers are taken as aligned to 16 bytes, as torch's allocator
    gives them, but for those that the kernel takes as they come; an integer that a launch would see as a multiple of 16
    is written ``"i32:16"``.
    """

    name: str
    fn: Any  # a triton.jit function, autotuned or not
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    fp_fusion: bool = True
    needs_wgmma: bool = False
    multiply_adds: int | None = None  # one round of a main loop needs; if given, loops must have no `faults`
    elements: int = 0  # of vectors that a round copies, for `faults`
    archs: tuple[int, ...] = tuple(SHARED_LIMIT)  # those it is launched on


@dataclass(frozen=True)
class LoopFigures:
    """A main loop on sm_90 or sm_100; of the latter nothing is modelled."""

    instructions: int  # a warp, each round
    tensor: dict[str, int]  # tensor instructions of a warp by shape
    tensor_clocks: float
    useful_clocks: float  # that the round's multiply-adds need
    wait: int | None  # the least wait count of its copies
    copies: int
    small_copies: int
    local: int
    modelled: tuple[float, float] | None  # clocks a round with and without overlap; a model (`machine_code`)
    busiest: str  # unit of that model

    def line(self) -> str:
        tensor = ""
        if self.tensor:
            shapes = ", ".join(f"{times} {shape}" for shape, times in self.tensor.items())
            clocks = f"{self.tensor_clocks:.0f} clocks, {self.useful_clocks:.0f} useful " if self.modelled else ""
            tensor = f"tensor {clocks}({shapes})  "
        wait = f"wait {self.wait}, {self.copies} copies, {self.small_copies} small  " if self.copies else ""
        line = f"    {self.instructions:>5} instr/warp  {tensor}{wait}{self.local} local"
        if self.modelled:
            line += f"  modelled {self.modelled[0]:.0f} to {self.modelled[1]:.0f} clocks ({self.busiest})"
        return line


@dataclass(frozen=True)
class AotResult:
    case: str
    arch: int
    registers: int = 0
    stack: int = 0  # bytes a thread
    shared: int = 0  # bytes a block
    wgmma: bool = False
    ctas: int = 0  # an SM holds, on sm_90 and sm_100
    instructions: int = 0  # of the whole kernel, likewise
    loops: tuple[LoopFigures, ...] = ()  # likewise
    error: str = ""  # what is wrong with it, "" if nothing

    @classmethod
    def of(cls, row: dict[str, Any]) -> AotResult:
        """Make one from a row of ``--json``."""
        return cls(**{**row, "loops": tuple(LoopFigures(**loop) for loop in row["loops"])})

    def line(self) -> str:
        head = f"{self.case:<44} sm_{self.arch:<4}"
        numbers = f"{self.registers:>4} regs {self.stack:>5} B stack {self.shared / 1024:>6.1f} KiB shared"
        ctas = f" {self.ctas} CTAs/SM {self.instructions:>5} instr" if self.ctas else ""
        head = f"{head} {numbers}{ctas} {'wgmma' if self.wgmma else '-':<6} {self.error or 'ok'}"
        return "\n".join([head, *(loop.line() for loop in self.loops)])


def cases(op: str) -> list[AotCase]:
    return importlib.import_module(f"tests.kernels.aot.{op}").CASES


def compile_case(case: AotCase, arch: int) -> AotResult:
    """Compile for ``sm_<arch>`` and check: no spills and no atomics, shared memory within the limit; wgmma and loops on
    sm_90."""
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
        anywhere = fn.do_not_specialize_on_alignment
        aligned = [
            i for i, a in enumerate(fn.arg_names)
            if (types[a][0].startswith("*") and a not in anywhere) or types[a][2] == "16"
        ]  # fmt: skip
        source = ASTSource(
            fn,
            {a: t[0] for a, t in types.items()},
            {(fn.arg_names.index(a),): v for a, v in case.constexprs.items()},
            {(i,): [["tt.divisibility", 16]] for i in aligned},
        )
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": case.fp_fusion}
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        return AotResult(case.name, arch, error=f"does not compile: {type(error).__name__}: {error}")
    shared, wgmma = kernel.metadata.shared, "wgmma.mma_async" in kernel.asm["ptx"]
    (code,) = machine_code.read(kernel.asm["cubin"])
    problems = []
    if code.spills:
        problems.append(f"spills registers in a loop, {code.stack} bytes of stack a thread")
    if code.atomics:
        problems.append(f"adds in the order in which programs arrive: {', '.join(sorted(set(code.atomics)))}")
    if shared > SHARED_LIMIT[arch]:
        problems.append(f"needs {shared} bytes of shared memory, sm_{arch} has {SHARED_LIMIT[arch]}")
    if arch not in READ:
        return AotResult(case.name, arch, code.registers, code.stack, shared, wgmma, error="; ".join(problems))
    if arch == 90 and case.needs_wgmma and not wgmma:
        problems.append("does not use wgmma")
    if case.multiply_adds is not None:
        needs = case.num_warps, case.multiply_adds if arch == 90 else None, case.elements
        problems += [fault for loop in code.main_loops for fault in loop.faults(*needs)]
    ctas = machine_code.ctas_per_sm(code.registers, shared, case.num_warps, getattr(kernel.metadata, "tmem_size", 0))
    loops = tuple(loop_figures(loop, case, modelled=arch == 90) for loop in code.main_loops)
    count, error = len(code.instructions), "; ".join(problems)
    return AotResult(case.name, arch, code.registers, code.stack, shared, wgmma, ctas, count, loops, error)


def loop_figures(loop: machine_code.Loop, case: AotCase, *, modelled: bool) -> LoopFigures:
    model = loop.modelled(case.num_warps) if modelled else None
    return LoopFigures(
        loop.count,
        dict(loop.tensor),
        loop.tensor_clocks(case.num_warps) if model else 0.0,
        (case.multiply_adds or 0) / machine_code.MULTIPLY_ADDS if model else 0.0,
        min(loop.waits, default=None),
        loop.copies,
        loop.small_copies,
        loop.local,
        (model.overlapped, model.serial) if model else None,
        model.busiest if model else "",
    )


def _compile_by_index(op: str, index: int, arch: int) -> AotResult:
    return compile_case(cases(op)[index], arch)


def compile_all(ops: list[str], archs: list[int], sample: bool = False) -> list[AotResult]:
    """Compile every case of ``ops``, or with ``sample`` those of `SAMPLE`, for every architecture, in parallel.

    Raises:
        ValueError: an op has none.
    """
    from triton.runtime.cache import triton_key

    chosen = [(op, i, case) for op in ops for i, case in enumerate(cases(op)) if not sample or case.name in SAMPLE]
    if none := set(ops) - {op for op, _, _ in chosen}:
        raise ValueError(f"tests/kernels/aot lists no kernel of {', '.join(sorted(none))}.")
    triton_key()  # hashes the whole compiler: here, and not in each process
    jobs = [(op, i, arch) for op, i, case in chosen for arch in archs if arch in case.archs]
    workers = max(1, min(len(jobs), len(os.sched_getaffinity(0))))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(_compile_by_index, *zip(*jobs, strict=True))) if jobs else []


def table_file(of: str = "", arch: int = 90) -> Path:
    """Return the file with the figures of this version of Triton."""
    import triton

    return RESULTS / f"static-sm_{arch}" / f"{of}triton-{triton.__version__}.jsonl"


def read_table(arch: int = 90) -> dict[str, AotResult]:
    """The written figures by case; {} if none are written for this version of Triton."""
    file = table_file(arch=arch)
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {row["case"]: AotResult.of(row) for row in rows}


def write_table(results: list[AotResult], arch: int) -> None:
    """Bring the rows of ``results`` up to date; other cases' rows stay. Clocks named modelled are of a model.

    Raises:
        ValueError: two cases have one name.
    """
    compiled = [r for r in results if r.arch == arch and not r.error.startswith("does not compile")]
    named = Counter(r.case for r in compiled)
    if twice := [name for name, times in named.items() if times > 1]:
        raise ValueError(f"Several cases are named {', '.join(twice)}; give each its own name.")
    listed = {case.name for op in OPS for case in cases(op)}
    rows = {name: r for name, r in read_table(arch).items() if name in listed} | {r.case: r for r in compiled}
    table_file(arch=arch).write_text("".join(json.dumps(asdict(rows[case])) + "\n" for case in sorted(rows)))


TABLED = re.compile(r"(tree (forward|dq|dkdv)|decode partial) D(64|128|256) bf16")
PAGE = """# The main loops of attention and decoding on sm_90

Machine code of the kernels in bf16, groups of 4 query heads, without window and softcap: a round of the loop over
wholly visible tiles, and that over masked ones where there is one. Nothing here was measured on a GPU. Written by
`make aot-write`; `tests/kernels/aot/machine_code.py` says what the columns count, and how the modelled clocks are made.

- *tensor*: clocks of the tensor cores a round, and those that its products need. They differ where the operands of a
  narrow product take longer to read than to multiply, and for mma.sync; no product is computed twice. Of dK/dV of
  D = 256 a round of one of its two programs, each of which computes all scores for half of the columns.
- *wait*: copies that may be under way when a round begins. *small*: copies of less than 16 bytes a thread: of the ends
  of subtrees where tiles are masked, and of lse and delta for D = 256 of dK/dV. There tiles fill 224 of the 227 KiB of
  shared memory, and 16 bytes for each of 256 threads would be 4 KiB a vector and stage. Issuing small copies takes at
  most 1.7 % of a round's modelled clocks, and 0.8 % of those of dK/dV.
- *local*: spilled registers, loaded and stored.
- *modelled*: clocks of a round if everything overlaps, and if tensor cores and instructions take turns. A model.

"""


PAGE_100 = """# The main loops of attention and decoding on sm_100

Machine code of the Triton kernels in bf16, as in [static-sm_90](../static-sm_90/table.md). Nothing here was run on a
GPU, and nothing is modelled. Written by `make aot-write`.

- *tensor*: instructions of a round. UTCHMMA is tcgen05's product of whole tiles, whose size is not in its name, and is
  issued by one thread; HMMA is mma.sync's of a warp.
- *wait*: copies that may be under way when a round begins.
- *small*, *local*: copies of less than 16 bytes a thread; spilled registers, loaded and stored.

| kernel | compiler | loop | instr / warp | tensor | wait | small | local | CTAs / SM |
|---|---|---|---|---|---|---|---|---|
"""


def _rows(arch: int) -> Iterator[tuple[str, str, str, str, LoopFigures]]:
    """Kernel, compiler, kind of loop, CTAs an SM and figures, of all versions of Triton; of a kernel's second loop
    without what is said of the first."""
    folder = RESULTS / f"static-sm_{arch}"
    found = []
    for file in folder.glob("triton-*.jsonl"):
        compiler = file.stem.replace("-", " ")
        rows = [AotResult.of(row) for row in map(json.loads, file.read_text().splitlines())]
        found += [(row, compiler) for row in rows if TABLED.fullmatch(row.case)]
    for row, compiler in sorted(
        found, key=lambda of: (of[0].case.split(" D")[0], int(of[0].case.split()[2][1:]), of[1])
    ):
        for i, loop in enumerate(row.loops):
            head = (row.case.removesuffix(" bf16"), compiler, str(row.ctas)) if i == 0 else ("", "", "")
            yield *head[:2], ("full", "masked")[i] if len(row.loops) == 2 else "", head[2], loop


def page() -> str:
    """The rows of sm_90 as tables."""
    from .. import sampling_figures

    lines = ["| kernel | compiler | loop | instr / warp | tensor | wait | small | local | CTAs / SM | modelled |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for name, compiler, kind, ctas, loop in _rows(90):
        assert loop.modelled is not None
        lines.append(
            f"| {name} | {compiler} | {kind} | {loop.instructions} | "
            f"{loop.tensor_clocks:.0f} / {loop.useful_clocks:.0f} | {loop.wait} of {loop.copies} | "
            f"{loop.small_copies} | {loop.local} | {ctas} | {loop.modelled[0]:.0f} to {loop.modelled[1]:.0f} |"
        )
    return PAGE + "\n".join(lines) + "\n" + sampling_figures.section()


def page_100() -> str:
    """The rows of sm_100 as a table."""
    return PAGE_100 + "".join(
        f"| {name} | {compiler} | {kind} | {loop.instructions} | "
        f"{', '.join(f'{times} {shape}' for shape, times in loop.tensor.items())} | {loop.wait} of {loop.copies} | "
        f"{loop.small_copies} | {loop.local} | {ctas} |\n"
        for name, compiler, kind, ctas, loop in _rows(100)
    )


def worse(now: AotResult, before: AotResult) -> list[str]:
    """Return the figures of the main loops in which a kernel got worse; without loops, those of its whole length."""
    lost = []
    if not before.loops and now.instructions > before.instructions:
        lost.append(f"{now.instructions} instructions, before {before.instructions}")
    if now.ctas < before.ctas:
        lost.append(f"{now.ctas} CTAs an SM, before {before.ctas}")
    if len(now.loops) != len(before.loops):
        return [*lost, f"{len(now.loops)} main loops, before {len(before.loops)}"]
    for i, (loop, old) in enumerate(zip(now.loops, before.loops, strict=True)):
        for name in ("instructions", "tensor_clocks", "small_copies", "local"):
            if getattr(loop, name) > getattr(old, name):
                lost.append(f"loop {i}: {name} {getattr(loop, name)}, before {getattr(old, name)}")
        if (loop.wait or 0) < (old.wait or 0):
            lost.append(f"loop {i}: wait count {loop.wait}, before {old.wait}")
    return lost


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for GPUs that are not there.")
    parser.add_argument("ops", nargs="*", help=f"which of: {', '.join(OPS)} (default: all)")
    parser.add_argument("--arch", type=int, action="append", choices=sorted(SHARED_LIMIT), help="default: all")
    parser.add_argument("--sample", action="store_true", help="only the cases that the default tests compile")
    parser.add_argument("--write", action="store_true", help=f"write the figures below {RESULTS}")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set; unset it, the interpreter replaces the compiler.")
    if unknown := set(args.ops) - set(OPS):
        parser.error(f"no case module named {', '.join(sorted(unknown))} in {HERE.name}/")
    results = compile_all(args.ops or OPS, args.arch or sorted(SHARED_LIMIT), args.sample)
    if args.write:
        from .. import sampling_figures

        for arch in READ:
            write_table(results, arch)
        if "sampling" in (args.ops or OPS):
            sampling_figures.write()
        (STATIC / "table.md").write_text(page())
        (RESULTS / "static-sm_100" / "triton.md").write_text(page_100())
    if args.json:
        print(json.dumps([asdict(r) for r in results]))
    else:
        print("\n".join(r.line() for r in results))
    return 1 if any(r.error for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
