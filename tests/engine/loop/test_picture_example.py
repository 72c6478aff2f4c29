"""`examples/pictures_cpu.toml`, in small: its pictures show what their rows say, and a run makes its model."""

from __future__ import annotations

import io
import json
import random
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rolltree.engine.app.cli import main
from rolltree.engine.data.media import FIRST_ID

from ...support.tiny import ROOT

SMALL = {
    "PICTURES = 3072": "PICTURES = 40",
    "STEPS = 240": "STEPS = 2",
    "PROBLEMS_PER_STEP = 64": "PROBLEMS_PER_STEP = 4",
}
OVERRIDES = (
    "--trainer.steps=1", "--trainer.prompts_per_step=3", "--rollout.n=4", "--evaluation.problems=6",
    "--checkpoint.every=1", "--reward.workers=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a small copy of the example has run."""
    home = tmp_path_factory.mktemp("example")
    shutil.copy(ROOT / "examples" / "pictures_cpu.toml", home)
    text = (ROOT / "examples" / "pictures_cpu.py").read_text()
    for whole, small in SMALL.items():
        assert f"\n{whole}\n" in text
        text = text.replace(whole, small)
    (home / "pictures_cpu.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["train", "pictures_cpu.toml", *OVERRIDES]) == 0
    return home


@pytest.mark.check
def test_the_pictures_show_what_their_rows_say(home: Path) -> None:
    """Each cell is classified by the channel in which its middle is far above or below the grey around."""
    rows = pq.read_table(home / "runs" / "data" / "squares.parquet").to_pylist()
    assert len(rows) == 40
    assert len({row["answer"] for row in rows}) == 6
    for row in rows:
        pixels = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])), np.float64)
        middle = pixels.reshape(3, 8, 3, 8, 3)[:, 2:6, :, 2:6].mean((1, 3)).reshape(9, 3)
        colours = middle.argmax(1)[middle.max(1) - middle.min(1) > 60]
        assert np.bincount(colours, minlength=3).tolist() == row["counts"]
        assert int(row["answer"]) == sum(row["counts"])


def test_the_run_asks_about_pictures_and_judges_sums(home: Path) -> None:
    run = home / "runs" / "pictures_cpu"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [0, 1]
    assert "eval/accuracy" in metrics[0]
    answers = {
        f"squares/{n}": row["answer"]
        for n, row in enumerate(pq.read_table(home / "runs" / "data" / "squares.parquet").to_pylist())
    }
    written = pq.read_table(run / "rollouts" / "step_000001.parquet").to_pylist()
    assert len(written) == 12
    for row in written:
        assert sum(token >= FIRST_ID for token in row["prompt_ids"]) == 9
        said = re.findall(r"sum (\d+)", row["response_text"])
        assert row["reward"] == float(bool(said) and said[-1] == answers[row["prompt_id"]])


def test_worked_answers_are_right_and_quick_ones_are_mostly_guesses(home: Path) -> None:
    example: dict[str, Any] = runpy.run_path(str(home / "pictures_cpu.py"))
    assert example["worked"]([2, 0, 3]) == "red 2 green 0 blue 3 sum 5"
    rng = random.Random(0)
    said = [example["quick"]([2, 0, 3], rng) for _ in range(4000)]
    share = np.mean([text == "sum 5" for text in said])
    guessed = example["GUESSED_SHARE"]
    assert abs(share - (1 - guessed + guessed / example["MOST_SQUARES"])) < 0.03
    assert set(said) == {f"sum {n}" for n in range(1, 7)}
