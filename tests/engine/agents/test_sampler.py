"""Episodes of agents through the run's server: trees, budgets, rewards, failures, and the environment's numbers."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rolltree.engine import LeafStatus
from rolltree.engine.data.segment import Origin
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.programs import AgentCalls, CallContext, EnvironmentTurns, Observation
from rolltree.engine.rollout import NativeEngine
from rolltree.engine.rollout.records import child_seed, parent_seed
from rolltree.engine.rollout.sampler import LostError

from ...support.agents import agent, job, run, sampler

TALK = """
async def solve(task, client):
    messages, reward = list(task["messages"]), 0.0
    for turn in range(4):
        answer = await client.chat.completions.create(model="any", messages=messages)
        said = answer.choices[0].message
        messages.append({"role": "assistant", "content": said.content})
        reward += float(len(said.content))
        messages.append({"role": "user", "content": "x" * (len(said.content) % 5)})
        if answer.choices[0].finish_reason == "length":
            break
    return reward
"""


class Talk:
    """Says what `TALK` says."""

    def __init__(self, context: Any) -> None:
        pass

    async def step(self, messages: list[dict[str, Any]]) -> Observation:
        said = messages[-1]["content"]
        return Observation([{"role": "user", "content": "x" * (len(said) % 5)}], reward=float(len(said)))


def flat(tree: TokenTree, leaf: int) -> dict[str, Any]:
    rows = tree.path_rows(leaf)
    columns = ("token_id", "loss_mask", "origin", "policy_version", "temperature")
    return {name: tree.columns[name][rows] if name in tree.columns else getattr(tree, name)[rows] for name in columns}


@pytest.mark.parametrize("seed", [7, 8])
def test_a_dialogue_samples_what_the_environment_samples(engine: NativeEngine, seed: int, tmp_path: Path) -> None:
    """Token for token, with the same log-probs, rewards and statuses."""
    asked = job(engine, n=4, seed=seed, max_new_tokens=400)
    by_agent = run(engine, asked, agent=agent(tmp_path, TALK))
    context = {"messages": asked.context["messages"], "tools": ()}
    params = asked.params
    program = EnvironmentTurns(Talk, max_turns=4)
    (wanted,) = engine.generate([asked.prompt], params, program, seeds=[seed], contexts=[context])
    assert by_agent.num_leaves == wanted.num_leaves == 4
    for leaf in range(4):
        mine, theirs = flat(by_agent, leaf), flat(wanted, leaf)
        for name, values in theirs.items():
            np.testing.assert_array_equal(mine[name], values, err_msg=name)
        np.testing.assert_allclose(
            by_agent.behaviour_logprob[by_agent.path_rows(leaf)],
            wanted.behaviour_logprob[wanted.path_rows(leaf)],
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip
    assert by_agent.meta["given_rewards"] == wanted.meta["given_rewards"]
    assert by_agent.leaf_prompt.tolist() == wanted.leaf_prompt.tolist()


def test_a_call_goes_on_with_the_random_numbers_of_its_chain(engine: NativeEngine) -> None:
    """What is sampled in two calls is what one would have sampled, for any seed."""
    for seed in (0, 5, -(2**63), 2**63 - 1):
        assert int(child_seed(parent_seed(seed), 0)) == seed
        whole = job(engine, n=1, max_new_tokens=24, ignore_eos=True)
        program = AgentCalls(agent="a.py:f")
        (tree,) = engine.generate([whole.prompt], whole.params, program, seeds=[parent_seed(seed)])
        ids = tree.flatten()[0].response
        rest = replace(whole.params, max_new_tokens=14)
        (tree,) = engine.generate(
            [[*whole.prompt, *ids[:10]]], rest, program, seeds=[parent_seed(seed)], contexts=[CallContext(10)]
        )
        assert tree.flatten()[0].response == ids[10:]


PLAIN = """
def solve(task, client):
    said = client.chat.completions.create(model="m", messages=task["messages"], {more})
    return {{"reward": 2, "length": len(said.choices[0].message.content)}}
"""


def test_what_is_recorded_was_sampled(engine: NativeEngine, tmp_path: Path) -> None:
    """Ids and log-probs of a call are those of the same job by the engine; a call's own parameters hold."""
    plain = PLAIN.format(more="temperature=0.5, max_tokens=9, top_p=0.9")
    tree = run(engine, job(engine, n=3), agent=agent(tmp_path, plain))
    asked = job(engine, n=3)
    params = replace(asked.params, temperature=0.5, max_new_tokens=9, top_p=0.9)
    (wanted,) = engine.generate([asked.prompt], params, seeds=[asked.seed])
    for mine, theirs in zip(tree.flatten(), wanted.flatten(), strict=True):
        assert mine.response == theirs.response
        np.testing.assert_allclose(mine.behaviour_logprob, theirs.behaviour_logprob, rtol=1e-5, atol=1e-6)
    rows = tree.path_rows(0)[int(tree.leaf_prompt[0]) :]
    assert (tree.temperature[rows] == np.float32(0.5)).all()
    assert (tree.origin[rows] == Origin.SAMPLED).all()
    assert tree.meta["given_rewards"] == {0: 2.0, 1: 2.0, 2: 2.0}


BRANCHES = """
import asyncio

async def solve(task, client):
    async def ask(messages, role=""):
        own = client.with_options(api_key=client.api_key + role) if role else client
        answer = await own.chat.completions.create(model="m", messages=messages, max_tokens=12)
        return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]

    first = await ask(task["messages"])
    on = {"role": "user", "content": "on"}
    await asyncio.gather(*(ask([*first, on]) for _ in range(3)))          # the same three times
    await ask([*first[:-1], {"role": "assistant", "content": "edited"}, on])
    await ask([{"role": "user", "content": "plan"}], ":planner")
    return 1.0
"""


def test_branches_sub_agents_and_repeated_calls(engine: NativeEngine, tmp_path: Path) -> None:
    tree = run(engine, job(engine, n=2), agent=agent(tmp_path, BRANCHES), roles=["planner"])
    # of six calls an episode two are one chain: the first, and the first of those that continue it
    assert tree.num_leaves == 10
    assert tree.columns["episode"].tolist() == [0] * 5 + [1] * 5
    assert tree.meta["roles"] == ["agent", "planner"]
    assert tree.meta["agent"]["calls"] == 12
    for leaf in range(10):
        assert tree.loss_mask[tree.path_rows(leaf)[int(tree.leaf_prompt[leaf]) :]].any()
    texts = [tuple(tree.flatten()[leaf].response) for leaf in range(5)]
    assert len(set(texts)) == 5, "calls that are repeated sample anew"


def test_each_call_may_be_a_sequence_of_its_own(engine: NativeEngine, tmp_path: Path) -> None:
    tree = run(engine, job(engine, n=1), agent=agent(tmp_path, BRANCHES), roles=["planner"], per_call=True)
    assert tree.num_leaves == tree.meta["agent"]["calls"] == 6


CATCHES = """
import openai

def solve(task, client):
    try:
        client.with_options(max_retries=0).chat.completions.create(model="m", messages=task["messages"], max_tokens=5)
    except openai.InternalServerError as error:
        assert "The engine failed: " in str(error), error
    return 1.0
"""


@pytest.mark.parametrize(
    ("losses", "error", "why"),
    [(2, LostError("gone"), None), (9, LostError("gone"), "gone"), (1, RuntimeError("no memory"), "no memory")],
)
def test_an_outage_is_no_answer(
    engine: NativeEngine, tmp_path: Path, losses: int, error: Exception, why: str | None
) -> None:
    """A call whose engine is lost is sampled again; an engine that fails fails the episode, whatever its agent says."""
    with sampler(engine, agent=agent(tmp_path, CATCHES)) as made:
        step, left = made.inner.step, losses

        def failing(seconds: float) -> Any:
            nonlocal left
            done = step(seconds)
            for flight in done:
                if left:
                    left, flight.tree, flight.error = left - 1, None, error
            return done

        made.inner.step = failing  # type: ignore[method-assign]
        (flight,) = made.submit([job(engine, n=1)])
        while not flight.done:
            made.step(0.05)
    tree = flight.tree
    assert tree is not None
    if why is None:
        assert tree.meta["given_rewards"] == {0: 1.0}
        assert "errors" not in tree.meta
    else:
        assert tree.status.tolist() == [LeafStatus.FAILED]
        assert tree.meta["errors"][0] == f"the engine failed on a call: {why}"
        assert "given_rewards" not in tree.meta


def test_words_put_into_the_models_mouth_are_not_trained(engine: NativeEngine, tmp_path: Path) -> None:
    """Messages of the assistant in the prompt are context, as whatever the agent did not get from the model."""
    text = """
def solve(task, client):
    talk = [*task["messages"], {"role": "assistant", "content": "given"}, {"role": "user", "content": "on"}]
    said = client.chat.completions.create(model="m", messages=talk, max_tokens=6).choices[0]
    talk += [{"role": "assistant", "content": said.message.content}, {"role": "user", "content": "and"}]
    talk += [{"role": "assistant", "content": "given too"}, {"role": "user", "content": "on"}]
    client.chat.completions.create(model="m", messages=talk, max_tokens=6)
    return 1.0
"""
    tree = run(engine, job(engine, n=1, max_new_tokens=300), agent=agent(tmp_path, text))
    words: Any = engine.tokenizer
    rows = tree.path_rows(0)
    assert tree.num_leaves == 1
    assert "given" in words.decode(tree.token_id[rows[: int(tree.leaf_prompt[0])]])
    response = rows[int(tree.leaf_prompt[0]) :]
    assert "<user>and<end>\n<assistant>given too<end>\n" in words.decode(tree.token_id[response])
    trained = words.decode(tree.token_id[response][tree.loss_mask[response]])
    assert "given" not in trained
    assert int(tree.loss_mask[rows].sum()) <= 12


LIMITS = """
import openai

def solve(task, client):
    messages = list(task["messages"])
    for _ in range(50):
        try:
            answer = client.chat.completions.create(model="m", messages=messages, max_tokens=20)
        except openai.APIStatusError as error:
            {then}
        said = answer.choices[0].message.content
        messages += [{{"role": "assistant", "content": said}}, {{"role": "user", "content": "on " * 6}}]
"""


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("options", "status", "code"),
    [({}, 400, "context_length_exceeded"), ({"calls": 2}, 429, "insufficient_quota"),
     ({"episode_tokens": 30}, 400, "context_length_exceeded")],
)  # fmt: skip
def test_out_of_budget(engine: NativeEngine, tmp_path: Path, options: Any, status: int, code: str) -> None:
    """The client hears the protocol's own error, and what was sampled counts as cut, whatever the agent does then."""
    told = f"assert (error.status_code, error.code) == ({status}, {code!r}), error; return 3.0"
    tree = run(engine, job(engine, max_new_tokens=200), agent=agent(tmp_path, LIMITS.format(then=told)), **options)
    assert tree.status.tolist() == [LeafStatus.LENGTH] * 2
    assert tree.meta["given_rewards"] == {0: 3.0, 1: 3.0}
    tree = run(engine, job(engine, max_new_tokens=200), agent=agent(tmp_path, LIMITS.format(then="raise")), **options)
    assert tree.status.tolist() == [LeafStatus.LENGTH] * 2
    assert "given_rewards" not in tree.meta
    if "episode_tokens" in options:
        assert (tree.response_length >= 0).all()
        assert tree.loss_mask.sum() <= 60


COMPACTS = """
import openai

def solve(task, client):
    messages, shortened = list(task["messages"]), False
    for _ in range(50):
        try:
            answer = client.chat.completions.create(model="m", messages=messages, max_tokens=20)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            messages, shortened = [messages[0], {"role": "user", "content": "so far: abc"}], True
            continue
        if shortened and answer.choices[0].finish_reason == "stop":
            return 1.0
        said = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "on " * 6}]
"""


def test_an_agent_that_goes_on_with_less_is_not_cut(engine: NativeEngine, tmp_path: Path) -> None:
    tree = run(engine, job(engine, max_new_tokens=200), agent=agent(tmp_path, COMPACTS))
    assert "errors" not in tree.meta, tree.meta["errors"]
    assert tree.meta["given_rewards"] == dict.fromkeys(range(tree.num_leaves), 1.0)
    last = np.flatnonzero(tree.columns["answer"])
    assert tree.status[last].tolist() == [LeafStatus.STOP] * 2
    assert tree.num_leaves > 2


FAILURES = [
    ("def solve(task, client):\n    raise KeyError('no tool')", "KeyError"),
    ("def solve(task, client):\n    import sys\n    sys.exit(3)", "SystemExit"),
    ("async def solve(task, client):\n    return 'good'", "is no finite number"),
    ("async def solve(task, client):\n    return float('nan')", "is no finite number"),
    ("async def solve(task, client):\n    return {'score': 1}", "has no entry 'reward'"),
    ("async def solve(task, client):\n    return 1.0", "made no call that was answered"),
    ("import asyncio\nasync def solve(task, client):\n    await asyncio.sleep(99)", "TimeoutError"),
    ("import time\ndef solve(task, client):\n    time.sleep(4)", "TimeoutError"),
]


@pytest.mark.slow(but=4)
@pytest.mark.check(but=2)
@pytest.mark.parametrize(("text", "said"), FAILURES)
def test_an_agent_that_fails_has_no_reward(engine: NativeEngine, tmp_path: Path, text: str, said: str) -> None:
    tree = run(engine, job(engine), agent=agent(tmp_path, text), timeout_s=0.5)
    assert tree.status.tolist() == [LeafStatus.FAILED] * 2
    assert "given_rewards" not in tree.meta
    assert all(said in tree.meta["errors"][leaf] for leaf in range(2)), tree.meta["errors"]


COMMAND = """
import json, os, subprocess, sys, urllib.request
task = json.load(open(os.environ["ROLLTREE_TASK"]))
body = {"model": "m", "messages": task["messages"], "max_tokens": 8}
def post(url, body):
    asked = urllib.request.Request(url, json.dumps(body).encode(), {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(asked))
said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
assert os.listdir(".") == []
open("left", "w").write("x")
what = sys.argv[1]
if what == "file":
    json.dump({"reward": 0.5, "more": 2}, open(os.environ["ROLLTREE_REWARD"], "w"))
elif what == "post":
    post(os.environ["ROLLTREE_URL"] + "/reward", 0.25)
elif what == "crash":
    print("first line", file=sys.stderr)
    raise RuntimeError("it broke")
elif what == "kill":
    os.kill(os.getpid(), 9)
elif what == "hang":
    import time; time.sleep(99)
elif what == "leak":
    for new in (False, True):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(98)"], start_new_session=new)
"""


@pytest.mark.slow(but=1)
@pytest.mark.check(but=2)
@pytest.mark.parametrize(
    ("what", "reward", "failure"),
    [("file", 0.5, None), ("post", 0.25, None), ("none", None, None), ("leak", None, None),
     ("crash", None, "ended with exit code 1: .*RuntimeError: it broke"), ("kill", None, "ended with signal 9"),
     ("hang", None, "TimeoutError")],
)  # fmt: skip
def test_a_command(
    engine: NativeEngine, tmp_path: Path, what: str, reward: Any, failure: Any, monkeypatch: Any
) -> None:
    """Its reward, its failures with the end of its stderr, and nothing of it is left."""

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "program.py").write_text(COMMAND)
    words = [sys.executable, str(tmp_path / "program.py"), what]
    tree = run(engine, job(engine), command=words, timeout_s=6.0 if what == "hang" else 60.0)
    if failure is None:
        assert "errors" not in tree.meta, tree.meta["errors"]
        assert tree.meta.get("given_rewards", {}) == ({} if reward is None else {0: reward, 1: reward})
    else:
        assert re.search(failure, tree.meta["errors"][0]), tree.meta["errors"]
    deadline = time.monotonic() + 5
    while left := [p for p in psutil.process_iter() if _marked(p, str(tmp_path))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert list((tmp_path / "temporary").iterdir()) == []


def _marked(process: psutil.Process, folder: str) -> bool:
    try:
        return process.pid != os.getpid() and any(folder in word or "sleep(98)" in word for word in process.cmdline())
    except psutil.Error:
        return False


def test_held_out_problems_are_answered_by_the_agent_while_groups_are_open(
    engine: NativeEngine, tmp_path: Path
) -> None:
    with sampler(engine, agent=agent(tmp_path, TALK)) as made:
        flights = made.submit([job(engine, seed=seed) for seed in range(3)])
        (tree,) = made.generate([job(engine, n=1, temperature=0.0)])
        assert tree.num_leaves == 1
        done: list[Any] = []
        while len(done) < 3:
            done += made.step(0.05)
        assert {id(flight) for flight in done} == {id(flight) for flight in flights}


def test_groups_that_are_dropped_leave_nothing(engine: NativeEngine, tmp_path: Path) -> None:
    with sampler(engine, agent=agent(tmp_path, TALK)) as made:
        flights = made.submit([job(engine, seed=seed) for seed in range(3)])
        for _ in range(20):
            made.step(0.01)
        assert made.kept(flights)[0].why == "agent"
        made.drop([flight for flight in flights if not flight.done])
        for _ in range(20):
            made.step(0.01)
        assert not made._calls
        assert not made._door.episodes
    assert not engine.loop.busy
