"""The fused elementwise loss, for every surrogate and KL estimator."""

from __future__ import annotations

from typing import Any, get_args

from rolltree.kernels.policy_loss import triton
from rolltree.kernels.policy_loss.elements import ESTIMATORS, Elements
from rolltree.kernels.policy_loss.objective import KL
from rolltree.kernels.policy_loss.surrogates import SURROGATES, Spec

from .harness import AotCase

SIGNATURE = {
    **dict.fromkeys((*Elements._fields, "d_logprob", "d_entropy", "partial"), "*fp32"),
    "mask": "*u8",
    **dict.fromkeys(("M", "blocks"), "i32"),
    **dict.fromkeys(Spec._fields, "fp32"),
}


def _case(surrogate: str, kl: str, options: bool, mismatch: str = "mask") -> AotCase:
    of = SURROGATES[surrogate]
    constexprs: dict[str, Any] = {
        "SURROGATE": triton.compiled(of.formula),
        "SIGNED": of.signed,
        "OF_ALL": of.of_all,
        "BOUNDED": of.bounded,
        "KL": triton.compiled(ESTIMATORS[kl.removesuffix("+")]),
        "STRAIGHT_THROUGH": kl.endswith("+"),
        "KL_IMPORTANCE": options,
        "MISMATCH": mismatch if options else "none",
        "BLOCK": triton.BLOCK,
    }
    if not options:
        constexprs |= dict.fromkeys((*Elements._field_defaults, "kl_coef", "entropy_coef"))
    signature = {name: of for name, of in SIGNATURE.items() if name not in constexprs}
    more = f" {mismatch}" if options else " bare"
    return AotCase(f"{surrogate} {kl}{more}", triton._terms, signature, constexprs)


CASES = [_case(s, "k3", True) for s in SURROGATES] + [_case("ppo", kl, True, "truncate") for kl in get_args(KL)]
CASES.append(_case("reinforce", "k1", False))
