"""The end of a decoding step on the device: rows take the token that was drawn and move on to their next position."""

from .api import advance
from .reference import Turns

__all__ = ["Turns", "advance"]
