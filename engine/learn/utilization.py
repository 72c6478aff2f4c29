"""Utilisation of a GPU: the updates' share of its peak (MFU), and counters of its driver (NVML)."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..batches.cost import CostModel
from ..batches.rows import distinct_rows
from ..data.tree import TokenTree
from ..train.phases import HEAD, MODEL, OPTIMIZER

PEAK_TFLOP_S = {
    "NVIDIA A100": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA GH200": 989.4,
    "NVIDIA B200": 2250.0,
    "NVIDIA L40S": 362.0,
}
"""Dense bf16 and fp16 peak by NVIDIA's data sheets, by the beginning of the device's name."""
SAMPLE_S = 0.5
"""Seconds between two queries of the driver."""
COUNTERS: dict[str, Callable[[Any, Any], float]] = {
    "perf/gpu/utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "perf/gpu/memory_gb": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9,
    "perf/gpu/power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
}
"""Counters queried with ``pynvml``; a partitioned or virtual GPU lacks some of them."""


def peak_tflop_s(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak in TFLOP/s of products in ``dtype`` on the device called ``name``; None if it is not listed."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((peak for begin, peak in PEAK_TFLOP_S.items() if name.startswith(begin)), None)


class Mfu:
    """Share of the device's peak that the policy's updates reached (model FLOP utilisation; Chowdhery et al. 2022).

    Counts the decoder on each unique token and the planned products with the head: 2 FLOP for each weight and token in
    the forward pass, as many for the gradient of the input, and as many for the gradient of trained weights.

    Args:
        peak: TFLOP/s of the devices together; None if it is not known, then nothing is recorded.
    """

    def __init__(self, model: PreTrainedModel, peak: float | None) -> None:
        self.peak = peak
        if peak is None:
            return
        self._cost = CostModel.of(model)
        weights = [p for p in model.get_decoder().parameters() if p.dim() >= 2]
        learning = sum(p.numel() for p in weights if p.requires_grad) / sum(p.numel() for p in weights)
        self._passes = 2 + learning
        self._flop = 0.0

    @staticmethod
    def of(model: PreTrainedModel, devices: int = 1) -> Mfu:
        """Return the meter for ``devices`` devices like that of ``model``, which update it together."""
        on_gpu = model.device.type == "cuda"
        peak = peak_tflop_s(torch.cuda.get_device_name(model.device), model.dtype) if on_gpu else None
        return Mfu(model, None if peak is None else devices * peak)

    def add(self, trees: Sequence[TokenTree], head_tflop: float) -> None:
        """Count an update on ``trees`` with ``head_tflop`` TFLOP in the head."""
        if self.peak is None:
            return
        rows = [distinct_rows(tree) for tree in trees]
        computed, visible = sum(of_tree.num_rows for of_tree in rows), sum(of_tree.visible for of_tree in rows)
        forward = self._cost.token * computed + self._cost.attention * visible
        self._flop += self._passes * forward + 1e12 * head_tflop

    def read(self, times: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the updates since the last call, given the step's account."""
        if self.peak is None:
            return {}
        flop, self._flop = self._flop, 0.0
        seconds = sum(times[f"timing_s/{part}"] for part in (MODEL, HEAD, OPTIMIZER))
        if not flop or not seconds:
            return {}
        return {"perf/mfu/actor": flop / (1e12 * self.peak * seconds), "perf/peak_tflop_s": self.peak}


class GpuMonitor:
    """Samples NVML's counters of a GPU in a thread of its own; the samples are averaged by step.

    Args:
        uuid: UUID of the GPU; None: nothing is recorded.
        told: called once with the reason if nothing more is recorded, and once for each counter that is missing.
        sample_s: seconds between two samples.
    """

    def __init__(self, uuid: str | None, told: Callable[[str], object], sample_s: float = SAMPLE_S) -> None:
        self._uuid, self._told, self._sample_s = uuid, told, sample_s
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._taken: dict[str, list[float]] = {}
        self._thread = threading.Thread(target=self._run, name="rolltree-nvml", daemon=True)
        if uuid is not None:
            self._thread.start()

    @staticmethod
    def of(device: torch.device, told: Callable[[str], object]) -> GpuMonitor:
        """Return the monitor of ``device``; it records nothing unless that is a GPU and nvidia-ml-py is installed."""
        there = device.type == "cuda" and importlib.util.find_spec("pynvml") is not None
        return GpuMonitor(f"GPU-{torch.cuda.get_device_properties(device).uuid}" if there else None, told)

    def read(self) -> dict[str, float]:
        """Return the means since the last call, without counters that were not sampled."""
        with self._lock:
            taken, self._taken = self._taken, {}
        return {name: sum(values) / len(values) for name, values in taken.items()}

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        nvml: Any = importlib.import_module("pynvml")
        counters = dict(COUNTERS)
        try:
            nvml.nvmlInit()
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
                while not self._closed.is_set():
                    self._sample(nvml, handle, counters)
                    self._closed.wait(self._sample_s)
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            self._told(f"NVML failed and is not read any more ({error}); the metrics lack perf/gpu.")

    def _sample(self, nvml: Any, handle: Any, counters: dict[str, Callable[[Any, Any], float]]) -> None:
        readings = {}
        for name, ask in list(counters.items()):
            try:
                readings[name] = ask(nvml, handle)
            except nvml.NVMLError_NotSupported as error:
                del counters[name]
                self._told(f"NVML does not report {name} of this GPU ({error}); the metrics lack it.")
        with self._lock:
            for name, value in readings.items():
                self._taken.setdefault(name, []).append(value)
