"""The sampling kernels: what every row runs, and what filters add."""

from collections.abc import Collection
from typing import Any

from rolltree.kernels.sampling.filters import select_kernel
from rolltree.kernels.sampling.strip_select import bracket_kernel, gather_kernel, race_kernel, settle_kernel
from rolltree.kernels.sampling.triton import (
    BLOCK,
    CHOSEN,
    GROUPS,
    ROOM,
    ROUND,
    SAMPLE,
    SPLITS,
    STRIP,
    WHOLE,
    finish_kernel,
    scan_kernel,
)

from .harness import AotCase

BLOCKS = 64  # of a row of 151,936 tokens, a power of two
GIVEN = {
    "logits": "", "temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32", "seed": "*i64",
    "step": "*i64", "row_stride": "i32:16", "vocab": "i32", "blocks": "i32",
    **dict.fromkeys(("token", "last_kept", "window", "bracket"), "*i64"),
    **dict.fromkeys(("bound", "chosen", "mode", "cut_index", "between", "counts", "ties"), "*i32"),
}  # fmt: skip
CONSTANTS = {
    "BLOCK": BLOCK, "GROUPS": GROUPS, "STRIP": STRIP, "STRIPS": BLOCK // STRIP, "CHOSEN": CHOSEN, "SPLITS": SPLITS,
    "SAMPLE": SAMPLE, "ROOM": ROOM, "ROUND": ROUND, "BLOCKS": BLOCKS,
}  # fmt: skip
FILTERS = ("top_k", "top_p", "min_p")


def case(name: str, kernel: Any, dtype: str, absent: Collection[str] = (), warps: int = 4, **more: object) -> AotCase:
    """All arguments but the ``absent`` ones, which are None."""
    constants = {n: v for n, v in CONSTANTS.items() if n in kernel.arg_names} | more | dict.fromkeys(absent)
    signature = {n: GIVEN.get(n, "*fp32") for n in kernel.arg_names if n not in constants} | {"logits": f"*{dtype}"}
    return AotCase(f"sample {name}", kernel, signature, constants, num_warps=warps)


def strip_select(dtype: str, mass: bool) -> list[AotCase]:
    by = f"{dtype} {'mass' if mass else 'count'}"
    return [
        case(f"bracket {by}", bracket_kernel, dtype, MASS=mass),
        case(f"gather {by}", gather_kernel, dtype, MASS=mass),
        case(f"settle {by}", settle_kernel, dtype, warps=16, MASS=mass, ROUND=WHOLE),
    ]


def selects(dtype: str, *filters: str) -> AotCase:
    absent = [name for name in FILTERS if name not in filters]
    return case(f"select {dtype} {' '.join(filters)}", select_kernel, dtype, absent, warps=8)


DTYPES = ("bf16", "fp32")
CASES = [
    *(case(f"scan {dtype} race", scan_kernel, dtype, (*FILTERS, "peaks")) for dtype in DTYPES),
    *(case(f"scan {dtype}", scan_kernel, dtype) for dtype in DTYPES),
    *(selects(dtype, *FILTERS) for dtype in DTYPES),
    *(selects(dtype, name) for dtype in DTYPES for name in FILTERS),
    *(part for dtype in DTYPES for part in strip_select(dtype, mass=True)),
    *(part for dtype in DTYPES for part in strip_select(dtype, mass=False)),
    *(case(f"race {dtype}", race_kernel, dtype) for dtype in DTYPES),
    case("finish", finish_kernel, "fp32", ("top_p", "min_p", "mode", "drawn", "cut", "cut_index", "kept")),
    case("finish filtered", finish_kernel, "fp32"),
]
