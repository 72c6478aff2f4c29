"""The tree of one prompt while it grows: nodes hold tokens, branches are its growing tips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..programs import BranchId, GroupState, RolloutProgram
from ..tree import LeafStatus, Segment, TokenTree

Array = npt.NDArray[Any]
NO_TOKENS = np.zeros(0, np.int32)
NO_LOGPROBS = np.zeros(0, np.float32)


@dataclass(eq=False)
class Node:
    """A run of tokens without a branch. While its branch samples, they lie in the row table."""

    parent: Node | None
    kv: int
    """Its id in the KvTree."""
    start: int
    """Position of its first token on the path."""
    tokens: Array = field(default_factory=lambda: NO_TOKENS)  # [n] int32
    logprobs: Array = field(default_factory=lambda: NO_LOGPROBS)  # [n] float32; empty for the prompt
    sealed: bool = False

    def path(self) -> Iterator[Node]:
        """The node and its ancestors, upwards."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def split(self, keep: int, kv: int) -> Node:
        """Move the first ``keep`` tokens to a new parent, whose id in the KvTree is ``kv``."""
        upper = Node(self.parent, kv, self.start, self.tokens[:keep], self.logprobs[:keep], sealed=True)
        self.parent, self.start = upper, self.start + keep
        self.tokens, self.logprobs = self.tokens[keep:], self.logprobs[keep:]
        return upper


@dataclass(eq=False)
class Branch:
    """A tip of the tree: a prompt, a response in flight, or a leaf."""

    group: Group
    id: BranchId
    node: Node
    seed: int
    order: int
    boundaries: tuple[int, ...]
    """Response lengths at which the path's segments ended; the first is 0, the prompt."""
    slot: int = -1
    """In the row table; -1 for a leaf."""
    status: LeafStatus | None = None
    length: int = 0
    """Response tokens of a leaf."""
    resting: bool = False
    rewinds: int = 0


class Group:
    """A prompt, its program and its branches."""

    def __init__(self, index: int, prompt: Array, seed: int, width: int, program: RolloutProgram) -> None:
        self.index = index
        self.prompt = prompt  # [P] int32
        self.seed = seed
        self.width = width
        self.program = program
        self.leaves: dict[BranchId, Branch] = {}
        self.sampling: dict[BranchId, Branch] = {}
        self.resting: dict[BranchId, Branch] = {}
        self._branches = 0

    def state(self) -> GroupState:
        return GroupState(self.width, self.seed, len(self.sampling), len(self.resting), len(self.leaves))

    def next_order(self) -> int:
        """Priority of a new branch: by prompt, then by age."""
        self._branches += 1
        return self.index << 32 | self._branches

    @property
    def done(self) -> bool:
        return not self.sampling and not self.resting

    def token_tree(self, policy_version: int, temperature: float) -> TokenTree:
        """The finished group, leaves in depth-first order of their ids."""
        leaves = [self.leaves[key] for key in sorted(self.leaves)]
        nodes = {id(node): node for leaf in leaves for node in leaf.node.path()}
        ordered = sorted(nodes.values(), key=lambda node: node.start)  # parents start before their children
        index = {id(node): i for i, node in enumerate(ordered)}
        return TokenTree.from_nodes(
            [-1 if node.parent is None else index[id(node.parent)] for node in ordered],
            [
                Segment.prompt(node.tokens)
                if node.parent is None
                else Segment.sampled(node.tokens, node.logprobs, policy_version, temperature)
                for node in ordered
            ],
            [index[id(leaf.node)] for leaf in leaves],
            [leaf.status for leaf in leaves if leaf.status is not None],
        )
