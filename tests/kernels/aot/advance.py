"""The end of a decoding step."""

from __future__ import annotations

from rolltree.kernels.advance import triton

from .harness import AotCase

_NAMES = ("vector", "rising", "turn", "input_ids", "slots", "next_slots")
_SIGNATURE = dict.fromkeys(_NAMES, "*i32") | {"step": "*i64", "numbers": "*fp32", "token": "*i64"}
_SIGNATURE |= dict.fromkeys(("logprob", "raw_logprob", "entropy"), "*fp32") | {"N": "i32", "M": "i32"}

CASES = [AotCase("advance", triton.advance_kernel, _SIGNATURE, {"BLOCK": triton.BLOCK}, num_warps=8)]
