"""The sampling kernels: what every row runs, and what filters add; run as a module, their figures by token as JSON."""

import json
from unittest import mock

from rolltree.kernels.sampling.triton import (
    BLOCK,
    GROUPS,
    ROUND,
    finish_kernel,
    race_kernel,
    scan_kernel,
    select_kernel,
)

from . import machine_code
from .harness import AotCase, compile_case

BLOCKS = 64  # of a row of 151936
ROWS = {"temperature": "*fp32", "seed": "*i64", "step": "*i64"}
FILTERS = {"top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32"}
SIZES = {"row_stride": "i32:16", "vocab": "i32"}
SUMS = dict.fromkeys(("best", "mass", "moment", "raw"), "*fp32")
RACE = {"least": "*fp32", "bound": "*i32"}
OUTPUTS = {"token": "*i64", "logprob": "*fp32", "raw_logprob": "*fp32", "entropy": "*fp32", "last_kept": "*i64"}
CUT = {"cut": "*fp32", "cut_index": "*i32"}


def scan(dtype: str, race: bool) -> AotCase:
    signature = {"logits": f"*{dtype}", **ROWS, **SUMS, **(RACE if race else {}), **SIZES}
    constants = {"BLOCK": BLOCK, "GROUPS": GROUPS, **({} if race else dict.fromkeys(RACE))}
    return AotCase(f"sample scan {dtype}{' race' if race else ''}", scan_kernel, signature, constants)


def select(dtype: str) -> AotCase:
    given = {"logits": f"*{dtype}", "temperature": "*fp32", **FILTERS, "best": "*fp32", "mass": "*fp32"}
    signature = {**given, **CUT, **SIZES, "blocks": "i32"}
    return AotCase(f"sample select {dtype}", select_kernel, signature, {"BLOCKS": BLOCKS, "ROUND": ROUND}, num_warps=8)


def race(dtype: str) -> AotCase:
    given = {"logits": f"*{dtype}", **ROWS, "min_p": "*fp32", "best": "*fp32", **CUT}
    signature = {**given, "kept": "*fp32", **RACE, **SIZES}
    constants = {"BLOCKS": BLOCKS, "BLOCK": BLOCK, "GROUPS": GROUPS}
    return AotCase(f"sample race {dtype}", race_kernel, signature, constants)


def finish(filtered: bool) -> AotCase:
    given = {"logits": "*fp32", **ROWS, **SUMS, **RACE, **OUTPUTS, **SIZES, "blocks": "i32"}
    constants = {"BLOCKS": BLOCKS, "BLOCK": BLOCK, "GROUPS": GROUPS, "ROUND": ROUND}
    filters = {"top_p": "*fp32", "min_p": "*fp32", **CUT, "kept": "*fp32"}
    if filtered:
        given |= filters
    else:
        constants |= dict.fromkeys(filters)
    return AotCase(f"sample finish{' filtered' if filtered else ''}", finish_kernel, given, constants)


CASES = [
    *(scan(dtype, race) for dtype in ("bf16", "fp32") for race in (True, False)),
    *(select(dtype) for dtype in ("bf16", "fp32")),
    *(race(dtype) for dtype in ("bf16", "fp32")),
    finish(False),
    finish(True),
]


def _wide_loads(way: tuple[machine_code.Instruction, ...]) -> int:
    return sum(i.name == "LDG" and i.bytes == 16 for i in way)


def _wide_products(way: tuple[machine_code.Instruction, ...]) -> int:
    return sum(i.name == "IMAD" and ".WIDE" in i.opcode for i in way)


def figures(case: AotCase) -> dict[str, object]:
    """Instructions a token on sm_90; 16-byte loads; spilled registers.

    ``instructions_a_token`` is the whole text, ``a_token`` the shortest and the longest way through it for a whole
    block (temperature 1 and all tokens with a weight; another temperature and some without), ``loops_a_token`` each
    loop.
    """
    read: list[machine_code.Kernel] = []

    def keep(cubin: bytes) -> list[machine_code.Kernel]:
        read[:] = real(cubin)
        return read

    real = machine_code.read
    with mock.patch.object(machine_code, "read", keep):
        result = compile_case(case, 90)
    if result.error:
        raise RuntimeError(result.line())
    (kernel,) = read
    tokens = (BLOCK if "BLOCK" in case.constexprs else ROUND) // (32 * case.num_warps)  # of a thread
    wide = _wide_loads(kernel.instructions)
    ways = [kernel.instructions]
    if not kernel.loops:  # those that load a whole block, and draw from it where any does
        products = max(map(_wide_products, kernel.ways()))
        ways = [way for way in kernel.ways() if _wide_loads(way) == wide and _wide_products(way) == products]
    return {
        "case": case.name,
        "instructions_a_token": len(kernel.instructions) / tokens,
        "a_token": [choice(map(len, ways)) / tokens for choice in (min, max)],
        "loops_a_token": [loop.count / tokens for loop in kernel.loops],
        "wide_loads": wide,
        "local": sum(i.name in ("LDL", "STL") for i in kernel.instructions),
        "ctas": result.ctas,
    }


if __name__ == "__main__":
    print(json.dumps([figures(case) for case in CASES]))
