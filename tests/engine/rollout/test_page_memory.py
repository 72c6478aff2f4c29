"""Pages whose addresses outlive their memory, by a stand-in for CUDA's driver that checks its rules."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.native.cache import addresses
from rolltree.engine.rollout.native.cache.addresses import Range, page_memory
from rolltree.engine.rollout.native.cache.resting import PagesAtRest

from .driver import CAN_BUILD, UNIT, StandIn, build, over_host
from .test_keep_pages import Forgetful
from .test_native_engine import MODELS, PROMPTS, TREEPO, assert_all_free, engine, model, responses

pytestmark = pytest.mark.skipif(not CAN_BUILD, reason="the stand-in needs g++ and Triton's header")
UNKNOWN = 999
LIBC = ctypes.CDLL(None)
PARAMS = SamplingParams(n=3, max_new_tokens=14, ignore_eos=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A driver; at the end no rule was broken, and everything was given back."""
    stand_in = StandIn(library)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: stand_in.library.synchronize())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(addresses, "over", over_host)
    yield stand_in
    gc.collect()
    assert stand_in.broken == ""
    assert stand_in.held == (0, 0)


def readable(tensor: Tensor) -> bool:
    """Return whether the kernel finds memory at the tensor's address."""
    reader, writer = os.pipe()
    try:
        return LIBC.write(writer, ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(1)) == 1
    finally:
        os.close(reader)
        os.close(writer)


def on(driver: StandIn, name: str = "qwen3", **options: Any) -> NativeEngine:
    """An engine whose pages have memory from the driver, as those of an engine on a GPU."""
    native = engine(name, **options)
    native.cache.memory = driver.memory()
    native._at_rest = PagesAtRest(torch.device("cpu"), native.config.keep_pages, apart=True)
    return native


def places(native: NativeEngine) -> list[int]:
    return [part.data_ptr() for kv in native.cache.pages.values() for part in kv]


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 7), (torch.bfloat16, 4), (torch.float64, 14)])
def test_memory_goes_and_comes_and_the_address_stays(dtype: torch.dtype, units: int, driver: StandIn) -> None:
    memory = driver.memory()
    small, large = memory.zeros((3, 5), dtype), memory.zeros((7, UNIT // 8, 2), dtype)
    assert (small.shape, small.dtype, large.shape) == ((3, 5), dtype, (7, UNIT // 8, 2))
    assert driver.held == (2, (1 + units) * UNIT)
    where = small.data_ptr(), large.data_ptr()
    for _ in range(3):
        assert not small.any()
        assert not large.any(), "what another process left"
        small.fill_(2.0)
        large.fill_(3.0)
        driver.library.use()
        memory.unmap()
        memory.unmap()
        assert driver.held == (2, 0)
        assert not readable(small)
        memory.map()
        memory.map()
        assert readable(small)
        assert (small.data_ptr(), large.data_ptr()) == where
    del memory
    gc.collect()
    assert driver.held[0] == 2, "a tensor keeps its addresses"
    assert not small.any()


def steps(driver: StandIn, tensors: list[Tensor]) -> Iterator[Callable[[], object]]:
    """The calls of an engine for the memory of its pages, in order."""
    memory = driver.memory()
    yield lambda: tensors.append(memory.zeros((4, 3), torch.float32))
    yield lambda: tensors.append(memory.zeros((4, 3), torch.bfloat16))
    yield lambda: (driver.library.use(), memory.unmap())
    yield memory.map
    assert not any(tensor.any() for tensor in tensors)
    yield memory.unmap


def errors(driver: StandIn, call: int) -> tuple[str, list[str]]:
    """Take the steps, each a second time where it fails; return the call that fails, and what the steps raised."""
    raised: list[str] = []
    tensors: list[Tensor] = []
    driver.library.fail(call, UNKNOWN)
    try:
        for step in steps(driver, tensors):
            try:
                step()
            except RuntimeError as error:
                raised.append(repr(error))
                step()
    except RuntimeError as error:  # before there was memory
        raised.append(repr(error))
    failed = driver.failed
    driver.library.fail(0, 0)  # the tensors go, and with them the addresses
    return failed, raised


def test_a_call_that_fails_is_named_and_leaves_nothing_behind(driver: StandIn) -> None:
    """Each call in turn; done again, the same succeeds."""
    calls = []
    for k in itertools.count(1):
        failed, raised = errors(driver, k)
        gc.collect()
        assert driver.held == (0, 0), failed
        if not failed:
            break
        assert raised == [
            f"RuntimeError(\"{failed} of CUDA's driver failed with 999 (CUDA_ERROR_UNKNOWN); set keep_pages to true, "
            'which does without these calls.")'
        ]
        calls.append(failed)
    assert raised == []
    one = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8_v2"]
    asked = ["cuDeviceGet", "cuDeviceGetAttribute", "cuMemGetAllocationGranularity"]
    gone = ["cuMemUnmap", "cuMemRelease"] * 2
    assert calls == [*asked, *["cuMemAddressReserve", *one] * 2, *gone, *one * 2, *gone]


def test_addresses_that_are_not_given_back_are_given_back_later(driver: StandIn) -> None:
    part = Range(driver.memory()._driver, 5)
    part.map()
    for nth, call in ((1, "cuMemUnmap"), (2, "cuMemRelease"), (2, "cuMemAddressFree")):
        driver.library.fail(nth, UNKNOWN)
        with pytest.raises(RuntimeError, match=f"^{call} "):
            part.close()
    assert driver.held == (1, 0)
    part.close()
    part.close()
    assert driver.held == (0, 0)


def test_a_failure_that_is_kept_holds_no_memory(driver: StandIn) -> None:
    """A request that failed keeps its error, and with it the frames."""
    memory = driver.memory()
    driver.library.fail(4, UNKNOWN)
    with pytest.raises(RuntimeError, match=r"^cuMemSetAccess ") as error:
        memory.zeros((1,), torch.float32)
    assert driver.held == (1, 0)
    assert error.value.__traceback__ is not None


def test_memory_that_could_not_be_given_back_is_given_back_before_there_is_new(driver: StandIn) -> None:
    memory = driver.memory()
    tensor = memory.zeros((1,), torch.float32)
    driver.library.fail(1, UNKNOWN)
    with pytest.raises(RuntimeError, match=r"^cuMemUnmap "):
        memory.unmap()
    assert driver.held == (1, UNIT)
    memory.map()
    assert driver.held == (1, UNIT)
    assert not tensor.any()


def test_sizes_have_64_bits(driver: StandIn) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        driver.memory().zeros((1 << 32, 3), torch.uint8)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_without_enough_memory_nothing_is_mapped(rows: int, driver: StandIn) -> None:
    """The error is that of PyTorch's allocator; what a trainer has freed is asked for first."""
    memory = driver.memory()
    tensors = [memory.zeros((UNIT,), torch.uint8) for _ in range(3)]
    memory.unmap()
    driver.library.set_limit(rows * UNIT - 1)
    with pytest.raises(torch.OutOfMemoryError, match=r"^cuMemCreate .* 2 \(CUDA_ERROR_OUT_OF_MEMORY\).* kv_tokens"):
        memory.map()
    assert not memory.mapped
    assert driver.held == (3, 0)
    driver.library.set_limit(3 * UNIT)
    memory.map()
    assert not any(tensor.any() for tensor in tensors)
    with pytest.raises(torch.OutOfMemoryError):
        memory.zeros((1,), torch.float32)
    assert memory.mapped
    assert driver.held[1] == 3 * UNIT, "the others keep theirs"
    assert all(map(readable, tensors))


def test_unused_memory_that_pytorch_holds_is_taken(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = driver.memory()
    tensor = memory.zeros((UNIT,), torch.uint8)
    memory.unmap()
    emptied = []

    def empty() -> None:
        emptied.append(driver.held)
        driver.library.set_limit(UNIT)

    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    driver.library.set_limit(0)
    memory.map()
    assert not tensor.any()
    memory.unmap()
    memory.map()
    assert len(emptied) == 1, "only where memory is short"


def test_only_a_driver_that_has_the_calls_is_used(
    driver: StandIn, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert page_memory(torch.device("cpu")) is None
    names = []

    def load(name: str) -> Any:
        names.append(name)
        return driver.library

    monkeypatch.setattr(ctypes, "CDLL", load)
    cuda = torch.device("cuda", 0)
    assert page_memory(cuda) is not None
    assert page_memory(torch.device("cuda")) is not None
    with pytest.raises(RuntimeError, match=r"^cuDeviceGet .* failed with 101 \(CUDA_ERROR_INVALID_DEVICE\)"):
        page_memory(torch.device("cuda", 1))
    driver.library.begin(0, 0)
    assert page_memory(cuda) is None
    assert set(names) == {"libcuda.so.1"}
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: LIBC)
    assert page_memory(cuda) is None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("host", [0, 4096])
def test_an_engine_that_slept_goes_on_at_the_same_addresses(name: str, host: int, driver: StandIn) -> None:
    """Unfinished requests and later ones have the samples, to the bit, of an engine that never slept, and the graphs
    stay; meanwhile the pages have no memory."""
    plain = engine(name)
    expected = [responses(tree) for tree in plain.generate(PROMPTS, PARAMS, seeds=range(6))]
    native = on(driver, name, host_kv_tokens=host)
    requests = native.submit(PROMPTS, PARAMS, seeds=range(6))
    for _ in range(5):
        native.step()
    native.loop.runner.graphs = graphs = Forgetful(native)
    where, held = places(native), native.cache.bytes
    assert len(set(where)) == driver.held[0] == 4
    driver.library.use()
    native.sleep()
    assert driver.held == (4, 0)
    assert native.cache.bytes == 0 < held
    assert not any(readable(part) for kv in native.cache.pages.values() for part in kv)
    native.wake()
    assert places(native) == where
    assert native.cache.bytes == held
    assert not any(part.any() for kv in native.cache.pages.values() for part in kv)
    assert graphs.forgotten == 0
    native.loop.runner.graphs = None  # its graph is none
    while not all(request.done for request in requests):
        native.step()
    assert [responses(request.tree) for request in requests if request.tree] == expected
    trees, others = (e.generate(PROMPTS, PARAMS, TREEPO) for e in (native, plain))
    assert [responses(tree) for tree in trees] == [responses(tree) for tree in others]
    for tree, other in zip(trees, others, strict=True):
        assert tree.behaviour_logprob.tobytes() == other.behaviour_logprob.tobytes()
    assert_all_free(native)


def test_sleep_in_any_order_changes_no_sample(driver: StandIn) -> None:
    """Sleep twice, kept or not and with weights or not, an update, and awake, against an engine that never sleeps."""
    nets = copy.deepcopy(model("qwen3")), copy.deepcopy(model("qwen3"))
    native, awake = (NativeEngine(net, config=EngineConfig(page_size=4, kv_tokens=4096)) for net in nets)
    native.cache.memory = driver.memory()
    for turn, sleeps in enumerate(product(product((True, False), repeat=2), repeat=2)):
        for keep, weights in sleeps:
            native._at_rest = PagesAtRest(torch.device("cpu"), keep, apart=True)
            native.sleep(weights=weights)
            assert (native.cache.bytes == 0) == (driver.held[1] == 0)
        if turn:
            assert (driver.held[1] == 0) == any(weights or not keep for keep, weights in sleeps)
        with torch.no_grad():
            for net in nets:
                next(net.parameters()).mul_(1.01)
        native.update_weights()
        awake.update_weights()
        native.wake()
        trees, others = (e.generate(PROMPTS[:3], PARAMS, seeds=[turn] * 3) for e in (native, awake))
        assert [responses(tree) for tree in trees] == [responses(tree) for tree in others]


def test_graphs_are_forgotten_where_an_address_moved_meanwhile(driver: StandIn) -> None:
    native = NativeEngine(copy.deepcopy(model("qwen3")), config=EngineConfig(page_size=4, kv_tokens=4096))
    native.cache.memory = driver.memory()
    native.generate(PROMPTS[:1], PARAMS)
    native.loop.runner.graphs = graphs = Forgetful(native)
    native.sleep()
    native.wake()
    assert graphs.forgotten == 0
    native.sleep()
    first = next(native.model.parameters())
    first.data = first.data.clone()
    native.wake()
    assert graphs.forgotten == 1
    graphs.capture()
    native.sleep(weights=True)
    assert graphs.forgotten == 2, "their memory is given back with that of the weights"
    native.wake()
    graphs.capture()
    native.cache.memory, native.cache._pages = None, dict(native.cache.pages)
    native.sleep()
    assert graphs.forgotten == 3, "pages of PyTorch's allocator"


def test_an_engine_that_finds_no_memory_sleeps_on(driver: StandIn) -> None:
    expected = [responses(tree) for tree in engine().generate(PROMPTS, PARAMS, seeds=range(6))]
    native = on(driver)
    native.generate(PROMPTS, PARAMS, seeds=range(6))
    native.loop.runner.graphs = graphs = Forgetful(native)
    native.sleep()
    driver.library.set_limit(3 * UNIT)
    with pytest.raises(torch.OutOfMemoryError, match=r"^cuMemCreate "):
        native.wake()
    assert driver.held == (4, 0)
    with pytest.raises(RuntimeError, match=r"call resume\(\) or wake\(\)"):
        native.generate(PROMPTS, PARAMS)
    driver.library.set_limit(4 * UNIT)
    native.wake()
    assert graphs.forgotten == 0
    native.loop.runner.graphs = None
    assert [responses(tree) for tree in native.generate(PROMPTS, PARAMS, seeds=range(6))] == expected


def test_an_engine_whose_first_pages_find_no_memory_says_so(driver: StandIn) -> None:
    native = on(driver)
    driver.library.set_limit(3 * UNIT)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match=r"^cuMemCreate .*lower kv_tokens"):
            native.generate(PROMPTS, PARAMS)
        gc.collect()
        assert driver.held == (0, 0)
        assert not native.cache.ready
    assert_all_free(native)
    driver.library.set_limit(4 * UNIT)
    expected = [responses(tree) for tree in engine().generate(PROMPTS, PARAMS, seeds=range(6))]
    assert [responses(tree) for tree in native.generate(PROMPTS, PARAMS, seeds=range(6))] == expected


def test_pages_on_a_cpu_are_pytorchs() -> None:
    assert engine().cache.memory is None
