"""Loads models and tokenizers from Hugging Face directories: safetensors only, and only layers that support trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..errors import UserError
from . import attention, pictures, recurrent
from .fused_layers import fuse_layers
from .invariant.install import make_invariant

TREE_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")  # names of the list of layers in configurations
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def choose_device(name: str) -> torch.device:
    """Return the device that the key `model.device` asks for.

    Raises:
        UserError: ``name`` is "cuda" and torch sees no CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "model.device is 'cuda' but torch sees no CUDA device; set it to 'auto' or see `rolltree doctor`."
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def check_model_dir(path: str | Path) -> None:
    """Check that ``path`` is a directory from which a model can be loaded.

    Raises:
        UserError: the directory, its `config.json` or its safetensors weights are missing.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(
            f"The model directory '{directory}' does not exist; set model.path to a Hugging Face directory."
        )
    if not (directory / "config.json").is_file():
        raise UserError(f"'{directory}' holds no config.json; set model.path to a Hugging Face model directory.")
    if not any(directory.glob("*.safetensors")):
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt"))
        why = "only pickled weights, which are never loaded; convert them to safetensors" if pickled else "no weights"
        raise UserError(f"'{directory}' holds {why} (expected model.safetensors).")


def read_config(path: str | Path) -> Any:
    """Return Transformers' configuration of the model at ``path``.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # a damaged directory can make transformers raise anything
        raise UserError(f"The model '{path}' cannot be loaded: {_why(error)}.") from error


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    train_tower: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """Load a causal language model with tree attention and fused layers (:func:`.fused_layers.fuse_layers`).

    A model that takes pictures (`pictures.FAMILIES`) comes with its vision tower.

    Args:
        path: a Hugging Face directory or hub name; the weights must be safetensors.
        dtype: of the parameters.
        train_tower: let the parameters outside of the decoder and its head have gradients; they are frozen by default.
        batch_invariant: let every token have the same bits whatever is computed with it (`make_invariant`).

    Raises:
        UserError: the model cannot be read, its tensors do not match its configuration, or it has layers that do not
            support tree masks, or that are known not to be batch-invariant.
    """
    local = Path(path).exists() or str(path).startswith((".", "/", "~")) or str(path).count("/") != 1
    if local:
        check_model_dir(path)
    config = read_config(path)
    try:
        _check_layers(config, path)
        # wrong shapes are ignored here, so that _check_tensors can name them
        model, report = auto_class(config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except UserError:
        raise
    except Exception as error:  # a damaged directory can make transformers raise anything
        raise UserError(f"The model '{path}' cannot be loaded: {_why(error)}.") from error
    _check_tensors(model, report, path)
    if config.model_type in pictures.FAMILIES:
        for _, parameter in pictures.tower_parameters(model):
            parameter.requires_grad_(train_tower)
    recurrent.install(model, str(path))
    fuse_layers(model.to(device))
    return make_invariant(model) if batch_invariant else model


def auto_class(config: Any) -> Any:
    """Return the class of Transformers that makes the model of a configuration, with its vision tower if it has one."""
    return AutoModelForImageTextToText if config.model_type in pictures.FAMILIES else AutoModelForCausalLM


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's directory or hub name.

    Raises:
        UserError: there is none, it returns no tokens for a text, or it has no end-of-sequence token.
    """
    directory = Path(path)
    if directory.is_dir() and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"'{path}' holds no tokenizer ({TOKENIZER_FILES[0]}); save the model's tokenizer next to its weights."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # as in load_model
        raise UserError(f"The tokenizer in '{path}' cannot be loaded: {_why(error)}.") from error
    if not tokenizer("1", add_special_tokens=False)["input_ids"]:
        raise UserError(f"The tokenizer in '{path}' makes no tokens of a text; save the model's own there.")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"The tokenizer in '{path}' has no eos_token, so responses could not end; set one in its config."
        )
    return tokenizer


def _check_layers(config: Any, path: str | Path) -> None:
    text = config.get_text_config()
    kinds = {kind for name in LAYER_KINDS for kind in getattr(text, name, None) or ()} - set(TREE_LAYERS)
    if kinds and text.model_type not in recurrent.FAMILIES:
        raise UserError(
            f"'{path}' has layers that cannot be tree-masked ({', '.join(sorted(kinds))}); use another model."
        )


def _check_tensors(model: PreTrainedModel, report: dict[str, Any], path: str | Path) -> None:
    """Check that every weight comes from the files; transformers would initialise missing ones at random.

    Tied weights are not missing. Tensors of parts that the decoder does not have (a vision tower) are ignored, as
    transformers does; tensors of the decoder itself must all be used.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # tied weights under their first name
    missing = sorted(report["missing_keys"], key=lambda key: (key not in named, key))
    misshapen = sorted(report["mismatched_keys"])
    unknown = sorted(key for key in report["unexpected_keys"] if key.startswith(f"{model.base_model_prefix}."))
    wrong = [f"'{key}' is missing" for key in missing]
    wrong += [f"'{key}' is {list(stored)} and not {list(ours)}" for key, stored, ours in misshapen]
    wrong += [f"'{key}' has no place in the model" for key in unknown]
    if not wrong:
        wrong = [f"'{key}' holds numbers that are not finite" for key, t in named.items() if not _finite(t)]
    if wrong:
        more = f" and {len(wrong) - 1} more are wrong" if len(wrong) > 1 else ""
        raise UserError(
            f"The weights in '{path}' are not those its config.json describes: {wrong[0]}{more}; restore the files."
        )


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or tensor.is_meta or bool(torch.isfinite(tensor).all())


def _why(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
