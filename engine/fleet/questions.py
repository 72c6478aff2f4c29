"""Questions of rollout programs to the run's verifier, if that is in other processes than the engine."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Self


class Question(NamedTuple):
    """A response to judge: its text and its prompt's context, with a number for the answer."""

    number: int
    text: str
    context: Any


class Questions:
    """A program's verifier: ``verify(text, context)`` waits in its thread until another process has answered.

    That process asks for the `next` questions and hands over their answers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._new: list[Question] = []
        self._asked_for: Future[list[Question]] | None = None
        self._answers: dict[int, Future[float | None]] = {}

    def __call__(self, text: str, context: Any) -> float | None:
        answer: Future[float | None] = Future()
        with self._lock:
            self._answers[self._count] = answer
            self._new.append(Question(self._count, text, context))
            self._count += 1
            self._hand_over()
        return answer.result()

    def next(self) -> Future[list[Question]]:
        """Return the questions since the last call, as soon as there is one."""
        with self._lock:
            self._asked_for = asked_for = Future[list[Question]]()
            self._hand_over()
        return asked_for

    def answer(self, values: Mapping[int, float | None]) -> None:
        """Set the rewards of responses by the numbers of their questions; None where judging failed."""
        for number, value in values.items():
            self._answers.pop(number).set_result(value)

    def _hand_over(self) -> None:
        if self._asked_for is not None and self._new:
            asked_for, self._asked_for = self._asked_for, None
            new, self._new = self._new, []
            asked_for.set_result(new)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # every group has a program of its own, and all share one verifier
