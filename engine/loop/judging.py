"""Verdicts on groups, asked for as soon as all responses of one are there, and what they make of its tree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..data.concat import side_by_side
from ..data.segment import LeafStatus, Origin, Segment
from ..data.tree import TokenTree
from ..errors import RunError
from ..rewards import RewardItem, RewardResult, Rewards
from ..rewards.verdicts import put_rewards
from .buffer import Group, Responses
from .failures import unsampled
from .sources import Prompt


def no_trace(track: str, name: str, begin: float, end: float) -> None:
    """Discard the event."""


TraceCall = Callable[[str, str, float, float], object]
"""Records that ``(track, name)`` went on from ``begin`` to ``end``, seconds of `time.perf_counter`."""


AT_ONCE = 2
"""Calls of the pool at the same time, each with all groups that had finished by then."""


class Judging:
    """Asks the pool's workers, and waits for them in threads of its own.

    Args:
        notify: called, in any thread, when the verdicts on a group have come.
        on_failure: what becomes of a response whose verifier failed: drop, zero or raise.
        trace: records when the verifier worked.
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
        self._waiting: list[tuple[Group, list[RewardItem]]] = []
        self._asked: dict[Future[list[RewardResult]], list[tuple[Group, list[RewardItem]]]] = {}
        self._judged: list[Group] = []

    @contextmanager
    def running(self, rewards: Rewards) -> Iterator[None]:
        """While it may be asked; ``rewards`` is closed at the end, so that nobody waits for it."""
        self._rewards = rewards
        with ThreadPoolExecutor(AT_ONCE, "rolltree-judging") as self._threads:
            try:
                yield
            finally:
                self._threads.shutdown(wait=False, cancel_futures=True)
                rewards.close()

    @property
    def busy(self) -> bool:
        """Whether verdicts are outstanding or not taken."""
        return bool(self._waiting or self._asked or self._judged)

    def add(self, finished: Sequence[tuple[Group, TokenTree]]) -> None:
        """Trees that hold (further) responses of their groups: ask for the verdicts on them."""
        texts = decode(self.tokenizer, [tree for _, tree in finished])
        for (group, tree), some in zip(finished, texts, strict=True):
            tree.set("group", group.ticket)
            group.parts.append(Responses(tree, some, unsampled(tree)))
        self.ask([group for group, _ in finished])

    def ask(self, groups: Sequence[Group]) -> None:
        """Ask for the verdicts on each group's newest responses; those that could not be sampled are not judged."""
        for group in groups:
            last = group.parts[-1]
            items = [item(group.prompt, last, leaf) for leaf in range(len(last.texts)) if leaf not in last.unsampled]
            self._waiting.append((group, items))
        self._send()

    def _send(self) -> None:
        """What waits goes to the pool together: a call has its price, and takes time from the sampling."""
        if not self._waiting or len(self._asked) >= AT_ONCE or self._rewards.in_turn:
            return
        future = self._threads.submit(self._score, [item for _, items in self._waiting for item in items])
        self._asked[future], self._waiting = self._waiting, []
        future.add_done_callback(lambda _: self._notify())

    def _score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        begin = time.perf_counter()
        try:
            return self._rewards.score(items)
        finally:
            self._trace("verifier", "judge", begin, time.perf_counter())

    def wait(self, seconds: float) -> None:
        """For any verdict."""
        wait(self._asked, seconds, FIRST_COMPLETED)

    def take(self, *, all_or_none: bool) -> list[Group]:
        """Groups whose verdicts have come, oldest first, with rewards on their trees.

        Raises:
            RunError: a verifier failed, and `reward.on_failure` says that a run ends then.
        """
        for future in [future for future in self._asked if future.done()]:
            self._share(self._asked.pop(future), future.result())
        self._send()
        if self._rewards.in_turn and self._waiting:  # the caller is who steps the engine
            waiting, self._waiting = self._waiting, []
            self._share(waiting, self._score([item for _, items in waiting for item in items]))
        if all_or_none and (self._waiting or self._asked):
            return []
        groups, self._judged = sorted(self._judged, key=lambda group: group.ticket), []
        for group in groups:
            self._put_rewards(group)
        return groups

    def _share(self, asked: Sequence[tuple[Group, list[RewardItem]]], verdicts: Sequence[RewardResult]) -> None:
        left = iter(verdicts)
        for group, items in asked:
            group.parts[-1].verdicts = list(islice(left, len(items)))
            self._judged.append(group)

    def given(self, group: Group, responses: Sequence[str], rewards: Sequence[float]) -> Responses:
        """Responses that nobody sampled, with their rewards."""
        ids = [list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in responses]
        tree = TokenTree.from_nodes(
            [-1] + [0] * len(ids),
            [Segment.prompt(group.prompt.token_ids), *(Segment.make(some, origin=Origin.INJECTED) for some in ids)],
            list(range(1, len(ids) + 1)),
            [LeafStatus.STOP] * len(ids),
        )
        tree.set("group", group.ticket)
        tree.rewards["reward"] = np.array(rewards, np.float32)
        return Responses(tree, list(responses), {})

    def _put_rewards(self, group: Group) -> None:
        """Rewards and names on the newest tree; NaN where there is no verdict."""
        last, prompt, on_failure = group.parts[-1], group.prompt, self._on_failure
        broken = [verdict.reason for verdict in last.verdicts if verdict.reason is not None]
        if broken and on_failure == "raise":
            raise RunError(
                f"The verifier failed on a response to '{prompt.id}' ({broken[0]}); mend it, or set "
                "reward.on_failure to 'drop' or 'zero'."
            )
        tree, verdicts = last.tree, iter(last.verdicts)
        of_leaves = [None if leaf in last.unsampled else next(verdicts) for leaf in range(tree.num_leaves)]
        text_of = partial(self.tokenizer.decode, skip_special_tokens=True)
        put_rewards(tree, of_leaves, text_of, failed=0.0 if on_failure == "zero" else np.nan)
        tree.meta |= {"prompt_id": prompt.id, "task": prompt.task, "prompt_text": prompt.text}
        tree.meta["attempt"] = group.attempt


def decode(tokenizer: PreTrainedTokenizerBase, trees: Sequence[TokenTree]) -> list[list[str]]:
    """The text of each leaf's response, of each tree."""
    if not trees:
        return []
    all_of = side_by_side(trees)
    responses = np.split(all_of.token_id[all_of.path_tokens], np.cumsum(all_of.response_length)[:-1])
    texts = iter(tokenizer.batch_decode(responses, skip_special_tokens=True))
    return [list(islice(texts, tree.num_leaves)) for tree in trees]


def item(prompt: Prompt, responses: Responses, leaf: int) -> RewardItem:
    """What the verifier is given of a response."""
    given = responses.tree.meta.get("given_rewards", {}).get(leaf)
    return RewardItem(responses.texts[leaf], prompt.entry, prompt.problem, prompt.text, given)
