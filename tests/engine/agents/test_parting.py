"""The place where the prompts of a group's episodes differ is measured, and shown with its text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltree.engine.app.report import write_report
from rolltree.engine.data.concat import join
from rolltree.engine.data.parting import tree_parting
from rolltree.engine.data.store import write_rollouts
from rolltree.engine.loop.describe import describe
from rolltree.engine.record.metrics import Sums
from rolltree.engine.rollout import NativeEngine

from ...support.agents import agent, job, run

TELLS = """
import asyncio, itertools

number = itertools.count()

async def solve(task, client):
    own = next(number)

    async def ask(system, said):
        messages = [{"role": "system", "content": system}, *said]
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=4)
        return [*said, {"role": "assistant", "content": answer.choices[0].message.content}]

    async def late(call):
        await asyncio.sleep(0.05)
        await call

    talk = list(task["messages"])
    title = ask("A title.", talk)
    BEGIN
    await ask(SYSTEM, [*talk, {"role": "user", "content": f"and {own}"}])
    return 1.0
"""
AT_ONCE = "talk, _ = await asyncio.gather(ask(SYSTEM, talk), late(title))"  # a call counts that comes before any answer
BEFORE, AFTER = "await title; talk = await ask(SYSTEM, talk)", "talk = await ask(SYSTEM, talk); await title"


@pytest.mark.slow(but=3)
@pytest.mark.check(but=2)
@pytest.mark.parametrize("begin", [AT_ONCE, BEFORE, AFTER], ids=["at once", "before", "after"])
@pytest.mark.parametrize("system", ["'Be brief.'", "f'Be brief. It is {own}0 to 9.'"], ids=["same", "a time"])
def test_where_prompts_part(engine: NativeEngine, tmp_path: Path, begin: str, system: str) -> None:
    """Later prompts hold sampled text and differ in any case; calls of different kinds are not compared."""
    source = TELLS.replace("BEGIN", begin).replace("SYSTEM", system)
    tree = run(engine, job(engine, n=3, max_new_tokens=400), agent=agent(tmp_path, source), episodes=3)
    assert "errors" not in tree.meta, tree.meta["errors"]
    tree.rewards["reward"] = np.ones(tree.num_leaves, np.float32)
    sums = Sums()
    describe([tree], 400, sums)
    metrics, found = sums.means(), tree_parting(tree)
    if begin is BEFORE:  # only the title's prompt was read before any answer
        assert found is None
        return
    if system == "'Be brief.'":
        assert found is None
        assert "agent/first_difference" not in metrics
    else:
        words: Any = engine.tokenizer
        assert found is not None
        assert metrics["agent/first_difference"] == found.shared
        assert words.decode(found.prompt[: found.shared]).endswith("Be brief. It is ")
        assert found.prompt[found.shared] != found.other[found.shared]
        assert words.decode(found.prompt[found.shared :]).startswith(("00 to 9", "10 to 9", "20 to 9"))
        joined = tree_parting(join([tree, tree]))
        assert joined is not None
        assert joined.shared == found.shared
    tree.meta |= {"prompt_id": "p", "task": "t", "prompt_text": "x"}
    write_rollouts(tmp_path / "rollouts" / "step_000001.parquet", 1, [tree], [[""] * tree.num_leaves])
    page = write_report(tmp_path).read_text()
    (trees,) = re.findall(r'<script type="application/json" id="trees">(.*?)</script>', page, re.DOTALL)
    (shown,) = [one["parting"] for one in json.loads(trees)]
    assert ("Where prompts part" in page) == (shown is not None) == (found is not None)
    if found is not None:
        assert (shown["shared"], shown["of"]) == (found.shared, len(found.prompt))
        assert shown["here"] != shown["there"]
