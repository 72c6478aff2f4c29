"""The run's group callback: it is asked about every judged group, and its answers are followed here.

What an answer needs of the sampler, further responses or another prompt's, the controller does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import RunError, UserError
from ..methods.groups import Accept, Add, Drop, More, Retry
from ..tasks import Problem
from .buffer import Buffer, Group, Responses, State
from .parts import SamplingParts
from .prompts import Prompt

MOST_ATTEMPTS = 64
"""Most further requests for one group; one more drops it."""


class Callback:
    """Follows the answers of `loop.callback`; without one every judged group is ready.

    Args:
        parts: the callback, and what its answers may do.
        buffer: holds the groups.
        given: makes responses with rewards of texts that were given.
    """

    def __init__(
        self,
        parts: SamplingParts,
        buffer: Buffer,
        given: Callable[[Group, Sequence[str], Sequence[float]], Responses],
    ) -> None:
        self.parts, self.buffer, self._given = parts, buffer, given
        self._dropped_before = 0  # groups dropped before the step began

    def begin_step(self) -> None:
        """Count the groups that are dropped from now on."""
        self._dropped_before = self.buffer.dropped.total()

    def answer(self, group: Group) -> More | Retry | None:
        """Ask about a judged group; return the answer if the sampler must be asked for its responses.

        Raises:
            UserError: the callback failed, or gave an invalid answer.
            RunError: it dropped too many groups.
        """
        answer = None if self.parts.callback is None else self._ask(group)
        if isinstance(answer, More | Retry) and group.attempt >= MOST_ATTEMPTS:
            answer = Drop("too_many_attempts")
        match answer:
            case None | Accept(None):
                self.buffer.to(group, State.READY)
            case Accept(leaves) if leaves is not None:
                with self._mistakes_told():
                    self.buffer.keep(group, leaves, "replaced")
                self.buffer.to(group, State.READY)
            case Drop(reason):
                self.buffer.drop(group, reason)
                self._check_drops(reason)
            case More(n, text) if n > 0:
                if text is not None and not self.parts.trains_plain:
                    raise UserError(
                        f"loop.callback = '{self.parts.callback_name}' samples a group under two prompts; set "
                        'loop.train_context to "plain".'
                    )
                group.other = None if text is None else self._prompt(group, text)
                return answer
            case Retry(text, entry):
                prompt = self._prompt(group, text, entry)
                if self.parts.trains_plain:
                    group.other = prompt
                else:
                    group.prompt = prompt
                self.buffer.discard(group, "retried")
                return answer
            case Add(responses, rewards, leaves) if len(responses) == len(rewards):
                if leaves is not None:
                    with self._mistakes_told():
                        self.buffer.keep(group, leaves, "replaced")
                group.parts.append(self._given(group, responses, rewards))
                self.buffer.to(group, State.READY)
            case _:
                raise UserError(
                    f"loop.callback = '{self.parts.callback_name}' answered {answer!r}; it must be None or one of the "
                    "answers of rolltree.engine.methods.groups."
                )
        return None

    def _ask(self, group: Group) -> Any:
        assert self.parts.callback is not None
        meta = group.tree.meta
        meta |= {"problem": group.prompt.problem, "entry": group.prompt.entry}
        try:
            return self.parts.callback(group.tree)
        finally:  # an open group is saved with its prompt, which holds them
            del meta["problem"], meta["entry"]

    @contextmanager
    def _mistakes_told(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise UserError(f"loop.callback = '{self.parts.callback_name}': {error}.") from error

    def _prompt(self, group: Group, text: str, entry: Mapping[str, Any] | None = None) -> Prompt:
        """Return another prompt for the group's problem."""
        own = group.prompt
        given = dict(own.entry if entry is None else entry)
        return self.parts.source.prompt(Problem(own.id, own.task, text, given, images=own.images))

    def _check_drops(self, reason: str) -> None:
        most = self.parts.max_dropped_batches * self.buffer.budget.batch
        if self.buffer.dropped.total() - self._dropped_before > most:
            raise RunError(
                f"The group callback dropped more than {most} groups for one step (loop.max_dropped_batches), the last "
                f"for '{reason}'; the prompts may be too easy or too hard for it."
            )
