"""Reads machine code of sm_90, and counts that of sm_100: what each loop of a kernel executes, what it waits for, and
how long that should take on sm_90.

    kernel, = read(compiled.asm["cubin"])              # of Triton; of nvcc's cubins every kernel
    for loop in kernel.main_loops:
        loop.count                                     # instructions a warp executes each time round
        loop.tensor                                    # {"HGMMA.64x128x16": 8}, HMMA.16816 for mma.sync
        loop.tensor_clocks(warps)                      # clocks an SM's tensor cores take for all warps of the CTA
        loop.useful_share(warps, multiply_adds)        # of what they compute; multiply_adds: what one round needs
        loop.waits, loop.bulk_copies                   # wait counts of cp.async groups; 0 = waits for the newest copy
        loop.local                                     # local loads and stores: registers spilled where it hurts
        loop.small_copies                              # asynchronous copies under 16 bytes a thread
        loop.faults(warps, multiply_adds, elements)    # sentences on all of these, [] for a loop as it should be
    kernel.registers, kernel.stack, ctas_per_sm(kernel.registers, shared_bytes, warps)

A loop is what lies between a label and the last branch back to it; ``main_loops`` are the innermost ones with tensor
instructions or, where a kernel has none, all innermost ones. Code is counted as if every predicate held.

Two warp groups that compute the same rows show as a useful share below one: the shape of the instructions times the
warps is more than the products of the tile. Wait counts are of committed groups, so with two copies a round a count of
2 leaves one whole round in flight.

The clocks of `Loop.modelled` are a model and no measurement. A round of all warps of a CTA takes the clocks of its
busiest unit if everything overlaps, the tensor cores' and the issue slots' together if those do not:

    issue    one instruction a clock for each of an SM's four schedulers
    fma      16 lanes of integer multiplies, 32 of fp32                    clocks a warp: IMAD 2, FFMA, FADD, FMUL 1
    alu      16 lanes: integers, logic, compare, select, convert           2
    xu       4 lanes: exp2, log2, reciprocals                              8
    lsu      128 bytes a clock for the SM                                  1, 2, 4 for 4, 8, 16 bytes a thread
    tensor   HGMMA 64xNx16: N / 2 for the SM, or the clocks of reading its operands from shared memory at 128 bytes a
             clock where that is more (A of 64 rows unless it is in registers, and B); HMMA.16816: 6.5 of a quarter,
             as mma.sync reaches about 62 % of wgmma (Luo et al. 2024, arXiv 2402.13499)
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SMS, CLOCK = 132, 1.755e9  # of an H100 SXM: multiprocessors, boost clock in Hz
MULTIPLY_ADDS = 2048  # dense bf16 ones that an SM's tensor cores do in a clock

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_SECTION = re.compile(r"^\.text\.(\S+):")
_HGMMA = re.compile(r"HGMMA\.64x(\d+)x16")


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str  # with its modifiers: LDGSTS.E.BYPASS.128
    operands: str
    predicate: str = ""

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def bytes(self) -> int:
        """Bytes a thread moves, of loads, stores and copies."""
        for width, size in ((".128", 16), (".64", 8), (".U8", 1), (".S8", 1), (".U16", 2), (".S16", 2)):
            if width in self.opcode:
                return size
        if self.name in ("LDSM", "STSM"):
            return 4 * int(self.opcode[-1]) if self.opcode.endswith((".2", ".4")) else 4
        return 4


@dataclass(frozen=True)
class Modelled:
    """Clocks an SM takes for one round of a loop by all warps of a CTA. A model, not a measurement."""

    overlapped: float  # the busiest unit alone
    serial: float  # tensor cores and issue slots one after the other
    busiest: str

    def tflops(self, multiply_adds: int) -> tuple[float, float]:
        """TFLOP/s of an H100 that does nothing but this loop, without overlap and with."""
        flops = 2 * multiply_adds * SMS * CLOCK / 1e12
        return flops / self.serial, flops / self.overlapped


ATOMICS = ("RED", "REDG", "REDS", "ATOM", "ATOMG", "ATOMS", "UBLKRED", "UTMAREDG")
"""Atomic operations on memory: of a thread, in bulk, and of the tensor memory accelerator. REDUX is none."""


@dataclass(frozen=True)
class Loop:
    instructions: tuple[Instruction, ...]

    @property
    def count(self) -> int:
        return len(self.instructions)

    def _of(self, *names: str) -> Iterator[Instruction]:
        return (i for i in self.instructions if i.name in names)

    @cached_property
    def tensor(self) -> Counter[str]:
        """Tensor instructions by shape."""
        shapes = (".".join(i.opcode.split(".")[:2]) for i in self._of("HGMMA", "HMMA", "QGMMA", "IGMMA", "UTCHMMA"))
        return Counter(shapes)

    @property
    def waits(self) -> list[int]:
        """Return the number of groups of copies that may still be under way, for each wait (cp.async.wait_group)."""
        found = (re.fullmatch(r"SB\d+, (0x[0-9a-f]+)", i.operands) for i in self._of("DEPBAR"))
        return [int(m[1], 16) for m in found if m]

    @property
    def tensor_waits(self) -> list[int]:
        """Return the number of groups of wgmma that may still be under way, for each wait (wgmma.wait_group)."""
        found = (re.fullmatch(r"gsb\d+, (0x[0-9a-f]+)", i.operands) for i in self._of("WARPGROUP"))
        return [int(m[1], 16) for m in found if m]

    @property
    def copies(self) -> int:
        """Asynchronous copies to shared memory (cp.async)."""
        return sum(1 for _ in self._of("LDGSTS"))

    @property
    def bulk_copies(self) -> int:
        """Copies of whole tiles by the copy engine (TMA); they are waited for on barriers, not by counts."""
        return sum(1 for _ in self._of("UTMALDG", "UBLKCP"))

    @property
    def small_copies(self) -> int:
        return sum(i.bytes < 16 for i in self._of("LDGSTS"))

    @property
    def local(self) -> int:
        return sum(1 for _ in self._of("LDL", "STL"))

    @property
    def loads(self) -> Counter[int]:
        """Loads from global memory into registers by bytes a thread."""
        return Counter(i.bytes for i in self._of("LDG"))

    @property
    def barriers(self) -> int:
        return sum(1 for _ in self._of("BAR"))

    def multiply_adds(self, warps: int) -> int:
        """Return the multiply-adds of the tensor instructions of all warps of a CTA in one round."""
        total = 0
        for shape, times in self.tensor.items():
            if m := _HGMMA.fullmatch(shape):
                total += times * (warps // 4) * 64 * int(m[1]) * 16
            elif shape in ("HMMA.16816", "HMMA.1688"):
                total += times * warps * 16 * 8 * int(shape[8:])
            else:
                raise ValueError(f"{shape} has no known size; add it to Loop.multiply_adds.")
        return total

    def useful_share(self, warps: int, multiply_adds: int) -> float:
        """Share of the computed multiply-adds that one round of the loop needs; 0 if it computes none."""
        computed = self.multiply_adds(warps)
        return multiply_adds / computed if computed else 0.0

    def tensor_clocks(self, warps: int) -> float:
        """Clocks of an SM's tensor cores for one round by all warps of a CTA (model above)."""
        clocks = 0.0
        for i in self._of("HGMMA", "HMMA"):
            if m := _HGMMA.match(i.opcode):
                columns, a_in_registers = int(m[1]), not i.operands.split(", ")[1].startswith("gdesc")
                operands = 32 * columns + (0 if a_in_registers else 64 * 16 * 2)  # bytes of shared memory
                clocks += warps / 4 * max(columns / 2, operands / 128)
            else:
                clocks += warps / 4 * 6.5 * int(i.opcode.split(".")[1][3:]) / 16
        return clocks

    def faults(self, warps: int, multiply_adds: int | None, elements: int = 0) -> list[str]:
        """Return what keeps the kernel from the speed its tile allows; empty for a main loop that is right.

        ``elements``: of vectors that one round copies, with a single element for a row or key of the tile. Triton
        copies them one a thread, or (3.6) to each thread those that it reads, which of the columns of a product are 2
        of 8. A tile must be copied by 16 bytes. ``multiply_adds``: None on sm_100, whose code does not tell.
        """
        found = []
        if multiply_adds is not None and self.tensor and self.multiply_adds(warps) != multiply_adds:
            found.append(f"computes {self.multiply_adds(warps)} multiply-adds a round where {multiply_adds} are needed")
        if self.copies and not min(self.waits, default=0):
            found.append("waits for the copy that it has just issued")
        if self.local:
            found.append(f"{self.local} loads and stores of spilled registers in a loop")
        if self.small_copies > elements // 8:
            found.append(f"{self.small_copies} copies under 16 bytes in a loop")
        return found

    def modelled(self, warps: int) -> Modelled:
        quarter = dict.fromkeys(("issue", "fma", "alu", "xu"), 0.0)
        lsu = 0.0
        for i in self.instructions:
            quarter["issue"] += 1
            if i.name in ("FFMA", "FADD", "FMUL", "FSWZADD", "FFMA2", "HFMA2", "HADD2", "HMUL2"):
                quarter["fma"] += 1
            elif i.name in ("IMAD", "IDP"):
                quarter["fma"] += 2
            elif i.name in ("MUFU", "F2I", "I2F", "FRND", "POPC", "FLO"):
                quarter["xu"] += 8
            elif i.name in ("LDS", "STS", "LDG", "STG", "LDGSTS", "LDSM", "STSM", "LDL", "STL", "SHFL", "RED", "ATOM"):
                lsu += max(1, i.bytes / 4)
            elif i.name not in ("HGMMA", "HMMA", "BRA", "BAR", "DEPBAR", "LDGDEPBAR", "WARPGROUP", "NOP"):
                quarter["alu"] += 2
        units = {name: clocks * warps / 4 for name, clocks in quarter.items()}
        units |= {"lsu": lsu * warps, "tensor": self.tensor_clocks(warps)}
        busiest = max(units, key=lambda name: units[name])
        return Modelled(units[busiest], max(units[busiest], units["tensor"] + units["issue"]), busiest)


@dataclass(frozen=True)
class Kernel:
    name: str
    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]  # the innermost ones, by address
    labels: Mapping[str, int]  # index of the instruction that follows
    registers: int  # a thread
    stack: int  # bytes a thread

    @property
    def main_loops(self) -> tuple[Loop, ...]:
        return tuple(loop for loop in self.loops if loop.tensor) or self.loops

    @property
    def spills(self) -> bool:
        """Return True if registers are spilled inside a loop, or anywhere in a kernel without one."""
        return any(loop.local for loop in self.loops) if self.loops else self.stack > 0

    @property
    def atomics(self) -> list[str]:
        """Return the instructions whose result depends on the order in which threads arrive; AND and OR have none."""
        return [i.opcode for i in self.instructions if i.name in ATOMICS and not i.opcode.endswith((".AND", ".OR"))]

    def ways(self) -> Iterator[tuple[Instruction, ...]]:
        """Return the instructions on every way through the kernel: both sides of branches and exits, each loop once."""
        waiting = [(0, tuple[Instruction, ...]())]
        while waiting:
            at, done = waiting.pop()
            while at < len(self.instructions):
                this = self.instructions[at]
                done, at = (*done, this), at + 1
                target = _target(this, self.labels, at - 1)
                uniform = this.operands.startswith(("UP", "!UP"))
                if this.name == "EXIT":
                    if this.predicate in ("", "PT"):
                        break
                    yield done
                if target is not None and target >= at:
                    if this.predicate or uniform:
                        waiting.append((target, done))
                    else:
                        at = target
            yield done

    @property
    def longest(self) -> int:
        """Instructions on the longest of the `ways`."""
        count = [0] * (len(self.instructions) + 1)
        for at in reversed(range(len(self.instructions))):
            this = self.instructions[at]
            if this.name == "EXIT" and this.predicate in ("", "PT"):
                count[at] = 1
                continue
            after = count[at + 1]
            target = _target(this, self.labels, at)
            if target is not None and target > at:
                uniform = this.operands.startswith(("UP", "!UP"))
                after = max(after, count[target]) if this.predicate or uniform else count[target]
            count[at] = 1 + after
        return count[0]


def tool(name: str) -> str:
    """A program of the CUDA toolkit: the one that Triton ships, which knows its cubins, or else the one on PATH."""
    from triton.backends import nvidia

    shipped = Path(next(iter(nvidia.__path__)), "bin", name)
    found = str(shipped) if shipped.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is neither in Triton's package nor on PATH; install the CUDA toolkit.")
    return found


def read(cubin: bytes) -> list[Kernel]:
    """Every kernel of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = _output(tool("nvdisasm"), "--print-code", file.name)
        return parse(code, _output(tool("cuobjdump"), "--dump-resource-usage", file.name))


def parse(code: str, usage: str) -> list[Kernel]:
    """Read what nvdisasm and cuobjdump print of a cubin, kernel by kernel."""
    resources = {m[1]: m[2] for m in re.finditer(r"Function (\S+):\s*\n\s*(.*)", usage)}
    if not resources:
        raise ValueError("the cubin has no kernel that cuobjdump can read; is it of a newer CUDA than the tools?")
    kernels = []
    for name, lines in _functions(code):
        instructions, loops, labels = _loops(lines)
        use = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", resources[name])}
        kernels.append(Kernel(name, instructions, loops, labels, use["REG"], use["STACK"] + use["LOCAL"]))
    return kernels


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _functions(code: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in code.splitlines():
        if section := _SECTION.match(line):
            if lines:
                yield name, lines
            name, lines = section[1], []
        elif name:
            lines.append(line)
    if lines:
        yield name, lines


def _target(instruction: Instruction, labels: Mapping[str, int], default: int) -> int | None:
    """Return the target of a branch; None for another instruction, or a branch of warps that have parted."""
    branches = instruction.name == "BRA" and ".DIV" not in instruction.opcode
    found = re.search(r"`\((\.L_x_\d+)\)", instruction.operands) if branches else None
    return labels.get(found[1], default) if found else None


def _loops(lines: list[str]) -> tuple[tuple[Instruction, ...], tuple[Loop, ...], Mapping[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}  # index of the instruction that follows
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif m := _INSTRUCTION.match(line):
            instructions.append(Instruction(int(m[1], 16), m[3], m[4], m[2] or ""))
    bodies: dict[int, int] = {}  # begin -> last branch back to it
    for at, instruction in enumerate(instructions):
        target = _target(instruction, labels, at)
        if target is not None and target < at:  # a branch to itself only ends the program
            bodies[target] = at
    spans = sorted(bodies.items())
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return tuple(instructions), tuple(Loop(tuple(instructions[a : b + 1])) for a, b in inner), labels


def ctas_per_sm(registers: int, shared: int, warps: int, tensor_columns: int = 0) -> int:
    """CTAs that one SM of sm_90 or sm_100 holds: 64 K registers (given out by 256 a warp), 228 KiB (1 KiB a CTA), 64
    warps, and of sm_100's tensor memory 512 columns."""
    by_registers = 65536 // (warps * 256 * -(-registers * 32 // 256))
    return min(32, 64 // warps, by_registers, 228 * 1024 // (shared + 1024), 512 // max(tensor_columns, 16))
