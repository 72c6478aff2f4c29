"""Settings shared by every test.

Without a CUDA device Triton kernels run in Triton's interpreter, which must be chosen before triton is imported; tests
marked ``gpu`` are skipped and counted. Where ``ROLLTREE_WITHOUT`` names Triton, importing it fails, as where it is not
installed. `tiers` says which tests a command runs.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .support import fresh, tiers
from .support.forks import TORCH, Forks, forks

try:
    import hypothesis
except ModuleNotFoundError:  # on a machine lent for its GPU, whose tests draw no examples
    hypothesis = None  # type: ignore[assignment]

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
if "triton" in os.environ.get("ROLLTREE_WITHOUT", ""):  # no file of rolltree is imported yet, which may import it
    sys.modules["triton"] = None  # type: ignore[assignment]
elif not HAS_GPU and importlib.util.find_spec("triton") is not None:
    from .support.interpreter import leave_out_what_is_dropped, round_sums_once

    leave_out_what_is_dropped()
    round_sums_once()

# Examples follow from the test's source alone, so a failure is the same on every machine.
if hypothesis is not None:
    hypothesis.settings.register_profile("rolltree", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("rolltree")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--most-cases", type=int, metavar="N", help="run N cases of each test (tests/support/tiers.py)")


def pytest_configure(config: pytest.Config) -> None:
    workers = getattr(config.option, "numprocesses", None) or 1
    if "OMP_NUM_THREADS" not in os.environ:  # workers inherit what is set here
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that tests start, too


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    if not HAS_GPU:
        no_gpu = pytest.mark.skip(reason="needs a CUDA device, and there is none")
        for item in items:
            if item.get_closest_marker("gpu"):  # not keywords, which hold the names of folders too
                item.add_marker(no_gpu)
    tier_of = tiers.select(config, items)
    yield  # to what -k leaves out
    if most := config.option.most_cases:
        tiers.thin(config, items, tier_of, most)


count_frozen = gc.get_freeze_count


def pytest_collection_finish() -> None:
    gc.freeze()  # every run of a trainer collects garbage; what is imported and collected by now is none
    gc.get_freeze_count = lambda: 1  # a run asks whether there are any, and counting millions takes a tenth of a second


def pytest_unconfigure() -> None:
    gc.unfreeze()
    gc.get_freeze_count = count_frozen


def pytest_runtest_logfinish() -> None:
    fresh.forget()


@pytest.fixture
def device() -> torch.device:
    """The device kernels are tested on: CUDA where there is one, otherwise the CPU (Triton interpreted)."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def torch_forks() -> Iterator[Forks]:
    """Programs in forks of a process that has imported torch and numpy, and nothing that imports them."""
    with forks(TORCH) as parent:
        yield parent


@pytest.fixture(scope="module")
def without_report() -> Iterator[None]:
    """Runs of the command line leave no report, whose plots take half of a short run's time; test_run.py has one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rolltree.engine.app.report.write_report", lambda directory: directory / "report.html")
        yield


@pytest.fixture(scope="module")
def engine() -> Any:
    """A small native engine with a chat template, which the tests of one file share."""
    from .support.serving import make_engine

    return make_engine()
