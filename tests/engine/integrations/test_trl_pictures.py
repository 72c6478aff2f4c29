"""GRPO on prompts with pictures through TRL's trainer, with and without `accelerate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

from .trl_tiny import arguments, assert_same, reward, train

pytest.importorskip("trl", reason="TRL is not installed: pip install rolltree[trl]")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rolltree.engine import UserError
from rolltree.engine.integrations.trl import accelerate
from rolltree.engine.integrations.trl import pictures as of_trl
from rolltree.engine.integrations.trl.regroup import regroup

from ...support.picture_run import write_model

TREE = {"rollouts": False}
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5")


class Processor(Qwen2_5_VLProcessor):
    """Qwen's processor of texts and pictures, without the one of videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = 120, 123
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


@pytest.fixture(
    scope="module", params=[pytest.param(f, marks=() if f == "qwen3_vl" else pytest.mark.slow) for f in FAMILIES]
)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, request.param)
    return directory


def dataset() -> Dataset:
    """Prompts of equal texts and different pictures, one with two."""
    draw = np.random.default_rng(0)
    sizes = [(8, 12), (8, 8), (12, 8), (8, 12)]
    shown = [Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    images = [[shown[0]], [shown[1]], [shown[2], shown[3]], [shown[3]]]
    prompts = [[{"role": "user", "content": "w7 w8"}]] * 4
    return Dataset.from_dict({"prompt": prompts * 4, "images": images * 4})


def judge(completions: list[Any], **given: Any) -> list[float]:
    return reward([message["content"] for (message,) in completions])


def make(path: Path, **options: Any) -> Any:
    given = dict(num_generations=4, max_completion_length=6) | options
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    processor = Processor(AutoImageProcessor.from_pretrained(path), tokenizer, tokenizer.chat_template)
    config = GRPOConfig(**arguments(path, **given))
    return GRPOTrainer(
        model=str(path), reward_funcs=judge, args=config, train_dataset=dataset(), processing_class=processor
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "num_iterations": 2,
            "learning_rate": 0.1,
            "beta": 0.2,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
        },
    ],
    ids=["on policy", "old policy, KL, accumulation"],
)
def test_trees_train_what_trl_trains(path: Path, options: dict[str, Any]) -> None:
    theirs, ours = train(make(path, **options), None), train(make(path, **options), TREE)
    assert_same(theirs, ours, 1e-4)
    own = dict(ours.model.named_parameters())
    towers = [name for name in own if "visual" in name]
    assert towers
    assert any(not torch.equal(own[name], ours.before[name]) for name in towers)


@pytest.fixture
def scored(path: Path) -> tuple[Any, Any, dict[str, Any]]:
    """TRL's trainer, an accelerated one, and a batch that the former has sampled: 4 completions of 4 prompts."""
    theirs, ours = make(path), accelerate(make(path))
    prompts = [dict(row) for row in dataset()][:4]
    return theirs, ours, theirs._generate_and_score_completions([row for row in prompts for _ in range(4)])


def logprobs(trainer: Any, batch: dict[str, Any], chunk: int | None = None) -> torch.Tensor:
    ids, mask = (torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], 1) for kind in ("ids", "mask"))
    shown = {name: batch[name] for name in of_trl.FIELDS}
    width = batch["completion_ids"].shape[1]
    with torch.no_grad():
        found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width, chunk, **shown)[0]
    return found * batch["completion_mask"]


def test_log_probs_are_trls_and_each_picture_is_encoded_once(
    scored: tuple[Any, Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours, batch = scored
    want = logprobs(theirs, batch)
    encoded = []
    encode = ours.model.model.get_image_features

    def noted(pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **given: Any) -> Any:
        encoded.append(image_grid_thw.tolist())
        return encode(pixel_values, image_grid_thw, **given)

    monkeypatch.setattr(ours.model.model, "get_image_features", noted)
    torch.testing.assert_close(logprobs(ours, batch), want, atol=1e-5, rtol=1e-5)
    assert encoded == [[[1, 4, 6], [1, 4, 4], [1, 6, 4], [1, 4, 6]]]  # 20 in TRL's batch
    torch.testing.assert_close(logprobs(ours, batch, 6), want, atol=1e-5, rtol=1e-5)
    ours.rolltree.tree = False
    torch.testing.assert_close(logprobs(ours, batch, 6), want, atol=1e-5, rtol=1e-5)
    ours.rolltree.tree = True
    right = of_trl.pictures_of

    def swapped(model: Any, fields: Any) -> Any:  # the first and the last prompt's, which have equal sizes
        found = right(model, fields)
        return [found[-1] if some == found[0] else some for some in found]

    monkeypatch.setattr(of_trl, "pictures_of", swapped)
    off = (logprobs(ours, batch) - want).abs().amax(1)
    assert float(off[:1].max()) > 1e-3
    assert float(off[4:].max()) < 1e-4


def test_completions_are_those_of_generate_and_their_log_probs_the_trainers(path: Path) -> None:
    greedy = {"generation_kwargs": {"do_sample": False}}
    theirs, ours = make(path, **greedy), accelerate(make(path, **greedy))
    rows = [dict(row) for row in dataset()][:4]
    prompts = [
        [{"role": "user", "content": [*({"type": "image", "image": image} for image in row["images"]),
                                      {"type": "text", "text": "w7 w8"}]}]
        for row in rows
        for _ in range(4)
    ]  # fmt: skip
    ids, images, fields = theirs._tokenize_prompts(prompts)
    want, _ = theirs._generate_single_turn(ids, images, fields, 4)
    got, _ = ours._generate_single_turn(ids, images, fields, 4)
    assert got == want
    assert len({tuple(some) for some in want}) > 1
    engine = ours.rolltree.rollouts._engine
    assert engine.stats["encoded_pictures"] == 4
    sampled = accelerate(make(path))
    batch = sampled._generate_and_score_completions([row for row in rows for _ in range(4)])
    live = batch["completion_mask"].bool()
    torch.testing.assert_close(
        batch["sampling_per_token_logps"][live], logprobs(sampled, batch)[live], atol=5e-5, rtol=1e-5
    )


def test_regrouping_moves_pictures_with_their_samples() -> None:
    """Prompts of equal ids are told apart by their pictures, of which sample i has i % 3 + 1 patches of value i % 3."""

    def micro_batch(samples: list[int]) -> dict[str, Any]:
        kinds = [i % 3 for i in samples]
        grids = [[1, 1, kind + 1] for kind in kinds]
        pixels = [torch.full((kind + 1, 2), float(kind)) for kind in kinds]
        return {
            "prompt_ids": torch.ones(len(samples), 5, dtype=torch.int64),
            "advantages": torch.tensor(samples, dtype=torch.float32),
            "num_images": [1] * len(samples),
            "image_grid_thw": torch.tensor(grids),
            "pixel_values": torch.cat(pixels),
        }

    found = regroup([micro_batch([0, 1, 2]), micro_batch([3, 4, 5])], 2)
    assert [batch["advantages"].tolist() for batch in found] == [[0, 3, 1], [4, 2, 5]]
    for batch in found:
        want = micro_batch([int(i) for i in batch["advantages"]])
        for name, values in want.items():
            assert torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(values)), name


def test_what_is_not_computed_is_refused(path: Path) -> None:
    trainer = make(path)
    trainer.tools = [print]
    with pytest.raises(UserError, match="GRPOTrainer trains on images with tools"):
        accelerate(trainer)
    trainer.tools = []
    trainer.model.config.model_type = "gemma3"
    with pytest.raises(
        UserError, match="a model of the type gemma3, and rolltree computes those of qwen2_5_vl, qwen3_5"
    ):
        accelerate(trainer)
