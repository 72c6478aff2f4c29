"""report.html: what stands on it, that its numbers add up, and that it says what it lacks."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolltree.engine.app.report import figures, trees, write_report
from rolltree.engine.app.report.run_data import RunData, read_run
from rolltree.engine.app.report.trees import tokenizer_texts
from rolltree.engine.data.columns import COLUMNS, Column, declare
from rolltree.engine.data.store import write_rollouts
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import RunError, UserError

from ...support.fake_run import tree_rows, write_fake_run
from ..chat.test_streamed import MAKERS


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_fake_run(tmp_path / "run", steps=20)


def embedded(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="trees">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def missing(page: str) -> str:
    found = re.search(r'<section class="missing">(.*?)</section>', page, re.S)
    return found[1] if found else ""


def test_a_whole_run_makes_one_self_contained_page(run_dir: Path) -> None:
    target = write_report(run_dir)
    page = target.read_text()
    assert target == run_dir / "report.html"
    assert not missing(page)
    assert page.count("* plotly.js v") == 1
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="http', page)
    for text in (
        "fake-arithmetic",
        "dapo on chain_sum, treepo rollouts of 8",
        "accuracy before",
        "token ratio",
        "reward",
    ):
        assert text in page
    assert page.count('class="plotly-graph-div"') == 2 + len(figures.CURVES)
    assert not [p for p in run_dir.iterdir() if "partial" in p.name]
    assert write_report(run_dir).read_text().count("<h2>") == page.count("<h2>")


def test_problems_are_shown_by_their_estimated_success(run_dir: Path) -> None:
    assert "<h2>Problems</h2>" not in write_report(run_dir).read_text()
    row = {"tries": 8, "groups": 2, "dropped": 1, "step": 3, "mean": 0.254, "deviation": 0.1}
    rows = [row | {"id": str(i), "text": f"<b>{i}</b> & more", "value": "v", "step": i} for i in range(300)]
    table = {
        "step": 20,
        "of": 1000,
        "by": "kind",
        "problems": rows,
        "values": [row | {"value": "<v>", "problems": 300}],
    }
    (run_dir / "problems.json").write_text(json.dumps(table))
    page = write_report(run_dir).read_text()
    assert not missing(page)
    assert "Problems tried: 300 of 1,000." in page
    assert page.count('class="plotly-graph-div"') == 3 + len(figures.CURVES)
    assert "<td>&lt;v&gt;</td><td>25 ± 10</td><td>300</td><td>8</td>" in page
    listed = re.findall(r"<td>&lt;b&gt;(\d+)&lt;/b&gt; &amp; more</td>", page)
    assert listed == [str(i) for i in range(299, 99, -1)]  # those tried last
    (run_dir / "problems.json").write_text(json.dumps(table | {"of": None, "by": None, "problems": rows[:1]}))
    page = write_report(run_dir).read_text()
    assert "Problems tried: 1." in page
    assert "&lt;v&gt;" not in page
    (run_dir / "problems.json").write_text('{"step": 2')
    assert "problems.json cannot be read" in missing(write_report(run_dir).read_text())


def test_a_run_of_agents_has_its_curves_and_counts_episodes_once(run_dir: Path) -> None:
    config = run_dir / "config.toml"
    config.write_text(config.read_text().replace('program = "treepo"', 'program = "agent"'))
    absent = "calls of agents, shared by calls, time of tools, waiting for agents"
    assert f"Not recorded in metrics.jsonl: {absent}." in missing(write_report(run_dir).read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    given = {"agent/calls": 4.0, "agent/branches": 1.5, "agent/shared_ratio": 3.0, "agent/tool_s": 1.0}
    given |= {"perf/idle/agents_start": 0.5, "perf/idle/agents_tools": 2.0}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row | given) + "\n" for row in rows))
    page = write_report(run_dir).read_text()
    assert not missing(page)
    assert page.count('class="plotly-graph-div"') == 2 + len(figures.CURVES) + len(figures.OF_AGENTS)
    row = {"prompt_id": "p", "response_ids": [1], "node_ids": [1], "status": "stop", "prompt_ids": [2]}
    leaves = [
        row | {"leaf": 0, "node_ids": [1], "reward": 1.0, "episode": 0},
        row | {"leaf": 1, "node_ids": [2], "reward": 1.0, "episode": 0},
        row | {"leaf": 2, "node_ids": [3], "reward": 0.0, "episode": 1},
    ]
    tree = trees.build_tree(leaves, None)
    assert (tree["reward"], tree["leaves"]) == (0.5, 3)
    assert [node["values"]["episode"] for node in tree["nodes"][1:]] == [0, 0, 1]
    assert trees.build_tree([one | {"episode": -1} for one in leaves], None)["reward"] == pytest.approx(2 / 3, abs=1e-4)


def test_the_time_line_of_an_episode_is_its_calls_and_what_is_between() -> None:
    """Calls at the same time are in lanes of their own; the parts of a lane follow one another."""
    names = ("number", "role", "arrived", "begun", "first", "ended", "read", "sampled")
    calls = [
        dict(zip(names, values, strict=True))
        for values in [
            (2, "planner", 1.5, 1.5, 2.5, 3.0, 20, 4),
            (1, "", 1.0, 1.25, 1.75, 2.0, 10, 3),
            (3, "", 2.0, 2.0, None, 4.0, 30, 5),
        ]
    ]
    row = {"prompt_id": "p", "response_ids": [1], "node_ids": [1], "status": "stop", "prompt_ids": [2], "leaf": 0}
    row |= {"episode": 0, "reward": 0.5, "episode_s": 5.0, "calls": calls}
    other = row | {"leaf": 1, "node_ids": [2], "calls": None, "episode_s": None}
    (line,) = trees.build_tree([row, other], None)["episodes"]
    assert (line["seconds"], line["lanes"], line["reward"]) == (5.0, 2, 0.5)
    parts = [(part["kind"], part["begin"], part["end"], part["lane"]) for part in line["parts"]]
    assert parts == [
        ("tool", 0.0, 1.0, 0),
        ("waiting", 1.0, 1.25, 0), ("prefill", 1.25, 1.75, 0), ("decode", 1.75, 2.0, 0),
        ("prefill", 1.5, 2.5, 1), ("decode", 2.5, 3.0, 1),
        ("engine", 2.0, 4.0, 0),
        ("tool", 4.0, 5.0, 0),
    ]  # fmt: skip
    assert [part["about"] for part in line["parts"]][4] == "call 2 of planner: 20 tokens read, 4 sampled"
    assert trees.build_tree([row | {"calls": []}], None)["episodes"][0]["parts"] == [
        {"kind": "tool", "begin": 0.0, "end": 5.0, "lane": 0, "about": ""}
    ]
    del row["calls"]
    assert trees.build_tree([row], None)["episodes"] == []


def test_headline_is_computed_from_the_metrics(tmp_path: Path) -> None:
    rows = [
        {"step": 0.0, "eval/accuracy": 0.25, "timing_s/step": 10.0},
        {"step": 1.0, "timing_s/step": 25.0, "perf/throughput": 100.0, "tree/token_ratio": 2.0},
        {"step": 2.0, "timing_s/step": 35.0, "perf/throughput": 200.0, "tree/token_ratio": 3.0, "eval/accuracy": 0.6},
    ]
    run = RunData(tmp_path, {"evaluation": {"problems": 500}, "trainer": {"steps": 9}}, "", rows, [])
    cards = {card["label"]: (card["value"], card["note"]) for card in figures.headline(run)}
    assert cards == {
        "accuracy before": ("25.0 %", "500 held-out problems, step 0"),
        "accuracy after": ("60.0 %", "+35.0 points, step 2"),
        "steps": ("2", "of 9"),
        "time": ("1 min 10 s", "35.00 s a step"),
        "tokens": ("9.5k", "on all paths; 136 a second"),
        "token ratio": ("2.50x", "logical over unique, mean"),
    }


def test_the_account_adds_up_to_the_step_and_shows_what_is_open(run_dir: Path) -> None:
    table = figures.account(read_run(run_dir))
    assert table[-1]["name"] == "the step"
    assert math.isclose(sum(float(r["total"]) for r in table[:-1]), float(table[-1]["total"]), abs_tol=0.4)
    assert "not accounted for" not in {r["name"] for r in table}
    rows = [{"step": 1.0, "timing_s/step": 10.0, "timing_s/gen": 6.0}]
    table = figures.account(RunData(run_dir, {}, "", rows, []))
    assert [(r["name"], r["total"]) for r in table] == [
        ("sampling rollouts", "6.0"),
        ("not accounted for", "4.0"),
        ("the step", "10.0"),
    ]


def test_metrics_of_a_killed_and_resumed_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.1, "note": "text"}\n{"step": 2, "reward/mean": 0.2}\n{"step": 3, "rewa\n'
        '{"step": 2, "reward/mean": 0.25}\n{"step": 3, "reward/mean": NaN}\n[]\n'
    )
    run = read_run(tmp_path)
    assert run.series("reward/mean") == ([1, 2], [0.1, 0.25])
    assert [r["step"] for r in run.rows] == [1, 2, 3]
    assert any("2 of 6 lines of metrics.jsonl" in m and "line 3, 6" in m for m in run.missing)


def test_every_missing_part_is_named(run_dir: Path) -> None:
    (run_dir / "config.toml").unlink()
    (run_dir / "export" / "tokenizer.json").unlink()
    for file in (run_dir / "rollouts").glob("*.parquet"):
        file.write_bytes(b"not parquet")
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    said = missing(write_report(run_dir).read_text())
    for part in (
        "no config.toml",
        "tokenizer.json",
        "step_000001.parquet cannot be read",
        "held-out accuracy",
        "entropy",
    ):
        assert part in said, said
    (run_dir / "metrics.jsonl").unlink()
    for file in (run_dir / "rollouts").glob("*.parquet"):
        file.unlink()
    (run_dir / "config.toml").write_text('name = "only a name"\n')
    page = write_report(run_dir).read_text()
    assert "There is no metrics.jsonl" in missing(page)
    assert "no rollouts/*.parquet" in missing(page)
    assert "<h1>only a name</h1>" in page
    assert len(page) < 20_000  # no plot, so no plotly either


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no run directory"):
        write_report(tmp_path / "absent")
    with pytest.raises(UserError, match="is not the directory of a run"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_page_that_cannot_be_written_is_a_failed_run_and_leaves_nothing(run_dir: Path) -> None:
    (run_dir / "report.html").mkdir()
    before = sorted(run_dir.iterdir())
    with pytest.raises(RunError, match="cannot be written"):
        write_report(run_dir)
    assert sorted(run_dir.iterdir()) == before


# -- rollout trees ----------------------------------------------------------------------------------------------------


def leaf_paths(tree: dict[str, Any]) -> dict[int, tuple[list[int], str, list[float]]]:
    """Per leaf: token ids, text and log-probs of the path from the root."""
    out = {}
    for node in tree["nodes"]:
        for leaf in node["leaves"]:
            path, at = [], node
            while at["parent"] >= 0:
                path.append(at)
                at = tree["nodes"][at["parent"]]
            path.reverse()
            ids = [t for n in path for t in n["tokens"]]
            out[leaf["leaf"]] = (
                ids,
                "".join("".join(n["text"]) for n in path),
                [v for n in path for v in n["values"]["behaviour_logprob"]],
            )
    return out


def test_trees_on_the_page_hold_every_path_exactly_and_shared_tokens_once(run_dir: Path) -> None:
    page = write_report(run_dir).read_text()
    shown = {(t["step"], t["id"]): t for t in embedded(page)}
    recorded: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for file in sorted((run_dir / "rollouts").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            recorded.setdefault((row["step"], row["prompt_id"]), []).append(row)
    assert set(shown) < set(recorded)
    assert f"{len(shown)} of {len(recorded)} recorded trees are embedded" in page
    for key, tree in shown.items():
        paths = leaf_paths(tree)
        for row in recorded[key]:
            ids, text, logp = paths[row["leaf"]]
            assert ids == row["response_ids"]
            assert text.replace("<eos>", "") == row["response_text"]
            assert logp == pytest.approx(row["behaviour_logprob"], abs=1e-4)
        unique = len({(n, i) for r in recorded[key] for i, n in enumerate(r["node_ids"])})
        assert sum(len(n["tokens"]) for n in tree["nodes"]) == unique
        assert tree["nodes"][0]["text"] == [recorded[key][0]["prompt_text"]]


def test_prefix_leaf_empty_leaf_and_missing_values() -> None:
    def row(leaf: int, ids: list[int], nodes: list[int], **more: Any) -> dict[str, Any]:
        return {"step": 3, "prompt_id": "p", "leaf": leaf, "response_ids": ids, "node_ids": nodes, **more}

    rows = [
        row(0, [5, 6, 7], [1, 1, 2], advantage=1.0, reward=1.0),
        row(1, [5, 6], [1, 1], advantage=-2.0, reward=float("nan")),
        row(2, [], []),
        row(3, [5, 6, 8], [1, 1, 3], advantage=0.0, reward=0.0, behaviour_logprob=[float("nan"), -0.5, -1.0]),
    ]
    tree = trees.build_tree(rows, None)
    assert [(n["parent"], n["tokens"], [x["leaf"] for x in n["leaves"]]) for n in tree["nodes"]] == [
        (-1, [], [2]),
        (0, [5, 6], [1]),
        (1, [7], [0]),
        (1, [8], [3]),
    ]
    assert tree["nodes"][1]["values"]["advantage"] == pytest.approx(-1 / 3, abs=1e-4)  # mean of the leaves below
    assert tree["nodes"][1]["values"]["behaviour_logprob"] == [None, -0.5]
    assert tree["nodes"][3]["values"] == {"advantage": 0, "behaviour_logprob": [-1.0]}
    assert tree["nodes"][1]["text"] == ["⟨5⟩", "⟨6⟩"]
    assert tree["reward"] == 0.5
    json.dumps(tree, allow_nan=False)


def test_the_explorer_offers_every_column_that_trees_carried(tmp_path: Path) -> None:
    """A column declared by a method reaches the page through `write_rollouts`, and the report names it nowhere."""
    name = "report_test_value"
    declare(Column(name, np.float32, "path", "a value of a method", fill=np.nan))
    try:
        tree = TokenTree.from_sequences([1], [[2, 3], [2, 4]], columns={name: [[1.0, np.nan], [3.0, 7.0]]})
        tree.rewards |= {"reward": np.array([1, 0], np.float32), "format": np.array([0, 1], np.float32)}
        tree.set("entropy", 0.5)
        tree.meta |= {"prompt_id": "p", "task": "t", "prompt_text": "x"}
        write_rollouts(tmp_path / "rollouts" / "step_000001.parquet", 1, [tree], [["a", "b"]])
        page = write_report(tmp_path).read_text()
    finally:
        del COLUMNS[name]
    offered = re.search(r'<script type="application/json" id="columns">(.*?)</script>', page, re.S)
    assert offered
    columns = json.loads(offered[1])
    assert columns[name] == "a value of a method"
    assert next(iter(columns)) == "advantage"
    assert {"entropy", "reward/format", name} <= set(columns)
    shared, first, second = embedded(page)[0]["nodes"][1:]
    assert [n["values"][name] for n in (shared, second)] == [[2.0], [7.0]]  # a shared token: the mean of both responses
    assert name not in first["values"]
    assert [n["values"]["reward/format"] for n in (shared, first, second)] == [0.5, 0.0, 1.0]
    assert first["values"]["entropy"] == [0.5]


def test_what_a_model_writes_cannot_leave_its_script_element(tmp_path: Path) -> None:
    rows = tree_rows(1, 0, 0.5, np.random.default_rng(0))
    for row in rows:
        row["prompt_text"] = "</script><script>alert(1)</script> & <b>\u2028"
    (tmp_path / "rollouts").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rollouts" / "step_000001.parquet")
    page = write_report(tmp_path).read_text()
    assert "alert(1)</script>" not in page
    assert embedded(page)[0]["nodes"][0]["text"] == [rows[0]["prompt_text"]]


def test_caps_are_spread_over_the_run_and_said(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_STEPS", 2)
    monkeypatch.setattr(trees, "TREES_PER_STEP", 1)
    page = write_report(run_dir).read_text()
    assert [t["step"] for t in embedded(page)] == [1, 20]
    assert "2 of 18 recorded trees" in page
    assert "the other 16 are left out" in page
    monkeypatch.setattr(trees, "MAX_TOKENS", 1)
    assert "0 of 18 recorded trees" in missing(write_report(run_dir).read_text())


@pytest.mark.parametrize("name", ["byte level", "sentencepiece, drops a blank", "sentencepiece"])
def test_texts_of_tokens_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    """Special tokens, runs of bytes that are characters or none, and an id that the tokenizer lacks."""
    made = MAKERS[name]()
    made.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts_of = tokenizer_texts([tmp_path / "absent", tmp_path / "tokenizer.json"], [])
    assert texts_of is not None
    draw, last = random.Random(0), made.convert_tokens_to_ids("!")
    for _ in range(50):
        ids = [draw.randrange(len(made)) for _ in range(20)] + [last]
        assert "".join(texts_of(ids)) == made.decode(ids, skip_special_tokens=False)
    assert texts_of([last, len(made), last]) == ["!", f"⟨{len(made)}⟩", "!"]


def test_rollouts_without_node_ids_are_drawn_whole(run_dir: Path) -> None:
    for file in (run_dir / "rollouts").glob("*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns(["node_ids"]), file)
    page = write_report(run_dir).read_text()
    assert "no column node_ids" in missing(page)
    assert all(len(t["nodes"]) == 1 + t["leaves"] for t in embedded(page))
