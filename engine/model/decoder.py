"""A Hugging Face decoder on packed trees: its log-probabilities and its loss."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rolltree.kernels import HeadLora, LogprobOutput, linear_logprob
from rolltree.kernels.checks import shown

from ..data.batch import TreeBatch
from ..data.pieces import PieceStore, depth_first
from ..errors import UserError
from . import attention
from .fused_layers import fuse_layers
from .sharding import whole

TREE_LAYERS = ("full_attention", "sliding_attention", "attention")
LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")  # what configurations call their list of layers
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
RECURRENT = re.compile(r"Mamba|Rwkv|Recurrent|GatedDelta|LinearAttention|ShortConv|Retention|Hyena|LSTM")


class Head(NamedTuple):
    """The language-model head: logits = softcap * tanh((hidden @ weight.T + bias) / softcap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None
    lora: HeadLora | None
    """A LoRA adapter of peft on the head itself: weight acts as ``weight + scale b a``."""


def head(model: PreTrainedModel) -> Head:
    """The head of ``model``, with the adapter that is active on it.

    Raises:
        ValueError: the model scales its logits, or adapts its head, in a way the fused head does not know.
    """
    return head_reader(model)()


def head_reader(model: PreTrainedModel) -> Callable[[], Head]:
    """What reads the head of ``model``, at every call: adapters come and go. Its config is read now.

    Raises:
        ValueError: as of :func:`head`.
    """
    config = model.config.get_text_config()
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{type(model).__name__} multiplies its logits ({name}), which the fused head does not know."
            )
    softcap = getattr(config, "final_logit_softcapping", None)

    def read() -> Head:
        layer = model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        return Head(whole(layer.weight), None if bias is None else whole(bias), softcap, _head_lora(layer))

    return read


def _head_lora(layer: Any) -> HeadLora | None:
    """What peft has put on the head: its layers answer for ``weight`` with the one below the adapter."""
    if type(layer) is nn.Linear or not hasattr(layer, "base_layer") or layer.disable_adapters or layer.merged:
        return None
    remedy = "leave lm_head out of the adapter's target_modules"
    if not hasattr(layer, "lora_A"):
        raise ValueError(f"The head's adapter is {type(layer).__name__}, which the fused head does not know; {remedy}.")
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if not active:
        return None
    (name, *others), dropout = active, layer.lora_dropout[active[0]]
    odd = {
        "several adapters at once": bool(others),
        "a LoRA variant (use_dora, ...)": name in getattr(layer, "lora_variant", {}),
        "lora_bias": layer.lora_bias.get(name, False),
        "lora_dropout": layer.training and getattr(dropout, "p", 0) > 0,
    }
    if any(odd.values()):
        what = next(option for option, found in odd.items() if found)
        raise ValueError(f"The head's adapter has {what}, which the fused head does not know; {remedy}.")
    dtype = layer.weight.dtype
    a, b = (whole(side[name].weight).to(dtype) for side in (layer.lora_A, layer.lora_B))
    return HeadLora(a, b, float(layer.scaling[name]))


class Decoded(NamedTuple):
    """What the decoder makes of packed tokens."""

    hidden: Tensor  # [T, H]
    router_loss: Tensor | None  # [], of a mixture of experts whose config asks for it (output_router_logits)


def decode(model: PreTrainedModel, batch: TreeBatch, store: PieceStore | None = None) -> Decoded:
    """The final hidden states of the batch's tokens, or of those of a piece.

    The experts' load is balanced as in the flat batch: a token counts once for every leaf below it.

    Raises:
        ValueError: the model was not loaded with ``attn_implementation="rolltree"``, or the batch is of pieces and none
            is named.
    """
    if batch.pieces and store is None:
        raise ValueError(
            "The batch holds a tree larger than its budget, to be computed in pieces; use backward, or pack without "
            "in_pieces."
        )
    implementation = model.config._attn_implementation
    if implementation != attention.NAME and batch.padded is None:
        raise ValueError(
            f"The model's attention is '{implementation}'; load it with attn_implementation='rolltree' or call "
            "model.set_attn_implementation('rolltree')."
        )
    rows = slice(None) if store is None else slice(store.piece.begin, store.piece.end)
    ids, positions, copies = (t[rows] for t in (batch.input_ids, batch.position_ids, batch.copies))
    given: dict[str, Any]
    if batch.padded is not None:
        ids, copies = (_padded(t, batch) for t in (ids, copies))
        given = {"input_ids": ids.view(batch.padded), "attention_mask": copies.view(batch.padded)}
    else:
        given = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": attention.MASK_STUB}
        given |= {"subtree_end": batch.subtree_end} if store is None else {"kv_store": store}
        if batch.cu_seqlens is not None and store is None:
            given |= {"cu_seq_lens_q": batch.cu_seqlens, "max_length_q": batch.longest}
    routed = getattr(model.config, "output_router_logits", False) and torch.is_grad_enabled()
    if routed:
        given["output_router_logits"] = True
    decoder: nn.Module = model.get_decoder()
    output = decoder(**given, use_cache=False)
    hidden = output.last_hidden_state.flatten(0, 1)
    if batch.padded is not None:
        hidden = hidden.index_select(0, batch.place)
    if not routed:
        return Decoded(hidden, None)
    balance = _balancing(model)
    # the mask it takes is a weight of each token
    found = balance(output.router_logits, model.num_experts, model.num_experts_per_tok, copies.view(1, -1))
    return Decoded(hidden, model.router_aux_loss_coef * found)


def _balancing(model: PreTrainedModel) -> Callable[..., Tensor]:
    """Transformers' load balancing loss of the model, which adapters or FSDP may have wrapped or subclassed."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = (getattr(sys.modules[cls.__module__], "load_balancing_loss_func", None) for cls in type(inner).__mro__)
    return next(function for function in found if function is not None)


def _padded(values: Tensor, batch: TreeBatch) -> Tensor:  # [T] -> [B S], 0 where padding is
    assert batch.padded is not None
    return values.new_zeros(batch.padded[0] * batch.padded[1]).index_copy(0, batch.place, values)


def check_call(op: str, model: object, batch: object) -> None:
    """Raises TypeError where ``op`` was given something else than a model and a batch."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"{op}: model must be a Transformers model, got {shown(model)}.")
    if not isinstance(batch, TreeBatch):
        raise TypeError(f"{op}: batch must be a TreeBatch, as pack makes them, got {shown(batch)}.")


def batch_logprob(
    model: PreTrainedModel, batch: TreeBatch, *, temperature: float = 1.0, want: Sequence[str] = ()
) -> LogprobOutput:
    """Log-probability of every target of ``batch``, and on request (``want``) entropy and sum of squared probabilities.

    Returns:
        ``logprob [M]`` fp32, one value a target. ``logsumexp``, ``entropy`` and ``sum_p2`` are per *target* too. Those
        of a batch of pieces have no gradient.

    Raises:
        ValueError: as :func:`decode`.
        TypeError: there is no model or no batch.
    """
    check_call("batch_logprob", model, batch)
    if batch.pieces:
        return _logprob_of_pieces(model, batch, temperature, want)
    return target_logprob(
        model, decode(model, batch).hidden, batch.target, batch.head_row, batch.head_index, temperature, want
    )


def _logprob_of_pieces(
    model: PreTrainedModel, batch: TreeBatch, temperature: float, want: Sequence[str]
) -> LogprobOutput:
    found: dict[str, Tensor] = {}

    def use(store: PieceStore, decoded: Decoded) -> None:
        p = store.piece
        some = target_logprob(
            model, decoded.hidden, batch.target[p.target], p.head_row, p.head_index, temperature, want
        )
        for name, values in some._asdict().items():
            if values is not None:
                found.setdefault(name, values.new_empty(len(batch.target)))[p.target] = values

    (tree,) = batch.trees
    run = partial(decode, model, batch)
    depth_first(tree, batch.pieces, batch.input_ids.device, run=run, use=use, gradients=False)
    return LogprobOutput(found["logprob"], found["logsumexp"], found.get("entropy"), found.get("sum_p2"), None)


def target_logprob(
    model: PreTrainedModel,
    hidden: Tensor,  # [T, H]
    target: Tensor,  # [M]
    head_row: Tensor,  # [R]
    head_index: Tensor,  # [M]
    temperature: float | Tensor,  # or [R]
    want: Sequence[str],
) -> LogprobOutput:
    """What the head says of ``target``, predicted by the rows ``head_row[head_index]``; all values are per target."""
    weight, bias, softcap, lora = head(model)
    out = linear_logprob(
        hidden.index_select(0, head_row),
        weight,
        target,
        row=head_index,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        want=want,
        lora=lora,
    )
    return LogprobOutput(
        logprob=out.logprob,
        logsumexp=out.logsumexp[head_index],
        entropy=None if out.entropy is None else out.entropy[head_index],
        sum_p2=None if out.sum_p2 is None else out.sum_p2[head_index],
        extra_logprob=None,
    )


def check_model_dir(path: str | Path) -> None:
    """Refuse a directory that is no loadable model, in one sentence.

    Raises:
        UserError: `config.json` or the safetensors weights are missing, or only pickled weights are there.
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


def load_model(path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    """A causal language model with tree attention, from a Hugging Face directory or hub name (safetensors only).

    Its layers are fused (:func:`.fused_layers.fuse_layers`).

    Raises:
        UserError: it cannot be read, its tensors are not those of its configuration, or it has layers that cannot be
            tree-masked.
    """
    local = Path(path).exists() or str(path).startswith((".", "/", "~")) or str(path).count("/") != 1
    if local:
        check_model_dir(path)
    try:
        config = AutoConfig.from_pretrained(path)
        _check_layers(config, path)
        # wrong shapes are let through here, to be named one by one below
        model, found = AutoModelForCausalLM.from_pretrained(
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
    except Exception as error:  # a damaged directory makes transformers raise whatever it meets first
        raise UserError(f"The model '{path}' cannot be loaded: {_why(error)}.") from error
    _check_tensors(model, found, path)
    _check_modules(model, path)
    return fuse_layers(model.to(device))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model.

    Raises:
        UserError: there is none, it knows no characters, or it names no end-of-sequence token.
    """
    directory = Path(path)
    if directory.is_dir() and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"'{path}' holds no tokenizer ({TOKENIZER_FILES[0]}); save the model's tokenizer beside its weights."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # as above
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
    if kinds:
        raise UserError(
            f"'{path}' has layers that cannot be tree-masked ({', '.join(sorted(kinds))}); use another model."
        )


def _check_tensors(model: PreTrainedModel, found: dict[str, Any], path: str | Path) -> None:
    """Every weight must come from the files: transformers fills what is missing with random numbers.

    Tied weights are not missing. Tensors of parts that a decoder has not (a vision tower) are left out, as transformers
    does; what belongs to the decoder itself must have its place there.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # of tied weights the first name
    missing = sorted(found["missing_keys"], key=lambda key: (key not in named, key))
    misshapen = sorted(found["mismatched_keys"])
    unknown = sorted(key for key in found["unexpected_keys"] if key.startswith(f"{model.base_model_prefix}."))
    wrong = [f"'{key}' is missing" for key in missing]
    wrong += [f"'{key}' is {list(theirs)} and not {list(ours)}" for key, theirs, ours in misshapen]
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


def _check_modules(model: nn.Module, path: str | Path) -> None:
    """Layers that carry a state from token to token, whatever the configuration calls them."""
    found = sorted({type(m).__name__ for m in model.modules() if RECURRENT.search(type(m).__name__)})
    if found:
        raise UserError(f"'{path}' has layers that cannot be tree-masked ({', '.join(found)}); use another model.")
