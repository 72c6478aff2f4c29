"""Verdicts on two sets of rows: what overlaps is noise, what does not is told, and a loss is an exit status."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rolltree.bench.cli import main
from rolltree.bench.compare import compare, drift, report, rows_at, worse
from rolltree.bench.schema import Row, append, append_line

ROW = Row("head", "small", "rolltree", "forward", "time_ms", 10.0, 9.5, 10.5, None, "a cpu", {}, "abc", "now")


def shifted(row: Row, factor: float) -> Row:
    return replace(row, value=row.value * factor, p20=row.p20 * factor, p80=row.p80 * factor)


@pytest.mark.parametrize(
    ("metric", "factor", "word"),
    [
        ("time_ms", 1.0, "same"),
        ("time_ms", 1.08, "same"),  # the ranges overlap
        ("time_ms", 1.2, "worse"),
        ("time_ms", 0.8, "better"),
        ("speedup", 1.2, "better"),
        ("speedup", 0.8, "worse"),
        ("accuracy", 0.8, "worse"),
        ("peak_memory_mib", 1.2, "worse"),
    ],
)
def test_a_change_beyond_the_noise_is_told(metric: str, factor: float, word: str) -> None:
    old = replace(ROW, metric=metric)
    (verdict,) = compare([old], [shifted(old, factor)])
    assert verdict.word == word
    assert (verdict.change > 0) == (word == "better") or word == "same"
    assert report([verdict]).splitlines()[0].startswith("1 of 1" if word == "same" else word.rjust(6))
    assert [*worse([verdict])] == ([verdict] if word == "worse" else [])


def test_narrow_ranges_do_not_make_a_small_change_count() -> None:
    exact = replace(ROW, p20=10.0, p80=10.0)
    assert compare([exact], [shifted(exact, 1.02)])[0].word == "same"
    assert compare([exact], [shifted(exact, 1.04)])[0].word == "worse"


def test_peers_tell_what_the_machine_did_and_lose_nothing_for_us() -> None:
    old = [ROW, *(replace(ROW, provider=name) for name in ("torch", "liger", "verl"))]
    verdicts = compare(old, [shifted(row, f) for row, f in zip(old, (1.0, 1.5, 1.3, 1.2), strict=True)])
    assert drift(verdicts) == pytest.approx(1.3)
    assert "1.30 x" in report(verdicts)
    assert not worse(verdicts)
    assert drift(verdicts[:1]) is None


def test_a_trainer_of_others_that_is_accelerated_is_ours() -> None:
    ours = replace(ROW, provider="trl+rolltree")
    assert worse(compare([ours], [shifted(ours, 2.0)]))


def test_the_last_of_several_rows_counts_and_others_are_left_out() -> None:
    new = [shifted(ROW, 3.0), shifted(ROW, 0.5), replace(ROW, case="large")]
    (verdict,) = compare([ROW], new)
    assert verdict.word == "better"


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="different devices"):
        compare([ROW], [replace(ROW, device="a gpu")])
    with pytest.raises(ValueError, match="no figure in common"):
        compare([ROW], [replace(ROW, case="large")])
    with pytest.raises(ValueError, match="holds no benchmark rows"):
        rows_at(tmp_path)
    assert main(["--compare", str(tmp_path / "none"), str(tmp_path)]) == 2
    assert "holds no benchmark rows" in capsys.readouterr().err


def test_the_command_compares_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append([ROW], tmp_path / "old" / "head.jsonl")
    append([shifted(ROW, 2.0)], tmp_path / "new" / "head.jsonl")
    for beside in ("head.outcomes.jsonl", "job.curves.jsonl"):
        append_line({"case": "small"}, tmp_path / "new" / beside)
    assert main(["--compare", str(tmp_path / "old"), str(tmp_path / "new" / "head.jsonl")]) == 1
    assert "worse -100.0 %  head  small" in capsys.readouterr().out
    assert main(["--compare", str(tmp_path / "new"), str(tmp_path / "old")]) == 0
    assert main(["policy_loss", "--compare", str(tmp_path / "new"), str(tmp_path / "old")]) == 2
    assert "give it no ops" in capsys.readouterr().err
