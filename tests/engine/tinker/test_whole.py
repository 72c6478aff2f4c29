"""All weights of one model in place of adapters: `--tinker_full`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltree.engine.app.cli import main
from rolltree.engine.model.loading import load_model
from rolltree.engine.rollout import EngineConfig, NativeEngine
from rolltree.engine.tinker.whole import Whole

from ...support.serving import model, save, tokenizer
from .served import client, close, downloaded, example, rest_client, serving, tinker, tokens, types

IDS = [10, 200, 31, 42, 53, 64, 75, 86, 97, 108]
SOME = [example(IDS, 5), example([*IDS[:4], 7, 8, 9], 3)]
ADAM = types.AdamParams(learning_rate=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-7, grad_clip_norm=0.5)
PARAMS = types.SamplingParams(max_tokens=8, seed=3, stop=[])
KEY = {"X-API-Key": "tml-tests"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tmp_path_factory.mktemp("model")))


@pytest.fixture
def url(tmp_path: Path, source: str) -> Iterator[str]:
    with _serving(tmp_path / "states", source) as found:
        yield found


def _serving(root: Path, source: str) -> Any:
    engine = NativeEngine(load_model(source), tokenizer(), EngineConfig(page_size=4, kv_tokens=4096))
    return serving(root, engine, source, full=True)


def made(url: str, rank: int = 0, **options: Any) -> tinker.TrainingClient:
    return client(url).create_lora_training_client("tiny", rank, **options).result()


def train(trained: tinker.TrainingClient, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(trained.forward_backward(SOME, "cross_entropy").result().metrics["loss:sum"])
        trained.optim_step(ADAM).result()
    return losses


def sampled(sampler: tinker.SamplingClient) -> tuple[list[int], list[float]]:
    (one,) = sampler.sample(tokens(IDS), 1, PARAMS).result().sequences
    return one.tokens, one.logprobs


def logprobs(net: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found = net(torch.tensor([ids[:-1]]), use_cache=False).logits[0].log_softmax(-1)
    return found.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.slow
def test_steps_are_those_of_adamw_on_the_plain_model(url: str, tmp_path: Path) -> None:
    judge = model()
    adamw = torch.optim.AdamW(judge.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.1)
    trained = made(url)
    losses = train(trained, 3)
    for ours in losses:
        total = torch.zeros(())
        for ids, count in ((IDS, 5), ([*IDS[:4], 7, 8, 9], 3)):
            logits = judge(torch.tensor([ids[:-1]]), use_cache=False).logits[0].log_softmax(-1)
            total = total - logits.gather(1, torch.tensor(ids[1:])[:, None])[-count:].sum()
        adamw.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(judge.parameters(), 0.5)
        adamw.step()
        assert ours == pytest.approx(float(total.detach()), rel=1e-4)
    folder = downloaded(url, trained, tmp_path / "after")
    ours = AutoModelForCausalLM.from_pretrained(folder)
    before = dict(model().named_parameters())
    for (name, own), theirs in zip(ours.named_parameters(), judge.parameters(), strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0, msg=name)
        assert (own - before[name]).abs().max() > 1e-3, name  # every one is trained
    assert AutoTokenizer.from_pretrained(folder)("ab").input_ids == tokenizer()("ab").input_ids


@pytest.mark.check
def test_samples_come_from_the_weights_that_they_ask_for(url: str, source: str, tmp_path: Path) -> None:
    trained = made(url)
    base = client(url).create_sampling_client(base_model="tiny").result()
    train(trained, 2)
    early = trained.save_weights_and_get_sampling_client().result()
    train(trained, 2)
    late = trained.save_weights_and_get_sampling_client().result()
    train(trained, 1)
    futures = [one.sample(tokens(IDS), 1, PARAMS) for _ in range(3) for one in (base, early, late)]  # in turns
    found = [(s.tokens, s.logprobs) for s in (future.result().sequences[0] for future in futures)]
    assert found[3:6] == found[:3]
    assert found[6:] == found[:3]
    known = early.compute_logprobs(tokens(IDS)).result()[1:]
    torch.testing.assert_close(torch.tensor(found[0][1]), logprobs(model(), IDS + found[0][0])[9:], atol=1e-4, rtol=0)
    again = made_again(url, trained, tmp_path, 2), made_again(url, trained, tmp_path, 4)
    for (ids, own), net in zip(found[1:3], again, strict=True):
        torch.testing.assert_close(torch.tensor(own), logprobs(net, IDS + ids)[9:], atol=1e-4, rtol=0)
        assert (torch.tensor(own) - logprobs(model(), IDS + ids)[9:]).abs().max() > 1e-2
    torch.testing.assert_close(torch.tensor(known), logprobs(again[0], IDS), atol=1e-4, rtol=0)


def made_again(url: str, trained: tinker.TrainingClient, folder: Path, steps: int) -> Any:
    """The weights after some steps, of a model that begins anew when the first one is gone."""
    close(trained)  # its heartbeat ends
    session = trained.model_id.partition(":")[0]
    assert httpx.post(f"{url}/api/v1/sessions/{session}/finish", headers=KEY).status_code == 200
    anew = made(url)
    train(anew, steps)
    found = AutoModelForCausalLM.from_pretrained(downloaded(url, anew, folder / f"after-{steps}"))
    httpx.post(f"{url}/api/v1/sessions/{anew.model_id.partition(':')[0]}/finish", headers=KEY)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state")
def test_training_goes_on_from_a_saved_state_after_the_server_ended(tmp_path: Path, source: str) -> None:
    with _serving(tmp_path / "states", source) as url:
        trained = made(url)
        train(trained, 2)
        path = trained.save_state("middle").result().path
        kept = trained.save_weights_for_sampler("kept").result().path
        before = sampled(client(url).create_sampling_client(kept).result())
        onward = train(trained, 3)
        trained.load_state_with_optimizer(path).result()
        assert train(trained, 3) == onward
    with _serving(tmp_path / "states", source) as url:
        assert sampled(client(url).create_sampling_client(kept).result()) == before
        again = client(url).create_training_client_from_state_with_optimizer(path).result()
        assert train(again, 3) == onward
        again.load_state(path).result()  # with an optimiser that begins
        fresh = train(again, 3)
        assert fresh[0] == onward[0]
        assert fresh[2] != onward[2]
        info = again.get_info()
        assert (info.is_lora, info.lora_rank) == (False, None)
        rest = rest_client(url)
        assert rest.get_weights_info_by_tinker_path(path).result().is_lora is False
        assert [run.is_lora for run in rest.list_training_runs().result().training_runs] == [False, False]


@pytest.mark.slow
def test_what_full_fine_tuning_cannot_do_is_refused(url: str, tmp_path: Path, source: str) -> None:
    for options, said in (
        ({"rank": 8}, "rank is 8, and this server trains all weights of one model"),
        ({"rank": 0, "train_mlp": False}, "rank 0 trains all weights; leave train_attn"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=said):
            made(url, **options)
    trained = made(url)
    losses = train(trained, 1)
    with pytest.raises(tinker.RequestFailedError, match="one is in training already"):
        client(url, "tml-other").create_lora_training_client("tiny", 0).result()
    assert train(trained, 1)[0] < losses[0]
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, "samples by Tinker's API alone" in answer.text) == (404, True)
    whole = trained.save_state("whole").result().path
    with serving(tmp_path / "adapters", source=source) as adapters:
        with pytest.raises(tinker.RequestFailedError, match="rank is 0, which stands for all weights; give 1 to 1024"):
            made(adapters)
        lora = made(adapters, 4).save_state("lora").result().path
    for folder, other, path, said in (
        (tmp_path / "adapters", True, lora, "rank is 4, and this server trains all weights"),
        (tmp_path / "states", False, whole, "rank is 0, which stands for all weights"),
    ):
        with _serving(folder, source) if other else serving(folder, source=source) as last:
            with pytest.raises(tinker.RequestFailedError, match=said):
                client(last).create_training_client_from_state(path).result()
            with pytest.raises(tinker.TinkerError, match=said):
                client(last).create_sampling_client(path).result()


def test_a_cancelled_change_of_weights_leaves_no_others_to_the_next_request(source: str, tmp_path: Path) -> None:
    other = model()
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    other.save_pretrained(tmp_path)
    engine = NativeEngine(load_model(source), tokenizer(), EngineConfig(page_size=4, kv_tokens=4096))
    thread, gate = ThreadPoolExecutor(1), threading.Event()

    class Calls:  # in the order of their coming, as the engine's thread
        async def call(self, function: Callable[[], Any]) -> Any:
            return await asyncio.wrap_future(thread.submit(function))

    async def enter(whole: Whole, place: Path | None) -> float:
        _, give_back = await whole.lend(place, None)
        weight = float(engine.model.model.norm.weight[0].detach())
        give_back()
        return weight

    async def run() -> list[float]:
        whole = Whole(engine, Calls(), source)  # type: ignore[arg-type]
        thread.submit(gate.wait)
        cancelled = asyncio.create_task(enter(whole, tmp_path))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(enter(whole, None))
        await asyncio.sleep(0.01)
        gate.set()
        return [await waiting, await enter(whole, tmp_path), await enter(whole, None)]

    assert asyncio.run(run()) == [1.0, 2.0, 1.0]


@pytest.mark.parametrize("options", [["--tinker_full", "--dtype", "float32"], ["--tinker", "--tinker_full"]])
def test_the_command_needs_float32(options: list[str], source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", source, *options]) == 2
    assert "--tinker_full needs --tinker, and --dtype float32" in capsys.readouterr().err
