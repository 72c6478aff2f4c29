"""Prompts from a taskset of the library `verifiers` (0.4, its `v1`), for ``data.source = "verifiers"``.

The rewards of such a task come from its environment, `rolltree.engine.programs.verifiers`.
"""

from __future__ import annotations

from typing import Any

from ..programs.verifiers import find_tasks


class TasksetPrompts:
    """``data.source = "verifiers"`` yields the tasks in order and begins again after the last.

    Args:
        taskset: ``file.py:function`` that makes the taskset.
        first: the number of the first task; earlier ones are left for an evaluation.

    Raises:
        UserError: the taskset cannot be used.
    """

    def __init__(self, taskset: str, first: int = 0) -> None:
        self._tasks, self._number = find_tasks(taskset), first

    def next(self, count: int) -> list[dict[str, Any]]:
        rows = []
        for number in range(self._number, self._number + count):
            data = self._tasks[number].data
            messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
            if isinstance(data.prompt, str):
                messages.append({"role": "user", "content": data.prompt})
            else:
                messages += [{"role": m.role, "content": m.content} for m in data.prompt or []]
            rows.append({"prompt": messages, "answer": "", "task": number})
        self._number += count
        return rows

    def state_dict(self) -> int:
        """Return the number of the next task."""
        return self._number

    def load_state_dict(self, state: int) -> None:
        self._number = state
