"""A whole training step on a group that shares its prompt: packed as a tree, and flat by plain Transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rolltree.engine import TokenTree, batch_loss, pack
from rolltree.kernels import Objective

from .runner import Bench, Calls, Case

FLAT = "flat, transformers sdpa"


@dataclass(frozen=True)
class Inputs:
    model: PreTrainedModel
    prompt: list[int]  # P
    responses: Tensor  # [G, R]
    advantage: Tensor  # [G]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """(prompt, response, group, layers, width, ffn, query heads, heads, head dim, vocab, dtype)"""
    small = (512, 128, 8, 4, 256, 768, 8, 4, 32, 1024, torch.float32)
    large = (2048, 1024, 8, 8, 1024, 3072, 16, 8, 128, 151936, torch.bfloat16)
    for shape in (small,) if quick or device.type == "cpu" else (small, large):
        prompt, response, group, layers, width, ffn, query_heads, heads, dim, vocab, dtype = shape
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=vocab,
            hidden_size=width,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=query_heads,
            num_key_value_heads=heads,
            head_dim=dim,
            max_position_embeddings=prompt + response,
            tie_word_embeddings=True,
        )
        model = Qwen3ForCausalLM(config).to(device, dtype).train()
        ids = torch.randint(vocab, (prompt + group * response,))
        advantage = torch.randn(group, device=device)
        inputs = Inputs(model, ids[:prompt].tolist(), ids[prompt:].view(group, response).to(device), advantage)
        name = f"{prompt}+{group}x{response} layers {layers} width {width} V={vocab}"
        yield Case(f"{name} {str(dtype).removeprefix('torch.')}", inputs)


def step_of(model: PreTrainedModel, loss: Callable[[], Tensor]) -> Calls:
    """Forward, backward, gradient clipping and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step}


def tree(x: Inputs) -> Calls:
    model: Any = copy.deepcopy(x.model)
    model.set_attn_implementation("rolltree")
    group, response = x.responses.shape
    packed = TokenTree.from_sequences(x.prompt, x.responses.tolist(), advantages=x.advantage.tolist())
    (batch,) = pack([packed], max_tokens=packed.num_tokens, device=x.responses.device)
    objective = Objective()
    return step_of(model, lambda: batch_loss(model, batch, objective, normalizer=group * response).loss)


def flat(x: Inputs) -> Calls:
    """What a trainer without trees does: the prompt repeated in every sequence, the head on the responses only."""
    model: Any = copy.deepcopy(x.model)
    model.set_attn_implementation("sdpa")
    group, response = x.responses.shape
    prompt = torch.tensor(x.prompt, device=x.responses.device).expand(group, -1)
    ids = torch.cat((prompt, x.responses), 1)

    def loss() -> Tensor:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=response + 1).logits[:, :-1].float()
        logprob = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), x.responses.flatten(), reduction="none")
        ratio = (logprob - logprob.detach()).exp()  # one on-policy update: the ratio is 1
        return -(ratio * x.advantage.repeat_interleave(response)).mean()

    return step_of(model, loss)


def flop_ratio(x: Inputs) -> float:
    """FLOP of the flat step over FLOP of the tree step; forward and backward scale alike."""
    c, p = x.model.config, len(x.prompt)
    g, r = x.responses.shape
    attended = c.num_attention_heads * c.head_dim
    projections = 2 * c.hidden_size * (2 * attended + 2 * c.num_key_value_heads * c.head_dim + 3 * c.intermediate_size)
    head = 2 * g * r * c.hidden_size * c.vocab_size

    def flop(tokens: int, pairs: int) -> int:
        return c.num_hidden_layers * (tokens * projections + 4 * pairs * attended) + head

    below = r * p + r * (r + 1) // 2  # pairs of one response's rows
    prompt_pairs = p * (p + 1) // 2
    return flop(g * (p + r), g * (prompt_pairs + below)) / flop(p + g * r, prompt_pairs + g * below)


BENCH = Bench(
    op="tree_step",
    cases=cases,
    providers={"rolltree, tree": tree, FLAT: flat},
    speedup_over=FLAT,
    speedup_ceiling=flop_ratio,
    ceiling_is="the FLOP of the flat step over the FLOP of the tree step",
)
