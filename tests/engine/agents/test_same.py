"""Times and ids that agents send are replaced by `same`, and what the model has sampled is left."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine.agents.alike import Alike
from rolltree.engine.data.parting import tree_parting
from rolltree.engine.programs import AgentCalls
from rolltree.engine.rollout import NativeEngine

from ...support.agents import agent, job, run, sampler

TELLS = """
import itertools

number = itertools.count()

async def solve(task, client):
    own, said = next(number), list(task["messages"])
    for call in range(3):
        first = [{"role": "system", "content": f"It is {own}{call} o'clock, {own}{call}."}]
        answer = await client.chat.completions.create(
            model="m", messages=first + said, max_tokens=4, extra_body={"ignore_eos": True})
        text = answer.choices[0].message.content
        said += [{"role": "assistant", "content": text}, {"role": "user", "content": f"at {own}{call}: go on"}]
    return 1.0
"""
DIGITS = {"[0-9]+": "0"}


@pytest.mark.check(but=1)
@pytest.mark.parametrize("same", [DIGITS, {}])
def test_what_differs_is_the_same(engine: NativeEngine, tmp_path: Path, same: dict[str, str]) -> None:
    """A time of each call in the system prompt, and one in what follows."""
    asked = job(engine, n=3, max_new_tokens=600)
    tree = run(engine, asked, agent=agent(tmp_path, TELLS), episodes=1, same=same)
    assert "errors" not in tree.meta, tree.meta["errors"]
    words: Any = engine.tokenizer
    prompts = {words.decode(tree.token_id[tree.path_rows(leaf)[: int(tree.leaf_prompt[leaf])]]) for leaf in range(3)}
    assert (tree.num_leaves == 3) == bool(same), "calls append to the calls before"
    assert (tree_parting(tree) is None) == bool(same)
    assert any("It is 0 o'clock, 0." in prompt for prompt in prompts) == bool(same)


def test_what_is_sampled_stays(engine: NativeEngine, tmp_path: Path) -> None:
    """An expression that matches every text changes neither answers nor the tokens that continue them."""
    asked = job(engine, n=2, max_new_tokens=600)
    plain = TELLS.replace("at {own}{call}", "7").replace("{own}{call}", "7")
    plain = plain.replace("o'clock", "hours")
    trees = [run(engine, asked, agent=agent(tmp_path, plain), same=same) for same in ({"7|[abc]": "7"}, {"7": "7"}, {})]
    for tree in trees:
        assert tree.token_id.tolist() == trees[-1].token_id.tolist()
        assert tree.loss_mask.tolist() == trees[-1].loss_mask.tolist()


def test_messages_and_tools() -> None:
    alike = Alike({r"pid (\d)\d*": r"pid \1", "never": "x", "pid": "id"})
    call = [{"id": "pid 77", "function": {"name": "f", "arguments": {"a": "pid 77"}}}]
    said = [
        {"role": "system", "content": "pid 12 and pid 34"},
        {"role": "assistant", "content": "pid 56", "tool_calls": call},
        {"role": "tool", "content": "pid 9", "tool_call_id": "pid 77"},
    ]
    assert alike.messages(said) == [
        {"role": "system", "content": "id 1 and id 3"}, said[1],
        {"role": "tool", "content": "id 9", "tool_call_id": "pid 77"},
    ]  # fmt: skip
    schema = {"properties": {"description": {"type": "string", "description": "of pid 8"}, "pid": {"enum": ["pid 8"]}}}
    (tool,) = alike.tools([{"function": {"name": "pid", "description": "pid 5", "parameters": schema}}])
    assert tool["function"] | {"parameters": None} == {"name": "pid", "description": "id 5", "parameters": None}
    assert tool["function"]["parameters"]["properties"] == {
        "description": {"type": "string", "description": "of id 8"}, "pid": {"enum": ["pid 8"]}
    }  # fmt: skip
    assert alike.tools(None) is None
    assert list(alike.unmatched) == ["never"]


def test_an_expression_that_matches_nothing_is_told(
    engine: NativeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = agent(tmp_path, TELLS)
    with sampler(engine, agent=named, same={"o'clock": "h", "minutes": "m"}) as made, caplog.at_level(logging.WARNING):
        made.generate([job(engine, n=1, max_new_tokens=600), job(engine, n=1, max_new_tokens=600)])
    (said,) = [record.getMessage() for record in caplog.records if "same" in record.getMessage()]
    assert "'minutes'" in said
    assert named in said


@pytest.mark.parametrize(("same", "sentence"), [
    ({"(": "x"}, r"cannot replace what '\(' of same matches by 'x': missing \)"),
    ({"a": r"\2"}, "invalid group reference"), ({"a*": "x"}, "matches an empty text"),
    (["a"], "a table of expressions"), ({"a": 3}, "a table of expressions"),
])  # fmt: skip
def test_what_cannot_replace_is_refused(same: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        AgentCalls(agent="a.py:f", same=same)
