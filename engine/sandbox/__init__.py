"""Untrusted code: for rewards that run it, and tools that a policy calls."""

from .sandbox import Execution, Limits, Sandbox, Sandboxes

__all__ = ["Execution", "Limits", "Sandbox", "Sandboxes"]
