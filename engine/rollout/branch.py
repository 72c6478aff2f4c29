"""The growing tree of one prompt: nodes hold tokens, branches are its tips."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data.columns import COLUMNS
from ..data.media import PromptMedia
from ..data.segment import LeafStatus, Origin, Segment
from ..data.tree import TokenTree, of_runs
from ..programs import BranchId, GroupState, RolloutProgram
from .completions import Completion, StopText
from .records import top_logprobs, unsampled
from .sampling_params import SamplingParams

Array = npt.NDArray[Any]


NOTHING = unsampled([])
UNKNOWN = np.zeros((0, 0, 0), np.int16)


@dataclass(eq=False)
class Node:
    """A run of tokens of one origin without a fork; tokens of a branch that still samples are in the row table."""

    parent: Node | None
    start: int
    """Position of the first token on the path."""
    records: Array = field(default_factory=lambda: NOTHING)  # [n], see sample_dtype
    origin: Origin = Origin.SAMPLED
    sealed: bool = False
    temperature: float = float("nan")
    """Temperature that the tokens were sampled at."""
    trained: bool = True
    """False: the tokens are in no policy loss."""
    routes: Array = field(default_factory=lambda: UNKNOWN)
    """[<= n, layers, k] int16, the experts that computed the first tokens, if they are recorded."""
    role: int = 0
    """Place of the role that the tokens were sampled in among the program's."""
    model: int = 0
    """Number of the policy that sampled the tokens; 0: the engine's own."""

    def path(self) -> Iterator[Node]:
        """Yield the node and its ancestors, upwards."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def split(self, keep: int) -> Node:
        """Move the first ``keep`` tokens to a new parent."""
        upper = replace(self, records=self.records[:keep], sealed=True, routes=self.routes[:keep])
        self.parent, self.start, self.records = upper, self.start + keep, self.records[keep:]
        self.routes = self.routes[keep:]
        return upper

    def column(self, name: str) -> Array:  # [start + n]
        """Return a field of all tokens on the path."""
        return np.concatenate([node.records[name] for node in self.path()][::-1])


@dataclass(eq=False)
class Branch:
    """A tip of the tree: a prompt, a response in flight, or a leaf."""

    request: Request
    id: BranchId
    node: Node
    seed: int
    order: int
    boundaries: tuple[int, ...]
    """Response lengths at which the path's segments ended; the first is 0, the prompt."""
    temperature: float = 1.0
    """Temperature of the tokens that are sampled next."""
    trained: bool = True
    """An update counts the response."""
    role: int = 0
    """Place of the role that its next tokens are sampled in among the program's."""
    kv: int = -1
    """Node of the KvTree that the branch holds; -1 for none."""
    slot: int = -1
    """Slot in the row table; -1 for a leaf."""
    status: LeafStatus | None = None
    length: int = 0
    """Response tokens of a leaf."""
    rewinds: int = 0
    reward: float | None = None
    """Reward of the response that the program gave."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Rewards that the program gave to turns: the response's length at the end of each, and the value."""
    saved: dict[str, Any] | None = None
    """The branch's row of the row table, while the request is aborted."""
    away: tuple[int, int] | None = None
    """While another policy samples it: into how many branches, and the response length at which they rest."""


class Request:
    """A prompt, its parameters, its program and its branches.

    Attributes:
        tree: the finished rollouts, None before; unfinished leaves of an aborted request have status ABORTED.
        error: reason for which the request failed as a whole, or None.
        errors, stopped: why single leaves failed, and the texts of ``params.stop`` that ended them, by branch.
    """

    def __init__(
        self,
        number: int,
        prompt: Array,
        seed: int,
        params: SamplingParams,
        program: RolloutProgram,
        media: PromptMedia | None = None,
    ) -> None:
        self.number = number
        self.prompt = prompt  # [P] int32
        self.media = media  # the prompt's pictures
        self.seed = seed
        self.params = params
        self.program = program
        self.adapter = 0  # number of the adapter in the engine; 0 is the model without one
        self.owner = 0  # see `Job.owner`
        self.held_out = False  # answers a held-out problem; counted apart
        self.forks = 0  # branches that the program asks for at the prompt
        self.tree: TokenTree | None = None
        self.error: Exception | None = None
        self.errors: dict[BranchId, str] = {}
        self.stopped: dict[BranchId, StopText] = {}
        self.leaves: dict[BranchId, Branch] = {}
        self.sampling: dict[BranchId, Branch] = {}
        self.resting: dict[BranchId, Branch] = {}
        self.kept: list[Array] = []  # see sample_dtype
        self.calls: deque[tuple[BranchId, Future[Any]]] = deque()
        self.lost_calls: list[BranchId] = []  # calls to repeat after a restart from a checkpoint
        self.started = False
        self.branches_made = 0

    def state(self) -> GroupState:
        """Return the numbers of branches that the program may decide by."""
        return GroupState(self.params.n, self.seed, len(self.sampling), len(self.resting), len(self.leaves))

    def next_order(self) -> int:
        """Return the priority of a new branch: by request, then by age."""
        self.branches_made += 1
        return self.number << 32 | self.branches_made

    @property
    def unfinished(self) -> list[Branch]:
        """The branches that are sampling or resting."""
        return [*self.sampling.values(), *self.resting.values()]

    @property
    def finished(self) -> bool:
        """True once the request has started and none of its branches is in flight."""
        return self.started and not self.sampling and not self.resting

    @property
    def done(self) -> bool:
        """True once the request has a tree or has failed."""
        return self.tree is not None or self.error is not None

    def completions(self) -> list[Completion]:
        """Return the responses one by one, in the order of the tree's leaves."""
        return [self._completion(leaf) for leaf in self._tips()]

    def _completion(self, leaf: Branch) -> Completion:
        nodes = [node for node in leaf.node.path() if node.parent is not None][::-1]

        def column(name: str) -> Array:
            return np.concatenate([node.records[name] for node in nodes] or [NOTHING[name]])

        tops = [top for node in nodes for top in top_logprobs(node.records)]
        origin = np.concatenate([np.zeros(0, np.int8), *(np.full(len(n.records), n.origin, np.int8) for n in nodes)])
        status = LeafStatus.ABORTED if leaf.status is None else leaf.status
        kept = None
        if self.params.kept_tokens:
            ids = [self.kept[i - 1] if i else np.zeros(0, np.int32) for i in column("kept").tolist()]
            kept = np.cumsum([0, *map(len, ids)]), np.concatenate([np.zeros(0, np.int32), *ids])
        return Completion(
            column("token"),
            origin,
            column("logprob"),
            column("raw_logprob"),
            column("entropy"),
            column("version"),
            tops,
            kept,
            status,
            self.errors.get(leaf.id),
            self.stopped.get(leaf.id),
        )

    def _tips(self) -> list[Branch]:
        """Return leaves and unfinished branches in depth-first order; the bare prompt before the request starts."""
        tips = {**self.leaves, **self.sampling, **self.resting}
        if not tips:
            root = Node(None, 0, unsampled(self.prompt), Origin.PROMPT, sealed=True)
            tips[()] = Branch(self, (), root, self.seed, 0, (0,), self.params.temperature)
        return [tips[key] for key in sorted(tips)]

    def token_tree(self) -> TokenTree:
        """Return the leaves as a tree, in depth-first order of their ids; unfinished branches become ABORTED leaves."""
        ordered = self._tips()
        nodes = {id(node): node for leaf in ordered for node in leaf.node.path()}
        by_start = sorted(nodes.values(), key=lambda node: node.start)  # parents start before their children
        index = {id(node): i for i, node in enumerate(by_start)}
        counted = {id(node) for leaf in ordered if leaf.trained for node in leaf.node.path()}
        tree = of_runs(
            [-1 if node.parent is None else index[id(node.parent)] for node in by_start],
            [len(node.records) for node in by_start],
            _tokens_of(by_start, [node.trained and id(node) in counted for node in by_start]),
            [index[id(leaf.node)] for leaf in ordered],
            np.array([LeafStatus.ABORTED if leaf.status is None else leaf.status for leaf in ordered], np.int8),
        )
        if self.media is not None:
            tree.pictures = self.media.pictures
        if self.program.counts:
            tree.meta["counts"] = dict(self.program.counts)
        if self.program.roles:
            tree.meta["roles"] = list(self.program.roles)
        if not all(leaf.trained for leaf in ordered):
            tree.set("trained", [leaf.trained for leaf in ordered])
        if any(leaf.turn_rewards for leaf in ordered):
            tree.set("token_reward", _rewards_of_turns(tree, [leaf.turn_rewards for leaf in ordered]))
        if rewards := {i: leaf.reward for i, leaf in enumerate(ordered) if leaf.reward is not None}:
            tree.meta["given_rewards"] = rewards
        if self.errors:
            tree.meta["errors"] = {i: self.errors[leaf.id] for i, leaf in enumerate(ordered) if leaf.id in self.errors}
        if self.stopped:
            tree.meta["stopped"] = {i: self.stopped.get(leaf.id) for i, leaf in enumerate(ordered)}
        return tree


def _rewards_of_turns(tree: TokenTree, turn_rewards: Sequence[Sequence[tuple[int, float]]]) -> Array:  # [P]
    """Return each turn's reward at its last token, those of one token added up; NaN elsewhere."""
    rewards = COLUMNS["token_reward"].filled(int(tree.response_length.sum()))
    first = np.cumsum(tree.response_length) - tree.response_length
    for begin, of_leaf in zip(first.tolist(), turn_rewards, strict=True):
        for length, value in of_leaf:
            rewards[begin + length - 1] = np.nan_to_num(rewards[begin + length - 1]) + value
    return rewards


def _tokens_of(nodes: Sequence[Node], in_loss: Sequence[bool]) -> Segment:
    """Concatenate the tokens of nodes; the sampled ones of those ``in_loss`` are trained on."""

    def column(name: str) -> Array:
        return np.concatenate([node.records[name] for node in nodes])

    length = [len(node.records) for node in nodes]
    origin = np.repeat(np.array([node.origin for node in nodes], np.int8), length)
    temperature = np.repeat(np.array([node.temperature for node in nodes], np.float32), length)
    trained = np.repeat(np.array(in_loss), length)
    sampled, nan = origin == Origin.SAMPLED, np.float32(np.nan)
    columns = {
        "origin": origin,
        "loss_mask": sampled & trained,
        "behaviour_logprob": np.where(sampled, column("logprob"), nan),
        "policy_version": np.where(sampled, column("version"), np.int32(0)),
        "entropy": np.where(sampled, column("entropy"), nan),
        "temperature": np.where(sampled, temperature, nan),
    }
    for name in ("role", "model"):
        if any(getattr(node, name) for node in nodes):
            columns[name] = np.repeat(np.array([getattr(node, name) for node in nodes], np.int8), length)
    if recorded := [node.routes for node in nodes if len(node.routes)]:
        routes = COLUMNS["routes"].filled(sum(length), recorded[0])
        for node, begin in zip(nodes, np.cumsum([0, *length]).tolist(), strict=False):
            if len(node.routes):
                routes[begin : begin + len(node.routes)] = node.routes
        columns["routes"] = routes
    return Segment(column("token"), columns)
