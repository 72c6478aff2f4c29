"""rolltree.kernels: exact fused ops for reinforcement learning of language models. No trainer, no model, no IO."""
