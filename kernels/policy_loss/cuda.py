"""The clipped-ratio loss in CUDA C++: csrc/cuda/policy_loss.cu. It knows surrogate "ppo" alone."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import SUMS, Elements, Kind
from .surrogates import Spec

ELEMENTS_A_BLOCK = 1024
KL = ("k1", "k2", "k3", "low_var", "abs")
MISMATCH = ("none", "truncate", "mask")


def knows(x: Elements, kind: Kind) -> bool:
    return kind.surrogate == "ppo" and x.pos_weight is None


def terms(x: Elements, kind: Kind, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.terms`, in fp32."""
    M, absent = len(x.logprob), x.logprob[:0]
    d_logprob = torch.empty_like(x.logprob, memory_format=torch.contiguous_format)
    d_entropy = d_logprob.new_empty(0 if x.entropy is None else M)
    partial = d_logprob.new_zeros(1 + len(SUMS), -(-M // ELEMENTS_A_BLOCK))
    given = x._replace(mask=None if x.mask is None else x.mask.view(torch.uint8))
    inputs = [
        absent if t is None else t.contiguous()
        for name, t in given._asdict().items()
        if name not in ("all_weight", "extra", "pos_weight", "neg_weight")  # what `knows` leaves to the others
    ]
    torch.ops.rolltree_cuda.clipped_loss(
        *inputs,
        1 - spec.eps_low,
        1 + spec.eps_high,
        spec.clip_ratio_c,
        spec.kl_coef,
        spec.entropy_coef,
        spec.mismatch_low,
        spec.mismatch_cap,
        KL.index(kind.kl.removesuffix("+")),
        MISMATCH.index(kind.mismatch),
        kind.kl.endswith("+"),
        kind.kl_importance,
        d_logprob,
        d_entropy,
        partial,
    )
    sums = partial.sum(1, dtype=torch.float64)
    return sums[0].to(d_logprob.dtype), d_logprob, d_entropy, sums[1:].clone()
