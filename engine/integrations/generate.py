"""Generation with the interface of Transformers' ``model.generate``: padded tensors in, padded tensors out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..rollout import RolloutEngine, SamplingParams

DEFAULTS: dict[str, Any] = {
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "num_return_sequences": 1,
}  # fmt: skip
"""Defaults of Transformers 5 for options that neither the caller nor the model's generation_config sets."""
NEW_TOKENS = 20
"""Maximum response length in Transformers 5 if no length is set."""
READ = {
    *DEFAULTS, "min_p", "max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "stop_strings",
}  # fmt: skip
WITHOUT_EFFECT = {
    "transformers_version", "_from_model_config", "bos_token_id", "decoder_start_token_id",  # not read by a decoder
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory",
    "compile_config", "disable_compile", "continuous_batching_config", "use_mtp",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight", "speculation_type",  # drafts: they change no token
    "early_stopping", "length_penalty",  # of beams, which are refused
    "renormalize_logits",  # before a softmax
}  # fmt: skip
"""Options that change how Transformers computes but not its samples."""
OF_SAMPLING = {"typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"}
"""Filters that Transformers ignores when it decodes greedily."""
NEUTRAL: dict[str, Any] = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "penalty_alpha": 0.0, "min_length": 0,
    "min_new_tokens": 0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
}  # fmt: skip
"""Values with which an option changes nothing, in addition to None, False and empty containers."""


def generate(
    engine: RolloutEngine,
    input_ids: Tensor,  # [B, S] int64, padded on the left
    attention_mask: Tensor | None = None,  # [B, S]
    generation_config: GenerationConfig | None = None,
    *,
    seed: int = 0,
    **options: Any,
) -> Tensor:  # [B * num_return_sequences, S + new] int64, padded on the right
    """Compute ``model.generate(input_ids, attention_mask, generation_config, **options)`` with ``engine``.

    Options take precedence over ``generation_config``, this over the model's own generation_config, and this over the
    defaults of Transformers (greedy, 20 new tokens; ``top_k=50`` when sampling).

    Args:
        engine: samples the responses.
        input_ids: [B, S] int64, prompts padded on the left.
        attention_mask: [B, S], 0 for padding; None: all tokens except a pad token that is no end-of-sequence token.
        seed: replaces PyTorch's global generator; each row has a seed of its own, so equal prompts get different
            responses.

    Returns:
        [B * num_return_sequences, S + new] int64, prompts followed by responses, padded on the right.

    Raises:
        ValueError: an option that changes the samples is not supported, or a length leaves no room for a response.
    """
    config = _resolved(engine, generation_config, options)
    sample = bool(config.do_sample)
    for name, value in unread(config, sample).items():
        raise ValueError(f"rolltree's generate does not support '{name}' = {value!r}; leave it out.")
    temperature = 1.0 if config.temperature is None else config.temperature
    if sample and not temperature > 0:
        raise ValueError(f"temperature is {temperature!r}; give a positive number, or do_sample=False.")
    eos = [config.eos_token_id] if isinstance(config.eos_token_id, int) else list(config.eos_token_id or [])
    stop = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or ()
    params = SamplingParams(
        n=config.num_return_sequences or 1,
        temperature=temperature if sample else 0.0,
        top_k=(config.top_k or None) if sample else None,
        top_p=config.top_p if sample and config.top_p is not None else 1.0,
        min_p=config.min_p if sample else None,
        max_new_tokens=_most(config, input_ids.shape[1], engine.longest),
        stop=tuple(stop),
        stop_token_ids=eos,
        ignore_eos=True,  # `eos` lists all tokens that end a response
    )
    prompts = [
        row[kept.bool()].tolist()
        for row, kept in zip(input_ids, _mask(config, eos, input_ids, attention_mask), strict=True)
    ]
    trees = engine.generate(prompts, params, seeds=[seed + i for i in range(len(prompts))])
    responses = [torch.tensor(leaf.response) for tree in trees for leaf in tree.flatten()]
    pad = config.pad_token_id if config.pad_token_id is not None else eos[0] if eos else 0
    new = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=pad)
    repeated = input_ids.repeat_interleave(params.n, dim=0)
    return torch.cat([repeated, new.to(input_ids)], dim=1)


def _resolved(engine: RolloutEngine, caller: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
    """Merge the settings by precedence: options, the caller's configuration, the model's, Transformers' defaults."""
    options = dict(options)
    tokenizer = options.pop("tokenizer", None)
    if tokenizer is not None and tokenizer is not engine.tokenizer:
        raise ValueError("rolltree's generate reads stop_strings with the engine's tokenizer; leave `tokenizer` out.")
    config = merged(GenerationConfig() if caller is None else caller, engine.generation_config)
    for name, value in config.update(**options).items():
        if value is not None:
            raise ValueError(f"rolltree's generate does not support '{name}'; leave it out.")
    return config


def merged(caller: GenerationConfig, model_settings: Mapping[str, Any]) -> GenerationConfig:
    """Return a copy of the caller's settings in which None is replaced by the model's, or Transformers' default."""
    config = copy.deepcopy(caller)
    config.update(
        defaults_only=True, **{name: value for name, value in model_settings.items() if hasattr(config, name)}
    )
    config.update(defaults_only=True, **DEFAULTS)
    return config


def unread(config: GenerationConfig, sample: bool) -> dict[str, Any]:
    """Return the options of ``config`` that change the samples of Transformers and are not in `READ`."""
    passed = READ | WITHOUT_EFFECT | (set() if sample else OF_SAMPLING)

    def neutral(name: str, value: Any) -> bool:
        empty = value is None or value is False or (isinstance(value, list | tuple | dict) and not value)
        return empty or value == NEUTRAL.get(name)

    others = {name: getattr(config, name) for name in vars(GenerationConfig()) if name not in passed}
    return {name: value for name, value in others.items() if not neutral(name, value)}


def _most(config: GenerationConfig, width: int, longest: int | None) -> int:
    """Return the maximum response length for prompts padded to ``width``."""
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if config.max_length is None:
        return NEW_TOKENS if longest is None else max(min(NEW_TOKENS, longest - width), 1)
    if config.max_length <= width:
        raise ValueError(
            f"The prompts have {width} tokens and max_length is {config.max_length}; raise it or give max_new_tokens."
        )
    return config.max_length - width


def _mask(
    config: GenerationConfig,
    eos: list[int],
    input_ids: Tensor,  # [B, S] int64
    mask: Tensor | None,  # [B, S]
) -> Tensor:  # [B, S]
    """Return the mask of the prompts' tokens: the caller's, or all but a pad token that is no end-of-sequence token."""
    if mask is not None:
        return mask
    pad = config.pad_token_id
    if pad is None or pad in eos:
        return torch.ones_like(input_ids)
    return input_ids.ne(pad)
