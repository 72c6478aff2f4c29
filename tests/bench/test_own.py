"""Sizes, providers and checkouts of the user's own in ``rolltree bench``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rolltree.bench import against
from rolltree.bench.cli import OPS, load, main
from rolltree.bench.schema import Row, read
from rolltree.bench.shapes import described, with_shapes

from ..test_docs import blocks

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SMALL = {
    "layer_ops": "N=3 H=8 I=16 Hq=2 Hkv=1 D=4 dtype=bfloat16",
    "linear_divergence": "N=5 H=8 V=11",
    "linear_logprob": "N=5 H=8 V=11",
    "linear_policy_loss": "N=64 H=8 V=11",
    "logprob_from_logits": "N=3 V=7 dtype=bfloat16",
    "policy_loss": "M=9",
    "sample_tokens": "N=3 V=7",
    "tree_attention": "P=5 G=3 R=2 Hq=4 Hkv=2 D=16",
    "tree_decode": "P=16 R=16 G=2 groups=2 Hq=2 Hkv=1 D=16",
    "tree_recurrence": "P=5 G=3 R=2 H=2 D=16",
}


def rows_of(folder: Path, op: str) -> list[Row]:
    return read(folder / f"{op}.jsonl")


@pytest.mark.parametrize("op", [op for op in OPS if load(op).shaped])
def test_every_op_runs_in_sizes_of_the_users(op: str, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--seconds", "0", "--providers", "^rolltree$|^torch$", "--out", str(tmp_path)]
    assert main([op, "--shape", SMALL[op], *options]) == 0
    cases = [case.name for case in with_shapes(load(op), [SMALL[op]]).cases(CPU, False)]
    timed = {row.case for row in rows_of(tmp_path, op) if row.provider == "rolltree" and row.metric == "time_ms"}
    assert timed == set(cases)


def test_sizes_of_linear_policy_loss_beyond_8192_need_not_be_round() -> None:
    case = next(with_shapes(load("linear_policy_loss"), ["N=9024 H=4 V=5"]).cases(CPU, False))
    inputs = case.make()
    assert len(inputs.target) % inputs.length == 0
    assert len(inputs.advantage) == 9024


@pytest.mark.parametrize(
    ("op", "shape", "sentence"),
    [
        ("policy_loss", "N=3", "'N=3' is none of its sizes; policy_loss takes M=..."),
        ("policy_loss", "M", "'M' is none of its sizes"),
        ("policy_loss", "M=3 M=4", "has M twice"),
        ("policy_loss", "M=0", "M must be a whole number above 0, got '0'"),
        ("policy_loss", "M=-4", "got '-4'"),
        ("policy_loss", "M=1e6", "got '1e6'"),
        ("policy_loss", "M=" + "9" * 5000, "M must be a whole number above 0"),
        ("policy_loss", "", "lacks M; policy_loss takes M=..."),
        ("sample_tokens", "N=3 V=4 dtype=int8", "'int8' is none of the types float32, bfloat16, float16"),
        ("linear_policy_loss", "N=65 H=8 V=9", "takes N in multiples of 64"),
        ("tree_decode", SMALL["tree_decode"].replace("P=16", "P=17"), "whole pages of 16 tokens, got P=17"),
        ("rollout", "N=3", "rollout takes no --shape"),
    ],
)
def test_wrong_sizes_are_refused(op: str, shape: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([op, "--device", "cpu", "--shape", shape]) == 2
    assert sentence in capsys.readouterr().err


def test_sizes_belong_to_one_op(capsys: pytest.CaptureFixture[str]) -> None:
    for ops in ([], ["all"], ["policy_loss", "sample_tokens"]):
        assert main([*ops, "--shape", "M=3"]) == 2
        assert "--shape belongs to one op" in capsys.readouterr().err


def test_the_list_names_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample_tokens", "--list", "--device", "cpu", "--shape", "N=3 V=7"]) == 0
    out = capsys.readouterr().out
    assert '--shape "N=... V=... [dtype=...]"' in out
    assert "N=3 V=7 T=1\n" in out
    assert described(load("policy_loss").shaped) == "M=..."  # type: ignore[arg-type]


def test_the_documented_function_is_timed(tmp_path: Path) -> None:
    code = next(code for code in blocks(ROOT / "docs" / "benchmarks.md", "python") if "my_loss.py" in code)
    (tmp_path / "my_loss.py").write_text(code)
    added = f"{tmp_path / 'my_loss.py'}:no_clip"
    options = ["--device", "cpu", "--seconds", "0", "--providers", "^rolltree$|no_clip", "--out", str(tmp_path)]
    assert main(["policy_loss", "--shape", "M=9", "--shape", "M=12", "--add", added, *options]) == 0
    timed = {(row.case, row.provider) for row in rows_of(tmp_path, "policy_loss") if row.metric == "time_ms"}
    assert timed == {(case, provider) for case in ("M=9", "M=12") for provider in ("rolltree", "no_clip")}


@pytest.mark.parametrize(
    ("code", "sentence"),
    [("def other(): ...", "has no function mine"), ("1 / 0", "ZeroDivisionError"), (None, "no file")],
)
def test_a_wrong_file_is_refused(
    code: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if code is not None:
        (tmp_path / "my.py").write_text(code)
    assert main(["policy_loss", "--device", "cpu", "--add", f"{tmp_path / 'my.py'}:mine"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another checkout: this one, with a copy of the benchmarks that a test can change."""
    checkout = tmp_path / "before"
    checkout.mkdir()
    for package in ("engine", "kernels"):
        (checkout / package).symlink_to(ROOT / package)
    shutil.copytree(ROOT / "bench", checkout / "bench", ignore=shutil.ignore_patterns("results", "__pycache__"))
    return checkout


def change(checkout: Path, before: str, after: str) -> None:
    file = checkout / "bench" / "ops" / "policy_loss.py"
    code = file.read_text()
    assert code.count(before) == 1
    file.write_text(code.replace(before, after))


@pytest.mark.slow
def test_the_ratio_of_two_checkouts_is_a_row_and_their_processes_end(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    start = against.Checkout._start

    def seen(self: against.Checkout) -> Any:
        started.append(start(self))
        return started[-1]

    monkeypatch.setattr(against.Checkout, "_start", seen)
    options = ["--device", "cpu", "--shape", "M=9", "--seconds", "0", "--out", str(tmp_path), "--providers", "^torch$"]
    assert main(["policy_loss", "--against", str(other), *options]) == 0
    rows = rows_of(tmp_path, "policy_loss")
    assert {row.provider for row in rows if row.metric == "speedup"} == {"rolltree, this checkout", "torch"}
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


@pytest.mark.slow
def test_a_process_that_dies_is_a_failure_of_its_own(other: Path, tmp_path: Path) -> None:
    change(other, "    objective = Objective(eps_low=EPS, eps_high=EPS)\n", "    import os\n    os._exit(3)\n")
    options = ["--device", "cpu", "--seconds", "0", "--out", str(tmp_path)]
    assert main(["policy_loss", "--shape", "M=9", "--shape", "M=12", "--against", str(other), *options]) == 1
    rows = rows_of(tmp_path, "policy_loss")
    assert {(row.case, row.provider) for row in rows} == {(case, "rolltree, this checkout") for case in ("M=9", "M=12")}
    assert "ended" in (tmp_path / "policy_loss.outcomes.jsonl").read_text()


@pytest.mark.slow
def test_a_commit_without_the_case_says_so(other: Path, tmp_path: Path) -> None:
    change(other, 'yield Case(f"M={M}"', 'yield Case(f"tokens={M}"')
    options = ["--device", "cpu", "--seconds", "0", "--out", str(tmp_path)]
    assert main(["policy_loss", "--shape", "M=9", "--against", str(other), *options]) == 1
    assert "that commit has no case 'M=9'" in (tmp_path / "policy_loss.outcomes.jsonl").read_text()


def test_what_is_no_checkout_is_refused(other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy_loss", "--device", "cpu", "--against", str(tmp_path)]) == 2
    assert "is no checkout of rolltree: it has no folder engine" in capsys.readouterr().err
    (other / "kernels").unlink()
    (other / "kernels").mkdir()
    (other / "kernels" / "__init__.py").touch()
    assert main(["policy_loss", "--device", "cpu", "--against", str(other)]) == 2
    assert "its kernels are not built" in capsys.readouterr().err
    assert main(["ceilings", "--device", "cpu", "--against", str(ROOT)]) == 2
    assert "ceilings has none" in capsys.readouterr().err
