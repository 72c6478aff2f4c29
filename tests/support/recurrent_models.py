"""Tiny random hybrids with a memory of tens of tokens, trees, and their flat log-probs by plain Transformers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch import Tensor

from rolltree.engine.data.tree import TokenTree

VOCAB = 48
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
    tie_word_embeddings=False, pad_token_id=None, bos_token_id=None, eos_token_id=None, max_position_embeddings=2048,
)  # fmt: skip
DELTA = SMALL | dict(
    num_hidden_layers=3, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=12, linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
MAMBA = SMALL | dict(
    num_hidden_layers=3, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=32,
    mamba_expand=2,
)  # fmt: skip
CONV = SMALL | dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], conv_L_cache=3)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5Text Qwen3_5", DELTA),
    "qwen3_next": ("Qwen3Next Qwen3Next", DELTA | EXPERTS),
    "olmo_hybrid": ("OlmoHybrid OlmoHybrid", DELTA),
    "nemotron_h": (
        "NemotronH NemotronH",
        SMALL | dict(layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"], head_dim=16,
                     mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=8, chunk_size=32),
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid GraniteMoeHybrid",
        MAMBA | dict(layer_types=["mamba", "attention", "mamba"], num_local_experts=0, num_experts_per_tok=0,
                     shared_intermediate_size=48, logits_scaling=1.0),
    ),
    "qwen3_5_moe": ("Qwen3_5MoeText Qwen3_5Moe", DELTA | EXPERTS),
    "kimi_linear": (
        "KimiLinear KimiLinear",
        SMALL | dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
                     mlp_layer_types=["dense", "sparse", "sparse"], linear_head_dim=8, linear_num_heads=4,
                     linear_conv_kernel_dim=4, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=6,
                     num_experts=4, num_experts_per_token=2, moe_intermediate_size=16, num_key_value_heads=2),
    ),
    "bamba": ("Bamba Bamba", MAMBA | dict(attn_layer_indices=[1])),
    "falcon_h1": ("FalconH1 FalconH1", MAMBA | dict(head_dim=16, mamba_d_ssm=64)),
    "lfm2": ("Lfm2 Lfm2", CONV),
    "lfm2_moe": ("Lfm2Moe Lfm2Moe", CONV | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                                                num_dense_layers=1)),
}  # fmt: skip


def make(family: str, **more: Any) -> Any:
    """A random model with attention "rolltree" whose decays keep tens of tokens; as drawn they keep one."""
    import transformers

    config, cls = FAMILIES[family][0].split()
    if family == "kimi_linear" and Version(transformers.__version__) < Version("5.19"):
        pytest.skip("Kimi Linear is tested with Transformers 5.19 and later; 5.16 has none")
    torch.manual_seed(0)
    made = getattr(transformers, cls + "ForCausalLM")(
        getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), config + "Config")(
            **FAMILIES[family][1] | more
        )
    )
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(0.01, 0.3).log())
            elif p.dim() > 1:
                p.mul_(3)
            else:
                p.add_(0.1 * torch.randn_like(p))
    made.set_attn_implementation("rolltree")
    return made.eval()


def random_trees(seed: int, count: int = 3, longest: int = 90) -> list[TokenTree]:
    """Responses that leave each other at several depths; some end where others go on, some segments have one token."""
    rng = np.random.default_rng(seed)
    trees = []
    for _ in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(1, longest)).tolist()
        responses = [rng.integers(0, VOCAB, rng.integers(1, longest)).tolist()]
        for _ in range(4):
            base = responses[rng.integers(len(responses))]
            keep = int(rng.integers(0, len(base) + 1))
            responses.append(base[:keep] + rng.integers(0, VOCAB, rng.integers(1, longest)).tolist())
        responses += [[*responses[0][:-1], int(token)] for token in rng.integers(0, VOCAB, 2)]
        trees.append(TokenTree.from_sequences(prompt, responses))
    return trees


def flat(model: Any, trees: Sequence[TokenTree]) -> list[Tensor]:
    """Log-probs of each response by the model on its own, without trees or packing."""
    model.set_attn_implementation("eager")
    found = []
    for tree in trees:
        for leaf in range(tree.num_leaves):
            ids = torch.from_numpy(tree.token_id[tree.path_rows(leaf)].astype(np.int64))
            logits = model(input_ids=ids[None], use_cache=False).logits[0].to(torch.float32)
            found.append(logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[int(tree.leaf_prompt[leaf]) - 1 :, 0])
    model.set_attn_implementation("rolltree")
    return found


def weights(values: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(v.shape, generator=generator) for v in values]


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of a gradient."""
    assert a.keys() == b.keys()
    assert a
    return max((float((a[n] - b[n]).norm() / a[n].norm().clamp(min=1e-20)), n) for n in a)
