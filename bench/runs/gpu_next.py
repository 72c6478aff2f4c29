"""``make gpu ARGS="--part next"``: figures that nobody has measured yet, the cheapest first, each useful alone.

    python -m rolltree.bench.runs.gpu_next decode --out DIR

Like gpu_first.py it tells each figure as it ends, and leaves out what has an outcome in ``DIR``.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ..cli import load
from ..gpu_first import Run, tell_all, timed_once
from ..jobs.next_profiles import profiles
from ..jobs.next_runs import whole_runs
from ..journal import Journal
from ..runner import Choice, DeviceLostError
from ..schema import Context, Row
from .next_products import products

KINDS = ("decode", "profiles", "products", "steps", "runs")
REPLAYS = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if everything of a kind passed, 1 if something failed, 3 if a fault left the device unusable."""
    parser = argparse.ArgumentParser(prog="python -m rolltree.bench.runs.gpu_next")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    kinds: dict[str, Callable[[Decoding], Iterator[tuple[str, Run]]]]
    kinds = {"decode": decoding, "profiles": profiles, "products": products, "steps": steps, "runs": whole_runs}
    journal = Journal(f"next_{args.kind}", args.out)
    try:
        tell_all(args.kind, kinds[args.kind](Decoding(device, args.rehearse, Context.of(device))), journal, device)
    except DeviceLostError as error:
        print(error, file=sys.stderr)
        return 3
    return 1 if journal.problems else 0


@dataclass(frozen=True)
class Decoding:
    """16 prompts of 2,048 tokens with 16 responses of 128, random weights of Qwen3 0.6B's shape in bf16; or small."""

    device: torch.device
    small: bool
    context: Context

    @cached_property
    def model(self) -> Any:
        from .rollout import make_model

        return make_model(self.device, small=self.small).eval()

    @cached_property
    def prompts(self) -> list[list[int]]:
        count, length = (2, 24) if self.small else (16, 2048)
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.model.config.vocab_size, (count, length), generator=generator).tolist()

    def engine(self, *, modules: bool = False, **options: Any) -> Any:
        """Return an engine; with ``modules`` its steps run Transformers' modules, and not ten kernels a layer."""
        from rolltree.engine import EngineConfig, NativeEngine

        engine = NativeEngine(self.model, config=EngineConfig(kv_tokens=1024 if self.small else 131072, **options))
        if modules:
            engine.loop.runner._replayed = None
        return engine

    def generate(self, engine: Any) -> tuple[list[Any], float]:
        """Return the trees of a call, and its seconds."""
        from rolltree.engine import SamplingParams

        params = SamplingParams(n=2 if self.small else 16, max_new_tokens=12 if self.small else 128, ignore_eos=True)
        self.wait()
        begin = time.perf_counter()
        trees = engine.generate(self.prompts, params, seeds=range(len(self.prompts)))
        self.wait()
        return trees, time.perf_counter() - begin

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def row(self, case: str, provider: str, metric: str, values: Sequence[float]) -> Row:
        ordered = sorted(values)
        low, middle, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.5, 0.8))
        return Row("next", case, provider, "forward", metric, middle, low, high, None, **asdict(self.context))


def decoding(x: Decoding) -> Iterator[tuple[str, Run]]:
    """Yield what decoding is to show: equal bits, sleep, the graph of a step, windows, prefill, pages that stay."""
    yield "windows sample the same", partial(_same, x)
    for keep in (True, False):
        yield f"sleep and wake, keep_pages = {keep}", partial(_asleep, x, keep)
    if x.device.type == "cuda":
        for modules in (False, True):
            yield f"graph of a step, {'modules' if modules else 'ten kernels'}", partial(_graph, x, modules)
    yield "steps of windows", partial(_windows, x)
    for modules in (False, True):
        yield f"calls, {'modules' if modules else 'ten kernels'}", partial(_calls, x, {"modules": modules})
    for tokens in (2048, 8192, 16384):
        yield f"calls, prefill of {tokens}", partial(_calls, x, {"max_prefill_tokens": tokens})
    for keep in (True, False):
        yield f"after an update, keep_pages = {keep}", partial(_after_update, x, keep)


STEPS = {
    "tree_step": (
        r"^4096\+8x1024 Qwen3 0\.6B",
        ("rolltree, tree, as trained", "rolltree, tree, as trained, attention kept", "rolltree, tree",
         "flex_attention, fused layers", "flex_attention, FLASH, fused layers"),
    ),
    "tree_attention": (r"^4096\+28x1024 ", ("rolltree", "rolltree, flash", "flex_attention", "flex_attention, FLASH")),
}  # fmt: skip
"""The case of a benchmark, and the providers that are timed, a line each."""


def steps(x: Decoding) -> Iterator[tuple[str, Run]]:
    """Yield whole steps with the layers that training has, and attention beside FLASH's."""
    for op, (pattern, providers) in STEPS.items():
        bench = load(op)
        name = next(case.name for case in bench.cases(x.device, x.small) if x.small or re.search(pattern, case.name))
        for provider in providers:
            chosen = re.compile(f"^{re.escape(provider)}$")
            choice = Choice(x.small, re.compile(f"^{re.escape(name)}$"), chosen, 0.1 if x.small else 2.0)
            yield f"{op}, {provider}", partial(timed_once, bench, x.device, choice)


def _same(x: Decoding) -> tuple[list[Row], str]:
    one, eight, modules = (
        x.generate(x.engine(window=window, modules=modules))[0]
        for window, modules in ((1, False), (8, False), (1, True))
    )
    _compare_bits(one, eight, "of a window of 8 steps differs from that of single steps")
    pairs = list(zip(one, modules, strict=True))
    same = sum(float((a.token_id == b.token_id).mean()) for a, b in pairs if a.num_tokens == b.num_tokens) / len(pairs)
    row = x.row("windows sample the same", "ten kernels", "share", [same])
    return [row], f"bits equal; {same:.4f} of the tokens are those of modules, up to roundings and what follows them"


def _compare_bits(trees: Sequence[Any], others: Sequence[Any], differs: str) -> None:
    for tree, other in zip(trees, others, strict=True):
        for name in ("token_id", "behaviour_logprob", "entropy"):
            if getattr(tree, name).tobytes() != getattr(other, name).tobytes():
                raise AssertionError(f"{name} {differs}")


def _asleep(x: Decoding, keep: bool) -> tuple[list[Row], str]:
    """Milliseconds of sleep and wake, after which samples, addresses and graphs are those before; without
    ``keep`` the memory of the pages is free meanwhile."""
    engine, on_gpu = x.engine(keep_pages=keep), x.device.type == "cuda"
    before = x.generate(engine)[0]
    pages = engine.cache.bytes
    times: dict[str, list[float]] = {"sleep": [], "wake": []}
    for _ in range(3):
        places = [part.data_ptr() for kv in engine.cache.pages.values() for part in kv]
        graphs = dict(engine.loop.runner.graphs._graphs) if on_gpu else {}
        free = torch.cuda.mem_get_info(x.device)[0] if on_gpu else 0
        for name, function in (("sleep", engine.sleep), ("wake", engine.wake)):
            x.wait()
            begin = time.perf_counter()
            function()
            x.wait()
            times[name].append(1e3 * (time.perf_counter() - begin))
            if on_gpu and name == "sleep" and (torch.cuda.mem_get_info(x.device)[0] - free >= pages) is keep:
                raise AssertionError(f"{pages} bytes of pages are {'' if keep else 'not '}free while the engine sleeps")
        _compare_bits(before, x.generate(engine)[0], "differs after the engine has slept")
        if on_gpu and graphs != engine.loop.runner.graphs._graphs:
            raise AssertionError("graphs were captured again after the engine had slept")
        if on_gpu and places != [part.data_ptr() for kv in engine.cache.pages.values() for part in kv]:
            raise AssertionError("pages have moved while the engine slept")
    rows = [x.row(name, f"keep_pages={keep}", "time_ms", values) for name, values in times.items()]
    return rows, ", ".join(f"{row.case} {row.value:.3g} ms" for row in rows) + f", pages of {pages / 2**20:.4g} MiB"


def _graph(x: Decoding, modules: bool) -> tuple[list[Row], str]:
    """Nodes, device time with and without gaps, and the host's time for a replay, of the largest captured graph."""
    engine = x.engine(modules=modules)
    x.generate(engine)
    graphs = engine.loop.runner.graphs._graphs
    kind = max(graphs)
    graph, decoded = graphs[kind]
    vector = decoded.vector
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> None:
        vector._device.copy_(vector._host, non_blocking=True)  # a window must not go on past its room
        graph.replay()

    with torch.inference_mode():
        replay()
        x.wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            x.wait()
        kernels = [event for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
        busy = sum(event.time_range.elapsed_us() for event in kernels) / 1000
        host = []
        begin.record()
        for _ in range(REPLAYS):
            started = time.perf_counter()
            replay()
            host.append(1e3 * (time.perf_counter() - started))
        end.record()
        x.wait()
    case = f"graph of {kind[0]} rows and {kind[1]} partials"
    provider, whole = "modules" if modules else "ten kernels", begin.elapsed_time(end) / REPLAYS
    values = {"nodes": len(kernels), "time_ms": whole, "busy_ms": busy, "host_ms": sorted(host)[REPLAYS // 2]}
    rows = [x.row(case, provider, metric, [value]) for metric, value in values.items()]
    return rows, ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _windows(x: Decoding) -> tuple[list[Row], str]:
    """Milliseconds a step with the prompts' keys kept, by turns."""
    engines = {window: x.engine(window=window) for window in (1, 2, 4, 8)}
    times: dict[int, list[float]] = {window: [] for window in engines}
    for turn in range(2 if x.small else 4):
        for window, engine in engines.items():
            seconds = x.generate(engine)[1]
            if turn:  # the first captures
                times[window].append(1e3 * seconds / engine.stats["steps"])
    rows = [x.row("step", f"window {window}", "time_ms", values) for window, values in times.items()]
    return rows, ", ".join(f"{row.provider} {row.value:.3g} ms" for row in rows)


def _calls(x: Decoding, options: dict[str, Any]) -> tuple[list[Row], str]:
    """Seconds of whole calls whose prompts' keys are computed anew."""
    engine, times = x.engine(**options), []
    for turn in range(2 if x.small else 4):
        engine.forget_prefixes()
        seconds = x.generate(engine)[1]
        if turn:
            times.append(1e3 * seconds)
    provider = ", ".join(f"{name}={value}" for name, value in options.items())
    row = x.row("16 x (2048 + 16x128)" if not x.small else "small", provider, "time_ms", times)
    return [row], f"{row.value:.4g} ms"


def _after_update(x: Decoding, keep: bool) -> tuple[list[Row], str]:
    """Seconds of a call after the engine has rested, as after each update."""
    engine, times = x.engine(keep_pages=keep), []
    for turn in range(2 if x.small else 4):
        engine.sleep()
        engine.wake()
        seconds = x.generate(engine)[1]
        if turn:
            times.append(1e3 * seconds)
    row = x.row("call after an update", f"keep_pages={keep}", "time_ms", times)
    return [row], f"{row.value:.4g} ms"


if __name__ == "__main__":
    sys.exit(main())
