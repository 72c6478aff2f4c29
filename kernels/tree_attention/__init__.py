"""Training attention over packed trees."""

from .api import tree_attention

__all__ = ["tree_attention"]
