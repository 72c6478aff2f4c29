"""The recipes of docs/other_trainers.md, run as the page has them, against the trainers' own functions on a CPU.

`make trainers` fetches those that install from a registry; slime and prime-rl are read from a checkout on the path.
"""

from __future__ import annotations

import importlib
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from ...support.tiny import ROOT

VOCABULARY, HIDDEN = 97, 24


def recipe(trainer: str) -> dict[str, Any]:
    """Return the names that the page's block of ``trainer`` defines."""
    text = (ROOT / "docs" / "other_trainers.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {trainer}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(code, f"other_trainers.md, {trainer}", "exec", dont_inherit=True), names)
    return names


def needs(module: str, trainer: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{trainer} cannot be imported ({error}): `make trainers`")


def without_init(monkeypatch: pytest.MonkeyPatch, package: ModuleType, *names: str) -> None:
    """Packages ``names`` below ``package`` whose own __init__, which imports more than is needed here, does not run."""
    for name in names:
        inner = ModuleType(f"{package.__name__}.{name}")
        inner.__path__ = [f"{place}/{name.replace('.', '/')}" for place in package.__path__]
        monkeypatch.setitem(sys.modules, inner.__name__, inner)


def draws(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def ids(*shape: int, seed: int = 9) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def same(ours: Any, theirs: Any, *, relative: float = 1e-5) -> None:
    """Equal to ``relative`` of the largest of them."""
    for mine, yours in zip(ours, theirs, strict=True):
        assert yours.abs().max() > 0, "a comparison with zeros shows nothing"
        torch.testing.assert_close(mine, yours, rtol=0, atol=relative * float(yours.abs().max()))


def scored(logprob: Tensor, entropy: Tensor | None, *leaves: Tensor) -> list[Tensor]:
    """Values, and the gradients of a sum of both with weights of either sign."""
    found = [logprob] if entropy is None else [logprob, entropy]
    total = sum(((value * draws(*value.shape, seed=5 + k)).sum() for k, value in enumerate(found)), torch.zeros(()))
    return [v.detach() for v in found] + list(torch.autograd.grad(total, leaves))


@pytest.fixture
def no_compilation() -> Iterator[None]:
    """Run compiled functions of the trainers eagerly."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("no_compilation")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_openrlhf(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed"):
        stand_in = ModuleType(name)  # it has no build without a GPU; OpenRLHF imports it for packed batches alone
        stand_in.__spec__ = ModuleSpec(name, None, is_package=True)
        for function in ("index_first_axis", "pad_input", "rearrange", "unpad_input", "all_gather"):
            setattr(stand_in, function, None)
        monkeypatch.setitem(sys.modules, name, stand_in)
    module = needs("openrlhf.models.actor", "OpenRLHF")
    for name in ("log_probs_from_logits", "compute_entropy"):
        monkeypatch.setattr(module, name, getattr(module, name))
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=12, tie_word_embeddings=False,
        )
    )  # fmt: skip
    actor = module.Actor(model, temperature=temperature)
    actor.packing_samples = False
    tokens = ids(3, 11)
    leaves = [model.lm_head.weight, model.model.embed_tokens.weight]

    def run() -> list[Tensor]:
        logprob, output = actor(
            tokens, torch.ones(3, 7), torch.ones_like(tokens), return_output=True, return_entropy=True
        )
        return scored(logprob, output.entropy, *leaves)

    theirs = run()
    recipe("OpenRLHF")["fuse_head"](actor)
    same(run(), theirs)


def prime_rl(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Patch prime-rl's head and losses; the head is put back when the test ends."""
    without_init(monkeypatch, needs("prime_rl.trainer", "prime-rl"), "models", "models.layers")  # its torchtitan
    head = needs("prime_rl.trainer.models.layers.lm_head", "prime-rl")
    monkeypatch.setattr(head.FusedOutputLinear, "forward", head.FusedOutputLinear.forward)
    return head, needs("prime_rl.trainer.rl.loss", "prime-rl")


@pytest.mark.usefixtures("no_compilation")
def test_prime_rl_head(monkeypatch: pytest.MonkeyPatch) -> None:
    head, _ = prime_rl(monkeypatch)
    linear = head.FusedOutputLinear(HIDDEN, VOCABULARY, chunk_size=4)
    hidden, labels, temperature = draws(1, 13, HIDDEN, grad=True), ids(1, 13), 0.5 + draws(1, 13, seed=2).abs()

    def run() -> list[Tensor]:
        out = linear(hidden, labels, temperature)
        return [*scored(out["logprobs"], None, hidden, linear.weight), out["entropy"].detach()]

    theirs = run()
    recipe("prime-rl")
    same(run(), theirs)


@pytest.mark.usefixtures("no_compilation")
@pytest.mark.parametrize("weighted", [False, True])
def test_prime_rl_loss(monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    _, loss = prime_rl(monkeypatch)
    old = -draws(40, seed=1).abs()
    logprob = (old + 0.5 * draws(40, seed=2)).clamp(max=0).requires_grad_()
    inputs = loss.LossInputs(
        trainer_logprobs=logprob,
        inference_logprobs=old,
        ref_logprobs=None,
        advantages=draws(40, seed=3),
        loss_mask=draws(40, seed=4) > -1,
        loss_weights=draws(40, seed=5).abs() if weighted else None,
    )
    options = Namespace(dppo_mask_low=0.1, dppo_mask_high=0.15, adv_tau=1.0, kl_tau=1e-2)
    (theirs,) = torch.autograd.grad(loss.default_loss_fn(inputs, options).loss, logprob)
    found = recipe("prime-rl")["loss"](inputs, surrogate="dppo_tv", eps_low=0.1, eps_high=0.15, kl="k2", kl_coef=2e-2)
    (ours,) = torch.autograd.grad(found.loss, logprob)
    assert 0 < (theirs == 0).sum() < 40, "nothing was masked; the test shows less"
    same([ours], [theirs])


@pytest.mark.usefixtures("no_compilation")
def test_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = needs("torchtitan.components.loss", "torchtitan")
    experiments = needs("torchtitan.experiments", "torchtitan")
    without_init(monkeypatch, experiments, "rl")  # vLLM
    dapo = importlib.import_module("torchtitan.experiments.rl.losses.dapo")
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    hidden, labels = draws(2, 8, HIDDEN, grad=True), ids(2, 8)
    loss_mask = draws(2, 8, seed=3) > -0.5
    current = torch.log_softmax(head(hidden), -1).gather(-1, labels[..., None])[..., 0].detach()
    sampler = current + 0.3 * draws(2, 8, seed=4)
    sampler[0, 2] = float("nan")
    advantages = draws(2, 1, seed=5).expand(2, 8) * loss_mask

    def run(configured: Any) -> list[Tensor]:
        built = configured.build()
        built.set_lm_head(head)
        head.weight.grad = hidden.grad = None
        found, metrics = built(
            hidden, labels, 11.0, generator_logprobs=sampler, advantages=advantages, loss_mask=loss_mask
        )
        found.backward()
        return [found.detach(), metrics["loss/mean"], hidden.grad, head.weight.grad]  # type: ignore[list-item]

    inner = dapo.DAPOLoss.Config(ratio_clip_low=0.2, ratio_clip_high=0.28)
    theirs = run(loss.ChunkedLossWrapper.Config(num_chunks=2, loss_fn=inner))
    same(run(recipe("torchtitan")["FusedPolicyLoss"].Config()), theirs)


@pytest.mark.usefixtures("no_compilation")
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_unsloth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, softcap: float) -> None:
    monkeypatch.setenv("UNSLOTH_IS_PRESENT", "1")
    monkeypatch.setenv("UNSLOTH_FORCE_CPU", "1")
    monkeypatch.setenv("UNSLOTH_COMPILE_LOCATION", str(tmp_path))
    module = needs("unsloth_zoo.fused_losses.fused_linear", "Unsloth")
    entry = needs("unsloth_zoo.rl_replacements", "Unsloth")
    monkeypatch.setattr(module, "fused_linear_logprobs", module.fused_linear_logprobs)
    hidden, head, bias = draws(2, 9, HIDDEN, grad=True), draws(VOCABULARY, HIDDEN, grad=True), draws(VOCABULARY)
    target = ids(2, 9)

    def of_grpo() -> list[Tensor]:
        found = entry.chunked_hidden_states_selective_log_softmax(
            hidden, head, target, temperature=0.8, logit_softcapping=softcap, lm_head_bias=bias
        )
        return scored(found, None, hidden, head)

    def with_entropy() -> list[Tensor]:
        found = module.fused_linear_logprobs(
            hidden, head, target, temperature=0.8, logit_softcapping=softcap, return_entropy=True
        )
        return scored(*found, hidden, head)

    theirs = of_grpo() + with_entropy()
    recipe("Unsloth")
    same(of_grpo() + with_entropy(), theirs)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_compilation", "one_rank")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_slime(temperature: float) -> None:
    module = needs("slime.backends.megatron_utils.loss", "slime")
    mpu = importlib.import_module("megatron.core").mpu
    mpu.initialize_model_parallel()
    try:
        totals, responses = [9, 6, 12], [4, 5, 7]
        logits = (2 * draws(1, sum(totals), VOCABULARY)).requires_grad_()
        tokens = [ids(total, seed=k) for k, total in enumerate(totals)]
        masks = [torch.ones(n) for n in responses]
        masks[2][1:3] = 0  # a tool's answer
        batch: dict[str, Any] = {
            "unconcat_tokens": tokens,
            "total_lengths": totals,
            "response_lengths": responses,
            "advantages": [draws(1, seed=k).expand(n) for k, n in enumerate(responses)],
            "loss_masks": masks,
            "rollout_mask_sums": [masks[0].sum() + masks[1].sum()] * 2 + [masks[2].sum()],
        }
        args = Namespace(
            rollout_temperature=temperature, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None, entropy_coef=0.01,
            use_rollout_logprobs=False, use_opsm=False, advantage_estimator="grpo", get_mismatch_metrics=False,
            use_tis=False, use_kl_loss=False, calculate_per_token_loss=False, allgather_cp=False,
            log_probs_chunk_size=-1, rollout_top_p=1.0, qkv_format="thd", use_rollout_top_p_mask=False,
        )  # fmt: skip
        reduce = module.get_sum_of_sample_mean(totals, responses, masks, batch["rollout_mask_sums"], False)
        with torch.no_grad():
            _, now = module.get_log_probs_and_entropy(
                logits, args=args, unconcat_tokens=tokens, total_lengths=totals, response_lengths=responses
            )
        batch["log_probs"] = [x + 0.3 * draws(len(x), seed=20 + k) for k, x in enumerate(now["log_probs"])]

        def run(function: Any) -> list[Tensor]:
            given = logits.detach().clone().requires_grad_()
            found, metrics = function(args, batch, given, reduce)
            (grad,) = torch.autograd.grad(found, given)
            return [found.detach(), metrics["loss"], grad]

        same(run(recipe("slime")["loss"]), run(module.policy_loss_function))
    finally:
        mpu.destroy_model_parallel()


@pytest.mark.usefixtures("no_compilation")
def test_areal(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = needs("areal.engine.fsdp_engine", "AReaL")
    functional = needs("areal.utils.functional", "AReaL")
    monkeypatch.setattr(engine, "gather_logprobs_entropy", engine.gather_logprobs_entropy)
    logits, labels = (2 * draws(15, VOCABULARY)).requires_grad_(), ids(15)
    theirs = scored(*functional.gather_logprobs_entropy(logits, labels, 0.7), logits)
    names = recipe("AReaL")
    same(scored(*engine.gather_logprobs_entropy(logits, labels, 0.7), logits), theirs)
    old = -draws(40, seed=1).abs()
    logprob = (old + 0.8 * draws(40, seed=2)).requires_grad_()
    given = {"advantages": draws(40, seed=3), "prox_logp": old, "loss_mask": (draws(40, seed=4) > -1).int()}
    expected, _ = functional.ppo_actor_loss_fn(
        logprob, old, old, given["advantages"], 0.2, given["loss_mask"].bool(), c_clip=3.0
    )
    found = names["loss"](logprob, torch.zeros(40), given)
    ours, yours = (torch.autograd.grad(x, logprob)[0] for x in (found, expected))
    same([found.detach(), ours], [expected.detach(), yours])
