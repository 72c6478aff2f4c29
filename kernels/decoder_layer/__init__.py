"""Decoders of the Llama family where they generate, and what their layers do between the products."""

from .api import Decoder, LayerWeights, add_rms_norm_, rotate_and_store_

__all__ = ["Decoder", "LayerWeights", "add_rms_norm_", "rotate_and_store_"]
