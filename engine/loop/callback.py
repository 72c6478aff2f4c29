"""The run's group callback: it is asked about every judged group, and its answers are followed here.

What an answer needs of the sampler, further responses or another prompt's, the controller does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..data.episodes import Episodes
from ..errors import RunError, UserError
from ..methods.groups import Accept, Add, Drop, GroupCallback, More, Retry
from ..prompts.group import Group, Responses, State
from ..prompts.prompts import Prompt
from ..tasks import Problem
from .buffer import Buffer

MOST_ATTEMPTS = 64
"""Most further requests for one group; one more drops it."""


@dataclass(frozen=True)
class CallbackRule:
    """A group callback, and what its answers may do.

    Attributes:
        name: the configured name, for messages.
        trains_plain: responses to another prompt of the callback's are trained under the problem's own.
        max_dropped_batches: most groups that it may drop for one step, in batches.
    """

    function: GroupCallback
    name: str
    trains_plain: bool = False
    max_dropped_batches: int = 16


class Callback:
    """Follows the answers of `loop.callback`; without one every judged group is ready.

    Args:
        rule: the callback; None for none.
        buffer: holds the groups.
        prompt: makes another prompt of a problem.
        given: makes responses with rewards of texts that were given.
    """

    def __init__(
        self,
        rule: CallbackRule | None,
        buffer: Buffer,
        prompt: Callable[[Problem], Prompt],
        make_responses: Callable[[Group, Sequence[str], Sequence[float]], Responses],
    ) -> None:
        self.rule, self.buffer, self._make_prompt, self._make_responses = rule, buffer, prompt, make_responses
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
        if (rule := self.rule) is None:
            self.buffer.to(group, State.READY)
            return None
        answer = self._ask(rule, group)
        if isinstance(answer, More | Retry) and group.attempt >= MOST_ATTEMPTS:
            answer = Drop("too_many_attempts")
        match answer:
            case None | Accept(None):
                self.buffer.to(group, State.READY)
            case Accept(leaves) if leaves is not None:
                self._keep(rule, group, leaves)
                self.buffer.to(group, State.READY)
            case Drop(reason):
                self.buffer.drop(group, reason)
                self._check_drops(rule, reason)
            case More(n, text) if n > 0:
                if text is not None and not rule.trains_plain:
                    raise UserError(
                        f"loop.callback = '{rule.name}' samples a group under two prompts; set "
                        'loop.train_context to "plain".'
                    )
                group.other = None if text is None else self._prompt(group, text)
                return answer
            case Retry(text, entry):
                prompt = self._prompt(group, text, entry)
                if rule.trains_plain:
                    group.other = prompt
                else:
                    group.prompt = prompt
                self.buffer.discard(group, "retried")
                return answer
            case Add(responses, rewards, leaves) if len(responses) == len(rewards):
                if leaves is not None:
                    self._keep(rule, group, leaves)
                group.parts.append(self._make_responses(group, responses, rewards))
                self.buffer.to(group, State.READY)
            case _:
                raise UserError(
                    f"loop.callback = '{rule.name}' answered {answer!r}; it must be None or one of the "
                    "answers of rolltree.engine.methods.groups."
                )
        return None

    @staticmethod
    def _ask(rule: CallbackRule, group: Group) -> Any:
        meta = group.tree.meta
        meta |= {"problem": group.prompt.problem, "entry": group.prompt.entry}
        try:
            return rule.function(Episodes(group.tree).tree)
        finally:  # an open group is saved with its prompt, which holds them
            del meta["problem"], meta["entry"]

    def _keep(self, rule: CallbackRule, group: Group, responses: Sequence[int]) -> None:
        with _mistakes_told(rule):
            self.buffer.keep(group, Episodes(group.tree).members(responses), "replaced")

    def _prompt(self, group: Group, text: str, entry: Mapping[str, Any] | None = None) -> Prompt:
        """Return another prompt for the group's problem."""
        prompt = group.prompt
        row = dict(prompt.entry if entry is None else entry)
        return self._make_prompt(Problem(prompt.id, prompt.task, text, row, images=prompt.images))

    def _check_drops(self, rule: CallbackRule, reason: str) -> None:
        most = rule.max_dropped_batches * self.buffer.budget.batch
        if self.buffer.dropped.total() - self._dropped_before > most:
            raise RunError(
                f"The group callback dropped more than {most} groups for one step (loop.max_dropped_batches), the last "
                f"for '{reason}'; the prompts may be too easy or too hard for it."
            )


@contextmanager
def _mistakes_told(rule: CallbackRule) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UserError(f"loop.callback = '{rule.name}': {error}.") from error
