"""The progress display of a run: one line a step, evaluations, and a progress bar with the time left.

On a terminal a progress bar stays below the lines; elsewhere (CI, a file) plain lines come at most every ten seconds.
A metric that is absent is left out of its line: the console never decides what a run must measure. A run goes on
after the reader of its output has ended, such as a closed terminal or pipe.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule

from .printable import printable

PLAIN_SECONDS = 10.0
"""Least time between two step lines without a terminal, in seconds."""
ETA_STEPS = 20
"""Number of recent steps from which the time left is estimated."""

MANY_UNPARSED = 0.05
"""Share of a step's responses without a readable answer above which the step's line shows it."""


class Terminal(RichConsole):
    """Falls silent where the pipe that it writes to is closed; rich itself would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def _count(value: float) -> str:
    """Shorten a count: 21437 -> 21.4k."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
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
    ("perf/flop", lambda v: f"{_count(v)}FLOP"),
    ("timing_s/step", lambda v: f"{v:.1f} s"),
)


class Console:
    """Prints a run's progress. Use as ``with Console() as console:`` so that a failure restores the terminal.

    Args:
        rich: console to print on; default: standard output.
    """

    def __init__(self, rich: RichConsole | None = None) -> None:
        self.rich = rich or Terminal(highlight=False)
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
        """Start the display; ``total_steps`` includes the steps done before a run was resumed."""
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
        """Show next to the bar what the run is doing now; without a bar nothing is printed."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=escape(printable(text)))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report the end of a step; ``step`` counts from 1."""
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

    def evaluation(self, step: int, accuracy: float, n: int, parts: Sequence[str], reward: float | None) -> None:
        """Report the accuracy (0 to 1) on ``n`` held-out problems after ``step`` steps; see `Progress.evaluation`."""
        text = f"evaluation after step {step}: {100 * accuracy:.1f} % of {n} held-out problems are right"
        text += " by " + " and ".join(f"'{part}'" for part in parts) if parts else ""
        if self._first_accuracy is None:
            self._first_accuracy = accuracy
        else:
            text += f" ({100 * (accuracy - self._first_accuracy):+.1f} points since the first)"
        text += "" if reward is None else f", mean reward {reward:.3g}"
        self._print(text, style="bold green")

    def note(self, text: str) -> None:
        """Print a message that is not an error."""
        self._print(text, style="yellow")

    def finish(self, lines: list[str]) -> None:
        """Stop the progress display and print the closing ``lines``."""
        self.close()
        if self.live:
            self._show(Rule(style="green"))
            for line in lines:
                self._show(Padding(escape(printable(line)), (0, 1)))
            return
        for line in lines:
            self._print(line)

    def close(self) -> None:
        """Stop the progress display; harmless when there is none."""
        if self._progress is not None:
            try:
                self._progress.stop()
            except OSError as error:
                self._mute(error)
            self._progress = None

    def _time_left(self, step: int) -> str:
        """Return '3:05 left', from the pace of the latest steps, with the evaluations and checkpoints between them."""
        if len(self._ends) < 2 or step >= self._total:
            return ""
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        seconds = round(pace * (self._total - step))
        hours, rest = divmod(seconds, 3600)
        clock = f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
        return f"{clock} left"

    def _print(self, text: str, style: str | None = None) -> None:
        self._show(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)

    def _show(self, what: Any, **options: Any) -> None:
        try:
            self.rich.print(what, **options)
        except OSError as error:
            self._mute(error)

    def _mute(self, error: OSError) -> None:
        """Print nothing any more where the terminal has been closed; otherwise raise ``error``."""
        if error.errno != errno.EIO:
            raise error
        self._progress, self.live = None, False
        self.rich.quiet = True
