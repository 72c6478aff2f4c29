"""Forward, dQ and dK/dV of tree attention: head sizes 64 and 128 in bf16 with groups of 4 heads, and the options."""

from typing import Any

import torch

from rolltree.kernels.tree_attention.blocks import padded_width, tiles_for
from rolltree.kernels.tree_attention.runs import CAPACITY, CHUNK, find_runs_kernel
from rolltree.kernels.tree_attention.triton import dkdv_kernel, dq_kernel, forward_kernel

from .harness import AotCase

FLOATS = {"scale": "fp32", "softcap": "fp32"}
RUNS = dict.fromkeys(("runs", "full_counts", "partial_counts", "order"), "*i32")
MASK = {"ends": "*i32", "positions": "*i32", **RUNS, "tokens": "i32", "offset": "i32", "window": "i32"}
Q_STRIDES = {f"{t}_{s}": "i32:16" for t in "qkv" for s in ("stride", "head")}
ALL_STRIDES = {**Q_STRIDES, "g_stride": "i32:16", "g_head": "i32:16"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(dim: int, dtype: str, *, window: bool = False, softcap: bool = False) -> list[AotCase]:
    return [case for archs in ((80,), (90,), (100,)) for case in _cases(dim, dtype, window, softcap, archs)]


def _cases(dim: int, dtype: str, window: bool, softcap: bool, archs: tuple[int, ...]) -> list[AotCase]:
    tiles = tiles_for(dim, DTYPES[dtype], major=archs[0] // 10, softcap=softcap)
    option = (" window" if window else "") + (" softcap" if softcap else "")
    tensors = dict.fromkeys(("q", "k", "v"), f"*{dtype}")
    constants: dict[str, Any] = {
        "HEADS": 32,
        "GROUP": 4,
        "CAPACITY": CAPACITY,
        "DIM": dim,
        "WIDTH": padded_width(dim),
        "HAS_WINDOW": window,
        "HAS_SOFTCAP": softcap,
    }
    forward = {**tensors, "out": f"*{dtype}", "lse": "*fp32", **MASK, **Q_STRIDES, **FLOATS}
    backward = {**tensors, "grad_out": f"*{dtype}", "lse": "*fp32", "delta": "*fp32", **MASK, **ALL_STRIDES, **FLOATS}
    dq = {**backward, "out": f"*{dtype}", "dq": f"*{dtype}"}
    dkdv = {**backward, "dk_out": f"*{dtype}", "dv_out": f"*{dtype}"}
    return [
        AotCase(
            f"tree {name} D{dim} {dtype}{option}",
            kernel,
            signature,
            {**constants, "ROWS": tile.rows, "KEYS": tile.keys},
            tile.warps,
            needs_wgmma=dtype == "bf16" and tile.keys * tile.rows >= 64 * 32,  # dK/dV of D = 256 has too few keys
            archs=archs,
        )
        for name, kernel, signature, tile in [
            ("forward", forward_kernel, forward, tiles.forward),
            ("dq", dq_kernel, dq, tiles.dq),
            ("dkdv", dkdv_kernel, dkdv, tiles.dkdv),
        ]
    ]


EXTENTS = dict.fromkeys(("lows", "highs", "key_firsts", "key_lasts", "row_firsts", "row_lasts"), "*i32")
FOUND = dict.fromkeys(("bounds", "full_counts", "partial_counts", "weights"), "*i32")
SIZES = {"tokens": "i32", "offset": "i32", "window": "i32"}


def find_runs(by_key: bool, window: bool) -> AotCase:
    constants = {"ROWS": 128, "KEYS": 64, "CAPACITY": CAPACITY, "CHUNK": CHUNK, "BY_KEY": by_key, "HAS_WINDOW": window}
    return AotCase(f"tree runs {by_key} {window}", find_runs_kernel, {**EXTENTS, **FOUND, **SIZES}, constants, 4)


CASES = [
    find_runs(False, True),
    find_runs(True, False),
    *cases(64, "bf16"),
    *cases(128, "bf16"),
    *cases(128, "bf16", window=True, softcap=True)[2::3],  # dK/dV: the one that needs most registers
    *cases(96, "bf16"),
    *cases(256, "bf16"),
    *cases(64, "fp32"),
]
