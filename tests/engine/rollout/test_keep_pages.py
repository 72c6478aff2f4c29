"""The pages of keys through an update: kept where there is room, and graphs forgotten only where something moved."""

from __future__ import annotations

import copy
import types
import weakref
from functools import partial
from typing import Any

import pytest
import torch

from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.native.cache.resting import PagesAtRest
from rolltree.engine.rollout.native.compiled import DecodeGraphs
from rolltree.engine.rollout.native.filling import GPU_PREFILL_TOKENS, PREFILL_TOKENS, prefill_limit
from rolltree.engine.rollout.native.runner import _places

from .test_native_engine import MODELS, PROMPTS, assert_all_free, engine, model, responses

GIB = 1 << 30


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Numbers of a GPU of 100 GiB, on which another process has 5."""
    memory = types.SimpleNamespace(reserved=20 * GIB, peak=0, others=5 * GIB, resets=0)

    def reset(device: Any) -> None:
        memory.resets += 1

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (100 * GIB - memory.others - memory.reserved, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda d: memory.reserved)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda d: memory.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    return memory


def test_pages_stay_where_there_was_room_for_both(device: types.SimpleNamespace) -> None:
    at_rest = PagesAtRest(torch.device("cuda"), "auto")
    assert not at_rest.keeps(8 * GIB)  # nothing is known yet
    at_rest.begin()
    device.peak = 77 * GIB
    at_rest.end(0)
    assert at_rest.keeps(8 * GIB)  # 5 + 77 + 8 of 90
    assert not at_rest.keeps(9 * GIB)
    device.peak = 80 * GIB
    at_rest.end(8 * GIB)  # the pages are part of this peak
    assert at_rest.keeps(8 * GIB)
    device.peak = 90 * GIB
    at_rest.end(8 * GIB)
    assert not at_rest.keeps(8 * GIB)  # an update that needed more counts from then on
    device.peak = 10 * GIB
    at_rest.end(0)
    assert not at_rest.keeps(8 * GIB)
    device.others = 0
    assert not at_rest.keeps(9 * GIB)
    assert device.resets == 1


def test_pages_whose_memory_is_not_pytorchs_count_beside_it(device: types.SimpleNamespace) -> None:
    at_rest = PagesAtRest(torch.device("cuda"), "auto", apart=True)
    device.peak = 77 * GIB
    device.others += 8 * GIB  # the pages
    at_rest.begin()
    at_rest.end(8 * GIB)
    assert at_rest.keeps(8 * GIB)  # 5 + 77 + 8 of 90
    device.others += 1 * GIB
    assert at_rest.keeps(9 * GIB) is False
    device.others -= 2 * GIB
    device.peak = 78 * GIB
    at_rest.end(0)
    assert at_rest.keeps(7 * GIB)  # 5 + 78 + 7


@pytest.mark.parametrize("keep", [True, False])
def test_who_says_so_is_obeyed(keep: bool, device: types.SimpleNamespace) -> None:
    assert PagesAtRest(torch.device("cuda"), keep).keeps(200 * GIB) is keep
    assert PagesAtRest(torch.device("cpu"), keep).keeps(1) is keep
    assert not PagesAtRest(torch.device("cpu"), "auto").keeps(1)


@pytest.mark.parametrize("host", [0, 4096])
def test_kept_pages_are_empty_and_where_they_were(host: int) -> None:
    """Unfinished requests go on afterwards with the same samples, with the same weights and with others."""
    params = SamplingParams(n=3, max_new_tokens=14, ignore_eos=True)
    expected = engine().generate(PROMPTS, params, seeds=range(6))
    native = engine(keep_pages=True, host_kv_tokens=host)
    requests = native.submit(PROMPTS, params, seeds=range(6))
    for _ in range(5):
        native.step()
    pages, held = native.cache.pages, native.cache.bytes
    native.sleep()
    assert native.cache.pages is pages
    assert native.cache.bytes == held > 0
    assert not any(part.any() for kv in pages.values() for part in kv)
    assert native.cache.tree.keys == 0
    native.wake()
    while not all(request.done for request in requests):
        native.step()
    assert [responses(request.tree) for request in requests if request.tree] == [responses(tree) for tree in expected]
    assert_all_free(native)
    native.sleep(weights=True)
    assert not native.cache.ready
    native.wake()
    assert [responses(tree) for tree in native.generate(PROMPTS, params, seeds=range(6))] == list(
        map(responses, expected)
    )


@pytest.mark.parametrize("name", MODELS)
def test_pages_are_freed_by_default_on_a_cpu(name: str) -> None:
    """Nothing of the engine holds their memory, the decoder that runs as one call included."""
    native = engine(name)
    native.generate(PROMPTS[:1], SamplingParams(max_new_tokens=2))
    pages = [weakref.ref(part) for kv in native.cache.pages.values() for part in kv]
    native.sleep()
    assert not native.cache.ready
    assert pages
    assert not any(page() is not None for page in pages)


class Forgetful(DecodeGraphs):
    """Has a graph, and counts how often all were forgotten."""

    def __init__(self, native: NativeEngine) -> None:
        runner: Any = native.loop.runner
        places = partial(_places, native.model, native.cache)
        super().__init__(native.cache, runner.decode_logits, torch.device("cpu"), places=places)
        self.forgotten = 0
        self.capture()

    def capture(self) -> None:
        self._graphs[(8, 64, False, ())] = (None, None)  # type: ignore[assignment]
        self._places = self._places_now()

    def clear(self) -> None:
        self.forgotten += bool(self._graphs)
        super().clear()


def test_graphs_are_forgotten_only_where_an_address_moved() -> None:
    net = copy.deepcopy(model("qwen3"))
    native = NativeEngine(net, config=EngineConfig(page_size=4, kv_tokens=4096, keep_pages=True))
    native.generate(PROMPTS[:1], SamplingParams(max_new_tokens=2))
    native.loop.runner.graphs = graphs = Forgetful(native)
    native.sleep()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.01)  # as an optimiser does
    native.wake()
    native.update_weights()
    native.update_weights(dict(copy.deepcopy(net).named_parameters()))
    assert graphs.forgotten == 0
    first = next(net.parameters())
    first.data = first.data.clone()
    native.update_weights()
    assert graphs.forgotten == 1
    graphs.capture()
    native.config = EngineConfig(keep_pages=False)
    native._at_rest = PagesAtRest(torch.device("cpu"), False)
    native.sleep()
    assert graphs.forgotten == 2  # the pages are gone
    native.wake()
    assert graphs.forgotten == 2


def test_adapters_that_are_added_or_whose_tables_move_are_seen() -> None:
    from .test_row_adapters import make

    native = make()
    native.loop.runner.graphs = graphs = Forgetful(native)
    native.update_weights(dict(native.model.named_parameters()))
    assert graphs.forgotten == 1


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_pages is 'yes'; give True, False or \"auto\""):
        EngineConfig(keep_pages="yes")  # type: ignore[arg-type]


def test_a_gpu_computes_more_prompt_tokens_at_once_but_for_long_paths() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert prefill_limit(None, cpu)(100) == PREFILL_TOKENS
    for device in (cuda, cpu):
        assert prefill_limit(7, device)(10**6) == 7
    limit = prefill_limit(None, cuda)
    assert limit(1) == limit(4096) == GPU_PREFILL_TOKENS
    assert limit(8192) == 4096
    assert limit(10**6) == PREFILL_TOKENS
    assert engine(max_prefill_tokens=11).loop.scheduler.prefill(5) == 11
    with pytest.raises(ValueError, match=r"EngineConfig\.max_prefill_tokens"):
        EngineConfig(max_prefill_tokens=0)
