"""The client from the registry, unmodified, against a server of a tiny model."""

from __future__ import annotations

import copy
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from ...support.serving import model, save
from ...support.tiny import ROOT
from .served import client, close, downloaded, example, serving, tinker, tokens, types

IDS = [10, 200, 31, 42, 53, 64, 75, 86, 97, 108]
ADAM = types.AdamParams(learning_rate=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-7, grad_clip_norm=0.5)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("states")) as found:
        yield found


@pytest.fixture(scope="module")
def service(url: str) -> tinker.ServiceClient:
    return client(url)


def made(service: tinker.ServiceClient, **options: Any) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", **{"rank": 4, "seed": 1, **options}).result()


def train(trained: tinker.TrainingClient, steps: int) -> list[float]:
    """Losses of steps on two examples."""
    some = [example(IDS, 5), example([*IDS[:4], 7, 8, 9], 3)]
    found = []
    for _ in range(steps):  # the step is sent before the gradients are there
        loss, step = trained.forward_backward(some, "cross_entropy"), trained.optim_step(ADAM)
        found.append(loss.result().metrics["loss:sum"])
        step.result()
    return found


def logprobs(trained: tinker.TrainingClient, ids: list[int]) -> np.ndarray[Any, Any]:
    out = trained.forward([example(ids, 1)], "cross_entropy").result()
    return np.array(out.loss_fn_outputs[0]["logprobs"].data)


def loaded(url: str, trained: tinker.TrainingClient, to: Path) -> Any:
    """The adapter as peft loads it from the files that a client downloads."""
    return peft.PeftModel.from_pretrained(copy.deepcopy(model()), str(downloaded(url, trained, to)))


@pytest.mark.check
def test_steps_are_those_of_adamw(service: tinker.ServiceClient, url: str, tmp_path: Path) -> None:
    trained = made(service, seed=4)
    judge = loaded(url, trained, tmp_path / "before")
    own = [p for n, p in judge.named_parameters() if "lora_" in n]
    for parameter in own:
        parameter.requires_grad_()
    adamw = torch.optim.AdamW(own, lr=1e-2, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.1)
    losses = train(trained, 3)
    for ours in losses:
        total = torch.zeros(())
        for ids, count in ((IDS, 5), ([*IDS[:4], 7, 8, 9], 3)):
            logits = judge(torch.tensor([ids[:-1]]), use_cache=False).logits[0].log_softmax(-1)
            total = total - logits.gather(1, torch.tensor(ids[1:])[:, None])[-count:].sum()
        adamw.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(own, 0.5)
        adamw.step()
        assert ours == pytest.approx(float(total.detach()), rel=1e-4)
    after = loaded(url, trained, tmp_path / "after")
    for (name, ours), theirs in zip(after.state_dict().items(), judge.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0, msg=name)
    assert losses[-1] < losses[0]


@pytest.mark.check
def test_samples_come_from_the_weights_that_are_trained(service: tinker.ServiceClient) -> None:
    trained = made(service)
    before = trained.save_weights_and_get_sampling_client().result()
    train(trained, 3)
    after = trained.save_weights_and_get_sampling_client().result()
    train(trained, 2)  # the sampler keeps what was saved
    params = types.SamplingParams(max_tokens=12, seed=5, stop=[])
    for sampler, same in ((before, True), (after, True)):
        first, again = (sampler.sample(tokens(IDS[:4]), 3, params).result() for _ in range(2))
        assert [s.tokens for s in first.sequences] == [s.tokens for s in again.sequences], same
        assert len({tuple(s.tokens) for s in first.sequences}) == 3
        assert {s.stop_reason for s in first.sequences} == {"length"}
    fresh = made(service)
    train(fresh, 3)  # the same weights again
    for sequence in after.sample(tokens(IDS[:4]), 2, params).result().sequences:
        theirs = logprobs(fresh, [*IDS[:4], *sequence.tokens])[3:]
        np.testing.assert_allclose(sequence.logprobs, theirs, atol=1e-4)
        assert np.abs(theirs - logprobs(trained, [*IDS[:4], *sequence.tokens])[3:]).max() > 1e-3


def test_a_prompt_s_log_probs_are_those_of_training(service: tinker.ServiceClient) -> None:
    trained = made(service)
    train(trained, 2)
    sampler = trained.save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(tokens(IDS)).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], logprobs(trained, IDS), atol=1e-4)
    assert sampler.compute_logprobs(tokens(IDS), prompt_logprobs_last_n=3).result() == [None] * 7 + scored[7:]
    out = sampler.sample(
        tokens(IDS), 1, types.SamplingParams(max_tokens=2, seed=1), True, topk_prompt_logprobs=3, topk_sample_logprobs=4
    ).result()
    assert out.topk_prompt_logprobs[0] is None
    assert [len(top) for top in out.topk_prompt_logprobs[1:]] == [3] * 9
    soft = trained.forward(
        [
            types.Datum(
                model_input=tokens(IDS[:-1]),
                loss_fn_inputs={
                    "target_tokens": np.array([[token for token, _ in top] for top in out.topk_prompt_logprobs[1:]]),
                    "weights": np.zeros((9, 3), np.float32),
                },
            )
        ],
        "cross_entropy",
    ).result()
    found = soft.loss_fn_outputs[0]["logprobs"]
    assert found.shape == [9, 3]
    wanted = [[value for _, value in top] for top in out.topk_prompt_logprobs[1:]]
    np.testing.assert_allclose(found.to_numpy(), wanted, atol=1e-4)
    (sequence,) = out.sequences
    assert dict(sequence.topk_logprobs[0]).get(sequence.tokens[0], -99) <= max(v for _, v in sequence.topk_logprobs[0])
    assert [len(top) for top in sequence.topk_logprobs] == [4] * len(sequence.tokens)


def test_samples_stop_where_they_are_told_to(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result()
    free = sampler.sample(tokens(IDS), 1, types.SamplingParams(max_tokens=30, seed=2, stop=[])).result().sequences[0]
    assert free.stop_reason == "length"
    ends = next(i for i, token in enumerate(free.tokens) if i > 2)
    stop = [free.tokens[ends]]
    ended = sampler.sample(tokens(IDS), 1, types.SamplingParams(max_tokens=30, seed=2, stop=stop)).result().sequences[0]
    first = free.tokens.index(stop[0])
    assert (ended.tokens, ended.stop_reason) == (free.tokens[: first + 1], "stop")


def test_training_goes_on_from_a_saved_state_as_if_it_had_not_stopped(service: tinker.ServiceClient) -> None:
    trained = made(service)
    train(trained, 2)
    path = trained.save_state("middle").result().path
    onward = train(trained, 3)
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert train(again, 3) == onward
    fresh = service.create_training_client_from_state(path).result()  # with an optimiser that begins
    found = train(fresh, 3)
    assert found[0] == onward[0]
    assert found[2] != onward[2]
    assert again.get_info().lora_rank == 4


@pytest.mark.check
def test_a_custom_loss_has_the_same_gradients_in_two_passes_and_as_a_graph(service: tinker.ServiceClient) -> None:
    def loss(logprobs: Any, weights: Any) -> Any:
        value = ((logprobs * weights) ** 2).sum()
        return value, {"custom/square:sum": value}

    def of_data(data: list[types.Datum], lists: list[torch.Tensor]) -> Any:
        each = [loss(lp, d.loss_fn_inputs["weights"].to_torch())[0] for lp, d in zip(lists, data, strict=True)]
        return sum(each), {"custom/square:sum": float(sum(each))}

    some = [example(IDS, 5), example([*IDS[:4], 7, 8, 9], 3)]
    handle = service.create_custom_loss(loss, input_ranks={"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is not None
    found = []
    for way in (handle, of_data):
        trained = made(service)
        train(trained, 1)
        out = trained.forward_backward_custom(some, way).result()
        norm = trained.optim_step(ADAM).result().metrics["grad_norm:mean"]
        found.append((out.metrics["loss:sum"], out.metrics["custom/square:sum"], norm, *logprobs(trained, IDS)))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)


@pytest.mark.check
def test_a_bad_request_fails_alone(service: tinker.ServiceClient) -> None:
    trained, judge = made(service), made(service)
    bad = {
        "not finite": {"target_tokens": IDS[1:], "logprobs": [0.0] * 9, "advantages": [float("nan")] * 9},
        "those of its shape|one number for each target": {
            "target_tokens": IDS[1:], "logprobs": [0.0] * 8, "advantages": [1.0] * 9,
        },
        "the id 257": {"target_tokens": [257] * 9, "logprobs": [0.0] * 9, "advantages": [1.0] * 9},
    }  # fmt: skip
    for said, inputs in bad.items():
        with pytest.raises(tinker.RequestFailedError, match=said) as failed:
            trained.forward_backward([types.Datum(tokens(IDS[:-1]), inputs)], "ppo").result()
        assert failed.value.category == types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="no gradients to apply"):
        trained.optim_step(ADAM).result()
    with pytest.raises(tinker.RequestFailedError, match="eps is 0"):
        trained.optim_step(types.AdamParams(eps=0)).result()
    assert train(trained, 2) == train(judge, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"base_model": "other"}, "There is no model 'other' here; this server has 'tiny'"),
        ({"rank": 0}, "rank is 0"),
        ({"optimizer": types.DimuonOptimizerConfig()}, "optimiser 'dimuon' is not served"),
    ],
)
def test_what_cannot_be_honoured_is_refused(service: tinker.ServiceClient, options: dict[str, Any], said: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match=said):
        service.create_lora_training_client(**{"base_model": "tiny", **options}).result()


@pytest.mark.slow
def test_two_adapters_in_turns_are_each_alone(service: tinker.ServiceClient) -> None:
    one, two = made(service, seed=1), made(service, seed=2, rank=8, train_unembed=False)
    some = [example(IDS, 5), example([*IDS[:4], 7, 8, 9], 3)]
    futures = []
    for _ in range(3):
        futures += [(m, m.forward_backward(some, "cross_entropy"), m.optim_step(ADAM)) for m in (one, two)]
    losses: dict[int, list[float]] = {}
    for m, loss, step in futures:
        losses.setdefault(id(m), []).append(loss.result().metrics["loss:sum"])
        step.result()
    for m, options in ((one, {"seed": 1}), (two, {"seed": 2, "rank": 8, "train_unembed": False})):
        assert losses[id(m)] == train(made(service, **options), 3)


@pytest.mark.check
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(save(tmp_path / "model"))
    with serving(tmp_path / "states", source=source) as own:
        monkeypatch.setenv("TINKER_BASE_URL", own)
        monkeypatch.setenv("TINKER_API_KEY", "tml-any")
        monkeypatch.setattr("sys.argv", ["tinker_loop.py", "2"])
        run = runpy.run_path(str(ROOT / "examples" / "tinker_loop.py"))
        close(run["training"])
    printed = capsys.readouterr().out
    assert re.fullmatch(r"step 0: reward 0\.\d+\nstep 1: reward 0\.\d+\n", printed), printed
    assert len((ROOT / "examples" / "tinker_loop.py").read_text(encoding="utf-8").splitlines()) <= 40
