"""The language-model head of a Hugging Face decoder: its weights, and the log-probs of given targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rolltree.kernels import HeadLora, LogprobOutput, VocabShards, linear_logprob
from rolltree.kernels.linear_logprob import linear_statistics

from .sharding import shards_of, whole

SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Names of the factor of the logits in configurations, and its power."""


class Head(NamedTuple):
    """The language-model head: logits = softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None
    lora: HeadLora | None
    """peft's LoRA adapter on the head itself: the effective weight is ``weight + lora.scale b a``."""
    scale: float = 1.0
    """The factor of the logits, which the ops take as a temperature of 1 / scale; 1 where there is a softcap."""
    shards: VocabShards | None = None
    """The ranks' rows of a weight that is split over the vocabulary, of which ``weight`` is this rank's."""

    def frozen(self) -> Head:
        """Return the head without gradient and with its adapter added to the weight; it keeps its present weights while
        those of another role take their place in the model."""
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        if self.lora is not None:
            weight = torch.addmm(weight, self.lora.b.detach(), self.lora.a.detach(), alpha=self.lora.scale)
        return self._replace(weight=weight, bias=bias, lora=None)

    def options(self, temperature: float | Tensor = 1.0) -> dict[str, Any]:
        """Return the keyword arguments of the fused head's ops other than the weight, at ``temperature``."""
        if self.scale != 1:
            temperature = temperature / self.scale
        options = {"bias": self.bias, "temperature": temperature, "softcap": self.softcap, "lora": self.lora}
        return options if self.shards is None else {**options, "tp_group": self.shards}


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the decoder below the head of ``model``; ``get_decoder`` of a few classes returns the model itself."""
    decoder = model.get_decoder()
    its_head = getattr(decoder, "get_output_embeddings", lambda: None)()
    return decoder.model if its_head is not None and hasattr(decoder, "model") else decoder


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
    softcap, scale = getattr(config, "final_logit_softcapping", None), 1.0
    for name, power in SCALES.items():
        factor = getattr(config, name, None)
        if factor is not None and factor != 1:
            if not factor > 0 or softcap is not None:
                also = f" and caps them at {softcap}" if softcap is not None else ""
                raise ValueError(
                    f"{type(model).__name__} multiplies its logits by {factor} ({name}){also}, which the fused head "
                    "does not support."
                )
            scale *= factor**power

    def read() -> Head:
        layer = model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        bias = None if bias is None else whole(bias)
        return Head(whole(layer.weight), bias, softcap, _head_lora(layer), scale, shards_of(layer.weight))

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
        what = next(option for option, present in unsupported.items() if present)
        raise ValueError(f"The head's adapter has {what}, which the fused head does not support; {remedy}.")
    dtype = layer.weight.dtype
    a, b = (whole(side[name].weight).to(dtype) for side in (layer.lora_A, layer.lora_B))
    return HeadLora(a, b, float(layer.scaling[name]))


def row_temperature(
    temperature: float | Tensor,  # one for all, or [M]
    head_index: Tensor,  # [M]
    rows: int,
) -> float | Tensor:  # one for all, or [rows]
    """Return the temperature of the head's rows from that of the targets, which agree wherever they share a row."""
    if not isinstance(temperature, Tensor):
        return temperature
    return temperature.new_ones(rows).scatter(0, head_index, temperature)


def target_logprob(
    model: PreTrainedModel,
    hidden: Tensor,  # [T, H]
    target: Tensor,  # [M]
    head_row: Tensor,  # [R]
    head_index: Tensor,  # [M]
    temperature: float | Tensor,  # one for all, or [M]
    want: Sequence[str],
) -> LogprobOutput:
    """Return the head's statistics of ``target``, predicted by the rows ``head_row[head_index]`` of ``hidden``.

    All values are fp32 and per target, ``[M]``.
    """
    lm_head = head(model)
    options = lm_head.options(row_temperature(temperature, head_index, len(head_row)))
    out = linear_logprob(hidden.index_select(0, head_row), lm_head.weight, target, row=head_index, want=want, **options)
    return LogprobOutput(
        logprob=out.logprob,
        logsumexp=out.logsumexp[head_index],
        entropy=None if out.entropy is None else out.entropy[head_index],
        sum_p2=None if out.sum_p2 is None else out.sum_p2[head_index],
        extra_logprob=None,
    )


def target_statistics(
    model: PreTrainedModel,
    hidden: Tensor,  # [T, H]
    target: Tensor,  # [M]
    head_row: Tensor,  # [R]
    head_index: Tensor,  # [M]
    temperature: float | Tensor,  # one for all, or [M]
    want: Sequence[str],
    extra_ids: Tensor | None,  # [M, K]
) -> dict[str, Tensor]:
    """Return ``logprob [M]`` and the statistics in ``want``, as `linear_statistics` does."""
    lm_head = head(model)
    options = lm_head.options(row_temperature(temperature, head_index, len(head_row)))
    rows = hidden.index_select(0, head_row)
    return linear_statistics(rows, lm_head.weight, target, row=head_index, want=want, extra_ids=extra_ids, **options)
