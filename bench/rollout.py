"""Groups of responses to fresh prompts, lengths forced, log-probs returned: the native engine and its peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams

from .runner import Bench, Calls, Case

PLAIN = "transformers generate"


@dataclass(frozen=True)
class Inputs:
    model: PreTrainedModel
    prompts: list[list[int]]
    group: int
    new_tokens: int


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """(prompts, prompt length, group, new tokens, layers, width, ffn, query heads, key heads, head dim, vocabulary)"""
    small = (4, 512, 16, 64, 4, 256, 768, 8, 4, 32, 1024, torch.float32)
    large = (16, 4096, 16, 512, 28, 1024, 3072, 16, 8, 128, 151936, torch.bfloat16)
    shape = (1, 64, 4, 16, *small[4:]) if quick else small if device.type == "cpu" else large
    count, prompt, group, new_tokens, layers, width, ffn, heads, kv_heads, dim, vocabulary, dtype = shape
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=prompt + new_tokens,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).to(device, dtype).eval()
    prompts = torch.randint(vocabulary, (count, prompt)).tolist()
    name = f"{count} x ({prompt} + {group}x{new_tokens}) layers {layers} width {width} V={vocabulary}"
    yield Case(f"{name} {str(dtype).removeprefix('torch.')}", Inputs(model, prompts, group, new_tokens))


def native(x: Inputs) -> Calls:
    """Every call begins with an empty cache: prompts are fresh."""
    tokens = sum(len(p) + x.group * x.new_tokens for p in x.prompts)
    engine = NativeEngine(x.model, config=EngineConfig(kv_tokens=2 * tokens))
    params = SamplingParams(n=x.group, max_new_tokens=x.new_tokens, ignore_eos=True)

    def call() -> None:
        engine.forget_prefixes()
        trees = engine.generate(x.prompts, params)
        assert sum(int(tree.response_length.sum()) for tree in trees) == len(x.prompts) * x.group * x.new_tokens

    return {"generate": call}


def transformers_generate(x: Inputs) -> Calls:
    """All groups as one batch; scores are kept and turned into the log-probs of what was sampled."""
    model: Any = x.model
    ids = torch.tensor(x.prompts, device=model.device)
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        num_return_sequences=x.group,
        max_new_tokens=x.new_tokens,
        min_new_tokens=x.new_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )

    def call() -> None:
        attention = model.config._attn_implementation
        model.set_attn_implementation("sdpa")  # an engine may have set its own
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        logprob = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        assert logprob.shape == (len(x.prompts) * x.group, x.new_tokens)
        model.set_attn_implementation(attention)

    return {"generate": call}


BENCH = Bench(
    op="rollout",
    cases=cases,
    providers={"rolltree": native, PLAIN: transformers_generate},
    speedup_over=PLAIN,
)
