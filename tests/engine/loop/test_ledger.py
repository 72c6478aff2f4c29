"""The ledger of tokens: each sampled token was trained, was dropped for a reason, or is open."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console as RichConsole

from rolltree.engine import Orchestrator, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.loop.buffer import LedgerError, TokenLedger
from rolltree.engine.loop.controller import Controller

QUIET = ["--evaluation.problems=0", "--evaluation.every=0"]


def orchestrate(toml: Path, name: str, *more: str) -> Orchestrator:
    config = load_config(str(toml), [f"--name={name}", *QUIET, *more])
    return build(config, console=Console(RichConsole(file=io.StringIO(), width=300)))


def written(run: Orchestrator) -> int:
    """Count the distinct tokens of the responses in the run's files; those of a flat program are all sampled."""
    tokens = set()
    for file in sorted((run.options.directory / "rollouts").glob("*.parquet")):
        for row in pq.read_table(file, columns=["group", "node_ids"]).to_pylist():
            tokens |= {(row["group"], place, node) for place, node in enumerate(row["node_ids"])}
    return len(tokens)


def test_all_tokens_that_the_engine_sampled_are_trained_or_dropped(toml: Path) -> None:
    run = orchestrate(toml, "plain", "--trainer.steps=3", "--rollout.drafts.rows=0")
    summary = run.run()
    ledger = run.buffer.ledger
    assert ledger.sampled == run.sampler.engine.loop.counts["sampled_tokens"] > 0
    assert ledger.trained + sum(ledger.dropped.values()) == ledger.sampled == written(run)
    assert f"{ledger.sampled:,} = {ledger.trained:,} trained" in str(summary.tokens)


def test_tokens_of_groups_that_a_callback_drops_are_named(toml: Path, tmp_path: Path) -> None:
    (tmp_path / "drops.py").write_text(
        "from rolltree.engine.methods.groups import Drop\nseen = []\n"
        "def some(tree):\n    seen.append(1)\n    return Drop('odd') if len(seen) % 2 else None\n"
    )
    run = orchestrate(
        toml, "drops", "--trainer.steps=2", f"--loop.callback={tmp_path / 'drops.py'}:some", "--loop.staleness=1"
    )
    summary = run.run()
    assert run.buffer.ledger.dropped["odd"] > 0
    assert "odd" in str(summary.tokens)


def test_a_run_that_forgets_to_enter_tokens_says_so(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = Controller.end_step

    def twice(self: Controller, batch: list, *rest: object) -> None:  # type: ignore[type-arg]
        self.buffer.ledger.trained += batch[0].sampled
        end(self, batch, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Controller, "end_step", twice)
    with pytest.raises(LedgerError, match="counted twice"):
        orchestrate(toml, "twice", "--trainer.steps=1").run()
    with pytest.raises(LedgerError, match="5 of 9 sampled tokens are missing"):
        TokenLedger(sampled=9, trained=4).summary(0)
