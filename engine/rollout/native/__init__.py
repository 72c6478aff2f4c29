"""The native rollout engine: continuous batching over a KV cache whose pages form the tree of rollouts.

Read in this order: ``engine`` (the public class), ``loop`` (one step after another), ``scheduler`` (which rows a step
computes), ``kv_cache`` (pages of keys), ``rows`` (the state of each branch), ``runner`` (the forward pass), ``draws``
(sampling). ``drafts`` guesses tokens that a step verifies, ``stops`` ends segments and responses, ``step_buffer``
copies a step to the device, and ``compiled`` and ``fused_decoder`` run it faster.
"""
