"""Asks the programs of requests what their branches do, and lets these do it, for every sampling backend.

A backend (`NativeLoop`, `VllmLoop`) samples branches. When branches stop, their program gets a `SegmentReport` of each
and answers with actions, which `Growing` carries out.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..data.segment import LeafStatus
from ..parts.calling import call
from ..programs import Action, BranchId, Call, Finish, Fork, Prune, Reward, Rewind, SegmentReport
from .branch import Request
from .calls import CallPool, due, take
from .growing import Growing, program_name

WAIT_S = 0.05  # seconds between checks of the requests while only calls are outstanding


class Steering(Growing):
    """The requests in flight, from prompts to finished trees.

    Attributes:
        version: version of the policy, recorded with every sampled token.
        requests: requests that have started and are not done.
        counts: steps, failed_steps, sampled_tokens, drafted_tokens and accepted_tokens (native loop only), forks,
            rewinds, pruned, failed_calls, appends_too_long; ``row_steps`` and ``idle_row_steps``, the unfinished
            branches that did and did not sample, summed over the steps; ``call_wait_us``, microseconds spent waiting
            for calls alone; ``flop``, ``held_out_flop`` and ``scored_flop`` (`Counters.read`).
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.requests: list[Request] = []
        self._calling: list[Request] = []
        self._done: list[Request] = []
        self._calls = CallPool()

    # -- interface of a backend ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def queued(self) -> Iterable[Request]:
        """Requests that have not been started."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a new request, or continue an aborted one where it stopped."""

    @abstractmethod
    def step(self) -> list[Request]:
        """Compute one step, if anything is to be computed; return the requests that are done since the last call."""

    @abstractmethod
    def abort(self, request: Request) -> None:
        """Stop a request at its present tokens; `add` continues it."""

    @abstractmethod
    def preempt_all(self) -> None:
        """Drop every key, because the weights have changed or to free memory; unfinished branches recompute theirs."""

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if requests are queued, in flight, or done and not yet returned by `step`."""
        return bool(self.requests) or bool(self._done) or any(True for _ in self.queued)

    def _let_go(self, request: Request) -> None:
        if self.others is not None:
            self.others.drop(request.sampling.values())
        for branch in [*request.unfinished, *request.leaves.values()]:
            self._drop(branch)
        if request in self._calling:
            self._calling.remove(request)
        self.requests.remove(request)

    def _fail(self, request: Request, error: Exception) -> None:
        if not request.done:
            request.error = error
            self._let_go(request)
            self._done.append(request)

    def _hand_out(self) -> list[Request]:
        done, self._done = self._done, []
        return done

    def _complete(self, request: Request) -> None:
        if not request.leaves:
            raise RuntimeError(f"{program_name(request)} pruned every branch of prompt {request.number}.")
        tree = request.token_tree()
        self._let_go(request)
        request.tree = tree
        self._done.append(request)

    def first_branches(self, request: Request) -> int:
        """Return the number of branches that the program asks for at the prompt.

        Raises:
            RuntimeError: the program asks for none.
        """
        forks = request.program.start(request.state())
        if forks < 1:
            raise RuntimeError(f"{program_name(request)}.start answered {forks}; a prompt needs at least one branch.")
        return forks

    # -- the program's answers -----------------------------------------------------------------------------------------

    def _report(self, ended: Iterable[tuple[Request, SegmentReport]]) -> None:
        """Ask each program once a step for its decision on the branches that ended."""
        reports: dict[int, tuple[Request, list[SegmentReport]]] = {}
        for request, report in ended:
            reports.setdefault(request.number, (request, []))[1].append(report)
        for request, finished in reports.values():
            if request.done:  # another branch of it failed
                continue
            finished.sort(key=lambda report: report.branch)
            self._ask(request, partial(request.program.decide, request.state(), finished))

    def _ask(self, request: Request, question: Callable[[], Iterable[Action]]) -> None:
        """Ask the program and apply the actions that it answers."""
        with self._alone(request):
            self._act(request, question())

    @contextmanager
    def _alone(self, request: Request) -> Iterator[None]:
        """Run the block for one request: an error in it, ours or the program's, ends only that request."""
        try:
            yield
        except Exception as error:
            self._fail(request, error)
        except SystemExit as error:
            self._fail(request, RuntimeError(f"{program_name(request)} called sys.exit({error.code!r})."))

    def _act(self, request: Request, actions: Iterable[Action]) -> None:
        answers, result = iter(actions), None
        while True:
            try:  # a generator gets the result of each action
                action = answers.send(result) if isinstance(answers, Generator) else next(answers)
            except StopIteration:
                break
            result = None
            match action:
                case Fork(key, n, append) if n >= 1 or append:
                    result = self._go_on(self._resting(request, key), action)
                case Finish(key, status, train):
                    branch = self._resting(request, key)
                    branch.trained = branch.trained if train is None else train
                    self._finish(branch, status)
                case Rewind(key, length, n, append) if n >= 1 or append:
                    result = self._go_on(self._rewind(request, key, length), action)
                case Prune(key):
                    self._prune(request, key)
                case Reward(key, value, None) if key in request.resting or key in request.leaves:
                    (request.resting.get(key) or request.leaves[key]).reward = float(value)
                case Reward(key, value, at) if at is not None and (key in request.resting or key in request.leaves):
                    self._reward_turn(request.resting.get(key) or request.leaves[key], at, float(value))
                case Call(key, function, arguments) if key in request.resting or key in request.leaves:
                    self._call(request, key, function, arguments)
                case _:
                    raise RuntimeError(f"{program_name(request)} answered {action}, which cannot be done.")
        if request.finished and not request.calls:
            if more := list(request.program.ended(request.state())):
                self._act(request, more)
            else:
                self._complete(request)
        elif not request.sampling and not request.calls:
            raise RuntimeError(
                f"{program_name(request)} left {len(request.resting)} branches of prompt {request.number} resting with "
                "nothing sampling; answer each full segment with Fork or Finish."
            )

    # -- branches that another policy samples --------------------------------------------------------------------------

    def _collect_others(self) -> None:
        """Let the other policies compute a step, and report the segments that they ended."""
        if self.others is None:
            return
        ended: list[tuple[Request, SegmentReport]] = []
        for branch, number, samples in self.others.step():
            with self._alone(branch.request):
                if isinstance(samples, Exception):
                    raise samples
                ended += self._come_back(branch, number, samples)
        self._report(ended)
        self.counts.update(self.others.flop)
        self.others.flop.clear()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _call(self, request: Request, key: BranchId, function: Any, arguments: tuple[Any, ...]) -> None:
        future = self._calls.submit(request.program.call_timeout_s, call, "a call", function, *arguments)
        request.calls.append((key, future))
        if request not in self._calling:
            self._calling.append(request)

    def _resume_calls(self, request: Request) -> None:
        """Collect the calls of a request that is taken up again; those that a checkpoint lost are made once more."""
        if request.calls:
            self._calling.append(request)
        if lost := request.lost_calls:
            request.lost_calls = []
            self._ask(request, lambda: request.program.repeated(request.state(), lost) or ())

    def _await_calls(self) -> None:
        """Wait up to `WAIT_S` for an outstanding call, since nothing can be computed."""
        if self._calling:
            begin = time.perf_counter()
            wait([future for request in self._calling for _, future in due(request)], WAIT_S, FIRST_COMPLETED)
            self.counts["call_wait_us"] += round(1e6 * (time.perf_counter() - begin))

    def _collect_calls(self) -> None:
        """Pass the results of finished calls to their programs, those of one request as `due` orders them."""
        if self._calling:
            self._calls.expire()
        for request in list(self._calling):
            while not request.done and (landed := take(request)):
                key, future = landed
                if not request.calls:
                    self._calling.remove(request)
                if key not in request.resting and key not in request.leaves:
                    continue  # pruned meanwhile
                error = future.exception()
                if error is None:
                    self._ask(request, partial(request.program.returned, request.state(), key, future.result()))
                else:
                    request.errors[key] = str(error).rstrip(".")
                    self.counts["failed_calls"] += 1
                    if key in request.leaves:
                        request.leaves[key].status = LeafStatus.FAILED
                        self._ask(request, partial(request.program.returned, request.state(), key, None))
                    else:
                        self._ask(request, partial(list, [Finish(key, LeafStatus.FAILED)]))
