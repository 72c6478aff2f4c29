"""The passes of a decoder layer between its products, with gradients: RMSNorm, rotary embedding, SwiGLU."""

from .api import rms_norm, rotate, silu_mul

__all__ = ["rms_norm", "rotate", "silu_mul"]
