"""The loop of a run: take a batch of judged groups, make one update, repeat; and the files in the run's directory.

`Controller` returns the batches, and `Learner` updates the policy with them. At staleness 0 every batch is sampled by
the weights that it updates, and all randomness follows from the seed and a group's ticket, never from time or order, so
a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

import gc
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..data.segment import Text
from ..data.tree import TokenTree
from ..errors import RunError, UserError
from ..methods.schedules import at_step
from ..model.processor import copy_processor
from ..parts.calling import call
from ..settings.training import MOST_OVER_SAMPLING
from ..train import checkpoint
from . import preflight
from .archive import Archive, NotKeptError
from .buffer import Buffer, Group
from .controller import Controller
from .describe import describe, describe_lag, describe_replay
from .evaluation import Evaluation
from .failures import Failures
from .metrics import Idle, MetricsLog, Stopwatch, Sums
from .parts import Parts, RanksLostError
from .publication import Further
from .replay import Replay
from .rollout_files import texts_of, write_step
from .runtime import Stopping
from .trace import Trace
from .trackers import Trackers
from .unfinished import RESTARTED
from .utilization import GpuMonitor

T = TypeVar("T")
OPEN, OWN = "open/", "own/"
"""Name prefixes in a checkpoint: tensors of open groups, tensors of the prompts' source and other parts."""


@dataclass(frozen=True)
class RunSummary:
    """The results of a run."""

    steps: int
    accuracy_before: float | None
    accuracy_after: float | None
    problems: int
    seconds: float
    export: Path
    tokens: str | None
    """One line about the fate of every sampled token."""
    failures: list[str]
    """One line for each kind of failure: responses that could not be sampled or judged."""


class Orchestrator:
    """A training run in its directory; see the module's description.

    Args:
        parts: the parts of the run, as `rolltree.engine.build` makes them from a configuration.

    Raises:
        UserError: a replay cannot be read, or the run asks for staleness with it.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts, self.options, self.console = parts, parts.options, parts.console
        sampling, console = parts.sampling, parts.console
        self.tokenizer, self.sampler = sampling.tokenizer, sampling.sampler
        self.source, self.demonstrations = sampling.source, parts.demonstrations
        self.log = MetricsLog(self.options.directory / "metrics.jsonl")
        self.trace = Trace(self.options.directory / "trace.json")
        self.watch = Stopwatch(told=partial(self.trace.add, "learner"))
        self.idle = Idle(self.options.max_batch_rows)
        self.failures = {
            "rollout": Failures(
                "rollout",
                "responses could not be sampled",
                limit=self.options.max_bad_steps,
                key="trainer.max_bad_steps",
                remedy="look into the weights and the last rollouts",
            ),
            "reward": Failures(
                "reward",
                "responses could not be judged",
                limit=self.options.max_failed_steps,
                key="reward.max_failed_steps",
                remedy="mend the verifier, or raise reward.timeout_s if it needs longer",
            ),
        }
        self.learner = parts.learner(self.watch, console.note)
        self.buffer = Buffer(sampling.budget)
        given = (sampling, self.buffer, self.watch, console, self.trace.add)
        self.controller = Controller(*given) if parts.replay is None else Replay(parts.replay, *given)
        self.evaluation = Evaluation(parts.evaluation, self.sampler, self.tokenizer, console)
        self.stopping = Stopping(console.note)
        self._row: dict[str, float] = {}  # of the last step
        self._dropped: Counter[str] = Counter()  # groups dropped up to the last step, by reason
        self._asked_again = 0  # items of `Rewards.asked_again` that are counted
        self._saved_step = -1
        self._best: tuple[float, int] | None = None  # value of `checkpoint.best`, and the step

    @property
    def step(self) -> int:
        """Number of steps that have ended."""
        return self.buffer.steps

    def run(self) -> RunSummary:
        """Train to the last step, then evaluate and export.

        Raises:
            KeyboardInterrupt: a signal stopped the run; its last step is saved.
        """
        begin = time.perf_counter()
        self.console.start(self.options.steps)
        # Everything has loaded before the directory is made, so an early mistake leaves no files.
        workers = self.parts.workers
        with nullcontext() if workers is None else closing(workers), closing(self.sampler), self.parts.rewards:
            self.console.phase("reading the reference answers")
            if note := self.parts.check_rewards():
                self.console.note(f"{note}.")
            export = self._train()
        return RunSummary(
            steps=self.step,
            accuracy_before=self.evaluation.first,
            accuracy_after=self.evaluation.last,
            problems=len(self.evaluation.problems),
            seconds=time.perf_counter() - begin,
            export=export,
            tokens=self.buffer.summary(),
            failures=[line for failures in self.failures.values() if (line := failures.summary())],
        )

    def _train(self) -> Path:
        """Take the steps and export the model; return its directory."""
        steps, saved, rewards = self.options.steps, self.parts.saved, self.parts.rewards
        with preflight.held(self.options.directory), self.controller.running(rewards):
            for note in filter(None, (rewards.note, self.parts.sampling.program.note)):
                self.console.note(f"{note}.")
            self.trackers = Trackers(self.options, saved.step if saved else 0, self.console.note)
            self._recovered(self._begin if saved is None else partial(self._restore, saved))
            self.monitor = GpuMonitor.of(self.learner.device, self.console.note)
            with self.stopping.on_signals(), closing(self.trackers), closing(self.monitor), _only_new_garbage():
                self.watch.restart()
                while self.step < steps and not self.stopping.asked:
                    self._recovered(self._step)
                if self.step < steps:
                    self._recovered(self._save_last)
                    raise KeyboardInterrupt
            self._check_best()
            self.console.phase("exporting")
            return self._recovered(self._export)

    def _begin(self) -> None:
        (self.options.directory / "config.toml").write_text(self.options.toml, encoding="utf-8")
        self.watch.restart()
        self.controller.publication.check(self.learner.weights(), 0)
        row = self._evaluate() | self.watch.read()
        self._save(row)  # from now on the run can be resumed
        self.log.append(0, row)
        self.trackers.log(0, row)

    def _recovered(self, work: Callable[[], T]) -> T:
        """Do ``work``; where the ranks that train are lost, go back to the newest checkpoint in place and repeat it."""
        while True:
            try:
                return work()
            except RanksLostError as error:
                self._go_back(error)

    def _go_back(self, error: RanksLostError) -> None:
        while True:
            self.console.note(f"{error}.")
            try:
                with self.controller.paused():
                    self.controller.clear()
                    if (path := checkpoint.latest(self.options.directory / "checkpoints")) is not None:
                        self._restore(checkpoint.load(path))
                return
            except RanksLostError as another:
                error = another

    # -- one step ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        step = self.step + 1
        sums = Sums()
        self.parts.context.at(step, self._row)
        for name, option in self.parts.context.schedules.items():
            sums.add(f"schedule/{name}", option.now())
        self._over_sample(step, sums)
        params = self.learner.sampling(step, self.parts.sampling.params)
        ahead = None if self.learner.ahead is None else partial(self.learner.ahead, step)
        batch = self.controller.next_batch(params, ahead)
        trees = [group.tree for group in batch]
        for group, tree in zip(batch, trees, strict=True):
            tree.meta["entry"] = group.prompt.entry
        self._record(batch, sums)
        if self.buffer.budget.staleness:
            describe_lag(batch, self.step, sums)
        elif self.parts.sampling.callback is not None:
            ready = len(self.buffer.open)  # the batch and its surplus
            sums.add("group/kept_ratio", ready, ready + len(self.buffer.fallen))
        describe(trees, params.max_new_tokens, sums)
        self.console.phase("updating")
        given = self.demonstrations.next()
        store, kept, replayed = self.parts.store, [], list[TokenTree]()
        if store is not None:
            kept, replayed = store.snapshot(batch), store.draw(step)
            describe_replay(replayed, self.learner.updates, sums)
        with self.controller.at_rest():
            changed = self.learner.update(trees + replayed, given, step, sums)
        if store is not None:
            store.add(kept, trees, step)
        with self.watch.part("dump_rollout_generations"):
            if batch:
                write_step(self.options.directory, step, batch)
        weights = self.learner.weights() if changed else None
        self.controller.end_step(batch, weights, self.learner.updates, self._others())
        self.controller.observe(batch, partial(self.learner.credit, step=step))
        for reason, count in (self.buffer.dropped - self._dropped).items():
            sums.count(f"group/dropped_{reason}", count)
        self._dropped = self.buffer.dropped.copy()
        for reason, count in self.controller.restarted.items():
            sums.count(f"group/restarted_{reason}", count)
        self.controller.restarted.clear()
        if again := self.parts.rewards.asked_again - self._asked_again:
            sums.count("reward/asked_again", again)
            self._asked_again += again
        metrics = sums.means()
        for reason in ("failed", "untrained", "unseen"):
            self.buffer.ledger.leave_out(reason, int(metrics[f"filter/{reason}_tokens"]))
        if self.evaluation.due(step, self.options.steps):
            metrics |= self._evaluate()
        times = self.watch.read(self.learner.spans())
        metrics["perf/throughput"] = sum(t.logical_tokens for t in trees) / times["timing_s/step"]
        metrics["perf/unique_tokens_per_s"] = sum(t.num_tokens for t in trees) / times["timing_s/step"]
        metrics |= self.idle.read(times, self.sampler.tally) | self.learner.utilization(times)
        metrics |= self.monitor.read()
        row = metrics | times
        self._row = row
        if step % self.options.save_every == 0 or step == self.options.steps or self.stopping.asked:
            self.console.phase("saving a checkpoint")
            with self.watch.part("checkpoint"):  # counted in the next step: the checkpoint holds this row
                self._save(row)
        self.log.append(step, row)
        self.trackers.log(step, row)
        self.trace.flush()
        self.console.step(step, row)

    def _record(self, batch: Sequence[Group], sums: Sums) -> None:
        """Record the rewards and failures of a batch."""
        for group in batch:
            for verdict in group.verdicts:
                if verdict.value is not None:
                    sums.add("reward/mean", verdict.value)
                for what, why in (("unparsed", verdict.unparsed), ("skipped", verdict.skipped)):
                    sums.count(f"reward/{what}", why is not None)
                    if why is not None:
                        sums.count(f"reward/{what}_{why}")
                sums.add("reward/unparsed_ratio", verdict.unparsed is not None)
        reasons = [reason for group in batch for reason in group.unsampled]
        self.failures["rollout"].record(reasons, sum(len(group.texts) for group in batch), sums, self.console)
        verdicts = [verdict for group in batch for verdict in group.verdicts]
        reasons = [verdict.reason for verdict in verdicts if verdict.reason is not None]
        skipped = sum(verdict.skipped is not None for verdict in verdicts)
        self.failures["reward"].record(reasons, len(verdicts), sums, self.console, skipped=skipped)

    def _others(self) -> Further:
        return {name: (learner.weights(), learner.updates) for name, learner in self.learner.policies.items()}

    def _over_sample(self, step: int, sums: Sums) -> None:
        """Let the rounds of ``step`` admit as many groups as `loop.over_sampling` says."""
        schedule, buffer = self.parts.sampling.over_sampling, self.buffer
        factor = at_step(schedule, step, self._row)
        if not 1 <= factor <= MOST_OVER_SAMPLING:
            raise UserError(
                f"loop.over_sampling must be from 1 to {MOST_OVER_SAMPLING}; at step {step} it is {factor:g}."
            )
        if not isinstance(schedule, int | float):
            sums.add("schedule/over_sampling", factor)
        buffer.budget = replace(buffer.budget, over_sampling=factor)

    def _evaluate(self) -> dict[str, float]:
        with self.controller.paused(), self.watch.part("eval"):
            return self.evaluation.run(self.step, self.parts.rewards)

    # -- directory, checkpoints -------------------------------------------------------------------------------------

    def _save_last(self) -> None:
        if self._saved_step != self.step:
            self._save(self._row)

    def _save(self, row: dict[str, float]) -> None:
        with self.controller.paused():  # so that groups and parts are of one moment
            open_tensors, groups = self.controller.state_dict()
            tensors = {f"{OPEN}{name}": tensor for name, tensor in open_tensors.items()}
            own = Archive()
            try:
                stream = own.pack(self.source.state_dict())
            except NotKeptError as error:
                raise RunError(
                    f"The state of data.source cannot be saved: {error} Give its rows plain values."
                ) from error
            known = {key: call(key, part.state_dict) for key, part in self.parts.stateful.items()}
            states = {key: self._kept(key, state, own) for key, state in (known | self.learner.states()).items()}
            tensors |= {f"{OWN}{name}": tensor for name, tensor in own.tensors.items()}
        self._best = self._better(row)
        state: dict[str, Any] = {
            "best": self._best,
            "demonstrations": self.demonstrations.state_dict(),
            "prompts": stream,
            "parts": states,
            "buffer": self.buffer.state_dict(),
            "groups": groups,
            "metrics": row,
            "accuracy": [self.evaluation.first, self.evaluation.last],
            "failures": {name: failures.state_dict() for name, failures in self.failures.items()},
        }
        checkpoint.save(
            self.options.directory / "checkpoints",
            self.step,
            learner=self.learner.save,
            tensors=tensors,
            state=state,
            trained=self.options.trained,
            keep=self.options.keep,
            spare=None if self._best is None else self._best[1],
        )
        self._saved_step = self.step

    @staticmethod
    def _kept(key: str, state: Any, archive: Archive) -> Any:
        try:
            return archive.pack(state)
        except NotKeptError as error:
            raise RunError(
                f"The state of {key} cannot be saved: {error} Let its state_dict return numbers, texts, arrays, and "
                "lists and dicts of them."
            ) from error

    def _better(self, row: dict[str, float]) -> tuple[float, int] | None:
        """Return the best checkpoint so far by `checkpoint.best`, including the present one."""
        name = self.options.best
        if name is None or (value := row.get(name.removeprefix("-"))) is None or not math.isfinite(value):
            return self._best
        value = -value if name.startswith("-") else value
        return (value, self.step) if self._best is None or value > self._best[0] else self._best

    def _check_best(self) -> None:
        if (name := self.options.best) is not None and self._best is None:
            self.console.note(f"No checkpoint was kept for checkpoint.best = '{name}': no step that was saved has it.")

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        state = saved.state
        self._row = state["metrics"] if saved.step else {}
        self.parts.context.at(saved.step + 1, self._row)
        self.learner.load(saved.learner, state["learner"])
        self.demonstrations.load_state_dict(state["demonstrations"])
        self._best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self._saved_step = saved.step
        own = Archive(_named(saved.tensors, OWN))
        self.source.load_state_dict(own.unpack(state["prompts"]))
        states = {key: own.unpack(packed) for key, packed in state["parts"].items()}
        for key, part in self.parts.stateful.items():
            call(key, part.load_state_dict, states[key])
        self.learner.restore(states)
        self.buffer.load_state_dict(state["buffer"])
        self._dropped = self.buffer.dropped.copy()
        self.controller.publication.send(self.learner.weights(), self.learner.updates, self._others())
        self.controller.load_state_dict(_named(saved.tensors, OPEN), state["groups"])
        self._remember_rollouts(saved.step)
        for name, failures in self.failures.items():
            failures.load_state_dict(state["failures"][name])
        self.evaluation.first, self.evaluation.last = state["accuracy"]
        stamp = time.strftime("%Y%m%d-%H%M%S")
        there = self.log.rewind(saved.step, self.options.directory / f"metrics.before-resume-{stamp}.jsonl")
        if saved.step not in there:
            self.log.append(saved.step, state["metrics"])  # the run was killed between the checkpoint and its row
        if lost := set(range(saved.step)) - there:
            self.console.note(f"'{self.log.path}' lacks the rows of {len(lost)} steps before step {saved.step}.")
        checkpoint.restore_generators(*saved.generators)
        self.console.note(f"Resuming after step {saved.step}.")
        for reason, count in self.controller.restarted.items():
            self.console.note(f"{count} unfinished groups are begun anew: {RESTARTED.get(reason, reason)}.")

    def _remember_rollouts(self, step: int) -> None:
        """Let the sampler draft from the rollouts up to ``step``: the latest files that fit."""
        room, files = self.options.remembered_tokens, list[list[Text]]()
        while room > 0 and step > 0:
            files.append(texts_of(self.options.directory, step))
            room -= sum(len(text.before) + len(text.tokens) for text in files[-1])
            step -= 1
        for texts in reversed(files):
            self.sampler.remember(texts)

    def _export(self) -> Path:
        """Write a Hugging Face directory that plain transformers loads, and return its path.

        Each further policy is such a directory of its own within, with the policy's name.
        """
        target = self.options.directory / "export"
        temporary = target.with_name("export.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        folders = {temporary: self.learner}
        folders |= {temporary / name: learner for name, learner in self.learner.policies.items()}
        for folder, learner in folders.items():
            learner.export(folder)
            self.tokenizer.save_pretrained(folder)
            copy_processor(self.tokenizer.name_or_path, folder)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        return target


def _named(tensors: Mapping[str, Tensor], beginning: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``beginning``, by the rest of their names."""
    return {name.removeprefix(beginning): tensor for name, tensor in tensors.items() if name.startswith(beginning)}


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Freeze existing objects so that garbage collection skips them within the block; scanning the imported libraries
    slows small steps."""
    by_caller = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not by_caller:
            gc.unfreeze()
