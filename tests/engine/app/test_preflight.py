"""Faults of a run are found before it has a directory; a run that got no further is begun anew."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.cli import main
from rolltree.engine.app.config import load_config
from rolltree.engine.app.console import Console
from rolltree.engine.errors import RunError, UserError
from rolltree.engine.loop import orchestrator
from rolltree.engine.loop.orchestrator import Orchestrator
from rolltree.engine.settings import TrainConfig

from ...support.thinned import thinned
from ...support.tiny import write_job

SHORT = [
    "--trainer.steps=1", "--trainer.prompts_per_step=2", "--evaluation.problems=0", "--evaluation.every=0",
    "--reward.verifier=exact",
]  # fmt: skip
MINE = """
import sys
import numpy as np

def scalar(trees):
    return 1.0

def one_short(trees):
    return [np.zeros(t.num_leaves - 1) for t in trees]

def text(trees):
    return [["a"] * t.num_leaves for t in trees]

def not_finite(trees):
    return [np.full(t.num_leaves, np.inf) for t in trees]

def nothing(trees):
    pass

def raises(trees):
    return trees[0].no_such_thing

def leaves(trees):
    sys.exit(0)

def create(config, directory):
    directory.mkdir()
    sys.exit(0)

def create_raises(config, directory):
    return {}["weights"]

def create_nothing(config, directory):
    pass
"""
EXITS = "import sys\nsys.exit(0)\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("home")
    write_job(directory)
    (directory / "mine.py").write_text(MINE)
    (directory / "exits.py").write_text(EXITS)
    for name, answers in (("missing", ["3", None]), ("unread", ["3", "\\frac{1}{2", "\\sqrt{2}"])):
        rows = [{"prompt": f"1 + {i}?", "answer": answer} for i, answer in enumerate(answers)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(directory / "model", directory / "bare")
    for file in (directory / "bare").glob("*token*"):
        file.unlink()
    return directory


def configure(home: Path, directory: Path, *overrides: str) -> TrainConfig:
    return load_config(home / "tiny.toml", [f"--output_dir={directory}/runs", *SHORT, *overrides])


def orchestrate(config: TrainConfig, resume: bool = False) -> tuple[Orchestrator, io.StringIO]:
    out = io.StringIO()
    return build(config, console=Console(RichConsole(file=out, width=300)), resume=resume), out


MISTAKES = [
    (["--rollout.program=spo_tree", "--rollout.program_options={}"], "spo_tree"),
    (["--rollout.program=eptree", "--rollout.program_options={}"], "leaves; set rollout.n to that"),
    (
        ["--rollout.program=treepo", "--rollout.program_options={segment_tokens='a'}"],
        "program = 'treepo' failed: TypeEr",
    ),
    (["--rollout.program_options={segment_tokens=0}"], "segment_tokens >= 1"),
    (["--rollout.program_options={nothing=0}"], "no option 'nothing'"),
    (["--rollout.max_new_tokens=70"], "134 tokens) is longer than the model's 128 positions"),
    (["--evaluation.max_new_tokens=70"], "134 tokens) is longer than the model's 128 positions"),
    (["--algorithm.advantage={home}/mine.py:scalar"], "failed: TypeError: 'float' object is not iterable"),
    (["--algorithm.advantage={home}/mine.py:one_short"], "mine.py:one_short'"),
    (["--algorithm.advantage={home}/mine.py:text"], "mine.py:text' failed: ValueError: could not convert"),
    (["--algorithm.advantage={home}/mine.py:not_finite"], "must return finite numbers"),
    (["--algorithm.advantage={home}/mine.py:nothing"], "'NoneType' object is not iterable"),
    (["--algorithm.advantage={home}/mine.py:raises"], "no_such_thing' (line 21 of 'mine.py')"),
    (["--algorithm.advantage={home}/mine.py:leaves"], "failed: SystemExit: 0 (line 24 of 'mine.py')"),
    (["--algorithm.advantage={home}/exits.py:leaves"], "cannot be imported: SystemExit: 0 (line 2 of 'exits.py')"),
    (["--algorithm.objective_options={eps_high='a'}"], "algorithm.objective = 'dapo'"),
    (["--reward.verifier={home}/exits.py:f"], "SystemExit: 0 (line 2 of 'exits.py')"),
    (["--data.tasks=[{name='chain_sum', options={min_terms='a'}}]"], "The task 'chain_sum' in data.tasks cannot be"),
    (["--data.tasks=[{name='chain_sum', options={min_terms=0}}]"], "The task 'chain_sum' in data.tasks cannot be"),
    (["--data.tasks=[]", "--data.path=/nowhere/p.jsonl"], "no prompts file '/nowhere/p.jsonl'"),
    (["--data.tasks=[]", "--data.path={home}/mine.py"], "is not .parquet, .jsonl, .json or .csv"),
    (["--data.tasks=[]", "--data.path={home}/missing.jsonl"], "The row of 'missing/1' cannot be judged by reward.ver"),
    (
        ["--data.tasks=[]", "--data.path={home}/unread.jsonl", "--reward.verifier=math"],
        "1 of 3 problems cannot be judged, such as 'unread/1': math-verify cannot read the reference answer",
    ),
    (["--data.tasks=[]", "--data.path={home}/unread.jsonl", "--reward.verifier=code"], "3 of 3 problems cannot be jud"),
    (["--model.path={home}/bare"], "holds no tokenizer (tokenizer.json)"),
    (["--output_dir={home}/mine.py"], "is no directory; choose another --output_dir"),
    (["--output_dir={home}/mine.py/a/b"], "is no directory; choose another --output_dir"),
    (["--rollout.backend=vllm"], "not installed"),
]


@pytest.mark.slow(but=12)
@pytest.mark.check(but=4)
@pytest.mark.parametrize(
    ("overrides", "says", "how"),
    thinned(
        ((*mistake, how) for mistake in MISTAKES for how in ("run", "dry")),
        lambda number, _: number // 2 % 2 == number % 2,  # one mistake is made in a run, the next in a dry run
    ),
)
def test_a_mistake_is_found_before_there_is_a_directory(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], says: str, how: str
) -> None:
    given = [override.replace("{home}", str(home)) for override in overrides]
    if how == "dry":
        arguments = ["train", str(home / "tiny.toml"), f"--output_dir={tmp_path}/runs", *SHORT, *given, "--dry-run"]
        assert main(arguments) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
    else:
        with pytest.raises(UserError) as caught:
            orchestrate(configure(home, tmp_path, *given))[0].run()
        message = str(caught.value)
    assert says in message, message
    assert not (tmp_path / "runs").exists()


def test_places_that_take_no_directory(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"cannot be made: .*; choose another --output_dir"):
        orchestrate(configure(home, tmp_path, f"--output_dir={tmp_path}/{'too_long' * 40}"))[0].run()
    monkeypatch.setattr(os, "access", lambda *_: False)  # whoever runs this test may write everywhere
    with pytest.raises(UserError, match=r"allows no writing; choose another --output_dir"):
        orchestrate(configure(home, tmp_path))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("create", "failed: SystemExit: 0 (line 28 of 'mine.py')"),
        ("create_raises", "failed: KeyError: 'weights' (line 31 of 'mine.py')"),
        ("create_nothing", "made no directory"),
    ],
)
def test_a_model_that_cannot_be_made(home: Path, tmp_path: Path, function: str, says: str) -> None:
    options = [f"--model.path={tmp_path}/new", f"--model.create={home}/mine.py:{function}"]
    with pytest.raises(UserError) as caught:
        orchestrate(configure(home, tmp_path, *options))
    assert says in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["--rollout.backend=vllm", "--rollout.engines=1"])
def test_a_missing_package_is_named_before_a_model_is_made(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    options = [f"--model.path={tmp_path}/new", f"--model.create={home}/mine.py:create_raises", missing]
    with pytest.raises(UserError, match=r"not installed; install rolltree\[(vllm|ray)\]"):
        orchestrate(configure(home, tmp_path, *options))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_a_checkpoint_is_taken_over(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(home, tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(orchestrator.checkpoint, "write_tensors", full)
        with pytest.raises(RunError, match=r"No space left.*free disk space and start over\.$"):
            orchestrate(config)[0].run()
    assert (config.run_dir / "config.toml").exists()
    with pytest.raises(UserError, match=r"nothing to resume.*start without --resume\.$"):
        orchestrate(config, resume=True)
    corrected = configure(home, tmp_path, "--trainer.lr=0.5")
    orchestrate(corrected)[0].run()
    assert load_config(config.run_dir / "config.toml") == corrected
    with pytest.raises(UserError, match="already holds a run"):
        orchestrate(config)


@pytest.mark.parametrize("file", ["notes.txt", "metrics.jsonl", "rollouts/a.parquet", "export/model.safetensors"])
def test_what_is_no_leftover_is_kept(home: Path, tmp_path: Path, file: str) -> None:
    config = configure(home, tmp_path)
    (config.run_dir / file).parent.mkdir(parents=True)
    (config.run_dir / file).write_text("mine")
    with pytest.raises(UserError, match="already holds a run"):
        orchestrate(config)
    assert (config.run_dir / file).read_text() == "mine"


@pytest.mark.check
def test_lost_metrics_are_told(home: Path, tmp_path: Path) -> None:
    orchestrate(configure(home, tmp_path))[0].run()
    config = configure(home, tmp_path, "--trainer.steps=2")
    (config.run_dir / "metrics.jsonl").unlink()
    run, out = orchestrate(config, resume=True)
    run.run()
    assert "metrics.jsonl' lacks the rows of 1 steps before step 1." in out.getvalue()
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


def test_dry_run_tells_a_run_from_a_leftover(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(home / "tiny.toml"), f"--output_dir={tmp_path}", *SHORT, "--dry-run"]
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.toml").touch()
    assert main(arguments) == 0
    assert "would be made" in capsys.readouterr().out
    (tmp_path / "tiny" / "metrics.jsonl").touch()
    assert main(arguments) == 0
    assert "holds a run" in capsys.readouterr().out
