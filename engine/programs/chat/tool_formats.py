"""The forms of calls, by the name that scripts of users import them by."""

from ...chat.tool_formats import FORMATS, ToolFormat

__all__ = ["FORMATS", "ToolFormat"]
