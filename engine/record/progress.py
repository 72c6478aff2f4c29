"""The progress of a run, on the screen or line by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Progress(Protocol):
    """Shows the progress of a run; `rolltree train` shows it in a terminal (`engine/app/console.py`)."""

    def start(self, total_steps: int) -> None:
        """Show that the run begins; ``total_steps`` includes the steps before a resume."""

    def phase(self, text: str) -> None:
        """Show the present activity, such as ``sampling``."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that a step has ended."""

    def evaluation(self, step: int, accuracy: float, n: int, parts: Sequence[str], reward: float | None) -> None:
        """Show the share ``accuracy`` of the ``n`` held-out problems that were solved after ``step`` steps.

        Args:
            parts: the parts of the reward that judged this; none: the reward did.
            reward: the mean of the rewards; None if no answer has one.
        """

    def note(self, text: str) -> None:
        """Show a sentence for the user."""
