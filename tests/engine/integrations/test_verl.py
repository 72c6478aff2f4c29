"""rolltree in verl's registries and below its models, against verl's own functions; `make verl` runs this."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("verl", reason="verl is not installed: `make verl`")
pytestmark = pytest.mark.verl

from verl.models.transformers.monkey_patch import patch_forward_with_backends  # noqa: E402
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

from rolltree.engine.integrations import verl as ours  # noqa: E402

MODES = tuple(ours.AGGREGATIONS)
SAME = {"dual_clip": "vanilla", "gspo_token": "gspo", "sapo": "sapo", "cispo": "cispo", "dppo_tv": "dppo_tv"}
"""Objectives that verl has under its own names."""
CASES = [
    (name, mode)
    for name in SAME
    for mode in MODES
    if name not in ("gspo_token", "sapo") or mode == "seq-mean-token-mean"
]  # verl takes no other mode for these two


def batch(seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shape = (5, 9)
    mask = torch.arange(9) < torch.tensor([9, 4, 1, 0, 7])[:, None]
    mask[0, 3:5] = False  # a tool's answer
    old = -torch.rand(shape, generator=rng) * 3
    return {
        "old_log_prob": old,
        "log_prob": (old + 0.4 * torch.randn(shape, generator=rng)).requires_grad_(),
        "advantages": torch.randn(shape[0], 1, generator=rng).expand(shape),
        "response_mask": mask.float(),
    }


def config(**options: Any) -> Any:
    made = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        **options,
    )
    return made


def called(name: str, mode: str, seed: int, settings: Any, **more: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    given = batch(seed)
    out, metrics = get_policy_loss_fn(name)(**given, loss_agg_mode=mode, config=settings, **more)
    (grad,) = torch.autograd.grad(out, given["log_prob"])
    return out.detach(), grad, metrics


@pytest.mark.parametrize("weighted", [False, True], ids=["", "corrected"])
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_objectives_that_verl_has_too(name: str, mode: str, weighted: bool) -> None:
    settings = config()
    weights = torch.rand(5, 9, generator=torch.Generator().manual_seed(7)) * 2 if weighted else None
    for seed in range(2):
        got = called(f"rolltree_{name}", mode, seed, settings, rollout_is_weights=weights)
        expected = called(SAME[name], mode, seed, settings, rollout_is_weights=weights)
        torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-6)
    if name == "dual_clip" and not weighted and mode.startswith("token"):
        for metric in ours.METRICS:
            assert got[2][metric] == pytest.approx(expected[2][metric], abs=1e-6), metric


def test_counts_of_the_whole_batch_and_ranks() -> None:
    settings = config()
    settings.global_batch_info.update(dp_size=4, batch_num_tokens=100, global_batch_size=32, loss_scale_factor=50)
    for mode in MODES:
        got, expected = (called(name, mode, 0, settings) for name in ("rolltree_dual_clip", "vanilla"))
        torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-7)
    settings.global_batch_info.update(batch_num_tokens=None)
    with pytest.raises(ValueError, match="batch_num_tokens of the global batch is needed"):
        called("rolltree_dual_clip", "token-mean", 0, settings)
    with pytest.raises(ValueError, match="loss_agg_mode 'sum' is not one of"):
        called("rolltree_dual_clip", "sum", 0, settings)


def test_every_objective_runs() -> None:
    names = ours.objectives()
    assert {"grpo", "dapo", "gspo", "gmpo", "vespo", "cispo"} <= set(names)
    for name in names:
        out, grad, _ = called(f"rolltree_{name}", "token-mean", 1, config())
        assert out.isfinite(), name
        assert grad.isfinite().all(), name
        assert grad.any(), name


@pytest.mark.parametrize(
    ("name", "theirs"), [("group_norm", "grpo"), ("rloo", "rloo"), ("opo", "opo")], ids=lambda name: name
)
def test_advantages_that_verl_has_too(name: str, theirs: str) -> None:
    rng = torch.Generator().manual_seed(3)
    mask = (torch.arange(6) < torch.tensor([6, 2, 4, 3, 5, 1])[:, None]).float()
    rewards = torch.randint(0, 3, (6, 6), generator=rng) * mask
    given = {"token_level_rewards": rewards, "response_mask": mask, "index": np.array(list("aababb"), object)}
    got, returns = get_adv_estimator_fn(f"rolltree_{name}")(**given, config=None)
    expected, _ = get_adv_estimator_fn(theirs)(**given)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert got is returns


def test_the_fused_head_below_verls_models() -> None:
    made = Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(made)
    plain = copy.deepcopy(model)
    forward = Qwen3ForCausalLM.forward
    ids = torch.randint(0, 97, (2, 11))
    try:
        patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="triton")
        out = model(input_ids=ids, temperature=0.7, return_dict=True)
        (out.log_probs[:, :-1].sum() + out.entropy[:, :-1].mean()).backward()
    finally:
        Qwen3ForCausalLM.forward = forward
    log_p = (plain(input_ids=ids).logits[:, :-1] / 0.7).log_softmax(-1)
    logprob = log_p.gather(2, ids[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (logprob.sum() + entropy.mean()).backward()
    torch.testing.assert_close(out.log_probs[:, :-1], logprob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.entropy[:, :-1], entropy, rtol=1e-5, atol=1e-5)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_temperature_a_token_and_what_is_refused() -> None:
    hidden, weight, labels = torch.randn(1, 6, 8), torch.randn(20, 8), torch.randint(0, 20, (1, 6))
    temperature = torch.rand(1, 6) + 0.5
    got, _ = ours.fused_head(hidden, weight, labels, temperature)
    logits = hidden @ weight.T / temperature[..., None]
    torch.testing.assert_close(got, logits.log_softmax(-1).gather(2, labels[..., None])[..., 0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no reduction 'mean'"):
        ours.fused_head(hidden, weight, labels, 1.0, "mean")


def test_verl_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["verl.plugins"] == {"rolltree": ours.__name__}
