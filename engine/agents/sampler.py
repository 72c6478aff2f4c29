"""Samples groups of episodes: agents call, another sampler answers, and the calls of a group become one tree.

    submit(job) --> n episodes: agents start --calls--> door --> queue
    step: queue --> jobs of the inner sampler --trees--> answers; a group whose episodes have all ended is done

Agents work in threads and processes of their own, so a call that waits for a tool costs the engine nothing.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..chat.writing import as_sent
from ..data.segment import Text
from ..data.tree import TokenTree
from ..programs import AgentCalls, CallContext
from ..programs.chat.toolbox import tool_schemas
from ..protocols.http import RefusedError
from ..rollout import TooLongError
from ..rollout.digest import Held
from ..rollout.failing import by_its_constraints
from ..rollout.local import LocalSampler
from ..rollout.native.scheduler import TooLargeError
from ..rollout.records import child_seed
from ..rollout.sampler import Array, Flight, Job, Kept, LostError, Sampler, WeightSource
from .alike import Alike
from .door import Door
from .episode import Episode, PendingCall
from .journal import Journal
from .records import Failure
from .session import Session
from .start import Agents, timed_out
from .tree import episode_tree

WAIT_S = 0.002
"""Seconds that the inner sampler may wait while a call may arrive."""
LONGEST_STEP_S = 5.0
"""Longest time between two steps that counts as sampling; a longer one is an update, in which no agent is late."""
TRIES = 3
"""Engines that may be lost under a call before its episode fails."""


@dataclass(eq=False)
class _Group:
    """The episodes of a job."""

    flight: Flight
    episodes: list[Episode]
    left: set[Episode] = field(default_factory=set)


class AgentSampler:
    """A sampler whose groups are episodes of agents.

    Args:
        inner: samples the calls.
        program: the agents, with their budgets.
        tokenizer: the model's, with a chat template.
        journal: file that tells of the episodes under way (`Journal`).

    Raises:
        UserError: there is no such agent.
        ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self, inner: Sampler, program: AgentCalls, tokenizer: PreTrainedTokenizerBase, journal: Path | None = None
    ) -> None:
        if tokenizer.chat_template is None:
            raise ValueError("agents need a chat template, and the tokenizer has none; give it one.")
        self.inner, self.program, self.tokenizer = inner, program, tokenizer
        self._ends = inner.end_token_ids or [tokenizer.eos_token_id]
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._local = inner if isinstance(inner, LocalSampler) else None
        vocabulary = None if self._local is None else self._local.engine.vocabulary
        self._alike = Alike(program.same)
        self._door = Door(tokenizer, inner.longest, self._arrived, self._left, vocabulary, self._alike)
        self._agents = Agents(program, self._returned)
        self._groups: dict[Flight, _Group] = {}
        self._group_of: dict[Episode, _Group] = {}
        self._waiting: deque[Episode] = deque()  # for their turn to start
        self._running: set[Episode] = set()
        self._calls: dict[Flight, PendingCall] = {}
        self._landed: list[Flight] = []
        self._numbers = 0
        self._journal = Journal(program, journal)
        self._waited = Counter(agent_start_us=0, agent_tools_us=0)
        self._stepped = time.monotonic()

    # -- from threads of the door and of agents ------------------------------------------------------------------------

    def _arrived(self, call: PendingCall) -> None:
        self._news.put(lambda: self._send(call))

    def _left(self, call: PendingCall) -> None:
        self._news.put(lambda: self._abort(call))

    def _returned(self, episode: Episode, why: Failure | None) -> None:
        self._news.put(lambda: self._end(episode, why))

    # -- the sampler ---------------------------------------------------------------------------------------------------

    @property
    def longest(self) -> int | None:
        return self.inner.longest

    @property
    def end_token_ids(self) -> Collection[int]:
        return self.inner.end_token_ids

    @property
    def tally(self) -> Counter[str]:
        """Counts of the sampler of calls, and microseconds without a call to sample: while agents start
        (``agent_start_us``), and while they or their tools work (``agent_tools_us``)."""
        tally = Counter(self.inner.tally)
        tally.update(self._waited)
        return tally

    def submit(self, jobs: Sequence[Job]) -> list[Flight]:
        flights = [Flight(job) for job in jobs]
        for flight in flights:
            task = self._task(flight.job)
            episodes = [self._episode(flight.job, task, number) for number in range(flight.job.params.n)]
            self._groups[flight] = group = _Group(flight, episodes, set(episodes))
            self._group_of |= dict.fromkeys(episodes, group)
            self._waiting += episodes
        self._start()
        return flights

    def _episode(self, job: Job, task: Mapping[str, Any], number: int) -> Episode:
        session = Session(self.tokenizer, self._ends, job.prompt, int(child_seed(job.seed, number)))
        self._numbers += 1
        return Episode(job, task, session, self.program, self._numbers)

    @staticmethod
    def _task(job: Job) -> dict[str, Any]:
        """Return what agents get: the row of the data, and the conversation with the descriptions of its tools."""
        task = dict(job.context or {})
        if "messages" in task:
            task["messages"] = as_sent(task["messages"])
            task["tools"] = tool_schemas(task.get("tools", ()))
        return task

    def _start(self) -> None:
        while self._waiting and len(self._running) < self.program.episodes:
            episode = self._waiting.popleft()
            self._running.add(episode)
            episode.began = time.monotonic()
            self._door.open(episode)
            self._agents.start(episode, self._door.address())

    def step(self, seconds: float) -> list[Flight]:
        self._advance(seconds)
        done, self._landed = self._landed, []
        return done

    def _advance(self, seconds: float) -> None:
        now = time.monotonic()
        passed, self._stepped = min(now - self._stepped, LONGEST_STEP_S), now
        if not self._calls and self._groups and not self._landed:
            self._wait(seconds)
        self._take_news()
        if self._calls:
            self._answer(self.inner.step(min(seconds, WAIT_S)))
            self._observe()
        self._expire(passed)
        self._start()
        self._journal.advance(self._running, len(self._waiting))

    def _wait(self, seconds: float) -> None:
        """Wait for a call or an end, since there is nothing to sample."""
        share = sum(not episode.has_called for episode in self._running) / max(len(self._running), 1)
        begin = time.monotonic()
        try:
            news = self._news.get(timeout=seconds)
        except queue.Empty:
            news = None
        microseconds = 1e6 * (time.monotonic() - begin)
        self._waited["agent_start_us"] += round(share * microseconds)
        self._waited["agent_tools_us"] += round((1 - share) * microseconds)
        if news is not None:
            news()

    def _take_news(self) -> None:
        while True:
            try:
                news = self._news.get_nowait()
            except queue.Empty:
                return
            news()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _send(self, call: PendingCall) -> None:
        """Let the inner sampler answer a call."""
        if call not in call.episode.open:
            call.answer.cancel()
            return
        episode = call.episode
        context = CallContext(call.drawn)
        job = Job(call.turn.prompt, call.params, call.params.seed, context, near=episode.place, owner=episode.number)
        try:
            (call.flight,) = self.inner.submit([job])
            call.begun = time.monotonic()
        except ValueError as error:
            if isinstance(error, TooLongError):
                episode.too_long()
            call.answer.set_exception(error)
            return
        self._calls[call.flight] = call

    def _abort(self, call: PendingCall) -> None:
        if call.flight is not None and self._calls.pop(call.flight, None) is not None and not call.flight.done:
            self.inner.drop([call.flight])

    def _answer(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            call = self._calls.pop(flight, None)
            if call is None:
                continue
            call.ended = time.monotonic()
            if call.first is None and self._local is not None:
                call.first = call.ended  # its first step was its last
            if flight.place is not None:
                call.episode.place = flight.place
            if isinstance(flight.error, LostError) and call.tries < TRIES:
                call.tries += 1
                call.flight = None
                self._send(call)
            elif isinstance(flight.error, TooLargeError):
                call.episode.too_long()
                _settle(call, error=flight.error.too_long)
            elif flight.tree is not None and "errors" not in flight.tree.meta:
                _settle(call, tree=flight.tree)
            else:
                self._failed(call, flight)

    def _failed(self, call: PendingCall, flight: Flight) -> None:
        """Settle a call whose sampling has failed, by the constraints of its request or by the engine."""
        if flight.tree is not None and by_its_constraints(call.params, flight.tree.meta["errors"][0]):
            _settle(call, error=ValueError(f"The answer cannot go on: {flight.tree.meta['errors'][0]}."))
            return
        why = flight.error if flight.tree is None else RuntimeError(flight.tree.meta["errors"][0])
        assert why is not None
        said = " ".join(str(why).split())[:300].rstrip(".")
        call.episode.outage = Failure("engine", f"the engine failed on a call: {said}")
        _settle(call, error=why)

    def _observe(self) -> None:
        """Note when calls begin and have their first tokens, and tell streams what has been sampled."""
        if self._local is None:
            return
        now = time.monotonic()
        for flight, call in self._calls.items():
            if call.first is not None and call.watch is None:
                continue
            sampled = self._local.progress(flight)
            if sampled is None:
                call.begun = now
            elif len(sampled) > len(call.sampled):
                call.sampled = sampled
                call.first = now if call.first is None else call.first
                watch, call.watch = call.watch, None  # until the client has been told
                if watch is not None:
                    watch()

    def _expire(self, passed: float) -> None:
        """Refuse calls and end episodes that take too long."""
        for call in [call for call in self._calls.values() if self._late(call, passed)]:
            self._abort(call)
            seconds = self.program.call_timeout_s
            _settle(call, error=RefusedError(f"The call took longer than {seconds:g} s (call_timeout_s).", 503))
        for episode in list(self._running):
            episode.seconds += passed
            if episode.seconds > self.program.timeout_s:
                why = timed_out(self.program.timeout_s)
                self._agents.stop(episode)
                self._end(episode, why)

    def _late(self, call: PendingCall, passed: float) -> bool:
        call.seconds += passed
        return call.seconds > self.program.call_timeout_s

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end(self, episode: Episode, why: Failure | None) -> None:
        """Take an episode whose agent has returned; its group is done with its last one."""
        group = self._group_of.get(episode)
        if group is None or episode not in group.left:
            return
        self._close(episode, why)
        group.left.discard(episode)
        if not group.left:
            self._land(group)

    def _close(self, episode: Episode, why: Failure | None) -> None:
        for call in episode.end(why):
            self._abort(call)
            call.answer.cancel()
        self._door.shut(episode)
        self.inner.let_go([episode.number])
        self._running.discard(episode)

    def _land(self, group: _Group) -> None:
        flight = group.flight
        del self._groups[flight]
        for episode in group.episodes:
            del self._group_of[episode]
        job = flight.job
        try:
            records = [episode.record() for episode in group.episodes]
            flight.tree = episode_tree(job.prompt, records, per_call=self.program.per_call, pictures=job.pictures)
        except Exception as error:
            flight.error = error
        else:
            flight.tree.meta["counts"] = {"aborted_calls": sum(episode.aborted for episode in group.episodes)}
            self._journal.landed(flight.tree, group.episodes, records, self._alike.unmatched)
        flight.place = next((e.place for e in group.episodes if e.place is not None), None)
        self._landed.append(flight)

    def drop(self, flights: Sequence[Flight]) -> None:
        why = Failure("dropped", "its group was dropped")
        for flight in flights:
            group = self._groups.pop(flight, None)
            for episode in [] if group is None else group.episodes:
                del self._group_of[episode]
                if episode in self._waiting:
                    self._waiting.remove(episode)
                self._agents.stop(episode)
                self._close(episode, why)

    def kept(self, flights: Sequence[Flight]) -> list[Kept]:
        return [Kept(None, "agent") for _ in flights]

    def generate(self, jobs: Sequence[Job]) -> list[TokenTree]:
        flights = self.submit(jobs)
        while not all(flight.done for flight in flights):
            self._advance(0.05)
        self._landed = [flight for flight in self._landed if flight not in flights]
        trees = []
        for flight in flights:
            if flight.tree is None:
                assert flight.error is not None
                raise flight.error
            trees.append(flight.tree)
        return trees

    # -- the inner sampler's -------------------------------------------------------------------------------------------

    def load(self, weights: WeightSource | None, version: int, *, keep_keys: bool) -> None:
        self.inner.load(weights, version, keep_keys=keep_keys)

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Array]]:
        return self.inner.score(prompts, continuations)

    def probe(self, prompts: Sequence[Sequence[int]], *, n: int, tokens: int, seed: int) -> list[TokenTree]:
        return self.inner.probe(prompts, n=n, tokens=tokens, seed=seed)

    def digests(self) -> Mapping[str, Held]:
        return self.inner.digests()

    def rest(self) -> None:
        self.inner.rest()

    def wake(self) -> None:
        self.inner.wake()

    def let_go(self, owners: Sequence[int]) -> None:
        self.inner.let_go(owners)

    def forget_prefixes(self) -> None:
        self.inner.forget_prefixes()

    def remember(self, texts: Iterable[Text]) -> None:
        self.inner.remember(texts)

    def in_thread(self) -> AbstractContextManager[Any]:
        return self.inner.in_thread()

    def settle(self) -> None:
        self.inner.settle()

    def close(self) -> None:
        """End all agents, the door and the inner sampler."""
        self.drop(list(self._groups))
        self._agents.close()
        self._door.close()
        self._journal.close()
        self.inner.close()


def _settle(call: PendingCall, *, tree: TokenTree | None = None, error: Exception | None = None) -> None:
    """Hand a call its result, if somebody waits for it."""
    if not call.answer.set_running_or_notify_cancel():
        return
    if tree is not None:
        call.answer.set_result(tree)
    else:
        call.answer.set_exception(error)
