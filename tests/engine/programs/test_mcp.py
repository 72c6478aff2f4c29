"""Tools of servers of MCP: what is offered, called and answered, sessions, and servers that misbehave."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine import LeafStatus
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.config import load_config
from rolltree.engine.app.console import Console
from rolltree.engine.errors import UserError
from rolltree.engine.programs import EnvironmentTurns
from rolltree.engine.programs.chat.toolbox import tool_schemas
from rolltree.engine.programs.chat.turns import ToolBox
from rolltree.engine.record.failures import kind, unsampled
from rolltree.engine.rollout import EngineConfig, NativeEngine

from ...support import serving
from ...support.conversations import write_conversations
from ...support.tiny import ROOT, as_toml, beside
from .test_environment import WORDS, call, said, talk

pytest.importorskip("mcp", reason="the SDK of MCP is not installed: pip install rolltree[mcp]")

from rolltree.engine.programs.servers.background import BACKGROUND
from rolltree.engine.programs.servers.contents import text_of
from rolltree.engine.rollout.calls import CallPool

SERVER = str(ROOT / "tests/support/mcp_server.py")


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return NativeEngine(serving.model(), WORDS, EngineConfig(kv_tokens=8192))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """A file with a line for each start of the server; all have ended at the end of the test."""
    yield tmp_path / "log"
    BACKGROUND.close()
    assert [pid for pid in starts(tmp_path / "log") if Path(f"/proc/{pid}").exists()] == []


def starts(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def server(log: Path, **options: Any) -> dict[str, Any]:
    return {"mcp": [sys.executable, SERVER, str(log)], **options}


def turns(*texts: str) -> Any:
    return lambda before: texts[min(before.count("<assistant>"), len(texts) - 1)]


def answers(tree: Any, leaf: int = 0) -> list[str]:
    return re.findall(r"<tool>(.*?)<end>", said(tree, leaf), re.S)


def test_tools_are_offered_with_references_resolved(log: Path) -> None:
    offered = tool_schemas(["calculator", server(log)])
    assert [schema["function"]["name"] for schema in offered] == ["calculator", "count", "where", "fail", "misbehave"]
    where = offered[2]["function"]
    assert where["description"] == "It can where."
    assert where["parameters"]["properties"]["point"]["properties"] == {"x": {"type": "integer"}}
    assert "$" not in json.dumps(where)
    with pytest.raises(UserError, match="two tools called 'count'"):
        tool_schemas([server(log), server(log, shared=True)])


@pytest.mark.check(but=1)
@pytest.mark.parametrize("shared", [False, True])
def test_an_episode_has_a_session_of_its_own_or_shares_one(engine, log: Path, shared: bool) -> None:
    tools = [server(log, shared=shared), "calculator"]
    script = turns(call("count", by=2) + call("calculator", expression="3"), call("count") + call("fail"), "ok")
    tree = talk(engine, script, EnvironmentTurns(), n=3, tools=tools, max_new_tokens=400)
    counts = sorted(int(answers(tree, leaf)[2]) for leaf in range(3))
    assert all(answers(tree, leaf)[1] == "3" for leaf in range(3))
    assert all(answers(tree, leaf)[3] == "error: no luck" for leaf in range(3))
    assert counts == [3, 3, 3] if not shared else max(counts) == 9
    assert len(starts(log)) == (1 if shared else 3)


def test_a_picture_is_an_error_of_the_tool_by_its_name(engine, log: Path) -> None:
    arguments = {"point": {"x": 4}, "name": "a"}  # as a parameter of ours is called
    where = f"<tool_call>{json.dumps({'name': 'where', 'arguments': arguments})}</tool_call>"
    assert answers(talk(engine, turns(where, "ok"), EnvironmentTurns(), tools=[server(log)])) == [
        "a at 4\nerror: where gave image/png, which conversations with tools cannot hold; only its texts are shown"
    ]


@pytest.mark.parametrize(("result", "text"), [
    ({"content": [], "structuredContent": {"a": 1}}, '{"a": 1}'),
    ({"content": [{"type": "text", "text": "b"}], "structuredContent": {"a": 1}}, "b"),
    ({"content": [{"type": "resource_link", "uri": "file:///a", "name": "a", "mimeType": "text/plain"}]},
     "[resource file:///a]"),
    ({"content": [{"type": "resource", "resource": {"uri": "a:b", "text": "c"}}], "isError": True}, "error: c"),
    ({"content": [{"type": "resource", "resource": {"uri": "a:b", "blob": "aGk=", "mimeType": "a/pdf"}}]},
     "error: t gave a/pdf, which"),
    ({"content": [{"type": "audio", "data": "aGk=", "mimeType": "audio/wav"}]}, "error: t gave audio/wav, which"),
])  # fmt: skip
def test_results_as_texts(result: dict[str, Any], text: str) -> None:
    assert text_of(result, "t").startswith(text)


def test_tools_that_are_named_are_offered_and_variables_passed(engine, log: Path, monkeypatch) -> None:
    monkeypatch.setenv("MCP_SECRET", "hidden")
    few = server(log, tools=["misbehave", "count"], env={"TOKEN": "a-${MCP_SECRET}"})
    assert [schema["function"]["name"] for schema in tool_schemas([few])] == ["count", "misbehave"]
    script = turns(call("misbehave", how="tell TOKEN") + call("where"), call("misbehave", how="refuse -32000"), "ok")
    first, absent, refused = answers(talk(engine, script, EnvironmentTurns(), tools=[few], max_new_tokens=400))
    assert first == "a-hidden"
    assert absent.startswith("error: that is no call of a tool")
    assert refused == "error: busy", "an error of the server with the SDK's own code does not end the session"
    with pytest.raises(UserError, match="lists no tool 'add', which `tools` names; it has count, where"):
        tool_schemas([server(log, tools=["add"])])
    with pytest.raises(UserError, match="more than 100 pages"):
        tool_schemas([server(log, env={"MCP_ENDLESS": "1"})])


@pytest.mark.parametrize(("tool", "reason"), [
    ({"mcp": "http://127.0.0.1:9/mcp", "headers": {"A": "${MCP_ABSENT}"}}, "variable MCP_ABSENT, which is not set"),
    ({"mcp": "http://127.0.0.1:9/mcp", "headers": {"A": "Bearer ${MCP_LINE}"}}, "The header `A` .* no header may have"),
    ({"mcp": "http://127.0.0.1:9/mcp?key=${MCP_LINE}"}, "stand in `headers` alone"),
    ({"mcp": [sys.executable], "headers": {"A": "b"}}, "key 'headers'; one with a command takes env"),
    ({"mcp": "http://127.0.0.1:9/mcp", "env": {"A": "b"}}, "key 'env'; one with an address takes headers"),
    ({"mcp": [sys.executable], "tools": []}, "at least one of its tools"),
])  # fmt: skip
def test_entries_that_do_not_fit(tool: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_LINE", "s3cr3t\n")
    with pytest.raises(UserError, match=reason) as raised:
        tool_schemas([tool])
    assert "s3cr3t" not in str(raised.value)


def test_calls_that_wait_for_servers_take_no_place_of_others() -> None:
    async def barrier() -> asyncio.Barrier:
        return asyncio.Barrier(3)

    async def meet(met: asyncio.Barrier) -> int:
        return await met.wait()

    met, pool = BACKGROUND.run(barrier()), CallPool(1)
    calls = [pool.submit(5.0, lambda: BACKGROUND.wait(meet(met), 5.0)) for _ in range(3)]
    assert sorted(future.result(10.0) for future in calls) == [0, 1, 2]
    late = pool.submit(5.0, lambda: BACKGROUND.wait(asyncio.sleep(10.0), 0.05))
    with pytest.raises(TimeoutError):
        late.result(5.0)


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("how", "reason", "sort"),
    [("die", "ended the session.*: it broke", "raised"), ("hang", "", "timeout"), ("hang at once", "", "")],
)
def test_a_server_that_dies_or_hangs_fails_the_episode_alone(engine, log, how, reason, sort, shared, monkeypatch):
    monkeypatch.setattr("rolltree.engine.programs.servers.mcp.PING_S", 0.2)
    tools = [server(log, shared=shared)]
    tool_schemas(tools)
    script = turns(call("count"), call("misbehave", how=how), "ok")
    tree = talk(engine, script, EnvironmentTurns(timeout_s=1.0), tools=tools)
    if not sort:
        assert list(tree.status) == [LeafStatus.STOP]
        return
    assert list(tree.status) == [LeafStatus.FAILED]
    (why,) = unsampled(tree).values()
    assert re.search(reason, why), why
    assert kind(why) == sort
    time.sleep(0.5)  # for the look at the shared one
    again = talk(engine, turns(call("count"), "ok"), EnvironmentTurns(), tools=tools)
    assert answers(again) == ["1"]
    assert len(starts(log)) == 2


@pytest.mark.slow
def test_a_flood_of_messages_and_words_is_passed_over(engine, log: Path) -> None:
    script = turns(call("misbehave", how="flood"), call("count"), "ok")
    assert answers(talk(engine, script, EnvironmentTurns(), tools=[server(log)])) == ["done", "1"]


@pytest.mark.slow
def test_ten_megabytes_are_cut_and_end_the_response_where_they_do_not_fit(engine, log: Path) -> None:
    box = ToolBox({"tools": [server(log)]})
    text = asyncio.run(box.call("misbehave", {"how": "long 10000000"}))
    assert text.endswith("x ... (9900000 characters left out)")
    assert len(text) < 100_100
    tree = talk(engine, turns(call("misbehave", how="long 10000000")), EnvironmentTurns(), tools=[server(log)])
    assert list(tree.status) == [LeafStatus.LENGTH]


@pytest.mark.check
def test_other_tools_than_the_prompt_offers_fail_the_episode(engine, log: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MCP_CHANGED", str(tmp_path / "changed"))
    tools = [server(log)]
    first = talk(engine, turns(call("misbehave", how="change"), call("count"), "ok"), EnvironmentTurns(), tools=tools)
    assert answers(first) == ["done", "1"]
    later = talk(engine, turns(call("count")), EnvironmentTurns(), tools=tools)
    assert "lists other tools than when the prompts were written" in unsampled(later)[0]


def test_a_session_is_not_copied_but_shared_ones_are(engine, log: Path) -> None:
    own, shared = ToolBox({"tools": [server(log)]}), ToolBox({"tools": [server(log, shared=True)]})
    copy.deepcopy(own)
    for box in (own, shared):
        assert box.state_dict() == {}
        assert asyncio.run(box.call("count", {})) == "1"
    assert own.state_dict() is None  # a checkpoint cannot hold it
    assert shared.state_dict() == {}
    assert asyncio.run(copy.deepcopy(shared).call("count", {})) == "2"
    with pytest.raises(UserError, match="cannot copy a session"):
        copy.deepcopy(own)
    with pytest.raises(ValueError, match="set `shared` to true"):
        talk(engine, turns("a"), EnvironmentTurns(ways=[2]), n=2, tools=[server(log)])


@pytest.mark.parametrize(("tool", "reason"), [
    ({"mcp": ["no-such-program"]}, "no program 'no-such-program'"),
    ({"mcp": [sys.executable, "-c", "raise SystemExit('no key')"]}, "ended the session .*: no key"),
    ({"mcp": "http://127.0.0.1:9/mcp"}, "`http://127.0.0.1:9/mcp` ended the session"),
    ({"mcp": "python server.py"}, "as a list"), ({"mcp": []}, "as a list"),
    ({"mcp": [sys.executable], "share": True}, "has the key 'share'"), ({"other": 1}, "names no server"),
])  # fmt: skip
def test_what_cannot_be_used_is_told(tool: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        tool_schemas([tool])


@contextmanager
def addressed(**variables: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The server at an address, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port), "http"], env=os.environ | variables)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/")
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.1)
        yield process, f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()
        BACKGROUND.close()


@pytest.mark.slow
def test_a_server_at_an_address() -> None:
    with addressed() as (process, address):
        boxes = [ToolBox({"tools": [{"mcp": address}]}) for _ in range(3)]
        assert [asyncio.run(box.call("double", {"number": 4})) for box in boxes] == ["8"] * 3
        assert asyncio.run(boxes[0].call("double", {"number": "x"})).startswith("error: ")
        assert asyncio.run(boxes[0].call("long", {"number": 2_000_000})).endswith("(1900000 characters left out)")
        process.kill()
        process.wait()
        with pytest.raises(UserError, match="ended the session"):
            asyncio.run(asyncio.wait_for(boxes[0].call("double", {"number": 4}), 20))


@pytest.mark.slow
def test_a_server_that_wants_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MCP_TOKEN", "s3cr3t")
    with addressed(MCP_GUARD="Bearer s3cr3t") as (_, address):
        right = {"mcp": address, "headers": {"Authorization": "Bearer ${MCP_TOKEN}"}}
        box = ToolBox({"tools": [right]})
        assert asyncio.run(box.call("double", {"number": 4})) == "8"
        box.close()
        for wrong in ({"mcp": address}, {"mcp": address, "headers": {"Authorization": "Basic ${MCP_TOKEN}"}}):
            with pytest.raises(UserError, match="401") as raised:
                tool_schemas([wrong])
            assert "s3cr3t" not in str(raised.value)
        toml = beside(
            write_conversations(tmp_path / "job"), "served", data={"tools": [right], "max_prompt_tokens": 80},
            rollout={"program_options": {"environment": "tools", "turn_tokens": 12}, "max_new_tokens": 40},
            reward={"verifier": "reward.py:judge"}, trainer={"steps": 1},
        )  # fmt: skip
        assert build(load_config(toml, [f"--output_dir={tmp_path}/runs"]), console=Console()).run().steps == 1
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert any(b"MCP_TOKEN" in path.read_bytes() for path in files)
    assert not [path for path in files if b"s3cr3t" in path.read_bytes()], "no secret is in the run's files"


@pytest.mark.slow(but=1)
@pytest.mark.check
def test_a_run_offers_them_and_ends_them(log: Path, tmp_path: Path) -> None:
    toml = beside(
        write_conversations(tmp_path / "job"), "served", data={"tools": [server(log)], "max_prompt_tokens": 80},
        rollout={"program_options": {"environment": "tools", "turn_tokens": 12}, "max_new_tokens": 40}, 
        reward={"verifier": "reward.py:judge"},
        trainer={"steps": 1},
    )  # fmt: skip
    assert "mcp" in toml.read_text()
    config = load_config(toml, [f"--output_dir={tmp_path}/runs"])
    made = build(config, console=Console())
    assert made.source.peek(1)[0].text.startswith("count,where,fail,misbehave,")
    assert made.run().steps == 1
    assert [pid for pid in starts(log) if Path(f"/proc/{pid}").exists()] == []
    for bad in ({"mcp": ["python"], "share": True}, {"mpc": ["python"]}):
        with pytest.raises(UserError, match=r"data\.tools"):
            load_config(toml, [f"--data.tools={as_toml([bad])}"])


@pytest.mark.slow
def test_a_killed_run_leaves_no_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = (
        "import asyncio\nfrom rolltree.engine.programs.chat.turns import ToolBox\n"
        f"box = ToolBox({{'tools': [{server(log)!r}]}})\n"
        "print(asyncio.run(box.call('count', {})), flush=True)\nasyncio.run(box.call('misbehave', {'how': 'hang'}))\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "1\n"
    (pid,) = starts(log)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    for _ in range(100):
        if not (left := Path(f"/proc/{pid}").exists()):
            break
        time.sleep(0.1)
    assert not left
