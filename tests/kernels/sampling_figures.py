"""Figures of the machine code of sampling on sm_90: instructions a token, and the share of copy bandwidth they allow.

``python -m tests.kernels.sampling_figures`` prints the figures of each kernel as JSON; with ``make aot-write`` they are
written to bench/results/static-sm_90, where :func:`section` puts them together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

from rolltree.kernels.sampling.triton import BLOCK, WHOLE

from .aot import harness, machine_code, sampling

VOCAB = 151936
BANDWIDTH = 3.35e12  # bytes a second, of an H100 SXM
LANES = machine_code.SMS * 4 * 32 * machine_code.CLOCK  # instructions of a thread that it issues a second
Way = tuple[machine_code.Instruction, ...]
Figures = dict[str, float | str]


def read(case: harness.AotCase) -> tuple[machine_code.Kernel, harness.AotResult]:
    found: list[machine_code.Kernel] = []

    def keep(cubin: bytes) -> list[machine_code.Kernel]:
        found[:] = real(cubin)
        return found

    real = machine_code.read
    with mock.patch.object(machine_code, "read", keep):
        result = harness.compile_case(case, 90)
    if result.error:
        raise RuntimeError(result.line())
    (kernel,) = found
    return kernel, result


def _wide(i: machine_code.Instruction) -> bool:
    return i.name == "LDG" and i.bytes == 16


def _most(ways: list[Way], counts: Callable[[machine_code.Instruction], int]) -> list[Way]:
    """Return the kernels that have most of what ``counts``."""
    found = [sum(map(counts, way)) for way in ways]
    return [way for way, many in zip(ways, found, strict=True) if many == max(found)]


def _round(kernel: machine_code.Kernel, loop: machine_code.Loop, noise: bool = True) -> int:
    """Instructions of a warp on the longest way through a loop that ends within the row, with all words that it can
    make or with none."""
    begin = kernel.instructions.index(loop.instructions[0])
    labels = {name: at - begin for name, at in kernel.labels.items()}
    ways = list(replace(kernel, instructions=loop.instructions, labels=labels).ways())
    ways = _most(ways, lambda i: (i.name == "LDG") * (1 if _wide(i) else -1))
    ways = _most(ways, lambda i: (i.name == "I2FP") * (1 if noise else -1))
    return max(map(len, ways))


def _searches(kernel: machine_code.Kernel) -> int:
    """Instructions of a warp for a round of every search among registers."""
    return sum(loop.count for loop in kernel.loops if not loop.loads)


def _scan(kernel: machine_code.Kernel, race: bool) -> tuple[float, float]:
    """The shortest and the longest way through a whole block: temperature 1 and all tokens with a weight; another
    temperature and some without."""
    ways = _most(list(kernel.ways()), _wide)
    if race:  # Philox's products
        ways = _most(ways, lambda i: i.opcode.startswith("IMAD.WIDE"))
    else:  # neither these, nor the least logit
        ways = _most(ways, lambda i: -(i.name == "FMNMX" and not i.operands.endswith("!PT")))
        ways = _most(ways, lambda i: -i.opcode.startswith("IMAD.WIDE"))
    return min(map(len, ways)) / BLOCK, max(map(len, ways)) / BLOCK


def _settle(kernel: machine_code.Kernel, rounds: int) -> tuple[float, float]:
    """Return the figures of a row whose sample led well, and of one that is searched as a whole.

    Each looks for the last of tied tokens, up to the row's end.
    """
    through = [loop for loop in kernel.loops if loop.loads]
    places = next(loop for loop in through if all(i.name != "FADD" for i in loop.instructions))  # it sums no weights
    passes = sorted(_round(kernel, loop) for loop in through if loop is not places)
    led = (kernel.longest + (rounds - 1) * _searches(kernel)) / VOCAB + _round(kernel, places) / WHOLE
    return led, kernel.longest / VOCAB + (_round(kernel, places) + rounds * passes[0] + passes[1]) / WHOLE


def figures(case: harness.AotCase) -> Figures:
    """``shortest`` and ``longest``: instructions of a thread for each token of a row; but for a few hundred that a
    program begins and ends with, where it goes through a row."""
    kernel, result = read(case)
    kind, dtype = case.name.split()[1:3] if "finish" not in case.name else ("finish", "")
    rounds = 16 if dtype == "bf16" else 32  # of a search, as many as the bits of a logit allow
    if kind == "scan":
        shortest, longest = _scan(kernel, case.name.endswith("race"))
    elif kind == "settle":
        shortest, longest = _settle(kernel, rounds)
    elif kind in ("gather", "race"):  # the shortest: of a search that is not the row's last
        (loop,) = kernel.loops
        shortest, longest = (_round(kernel, loop, noise) / BLOCK for noise in (False, True))
    else:
        shortest = kernel.longest / VOCAB
        longest = shortest + (rounds - 1) * _searches(kernel) / VOCAB
    threads = 32 * case.num_warps
    return {
        "case": case.name,
        "shortest": round(threads * shortest, 2),
        "longest": round(threads * longest, 2),
        "wide_loads": sum(map(_wide, kernel.instructions)),
        "ctas": result.ctas,
    }


def write() -> None:
    """The figures of this version of Triton."""
    rows = [figures(case) for case in sampling.CASES]
    harness.table_file("sampling-").write_text("".join(json.dumps(row) + "\n" for row in rows))


ROWS = {  # what a row asks for: the filters that are compiled, and the searches beyond the candidates
    "no filter": ("", ()),
    "top-k": ("top_k", ()),
    "top-p": ("top_p", ()),
    "min-p": ("min_p", ()),
    "all three": ("top_k top_p min_p", ()),
    "top-k, flat": ("top_k", ("count",)),
    "top-p, flat": ("top_p", ("mass",)),
    "min-p, flat": ("min_p", ()),
    "all three, flat": ("top_k top_p min_p", ("count", "mass")),
}
TEXT = f"""
# Sampling on sm_90

Instructions of a thread for each token of a row of {VOCAB:,} logits at temperature 1, and the share of an H100's copy
bandwidth (3.35 TB/s) at which its 132 x 128 lanes issue them at 1.755 GHz, if nothing waits; above 100 % the memory is
slower. A model: it knows neither latencies nor launches. Searches take as many rounds as the bits of a logit allow.

- *flat*: a row whose candidates do not hold the last token that is kept. In brackets, if the sample misleads, so that
  the whole row is searched, each time, and raced.
- *scan*, *select*, *finish*: of every row with filters. Of flat rows *select* counts searches that do not run.
- *bracket*, *gather*, *settle*: of flat rows alone; for all three filters by count and by mass.
- *race*: of flat rows that min-p cuts; the others' tokens are judged while they are gathered.

In bf16, 60 % is 29.5 instructions a token, which a row without filters takes: ten of them are Philox's. A flat row
whose filters keep most of its tokens races as many, and finds its cut besides, so it cannot reach that.

| row | logits | compiler | scan | select | bracket | gather | settle | race | finish | together | of copy bandwidth |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def _share(dtype: str, instructions: float) -> str:
    return f"{100 * (2 if dtype == 'bf16' else 4) * LANES / BANDWIDTH / instructions:.0f} %"


def _lines(compiler: str, rows: dict[str, Figures]) -> Iterator[tuple[str, ...]]:
    def of(name: str, end: str = "longest") -> float:
        return float(rows[f"sample {name}"][end])

    for dtype in ("bf16", "fp32"):
        for name, (filters, searches) in ROWS.items():
            flat = name.endswith("flat")
            parts = {"scan": of(f"scan {dtype}" if filters else f"scan {dtype} race", "shortest")}
            parts["select"] = of(f"select {dtype} {filters}") if filters else 0.0
            for kind in ("bracket", "gather", "settle"):
                ends = ["shortest" if kind == "settle" else "longest" for _ in searches]
                if kind == "gather":  # the last judges groups too
                    ends[:-1] = ["shortest"] * len(ends[:-1])
                parts[kind] = sum(of(f"{kind} {dtype} {by}", end) for by, end in zip(searches, ends, strict=True))
            misled = sum(of(f"settle {dtype} {by}") for by in searches) + of(f"race {dtype}")
            parts["race"] = of(f"race {dtype}") if flat and not searches else 0.0
            parts["finish"] = of("finish filtered" if filters else "finish", "shortest")
            sums = [sum(parts.values())] + ([sum(parts.values()) - parts["settle"] + misled] if searches else [])
            told = [f"{value:.1f}" if value else "" for value in parts.values()]
            for texts in ([f"{total:.1f}" for total in sums], [_share(dtype, total) for total in sums]):
                told.append(texts[0] + "".join(f" ({text})" for text in texts[1:]))
            yield name, dtype, compiler, *told


def section() -> str:
    """The rows of all versions of Triton, as a table."""
    lines = list[tuple[str, ...]]()
    for file in sorted(harness.STATIC.glob("sampling-triton-*.jsonl")):
        rows = {row["case"]: row for row in map(json.loads, file.read_text().splitlines())}
        lines += _lines(file.stem.removeprefix("sampling-").replace("-", " "), rows)
    order = {name: at for at, name in enumerate(ROWS)}
    lines.sort(key=lambda line: (line[1], order[line[0]], line[2]))
    return TEXT + "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(json.dumps([figures(case) for case in sampling.CASES]))
