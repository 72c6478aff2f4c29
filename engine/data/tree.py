"""TokenTree: rollouts that share prefixes, as one structure of arrays on the host.

Nodes are runs of tokens without a branch, stored in depth-first preorder, so the tokens below a node are one
contiguous run of rows: row ``i`` sees key ``j`` iff ``j <= i < subtree_end[j]``. Node 0 is the prompt. A flat group of
responses is a tree of depth 1, a single sequence a tree with one leaf; a leaf may end at any node, also at the prompt
(an empty response). Leaves may have longer prompts than node 0, for example if every turn of a conversation is a
sample: a response begins after ``leaf_prompt`` tokens, and the tokens before are not in that leaf's loss.

A token holds one record (log-prob, version, mask, origin). Siblings with equal ids and different records are different
tokens; `pack` computes them as one row.

Leaves keep the order in which they were given (the *leaf index* of every ``[L]`` array here). ``leaf_order`` lists them
depth-first; ``first_leaf`` and ``last_leaf`` of a node are ranks in that order, both inclusive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from . import checks
from .build import check_count, merge
from .columns import COLUMNS, Array, find_column
from .media import Picture, distinct
from .order import check_nodes, order_nodes, without_empty
from .segment import LeafStatus, Origin, Segment, Sequence


@dataclass(eq=False)
class TokenTree:
    """A tree of rollouts, as the module describes. Build one with :meth:`from_nodes` or :meth:`from_sequences`."""

    # per node [K], int32
    parent: Array  # -1 for the root
    start: Array  # first row
    length: Array
    first_leaf: Array  # first leaf below, as a rank in leaf_order
    last_leaf: Array  # last leaf below, inclusive
    # per token [T], int32
    token_id: Array
    position: Array  # depth along the path
    parent_row: Array  # the row whose hidden state predicts this token; -1 for the prompt's first
    subtree_end: Array  # one past the last row below this token
    # per leaf [L], int32
    leaf_node: Array
    leaf_order: Array  # leaf indices in depth-first order
    leaf_prompt: Array  # tokens on the leaf's path before its response; at least node 0's
    columns: dict[str, Array] = field(default_factory=dict)  # further values, declared in columns.py; written by set()
    rewards: dict[str, Array] = field(default_factory=dict)  # name -> [L] float32
    meta: dict[str, Any] = field(default_factory=dict)  # prompt id, task, ...
    pictures: tuple[Picture, ...] = ()  # whose rows are among the tokens, each once

    def __getattr__(self, name: str) -> Array:
        """The declared column ``name``; one that was not set reads as its fill and is read-only.

        Raises:
            AttributeError: there is no such column.
        """
        if name not in COLUMNS or "columns" not in self.__dict__:
            raise AttributeError(f"'TokenTree' object has no attribute or column '{name}'")
        return self.columns[name] if name in self.columns else self._filled(name)

    def _filled(self, name: str) -> Array:
        values = COLUMNS[name].filled(self._count(name))
        values.flags.writeable = False
        return values

    def set(self, name: str, values: npt.ArrayLike) -> None:
        """Give the column ``name`` its values: one for all, or one a token, node, leaf or response token of a leaf.

        A value of ``routes`` is an array ``[layers, k]``.

        Raises:
            ValueError: the column is not declared, or the number or a value of ``values`` does not fit.
        """
        self.columns[name] = find_column(name).array(values, self._count(name), "TokenTree.set")

    def _count(self, name: str) -> int:
        per = COLUMNS[name].per
        if per == "path":
            return int(self.response_length.sum())
        return {"token": self.num_tokens, "node": self.num_nodes, "leaf": self.num_leaves}[per]

    @property
    def names(self) -> Collection[str]:
        """The names of the columns that were set."""
        return self.columns.keys()

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def num_tokens(self) -> int:
        """Stored tokens, the prompt's included."""
        return len(self.token_id)

    @property
    def sampled_tokens(self) -> int:
        """Stored tokens that the policy sampled."""
        return int(np.count_nonzero(self.origin == Origin.SAMPLED))

    @property
    def num_leaves(self) -> int:
        return len(self.leaf_node)

    @property
    def prompt_length(self) -> int:
        return int(self.length[0])

    @property
    def logical_tokens(self) -> int:
        """Tokens of all root-to-leaf paths, the prompt counted once a leaf: the tokens of the flat batch."""
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
        return self.count_along(self.loss_mask)

    def count_along(self, mask: Array) -> Array:  # [T] bool -> [L] int64
        """Tokens of each response that ``mask`` marks."""
        change = np.zeros(self.num_tokens + 1, np.int64)
        change[:-1] = mask
        change -= np.bincount(self.subtree_end[mask], minlength=len(change))  # a token counts for the rows below it
        along = change.cumsum()
        return along[self.row_at(self.path_length - 1)] - along[self.row_at(self.leaf_prompt - 1)]

    @property
    def loss_tokens(self) -> int:
        """Tokens of all responses that are in the loss, counted once a leaf: the normaliser of ``token_mean``."""
        return int(self.loss_length.sum())

    @property
    def response_leaves(self) -> Array:
        """[T] leaves whose response a token is part of; 0 for a token that is prompt to all."""
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
        *,
        pictures: Seq[Picture] = (),
    ) -> TokenTree:
        """The tree of nodes given in any order that puts parents first.

        Args:
            parents: parent of each node; ``parents[0] == -1`` is the prompt, all others lie before their children.
            segments: tokens of each node. An empty one other than the prompt's is replaced by its parent.
            leaf_nodes: the node at which each leaf ends; the order given becomes the leaf index.
            statuses: how each leaf ended.
            pictures: whose rows are among the tokens.

        Raises:
            ValueError: the prompt is empty, no leaf is given, a parent does not precede its child, a leaf's node does
                not exist, a status is unknown, or a childless node is no leaf's.
        """
        check_nodes(parents, segments, leaf_nodes, statuses)
        names = dict.fromkeys(name for segment in segments if len(segment) for name in segment.columns)
        lengths = [len(s) for s in segments]
        columns = {name: COLUMNS[name].joined([s.columns.get(name) for s in segments], lengths) for name in names}
        tokens = Segment(np.concatenate([segment.token_ids for segment in segments]), columns)
        tree = of_runs(parents, lengths, tokens, leaf_nodes, checks.codes("statuses", statuses, LeafStatus))
        tree.pictures = distinct(pictures)
        return tree

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
        columns: Mapping[str, Seq[npt.ArrayLike]] | None = None,
        pictures: Seq[Picture] = (),
    ) -> TokenTree:
        """The tree of prompts and responses, shared prefixes merged.

        Response tokens merge only if token id, behaviour log-prob (bit for bit), policy version, loss mask and all
        further columns that must be equal agree; otherwise the paths split there. Prompt tokens need only the id, and
        merge with responses too: the turns of a conversation, each a prompt and a response, become one path. Responses
        may be empty, equal, or prefixes of one another.

        Args:
            prompt: token ids of the prompt of all responses, or of each one's. Several must begin with the same token;
                `forest` takes any.
            responses: token ids of each response; their order becomes the leaf index.
            advantages: one number a response, 0 where absent.
            behaviour_logprobs: per response, one number a token; NaN where absent.
            loss_masks: per response, True for the tokens to train on; all where absent. The others are observations.
            policy_version: one for all tokens, or per response one number or one a token.
            statuses: how each response ended; STOP where absent.
            columns: further columns by name, with an entry a response: of tokens and paths one number for all its
                tokens or one a token, of leaves one number.
            pictures: whose rows (`media.expand`) are among the tokens.

        Raises:
            ValueError: no response, an empty prompt, prompts that share no first token, per-response data whose
                lengths differ from the responses', or values that are not what they should be: ids and versions
                integers of int32, advantages and log-probs finite, known statuses.
        """
        merged = merge(
            prompt, responses, advantages, behaviour_logprobs, loss_masks, policy_version, statuses, columns or {}
        )
        tree = in_order(*merged.nodes)
        for name, values in merged.summed.items():
            sums = np.zeros(tree.num_tokens, np.float64)
            np.add.at(sums, tree.path_tokens, values)
            tree.set(name, sums)
        tree.pictures = distinct(pictures)
        return tree

    @staticmethod
    def forest(
        prompts: Seq[Seq[int]],
        responses: Seq[Seq[int]],
        *,
        columns: Mapping[str, Seq[npt.ArrayLike]] | None = None,
        pictures: Seq[Picture] = (),
        **per_response: Any,
    ) -> tuple[list[TokenTree], list[Array]]:
        """Trees of samples of any prompts, one for each first token, and the indices ``[L]`` of each tree's samples.

        ``columns`` and ``per_response`` are keyword arguments of :meth:`from_sequences`, each with an entry a response.

        Raises:
            ValueError: as :meth:`from_sequences`.
        """
        count = checks.count("responses", responses)
        for name, values in {"prompts": prompts, **per_response, **(columns or {})}.items():
            check_count(name, values, count)
        members: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            ids = checks.token_ids(f"prompts[{i}]", prompt)
            members.setdefault(int(ids[0]) if len(ids) else -1, []).append(i)
        trees = [
            TokenTree.from_sequences(
                [prompts[i] for i in indices],
                [responses[i] for i in indices],
                columns={name: [values[i] for i in indices] for name, values in (columns or {}).items()},
                pictures=pictures,
                **{name: [values[i] for i in indices] for name, values in per_response.items()},
            )
            for indices in members.values()
        ]
        return trees, [np.array(indices) for indices in members.values()]

    def without_leaves(self, drop: Array) -> TokenTree | None:  # [L] bool
        """A copy without the leaves marked in ``drop`` and the tokens only they used; None when no leaf is left."""
        keep_leaf = ~np.asarray(drop, bool)
        if not keep_leaf.any():
            return None
        below = np.concatenate([[0], np.cumsum(keep_leaf[self.leaf_order])])
        keep_node = below[self.last_leaf + 1] > below[self.first_leaf]
        keep_node[0] = True
        renumber = np.cumsum(keep_node) - 1
        parent = np.where(self.parent[keep_node] < 0, -1, renumber[self.parent[keep_node]]).astype(np.int32)
        keep = {
            "token": np.repeat(keep_node, self.length),
            "node": keep_node,
            "leaf": keep_leaf,
            "path": np.repeat(keep_leaf, self.response_length),
        }
        leaf_node = renumber[self.leaf_node[keep_leaf]].astype(np.int32)
        return self._part(keep, parent, self.length[keep_node], leaf_node)

    def chain(self, leaf: int) -> TokenTree:
        """The path to ``leaf`` alone; its prompt is one node, and its response has the nodes of the path."""
        rows, prompt = self.path_rows(leaf), int(self.leaf_prompt[leaf])
        node = np.repeat(np.arange(self.num_nodes), self.length)[rows]
        cuts = prompt + 1 + np.flatnonzero(np.diff(node[prompt:]))
        bounds = np.unique([0, prompt, *cuts, len(rows)])
        length = np.diff(bounds)
        first = np.cumsum(self.response_length) - self.response_length
        keep = {
            "token": rows,
            "node": node[bounds[:-1]],
            "leaf": np.array([leaf]),
            "path": np.arange(first[leaf], first[leaf] + self.response_length[leaf]),
        }
        return self._part(keep, np.arange(len(length)) - 1, length, np.array([len(length) - 1]))

    def _part(self, keep: dict[str, Array], parent: Array, length: Array, leaf_node: Array) -> TokenTree:
        """The tree of some nodes and leaves; ``keep`` selects the values of a token, node, leaf and path."""
        tree = in_order(
            parent,
            length,
            self.token_id[keep["token"]],
            leaf_node,
            self.leaf_prompt[keep["leaf"]],
            {name: values[keep[COLUMNS[name].per]] for name, values in self.columns.items()},
        )
        tree.rewards = {name: values[keep["leaf"]] for name, values in self.rewards.items()}
        tree.meta, tree.pictures = dict(self.meta), self.pictures
        return tree

    def reroot(self, prompt: Seq[int]) -> TokenTree:
        """A copy in which ``prompt`` takes the place of node 0: the same responses after another prompt.

        Positions follow from the new prompt. All values of the responses stay, the behaviour log-probs too, which are
        those under the prompt that was sampled under.

        Raises:
            ValueError: the prompt is empty or holds no token ids, or pictures are among the tree's tokens.
        """
        ids = checks.token_ids("prompt", prompt)
        if not len(ids):
            raise ValueError("A tree needs a prompt of at least one token to be put after it; it is empty.")
        if self.pictures:
            raise ValueError("A tree with pictures keeps its prompt, which holds their rows.")
        length = self.length.copy()
        length[0] = len(ids)
        columns = {}
        for name, values in self.columns.items():
            column = COLUMNS[name]
            if column.per == "token":
                values = np.concatenate([column.filled(len(ids), values), values[self.prompt_length :]])
            columns[name] = values
        tree = in_order(
            self.parent,
            length,
            np.concatenate([ids, self.token_id[self.prompt_length :]]),
            self.leaf_node,
            self.leaf_prompt + (len(ids) - self.prompt_length),
            columns,
        )
        tree.rewards = {name: values.copy() for name, values in self.rewards.items()}
        tree.meta = dict(self.meta)
        return tree

    def of_episodes(self, main: Array) -> TokenTree | None:  # [E]
        """The tree of the episodes that leaves ``main`` stand for (`episodes`), where it was made before."""
        return None

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

    @property
    def all_path_rows(self) -> Array:  # int64
        """Rows of the tokens from the root to each leaf, leaf after leaf."""
        levels = [self.leaf_node]
        while ((above := np.where(levels[-1] >= 0, self.parent[levels[-1]], -1)) >= 0).any():
            levels.append(above)
        nodes = np.stack(levels[::-1], axis=1)  # [L, depth], -1 above the root
        nodes = nodes[nodes >= 0]
        length = self.length[nodes].astype(np.int64)
        end = np.cumsum(length)
        return np.repeat(self.start[nodes] - end + length, length) + np.arange(end[-1])

    @property
    def path_tokens(self) -> Array:  # [P] int64
        """Rows of every leaf's response tokens, leaf after leaf: the tokens of the values of a ``path`` column."""
        rows = self.all_path_rows
        return rows[self.position[rows] >= np.repeat(self.leaf_prompt, self.path_length)]

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


def of_runs(
    parents: Seq[int],
    lengths: Seq[int],
    tokens: Segment,
    leaf_nodes: Seq[int],
    status: Array,  # [L] int8
    leaf_prompt: Array | None = None,  # [L]; None: node 0's length
) -> TokenTree:
    """Make a tree like :meth:`TokenTree.from_nodes`, unchecked, from the joined tokens of nodes of ``lengths``."""
    parent, length, leaf_node = without_empty(parents, lengths, leaf_nodes)
    prompts = np.full(len(leaf_node), length[0]) if leaf_prompt is None else leaf_prompt
    return in_order(parent, length, tokens.token_ids, leaf_node, prompts, {**tokens.columns, "status": status})


def in_order(
    parent: Array, length: Array, token_id: Array, leaf_node: Array, leaf_prompt: Array, columns: dict[str, Array]
) -> TokenTree:
    """The tree of nodes given in any order that puts parents first, with their tokens concatenated."""
    structure = order_nodes(parent, length, leaf_node)
    ordered = structure.ordered({"advantage": np.zeros(len(leaf_node), np.float32)} | columns)
    return TokenTree(
        **{name: values for name, values in structure._asdict().items() if not name.endswith("_source")},
        token_id=token_id[structure.row_source],
        leaf_prompt=np.asarray(leaf_prompt, np.int32),
        columns={name: np.array(values) for name, values in ordered.items()},
    )
