"""A run's metrics in TensorBoard, wandb and trackio, each through its own library.

They get the rows of `metrics.jsonl`, which remains the record. A tracker that fails during a run is reported, left out
from then on, and does not end the run. Projects, accounts and servers are set by the libraries' own environment
variables.
"""

from __future__ import annotations

import importlib
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..parts.calling import failure

PROJECT = "rolltree"


@dataclass(frozen=True)
class Tracked:
    """The run that trackers show: its name, its directory, and its configuration as plain values."""

    name: str
    directory: Path
    document: Mapping[str, Any]


Log = Callable[[int, dict[str, float]], object]
End = Callable[[], object]


class Trackers:
    """The trackers that the option `trackers` names.

    Args:
        names: tensorboard, wandb, trackio.
        step: the last step that has ended; a resumed run continues after it.
        note: called with sentences for the user.

    Raises:
        UserError: a library is not installed, or does not start.
    """

    def __init__(self, names: Sequence[str], run: Tracked, step: int, note: Callable[[str], object]) -> None:
        self._note = note
        self._open: dict[str, tuple[Log, End]] = {}
        for name in names:
            try:
                self._open[name] = OPEN[name](run, step)
            except ImportError as error:
                self.close()
                raise UserError(f"trackers has '{name}', which is not installed; `pip install {name}`.") from error
            except Exception as error:
                self.close()
                raise UserError(f"trackers has '{name}', which does not start: {failure(error)}.") from error

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Log the finite metrics of ``step``."""
        finite = {name: float(value) for name, value in row.items() if math.isfinite(value)}
        self._each(lambda opened: opened[0](step, finite))

    def close(self) -> None:
        """Let the trackers write buffered data and close them."""
        self._each(lambda opened: opened[1]())
        self._open.clear()

    def _each(self, act: Callable[[tuple[Log, End]], object]) -> None:
        for name, opened in list(self._open.items()):
            try:
                act(opened)
            except Exception as error:
                del self._open[name]
                self._note(f"The tracker '{name}' failed and gets no more metrics: {failure(error)}.")


def _tensorboard(run: Tracked, step: int) -> tuple[Log, End]:
    importlib.import_module("tensorboard")
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
        str(run.directory / "tensorboard"), purge_step=step + 1 if step else None
    )

    def log(step: int, row: dict[str, float]) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _wandb(run: Tracked, step: int) -> tuple[Log, End]:
    wandb = importlib.import_module("wandb")
    file = run.directory / "wandb.id"  # so that a resumed run continues the same wandb run
    if not file.exists():
        file.write_text(uuid.uuid4().hex, encoding="utf-8")
    id_ = file.read_text(encoding="utf-8")
    opened = wandb.init(
        project=PROJECT, name=run.name, id=id_, dir=str(run.directory), config=run.document, resume="allow"
    )
    return lambda step, row: opened.log(row, step=step), opened.finish


def _trackio(run: Tracked, step: int) -> tuple[Log, End]:
    trackio = importlib.import_module("trackio")
    opened = trackio.init(
        project=PROJECT, name=run.name, config=run.document, resume="allow" if step else "never", embed=False
    )
    return lambda step, row: opened.log(row, step=step), opened.finish


OPEN: dict[str, Callable[[Tracked, int], tuple[Log, End]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
