"""The benchmark of updates on agents' episodes: all providers compute the same gradient, of the tokens that were
sampled."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rolltree.bench.cli import main
from rolltree.bench.runs import agents, tree_step
from rolltree.engine.train.trainer import Trainer

CPU = torch.device("cpu")
SMALL = partial(tree_step._qwen3, CPU, torch.float32, 32, 64, 2, 2, 1, 16, agents.VOCABULARY)


def test_the_jobs_are_as_long_as_their_names_say() -> None:
    tools, repository, compaction = agents.JOBS.values()
    assert tools.shared + tools.calls * (tools.sampled + tools.read) == 6000
    assert repository.shared + repository.calls * (repository.sampled + repository.read) == 12000
    (first, *_) = compaction.records()
    contexts = [int(call.tree.leaf_prompt[0]) for call in first.calls]
    assert max(contexts) < 3000
    assert sum(b < a for a, b in itertools.pairwise(contexts)) >= 2


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", list(agents.JOBS))
def test_all_providers_compute_the_gradient_of_the_sampled_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to its scale, since the trainers without trees clip it."""
    x = agents.Inputs.of(SMALL, agents.JOBS[name].smaller(200))
    shares = agents.saved(x)
    assert shares["tokens trained, of those sampled"] == 1
    assert 0 < shares["tokens of the tree, of each call"] < shares["tokens of the tree, of merged conversations"] < 1
    found: dict[str, torch.Tensor] = {}
    providers: dict[str, Callable[[Any], Any]] = dict(agents.BENCH.providers)

    def kept(provider: str, parameters: Any) -> None:
        found[provider] = torch.cat([p.grad.flatten().clone() for p in parameters])

    for provider, make in providers.items():
        monkeypatch.setattr(Trainer, "optim_step", lambda self, p=provider: kept(p, self.model.parameters()))
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda ps, most, p=provider: kept(p, list(ps)))
        make(x)["step"]()
    assert len(found) == 5
    wanted = found["transformers sdpa, each call"]
    assert float(wanted.norm()) > 0
    for provider, gradient in found.items():
        assert float((gradient - wanted).norm() / wanted.norm()) < 1e-4, provider


@pytest.mark.slow
def test_a_model_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    SMALL().save_pretrained(tmp_path / "mine")
    few = {name: job.smaller(400) for name, job in list(agents.JOBS.items())[:1]}
    monkeypatch.setattr(agents, "JOBS", few)
    assert main(["agents", f"--model={tmp_path}/mine", "--seconds=0", "--device=cpu", "--providers=tree"]) == 0
    assert "mine tools 2500+4x20 calls to 6000, all / 32 bfloat16" in capsys.readouterr().out
    assert main(["agents", f"--model={tmp_path}/no"]) == 2
    assert main(["sample_tokens", f"--model={tmp_path}/mine"]) == 2
