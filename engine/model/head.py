"""The language-model head of a Hugging Face decoder: its weights, and the log-probs of given targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from rolltree.kernels import HeadLora, LogprobOutput, linear_logprob

from .sharding import whole


class Head(NamedTuple):
    """The language-model head: logits = softcap * tanh((hidden @ weight.T + bias) / softcap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None
    lora: HeadLora | None
    """peft's LoRA adapter on the head itself: the effective weight is ``weight + scale b a``."""


def head(model: PreTrainedModel) -> Head:
    """Return the head of ``model``, with its active adapter.

    Raises:
        ValueError: the model scales its logits, or adapts its head, in a way the fused head does not support.
    """
    return head_reader(model)()


def head_reader(model: PreTrainedModel) -> Callable[[], Head]:
    """Return a function that reads the head of ``model`` at every call, since adapters can change. The config is read
    only once, now.

    Raises:
        ValueError: as for :func:`head`; about adapters when the returned function is called.
    """
    config = model.config.get_text_config()
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{type(model).__name__} multiplies its logits ({name}), which the fused head does not support."
            )
    softcap = getattr(config, "final_logit_softcapping", None)

    def read() -> Head:
        layer = model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        return Head(whole(layer.weight), None if bias is None else whole(bias), softcap, _head_lora(layer))

    return read


def _head_lora(layer: Any) -> HeadLora | None:
    """Return peft's adapter on the head; ``weight`` of a peft layer is that of the layer it wraps."""
    if type(layer) is nn.Linear or not hasattr(layer, "base_layer") or layer.disable_adapters or layer.merged:
        return None
    remedy = "leave lm_head out of the adapter's target_modules"
    if not hasattr(layer, "lora_A"):
        raise ValueError(
            f"The head's adapter is {type(layer).__name__}, which the fused head does not support; {remedy}."
        )
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if not active:
        return None
    (name, *others), dropout = active, layer.lora_dropout[active[0]]
    unsupported = {
        "several adapters at once": bool(others),
        "a LoRA variant (use_dora, ...)": name in getattr(layer, "lora_variant", {}),
        "lora_bias": layer.lora_bias.get(name, False),
        "lora_dropout": layer.training and getattr(dropout, "p", 0) > 0,
    }
    if any(unsupported.values()):
        what = next(option for option, found in unsupported.items() if found)
        raise ValueError(f"The head's adapter has {what}, which the fused head does not support; {remedy}.")
    dtype = layer.weight.dtype
    a, b = (whole(side[name].weight).to(dtype) for side in (layer.lora_A, layer.lora_B))
    return HeadLora(a, b, float(layer.scaling[name]))


def target_logprob(
    model: PreTrainedModel,
    hidden: Tensor,  # [T, H]
    target: Tensor,  # [M]
    head_row: Tensor,  # [R]
    head_index: Tensor,  # [M]
    temperature: float | Tensor,  # one for all, or [R]
    want: Sequence[str],
) -> LogprobOutput:
    """Return the head's statistics of ``target``, predicted by the rows ``head_row[head_index]`` of ``hidden``.

    All values are fp32 and per target, ``[M]``.
    """
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
