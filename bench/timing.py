"""Timing of several providers side by side.

Each round runs every provider once, in an order that rotates, so that clock drift and other people's load fall on all
of them alike and a ratio can be taken within a round. On CUDA, device events bracket the call, and a buffer larger than
L2 is written before it. A pause of the device after that gives the host time to launch the call, so that launch latency
is not what is measured; what is too short for that is timed as the replay of a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

WARMUP_CALLS = 2
MIN_ROUNDS = 3
PAUSE_CYCLES = 2_000_000  # about a millisecond


@dataclass(frozen=True)
class Samples:
    """Milliseconds of one provider, one number a round."""

    ms: tuple[float, ...]

    def quantiles(self) -> tuple[float, float, float]:
        """p20, median, p80."""
        return quantiles(self.ms)


def quantiles(values: tuple[float, ...] | list[float]) -> tuple[float, float, float]:
    """p20, median, p80."""
    p20, median, p80 = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    )
    return float(p20), float(median), float(p80)


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    seconds: float,
    max_rounds: int = 200,
    warmup: int = WARMUP_CALLS,
    guard: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> dict[str, Samples]:
    """Time ``calls`` against each other for about ``seconds`` seconds, at least three rounds.

    Every call runs inside ``guard(name)``; where that swallows what the call raises, the name is left out from there
    on and has no samples.
    """
    clock = _CudaClock(device) if device.type == "cuda" else _CpuClock()
    found: dict[str, list[float]] = {name: [] for name in calls}

    def measure(name: str, *, keep: bool) -> None:
        with guard(name):
            taken = clock.time(calls[name])
            if keep:
                found[name].append(taken)
            return
        del found[name]

    for name in list(found):
        for _ in range(warmup):
            if name in found:
                measure(name, keep=False)
    deadline = time.perf_counter() + seconds
    for round_index in range(max_rounds):
        if not found or (round_index >= MIN_ROUNDS and time.perf_counter() > deadline):
            break
        names = list(found)
        shift = round_index % len(names)
        for name in names[shift:] + names[:shift]:
            measure(name, keep=True)
    return {name: Samples(tuple(ms)) for name, ms in found.items()}


class GraphError(RuntimeError):
    """A call cannot go into a CUDA graph."""


def replay(call: Callable[[], object]) -> Callable[[], object]:
    """``call`` as the replay of a CUDA graph: its kernels without their launches by Python.

    Raises:
        GraphError: it waits for the device, or does what a graph cannot hold.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            call()  # autotuning and compiling end here
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            kept = call()
    except RuntimeError as error:
        torch.cuda.synchronize()  # raises where the device itself failed
        raise GraphError((str(error).splitlines() or [""])[0]) from None

    def again() -> object:
        graph.replay()
        return kept

    return again


def peak_memory_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """MiB in use at the peak of ``call`` beyond what was before, its results included; None where it does not show.

    On CUDA of torch's allocator, on a CPU resident memory of the process.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    try:
        forget_peak(device)
        resident = _status_mib("VmRSS")
        call()
        peak = _status_mib("VmHWM") - resident
    except OSError:
        return None
    return peak if peak >= 1 else None  # little comes from what the process holds already, and does not show


def resident_peak_mib(device: torch.device) -> float:
    """MiB at the peak since :func:`forget_peak`: on CUDA of torch's allocator, on a CPU of the process.

    Raises:
        OSError: the system does not say.
    """
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else _status_mib("VmHWM")


def forget_peak(device: torch.device) -> None:
    """Let the peak start again from what is in use now.

    Raises:
        OSError: the system has no such thing.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {field}")


class _CpuClock:
    def time(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3


class _CudaClock:
    def __init__(self, device: torch.device) -> None:
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self.sweep: Tensor = torch.empty(4 * l2, dtype=torch.int8, device=device)

    def time(self, call: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.sweep.zero_()
        torch.cuda._sleep(PAUSE_CYCLES)  # what the call launches is in the queue before the first of it may start
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
