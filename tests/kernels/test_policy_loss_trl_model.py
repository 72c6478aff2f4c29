"""policy_loss against TRL's own GRPO loss through a whole model: value and gradients of every parameter.

Two micro-batches of uneven lengths, with tokens written by tools inside the completions. TRL's `_compute_loss` runs on
a trainer without its constructor; only its forward is replaced, by the same model's. Settings under which the two are
meant to be equal: TRL's cispo bound is the ratio itself (ours is 1 + eps_high, with eps_low 1), and its delta, which
also caps ratios of positive advantages, lies above 1 + epsilon_high.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rolltree.kernels import Objective, PolicyFields, policy_loss

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'trl==1.16.*' accelerate datasets")

B, P, T, V = 3, 4, 7, 50
LENGTHS = [[7, 2, 4], [1, 6, 3]]  # completions of two micro-batches
SEQUENCES, LIMIT = 6, 9


class OneProcess:
    """A stand-in for the parts of accelerate that the loss uses."""

    num_processes, sync_gradients, process_index = 1, True, 0

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str = "sum") -> Tensor:
        return x


def tiny_model() -> Any:
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, num_key_value_heads=2, **sizes)).float()


def forward(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, T] of the completions."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logp = model(input_ids=ids, attention_mask=attended).logits[:, P - 1 : -1].log_softmax(-1)
    return logp.gather(-1, batch["completion_ids"][..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def micro_batches(model: Any) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    made: list[dict[str, Tensor]] = []
    for lengths in LENGTHS:
        tool = torch.ones(B, T, dtype=torch.long)
        tool[0, 2:4] = tool[1, 1] = 0
        batch = {
            "prompt_ids": torch.randint(0, V, (B, P), generator=g),
            "prompt_mask": torch.ones(B, P, dtype=torch.long),
            "completion_ids": torch.randint(0, V, (B, T), generator=g),
            "completion_mask": (torch.arange(T)[None] < torch.tensor(lengths)[:, None]).long(),
            "tool_mask": tool,
            "advantages": torch.randn(B, generator=g),
        }
        with torch.no_grad():
            now, _ = forward(model, batch)
        old, ref, sampler = torch.randn(3, B, T, generator=g)
        batch["old_per_token_logps"] = now + 0.3 * old
        batch["ref_per_token_logps"] = now + 0.5 * ref
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + 0.3 * sampler
        made.append(batch)
    tokens = sum((b["completion_mask"] * b["tool_mask"]).sum() for b in made)
    return [b | {"num_items_in_batch": torch.as_tensor(tokens)} for b in made]


def gradients(loss: Tensor, model: Any) -> tuple[Tensor, Tensor]:
    of = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), torch.cat([g.flatten() for g in of])


def theirs(
    model: Any, batches: list[dict[str, Tensor]], loss_type: str, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    trainer: Any = object.__new__(trl.GRPOTrainer)
    trainer.model, trainer.accelerator = SimpleNamespace(training=True), OneProcess()
    trainer._metrics = {"train": defaultdict(list)}
    trainer.args = SimpleNamespace(
        delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=len(batches),
        sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
    )  # fmt: skip
    attributes = dict(
        loss_type=loss_type, current_gradient_accumulation_steps=len(batches), max_completion_length=LIMIT,
        epsilon_low=0.2, epsilon_high=0.2, beta=0.0, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", use_vllm=False, vllm_importance_sampling_correction=True,
        aux_loss_enabled=False, _entropy_bonus_enabled=False,
    )  # fmt: skip
    for name, value in (attributes | {k: v for k, v in settings.items() if k != "delta"}).items():
        setattr(trainer, name, value)
    total = torch.zeros(())
    for batch in batches:
        trainer._get_per_token_logps_and_entropies = lambda *_, b=batch, **__: (*forward(model, b), None)
        gap = (
            batch["old_per_token_logps"] - batch["sampling_per_token_logps"]
        )  # token_truncate, as the rollout makes it
        inputs = batch | {"importance_sampling_ratio": gap.exp().clamp(max=1.3)}
        total = total + trainer._compute_loss(model, inputs)
    return gradients(total, model)


def ours(
    model: Any, batches: list[dict[str, Tensor]], objective: Objective, normalizer: Callable[[int, int], float]
) -> tuple[Tensor, Tensor]:
    total = torch.zeros(())
    for batch in batches:
        written = batch["completion_mask"].bool()
        learned = batch["tool_mask"].bool()[written]
        logprob, _ = forward(model, batch)
        fields = PolicyFields.flat(
            batch["advantages"],
            old_logprob=batch["old_per_token_logps"][written],
            ref_logprob=batch["ref_per_token_logps"][written],
            behaviour_logprob=batch["sampling_per_token_logps"][written],
            mask=learned,
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), written.sum(1).cumsum(0)]),
        )
        denominator = normalizer(int(learned.sum()), int(batch["num_items_in_batch"]))
        total = total + policy_loss(logprob[written], fields, objective, normalizer=denominator).loss
    return gradients(total, model)


NORMALIZER: dict[str, Callable[[int, int], float]] = {  # from the tokens of the micro-batch and of all of them
    "grpo": lambda here, all_: SEQUENCES,
    "sapo": lambda here, all_: SEQUENCES,
    "dr_grpo": lambda here, all_: SEQUENCES * LIMIT,
    "dapo": lambda here, all_: all_,
    "cispo": lambda here, all_: all_,
    "bnpo": lambda here, all_: len(LENGTHS) * here,  # a mean over the own tokens, then over micro-batches
}
OVERRIDES: dict[str, dict[str, Any]] = {"dapo": {"eps_high": 0.2}, "cispo": {"eps_low": 1.0, "eps_high": 0.2}}
SETTINGS: dict[str, dict[str, Any]] = {"cispo": {"epsilon_high": 1.2}}


def compare(loss_type: str, changes: dict[str, Any], settings: dict[str, Any]) -> None:
    model = tiny_model()
    batches = micro_batches(model)
    objective = Objective.preset(loss_type, **(OVERRIDES.get(loss_type, {}) | changes))
    value, gradient = theirs(model, batches, loss_type, SETTINGS.get(loss_type, {}) | settings)
    got_value, got_gradient = ours(model, batches, objective, NORMALIZER[loss_type])
    assert gradient.abs().max() > 0
    assert (got_value - value).abs() <= 1e-5 * value.abs()
    assert (got_gradient - gradient).abs().max() <= 1e-5 * gradient.abs().max()


@pytest.mark.parametrize("loss_type", NORMALIZER)
def test_loss_types(loss_type: str) -> None:
    compare(loss_type, {}, {})


@pytest.mark.parametrize("loss_type", NORMALIZER)
def test_with_kl(loss_type: str) -> None:
    compare(loss_type, {"kl_coef": 0.3}, {"beta": 0.3})


@pytest.mark.parametrize("loss_type", NORMALIZER)
def test_truncated_importance_of_tokens(loss_type: str) -> None:
    compare(loss_type, {"mismatch": "truncate", "mismatch_cap": 1.3}, {"use_vllm": True})


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_two_sided_clipping(loss_type: str) -> None:
    compare(loss_type, {"clip_ratio_c": 1.4}, {"delta": 1.4})


def test_ratio_of_the_sequence() -> None:
    compare("grpo", {"ratio_level": "sequence"}, {"importance_sampling_level": "sequence"})
