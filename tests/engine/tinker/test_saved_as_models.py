"""Saved adapters of several clients in one batch, and as models of OpenAI's and Anthropic's endpoints."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ...support.serving import make_engine
from .served import client, example, serving, tinker, tokens, types

IDS = [10, 200, 31, 42, 53, 64, 75, 86, 97, 108]
OTHER = "tml-other"
PARAMS = types.SamplingParams(max_tokens=12, seed=5, stop=[])
PARTS = {"red": {"rank": 4, "seed": 1}, "blue": {"rank": 7, "seed": 2, "train_unembed": False}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("states")) as found:
        yield found


def trained(service: tinker.ServiceClient, **options: Any) -> tinker.TrainingClient:
    """An adapter after two steps that change what the model says."""
    made = service.create_lora_training_client("tiny", **options).result()
    for _ in range(2):
        made.forward_backward([example([*IDS, options["seed"]], 6)], "cross_entropy").result()
        made.optim_step(types.AdamParams(learning_rate=0.1)).result()
    return made


def saved(made: tinker.TrainingClient, name: str) -> str:
    path: str = made.save_weights_for_sampler(name).result().path
    return path


# -- two clients at once -----------------------------------------------------------------------------------------------


def learned(url: str, name: str, steps: int = 4) -> list[Any]:
    """Losses of a client that trains, and tokens and log-probs of what it samples after each step."""
    service = client(url, f"tml-{name}")
    made = service.create_lora_training_client("tiny", **PARTS[name]).result()
    found: list[Any] = []
    for step in range(steps):
        data = [example([*IDS[: 4 + step], ord(name[0]), 8, 9], 3), example([*IDS, ord(name[0])], 5)]
        loss = made.forward_backward(data, "cross_entropy")
        made.optim_step(types.AdamParams(learning_rate=3e-2)).result()
        found.append(loss.result().metrics["loss:sum"])
        sampler = made.save_weights_and_get_sampling_client().result()
        for sequence in sampler.sample(tokens(IDS), 4, PARAMS).result().sequences:
            found += [sequence.tokens, sequence.logprobs]
        found.append(sampler.compute_logprobs(tokens(IDS)).result()[1:])
    return found


def at_once(*work: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(work)

    def run(i: int) -> None:
        results[i] = work[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.slow
def test_two_clients_at_once_learn_and_sample_what_each_does_alone(tmp_path: Path) -> None:
    alone = []
    for name in PARTS:
        with serving(tmp_path / name) as url:
            alone.append(learned(url, name))
    with serving(tmp_path / "both") as url:
        both = at_once(*(lambda name=name: learned(url, name) for name in PARTS))  # type: ignore[misc]
    for one, other in zip(both, alone, strict=True):
        for a, b in zip(one, other, strict=True):
            if isinstance(a, list) and isinstance(a[0], int):
                assert a == b
            else:
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert alone[0] != alone[1]


@pytest.mark.slow
def test_samples_of_several_adapters_share_steps(tmp_path: Path) -> None:
    engine = make_engine()
    with serving(tmp_path, engine) as url:
        service = client(url)
        paths = [saved(trained(service, rank=4, seed=seed), "one") for seed in (1, 2, 3)]
        samplers = [service.create_sampling_client(model_path=path) for path in paths]
        samplers.append(service.create_sampling_client(base_model="tiny"))
        params = types.SamplingParams(max_tokens=200, seed=5, stop=[])
        alone = [sampler.sample(tokens(IDS), 1, params).result().sequences[0].tokens for sampler in samplers]
        before = engine.stats["steps"]
        asked = [sampler.sample(tokens(IDS), 1, params) for sampler in samplers]
        together = [one.result().sequences[0].tokens for one in asked]
        steps = engine.stats["steps"] - before
    assert together == alone
    assert len({str(one) for one in together}) == 4
    assert steps < 500  # one after the other takes 4 times 200, and requests come one by one


# -- as models ---------------------------------------------------------------------------------------------------------


def get(url: str, path: str, key: str = "tml-tests") -> httpx.Response:
    return httpx.get(f"{url}/v1/{path}", headers={"Authorization": f"Bearer {key}"})


def post(url: str, path: str, body: dict[str, Any], key: str = "tml-tests") -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def completed(url: str, model: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": IDS, "max_tokens": 12, "temperature": 1, "seed": 5, "logprobs": 1, "ignore_eos": True, **more}
    reply = post(url, "completions", {"model": model, **body})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    assert found["model"] == model
    return found["choices"][0]


@pytest.fixture(scope="module")
def adapters(url: str) -> dict[str, str]:
    """Paths of two states of one name, the newest last, and of another client's."""
    service = client(url)
    return {
        "older": saved(trained(service, rank=4, seed=1), "final"),
        "newer": saved(trained(service, rank=3, seed=2), "final"),
        "theirs": saved(trained(client(url, OTHER), rank=2, seed=3), "secret"),
    }


def test_a_model_is_the_path_or_the_name_of_a_saved_adapter(url: str, adapters: dict[str, str]) -> None:
    service = client(url)
    bodies = {model: completed(url, model) for model in (adapters["older"], adapters["newer"], "final", "tiny")}
    for model in (adapters["older"], adapters["newer"]):
        sampler = service.create_sampling_client(model_path=model)
        (expected,) = sampler.sample(tokens(IDS), 1, PARAMS).result().sequences
        np.testing.assert_allclose(bodies[model]["logprobs"]["token_logprobs"], expected.logprobs, rtol=0, atol=1e-5)
    assert bodies["final"]["text"] == bodies[adapters["newer"]]["text"]
    assert len({body["text"] for body in bodies.values()}) == 3


def test_log_probs_of_a_prompt_are_the_adapters(url: str, adapters: dict[str, str]) -> None:
    sampler = client(url).create_sampling_client(model_path=adapters["older"])
    expected = sampler.compute_logprobs(tokens(IDS)).result()[1:]
    echoed = completed(url, adapters["older"], echo=True, max_tokens=0)["logprobs"]["token_logprobs"][1:]
    np.testing.assert_allclose(echoed, expected, rtol=0, atol=1e-5)
    base = completed(url, "tiny", echo=True, max_tokens=0)["logprobs"]["token_logprobs"][1:]
    assert np.abs(np.subtract(base, expected)).max() > 0.01


def test_chats_and_streams(url: str, adapters: dict[str, str]) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    texts = {}
    for model in ("tiny", "final"):
        texts[model] = post(url, "chat/completions", {"model": model, **body}).json()["choices"][0]["message"][
            "content"
        ]
    assert texts["tiny"] != texts["final"]
    message = post(url, "messages", {"model": "final", **body}).json()
    assert message["model"] == "final"
    assert message["content"][0]["text"] == texts["final"]
    streamed = post(url, "chat/completions", {"model": "final", "stream": True, **body}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    parts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(parts) == texts["final"]
    assert post(url, "messages/count_tokens", {"model": "final", "messages": messages}).json()["input_tokens"] > 0


@pytest.mark.check
def test_a_key_sees_its_own_adapters_alone(url: str, adapters: dict[str, str]) -> None:
    names = [model["id"] for model in get(url, "models").json()["data"]]
    assert names[:3] == ["tiny", adapters["newer"], adapters["older"]]
    assert adapters["theirs"] not in names
    theirs = [model["id"] for model in get(url, "models", OTHER).json()["data"]]
    assert theirs == ["tiny", adapters["theirs"]]
    assert get(url, f"models/{adapters['older']}").json()["id"] == adapters["older"]
    for model in (adapters["theirs"], "secret", "nothing", "tinker://nothing", f"{adapters['older']}x"):
        found = [get(url, f"models/{model}"), post(url, "completions", {"model": model, "prompt": "a"})]
        found.append(post(url, "chat/completions", {"model": model, "messages": [{"role": "user", "content": "a"}]}))
        for reply in found:
            assert reply.status_code == 404
            assert reply.json()["error"]["code"] == "model_not_found"
            assert "There is no model" in reply.json()["error"]["message"]
    assert post(url, "completions", {"model": "secret", "prompt": "a"}, OTHER).status_code == 200


def test_a_deleted_adapter_is_no_model(url: str) -> None:
    service = client(url)
    path = saved(trained(service, rank=2, seed=4), "short-lived")
    assert completed(url, "short-lived")["text"]
    service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    for model in (path, "short-lived"):
        assert post(url, "completions", {"model": model, "prompt": "a"}).status_code == 404
    assert path not in [model["id"] for model in get(url, "models").json()["data"]]


@pytest.mark.slow
def test_an_adapter_stays_while_a_stream_uses_it_and_leaves_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltree.engine.tinker.adapters.MOST_RESIDENT", 0)
    engine = make_engine()
    with serving(tmp_path, engine) as url:
        service = client(url)
        path = saved(trained(service, rank=2, seed=4), "one")
        body = {"model": path, "prompt": IDS, "max_tokens": 150, "ignore_eos": True, "stream": True, "seed": 1}
        headers = {"Authorization": "Bearer tml-tests"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
            rest = list(lines)
        assert rest[-1] == "" or "[DONE]" in rest
        assert any("[DONE]" in line for line in rest)
        assert not any("error" in line for line in rest)
        service.create_sampling_client(base_model="tiny").sample(tokens(IDS), 1, PARAMS).result()
        assert not engine._adapters.numbers
