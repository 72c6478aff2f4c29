"""Runs one benchmark: its cases, and in each the providers side by side.

A provider is one function: it takes a case's inputs and returns what to time, by direction. It imports its own package
inside the function, so that an absent one is reported as not installed, and raises :class:`UnsupportedError` where it
cannot run a case. The ceiling is a provider too: the least work that any implementation must do, measured on the same
device in the same rounds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from .schema import Context, Row
from .timing import interleaved, peak_memory_mib, quantiles

Calls = dict[str, Callable[[], object]]  # by direction
CEILING = "ceiling"


class UnsupportedError(Exception):
    """Why a provider does not run a case."""


class Case(NamedTuple):
    name: str
    inputs: Any


@dataclass(frozen=True)
class Bench:
    """One op's benchmark.

    ``speedup_over`` names the provider whose time is divided by the others' for rows of metric "speedup", with
    ``speedup_ceiling(inputs)`` as their limit.
    """

    op: str
    cases: Callable[[torch.device, bool], Iterator[Case]]  # (device, quick)
    providers: Mapping[str, Callable[[Any], Calls]]
    ceiling: Callable[[Any], Calls] | None = None
    ceiling_is: str = ""  # what the ceiling stands for, in words
    speedup_over: str | None = None
    speedup_ceiling: Callable[[Any], float] | None = None


def run(bench: Bench, device: torch.device, *, quick: bool, say: Callable[[str], None]) -> Iterator[Row]:
    """Measure every case and yield its rows; ``say`` gets a line for every provider that does not run."""
    context = Context.of(device)
    absent: set[str] = set()
    for case in bench.cases(device, quick):
        by_direction: dict[str, dict[str, Callable[[], object]]] = {}
        providers = {**bench.providers, **({CEILING: bench.ceiling} if bench.ceiling else {})}
        for name, provider in providers.items():
            try:
                for direction, call in provider(case.inputs).items():
                    call()  # a provider that cannot run says so here, before anything is timed
                    by_direction.setdefault(direction, {})[name] = call
            except ImportError as error:
                if name not in absent:
                    say(f"{bench.op}: {name} is not installed ({error.name or error})")
                absent.add(name)
            except UnsupportedError as reason:
                say(f"{bench.op} / {case.name}: {name} does not run: {reason}")
            except Exception as error:
                if "rolltree" in name or name == CEILING:
                    raise
                say(f"{bench.op} / {case.name}: {name} failed: {type(error).__name__}: {error}")  # a peer's own matter
        for direction, calls in by_direction.items():
            yield from _measure(bench, case, direction, calls, device, context, seconds=1.0 if quick else 8.0)
        del by_direction
        gc.collect()


def _measure(
    bench: Bench,
    case: Case,
    direction: str,
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    context: Context,
    seconds: float,
) -> Iterator[Row]:
    samples = interleaved(calls, device, seconds=seconds)
    limit = samples[CEILING].quantiles()[1] if CEILING in samples else None

    def row(provider: str, metric: str, p20: float, value: float, p80: float, ceiling: float | None) -> Row:
        return Row(bench.op, case.name, provider, direction, metric, value, p20, p80, ceiling, **asdict(context))

    for provider, call in calls.items():
        if provider == CEILING:
            continue
        yield row(provider, "time_ms", *samples[provider].quantiles(), limit)
        if (peak := peak_memory_mib(call, device)) is not None:
            yield row(provider, "peak_memory_mib", peak, peak, peak, None)
        if bench.speedup_over in samples and provider != bench.speedup_over:
            base = samples[bench.speedup_over].ms
            ratios = [theirs / ours for theirs, ours in zip(base, samples[provider].ms, strict=True)]
            ceiling = bench.speedup_ceiling(case.inputs) if bench.speedup_ceiling else None
            yield row(provider, "speedup", *quantiles(ratios), ceiling)
