"""Images in model inputs, for tiny models that take them and one that does not, beside plain Transformers."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rolltree.engine.model.loading import load_model, load_tokenizer
from rolltree.engine.model.pictures import tower_parameters
from rolltree.engine.model.processor import PictureProcessor
from rolltree.engine.rollout import EngineConfig, NativeEngine

from ...support.picture_models import make_models, plain_inputs
from ...support.picture_run import encoded, write_model
from .served import Adapters, Lora, client, downloaded, serving, tinker, types

BEGIN, END = 121, 122  # around an image
ADAM = types.AdamParams(learning_rate=1e-2, weight_decay=0.1, eps=1e-7)
DRAW = np.random.default_rng(3)
FILES = [encoded(DRAW), encoded(DRAW, "JPEG")]
Parts = Sequence[int | bytes]
"""A sequence: token ids, and files of images."""
SHARED: Parts = [1, 7, BEGIN, FILES[0], END, 8, 9]
SOME: list[Parts] = [
    [*SHARED, 20, 21, 22],
    [*SHARED, 20, 31],
    [1, 7, BEGIN, FILES[1], END, 8, 9, 20, 21],
    [*SHARED, BEGIN, FILES[1], END, 40],
    [1, 7, 8, 9],
]


def engine_of(folder: Path) -> NativeEngine:
    return NativeEngine(load_model(folder), load_tokenizer(folder), EngineConfig(page_size=4, kv_tokens=2048))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_model(made)
    return made


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("states"), engine_of(folder), str(folder)) as found:
        yield found


def model_input(parts: Parts, expected: dict[bytes, int] | None = None) -> types.ModelInput:
    chunks: list[Any] = []
    for part in parts:
        if isinstance(part, bytes):
            kind: Any = "png" if part.startswith(b"\x89PNG") else "jpeg"
            chunks.append(types.ImageChunk(data=part, format=kind, expected_tokens=(expected or {}).get(part)))
        else:
            chunks.append(types.EncodedTextChunk(tokens=[part]))
    return types.ModelInput(chunks=chunks)


class Judge:
    """The model under plain Transformers, which gets placeholders and pixels."""

    def __init__(self, folder: Path, name: str = "qwen3_vl") -> None:
        self.name, self.net = name, make_models(name)[1]
        processor = PictureProcessor(str(folder))
        self.pictures = {file: processor.picture(file) for file in FILES}
        self.rows = {file: picture.rows for file, picture in self.pictures.items()}

    def ids(self, parts: Parts) -> list[int]:
        each = [self.pictures[part].ids if isinstance(part, bytes) else [part] for part in parts]
        return [token for ids in each for token in ids]

    def targets(self, parts: Parts) -> list[int]:  # as the cookbook has them: 0 at rows of images
        return [token if token < 128 else 0 for token in self.ids(parts)[1:]]

    def logprobs(self, net: Any, parts: Parts) -> Tensor:
        inputs = plain_inputs(self.name, self.ids(parts)[:-1], list(self.pictures.values()))
        logits = net(**inputs, use_cache=False).logits[0].log_softmax(-1)
        found: Tensor = logits.gather(1, torch.tensor(self.targets(parts))[:, None])[:, 0]
        return found

    def datum(self, parts: Parts, trained: int = 0) -> types.Datum:
        targets = self.targets(parts)
        weights = [0.0] * (len(targets) - trained) + [1.0] * trained
        inputs = {"target_tokens": targets, "weights": weights}
        return types.Datum(model_input=model_input(parts[:-1], self.rows), loss_fn_inputs=inputs)


def train(trained: tinker.TrainingClient, judge: Judge, steps: int) -> list[Any]:
    results = []
    for _ in range(steps):
        results.append(trained.forward_backward([judge.datum(some, 2) for some in SOME], "cross_entropy").result())
        trained.optim_step(ADAM).result()
    return results


def judged(judge: Judge, net: Any, results: list[Any], own: list[Tensor]) -> None:
    """Check losses and log-probs of all positions of some steps, and take them with torch's AdamW."""
    adamw = torch.optim.AdamW(own, lr=1e-2, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1)
    for result in results:
        total = torch.zeros(())
        for parts, out in zip(SOME, result.loss_fn_outputs, strict=True):
            known = judge.logprobs(net, parts)
            torch.testing.assert_close(out["logprobs"].to_torch(), known.detach(), atol=1e-4, rtol=0)
            total = total - known[-2:].sum()
        assert result.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-4)
        adamw.zero_grad()
        total.backward()
        adamw.step()


@pytest.mark.slow
def test_steps_on_images_are_those_of_adamw(url: str, folder: Path, tmp_path: Path) -> None:
    trained = client(url).create_lora_training_client("tiny", 4, seed=1).result()
    judge = Judge(folder)
    net = peft.PeftModel.from_pretrained(judge.net, str(downloaded(url, trained, tmp_path / "before")))
    own = [p.requires_grad_() for n, p in net.named_parameters() if "lora_" in n]
    judged(judge, net, train(trained, judge, 3), own)
    folder = downloaded(url, trained, tmp_path / "after")
    after = peft.PeftModel.from_pretrained(make_models("qwen3_vl")[1], str(folder))
    for (name, ours), theirs in zip(after.state_dict().items(), net.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0, msg=name)


@pytest.mark.slow
def test_all_weights_but_the_towers_are_trained_on_images(folder: Path, tmp_path: Path) -> None:
    judge = Judge(folder)
    tower = {name for name, _ in tower_parameters(judge.net)}
    for name, parameter in judge.net.named_parameters():
        parameter.requires_grad_(name not in tower)
    with serving(tmp_path / "states", engine_of(folder), str(folder), full=True) as own:
        trained = client(own).create_lora_training_client("tiny", 0).result()
        judged(judge, judge.net, train(trained, judge, 2), [p for p in judge.net.parameters() if p.requires_grad])
        after = AutoModelForImageTextToText.from_pretrained(downloaded(own, trained, tmp_path / "after"))
        sampler = trained.save_weights_and_get_sampling_client().result()
        check_samples(sampler, judge, after)
    before = dict(make_models("qwen3_vl")[1].named_parameters())
    for (name, ours), theirs in zip(after.named_parameters(), judge.net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0, msg=name)
        assert torch.equal(ours, before[name]) == (name in tower), name


def check_samples(sampler: tinker.SamplingClient, judge: Judge, net: Any) -> None:
    """Check that the log-probs of samples are those of the weights, and depend on the image."""
    params = types.SamplingParams(max_tokens=6, seed=3, stop=[])
    for prompt in (SHARED, [*SHARED[:3], FILES[1], *SHARED[4:]]):
        sampled = sampler.sample(model_input(prompt), 2, params).result().sequences
        assert len({tuple(one.tokens) for one in sampled}) == 2
        for one in sampled:
            with torch.no_grad():
                theirs = judge.logprobs(net, [*prompt, *one.tokens])[-6:]
            np.testing.assert_allclose(one.logprobs, theirs, atol=1e-4)
            other = [*prompt[:3], FILES[0 if prompt[3] == FILES[1] else 1], *prompt[4:], *one.tokens]
            with torch.no_grad():
                assert np.abs(judge.logprobs(net, other)[-6:].numpy() - one.logprobs).max() > 1e-3


@pytest.mark.slow
def test_samples_after_an_image_are_those_of_the_adapter(url: str, folder: Path, tmp_path: Path) -> None:
    judge = Judge(folder)
    trained = client(url).create_lora_training_client("tiny", 4, seed=1).result()
    train(trained, judge, 2)
    net = peft.PeftModel.from_pretrained(judge.net, str(downloaded(url, trained, tmp_path / "adapter")))
    check_samples(trained.save_weights_and_get_sampling_client().result(), judge, net)
    check_samples(client(url).create_sampling_client(base_model="tiny").result(), judge, make_models("qwen3_vl")[1])


@pytest.mark.check
def test_images_that_cannot_be_used_are_refused_alone(url: str, folder: Path) -> None:
    judge = Judge(folder)
    trained = client(url).create_lora_training_client("tiny", 4, seed=1).result()
    sampler = client(url).create_sampling_client(base_model="tiny").result()
    bitmap = io.BytesIO()
    Image.new("RGB", (8, 8)).save(bitmap, "GIF")
    huge = io.BytesIO()
    Image.new("1", (9000, 9000)).save(huge, "PNG")
    for file, rows, said in (
        (b"\x89PNG no image", None, "is no image that can be read; give a PNG or JPEG file"),
        (bitmap.getvalue(), None, "is no image that can be read; give a PNG or JPEG file"),
        (huge.getvalue(), None, "is an image of 9000 x 9000 pixels, more than"),
        (FILES[0], judge.rows[FILES[0]] + 1, "has expected_tokens .* and this image takes"),
    ):
        prompt = types.ModelInput(
            chunks=[types.EncodedTextChunk(tokens=[1]), types.ImageChunk(data=file, format="png", expected_tokens=rows)]
        )
        inputs = {"target_tokens": [0] * (1 + (rows or 1))}
        datum = types.Datum(model_input=prompt, loss_fn_inputs=inputs)
        with pytest.raises(tinker.RequestFailedError, match=rf"data\[0\].model_input\[1\] {said}"):
            trained.forward([datum], "cross_entropy").result()
        with pytest.raises(tinker.TinkerError, match=f"Chunk 1 of the prompt {said}"):
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
    with pytest.raises(tinker.TinkerError, match="Log-probs of a prompt with images are not served"):
        sampler.compute_logprobs(model_input(SHARED)).result()
    assert len(train(trained, judge, 1)) == 1


def test_a_model_of_text_alone_refuses_images(tmp_path: Path) -> None:
    with serving(tmp_path) as own:
        trained = client(own).create_lora_training_client("tiny", 4).result()
        datum = types.Datum(
            model_input=model_input([1, FILES[0]], {FILES[0]: 1}), loss_fn_inputs={"target_tokens": [2, 3]}
        )
        with pytest.raises(tinker.RequestFailedError, match=r"is an image\. Qwen3ForCausalLM takes no pictures"):
            trained.forward([datum], "cross_entropy").result()
        sampler = client(own).create_sampling_client(base_model="tiny").result()
        with pytest.raises(tinker.TinkerError, match=r"is an image\. Qwen3ForCausalLM takes no pictures"):
            sampler.sample(model_input([1, FILES[0]]), 1, types.SamplingParams(max_tokens=1)).result()


@pytest.mark.parametrize("name", ["gemma3", "smolvlm", "qwen2_5_vl"])
def test_adapters_leave_the_tower_alone(name: str) -> None:
    net = make_models(name)[0]
    engine = NativeEngine(net, config=EngineConfig(page_size=4, kv_tokens=512))
    adapters = Adapters(engine, None)  # type: ignore[arg-type]  # nothing is lent here
    own = adapters.parameters(adapters.create(Lora(rank=2, seed=1)))
    assert own
    tower = {name for name, _ in tower_parameters(make_models(name)[1])}
    assert not [n for n in own if f"{n.partition('.lora_')[0]}.weight" in tower]


@pytest.mark.check
def test_two_images_without_a_token_between_are_refused_where_they_would_be_one(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "gemma3")
    with serving(tmp_path / "states", engine_of(tmp_path / "model"), str(tmp_path / "model")) as own:
        judge = Judge(tmp_path / "model", "gemma3")
        trained = client(own).create_lora_training_client("tiny", 4).result()
        apart = trained.forward([judge.datum([*SHARED, FILES[1], 5])], "cross_entropy").result()
        with torch.no_grad():
            known = judge.logprobs(judge.net, [*SHARED, FILES[1], 5])
        torch.testing.assert_close(apart.loss_fn_outputs[0]["logprobs"].to_torch(), known, atol=1e-4, rtol=0)
        with pytest.raises(tinker.RequestFailedError, match="Two pictures follow one another"):
            trained.forward([judge.datum([1, FILES[0], FILES[1], 5])], "cross_entropy").result()
