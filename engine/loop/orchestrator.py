"""The loop of a run: take a batch of judged groups, make one update, repeat; and the files in the run's directory.

`Controller` returns the batches, and `Learner` updates the policy with them. At staleness 0 every batch is sampled by
the weights that it updates, and all randomness follows from the seed and a group's ticket, never from time or order, so
a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from ..data.tree import TokenTree
from ..errors import UserError
from ..fleet.publication import Publication, further
from ..fleet.workers import Workers
from ..learn.learning import Learning, RanksLostError
from ..learn.utilization import GpuMonitor
from ..methods.schedules import Schedule, at_step
from ..parts.context import Context
from ..prompts.demonstrations import Demonstrations
from ..prompts.group import Group
from ..record.directory import held
from ..record.failures import Failures
from ..record.metrics import Idle, MetricsLog, Stopwatch, Sums
from ..record.progress import Progress
from ..record.spent import FlopAccount, of_targets
from ..record.trace import Trace
from ..record.trackers import Tracked, Trackers
from ..rewards import Rewards
from ..settings.training import MOST_OVER_SAMPLING
from ..train import checkpoint
from .budget import Budget
from .buffer import Buffer
from .callback import CallbackRule
from .checkpoints import Checkpoints, Keeping, export
from .controller import Controller
from .describe import describe, describe_lag, describe_replay, describe_skipped, describe_verdicts
from .evaluation import Evaluation
from .replay import Replay
from .replay_store import ReplayStore
from .runtime import Stopping, only_new_garbage
from .sampling import SamplingParts

T = TypeVar("T")


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


@dataclass(frozen=True)
class RunOptions:
    """Directory and length of a run.

    Attributes:
        toml: the resolved configuration as text, kept in the directory.
        document: the same configuration as plain values, for trackers.
        max_bad_steps: consecutive steps without a sampled response after which the run stops.
        max_failed_steps: consecutive steps without a verdict after which the run stops.
        max_batch_rows: sequences that the engine decodes together.
        keeping: what the run's checkpoints keep.
    """

    name: str
    directory: Path
    steps: int
    toml: str
    document: dict[str, Any]
    trackers: Sequence[str]
    max_bad_steps: int
    max_failed_steps: int
    max_batch_rows: int
    keeping: Keeping


class Orchestrator:
    """A training run in its directory; see the module's description. `rolltree.engine.build` makes one from a
    configuration.

    Args:
        sampling: what samples, and from which prompts.
        publication: sends the policy to the sampler.
        budget: how many groups may be open.
        learner: makes the object that trains, from the run's stopwatch and a function that is called with sentences
            for the user.
        evaluation: answers the held-out problems.
        rewards: the verifiers; the run enters them, which starts their processes, and closes them.
        check_rewards: makes the entered ``rewards`` read each known problem once; returns a sentence about those that
            cannot be judged, or an empty text.
        demonstrations: trees that are given, not sampled.
        console: shows the progress.
        rule: the group callback; None accepts all judged groups.
        over_sampling: factor of ``budget`` by the step, at staleness 0.
        saved: the checkpoint from which a resumed run continues.
        replay: a file of recorded groups to learn from instead of sampling.
        store: groups of earlier steps to train on again.
        context: the run's values that parts outside of the learner ask for.
        workers: starts the run's other processes; the run closes it. None if it has none.
        stateful: objects outside of the learner whose state is in checkpoints, by the key of the configuration that
            names each; they have ``state_dict`` and ``load_state_dict``.

    Raises:
        UserError: a replay cannot be read, or the run asks for staleness with it.
    """

    def __init__(
        self,
        options: RunOptions,
        *,
        sampling: SamplingParts,
        publication: Publication,
        budget: Budget,
        learner: Callable[[Stopwatch, Callable[[str], object]], Learning],
        evaluation: Evaluation,
        rewards: Rewards,
        check_rewards: Callable[[], str],
        demonstrations: Demonstrations,
        console: Progress,
        rule: CallbackRule | None = None,
        over_sampling: Schedule = 1.0,
        saved: checkpoint.Checkpoint | None = None,
        replay: Path | None = None,
        store: ReplayStore | None = None,
        context: Context | None = None,
        workers: Workers | None = None,
        stateful: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.options, self.sampling, self.console = options, sampling, console
        self.tokenizer, self.sampler = sampling.tokenizer, sampling.sampler
        self.source, self.demonstrations = sampling.source, demonstrations
        self.rewards, self.check_rewards = rewards, check_rewards
        self.rule, self.over_sampling = rule, over_sampling
        self.saved, self.store, self.workers, self.stateful = saved, store, workers, stateful
        self.context = context or Context()
        self.evaluation = evaluation
        self.log = MetricsLog(options.directory / "metrics.jsonl")
        self.trace = Trace(options.directory / "trace.json")
        self.watch = Stopwatch(told=partial(self.trace.add, "learner"))
        self.idle, self.flop = Idle(options.max_batch_rows), FlopAccount()
        self.failures = {
            "rollout": Failures.of_rollouts(options.max_bad_steps),
            "reward": Failures.of_rewards(options.max_failed_steps),
        }
        self.learner = learner(self.watch, console.note)
        self.buffer = Buffer(budget)
        arguments = (sampling, self.buffer, publication, self.watch, console, rule, self.trace.add)
        self.controller = Controller(*arguments, self.learner.gather) if replay is None else Replay(replay, *arguments)
        self.checkpoints = Checkpoints(
            options.directory,
            options.keeping,
            self.controller,
            self.learner,
            demonstrations,
            evaluation,
            self.failures,
            self.context,
            stateful,
        )
        self.stopping = Stopping(console.note)
        self._row: dict[str, float] = {}  # of the last step
        self._dropped: Counter[str] = Counter()  # groups dropped up to the last step, by reason
        self._told: set[str] = set()  # sentences about skipped rows
        self._asked_again = 0  # items of `Rewards.asked_again` that are counted

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
        workers = self.workers
        with nullcontext() if workers is None else closing(workers), closing(self.sampler), self.rewards:
            self.console.phase("reading the reference answers")
            if note := self.check_rewards():
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
        steps, saved, rewards = self.options.steps, self.saved, self.rewards
        with held(self.options.directory), self.controller.running(rewards):
            for note in filter(None, (rewards.note, self.sampling.program.note)):
                self.console.note(f"{note}.")
            run = Tracked(self.options.name, self.options.directory, self.options.document)
            done = saved.step if saved else 0
            self.trackers = Trackers(self.options.trackers, run, done, self.console.note)
            self._recovered(self._begin if saved is None else partial(self._restore, saved))
            self.monitor = GpuMonitor.of(self.learner.device, self.console.note)
            with self.stopping.on_signals(), closing(self.trackers), closing(self.monitor), only_new_garbage():
                self.watch.restart()
                while self.step < steps and not self.stopping.requested:
                    self._recovered(self._step)
                if self.step < steps:
                    self._recovered(self._save_last)
                    raise KeyboardInterrupt
            if without := self.checkpoints.without_best():
                self.console.note(without)
            self.console.phase("exporting")
            return self._recovered(partial(export, self.options.directory, self.learner, self.tokenizer))

    def _begin(self) -> None:
        (self.options.directory / "config.toml").write_text(self.options.toml, encoding="utf-8")
        self.watch.restart()
        self.controller.publication.check(self.learner.weights(), 0)
        row = self._evaluate() | self.watch.read() | self.flop.read(self.sampler.tally, {}, {})
        self.checkpoints.save(0, row)  # from now on the run can be resumed
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
        self._begin_step(step, sums)
        params = self.learner.sampling(step, self.sampling.params)
        ahead = None if self.learner.ahead is None else partial(self.learner.ahead, step)
        batch = self.controller.next_batch(params, ahead)
        self._describe(batch, params.max_new_tokens, sums)
        changed = self._update(batch, step, sums)
        with self.watch.part("dump_rollout_generations"):
            if batch:
                trees, texts = [group.tree for group in batch], [group.texts for group in batch]
                self.learner.record(
                    self.options.directory, step, trees, texts, [group.prompt.images for group in batch]
                )
        weights = self.learner.weights() if changed else None
        self.controller.end_step(batch, weights, self.learner.updates, further(self.learner))
        self.controller.observe(batch, partial(self.learner.credit, step=step))
        self._row = self._measured(step, [group.tree for group in batch], sums)
        self._end_step(step)

    def _begin_step(self, step: int, sums: Sums) -> None:
        """Set everything that changes with the step."""
        self.context.at(step, self._row)
        for name, option in self.context.schedules.items():
            sums.add(f"schedule/{name}", option.now())
        self._over_sample(step, sums)

    def _describe(self, batch: Sequence[Group], max_new_tokens: int, sums: Sums) -> None:
        """Record what was sampled and judged for the step."""
        describe_verdicts(batch, self.failures, sums, self.console, more=self.step + 1 < self.options.steps)
        if self.buffer.budget.staleness:
            describe_lag(batch, self.step, sums)
        elif self.rule is not None:
            ready = len(self.buffer.open)  # the batch and its surplus
            sums.add("group/kept_ratio", ready, ready + len(self.buffer.fallen))
        describe([group.tree for group in batch], max_new_tokens, sums)

    def _update(self, batch: Sequence[Group], step: int, sums: Sums) -> bool:
        """Learn from the batch, from groups of earlier steps and from demonstrations; return True if the policy has
        changed."""
        self.console.phase("updating")
        trees = [group.tree for group in batch]
        for group, tree in zip(batch, trees, strict=True):
            tree.meta |= {"entry": group.prompt.entry, "problem": group.prompt.problem}
        demonstrations = self.demonstrations.next()
        kept, replayed = [], list[TokenTree]()
        if self.store is not None:
            kept, replayed = self.store.snapshot(batch), self.store.draw(step)
            describe_replay(replayed, self.learner.updates, sums)
        with self.controller.at_rest():
            changed = self.learner.update(trees + replayed, demonstrations, step, sums)
        if self.store is not None:
            self.store.add(kept, trees, step)
        return changed

    def _measured(self, step: int, trees: Sequence[TokenTree], sums: Sums) -> dict[str, float]:
        """Return the metrics of the step, and evaluate if it is time."""
        for reason, count in (self.buffer.dropped - self._dropped).items():
            sums.count(f"group/dropped_{reason}", count)
        self._dropped = self.buffer.dropped.copy()
        for reason, count in self.controller.restarted.items():
            sums.count(f"group/restarted_{reason}", count)
        self.controller.restarted.clear()
        describe_skipped(self.source.skipped, self._told, sums, self.console)
        if again := self.rewards.asked_again - self._asked_again:
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
        tally, computed = self.sampler.tally, self.learner.utilization(times)
        metrics |= self.idle.read(times, tally) | computed | self.flop.read(tally, computed, self._row)
        metrics |= self.monitor.read() | times
        if "eval/accuracy" in metrics and self.evaluation.targets:
            rows, ended = [*self.log.rows(), {"step": step, **metrics}], step == self.options.steps
            metrics |= of_targets(self.evaluation.targets, rows, self.console.note, ended=ended)
        return metrics

    def _end_step(self, step: int) -> None:
        """Save a checkpoint if it is time, then write and show the metrics."""
        if self.checkpoints.due(step) or step == self.options.steps or self.stopping.requested:
            self.console.phase("saving a checkpoint")
            with self.watch.part("checkpoint"):  # counted in the next step: the checkpoint holds this row
                self.checkpoints.save(step, self._row)
        self.log.append(step, self._row)
        self.trackers.log(step, self._row)
        self.trace.flush()
        self.console.step(step, self._row)

    def _over_sample(self, step: int, sums: Sums) -> None:
        """Let the rounds of ``step`` admit as many groups as `loop.over_sampling` says."""
        schedule, buffer = self.over_sampling, self.buffer
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
            return self.evaluation.run(self.step, self.rewards)

    # -- directory --------------------------------------------------------------------------------------------------

    def _save_last(self) -> None:
        if self.checkpoints.saved_step != self.step:
            self.checkpoints.save(self.step, self._row)

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        self._row = self.checkpoints.restore(saved, self.log, self.console.note)
        self._dropped = self.buffer.dropped.copy()
