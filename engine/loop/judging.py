"""Verdicts on groups: requested as soon as all responses of a group are sampled, then written to its tree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..chat.ends import turn_end
from ..chat.marks import response_text
from ..data.columns import Array
from ..data.concat import side_by_side
from ..data.episodes import Episodes
from ..data.policies import role_texts
from ..data.segment import LeafStatus, Origin, Segment
from ..data.tree import TokenTree
from ..errors import RunError
from ..prompts.group import Group, Responses
from ..prompts.prompts import Prompt, pictures_of
from ..record.failures import unsampled
from ..rewards import RewardItem, RewardResult, Rewards
from ..rewards.verdicts import put_rewards


def no_trace(track: str, name: str, begin: float, end: float) -> None:
    """Discard the event: the default trace callback."""


TraceCall = Callable[[str, str, float, float], object]
"""Records an event ``(track, name, begin, end)`` with times in seconds of `time.perf_counter`."""


class Judging:
    """Requests verdicts from the pool's workers and waits for them in threads of its own.

    Args:
        notify: called, in any thread, when the verdicts on a group have arrived.
        on_failure: treatment of a response whose verifier failed: drop, zero or raise.
        trace: records the times at which the verifier worked.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        notify: Callable[[], None],
        *,
        on_failure: str,
        trace: TraceCall = no_trace,
    ) -> None:
        self.tokenizer, self._notify, self._on_failure, self._trace = tokenizer, notify, on_failure, trace
        self._text_of = partial(response_text, tokenizer)
        self._waiting: list[tuple[Group, list[RewardItem]]] = []
        self._sent: dict[Future[list[RewardResult]], list[tuple[Group, list[RewardItem]]]] = {}
        self._judged: list[Group] = []

    @contextmanager
    def running(self, rewards: Rewards) -> Iterator[None]:
        """Allow requests within the block; at its end ``rewards`` is closed, so that no thread waits for it."""
        self._rewards = rewards
        with ThreadPoolExecutor(rewards.at_once, "rolltree-judging") as self._threads:
            try:
                yield
            finally:
                self._threads.shutdown(wait=False, cancel_futures=True)
                rewards.close()

    @property
    def in_turn(self) -> bool:
        """True if verdicts come from the rollout engine, between two of its steps."""
        return self._rewards.in_turn

    @property
    def busy(self) -> bool:
        """True if verdicts are outstanding or not taken."""
        return bool(self._waiting or self._sent or self._judged)

    def clear(self) -> None:
        """Discard all requests; verdicts that arrive later belong to no group."""
        for future in self._sent:
            future.cancel()
        self._waiting, self._sent, self._judged = [], {}, []

    def add(self, finished: Sequence[tuple[Group, TokenTree, list[str] | None]]) -> None:
        """Add trees with (further) responses of their groups, and request the verdicts on them.

        Args:
            finished: each with the responses' texts, or None where the sampler has not decoded them.
        """
        decoded = iter(decode(self.tokenizer, [tree for _, tree, texts in finished if texts is None]))
        for group, tree, texts in finished:
            tree.set("group", group.ticket)
            group.parts.append(Responses(tree, next(decoded) if texts is None else texts, unsampled(tree)))
        self.ask([group for group, _, _ in finished])

    def ask(self, groups: Sequence[Group]) -> None:
        """Request verdicts on each group's newest responses, or on all of them where they are compared; those that
        could not be sampled are not judged."""
        for group in groups:
            items = [
                replace(item(group.asked, part, leaf, self._text_of), group=group.ticket)
                for part in self._asked_parts(group)
                for leaf in part.judged
            ]
            self._waiting.append((group, items))
        self._send()

    def _asked_parts(self, group: Group) -> list[Responses]:
        return group.parts if self._rewards.by_group else group.parts[-1:]

    def _send(self) -> None:
        """Send all waiting responses to the verifiers in one call, because each call costs time that sampling loses."""
        if not self._waiting or len(self._sent) >= self._rewards.at_once or self._rewards.in_turn:
            return
        future = self._threads.submit(self._score, [item for _, items in self._waiting for item in items])
        self._sent[future], self._waiting = self._waiting, []
        future.add_done_callback(lambda _: self._notify())

    def _score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        begin = time.perf_counter()
        try:
            return self._rewards.score(items)
        finally:
            self._trace("verifier", "judge", begin, time.perf_counter())

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` for any verdict."""
        wait(self._sent, seconds, FIRST_COMPLETED)

    def take(self, due: Sequence[Group] | None = None) -> list[Group]:
        """Return groups whose verdicts have arrived, oldest first, with rewards on their trees: all, or those that are
        ``due`` and none of them while a verdict on one is outstanding.

        Raises:
            RunError: a verifier failed and `reward.on_failure` is "raise".
        """
        for future in [future for future in self._sent if future.done()]:
            self._share(self._sent.pop(future), future.result())
        self._send()
        if self._rewards.in_turn and self._waiting and due != []:  # the calling thread also steps the engine
            waiting, self._waiting = self._waiting, []
            self._share(waiting, self._score([item for _, items in waiting for item in items]))
        taken = set(self._judged if due is None else due)
        if not taken <= set(self._judged):
            return []
        self._judged = [group for group in self._judged if group not in taken]
        groups = sorted(taken, key=lambda group: group.ticket)
        for group in groups:
            self._put_rewards(group)
        return groups

    def _share(self, sent: Sequence[tuple[Group, list[RewardItem]]], verdicts: Sequence[RewardResult]) -> None:
        left = iter(verdicts)
        for group, _ in sent:
            for part in self._asked_parts(group):
                part.verdicts = list(islice(left, len(part.judged)))
            self._judged.append(group)

    def given(self, group: Group, responses: Sequence[str], rewards: Sequence[float]) -> Responses:
        """Return responses that were given and not sampled, with their rewards; each ends with a turn's end token."""
        last = turn_end(self.tokenizer, chat=bool(group.prompt.messages))
        end = [] if last is None else [last]
        ids = [[*self.tokenizer(text, add_special_tokens=False)["input_ids"], *end] for text in responses]
        tree = TokenTree.from_nodes(
            [-1] + [0] * len(ids),
            [Segment.prompt(group.prompt.token_ids), *(Segment.make(tokens, origin=Origin.INJECTED) for tokens in ids)],
            list(range(1, len(ids) + 1)),
            [LeafStatus.STOP] * len(ids),
            pictures=pictures_of(group.prompt, self.tokenizer),
        )
        tree.set("group", group.ticket)
        tree.rewards["reward"] = np.array(rewards, np.float32)
        return Responses(tree, list(responses), {})

    def _put_rewards(self, group: Group) -> None:
        """Write rewards to the trees whose responses were judged, and metadata to the newest; NaN where there is no
        verdict."""
        last, prompt, on_failure = group.parts[-1], group.prompt, self._on_failure
        parts = self._asked_parts(group)
        broken = [verdict.reason for part in parts for verdict in part.verdicts if verdict.reason is not None]
        failed = group.unsampled if "episode" in last.tree.columns else []
        if failed and on_failure == "raise":
            raise RunError(
                f"An agent failed on '{prompt.id}' ({failed[0]}); repair it, or set reward.on_failure to 'drop'."
            )
        if broken and on_failure == "raise":
            raise RunError(
                f"The verifier failed on a response to '{prompt.id}' ({broken[0]}); repair it, or set "
                "reward.on_failure to 'drop' or 'zero'."
            )
        for part in parts:
            put_rewards(part.tree, part.of_leaves, self._text_of, failed=0.0 if on_failure == "zero" else np.nan)
        tree = last.tree
        tree.meta |= {"prompt_id": prompt.id, "task": prompt.task, "prompt_text": prompt.text}
        tree.meta["attempt"] = group.attempt
        if group.other is not None:
            last.tree = tree.reroot(prompt.token_ids)
            last.tree.set("other_prompt", group.attempt)


def decode(tokenizer: PreTrainedTokenizerBase, trees: Sequence[TokenTree]) -> list[list[str]]:
    """Return for each tree the text of each leaf's response."""
    if not trees:
        return []
    all_of = side_by_side(trees)
    responses = np.split(all_of.token_id[all_of.path_tokens], np.cumsum(all_of.response_length)[:-1])
    texts = (response_text(tokenizer, response) for response in responses)
    return [list(islice(texts, tree.num_leaves)) for tree in trees]


def item(prompt: Prompt, responses: Responses, leaf: int, text_of: Callable[[Array], str] | None = None) -> RewardItem:
    """Return the verifier's input for a response.

    Args:
        text_of: returns the text of token ids, for the texts of roles; None: the response has one role.
    """
    tree, roles = responses.tree, None
    assigned = tree.meta.get("given_rewards", {}).get(leaf)
    if text_of is not None and "roles" in tree.meta:
        whole = Episodes(tree)
        roles = role_texts(whole.tree, int(whole.place[leaf]), text_of)
    ended = bool(tree.status[leaf] == LeafStatus.STOP)
    return RewardItem(responses.texts[leaf], prompt.entry, prompt.problem, prompt.text, assigned, roles, ended=ended)
