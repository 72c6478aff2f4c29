"""Interleaved timing of several providers.

Each round runs every provider once, in an order that rotates, so that clock drift and other load affect all of them
alike and a ratio can be taken within a round. On CUDA, device events bracket the call, and a buffer larger than L2 is
written before it. The device then pauses, which gives the host time to launch the call, so that launch latency is not
measured; calls that are too short for that are timed as the replay of a CUDA graph.
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


class TimedCall:
    """A call that another process makes, and times with its own clock.

    :meth:`milliseconds` makes it once, :meth:`peak_mib` returns its memory as :func:`peak_memory_mib` does.
    """

    def __call__(self) -> object:
        return self.milliseconds()

    def milliseconds(self) -> float:
        raise NotImplementedError

    def peak_mib(self) -> float | None:
        raise NotImplementedError


@dataclass(frozen=True)
class Samples:
    """Milliseconds of one provider, one number for each round."""

    ms: tuple[float, ...]

    def quantiles(self) -> tuple[float, float, float]:
        """Return the 20th percentile, the median and the 80th percentile."""
        return quantiles(self.ms)


def quantiles(values: tuple[float, ...] | list[float]) -> tuple[float, float, float]:
    """Return the 20th percentile, the median and the 80th percentile."""
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

    Every call runs inside ``guard(name)``. If that suppresses an error, the name is left out from there on and has no
    samples.
    """
    clock = clock_of(device)
    times: dict[str, list[float]] = {name: [] for name in calls}

    def measure(name: str, *, keep: bool) -> None:
        with guard(name):
            call = calls[name]
            taken = call.milliseconds() if isinstance(call, TimedCall) else clock.time(call)
            if keep:
                times[name].append(taken)
            return
        del times[name]

    for name in list(times):
        for _ in range(warmup):
            if name in times:
                measure(name, keep=False)
    deadline = time.perf_counter() + seconds
    for round_index in range(max_rounds):
        if not times or (round_index >= MIN_ROUNDS and time.perf_counter() > deadline):
            break
        names = list(times)
        shift = round_index % len(names)
        for name in names[shift:] + names[:shift]:
            measure(name, keep=True)
    return {name: Samples(tuple(ms)) for name, ms in times.items()}


class GraphError(RuntimeError):
    """A call cannot go into a CUDA graph."""


def replay(call: Callable[[], object]) -> Callable[[], object]:
    """Return ``call`` as the replay of a CUDA graph: its kernels without their launches by Python.

    Raises:
        GraphError: the call waits for the device, or does something that a graph cannot capture.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            call()  # autotuning and compilation happen here
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            kept = call()
    except RuntimeError as error:
        torch.cuda.synchronize()  # raises if the device itself failed
        raise GraphError((str(error).splitlines() or [""])[0]) from None

    def again() -> object:
        graph.replay()
        return kept, call  # the graph reads what only ``call`` holds

    return again


def peak_memory_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Return the peak memory of ``call`` in MiB above that before it, with its results; None if too small to see.

    Measures torch's allocator on CUDA, and the resident memory of the process on a CPU, without the files that it maps:
    how much of those the system maps at a time differs from machine to machine. Files that ``call`` maps after its peak
    are subtracted too, so it should have run before.
    """
    if isinstance(call, TimedCall):
        return call.peak_mib()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    try:
        forget_peak(device)
        resident = _unmapped_mib("VmRSS")
        call()
        peak = _unmapped_mib("VmHWM") - resident
    except OSError:
        return None
    return peak if peak >= 1 else None  # small allocations reuse memory that the process holds, and do not show


def resident_peak_mib(device: torch.device) -> float:
    """Return the peak memory in MiB since :func:`forget_peak`: of torch's allocator on CUDA, of the process on a CPU,
    without the files that it maps.

    Raises:
        OSError: the system does not report it.
    """
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else _unmapped_mib("VmHWM")


def forget_peak(device: torch.device) -> None:
    """Reset the peak to the memory in use now.

    Raises:
        OSError: the system does not support it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _unmapped_mib(field: str) -> float:
    """Return a field of resident memory without the mapped files among it, which only grow while memory is free."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines if line.endswith(" kB"))}
    if missing := {field, "RssFile"} - kib.keys():
        raise OSError(f"/proc/self/status has no {missing.pop()}")
    return (kib[field] - kib["RssFile"]) / 1024


def clock_of(device: torch.device) -> CpuClock | CudaClock:
    """Return the clock of the device's calls."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


class CpuClock:
    def time(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3


class CudaClock:
    def __init__(self, device: torch.device) -> None:
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self.sweep: Tensor = torch.empty(4 * l2, dtype=torch.int8, device=device)

    def time(self, call: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.sweep.zero_()
        torch.cuda._sleep(PAUSE_CYCLES)  # the call's kernels are queued before the first one starts
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
