"""The native rollout engine: continuous batching over a KV cache whose pages form the tree of rollouts.

Read in this order: ``engine`` (the public class), ``loop`` (one step after another), ``scheduler`` (which rows a step
computes), ``kv_cache`` (pages of keys), ``runner`` (the forward pass), ``draws`` (sampling).
"""
