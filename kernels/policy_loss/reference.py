"""`elements.losses` in plain PyTorch, masked and added up; on a CPU it is also the fast one."""

from __future__ import annotations

import torch
from torch import Tensor

from .elements import Elements, Kind, Sums, losses
from .kl import ESTIMATORS
from .surrogates import SURROGATES, Spec

SUMS = Sums._fields[1:]
"""The sums over elements that metrics are made of, in the order of `Evaluation.sums`."""


def terms(x: Elements, kind: Kind, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(sum of the losses [], d/dlogprob [M], d/dentropy [M] or [0], sums [len(SUMS)] fp64)``."""
    of = SURROGATES[kind.surrogate]
    grad, d_entropy, parts = losses(
        x,
        spec,
        of.formula,
        of.signed,
        of.of_all,
        of.bounded,
        ESTIMATORS[kind.kl.removesuffix("+")],
        kind.kl.endswith("+"),
        kind.kl_importance,
        kind.mismatch,
    )
    nothing, zero = x.logprob.new_empty(0), torch.zeros_like(x.logprob)
    none = torch.zeros((), dtype=torch.float64, device=zero.device)

    def live(values: Tensor | float) -> Tensor:
        values = values if isinstance(values, Tensor) else torch.full_like(zero, values)
        return values if x.mask is None else torch.where(x.mask, values, 0)

    sums = [live(row).sum(dtype=torch.float64) if isinstance(row, Tensor) else none for row in parts]
    return (
        sums[0].to(zero.dtype),
        live(grad),
        nothing if x.entropy is None else live(d_entropy),
        torch.stack(sums[1:]),
    )
