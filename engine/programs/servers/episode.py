"""Episodes of OpenEnv servers as environments: one session each, rewards and ends from the server."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from ...chat.messages import Message
from ...errors import UserError
from ...parts.resolve import import_object
from ..chat.turns import Observation, ToolBox, calls_of
from .background import BACKGROUND
from .contents import cut, text_of
from .openenv import LISTED, RefusedError, Result, Session, find_server

SHOWN = "openenv_observation"
"""Column of a prompt with the observation of the reset that it shows."""


class ServedEpisode:
    """An episode of an OpenEnv server.

    Args:
        context: of a prompt; its ``tools`` are offered too.
        url: address of the server.
        command: starts the server, with ``{port}`` in place of its port; it ends with the run.
        headers: of requests to the address; ``${NAME}`` in them stands for an environment variable.
        reset: columns of the prompt that are passed to the server's reset. Default: ``seed``, where there is one.
        observation: the field of the server's observation that the model is shown, or ``file.py:function`` that makes a
            text of it. Default: the only field if that is a text, else all as JSON.

    Raises:
        UserError: the server cannot be reached, or the prompt lacks a column.
    """

    def __init__(
        self,
        context: Mapping[str, Any],
        url: str | None = None,
        command: Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
        reset: Sequence[str] | None = None,
        observation: str | None = None,
    ) -> None:
        self._options = (context, url, command, headers, reset, observation)
        self._server = find_server(url, command, headers)
        self._offer = self._server.offer()
        self._names = {tool["function"]["name"] for tool in self._offer.tools}
        others = [tool for tool in context["tools"] if isinstance(tool, str) or "openenv" not in tool]
        self._box = ToolBox({"tools": others})
        if missing := [name for name in reset or () if name not in context]:
            raise UserError(
                f"The option `reset` of openenv names the column '{missing[0]}', which the prompt lacks; it has "
                f"{', '.join(sorted(map(str, context)))}."
            )
        columns = [name for name in ("seed",) if name in context] if reset is None else reset
        self._reset = {name: context[name] for name in columns}
        self._shown, self._show = context.get(SHOWN), observation
        self._session: Session | None = None
        self._seconds = 0.0

    def open(self, messages: Sequence[Message], seconds: float) -> None:
        """Begin the episode at its first turn; wait for a session where the server has none to give."""
        self._box.open(messages, seconds)
        self._seconds = seconds
        if self._session is not None:
            return
        self._session = session = self._server.session(self._reset, seconds)
        weakref.finalize(self, session.close).atexit = False
        assert session.first is not None
        if session.first.done:
            raise UserError(f"{self._server} ended the episode at its reset.")
        if self._shown is not None and (now := said(session.first.observation, self._show)) != self._shown:
            raise UserError(
                f"{self._server} began with {now[:80]!r}, and the prompt shows {self._shown[:80]!r}: its resets do not "
                "follow `seed`; give prompts by data.path."
            )

    def step(self, messages: Sequence[Message]) -> Observation:
        """Act as the last message says: by its calls, or by its text where that is the action.

        A message that should call a tool and calls none ends the episode.
        """
        assert self._session is not None
        first, self._session.first = self._session.first, None
        reward, end = _sum(None, first), time.monotonic() + self._seconds
        calls = calls_of(messages[-1])
        if self._offer.text is not None and not calls:
            content, result = self._act({self._offer.text: messages[-1]["content"]}, end)
            return self._observation([{"role": "user", "content": content}], result, _sum(reward, result))
        answers, result = [], None
        for call in calls:
            if call.error or call.name not in self._names:
                left = end - time.monotonic()
                answers.append(call.answer(call.error or self._box.answer(call.name, call.arguments, left)))
                continue
            content, result = self._act(self._offer.call(call.name, call.arguments), end)
            answers.append(call.answer(content))
            reward = _sum(reward, result)
            if result is not None and result.done:
                break
        if not calls:
            return Observation(done=True, reward=reward)
        return self._observation(answers, result, reward)

    def _act(self, action: Mapping[str, Any], end: float) -> tuple[str, Result | None]:
        """Return the text that answers an action, and the server's result; None where it takes no such action.

        Raises:
            TimeoutError: the server has not answered by ``end``, of `time.monotonic`.
        """
        assert self._session is not None
        try:
            result = BACKGROUND.wait(self._session.step(action), end - time.monotonic())
        except RefusedError:
            return f"error: {_why(self._offer.action, action)}", None
        return said(result.observation, self._show), result

    def _observation(
        self, answers: Sequence[Mapping[str, Any]], result: Result | None, reward: float | None
    ) -> Observation:
        if result is not None and result.done:
            return Observation(answers, done=True, reward=reward, truncated=result.truncated)
        return Observation(answers, reward=reward)

    def close(self) -> None:
        """End the session."""
        self._box.close()
        if self._session is not None:
            self._session.close()

    def fork(self) -> ServedEpisode:
        """Return another episode that has not begun.

        Raises:
            UserError: this one has.
        """
        if self._session is not None:
            raise UserError(f"{self._server} cannot copy an episode; leave `ways` out.")
        return ServedEpisode(*self._options)


def _sum(reward: float | None, result: Result | None) -> float | None:
    if result is None or result.reward is None:
        return reward
    return (reward or 0.0) + result.reward


def said(observation: Mapping[str, Any], show: str | None) -> str:
    """Return the text of an observation; ``show`` is the option ``observation``.

    Raises:
        UserError: it has no such field.
    """
    if show is not None and ":" in show:
        return cut(str(import_object(show)(observation)))
    if show is not None:
        if show not in observation:
            raise UserError(
                f"The option `observation` of openenv is '{show}', and the server's observation has "
                f"{', '.join(observation) or 'no field'}."
            )
        return _text(observation[show])
    if LISTED[0] in observation and "result" in observation:
        error = observation.get("error")
        if error:
            return cut(f"error: {error.get('message', error) if isinstance(error, dict) else error}")
        return text_of(observation["result"], str(observation[LISTED[0]]))
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    return _text(next(iter(fields.values()))) if len(fields) == 1 else _text(fields) if fields else ""


def _text(value: Any) -> str:
    return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _why(schema: Mapping[str, Any], action: Mapping[str, Any]) -> str:
    """Return the reason why an action does not fit its schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema).iter_errors(action))
    return error.message if error is not None else "the environment takes no such action"
