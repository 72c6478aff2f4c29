"""Rollouts sampled by vLLM, which is installed separately.

``engine`` is the public class, ``loop`` its steps: each segment of a branch is one vLLM request whose prompt is the
path so far, and finished segments go to the programs through `Steering`.
"""
