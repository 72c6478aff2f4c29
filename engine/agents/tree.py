"""The tree of a group of episodes: equal beginnings of their calls are stored once, each sampled token has one leaf.

A *chain* is a sequence of calls of an episode in which each prompt begins with all tokens, prompt and sampled, of the
call before. A chain is a leaf: its response begins with the first token that it sampled itself, and the tokens between
its calls are observations. When two calls continue the same one, the first that arrived continues its chain, and the
others begin chains: their prompts are context, in no loss of theirs. So each sampled token is in one response.

Prompts of chains are stored once where their ids are equal, whatever recorded them. What an episode samples or observes
itself is stored for it alone, as other programs' branches are; `pack` computes equal prefixes once in any case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..data.columns import COLUMNS, Array
from ..data.media import Picture, distinct
from ..data.segment import LeafStatus, Origin, Segment
from ..data.tree import TokenTree, of_runs
from .records import EpisodeRecord, Failure, SampledCall

AGENT = "agent"
"""Name of the role of calls that name none, in groups with calls that do."""
OTHER_START = Failure(
    "template",
    "a call's prompt begins with another token than the first call of its group, so they are no one tree; use a chat "
    "template that begins every conversation with the same token",
)
"""Failure of an episode whose calls have no place in the tree of its group."""


@dataclass(eq=False)
class _Run:
    """Tokens without a branch, and the runs that follow them."""

    parent: _Run | None
    tokens: Segment
    episode: int
    following: list[_Run] = field(default_factory=list)

    def then(self, tokens: Segment, episode: int) -> _Run:
        """Return a new run after this one."""
        run = _Run(self, tokens, episode)
        self.following.append(run)
        return run

    def cut(self, count: int) -> _Run:
        """Move the first ``count`` tokens to a run of their own, in this one's place, and return that."""
        if count == len(self.tokens):
            return self
        assert self.parent is not None
        upper = _Run(self.parent, _part(self.tokens, 0, count), self.episode, [self])
        self.parent.following[self.parent.following.index(self)] = upper
        self.parent, self.tokens = upper, _part(self.tokens, count, len(self.tokens))
        return upper


@dataclass(eq=False)
class _Chain:
    """A chain, or a call by itself."""

    tip: _Run
    prompt: int
    """Tokens before the first that it sampled."""
    ids: Array
    """[n] int32, all tokens to its end."""
    last: SampledCall
    status: LeafStatus


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the group's tree."""

    tip: _Run
    """The run that it ends with."""
    prompt: int
    """Tokens before its response."""
    episode: int
    status: LeafStatus
    answer: bool
    """It ends with the episode's answer."""


def episode_tree(
    prompt: Sequence[int],
    episodes: Sequence[EpisodeRecord],
    *,
    per_call: bool = False,
    pictures: Sequence[Picture] = (),
) -> TokenTree:
    """Return the tree of a group: a leaf for each chain of each episode, or for each call.

    An example of one episode, whose calls read O (observations) and sample A (actions)::

        call  reads     samples
        1     O1        A1
        2     O1 A1 O2  A2       it continues the chain of call 1
        3     O3        A3       it does not begin with O1: a chain of its own
        4     O1 A1 O4  A4       call 2 has continued call 1: another chain, in which A1 is context

    The tree has three leaves, here with ``|`` between prompt and response: ``O1 | A1 O2 A2``, ``O3 | A3`` and
    ``O1 A1 O4 | A4``. It holds O1 and A1 once, and each A is in one response.

    The leaves follow episode after episode, in the order in which their chains began. Columns: ``episode``; ``answer``,
    true for the leaf that ends with the last answer of the agent itself; ``call``, the number from 1 of the call that
    sampled or first read a token; ``role`` where calls have roles, which ``meta["roles"]`` names, the agent's own
    (`AGENT`) first. ``meta["given_rewards"]`` and ``meta["given_named"]`` have the agents' rewards by leaf,
    ``meta["errors"]`` the reasons of failures, ``meta["agent"]`` the numbers of calls in the tree and of their tokens,
    the agents' own seconds and the numbers of failures by cause, ``meta["timeline"]`` the times of the episodes' calls.
    An episode without a call is a leaf at the prompt. Where an episode failed, all its leaves have.

    Args:
        prompt: token ids of the group's prompt, the tree of a group without any call.
        episodes: in the order of their numbers.
        per_call: each call is a leaf.
        pictures: whose rows are among ``prompt``.

    Raises:
        ValueError: there is no episode, a call's tree has several leaves, or an extra reward is called "reward".
    """
    if not episodes:
        raise ValueError("A tree needs at least one episode; none was given.")
    if any("reward" in record.extras for record in episodes):
        raise ValueError("An episode's reward is its `reward`; give further ones, of other names, in `extras`.")
    calls, failures = _fitting(episodes)
    top = _Run(None, Segment.make([]), -1)
    roles = {AGENT: 0}
    chains = [_chains(top, of_episode, number, per_call, roles) for number, of_episode in enumerate(calls)]
    every = [call for of_episode in calls for call in of_episode]
    if not every:
        top.then(Segment.prompt(prompt), -1)
    (root,) = top.following  # all calls begin with the same token
    root.parent = None
    leaves: list[_Leaf] = []
    for number, (record, failure) in enumerate(zip(episodes, failures, strict=True)):
        leaves += _leaves(root, chains[number], number, record.status if failure is None else LeafStatus.FAILED)
    tree = _tree_of(root, leaves)
    tree.pictures = tuple(distinct([*pictures, *(picture for call in every for picture in call.tree.pictures)]))
    tree.meta |= _by_leaf(tree, episodes, failures)
    tree.meta["agent"] = {
        "calls": len(every),
        "call_tokens": sum(call.tree.num_tokens for call in every),
        "tool_s": sum(record.own_seconds for record in episodes),
        **Counter(f"failed_{failure.cause}" for failure in failures if failure is not None),
    }
    tree.meta["timeline"] = [_timeline(record) for record in episodes]
    if len(roles) > 1:
        tree.meta["roles"] = list(roles)
    return tree


def _fitting(episodes: Sequence[EpisodeRecord]) -> tuple[list[list[SampledCall]], list[Failure | None]]:
    """Return the calls of each episode, in order, and its failure. An episode with a call that begins with another
    token than the first of the group has failed, and has no calls."""
    calls = [sorted(record.calls, key=lambda call: call.number) for record in episodes]
    start = next((call.tree.token_id[0] for of_episode in calls for call in of_episode), None)
    failures = [record.failure for record in episodes]
    for number, of_episode in enumerate(calls):
        if any(call.tree.token_id[0] != start for call in of_episode):
            failures[number] = failures[number] or OTHER_START
            calls[number] = []
    return calls, failures


def _leaves(root: _Run, chains: Sequence[_Chain], episode: int, status: LeafStatus) -> list[_Leaf]:
    """Return the leaves of an episode that ended with ``status``; one at the prompt if it has no chain."""
    if not chains:
        return [_Leaf(root, len(root.tokens), episode, status, answer=True)]
    answering = _answering(chains)
    failed = status == LeafStatus.FAILED
    return [
        _Leaf(
            chain.tip,
            chain.prompt,
            episode,
            status if failed or chain is answering else chain.status,
            answer=chain is answering,
        )
        for chain in chains
    ]


def _tree_of(root: _Run, leaves: Sequence[_Leaf]) -> TokenTree:
    """Return the tree of the runs below ``root``, with the columns of ``leaves``."""
    runs = list(_depth_first(root))
    place = {id(run): i for i, run in enumerate(runs)}
    tree = of_runs(
        [-1 if run.parent is None else place[id(run.parent)] for run in runs],
        [len(run.tokens) for run in runs],
        _joined([run.tokens for run in runs]),
        [place[id(leaf.tip)] for leaf in leaves],
        np.array([leaf.status for leaf in leaves], np.int8),
        np.array([leaf.prompt for leaf in leaves], np.int32),
    )
    tree.set("episode", [leaf.episode for leaf in leaves])
    tree.set("answer", [leaf.answer for leaf in leaves])
    return tree


def _timeline(record: EpisodeRecord) -> dict[str, object]:
    """Return the seconds of an episode, and of each of its calls, with its number of tokens."""
    calls = [
        {
            "number": order,
            "role": call.role,
            **call.times._asdict(),
            "read": int(call.tree.leaf_prompt[0]),
            "sampled": call.tree.num_tokens - int(call.tree.leaf_prompt[0]),
        }
        for order, call in enumerate(sorted(record.calls, key=lambda call: call.number), start=1)
        if call.times is not None
    ]
    return {"seconds": record.seconds, "calls": calls}


def _answering(chains: Sequence[_Chain]) -> _Chain:
    """Return the chain that ends with the agent's last answer; with the last of all where it has none of its own."""
    of_agent = [chain for chain in chains if chain.last.role in ("", AGENT)]
    return max(of_agent or chains, key=lambda chain: chain.last.number)


def _chains(
    top: _Run, calls: Sequence[SampledCall], episode: int, per_call: bool, roles: dict[str, int]
) -> list[_Chain]:
    """Add the calls of an episode below ``top`` and return their chains; if ``per_call``, each call by itself."""
    chains: list[_Chain] = []
    alone: list[_Chain] = []
    for order, call in enumerate(calls, start=1):
        if call.tree.num_leaves != 1:
            raise ValueError(f"A call's tree has one leaf, got {call.tree.num_leaves}; submit calls with n = 1.")
        ids, length = call.tree.token_id, int(call.tree.leaf_prompt[0])
        status = LeafStatus(int(call.tree.status[0]))
        read, sampled = _segments(call.tree, order, roles.setdefault(call.role or AGENT, len(roles)))
        chain = _continued(chains, ids[:length])
        if chain is None:
            tip = _place(top, read, episode)
            chain = _Chain(tip, length, ids, call, status)
            chains.append(chain)
        elif chain.prompt == len(chain.ids):  # it has sampled nothing yet
            tip = _place(top, read, episode)
            chain.prompt = length
        else:
            tip = chain.tip.then(_observation(_part(read, len(chain.ids), length), order), episode)
        chain.tip = tip.then(sampled, episode) if len(sampled) else tip
        chain.ids, chain.last, chain.status = ids, call, status
        if per_call:
            alone.append(_Chain(chain.tip, length, ids, call, status))
    return alone if per_call else chains


def _continued(chains: Sequence[_Chain], prompt: Array) -> _Chain | None:
    """Return the longest chain that ``prompt`` begins with, the first of several."""
    fitting = [
        chain
        for chain in chains
        if len(chain.ids) <= len(prompt) and np.array_equal(chain.ids, prompt[: len(chain.ids)])
    ]
    return max(fitting, key=lambda chain: len(chain.ids), default=None)


def _place(top: _Run, read: Segment, episode: int) -> _Run:
    """Return the run at whose end the prompt ``read`` ends: what is there already is shared, the rest a new run."""
    tip, shared = _shared(top, read.token_ids, episode)
    return tip if shared == len(read) else tip.then(_part(read, shared, len(read)), episode)


def _shared(top: _Run, ids: Array, episode: int) -> tuple[_Run, int]:
    """Return the run at whose end the longest known beginning of ``ids`` ends, and its length; the episode's own first
    of several."""
    best, longest, partly = top, 0, 0
    waiting = [(top, 0)]
    while waiting:
        run, begin = waiting.pop()
        for child in sorted(run.following, key=lambda child: child.episode == episode):
            there = child.tokens.token_ids
            count = min(len(there), len(ids) - begin)
            differ = np.flatnonzero(there[:count] != ids[begin : begin + count])
            equal = int(differ[0]) if len(differ) else count
            if equal and (begin + equal > longest or (begin + equal == longest and child.episode == episode)):
                best, longest, partly = child, begin + equal, equal
            if equal == len(there):
                waiting.append((child, begin + equal))
    return (best if best is top else best.cut(partly)), longest


def _segments(tree: TokenTree, call: int, role: int) -> tuple[Segment, Segment]:
    """Return the tokens that a call read, and those that it sampled, with their columns."""
    rows, prompt = tree.path_rows(0), int(tree.leaf_prompt[0])
    columns = {name: values[rows] for name, values in tree.columns.items() if COLUMNS[name].per == "token"}
    columns["call"] = np.full(len(rows), call, np.int32)
    columns["call"][:prompt] = 0
    if role:
        columns["role"] = np.where(columns["origin"] == Origin.SAMPLED, np.int8(role), np.int8(0))
    whole = Segment(tree.token_id[rows], columns)
    return _part(whole, 0, prompt), _part(whole, prompt, len(rows))


def _observation(tokens: Segment, call: int) -> Segment:
    """Return what a call read that no earlier call of its chain had."""
    count = len(tokens)
    origin, number = np.full(count, Origin.OBSERVATION, np.int8), np.full(count, call, np.int32)
    return Segment(tokens.token_ids, {**tokens.columns, "origin": origin, "call": number})


def _part(tokens: Segment, begin: int, end: int) -> Segment:
    """Return some of the tokens."""
    return Segment(tokens.token_ids[begin:end], {name: values[begin:end] for name, values in tokens.columns.items()})


def _joined(parts: Sequence[Segment]) -> Segment:
    """Return the tokens of all ``parts``, one after the other."""
    lengths = [len(part) for part in parts]
    names = dict.fromkeys(name for part in parts if len(part) for name in part.columns)
    columns = {name: COLUMNS[name].joined([part.columns.get(name) for part in parts], lengths) for name in names}
    return Segment(np.concatenate([part.token_ids for part in parts]), columns)


def _depth_first(root: _Run) -> Iterator[_Run]:
    """Yield the runs, parents first and siblings in order."""
    waiting = [root]
    while waiting:
        run = waiting.pop()
        yield run
        waiting += reversed(run.following)


def _by_leaf(
    tree: TokenTree, episodes: Sequence[EpisodeRecord], failures: Sequence[Failure | None]
) -> dict[str, dict[int, object]]:
    """Return the metadata of rewards and failures, by leaf; what no leaf has is left out."""
    by_leaf: dict[str, dict[int, object]] = {"given_rewards": {}, "given_named": {}, "errors": {}}
    for leaf, number in enumerate(tree.episode.tolist()):
        record, failure = episodes[number], failures[number]
        if record.reward is not None:
            by_leaf["given_rewards"][leaf] = record.reward
        if record.extras:
            by_leaf["given_named"][leaf] = dict(record.extras)
        if failure is not None:
            by_leaf["errors"][leaf] = failure.why
    return {name: values for name, values in by_leaf.items() if values}
