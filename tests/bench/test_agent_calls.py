"""The benchmark of sampled calls: what each provider is asked is what the job says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rolltree.bench.cli import main
from rolltree.bench.runs import agent_calls, agents, tree_step
from rolltree.engine import NativeEngine, SamplingParams
from rolltree.engine.data.tree import TokenTree

SMALL = partial(tree_step._qwen3, torch.device("cpu"), torch.float32, 32, 64, 2, 2, 1, 16, agents.VOCABULARY)


@pytest.mark.parametrize("name", list(agents.JOBS))
@pytest.mark.parametrize("provider", ["rolltree", agent_calls.NO_PREFIXES])
def test_calls_continue_answers_and_only_kept_keys_are_shared(
    name: str, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = agent_calls.Inputs(SMALL(), agents.JOBS[name].smaller(100), agents.VOCABULARY)
    asked: list[Sequence[Sequence[int]]] = []
    answers: list[list[list[int]]] = []
    computed = 0
    real = NativeEngine.generate

    def generate(self: NativeEngine, prompts: Any, params: SamplingParams) -> list[TokenTree]:
        nonlocal computed
        asked.append(prompts)
        found = real(self, prompts, params)
        computed += int(self.stats["prefill_tokens"])
        answers.append([tree.token_id[tree.response_rows(0)].tolist() for tree in found])
        return found

    monkeypatch.setattr(NativeEngine, "generate", generate)
    agent_calls.BENCH.providers[provider](x)["sample"]()
    job = x.job
    assert len(asked) == job.calls
    assert {len(prompts) for prompts in asked} == {job.episodes}
    assert {len(said) for turn in answers for said in turn} == {job.sampled}
    assert max(len(prompt) for prompts in asked for prompt in prompts) + job.sampled <= x.longest
    restarts = 0
    for before, said, after in zip(asked, answers, asked[1:], strict=False):
        for old, new, next_one in zip(before, said, after, strict=True):
            grown = [*old, *new]
            if next_one[: len(grown)] == grown:
                assert len(next_one) == len(grown) + job.read
            else:
                restarts += 1
                assert next_one[: job.shared] == old[: job.shared]
                assert len(next_one) == job.shared + job.summary
    assert (restarts > 0) == bool(job.full)
    given = sum(len(prompt) for prompts in asked for prompt in prompts)
    if provider == agent_calls.NO_PREFIXES:
        assert computed == given, "every token of every call"
    else:
        assert computed < given / 2


def test_a_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SMALL().save_pretrained(tmp_path / "mine")
    words = ["agent_calls", f"--model={tmp_path}/mine", "--quick", "--device=cpu", "--providers=^rolltree$"]
    assert main([*words, "--cases=tools.*float32"]) == 0
    assert "tools 2500+4x20 calls to 6000, all / 128 float32" in capsys.readouterr().out
