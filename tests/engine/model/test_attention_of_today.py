"""Sinks, narrow values, chunks, logit scales and layers that hand nothing on: trees equal plain Transformers."""

from __future__ import annotations

import copy
import threading
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams, backward, batch_logprob, pack, skip_check
from rolltree.engine.model import attention
from rolltree.kernels import Objective, Term, tree_attention, use_backend
from rolltree.kernels.libraries import load_library

from .test_tree_equals_flat import TEMPERATURE, close, flat_logprobs, random_tree

SMALL: dict[str, Any] = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None, bos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=6
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
OWN: dict[str, dict[str, Any]] = {
    "nemotron": {},
    "stablelm": {},
    "phimoe": EXPERTS | {"sliding_window": 6},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "gpt_oss": EXPERTS | {"head_dim": 16, "sliding_window": 6},
    "granite_swa": {"head_dim": 16, "sliding_window": 6},
    "deepseek_v3": LATENT
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"first_k_dense_replace": 1},
    "minicpm3": LATENT,
    "gemma4_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 6, "head_dim": 16}
    | {"global_head_dim": 512, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "llama4_text": EXPERTS
    | {"head_dim": 16, "attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.5, "attn_temperature_tuning": True}
    | {"intermediate_size_mlp": 32, "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]},
}
IN_ENGINE = [name for name in OWN if name != "llama4_text"]


def models(name: str) -> tuple[Any, Any]:
    """Return equal weights under rolltree's and under Transformers' eager attention; sinks are not 0."""
    both = []
    for implementation in ("rolltree", "eager"):
        config = AutoConfig.for_model(name, **SMALL | OWN[name])
        torch.manual_seed(0)
        both.append(AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval())
    for key, parameter in both[0].named_parameters():
        if key.endswith("sinks"):
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    both[1].load_state_dict(both[0].state_dict())
    return both[0], both[1]


def learn(model: Any, max_tokens: int = 4096) -> list[Tensor]:
    """Return the gradients of two packed trees' negative log-likelihood, of each leaf apart."""
    trees = [random_tree(1, 3, 9), random_tree(2, 3, 4)]
    for batch in pack(trees, max_tokens=max_tokens, in_pieces=max_tokens < 100):
        fields = batch.fields(Objective.preset("reinforce"), old_logprob=None, ref_logprob=None)
        backward(model, batch, [Term(fields, Objective.preset("reinforce"), 3.0)], temperature=TEMPERATURE)
    return [p.grad for p in model.parameters() if p.requires_grad]


def learn_flat(model: Any) -> list[Tensor]:
    loss = torch.zeros(())
    for tree in (random_tree(1, 3, 9), random_tree(2, 3, 4)):
        for s, flat in zip(tree.flatten(), flat_logprobs(model, tree)[0], strict=True):
            mask = torch.from_numpy(s.loss_mask)
            loss = loss - s.advantage * (flat * mask).sum() / 3.0
    loss.backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


def equal(mine: list[Tensor], theirs: list[Tensor], bound: float = 1e-5) -> None:
    """Compare gradients; one that is 0 in exact arithmetic has no relative error."""
    size = torch.stack([g.norm() for g in theirs if g is not None]).norm()
    for a, b in zip(mine, theirs, strict=True):
        if b is not None:
            assert (a - b).norm() <= bound * max(float(b.norm()), 1e-2 * float(size))


@pytest.mark.slow(but=6)
@pytest.mark.check(but=3)
@pytest.mark.parametrize("name", OWN)
def test_logprobs_and_gradients(name: str) -> None:
    ours, theirs = models(name)
    trees = [random_tree(1, 3, 9), random_tree(2, 3, 4)]
    (batch,) = pack(trees, max_tokens=4096)
    got = batch_logprob(ours, batch, temperature=TEMPERATURE).logprob
    for tree, mine in zip(trees, batch.to_leaves(got.detach()), strict=True):
        for values, flat in zip(mine, flat_logprobs(theirs, tree)[0], strict=True):
            close(values, flat)
    if name == "gemma4_text":  # whose plain gradients in fp32 are 4e-5 from those in fp64
        ours, theirs = ours.double(), theirs.double()
        theirs.set_attn_implementation("sdpa")  # eager attention rounds to fp32
    # granite's gradients amplify the rounding of the CPU's products: 6e-6 apart with AVX-512, 1.1e-5 with SSE
    equal(learn(ours), learn_flat(theirs), 2e-5 if name == "granite_swa" else 1e-5)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")),
        "triton",
        "reference",
    ],
)
def test_wide_heads_and_narrow_values_with_sinks(backend: str) -> None:
    """Both directions of every backend are as close to fp64 as rounding allows."""
    torch.manual_seed(0)
    end = torch.full((60,), 60, dtype=torch.int32)
    for begin, stop in ((15, 40), (22, 33), (40, 58)):
        end[begin:stop] = stop
    for width, of_values in ((512, 512), (24, 16)):
        exact = [
            torch.randn(s, dtype=torch.float64) for s in ((60, 2, width), (60, 1, width), (60, 1, of_values), (2,))
        ]
        grad = torch.randn(60, 2, of_values, dtype=torch.float64)
        results = []
        for dtype, name in ((torch.float64, "reference"), (torch.float32, backend)):
            inputs = [x.to(dtype).requires_grad_() for x in exact]
            with use_backend(name):
                out = tree_attention(*inputs[:3], end, sink=inputs[3])
                results.append([out, *torch.autograd.grad(out, inputs, grad.to(dtype))])
        for want, got in zip(*results, strict=True):
            assert (got - want).norm() < 2e-6 * want.norm()
        q, k, v, sink = exact
        score = torch.einsum("ihd,jhd->hij", q, k.expand(-1, 2, -1)) * width**-0.5
        row = torch.arange(60)
        seen = (row <= row[:, None]) & (row[:, None] < end)
        score = torch.cat([score.masked_fill(~seen, -torch.inf), sink[:, None, None].expand(2, 60, 1)], -1)
        dense = torch.einsum("hij,jhd->ihd", score.softmax(-1)[..., :-1], v.expand(-1, 2, -1))
        assert (results[0][0] - dense).norm() < 1e-12 * dense.norm()


@pytest.mark.parametrize("name", ["nemotron", "gpt_oss", "llama4_text", "deepseek_v3"])
def test_pieces_checkpointing_and_lora(name: str) -> None:
    """Recomputed layers get the tree back, in the thread of another backward too."""
    ours, theirs = models(name)
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    ours, theirs = (peft.get_peft_model(m, copy.deepcopy(config)) for m in (ours, theirs))
    theirs.load_state_dict(ours.state_dict())
    wanted = learn_flat(theirs.eval())
    equal(learn(ours.eval(), max_tokens=40), wanted)
    ours.zero_grad()
    ours.train()
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    ours.enable_input_require_grads()
    (batch,) = pack([random_tree(1, 3, 9), random_tree(2, 3, 4)], max_tokens=4096)
    logprob = batch_logprob(ours, batch, temperature=TEMPERATURE).logprob
    fields = batch.fields(Objective.preset("reinforce"), old_logprob=None, ref_logprob=None)
    weight = torch.autograd.grad(_surrogate(logprob, fields), logprob, retain_graph=True)[0]
    thread = threading.Thread(target=logprob.backward, args=(weight,))
    thread.start()
    thread.join()
    equal([p.grad for p in ours.parameters() if p.requires_grad], wanted)


def _surrogate(logprob: Tensor, fields: Any) -> Tensor:
    from rolltree.kernels import policy_loss

    return policy_loss(logprob, fields, Objective.preset("reinforce"), normalizer=3.0).loss


@pytest.mark.parametrize(
    ("name", "part", "value"),
    [
        ("gpt_oss", "s_aux", None),
        ("gpt_oss", "sliding_window", None),
        ("llama4_text", "attention_chunk_size", 64),
        ("cohere", "logit_scale", 1.0),
    ],
)
def test_what_is_ignored_is_found_out(monkeypatch: Any, name: str, part: str, value: Any) -> None:
    """A sink, window, chunk or scale left out, below the check: the check refuses the model."""
    ours, _ = models(name)
    (batch,) = pack([random_tree(1, 3, 9)], max_tokens=4096)
    if part == "logit_scale":
        monkeypatch.setattr("rolltree.engine.model.head.SCALES", {})
    else:
        packed = attention._packed
        option = {"s_aux": "sink", "sliding_window": "window", "attention_chunk_size": "chunk"}[part]
        monkeypatch.setattr(attention, "_packed", lambda *a: packed(*a[:-1], a[-1]._replace(**{option: value})))
    with pytest.raises(ValueError, match="gives other log-probs on packed trees"):
        batch_logprob(ours, batch)
    skip_check(ours)
    batch_logprob(ours, batch)


def test_a_prepared_mask_without_a_tree_is_refused() -> None:
    ours, _ = models("nemotron")
    with pytest.raises(ValueError, match="NemotronAttention got the prepared mask of a tree and no tree"):
        ours(input_ids=torch.ones(1, 5, dtype=torch.long), attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    config = AutoConfig.for_model("bloom", vocab_size=97, hidden_size=32, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="rolltree").eval()
    (batch,) = pack([random_tree(1, 3, 9)], max_tokens=4096)
    with pytest.raises(ValueError, match="BloomForCausalLM cannot be computed on packed trees"):
        batch_logprob(model, batch)


def test_gradient_of_the_sink_in_fp64() -> None:
    torch.manual_seed(0)
    end = torch.tensor([8, 5, 4, 4, 5, 8, 7, 8], dtype=torch.int32)
    shapes = (8, 4, 3), (8, 2, 3), (8, 2, 2), (4,)
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(lambda q, k, v, sink: tree_attention(q, k, v, end, sink=sink), inputs)


@pytest.mark.slow(but=5)
@pytest.mark.check(but=2)
@pytest.mark.parametrize("name", IN_ENGINE)
def test_greedy_answers_are_those_of_generate(name: str) -> None:
    ours, theirs = models(name)
    prompts = [[5, 9, 33, 2, 7], [5, 9, 33, 2, 7, 41, 8, 8, 1]]
    for kv_tokens in (512, 44):  # the second preempts
        engine = NativeEngine(ours, config=EngineConfig(page_size=4, kv_tokens=kv_tokens))
        trees = engine.generate(prompts, SamplingParams(n=2, temperature=0.0, max_new_tokens=12, ignore_eos=True))
        for prompt, tree in zip(prompts, trees, strict=True):
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            want = theirs.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
            for leaf in tree.flatten():
                assert list(leaf.response) == want[0, len(prompt) :].tolist()
