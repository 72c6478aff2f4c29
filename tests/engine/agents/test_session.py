"""Random agents over real chat templates: sampled tokens stay, and branches begin at the last common message."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rolltree.engine.agents.records import EpisodeRecord, SampledCall
from rolltree.engine.agents.session import Session, Turn
from rolltree.engine.agents.tree import episode_tree
from rolltree.engine.chat.writing import IncompleteError
from rolltree.engine.data.segment import LeafStatus
from rolltree.engine.programs.chat.toolbox import tool_schema
from rolltree.engine.protocols.answers import Answer, Called
from rolltree.engine.rollout.records import child_seed

from ...support import chat_templates as templates
from ...support.conversations import TEMPLATE
from .calls import call_tree, sampled_tokens

TOOLS = [tool_schema("calculator"), tool_schema("python")]
NAMES = sorted({"qwen3", "qwen3_5_think", "llama3_1", "glm4moe", "gptoss", "lfm2_2_5"} & set(templates.names()))


def tokenizer_of(name: str) -> tuple[PreTrainedTokenizerFast, list[int]]:
    if name != "own":
        made, ends = templates.tokenizer(name), templates.ends(name)
    else:
        made, ends = templates.byte_tokenizer(f"<bos>{TEMPLATE}", ("<end>",)), ("<end>",)
    return made, made.convert_tokens_to_ids(list(ends))


KINDS = ["compact", "think", "edit", "tools", "parallel", "again", "sub", "say", "back"]


@dataclass
class Call:
    """What the agent knows of a call: the messages that it sent, never changed, and the answer that it got."""

    sent: list[dict[str, Any]]
    tools: Any
    turn: Turn
    sampled: list[int]
    answer: dict[str, Any]
    rewritten: bool = False
    """Set by `check_tokens`: the template wrote what was before in another way."""


@dataclass
class Agent:
    """An agent whose every message is another one, known by a number in it."""

    draw: Any
    session: Session
    tokenizer: PreTrainedTokenizerFast
    ends: list[int]
    calls: list[Call] = field(default_factory=list)
    number: int = 0
    sampled: int = 0
    tools: Any = None
    most_calls: int = 2
    refused: int = 0

    def text(self) -> str:
        self.number += 1
        return self.draw(st.sampled_from(["", " ", "<tool_call>", "\n", "\u00fc"])) + f"[{self.number}]"

    def user(self) -> dict[str, Any]:
        return {"role": "user", "content": self.text()}

    def ask(self, messages: list[dict[str, Any]]) -> None:
        """Send copies of messages, and have any tokens sampled, in whatever way they spell a text."""
        sent = copy.deepcopy(messages)
        try:
            turn = self.session.begin(copy.deepcopy(sent), self.tools)
        except IncompleteError:  # the template leaves out a part of a turn that the agent gives
            self.refused += 1
            return
        said = self.draw(st.lists(st.integers(0, 255), min_size=0, max_size=4))
        said += self.draw(st.sampled_from([[end] for end in self.ends] + [[7]]))  # an end, or cut off
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        calls = []
        if self.draw(st.booleans()) and self.tools:
            for place in range(self.draw(st.integers(1, self.most_calls))):
                own = self.draw(st.sampled_from([None, "own"]))
                calls.append(Called(self.session.new_id(own, place), "calculator", json.dumps({"expression": "1"})))
        self.session.answered(turn, said, Answer(text, calls, "stop"))
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            answer["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
                for c in calls
            ]
        self.calls.append(Call(sent, self.tools, turn, said, answer))

    def results(self, call: Call) -> list[dict[str, Any]]:
        """The tools' answers, as a server passes them on, or a user's where nothing was called."""
        calls = call.answer.get("tool_calls", [])
        known = [{"role": "tool", "tool_call_id": c["id"], "name": c["function"]["name"]} for c in calls]
        return [{**one, "content": self.text()} for one in known] or [self.user()]

    def step(self) -> None:
        """Do something with the history of a call, mostly the last."""
        draw = self.draw
        last = self.calls[-1 if draw(st.integers(0, 2)) else draw(st.integers(0, len(self.calls) - 1))]
        talk = [*last.sent, last.answer]
        self.tools = last.tools
        match draw(st.sampled_from(["append"] * 4 + KINDS)):
            case "append":
                self.ask([*talk, *self.results(last)])
            case "compact":  # a summary in the place of what was said
                self.ask([talk[0], {"role": "user", "content": f"Summary {self.text()}"}])
            case "think":  # drop the beginning of the answer
                changed = {**last.answer, "content": last.answer["content"][1:] + self.text()}
                self.ask([*last.sent, changed, *self.results(last)])
            case "edit" if any(m["role"] == "tool" for m in talk):
                at = next(i for i, m in enumerate(talk) if m["role"] == "tool")
                self.ask([*talk[:at], {**talk[at], "content": self.text()}, *talk[at + 1 :], *self.results(last)])
            case "tools" if self.tools:
                self.tools = self.tools[::-1]
                self.ask([*talk, *self.results(last)])
            case "parallel":
                more = self.results(last)
                self.ask([*talk, *more])
                self.ask([*talk, *more[:-1], {**more[-1], "content": self.text()}])
            case "again":
                self.ask(last.sent)
            case "sub":
                self.tools = None
                self.ask([self.user()])
            case "say":  # words that the agent puts into the model's mouth
                self.ask([*talk, *self.results(last), {"role": "assistant", "content": self.text()}, self.user()])
            case "back" if last.sent[-1]["role"] == "user":  # without the last exchange
                self.ask([*last.sent[:-1], self.user()])
            case _:
                self.ask([*talk, *self.results(last)])


def begins_with(talk: list[Any], beginning: list[Any]) -> bool:
    return talk[: len(beginning)] == beginning


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.slow(but=1)
@pytest.mark.check(but=2)
@pytest.mark.parametrize("name", ["own", *NAMES])
def test_random_agents(name: str) -> None:
    tokenizer, ends = tokenizer_of(name)

    @settings(max_examples=40, deadline=None, phases=[Phase.generate])  # shrinking takes minutes
    @given(st.data())
    def run(data: st.DataObject) -> None:
        agent = Agent(data.draw, Session(tokenizer, ends, [1], seed=5), tokenizer, ends)
        agent.most_calls = 1 if name == "llama3_1" else 2  # its template refuses more
        agent.tools = data.draw(st.sampled_from([None, TOOLS]))
        agent.ask([{"role": "system", "content": "[S]"}, agent.user()][data.draw(st.integers(0, 1)) :])
        for _ in range(data.draw(st.integers(1, 6))):
            agent.step()
        assert not agent.refused or name in ("llama3_1", "gptoss")  # without the text beside a call, or a second call
        check_tokens(agent, tokenizer, REWRITTEN.get(name, lambda talk, given: False))
        check_tree(agent)

    run()


Talk = list[dict[str, Any]]


def called_beside_text(message: dict[str, Any]) -> bool:
    return bool("tool_calls" in message and message["content"])


def thought_before_an_answer(talk: Talk) -> bool:
    """Return whether a turn without calls follows one with calls and text, which gpt-oss's template then leaves out."""
    turns = [message for message in talk if message["role"] == "assistant"]
    return any(
        called_beside_text(turn) and any("tool_calls" not in later for later in turns[i + 1 :])
        for i, turn in enumerate(turns)
    )


REWRITTEN: dict[str, Callable[[Talk, Talk], bool]] = {
    "qwen3_5_think": lambda talk, given: bool(given),  # in another way once a user has spoken after it
    "llama3_1": lambda talk, given: any(map(called_beside_text, given)),  # without its text
    "gptoss": lambda talk, given: thought_before_an_answer(talk),
}
"""True where a template writes earlier turns in another way, by the conversation and the turns that the agent gives."""


def check_tokens(agent: Agent, tokenizer: PreTrainedTokenizerFast, rewritten: Callable[[dict[str, Any]], bool]) -> None:
    """Check prompts against what the agent knows, but for those whose beginning the template has ``rewritten``."""
    for number, call in enumerate(agent.calls):
        prompt = call.turn.prompt
        known = [
            other
            for other in agent.calls[:number]
            if other.tools == call.tools and begins_with(call.sent, [*other.sent, other.answer])
        ]
        best = max((len(other.sent) for other in known), default=-1)
        sampled = [[*other.sent, other.answer] for other in agent.calls[:number] if other.tools == call.tools]
        given = [  # after other messages than they were sampled after, or not sampled at all
            message
            for place, message in enumerate(call.sent)
            if message["role"] == "assistant" and call.sent[: place + 1] not in sampled
        ]
        put = call.rewritten = rewritten(call.sent, given)
        if known and not put:
            begun = [[*o.turn.prompt, *o.sampled] for o in known if len(o.sent) == best]
            assert any(prompt[: len(ids)] == ids for ids in begun), call.sent
        for other in agent.calls[:number]:
            if other.tools != call.tools or put or other.rewritten:
                continue
            common = shared(call.sent, other.sent)  # messages
            upto = shared(prompt, other.turn.prompt)
            if common and call.sent[common - 1]["role"] != "assistant":
                said = call.sent[common - 1]["content"]
                text = tokenizer.decode(prompt[:upto])
                assert said.strip() in text, (said, text)
            for talk in (call.sent, other.sent):
                if common < len(talk) and talk[common]["role"] != "assistant":
                    assert talk[common]["content"].strip() not in tokenizer.decode(prompt[:upto])


def check_tree(agent: Agent) -> None:
    """Each sampled token is in the tree's loss once, and none that was not sampled is."""
    calls = []
    for number, call in enumerate(agent.calls):
        logprobs = [-1 - 0.001 * (agent.sampled + i) for i in range(len(call.sampled))]
        agent.sampled += len(call.sampled)
        calls.append(SampledCall(call_tree(call.turn.prompt, call.sampled, logprobs), number=number))
    record = EpisodeRecord(tuple(calls), LeafStatus.STOP, reward=1.0)
    tree = episode_tree(calls[0].tree.token_id[: calls[0].tree.leaf_prompt[0]].tolist(), [record])
    trained = []
    for leaf in range(tree.num_leaves):
        rows = tree.path_rows(leaf)
        for place in range(int(tree.leaf_prompt[leaf]), len(rows)):
            if tree.loss_mask[rows[place]]:
                before = tuple(tree.token_id[rows[:place]].tolist())
                trained.append((int(tree.token_id[rows[place]]), float(tree.behaviour_logprob[rows[place]]), before))
    wanted = [(token, logprob, before) for _, token, logprob, before in sampled_tokens([record])]
    assert sorted(trained) == sorted(wanted)


# -- one by one -------------------------------------------------------------------------------------------------------

ASKED = [{"role": "user", "content": "Six times seven?"}]


def answer(session: Session, turn: Turn, text: str, end: int | None) -> dict[str, Any]:
    sampled = [*session.tokenizer(text, add_special_tokens=False)["input_ids"], *([] if end is None else [end])]
    session.answered(turn, sampled, Answer(text, [], "stop"))
    return {"role": "assistant", "content": text}


def made(name: str = "own", prompt: list[int] | None = None, seed: int = 5) -> tuple[Session, Any, list[int]]:
    tokenizer, ends = tokenizer_of(name)
    return Session(tokenizer, ends, prompt or [1], seed), tokenizer, ends


def test_the_groups_prompt_is_met_also_where_it_spells_control_tokens() -> None:
    tokenizer, ends = tokenizer_of("own")
    asked = [{"role": "user", "content": "<end> 6 * 7?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True, return_dict=False)
    session = Session(tokenizer, ends, prompt, 5)
    assert session.begin(asked).prompt == prompt
    assert session.begin(asked).prompt == prompt
    other = session.begin([{"role": "user", "content": "<end> 6 * 8?"}]).prompt
    assert ends[0] not in other[: other.index(ends[0])]
    assert tokenizer.decode(other) == tokenizer.decode(prompt).replace("7", "8")
    assert other.count(ends[0]) == prompt.count(ends[0]) - 1


def test_seeds_and_numbers_are_those_of_a_conversation_in_its_first_chain_and_others_elsewhere() -> None:
    session, _, ends = made()
    first = session.begin(ASKED)
    assert (first.chain.seed, first.chain.drawn(len(first.prompt))) == (5, 0)
    talk = [*ASKED, answer(session, first, "a", ends[0]), {"role": "user", "content": "on"}]
    second = session.begin(talk)
    assert second.chain is first.chain
    assert second.chain.drawn(len(second.prompt)) == len(second.prompt) - len(first.prompt)
    beside = session.begin(talk)  # the same again
    assert (beside.chain.seed, beside.prompt) == (int(child_seed(5, 1)), second.prompt)
    assert beside.chain.drawn(len(beside.prompt)) == 0
    session.dropped(second)
    again = session.begin(talk)
    assert again.chain is first.chain
    anew = session.begin(ASKED)
    assert anew.chain.seed == int(child_seed(5, 2))


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({}, True),
        ({"refusal": None, "annotations": [], "audio": None, "reasoning_content": "hm"}, True),
        ({"content": "a "}, False),
        ({"content": "A"}, False),
        ({"role": "user"}, False),
        ({"tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": {}}}]}, False),
        ({"tool_calls": []}, True),
    ],
)
def test_an_answer_is_the_same_by_what_it_says(changed: dict[str, Any], same: bool) -> None:
    session, _, ends = made()
    first = session.begin(ASKED)
    said = answer(session, first, "a", ends[0]) | changed
    assert (session.begin([*ASKED, said, {"role": "user", "content": "on"}]).base is first) == same


XY = {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("arguments", "same"), [(XY, True), ({"y": 2, "x": 1}, True), (XY | {"x": True}, False), (XY | {"x": 1.0}, False)]
)
def test_arguments_are_the_same_as_json(arguments: dict[str, Any], same: bool) -> None:
    session, _, ends = made()
    first = session.begin(ASKED, TOOLS)
    id_ = session.new_id(None, 0)
    session.answered(first, [65, ends[0]], Answer("", [Called(id_, "calculator", '{"x": 1, "y": 2}')], "tool_calls"))
    call = {"id": id_, "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    talk = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": id_, "name": "calculator", "content": "7"})
    assert (session.begin(talk, TOOLS).base is first) == same
    changed = {**talk[1], "tool_calls": [{**call, "id": "call00009"}]}
    talk = [talk[0], changed, {**talk[2], "tool_call_id": "call00009"}]
    assert session.begin(talk, TOOLS).base is None


def test_a_stop_text_that_the_agent_puts_back_was_sampled() -> None:
    session, tokenizer, _ = made()
    sampled = tokenizer("words</code>", add_special_tokens=False)["input_ids"]
    for content, stop, same in (("words", "</code>", True), ("words", "<", False), ("word", "s</code>", True)):
        turn = session.begin(ASKED)
        session.answered(turn, sampled, Answer(content, [], "stop", stop))
        for told in (content, "words</code>"):
            said = {"role": "assistant", "content": told}
            base = session.begin([*ASKED, said, {"role": "user", "content": "on"}]).base
            assert base is not None or (told != content and not same)
            if told == content:
                assert base is turn
    edited = {"role": "assistant", "content": "words</code> "}
    assert session.begin([*ASKED, edited, {"role": "user", "content": "on"}]).base is None


def test_a_given_message_with_another_field_is_another_message() -> None:
    """A template may read any field of what was not sampled."""
    session, _, ends = made()
    first = session.begin([{"role": "user", "content": "x", "mood": "glad"}])
    said = answer(session, first, "a", ends[0])
    on = {"role": "user", "content": "on"}
    assert session.begin([{"role": "user", "content": "x", "mood": "sad"}, said, on]).base is None
    assert session.begin([{"role": "user", "content": "x", "mood": "glad"}, said, on]).base is first


@pytest.mark.parametrize("name", ["own", *NAMES])
def test_after_a_cut_answer_the_templates_own_end_follows(name: str) -> None:
    session, tokenizer, _ = made(name)
    first = session.begin(ASKED)
    said = answer(session, first, "cut", None)
    again = session.begin([*ASKED, said, {"role": "user", "content": "on"}])
    text = tokenizer.apply_chat_template(
        [*ASKED, {"role": "assistant", "content": "cut"}, {"role": "user", "content": "on"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert again.base is first
    assert tokenizer.decode(again.added) == text[text.rindex("cut") + 3 :]


def test_a_template_that_rewrites_history_begins_a_branch() -> None:
    marks = "{% for m in messages %}{% if loop.last and m.role == 'user' %}Now: {% endif %}<{{ m.role }}>"
    marks += "{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer = templates.byte_tokenizer(marks, ("<end>",))
    ends = [tokenizer.convert_tokens_to_ids("<end>")]
    session = Session(tokenizer, ends, [1], 5)
    first = session.begin(ASKED)
    talk = [*ASKED, answer(session, first, "42", ends[0]), {"role": "user", "content": "on"}]
    second = session.begin(talk)
    assert (second.base, second.chain is first.chain) == (None, False)
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(second.prompt) == text


def test_what_a_template_cannot_write_is_an_error() -> None:
    tokenizer = templates.byte_tokenizer("{{ raise_exception('no') }}", ("<end>",))
    with pytest.raises(ValueError, match="cannot write messages of user: no"):
        Session(tokenizer, [3], [1], 5).begin(ASKED)


def test_equal_turns_are_written_alike_whatever_the_ids_of_their_calls() -> None:
    """Templates may write ids; those that this made are shown as the place of the call, a model's own as it is."""
    writes = "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}"
    writes += "{{ m.tool_call_id }}{{ m.content }}<end>\n{% endfor %}"
    tokenizer = templates.byte_tokenizer(writes, ("<end>",))
    end, prompts = tokenizer.convert_tokens_to_ids("<end>"), []
    for before in (0, 3):
        session = Session(tokenizer, [end], [1], 5)
        for _ in range(before):
            session.new_id(None, 0)
        first = session.begin(ASKED, TOOLS)
        ids = [session.new_id(None, 0), session.new_id("own1", 1)]
        assert len(set(ids)) == 2
        calls = [Called(id_, "calculator", "{}") for id_ in ids]
        session.answered(first, [65, end], Answer("", calls, "tool_calls"))
        spelt = [{"id": i, "type": "function", "function": {"name": "calculator", "arguments": {}}} for i in ids]
        talk = [*ASKED, {"role": "assistant", "content": "", "tool_calls": spelt}]
        talk += [{"role": "tool", "tool_call_id": i, "name": "calculator", "content": "7"} for i in ids]
        prompts.append(session.begin(talk, TOOLS).prompt)
    assert prompts[0] == prompts[1]
    assert "<tool>call000007<end>\n<tool>own17<end>" in tokenizer.decode(prompts[0])


@pytest.mark.parametrize(("said", "kept"), [("", True), ("x", False)])
def test_a_call_that_the_agent_gives_needs_no_text(said: str, kept: bool) -> None:
    """Llama's template writes a call without the text beside it; a conversation of which that leaves a part out is
    refused."""
    session, _, ends = made("llama3_1")

    def calling(text: str, id_: str) -> dict[str, Any]:
        function = {"name": "calculator", "arguments": {"expression": "1"}}
        return {
            "role": "assistant", "content": text, "tool_calls": [{"id": id_, "type": "function", "function": function}],
        }  # fmt: skip

    def result(id_: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": id_, "name": "calculator", "content": "1"}

    first = session.begin(ASKED, TOOLS)
    id_ = session.new_id(None, 0)
    session.answered(first, [65, ends[0]], Answer("a", [Called(id_, "calculator", '{"expression": "1"}')], "stop"))
    talk = [*ASKED, calling("a", id_), result(id_), calling(said, "mine"), result("mine")]
    if kept:
        assert session.begin(talk, TOOLS).base is first
        return
    with pytest.raises(IncompleteError, match="has 'content', which the chat template leaves out"):
        session.begin(talk, TOOLS)
