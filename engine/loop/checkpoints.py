"""The checkpoints of a run: what one holds beside the learner's own part, and how a run continues from it."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..data.segment import Text
from ..errors import RunError
from ..fleet.publication import further
from ..learn.learning import Learning
from ..model.processor import copy_processor
from ..parts.calling import call
from ..parts.context import Context
from ..prompts.archive import Archive, NotKeptError
from ..prompts.demonstrations import Demonstrations
from ..record.failures import Failures
from ..record.metrics import MetricsLog
from ..record.problems import write_problems
from ..record.rollout_files import texts_of
from ..train import checkpoint
from .controller import Controller
from .evaluation import Evaluation
from .unfinished import RESTARTED

OPEN, OWN = "open/", "own/"
"""Name prefixes in a checkpoint: tensors of open groups, tensors of the prompts' source and other parts."""


@dataclass(frozen=True)
class Keeping:
    """The checkpoints that a run keeps.

    Attributes:
        every: steps between two checkpoints.
        keep: number of the newest ones that are kept.
        best: metric whose highest checkpoint is kept too; "-name" keeps the lowest.
        trained: the settings that decide the training; a resumed run must have the same.
        remembered_tokens: tokens of earlier rollouts that a resumed run drafts from.
    """

    every: int
    keep: int
    best: str | None
    trained: dict[str, Any]
    remembered_tokens: int


class Checkpoints:
    """Saves the parts of a run together and restores them.

    Args:
        directory: the run's.
        failures: counts of failures, by the part of the run.
        stateful: objects with ``state_dict`` and ``load_state_dict``, by their keys of the configuration.

    Attributes:
        saved_step: step of the newest checkpoint; -1 before the first.
    """

    def __init__(
        self,
        directory: Path,
        keeping: Keeping,
        controller: Controller,
        learner: Learning,
        demonstrations: Demonstrations,
        evaluation: Evaluation,
        failures: Mapping[str, Failures],
        context: Context,
        stateful: Mapping[str, Any],
    ) -> None:
        self.directory, self.keeping, self.controller, self.learner = directory, keeping, controller, learner
        self.demonstrations, self.evaluation, self.failures = demonstrations, evaluation, failures
        self.context, self.stateful = context, stateful
        self.saved_step = -1
        self._best: tuple[float, int] | None = None  # value of `Keeping.best`, and the step

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is saved after ``step``."""
        return step % self.keeping.every == 0

    def save(self, step: int, row: dict[str, float]) -> None:
        """Save the run after ``step``, whose metrics are ``row``.

        Raises:
            RunError: a state cannot be stored.
            OSError: a file cannot be written.
        """
        controller = self.controller
        with controller.paused():  # so that groups and parts are of one moment
            open_tensors, groups = controller.state_dict()
            archive = Archive()
            try:
                stream = archive.pack(controller.source.state_dict())
            except NotKeptError as error:
                raise RunError(
                    f"The state of data.source cannot be saved: {error} Give its rows plain values."
                ) from error
            part_states = {key: call(key, part.state_dict) for key, part in self.stateful.items()}
            states = {key: _kept(key, state, archive) for key, state in (part_states | self.learner.states()).items()}
        self._best = self._better(step, row)
        state: dict[str, Any] = {
            "best": self._best,
            "demonstrations": self.demonstrations.state_dict(),
            "prompts": stream,
            "parts": states,
            "buffer": controller.buffer.state_dict(),
            "groups": groups,
            "metrics": row,
            "accuracy": [self.evaluation.first, self.evaluation.last],
            "failures": {name: failures.state_dict() for name, failures in self.failures.items()},
        }
        checkpoint.save(
            self.directory / "checkpoints",
            step,
            learner=self.learner.save,
            tensors=_prefixed(OPEN, open_tensors) | _prefixed(OWN, archive.tensors),
            state=state,
            trained=self.keeping.trained,
            keep=self.keeping.keep,
            spare=None if self._best is None else self._best[1],
        )
        if (table := controller.source.table()) is not None:
            write_problems(self.directory, step, table)
        self.saved_step = step

    def restore(self, saved: checkpoint.Checkpoint, log: MetricsLog, note: Callable[[str], object]) -> dict[str, float]:
        """Continue from ``saved``: restore all parts, send the policy to the sampler, and cut the metrics after it.

        Args:
            note: called with sentences for the user.

        Returns:
            The metrics of the step after which the run continues; empty before the first step.

        Raises:
            UserError: the configuration or the model has changed.
        """
        state, controller = saved.state, self.controller
        row = state["metrics"] if saved.step else {}
        self.context.at(saved.step + 1, row)
        self.learner.load(saved.learner, state["learner"])
        self.demonstrations.load_state_dict(state["demonstrations"])
        self._best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self.saved_step = saved.step
        self._restore_parts(Archive(_named(saved.tensors, OWN)), state)
        controller.buffer.load_state_dict(state["buffer"])
        controller.publication.send(self.learner.weights(), self.learner.updates, further(self.learner))
        controller.load_state_dict(_named(saved.tensors, OPEN), state["groups"])
        self._remember_rollouts(saved.step)
        for name, failures in self.failures.items():
            failures.load_state_dict(state["failures"][name])
        self.evaluation.first, self.evaluation.last = state["accuracy"]
        self._cut(log, saved.step, state["metrics"], note)
        checkpoint.restore_generators(*saved.generators)
        note(f"Resuming after step {saved.step}.")
        for reason, count in controller.restarted.items():
            note(f"{count} unfinished groups are begun anew: {RESTARTED.get(reason, reason)}.")
        return row

    def without_best(self) -> str | None:
        """Return a sentence if no checkpoint has the metric of `checkpoint.best`."""
        if (name := self.keeping.best) is None or self._best is not None:
            return None
        return f"No checkpoint was kept for checkpoint.best = '{name}': no step that was saved has it."

    def _better(self, step: int, row: Mapping[str, float]) -> tuple[float, int] | None:
        """Return the best checkpoint so far by `checkpoint.best`, including the present one."""
        name = self.keeping.best
        if name is None or (value := row.get(name.removeprefix("-"))) is None or not math.isfinite(value):
            return self._best
        value = -value if name.startswith("-") else value
        return (value, step) if self._best is None or value > self._best[0] else self._best

    def _restore_parts(self, archive: Archive, state: Mapping[str, Any]) -> None:
        self.controller.source.load_state_dict(archive.unpack(state["prompts"]))
        states = {key: archive.unpack(packed) for key, packed in state["parts"].items()}
        for key, part in self.stateful.items():
            call(key, part.load_state_dict, states[key])
        self.learner.restore(states)

    def _cut(self, log: MetricsLog, step: int, row: dict[str, float], note: Callable[[str], object]) -> None:
        """Set rows of steps after ``step`` aside, and complete what a killed run did not write."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        there = log.rewind(step, self.directory / f"metrics.before-resume-{stamp}.jsonl")
        if step not in there:
            log.append(step, row)  # the run was killed between the checkpoint and its row
        if lost := set(range(step)) - there:
            note(f"'{log.path}' lacks the rows of {len(lost)} steps before step {step}.")

    def _remember_rollouts(self, step: int) -> None:
        """Let the sampler draft from the rollouts up to ``step``: the latest files that fit."""
        room, files = self.keeping.remembered_tokens, list[list[Text]]()
        while room > 0 and step > 0:
            files.append(texts_of(self.directory, step))
            room -= sum(len(text.before) + len(text.tokens) for text in files[-1])
            step -= 1
        for texts in reversed(files):
            self.controller.sampler.remember(texts)


def _kept(key: str, state: Any, archive: Archive) -> Any:
    try:
        return archive.pack(state)
    except NotKeptError as error:
        raise RunError(
            f"The state of {key} cannot be saved: {error} Let its state_dict return numbers, texts, arrays, and "
            "lists and dicts of them."
        ) from error


def _prefixed(beginning: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{beginning}{name}": tensor for name, tensor in tensors.items()}


def _named(tensors: Mapping[str, Tensor], beginning: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``beginning``, by the rest of their names."""
    return {name.removeprefix(beginning): tensor for name, tensor in tensors.items() if name.startswith(beginning)}


def export(directory: Path, learner: Learning, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write a Hugging Face directory that plain transformers loads to the run's ``directory``, and return its path.

    Each further policy is such a directory of its own within, with the policy's name.
    """
    target = directory / "export"
    temporary = target.with_name("export.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    folders = {temporary: learner}
    folders |= {temporary / name: other for name, other in learner.policies.items()}
    for folder, policy in folders.items():
        policy.export(folder)
        tokenizer.save_pretrained(folder)
        copy_processor(tokenizer.name_or_path, folder)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    return target
