"""TRL's trainers on rolltree's kernels: ``accelerate(trainer)``, or `RolltreeGRPOTrainer` in place of `GRPOTrainer`.

TRL's own code computes loss and metrics from log-probs and entropies; rolltree changes where these come from
(``head``), how often a prompt is computed (``tree``), and which engine samples (``rollouts``). Read in this order:
``entry`` (the call and its options), ``checks`` (refused trainers), ``replaced`` (the methods that stay the user's),
``parts`` (the options of each step), ``groups`` (overridden methods), ``packing`` (batches as trees), ``fused_head``
(scores), ``objective`` (losses fused with the head), ``agreement`` (their comparison with TRL's), ``regroup`` (order of
micro-batches), ``rollouts`` (completions).
"""

from __future__ import annotations

from .entry import RolltreeGRPOTrainer, accelerate

__all__ = ["RolltreeGRPOTrainer", "accelerate"]
