"""The argument `policy` of callbacks and sources: it samples and scores with the weights of the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltree.engine import Orchestrator, UserError, load_config
from rolltree.engine.app.assembly.run import build

from ...support.tiny import tiny_job
from ..learn.test_learner import Console

MINE = """
import json
from pathlib import Path

HERE = Path(__file__).parent

def asks(tree, policy, step):
    greedy = policy.generate(["1 + 2 =\\n"], temperature=0.0, max_new_tokens=4)
    several = policy.generate(["1 + 2 =\\n", "3 + 4 =\\n"], 3, max_new_tokens=5)
    scored = policy.score(["1 + 2 =\\n", "1 + 2 =\\n"], ["3", ""])
    with (HERE / "asked.jsonl").open("a") as file:
        said = [step, greedy, several, [[float(x) for x in some] for some in scored]]
        file.write(json.dumps(said) + "\\n")

def silent(tree):
    return None

def credit(trees, policy):
    return [[0.0] * tree.num_leaves for tree in trees]

class Source:
    def next(self, count, policy):
        return [{"prompt": f"{len(policy.generate(['1 + 1 ='])[0][0])} + 2 =", "answer": "1"} for _ in range(count)]
"""
KEYS = (
    "--evaluation.problems=0", "--evaluation.every=0", "--checkpoint.every=1", "--rollout.program=flat",
    "--rollout.program_options={}", "--algorithm.advantage=group_norm", "--trainer.prompts_per_step=3",
)  # fmt: skip


toml = tiny_job({"mine.py": MINE})


def train(toml: Path, folder: Path, *keys: str) -> tuple[Orchestrator, list[Any]]:
    """Run; return what the callback asked in it too."""
    asked = toml.with_name("asked.jsonl")
    asked.unlink(missing_ok=True)
    config = load_config(toml, [*KEYS, f"--output_dir={folder}", *keys])
    run = build(config, console=Console())
    run.run()
    return run, [json.loads(line) for line in asked.read_text().splitlines()] if asked.exists() else []


def tokens(run: Orchestrator, step: int) -> Any:
    table = pq.read_table(run.options.directory / "rollouts" / f"step_{step:06d}.parquet")
    return table.select(["response_ids"]).to_pylist()


@pytest.mark.slow
def test_a_callback_samples_and_scores_with_the_present_weights(toml: Path, tmp_path: Path) -> None:
    callback = f"--loop.callback={toml.parent}/mine.py:asks"
    run, asked = train(toml, tmp_path / "a", callback, "--trainer.steps=2")
    folder = toml.parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer("1 + 2 =\n")["input_ids"]
    first = [one for one in asked if one[0] == 1]
    assert len(first) == 3
    end = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)[0, len(ids) :]
    three = tokenizer("3", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids + three])).logits[0].log_softmax(-1)
    expected = [float(logprobs[len(ids) - 1 + i, token]) for i, token in enumerate(three)]
    for _, greedy, several, scored in first:
        assert greedy == [[tokenizer.decode(end, skip_special_tokens=True)]]
        assert [len(texts) for texts in several] == [3, 3]
        assert scored[0] == pytest.approx(expected, abs=1e-4)
        assert scored[1] == []
    assert len({json.dumps(several) for _, _, several, _ in first}) > 1  # each call has seeds of its own
    (second, *_) = [one for one in asked if one[0] == 2]
    assert second[3][0] != pytest.approx(expected, abs=1e-4)  # of the weights after the update
    plain, _ = train(toml, tmp_path / "b", f"--loop.callback={toml.parent}/mine.py:silent", "--trainer.steps=2")
    assert tokens(run, 1) == tokens(plain, 1)  # what the run samples is not changed
    assert tokens(run, 2) == tokens(plain, 2)


@pytest.mark.check(but=1)
def test_it_serves_while_a_thread_samples(toml: Path, tmp_path: Path) -> None:
    keys = ["--loop.staleness=1", "--loop.overlap=true", "--trainer.steps=3"]
    run, asked = train(toml, tmp_path, f"--loop.callback={toml.parent}/mine.py:asks", *keys)
    assert run.step == 3
    assert len(asked) >= 9
    assert all(np.isfinite(one[3][0]).all() for one in asked)


def test_a_source_asks_it_for_prompts(toml: Path, tmp_path: Path) -> None:
    keys = ["--data.tasks=[]", f"--data.source={toml.parent}/mine.py:Source", "--trainer.steps=1"]
    run, _ = train(toml, tmp_path, *keys, f"--reward.verifier={toml.parent}/reward.py:judge")
    assert run.step == 1


def test_parts_that_work_elsewhere_do_not_get_it(toml: Path, tmp_path: Path) -> None:
    keys = [f"--algorithm.advantage={toml.parent}/mine.py:credit", "--trainer.steps=1"]
    with pytest.raises(UserError, match="policy"):
        train(toml, tmp_path, *keys)
