"""`rolltree report RUN --watch`: the page on a run that goes on, in a browser and without one."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine.app.cli import main
from rolltree.engine.app.report import write_report
from rolltree.engine.app.report.changes import changes
from rolltree.engine.app.report.run_data import Metrics
from rolltree.engine.app.report.watch import Watched
from rolltree.engine.record.directory import EPISODES

from ...support import browser
from ...support.conversations import write_conversations
from ...support.fake_run import write_fake_run
from ...support.tiny import beside

CLI = [sys.executable, "-m", "rolltree.engine.app.cli"]
HOLDS = """
import asyncio, os

begun = 0

async def solve(task, client):
    global begun
    begun += 1
    number = begun
    answer = await client.chat.completions.create(model="m", messages=task["messages"], max_tokens=6)
    if number == 3:
        raise RuntimeError("a <b>fault</b>")
    while os.path.exists({first!r}) and not os.path.exists({go!r}):
        await asyncio.sleep(0.02)
    return float(len(answer.choices[0].message.content) % 3)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_fake_run(tmp_path / "run", steps=20)


def cut(run_dir: Path, step: int) -> Callable[[], None]:
    """Take what is after a step out of a run, and return what puts it back."""
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    later = [(file, file.read_bytes()) for file in sorted((run_dir / "rollouts").iterdir()) if number(file) > step]
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    for file, _ in later:
        file.unlink()

    def back() -> None:
        metrics.write_text("".join(lines))
        for file, content in later:
            file.write_bytes(content)

    return back


def number(file: Path) -> int:
    return int(file.stem.rpartition("_")[2])


@pytest.mark.check
def test_news_are_what_has_been_added(run_dir: Path) -> None:
    back = cut(run_dir, 10)
    watched = Watched(run_dir)
    page = watched.page()
    version = json.loads(re.search(r"let version = (.*?);", page)[1])  # type: ignore[index]
    assert "Step 10 was recorded" in page
    assert {tree["step"] for tree in of_page(page, "trees")} == {1, 10}
    assert watched.news(version) is None
    back()
    (run_dir / EPISODES).write_text(
        json.dumps(
            {
                "written_ns": 1,
                "waiting": 7,
                "failed": ["it <b>broke</b>"],
                "episodes": [
                    {
                        "number": 5,
                        "problem": "<i>six</i>",
                        "seconds": 1.5,
                        "calls": 2,
                        "sampled": 30,
                        "now": "the agent works",
                    }
                ],
            }
        )
    )
    news = watched.news(version)
    assert news
    assert "Step 20 was recorded" in news["html"]
    assert {tree["step"] for tree in news["trees"]} == {20}
    assert news["steps"] == [1, 10, 20]
    xs = [change for name, of_plot in news["plots"].items() for change in of_plot if change[0][-1] == "x"]
    assert [value for _, _, value in xs] == [[*range(11, 21)]] * len(xs) != [], "the new points alone"
    assert all(f'id="{name}"' in page for name in news["plots"])
    for said in ("1 episodes, 7 that wait", "it &lt;b&gt;broke", "&lt;i&gt;six", "the agent works"):
        assert said in news["html"], said
    json.dumps(news, allow_nan=False)
    (run_dir / EPISODES).unlink()
    (run_dir / "export" / "config.json").write_text("{}")
    assert watched.news(""), "the report is still to come"
    os.utime(run_dir / "export" / "config.json", (1, 1))
    assert watched.news(news["version"]) == {}
    (run_dir / "export" / "config.json").unlink()
    written = write_report(run_dir).read_text()
    assert watched.news(news["version"]) == {}
    assert watched.page() == written, "after the end the page is the report"
    assert "Episodes under way" not in written
    with (run_dir / "metrics.jsonl").open("a") as file:  # it is resumed
        file.write('{"step": 21, "reward/mean": 0.5}\n')
    assert "Step 21 was recorded" in watched.page()


def of_page(page: str, name: str) -> Any:
    """Return the data of an element of a page."""
    return json.loads(re.search(rf'id="{name}">(.*?)</script>', page, re.S)[1])  # type: ignore[index]


def renewed(page: Any, changes: Any) -> Any:
    """Return what a page makes of its plot and the changes."""
    page = json.loads(json.dumps(page))
    for place, kept, value in json.loads(json.dumps(changes, allow_nan=False)):
        *path, last = place
        at = functools.reduce(lambda part, name: part[name], path, page)
        at[last] = value if kept is None else at[last][:kept] + value
    return page


EMPTY: dict[str, Any] = {"data": None, "layout": None}


def test_changes_make_one_plot_into_the_other() -> None:
    rng = random.Random(0)

    def plot() -> dict[str, Any]:
        lines = [{"y": [rng.choice((0.5, 1.5)) for _ in range(rng.randrange(4))]} for _ in range(rng.randrange(3))]
        menus = {} if rng.random() < 0.3 else {"menus": [{"args": [{"x": [line["y"]]}, "title"]} for line in lines]}
        return {"data": lines, "layout": {"height": rng.randrange(2), **menus}}

    for _ in range(500):
        before, now = plot(), plot()
        assert renewed(before, [*changes(before, now)]) == now
        twice = renewed(renewed(before, [*changes(before, now)]), [*changes(before, now)])
        assert twice == now, "what a page has taken in part, it may take again"
        assert renewed(EMPTY, [*changes(EMPTY, now)]) == now
    assert [*changes({"y": [1, 2]}, {"y": [1, 2, 3]})] == [(["y"], 2, [3])]
    assert [*changes({"y": [1, 2]}, {"y": [1, 2]})] == []


def written(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_page_has_the_plots_of_the_files_whatever_happens_to_them(tmp_path: Path) -> None:
    """Steps are added, a metric begins late, values are not finite, and a resumed run replaces the end of the file."""
    run_dir = write_fake_run(tmp_path, steps=100)
    metrics = run_dir / "metrics.jsonl"
    (run_dir / "config.toml").write_text("")  # it goes on
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    late = [{name: row[name] for name in row if name != "actor/entropy"} for row in rows]
    other = [row | {"reward/mean": -1.0} for row in rows]
    odd = {"step": 101, "reward/mean": math.nan, "timing_s/step": math.inf, "actor/grad_norm": None}
    states = [
        written(late[:30]), written(late[:39]), written(late[:39] + rows[39:45]), written(late[:39] + rows[39:90])[:-9],
        written(rows), written([*rows, odd]), written(rows[:50] + other[50:60]), written(rows[:50] + other[50:99]),
        written(rows[:50] + other[50:] + other[50:]), "", written(other[:3]), '{"step": 1e999}\n' + written(rows),
    ]  # fmt: skip
    watched, version, page = Watched(run_dir), "", dict[str, Any]()
    for number, state in enumerate(states):
        metrics.write_text(state)
        os.utime(metrics, (number + 1, number + 1))
        news = watched.news(version)
        assert news
        plots = {name: renewed(page.get(name, EMPTY), of_plot) for name, of_plot in news["plots"].items()}
        whole = Watched(run_dir).news("")
        assert whole
        assert plots == {name: renewed(EMPTY, of_plot) for name, of_plot in whole["plots"].items()}, number
        assert news["html"] == whole["html"]
        version, page = news["version"], plots
    fresh = Watched(run_dir).page()
    assert page == {name: of_page(fresh, f"{name}-figure") for name in page}


def test_trees_that_a_resumed_run_writes_again_are_sent_again(run_dir: Path) -> None:
    back = cut(run_dir, 10)
    watched = Watched(run_dir)
    version = watched.news("")["version"]  # type: ignore[index]
    again = run_dir / "rollouts" / "step_000010.parquet"
    again.write_bytes((run_dir / "rollouts" / "step_000001.parquet").read_bytes())
    back()
    news = watched.news(version)
    assert news
    assert [tree["step"] for tree in news["trees"]].count(20) > 0 < [tree["step"] for tree in news["trees"]].count(1)
    for file in (run_dir / "rollouts").iterdir():
        file.unlink()
    emptied = watched.news(news["version"])
    assert emptied
    assert (emptied["trees"], emptied["steps"]) == ([], [])


def test_metrics_are_read_on_from_where_they_were(tmp_path: Path) -> None:
    path, kept = tmp_path / "metrics.jsonl", Metrics()
    pieces = [
        '{"step": 1, "a": 1}\n{"step": 2,',
        ' "a": 2}\n',
        "no json\n",
        '{"step": 2, "a": 3}',
        "\n",
        '{"step": 3, "a": 4}\n',
    ]
    assert kept.read(path, []) == []
    written = ""
    for piece in pieces:
        written += piece
        path.write_text(written)
        said, whole = list[str](), list[str]()
        assert kept.read(path, said) == Metrics().read(path, whole)
        assert said == whole
    assert [row["a"] for row in kept.read(path, [])] == [1, 3, 4]
    path.write_text('{"step": 9, "a": 9}\n')
    assert [row["step"] for row in kept.read(path, [])] == [9], "a file that is shorter is another one"
    path.write_text('{"step": 7, "a": 9}\n{"step": 8, "a": 9}\n')
    assert [row["step"] for row in kept.read(path, [])] == [7, 8], "so is one that is longer, and has another beginning"


def _heed_interrupts() -> None:
    """Undo that shells let what they start in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def served(run_dir: Path) -> Iterator[str]:
    """The address of the page, served by the command."""
    command = [*CLI, "report", str(run_dir), "--watch"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), line
        yield line.split()[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_server_is_this_machines_alone(run_dir: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    with served(run_dir) as address:
        for path, headers, status in (
            ("", {}, 200), ("", {"Host": "evil.example:80"}, 403), ("../config.toml", {}, 404), ("news", {}, 500),
            ("news?version=x", {}, 200),
        ):  # fmt: skip
            try:
                answered = urllib.request.urlopen(urllib.request.Request(address + path, headers=headers)).status
            except urllib.error.HTTPError as error:
                answered = error.code
            assert answered == status, path
        port = address.split(":")[2].strip("/")
        assert main(["report", str(run_dir), "--watch", "--port", port]) == 2
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before, "the run's files are only read"


@pytest.mark.slow
def test_the_page_is_made_without_torch(run_dir: Path) -> None:
    """A process that has imported it takes seconds to begin and, after Ctrl-C, to end."""
    code = "import sys; from pathlib import Path; from rolltree.engine.app.report.watch import Watched"
    code += f"; Watched(Path({str(run_dir)!r})).page(); print({{'torch', 'numba'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_one_run_is_watched(run_dir: Path, capsys: Any) -> None:
    assert main(["report", str(run_dir), str(run_dir), "--watch"]) == 2
    assert "--watch shows one run" in capsys.readouterr().err
    assert main(["report", str(run_dir / "absent"), "--watch"]) == 2
    assert "There is no run directory" in capsys.readouterr().err


@pytest.mark.check
@pytest.mark.skipif(browser.PROGRAM is None, reason="there is no Chromium")
def test_plots_and_choices_stay_where_they_are(tmp_path: Path) -> None:
    """The axis of accuracy, a step and a colour that were chosen; what was added is drawn."""
    run_dir = write_fake_run(tmp_path / "run", steps=120)
    back = cut(run_dir, 80)
    accuracy = "document.getElementById('plot-accuracy')"
    with served(run_dir) as address, browser.browser() as page:
        page.open(address)
        page.until(f"{accuracy}?.data")
        before = page.value(f"{accuracy}.calcdata[0].length")
        page.value(f"Plotly.relayout({accuracy}, 'updatemenus[0].active', 1) && 0")
        first = page.value("document.querySelector('#step option').value")
        page.value(f"document.getElementById('step').value = '{first}'; document.getElementById('step').onchange()")
        page.value("document.getElementById('colour').value = 'entropy'")
        page.value("window.same = true")
        back()
        page.until("document.getElementById('live').textContent.includes('Step 120')")
        assert page.value("document.getElementById('stopped').hidden")
        assert page.value("window.same"), "the page was renewed, not loaded again"
        assert page.value(f"{accuracy}.calcdata[0].length") > before
        menu = f"{accuracy}.layout.updatemenus[0]"
        assert page.value(f"{menu}.active") == 1
        assert page.value(f"{accuracy}.data[0].x.join() === {menu}.buttons[1].args[0].x[0].join()")
        assert page.value("[...document.querySelectorAll('#step option')].at(-1).value") == "120"
        assert page.value("document.getElementById('colour').value") == "entropy"
        cut(run_dir, 60)  # it is resumed
        metrics = run_dir / "metrics.jsonl"
        metrics.write_text(
            metrics.read_text() + written([{"step": step, "reward/mean": 3.0} for step in range(61, 150)])
        )
        page.until("document.getElementById('live').textContent.includes('Step 149')")
        reward = "document.getElementById('plot-0')"
        assert page.value("window.same")
        assert page.value(f"{reward}.data[0].x.join()") == ",".join(map(str, range(1, 150)))
        assert page.value(f"{reward}.calcdata[0].filter((point) => point.y === 3).length") == 89
        assert page.errors == []


@pytest.mark.check
@pytest.mark.skipif(browser.PROGRAM is None, reason="there is no Chromium")
def test_a_browser_sees_a_run_go_on(tmp_path: Path) -> None:
    """A run of agents, whose episodes wait after the first step until the page is there."""
    toml, go = write_conversations(tmp_path), tmp_path / "go"
    run_dir = tmp_path / "runs" / "seen"
    first = run_dir / "rollouts" / "step_000001.parquet"
    (tmp_path / "agent.py").write_text(HOLDS.format(first=str(first), go=str(go)))
    agent = {"program": "agent", "program_options": {"agent": "agent.py:solve", "call_tokens": 12}}
    beside(toml, toml.stem, rollout=agent, algorithm={"advantage": "group_norm"})
    log = (tmp_path / "log").open("w")
    flags = [f"--output_dir={tmp_path / 'runs'}", "--trainer.steps=4", "--name=seen"]
    process = subprocess.Popen([*CLI, "train", str(toml), *flags], stdout=log, stderr=log, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not first.exists() or not (run_dir / EPISODES).exists():
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        with served(run_dir) as address, browser.browser() as page:
            page.open(address)
            page.until("document.getElementById('live').textContent.includes('Step 1 was')")
            page.until("document.getElementById('under_way').innerText.includes('the agent works')")
            assert "a <b>fault</b>" in page.value("document.getElementById('under_way').innerText")
            steps = "[...document.querySelectorAll('#step option')].map((option) => option.value).join()"
            assert page.value(steps) == "1"
            page.screenshot(tmp_path / "during.png")
            go.touch()
            page.until(f"{steps}.includes('2')")
            page.until("!document.getElementById('live')")  # the run has ended
            page.until("document.readyState === 'complete'")
            assert process.wait(60) == 0, (tmp_path / "log").read_text()
            last = page.value("document.querySelector('main').innerText")
            assert page.value(steps) == "1,2,3,4"
            page.open(f"file://{run_dir / 'report.html'}")
            assert page.value("document.querySelector('main').innerText") == last
            page.screenshot(tmp_path / "after.png")
            assert page.errors == []
        assert not (run_dir / EPISODES).exists()
    finally:
        go.touch()
        process.kill()
        process.wait()
        log.close()
