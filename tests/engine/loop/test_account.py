"""The seconds of a step by what they went to, the model's FLOP by the device's peak, and what NVML says."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console as RichConsole

from rolltree.engine import Orchestrator, load_config, pack, skip_check
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.batches.cost import CostModel, Work
from rolltree.engine.learn import utilization
from rolltree.engine.learn.utilization import Compute, GpuMonitor, peak_tflop_s
from rolltree.engine.record.metrics import TIMED_PARTS, Stopwatch, overlaid
from rolltree.engine.train import phases
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.phases import HEAD, MODEL, OPTIMIZER, Phases, Span
from rolltree.engine.train.terms import TokenTerm
from rolltree.engine.train.trainer import Trainer, Weighted
from rolltree.kernels import Objective

from ...support.tiny import train_step
from ..train.test_trainer import make_model, make_trees

QUIET = [
    "--evaluation.problems=0",
    "--evaluation.every=0",
    "--rollout.program=flat",
    "--algorithm.advantage=group_norm",
]
QUIET += ["--rollout.program_options={}", "--rollout.n=2", "--rollout.max_new_tokens=2", "--trainer.prompts_per_step=2"]


def orchestrate(toml: Path, tmp_path: Path, *extra: str) -> Orchestrator:
    config = load_config(toml, [f"--output_dir={tmp_path}", *QUIET, *extra])
    return build(config, console=Console(RichConsole(file=(tmp_path / "out").open("w"))))


def rows(run: Orchestrator) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.options.directory / "metrics.jsonl").read_text().splitlines()]


# -- the account -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_parts_of_100_steps_sum_to_the_run(toml: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    """The sum is compared with a clock that no part of the account reads."""
    marks: list[float] = []
    read = Stopwatch.read

    def timed(self: Stopwatch, within: Sequence[Span] = ()) -> dict[str, float]:
        times = read(self, within)
        marks.append(time.monotonic())  # here, where one account ends: a machine may stop for a moment anywhere
        return times

    monkeypatch.setattr(Stopwatch, "read", timed)
    run = orchestrate(toml, tmp_path, "--trainer.steps=102", "--checkpoint.every=1000")
    capfd.readouterr()
    run.run()
    assert "timing" not in "".join(capfd.readouterr())
    found = rows(run)[2:102]  # the last step of a run ends with its checkpoint, which no step accounts for
    parts = [{k: v for k, v in row.items() if k.startswith("timing_s/")} for row in found]
    whole = math.fsum(part.pop("timing_s/step") for part in parts)
    assert {name for part in parts for name in part} == {f"timing_s/{name}" for name in (*TIMED_PARTS, "other")}
    assert math.fsum(v for part in parts for v in part.values()) == pytest.approx(whole, rel=1e-9)
    assert whole == pytest.approx(marks[101] - marks[1], rel=0.01)
    assert all(value >= -1e-9 for part in parts for value in part.values())  # no second counts twice
    for name in ("prompts", "gen", "reward", "pack", MODEL, HEAD, OPTIMIZER, "dump_rollout_generations"):
        assert any(part[f"timing_s/{name}"] > 0 for part in parts), name


def test_what_the_device_still_does_goes_before_what_the_host_does() -> None:
    under = [Span("gen", 0, 2), Span("pack", 2, 3), Span(MODEL, 3, 6), Span("dump", 6, 7), Span("sync", 7.5, 9)]
    over = [Span(HEAD, 4, 5), Span(OPTIMIZER, 5.5, 8)]
    assert overlaid(under, over) == [
        ("gen", 0, 2), ("pack", 2, 3), (MODEL, 3, 4), (HEAD, 4, 5), (MODEL, 5, 5.5), (OPTIMIZER, 5.5, 8), ("sync", 8, 9)
    ]  # fmt: skip
    assert overlaid(under, []) == under
    assert overlaid([], over) == over
    now = iter([0.0, *(moment for span in under for moment in span[1:]), 10.0])
    told: list[Span] = []
    watch = Stopwatch(lambda: next(now), lambda *span: told.append(Span(*span)))
    for name, *_ in under:
        with watch.part("checkpoint" if name == "dump" else name):
            pass
    read = watch.read(over)
    assert told == overlaid(under, over)
    assert {k.removeprefix("timing_s/"): v for k, v in read.items() if v} == {
        "gen": 2, "pack": 1, MODEL: 1.5, HEAD: 1, OPTIMIZER: 2.5, "sync": 1, "other": 1, "step": 10
    }  # fmt: skip


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which every look takes a second."""
    now = iter(range(10**6))
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))


@pytest.mark.parametrize(
    ("objective", "max_tokens", "passes"),
    [("dapo", 10_000, 1), ("dapo", 30, 3), ("gspo", 10_000, 1), ("dapo", 10, None), ("gspo", 10, None)],
    ids=["tokens", "three batches", "sequences", "pieces", "pieces twice"],
)
def test_model_and_head_take_turns(ticks: None, objective: str, max_tokens: int, passes: int | None) -> None:
    model, trees = make_model(), make_trees()
    skip_check(model)  # whose forwards are no phases of an update
    found = Phases(model.device)
    trainer = Trainer(model, TrainerConfig(lr=1e-3), found)
    term = TokenTerm(Objective.preset(objective))
    term.prepare(trees)
    batches = pack(trees, max_tokens=max_tokens, in_pieces=True)
    train_step(trainer, batches, [Weighted(term, term.normalizer(trees))], temperature=1.0, on_policy=False)
    spans = found.read()
    assert found.read() == []
    assert all(a.end == b.begin for a, b in itertools.pairwise(spans))  # without a gap
    turns = [name for name, _ in itertools.groupby(span.name for span in spans)]
    assert turns[0] == MODEL
    assert turns[-2:] == [MODEL, OPTIMIZER]
    assert turns[:-1] == [MODEL, HEAD] * (len(turns) // 2 - 1) + [MODEL]
    if passes is not None:
        assert turns.count(HEAD) == passes
    assert not model.get_decoder()._forward_hooks


class Gpu:
    """Events as of a GPU that begins ``behind`` seconds after the host's orders."""

    def __init__(self, behind: float) -> None:
        self.behind, self.asked = behind, Counter[str]()
        self.host = 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                gpu.asked["record"] += 1
                self.at = gpu.host + gpu.behind

            def elapsed_time(self, end: Event) -> float:
                assert gpu.host >= max(self.at, end.at), "it is not over yet"
                return 1e3 * (end.at - self.at)

            def synchronize(self) -> None:
                gpu.asked["wait"] += 1
                gpu.host = max(gpu.host, self.at)

        self.Event = Event


def test_a_gpu_ends_an_update_behind_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(behind=5.0)
    monkeypatch.setattr(torch.cuda, "Event", gpu.Event)
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: gpu.host))
    found = Phases(torch.device("cuda"))
    for begin in (10.0, 40.0):
        gpu.host = begin
        found.enter(MODEL)
        gpu.host += 1
        found.enter(HEAD)
        gpu.host += 2
        found.enter(OPTIMIZER)
        gpu.host += 5  # the host waits for the loss
        found.met()
        gpu.host += 1
        found.enter(None)
    assert gpu.asked == {"record": 8}  # until here nobody waited
    spans = found.read()
    assert gpu.asked["wait"] == 1
    assert spans == [
        (MODEL, 15, 16), (HEAD, 16, 18), (OPTIMIZER, 18, 24), (MODEL, 45, 46), (HEAD, 46, 48), (OPTIMIZER, 48, 54)
    ]  # fmt: skip


# -- the device's peak -------------------------------------------------------------------------------------------------


def test_peaks_are_known_or_left_out(toml: Path, tmp_path: Path) -> None:
    bf16 = torch.bfloat16
    assert peak_tflop_s("NVIDIA H100 80GB HBM3", bf16) == 989.4
    assert peak_tflop_s("NVIDIA H200", torch.float16) == 989.4
    assert peak_tflop_s("NVIDIA H200 NVL", bf16) == 835.5
    assert peak_tflop_s("NVIDIA A100-SXM4-80GB", bf16) == 312
    assert peak_tflop_s("NVIDIA H100 80GB HBM3", torch.float32) is None
    assert peak_tflop_s("Some GPU", bf16) is None
    model = make_model()
    assert Compute.of(model).peak is None
    unknown = Compute(None)
    unknown.train(model, Work(1), Work(), 1.0)
    assert unknown.read({}).keys() == {"perf/flop_trained", "perf/flop_scored"}
    run = orchestrate(toml, tmp_path, "--trainer.steps=1")
    run.run()
    assert not [name for name in rows(run)[1] if "mfu" in name or "peak" in name or "gpu" in name]


def test_mfu_is_the_models_flop_by_the_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, work = make_model(), Work(100, 2000, 50)
    meter, cost = Compute(peak=2.0), CostModel.of(model)
    meter.train(model, work, Work(), 0.5e12)
    forward = cost.token * 100 + cost.attention * 2000
    times = {f"timing_s/{MODEL}": 1.0, f"timing_s/{HEAD}": 0.5, f"timing_s/{OPTIMIZER}": 0.5, "timing_s/gen": 9.0}
    assert meter.read(times) == {
        "perf/flop_trained": pytest.approx(3 * forward + 0.5e12),
        "perf/flop_scored": 0.0,
        "perf/mfu/actor": pytest.approx((3 * forward + 0.5e12) / 4e12),
        "perf/peak_tflop_s": 2.0,
    }
    assert "perf/mfu/actor" not in meter.read(times)  # no update
    meter.train(model, work, Work(10, 100), 0.5e12)  # some pieces twice
    again = meter.read(times)
    assert again["perf/mfu/actor"] == pytest.approx((3 * forward + 0.5e12) / 4e12)
    assert again["perf/flop_trained"] == pytest.approx(3 * forward + 0.5e12 + cost.token * 10 + cost.attention * 100)


# -- NVML --------------------------------------------------------------------------------------------------------------


class Nvml:
    """A stand-in for the module ``pynvml``."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818
        pass

    def __init__(self, fails_after: int = 10**9, power: bool = True) -> None:
        self.calls, self.fails_after, self.power = Counter[str](), fails_after, power
        self.enough, self.go_on = threading.Event(), threading.Event()

    def nvmlInit(self) -> None:  # noqa: N802
        self.calls["init"] += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.calls["shutdown"] += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        assert uuid == "GPU-7"
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        assert handle == "handle"
        self.calls["sample"] += 1
        if self.calls["sample"] > self.fails_after:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(gpu=30 if self.calls["sample"] % 2 else 50, memory=99)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=3 * 10**9)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        if self.calls["sample"] == 4:
            self.enough.set()
            assert self.go_on.wait(10)
        if not self.power:
            self.calls["power"] += 1
            raise self.NVMLError_NotSupported("Not Supported")
        return 250_000


def test_nvml_is_averaged_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, said = Nvml(), []
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monitor = GpuMonitor("GPU-7", said.append, sample_s=0.0)
    assert nvml.enough.wait(10)
    first = monitor.read()  # of three
    nvml.go_on.set()
    assert first["perf/gpu/utilization"] == pytest.approx((0.3 + 0.5 + 0.3) / 3)
    assert (first["perf/gpu/memory_gb"], first["perf/gpu/power_w"]) == (3.0, 250.0)
    monitor.close()
    assert (nvml.calls["init"], nvml.calls["shutdown"], said) == (1, 1, [])


def test_a_counter_that_there_is_not_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, said = Nvml(power=False), []
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monitor = GpuMonitor("GPU-7", said.append, sample_s=0.0)
    while nvml.calls["sample"] < 3:
        time.sleep(0.001)
    monitor.close()
    found = monitor.read()
    assert found.keys() == {"perf/gpu/utilization", "perf/gpu/memory_gb"}
    assert found["perf/gpu/memory_gb"] == 3.0
    assert nvml.calls["power"] == 1
    assert said == ["NVML does not report perf/gpu/power_w of this GPU (Not Supported); the metrics lack it."]


def test_a_driver_that_fails_is_told_of_once_and_a_run_goes_on(toml: Path, tmp_path: Path, monkeypatch) -> None:
    nvml = Nvml(fails_after=1)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    def failing(device: torch.device, told) -> GpuMonitor:
        monitor = GpuMonitor("GPU-7", told, sample_s=0.0)
        monitor._thread.join(10)
        return monitor

    monkeypatch.setattr(GpuMonitor, "of", failing)
    run = orchestrate(toml, tmp_path, "--trainer.steps=3")
    run.run()
    assert nvml.calls == {"init": 1, "sample": 2, "shutdown": 1}
    found = [row.get("perf/gpu/utilization") for row in rows(run)[1:]]
    assert found == [0.3, None, None]
    assert (tmp_path / "out").read_text().count("NVML failed and is not read any more (GPU is lost)") == 1


def test_without_a_gpu_or_the_library_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(utilization.importlib.util, "find_spec", lambda name: None)
    for device in ("cpu", "cuda"):
        monitor = GpuMonitor.of(torch.device(device), pytest.fail)
        assert monitor.read() == {}
        monitor.close()


def test_the_stand_in_is_what_the_library_is() -> None:
    """Each of its functions takes what nvidia-ml-py's takes, and structures have the fields that are read."""
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py (extra `monitor`) is not installed")
    functions = [name for name in vars(Nvml) if name.startswith("nvml")]
    assert len(functions) == 6
    for name in functions:
        ours = list(inspect.signature(getattr(Nvml, name)).parameters)[1:]
        theirs = inspect.signature(getattr(real, name)).parameters
        assert [p.name for p in theirs.values() if p.default is p.empty] == ours, name
    assert "gpu" in dict(real.c_nvmlUtilization_t._fields_)
    assert "used" in dict(real.c_nvmlMemory_t._fields_)
    assert issubclass(real.NVMLError, Exception)
    assert issubclass(real.NVMLError_NotSupported, real.NVMLError)
    assert type(real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)) is real.NVMLError_NotSupported


def test_the_library_without_a_driver_says_so_once() -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py (extra `monitor`) is not installed")
    try:
        real.nvmlInit()
    except real.NVMLError as error:
        expected = str(error)
    else:
        pytest.skip("this machine has NVIDIA's driver")
    said: list[str] = []
    monitor = GpuMonitor("GPU-7", said.append)
    monitor._thread.join(10)
    assert monitor.read() == {}
    monitor.close()
    assert said == [f"NVML failed and is not read any more ({expected}); the metrics lack perf/gpu."]
