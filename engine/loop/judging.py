"""Verdicts on groups: requested as soon as all responses of a group are sampled, then written to its tree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..chat.ends import turn_end
from ..chat.marks import response_text
from ..data.segment import LeafStatus, Origin, Segment
from ..data.tree import TokenTree
from ..errors import RunError
from ..fleet.workers import GoneError
from ..prompts.group import Group, Responses
from ..prompts.prompts import pictures_of
from ..record.failures import unsampled
from ..rewards import RewardItem, RewardResult, Rewards
from ..rewards.verdicts import put_rewards
from .items import decode, item


def no_trace(track: str, name: str, begin: float, end: float) -> None:
    """Discard the event: the default trace callback."""


TraceCall = Callable[[str, str, float, float], object]
"""Records an event ``(track, name, begin, end)`` with times in seconds of `time.perf_counter`."""


class _Request(NamedTuple):
    """The responses of a group that verdicts were requested on."""

    group: Group
    parts: list[Responses]
    items: list[RewardItem]

    @property
    def open(self) -> bool:
        """The group has not begun anew since."""
        return self.parts[-1] in self.group.parts


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
        self._waiting: list[_Request] = []
        self._sent: dict[Future[list[RewardResult]], list[_Request]] = {}
        self._judged: list[Group] = []
        self._gone: list[Group] = []

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
        return bool(self._waiting or self._sent or self._judged or self._gone)

    def clear(self) -> None:
        """Discard all requests; verdicts that arrive later belong to no group."""
        for future in self._sent:
            future.cancel()
        self._waiting, self._sent, self._judged, self._gone = [], {}, [], []

    def add(self, finished: Sequence[tuple[Group, TokenTree, Sequence[str] | None]]) -> None:
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
            parts = list(self._asked_parts(group))
            try:
                items = [
                    item(group.asked, part, leaf, self._text_of, self._rewards, group.ticket)
                    for part in parts
                    for leaf in part.judged
                ]
            except GoneError:
                self._gone.append(group)
            else:
                self._waiting.append(_Request(group, parts, items))
        self._send()

    def _asked_parts(self, group: Group) -> list[Responses]:
        return group.parts if self._rewards.by_group else group.parts[-1:]

    def _send(self) -> None:
        """Send all waiting responses to the verifiers in one call, because each call costs time that sampling loses."""
        if not self._waiting or len(self._sent) >= self._rewards.at_once or self._rewards.in_turn:
            return
        future = self._threads.submit(self._score, [item for request in self._waiting for item in request.items])
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
        """Return groups whose verdicts have arrived, oldest first: all, or those that are ``due`` and none of them
        while a verdict on one is outstanding. `put_rewards` writes these to their trees."""
        for future in [future for future in self._sent if future.done()]:
            sent = self._sent.pop(future)
            if isinstance(future.exception(), GoneError):
                self._ask_again(sent)
            else:
                self._share(sent, future.result())
        self._send()
        if self._rewards.in_turn and self._waiting and due != []:  # the calling thread also steps the engine
            waiting, self._waiting = self._waiting, []
            self._share(waiting, self._score([item for request in waiting for item in request.items]))
        taken = set(self._judged if due is None else due)
        if not taken <= set(self._judged):
            return []
        self._judged = [group for group in self._judged if group not in taken]
        return sorted(taken, key=lambda group: group.ticket)

    def _share(self, sent: Sequence[_Request], verdicts: Sequence[RewardResult]) -> None:
        left = iter(verdicts)
        for request in sent:
            for part in request.parts:
                part.verdicts = list(islice(left, len(part.judged)))
            if request.open:
                self._judged.append(request.group)

    def _ask_again(self, sent: Sequence[_Request]) -> None:
        """Request verdicts on the groups again whose texts are still where they were stored."""
        for request in filter(lambda request: request.open, sent):
            try:
                again = [item.fetched() for item in request.items]
            except GoneError:
                self._gone.append(request.group)
            else:
                self._waiting.append(request._replace(items=again))

    def take_gone(self) -> list[Group]:
        """Return the groups whose responses are no more where they were stored; they have no verdicts."""
        gone, self._gone = self._gone, []
        return gone

    def forget(self, group: Group) -> None:
        """Take out a group that begins anew; verdicts on its responses that arrive later belong to no group."""
        self._waiting = [request for request in self._waiting if request.group is not group]
        self._judged = [judged for judged in self._judged if judged is not group]

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

    def put_rewards(self, group: Group) -> None:
        """Write the rewards of a group of `take` to the trees whose responses were judged, and metadata to the newest;
        NaN where there is no verdict.

        Raises:
            RunError: a verifier failed and `reward.on_failure` is "raise".
        """
        last, prompt, on_failure = group.parts[-1], group.prompt, self._on_failure
        parts = self._asked_parts(group)
        broken = [verdict.reason for part in parts for verdict in part.verdicts if verdict.reason is not None]
        failed = group.unsampled if "episode" in last.tree.names else []
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
