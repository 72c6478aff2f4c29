"""`accelerate` raises where it cannot honour an option, and names in one sentence each thing that it leaves to TRL."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from peft import PromptTuningConfig
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM
from trl import GRPOTrainer

from rolltree.engine import UserError
from rolltree.engine.integrations.trl import RolltreeGRPOTrainer, accelerate, entry

from .trl_tiny import make_grpo, save_model, tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("trl"))


class Instance(GRPOTrainer):
    """A trainer that is given a model instead of a path."""

    def __init__(self, path: str, *, model: Any, **kwargs: Any) -> None:
        super().__init__(model, processing_class=tokenizer(), **kwargs)


IDS = dict(pad_token_id=0, eos_token_id=1, bos_token_id=None)
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "recurrent": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, state_size=4, **IDS)),
        r"MambaForCausalLM has layers that cannot be tree-masked \(linear_attention\); pass tree=False and rollouts",
    ),
    "learned positions": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=64, **IDS)),
        "GPT2LMHeadModel has no rotary positions",
    ),
    "logits scaled and capped": (
        lambda: CohereForCausalLM(
            CohereConfig(vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1, logit_scale=0.5,
                         num_attention_heads=2, num_key_value_heads=2, final_logit_softcapping=5.0, **IDS)
        ),
        r"CohereForCausalLM multiplies its logits by 0.5 \(logit_scale\) and caps them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_models(path: str, kind: str) -> None:
    make, message = MODELS[kind]
    trainer = make_grpo(path, {"model": make()}, cls=Instance)
    with pytest.raises(UserError, match=message):
        accelerate(trainer)


def test_the_head_alone_needs_no_trees(path: str) -> None:
    trainer = make_grpo(path, {"model": MODELS["recurrent"][0]()}, cls=Instance)
    assert accelerate(trainer, tree=False, rollouts=False) is trainer


@pytest.mark.parametrize("layers", [True, False])
def test_layers_are_fused_unless_switched_off(path: str, layers: bool) -> None:
    trainer = accelerate(make_grpo(path), layers=layers)
    fused = [type(module).__name__ for module in trainer.model.modules() if "forward" in vars(module)]
    assert set(fused) - {type(trainer.model).__name__} == (
        {"Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention"} if layers else set()
    )


def test_a_trainer_on_a_cpu_keeps_the_memory_that_its_steps_free(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(entry, "keep_freed_memory", lambda: asked.append(True))
    accelerate(make_grpo(path))
    assert asked == [True]


TRAINERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "images": (lambda t: setattr(t, "_is_vlm", True), "GRPOTrainer trains on images"),
    "liger": (lambda t: setattr(t.args, "use_liger_kernel", True), "use_liger_kernel"),
    "fsdp": (
        lambda t: setattr(t, "accelerator", SimpleNamespace(distributed_type="DistributedType.FSDP")),
        "GRPOTrainer is sharded by FSDP",
    ),
    "dropout": (lambda t: setattr(t.model.config, "attention_dropout", 0.1), "drops attention"),
    "twice": (accelerate, "accelerated already"),
    "another forward": (
        lambda t: setattr(t.model, "forward", lambda *args, **kwargs: None),
        "Qwen3ForCausalLM has another forward than TRL gave it",
    ),
}


@pytest.mark.parametrize("kind", TRAINERS)
def test_trainers(path: str, kind: str) -> None:
    spoil, message = TRAINERS[kind]
    trainer = make_grpo(path)
    spoil(trainer)
    with pytest.raises(UserError, match=message):
        accelerate(trainer)


def test_virtual_tokens(path: str) -> None:
    trainer = make_grpo(path, {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)})
    with pytest.raises(UserError, match="a prompt of virtual tokens"):
        accelerate(trainer)


def test_arguments(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"accelerate supports GRPO, RLOO, Distillation, DPO, SFT and GKD trainers of TRL, not a str\."
    ):
        accelerate("trainer")
    trainer = make_grpo(path)
    with pytest.raises(UserError, match="tree=True scores by rolltree's head"):
        accelerate(trainer, head=False)
    monkeypatch.setattr(trl, "__version__", "1.10.0")
    with pytest.raises(
        UserError, match=r"TRL is of version 1\.10\.0; rolltree supports 1\.16: pip install 'trl==1\.16\.\*'"
    ):
        accelerate(trainer)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty is 1.2"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation is asked for num_beams"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching is set"),
    ],
)
def test_what_samples_is_said(path: str, options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = accelerate(make_grpo(path, **options))
    assert trainer.rolltree.rollouts is None
    assert f"Completions are TRL's, not the native engine's: {why}." in caplog.text


def test_the_subclass(path: str) -> None:
    trainer = make_grpo(path, {"rollouts": False}, cls=RolltreeGRPOTrainer)
    assert trainer.rolltree.tree
    assert trainer.rolltree.rollouts is None
    assert trainer.model.config._attn_implementation == "rolltree"
