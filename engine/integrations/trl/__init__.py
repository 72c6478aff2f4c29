"""TRL's trainers on rolltree's kernels: ``accelerate(trainer)``, or `RolltreeGRPOTrainer` in place of `GRPOTrainer`.

Loss, gradients and metrics stay TRL's: its own code computes them, from log-probs and entropies that come from
somewhere else. What changes is where they come from (`head`), how often a prompt is computed (`tree`), and who samples
(`rollouts`).
"""

from __future__ import annotations

from .entry import RolltreeGRPOTrainer, accelerate

__all__ = ["RolltreeGRPOTrainer", "accelerate"]
