"""The sampling kernels: what every row runs, and what filters add; run as a module, their figures by token as JSON."""

import json
from collections.abc import Collection
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
from .harness import AotCase, compile_case

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


def selects(dtype: str, *filters: str) -> AotCase:
    absent = [name for name in FILTERS if name not in filters]
    return replace(case(f"select {dtype} {' '.join(filters)}", select_kernel, dtype, absent, warps=8), registers=128)


DTYPES = ("bf16", "fp32")
CASES = [
    *(case(f"scan {dtype} race", scan_kernel, dtype, (*FILTERS, "peaks")) for dtype in DTYPES),
    *(case(f"scan {dtype}", scan_kernel, dtype) for dtype in DTYPES),
    *(selects(dtype, *filters) for dtype in DTYPES for filters in (("top_k",), ("top_p",), ("min_p",), FILTERS)),
    *(
        case(f"narrow {dtype} {'mass' if mass else 'count'}{' last' if last else ''}", narrow_kernel, dtype,
             MASS=mass, LAST=last)
        for dtype in DTYPES for mass in (False, True) for last in (False, True)
    ),
    *(case(f"race {dtype}", race_kernel, dtype) for dtype in DTYPES),
    case("finish", finish_kernel, "fp32", ("top_p", "min_p", "mode", "drawn", "cut", "cut_index", "kept")),
    case("finish filtered", finish_kernel, "fp32"),
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
