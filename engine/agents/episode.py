"""An episode: the work of one agent on one task, its calls and budgets, and how it ended."""

from __future__ import annotations

import hashlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data.segment import LeafStatus
from ..data.tree import TokenTree
from ..programs import AgentCalls
from ..protocols.http import RefusedError
from ..protocols.keys import same_key
from ..rollout import SamplingParams, TooLongError
from ..rollout.sampler import Flight, Job
from .records import EpisodeRecord, Failure, SampledCall, Times
from .session import Session, Turn

Array = npt.NDArray[Any]
REPLAYED = 16
"""Answers of an episode that are kept for clients that ask again because they have not got them."""


@dataclass(eq=False)
class PendingCall:
    """A call between its arrival and its answer.

    Attributes:
        drawn: tokens of its chain before the answer.
        number: place in the order of the episode's calls.
        answer: the engine's tree, or the reason why there is none.
        flight: the engine's job; None before.
        seconds: time that the engine has had for it.
        sampled: [n] int32, its tokens so far, where the sampler knows them.
        watch: called once, in the sampler's thread, when there are more of them; None where nothing waits for them.
        arrived, begun, first, ended: as `Times` has them, by the monotonic clock.
    """

    episode: Episode
    turn: Turn
    params: SamplingParams
    drawn: int
    role: str
    number: int
    answer: Future[TokenTree] = field(default_factory=Future)
    flight: Flight | None = None
    seconds: float = 0.0
    tries: int = 0
    sampled: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    watch: Callable[[], object] | None = None
    arrived: float = field(default_factory=time.monotonic)
    begun: float = 0.0
    first: float | None = None
    ended: float = 0.0

    @property
    def times(self) -> Times:
        """Its seconds since the episode began."""
        zero = self.episode.began
        first = None if self.first is None else self.first - zero
        return Times(self.arrived - zero, self.begun - zero, first, self.ended - zero)


class Episode:
    """An episode; its methods may be called from any thread.

    Args:
        job: the group's.
        task: what the agent gets: the row of the data, with the conversation.
        session: the tokens of its calls.
        program: has the budgets.
        number: of all episodes of the run, from 1.

    Attributes:
        place: number of the engine that has it, of several.
        id, key: its name among the run's episodes, and what its calls must send, which begins with that.
        calls: those that were answered.
        failure: None if it did not fail.
        began: its start by the monotonic clock.
        ended: it takes no more calls.
        greedy: answered calls that asked for temperature 0, where the run has another.
    """

    def __init__(
        self, job: Job, task: Mapping[str, Any], session: Session, program: AgentCalls, number: int = 1
    ) -> None:
        self.job, self.task, self.session, self.program, self.number = job, task, session, program, number
        self.id = secrets.token_hex(8)
        self.key = f"{self.id}-{secrets.token_urlsafe(24)}"
        self.lock = threading.Lock()
        self.calls: list[SampledCall] = []
        self.open: list[PendingCall] = []
        self.reward: float | None = None
        self.extras: dict[str, float] = {}
        self.failure: Failure | None = None
        self.outage: Failure | None = None
        self.began = self._over = time.monotonic()
        self.ended = False
        self.aborted = self.greedy = 0
        self.seconds = 0.0
        self.place = job.near
        self._numbers = self._calls_begun = self._sampled = 0
        self._out_of_budget = self._cut = False
        self._refusal: str | None = None
        self._answers: dict[bytes, tuple[Turn, Any]] = {}

    @property
    def has_called(self) -> bool:
        """True once a call has come."""
        return self._numbers > 0

    # -- calls ------------------------------------------------------------------------------------------------------

    def role(self, key: bytes) -> str:
        """Return the role in which a key calls, "" for the agent's own.

        Raises:
            RefusedError: it is no key of this episode.
        """
        secret, _, role = key.partition(b":")
        if not same_key(secret, self.key.encode()):
            raise RefusedError(WRONG_KEY, 401, "invalid_api_key")
        name = role.decode(errors="replace")
        if name and name not in self.program.roles[1:]:
            roles = ", ".join(self.program.roles[1:]) or "none"
            raise RefusedError(f"The key ends with the role '{name}'; rollout.program_options.roles has {roles}.")
        return name

    def admit(self, raw: bytes) -> int:
        """Count a call, whose body is ``raw``, and return its number.

        Raises:
            RefusedError: the episode has ended or has no budget for it.
        """
        with self.lock:
            if self.ended:
                raise RefusedError("This episode has ended; its calls are answered no more.", 410, "episode_ended")
            if len(self.open) + 1 > self.program.at_once:
                self._answers.pop(_digest(raw), None)  # when it is asked again, this call is meant
                raise RefusedError(
                    f"{self.program.at_once} calls of this episode wait for answers (at_once); ask again in a second.",
                    429, "rate_limit_exceeded", retry_after="1",
                )  # fmt: skip
            if self.program.calls is not None and self._calls_begun >= self.program.calls:
                self._out_of_budget = True
                raise RefusedError(
                    f"This episode has made its {self.program.calls} calls (calls); it is to end.",
                    429, "insufficient_quota", x_should_retry="false",
                )  # fmt: skip
            number, self._numbers = self._numbers, self._numbers + 1
            self._calls_begun += 1
            return number

    def unmade(self, raw: bytes) -> None:
        """Take back a call that got no answer; if its client asks again, it means no earlier answer to ``raw``."""
        with self.lock:
            self._calls_begun -= 1
            self._answers.pop(_digest(raw), None)

    def begin(
        self,
        number: int,
        role: str,
        talk: tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]],
        params: Callable[[int, int], SamplingParams],
        longest: int | None,
    ) -> PendingCall:
        """Return the call that answers a conversation.

        Args:
            talk: its messages, the tools for the template, and variables of the template.
            params: returns the sampling parameters for an answer of so many tokens at most, with a seed.
            longest: positions of the model.

        Raises:
            TooLongError: there is no room for an answer.
            RefusedError: the episode has ended.
            ValueError: the template cannot write the messages.
        """
        with self.lock:
            turn = self.session.begin(*talk)
            try:
                length = len(turn.prompt)
                room = self._room(length, longest)
                if room < 1:
                    self._out_of_budget = True
                    raise TooLongError(
                        f"The conversation of {length} tokens leaves no room for an answer (rollout.max_new_tokens, "
                        "data.max_prompt_tokens or episode_tokens); shorten it, or end.",
                        length, 1, max(length + room, 0),
                    )  # fmt: skip
                sampling = params(room, turn.chain.seed)
                if self.ended:
                    raise RefusedError("This episode has ended.", 410, "episode_ended")
            except BaseException:
                self.session.dropped(turn)
                raise
            call = PendingCall(self, turn, sampling, turn.chain.drawn(length), role, number)
            self.open.append(call)
            return call

    def _room(self, prompt: int, longest: int | None) -> int:
        """Return the longest answer to a prompt of ``prompt`` tokens."""
        room = self.job.params.max_new_tokens - (prompt - len(self.job.prompt))
        if longest is not None:
            room = min(room, longest - prompt)
        if self.program.call_tokens is not None and room > 0:
            room = min(room, self.program.call_tokens)
        if self.program.episode_tokens is not None:
            room = min(room, self.program.episode_tokens - self._sampled)
        return room

    def answered(self, call: PendingCall, tree: TokenTree, read: Callable[[], Any], raw: bytes) -> Any:
        """Record a call whose client gets its answer, and return what ``read`` makes of it.

        Raises:
            RefusedError: the episode has ended meanwhile.
        """
        with self.lock:
            if call not in self.open:
                raise RefusedError("This episode has ended.", 410, "episode_ended")
            answer, shown = read()
            sampled = tree.token_id[int(tree.leaf_prompt[0]) :].tolist()
            self.session.answered(call.turn, sampled, answer)
            self.open.remove(call)
            self.calls.append(SampledCall(tree, call.role, call.number, call.times))
            self._sampled += len(sampled)
            self.greedy += call.params.temperature == 0 < self.job.params.temperature
            if not call.role:
                self._out_of_budget = False  # it has gone on with less, such as a summary
                self._cut = int(tree.status[0]) == LeafStatus.LENGTH
            self._answers[_digest(raw)] = call.turn, shown
            if len(self._answers) > REPLAYED:
                del self._answers[next(iter(self._answers))]
            return shown

    def repeated(self, raw: bytes) -> Any:
        """Return the answer to the same body where no call has continued it, for a client that tries again; or None."""
        with self.lock:
            turn, shown = self._answers.get(_digest(raw), (None, None))
            return shown if turn is not None and turn.next is None else None

    def dropped(self, call: PendingCall) -> None:
        """Forget a call whose client does not get an answer."""
        with self.lock:
            if call in self.open:
                self.open.remove(call)
                self.session.dropped(call.turn)
                self.aborted += 1

    def refused(self, why: str) -> None:
        """Note why a call was refused, for an episode in which none is answered."""
        with self.lock:
            self._refusal = self._refusal or why

    def too_long(self) -> None:
        """Note that the engine had no room for a call."""
        with self.lock:
            self._out_of_budget = True

    # -- its end ----------------------------------------------------------------------------------------------------

    def rewarded(self, reward: Any) -> None:
        """Take the agent's reward: a number, or a dict with ``reward`` and further numbers.

        Raises:
            ValueError: it is none.
        """
        values = reward if isinstance(reward, Mapping) else {"reward": reward}
        for name, value in values.items():
            if isinstance(value, bool):
                value = float(value)
            if not isinstance(name, str) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"the reward {reward!r} is no finite number, and no dict of such with 'reward'")
        if "reward" not in values:
            raise ValueError(f"the reward {reward!r} has no entry 'reward'")
        with self.lock:
            numbers = {name: float(value) for name, value in values.items()}
            self.reward = numbers.pop("reward")
            self.extras = numbers

    def end(self, failure: Failure | None = None) -> list[PendingCall]:
        """End the episode; return the calls that will get no answer."""
        with self.lock:
            if self.ended:
                return []
            self.ended, self._over = True, time.monotonic()
            left, self.open = self.open, []
            self.aborted += len(left)
            self.failure = failure
            return left

    def record(self) -> EpisodeRecord:
        """Return the record of an episode that has ended."""
        failure = self.failure
        if failure is not None and self._out_of_budget and failure.cause != "timeout":
            failure = None  # its agent did not get over a refusal: it ends as cut
        failure = self.outage or failure
        agent_called = any(not call.role for call in self.calls)
        if failure is None and not agent_called:
            first = "" if self._refusal is None else f"; the first was refused: {self._refusal.rstrip('.')}"
            failure = Failure("silent", f"the agent made no call that was answered{first}")
        status = LeafStatus.LENGTH if self._out_of_budget or self._cut else LeafStatus.STOP
        return EpisodeRecord(
            tuple(self.calls),
            LeafStatus.FAILED if failure is not None else status,
            self.reward if failure is None else None,
            self.extras if failure is None else {},
            failure,
            self._over - self.began,
        )


WRONG_KEY = "The key is missing, or no episode's; send the episode's own as `Authorization: Bearer KEY`."


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()
