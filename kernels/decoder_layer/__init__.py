"""Decoder layers where they decode, and what they do between their products."""

from .api import LayerWeights, add_rms_norm_, decoder_layers_, rotate_and_store_

__all__ = ["LayerWeights", "add_rms_norm_", "decoder_layers_", "rotate_and_store_"]
