"""What a run tells whoever watches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Progress(Protocol):
    """Told what a run does as it does it; `rolltree train` gives it a terminal (`engine/app/console.py`)."""

    def start(self, total_steps: int) -> None:
        """The run begins; ``total_steps`` counts those of an earlier, resumed part too."""

    def phase(self, text: str) -> None:
        """What it does now, such as ``sampling``."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended."""

    def evaluation(self, step: int, accuracy: float, n: int) -> None:
        """The held-out problems were answered after ``step`` steps, a share ``accuracy`` of all ``n`` rightly."""

    def note(self, text: str) -> None:
        """Something the user should know."""
