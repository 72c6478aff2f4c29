"""Draws the next token of every row: temperature, top-k, top-p, min-p, and the log-probs the trainer needs."""

from .api import SampleOutput, kept_tokens, sample_rows, sample_tokens

__all__ = ["SampleOutput", "kept_tokens", "sample_rows", "sample_tokens"]
