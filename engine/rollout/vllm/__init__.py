"""Rollouts sampled by vLLM, which is installed separately: ``engine`` (the public class) and ``loop`` (its steps)."""
