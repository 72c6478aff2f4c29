"""Runs untrusted Python, for rewards that execute responses and for tools that a policy calls.

`Sandbox.run` (`sandbox`) sends a program over a socket to a process that it has started from the script `jail`. That
process forks a child for each program, in namespaces of its own where the kernel grants them, watches its limits, and
sends back its output and status. `filters` is what the child gives up before it runs the program: system calls, files,
capabilities. `Sandboxes` lends sandboxes to several threads. Read `sandbox`, `jail`, `filters`.
"""

from .sandbox import Execution, Limits, Sandbox, Sandboxes

__all__ = ["Execution", "Limits", "Sandbox", "Sandboxes"]
