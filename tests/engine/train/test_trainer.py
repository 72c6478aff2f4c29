"""The trainer against plain torch: micro-batching, warm-up, bf16 masters, bad steps, and exact state."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rolltree.engine import batch_loss, pack, skip_check
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import RunError, UserError
from rolltree.engine.model import loss
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.terms import TokenTerm
from rolltree.engine.train.trainer import Trainer, Weighted
from rolltree.kernels import Objective

from ...support.tiny import train_step

GRPO = Objective.preset("dapo")
CONFIG = TrainerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05)


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="rolltree").to(dtype)


def make_trees(seed=0, count=3):
    generator = torch.Generator().manual_seed(seed)
    trees = []
    for _ in range(count):
        ids = torch.randint(0, 61, (4, 6), generator=generator)
        ids[1, :3] = ids[0, :3]
        logprob = -4 - torch.rand(4, 6, generator=generator)  # the model's are about -4.1: some ratios are clipped
        logprob[1, :3] = logprob[0, :3]
        trees.append(
            TokenTree.from_sequences(
                [1, 2, 3], ids.tolist(), advantages=[1.0, -1.0, 0.5, -0.5], behaviour_logprobs=logprob.numpy()
            )
        )
    return trees


BATCHES = pack(make_trees(), max_tokens=10_000)
TOKENS = float(sum(b.loss_tokens for b in BATCHES))


def test_an_update_without_a_micro_batch_is_refused():
    trainer = Trainer(make_model(), CONFIG)
    with pytest.raises(ValueError, match="call forward_backward for each micro-batch first"):
        trainer.optim_step()
    assert trainer.updates == 0


def step(trainer, batches=BATCHES, on_policy=True, normalizer=TOKENS):
    return train_step(trainer, batches, [Weighted(TokenTerm(GRPO), normalizer)], temperature=0.9, on_policy=on_policy)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("on_policy", [True, False])
def test_two_steps_are_plain_adamw(on_policy):
    model, plain = make_model(), make_model()
    trainer = Trainer(model, CONFIG)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=CONFIG.betas, weight_decay=0.1, foreach=False)
    for _ in range(2):
        metrics = step(trainer, on_policy=on_policy)
        (batch,) = BATCHES
        old = None if on_policy else batch.behaviour_logprob
        loss = batch_loss(plain, batch, GRPO, normalizer=TOKENS, temperature=0.9, old_logprob=old).loss
        loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in plain.parameters()))
        assert norm > 0.05  # clipping acts
        for p in plain.parameters():
            p.grad *= 0.05 / norm
        optimizer.step()
        optimizer.zero_grad()
        assert metrics["actor/grad_norm"][0] == pytest.approx(norm.item(), rel=1e-5)
        assert metrics["actor/loss"][0] == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    for mine, theirs in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)
    assert trainer.updates == 2


def test_micro_batches_make_no_difference():
    whole, parts = Trainer(make_model(), CONFIG), Trainer(make_model(), CONFIG)
    small = pack(make_trees(), max_tokens=30)
    assert len(small) == 3
    a, b = step(whole), step(parts, small)
    for name in a:
        mean, other = (float(m[name][0]) / float(m[name][1]) for m in (a, b))
        assert other == pytest.approx(mean, rel=1e-4, abs=1e-6), name
    for mine, other in zip(weights(whole.model), weights(parts.model), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_the_measured_share_of_clipped_rows_is_in_the_next_plan():
    trainer = Trainer(make_model(), TrainerConfig(lr=1e-9))
    first, second = (step(trainer, on_policy=False) for _ in range(2))
    clipped, computed = first["actor/pg_clipfrac"][0], first["actor/ppo_kl"][1]
    assert 0 < clipped < computed
    flop = second["perf/head_tflop"][0] / first["perf/head_tflop"][0]
    assert flop == pytest.approx((2 + 4 * (1 - clipped / computed)) / 6)


def test_warm_up_is_linear_and_reported():
    trainer = Trainer(make_model(), TrainerConfig(lr=0.4, lr_warmup_steps=4, max_grad_norm=1e-9))
    assert [step(trainer)["actor/lr"][0] for _ in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_bf16_model_keeps_fp32_masters():
    """An update far below bf16's resolution is not lost, and the model is always the rounded master."""
    trainer = Trainer(make_model(torch.bfloat16), TrainerConfig(lr=1e-5))
    before = weights(trainer.model)
    for _ in range(3):
        step(trainer)
    tensors, _ = trainer.state_dict()
    moved = 0
    for (name, parameter), old in zip(trainer.model.named_parameters(), before, strict=True):
        master = tensors[f"weight.{name}"]
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), parameter)
        assert parameter.grad is None
        moved += int((master != old.float()).sum())
    assert moved > 0.9 * sum(p.numel() for p in before if p.dim() == 2 and p.shape[0] != 61)


@pytest.mark.parametrize("max_tokens", [30, 14])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_gradient_is_summed_in_place(dtype, max_tokens, monkeypatch):
    """Micro-batches and pieces add to one fp32 tensor, which in bf16 is never rounded."""
    trainer, given, known = Trainer(make_model(dtype), CONFIG), [], {}
    head = trainer.model.lm_head.weight
    master = head if dtype == torch.float32 else trainer._masters[trainer._head]
    linear_terms_loss, clip = loss.linear_terms_loss, torch.nn.utils.clip_grad_norm_

    def spy(*args, weight_grad=None, in_forward=False, **options):
        assert (weight_grad is None) == (not in_forward)
        given.append(weight_grad)
        return linear_terms_loss(*args, weight_grad=weight_grad, in_forward=in_forward, **options)

    def look(masters, most):
        known["grad"] = master.grad
        known["value"] = master.grad.clone()
        return clip(masters, most)

    monkeypatch.setattr(loss, "linear_terms_loss", spy)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", look)
    small = pack(make_trees(), max_tokens=max_tokens, in_pieces=True)
    assert any(batch.pieces for batch in small) == (max_tokens == 14)
    step(trainer, small)
    assert len(given) >= 3
    assert head.grad is None
    first = [None] if dtype == torch.float32 else [known["grad"]]
    assert all(a is b for a, b in zip(given, first + [known["grad"]] * (len(given) - 1), strict=True))
    plain = make_model(torch.float64)
    plain.load_state_dict({name: w.double() for name, w in make_model(dtype).state_dict().items()})
    for batch in small:
        whole = pack(batch.trees, max_tokens=1000)[0]
        batch_loss(plain, whole, GRPO, normalizer=TOKENS, temperature=0.9, old_logprob=None).loss.backward()
    want = plain.lm_head.weight.grad
    error = (known["value"].double() - want).norm() / want.norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.03)
    if dtype == torch.bfloat16:
        assert (known["value"] != known["value"].bfloat16().float()).float().mean() > 0.9


@pytest.mark.parametrize("where", ["weight", "loss"])
def test_a_step_that_is_not_finite_changes_nothing(where):
    trainer = Trainer(make_model(), TrainerConfig(lr=1e-2, max_bad_steps=3))
    step(trainer)
    before, (tensors, _) = weights(trainer.model), trainer.state_dict()
    state = {name: t.clone() for name, t in tensors.items()}
    bad = make_trees()
    bad[0].advantage[0] = float("nan")
    batches = pack(bad, max_tokens=10_000)
    embedding = trainer.model.get_input_embeddings().weight
    for count in (1, 2):
        if where == "weight":
            with torch.no_grad():
                kept = embedding[5, 0].item()
                embedding[5, 0] = float("inf")
        metrics = step(trainer, batches if where == "loss" else BATCHES)
        if where == "weight":
            with torch.no_grad():
                embedding[5, 0] = kept
        assert metrics["actor/skipped_updates"] == (1.0, 1)
        assert "actor/grad_norm" not in metrics
        assert (trainer.updates, trainer.bad_steps) == (1, count)
    assert equal(weights(trainer.model), before)
    assert all(torch.equal(t, state[name]) for name, t in trainer.state_dict()[0].items())
    assert step(trainer)["actor/skipped_updates"] == (0.0, 1)  # a good one in between starts the count again
    assert trainer.bad_steps == 0
    for _ in range(2):
        step(trainer, pack(bad, max_tokens=10_000))
    with pytest.raises(RunError, match=r"not finite in 3 updates in a row"):
        step(trainer, pack(bad, max_tokens=10_000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_continues_to_the_same_bits(dtype):
    one = Trainer(make_model(dtype), CONFIG)
    step(one)
    step(one, pack(make_trees(1), max_tokens=10_000))
    tensors, counters = one.state_dict()
    saved = {name: t.clone() for name, t in tensors.items()}
    other = Trainer(make_model(dtype), CONFIG)
    pointers = [p.data_ptr() for p in other.model.parameters()]
    other.load_state_dict(saved, counters)
    assert [p.data_ptr() for p in other.model.parameters()] == pointers  # the rollout engine reads these
    for _ in range(2):
        step(one)
        step(other)
    assert equal(weights(one.model), weights(other.model))
    assert one.state_dict()[1] == other.state_dict()[1] == {"updates": 4, "bad_steps": 0}


def test_state_before_the_first_update():
    one, other = Trainer(make_model(), CONFIG), Trainer(make_model(), CONFIG)
    other.load_state_dict(*one.state_dict())
    step(one)
    step(other)
    assert equal(weights(one.model), weights(other.model))


def test_state_of_another_model_is_refused():
    trainer = Trainer(make_model(), CONFIG)
    tensors, counters = trainer.state_dict()
    missing = {name: t for name, t in tensors.items() if name != "weight.model.norm.weight"}
    with pytest.raises(UserError, match=r"model\.norm\.weight.*missing.*model\.path"):
        trainer.load_state_dict(missing, counters)
    other = tensors | {"weight.model.norm.weight": torch.ones(31)}
    with pytest.raises(UserError, match=r"model\.norm\.weight.*31.*32"):
        trainer.load_state_dict(other, counters)


def test_off_policy_needs_the_samplers_logprobs():
    trees = [TokenTree.from_sequences([1], [[2, 3], [4]], advantages=[1.0, -1.0])]
    with pytest.raises(ValueError, match="no recorded log-prob"):
        step(Trainer(make_model(), CONFIG), pack(trees, max_tokens=100), on_policy=False)


def test_gradient_checkpointing_gives_the_same_update():
    plain, saving = make_model(), make_model()
    saving.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls = []
    skip_check(saving)  # whose forwards would be counted
    layer = saving.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    step(Trainer(plain, CONFIG))
    step(Trainer(saving, CONFIG))
    assert len(calls) == 2  # forward, and again in the backward pass
    assert equal(weights(plain), weights(saving))


def test_model_is_shared_and_its_copy_is_not_touched():
    model = make_model()
    other = copy.deepcopy(model)
    before = weights(other)
    step(Trainer(model, CONFIG))
    assert equal(weights(other), before)
    assert not equal(weights(model), before)
