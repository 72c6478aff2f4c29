"""Runs one benchmark: its cases, and in each case the providers in turns.

A provider is one function: it takes a case's inputs and returns the calls to time, by direction. It imports its package
inside the function, so that a missing one is reported as not installed, and raises :class:`UnsupportedError` if it
cannot run a case. The ceiling is a provider too: the least work that any implementation must do, measured on the same
device in the same rounds. If a provider fails, only its own rows are missing, and the journal has the reason.
"""

from __future__ import annotations

import gc
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .journal import Journal
from .schema import Context, Row
from .timing import WARMUP_CALLS, GraphError, Samples, TimedCall, interleaved, peak_memory_mib, quantiles, replay

Calls = dict[str, Callable[[], object]]  # by direction
CEILING = "ceiling"
ANY = re.compile("")


class UnsupportedError(Exception):
    """A provider does not run a case, for the reason given."""


class DeviceLostError(RuntimeError):
    """A fault left the device unusable to this process."""


class CaseTimeoutError(BaseException):
    """A provider exceeded the time limit. It is no Exception, which compilers would catch."""


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Any]
    """Makes the inputs when the case runs."""


@dataclass(frozen=True)
class Bench:
    """One op's benchmark.

    ``speedup_over`` names the provider whose time is divided by the others' for rows of metric "speedup", with
    ``speedup_ceiling(inputs)`` as their limit. With ``replayed`` a call is shorter than its launches: on CUDA it is
    timed as the replay of a graph. With ``alone`` the providers are too large to be on the device together: each is
    made, timed and dropped before the next one.
    """

    op: str
    cases: Callable[[torch.device, bool], Iterator[Case]]  # (device, quick)
    providers: Mapping[str, Callable[[Any], Calls]]
    shaped: Callable[..., Iterator[Case]] | None = None
    """Yields the cases of one size, by keywords after the device (:mod:`.shapes`); None: the op takes none."""
    elsewhere: Mapping[str, Callable[[str], Calls]] = field(default_factory=dict)
    """Further providers, which make a case of this name in a process of their own (:mod:`.against`)."""
    model_cases: Callable[[Path, torch.device, bool], Iterator[Case]] | None = None
    """The cases of a pretrained model in a directory; None: the op has none."""
    directions: Sequence[str] = ("forward",)
    """The directions that its providers time, for the pytest-benchmark suite."""
    ceiling: Callable[[Any], Calls] | None = None
    ceiling_is: str = ""  # a description of the ceiling
    speedup_over: str | None = None
    speedup_ceiling: Callable[[Any], float] | None = None
    replayed: bool = False
    alone: bool = False
    warmup: int = WARMUP_CALLS
    """Untimed calls after the first call, which is never timed."""
    work: Callable[[Any], Mapping[str, tuple[float, float]]] | None = None
    """Returns the FLOP and bytes of an implementation without repeated work, by direction, for the roofline."""
    shares: Callable[[Any], Mapping[str, float]] | None = None
    """Returns rows of metric "share" by name, from what providers recorded in a case's inputs."""


@dataclass(frozen=True)
class Choice:
    """The cases and providers that run, and for how long."""

    quick: bool = False
    cases: re.Pattern[str] = ANY
    """A pattern that a case's name must contain."""
    providers: re.Pattern[str] = ANY
    """A pattern that a provider's name must contain; the ceiling always runs."""
    seconds: float | None = None
    """Seconds of timing for every direction of a case."""
    limit: float = 120.0
    """Seconds after which a provider is stopped, while it is prepared and again while it is timed."""

    @property
    def budget(self) -> float:
        return self.seconds if self.seconds is not None else 1.0 if self.quick else 8.0


Guard = Callable[[str], AbstractContextManager[None]]


def run(
    bench: Bench, device: torch.device, choice: Choice, journal: Journal, say: Callable[[str], None]
) -> Iterator[Row]:
    """Measure every case that the journal does not have and yield its rows; ``say`` gets a line for every provider
    that does not run.

    Raises:
        DeviceLostError: the reason is in the journal; another process can continue from there.
    """
    context = Context.of(device)
    for case in bench.cases(device, choice.quick):
        if not choice.cases.search(case.name) or journal.finished(case.name):
            continue
        inputs = None
        guard = _guard(bench.op, case.name, device, choice, journal, say)
        if not journal.known(case.name, "inputs"):
            with guard("inputs"):
                inputs = case.make()
        rows = (
            [] if inputs is None else _measure(bench, case.name, inputs, device, choice, context, journal, guard, say)
        )
        del inputs
        _release(device)
        journal.finish(case.name, rows)
        yield from rows


def _guard(
    op: str, case: str, device: torch.device, choice: Choice, journal: Journal, say: Callable[[str], None]
) -> Guard:
    """Return a context for a provider's work that writes its error or timeout into the journal."""

    @contextmanager
    def guard(provider: str) -> Iterator[None]:
        journal.begin(case, provider)
        try:
            with _time_limit(choice.limit):
                yield
        except ImportError as error:
            first = not any(o.provider == provider and o.status == "absent" for o in journal.outcomes)
            journal.record(case, provider, "absent", str(error.name or error))
            if first:
                say(f"{op}: {provider} is not installed ({error.name or error})")
        except UnsupportedError as reason:
            journal.record(case, provider, "unsupported", str(reason))
            say(f"{op} / {case}: {provider} does not run: {reason}")
        except CaseTimeoutError:
            say(str(journal.record(case, provider, "stopped", f"it took longer than {choice.limit:.0f} s")))
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            say(str(journal.record(case, provider, "failed", f"{type(error).__name__}: {first_line}")))
            error.__traceback__ = None  # the traceback would hold the tensors of the call
            check_device(device)

    return guard


def _measure(
    bench: Bench,
    case: str,
    inputs: Any,
    device: torch.device,
    choice: Choice,
    context: Context,
    journal: Journal,
    guard: Guard,
    say: Callable[[str], None],
) -> list[Row]:
    providers = {name: p for name, p in bench.providers.items() if choice.providers.search(name)}
    providers |= {CEILING: bench.ceiling} if bench.ceiling else {}
    providers |= {name: partial(_by_name, make, case) for name, make in bench.elsewhere.items()}
    calls: dict[str, Calls] = {}  # by direction and provider
    samples: dict[str, dict[str, Samples]] = {}
    peaks: dict[str, dict[str, float | None]] = {}

    def time(calls: dict[str, Calls]) -> None:
        for direction, by_provider in calls.items():
            timed = interleaved(by_provider, device, seconds=choice.budget, warmup=bench.warmup, guard=guard)
            samples.setdefault(direction, {}).update(timed)
            if bench.replayed and device.type == "cuda" and not direction.endswith("launched"):
                continue  # a replay allocates nothing
            for name in timed:
                with guard(name):
                    peaks.setdefault(direction, {})[name] = peak_memory_mib(by_provider[name], device)

    for name, provider in providers.items():
        if journal.known(case, name):  # an earlier process recorded it
            continue
        prepared: dict[str, Calls] = {}
        with guard(name):
            for direction, call in provider(inputs).items():
                call()  # raises here, before anything is timed, if the provider cannot run
                if bench.replayed and device.type == "cuda" and not isinstance(call, TimedCall):
                    try:
                        call = replay(call)
                    except GraphError as error:
                        say(f"{bench.op} / {case}: {name} is timed with its launches: {error}")
                        direction += ", launched"
                prepared[direction] = {name: call}
        if bench.alone:
            time(prepared)
            prepared.clear()
            call = provider = None  # type: ignore[assignment]
            _release(device)
        for direction, of_provider in prepared.items():
            calls.setdefault(direction, {}).update(of_provider)
    time(calls)
    rows = [
        row
        for direction, of_direction in samples.items()
        for row in _rows(bench, case, direction, inputs, of_direction, peaks.get(direction, {}), context)
    ]
    for name, share in (bench.shares(inputs) if bench.shares else {}).items():
        rows.append(Row(bench.op, case, name, "-", "share", share, share, share, None, **asdict(context)))
    return rows


def _by_name(make: Callable[[str], Calls], case: str, inputs: Any) -> Calls:
    """Return the calls of another process, which makes inputs of its own: those of the case with the same name."""
    return make(case)


def _rows(
    bench: Bench,
    case: str,
    direction: str,
    inputs: Any,
    samples: Mapping[str, Samples],
    peaks: Mapping[str, float | None],
    context: Context,
) -> Iterator[Row]:
    limit = samples[CEILING].quantiles()[1] if CEILING in samples else None

    flop, moved = bench.work(inputs).get(direction.partition(",")[0], (0.0, 0.0)) if bench.work else (0.0, 0.0)

    def row(provider: str, metric: str, p20: float, value: float, p80: float, ceiling: float | None) -> Row:
        measured_row = Row(bench.op, case, provider, direction, metric, value, p20, p80, ceiling, **asdict(context))
        return replace(measured_row, flop=flop or None, bytes=moved or None) if metric == "time_ms" else measured_row

    for provider, measured in samples.items():
        if provider == CEILING:
            continue
        yield row(provider, "time_ms", *measured.quantiles(), limit)
        if (peak := peaks.get(provider)) is not None:
            yield row(provider, "peak_memory_mib", peak, peak, peak, None)
        base = samples.get(bench.speedup_over or "")
        if base is not None and provider != bench.speedup_over:
            base_ms = (
                [base.quantiles()[1]] * len(measured.ms) if bench.alone else base.ms
            )  # otherwise the ratio of each round
            ratios = [a / b for a, b in zip(base_ms, measured.ms, strict=True)]
            ceiling = bench.speedup_ceiling(inputs) if bench.speedup_ceiling else None
            yield row(provider, "speedup", *quantiles(ratios), ceiling)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`CaseTimeoutError` in the block after ``seconds``; works in the main thread, which gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise CaseTimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_device(device: torch.device) -> None:
    """Check that the device still works for this process.

    Raises:
        DeviceLostError: it does not, for example after an illegal memory access.
    """
    if device.type == "cuda":
        try:
            torch.zeros(1, device=device).item()
        except RuntimeError as error:
            raise DeviceLostError("a fault left the device unusable to this process") from error


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
