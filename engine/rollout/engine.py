"""The native rollout engine: prompts in, trees of responses out."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..integrations import transformers as integration
from ..programs import RolloutProgram, make_program
from ..tree import TokenTree
from .branch import Request
from .kv_cache import KvCache
from .loop import Loop
from .runner import Runner
from .sampling_params import SamplingParams
from .score import score
from .stops import Stops

Array = npt.NDArray[Any]
Prompt = Sequence[int] | str


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
    debug: bool = False
    """Check the KV tree after every step, and every layer's attention against the reference; slow."""

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batch_rows", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineConfig.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.kv_tokens < self.page_size:
            raise ValueError(f"EngineConfig.kv_tokens is {self.kv_tokens}; it must hold a page of {self.page_size}.")


class NativeEngine:
    """Samples with the very module that is trained.

    `generate` serves a batch; `submit` and `step`, or `stream`, serve requests as they come. All methods may be called
    from any thread; they take turns with the steps.

    Args:
        model: a causal language model; its attention implementation is set to "rolltree".
        tokenizer: needed for prompts and stops given as text; its end-of-sequence token ends responses too.
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
        if model.config._attn_implementation != integration.NAME:
            model.set_attn_implementation(integration.NAME)
        device = model.get_output_embeddings().weight.device
        self.cache = KvCache(self.config.kv_tokens, self.config.page_size, device, debug=self.config.debug)
        self.loop = Loop(
            self.cache,
            Runner(model, self.cache, self._use_adapter),
            Stops(model, tokenizer),
            max_batch_rows=self.config.max_batch_rows,
            max_prefill_tokens=self.config.max_prefill_tokens,
        )
        self._lock = threading.RLock()
        self._requests = 0
        self._paused = False
        self._device: torch.device | None = None  # where the weights belong, while they sleep
        self._adapters: list[str] = []
        self._adapter = 0
        self.reset_stats()

    # -- batches ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        program: str | RolloutProgram = "flat",
        *,
        seeds: Sequence[int] | None = None,
    ) -> list[TokenTree]:
        """Sample responses: one tree a prompt, in their order, leaves in depth-first order.

        Args:
            prompts: token ids, or texts for the tokenizer.
            params: for all prompts, or one a prompt.
            program: who forks and when; a name of `rolltree.engine.programs` or an object, copied for each prompt.
            seeds: one a prompt, instead of ``params.seed``. What a prompt's branches sample follows from its seed, its
                tokens and the parameters, not from the batch.

        Raises:
            ValueError: a prompt is empty or cannot fit, or the arguments do not go together.
            KvExhaustedError: not even one branch of a prompt fits into the KV cache.
            RuntimeError: a program answered what cannot be done, or the engine is paused or asleep.
        """
        if self._paused:
            raise RuntimeError("The engine is paused or asleep; call resume() or wake() before generate.")
        if not self.loop.busy:
            self.reset_stats()
        requests = self.submit(prompts, params, program, seeds=seeds)
        try:
            while not all(request.done for request in requests):
                self.step()
                for request in requests:
                    if request.error is not None:
                        raise request.error
        except BaseException:
            self.abort([request for request in requests if not request.done])
            raise
        return [request.tree for request in requests if request.tree is not None]

    def score(self, prompts: Sequence[Prompt], continuations: Sequence[Sequence[Sequence[int]]]) -> list[list[Array]]:
        """Log-probs of given continuations, by prefill alone; their shared prefixes are computed once.

        Args:
            prompts: token ids, or texts for the tokenizer.
            continuations: for each prompt the token ids of any number of continuations.

        Returns:
            for each prompt and continuation the log-probs [len(continuation)] float32, at temperature 1.
        """
        if len(prompts) != len(continuations):
            raise ValueError(f"score got {len(prompts)} prompts and {len(continuations)} lists of continuations.")
        tokens = [self._token_ids(i, prompt) for i, prompt in enumerate(prompts)]
        with self._lock, _evaluating(self.model):
            self._use_adapter(0)
            return score(self.model, tokens, continuations, max_tokens=max(self.config.max_prefill_tokens, 2048))

    # -- requests as they come --------------------------------------------------------------------------------------

    def submit(
        self,
        prompts: Sequence[Prompt | Request],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        program: str | RolloutProgram = "flat",
        *,
        seeds: Sequence[int] | None = None,
    ) -> list[Request]:
        """Queue requests, arguments as for `generate`; a `Request` that was aborted goes on where it stopped."""
        with self._lock:
            requests = self._requests_of(prompts, params, program, seeds)
            for request in requests:
                self.loop.add(request)
        return requests

    def step(self) -> list[Request]:
        """Compute one step of all requests; returns those that are done. Nothing happens while paused."""
        with self._lock:
            if self._paused:
                return []
            begin = time.perf_counter()
            with _evaluating(self.model), torch.inference_mode():
                done = self.loop.step()
            self._seconds += time.perf_counter() - begin
            if self.config.debug:
                self.cache.tree.check()
            for request in done:
                if request.tree is not None:
                    self._logical += request.tree.logical_tokens
                    self._unique += request.tree.num_tokens
            return done

    async def stream(
        self,
        prompts: Sequence[Prompt | Request],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        program: str | RolloutProgram = "flat",
        *,
        seeds: Sequence[int] | None = None,
    ) -> AsyncIterator[Request]:
        """Requests as they finish, ``request.tree`` or ``request.error`` set. Streams may run at the same time.

        Ending the iteration early aborts what is left.
        """
        requests = self.submit(prompts, params, program, seeds=seeds)
        try:
            left = list(requests)
            while left:
                for request in [request for request in left if request.done]:
                    left.remove(request)
                    yield request
                if left:
                    await asyncio.to_thread(self.step)
                    if self._paused:
                        await asyncio.sleep(0.005)
        finally:
            self.abort([request for request in requests if not request.done])

    def abort(self, requests: Sequence[Request] | None = None) -> list[Request]:
        """Stop requests (None: all) where they are; returns them.

        What they sampled stays with them: ``request.token_tree()`` shows it, and `submit` takes them up again, with the
        same result as if they had never been stopped, as far as the weights are the same.
        """
        with self._lock:
            if requests is None:
                requests = [*self.loop.scheduler.requests, *self.loop.scheduler.queue]
            here = [*self.loop.scheduler.requests, *self.loop.scheduler.queue]
            stopped = [request for request in requests if request in here]
            for request in stopped:
                self.loop.abort(request)
            return stopped

    def pause(self, mode: Literal["keep", "abort"] = "keep") -> list[Request]:
        """Compute nothing until `resume`. With "abort" all requests are aborted and returned."""
        with self._lock:
            self._paused = True
            return self.abort() if mode == "abort" else []

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._device is not None:
            raise RuntimeError("The engine is asleep; call wake() instead of resume().")
        self._paused = False

    # -- weights ----------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Written to every sampled token; raised by `update_weights`, or set by a trainer of the same module."""
        return self.loop.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.loop.version = version

    def update_weights(
        self, weights: Mapping[str, Tensor] | None = None, *, version: int | None = None, keep_kv: bool = False
    ) -> None:
        """New weights for all that is sampled from now on, also in responses already begun.

        Args:
            weights: by the names of ``model.named_parameters()``, copied in place; None where the module, being the
                trainer's own, has them already.
            version: of the policy from now on; one more than before if None.
            keep_kv: go on with keys that the old weights computed. Otherwise those of responses in flight are computed
                again.

        Raises:
            ValueError: a name or a shape that the model does not have; nothing has changed then.
        """
        with self._lock:
            if weights is not None:
                _copy_weights(self.model, weights)
            self.loop.version = self.loop.version + 1 if version is None else version
            if not keep_kv:
                self.loop.preempt_all()

    def sleep(self, *, weights: bool = False) -> None:
        """Give the memory of the KV cache back, and with ``weights`` that of the model to the host, until `wake`.

        Requests in flight stay and go on afterwards, their keys computed again.
        """
        with self._lock:
            self._paused = True
            self.loop.preempt_all()
            self.cache.free()
            self._device = self.model.get_output_embeddings().weight.device
            if weights:
                self.model.to("cpu")

    def wake(self) -> None:
        """Go on after `sleep`."""
        with self._lock:
            if self._device is not None:
                self.model.to(self._device)
                self._device = None
            self._paused = False

    def forget_prefixes(self) -> None:
        """Drop the keys that are kept for later requests with the same prefixes.

        A call that finds none computes the same to the last bit; with them, log-probs may differ by rounding.
        """
        with self._lock:
            self.cache.tree.forget()

    def load_adapter(self, name: str, path: str) -> None:
        """Make the LoRA adapter in directory ``path`` available as ``SamplingParams(adapter=name)``; needs `peft`.

        A step computes with one adapter; requests with different ones take turns.
        """
        with self._lock:
            if name in self._adapters:
                raise ValueError(f"There is an adapter '{name}' already; give this one another name.")
            self.model.load_adapter(path, adapter_name=name)
            self.model.disable_adapters()
            self._adapters.append(name)
            self._adapter = 0

    def _use_adapter(self, number: int) -> None:
        if number == self._adapter:
            return
        if number == 0:
            self.model.disable_adapters()
        else:
            self.model.enable_adapters()
            self.model.set_adapter(self._adapters[number - 1])
        self._adapter = number

    # -- counters ---------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, float]:
        """Counters since the last `generate` (or `reset_stats`).

        Tokens: ``logical_tokens`` (root-to-leaf paths) and ``unique_tokens`` of finished trees, ``sampled_tokens``,
        ``prefill_tokens`` (computed beside decoding), ``prefix_hit_tokens`` (of prompts, found in the cache). Events:
        ``steps``, ``forks``, ``rewinds``, ``pruned``, ``preemptions``, ``failed_calls``, ``appends_too_long``.
        ``bubble``: the share of unfinished branches, summed over the steps, that sampled nothing. ``peak_pages`` and
        ``peak_kv_tokens`` of the KV cache. ``logical_tokens_per_s``, ``unique_tokens_per_s``.
        """
        counts, scheduler, tree = self.loop.counts, self.loop.scheduler, self.cache.tree
        events = ("sampled_tokens", "steps", "forks", "rewinds", "pruned", "failed_calls", "appends_too_long")
        branch_steps = counts["row_steps"] + counts["idle_row_steps"]
        return {
            **{name: counts[name] for name in events},
            "logical_tokens": self._logical,
            "unique_tokens": self._unique,
            "prefill_tokens": scheduler.prefill_tokens,
            "prefix_hit_tokens": tree.reused,
            "preemptions": scheduler.preemptions,
            "bubble": counts["idle_row_steps"] / branch_steps if branch_steps else 0.0,
            "peak_pages": tree.peak_pages,
            "peak_kv_tokens": tree.peak_keys,
            "logical_tokens_per_s": self._logical / self._seconds if self._seconds else 0.0,
            "unique_tokens_per_s": self._unique / self._seconds if self._seconds else 0.0,
        }

    def reset_stats(self) -> None:
        self.loop.counts.clear()
        self.loop.scheduler.prefill_tokens = self.loop.scheduler.preemptions = 0
        self.cache.tree.start_counting()
        self._logical = self._unique = 0
        self._seconds = 0.0

    # -- checks of what is asked ------------------------------------------------------------------------------------

    def _requests_of(
        self,
        prompts: Sequence[Prompt | Request],
        params: SamplingParams | Sequence[SamplingParams] | None,
        program: str | RolloutProgram,
        seeds: Sequence[int] | None,
    ) -> list[Request]:
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        for name, values in (("SamplingParams", each), ("seeds", seeds)):
            if values is not None and len(values) != len(prompts):
                raise ValueError(f"Got {len(values)} {name} for {len(prompts)} prompts; give one a prompt.")
        if isinstance(program, str):
            program = make_program(program)
        requests = []
        for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            if isinstance(prompt, Request):
                requests.append(prompt)
                continue
            if own is None:
                raise ValueError("New prompts need SamplingParams; only aborted requests bring their own.")
            tokens = self._token_ids(i, prompt)
            self._check_size(i, tokens, own)
            self.loop.runner.check(own)
            mine = copy.deepcopy(program)
            mine.tokenizer = self.tokenizer
            if self.tokenizer is None and (own.stop or mine.segment_stop):
                raise ValueError(
                    "Stops are given as texts but the engine has no tokenizer; pass one, or use stop_token_ids."
                )
            seed = own.seed if seeds is None else seeds[i]
            request = Request(self._requests, tokens, _signed(seed), own, mine)
            request.adapter = self._adapter_number(own.adapter)
            self._requests += 1
            requests.append(request)
        return requests

    def _adapter_number(self, name: str | None) -> int:
        if name is None:
            return 0
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise ValueError(f"There is no adapter '{name}'; load_adapter has been called for: {known}.")
        return self._adapters.index(name) + 1

    def _token_ids(self, index: int, prompt: Prompt) -> Array:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("Prompts are given as text but the engine has no tokenizer; pass one, or token ids.")
            prompt = self.tokenizer(prompt)["input_ids"]
        ids = np.asarray(prompt, np.int64)
        if ids.size == 0:
            raise ValueError(f"Prompt {index} is empty; a prompt needs at least one token.")
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ValueError(f"Prompt {index} has token ids outside the model's vocabulary of {vocabulary}.")
        return ids.astype(np.int32)

    def _check_size(self, index: int, ids: Array, params: SamplingParams) -> None:
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


def _copy_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in weights.items():
        if name not in own:
            raise ValueError(f"The model has no parameter '{name}'; nothing was updated.")
        if own[name].shape != tensor.shape:
            raise ValueError(
                f"'{name}' has shape {list(tensor.shape)}, the model's {list(own[name].shape)}; nothing was updated."
            )
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


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
