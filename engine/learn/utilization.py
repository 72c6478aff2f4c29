"""The FLOP of updates, their share of a GPU's peak (MFU), and counters of the GPU's driver (NVML)."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..batches.cost import CostModel, Work
from ..train.checkpointing import checkpointed_share, keeps_attention
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


class Compute:
    """FLOP of updates and of what roles score, and the share of the devices' peak that the updates reached (model FLOP
    utilisation; Chowdhery et al. 2022).

    Counts the decoder on the rows and pairs that were computed, and the planned products with the head: 2 FLOP for each
    weight and row in the forward pass, as many for the gradient of the input, and as many for the gradient of trained
    weights; attention takes twice its forward pass for the backward one. A second forward pass, of checkpointed layers
    or of pieces (`pieces.py`), counts as FLOP and not as utilisation. Products that a kernel repeats in its backward
    pass are not counted.

    Args:
        peak: TFLOP/s of the devices together; None if it is not known, then no utilisation is recorded.
    """

    def __init__(self, peak: float | None) -> None:
        self.peak = peak
        self._costs: dict[int, CostModel] = {}  # by the model's identity; the models live as long as the learner
        self._trained = self._scored = self._useful = 0.0

    @staticmethod
    def of(model: PreTrainedModel, devices: int = 1) -> Compute:
        """Return the meter for ``devices`` devices like that of ``model``, which update it together."""
        on_gpu = model.device.type == "cuda"
        peak = peak_tflop_s(torch.cuda.get_device_name(model.device), model.dtype) if on_gpu else None
        return Compute(None if peak is None else devices * peak)

    def train(self, model: PreTrainedModel, work: Work, again: Work, head_flop: float) -> float:
        """Count an update of ``model`` and return its FLOP.

        Args:
            work: of its forward pass.
            again: pieces that were computed a second time.
            head_flop: FLOP of the head's products, forward and backward; those of ``work`` are not counted.
        """
        cost, weights = self._cost(model), [p for p in model.get_decoder().parameters() if p.dim() >= 2]
        learning = sum(p.numel() for p in weights if p.requires_grad) / sum(p.numel() for p in weights)
        useful = (2 + learning) * cost.token * work.rows + 3 * cost.attention * work.pairs + head_flop
        repeated = cost.forward(replace(again, heads=0))
        if share := checkpointed_share(model):
            pairs = 0.0 if keeps_attention(model) else work.pairs
            repeated += share * (cost.forward(replace(work, heads=0, pairs=pairs)) - _last_products(model) * work.rows)
        self._useful += useful
        self._trained += useful + repeated
        return useful + repeated

    def score(self, model: PreTrainedModel, work: Work) -> None:
        """Count a forward pass of ``model`` for a column of scores."""
        self._scored += self._cost(model).forward(work)

    def read(self, times: dict[str, float]) -> dict[str, float]:
        """Return the metrics since the last call, given the step's account."""
        out = {"perf/flop_trained": self._trained, "perf/flop_scored": self._scored}
        useful = self._useful
        self._trained = self._scored = self._useful = 0.0
        if self.peak is None:
            return out
        seconds = sum(times[f"timing_s/{part}"] for part in (MODEL, HEAD, OPTIMIZER))
        if not useful or not seconds:
            return out
        return out | {"perf/mfu/actor": useful / (1e12 * self.peak * seconds), "perf/peak_tflop_s": self.peak}

    def _cost(self, model: PreTrainedModel) -> CostModel:
        if id(model) not in self._costs:
            self._costs[id(model)] = CostModel.of(model)
        return self._costs[id(model)]


def _last_products(model: PreTrainedModel) -> float:
    """Return the FLOP of a row in the products that end the layers: torch's checkpoint repeats a layer only up to the
    last tensor that its gradient needs."""
    named = model.get_decoder().named_parameters()
    return 2.0 * sum(p.numel() for name, p in named if name.endswith("mlp.down_proj.weight"))


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
