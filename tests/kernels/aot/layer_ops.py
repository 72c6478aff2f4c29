"""The ops between a layer's products: rows of a model's width and of a head, in both directions."""

from __future__ import annotations

from typing import Any

from rolltree.kernels.layer_ops import triton

from .harness import AotCase


def _norm(width: int, dtype: str = "bf16") -> list[AotCase]:
    tile = triton.tile_of(width)
    warps = tile.pop("num_warps")
    rows, numbers = dict.fromkeys(("x", "weight"), f"*{dtype}"), {"N": "i32", "H": "i32:16"}
    forward = {**rows, "out": f"*{dtype}", "factor": "*fp32", **numbers, "eps": "fp32"}
    backward = {"dy": f"*{dtype}", **rows, "factor": "*fp32", "dx": f"*{dtype}", "partial": "*fp32", **numbers}
    found = [AotCase(f"norm {width} {dtype}", triton.norm_kernel, forward, tile, num_warps=warps)]
    for of_weight in (True, False):
        constants: dict[str, Any] = tile | {"TILES": triton.TILES} | ({} if of_weight else {"partial": None})
        signature = {name: of for name, of in backward.items() if name not in constants}
        name = f"norm gradient {width} {dtype}{'' if of_weight else ' frozen'}"
        found.append(AotCase(name, triton.norm_gradient_kernel, signature, constants, num_warps=warps))
    return found


def _rotate(heads: int, kv_heads: int, dim: int, back: bool, dtype: str = "bf16") -> AotCase:
    pointers = dict.fromkeys(("q", "k", "cos", "sin", "q_out", "k_out"), f"*{dtype}")
    of_rows = {"tokens": "i32", "cos_batch": "i32"} | {f"{name}_batch": "i32" for name in ("q", "k", "q_out", "k_out")}
    of_heads = {f"{name}_{of}": "i32:16" for name in ("q", "k", "q_out", "k_out") for of in ("head", "token")}
    constants = triton.heads_of(heads, kv_heads, dim) | {"BACK": back}
    signature = pointers | of_rows | of_heads | {"HALF": "i32:16"}
    name = f"rotate {heads}/{kv_heads} D{dim} {dtype}{' back' if back else ''}"
    return AotCase(name, triton.rotate_kernel, signature, constants)


def _silu_mul(dtype: str = "bf16") -> list[AotCase]:
    forward = dict.fromkeys(("gate", "up", "out"), f"*{dtype}") | {"M": "i32"}
    backward = dict.fromkeys(("dy", "gate", "up", "dgate", "dup"), f"*{dtype}") | {"M": "i32"}
    block = {"BLOCK": triton.BLOCK}
    return [
        AotCase(f"silu mul {dtype}", triton.silu_mul_kernel, forward, block),
        AotCase(f"silu mul gradient {dtype}", triton.silu_mul_gradient_kernel, backward, block),
    ]


CASES = [
    *_norm(4096),
    *(case for width in (128, 576, 8192) for case in _norm(width)),
    *_norm(4096, "fp32"),
    _rotate(32, 8, 128, False),
    _rotate(32, 8, 128, True),
    _rotate(64, 8, 256, True),
    _rotate(9, 3, 64, False, "fp16"),
    *_silu_mul(),
    *_silu_mul("fp32"),
]
