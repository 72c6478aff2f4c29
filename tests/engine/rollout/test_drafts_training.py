"""Training with drafts: the same tokens at every step, weights to rounding, and texts that a resumed run has again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from rolltree.engine.app.cli import main
from rolltree.engine.rollout.native import loop
from rolltree.engine.rollout.native.drafts import DraftConfig, Drafts, on_path

from ...support.tiny import write_job


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[Drafts, int]:
    """The drafts of the runs' engines, and how many of their tokens were accepted."""
    made: dict[Drafts, int] = {}
    begin = Drafts.__init__

    def init(self: Drafts, config: DraftConfig) -> None:
        begin(self, config)
        made[self] = 0

    def counted(token: np.ndarray, before: np.ndarray, offset: np.ndarray) -> np.ndarray:
        kept = on_path(token, before, offset)
        made[list(made)[-1]] += int(np.count_nonzero(kept & (offset > 0)))
        return kept

    monkeypatch.setattr(Drafts, "__init__", init)
    monkeypatch.setattr(loop, "on_path", counted)
    return made


def sampled(directory: Path) -> list[list[list[int]]]:
    files = sorted((directory / "rollouts").glob("*.parquet"))
    return [pq.read_table(file, columns=["response_ids"]).column(0).to_pylist() for file in files]


@pytest.mark.slow
@pytest.mark.usefixtures("without_report")
def test_the_curve_is_the_same_with_drafts_and_after_a_resume(tmp_path: Path, made: dict[Drafts, int]) -> None:
    """Four passes over six problems."""
    toml = write_job(tmp_path)
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"prompt": f"{i} + {i} =", "answer": str(2 * i)}) + "\n" for i in range(6)))
    common = ["train", str(toml), "--data.tasks=[]", f"--data.path={problems}", "--evaluation.problems=0"]
    common += ["--evaluation.every=0", "--rollout.max_new_tokens=24", "--rollout.program=flat", "--rollout.n=8"]
    common += ["--rollout.program_options={}", "--algorithm.advantage=group_norm", "--rollout.temperature=0.02"]
    drafts = ["--rollout.drafts.rows=512", "--rollout.drafts.remembered=16384"]
    assert main([*common, "--trainer.steps=4", "--name=plain"]) == 0
    assert main([*common, "--trainer.steps=4", "--name=drafts", *drafts]) == 0
    assert main([*common, "--trainer.steps=2", "--name=resumed", *drafts]) == 0
    assert main([*common, "--trainer.steps=4", "--name=resumed", *drafts, "--resume"]) == 0
    whole, first, second = made
    plain, drafted, resumed = (tmp_path / "runs" / name for name in ("plain", "drafts", "resumed"))
    assert len(sampled(plain)) == 4
    assert sampled(plain) == sampled(drafted) == sampled(resumed)
    weights = [load_file(directory / "export" / "model.safetensors") for directory in (plain, drafted, resumed)]
    start = load_file(tmp_path / "model" / "model.safetensors")
    for name, weight in weights[0].items():
        for other in weights[1:]:
            torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(weights[0][name], start[name]) for name in start), "nothing was learned"
    assert made[whole] > made[first] > 0
    assert made[second] > 0
    assert second.index.tokens >= whole.index.tokens * 0.9, "the resumed run has the first one's texts again"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--rollout.drafts.rows=-1", "--rollout.drafts.rows"),
        ("--rollout.drafts=5000", "--rollout.drafts"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_an_error(
    given: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(write_job(tmp_path)), given, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
