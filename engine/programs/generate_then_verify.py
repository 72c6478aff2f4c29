"""Two roles in turn: one answers the problem, the other reads the answer and judges it."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from ..chat.conversation import conversation
from ..data.segment import LeafStatus, Origin
from .program import WHOLE, Action, BranchId, Finish, Fork, Given, GroupState, RolloutProgram, SegmentReport

QUESTION = (
    "\nCheck the solution above step by step. Write one line for each step, 'Step K: correct' or 'Step K: incorrect', "
    "and then 'Verdict: correct' or 'Verdict: incorrect'.\n"
)
"""The words are inferred."""


class GenerateThenVerify(RolloutProgram):
    """RL Tango (arXiv 2505.15034) and other pairs of roles: after each response of the first role the second one is
    asked about it, and a leaf is a response with one answer of the second.

    ``n`` leaves are ``n / verdicts`` responses with ``verdicts`` answers each. A response that does not end within
    ``generate_tokens`` is a leaf of its own, with status LENGTH. In a chat the question is a message of the user.

    Args:
        generate_tokens: longest response of the first role; the rest of `rollout.max_new_tokens` is for the question
            and the second role.
        verdicts: answers of the second role to each response.
        question: text put after the response; it is not trained on.
        roles: names of the two roles. A policy of ``[models.NAME]`` plays the one of its name.
        stop: texts that end a response of either role, in addition to the end-of-sequence tokens.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        generate_tokens: int,
        verdicts: int = 1,
        question: str = QUESTION,
        roles: Sequence[str] = ("generator", "verifier"),
        stop: Sequence[str] = (),
    ) -> None:
        if generate_tokens < 1 or verdicts < 1 or not question:
            raise ValueError("generate_then_verify needs generate_tokens and verdicts of at least 1, and a question.")
        if len(roles) != 2 or len(set(roles)) != 2:
            raise ValueError(f"generate_then_verify has two roles of different names, not {list(roles)}.")
        self.segment_tokens, self.verdicts, self.question = generate_tokens, verdicts, question
        self.roles, self.segment_stop = tuple(roles), tuple(stop)

    @property
    def segment_stop_token_ids(self) -> Sequence[int]:  # type: ignore[override]
        """The model's end-of-sequence tokens: they end a role's turn, and the program decides what follows."""
        ends = self.end_token_ids or ([] if self.tokenizer is None else [self.tokenizer.eos_token_id])
        return sorted(ends)

    def start(self, group: GroupState) -> int:
        if self.tokenizer is None:
            raise ValueError("generate_then_verify puts a question into responses, so the engine needs a tokenizer.")
        if self.segment_stop and self._messages:
            raise ValueError("generate_then_verify ends turns of a chat by the template's tokens; leave `stop` out.")
        responses, rest = divmod(group.width, self.verdicts)
        if rest:
            raise ValueError(f"generate_then_verify makes a multiple of {self.verdicts} responses, not {group.width}.")
        self._asked: set[BranchId] = set()
        return responses

    def decide(
        self, group: GroupState, finished: Sequence[SegmentReport]
    ) -> Generator[Action, Sequence[BranchId], None]:
        for segment in finished:
            if segment.status is not None:
                continue
            ids = segment.token_ids
            ended = segment.stop is not None or (len(ids) > 0 and int(ids[-1]) in self.segment_stop_token_ids)
            if segment.branch in self._asked or not ended:
                yield Finish(segment.branch, LeafStatus.STOP if ended else LeafStatus.LENGTH)
                continue
            question = Given(self._question(segment), Origin.OBSERVATION)
            verdicts = yield Fork(segment.branch, self.verdicts, question, WHOLE, role=self.roles[1])
            self._asked |= set(verdicts)

    @property
    def _messages(self) -> list[dict[str, str]]:
        """The messages of a chat that the prompt was made of; empty for a text."""
        return list((self.context or {}).get("messages") or [])

    def _question(self, segment: SegmentReport) -> list[int]:
        """Return the tokens that ask the second role about a response."""
        assert self.tokenizer is not None
        if not (messages := self._messages):
            return self.tokenizer.encode(self.question, add_special_tokens=False)
        talk = conversation(self.tokenizer, [], self.segment_stop_token_ids)
        text = self.tokenizer.decode(segment.token_ids[:-1], skip_special_tokens=False)
        said = [*messages, {"role": "assistant", "content": text}]
        question = {"role": "user", "content": self.question.strip()}
        return talk.grow(said, talk.begin(messages), [question], int(segment.token_ids[-1]))[0]
