"""What a decoder layer does between its products where it decodes."""

from .api import add_rms_norm_, rotate_and_store_

__all__ = ["add_rms_norm_", "rotate_and_store_"]
