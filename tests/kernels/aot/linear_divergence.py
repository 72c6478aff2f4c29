"""Row kernels of linear_divergence: every kind on Qwen3's vocabulary, and options on an odd one."""

from __future__ import annotations

from typing import Any

from rolltree.kernels.linear_divergence import triton
from rolltree.kernels.linear_divergence.kinds import KINDS

from .harness import AotCase

SIDES = {
    f"{side}{name}": kind
    for side in ("", "teacher_")
    for name, kind in {
        "logits": "*fp32",
        "stride": "i32:16",
        "bias": "*fp32",
        "temperature": "*fp32",
        "temperature_stride": "i32",
        "softcap": "fp32",
    }.items()
}
OF_ROWS = dict.fromkeys(("student_shift", "student_log", "teacher_shift", "teacher_log", "slope_sum"), "*fp32")
TOTALS = {**SIDES, **dict.fromkeys(("divergence", "entropy", "teacher_entropy"), "*fp32"), **OF_ROWS}


def _case(name: str, fn: Any, signature: dict[str, str], V: int, kind: str, options: bool) -> AotCase:
    launch = triton._launch_gradient(V) if fn is triton._gradient else triton._launch(V)
    other = {"num_warps": launch.pop("num_warps"), "fp_fusion": launch.pop("enable_fp_fusion")}
    flags = dict.fromkeys(("HAS_BIAS", "HAS_SOFTCAP", "TEACHER_BIAS", "TEACHER_SOFTCAP"), options)
    whole = {**signature, "V": "i32:16" if V % 16 == 0 else "i32", "share": "fp32"}
    constexprs = {**flags, "KIND": KINDS.index(kind), **launch}
    return AotCase(f"{name} {kind}{' options' if options else ''} V={V}", fn, whole, constexprs, **other)


def _totals(V: int, kind: str, options: bool = False) -> AotCase:
    return _case("divergence", triton._totals, TOTALS, V, kind, options)


def _gradient(V: int, kind: str, out: str, options: bool = False) -> AotCase:
    signature = {**SIDES, "factor": "*fp32", **OF_ROWS, "out": f"*{out}", "out_stride": "i32:16"}
    return _case(f"divergence gradient {out}", triton._gradient, signature, V, kind, options)


CASES = [
    *(_totals(151936, kind) for kind in KINDS),
    *(_gradient(151936, kind, "bf16") for kind in KINDS),
    _totals(50257, "jsd", True),
    _gradient(50257, "skew_reverse_kl", "fp32", True),
    _gradient(97, "jsd", "fp16", True),
]
