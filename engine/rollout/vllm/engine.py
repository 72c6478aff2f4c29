"""vLLM behind the interface of the native engine: group sampling over its prefix cache, programs by re-submission."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# before vllm is imported: weights are handed over in this process
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.inputs import TokensPrompt
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from ..branch import Request
from ..engine import RolloutEngine
from ..sampling_params import eos_token_ids
from .loop import VllmLoop, is_plain

Array = npt.NDArray[Any]
TRANSFER = "rolltree"


@dataclass
class NoInfo:
    """Nothing has to be known to begin."""


@dataclass
class Weights:
    """Tensors by the names of a Hugging Face checkpoint."""

    weights: list[tuple[str, Tensor]]


class InProcessTransfer(WeightTransferEngine[NoInfo, Weights]):
    """vLLM's weight updates where the tensors are at hand: no transport, only its loading."""

    init_info_cls = NoInfo
    update_info_cls = Weights

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Weights) -> None:
        self.model.load_weights(update_info.weights)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # A head tied to the embedding has no weights of its own to be reloaded, but on the CPU a packed copy of them.
        for module in self.model.modules():
            if isinstance(getattr(module, "quant_method", None), UnquantizedEmbeddingMethod):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass


if TRANSFER not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER, InProcessTransfer)


class VllmEngine(RolloutEngine):
    """Samples with vLLM, in this process.

    What differs from the native engine: entropies are not known, so programs that need them are refused; a program's
    fork is a new request, whose path vLLM finds in its prefix cache; a seed repeats a sample only in the same version
    of vLLM, and not over `abort`; there is no grammar hook and no adapter. vLLM's own drafts are
    ``speculative_config={"method": "suffix"}`` (or "ngram", "eagle", ..., see there); they keep the distribution of
    what is sampled, but unlike the native engine's not the sample: other drafts, other tokens from the same seed. With
    them vLLM's log-probs after temperature and filters are wrong where a draft was refused (0.32, on a CPU), and those
    of the logits are right: so temperatures but 0 and 1, filters and biases are refused.

    Args:
        model: a Hugging Face directory.
        tokenizer: needed for prompts and stops given as text.
        raw_logprobs: also compute the log-probs under softmax(logits) where temperature, filters or biases make them
            others than those sampled with: a prefill for each response.
        engine_args: of ``vllm.LLM``.
    """

    loop: VllmLoop

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        raw_logprobs: bool = False,
        **engine_args: Any,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        arguments: dict[str, Any] = {
            "tokenizer": None if tokenizer is None else tokenizer.name_or_path or model,
            "skip_tokenizer_init": tokenizer is None,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": 64,
            "weight_transfer_config": WeightTransferConfig(backend=TRANSFER),
        }
        if current_platform.is_cpu():  # there vLLM cannot rewind the seed of a prompt that it computes in parts
            arguments["enable_chunked_prefill"] = False
        self._drafts = engine_args.get("speculative_config") is not None
        if self._drafts:
            arguments["logprobs_mode"] = "raw_logprobs"
        arguments |= engine_args
        with _without_odd_modules():
            self.llm = LLM(model=model, **arguments)
        config = self.llm.model_config
        self.end_token_ids = eos_token_ids(config.try_get_generation_config(), config.hf_text_config, tokenizer)
        self.loop = VllmLoop(self.llm, self.end_token_ids, raw_logprobs=raw_logprobs)
        self._stopped: list[Request] = []  # in flight when it went to sleep

    def _score(self, prompts: Sequence[Array], continuations: Sequence[Sequence[Sequence[int]]]) -> list[list[Array]]:
        if self.loop.busy:
            raise RuntimeError("VllmEngine.score needs vLLM to itself; finish or abort the requests in flight first.")
        paths = [[*p.tolist(), *c] for p, some in zip(prompts, continuations, strict=True) for c in some if len(c)]
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
        outputs = self.llm.generate([TokensPrompt(prompt_token_ids=p) for p in paths], asked, use_tqdm=False)
        known = iter(zip(paths, outputs, strict=True))
        found: list[list[Array]] = []
        for prompt, some in zip(prompts, continuations, strict=True):
            found.append([np.zeros(0, np.float32) if not len(c) else _known(*next(known), len(prompt)) for c in some])
        return found

    def update_weights(
        self, weights: Mapping[str, Tensor] | None = None, *, version: int | None = None, keep_kv: bool = False
    ) -> None:
        with self._lock:
            if weights is not None:
                self.llm.collective_rpc("start_weight_update")
                self.llm.collective_rpc("update_weights", args=({"weights": list(weights.items())},))
                self.llm.collective_rpc("finish_weight_update")
            self.loop.version = self.loop.version + 1 if version is None else version
            self.llm.llm_engine.set_weight_version(str(self.loop.version))
            if not keep_kv:
                self.loop.preempt_all()

    def sleep(self, *, weights: bool = False) -> None:
        """It needs ``enable_sleep_mode=True``. Requests in flight are aborted, and taken up again by `wake`."""
        with self._lock:
            self._stopped = self.pause("abort")
            self.llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        with self._lock:
            if self._asleep:
                self.llm.wake_up()
            self._asleep = self._paused = False
            self.submit(self._stopped)
            self._stopped = []

    def forget_prefixes(self) -> None:
        with self._lock:
            self.llm.reset_prefix_cache()

    @property
    def vocabulary(self) -> int:
        return self.loop.vocabulary

    @property
    def longest(self) -> int | None:
        return self.llm.model_config.max_model_len

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self.llm.model_config.try_get_generation_config()

    def _check(self, index: int, request: Request) -> None:
        name = type(request.program).__name__
        if request.program.needs_entropies:
            raise ValueError(f"{name} looks at entropies, which vLLM does not tell; use the native engine.")
        params = request.params
        if params.prefix_allowed_tokens_fn is not None or params.kept_tokens or params.adapter is not None:
            raise ValueError(
                "VllmEngine has no prefix_allowed_tokens_fn, no kept_tokens and no adapters; use the native engine."
            )
        if self._drafts and not is_plain(replace(params, temperature=params.temperature or 1.0)):
            raise ValueError(
                "With speculative_config vLLM tells wrong log-probs at temperatures but 0 and 1 and with filters or "
                "biases; leave them out, or speculative_config, or use the native engine and its own drafts."
            )


@contextmanager
def _without_odd_modules() -> Iterator[None]:
    """On the CPU vLLM 0.32 looks into every object of every module, and trips over llvmlite's (numba's), whose
    ``__dict__`` is no dictionary; such modules are out of its sight while it starts."""
    odd = {
        name: module
        for name, module in list(sys.modules.items())
        if name.startswith("llvmlite.")
        and any(not isinstance(getattr(value, "__dict__", {}), Mapping) for value in vars(module).values())
    }
    for name in odd:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(odd)


def _known(path: list[int], output: Any, prompt: int) -> Array:
    logprobs = [
        known[token].logprob for token, known in zip(path[prompt:], output.prompt_logprobs[prompt:], strict=True)
    ]
    return np.array(logprobs, np.float32)
