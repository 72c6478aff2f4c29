"""Settings shared by every test.

Without a CUDA device Triton kernels run in Triton's interpreter, which must be chosen before triton is imported; tests
marked ``gpu`` are skipped and counted.

Every test is in one tier. Those marked for a campaign (:data:`CAMPAIGNS`) are left out unless the mark expression names
it; those marked ``check`` unless it does, or the command names files or folders. `make test` runs all others, and `make
check` the mark expression ``check``. ``check(but=n)`` leaves n cases of a test, evenly spaced, to `make test`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from .forks import TORCH, Forks, forks

try:
    import hypothesis
except ModuleNotFoundError:  # on a machine lent for its GPU, whose tests draw no examples
    hypothesis = None  # type: ignore[assignment]

CAMPAIGNS = ("slow", "methods", "aot", "hopper", "verl", "vllm", "ray")
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    from .interpreter import leave_out_what_is_dropped, round_sums_once

    leave_out_what_is_dropped()
    round_sums_once()

# Examples follow from the test's source alone, so a failure is the same on every machine.
if hypothesis is not None:
    hypothesis.settings.register_profile("rolltree", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("rolltree")


def pytest_configure(config: pytest.Config) -> None:
    workers = getattr(config.option, "numprocesses", None) or 1
    if "OMP_NUM_THREADS" not in os.environ:  # workers inherit what is set here
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that tests start, too


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not HAS_GPU:
        no_gpu = pytest.mark.skip(reason="needs a CUDA device, and there is none")
        for item in items:
            if item.get_closest_marker("gpu"):  # not keywords, which hold the names of folders too
                item.add_marker(no_gpu)
    named = config.option.markexpr
    wanted = {mark for mark in (*CAMPAIGNS, "check") if mark in named}
    if named != "check":
        wanted.add("test")
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        wanted.add("check")
    tiers = {item: tier(item) for item in items} | {item: {"test"} for item in spared(items)}
    config.hook.pytest_deselected(items=[item for item in items if not tiers[item] <= wanted])
    items[:] = [item for item in items if tiers[item] <= wanted]


def tier(item: pytest.Item) -> set[str]:
    """Return the marks of the campaigns that a test belongs to; if there are none, ``check`` or ``test``."""
    campaigns = {mark for mark in CAMPAIGNS if item.get_closest_marker(mark)}
    return campaigns or {"check" if item.get_closest_marker("check") else "test"}


def spared(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that ``check(but=n)`` leaves to `make test`."""
    cases: dict[tuple[pytest.Item, str], list[pytest.Item]] = {}
    for item in items:
        if tier(item) == {"check"}:
            cases.setdefault((item.parent, item.originalname), []).append(item)
    for same in cases.values():
        n = min(same[0].get_closest_marker("check").kwargs.get("but", 0), len(same))
        yield from (same[len(same) * i // n] for i in range(n))


def pytest_collection_finish() -> None:
    gc.freeze()  # every run of a trainer collects garbage; what is imported and collected by now is none


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def device() -> torch.device:
    """The device kernels are tested on: CUDA where there is one, otherwise the CPU (Triton interpreted)."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def torch_forks() -> Iterator[Forks]:
    """Programs in forks of a process that has imported torch and numpy, and nothing that imports them."""
    with forks(TORCH) as parent:
        yield parent
