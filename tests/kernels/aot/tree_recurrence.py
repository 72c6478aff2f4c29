"""Recurrences on trees: the gated delta rule of Qwen3.5 and Kimi (heads of 128), OLMo's (96 and 192), Mamba-2's scan of
Nemotron-H (128 and 64) and Falcon-H1 (256 and 64), fp32, and convolutions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rolltree.kernels.tree_recurrence import triton
from rolltree.kernels.tree_recurrence import triton_convolution as convolution
from rolltree.kernels.tree_recurrence.triton_channels import channel_pairs_kernel, channel_sums_kernel, weights_kernel
from rolltree.kernels.tree_recurrence.triton_chunks import inverse_kernel, pairs_kernel
from rolltree.kernels.tree_recurrence.triton_gradients import gradients_kernel
from rolltree.kernels.tree_recurrence.triton_scan import state_scan_back_kernel, state_scan_kernel

from .harness import AotCase

Archs = tuple[int, ...]
AMPERE: Archs = (80,)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SEGMENTS = dict.fromkeys(("row", "rows", "chunk", "source", "slot", "run_begin", "run_end"), "*i32")
CHUNKS = dict.fromkeys(("chunk_row", "chunk_rows"), "*i32")
STRIDES = {f"{of}_{along}": "i32:16" for of in ("q", "k", "v") for along in ("row", "head")}
GIVEN = ("initial", "grad_initial")  # absent if no segment begins with a given state
OF_DELTA = (
    "beta",
    "system",
    "inverse",
    "grad_x",
    "grad_beta",
    "grad_removed",
    "removed",
)  # absent without the delta rule
WIDE = ("decay", "beta", "system", "initial", "states", "grad_states", "grad_initial", "grad_query",
        "grad_key", "grad_removed", "grad_decay", "grad_beta", "grad_value", "written", "removed")  # fmt: skip


def _case(name: str, fn: Any, dtype: str, constants: dict[str, Any], warps: int, absent: tuple[str, ...]) -> AotCase:
    integers = {**SEGMENTS, **CHUNKS, **STRIDES, "part_stride": "i32", "scale": "fp32"}
    names = [a for a in fn.arg_names if a.islower() and a not in absent]
    signature = {a: integers.get(a) or ("*fp32" if a in WIDE else f"*{dtype}") for a in names}
    constants = {a: constants[a] for a in fn.arg_names if not a.islower()} | dict.fromkeys(
        set(fn.arg_names) & set(absent)
    )
    return AotCase(name, fn, signature, constants, num_warps=warps)


def cases(
    rule: str, heads: int, groups: int, dim: int, values: int, dtype: str, given: bool = False, archs: Archs = (90, 100)
) -> list[AotCase]:
    tiles = triton.tiles_for(dim, values, DTYPES[dtype], major=archs[0] // 10)
    delta, channels = rule != "mamba", rule == "kimi"
    options = {
        "HEADS": heads, "GROUP": heads // groups, "DIM": dim, "WIDTH": triton.padded(dim), "VALUES": values,
        "CHUNK": tiles.chunk, "DELTA": delta, "CHANNELS": channels, "GIVEN": given,
    }  # fmt: skip
    of_channels = () if channels else ("key_to",)
    none = (*of_channels, *(() if delta else OF_DELTA), *(() if given else GIVEN))
    what = f"D{dim} V{values} {dtype}{' given' if given else ''}{' Ampere' if archs == AMPERE else ''}"
    scan = options | {"BLOCK": tiles.block} | ({"GROUP": 1} if channels else {})
    products = options | {"PART": triton.part_of(dim, DTYPES[dtype])}
    gradients = options | {"PART": tiles.part, "BLOCK": tiles.values}
    found = [
        _case(
            f"{rule} scan {what}", state_scan_kernel, dtype, scan | {"OUT": True}, tiles.warps, (*none, "new", "starts")
        ),
        _case(
            f"{rule} scan again {what}",
            state_scan_kernel,
            dtype,
            scan | {"OUT": False},
            tiles.warps,
            (*none, "out", "pairs"),
        ),
        _case(f"{rule} scan back {what}", state_scan_back_kernel, dtype, scan, tiles.warps, none),
    ]
    if rule == "delta" and dtype == "bf16" and archs != AMPERE:
        archs_back: Archs = (90,)  # on sm_100 Triton 3.6, not 3.9, spills registers in its loop
    else:
        archs_back = archs
    back = found.pop()
    if given:
        return [*(replace(case, archs=archs) for case in found), replace(back, archs=archs_back)]
    if not channels:
        found += [_case(f"{rule} pairs {what}", pairs_kernel, dtype, products, 4, none)]
        none = (*none, "grad_removed")
    else:
        found += [
            _case(f"{rule} pairs {what}", channel_pairs_kernel, dtype, options, 4, none),
            _case(f"{rule} weights {what}", weights_kernel, dtype, gradients, 4, none),
            _case(f"{rule} sums {what}", channel_sums_kernel, dtype, options, 4, none),
        ]
    found += [_case(f"{rule} gradients {what}", gradients_kernel, dtype, gradients, tiles.gradient_warps, none)]
    return [*(replace(case, archs=archs) for case in found), replace(back, archs=archs_back)]


def inverse(chunk: int, dtype: str) -> AotCase:
    signature, constants = {"system": "*fp32", "inverse": f"*{dtype}"}, {"HEADS": 32, "CHUNK": chunk}
    return AotCase(f"delta inverse {dtype}", inverse_kernel, signature, constants, num_warps=1)


def convolutions(taps: int, dtype: str, biased: bool) -> list[AotCase]:
    tile = {"TAPS": taps, "ROWS": convolution.ROWS, "COLUMNS": convolution.COLUMNS}
    rows, sizes = dict.fromkeys(("x", "weight"), f"*{dtype}"), {"T": "i32", "D": "i32:16"}
    bias = {"bias": f"*{dtype}"} if biased else {}
    forward = {**rows, **bias, "before": "*i64", "out": f"*{dtype}", **sizes}
    dx = {"grad": f"*{dtype}", "weight": f"*{dtype}", "readers": "*i64", "begin": "*i64", "dx": f"*{dtype}", **sizes}
    dweight = {"grad": f"*{dtype}", "x": f"*{dtype}", "before": "*i64", "partial": "*fp32", **sizes}
    name = f"K{taps} {dtype}"
    return [
        AotCase(
            f"convolution {name}", convolution.convolution_kernel, forward, tile | ({} if biased else {"bias": None})
        ),
        AotCase(
            f"convolution input {name}",
            convolution.convolution_input_kernel,
            dx,
            {"TAPS": taps, "COLUMNS": convolution.READ_COLUMNS},
        ),
        AotCase(
            f"convolution weight {name}",
            convolution.convolution_weight_kernel,
            dweight,
            {**tile, "TILES": convolution.TILES},
        ),
    ]


CASES = [
    *convolutions(4, "bf16", True),
    inverse(64, "bf16"),
    inverse(16, "fp32"),
    *cases("delta", 32, 16, 128, 128, "bf16"),
    *cases("delta", 30, 30, 96, 192, "bf16", given=True),
    *cases("delta", 32, 16, 128, 128, "fp32", archs=(90, 100, *AMPERE)),
    *cases("kimi", 32, 32, 128, 128, "bf16"),
    *cases("mamba", 128, 8, 128, 64, "bf16"),
    *cases("mamba", 32, 1, 256, 64, "bf16"),
    *cases("delta", 32, 16, 128, 128, "bf16", archs=AMPERE),
    *cases("kimi", 32, 32, 128, 128, "bf16", archs=AMPERE),
]
