"""Whole runs that sample with the real vLLM on the CPU: `make vllm`."""

from __future__ import annotations

import copy
import io
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from rolltree.engine import Orchestrator, TokenTree, load_config, pack
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.errors import RunError
from rolltree.engine.train.trainer import Trainer, Weighted

from ...support.tiny import write_job
from .test_vllm import letters, net

pytestmark = pytest.mark.vllm
VLLM = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "kv_cache_memory_bytes": 1 << 26}
"""Options of the engine; several runs of this process have one each, one after the other."""


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vllm")
    prompts = [{"prompt": chr(0x110 + a) + chr(0x120 + b), "answer": ""} for a in range(5) for b in range(5)]
    judge = "def judge(text, entry):\n    return float(sum(map(ord, text)) % 2)\n"
    toml = write_job(
        directory, {"prompts.jsonl": prompts, "reward.py": judge},
        data={"tasks": None, "path": "FOLDER/prompts.jsonl"},
    )  # fmt: skip
    net().save_pretrained(directory / "model")
    tokenizer = copy.deepcopy(letters())
    tokenizer.eos_token = tokenizer.pad_token = chr(0x103)
    tokenizer.save_pretrained(directory / "model")
    return toml


def start(toml: Path, directory: Path, *overrides: str) -> Orchestrator:
    options = ", ".join(f"{name} = {json.dumps(value)}" for name, value in VLLM.items())
    given = ["--rollout.backend=vllm", f"--rollout.vllm_options={{{options}}}", f"--output_dir={directory}/runs"]
    given += ["--evaluation.problems=0", "--evaluation.every=0", "--trainer.lr=0.02", *overrides]
    console = Console(RichConsole(file=io.StringIO(), width=300))
    return build(load_config(toml, given), console=console)


Batches = list[list[TokenTree]]
"""The trees of every update."""


def batches(run: Orchestrator) -> Batches:
    """A list that gets the trees of every update."""
    found: Batches = []
    update = run.learner.update

    def watched(trees: list[TokenTree], *given: Any) -> bool:
        changed = update(trees, *given)
        found.append(trees)
        return changed

    run.learner.update = watched  # type: ignore[method-assign,assignment]
    return found


@pytest.fixture(scope="module")
def trained(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Orchestrator, Batches, list[dict[str, Any]]]:
    """A finished run, the trees of its updates and its metrics."""
    directory = tmp_path_factory.mktemp("run")
    run = start(toml, directory, "--trainer.steps=5", "--loop.staleness=1")
    found = batches(run)
    run.run()
    (file,) = directory.glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return run, found, [row for row in rows if "actor/grad_norm" in row]


def test_a_run_gets_its_weights_every_step(trained: tuple[Orchestrator, Batches, list[dict[str, Any]]]) -> None:
    """Tokens are of every version, and vLLM's log-probs are the trainer's, for which the publication check looks."""
    run, found, rows = trained
    versions = {int(v) for trees in found for tree in trees for v in tree.policy_version[tree.loss_mask]}
    assert versions >= {0, 1, 2, 3}
    difference = run.controller.publication.difference
    assert difference is not None
    assert difference < 1e-4
    assert len(rows) == 5
    assert rows[0]["training/rollout_probs_diff_mean"] < 1e-4


def test_its_log_probs_split_no_rows_and_change_no_gradient(
    trained: tuple[Orchestrator, Batches, list[dict[str, Any]]],
) -> None:
    """Siblings' log-probs of equal tokens differ in their last bits; gradients are the flat batch's.

    Prints rows and seconds of a forward and backward, the best of five: `make vllm ARGS="-s -k split_no_rows"`.
    """
    run, found, _ = trained
    trees = found[-1]
    paths = [[s.prompt + s.response for s in tree.flatten()] for tree in trees]
    prefixes = sum(len({tuple(path[:n]) for path in some for n in range(1, len(path) + 1)}) for some in paths)
    logical = sum(len(path) for some in paths for path in some)
    records = sum(tree.num_tokens for tree in trees)
    gradients, seconds = [], []
    for flat, rows in ((False, prefixes), (True, logical)):
        packed = pack(trees, max_tokens=100_000, flat=flat)
        assert sum(batch.num_tokens for batch in packed) == rows
        trainer = Trainer(run.learner.model, run.learner.parts.optimizer, run.learner.phases, run.learner.group)
        terms = [Weighted(t, n, 1.0) for t, _ in run.learner.terms if (n := t.normalizer(trees, []))]
        for batch in packed:
            trainer.forward_backward(batch, terms, logical, temperature=1.0, on_policy=False)
        gradients.append({n: p.grad.clone() for n, p in run.learner.model.named_parameters() if p.grad is not None})
        trainer.drop_gradients()
        seconds.append(math.inf)
        for _ in range(5):
            begin = time.perf_counter()
            for batch in packed:
                trainer.forward_backward(batch, terms, logical, temperature=1.0, on_policy=False)
            seconds[-1] = min(seconds[-1], time.perf_counter() - begin)
            trainer.drop_gradients()
    print(f"{prefixes} rows in {seconds[0]:.4f} s; flat, {logical} rows in {seconds[1]:.4f} s")
    assert prefixes <= records < logical
    ours, theirs = gradients
    assert ours.keys() == theirs.keys()
    assert any(gradient.norm() > 1e-3 for gradient in theirs.values())
    for name in theirs:
        assert (ours[name] - theirs[name]).norm() <= 1e-4 * theirs[name].norm() + 1e-7, name


def test_a_vllm_that_ignores_its_weights_ends_the_run(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rolltree.engine.rollout.vllm import engine as ours

    monkeypatch.setattr(ours.VllmEngine, "update_weights", lambda self, weights, version, **given: None)
    run = start(toml, tmp_path, "--trainer.steps=3")
    with pytest.raises(RunError, match=r"^After update 1 the sampler"):
        run.run()
