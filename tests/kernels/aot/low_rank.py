"""Low-rank products of rows with different adapters."""

from __future__ import annotations

from typing import Any

from rolltree.kernels.low_rank import triton
from rolltree.kernels.low_rank.runs import TILE

from .harness import AotCase


def _case(dtype: str) -> list[AotCase]:
    table: dict[str, Any] = {"matrices": "*i64", "scales": "*fp32", "tiles": "*i32"}
    sizes: dict[str, Any] = {"TILE": TILE, "RANKS": triton.RANKS}
    inner = {"x": f"*{dtype}", **table, "inner": f"*{dtype}", "K": "i32:16", "most_rank": "i32:16"}
    del inner["scales"]
    outer = {"inner": f"*{dtype}", **table, "out": f"*{dtype}", "M": "i32:16", "most_rank": "i32:16"}
    return [
        AotCase(f"low rank inner {dtype}", triton.inner_kernel, inner, {**sizes, "DEPTH": triton.DEPTH}),
        AotCase(f"low rank outer {dtype}", triton.outer_kernel, outer, {**sizes, "COLUMNS": triton.COLUMNS}),
    ]


CASES = [*_case("bf16"), *_case("fp32")]
