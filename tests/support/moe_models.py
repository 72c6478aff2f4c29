"""Tiny random mixtures of experts, and their routers by formulas of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rolltree.engine.data.tree import TokenTree

VOCAB = 48
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=False, pad_token_id=None,
    bos_token_id=None, eos_token_id=None, num_experts=8, num_local_experts=8, n_routed_experts=8, moe_num_experts=8,
    num_experts_per_tok=3, num_experts_per_token=3, moe_k=3, moe_topk=3, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=8, n_group=4, topk_group=2, first_k_dense_replace=1, moe_layer_start_index=1, moe_layer_end_index=2,
    sliding_window=8, initializer_range=0.2, attention_dropout=0.0, logits_scaling=1.0, shared_intermediate_size=48,
)  # fmt: skip
DELTA: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": dict(topk_method="greedy"),
    "dots1": dict(n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=3),
    "gemma4_text": dict(enable_moe_block=True, top_k_experts=3, global_head_dim=16, num_kv_shared_layers=0,
                        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB),
    "gpt_oss": dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "granitemoehybrid": dict(layer_types=["attention"] * 3, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2,
                             mamba_d_state=8, mamba_expand=2),
    "kimi_linear": dict(topk_group=1, layer_types=["linear_attention", "full_attention", "linear_attention"],
                        linear_head_dim=8, linear_num_heads=4, mlp_layer_types=["dense", "sparse", "sparse"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention", "conv"], num_dense_layers=1),
    "nemotron_h": dict(layers_block_type=["linear_attention", "moe", "full_attention", "moe"], mamba_num_heads=4,
                       mamba_head_dim=16, n_groups=2, ssm_state_size=8, chunk_size=32),
    "qwen3_5_moe_text": DELTA,
    "qwen3_next": DELTA,
}  # fmt: skip


def make(family: str, **more: Any) -> Any:
    """A random model with attention "rolltree" in which every parameter, bias and buffer of a router counts."""
    own = OWN.get(family, {}) | more
    known = AutoConfig.for_model(family).to_dict()
    given = {
        name: v for name, v in SIZES.items() if name in known and not ("kv_lora_rank" in known and name == "head_dim")
    }
    config = AutoConfig.for_model(family, **given | own)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="rolltree").eval().float()
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(0.01, 0.3).log())
            elif p.dim() == 1 and "inv_freq" not in name:
                p.add_(0.1 * torch.randn_like(p))
    return model


def all_softmax(norm: bool) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """Softmax over all experts; with ``norm``, the chosen ones' sum is 1."""

    def weights(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
        found = logits.softmax(-1).gather(1, chosen)
        return found / found.sum(1, keepdim=True) if norm else found

    return weights


def chosen_softmax(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.gather(1, chosen).softmax(-1)


def sigmoid(scaled: bool = True) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """Sigmoids of the chosen logits, divided by their sum; a bias of the choice has no part in them."""

    def weights(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
        found = logits.gather(1, chosen).sigmoid()
        if getattr(router, "norm_topk_prob", True):
            found = found / found.sum(1, keepdim=True)
        return found * router.routed_scaling_factor if scaled else found

    return weights


FAMILIES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "qwen2_moe": all_softmax(False),
    "qwen3_moe": all_softmax(False),
    "qwen3_next": all_softmax(True),
    "qwen3_5_moe_text": all_softmax(True),
    "olmoe": all_softmax(False),
    "flex_olmo": all_softmax(False),
    "mixtral": all_softmax(True),
    "hunyuan_v1_moe": all_softmax(True),
    "ernie4_5_moe": all_softmax(True),
    "gpt_oss": chosen_softmax,
    "granitemoe": chosen_softmax,
    "granitemoeshared": chosen_softmax,
    "granitemoehybrid": chosen_softmax,
    "granitemoe_swa": chosen_softmax,
    "cohere2_moe": chosen_softmax,
    "deepseek_v2": lambda router, logits, chosen: logits.softmax(-1).gather(1, chosen) * router.routed_scaling_factor,
    "deepseek_v3": sigmoid(),
    "glm4_moe": sigmoid(),
    "glm4_moe_lite": sigmoid(),
    "dots1": sigmoid(),
    "exaone_moe": sigmoid(),
    "kimi_linear": sigmoid(),
    "nemotron_h": sigmoid(),
    "lfm2_moe": sigmoid(),
    "minimax_m2": sigmoid(scaled=False),
    "axk1": sigmoid(),
    "solar_open": sigmoid(),
    "mellum": all_softmax(True),
    "laguna": sigmoid(scaled=False),
    "afmoe": lambda router, logits, chosen: sigmoid(scaled=False)(router, logits, chosen) * router.route_scale,
    "gemma4_text": lambda router, logits, chosen: (
        all_softmax(True)(router, logits, chosen) * router.per_expert_scale[chosen]
    ),
}
"""Weights of the chosen experts, from the logits of all."""
FIRST = ("granitemoe", "granitemoeshared", "granitemoehybrid")
"""Families whose routers return indices, weights and logits; those of the others return the reverse."""


def routers(model: Any) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith(("Router", "MoEV1Gate"))]


class Given:
    """Replaces the forward of a model's routers by one that uses given routes ``[S, layers, k]``, by the formula."""

    def __init__(self, family: str, model: Any) -> None:
        self.routes = torch.zeros(0)
        for place, router in enumerate(routers(model)):
            router.forward = self._forward(family, router, place)  # type: ignore[method-assign]

    def _forward(self, family: str, router: Any, place: int) -> Callable[..., tuple[Tensor, ...]]:
        def forward(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
            if family == "gemma4_text":
                hidden = router.norm(hidden) * router.scale * router.scalar_root_size
            weight = next(p for p in router.parameters() if p.dim() == 2)
            logits = hidden.reshape(-1, hidden.shape[-1]).float() @ weight.float().T
            if getattr(router, "bias", None) is not None:
                logits = logits + router.bias
            chosen = self.routes[:, place].long()
            out = logits, FAMILIES[family](router, logits, chosen).to(hidden.dtype), chosen
            return out[::-1] if family in FIRST else out

        return forward


def trees_with_routes(layers: int, k: int, experts: int, seed: int = 0) -> list[TokenTree]:
    """Trees of several levels, every token with random experts, no two alike; equal ids with other routes too."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(2):
        prompt, a, b, c, d = (rng.integers(0, VOCAB, n).tolist() for n in rng.integers(1, 12, 5))
        tree = TokenTree.from_sequences(prompt, [a + b, a + c, a + b[:1] + d, d, [*d[:1], *c]])
        draws = rng.random((tree.num_tokens, layers, experts)).argsort(-1)[..., :k]
        tree.set("routes", draws)
        found.append(tree)
    return found


def flat(model: Any, given: Given, trees: Sequence[TokenTree]) -> list[Tensor]:
    """Log-probs of each response by the model on its own, with the routes of its path."""
    found = []
    for tree in trees:
        for leaf in range(tree.num_leaves):
            rows = tree.path_rows(leaf)
            given.routes = torch.from_numpy(tree.routes[rows])
            ids = torch.from_numpy(tree.token_id[rows].astype(np.int64))
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
            found.append(logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[int(tree.leaf_prompt[leaf]) - 1 :, 0])
    return found
