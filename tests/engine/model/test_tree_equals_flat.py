"""A packed tree gives the log-probabilities, loss and gradients of its flat sequences under plain transformers."""

import copy

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rolltree.engine import TokenTree, batch_logprob, batch_loss, pack
from rolltree.kernels import Objective

SMALL = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, attention_dropout=0.0, initializer_range=0.3,
)  # fmt: skip
CONFIGS = {
    "qwen3": Qwen3Config(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3-moe": Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, router_aux_loss_coef=0.1
    ),
    "llama": LlamaConfig(**SMALL),
    "mistral-window": MistralConfig(**SMALL, sliding_window=7),
    "gemma2-window-softcap": Gemma2Config(
        **{**SMALL, "sliding_window": 6, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}
    ),
    "gemma3-window": Gemma3TextConfig(**SMALL, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
}
TEMPERATURE = 0.8


def make_models(name: str):
    """The same weights under rolltree attention and under plain transformers."""
    config = copy.deepcopy(CONFIGS[name])  # from_config writes the attention into it
    torch.manual_seed(0)
    ours = AutoModelForCausalLM.from_config(config, attn_implementation="rolltree").eval()
    plain = "eager" if "softcap" in name else "sdpa"
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=plain).eval()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def random_tree(seed: int, depth: int, leaves: int) -> TokenTree:
    """A random tree: each response follows an earlier one up to a random point, then goes its own way."""
    rng = np.random.default_rng(seed)
    responses: list[list[int]] = []
    logprobs: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for i in range(leaves):
        ids: list[int] = []
        logprob, mask = np.zeros(0, np.float32), np.zeros(0, bool)
        if i and depth > 1 and rng.random() < 0.8:
            parent = int(rng.integers(i))
            cut = int(rng.integers(len(responses[parent]) + 1))
            ids, logprob, mask = responses[parent][:cut], logprobs[parent][:cut], masks[parent][:cut]
        new = int(rng.integers(0, 12 // max(1, depth // 2)))
        responses.append(ids + rng.integers(0, 97, new).tolist())
        logprobs.append(np.concatenate([logprob, rng.normal(-4, 1, new).astype(np.float32)]))
        masks.append(np.concatenate([mask, rng.random(new) < 0.8]))
    prompt = rng.integers(0, 97, rng.integers(1, 9)).tolist()
    return TokenTree.from_sequences(
        prompt, responses, advantages=rng.normal(size=leaves), behaviour_logprobs=logprobs, loss_masks=masks
    )


def flat_logprobs(
    model, tree: TokenTree, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs and entropies of every response token: the flat sequences as one right-padded batch."""
    sequences = tree.flatten()
    width = max(len(s.prompt) + len(s.response) for s in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, s in enumerate(sequences):
        length = len(s.prompt) + len(s.response)
        ids[i, :length] = torch.tensor(s.prompt + s.response)
        mask[i, :length] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.to(dtype) / TEMPERATURE
    log_p = F.log_softmax(logits[:, :-1], -1)
    logprob = log_p.gather(2, ids[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    responses = [slice(len(s.prompt) - 1, len(s.prompt) + len(s.response) - 1) for s in sequences]
    return [logprob[i, r] for i, r in enumerate(responses)], [entropy[i, r] for i, r in enumerate(responses)]


def close(ours: torch.Tensor, theirs: torch.Tensor, bound: float = 1e-5) -> None:
    assert (ours - theirs).norm() <= bound * max(theirs.norm().item(), 1e-6), (ours - theirs).norm() / theirs.norm()


@pytest.mark.slow(but=9)
@pytest.mark.check(but=3)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("seed", "depth", "leaves"), [(0, 1, 5), (1, 3, 40), (2, 6, 200)])
def test_logprob_and_gradients(name, seed, depth, leaves):
    """grpo with clipping active: gradients of the old log-probs' ratio, weighted per sequence."""
    ours, theirs = make_models(name)
    trees = [random_tree(seed, depth, leaves), random_tree(seed + 100, depth, 3)]
    (batch,) = pack(trees, max_tokens=100_000)
    objective = Objective.preset("grpo", entropy_coef=0.01)

    got = batch_logprob(ours, batch, temperature=TEMPERATURE)
    old = got.logprob.detach() + torch.randn(len(batch.row), generator=torch.Generator().manual_seed(seed)) * 0.3
    out = batch_loss(ours, batch, objective, normalizer=7.0, temperature=TEMPERATURE, old_logprob=old)
    out.loss.backward()

    loss = torch.zeros(())
    for tree, leaf_values, leaf_old in zip(trees, batch.to_leaves(got.logprob), batch.to_leaves(old), strict=True):
        logprobs, entropies = flat_logprobs(theirs, tree)
        for s, mine, flat, entropy, flat_old in zip(
            tree.flatten(), leaf_values, logprobs, entropies, leaf_old, strict=True
        ):
            close(mine, flat)
            mask = torch.from_numpy(s.loss_mask)
            if mask.any():
                ratio = (flat - flat_old).exp()
                clipped = torch.minimum(ratio * s.advantage, ratio.clamp(0.8, 1.2) * s.advantage)
                loss = loss - ((clipped + 0.01 * entropy) * mask).sum() / mask.sum() / 7.0
    loss.backward()
    close(out.loss, loss)
    for (key, mine), flat in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None, key
        close(mine.grad, flat.grad)


def test_an_adapter_on_the_head_is_scored_and_trained():
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    models = []
    for model in make_models("qwen3"):
        torch.manual_seed(3)
        models.append(peft.get_peft_model(model, copy.deepcopy(config)).eval())
    ours, theirs = models
    tree = random_tree(1, 3, 9)
    (batch,) = pack([tree], max_tokens=1000)
    got = batch_logprob(ours, batch, temperature=TEMPERATURE)
    out = batch_loss(
        ours, batch, Objective.preset("reinforce"), normalizer=1.0, temperature=TEMPERATURE, old_logprob=None
    )
    out.loss.backward()
    logprobs, _ = flat_logprobs(theirs, tree)
    masks = [torch.from_numpy(s.loss_mask) for s in tree.flatten()]
    loss = -sum(s.advantage * (f * m).sum() for s, f, m in zip(tree.flatten(), logprobs, masks, strict=True))
    loss.backward()
    for mine, flat in zip(batch.to_leaves(got.logprob)[0], logprobs, strict=True):
        close(mine, flat)
    trained = [(n, p) for n, p in ours.named_parameters() if p.requires_grad]
    assert sum("lm_head.lora" in name for name, _ in trained) == 2
    for (name, mine), flat in zip(trained, (p for p in theirs.parameters() if p.requires_grad), strict=True):
        assert mine.grad is not None, name
        close(mine.grad, flat.grad)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
@pytest.mark.parametrize("max_tokens", [40, 90])
def test_splitting_changes_nothing(aggregation, max_tokens):
    """Any budget, also one that splits trees: the same loss and gradients."""
    ours, _ = make_models("qwen3")
    trees = [random_tree(seed, 3, 15) for seed in range(4)]
    objective = Objective.preset("dapo", aggregation=aggregation)

    def run(batches):
        ours.zero_grad()
        loss = sum(batch_loss(ours, b, objective, normalizer=11.0, old_logprob=None).loss for b in batches)
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in ours.parameters()]

    whole = pack(trees, max_tokens=100_000)
    parts = pack(trees, max_tokens=max_tokens)
    assert len(parts) > len(whole) == 1
    assert max(b.num_tokens for b in parts) <= max_tokens
    if max_tokens == 40:
        assert sum(len(b.tree_index) for b in parts) > len(trees), "no tree was split; the test shows nothing"
    assert sum(b.loss_tokens for b in parts) == whole[0].loss_tokens
    loss, grads = run(whole)
    split_loss, split_grads = run(parts)
    close(split_loss, loss)
    for mine, other in zip(split_grads, grads, strict=True):
        close(mine, other)


@pytest.mark.parametrize("name", CONFIGS)
def test_ordinary_batches_are_unchanged(name):
    """Padded batches and generate() under attn_implementation="rolltree" are plain transformers'."""
    ours, theirs = make_models(name)
    ids = torch.randint(0, 97, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    a, b = (m(input_ids=ids, attention_mask=mask).logits[mask.bool()] for m in (ours, theirs))
    close(a, b)
    a, b = (m.generate(ids[:1], max_new_tokens=12, do_sample=False, pad_token_id=0) for m in (ours, theirs))
    assert torch.equal(a, b)


def test_subtree_end_as_a_forward_keyword_needs_no_mask():
    ours, _ = make_models("llama")
    (batch,) = pack([random_tree(1, 3, 9)], max_tokens=1000)
    out = ours(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], subtree_end=batch.subtree_end)
    logits = out.logits[0][batch.row] / TEMPERATURE
    close(
        F.log_softmax(logits, -1).gather(1, batch.target[:, None])[:, 0],
        batch_logprob(ours, batch, temperature=TEMPERATURE).logprob,
    )


def test_a_model_without_tree_attention_is_refused():
    _, theirs = make_models("qwen3")
    (batch,) = pack([random_tree(0, 1, 2)], max_tokens=1000)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        batch_logprob(theirs, batch)


def test_a_path_longer_than_the_budget_is_named():
    with pytest.raises(ValueError, match=r"Leaf 1 of tree 0 is 6 tokens long.*max_tokens=5"):
        pack([TokenTree.from_sequences([1, 2], [[3], [4, 5, 6, 7]])], max_tokens=5)


def test_experts_are_balanced_as_in_the_flat_batch():
    """Each token of the tree counts as often as the flat batch repeats it; so does transformers' own loss there."""
    ours, theirs = make_models("qwen3-moe")
    trees = [random_tree(1, 3, 12), random_tree(2, 1, 4)]
    for model in (ours, theirs):
        model.config.output_router_logits = True
    zero = Objective.preset("grpo")
    for tree in trees:
        tree.advantage[:] = 0
    (batch,) = pack(trees, max_tokens=100_000)
    out = batch_loss(ours, batch, zero, normalizer=1.0, router_share=0.5, old_logprob=None)
    out.loss.backward()
    sequences = [s.prompt + s.response for tree in trees for s in tree.flatten()]
    ids, mask = torch.zeros(2, len(sequences), max(map(len, sequences)), dtype=torch.long)
    for i, s in enumerate(sequences):
        ids[i, : len(s)], mask[i, : len(s)] = torch.tensor(s), 1
    want = theirs(input_ids=ids, attention_mask=mask, use_cache=False).aux_loss * 0.1
    (0.5 * want).backward()
    close(out.loss, 0.5 * want)
    value, count = out.metrics["actor/router_loss"]
    assert float(value / count) == pytest.approx(float(want), rel=1e-5)
    compared = 0
    for mine, flat in zip(ours.parameters(), theirs.parameters(), strict=True):
        if flat.grad is not None and flat.grad.any():
            close(mine.grad, flat.grad)
            compared += 1
    assert compared > 5


@pytest.mark.check(but=2)
@pytest.mark.parametrize("name", CONFIGS)
def test_flat_batches_are_plain_transformers(name):
    """Padded sequences without sharing have the same loss and gradients as the tree."""
    ours, _ = make_models(name)
    trees = [random_tree(seed, 3, 12) for seed in range(3)]
    objective = Objective.preset("gspo", aggregation="seq_mean_token_mean")
    results = []
    for batches in (pack(trees, max_tokens=100_000), pack(trees, max_tokens=70, flat=True)):
        ours.zero_grad()
        losses = [batch_loss(ours, b, objective, normalizer=5.0, old_logprob=None) for b in batches]
        sum(out.loss for out in losses).backward()
        results.append((sum(out.loss.detach() for out in losses), [p.grad.clone() for p in ours.parameters()]))
    assert len(batches) > 2
    assert all(b.padded[0] * b.padded[1] <= 70 for b in batches)
    assert sum(b.num_leaves for b in batches) == sum(t.num_leaves for t in trees)
    close(results[1][0], results[0][0], 1e-4)
    for flat, tree in zip(results[1][1], results[0][1], strict=True):
        close(flat, tree, 2e-5)
    with pytest.raises(ValueError, match="over the budget of max_tokens=3"):
        pack(trees, max_tokens=3, flat=True)


# transformers multiplies experts in no fp64, and bf16 routes some tokens to others
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen3-moe"])
def test_bf16_is_no_further_from_fp64_than_twice_flat(name):
    """Log-probs and gradients of a bf16 model as a tree and as plain transformers, against fp64."""
    tree = random_tree(5, 4, 30)
    (batch,) = pack([tree], max_tokens=100_000)

    def flat(dtype):
        _, model = make_models(name)
        model.to(dtype)
        logprob = torch.cat(flat_logprobs(model, tree, torch.promote_types(dtype, torch.float32))[0])
        logprob.sum().backward()
        return logprob.detach().double(), torch.cat([p.grad.double().flatten() for p in model.parameters()])

    ours, _ = make_models(name)
    ours.to(torch.bfloat16)
    logprob = torch.cat(batch.to_leaves(batch_logprob(ours, batch, temperature=TEMPERATURE).logprob)[0])
    logprob.sum().backward()
    mine = logprob.detach().double(), torch.cat([p.grad.double().flatten() for p in ours.parameters()])
    truth = torch.float32 if "softcap" in name else torch.float64  # transformers' eager attention gives NaN in fp64
    for got, plain, exact in zip(mine, flat(torch.bfloat16), flat(truth), strict=True):
        assert (got - exact).norm() <= 2 * (plain - exact).norm()
        assert (got - exact).norm() < 0.1 * exact.norm()


@pytest.mark.slow
def test_a_compiled_layer_takes_trees_of_any_size_without_recompiling():
    ours, plain = make_models("qwen3")[0], make_models("qwen3")[0]
    objective = Objective.preset("grpo")
    ours.model.layers[0].compile(backend="eager", dynamic=True, fullgraph=True)  # one takes seconds, and all are alike
    for seed in range(3):
        (batch,) = pack([random_tree(seed, 3, 8 + 3 * seed)], max_tokens=100_000)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            for model in (ours, plain):
                model.zero_grad()
                batch_loss(model, batch, objective, normalizer=3.0, old_logprob=None).loss.backward()
        for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
            close(mine.grad, other.grad)
