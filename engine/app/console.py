"""What a run shows while it runs: one line a step, evaluations that stand out, live progress with the time left.

On a terminal a progress bar stays below the lines; elsewhere (CI, a file) plain lines come at most every ten seconds.
A metric that is absent is left out of its line: the console never decides what a run must measure.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule

PLAIN_SECONDS = 10.0
"""Least time between two step lines where there is no terminal."""
ETA_STEPS = 20
"""The time left is estimated from this many recent steps."""

MANY_UNPARSED = 0.05
"""Share of a step's responses without an answer that can be read, above which the step line shows it."""


def _count(value: float) -> str:
    """21437 -> 21.4k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


# A part whose text is empty is left out.
PARTS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("reward/mean", lambda v: f"reward {v:.3f}"),
    ("rollout/failed", lambda v: f"{v:.0f} UNSAMPLED" if v else ""),
    ("reward/failed", lambda v: f"{v:.0f} UNJUDGED" if v else ""),
    ("reward/unparsed_ratio", lambda v: f"{100 * v:.0f}% UNPARSED" if v > MANY_UNPARSED else ""),
    ("actor/pg_loss", lambda v: f"loss {v:.3f}"),
    ("actor/entropy", lambda v: f"ent {v:.2f}"),
    ("actor/pg_clipfrac", lambda v: f"clip {100 * v:.1f}%"),
    ("actor/grad_norm", lambda v: f"gnorm {v:.2f}"),
    ("response_length/mean", lambda v: f"len {v:.0f}"),
    ("perf/throughput", lambda v: f"{_count(v)} tok/s"),
    ("tree/token_ratio", lambda v: f"ratio {v:.1f}x"),
    ("timing_s/step", lambda v: f"{v:.1f} s"),
)


class Console:
    """Use as ``with Console() as console:`` so that a failure leaves the terminal as it was.

    Args:
        rich: where to print; standard output unless given.
    """

    def __init__(self, rich: RichConsole | None = None) -> None:
        self.rich = rich or RichConsole(highlight=False)
        self.live = self.rich.is_terminal and not self.rich.is_dumb_terminal
        self._progress: Progress | None = None
        self._total = 0
        self._ends: deque[float] = deque(maxlen=ETA_STEPS + 1)  # when the run and its latest steps ended
        self._last_line = float("-inf")
        self._first_accuracy: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start(self, total_steps: int) -> None:
        """Begin; ``total_steps`` counts those of an earlier, resumed part too."""
        self._total = total_steps
        self._ends.clear()
        self._ends.append(time.monotonic())
        if self.live and self._progress is None:
            self._progress = Progress(
                TextColumn("[bold]{task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=None),
                TimeElapsedColumn(),
                TextColumn("[cyan]{task.fields[left]}"),
                TextColumn("[dim]{task.description}"),
                console=self.rich,
                transient=True,
            )
            self._progress.add_task("starting", total=total_steps, left="")
            self._progress.start()

    def phase(self, text: str) -> None:
        """What is being done now: shown beside the bar, nowhere else."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=escape(text))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended; ``step`` counts from 1."""
        now = time.monotonic()
        self._ends.append(now)
        left = self._time_left(step)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, left=left)
        elif self._total > step > 1 and now - self._last_line < PLAIN_SECONDS:
            return
        self._last_line = now
        width = len(str(self._total))
        parts = [f"step {step:>{width}}/{self._total}"]
        parts += [text for key, show in PARTS if key in metrics and (text := show(float(metrics[key])))]
        if self._progress is None and left:
            parts.append(left)
        self._print(" | ".join(parts))

    def evaluation(self, step: int, accuracy: float, n: int) -> None:
        """Accuracy (a share) on ``n`` held-out problems after ``step`` steps."""
        text = f"evaluation after step {step}: {100 * accuracy:.1f} % of {n} held-out problems"
        if self._first_accuracy is None:
            self._first_accuracy = accuracy
        else:
            text += f" ({100 * (accuracy - self._first_accuracy):+.1f} points since the first)"
        self._print(text, style="bold green")

    def note(self, text: str) -> None:
        """Something worth knowing that is no error."""
        self._print(text, style="yellow")

    def finish(self, lines: list[str]) -> None:
        """Stop the progress and print the closing ``lines``."""
        self.close()
        if self.live:
            self.rich.print(Rule(style="green"))
            for line in lines:
                self.rich.print(Padding(escape(line), (0, 1)))
            return
        for line in lines:
            self._print(line)

    def close(self) -> None:
        """Stop the progress display; harmless when there is none."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _time_left(self, step: int) -> str:
        """'3:05 left', from the pace of the latest steps; evaluations and checkpoints between them are in the pace."""
        if len(self._ends) < 2 or step >= self._total:
            return ""
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        seconds = round(pace * (self._total - step))
        hours, rest = divmod(seconds, 3600)
        clock = f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
        return f"{clock} left"

    def _print(self, text: str, style: str | None = None) -> None:
        self.rich.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
