"""Moves groups through their states: admits prompts, samples, requests verdicts, and hands out batches.

At staleness 0 all work happens in the caller's thread while it waits for a batch, and no group is open between steps.
At a higher staleness with overlap, a thread samples with a copy of the weights while the caller trains; without
overlap, sampling pauses during training, and unfinished groups continue afterwards. Other threads wait for verdicts.

One lock guards the states of the groups. The sampling thread changes them; the caller takes batches and ends steps.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..data.tree import TokenTree
from ..errors import RunError, UserError
from ..fleet.publication import NONE, Further, Publication
from ..fleet.workers import GoneError
from ..learn.learning import Gather, RanksLostError
from ..methods.groups import More, Retry
from ..parts.calling import failure
from ..prompts.archive import Archive, NotKeptError
from ..prompts.group import Group, State
from ..prompts.prompts import pictures_of
from ..record.metrics import Stopwatch
from ..record.progress import Progress
from ..rewards import Rewards
from ..rollout import SamplingParams
from ..rollout.sampler import Flight, Job, Kept, LostError, WeightSource
from .background import Background
from .buffer import Buffer
from .callback import Callback, CallbackRule
from .due import Due
from .judging import Judging, TraceCall, no_trace
from .runtime import Cores
from .sampling import GroupSeeds, SamplingParts
from .unfinished import group_state

LOOK_S = 0.05
"""Seconds between checks of the sampler while only verdicts are outstanding."""


class Controller:
    """Samples, judges and hands out the batches of a run.

    Args:
        parts: the sampler, the prompts and the settings.
        buffer: holds the groups.
        publication: sends the policy to the sampler.
        watch: accounts for the caller's time.
        console: shows the progress.
        rule: the group callback; None accepts all judged groups.
        trace: records the times at which the sampler and the verifier worked.
        gather: fetches the trees of a batch to where they are trained; groups whose trees are gone begin anew.
    """

    def __init__(
        self,
        parts: SamplingParts,
        buffer: Buffer,
        publication: Publication,
        watch: Stopwatch,
        console: Progress,
        rule: CallbackRule | None = None,
        trace: TraceCall = no_trace,
        gather: Gather | None = None,
    ) -> None:
        self.parts, self.buffer, self.watch, self.console, self.trace = parts, buffer, watch, console, trace
        self.sampler, self.source = parts.sampler, parts.source
        self.publication, self._gather = publication, gather
        self._params = parts.params  # of the step for which the sampler works
        self._sampling: dict[Group, Flight] = {}
        self._began: dict[Flight, tuple[int, Group]] = {}  # the groups of `_sampling`, with their numbers there
        self._numbers = 0
        self._ended: list[Flight] = []  # of the sampler's last step
        self._unread = False  # flights may have ended outside of a step
        self._changed = threading.Condition(threading.RLock())
        self.judging = Judging(parts.tokenizer, self._notify, on_failure=parts.on_failure, trace=trace)
        self._thread = Background(self._changed, self.advance, self.sampler.in_thread)
        self._settles_at_once = True  # a group is answered as soon as it is judged
        self._due, self._waits = Due(buffer, counted=parts.counted), False
        self.restarted: Counter[str] = Counter()  # unfinished groups that began again, by reason
        self.callback = Callback(
            rule, buffer, lambda problem: self.source.prompt(problem), lambda *arguments: self.judging.given(*arguments)
        )
        self._seeds = GroupSeeds(parts.seed, buffer.budget.batch)
        self.cores = Cores(shared=parts.overlaps and parts.on_cpu)

    @contextmanager
    def running(self, rewards: Rewards) -> Iterator[None]:
        """Allow `next_batch` within the block; ``rewards`` judges the responses."""
        with self.judging.running(rewards), self.cores.left_to_caller():
            try:
                yield
            finally:
                self._thread.close()

    def next_batch(
        self, params: SamplingParams | None = None, ahead: Callable[[TokenTree], object] | None = None
    ) -> list[Group]:
        """Wait for the judged groups of the next update and return them.

        Args:
            params: sampling parameters from now on; None to keep the present ones.
            ahead: called with the tree of each ready group, the oldest first, while the batch is not complete.

        Raises:
            UserError: the sampler cannot serve a request, or the group callback gave an invalid answer.
            RunError: the program or a verifier failed, or the group callback dropped too many groups.
        """
        if params is not None:
            with self._changed:
                self._params = params
        if self.buffer.budget.staleness == 0:
            for sampler in (self.sampler, *self.parts.others.values()):
                sampler.forget_prefixes()  # so that the samples follow from this step alone
        if self.parts.overlaps:
            self._thread.start()
        nothing_follows = self.callback.rule is None and not self.judging.in_turn
        self._settles_at_once = self.buffer.budget.staleness > 0 or nothing_follows
        while True:
            with self.cores.left_to_sampler():
                while (ready := self._batch_or_group(offers=ahead is not None)) is None:
                    self._await_change() if self._thread.started else self.advance()
            if not isinstance(ready, list):
                assert ahead is not None
                ahead(ready.tree)
            elif self._gathered(ready):
                return ready

    def _batch_or_group(self, *, offers: bool) -> list[Group] | Group | None:
        """Return the next batch if it is complete, else the oldest ready group that was not returned before."""
        with self._changed:
            if (batch := self.buffer.batch()) is not None or not offers:
                return batch
            group = next((group for group in self.buffer.among(State.READY) if not group.offered), None)
            if group is not None:
                group.offered = True
            return group

    def _gathered(self, batch: Sequence[Group]) -> bool:
        """Return True if the trees of a batch could be fetched; otherwise it is given back, and groups begin anew."""
        with self.watch.part("pack"):
            if self._gather is None or not (gone := self._gather([group.tree for group in batch])):
                return True
        with self._changed:
            self.buffer.give_back(batch)
            for at in gone:
                self._begin_anew(batch[at])
        return False

    def _begin_anew(self, group: Group) -> None:
        """Sample the responses of a group anew: where they were stored they are no more."""
        if (flight := self._sampling.pop(group, None)) is not None:
            del self._began[flight]
            self.sampler.drop([flight])
        self.judging.forget(group)
        self.buffer.begin_anew(group)
        self.restarted["lost"] += 1

    def end_step(
        self, batch: Sequence[Group], weights: WeightSource | None, version: int, others: Further = NONE
    ) -> None:
        """End the step that trained ``batch``; ``weights`` are the policy's, None if no policy has changed.

        Raises:
            RunError: the sampler does not sample the policy that was sent.
        """
        with self.watch.part("sync"), self.paused():
            if weights is not None:
                self.publication.send(weights, version, others)
            with self._changed:
                self.buffer.end_step(batch)
                self.callback.begin_step()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Let a sampler that shares the trainer's devices rest within the block."""
        if not self.parts.colocated:
            yield
            return
        self.sampler.rest()
        self._unread = True
        yield
        self.sampler.wake()

    def observe(self, batch: Sequence[Group], credit: Callable[[Sequence[TokenTree]], object]) -> None:
        """Show the prompts' source the groups of an ended step, the oldest first: those of ``batch``, which have their
        credit, and those that were dropped after judging, which ``credit`` gives theirs."""
        with self._changed:
            dropped, self.buffer.fallen = self.buffer.fallen, []
        if not self.source.observes:
            return
        for group in dropped:
            group.tree.meta |= {"dropped": group.reason, "entry": group.prompt.entry}
        if dropped:
            credit([group.tree for group in dropped])
        with self._changed:
            self.source.observe(sorted([*batch, *dropped], key=lambda group: group.ticket))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop sampling within the block, except for the caller's own requests to the engine."""
        self._thread.pause()
        self._synchronize()
        self._unread = True
        try:
            with self.cores.left_to_caller():
                yield
        finally:
            self._synchronize()
            self._unread = True
            self._thread.go_on()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Tensor], list[Any]]:
        """Return tensors and plain values of every open group: prompt, responses, tokens of unfinished responses.

        An unfinished group with state that cannot be stored, such as a running call, begins again in a resumed run.

        Raises:
            RunError: an entry of a prompt cannot be stored.
        """
        archive = Archive()
        with self.paused(), self._changed:
            self._collect()
            kept = dict(zip(self._sampling, self.sampler.kept(list(self._sampling.values())), strict=True))
            try:
                groups = [self._kept(group, kept.get(group), archive) for group in list(self.buffer.open.values())]
            except NotKeptError as error:
                raise RunError(
                    f"An open group cannot be saved: {error} Give prompts plain entries, or set loop.staleness to 0."
                ) from error
        return archive.tensors, groups

    def _kept(self, group: Group, kept: Kept | None, archive: Archive) -> Any:
        """Return a group's state; it begins anew if its responses are gone."""
        try:
            return group_state(group, self._sampling.get(group), kept, archive)
        except GoneError:
            self._begin_anew(group)
            return group_state(group, None, None, archive)

    def clear(self) -> None:
        """Discard all open groups, so that this run can go back to a checkpoint."""
        with self.paused(), self._changed:
            with suppress(RanksLostError):  # the sampling thread may have ended by what the run goes back for
                self._thread.raise_error()
            self.sampler.drop([flight for flight in self._sampling.values() if not flight.done])
            self._sampling.clear()
            self.judging.clear()
            self._began.clear()
            self.buffer.clear()
            self.restarted.clear()

    def load_state_dict(self, tensors: dict[str, Tensor], groups: Sequence[Any]) -> None:
        """Restore the state that :meth:`state_dict` returned; load the buffer's counts and the weights before."""
        archive = Archive(tensors)
        for packed in groups:
            values = archive.unpack(packed)
            request, state = values.pop("request"), State(values.pop("state"))
            params = values.pop("params")
            if (lost := values.pop("lost")) is not None:
                self.restarted[lost] += 1
            group = Group(**values)
            self.buffer.put(group, state if state in (State.JUDGING, State.READY) else State.QUEUED)
            if request is not None:
                self._begin(group, *self._submit([group], kept=request, params=params))
            elif state is State.JUDGING:
                self.judging.ask([group])
        self.callback.begin_step()

    # -- the thread that samples ------------------------------------------------------------------------------------

    def _await_change(self) -> None:
        """Wait for the sampling thread, and account for the time; raise the thread's error if it failed."""
        with self._changed:
            self._thread.raise_error()
            self.console.phase("sampling" if self._sampling else "waiting for rewards")
            with self.watch.part("gen" if self._sampling or not self.judging.busy else "reward"):
                self._changed.wait(LOOK_S)

    def _synchronize(self) -> None:
        """Finish the work of one thread on shared weights and keys before the other thread begins."""
        if self._thread.started:
            self.sampler.settle()

    # -- one round --------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Take finished groups, admit new ones, and sample a step, or wait briefly for a verdict."""
        with self._changed:
            self._collect()
            self._settle()
            self._admit()
            self._changed.notify_all()
        if self._sampling and not self._waits:
            with self._timed("sampling", "gen"), self._errors_told():
                self._step_sampler()
        elif self.judging.busy:
            with self._timed("waiting for rewards", "reward"):
                self.judging.wait(LOOK_S)
        elif self._thread.started:
            with self._changed:
                self._changed.wait(LOOK_S)

    def _step_sampler(self) -> None:
        if self._thread.started:
            self.cores.take()
        begin = time.perf_counter()
        self._ended += self.sampler.step(LOOK_S)
        self._due.step()
        self.trace("sampler", "decode", begin, time.perf_counter())

    @contextmanager
    def _timed(self, phase: str | None, part: str) -> Iterator[None]:
        """Account for the caller's time; time in a sampling thread is not counted."""
        if self._thread.started:
            yield
            return
        if phase is not None:
            self.console.phase(phase)
        with self.watch.part(part):
            yield

    def _admit(self) -> None:
        """Admit groups while there is room, and submit the queued ones."""
        if (room := self.buffer.room) > 0:
            with self._timed(None, "prompts"):
                prompts = self.source.next(room)
            self.buffer.admit(prompts)
        if queued := self.buffer.among(State.QUEUED):
            for group, flight in zip(queued, self._submit(queued), strict=True):
                self._begin(group, flight)

    def _submit(
        self,
        groups: Sequence[Group],
        n: int | None = None,
        kept: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> list[Flight]:
        """Submit jobs of ``n`` responses (None: the prompt's own or the usual number), or continue from ``kept`` with
        the sampling parameters ``params``."""
        now = self._params
        jobs = [
            Job(
                group.asked.token_ids,
                replace(now, **(params or {"n": n or group.prompt.n or now.n})),
                self._seeds(group.ticket, group.attempt),
                group.asked.context,
                kept,
                near=group.place,
                pictures=pictures_of(group.asked, self.parts.tokenizer),
            )
            for group in groups
        ]
        with self._timed("sampling", "gen"), self._errors_told():
            return self.sampler.submit(jobs)

    def _begin(self, group: Group, flight: Flight) -> None:
        self.buffer.to(group, State.SAMPLING)
        self._sampling[group] = flight
        self._began[flight] = self._numbers, group
        self._numbers += 1

    def _collect(self) -> None:
        """Request verdicts on finished groups, and queue lost ones again."""
        if self._unread:
            self._ended, self._unread = [flight for flight in self._began if flight.done], False
        ended, self._ended, finished = set(self._ended), [], []
        for _, group in sorted((self._began.pop(flight) for flight in ended if flight in self._began), key=_number):
            flight = self._sampling.pop(group)
            if flight.begun_anew:
                self.restarted["lost"] += flight.begun_anew
            if isinstance(flight.error, LostError):
                self.buffer.to(group, State.QUEUED)
                self.restarted["lost"] += 1
                continue
            if flight.error is not None:
                with self._errors_told():
                    raise flight.error
            assert flight.tree is not None
            self.buffer.to(group, State.JUDGING)
            self.buffer.sampled(group, flight.tree)
            group.place = flight.place
            finished.append((group, flight.tree, flight.texts))
        if finished:
            self._due.finish(group for group, *_ in finished)
            with self._timed(None, "reward"):
                self.judging.add(finished)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _settle(self) -> None:
        """Make judged groups ready, or follow the answers of the group callback, at staleness 0 of those that are due:
        then the next samples do not depend on the verifiers' speed."""
        due = None if self._settles_at_once else self._due.now(self._params)
        with self._timed(None, "reward"):
            judged = self.judging.take(due)
        for group in self.judging.take_gone():
            self._begin_anew(group)
        self._waits = bool(due) and not judged
        for group in judged:
            try:
                self.judging.put_rewards(group)
                self._answer(group)
            except GoneError:
                self._begin_anew(group)

    def _answer(self, group: Group) -> None:
        """Do with a judged group what the group callback says."""
        match self.callback.answer(group):
            case More(n):
                group.attempt += 1
                self._begin(group, *self._submit([group], n))
            case Retry():
                group.attempt += 1
                self.buffer.to(group, State.QUEUED)
            case _:
                pass

    @contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise UserError(f"[rollout] cannot be done: {error}") from error
        except (UserError, RunError, RuntimeError, MemoryError, OSError):
            raise
        except Exception as error:
            program = f"rollout.program = '{self.parts.program_name}'"
            raise RunError(f"{program} failed: {failure(error, type(self.parts.program))}.") from error


def _number(began: tuple[int, Group]) -> int:
    return began[0]
