"""Judged groups in a file, and a run that trains on them instead of sampling, so that updates can be repeated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import UserError
from ..prompts.archive import Archive
from ..prompts.group import Group, Responses, State
from ..prompts.prompts import Prompt
from ..rollout import SamplingParams
from .controller import Controller

Recorded = tuple[Prompt, list[Responses]]


def write_groups(path: Path, groups: Sequence[Recorded]) -> None:
    """Write prompts and judged responses to one safetensors file, with the groups' structure as JSON in its header."""
    archive = Archive()
    packed = archive.pack([list(group) for group in groups])
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(archive.tensors, path, metadata={"groups": json.dumps(packed)})


def read_groups(path: Path) -> list[Recorded]:
    """Read the groups that `write_groups` wrote.

    Raises:
        UserError: the file does not exist or is not one of `write_groups`.
    """
    try:
        with safe_open(path, "pt") as file:
            packed = json.loads((file.metadata() or {})["groups"])
            archive = Archive({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            return [(prompt, parts) for prompt, parts in archive.unpack(packed)]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"'{path}' holds no recorded groups ({type(error).__name__}); write some with `rolltree rollout --record`."
        ) from error


class Replay(Controller):
    """Returns recorded groups in their order; nothing is sampled for an update.

    Args:
        path: file written by `write_groups`.
        parts: arguments of `Controller`.

    Raises:
        UserError: the file cannot be read, or the run asks for staleness.
    """

    def __init__(self, path: Path, *parts: Any) -> None:
        super().__init__(*parts)
        if self.buffer.budget.staleness:
            raise UserError("A replay samples nothing, so nothing is stale; set loop.staleness to 0.")
        self.path, self.recorded = path, read_groups(path)

    def next_batch(self, params: SamplingParams | None = None, ahead: object = None) -> list[Group]:
        """Return the next recorded groups, all at once, so none is scored ahead.

        Raises:
            UserError: too few groups are left.
        """
        begin, count = self.buffer.admitted, self.buffer.budget.batch
        chosen = self.recorded[begin : begin + count]
        if len(chosen) < count:
            raise UserError(
                f"'{self.path}' holds {len(self.recorded)} groups, enough for {len(self.recorded) // count} steps of "
                f"{count}; lower trainer.steps, or record more."
            )
        for group, (_, parts) in zip(self.buffer.admit([prompt for prompt, _ in chosen]), chosen, strict=True):
            group.parts = parts
            group.tree.set("group", group.ticket)
            self.buffer.sampled(group, group.tree)
            for state in (State.SAMPLING, State.JUDGING, State.READY):
                self.buffer.to(group, state)
        batch = self.buffer.batch()
        assert batch is not None
        return batch
