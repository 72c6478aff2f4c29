"""Executes a step: the trainer's own decoder over the step's rows, the head over the rows that sample, the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from rolltree.kernels import sample_tokens

from ..integrations.transformers import MASK_STUB
from ..model import head
from .kv_cache import KvCache
from .sampling_params import SamplingParams
from .scheduler import Step

Array = npt.NDArray[Any]


class Sampled(NamedTuple):
    """One entry a sample; a row that forks has several, one after the other."""

    token: Array  # [E] int64
    logprob: Array  # [E] float32, under the distribution sampled from
    entropy: Array  # [E] float32, of softmax(logits / temperature)


class Runner:
    """Runs steps of one ``generate`` call."""

    def __init__(self, model: PreTrainedModel, cache: KvCache, params: SamplingParams) -> None:
        self._decoder = model.get_decoder()
        self._head = head(model)
        self._device = self._head.weight.device
        self._cache = cache
        self._params = params
        self._bias = self._token_bias()

    def run(
        self,
        step: Step,
        samples: Array,  # [S] int64, samples to take from each of step.sample_rows
        seed: Array,  # [E] int64
        position: Array,  # [E] int64, of the sampled token in its response
    ) -> Sampled:
        self._cache.begin_step(step.kv_slots, step.plan, step.position_ids.astype(np.int32))
        output = self._decoder(
            input_ids=self._to_device(step.input_ids)[None],
            position_ids=self._to_device(step.position_ids)[None],
            attention_mask=MASK_STUB,
            use_cache=False,
            kv_store=self._cache,
        )
        if len(step.sample_rows) == 0:
            empty = np.zeros(0, np.float32)
            return Sampled(np.zeros(0, np.int64), empty, empty)
        logits = self._logits(output.last_hidden_state[0].index_select(0, self._to_device(step.sample_rows)))
        if len(seed) > len(samples):
            logits = logits.index_select(0, self._to_device(np.repeat(np.arange(len(samples)), samples)))
        params = self._params
        out = sample_tokens(
            logits,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p if params.top_p < 1 else None,
            min_p=params.min_p,
            seed=self._to_device(seed),
            step=self._to_device(position),
        )
        return Sampled(out.token.cpu().numpy(), out.logprob.cpu().numpy(), out.entropy.cpu().numpy())

    def _logits(self, hidden: Tensor) -> Tensor:  # [S, H] -> [S, V] fp32
        weight, bias, softcap = self._head
        if weight.dtype == torch.float32:
            logits = F.linear(hidden, weight)
        elif weight.is_cuda:
            logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
        else:
            logits = F.linear(hidden.float(), weight.float())
        if bias is not None:
            logits = logits + bias.float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits if self._bias is None else logits + self._bias

    def _token_bias(self) -> Tensor | None:  # [V] fp32
        params, vocabulary = self._params, len(self._head.weight)
        if not params.logit_bias and params.allowed_token_ids is None:
            return None
        bias = np.zeros(vocabulary, np.float32)
        if params.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[_in_vocabulary("allowed_token_ids", params.allowed_token_ids, vocabulary)] = 0
        bias[_in_vocabulary("logit_bias", list(params.logit_bias), vocabulary)] += list(params.logit_bias.values())
        return self._to_device(bias)

    def _to_device(self, values: Array) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _in_vocabulary(name: str, ids: Sequence[int], vocabulary: int) -> Array:  # [*] int64
    index = np.asarray(ids, np.int64)
    if len(index) and (index.min() < 0 or index.max() >= vocabulary):
        raise ValueError(f"SamplingParams.{name} names tokens outside the model's vocabulary of {vocabulary}.")
    return index
