"""Turns with tools: a call in the response is run, and its result is appended as an observation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..data.segment import LeafStatus, Origin
from ..parts.resolve import resolve
from .chat.toolbox import TOOLS
from .program import Action, BranchId, Call, Finish, Fork, Given, GroupState, RolloutProgram, SegmentReport

Tool = Callable[..., str]


def find_tool(name: str, options: Mapping[str, Any] | None = None) -> Tool:
    """Return the tool called ``name``, or the function that ``file.py:function`` names.

    Raises:
        UserError: the tool or an option does not exist.
    """
    tool: Tool = resolve("rollout.program_options.tool", name, options, parts=TOOLS, inputs=("call", "context"))
    return tool


class ToolTurns(RolloutProgram):
    """Independent responses with tool calls: each call is run, and its result is appended as an observation.

    Tools run in threads while other responses are sampled. Held-out problems are answered with the tool as well.

    Args:
        tool: function of the text between ``call_start`` and ``call_end`` and of the prompt's context that returns the
            observation's text, or its name: ``calculator``, ``python`` or ``file.py:function``.
        call_start, call_end: the texts around a call.
        observation: the text to append, with ``{}`` in place of the tool's result.
        max_turns: calls of one response; a further one ends it with status LENGTH.
        tool_options: options of a tool given by name.

    Raises:
        ValueError: max_turns is below 1, or the observation has no place for the tool's text.
    """

    answers_held_out = True
    takes_any_order = True

    def __init__(
        self,
        tool: Tool | str,
        call_start: str = "<tool_call>",
        call_end: str = "</tool_call>",
        observation: str = "<tool_response>{}</tool_response>",
        max_turns: int = 8,
        tool_options: Mapping[str, Any] | None = None,
    ) -> None:
        if max_turns < 1 or "{}" not in observation:
            raise ValueError("tools needs max_turns >= 1 and an observation with {} for the tool's text.")
        self.tool: Tool = find_tool(tool, tool_options) if isinstance(tool, str) else tool
        self.note = getattr(self.tool, "note", "")
        self.call_start, self.observation, self.max_turns = call_start, observation, max_turns
        self.segment_stop = (call_end,)

    def start(self, group: GroupState) -> int:
        self._turns: dict[BranchId, int] = {}
        self._asked: dict[BranchId, str] = {}  # calls that are running
        return group.width

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if segment.status is None:
                yield self.turn(segment)

    def turn(self, segment: SegmentReport) -> Action:
        """Return the action after a segment that ended with a call."""
        turns = self._turns[segment.branch] = self._turns.get(segment.branch, 0) + 1
        if turns > self.max_turns:
            return Finish(segment.branch, LeafStatus.LENGTH)
        assert self.tokenizer is not None  # the engine refuses texts without one
        text = self.tokenizer.decode(segment.token_ids)
        call = text.rpartition(self.call_start)[2].partition(self.segment_stop[0])[0]
        self._asked[segment.branch] = call
        return Call(segment.branch, self.tool, (call, self.context))

    def repeated(self, group: GroupState, branches: Sequence[BranchId]) -> list[Action]:
        return [Call(branch, self.tool, (self._asked[branch], self.context)) for branch in branches]

    def returned(self, group: GroupState, branch: BranchId, result: Any) -> Iterable[Action]:
        del self._asked[branch]
        yield Fork(branch, append=self.observed(result))

    def observed(self, result: Any) -> Given:
        assert self.tokenizer is not None
        text = self.observation.replace("{}", str(result))
        return Given(self.tokenizer.encode(text, add_special_tokens=False), Origin.OBSERVATION)
