"""Recorded rollouts are sampled once more, token by token, and drafts are measured on them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from rolltree.bench.cli import load, main
from rolltree.bench.runs import recorded
from rolltree.bench.schema import read
from rolltree.engine import DraftConfig, NativeEngine, TokenTree
from rolltree.engine.app.cli import main as rolltree
from rolltree.engine.data.store import read_texts

from ..support.tiny import write_job

CPU = torch.device("cpu")
PROGRAMS = {"flat": "{}", "treepo": "{ segment_tokens = 3, init = 2 }"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, without_report: None) -> Path:
    """Three passes over six problems, by independent responses and by trees."""
    directory = tmp_path_factory.mktemp("recorded")
    problems = directory / "problems.jsonl"
    toml = write_job(directory, {problems.name: [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(6)]})
    for program, options in PROGRAMS.items():
        command = ["train", str(toml), f"--name={program}", "--data.tasks=[]", f"--data.path={problems}"]
        command += ["--trainer.steps=3", "--evaluation.problems=0", "--evaluation.every=0", "--checkpoint.every=3"]
        command += ["--rollout.max_new_tokens=24", "--rollout.temperature=0.02", "--algorithm.advantage=group_norm"]
        command += [f"--rollout.program={program}", f"--rollout.program_options={options}"]
        assert rolltree(command) == 0
    return directory / "runs"


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_is_sampled_again_to_the_token(runs: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, written, accepted = runs / program, [], []
    generate = NativeEngine.generate

    def watched(self: NativeEngine, *arguments: Any, **options: Any) -> list[TokenTree]:
        trees = generate(self, *arguments, **options)
        written.extend([leaf.response for leaf in tree.flatten()] for tree in trees)
        accepted.append(self.stats["accepted_tokens"])
        return trees

    monkeypatch.setattr(NativeEngine, "generate", watched)
    monkeypatch.setattr(recorded, "RULE", DraftConfig(rows=512))
    groups = recorded.read_groups(run, recorded.load_config(run / "config.toml"))
    texts = [[part.tokens.tolist() for part in group.parts.values() if not part.forks] for group in groups]
    assert [group.again for group in groups] == [False] * 6 + [True] * 12
    bench = load("speculation", run)
    for case, expected in zip(list(bench.cases(CPU, False))[2:4], (texts[:6], texts[6:]), strict=True):
        x, right = case.make(), 0.0
        for name in ("rolltree", recorded.NONE):
            call = bench.providers[name](x)["generate"]
            for _ in range(len(x.batches) + 1):  # the first one once more
                call()
            assert written == expected + expected[:6]
            assert (sum(accepted) > 0) == (name == "rolltree")
            right += sum(accepted)
            written.clear()
            accepted.clear()
        assert bench.shares is not None
        ((name, share),) = bench.shares(x).items()
        assert name == f"accepted of {x.counts['drafted_tokens']} drafted"
        assert 0 < share == right / x.counts["drafted_tokens"] <= 1

    files = sorted((run / "rollouts").glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file, columns=["response_ids"]).column(0).to_pylist()]
    assert rows == list(itertools.chain.from_iterable(texts))
    once = sum(len(text.tokens) for file in files for text in read_texts(file))
    assert once == sum(len(text.tokens) for group in groups for text in group.texts)


def test_its_seeds_are_those_of_the_run(runs: Path) -> None:
    """The weights of the first step are at hand: what they sample with a group's seed is what was recorded."""
    run = runs / "flat"
    config = recorded.load_config(run / "config.toml")
    model = recorded.load_model(config.model.path, dtype=torch.float32, device=CPU)
    engine = NativeEngine(model, recorded.load_tokenizer(config.model.path))
    groups = recorded.read_groups(run, config)[:6]
    trees = engine.generate(
        [group.prompt for group in groups],
        recorded.sampling_params(config.rollout),
        seeds=[group.seed for group in groups],
    )
    for tree, group in zip(trees, groups, strict=True):
        responses = [leaf.response for leaf in tree.flatten()]
        assert responses == [part.tokens.tolist() for part in group.parts.values() if not part.forks]


@pytest.mark.slow
def test_command_line(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows"
    command = ["speculation", "--recorded", str(runs / "treepo"), "--quick", "--providers=rolltree", "--seconds=0.01"]
    assert main([*command, "--out", str(out)]) == 0
    rows = [row for file in out.rglob("*.jsonl") if "outcome" not in file.name for row in read(file)]
    cases = {row.case for row in rows}
    assert cases == {f"1 x 4 rows of treepo, {epochs} epochs" for epochs in ("first", "later")}
    assert {row.provider for row in rows if row.metric == "speedup"} == {"rolltree"}
    capsys.readouterr()
    for wrong, reason in (
        (["speculation", "--recorded", str(tmp_path)], "config.toml"),
        (["ceilings", "--recorded", str(runs / "flat")], "speculation alone"),
    ):
        assert main(wrong) == 2
        assert reason in capsys.readouterr().err
