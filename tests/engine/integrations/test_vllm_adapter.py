"""The policy's LoRA adapter in the real vLLM, which computes with A and B themselves: `make vllm`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.engine import UserError
from rolltree.engine.model.lora import Alone, add_lora, merged
from rolltree.engine.rollout import SamplingParams

from ..programs.test_programs import rescored
from ..rollout.test_native_engine import PROMPTS, letters
from .test_vllm import net
from .test_vllm_run import batches, start, toml  # noqa: F401  # the fixture

pytestmark = pytest.mark.vllm
RANK, ALPHA = 3, 6.0
PARAMS = SamplingParams(n=3, max_new_tokens=16, ignore_eos=True)


def adapted(dtype: torch.dtype) -> Any:
    """Return the model with an adapter of random A and B."""
    torch.manual_seed(1)
    model = copy.deepcopy(net()).to(dtype)
    add_lora(model, rank=RANK, alpha=ALPHA, rslora=False, targets="all-linear")
    draw(model, 0.1)
    return model


def draw(model: Any, size: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=size)


def engine_of(directory: Path, dtype: str, **options: Any) -> Any:
    from rolltree.engine.rollout.vllm.adapter import Adapter
    from rolltree.engine.rollout.vllm.engine import VllmEngine

    net().save_pretrained(directory)
    letters().save_pretrained(directory)
    return VllmEngine(
        str(directory),
        adapter=Adapter(RANK, ALPHA / RANK),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 26,
        **options,
    )


def test_log_probs_are_those_of_the_adapter(tmp_path: Path) -> None:
    """Before the first update those of the base, then of each adapter in turn, in samples and in scores."""
    model, engine = adapted(torch.float32), engine_of(tmp_path, "float32")
    for tree in engine.generate(PROMPTS, PARAMS):
        assert rescored(tree, net(), 1.0, {}) < 1e-5
    for _ in range(2):
        draw(model, 0.2)
        engine.update_weights(Alone(model).tensors())
        for tree in engine.generate(PROMPTS, PARAMS):
            assert rescored(tree, model, 1.0, {}) < 1e-5
            assert rescored(tree, net(), 1.0, {}) > 1e-3
        (scores,) = engine.score([PROMPTS[3]], [[[5, 6, 7]]])
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPTS[3], 5, 6, 7]])).logits[0, len(PROMPTS[3]) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor([5, 6, 7])[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(scores[0]), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="takes the adapter's weights alone"):
        engine.update_weights(merged(model))


def test_an_update_below_the_spacing_of_bf16_arrives(tmp_path: Path) -> None:
    """It changes vLLM's log-probs, and hardly any of the merged weights."""
    model, engine = adapted(torch.bfloat16), engine_of(tmp_path, "bfloat16")
    draw(model, 3e-5)
    before = dict(net().to(torch.bfloat16).named_parameters())
    same = torch.cat([(tensor == before[n]).flatten() for n, tensor in merged(model).items() if "proj" in n])
    assert same.float().mean() > 0.9
    found: list[Tensor] = []
    for scale in (0.0, 1.0):
        engine.update_weights({n: p * scale if ".lora_B." in n else p for n, p in Alone(model).tensors().items()})
        (scores,) = engine.score([PROMPTS[3]], [[list(range(5, 25))]])
        found.append(torch.from_numpy(scores[0]))
    assert not torch.equal(*found)


def test_a_run_sends_the_adapter(toml: Path, tmp_path: Path) -> None:  # noqa: F811
    """The publication check compares vLLM's log-probs with the trained model's after each update."""
    run = start(toml, tmp_path, "--trainer.steps=3", "--model.lora.rank=3", "--trainer.lr=0.05")
    found = batches(run)
    run.run()
    assert run.controller.publication.difference < 1e-4
    versions = {int(v) for trees in found for tree in trees for v in tree.policy_version[tree.loss_mask]}
    assert versions == {0, 1, 2}


def test_ranks_that_vllm_does_not_take_are_refused(toml: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(UserError, match=r"model.lora.rank is 600, and vLLM takes adapters up to rank \d+; lower it"):
        start(toml, tmp_path, "--model.lora.rank=600")
