from .api import DivergenceOutput, linear_divergence, linear_topk_divergence

__all__ = ["DivergenceOutput", "linear_divergence", "linear_topk_divergence"]
