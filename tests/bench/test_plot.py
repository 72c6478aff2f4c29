"""Pictures of rows and curves: what they show is what the files say."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install rolltree[plots]")

from rolltree.bench import plot, readme
from rolltree.bench.cli import main
from rolltree.bench.jobs.job import Point, case_of, name_of
from rolltree.bench.schema import Row, append, append_line
from rolltree.engine.settings import DataConfig, ModelConfig, RewardConfig, TrainConfig

ROW = Row("head", "small", "rolltree", "forward", "time_ms", 10.0, 9.5, 11.0, 4.0, "a cpu", {}, "abc", "now")
PEER = replace(ROW, provider="torch", value=20.0, p20=19.0, p80=23.0)
POINT = Point("sums, seed 0", "trl", 0, 0.0, 0, 0.25, 512, "a cpu", {}, "abc", "now")


def test_bars_are_times_with_their_spread_and_ceiling() -> None:
    others = [replace(ROW, metric="speedup"), replace(ROW, direction="backward", ceiling=None)]
    ((name, figure),) = plot.bars([ROW, PEER, *others])
    assert name == "head-a-cpu"
    forward, backward = figure.axes
    assert [bar.get_width() for bar in forward.patches] == [10.0, 20.0]
    assert [text.get_text() for text in forward.get_yticklabels()] == ["rolltree", "torch"]
    ends = [segment[:, 0].tolist() for segment in forward.collections[0].get_segments()]
    assert ends == [[9.5, 11.0], [19.0, 23.0]]
    marked = [line for line in forward.lines if line.get_label() == "ceiling"]
    assert {float(line.get_xdata()[0]) for line in marked} == {4.0}
    assert not [line for line in backward.lines if line.get_label() == "ceiling"]


def test_the_roofline_has_rows_that_were_counted_under_what_the_device_gave() -> None:
    counted = replace(ROW, flop=4e9, bytes=1e9)
    product = replace(ROW, op="ceilings", provider="product", value=1.0, flop=1e9)
    copy = replace(ROW, op="ceilings", provider="copy", value=2.0, bytes=1e8)
    ((_, figure),) = plot.rooflines([counted, PEER, product, copy])
    (axis,) = figure.axes
    ours, roof = axis.lines
    assert ours.get_xydata().tolist() == [[4.0, 400.0]]  # 4 FLOP a byte, 4 GFLOP in 10 ms
    assert roof.get_xydata().tolist() == [[2.0, 100.0], [8.0, 400.0], [20.0, 1000.0]]  # 50 GB/s up to 1 TFLOP/s
    assert not [*plot.rooflines([ROW, product, copy])]


def test_curves_are_accuracy_over_seconds_and_over_tokens() -> None:
    points = [POINT, replace(POINT, step=2, seconds=3.0, tokens=50, accuracy=0.75), replace(POINT, provider="rolltree")]
    ((_, figure),) = plot.curves(points)
    seconds, tokens = figure.axes
    assert seconds.lines[0].get_xydata().tolist() == [[0.0, 25.0], [3.0, 75.0]]
    assert tokens.lines[0].get_xydata().tolist() == [[0.0, 25.0], [50.0, 75.0]]
    assert [line.get_label() for line in seconds.lines] == ["trl", "rolltree"]


@pytest.mark.slow
def test_the_command_writes_pictures_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, out = tmp_path / "rows", tmp_path / "out"
    append([ROW, replace(PEER, value=99.0), PEER], there / "head.jsonl")
    for point in (POINT, replace(POINT, step=7), POINT, replace(POINT, step=1)):
        append_line(asdict(point), there / "job.curves.jsonl")
    append_line({"op": "head", "status": "finished"}, there / "head.outcomes.jsonl")
    rows, points = plot.read([there])
    assert rows == [ROW, PEER], "the last of several counts"
    assert [point.step for point in points] == [0, 1], "the last run"
    assert main(["plot", str(there), "--out", str(out)]) == 0
    pictures = sorted(out.glob("*.png"))
    assert [p.stem for p in pictures] == ["head-a-cpu", "job-sums-seed-0-a-cpu"]
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size < 100_000 for p in pictures)
    page = (out / "bench.html").read_text()
    assert page.count("<svg") == 2
    assert str(out / "bench.html") in capsys.readouterr().out


def test_what_cannot_be_drawn_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path / "none.jsonl")]) == 2
    assert "There is no" in capsys.readouterr().err
    append([replace(ROW, metric="share")], tmp_path / "share.jsonl")
    assert main(["plot", str(tmp_path / "share.jsonl")]) == 2
    assert "nothing to draw" in capsys.readouterr().err


def case(name: str, seed: int = 0) -> str:
    model, data = ModelConfig(path="m"), DataConfig(path="d")
    return case_of(TrainConfig(name=name, seed=seed, model=model, data=data, reward=RewardConfig(verifier="exact")))


@pytest.fixture
def recorded(tmp_path: Path) -> list[Path]:
    """Folders of two machines' results."""
    return [tmp_path / machine for machine in ("one", "two")]


@pytest.mark.slow
def test_each_job_has_a_picture_by_its_configurations_name(tmp_path: Path, recorded: list[Path]) -> None:
    assert name_of(case("a-b, c")) == "a-b, c"
    cases = [case(name) for name in ("sums-of-two", "sums-of-three")]
    append_line(asdict(replace(POINT, case=cases[0])), recorded[0] / "job.curves.jsonl")
    append_line(asdict(replace(POINT, case=cases[1], device="another")), recorded[1] / "job.curves.jsonl")
    out = tmp_path / "docs"
    out.mkdir()
    readme.draw_jobs(tmp_path, out)
    drawn = {path.name: path.read_bytes() for path in out.iterdir()}
    assert drawn.keys() == {"job_sums-of-two.png", "job_sums-of-three.png"}
    assert all(f"Title\0{of}".encode() in drawn[f"job_{name_of(of)}.png"] for of in cases)
    readme.draw_jobs(tmp_path, out)
    assert drawn == {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("differs", [{"device": "another"}, {"case": case("sums").replace("steps", "steps more")}])
def test_a_job_recorded_twice_has_no_one_picture(tmp_path: Path, recorded: list[Path], differs: dict[str, str]) -> None:
    first = replace(POINT, case=case("sums"))
    for point, folder in zip((first, replace(first, **differs)), recorded, strict=True):
        append_line(asdict(point), folder / "job.curves.jsonl")
    with pytest.raises(ValueError, match=r"job_sums\.png"):
        readme.draw_jobs(tmp_path, tmp_path)
    assert not list(tmp_path.glob("*.png"))
    pictures = {path.name for path in plot.draw(recorded, tmp_path / "pictures")}
    assert len(pictures) == 3, "the page and one of each"
