"""The description of the tool ``shell`` for a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": (
            "Runs a command in the task's container and gives what it prints. Each call is a new shell in the working "
            "directory; files stay."
        ),
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command, for a POSIX shell."}},
            "required": ["command"],
        },
    },
}


def shell_schemas(tool: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the description of the tool that episodes of Harbor's tasks have."""
    return [SHELL]
