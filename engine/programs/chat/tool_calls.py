"""The reading of calls, by the name that scripts of users import it by."""

from ...chat.reading import Turn, read_turn

__all__ = ["Turn", "read_turn"]
