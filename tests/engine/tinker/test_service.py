"""Adapters that come and go, requests that wait for each other, and bounds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rolltree.engine.rollout import NativeEngine, SamplingParams

from ...support.serving import make_engine
from .served import Adapters, Lora, adapted, client, example, randomize, serving, tinker, tokens, types

from rolltree.engine.tinker.faults import FaultError  # isort: skip

IDS = [10, 200, 31, 42, 53, 64, 75, 86, 97, 108]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, engine: NativeEngine) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("states"), engine) as found:
        yield found


def resident(engine: NativeEngine) -> set[str]:
    """Names of all adapters in the module."""
    marked = [n.rpartition(".lora_A.")[2] for n, _ in engine.model.named_parameters() if ".lora_A." in n]
    return {name.partition(".")[0] for name in marked}


@pytest.mark.slow
def test_saved_adapters_leave_the_module_and_come_back(
    url: str, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltree.engine.tinker.adapters.MOST_RESIDENT", 1)
    service = client(url)
    trained = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    before = resident(engine)
    samplers = []
    for _ in range(3):
        trained.forward_backward([example(IDS, 5)], "cross_entropy").result()
        trained.optim_step(types.AdamParams(learning_rate=3e-2)).result()
        samplers.append(trained.save_weights_and_get_sampling_client().result())
    params = types.SamplingParams(max_tokens=8, seed=3, stop=[])

    def sampled() -> list[Any]:
        found = [sampler.sample(tokens(IDS), 1, params).result().sequences[0] for sampler in samplers]
        assert len(resident(engine) - before) <= 2
        return [(one.tokens, one.logprobs) for one in found]

    first = sampled()
    assert len({str(one) for one in first}) == 3
    assert sampled() == first
    both = [sampler.sample(tokens(IDS), 1, params) for sampler in samplers]  # at once: none leaves while it is used
    assert [(s.tokens, s.logprobs) for s in (one.result().sequences[0] for one in both)] == first


def test_numbers_of_adapters_are_given_again_without_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltree.engine.rollout.native.adapters.MOST_ADAPTERS", 3)
    native, adapters, stays = adapted(Lora(rank=2, seed=1))
    native.add_adapter(stays)
    params = SamplingParams(n=1, max_new_tokens=6, ignore_eos=True, adapter=stays)
    before = native.generate([IDS], params)[0].token_id.tolist()
    seen = []
    for seed in range(2, 5):
        name = adapters.create(Lora(rank=2, seed=seed))
        randomize(adapters, name)
        for parameter in adapters.parameters(name).values():
            parameter.data.mul_(seed)
        native.add_adapter(name)
        own = SamplingParams(n=1, max_new_tokens=6, ignore_eos=True, adapter=name)
        cached = native.generate([IDS], own)[0].behaviour_logprob[-6:].tolist()
        native.forget_prefixes()
        fresh = native.generate([IDS], own)[0].behaviour_logprob[-6:].tolist()
        assert cached == pytest.approx(fresh, abs=1e-4)
        seen.append(cached)
        native.drop_adapter(name)
        adapters.delete(name)
    assert len({str(one) for one in seen}) == 3
    assert native.generate([IDS], params)[0].token_id.tolist() == before
    assert resident(native) == {stays}


@pytest.mark.slow
@pytest.mark.parametrize("trainers", [1, 4])
def test_long_training_requests_do_not_hold_up_samples(
    url: str, trainers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rolltree.engine.tinker import compute

    monkeypatch.setattr("rolltree.engine.tinker.training.shares", lambda data: compute.shares(data, 16))
    service = client(url)
    each = [service.create_lora_training_client("tiny", rank=2, seed=1).result() for _ in range(trainers)]
    sampler = service.create_sampling_client(base_model="tiny").result()
    some = [example([i, *IDS[1:]], 5) for i in range(60)]  # as many micro-batches
    losses = [trained.forward_backward(some, "cross_entropy") for trained in each]
    while httpx.get(f"{url}/health").json()["outstanding"] < trainers:
        time.sleep(0.005)
    params = types.SamplingParams(max_tokens=4, seed=1, stop=[])
    assert len(sampler.sample(tokens(IDS), 1, params).result().sequences[0].tokens) == 4
    assert not any(loss.future().done() for loss in losses)
    assert [len(loss.result().loss_fn_outputs) for loss in losses] == [60] * trainers


@pytest.mark.slow
def test_many_clients_at_once_are_each_alone_and_none_waits_for_another_s_end(url: str) -> None:
    count, steps, params = 8, 3, types.SamplingParams(max_tokens=6, seed=5, stop=[])
    ends: list[tuple[int, int]] = []  # client and step, in the order of their ends

    def made(i: int, turn: str) -> tinker.TrainingClient:
        return client(url, f"tml-{turn}-{i}").create_lora_training_client("tiny", rank=2 + i % 3, seed=i).result()

    def work(i: int, trained: tinker.TrainingClient) -> list[float]:
        found: list[float] = []
        for step in range(steps):
            some = [example([i, *IDS[1:]], 5), example([i, *IDS[1:4], 7], 2)]
            loss = trained.forward_backward(some, "cross_entropy")
            trained.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            found.append(loss.result().metrics["loss:sum"])
            sampler = trained.save_weights_and_get_sampling_client().result()
            (one,) = sampler.sample(tokens([i, *IDS]), 1, params).result().sequences
            found += [*one.tokens, *one.logprobs]
            ends.append((i, step))
        return found

    alone = [work(i, made(i, "alone")) for i in range(count)]
    together = [made(i, "together") for i in range(count)]
    ends.clear()
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(work, range(count), together))
    for ours, theirs in zip(found, alone, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert len({str(one) for one in found}) == count
    last_first = max(ends.index((i, 0)) for i in range(count))
    assert last_first < min(ends.index((i, steps - 1)) for i in range(count))


def test_more_requests_than_fit_are_sent_again_later(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = client(url)
    session = service.holder.get_session_id()
    body = {"session_id": session, "model_seq_id": 50, "base_model": "tiny", "lora_config": {"rank": 1}}
    key = {"X-API-Key": "tml-tests"}
    for name in ("MOST_WAITING", "MOST_BYTES"):
        with monkeypatch.context() as patched:
            patched.setattr(f"rolltree.engine.tinker.futures.{name}", 0)
            refused = httpx.post(f"{url}/api/v1/create_model", json=body, headers=key)
            assert refused.status_code == 429
            assert "send this one again later" in refused.json()["error"]["message"]
    monkeypatch.setattr("rolltree.engine.tinker.models.MOST_MODELS", 0)
    with pytest.raises(tinker.RequestFailedError, match="trains 0 models already"):
        service.create_lora_training_client("tiny", rank=1).result()


def test_newer_weights_in_flight_reach_the_samplers_that_are_there(url: str) -> None:
    service = client(url)
    trained = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    params = types.SamplingParams(max_tokens=8, seed=3, stop=[])
    old = trained.save_weights_and_get_sampling_client(kind="inflight").result()
    before = old.sample(tokens(IDS), 1, params).result().sequences[0].logprobs
    for _ in range(2):
        trained.forward_backward([example(IDS, 5)], "cross_entropy").result()
        trained.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    new = trained.save_weights_and_get_sampling_client(kind="inflight").result()
    found = [sampler.sample(tokens(IDS), 1, params).result().sequences[0].logprobs for sampler in (old, new)]
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert found[0] != pytest.approx(before, abs=1e-2)


def test_a_request_whose_predecessor_never_comes_fails(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltree.engine.tinker.training.GAP_S", 0.1)
    trained = client(url).create_lora_training_client("tiny", rank=2, seed=1).result()
    trained._reserve_request_ids(1)
    trained._turn_counter += 1
    with pytest.raises(tinker.RequestFailedError, match="waited for request 1, which never came"):
        trained.save_state("x").result()
    assert trained.save_state("y").result().path.endswith("/weights/y")


def test_a_layer_of_no_known_part_is_refused() -> None:
    import torch

    engine = make_engine()
    engine.model.model.layers[0].odd = torch.nn.Linear(4, 4)
    with pytest.raises(Exception, match=r"layer 'model.layers.0.odd' is part of neither attention nor MLP"):
        Adapters(engine, None).create(Lora(rank=1, seed=0))  # type: ignore[arg-type]


def test_metrics_count_what_there_is(url: str, engine: NativeEngine) -> None:
    def read() -> dict[str, int]:
        text = httpx.get(f"{url}/metrics").text
        return {name: int(n) for name, n in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}

    before = read()
    trained = client(url).create_lora_training_client("tiny", rank=2, seed=1).result()
    with pytest.raises(tinker.RequestFailedError):
        trained.optim_step(types.AdamParams()).result()
    after = read()
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        "rolltree_sessions": 1,
        "rolltree_models": 1,
        'rolltree_requests_total{result="ok"}': 1,
        'rolltree_requests_total{result="user"}': 1,
    }


def test_a_request_that_comes_again_long_after_its_answer_changes_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltree.engine.tinker.futures.FETCHED_S", 0.0)
    service = client(url)
    trained = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    trained.forward_backward([example(IDS, 5)], "cross_entropy").result()
    trained.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    before = trained.forward([example(IDS, 5)], "cross_entropy").result().metrics
    session, _, seq_id = trained.model_id.partition(":train:")
    made = {"session_id": session, "model_seq_id": int(seq_id), "base_model": "tiny", "lora_config": {"rank": 2}}
    step = {"model_id": trained.model_id, "adam_params": {}, "seq_id": 2}
    key = {"X-API-Key": "tml-tests"}
    again = httpx.post(f"{url}/api/v1/create_model", json=made, headers=key).json()["request_id"]
    found = httpx.post(f"{url}/api/v1/retrieve_future", json={"request_id": again}, headers=key).json()
    assert found == {"type": "create_model", "model_id": trained.model_id}
    refused = httpx.post(f"{url}/api/v1/optim_step", json=step, headers=key)
    assert (refused.status_code, "was answered already" in refused.text) == (400, True)
    assert trained.forward([example(IDS, 5)], "cross_entropy").result().metrics == before


def test_experts_get_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    native = make_engine()
    experts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    monkeypatch.setattr(native.model.model.layers[0].mlp, "experts", experts, raising=False)
    adapters = Adapters(native, None)  # type: ignore[arg-type]  # nothing is lent here
    with pytest.raises(FaultError, match="The experts of this model get no adapter here; set train_mlp=False"):
        adapters.create(Lora(rank=2, seed=1))
    assert resident(native) == set()
    adapters.create(Lora(rank=2, seed=1, train_mlp=False))


def test_an_adapter_that_the_engine_refuses_leaves_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = Lora(rank=2, seed=1)
    native, adapters, name = adapted(lora)
    adapters.writer(name, lora, "tiny")(tmp_path)

    def refuse(self: NativeEngine, name: str) -> None:
        raise ValueError("not this one")

    monkeypatch.setattr(NativeEngine, "add_adapter", refuse)
    with pytest.raises(ValueError, match="not this one"):
        adapters._load(tmp_path, lora)
    assert resident(native) == {name}
