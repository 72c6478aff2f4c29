"""Recurrent layers over packed trees: linear attention with decay, the gated delta rule, short convolutions."""

from .api import tree_convolution, tree_recurrence
from .plan import RecurrencePlan, Segments, find_segments

__all__ = ["RecurrencePlan", "Segments", "find_segments", "tree_convolution", "tree_recurrence"]
