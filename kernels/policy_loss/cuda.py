"""The clipped-ratio loss in CUDA C++: csrc/cuda/policy_loss.cu. It has surrogate "ppo" alone."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .elements import SUMS, Elements, Kind
from .surrogates import Spec

ELEMENTS_A_BLOCK = 1024
KL = ("k1", "k2", "k3", "low_var", "abs")
MISMATCH = ("none", "truncate", "mask")


@functools.cache
def _rows() -> tuple[str, ...]:
    """Return the names of the rows of ``partial``, in the kernel's order: those of `Sums`."""
    return tuple(torch.ops.rolltree_cuda.clipped_loss_sums().split())


def unfit(x: Elements, kind: Kind) -> str | None:
    """Return why the kernel cannot compute this loss, or None if it can."""
    if kind.surrogate != "ppo":
        return f"its kernel has the surrogate 'ppo' alone, and this one is '{kind.surrogate}'"
    if x.pos_weight is not None:
        return "its kernel does not count clipped targets by the signs of their leaves' advantages"
    return None


def terms(x: Elements, kind: Kind, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like `elements.terms`, in fp32."""
    M, absent = len(x.logprob), x.logprob[:0]
    d_logprob = torch.empty_like(x.logprob, memory_format=torch.contiguous_format)
    d_entropy = d_logprob.new_empty(0 if x.entropy is None else M)
    rows = _rows()
    partial = d_logprob.new_zeros(len(rows), -(-M // ELEMENTS_A_BLOCK))
    tensors = x._replace(mask=None if x.mask is None else x.mask.view(torch.uint8))._asdict()
    inputs = {
        name: absent if t is None else t.contiguous()
        for name, t in tensors.items()
        if name not in ("all_weight", "extra", "pos_weight", "neg_weight")  # losses that use them are `unfit`
    }
    torch.ops.rolltree_cuda.clipped_loss(
        **inputs,
        low_bound=1 - spec.eps_low,
        high_bound=1 + spec.eps_high,
        clip_ratio_c=spec.clip_ratio_c,
        kl_coef=spec.kl_coef or 0.0,
        entropy_coef=spec.entropy_coef or 0.0,
        mismatch_low=spec.mismatch_low,
        mismatch_cap=spec.mismatch_cap,
        kl=KL.index(kind.kl.removesuffix("+")),
        mismatch=MISMATCH.index(kind.mismatch),
        straight_through=kind.kl.endswith("+"),
        kl_importance=kind.kl_importance,
        d_logprob=d_logprob,
        d_entropy=d_entropy,
        partial=partial,
    )
    sums = dict(zip(rows, partial.sum(1, dtype=torch.float64).unbind(), strict=True))
    return sums["loss"].to(d_logprob.dtype), d_logprob, d_entropy, torch.stack([sums[name] for name in SUMS])
