"""Lines of gpu_next.py about the kernels of three steps, with and without `model.batch_invariant`.

Each kernel of a step is a row, by its whole name: what equal bits cost is the difference of two such lists.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.model.invariant.install import make_invariant
from rolltree.kernels import dispatch

from .. import workloads
from ..gpu_first import Run
from ..runs.tree_step import Inputs, tree
from ..schema import Row
from .next_runs import Measured

STEPS = 3
BEFORE = 3  # steps that compile and capture


class Profiled(Measured, Protocol):
    """`gpu_next.Decoding`, as far as it is needed here."""

    @property
    def prompts(self) -> list[list[int]]: ...
    def wait(self) -> None: ...


def profiles(x: Profiled) -> Iterator[tuple[str, Run]]:
    """Yield steps of decoding, then steps of training, each with equal bits and without."""
    for kind, steps in (("decoding", _decoding), ("training", _training)):
        for invariant in (True, False):
            yield f"three steps of {kind}, batch_invariant = {invariant}", partial(_profile, x, kind, invariant, steps)


def _profile(
    x: Profiled, kind: str, invariant: bool, steps: Callable[[Profiled, Any], Callable[[], object]]
) -> tuple[list[Row], str]:
    """Return milliseconds of a step that is not profiled, and of a profiled one by kernel.

    Raises:
        RuntimeError: the profiler has recorded nothing.
    """
    with _model(x, invariant) as model:
        step = steps(x, model)
        for _ in range(BEFORE):
            step()
        whole = []
        for _ in range(STEPS):
            x.wait()
            begin = time.perf_counter()
            step()
            x.wait()
            whole.append(1e3 * (time.perf_counter() - begin))
        on_gpu = x.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
            for _ in range(STEPS):
                step()
            x.wait()
        kernels = by_kernel(seen.events(), on_gpu)
    if not kernels:
        raise RuntimeError("the profiler recorded no kernel; the driver may not let this user profile (see CUPTI)")
    case = f"step of {kind}, batch_invariant={invariant}"
    rows = [x.row(case, "whole", "time_ms", whole), x.row(case, "all kernels", "busy_ms", [sum(kernels.values())])]
    rows += [x.row(case, name, "busy_ms", [busy]) for name, busy in kernels.items()]
    most = ", ".join(f"{row.provider[:40]} {row.value:.3g}" for row in rows[2:5])
    return rows, f"{rows[0].value:.4g} ms a step, {rows[1].value:.4g} in {len(kernels)} kernels, most in {most}"


def by_kernel(events: Iterable[Any], on_gpu: bool) -> dict[str, float]:
    """Return milliseconds a step by the name of a kernel or copy, the longest first; on a CPU of an operator, without
    the operators that it calls."""
    busy = defaultdict[str, float](float)
    for event in events:
        if on_gpu and event.device_type == DeviceType.CUDA:
            busy[event.name] += event.time_range.elapsed_us() / 1000 / STEPS
        elif not on_gpu:
            busy[event.name] += event.self_cpu_time_total / 1000 / STEPS
    return dict(sorted(busy.items(), key=lambda item: -item[1]))


@contextmanager
def _model(x: Profiled, invariant: bool) -> Iterator[Any]:
    """Give a copy of the model; if ``invariant``, it and on a GPU the process compute with equal bits meanwhile."""
    model = copy.deepcopy(x.model)
    try:
        yield make_invariant(model) if invariant else model
    finally:
        dispatch.set_backend(None)


def _decoding(x: Profiled, model: Any) -> Callable[[], object]:
    """Return a step of one token for each of 256 responses, whose prompts have been computed.

    Raises:
        RuntimeError: a request has ended before.
    """
    responses, tokens = (2, 24) if x.small else (16, 128)
    engine = NativeEngine(model, config=EngineConfig(kv_tokens=1024 if x.small else 131072, window=1))
    params = SamplingParams(n=responses, max_new_tokens=tokens, ignore_eos=True)
    engine.submit(x.prompts, params, seeds=range(len(x.prompts)))
    before = 0.0
    while engine.stats["sampled_tokens"] - before < responses * len(x.prompts):
        before = engine.stats["sampled_tokens"]
        if ended := engine.step():
            raise RuntimeError(f"a request ended before all were decoded: {ended[0].error}")
    return engine.step


def _training(x: Profiled, model: Any) -> Callable[[], object]:
    """Return a step on a prompt with 8 responses, as `rolltree train` computes it where memory is ample."""
    prompt, response = (128, 32) if x.small else (4096, 1024)
    return tree(Inputs(model.train(), workloads.group(prompt, response, 8)), fused=True, checkpointed=False)["step"]
