"""The native rollout engine: samples with the same module that is trained."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...batches.cost import CostModel
from ...data.media import PromptMedia
from ...data.segment import Text
from ...errors import UserError
from ...model import attention, recurrent, routes
from ...model.lora import delete_adapter, use_adapter
from ...model.pictures import both_ways, family_of, not_touching, placeholders
from ..branch import Request
from ..digest import Held, digests
from ..engine import RolloutEngine
from ..failing import TooLongError
from ..packed import Changes
from ..sampling_params import INT32, check_integer
from .adapters import RowAdapters
from .cache.addresses import page_memory
from .cache.kv_cache import KvCache
from .cache.resting import PagesAtRest
from .cache.states import StateCache
from .drafts import DraftConfig, Drafts
from .filling import PREFILL_TOKENS, prefill_limit
from .loop import NativeLoop
from .runner import Runner
from .score import prompt_logprobs, score
from .stops import Stops
from .windows import MOST_STEPS

Array = npt.NDArray[Any]
log = logging.getLogger("rolltree.rollout")


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and switches of the native engine.

    Raises:
        ValueError: a size is out of range, or ``compile`` and ``debug`` are both set.
    """

    page_size: int = 16
    """Tokens of a page of the KV cache."""
    kv_tokens: int = 65536
    """Capacity of the paged KV cache, in tokens."""
    host_kv_tokens: int = 0
    """Tokens of preempted branches whose keys are kept in host memory instead of being computed again."""
    max_batch_rows: int = 512
    """Most branches decoded in one step."""
    max_prefill_tokens: int | None = None
    """Most tokens with missing keys computed in the same step, such as those of prompts. None: 2,048, on a GPU up to
    8,192, but fewer on long paths, whose attention needs memory for each `CHUNK` keys that a token sees."""
    kept_states: int = 64
    """States of recurrent layers that are kept besides those of running branches, for forks, rewinds, preempted and
    resumed branches and later prompts; without one, tokens are computed again. No effect on models without such layers.
    """
    cuda_graphs: bool = True
    """Replay steps that only decode as CUDA graphs; no effect on a CPU and on models with recurrent layers."""
    keep_pages: bool | Literal["auto"] = "auto"
    """Keep the memory of the KV cache through `sleep`; "auto": on a GPU, if there was room for both in the updates so
    far. `sleep(weights=True)` always frees it. Where it is freed, graphs stay valid if CUDA's driver can keep the
    addresses alone (`cache.addresses`); True does without these calls."""
    window: int | Literal["auto"] = "auto"
    """Most decoding steps that the device takes before the host looks at the samples, up to 8. The samples are the
    same. "auto": 8 where steps are replayed as CUDA graphs, else 1. Steps in which the host must see each token are
    taken one by one (`windows`)."""
    compile: bool = False
    """Let torch.compile fuse the operations between matrix products; the first steps wait for it."""
    record_routes: bool = False
    """Record the experts of every token of a mixture of experts as the trees' column `routes`, for
    `pack(replay_routes=True)`. On a GPU, decoding steps are then not replayed as CUDA graphs."""
    drafts: DraftConfig | None = None
    """Speculative decoding with tokens drafted from earlier texts; None for none. The sampled tokens are the same."""
    debug: bool = False
    """Check the KV tree after every step, and every layer's attention against the reference; slow."""

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batch_rows", "max_prefill_tokens"):
            if name != "max_prefill_tokens" or self.max_prefill_tokens is not None:
                check_integer(f"EngineConfig.{name}", getattr(self, name), 1, INT32)
        for name in ("kv_tokens", "host_kv_tokens", "kept_states"):  # slots are int32
            check_integer(f"EngineConfig.{name}", getattr(self, name), 0, INT32)
        if self.keep_pages not in (True, False, "auto"):
            raise ValueError(f'EngineConfig.keep_pages is {self.keep_pages!r}; give True, False or "auto".')
        if self.window != "auto":
            check_integer("EngineConfig.window", self.window, 1, MOST_STEPS)
            if self.window > 1 and (self.debug or self.record_routes):
                other = "debug" if self.debug else "record_routes"
                raise ValueError(f'EngineConfig.{other} looks at every step; set EngineConfig.window to 1 or "auto".')
        if self.compile and self.debug:
            raise ValueError("EngineConfig.debug looks into every layer, which compiled ones do not allow; choose one.")
        if self.compile and self.record_routes:
            raise ValueError(
                "EngineConfig.record_routes looks into routers, which compiled layers do not allow; choose one."
            )
        if self.kv_tokens < self.page_size:
            raise ValueError(f"EngineConfig.kv_tokens is {self.kv_tokens}; it must hold a page of {self.page_size}.")


class NativeEngine(RolloutEngine):
    """Continuous batching over a KV cache whose pages form the tree of rollouts.

    Args:
        model: a causal language model; its attention implementation is set to "rolltree".
        tokenizer: needed for prompts and stops given as text; its end-of-sequence token also ends responses.
        config: sizes and switches; None for the defaults.

    Raises:
        UserError: the compiled module is missing, ``compile`` is set for a model with recurrent layers, or routes are
            to be recorded and the model has no routers that are known.
    """

    loop: NativeLoop

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or EngineConfig()
        has_states = recurrent.install(model)
        if has_states and self.config.compile:
            raise UserError(
                f"{type(model).__name__} has recurrent layers, which the native engine cannot compile; set "
                "rollout.compile=false."
            )
        if has_states and self.config.window not in ("auto", 1):
            raise UserError(
                f"{type(model).__name__} has recurrent layers, whose states the host gives to each step; set "
                'rollout.window to "auto".'
            )
        if self.config.record_routes:
            routes.install(model)
        drafts = self.config.drafts
        if has_states and drafts is not None:
            log.warning("%s has recurrent layers, so no tokens are drafted.", type(model).__name__)
            drafts = None
        if model.config._attn_implementation != attention.NAME:
            model.set_attn_implementation(attention.NAME)
        self._device = model.get_output_embeddings().weight.device
        graphs = self.config.cuda_graphs and not (self.config.debug or has_states or self.config.record_routes)
        graphs = graphs and self._device.type == "cuda"
        self.cache = KvCache(
            self.config.kv_tokens,
            self.config.page_size,
            self._device,
            host_tokens=self.config.host_kv_tokens,
            states=StateCache(self.config.kept_states, self._device) if has_states else None,
            record_routes=self.config.record_routes,
            memory=page_memory(self._device) if graphs and self.config.keep_pages is not True else None,
            debug=self.config.debug,
        )
        stops = Stops(model, tokenizer)
        self.end_token_ids = stops.eos
        self.placeholder_ids = placeholders(model)
        self._adapters = RowAdapters(model)
        window = self.config.window
        if window == "auto":
            window = MOST_STEPS if graphs else 1
        self.loop = NativeLoop(
            self.cache,
            Runner(
                model,
                self.cache,
                self._adapters,
                compiled=self.config.compile,
                fused=not self.config.debug,
                cuda_graphs=graphs,
                window=window,
            ),
            stops,
            CostModel.of(model),
            max_batch_rows=self.config.max_batch_rows,
            prefill=prefill_limit(self.config.max_prefill_tokens, self._device),
            drafts=Drafts(drafts) if drafts else None,
            window=window,
            positions=self.longest,
        )
        self._at_rest = PagesAtRest(self._device, self.config.keep_pages, apart=self.cache.memory is not None)
        self._digests: dict[int, str] = {}  # of pictures, by their first token ids, for cached keys tell ids only

    def step(self) -> list[Request]:
        done = super().step()
        if self.config.debug:
            self.cache.tree.check()
        return done

    def _score(self, prompts: Sequence[Array], continuations: Sequence[Sequence[Sequence[int]]]) -> list[list[Array]]:
        tokens = max(self.config.max_prefill_tokens or 0, PREFILL_TOKENS)
        logprobs, work = score(self.model, prompts, continuations, max_tokens=tokens)
        self.loop.counts["scored_flop"] += round(self.loop.cost.forward(work))
        return logprobs

    def _prompt_logprobs(self, ids: Array, top: int, adapter: str | None) -> Array:  # [P] int32 -> [P - 1] records
        if adapter is None:
            return prompt_logprobs(self.model, self.loop.runner.logits, ids, top)
        self._check_adapter(adapter)
        with self.changing_adapters():
            use_adapter(self.model, adapter)
            return prompt_logprobs(self.model, self.loop.runner.logits, ids, top)

    @property
    def policy_version(self) -> int:
        return super().policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        if version != self.loop.version:  # the trainer of the same module has changed its weights
            self.loop.runner.towers.forget()
            self.cache.tree.let_go_all()  # keys of older weights are not found again
        RolloutEngine.policy_version.fset(self, version)  # type: ignore[attr-defined]

    def update_weights(
        self,
        weights: Mapping[str, Tensor | Changes] | None = None,
        *,
        version: int | None = None,
        keep_kv: bool = False,
    ) -> None:
        with self._lock:
            if weights is not None:
                _copy_weights(self.model, weights)
                self._adapters_moved()
            self.loop.runner.forget_moved_graphs()
            self.policy_version = self.loop.version + 1 if version is None else version
            self.loop.runner.towers.forget()  # also where the version stays
            if not keep_kv:
                self.loop.preempt_all()
                self.cache.forget_dropped()

    def digests(self) -> dict[str, Held]:
        with self._lock:
            return digests(dict(self.model.named_parameters()))

    def sleep(self, *, weights: bool = False) -> None:
        with self._lock:
            self._paused = True
            self.loop.preempt_all()
            keep = not weights and self._at_rest.keeps(self.cache.bytes)
            self.cache.free(keep_pages=keep)
            self.loop.runner.towers.forget()
            self._adapters_moved()
            if weights or not (keep or self.cache.memory):
                self.loop.runner.forget_graphs()  # and free their memory
            if weights:
                self.model.to("cpu")
            self._at_rest.begin()
            self._asleep = True

    def wake(self) -> None:
        with self._lock:
            if self._asleep:
                self._at_rest.end(self.cache.bytes)
            self.model.to(self._device)
            self.cache.map_pages()
            self.loop.runner.forget_moved_graphs()
            self._asleep = self._paused = False

    def forget_prefixes(self) -> None:
        with self._lock:
            self.cache.forget_prefixes()

    def let_go(self, owners: Iterable[int]) -> None:
        with self._lock:
            for owner in owners:
                self.cache.tree.let_go(owner)

    def remember(self, texts: Iterable[Text]) -> None:
        """Draft from texts that were sampled before a restart, or by another engine. No sampled token changes."""
        with self._lock:
            if self.loop.scheduler.drafts is not None:
                for text in texts:
                    self.loop.scheduler.drafts.remember(text)

    def load_adapter(self, name: str, path: str) -> None:
        """Make the LoRA adapter in directory ``path`` available as ``SamplingParams(adapter=name)``; needs `peft`.

        Rows of different adapters, and of none, are computed in the same steps.

        Raises:
            ValueError: an adapter of that name exists, or it is one that `add_adapter` refuses.
        """
        with self.changing_adapters():
            if name in self._adapters.numbers:
                raise ValueError(f"There is an adapter '{name}' already; give this one another name.")
            self.model.load_adapter(path, adapter_name=name)
            try:
                self.add_adapter(name)
            except ValueError:
                delete_adapter(self.model, name)
                raise

    def add_adapter(self, name: str) -> None:
        """Make a LoRA adapter that the module has already, and whose weights stay, available by its name.

        Raises:
            ValueError: it is a LoRA variant, or has a part that is no linear layer or is in the vision tower.
        """
        with self._lock:
            if self._adapters.add(name):
                self.cache.forget_prefixes()
            self.loop.runner.forget_graphs()

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter that no request samples with."""
        with self._lock:
            self._adapters.drop(name)
            self.loop.runner.forget_graphs()

    def _adapters_moved(self) -> None:
        if self._adapters.numbers:
            self._adapters.forget_tables()
            self.loop.runner.forget_graphs()

    def _check_adapter(self, name: str) -> int:
        """Return the number of an adapter."""
        if name not in self._adapters.numbers:
            loaded = ", ".join(self._adapters.numbers) or "none"
            raise ValueError(f"There is no adapter '{name}'; load_adapter has been called for: {loaded}.")
        return self._adapters.numbers[name]

    @contextmanager
    def changing_adapters(self) -> Iterator[None]:
        """Add or delete adapters of the module, or compute with one of them, in a with-block between two steps."""
        with self._lock:
            try:
                yield
            finally:
                use_adapter(self.model, None)

    @property
    def stats(self) -> dict[str, float]:
        """Counts of the base class, and ``prefill_tokens`` (computed for missing keys), ``prefix_hit_tokens`` (prompt
        tokens found in the cache), ``preemptions``, ``restored_tokens`` (keys copied back from the host),
        ``peak_pages`` and ``peak_kv_tokens`` of the KV cache, ``encoded_pictures`` (by the vision tower); with
        recurrent layers also ``peak_states`` (of running branches and kept) and ``state_evictions`` (kept states that
        were dropped for newer ones)."""
        scheduler, tree, states = self.loop.scheduler, self.cache.tree, self.cache.states
        return {
            **super().stats,
            "prefill_tokens": scheduler.prefill_tokens,
            "prefix_hit_tokens": tree.reused,
            "preemptions": scheduler.preemptions,
            "restored_tokens": scheduler.restored_tokens,
            "peak_pages": tree.peak_pages,
            "peak_kv_tokens": tree.peak_keys,
            "encoded_pictures": self.loop.runner.towers.encoded,
            **({} if states is None else {"peak_states": states.peak, "state_evictions": states.evictions}),
        }

    def reset_stats(self) -> None:
        super().reset_stats()
        scheduler = self.loop.scheduler
        self.loop.runner.towers.encoded = 0
        scheduler.prefill_tokens = scheduler.restored_tokens = scheduler.preemptions = 0
        self.cache.tree.start_counting()
        if self.cache.states is not None:
            self.cache.states.peak = self.cache.states.evictions = 0

    @property
    def vocabulary(self) -> int:
        return self.loop.vocabulary

    @property
    def longest(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def generation_config(self) -> Mapping[str, Any]:
        config = self.model.generation_config
        return {} if config is None else config.to_dict()

    def room(self, prompt_tokens: int) -> int:
        """Return the most tokens that a response to a prompt of ``prompt_tokens`` can have, by the model's positions
        and the KV cache; zero or negative if the prompt alone is too long.

        An eighth of the free pages is not counted: a prompt whose prefix is cached in pieces by other requests needs
        up to one more page for each piece.
        """
        free = self.cache.tree.num_pages - -(-prompt_tokens // self.config.page_size)
        spare = -(-free // 8) if free > 1 else 0
        cached = (free - spare) * self.config.page_size
        positions = super().room(prompt_tokens)
        return cached if positions is None else min(cached, positions)

    def _check(self, index: int, request: Request) -> None:
        if request.media is not None:
            self._check_pictures(index, request.media)
        if request.params.adapter is not None:
            request.adapter = self._check_adapter(request.params.adapter)

    def _check_length(self, index: int, prompt: int, most: int) -> None:
        size, pages = self.config.page_size, self.cache.tree.num_pages
        left, whole = pages - -(-prompt // size), pages * size
        if self.longest is not None and self.longest <= whole:
            super()._check_length(index, prompt, most)
        if -(-most // size) <= left:
            super()._check_length(index, prompt, most)
            return
        raise TooLongError(
            f"Prompt {index} of {prompt} tokens and max_new_tokens={most} cannot fit into the KV cache; raise "
            f"kv_tokens (now {self.config.kv_tokens}) or shorten them.",
            prompt, most, whole if prompt + most > whole else prompt + left * size,
        )  # fmt: skip

    def _check_pictures(self, index: int, media: PromptMedia) -> None:
        """Raise ValueError if the pictures of prompt ``index`` cannot be computed."""
        family, name = family_of(self.model), type(self.model).__name__
        if both_ways(self.model) is not None:
            ends = {end for _, end, _ in media.spans}
            not_touching(self.model, any(begin in ends for begin, _, _ in media.spans))
        for picture in media.pictures:
            if family.grid != (picture.grid is not None):
                raise ValueError(
                    f"Prompt {index} has pictures that were made for another model than {name}; make them with its "
                    "processor."
                )
            if self._digests.setdefault(picture.first_id, picture.digest) != picture.digest:
                raise ValueError(
                    f"Prompt {index} has a picture whose token ids are by chance those of an earlier one "
                    f"({picture.first_id}); leave it out."
                )

    @contextmanager
    def _computing(self) -> Iterator[None]:
        was_training = self.model.training
        if was_training:  # once for a batch, not at every step, because it takes as long as a layer
            self.model.eval()
        try:
            with torch.inference_mode():
                yield
        finally:
            if was_training:
                self.model.train()


def _copy_weights(model: PreTrainedModel, weights: Mapping[str, Tensor | Changes]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in weights.items():
        if name not in parameters:
            raise ValueError(f"The model has no parameter '{name}'; nothing was updated.")
        if parameters[name].shape != tensor.shape:
            raise ValueError(
                f"'{name}' has shape {list(tensor.shape)}, the model's {list(parameters[name].shape)}; nothing was "
                "updated."
            )
    with torch.no_grad():
        for name, tensor in weights.items():
            if isinstance(tensor, Changes):
                tensor.apply(parameters[name])
            elif parameters[name] is not tensor:  # a trainer of the same module passes the same tensors
                parameters[name].copy_(tensor)
