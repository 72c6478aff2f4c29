"""A run that trains a LoRA adapter: the gradient by its formula, and what sampler, checkpoint and export hold.

The policy is computed here with plain transformers on ``W + s B A``, by hand.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from rolltree.engine import UserError, load_config
from rolltree.engine.app.assembly.sampling import sampled_model
from rolltree.engine.app.dry_run import plan_lines
from rolltree.engine.errors import RunError
from rolltree.engine.model import lora
from rolltree.engine.train import checkpoint

from ...support.picture_models import make_models
from ...support.real_step import Steps, Update, along, leaves_of, take_steps

RANK, ALPHA = 4, 8.0
SCALE = ALPHA / RANK**0.5
ADAPTER = f"--model.lora={{rank={RANK}, alpha={ALPHA}}}"
FAST = ("--trainer.lr=0.05", "--trainer.max_tokens=4096", "--algorithm.objective=dapo", "--trainer.prompts_per_step=8")
NEAR = (ADAPTER, *FAST, "--roles.reference={}", "--algorithm.objective_options={kl_coef=0.1}")
NO_STEPS = ("trainer.steps",)


@pytest.fixture(scope="module")
def two_steps(toml, tmp_path_factory) -> tuple[Steps, Path]:
    """Two steps with a reference; the second begins with an adapter that is not zero."""
    folder = tmp_path_factory.mktemp("steps")
    return take_steps(toml, folder, *NEAR, "--trainer.steps=2", unset=NO_STEPS), folder / "runs/tiny"


def base_model(toml: Path) -> Any:
    path = toml.parent / "model"
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def of_policy(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return W + s B A for every layer with an adapter, by its name in the plain ``model``."""
    plain, found = dict(model.named_parameters()), {}
    for name in weights:
        layer, _, rest = name.partition(".lora_A.")
        if rest:
            a, b = weights[name], weights[name.replace("lora_A", "lora_B")]
            found[f"{layer}.weight"] = plain[f"{layer}.weight"].detach() + SCALE * b @ a
    return found


def logprobs(model: Any, changed: dict[str, Tensor], tree: Any, leaf: int) -> Tensor:
    path = tree.path_rows(leaf)
    ids, first = torch.from_numpy(tree.token_id[path].astype(np.int64)), int(tree.leaf_prompt[leaf])
    logits = functional_call(model, changed, args=(), kwargs={"input_ids": ids[None]}).logits[0, first - 1 : -1]
    return torch.log_softmax(logits.float(), -1).gather(1, ids[first:, None])[:, 0]


def adapter_of(update: Update) -> dict[str, Tensor]:
    return {name: w.clone().requires_grad_() for name, w in update.weights.items() if ".lora_" in name}


@pytest.mark.check
def test_the_gradient_of_the_adapter_is_that_of_the_formula(toml, two_steps):
    """DAPO's loss on policy, and 0.1 times the k3 estimate of the KL to the model without adapter."""
    steps, _ = two_steps
    model, update = base_model(toml), steps.updates[1]
    adapter = adapter_of(update)
    parts = []
    for tree, leaf in leaves_of(update.trees):
        lp = logprobs(model, of_policy(model, adapter), tree, leaf)
        with torch.no_grad():
            reference = logprobs(model, {}, tree, leaf)
        gap = reference - lp
        parts.append(-float(tree.advantage[leaf]) * (lp - lp.detach()).exp() + 0.1 * (gap.exp() - gap - 1))
    loss = torch.cat(parts).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in adapter.values()]).norm()
    off = torch.stack([(update.gradient[name] - p.grad).norm() for name, p in adapter.items()]).norm()
    assert min(p.grad.norm() for p in adapter.values()) > 0  # of A too: B is no longer zero
    assert off <= 2e-4 * norm, off / norm
    assert abs(update.loss - loss.item()) <= 2e-4


def test_only_the_adapter_is_trained(toml, two_steps):
    steps, _ = two_steps
    plain = dict(base_model(toml).named_parameters())
    moved = 0
    for name, p in steps.orchestrator.learner.model.named_parameters():
        if ".lora_" in name:
            moved += not torch.equal(p, steps.updates[0].weights[name])
        else:
            assert torch.equal(p, plain[name.replace(".base_layer.", ".")]), name
    trainer = steps.orchestrator.learner.trainer
    assert moved == len(trainer._masters) == 2 * 2 * 7  # A and B of seven matrices of two layers


def test_the_samplers_log_probs_are_those_of_the_sum(toml, two_steps):
    steps, _ = two_steps
    model, moved = base_model(toml), 0.0
    for number, update in enumerate(steps.updates):
        for tree, leaf in leaves_of(update.trees):
            with torch.no_grad():
                policy = logprobs(model, of_policy(model, update.weights), tree, leaf)
                moved += number * float((policy - logprobs(model, {}, tree, leaf)).abs().max())
            torch.testing.assert_close(along(tree, leaf, "behaviour_logprob"), policy, atol=2e-5, rtol=1e-5)
    assert moved > 0.1  # the adapter says something, so the comparison is not with the model itself


def test_the_reference_is_the_model_without_its_adapter(toml, two_steps):
    steps, _ = two_steps
    (role,) = steps.orchestrator.learner.roles
    assert role.weights is None  # no copy
    model = base_model(toml)
    for tree, leaf in leaves_of(steps.updates[1].trees):
        with torch.no_grad():
            plain = logprobs(model, {}, tree, leaf)
        torch.testing.assert_close(along(tree, leaf, "ref_logprob"), plain, atol=2e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_reference_that_follows_is_a_copy_of_the_adapter(toml, tmp_path):
    flags = (
        ADAPTER,
        *FAST,
        "--trainer.steps=3",
        "--roles.reference={ema=0.5}",
        "--algorithm.objective_options.kl_coef=0.1",
    )
    steps = take_steps(toml, tmp_path, *flags, unset=NO_STEPS)
    (role,) = steps.orchestrator.learner.roles
    assert role.weights is not None
    assert role.weights.keys() == adapter_of(steps.updates[0]).keys()
    first, second, third = (adapter_of(update) for update in steps.updates)
    after = {name: 0.5 * (0.5 * first[name] + 0.5 * second[name]) + 0.5 * third[name] for name in first}
    model = base_model(toml)
    for tree, leaf in leaves_of(steps.updates[2].trees):
        with torch.no_grad():
            wanted = logprobs(model, of_policy(model, after), tree, leaf)
        torch.testing.assert_close(along(tree, leaf, "ref_logprob"), wanted, atol=2e-5, rtol=1e-5)


def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(two_steps):
    steps, directory = two_steps
    path = checkpoint.latest(directory / "checkpoints")
    assert path is not None
    tensors = checkpoint.read_tensors(path / checkpoint.LEARNER)
    assert {name.partition(".")[0] for name in tensors} == {"weight", "step", "exp_avg", "exp_avg_sq"}
    assert all(".lora_" in name for name in tensors)
    adapter = {name for name in tensors if name.startswith("weight.")}
    assert len(adapter) == 28
    assert len(tensors) == 4 * len(adapter)
    for name, p in steps.orchestrator.learner.model.named_parameters():
        if ".lora_" in name:
            assert torch.equal(tensors[f"weight.{name}"], p)


def test_the_export_is_the_sum_for_transformers_and_the_adapter_for_peft(toml, two_steps):
    steps, directory = two_steps
    model = base_model(toml)
    ids = torch.tensor([steps.updates[0].trees[0].token_id[:6].tolist()])
    with torch.no_grad():
        adapter = dict(steps.orchestrator.learner.model.named_parameters())
        wanted = functional_call(model, of_policy(model, adapter), (), {"input_ids": ids}).logits
        plain = AutoModelForCausalLM.from_pretrained(directory / "export", attn_implementation="eager").eval()
        alone = peft.PeftModel.from_pretrained(base_model(toml), str(directory / "export" / "adapter")).eval()
        torch.testing.assert_close(plain(ids).logits, wanted, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(alone(ids).logits, wanted, atol=2e-5, rtol=1e-5)
        assert (model(ids).logits - wanted).abs().max() > 0.01
    assert not any("lora" in name for name in load_file(directory / "export" / "model.safetensors"))


def test_an_adapter_does_not_go_on_above_other_weights(toml, two_steps, tmp_path):
    shutil.copytree(two_steps[1].parent, tmp_path / "runs")
    file = toml.parent / "model" / "model.safetensors"
    before, weights = file.read_bytes(), load_file(file)
    weights["model.norm.weight"][3] += 1e-6
    try:
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match="adapter was trained on other weights"):
            take_steps(toml, tmp_path, *NEAR, "--trainer.steps=3", unset=NO_STEPS, resume=True)
    finally:
        file.write_bytes(before)


LAGS = ("--loop.staleness=1", "--loop.overlap=true", "--trainer.steps=3")


class TestASamplerOfItsOwn:
    @pytest.mark.check
    def test_it_holds_the_adapter_itself(self, toml, tmp_path):
        """A and B bit for bit, also where a step is far below the spacing of bf16 weights, in which their sum would be
        rounded."""
        steps = take_steps(toml, tmp_path, ADAPTER, *FAST, *LAGS, unset=NO_STEPS)
        run = steps.orchestrator
        held, trained = (dict(model.named_parameters()) for model in (run.sampler.engine.model, run.learner.model))
        model = base_model(toml)
        assert held.keys() == trained.keys() != dict(model.named_parameters()).keys()
        assert all(held[name] is not trained[name] and torch.equal(held[name], trained[name]) for name in trained)
        assert any(".lora_B." in name and p.abs().max() > 0 for name, p in held.items())
        assert not any(p.requires_grad for p in held.values())
        assert run.controller.publication.difference is not None
        assert run.controller.publication.difference < 1e-4
        versions = {int(v) for tree in steps.trees for v in tree.policy_version[tree.loss_mask]}
        assert len(versions) > 1
        for tree, leaf in leaves_of(steps.trees):
            v = along(tree, leaf, "policy_version")
            if len(set(v.tolist())) == 1 and int(v[0]) < len(steps.updates):
                with torch.no_grad():
                    policy = logprobs(model, of_policy(model, steps.updates[int(v[0])].weights), tree, leaf)
                torch.testing.assert_close(along(tree, leaf, "behaviour_logprob"), policy, atol=2e-5, rtol=1e-5)

    @pytest.mark.check
    def test_an_update_below_the_spacing_of_bf16_is_sampled_from(self, toml, tmp_path):
        flags = ("--model.dtype=bfloat16", "--trainer.lr=1e-7")
        run = take_steps(toml, tmp_path, ADAPTER, *FAST, *LAGS, *flags, unset=NO_STEPS).orchestrator
        held, learned = run.sampler.engine.model, run.learner.model
        sums, base = lora.merged(learned), dict(base_model(toml).bfloat16().named_parameters())
        adapted = [f"{name}.weight" for name, _ in lora.adapted_layers(learned)]
        kept = [(sums[name] != base[name]).float().mean() for name in adapted]
        assert max(kept) < 0.02  # their sum would have lost all but some updates of the smallest weights
        sides = [name for name, _ in held.named_parameters() if ".lora_B." in name]
        assert any(held.get_parameter(name).abs().max() > 0 for name in sides)
        assert all(torch.equal(held.get_parameter(name), learned.get_parameter(name)) for name in sides)

    def test_the_canary_finds_a_sampler_without_the_adapter(self, toml, tmp_path, monkeypatch):
        """The digests agree, as the weights are those that were sent; the policy is another one."""

        def without(*given):
            model = sampled_model(*given)
            lora.use_adapter(model, None)
            return model

        monkeypatch.setattr("rolltree.engine.app.assembly.run.sampled_model", without)
        with pytest.raises(RunError, match="log-probs of a canary prompt differ"):
            take_steps(toml, tmp_path, ADAPTER, *FAST, *LAGS, unset=NO_STEPS)

    def test_the_digests_find_a_sampler_that_was_not_told(self, toml, tmp_path, monkeypatch):
        monkeypatch.setattr("rolltree.engine.rollout.native.engine._copy_weights", lambda model, weights: None)
        with pytest.raises(RunError, match="holds other weights than were sent"):
            take_steps(toml, tmp_path, ADAPTER, *FAST, *LAGS, unset=NO_STEPS)


def test_a_critic_learns_beside_an_adapter(toml, tmp_path):
    flags = (ADAPTER, *FAST, "--roles.critic={}", "--algorithm.advantage=gae")
    steps = take_steps(toml, tmp_path, *flags, unset=("algorithm.advantage",))
    critic = steps.orchestrator.learner.critic
    assert critic is not None
    assert not any(".lora_" in name for name, _ in critic.model.named_parameters())
    assert critic.model.value_head.weight.abs().max() > 0


def test_bfloat16_weights_have_fp32_masters_of_the_adapter_alone(toml, tmp_path):
    steps = take_steps(toml, tmp_path, ADAPTER, *FAST, "--model.dtype=bfloat16")
    trainer = steps.orchestrator.learner.trainer
    assert {m.dtype for m in trainer._masters} == {torch.float32}
    assert {p.dtype for _, p in trainer._named} == {torch.bfloat16}
    assert any(not torch.equal(p, steps.updates[0].weights[name]) for name, p in trainer._named)


def test_a_vision_tower_has_no_adapter():
    model, _ = make_models("qwen3_vl")
    names = {name for name, _ in model.named_parameters()}
    with pytest.raises(UserError, match="'qkv', and no linear layer"):  # the tower alone has one
        lora.find_targets(model, ["qkv"])
    lora.add_lora(model, rank=2, alpha=2.0, rslora=True, targets="all-linear")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 3 * 7  # A and B of seven matrices of three layers
    assert all(".language_model.layers." in name for name in trained)
    assert lora.merged(model).keys() == names


class TestMistakes:
    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (("--model.lora={targets=['q']}",), "'q', and no linear layer of the model is called so"),
            (("--model.lora={targets=['lm_head']}",), "whose weight is the embedding's too"),
            (("--model.lora={targets=[]}",), "at least one linear layer"),
            (("--model.lora={rank=0}",), "greater than 0"),
        ],
    )
    def test_a_dry_run_finds(self, toml, flags, said):
        with pytest.raises(UserError, match=said):
            list(plan_lines(load_config(toml, flags)))

    def test_a_dry_run_tells_the_size(self, toml):
        lines = "\n".join(plan_lines(load_config(toml, ["--model.lora={rank=4, targets=['q_proj']}"])))
        assert f"adapter            LoRA of rank 4, {2 * 4 * (32 + 32) / 1e6:.2f} M trained" in lines

    def test_peft_must_be_there(self, toml, monkeypatch):
        monkeypatch.setattr(lora.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"install rolltree\[lora\]"):
            lora.check_installed()
