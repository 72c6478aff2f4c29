"""The example of docs/agents.md runs: a role for an auxiliary call."""

from __future__ import annotations

import re
from pathlib import Path

from rolltree.engine.rollout import NativeEngine

from ...support.agents import agent, job, run
from ...support.tiny import ROOT


def test_an_auxiliary_call_has_a_role_and_is_not_the_answer(engine: NativeEngine, tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)
    named = agent(tmp_path, source)
    tree = run(engine, job(engine, n=2), agent=named, roles=["title"])
    assert "errors" not in tree.meta, tree.meta["errors"]
    assert tree.meta["roles"] == ["agent", "title"]
    assert tree.columns["answer"].tolist() == [True, False] * 2
    for leaf in range(4):
        rows = tree.path_rows(leaf)[int(tree.leaf_prompt[leaf]) :]
        assert set(tree.columns["role"][rows].tolist()) == {leaf % 2}
    without = run(engine, job(engine, n=2), agent=agent(tmp_path, source.replace(":title", "")))
    assert without.columns["answer"].tolist() == [False, True] * 2, "the last call answers"
