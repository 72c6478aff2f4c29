"""The branches of requests as they grow, for every sampling backend: forks, rewinds, given tokens, ends of segments.

A backend samples; `Steering` asks programs what happens to a branch that rests. The effect on the tree is implemented
here once, for branches that the engine's own policy samples and for those of another one (`others.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..data.segment import LeafStatus, Origin
from ..programs import BranchId, Fork, Given, Rewind, SegmentReport
from .branch import Branch, Node, Request
from .completions import find_stop
from .records import child_seed, unsampled
from .sampling_params import TEMPERATURES

Array = npt.NDArray[Any]


class Sampled(NamedTuple):
    """The tokens that another policy sampled for one branch."""

    records: Array  # [tokens], see `sample_dtype`
    status: LeafStatus | None
    """Why the branch ended, see `SegmentReport`; None if it goes on."""
    stop: str | None
    error: str | None


class FurtherPolicies(Protocol):
    """The further policies of a run, which sample the branches of their roles; see `Others`."""

    flop: Counter[str]

    def plays(self, branch: Branch) -> bool:
        """Return whether another policy plays the role of ``branch``."""
        ...

    def ask(self, branch: Branch, path: Array, length: int) -> None:
        """Let the policy of the branch's role sample its next segment."""
        ...

    def step(self) -> list[tuple[Branch, int, list[Sampled] | Exception]]:
        """Compute a step; return the branches whose segments have ended."""
        ...

    def drop(self, branches: Iterable[Branch]) -> None:
        """Stop sampling those of ``branches`` that another policy samples."""
        ...


class Growing(ABC):
    """The operations on branches.

    Attributes:
        version: version of the policy, recorded with every sampled token.
        counts: see `Steering`.
        others: the further policies of a run; None without any.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.version = 0
        self.counts: Counter[str] = Counter()
        self.others: FurtherPolicies | None = None

    # -- interface of a backend ----------------------------------------------------------------------------------------

    @abstractmethod
    def _length(self, branch: Branch) -> int:
        """Return the number of response tokens of a resting branch."""

    @abstractmethod
    def path_so_far(self, branch: Branch) -> Array:  # [prompt + response] int32
        """Return all tokens of a branch."""

    @abstractmethod
    def records_so_far(self, branch: Branch) -> Array:  # [response] records
        """Return the records of a branch's response; see `sample_dtype`."""

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
    def _retire(self, branch: Branch) -> None:
        """Release the resources that a branch no longer needs as a leaf."""

    @abstractmethod
    def _drop(self, branch: Branch) -> None:
        """Release the backend's resources of a branch, unfinished or a leaf."""

    # -- forks and given tokens ----------------------------------------------------------------------------------------

    def children(self, parent: Branch, n: int) -> list[Branch]:
        """Return the branches that replace ``parent``, whose node is sealed; a single one keeps its id and seed."""
        start, ids = parent.node.start + len(parent.node.records), self.child_ids(parent, n)

        def child(id_: BranchId, seed: int, order: int) -> Branch:
            node = Node(parent.node, start, temperature=parent.temperature, trained=parent.trained, role=parent.role)
            inherited = parent.boundaries, parent.temperature, parent.trained, parent.role
            return Branch(parent.request, id_, node, seed, order, *inherited, turn_rewards=parent.turn_rewards)

        if ids == [parent.id]:
            only = child(parent.id, parent.seed, parent.order)
            only.rewinds = parent.rewinds
            return [only]
        self.counts["forks"] += 1
        seeds = child_seed(parent.seed, np.arange(n)).tolist()
        return [child(ids[i], seeds[i], parent.request.next_order()) for i in range(n)]

    @staticmethod
    def child_ids(parent: Branch, n: int) -> list[BranchId]:
        """Return the ids of the ``n`` branches that replace ``parent``."""
        return [parent.id] if n == 1 and parent.node.parent is not None else [(*parent.id, i) for i in range(n)]

    @staticmethod
    def segment_end(request: Request, length: int, tokens: int | None) -> int:
        """Return the response length at which a segment of ``tokens`` that begins at ``length`` is full."""
        most = request.params.max_new_tokens
        return most if tokens is None else min(length + tokens, most)

    def _go_on(self, branch: Branch, action: Fork | Rewind) -> list[BranchId]:
        """Let a resting branch continue as ``action`` says; return the ids of the branches that it becomes."""
        request, n, append, segment_tokens = branch.request, action.n, action.append, action.segment_tokens
        before = branch.temperature, branch.trained, branch.role
        if action.temperature is not None:
            low, high = TEMPERATURES
            if not (action.temperature == 0 or low <= action.temperature <= high):
                raise ValueError(f"The temperature of a branch is {action.temperature!r}; give 0 or a positive number.")
            branch.temperature = float(action.temperature)
        if action.train is not None:
            branch.trained = action.train
        if action.role is not None:
            branch.role = _role(request, action.role)
        if (branch.temperature, branch.trained, branch.role) != before:
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
        end = self.segment_end(request, self._length(branch), tokens)
        if self.others is not None and self.others.plays(branch):
            self._seal(branch)
            branch.away = n, end
            self.others.ask(branch, self.path_so_far(branch), self._length(branch))
        else:
            self._sample(branch, n, end)
        return self.child_ids(branch, n)

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
        records = unsampled(tokens, versions, logprobs)
        node = Node(branch.node, start, records, origin, True, temperature, branch.trained, role=branch.role)
        self._append(branch, node)
        branch.node = node

    def _come_back(self, parent: Branch, number: int, samples: list[Sampled]) -> list[tuple[Request, SegmentReport]]:
        """Append what policy ``number`` sampled to ``parent``, or to the branches that it becomes."""
        request, (n, _), ended = parent.request, parent.away or (1, 0), []
        parent.away = None
        branches = [parent]
        if self.child_ids(parent, n) != [parent.id]:
            del request.sampling[parent.id]
            branches, length = self.children(parent, n), self._length(parent)
            for branch in branches:
                branch.node = parent.node
                self._open(branch, parent, length)
                request.sampling[branch.id] = branch
            self._drop(parent)
        for branch, (records, status, stop, error) in zip(branches, samples, strict=True):
            start = branch.node.start + len(branch.node.records)
            sampling = branch.temperature, branch.trained
            node = Node(branch.node, start, records, Origin.SAMPLED, True, *sampling, role=branch.role, model=number)
            if len(records):
                self._append(branch, node)
                branch.node = node
            if error is not None:
                request.errors[branch.id] = error
            if status is LeafStatus.LENGTH and self._length(branch) < request.params.max_new_tokens:
                status = None  # the segment is full, not the response
            ended.append(self._end_segment(branch, records, status, stop))
        return ended

    # -- ends, rewinds, rewards ----------------------------------------------------------------------------------------

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
        if status is LeafStatus.STOP and stop in request.params.stop and request.program.tokenizer is not None:
            stop_text = find_stop(request.program.tokenizer, report.response_ids, request.params.stop)
            request.stopped |= {} if stop_text is None else {branch.id: stop_text}
        if status is None:
            branch.boundaries = (*branch.boundaries, length)
        else:
            self._finish(branch, status)
        return request, report

    def _finish(self, branch: Branch, status: LeafStatus) -> None:
        branch.status, branch.length = status, self._length(branch)
        self._seal(branch)
        branch.request.leaves[branch.id] = branch.request.resting.pop(branch.id)
        self._retire(branch)

    def _rewind(self, request: Request, key: BranchId, length: int) -> Branch:
        """Return a new resting branch that begins at ``length`` response tokens of another one."""
        source = request.leaves.get(key) or request.resting.get(key)
        if source is not None and source.status is None:
            source.length = self._length(source)
            self._seal(source)
        if source is None or not 0 <= length < max(source.length, 1):
            raise RuntimeError(f"{program_name(request)} rewinds branch {key} to {length}, where it has no tokens.")
        position = len(request.prompt) + length
        node = next(node for node in source.node.path() if node.start < position)
        if position - node.start < len(node.records):
            node = node.split(position - node.start)
        index = -1 - source.rewinds
        source.rewinds += 1
        boundaries = tuple(b for b in source.boundaries if b <= length)
        seed = int(child_seed(source.seed, index))
        id_, order = (*source.id, index), request.next_order()
        inherited = source.temperature, source.trained, source.role
        branch = Branch(request, id_, node, seed, order, boundaries, *inherited)
        branch.turn_rewards = tuple(turn for turn in source.turn_rewards if turn[0] <= length)
        self._open(branch, source, length)
        request.resting[branch.id] = branch
        self.counts["rewinds"] += 1
        return branch

    def _reward_turn(self, branch: Branch, at: int, value: float) -> None:
        length = self._length(branch) if branch.status is None else branch.length
        if not 1 <= at <= length or not np.isfinite(value):
            raise RuntimeError(
                f"{program_name(branch.request)} gives the reward {value:g} to a turn that ends after {at} tokens; the "
                f"response has {length}, and a reward is finite."
            )
        branch.turn_rewards = (*branch.turn_rewards, (at, value))

    def _prune(self, request: Request, key: BranchId) -> None:
        for place in (request.leaves, request.resting, request.sampling):
            if (branch := place.pop(key, None)) is not None:
                if self.others is not None:
                    self.others.drop([branch])
                self._drop(branch)
                self.counts["pruned"] += 1
                return
        raise RuntimeError(f"{program_name(request)} prunes branch {key}, which does not exist.")

    def _resting(self, request: Request, key: BranchId) -> Branch:
        branch = request.resting.get(key)
        if branch is None:
            raise RuntimeError(f"{program_name(request)} answered for branch {key}, which is not resting.")
        return branch


def _role(request: Request, name: str) -> int:
    """Return the place of a role among those of the request's program."""
    roles = list(request.program.roles)
    if name not in roles:
        choice = f"its roles are {', '.join(roles)}" if roles else "it has one role, without a name"
        raise RuntimeError(f"{program_name(request)} gives a branch the role '{name}'; {choice}.")
    return roles.index(name)


def program_name(request: Request) -> str:
    return type(request.program).__name__
