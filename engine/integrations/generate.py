"""Generation in the manner of ``model.generate`` of Transformers: padded tensors in, padded tensors out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..rollout import RolloutEngine, SamplingParams

TAKEN = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "num_return_sequences", "eos_token_id",
    "pad_token_id", "bos_token_id", "stop_strings", "transformers_version", "use_cache", "_from_model_config",
}  # fmt: skip


def generate(
    engine: RolloutEngine,
    input_ids: Tensor,  # [B, S] int64, padded on the left
    attention_mask: Tensor | None = None,  # [B, S]
    generation_config: GenerationConfig | None = None,
    *,
    seed: int = 0,
    **options: Any,
) -> Tensor:  # [B * num_return_sequences, S + new] int64, padded on the right
    """What ``model.generate(input_ids, attention_mask, generation_config, **options)`` returns, by ``engine``.

    Responses of one prompt differ also where prompts are equal; ``seed`` takes the place of the global generator.

    Raises:
        ValueError: an option that changes what is sampled and is not known here.
    """
    config = GenerationConfig(**{**(generation_config.to_dict() if generation_config else {}), **options})
    usual = GenerationConfig().to_dict()
    for name, value in config.to_dict().items():
        if name not in TAKEN and value is not None and value != usual.get(name):
            raise ValueError(f"rolltree's generate does not know '{name}' = {value!r}; leave it out.")
    if config.max_new_tokens is None:
        raise ValueError("rolltree's generate needs max_new_tokens.")
    eos = config.eos_token_id
    sample = bool(config.do_sample)
    params = SamplingParams(
        n=config.num_return_sequences or 1,
        temperature=(1.0 if config.temperature is None else config.temperature) if sample else 0.0,
        top_k=(config.top_k or None) if sample else None,
        top_p=(1.0 if config.top_p is None else config.top_p) if sample else 1.0,
        min_p=config.min_p if sample else None,
        max_new_tokens=config.max_new_tokens,
        stop=tuple([config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or ()),
        stop_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else list(eos),
    )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    prompts = [row[kept.bool()].tolist() for row, kept in zip(input_ids, mask, strict=True)]
    trees = engine.generate(prompts, params, seeds=[seed + i for i in range(len(prompts))])
    responses = [torch.tensor(leaf.response) for tree in trees for leaf in tree.flatten()]
    first = params.stop_token_ids[0] if params.stop_token_ids else 0
    pad = first if config.pad_token_id is None else config.pad_token_id
    new = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=pad)
    repeated = input_ids.repeat_interleave(params.n, dim=0)
    return torch.cat([repeated, new.to(input_ids)], dim=1)
