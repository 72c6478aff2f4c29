"""Decode attention over a paged tree of keys and values."""

from .api import tree_decode_attention
from .plan import DecodePlan

__all__ = ["DecodePlan", "tree_decode_attention"]
