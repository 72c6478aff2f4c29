"""Agents: programs of the user's that call the model at an address of the run; `engine/agents/` serves them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..sandbox import no_place
from .program import Action, GroupState, RolloutProgram, SegmentReport


class AgentCalls(RolloutProgram):
    """Episodes of programs that own their loop: a function or a command calls the model at a local address.

    Their calls become one tree, see docs/agents.md; held-out problems are answered by them too. In the engine each call
    is one response.

    Args:
        agent: ``file.py:function``, called as ``function(task, client)`` with a client of OpenAI's for the episode; it
            may be ``async``. It returns its reward (a number, or a dict with ``reward``), or None.
        command: the words of a command that is run for each episode instead.
        environment: environment variables of the command, besides the run's own.
        container: options of the containers in which the command runs, for tasks in Harbor's format (`Setup`); ``{}``
            for their defaults. The reward is that of the tasks' tests.
        episodes: the largest number of episodes that run at the same time; others wait for their turn.
        at_once: the largest number of calls of one episode at the same time; a further one is refused for the moment.
        calls: the largest number of calls of an episode; None for no limit.
        call_tokens: the longest answer to a call, in tokens; None: as long as `rollout.max_new_tokens` leaves room.
        episode_tokens: the largest number of tokens that are sampled for an episode; None for no limit.
        call_timeout_s: after so many seconds in the engine a call is refused.
        timeout_s: after so many seconds of sampling an episode ends as failed.
        per_call: each call is a sequence of its own, though it continues an earlier one.
        roles: names that the key of a call may end with, after a colon, for calls of another role than the agent's own.
        sampling: "call": temperature, top_p, top_k and min_p of a call hold, where it has them; "run": those of the run
            always do.
        same: texts by the regular expressions of what they replace in calls, so that times and ids do not part the
            episodes of a group: in messages other than the agent's own, and in descriptions of tools.

    Raises:
        ValueError: an argument is out of range or unknown, or there is not one of ``agent`` and ``command``.
    """

    answers_held_out = True
    independent = True

    def __init__(
        self,
        agent: str | None = None,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        container: Mapping[str, Any] | None = None,
        episodes: int = 64,
        at_once: int = 16,
        calls: int | None = None,
        call_tokens: int | None = None,
        episode_tokens: int | None = None,
        call_timeout_s: float = 600.0,
        timeout_s: float = 1800.0,
        per_call: bool = False,
        roles: Sequence[str] = (),
        sampling: Literal["call", "run"] = "call",
        same: Mapping[str, str] | None = None,
    ) -> None:
        if (agent is None) == (command is None):
            raise ValueError('agent needs one of agent = "file.py:function" and command = ["program", ...].')
        words = isinstance(command, list | tuple) and bool(command) and all(isinstance(word, str) for word in command)
        if command is not None and not words:
            raise ValueError('agent needs command as a list of words, such as ["python", "agent.py"].')
        if environment and command is None:
            raise ValueError("agent gives environment to a command; leave it out, or name a command.")
        if container is not None and (command is None or "containers" in container):
            raise ValueError(
                "agent runs a command in a container, one an episode; name a command, and limit `episodes` instead of "
                "`containers`."
            )
        counts = [count for count in (episodes, at_once, calls, call_tokens, episode_tokens) if count is not None]
        if min(counts) < 1 or min(call_timeout_s, timeout_s) <= 0:
            raise ValueError(
                "agent needs episodes, at_once, calls, call_tokens and episode_tokens >= 1, and seconds above 0."
            )
        named = all(re.fullmatch(r"[A-Za-z][\w.-]{0,63}", role) and role != "agent" for role in roles)
        if isinstance(roles, str) or not named:
            raise ValueError('agent needs roles as a list of names of letters and digits, other than "agent".')
        if sampling not in ("call", "run"):
            raise ValueError(f'agent needs sampling = "call" or "run", got {sampling!r}.')
        _check_same(same or {})
        self.sampling, self.same = sampling, dict(same or {})
        self.agent, self.command, self.environment = agent, command, dict(environment or {})
        self.episodes, self.at_once, self.calls = episodes, at_once, calls
        self.call_tokens, self.episode_tokens = call_tokens, episode_tokens
        self.call_timeout_s, self.timeout_s, self.per_call = call_timeout_s, timeout_s, per_call
        self.roles = ("agent", *roles) if roles else ()
        self.container = container
        if command is not None and container is None and (why := no_place()):
            self.note = (
                f"Commands of episodes work in directories of different names ({why}), so prompts that tell the "
                "directory share only what is before it"
            )

    def check(self, context: Any) -> None:
        if self.container is not None and self.command is not None:
            from .harbor.agent import agents_pool, task_of

            agents_pool(self.container, self.episodes).check(task_of(context), self.command[0])

    def start(self, group: GroupState) -> int:
        self.drawn = self.context.drawn if isinstance(self.context, CallContext) else 0
        return group.width

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        return ()


def _check_same(same: Mapping[str, str]) -> None:
    """Raise a ValueError where ``same`` is no table of regular expressions and texts that can replace matches."""
    if not isinstance(same, Mapping) or not all(isinstance(text, str) for text in same.values()):
        raise ValueError('agent needs same as a table of expressions and texts, such as { "pid [0-9]+" = "pid" }.')
    for pattern, text in same.items():
        try:
            compiled = re.compile(pattern)
            compiled.sub(text, "")
        except (re.error, IndexError) as error:
            raise ValueError(f"agent cannot replace what {pattern!r} of same matches by {text!r}: {error}.") from error
        if compiled.fullmatch(""):
            raise ValueError(f"agent has {pattern!r} in same, which matches an empty text; make it match some letter.")


@dataclass(frozen=True)
class CallContext:
    """The context of a call's job.

    Attributes:
        drawn: tokens of its chain of calls before the answer.
    """

    drawn: int
