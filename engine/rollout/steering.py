"""Applies the decisions of programs to the growing trees, for every sampling backend.

A backend (`NativeLoop`, `VllmLoop`) samples branches. When branches stop, their program gets a `SegmentReport` of each
and answers with actions. The effect of forks, rewinds, appended tokens and calls on the tree is implemented here once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data.segment import LeafStatus, Origin
from ..parts.calling import call
from ..programs import Action, BranchId, Call, Finish, Fork, Given, Prune, Reward, Rewind, SegmentReport
from .branch import Branch, Node, Request, child_seed, given
from .calls import CallPool
from .sampling_params import TEMPERATURES

Array = npt.NDArray[Any]
WAIT_S = 0.05  # seconds between checks of the requests while only calls are outstanding


class Steering(ABC):
    """The requests in flight, from prompts to finished trees.

    Attributes:
        version: version of the policy, recorded with every sampled token.
        requests: requests that have started and are not done.
        counts: steps, failed_steps, sampled_tokens, drafted_tokens and accepted_tokens (native loop only), forks,
            rewinds, pruned, failed_calls, appends_too_long; ``row_steps`` and ``idle_row_steps``, the unfinished
            branches that did and did not sample, summed over the steps; ``call_wait_us``, microseconds spent waiting
            for calls alone.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.version = 0
        self.requests: list[Request] = []
        self.counts: Counter[str] = Counter()
        self._calling: list[Request] = []
        self._done: list[Request] = []
        self._calls = CallPool()

    # -- interface of a backend -------------------------------------------------------------------------------------

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

    @abstractmethod
    def _length(self, branch: Branch) -> int:
        """Return the number of response tokens of a resting branch."""

    @abstractmethod
    def _seal(self, branch: Branch) -> None:
        """Move the tokens that a resting branch sampled into its node, which takes no more tokens."""

    @abstractmethod
    def _append(self, branch: Branch, node: Node) -> None:
        """Move a resting, sealed branch to the end of ``node``, a child of its node that holds given tokens."""

    @abstractmethod
    def _open(self, branch: Branch, source: Branch, length: int) -> None:
        """Make ``branch`` a resting branch whose path is the first ``length`` response tokens of ``source``."""

    @abstractmethod
    def _sample(self, branch: Branch, n: int, segment_end: int) -> None:
        """Let a branch continue as ``n`` branches, up to the response length ``segment_end``."""

    @abstractmethod
    def _drop(self, branch: Branch) -> None:
        """Release the backend's resources of a branch, unfinished or a leaf."""

    # -- requests ---------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if requests are queued, in flight, or done and not yet returned by `step`."""
        return bool(self.requests) or bool(self._done) or any(True for _ in self.queued)

    def _let_go(self, request: Request) -> None:
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
            raise RuntimeError(f"{_name(request)} pruned every branch of prompt {request.number}.")
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
            raise RuntimeError(f"{_name(request)}.start answered {forks}; a prompt needs at least one branch.")
        return forks

    def children(self, parent: Branch, n: int) -> list[Branch]:
        """Return the branches that replace ``parent``, whose node is sealed; a single one keeps its id and seed."""
        start, ids = parent.node.start + len(parent.node.records), self.child_ids(parent, n)

        def child(id_: BranchId, seed: int, order: int) -> Branch:
            node = Node(parent.node, start, temperature=parent.temperature, trained=parent.trained)
            own = parent.boundaries, parent.temperature, parent.trained
            return Branch(parent.request, id_, node, seed, order, *own, turn_rewards=parent.turn_rewards)

        if ids == [parent.id]:
            only = child(parent.id, parent.seed, parent.order)
            only.rewinds = parent.rewinds
            return [only]
        self.counts["forks"] += 1
        seeds = child_seed(parent.seed, np.arange(n)).tolist()
        return [child(ids[i], seeds[i], parent.request.next_order()) for i in range(n)]

    @staticmethod
    def segment_end(request: Request, length: int, tokens: int | None) -> int:
        """Return the response length at which a segment of ``tokens`` that begins at ``length`` is full."""
        most = request.params.max_new_tokens
        return most if tokens is None else min(length + tokens, most)

    # -- ends of segments -------------------------------------------------------------------------------------------

    def _end_segment(
        self, branch: Branch, segment: Array, status: LeafStatus | None, stop: str | None
    ) -> tuple[Request, SegmentReport]:
        """Report to the program a branch that has stopped sampling; ``segment`` are its records [tokens]."""
        request, length = branch.request, self._length(branch)
        report = SegmentReport(
            branch=branch.id,
            status=status,
            stop=stop,
            depth=len(branch.boundaries),
            boundaries=branch.boundaries,
            length=length,
            response_ids=self.path_so_far(branch)[len(request.prompt) :],
            token_ids=segment["token"],
            logprobs=segment["logprob"],
            versions=segment["version"],
            temperature=branch.temperature,
            entropies=segment["entropy"],
            top_ids=segment["top_id"],
            top_logprobs=segment["top_logprob"],
        )
        del request.sampling[branch.id]
        request.resting[branch.id] = branch
        if status is None:
            branch.boundaries = (*branch.boundaries, length)
        else:
            self._finish(branch, status)
        return request, report

    @abstractmethod
    def path_so_far(self, branch: Branch) -> Array:  # [prompt + response] int32
        """Return all tokens of a branch."""

    @abstractmethod
    def records_so_far(self, branch: Branch) -> Array:  # [response] records
        """Return the records of a branch's response; see `sample_dtype`."""

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

    def _finish(self, branch: Branch, status: LeafStatus) -> None:
        branch.status, branch.length = status, self._length(branch)
        self._seal(branch)
        branch.request.leaves[branch.id] = branch.request.resting.pop(branch.id)
        self._retire(branch)

    @abstractmethod
    def _retire(self, branch: Branch) -> None:
        """Release the resources that a branch no longer needs as a leaf."""

    # -- the program's answers --------------------------------------------------------------------------------------

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
            self._fail(request, RuntimeError(f"{_name(request)} called sys.exit({error.code!r})."))

    def _act(self, request: Request, actions: Iterable[Action]) -> None:
        answers, made = iter(actions), None
        while True:
            try:  # a generator gets the result of each action
                action = answers.send(made) if isinstance(answers, Generator) else next(answers)
            except StopIteration:
                break
            made = None
            match action:
                case Fork(key, n, append) if n >= 1 or append:
                    made = self._go_on(self._resting(request, key), action)
                case Finish(key, status):
                    self._finish(self._resting(request, key), status)
                case Rewind(key, length, n, append) if n >= 1 or append:
                    made = self._go_on(self._rewind(request, key, length), action)
                case Prune(key):
                    self._prune(request, key)
                case Reward(key, value, None) if key in request.resting or key in request.leaves:
                    (request.resting.get(key) or request.leaves[key]).reward = float(value)
                case Reward(key, value, at) if at is not None and (key in request.resting or key in request.leaves):
                    self._reward_turn(request.resting.get(key) or request.leaves[key], at, float(value))
                case Call(key, function, arguments) if key in request.resting or key in request.leaves:
                    self._call(request, key, function, arguments)
                case _:
                    raise RuntimeError(f"{_name(request)} answered {action}, which cannot be done.")
        if request.finished and not request.calls:
            if more := list(request.program.ended(request.state())):
                self._act(request, more)
            else:
                self._complete(request)
        elif not request.sampling and not request.calls:
            raise RuntimeError(
                f"{_name(request)} left {len(request.resting)} branches of prompt {request.number} resting with "
                "nothing sampling; answer each full segment with Fork or Finish."
            )

    def _go_on(self, branch: Branch, action: Fork | Rewind) -> list[BranchId]:
        """Let a resting branch continue as ``action`` says; return the ids of the branches that it becomes."""
        request, n, append, segment_tokens = branch.request, action.n, action.append, action.segment_tokens
        before = branch.temperature, branch.trained
        if action.temperature is not None:
            low, high = TEMPERATURES
            if not (action.temperature == 0 or low <= action.temperature <= high):
                raise ValueError(f"The temperature of a branch is {action.temperature!r}; give 0 or a positive number.")
            branch.temperature = float(action.temperature)
        if action.train is not None:
            branch.trained = action.train
        if (branch.temperature, branch.trained) != before:
            self._seal(branch)  # its next tokens are another node's
        if append is not None and len(append.token_ids):
            if self._length(branch) + len(append.token_ids) + (n > 0) > request.params.max_new_tokens:
                self.counts["appends_too_long"] += 1
                self._finish(branch, LeafStatus.LENGTH)  # no room to sample after them
                return []
            self._give(branch, append)
        if n == 0:
            self._finish(branch, LeafStatus.STOP)
            return []
        request.sampling[branch.id] = request.resting.pop(branch.id)
        tokens = request.program.segment_tokens if segment_tokens is None else segment_tokens
        self._sample(branch, n, self.segment_end(request, self._length(branch), tokens))
        return self.child_ids(branch, n)

    @staticmethod
    def child_ids(parent: Branch, n: int) -> list[BranchId]:
        """Return the ids of the ``n`` branches that replace ``parent``."""
        return [parent.id] if n == 1 and parent.node.parent is not None else [(*parent.id, i) for i in range(n)]

    def _give(self, branch: Branch, append: Given) -> None:
        """Append tokens to a resting branch, in a node of their own."""
        tokens = np.asarray(append.token_ids, np.int32)
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise ValueError(f"A response cannot hold tokens outside the model's vocabulary of {self.vocabulary}.")
        logprobs: Any = np.nan if append.logprobs is None else append.logprobs
        origin = append.origin if append.logprobs is None else Origin.SAMPLED
        self._seal(branch)
        start = branch.node.start + len(branch.node.records)
        versions: Any = self.version if append.versions is None else append.versions
        temperature = branch.temperature if append.temperature is None else append.temperature
        records = given(tokens, versions, logprobs)
        node = Node(branch.node, start, records, origin, True, temperature, branch.trained)
        self._append(branch, node)
        branch.node = node

    def _rewind(self, request: Request, key: BranchId, length: int) -> Branch:
        """Return a new resting branch that begins at ``length`` response tokens of another one."""
        source = request.leaves.get(key) or request.resting.get(key)
        if source is not None and source.status is None:
            source.length = self._length(source)
            self._seal(source)
        if source is None or not 0 <= length < max(source.length, 1):
            raise RuntimeError(f"{_name(request)} rewinds branch {key} to {length}, where it has no tokens.")
        position = len(request.prompt) + length
        node = next(node for node in source.node.path() if node.start < position)
        if position - node.start < len(node.records):
            node = node.split(position - node.start)
        index = -1 - source.rewinds
        source.rewinds += 1
        boundaries = tuple(b for b in source.boundaries if b <= length)
        seed = int(child_seed(source.seed, index))
        id_, order = (*source.id, index), request.next_order()
        branch = Branch(request, id_, node, seed, order, boundaries, source.temperature, source.trained)
        branch.turn_rewards = tuple(turn for turn in source.turn_rewards if turn[0] <= length)
        self._open(branch, source, length)
        request.resting[branch.id] = branch
        self.counts["rewinds"] += 1
        return branch

    def _reward_turn(self, branch: Branch, at: int, value: float) -> None:
        length = self._length(branch) if branch.status is None else branch.length
        if not 1 <= at <= length or not np.isfinite(value):
            raise RuntimeError(
                f"{_name(branch.request)} gives the reward {value:g} to a turn that ends after {at} tokens; the "
                f"response has {length}, and a reward is finite."
            )
        branch.turn_rewards = (*branch.turn_rewards, (at, value))

    def _prune(self, request: Request, key: BranchId) -> None:
        for place in (request.leaves, request.resting, request.sampling):
            if (branch := place.pop(key, None)) is not None:
                self._drop(branch)
                self.counts["pruned"] += 1
                return
        raise RuntimeError(f"{_name(request)} prunes branch {key}, which does not exist.")

    def _resting(self, request: Request, key: BranchId) -> Branch:
        branch = request.resting.get(key)
        if branch is None:
            raise RuntimeError(f"{_name(request)} answered for branch {key}, which is not resting.")
        return branch

    # -- calls ------------------------------------------------------------------------------------------------------

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
            wait([request.calls[0][1] for request in self._calling], WAIT_S, FIRST_COMPLETED)
            self.counts["call_wait_us"] += round(1e6 * (time.perf_counter() - begin))

    def _collect_calls(self) -> None:
        """Pass the results of finished calls to their programs, those of one request in the order of its calls."""
        if self._calling:
            self._calls.expire()
        for request in list(self._calling):
            while request.calls and request.calls[0][1].done() and not request.done:
                key, future = request.calls.popleft()
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


def _name(request: Request) -> str:
    return type(request.program).__name__
