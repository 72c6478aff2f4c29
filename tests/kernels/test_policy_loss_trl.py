"""linear_policy_loss and policy_loss against TRL's own GRPO loss: value and gradients over micro-batches of uneven
lengths, with tokens written by tools inside the completions.

TRL's `_compute_loss` runs on a trainer without its constructor; only where its log-probs come from is replaced, by a
plain head on given hidden states. Settings under which the two are meant to be equal: TRL's cispo bound is the ratio
itself (ours is 1 + eps_high, with eps_low 1), its delta is our clip_ratio_c, its sequence level our "sequence".
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import Objective, PolicyFields, linear_policy_loss, policy_loss

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install rolltree[peers]")
GRPOTrainer = trl.GRPOTrainer

B, T, H, V = 3, 7, 8, 40
LENGTHS = [[7, 2, 4], [1, 6, 3]]  # of two micro-batches
WRITTEN = [(0, 2), (0, 3), (1, 1)]  # (sequence, place) of tokens of tools, in each micro-batch
TOKENS, SEQUENCES, LIMIT = 19, 6, 9  # without those of tools


class OneProcess:
    """A stand-in for the parts of accelerate that the loss uses."""

    num_processes, sync_gradients, process_index = 1, True, 0

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str = "sum") -> Tensor:
        return x

    def pad_across_processes(self, x: Tensor, dim: int, pad_index: float) -> Tensor:
        return x


def micro_batches(seed: int = 0) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    batches = []
    for lengths in LENGTHS:
        mask = torch.arange(T)[None] < torch.tensor(lengths)[:, None]
        sampled = torch.ones(B, T, dtype=torch.long)
        sampled[tuple(zip(*WRITTEN, strict=True))] = 0
        batches.append(
            {
                "hidden": torch.randn(B, T, H, generator=g),
                "completion_ids": torch.randint(0, V, (B, T), generator=g),
                "completion_mask": mask.long(),
                "tool_mask": sampled,
                "advantages": torch.randn(B, generator=g),
                "num_items_in_batch": torch.tensor(TOKENS),
                "noise": torch.randn(3, B, T, generator=g),
            }
        )
    return batches


def head(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.T).log_softmax(-1)
    return logp.gather(-1, ids[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def given(batch: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """Log-probs of the other policies, near those of the current one."""
    with torch.no_grad():
        now, _ = head(batch["hidden"], weight, batch["completion_ids"])
    noise = batch["noise"]
    old = now + 0.3 * noise[0]
    return {"old_per_token_logps": old, "ref_per_token_logps": now + 0.5 * noise[1],
            "sampling_per_token_logps": old + 0.3 * noise[2]}  # fmt: skip


def theirs(loss_type: str, weight: Tensor, batches: list[dict[str, Tensor]], **settings: Any) -> tuple[Tensor, Tensor]:
    weight = weight.clone().requires_grad_()
    trainer: Any = object.__new__(GRPOTrainer)
    trainer.model = SimpleNamespace(training=True)
    trainer.accelerator, trainer._metrics = OneProcess(), {"train": defaultdict(list)}
    trainer.loss_type, trainer.current_gradient_accumulation_steps = loss_type, len(batches)
    trainer.max_completion_length = LIMIT
    defaults = dict(
        epsilon_low=0.2, epsilon_high=0.2, beta=0.0, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", use_vllm=False, vllm_importance_sampling_correction=True,
        aux_loss_enabled=False, _entropy_bonus_enabled=False,
    )  # fmt: skip
    for name, value in (defaults | {k: v for k, v in settings.items() if k in defaults}).items():
        setattr(trainer, name, value)
    trainer.args = SimpleNamespace(
        delta=settings.get("delta"), use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
        steps_per_generation=len(batches), sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    )  # fmt: skip
    total = torch.zeros(())
    for batch in batches:
        trainer._get_per_token_logps_and_entropies = lambda *_, batch=batch, **__: (
            *head(batch["hidden"], weight, batch["completion_ids"]), None
        )  # fmt: skip
        inputs = batch | given(batch, weight)
        if "importance" in settings:
            inputs["importance_sampling_ratio"] = settings["importance"](inputs)
        nothing = torch.zeros(B, 0, dtype=torch.long)
        total = total + trainer._compute_loss(None, inputs | {"prompt_ids": nothing, "prompt_mask": nothing})
    return total.detach(), torch.autograd.grad(total, weight)[0]


def ours(
    objective: Objective, normalizer: Any, weight: Tensor, batches: list[dict[str, Tensor]], *, fused: bool
) -> tuple[Tensor, Tensor]:
    weight = weight.clone().requires_grad_()
    total = torch.zeros(())
    for batch in batches:
        live = batch["completion_mask"].bool()
        of = {name: value[live] for name, value in given(batch, weight).items()}
        lengths, sampled = live.sum(1), batch["tool_mask"].bool()[live]
        fields = PolicyFields.flat(
            batch["advantages"],
            old_logprob=of["old_per_token_logps"],
            ref_logprob=of["ref_per_token_logps"],
            behaviour_logprob=of["sampling_per_token_logps"],
            mask=sampled,
            cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        )
        hidden, ids, denominator = batch["hidden"][live], batch["completion_ids"][live], normalizer(int(sampled.sum()))
        if fused:
            out = linear_policy_loss(hidden, weight, ids, fields, objective, normalizer=denominator)
        else:
            logprob, entropy = head(hidden, weight, ids)
            out = policy_loss(logprob, fields, objective, normalizer=denominator, entropy=entropy)
        total = total + out.loss
    return total.detach(), torch.autograd.grad(total, weight)[0]


def compare(loss_type: str, objective: Objective, settings: dict[str, Any]) -> None:
    normalizer = {
        **dict.fromkeys(("grpo", "sapo", "luspo"), lambda tokens: SEQUENCES),
        **dict.fromkeys(("dapo", "cispo", "vespo"), lambda tokens: TOKENS),
        "bnpo": lambda tokens: 2 * tokens,  # the mean over the micro-batch's own tokens, then over micro-batches
        "dr_grpo": lambda tokens: SEQUENCES * LIMIT,
    }[loss_type]
    for seed in range(3):
        weight = torch.randn(V, H, generator=torch.Generator().manual_seed(seed))
        batches = micro_batches(seed)
        want = theirs(loss_type, weight, batches, **settings)
        assert want[1].abs().max() > 0
        for fused in (True, False):
            got = ours(objective, normalizer, weight, batches, fused=fused)
            assert (got[0] - want[0]).abs() <= 1e-5 * max(float(want[0].abs()), 0.1)
            assert (got[1] - want[1]).abs().max() <= 1e-5 * want[1].abs().max()


LOSSES = {
    "grpo": Objective.preset("grpo"),
    "bnpo": Objective.preset("bnpo"),
    "dr_grpo": Objective.preset("dr_grpo"),
    "dapo": Objective.preset("dapo", eps_high=0.2),
    "cispo": Objective.preset("cispo", eps_low=1.0, eps_high=0.2),
    "sapo": Objective.preset("sapo"),
    "luspo": Objective.preset("luspo", eps_low=0.2, eps_high=0.2),
    "vespo": Objective.preset("vespo"),
}
SETTINGS = {
    "cispo": {"epsilon_high": 1.2},
    "luspo": {"importance_sampling_level": "sequence"},
}


@pytest.mark.parametrize("loss_type", LOSSES)
def test_eight_loss_types(loss_type: str) -> None:
    compare(loss_type, LOSSES[loss_type], SETTINGS.get(loss_type, {}))


@pytest.mark.parametrize("loss_type", LOSSES)
def test_with_kl(loss_type: str) -> None:
    compare(loss_type, replace_in(loss_type, kl_coef=0.3), SETTINGS.get(loss_type, {}) | {"beta": 0.3})


@pytest.mark.parametrize("loss_type", [name for name in LOSSES if name not in ("luspo", "vespo")])
def test_kl_corrected_by_importance(loss_type: str) -> None:
    settings = SETTINGS.get(loss_type, {}) | {"beta": 0.3, "use_bias_correction_kl": True}
    compare(loss_type, replace_in(loss_type, kl_coef=0.3, kl_importance=True), settings)


@pytest.mark.parametrize("loss_type", ["grpo", "sapo"])
def test_ratio_of_the_sequence(loss_type: str) -> None:
    compare(loss_type, replace_in(loss_type, ratio_level="sequence"), {"importance_sampling_level": "sequence"})


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo"])
def test_two_sided_clipping(loss_type: str) -> None:
    compare(loss_type, replace_in(loss_type, clip_ratio_c=1.4), {"delta": 1.4})


@pytest.mark.parametrize("loss_type", LOSSES)
def test_off_policy_mask(loss_type: str) -> None:
    settings = SETTINGS.get(loss_type, {}) | {"off_policy_mask_threshold": 0.02}
    compare(loss_type, replace_in(loss_type, off_policy_delta=0.02), settings)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_high_entropy_tokens(loss_type: str) -> None:
    settings = SETTINGS.get(loss_type, {}) | {"top_entropy_quantile": 0.4, "beta": 0.1}
    compare(loss_type, replace_in(loss_type, entropy_share=0.4, kl_coef=0.1), settings)


# TRL refuses corrections of sequences for vespo, and so does Objective
CORRECTIONS = [(name, "token") for name in LOSSES] + [(name, "sequence") for name in LOSSES if name != "vespo"]


@pytest.mark.slow(but=17)
@pytest.mark.check(but=10)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize(("loss_type", "level"), CORRECTIONS)
def test_sampler_mismatch(loss_type: str, level: Any, mode: Any) -> None:
    """TRL makes its ratio in the rollout, by the formulas of `_generate_and_score_completions`."""

    def importance(inputs: dict[str, Tensor]) -> Tensor:
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        log_ratio = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]) * mask
        w = (log_ratio.sum(-1, keepdim=True) if level == "sequence" else log_ratio).exp()
        return w.clamp(max=1.3) if mode == "truncate" else torch.where(w <= 1.3, w, 0)

    settings = SETTINGS.get(loss_type, {}) | {"use_vllm": True, "importance": importance}
    compare(loss_type, replace_in(loss_type, mismatch=mode, mismatch_level=level, mismatch_cap=1.3), settings)


def replace_in(loss_type: str, **changes: Any) -> Objective:
    return replace(LOSSES[loss_type], **changes)
