"""The benchmark harness on made-up providers, and every real one's smallest case."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from rolltree.bench import readme, workloads
from rolltree.bench.cli import FIRST, OPS, load, main
from rolltree.bench.journal import Journal
from rolltree.bench.runner import Bench, Calls, Case, Choice, UnsupportedError, run
from rolltree.bench.schema import Context, Row, append, read, versions
from rolltree.bench.table import table
from rolltree.bench.timing import interleaved, quantiles, replay
from rolltree.engine import TokenTree

from ..support.forks import Forks

CPU = torch.device("cpu")


def sleeper(milliseconds: float) -> Any:
    def provider(inputs: object) -> Calls:
        return {"forward": lambda: time.sleep(milliseconds / 1e3)}

    return provider


def absent(inputs: object) -> Calls:
    import a_package_that_is_not_there  # type: ignore[import-not-found]

    return a_package_that_is_not_there.calls()


def refuses(inputs: object) -> Calls:
    raise UnsupportedError("it needs a tide")


def changed(inputs: object) -> Calls:
    raise TypeError("unexpected argument 'tide'")


def made_up() -> Bench:
    def cases(device: torch.device, quick: bool) -> Iterator[Case]:
        yield from (Case("one", lambda: 1), Case("two", lambda: 2))

    return Bench(
        op="sleep",
        cases=cases,
        providers={"slow": sleeper(8), "fast": sleeper(2), "absent": absent, "refuses": refuses, "changed": changed},
        ceiling=sleeper(1),
        speedup_over="slow",
        speedup_ceiling=lambda inputs: 8.0,
    )


@pytest.fixture
def counted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks that move by what is slept alone, so that other load on the machine decides nothing."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))


@pytest.mark.usefixtures("counted_time")
def test_rows_of_a_run() -> None:
    said: list[str] = []
    rows = list(run(made_up(), CPU, Choice(quick=True, seconds=0.2), Journal("sleep", None), said.append))
    assert {(r.case, r.provider, r.metric) for r in rows} == {
        (case, *rest)
        for case in ("one", "two")
        for rest in (("slow", "time_ms"), ("fast", "time_ms"), ("fast", "speedup"))
    }
    for row in rows:
        assert row.p20 <= row.value <= row.p80
        if row.metric == "speedup":
            assert row.ceiling == 8.0
            assert row.value == pytest.approx(4)
        else:
            assert row.value == pytest.approx(8 if row.provider == "slow" else 2)
            assert row.ceiling == pytest.approx(1)
    assert [line for line in said if "absent" in line] == [
        "sleep: absent is not installed (a_package_that_is_not_there)"
    ]
    assert sum("refuses does not run: it needs a tide" in line for line in said) == 2
    assert sum("changed: failed: TypeError: unexpected argument 'tide'" in line for line in said) == 2


def test_what_was_counted_stands_in_the_rows_of_times() -> None:
    counted = replace(made_up(), ceiling=None, work=lambda inputs: {"forward": (5.0, 0.0), "backward": (7.0, 7.0)})
    rows = list(run(counted, CPU, Choice(quick=True, seconds=0.0), Journal("sleep", None), lambda line: None))
    assert {(row.metric, row.flop, row.bytes) for row in rows} == {("time_ms", 5.0, None), ("speedup", None, None)}


def test_work_is_what_its_formula_says() -> None:
    """Worked out by hand for the smallest cases on a CPU, of fp32."""
    decode = next(load("tree_decode").cases(CPU, True)).make()  # P=512 R=64 G=16 x 4 heads 8/4 D=32
    keys = 4 * (512 + 16 * 64) * 4 * 32 * 4
    assert load("tree_decode").work(decode) == {"forward": (2 * 2 * 64 * 8 * 32 * 576, 2 * keys + 2 * 64 * 8 * 32 * 4)}
    head = next(load("linear_policy_loss").cases(CPU, True)).make()  # N=1024 H=256 V=8192 all live
    moved = 2 * 4 * (1024 * 256 + 8192 * 256)
    assert load("linear_policy_loss").work(head) == {"forward+backward": (3 * 2 * 1024 * 256 * 8192, moved)}
    of_cases = [load("ceilings").work(case.make()) for case in load("ceilings").cases(CPU, True)]
    assert of_cases == [{"forward": (0, 2 * (1 << 24))}, {"forward": (2 * 256**3, 0)}]


def test_a_replay_keeps_what_its_graph_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds addresses: tensors that only the call holds would be freed, and their memory used by others."""
    for name in ("Stream", "CUDAGraph", "graph", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    read = torch.ones(3)
    held = weakref.ref(read)
    again = replay(lambda read=read: read.sum())
    del read
    gc.collect()
    assert held() is not None
    again()
    del again
    gc.collect()
    assert held() is None


def test_rounds_are_interleaved_and_bounded() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    found = interleaved(calls, CPU, seconds=0.0)
    assert {len(samples.ms) for samples in found.values()} == {3}
    assert order[4:] == ["a", "b", "b", "a", "a", "b"], "two warm-up calls each, then rounds that rotate"
    assert len(interleaved(calls, CPU, seconds=60.0, max_rounds=5)["a"].ms) == 5
    assert quantiles([1.0, 2.0, 3.0, 4.0, 100.0])[1] == 3.0


def row(**changes: Any) -> Row:
    context = Context("a chip", {"torch": "2"}, "abc", "2026-01-01T00:00:00+00:00")
    values: dict[str, Any] = dict(op="op", case="case", provider="us", direction="forward", metric="time_ms")
    values |= dict(value=2.0, p20=1.0, p80=3.0, ceiling=1.5, **vars(context))
    return Row(**(values | changes))


def test_rows_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    append([row()], path)
    append([row(ceiling=None)], path)
    assert read(path) == [row(), row(ceiling=None)]
    names = "op case provider direction metric value p20 p80 ceiling device versions commit time flop bytes"
    assert " ".join(json.loads(path.read_text().splitlines()[0])) == names
    path.write_text(path.read_text() + '{"op": "half')
    with pytest.raises(ValueError, match=r"rows\.jsonl:3"):
        read(path)


def test_rows_of_a_gpu_name_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the driver's own program tells it; a machine may lack it, and several GPUs have a line each."""
    program, cuda = tmp_path / "nvidia-smi", torch.device("cuda")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions(cuda)["driver"] == "unknown"
    for told, driver in (("echo 580.159.03; echo 580.159.03", "580.159.03"), ("echo broken; exit 9", "unknown")):
        program.write_text(f"#!/bin/sh\n{told}\n")
        program.chmod(0o755)
        assert versions(cuda)["driver"] == driver
    assert "driver" not in versions(torch.device("cpu"))


def test_table() -> None:
    text = table([row(), row(ceiling=None), row(metric="speedup", value=3.0, ceiling=4.0)])
    assert [line.split()[-2:] for line in text.splitlines()[1:]] == [["75", "%"], ["-", "-"], ["75", "%"]]
    assert "3 x" in text


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in listed if not line.startswith("  ")] == list(OPS)
    assert main(["no_such_op"]) == 2
    assert "no_such_op" in capsys.readouterr().err
    assert main(["--device", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "sentence"), [
    (["--limit", "-1"], "--limit must be above 0 seconds, got -1.0"),
    (["--limit", "0"], "--limit must be above 0 seconds, got 0.0"),
    (["--seconds", "-1"], "--seconds must be at least 0 seconds, got -1.0"),
    (["--cases", "zzz"], "no case's name contains --cases 'zzz'"),
    (["--providers", "zzz"], "no provider's name contains --providers 'zzz'"),
    (["--cases", "["], "'[' is not a regular expression"),
    pytest.param(["--device", "cuda"], "the device 'cuda' cannot be used",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
])  # fmt: skip
def test_a_wrong_command_line_is_a_sentence(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy_loss", "--quick", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_a_finished_run_prints_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["policy_loss", "--quick", "--seconds", "0.01", "--providers", "^rolltree$", "--out", str(tmp_path)]
    tables = []
    for _ in range(2):
        assert main(command) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    assert "rolltree" in tables[1].splitlines()[1]


def test_without_an_op_some_run_in_small_cases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, bool]] = []

    def noted(bench: Bench, device: torch.device, choice: Choice, *_: Any, **__: Any) -> list[Row]:
        asked.append((bench.op, choice.quick))
        return []

    monkeypatch.setattr("rolltree.bench.cli.run", noted)
    for command, ops, quick in (([], FIRST, True), (["all"], OPS, False), (["ceilings"], ("ceilings",), False)):
        asked.clear()
        assert main(command) == 0
        assert asked == [(op, quick) for op in ops]
        assert ("small cases" in capsys.readouterr().out) == quick
    assert main(["all", "ceilings"]) == 2


TREES = {
    "group": workloads.group(40, 20, 3),
    "segments": workloads.segments(16, 8, 3, 4),
    "agent": workloads.agent(20, 6, 4, 3, 2),
}


def assert_gradients_agree(bench: Bench, inputs: Any) -> None:
    """AdamW's first step is the gradient's sign, so gradients are read before it."""
    found = []
    for provider in bench.providers.values():
        try:
            step = provider(inputs)["step"]
        except UnsupportedError:
            continue
        (model,) = {cell.cell_contents for cell in step.__closure__ if hasattr(cell.cell_contents, "parameters")}
        (optimizer,) = {cell.cell_contents for cell in step.__closure__ if hasattr(cell.cell_contents, "zero_grad")} - {
            model
        }
        grads: list[torch.Tensor] = []

        def read(*_: object, model: torch.nn.Module = model, grads: list[torch.Tensor] = grads) -> None:
            grads += [p.grad.clone().flatten() for p in model.parameters() if p.grad is not None]

        optimizer.register_step_pre_hook(read)
        step()
        found.append(torch.cat(grads))
    assert len(found) >= 3
    for other in found[1:]:
        assert (other - found[0]).norm() <= 1e-4 * found[0].norm()


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", TREES)
def test_tree_step_computes_the_same_gradient_every_way(name: str) -> None:
    bench = load("tree_step")
    assert_gradients_agree(bench, replace(next(bench.cases(CPU, True)).make(), tree=TREES[name]))


@pytest.mark.slow
def test_picture_step_computes_the_same_gradient_every_way() -> None:
    bench = load("picture_step")
    frozen, trained = (case.make() for case in bench.cases(CPU, True))
    assert {p.requires_grad for p in frozen.model.model.visual.parameters()} == {False}
    assert_gradients_agree(bench, trained)


def test_tree_recurrence_computes_the_same_every_way() -> None:
    bench = load("tree_recurrence")
    x = next(bench.cases(CPU, True)).make()
    rows = torch.stack([torch.from_numpy(x.tree.path_rows(leaf)) for leaf in range(x.tree.num_leaves)])
    found: dict[str, Any] = {}
    for name, provider in bench.providers.items():
        try:
            calls = provider(x)
        except ImportError:
            continue  # a peer that is not installed
        out, grads = calls["forward"](), calls["forward+backward"]()
        if name == bench.speedup_over:
            out = torch.zeros_like(x.value).index_put_((rows,), out)
            grads = [
                torch.zeros_like(x).index_add(0, rows.flatten(), g.flatten(0, 1))
                for x, g in zip(x.leaves, grads, strict=True)
            ]
        found[name] = [out, *grads]
    own = found.pop("rolltree")
    assert bench.speedup_over in found
    for other in found.values():
        for mine, theirs in zip(own, other, strict=True):
            assert (mine - theirs).norm() <= 1e-5 * mine.norm()


@pytest.mark.parametrize(
    ("tree", "tokens", "pairs"),
    [
        (lambda: workloads.group(1024, 1024, 8), 1.78, 1.28),
        (lambda: workloads.group(4096, 1024, 8), 3.33, 2.27),
        (lambda: workloads.segments(1024, 512, 14, 16), 1.33, 1.08),
        (lambda: workloads.segments(1024, 512, 7, 16), 1.80, 1.28),
        (lambda: workloads.segments(4096, 512, 14, 64), 2.18, 1.43),
    ],
)
def test_workloads_save_what_their_shape_promises(tree: Callable[[], TokenTree], tokens: float, pairs: float) -> None:
    """Figures worked out by hand for these shapes."""
    made = tree()
    assert made.logical_tokens / made.num_tokens == pytest.approx(tokens, rel=0.005)
    assert workloads.flat_pairs(made) / workloads.visible_pairs(made) == pytest.approx(pairs, rel=0.005)


def test_every_turn_of_a_conversation_is_a_sample() -> None:
    tree = workloads.agent(4096, 512, 1024, 8, 8)
    # the last observation is in no sample: 8 (4096 + 8 x 512 + 7 x 1024) flat-free tokens below the prompt
    assert tree.num_tokens == 4096 + 8 * (8 * 512 + 7 * 1024)
    assert tree.logical_tokens == 8 * sum(4096 + t * 1536 + 512 for t in range(8))


PEAK = """
import mmap
import torch
from rolltree.bench.timing import peak_memory_mib
cpu, mapped = torch.device("cpu"), []

def call(values):
    mapped.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    sum(mapped[-1][::4096])
    return torch.ones(values)

with open("file", "w+b") as file:
    file.truncate(2**26)
    call(2**22)  # maps what torch needs
    print(peak_memory_mib(lambda: call(2**26), cpu))
print(peak_memory_mib(lambda: None, cpu))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system hides the peak of a process")
def test_peak_memory_on_a_cpu(torch_forks: Forks, tmp_path: Path) -> None:
    """256 MiB beside a mapped file, and nothing, in a process whose allocator has not kept anything yet."""
    code, printed = torch_forks.run(PEAK, directory=tmp_path)
    assert code == 0, printed
    peak, nothing = printed.split()
    assert float(peak) == pytest.approx(256, rel=0.02)
    assert nothing == "None"


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_tables_are_what_was_recorded(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    table = readme.BLOCK.search(text)
    assert table
    assert readme.rewritten(text) == text, "run python -m rolltree.bench.readme"
    spoiled = text.replace(table[0], table[0].replace("|---|", "|===|", 1))
    assert spoiled != text
    assert readme.rewritten(spoiled) == text


def test_the_table_of_jobs() -> None:
    job = row(op="job", case="sums", provider="rolltree_tree", direction="job", value=61500.0)
    rows = [
        row(op="job", case="sums", provider="rolltree_tree", direction="step", value=970.0, p20=960.0, p80=980.0),
        row(op="job", case="sums", provider="rolltree_tree", direction="step", metric="speedup", value=2.5),
        job,
        replace(job, metric="peak_memory_mib", value=800.0),
        replace(job, metric="accuracy", value=0.8512),
        replace(job, direction="to 50 %", value=30000.0),
        replace(job, direction="to 50 %", metric="speedup", value=2.04),
        replace(job, direction="to 80 %", value=45000.0),
    ]
    line = readme.jobs(rows).splitlines()[2]
    targets = "50 %: 30 s (2.0 x), 80 %: 45 s"
    assert line == f"| sums | rolltree_tree | 970 ms (960 to 980) | 2.50 x | 62 s | {targets} | 800 MiB | 85.1 % |"


def test_a_job_s_seeds_share_a_line() -> None:
    rows = []
    for seed, seconds in ((0, 30.0), (1, 50.0)):
        job = row(op="job", case=f"sums, seed {seed}", provider="trl", direction="job", value=1e3 * seconds)
        rows += [
            replace(job, direction="step", value=seconds, p20=seconds - 1, p80=seconds + 2),
            job,
            replace(job, metric="peak_memory_mib", value=10 * seconds),
            replace(job, metric="accuracy", value=seconds / 100),
            replace(job, direction="to 30 %", value=1e3 * seconds),
            replace(job, direction="to 30 %", metric="speedup", value=seconds / 10),
        ]
    rows.append(replace(rows[-2], direction="to 40 %"))
    (line,) = readme.jobs(rows).splitlines()[2:-2]
    targets = "30 %: 40 s (30 to 50, 4.0 x), 40 %: 50 s (1 of 2)"
    assert line == f"| sums, seeds 0, 1 | trl | 40 ms (29 to 52) |  | 40 s | {targets} | 500 MiB | 40.0 % |"


def test_a_table_says_what_it_was_measured_on() -> None:
    one = row()
    rows = [one, replace(one, provider="torch", commit="fedcba9")]
    commits = " and ".join(sorted((one.commit, "fedcba9")))
    last = f"Measured on {one.device}, torch {one.versions['torch']}, commit {commits}."
    assert readme.markdown(rows).splitlines()[-2:] == ["", last]
