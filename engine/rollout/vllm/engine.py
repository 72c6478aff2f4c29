"""vLLM as a `RolloutEngine`: prefixes are shared through its prefix cache, programs continue by new requests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerBase

# must be set before vllm is imported, so that weights can be passed within this process
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from ...batches.cost import CostModel
from ...chat.ends import end_token_ids
from ...model.loading import auto_class
from ...model.pictures import placeholders_of
from ..branch import Request
from ..digest import Held, digests
from ..engine import RolloutEngine
from ..packed import Changes
from .adapter import SIDE, Adapter
from .loop import VllmLoop, is_plain
from .pictures import check_pictures

Array = npt.NDArray[Any]
TRANSFER = "rolltree"
PLAIN = (VocabParallelEmbedding, LinearBase, RMSNorm, GemmaRMSNorm)
UNQUANTIZED = (type(None), UnquantizedEmbeddingMethod, UnquantizedLinearMethod)


@dataclass
class NoInfo:
    """Initialisation data of a transfer within the process: none."""


@dataclass
class Weights:
    """New weights by the names of a Hugging Face checkpoint."""

    weights: list[tuple[str, Tensor]]


class InProcessTransfer(WeightTransferEngine[NoInfo, Weights]):
    """vLLM's weight update for tensors of this process: it loads them without any transport."""

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
        # A head tied to the embedding is not reloaded itself, but on a CPU it has a packed copy of the weights.
        for module in self.model.modules():
            if isinstance(getattr(module, "quant_method", None), UnquantizedEmbeddingMethod):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass


if TRANSFER not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER, InProcessTransfer)


class VllmEngine(RolloutEngine):
    """Samples with vLLM, in this process.

    Differences from the native engine: entropies are not available, so programs that need them are refused; a fork is
    a new request, whose path vLLM finds in its prefix cache; a seed repeats a sample only in the same version of vLLM,
    and not across `abort`; there is no grammar hook, and no adapter but the policy's. vLLM's own drafts are enabled by
    ``speculative_config={"method": "suffix"}`` (or "ngram", "eagle", ..., see vLLM). Unlike the native engine's, they
    keep only the distribution of samples: with other drafts, the same seed gives other tokens. With drafts, vLLM 0.32
    on a CPU returns wrong log-probs after temperature and filters where it rejected a draft; those of the logits are
    right. Therefore temperatures other than 0 and 1, filters and biases are refused with drafts.

    Args:
        model: a Hugging Face directory.
        tokenizer: needed for prompts and stops given as text.
        raw_logprobs: also compute the log-probs under softmax(logits) if temperature, filters or biases make the
            sampling distribution differ from it; this takes one prefill for each response.
        adapter: the LoRA adapter that `update_weights` will get; None: it gets whole weights.
        engine_args: arguments of ``vllm.LLM``.

    Raises:
        ValueError: `submit` or `generate` asks for something that vLLM does not provide, as listed above.
    """

    loop: VllmLoop

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        raw_logprobs: bool = False,
        adapter: Adapter | None = None,
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
        if "mm_device_do_normalize" in EngineArgs.__dataclass_fields__:
            arguments["mm_device_do_normalize"] = False  # pixels are normalised by the trainer's processor
        if current_platform.is_cpu():  # on a CPU vLLM cannot rewind the seed of a prompt that it computes in parts
            arguments["enable_chunked_prefill"] = False
        self._drafts = engine_args.get("speculative_config") is not None
        if self._drafts:
            arguments["logprobs_mode"] = "raw_logprobs"
        self._adapter = adapter
        arguments |= (adapter.engine_args if adapter is not None else {}) | engine_args
        with _without_odd_modules():
            self.llm = LLM(model=model, **arguments)
        config = self.llm.model_config
        self.end_token_ids = end_token_ids(tokenizer, config.try_get_generation_config(), config.hf_text_config)
        self.placeholder_ids = placeholders_of(config.hf_config)
        hf = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            cost = CostModel.of(auto_class(hf).from_config(hf))
        self.loop = VllmLoop(self.llm, self.end_token_ids, cost, raw_logprobs=raw_logprobs)
        self._stopped: list[Request] = []  # in flight when it went to sleep

    def _score(self, prompts: Sequence[Array], continuations: Sequence[Sequence[Sequence[int]]]) -> list[list[Array]]:
        if self.loop.busy:
            raise RuntimeError("VllmEngine.score needs vLLM to itself; finish or abort the requests in flight first.")
        by_prompt = list(zip(prompts, continuations, strict=True))
        paths = [[*prompt.tolist(), *c] for prompt, of_prompt in by_prompt for c in of_prompt if len(c)]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
        whole = [TokensPrompt(prompt_token_ids=p) for p in paths]
        outputs = self.llm.generate(whole, params, use_tqdm=False, lora_request=self.loop.adapter)
        scored = iter(zip(paths, outputs, strict=True))
        logprobs: list[list[Array]] = []
        for prompt, of_prompt in by_prompt:
            logprobs.append(
                [_scores(*next(scored), len(prompt)) if len(c) else np.zeros(0, np.float32) for c in of_prompt]
            )
        return logprobs

    def update_weights(
        self,
        weights: Mapping[str, Tensor | Changes] | None = None,
        *,
        version: int | None = None,
        keep_kv: bool = False,
    ) -> None:
        if any(isinstance(value, Changes) for value in (weights or {}).values()):
            raise ValueError("vLLM loads whole weights, not their changes.")
        if weights and any((SIDE in name) != (self._adapter is not None) for name in weights):
            raise ValueError(
                "A VllmEngine with an adapter takes the adapter's weights alone, and one without takes whole weights; "
                "make it with or without `adapter`."
            )
        with self._lock:
            if weights is not None and self._adapter is not None:
                self._adapter.load(self.llm, weights)  # type: ignore[arg-type]
                self.loop.adapter = self._adapter.request
            elif weights is not None:
                self.llm.collective_rpc("start_weight_update")
                self.llm.collective_rpc("update_weights", args=({"weights": list(weights.items())},))
                self.llm.collective_rpc("finish_weight_update")
                self.llm.llm_engine.reset_encoder_cache()  # what the old tower made of pictures
            self.loop.version = self.loop.version + 1 if version is None else version
            self.llm.llm_engine.set_weight_version(str(self.loop.version))
            if not keep_kv:
                self.loop.preempt_all()

    def digests(self) -> dict[str, Held]:
        with self._lock:
            workers = self.llm.apply_model(_digests)
        return {name: held for of_worker in workers for name, held in of_worker.items()}

    def sleep(self, *, weights: bool = False) -> None:
        """Free the KV cache until `wake`; needs ``enable_sleep_mode=True``. Unfinished requests are aborted, and `wake`
        continues them."""
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
            if not self.llm.reset_prefix_cache():  # refused while requests hold keys
                self.loop.preempt_all()

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
        if request.media is not None:
            check_pictures(index, request.media, self.llm.model_config)
        name = type(request.program).__name__
        if request.program.needs_entropies:
            raise ValueError(f"{name} needs entropies, which vLLM does not return; use the native engine.")
        params = request.params
        if params.prefix_allowed_tokens_fn is not None or params.kept_tokens or params.adapter is not None:
            raise ValueError(
                "VllmEngine has no prefix_allowed_tokens_fn, no kept_tokens and no adapters; use the native engine."
            )
        if self._drafts and not is_plain(replace(params, temperature=params.temperature or 1.0)):
            raise ValueError(
                "With speculative_config vLLM returns wrong log-probs at temperatures other than 0 and 1 and with "
                "filters or biases; leave these or speculative_config out, or use the native engine and its drafts."
            )


@contextmanager
def _without_odd_modules() -> Iterator[None]:
    """Hide some modules while vLLM starts: on a CPU, vLLM 0.32 inspects every object of every module and fails on
    objects of llvmlite (numba) whose ``__dict__`` is no dictionary."""
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


def _digests(model: nn.Module) -> dict[str, Held]:
    """Return the digests of a worker's plain weights by the names of a Hugging Face checkpoint.

    vLLM holds the weights of some layers as one, such as those of queries, keys and values, which are separated here.
    Absent are quantised ones, experts, those distributed over devices, and on a CPU the layers that vLLM packs.
    """
    if get_tensor_model_parallel_world_size() > 1:
        return {}
    merged: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    held: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if not isinstance(module, PLAIN) or not isinstance(getattr(module, "quant_method", None), UNQUANTIZED):
            continue
        path = path.removesuffix(".base_layer")  # of an adapter
        parent, _, leaf = path.rpartition(".")
        for name, parameter in module.named_parameters(recurse=False):
            sizes = getattr(module, "output_sizes", None) if len(merged.get(leaf, ())) > 1 else None
            if not parameter.numel():  # a packed copy has taken its place
                continue
            if sizes is not None:
                for part, tensor in zip(merged[leaf], parameter.split(sizes), strict=True):
                    held[f"{parent}.{part}.{name}"] = tensor
            elif isinstance(module, VocabParallelEmbedding):
                held[f"{path}.{name}"] = parameter[: module.org_vocab_size]  # the rest is padding
            else:
                held[f"{path}.{name}"] = parameter
    return digests({_of_checkpoint(name, model): tensor for name, tensor in held.items()})


def _of_checkpoint(name: str, model: nn.Module) -> str:
    """Return a weight's name in the checkpoint; models with pictures have other names for their parts."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for old, new in (mapper.orig_to_new_prefix if mapper is not None else {}).items():
        if old and new and name.startswith(new):
            return f"{old}{name.removeprefix(new)}"
    return name


def _scores(path: list[int], output: Any, prompt: int) -> Array:
    logprobs = [
        likely[token].logprob for token, likely in zip(path[prompt:], output.prompt_logprobs[prompt:], strict=True)
    ]
    return np.array(logprobs, np.float32)
