"""Every case of `rolltree bench` as an entry of pytest-benchmark: ``make bench-ops``, or ``pytest bench/suite.py``.

A group is an op, a case (its shape) and a direction; its entries are the providers, the ceiling among them. pytest's
``-k`` selects by these names. pytest-benchmark's options compare with earlier runs, draw histograms and write JSON.
``BENCH_QUICK=1`` runs the small cases, ``BENCH_DEVICE`` names the device.

An entry is timed after the one before it, not interleaved with the other providers of its group, and without clearing
the L2 cache of a GPU; for ratios on a shared machine and for memory use `rolltree bench`, whose rows docs/benchmarks.md
shows.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from .cli import OPS, load
from .runner import CEILING, Bench, Calls, Case, UnsupportedError
from .schema import commit, device_name


@dataclass(frozen=True)
class Entry:
    """One provider of one case in one direction."""

    bench: Bench
    case: Case
    provider: str
    direction: str
    device: torch.device

    @property
    def group(self) -> str:
        return f"{self.bench.op}: {self.case.name}, {self.direction}"

    def __str__(self) -> str:
        return f"{self.group}, {self.provider}"


def entries(device: torch.device, quick: bool, ops: Sequence[str] = OPS) -> Iterator[Entry]:
    """Yield the entries of ``ops``; those of a case, and of a provider in it, follow each other."""
    for bench in map(load, ops):
        providers = [*bench.providers, *([CEILING] if bench.ceiling else [])]
        for case in bench.cases(device, quick):
            for provider in providers:
                for direction in bench.directions:
                    yield Entry(bench, case, provider, direction, device)


@dataclass
class Prepared:
    """The inputs of one case and the calls of one provider, which consecutive entries share."""

    case: Case | None = None
    inputs: Any = None
    provider: str = ""
    calls: Calls = field(default_factory=dict)
    missing: str = ""
    """Why the provider does not run the case; empty if it does."""

    def call(self, entry: Entry) -> Callable[[], object]:
        """Return the call of ``entry``, which has run once.

        Raises:
            UnsupportedError: the provider is not installed, or does not run the case in this direction.
        """
        if self.case is not entry.case:
            self.__init__()  # type: ignore[misc]
            self._release(entry.device)
            self.inputs = entry.case.make()
            self.case = entry.case
        if self.provider != entry.provider:
            self.provider, self.calls, self.missing = entry.provider, {}, ""
            self._release(entry.device)
            provider = entry.bench.ceiling if entry.provider == CEILING else entry.bench.providers[entry.provider]
            assert provider is not None
            try:
                self.calls = provider(self.inputs)
            except ImportError as error:
                self.missing = f"{error.name or error} is not installed"
            except UnsupportedError as error:
                self.missing = str(error)
        if self.missing or entry.direction not in self.calls:
            raise UnsupportedError(self.missing or f"{entry.provider} has no direction '{entry.direction}' here")
        call = self.calls[entry.direction]
        try:
            call()
        except ImportError as error:
            raise UnsupportedError(f"{error.name or error} is not installed") from error
        return call

    @staticmethod
    def _release(device: torch.device) -> None:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure(entry: Entry, call: Callable[[], object], benchmark: Any) -> None:
    """Time ``call`` with the fixture ``benchmark`` of pytest-benchmark."""

    def synchronized() -> None:
        call()
        torch.cuda.synchronize(entry.device)

    benchmark.group, benchmark.name = entry.group, entry.provider
    benchmark.extra_info.update(
        op=entry.bench.op, case=entry.case.name, provider=entry.provider, direction=entry.direction,
        device=device_name(entry.device), commit=commit(), torch=torch.__version__,
    )  # fmt: skip
    benchmark(synchronized if entry.device.type == "cuda" else call)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return Prepared()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = torch.device(os.environ.get("BENCH_DEVICE", "cuda" if torch.cuda.is_available() else "cpu"))
    quick = os.environ.get("BENCH_QUICK", "0") not in ("", "0")
    metafunc.parametrize("entry", list(entries(device, quick)), ids=str)


def test_entry(entry: Entry, prepared: Prepared, benchmark: Any) -> None:
    try:
        call = prepared.call(entry)
    except UnsupportedError as error:
        pytest.skip(str(error))
    measure(entry, call, benchmark)
