"""The native rollout engine: prompts in, trees of responses out."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..integrations import transformers as integration
from ..programs import RolloutProgram, make_program
from ..tree import TokenTree
from .branch import Group
from .generation import Generation
from .kv_cache import KvCache
from .rows import RowTable
from .runner import Runner
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .stop_strings import StopStrings

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the native engine.

    Raises:
        ValueError: one of them is too small.
    """

    page_size: int = 16
    kv_tokens: int = 65536
    """Capacity of the paged KV cache, in tokens."""
    max_batch_rows: int = 512
    """Branches decoded together."""
    max_prefill_tokens: int = 2048
    """Prompt tokens computed beside them in one step."""

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batch_rows", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineConfig.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.kv_tokens < self.page_size:
            raise ValueError(f"EngineConfig.kv_tokens is {self.kv_tokens}; it must hold a page of {self.page_size}.")


class NativeEngine:
    """Samples with the very module that is trained.

    Args:
        model: a causal language model; its attention implementation is set to "rolltree".
        tokenizer: needed for prompts given as text; its end-of-sequence token ends responses too.

    Attributes:
        policy_version: written to every sampled token; the trainer raises it with each update.
        stats: counters of the last `generate` call. Tokens: ``logical_tokens`` (root-to-leaf paths), ``unique_tokens``
            (of the trees), ``sampled_tokens``, ``prefill_tokens`` (computed beside decoding); ``steps``, ``forks``,
            ``rewinds``, ``preemptions``; ``peak_pages`` and ``peak_kv_tokens`` of the KV cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or EngineConfig()
        self.policy_version = 0
        self.stats: dict[str, int] = {}
        if model.config._attn_implementation != integration.NAME:
            model.set_attn_implementation(integration.NAME)
        device = model.get_output_embeddings().weight.device
        self.cache = KvCache(self.config.kv_tokens, self.config.page_size, device)

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams,
        program: str | RolloutProgram = "flat",
        *,
        seeds: Sequence[int] | None = None,
    ) -> list[TokenTree]:
        """Sample responses: one tree a prompt, in their order, leaves in depth-first order.

        Args:
            prompts: token ids, or texts for the tokenizer.
            program: who forks and when; a name of `rolltree.engine.programs` or an object, copied for each prompt.
            seeds: one a prompt, instead of ``params.seed``. What a prompt's branches sample follows from its seed, its
                tokens and the parameters, not from the batch.

        Raises:
            ValueError: a prompt is empty or cannot fit, or the arguments do not go together.
            KvExhaustedError: not even one branch fits into the KV cache.
        """
        tokens = [self._token_ids(i, prompt, params) for i, prompt in enumerate(prompts)]
        if seeds is None:
            seeds = [params.seed] * len(tokens)
        if len(seeds) != len(tokens):
            raise ValueError(f"generate got {len(seeds)} seeds for {len(tokens)} prompts; give one a prompt.")
        if isinstance(program, str):
            program = make_program(program)
        groups = [
            Group(i, prompt, _signed(seed), params.n, copy.deepcopy(program))
            for i, (prompt, seed) in enumerate(zip(tokens, seeds, strict=True))
        ]
        # What earlier calls left in the node table shows in the last bits of the log-probs (2e-7 in fp32).
        self.cache.reset()
        with _evaluating(self.model), torch.inference_mode():
            scheduler = self._scheduler(params)
            generation = Generation(
                groups,
                params,
                scheduler,
                Runner(self.model, self.cache, params),
                is_stop=self._stop_table(params),
                stop_strings=self._stop_strings(params),
                policy_version=self.policy_version,
            )
            trees = generation.run()
        self.stats = {
            "logical_tokens": sum(tree.logical_tokens for tree in trees),
            "unique_tokens": sum(tree.num_tokens for tree in trees),
            **{name: generation.counts[name] for name in ("sampled_tokens", "steps", "forks", "rewinds")},
            "prefill_tokens": scheduler.prefill_tokens,
            "preemptions": scheduler.preemptions,
            "peak_pages": self.cache.tree.peak_pages,
            "peak_kv_tokens": self.cache.tree.peak_tokens,
        }
        return trees

    def _token_ids(self, index: int, prompt: Sequence[int] | str, params: SamplingParams) -> Array:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "generate got prompts as text but the engine has no tokenizer; pass one, or token ids."
                )
            prompt = self.tokenizer(prompt)["input_ids"]
        ids = np.asarray(prompt, np.int64)
        if ids.size == 0:
            raise ValueError(f"Prompt {index} is empty; a prompt needs at least one token.")
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ValueError(f"Prompt {index} has token ids outside the model's vocabulary of {vocabulary}.")
        size = self.config.page_size
        if -(-len(ids) // size) - (-params.max_new_tokens // size) > self.cache.tree.num_pages:
            raise ValueError(
                f"Prompt {index} of {len(ids)} tokens and max_new_tokens={params.max_new_tokens} cannot fit into the "
                f"KV cache; raise kv_tokens (now {self.config.kv_tokens}) or shorten them."
            )
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and len(ids) + params.max_new_tokens > longest:
            raise ValueError(
                f"Prompt {index} of {len(ids)} tokens and max_new_tokens={params.max_new_tokens} exceed the model's "
                f"{longest} positions; shorten them."
            )
        return ids.astype(np.int32)

    def _scheduler(self, params: SamplingParams) -> Scheduler:
        return Scheduler(
            self.cache,
            RowTable(),
            max_batch_rows=self.config.max_batch_rows,
            max_prefill_tokens=self.config.max_prefill_tokens,
            max_new_tokens=params.max_new_tokens,
        )

    def _stop_strings(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop:
            return None
        if self.tokenizer is None:
            raise ValueError(
                "SamplingParams.stop names texts but the engine has no tokenizer; pass one, or use stop_token_ids."
            )
        return StopStrings(params.stop, self.tokenizer)

    def _stop_table(self, params: SamplingParams) -> Array:  # [V] bool
        stop = set(params.stop_token_ids)
        for source in (self.model.generation_config, self.model.config.get_text_config(), self.tokenizer):
            eos = getattr(source, "eos_token_id", None)
            if not params.ignore_eos:
                stop.update([eos] if isinstance(eos, int) else eos or [])
        table = np.zeros(self.model.get_output_embeddings().weight.shape[0], np.bool_)
        table[[token for token in stop if 0 <= token < len(table)]] = True
        return table


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _signed(seed: int) -> int:
    """The seed modulo 2**64, as an int64."""
    return (int(seed) + 2**63) % 2**64 - 2**63
