"""Runs untrusted Python, for rewards that execute responses and for tools that a policy calls.

`Sandbox.run` (`sandbox`) sends a program over a socket to a process that it has started from the script `jail`. That
process, in new namespaces if the kernel grants them, forks a child for each program, enforces its limits, and sends
back its output and status. `filters` restricts the child's system calls, files and capabilities before it runs the
program. `Sandboxes` lends sandboxes to several threads. Read `sandbox`, `jail`, `filters`.

Commands of agents are not contained; `place` and the script `mounted` give each a directory at the same path.
"""

from .place import PLACE, at_place, no_place
from .sandbox import Execution, Limits, Sandbox, Sandboxes

__all__ = ["PLACE", "Execution", "Limits", "Sandbox", "Sandboxes", "at_place", "no_place"]
