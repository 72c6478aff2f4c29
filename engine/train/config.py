"""The configuration of an optimiser."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerConfig:
    """AdamW (Loshchilov & Hutter 2019), its learning rate, and the limit of failed updates.

    Args:
        lr: learning rate.
        lr_warmup_steps: updates over which the learning rate rises linearly from zero; 0: none.
        betas: AdamW's decay of the first and second moment.
        eps: added to the root of AdamW's second moment.
        weight_decay: AdamW's decoupled weight decay.
        max_grad_norm: a gradient of a larger L2 norm is scaled down to this one.
        max_bad_steps: updates in a row with a non-finite loss or gradient after which `RunError` is raised.
    """

    lr: float = 1e-6
    lr_warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_bad_steps: int = 5
