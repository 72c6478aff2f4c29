"""Environments: conversations in turns with something that answers, by tools, a game, or your own program.

Each turn of the model ends with any of its end-of-sequence tokens. The environment then steps in a thread, while other
branches keep sampling. Its messages are appended as the tokenizer's chat template writes them, and are not trained on.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..chat.conversation import Conversation, conversation
from ..chat.messages import Message, assistant_message, find_format
from ..chat.reading import HERMES, begins_reasoning, ends_reasoning, read_ids
from ..chat.rendering import render
from ..data.segment import LeafStatus, Origin
from ..parts.resolve import import_object, resolve
from ..parts.waiting import waiting
from .chat.environments import ENVIRONMENTS
from .chat.toolbox import tool_schemas
from .chat.turns import Observation, within
from .program import Action, BranchId, Call, Finish, Fork, Given, GroupState, Reward, RolloutProgram, SegmentReport
from .servers.background import BACKGROUND

MADE = ("_tools", "_form", "_conversation", "_thinks")
"""Attributes of `EnvironmentTurns` that follow from its context."""


@dataclass(frozen=True)
class _Answer:
    """An environment's answer, and what the conversation grows by where it goes on."""

    observation: Observation
    messages: Sequence[Message] = ()
    token_ids: Sequence[int] = ()
    written: Sequence[str] = ()


@dataclass
class _Talk:
    """The conversation of a branch."""

    environment: Any
    messages: list[Message] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    """The conversation as it was appended; see `Conversation.grow`."""
    reward: float | None = None
    end: int = -1
    """The token that ended the last turn."""
    length: int = 0
    """Tokens of the response at the end of the last turn."""
    judging: bool = False
    """True once the response has ended and is judged."""
    before: Any = None
    """The environment's state when the step under way began; a step that has ended has changed it."""
    stepping: bool = False
    """True while a step is under way."""

    def state(self) -> tuple[Any, ...]:
        """Return plain values, with the environment itself where it has no ``state_dict()``."""
        state = self.before if self.stepping else _state_of(self.environment)
        of_environment = self.environment if state is None else state
        return of_environment, self.messages, self.written, self.reward, self.end, self.length, self.judging

    def judge(self, branch: BranchId) -> Call:
        """Return the call that judges the response, which has ended."""
        self.before, self.stepping, self.judging = _state_of(self.environment), True, True
        return Call(branch, _judged, (self.environment,))

    def step(self, branch: BranchId, seconds: float, conversation: Conversation | None) -> Call:
        """Return the call that steps the environment with the messages so far; ``conversation`` grows by its answer."""
        self.before, self.stepping = _state_of(self.environment), True
        talk = None if conversation is None else (conversation, list(self.messages), list(self.written), self.end)
        return Call(branch, _step, (self.environment, list(self.messages), seconds, talk))

    def fork(self) -> _Talk:
        """Return the same state for another branch."""
        copied = getattr(self.environment, "fork", functools.partial(copy.deepcopy, self.environment))()
        return _Talk(copied, list(self.messages), list(self.written), self.reward)


class EnvironmentTurns(RolloutProgram):
    """Conversations in turns with an environment; see docs/environments.md.

    Held-out problems are answered in it too.

    Args:
        environment: ``tools``, ``game``, ``verifiers``, ``openenv``, ``harbor``, or ``file.py:Class`` of your own: made
            with the prompt's context, with ``async def step(messages)`` that answers an `Observation`, a text (of a
            user), or None at the end, and maybe a ``fork()``; without it, it is copied. With ``state_dict()`` of plain
            values and ``load_state_dict(state)`` an unfinished conversation is part of a checkpoint.
            ``open(messages, seconds)`` is called before each step, without a time limit of its own, for what a step may
            have to wait for; ``judge()`` once after the last, however the conversation ended, for a reward that is
            added, also without a limit; ``close()`` at the very end, also of a conversation that fails. ``ahead()`` is
            called when sampling begins, and ``check()`` before the run.
        environment_options: passed to it.
        max_turns: turns of one response; after the last it ends with status LENGTH, if the environment did not end it.
        turn_tokens: the longest turn; a longer one ends the response with status LENGTH.
        ways: into how many branches responses divide after their first, second, ... turn, each with a copy of the
            environment's state. Their product divides ``n``.
        timeout_s: of one step of the environment.
        tool_format: the form in which the model writes calls of tools, one of `FORMATS`; None: the one that the chat
            template teaches.
        turn_rewards: the environment's reward of a turn before the last becomes the reward of this turn (column
            `token_reward`, at its last token), for advantages such as `turn_credit`; otherwise a response's reward is
            the sum of all.

    Raises:
        ValueError: an argument is out of range.
    """

    answers_held_out = True
    takes_any_order = True
    independent = True

    def __init__(
        self,
        environment: str | type = "tools",
        environment_options: Mapping[str, Any] | None = None,
        max_turns: int = 8,
        turn_tokens: int | None = None,
        ways: Sequence[int] = (),
        timeout_s: float = 60.0,
        tool_format: str | None = None,
        turn_rewards: bool = False,
    ) -> None:
        if max_turns < 1 or timeout_s <= 0 or any(way < 1 for way in ways) or (turn_tokens or 1) < 1:
            raise ValueError("environment needs max_turns, turn_tokens and ways >= 1, and timeout_s above 0.")
        if environment in ("openenv", "harbor") and math.prod(ways) > 1:
            raise ValueError(f"{environment} cannot copy an episode for each of several ways; leave `ways` out.")
        self.make = _maker(environment, environment_options or {})
        if environment == "openenv":
            options = environment_options or {}
            self.tools = [{"openenv": {key: options.get(key) for key in ("url", "command", "headers")}}]
        elif environment == "harbor":
            self.tools = [{"harbor": True}]
        self.max_turns, self.ways = max_turns, tuple(ways)
        self.segment_tokens, self.call_timeout_s = turn_tokens, timeout_s
        self.tool_format, self.turn_rewards = tool_format, turn_rewards

    @property
    def segment_stop_token_ids(self) -> Sequence[int]:  # type: ignore[override]
        """The tokens that end a turn, after which the response goes on: the model's end-of-sequence tokens."""
        ends = self.end_token_ids or ([] if self.tokenizer is None else [self.tokenizer.eos_token_id])
        return sorted(ends)

    def start(self, group: GroupState) -> int:
        context = self.context or {}
        if self.tokenizer is None or not context.get("messages"):
            raise ValueError("environment needs conversations as prompts; set data.chat to true.")
        self._ways = self.ways if group.width > 1 else ()
        begun, rest = divmod(group.width, math.prod(self._ways))
        if rest:
            raise ValueError(
                f"environment makes a multiple of {math.prod(self._ways)} responses (ways), not {group.width}."
            )
        if math.prod(self._ways) > 1 and any(_has_sessions(tool) for tool in context["tools"]):
            raise ValueError("environment cannot copy sessions of MCP for each of several ways; set `shared` to true.")
        self._prepare()
        messages = [dict(message) for message in context["messages"]]
        if not all(isinstance(message["content"], str) for message in messages):
            raise ValueError("environment takes no pictures in conversations yet; use another program.")
        self._conversation.check(messages, "tool" if self._tools else "user")
        first = _Talk(self.make(context), messages, self._conversation.begin(messages))
        self._talks: dict[BranchId, _Talk] = {(begun - 1,): first}
        self._talks |= {(i,): first.fork() for i in range(begun - 1)}
        for talk in () if self.tried else self._talks.values():
            if (ahead := getattr(talk.environment, "ahead", None)) is not None:
                ahead()
        return begun

    def check(self, context: Mapping[str, Any]) -> None:
        if (check := getattr(self.make(context), "check", None)) is not None:
            check()

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            talk = self._talks[segment.branch]
            ended = bool(len(segment.token_ids)) and int(segment.token_ids[-1]) in self.segment_stop_token_ids
            if segment.status is not None or not ended:
                if talk.reward is not None:
                    yield Reward(segment.branch, talk.reward)
                if segment.status is None:
                    yield Finish(segment.branch, LeafStatus.LENGTH)  # the turn was too long
                if segment.status is not LeafStatus.FAILED and hasattr(talk.environment, "judge"):
                    yield talk.judge(segment.branch)
                else:
                    _close(self._talks.pop(segment.branch).environment)
                continue
            assert self.tokenizer is not None
            ids = segment.token_ids[:-1]
            thinks = self._thinks and ends_reasoning(self.tokenizer, ids)
            turn = read_ids(self.tokenizer, ids, self._tools, self._form or HERMES, thinks=thinks)
            talk.messages.append(assistant_message(turn, self._tools))
            talk.end, talk.length = int(segment.token_ids[-1]), segment.length
            yield self._step(segment.branch)

    def returned(
        self, group: GroupState, branch: BranchId, result: _Answer | float | None
    ) -> Generator[Action, Sequence[BranchId], None]:
        talk = self._talks.pop(branch)
        if not isinstance(result, _Answer):  # of `judge`, for a response that has ended
            _close(talk.environment)
            if result is not None:
                yield Reward(branch, (talk.reward or 0.0) + result)
            return
        talk.stepping, observation = False, result.observation
        turns = self._turns(talk)
        last = observation.done or turns >= self.max_turns
        if observation.reward is not None:
            placed = self.turn_rewards and not last
            if placed:
                yield Reward(branch, observation.reward, at=talk.length)
            talk.reward = (talk.reward or 0.0) + (0.0 if placed else observation.reward)
        if talk.reward is not None:
            yield Reward(branch, talk.reward)
        if last:
            _close(talk.environment)
            ended = observation.done and not observation.truncated
            yield Finish(branch, LeafStatus.STOP if ended else LeafStatus.LENGTH)
            return
        talk.messages += result.messages
        talk.written = list(result.written)
        answer = Given(result.token_ids, Origin.OBSERVATION)
        children = yield Fork(branch, self._ways[turns - 1] if turns <= len(self._ways) else 1, append=answer)
        for child in children[1:]:
            self._talks[child] = talk.fork()
        if children:
            self._talks[children[0]] = talk

    def repeated(self, group: GroupState, branches: Sequence[BranchId]) -> list[Action]:
        ended = {branch for branch in branches if self._talks[branch].judging}
        return [self._talks[branch].judge(branch) if branch in ended else self._step(branch) for branch in branches]

    def _step(self, branch: BranchId) -> Call:
        talk = self._talks[branch]
        last = self._turns(talk) >= self.max_turns
        return talk.step(branch, self.call_timeout_s, None if last else self._conversation)

    def _turns(self, talk: _Talk) -> int:
        """Return the number of the model's turns."""
        prompt = self.context["messages"]
        return sum(m["role"] == "assistant" for m in talk.messages) - sum(m["role"] == "assistant" for m in prompt)

    def _prepare(self) -> None:
        """Set what follows from the tokenizer and the context."""
        assert self.tokenizer is not None
        schemas = tool_schemas(self.context["tools"])
        self._tools = {schema["function"]["name"]: schema["function"].get("parameters", {}) for schema in schemas}
        self._form = find_format(self.tokenizer, schemas, self.tool_format) if schemas else None
        self._conversation = conversation(self.tokenizer, schemas, self.segment_stop_token_ids)
        prompt = render(self.tokenizer, self.context["messages"], schemas or None, generation=True)
        self._thinks = begins_reasoning(self.tokenizer, prompt)

    def close(self) -> None:
        BACKGROUND.close()

    def state_dict(self, attributes: dict[str, Any]) -> dict[str, Any]:
        attributes = {name: value for name, value in attributes.items() if name not in MADE}
        return attributes | {"_talks": [(branch, talk.state()) for branch, talk in self._talks.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._prepare()
        self._talks = {}
        for branch, (of_environment, *talk) in state["_talks"]:
            environment = self.make(self.context)
            environment.load_state_dict(of_environment)
            self._talks[branch] = _Talk(environment, *talk)


def _has_sessions(tool: str | Mapping[str, Any]) -> bool:
    """Return whether each conversation has a session of its own with a tool's server."""
    return not isinstance(tool, str) and "mcp" in tool and not tool.get("shared")


def _as_text(message: Mapping[str, Any]) -> Message:
    """Return a message of the environment with its content as text, where it is no list or mapping of parts."""
    content = message["content"]
    return {**message, "content": content if isinstance(content, str | list | dict) else str(content)}


def _close(environment: Any) -> None:
    """Let the environment, which is not asked again, end what it holds."""
    if (end := getattr(environment, "close", None)) is not None:
        end()


def _state_of(environment: Any) -> Any:
    """Return the environment's ``state_dict()``; None where it has none."""
    give = getattr(environment, "state_dict", None)
    return None if give is None else give()


def _maker(environment: str | type, options: Mapping[str, Any]) -> Any:
    """Return a function that makes the environment of a prompt's context, its options checked.

    Raises:
        UserError: there is no such class, or it has no such option.
    """
    name = environment if isinstance(environment, str) else environment.__name__
    makers = {builtin: _later(maker) for builtin, maker in ENVIRONMENTS.items()}
    if not isinstance(environment, str):
        makers[name] = _later(environment)
    elif ":" in name:
        makers[name] = _later(import_object(name))
    key = "rollout.program_options.environment"
    return resolve(key, name, options, parts=makers, inputs=("context",))


def _later(environment: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the parameters of ``environment``."""

    def maker(context: Mapping[str, Any], **options: Any) -> Any:
        return environment(context, **options)

    maker.__signature__ = inspect.signature(environment)  # type: ignore[attr-defined]
    return maker


def _step(environment: Any, messages: list[Message], seconds: float, talk: tuple[Any, ...] | None) -> _Answer:
    """Step the environment, and write its answer where the conversation goes on; called in a thread of its own."""
    try:
        return _stepped(environment, messages, seconds, talk)
    except BaseException:
        _close(environment)
        raise


def _stepped(environment: Any, messages: list[Message], seconds: float, talk: tuple[Any, ...] | None) -> _Answer:
    if (begin := getattr(environment, "open", None)) is not None:
        with waiting():
            begin(messages, seconds)
    answer = environment.step(messages)
    if inspect.isawaitable(answer):
        answer = asyncio.run(within(answer, seconds))
    if answer is None:
        answer = Observation(done=True)
    if isinstance(answer, str):
        answer = Observation([{"role": "user", "content": answer}])
    if not isinstance(answer, Observation):
        raise TypeError(f"{type(environment).__name__}.step answered {answer!r}; give an Observation, a text or None")
    if (answer.done or talk is None) and hasattr(environment, "judge"):
        answer = replace(answer, reward=(answer.reward or 0.0) + _judged(environment))
    if answer.reward is not None and not math.isfinite(answer.reward):
        raise ValueError(f"{type(environment).__name__} gave the reward {answer.reward:g}, which is not finite")
    if answer.done or talk is None:
        return _Answer(answer)
    conversation, said, written, end = talk
    new = [_as_text(message) for message in answer.messages]
    return _Answer(answer, new, *conversation.grow(said, written, new, end))


def _judged(environment: Any) -> float:
    """Return the reward by ``judge()`` of an environment; called in a thread of its own."""
    with waiting():
        reward = environment.judge()
    return float(reward)
