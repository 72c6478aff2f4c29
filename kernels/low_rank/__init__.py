"""Low-rank products of LoRA adapters for rows of which each may have another one; the base's product is made before."""

from .adapters import Adapters, LowRank
from .api import add_low_rank_
from .runs import Runs

__all__ = ["Adapters", "LowRank", "Runs", "add_low_rank_"]
