"""``rolltree kernels build``: a model's kernels, compiled ahead of time for a GPU that need not be there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from rolltree.kernels import ahead, kernel_cache

from ..errors import UserError


def compile_kernels(path: Path, arch: str, dtype: str) -> None:
    """Fill the caches that a training run of the model at ``path`` reads on a GPU of ``arch``.

    Raises:
        UserError: no model is at ``path``, or Triton is missing or interprets.
    """
    if importlib.util.find_spec("triton") is None:
        raise UserError("There is no Triton here to compile with; install rolltree on Linux.")
    model = kernels_model(path, dtype)
    versions = kernel_cache.versions()
    flash = "flash-attn-4" in versions
    if not flash:
        print("flash-attn 4 is not installed, so only Triton's kernels are built; rolltree[hopper] brings it.")
    count = seconds = 0.0
    try:
        for built in ahead.build(ahead.TARGETS[arch], model, flash=flash):
            count, seconds = count + built.compiled, seconds + built.seconds
            print(f"{built.name:<48} {built.compiled:>3} compiled {built.seconds:>6.1f} s", flush=True)
    except RuntimeError as error:
        raise UserError(str(error)) from error
    under = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{count:.0f} kernels for {ahead.TARGETS[arch].arch} in {seconds:.0f} s, under {under}.")
    from triton import knobs

    folders = [knobs.cache.dir] + ([kernel_cache.directory()] if flash else [])
    print(f"They travel in {' and '.join(map(str, folders))}.")


def kernels_model(path: Path, dtype: str) -> ahead.Model:
    """What kernels depend on of the model at ``path``, from its configuration alone."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(f"The model '{path}' has no configuration that can be read; give a model's folder.") from error
    heads = config.num_attention_heads
    kinds = getattr(config, "layer_types", None)
    sliding = getattr(config, "sliding_window", None) is not None if kinds is None else "sliding_attention" in kinds
    return ahead.Model(
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=config.vocab_size,
        dtype=getattr(torch, dtype),
        softcap=getattr(config, "attn_logit_softcapping", None),
        window=sliding,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
    )
