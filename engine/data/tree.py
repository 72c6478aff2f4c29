"""TokenTree: rollouts that share prefixes, as one structure of arrays on the host.

Nodes are runs of tokens without a branch, stored in depth-first preorder, so the tokens below a node are one
contiguous run of rows: row ``i`` sees key ``j`` iff ``j <= i < subtree_end[j]``. Node 0 is the prompt. A flat group of
responses is a tree of depth 1, a single sequence a tree with one leaf; a leaf may end at any node, also at the prompt
(an empty response). Leaves may have longer prompts than node 0 holds, as where every turn of a conversation is a sample
of its own: ``leaf_prompt`` says where each response begins, and the tokens before are no part of that leaf's loss.

Leaves keep the order in which they were given (the *leaf index* of every ``[L]`` array here). ``leaf_order`` lists them
depth-first; ``first_leaf`` and ``last_leaf`` of a node are ranks in that order, both inclusive.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from . import checks
from .prefix import prefix_tree

Array = npt.NDArray[Any]


class Origin(IntEnum):
    """Where a token came from."""

    PROMPT = 0
    SAMPLED = 1
    OBSERVATION = 2  # a tool's answer
    INJECTED = 3  # a hint or a teacher's token


class LeafStatus(IntEnum):
    """How a response ended."""

    STOP = 0
    LENGTH = 1
    ABORTED = 2
    FAILED = 3


@dataclass(frozen=True)
class Segment:
    """A run of tokens with what training needs to know of each; all arrays have the same length."""

    token_ids: Array  # [n] int32
    loss_mask: Array  # [n] bool, True where the token is trained on
    origin: Array  # [n] int8, an Origin
    behaviour_logprob: Array  # [n] float32, log-probability under the distribution it was sampled from; NaN where none
    policy_version: Array  # [n] int32
    temperature: Array  # [n] float32

    def __post_init__(self) -> None:
        wrong = {f.name: np.shape(getattr(self, f.name)) for f in fields(self)}
        if len(set(wrong.values())) != 1 or np.ndim(self.token_ids) != 1:
            raise ValueError(f"A Segment's arrays must be one-dimensional and of one length, got {wrong}.")

    def __len__(self) -> int:
        return len(self.token_ids)

    @staticmethod
    def make(
        token_ids: npt.ArrayLike,
        *,
        origin: npt.ArrayLike,
        loss_mask: npt.ArrayLike = False,
        behaviour_logprob: npt.ArrayLike = np.nan,
        policy_version: npt.ArrayLike = 0,
        temperature: npt.ArrayLike = 1.0,
    ) -> Segment:
        """A segment whose scalar arguments hold for every token."""
        ids = checks.token_ids("token_ids", token_ids)

        def column(values: Array) -> Array:
            return np.full(ids.shape, values, values.dtype) if values.ndim == 0 else values

        return Segment(
            ids,
            column(checks.flags("loss_mask", loss_mask)),
            column(checks.codes("origin", origin, Origin)),
            column(checks.numbers("behaviour_logprob", behaviour_logprob, nan=True)),
            column(checks.integers("policy_version", policy_version)),
            column(checks.numbers("temperature", temperature, least=0)),
        )

    @staticmethod
    def prompt(token_ids: npt.ArrayLike) -> Segment:
        """Prompt tokens: not trained on, no behaviour log-probability."""
        return Segment.make(token_ids, origin=Origin.PROMPT)

    @staticmethod
    def sampled(
        token_ids: npt.ArrayLike,
        logprobs: npt.ArrayLike,
        policy_version: npt.ArrayLike = 0,
        temperature: npt.ArrayLike = 1.0,
    ) -> Segment:
        """Tokens the policy sampled, with their log-probability under the sampling distribution."""
        return Segment.make(
            token_ids,
            origin=Origin.SAMPLED,
            loss_mask=True,
            behaviour_logprob=logprobs,
            policy_version=policy_version,
            temperature=temperature,
        )


_TOKEN_FIELDS = ("token_id", "loss_mask", "origin", "behaviour_logprob", "policy_version", "temperature")
_SEGMENT_FIELDS = tuple(f.name for f in fields(Segment))


@dataclass(frozen=True)
class Sequence:
    """One root-to-leaf path: what an ordinary trainer calls a sample."""

    prompt: list[int]
    response: list[int]
    behaviour_logprob: Array  # [len(response)] float32
    loss_mask: Array  # [len(response)] bool
    policy_version: Array  # [len(response)] int32
    advantage: float
    status: LeafStatus


@dataclass(eq=False)
class TokenTree:
    """See the module's description. Build one with :meth:`from_nodes` or :meth:`from_sequences`."""

    # per node [K], int32
    parent: Array  # -1 for the root
    start: Array  # first row
    length: Array
    first_leaf: Array  # first leaf below, as a rank in leaf_order
    last_leaf: Array  # last leaf below, inclusive
    # per token [T]
    token_id: Array  # int32
    position: Array  # int32, depth along the path
    parent_row: Array  # int32, the row whose hidden state predicts this token; -1 for the prompt's first
    subtree_end: Array  # int32, one past the last row below this token
    loss_mask: Array  # bool
    origin: Array  # int8
    behaviour_logprob: Array  # float32
    policy_version: Array  # int32
    temperature: Array  # float32
    # per leaf [L]
    leaf_node: Array  # int32
    leaf_order: Array  # int32, leaf indices in depth-first order
    leaf_prompt: Array  # int32, tokens on the leaf's path before its response; at least node 0's
    status: Array  # int8, a LeafStatus
    advantage: Array  # float32
    answer_id: Array  # int32, responses with equal answers share one; -1 where unknown
    rewards: dict[str, Array] = field(default_factory=dict)  # name -> [L] float32
    meta: dict[str, Any] = field(default_factory=dict)  # prompt id, task, ...

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def num_tokens(self) -> int:
        """Unique tokens, the prompt's included."""
        return len(self.token_id)

    @property
    def num_leaves(self) -> int:
        return len(self.leaf_node)

    @property
    def prompt_length(self) -> int:
        return int(self.length[0])

    @property
    def logical_tokens(self) -> int:
        """Tokens of all root-to-leaf paths, the prompt counted once a leaf: what a flat batch would hold."""
        return int((self.node_position + self.length)[self.leaf_node].sum())

    @property
    def node_position(self) -> Array:
        """[K] position of each node's first token."""
        return self.position[self.start]

    @property
    def path_length(self) -> Array:
        """[L] tokens of each path, prompt included."""
        return (self.node_position + self.length)[self.leaf_node]

    @property
    def response_length(self) -> Array:
        """[L] tokens of each response."""
        return self.path_length - self.leaf_prompt

    @property
    def loss_length(self) -> Array:
        """[L] tokens of each response that are in the loss."""
        change = np.zeros(self.num_tokens + 1, np.int64)
        change[:-1] = self.loss_mask
        np.subtract.at(change, self.subtree_end, self.loss_mask)  # a token counts for the rows below it
        along = change.cumsum()
        return along[self.row_at(self.path_length - 1)] - along[self.row_at(self.leaf_prompt - 1)]

    @property
    def response_leaves(self) -> Array:
        """[T] leaves whose response a token is part of: 0 for what is prompt to all."""
        change = np.zeros(self.num_tokens + 1, np.int64)
        np.add.at(change, self.row_at(self.path_length - 1), 1)
        np.subtract.at(change, self.row_at(self.leaf_prompt - 1), 1)
        before = np.concatenate([[0], change.cumsum()])
        return before[self.subtree_end] - before[: self.num_tokens]

    def row_at(self, position: Array) -> Array:  # [L] -> [L] int64
        """The row at a position of each leaf's path."""
        node = self.leaf_node.astype(np.int64)
        while (above := self.node_position[node] > position).any():
            node[above] = self.parent[node[above]]
        return self.start[node] + position - self.node_position[node]

    # -- builders ---------------------------------------------------------------------------------------------------

    @staticmethod
    def from_nodes(
        parents: Seq[int],
        segments: Seq[Segment],
        leaf_nodes: Seq[int],
        statuses: Seq[LeafStatus],
    ) -> TokenTree:
        """The tree of nodes given in any order that puts parents first.

        Args:
            parents: parent of each node; ``parents[0] == -1`` is the prompt, all others lie before their children.
            segments: tokens of each node. An empty one other than the prompt's is replaced by its parent.
            leaf_nodes: the node at which each leaf ends; the order given becomes the leaf index.
            statuses: how each leaf ended.

        Raises:
            ValueError: the prompt is empty, no leaf is given, a parent does not precede its child, a leaf's node does
                not exist, a status is unknown, or a childless node is no leaf's.
        """
        checks.all_of("segments", segments, Segment)
        if not segments or len(segments[0]) == 0:
            raise ValueError("A TokenTree needs a prompt of at least one token; the root segment is empty.")
        if len(leaf_nodes) == 0:
            raise ValueError("A TokenTree needs at least one leaf; no responses were given.")
        if len(parents) != len(segments) or len(leaf_nodes) != len(statuses):
            raise ValueError(
                f"Got {len(parents)} parents for {len(segments)} segments and {len(leaf_nodes)} leaves for "
                f"{len(statuses)} statuses; give one of each."
            )
        parents = checks.integers("parents", parents).tolist()
        leaf_nodes = checks.integers("leaf_nodes", leaf_nodes).tolist()
        if parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(parents) if i):
            raise ValueError("parents[0] must be -1 and every other parent must precede its child.")
        if min(leaf_nodes) < 0 or max(leaf_nodes) >= len(parents):
            raise ValueError(f"leaf_nodes must be in 0..{len(parents) - 1}, got {min(leaf_nodes)}..{max(leaf_nodes)}.")

        keep = [i for i, s in enumerate(segments) if len(s)]
        stands_for = list(range(len(parents)))  # an empty node is replaced by its nearest non-empty ancestor
        for i, segment in enumerate(segments):
            if len(segment) == 0:
                stands_for[i] = stands_for[parents[i]]
        new = {node: k for k, node in enumerate(keep)}
        parent = np.array([-1] + [new[stands_for[parents[i]]] for i in keep[1:]], np.int32)
        leaf_node = np.array([new[stands_for[n]] for n in leaf_nodes], np.int32)
        tokens = {
            name: np.concatenate([getattr(segments[i], column) for i in keep])
            for name, column in zip(_TOKEN_FIELDS, _SEGMENT_FIELDS, strict=True)
        }
        length = np.array([len(segments[i]) for i in keep], np.int32)
        prompts = np.full(len(leaf_node), length[0])
        return _depth_first(parent, length, tokens, leaf_node, checks.codes("statuses", statuses, LeafStatus), prompts)

    @staticmethod
    def from_sequences(
        prompt: Seq[int] | Seq[Seq[int]],
        responses: Seq[Seq[int]],
        *,
        advantages: Seq[float] | None = None,
        behaviour_logprobs: Seq[npt.ArrayLike] | None = None,
        loss_masks: Seq[npt.ArrayLike] | None = None,
        policy_version: int | Seq[npt.ArrayLike] = 0,
        statuses: Seq[LeafStatus] | None = None,
    ) -> TokenTree:
        """The tree of prompts and responses, shared prefixes merged.

        Response tokens merge only where token id, behaviour log-prob (bit for bit), policy version and loss mask all
        agree; otherwise the paths split there. Prompt tokens need only the id, and merge with responses too: the turns
        of a conversation, each a prompt and a response, become one path. Responses may be empty, equal, or prefixes of
        one another.

        Args:
            prompt: token ids of the prompt of all responses, or of each one's. Several must begin with the same token;
                `forest` takes any.
            responses: token ids of each response; their order becomes the leaf index.
            advantages: one number a response, 0 where absent.
            behaviour_logprobs: per response, one number a token; NaN where absent.
            loss_masks: per response, True for the tokens to train on; all where absent. The others are observations.
            policy_version: one for all tokens, or per response one number or one a token.

        Raises:
            ValueError: no response, an empty prompt, prompts that share no first token, per-response data whose
                lengths differ from the responses', or values that are not what they should be: ids and versions
                integers of int32, advantages and log-probs finite, known statuses.
        """
        count = len(responses)
        if isinstance(responses, str | bytes) or count == 0:
            raise ValueError("from_sequences needs at least one response; give token ids of each in `responses`.")
        _check_count("advantages", advantages, count)
        if advantages is not None and np.ndim(cast("Any", advantages)) != 1:
            raise ValueError("advantages must be one number a response; give those of tokens to the loss itself.")
        _check_count("statuses", statuses, count)
        ids = [checks.token_ids(f"responses[{i}]", response) for i, response in enumerate(responses)]
        lengths = np.array([len(r) for r in ids])
        as_logprobs = partial(checks.numbers, nan=True)
        logprob = _per_token("behaviour_logprobs", behaviour_logprobs, lengths, np.float32(np.nan), as_logprobs)
        mask = _per_token("loss_masks", loss_masks, lengths, np.True_, checks.flags)
        one = np.ndim(cast("npt.ArrayLike", policy_version)) == 0
        per_response = None if one else cast("Seq[npt.ArrayLike]", policy_version)
        fallback = checks.integers("policy_version", policy_version if one else 0)
        version = _per_token("policy_version", per_response, lengths, fallback, checks.integers)
        response = np.concatenate([*ids, np.zeros(0, np.int32)])

        root, prompts = _prompts(prompt, count)
        context = np.array([len(p) for p in prompts]) - len(root)
        # sequences from the common prompt on: the rest of their prompt, then their response
        total = lengths + context
        ends = np.cumsum(total)
        within = np.arange(total.sum()) - np.repeat(ends - total, total)
        of_prompt = within < np.repeat(context, total)

        def column(of_response: Array, of_prompts: npt.ArrayLike) -> Array:
            values = np.empty(len(within), of_response.dtype)
            values[of_prompt], values[~of_prompt] = of_prompts, of_response
            return values

        rest = np.concatenate([p[len(root) :] for p in prompts] + [np.zeros(0, np.int32)])
        origin = np.where(mask, Origin.SAMPLED, Origin.OBSERVATION).astype(np.int8)
        columns = {
            "token_id": column(response, rest),
            "loss_mask": column(mask, False),
            "origin": column(origin, Origin.PROMPT),
            "behaviour_logprob": column(logprob, np.nan),
            "policy_version": column(version, 0),
            "temperature": np.ones(len(within), np.float32),
        }
        nodes = prefix_tree(
            columns["token_id"],
            columns["behaviour_logprob"],
            columns["policy_version"],
            columns["loss_mask"],
            total,
            context,
        )
        length = nodes.end - nodes.begin
        source = np.repeat(nodes.begin - (np.cumsum(length) - length), length) + np.arange(length.sum())
        of_root = Segment.prompt(root)
        length[0] = len(root)
        tree = _depth_first(
            nodes.parent,
            length,
            {
                name: np.concatenate([getattr(of_root, of_segment), columns[name][source]])
                for name, of_segment in zip(_TOKEN_FIELDS, _SEGMENT_FIELDS, strict=True)
            },
            nodes.leaf_node,
            checks.codes("statuses", [LeafStatus.STOP] * count if statuses is None else statuses, LeafStatus),
            len(root) + context,
        )
        if advantages is not None:
            tree.advantage[:] = checks.numbers("advantages", advantages)
        return tree

    @staticmethod
    def forest(
        prompts: Seq[Seq[int]], responses: Seq[Seq[int]], **per_response: Any
    ) -> tuple[list[TokenTree], list[Array]]:
        """Trees of samples of any prompts, one for each first token, and the indices ``[L]`` of each tree's samples.

        ``per_response`` are the keyword arguments of :meth:`from_sequences`, each a sequence with one entry a response.

        Raises:
            ValueError: as :meth:`from_sequences`.
        """
        for name, values in {"prompts": prompts, **per_response}.items():
            _check_count(name, values, len(responses))
        members: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            ids = checks.token_ids(f"prompts[{i}]", prompt)
            members.setdefault(int(ids[0]) if len(ids) else -1, []).append(i)
        trees = [
            TokenTree.from_sequences(
                [prompts[i] for i in some],
                [responses[i] for i in some],
                **{name: [values[i] for i in some] for name, values in per_response.items()},
            )
            for some in members.values()
        ]
        return trees, [np.array(some) for some in members.values()]

    def without_leaves(self, drop: Array) -> TokenTree | None:  # [L] bool
        """A copy without the leaves marked in ``drop`` and the tokens only they used; None when no leaf is left."""
        keep_leaf = ~np.asarray(drop, bool)
        if not keep_leaf.any():
            return None
        below = np.concatenate([[0], np.cumsum(keep_leaf[self.leaf_order])])
        keep_node = below[self.last_leaf + 1] > below[self.first_leaf]
        keep_node[0] = True
        renumber = np.cumsum(keep_node) - 1
        keep_token = np.repeat(keep_node, self.length)
        parent = np.where(self.parent[keep_node] < 0, -1, renumber[self.parent[keep_node]]).astype(np.int32)
        tree = _depth_first(
            parent,
            self.length[keep_node],
            {name: getattr(self, name)[keep_token] for name in _TOKEN_FIELDS},
            renumber[self.leaf_node[keep_leaf]].astype(np.int32),
            self.status[keep_leaf],
            self.leaf_prompt[keep_leaf],
        )
        tree.advantage[:] = self.advantage[keep_leaf]
        tree.answer_id[:] = self.answer_id[keep_leaf]
        tree.rewards = {name: values[keep_leaf] for name, values in self.rewards.items()}
        tree.meta = dict(self.meta)
        return tree

    def chain(self, leaf: int) -> TokenTree:
        """The path to ``leaf`` alone."""
        rows, prompt = self.path_rows(leaf), int(self.leaf_prompt[leaf])
        length = np.array([prompt, len(rows) - prompt] if prompt < len(rows) else [prompt])
        tree = _depth_first(
            np.arange(len(length)) - 1,
            length,
            {name: getattr(self, name)[rows] for name in _TOKEN_FIELDS},
            np.array([len(length) - 1]),
            self.status[[leaf]],
            self.leaf_prompt[[leaf]],
        )
        tree.advantage[:] = self.advantage[leaf]
        tree.answer_id[:] = self.answer_id[leaf]
        tree.rewards = {name: values[[leaf]] for name, values in self.rewards.items()}
        tree.meta = dict(self.meta)
        return tree

    # -- views ------------------------------------------------------------------------------------------------------

    def path_rows(self, leaf: int) -> Array:  # [prompt + response] int64
        """Rows of the tokens from the root to ``leaf``."""
        runs = []
        node = int(self.leaf_node[leaf])
        while node >= 0:
            runs.append(np.arange(self.start[node], self.start[node] + self.length[node]))
            node = int(self.parent[node])
        return np.concatenate(runs[::-1])

    def response_rows(self, leaf: int) -> Array:  # [response] int64
        """Rows of the response's tokens, in order."""
        return self.path_rows(leaf)[self.leaf_prompt[leaf] :]

    def flatten(self) -> list[Sequence]:
        """The root-to-leaf paths in leaf-index order: the inverse of :meth:`from_sequences`."""
        out = []
        for leaf in range(self.num_leaves):
            path = self.path_rows(leaf)
            rows = path[self.leaf_prompt[leaf] :]
            out.append(
                Sequence(
                    self.token_id[path[: self.leaf_prompt[leaf]]].tolist(),
                    self.token_id[rows].tolist(),
                    self.behaviour_logprob[rows],
                    self.loss_mask[rows],
                    self.policy_version[rows],
                    float(self.advantage[leaf]),
                    LeafStatus(int(self.status[leaf])),
                )
            )
        return out


def _depth_first(
    parent: Array, length: Array, tokens: dict[str, Array], leaf_node: Array, status: Array, leaf_prompt: Array
) -> TokenTree:
    """Reorder nodes into depth-first preorder, children in the order of their numbers, and derive the rest."""
    count = len(parent)
    children: list[list[int]] = [[] for _ in range(count)]
    for node in range(count - 1, 0, -1):  # reversed, so that the stack pops the first child first
        children[parent[node]].append(node)
    preorder: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        preorder.append(node)
        stack.extend(children[node])
    order = np.array(preorder)
    rank = np.empty(count, np.int32)
    rank[order] = np.arange(count, dtype=np.int32)

    begin = np.concatenate([[0], np.cumsum(length)[:-1]])
    length = length[order].astype(np.int32)
    start = (np.cumsum(length) - length).astype(np.int32)
    total = int(length.sum())
    within = np.arange(total) - np.repeat(start, length)
    source = np.repeat(begin[order], length) + within
    parent = np.where(order == 0, -1, rank[parent[order]]).astype(np.int32)

    size = np.ones(count, np.int64)  # nodes in each subtree
    node_position = np.zeros(count, np.int32)
    for node in range(1, count):
        node_position[node] = node_position[parent[node]] + length[parent[node]]
    for node in range(count - 1, 0, -1):
        size[parent[node]] += size[node]
    node_end = np.append(start, total)[np.arange(count) + size]

    leaf_node = rank[leaf_node]
    leaf_order = np.argsort(leaf_node, kind="stable").astype(np.int32)
    in_order = leaf_node[leaf_order]
    first_leaf = np.searchsorted(in_order, np.arange(count)).astype(np.int32)
    last_leaf = (np.searchsorted(in_order, np.arange(count) + size) - 1).astype(np.int32)
    if (last_leaf < first_leaf).any():
        raise ValueError("A childless node must be the end of a leaf; name it in leaf_nodes or leave it out.")

    parent_last = np.where(parent < 0, -1, (start + length - 1)[parent])
    leaves = len(leaf_node)
    return TokenTree(
        parent=parent,
        start=start,
        length=length,
        first_leaf=first_leaf,
        last_leaf=last_leaf,
        position=(np.repeat(node_position, length) + within).astype(np.int32),
        parent_row=np.where(within == 0, np.repeat(parent_last, length), np.arange(total) - 1).astype(np.int32),
        subtree_end=np.repeat(node_end, length).astype(np.int32),
        leaf_node=leaf_node,
        leaf_order=leaf_order,
        leaf_prompt=leaf_prompt.astype(np.int32),
        status=status.copy(),
        advantage=np.zeros(leaves, np.float32),
        answer_id=np.full(leaves, -1, np.int32),
        **cast("dict[str, Any]", {name: values[source] for name, values in tokens.items()}),
    )


def _prompts(prompt: Seq[int] | Seq[Seq[int]], count: int) -> tuple[Array, list[Array]]:
    """The longest common prompt, and every response's own."""
    several = len(prompt) > 0 and np.ndim(cast("Any", prompt[0])) == 1
    if not several:
        root = checks.token_ids("prompt", prompt)
        if len(root) == 0:
            raise ValueError("A TokenTree needs a prompt of at least one token; `prompt` is empty.")
        return root, [root] * count
    _check_count("prompt", prompt, count)
    prompts = [checks.token_ids(f"prompt[{i}]", p) for i, p in enumerate(cast("Seq[Seq[int]]", prompt))]
    root = prompts[0]
    for other in prompts:
        shortest = min(len(root), len(other))
        differ = np.flatnonzero(root[:shortest] != other[:shortest])
        root = root[: differ[0] if len(differ) else shortest]
    if len(root) == 0:
        raise ValueError(
            "The prompts share no first token, so they are no one tree; TokenTree.forest makes a tree of each kind."
        )
    return root, prompts


def _check_count(name: str, values: Seq[Any] | None, count: int) -> None:
    if values is not None and not hasattr(values, "__len__"):
        raise ValueError(f"{name} must have one entry a response, got {values!r}.")
    if values is not None and len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} responses; give one a response.")


def _per_token(
    name: str,
    values: Seq[npt.ArrayLike] | None,
    lengths: Array,
    default: Any,  # a numpy scalar of the dtype of the column
    checked: Callable[[str, object], Array],
) -> Array:  # [sum(lengths)]
    dtype = default.dtype
    if values is None:
        return np.full(int(lengths.sum()), default, dtype)
    _check_count(name, values, len(lengths))
    columns = []
    for i, (value, length) in enumerate(zip(values, lengths, strict=True)):
        column = checked(f"{name}[{i}]", value)
        if column.ndim == 0:
            column = np.full(length, column, dtype)
        if column.shape != (length,):
            raise ValueError(f"{name}[{i}] has shape {column.shape} for a response of {length} tokens.")
        columns.append(column)
    return np.concatenate(columns) if columns else np.zeros(0, dtype)
