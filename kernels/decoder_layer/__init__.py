"""Decoders of the Llama family for generation, and the passes of their layers between the products."""

from .api import Decoder, add_rms_norm_, rotate_and_store_
from .weights import Adapted, DecoderAdapters, LayerWeights

__all__ = ["Adapted", "Decoder", "DecoderAdapters", "LayerWeights", "add_rms_norm_", "rotate_and_store_"]
