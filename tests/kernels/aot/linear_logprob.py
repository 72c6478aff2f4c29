"""Row kernels of linear_logprob: Qwen3's vocabulary (a multiple of 16) and an odd one, with and without options."""

from __future__ import annotations

from typing import Any

from rolltree.kernels.linear_logprob import triton

from .harness import AotCase

STATISTICS = {
    **dict.fromkeys(("logits", "bias", "temperature"), "*fp32"),
    "temperature_stride": "i32",
    **dict.fromkeys(("start", "target"), "*i64"),
    **dict.fromkeys(("logprob", "logsumexp", "correction", "entropy", "sum_p2"), "*fp32"),
    "softcap": "fp32",
}
GRADIENT = {
    **dict.fromkeys(("logits", "bias", "temperature"), "*fp32"),
    "temperature_stride": "i32",
    **dict.fromkeys(("start", "target"), "*i64"),
    **dict.fromkeys(("logsumexp", "correction", "grad_logprob", "constant", "per_log", "per_p"), "*fp32"),
    "softcap": "fp32",
}


def _case(name: str, fn: Any, signature: dict[str, str], V: int, **constexprs: Any) -> AotCase:
    launch = triton._launch(V)
    options = {"num_warps": launch.pop("num_warps"), "fp_fusion": launch.pop("enable_fp_fusion")}
    width = "i32:16" if V % 16 == 0 else "i32"
    # rows of a tile of fp32 are padded, those of a caller's logits lie end to end
    stride = "i32:16" if signature["logits"] == "*fp32" else width
    strides = {name: stride for name in ("stride", "out_stride") if name in fn.arg_names}
    return AotCase(f"{name} V={V}", fn, {**signature, **strides, "V": width}, {**constexprs, **launch}, **options)


def _statistics(V: int, options: bool, logits: str = "fp32") -> AotCase:
    flags = dict.fromkeys(("HAS_BIAS", "HAS_SOFTCAP", "ENTROPY", "SUM_P2"), options)
    signature = {**STATISTICS, "logits": f"*{logits}"}
    name = f"statistics {logits}{' options' if options else ''}"
    absent = dict.fromkeys(("base", "out"))
    signature["out_stride"] = "i32"
    return _case(name, triton._statistics, signature, V, TARGETS=16, EACH=1, **absent, **flags)


def _exponentials(V: int, biased: bool) -> AotCase:
    flags = {"HAS_BIAS": biased, "HAS_SOFTCAP": False, "ENTROPY": True, "SUM_P2": False}
    signature = {**STATISTICS, "logits": "*fp32", "base": "*fp32", "out": "*bf16"}
    name = f"exponentials{' bias' if biased else ''}"
    return _case(name, triton._statistics, signature, V, TARGETS=16, EACH=1, **flags)


def _gradient(V: int, options: bool, out: str, logits: str = "fp32") -> AotCase:
    flags = dict.fromkeys(("HAS_BIAS", "HAS_SOFTCAP", "PER_LOG", "PER_P"), options)
    signature = {**GRADIENT, "logits": f"*{logits}", "out": f"*{out}"}
    name = f"gradient {logits} {out}{' options' if options else ''}"
    return _case(name, triton._gradient, signature, V, **flags)


CASES = [
    _exponentials(151936, False),
    _exponentials(50257, True),
    _statistics(151936, False),
    _statistics(151936, True),
    _statistics(50257, True),
    _statistics(97, True),
    _gradient(151936, False, "fp32"),
    _gradient(151936, True, "bf16"),
    _gradient(50257, True, "fp16"),
    _gradient(97, True, "fp32"),
    _statistics(151936, True, "bf16"),
    _statistics(50257, False, "fp16"),
    _gradient(151936, True, "bf16", "bf16"),
    _gradient(50257, False, "fp16", "fp16"),
]
