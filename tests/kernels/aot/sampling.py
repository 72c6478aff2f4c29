"""The sampling kernels: what every row runs, and what filters add; as a module, their instructions a token as JSON."""

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any
from unittest import mock

from rolltree.kernels.sampling.filters import select_kernel
from rolltree.kernels.sampling.narrow import narrow_kernel, race_kernel
from rolltree.kernels.sampling.triton import (
    BLOCK,
    CHOSEN,
    GROUPS,
    ROUND,
    SPLITS,
    STRIP,
    finish_kernel,
    scan_kernel,
)

from . import machine_code
from .harness import AotCase, AotResult, compile_case

Way = tuple[machine_code.Instruction, ...]
VOCAB = 151936
BLOCKS = 64  # of a row of it, a power of two
GIVEN = {
    "logits": "", "temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32", "seed": "*i64",
    "step": "*i64", "row_stride": "i32:16", "vocab": "i32", "blocks": "i32", "number": "i32", "begin": "i32",
    "passes": "i32", **dict.fromkeys(("token", "last_kept", "window"), "*i64"),
    **dict.fromkeys(("bound", "chosen", "mode", "cut_index"), "*i32"),
}  # fmt: skip
CONSTANTS = {
    "BLOCK": BLOCK, "GROUPS": GROUPS, "STRIP": STRIP, "STRIPS": BLOCK // STRIP, "CHOSEN": CHOSEN, "SPLITS": SPLITS,
    "ROUND": ROUND, "BLOCKS": BLOCKS,
}  # fmt: skip
FILTERS = ("top_k", "top_p", "min_p")


def case(name: str, kernel: Any, dtype: str, absent: Collection[str] = (), warps: int = 4, **more: object) -> AotCase:
    """All arguments but the ``absent`` ones, which are None."""
    constants = {n: v for n, v in CONSTANTS.items() if n in kernel.arg_names} | more | dict.fromkeys(absent)
    signature = {n: GIVEN.get(n, "*fp32") for n in kernel.arg_names if n not in constants} | {"logits": f"*{dtype}"}
    return AotCase(f"sample {name}", kernel, signature, constants, num_warps=warps)


def narrow(dtype: str, mass: bool, last: bool) -> AotCase:
    name = f"narrow {dtype} {'mass' if mass else 'count'}{' last' if last else ''}"
    return case(name, narrow_kernel, dtype, MASS=mass, LAST=last)


def beside(case: AotCase) -> AotCase:
    """Not compiled by the tests: another that they compile has all its code."""
    return replace(case, ci=False)


def selects(dtype: str, *filters: str) -> AotCase:
    absent = [name for name in FILTERS if name not in filters]
    return case(f"select {dtype} {' '.join(filters)}", select_kernel, dtype, absent, warps=8)


DTYPES = ("bf16", "fp32")
CASES = [
    *(case(f"scan {dtype} race", scan_kernel, dtype, (*FILTERS, "peaks")) for dtype in DTYPES),
    *(case(f"scan {dtype}", scan_kernel, dtype) for dtype in DTYPES),
    *(selects(dtype, *FILTERS) for dtype in DTYPES),
    *(beside(selects(dtype, name)) for dtype in DTYPES for name in FILTERS),
    *(narrow(dtype, mass=True, last=True) for dtype in DTYPES),
    *(beside(narrow(dtype, *kind)) for dtype in DTYPES for kind in ((False, False), (False, True), (True, False))),
    *(case(f"race {dtype}", race_kernel, dtype) for dtype in DTYPES),
    case("finish", finish_kernel, "fp32", ("top_p", "min_p", "mode", "drawn", "cut", "cut_index", "kept")),
    case("finish filtered", finish_kernel, "fp32"),
]


def read(case: AotCase) -> tuple[machine_code.Kernel, AotResult]:
    found: list[machine_code.Kernel] = []

    def keep(cubin: bytes) -> list[machine_code.Kernel]:
        found[:] = real(cubin)
        return found

    real = machine_code.read
    with mock.patch.object(machine_code, "read", keep):
        result = compile_case(case, 90)
    if result.error:
        raise RuntimeError(result.line())
    (kernel,) = found
    return kernel, result


def _most(ways: list[Way], counts: Callable[[machine_code.Instruction], int]) -> list[Way]:
    """Those that have most of what ``counts``."""
    found = [sum(map(counts, way)) for way in ways]
    return [way for way, many in zip(ways, found, strict=True) if many == max(found)]


def scan_figures(case: AotCase) -> dict[str, object]:
    """Instructions a token of the shortest and of the longest way through a whole block that the case is named for:
    temperature 1 and all tokens with a weight; another temperature and some without."""
    kernel, result = read(case)
    wide = sum(i.name == "LDG" and i.bytes == 16 for i in kernel.instructions)
    ways = [way for way in kernel.ways() if sum(i.name == "LDG" and i.bytes == 16 for i in way) == wide]
    if case.name.endswith("race"):  # Philox's products
        ways = _most(ways, lambda i: i.opcode.startswith("IMAD.WIDE"))
    else:  # neither these, nor the least logit
        ways = _most(ways, lambda i: -(i.name == "FMNMX" and not i.operands.endswith("!PT")))
        ways = _most(ways, lambda i: -i.opcode.startswith("IMAD.WIDE"))
    tokens = BLOCK // (32 * case.num_warps)  # of a thread
    shortest, longest = (choice(map(len, ways)) / tokens for choice in (min, max))
    return {"a_token": [shortest, longest], "wide_loads": wide, "ctas": result.ctas}


def row_figures(case: AotCase) -> dict[str, object]:
    """Instructions of a row for each of its ``VOCAB`` tokens, on the longest way: each search ends after a round, or
    after all that the bits of a logit allow."""
    kernel, result = read(case)
    share = 32 * case.num_warps / VOCAB
    rounds = 16 if "bf16" in case.name else 32
    once = kernel.longest * share
    more = sum(loop.count * share * (rounds - 1) for loop in kernel.loops)
    wide = sum(i.name == "LDG" and i.bytes == 16 for i in kernel.instructions)
    return {"a_token": [once, once + more], "wide_loads": wide, "ctas": result.ctas}


def round_figures(case: AotCase, tokens: int) -> dict[str, object]:
    """Instructions a token of the main loop, a round of which has ``tokens``."""
    kernel, result = read(case)
    loop = max(kernel.loops, key=lambda loop: loop.count)
    return {"a_token": loop.count * 32 * case.num_warps / tokens, "wide_loads": loop.loads[16], "ctas": result.ctas}


def figures(case: AotCase) -> dict[str, object]:
    kind = case.name.split()[1]
    if kind == "scan":
        found = scan_figures(case)
    elif kind in ("select", "finish"):
        found = row_figures(case)
    elif kind == "race":
        found = round_figures(case, BLOCK)
    else:
        found = round_figures(case, ROUND // 2 if case.name.endswith("last") else ROUND)
    return {"case": case.name, **found}


if __name__ == "__main__":
    print(json.dumps([figures(case) for case in CASES]))
