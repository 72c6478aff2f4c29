"""A Hugging Face decoder on packed trees: its log-probabilities and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rolltree.kernels import LogprobOutput, Objective, PolicyLossOutput, linear_logprob, linear_policy_loss

from .batch import TreeBatch
from .errors import UserError
from .integrations import transformers as integration
from .pieces import PieceStore, depth_first

TREE_LAYERS = ("full_attention", "sliding_attention")


class Head(NamedTuple):
    """The language-model head: logits = softcap * tanh((hidden @ weight.T + bias) / softcap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None


def head(model: PreTrainedModel) -> Head:
    """The head of ``model``.

    Raises:
        ValueError: the model scales its logits in a way the fused head does not know.
    """
    config = model.config.get_text_config()
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{type(model).__name__} multiplies its logits ({name}), which the fused head does not know."
            )
    layer = model.get_output_embeddings()
    return Head(layer.weight, getattr(layer, "bias", None), getattr(config, "final_logit_softcapping", None))


def hidden_states(model: PreTrainedModel, batch: TreeBatch, store: PieceStore | None = None) -> Tensor:  # [T, H]
    """The final hidden states of the packed tokens, or of the ones of a piece.

    Raises:
        ValueError: the model was not loaded with ``attn_implementation="rolltree"``, or the batch is of pieces and none
            is named.
    """
    if batch.pieces and store is None:
        raise ValueError(
            "The batch holds a tree larger than its budget, to be computed in pieces; use backward, or pack "
            "without in_pieces."
        )
    implementation = model.config._attn_implementation
    if implementation != integration.NAME:
        raise ValueError(
            f"The model's attention is '{implementation}'; load it with attn_implementation='rolltree' or call "
            "model.set_attn_implementation('rolltree')."
        )
    decoder: nn.Module = model.get_decoder()
    rows = slice(None) if store is None else slice(store.piece.begin, store.piece.end)
    attend = {"subtree_end": batch.subtree_end} if store is None else {"kv_store": store}
    output = decoder(
        input_ids=batch.input_ids[None, rows],
        position_ids=batch.position_ids[None, rows],
        attention_mask=integration.MASK_STUB,
        use_cache=False,
        **attend,
    )
    return output.last_hidden_state[0]


def batch_logprob(
    model: PreTrainedModel, batch: TreeBatch, *, temperature: float = 1.0, want: Sequence[str] = ()
) -> LogprobOutput:
    """Log-probability of every pair of ``batch``, and on request (``want``) entropy and sum of squared probabilities.

    Returns:
        ``logprob [M]`` fp32, one value a pair. ``logsumexp``, ``entropy`` and ``sum_p2`` are per *pair* too. Those of a
        batch of pieces have no gradient.

    Raises:
        ValueError: as :func:`hidden_states`.
    """
    if batch.pieces:
        return _logprob_of_pieces(model, batch, temperature, want)
    return pair_logprob(
        model, hidden_states(model, batch), batch.target, batch.head_row, batch.head_index, temperature, want
    )


def _logprob_of_pieces(
    model: PreTrainedModel, batch: TreeBatch, temperature: float, want: Sequence[str]
) -> LogprobOutput:
    found: dict[str, Tensor] = {}

    def use(store: PieceStore, hidden: Tensor) -> None:
        p = store.piece
        some = pair_logprob(model, hidden, batch.target[p.pair], p.head_row, p.head_index, temperature, want)
        for name, values in some._asdict().items():
            if values is not None:
                found.setdefault(name, values.new_empty(len(batch.target)))[p.pair] = values

    (tree,) = batch.trees
    run = partial(hidden_states, model, batch)
    depth_first(tree, batch.pieces, batch.input_ids.device, run=run, use=use, gradients=False)
    return LogprobOutput(found["logprob"], found["logsumexp"], found.get("entropy"), found.get("sum_p2"), None)


def pair_logprob(
    model: PreTrainedModel,
    hidden: Tensor,  # [T, H]
    target: Tensor,  # [M]
    head_row: Tensor,  # [R]
    head_index: Tensor,  # [M]
    temperature: float,
    want: Sequence[str],
) -> LogprobOutput:
    """What the head says of ``target``, predicted by the rows ``head_row[head_index]``; all values are per pair."""
    weight, bias, softcap = head(model)
    out = linear_logprob(
        hidden.index_select(0, head_row),
        weight,
        target,
        row=head_index,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        want=want,
    )
    pair = head_index
    return LogprobOutput(
        logprob=out.logprob,
        logsumexp=out.logsumexp[pair],
        entropy=None if out.entropy is None else out.entropy[pair],
        sum_p2=None if out.sum_p2 is None else out.sum_p2[pair],
        extra_logprob=None,
    )


def batch_loss(
    model: PreTrainedModel,
    batch: TreeBatch,
    objective: Objective,
    *,
    normalizer: float | Tensor,
    temperature: float = 1.0,
    old_logprob: Tensor | None = None,  # [M]
    ref_logprob: Tensor | None = None,  # [M]
) -> PolicyLossOutput:
    """The objective's loss over all leaves of ``batch``, exact for shared tokens, ready for ``.backward()``.

    Args:
        normalizer: what the sum over logical tokens is divided by; see ``Objective.aggregation``. Give the count of the
            whole update, so that the loss does not depend on how it was cut into micro-batches.
        temperature: of the distribution whose log-probabilities enter the ratio.
        old_logprob: of the policy at the start of the update; None for a single on-policy update (ratio 1).
        ref_logprob: of the reference policy, for objectives with a KL term.
    """
    fields = batch.fields(objective, old_logprob=old_logprob, ref_logprob=ref_logprob)
    weight, bias, softcap = head(model)
    return linear_policy_loss(
        hidden_states(model, batch),
        weight,
        batch.target,
        fields,
        objective,
        normalizer=normalizer,
        row=batch.row,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
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

    Raises:
        UserError: it cannot be read, or has layers that cannot be tree-masked.
    """
    local = Path(path).exists() or str(path).startswith((".", "/", "~")) or str(path).count("/") != 1
    if local:
        check_model_dir(path)
    try:
        config = AutoConfig.from_pretrained(path)
        _check_layers(config, path)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=integration.NAME, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"The model '{path}' cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    return model.to(device)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model.

    Raises:
        UserError: there is none, or it names no end-of-sequence token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"The tokenizer in '{path}' cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"The tokenizer in '{path}' has no eos_token, so responses could not end; set one in its config."
        )
    return tokenizer


def _check_layers(config: Any, path: str | Path) -> None:
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - set(TREE_LAYERS)
    if kinds:
        raise UserError(
            f"'{path}' has layers that cannot be tree-masked ({', '.join(sorted(kinds))}); use another model."
        )
