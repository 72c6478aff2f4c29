"""The fused elementwise loss, for every surrogate and KL estimator."""

from __future__ import annotations

from typing import get_args

from rolltree.kernels.policy_loss import triton
from rolltree.kernels.policy_loss.objective import KL
from rolltree.kernels.policy_loss.reference import Elements
from rolltree.kernels.policy_loss.surrogates import SURROGATES, Spec

from .harness import AotCase

POINTERS = [{"low": "clip_low", "high": "clip_high"}.get(name, name) for name in Elements._fields if name != "mask"]
SIGNATURE = {
    **dict.fromkeys((*POINTERS, "d_logprob", "d_entropy", "partial"), "*fp32"),
    "mask": "*u8",
    **dict.fromkeys(("M", "blocks"), "i32"),
    **dict.fromkeys(Spec._fields, "fp32"),
}
FLAGS = ("ENTROPY", "ALL", "MASK", "RATIO", "OLD", "REF", "BEHAVIOUR", "LOW", "HIGH", "EXTRA", "SIDES")


def _case(surrogate: str, kl: str, options: bool, mismatch: str = "mask") -> AotCase:
    constexprs = {
        **dict.fromkeys((f"HAS_{flag}" for flag in FLAGS), options),
        "SURROGATE": surrogate,
        "KL": kl.removesuffix("+"),
        "STRAIGHT_THROUGH": kl.endswith("+"),
        "KL_IMPORTANCE": options,
        "MISMATCH": mismatch if options else "none",
        "BLOCK": triton.BLOCK,
    }
    return AotCase(f"{surrogate} {kl} {options}", triton._terms, SIGNATURE, constexprs)


CASES = [_case(s, "k3", True) for s in SURROGATES] + [_case("ppo", kl, True, "truncate") for kl in get_args(KL)]
CASES.append(_case("reinforce", "k1", False))
