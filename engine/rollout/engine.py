"""The interface of a rollout engine: batches, streams, requests that are aborted and continued. A backend samples."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy.typing as npt
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..data.media import Picture
from ..data.segment import Text
from ..data.tree import TokenTree
from ..programs import BranchId, RolloutProgram, make_program
from .branch import Request
from .checks import check_params, media_of, signed, token_ids
from .counters import Counters
from .digest import Held
from .failing import check_length, check_prompt
from .packed import Changes
from .sampling_params import INT32, MOST_TOP_LOGPROBS, SEEDS, SamplingParams, check_integer
from .steering import Steering

Array = npt.NDArray[Any]
Prompt = Sequence[int] | str


class RolloutEngine(ABC):
    """Turns prompts into trees of responses.

    `generate` serves a batch; `submit` with `step`, or `stream`, serves requests as they arrive. All methods may be
    called from any thread; a lock serialises them with the steps.
    """

    loop: Steering
    tokenizer: PreTrainedTokenizerBase | None
    end_token_ids: Collection[int] = ()
    """End-of-sequence tokens of the model."""
    placeholder_ids: Collection[int] = ()
    """Tokens that stand for pictures, which are never sampled."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = 0
        self._paused = False
        self._asleep = False
        self._counters = Counters()

    # -- batches ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        program: str | RolloutProgram = "flat",
        *,
        seeds: Sequence[int] | None = None,
        contexts: Sequence[Any] | None = None,
        pictures: Sequence[Sequence[Picture]] | None = None,
        held_out: bool = False,
    ) -> list[TokenTree]:
        """Sample the responses to a batch of prompts.

        Args:
            prompts: token ids, or texts for the tokenizer.
            params: parameters for all prompts, or one for each prompt.
            program: decides which branches fork and when; a name from `rolltree.engine.programs` or an object, which
                is copied for each prompt.
            seeds: one for each prompt, instead of ``params.seed``. The samples of a prompt depend on its seed, its
                tokens and its parameters, not on the batch.
            contexts: one for each prompt, passed to its program: for example the answer to verify with.
            pictures: those of each prompt, whose token ids hold the ids of their rows (`media.expand`).
            held_out: the prompts are held-out problems, whose FLOP are counted apart (`stats`).

        Returns:
            One tree for each prompt, in the order of ``prompts``, its leaves in depth-first order.

        Raises:
            ValueError: a prompt is empty or too long, or the arguments contradict each other.
            KvExhaustedError: not even one branch of a prompt fits into the KV cache.
            RuntimeError: a program asked for an impossible action, or the engine is paused or asleep.
        """
        if self._paused:
            raise RuntimeError("The engine is paused or asleep; call resume() or wake() before generate.")
        if not self.loop.busy:
            self.reset_stats()
        with self._lock:
            requests = self.submit(prompts, params, program, seeds=seeds, contexts=contexts, pictures=pictures)
            for request in requests:
                request.held_out = held_out
        try:
            with self._computing():
                while not all(request.done for request in requests):
                    for request in self.step():
                        if request.error is not None and request in requests:
                            raise request.error
        except BaseException:
            self.abort([request for request in requests if not request.done])
            raise
        return [request.tree for request in requests if request.tree is not None]

    def score(self, prompts: Sequence[Prompt], continuations: Sequence[Sequence[Sequence[int]]]) -> list[list[Array]]:
        """Compute the log-probs of given continuations by prefill alone; shared prefixes are computed once.

        Args:
            prompts: token ids, or texts for the tokenizer.
            continuations: for each prompt the token ids of any number of continuations.

        Returns:
            For each prompt and continuation the log-probs [len(continuation)] float32, at temperature 1.

        Raises:
            ValueError: a prompt is empty or invalid, or ``prompts`` and ``continuations`` differ in length.
        """
        if len(prompts) != len(continuations):
            raise ValueError(f"score got {len(prompts)} prompts and {len(continuations)} lists of continuations.")
        tokens = [self._token_ids(i, prompt) for i, prompt in enumerate(prompts)]
        with self._lock, self._computing():
            return self._score(tokens, continuations)

    # -- requests as they come --------------------------------------------------------------------------------------

    def submit(
        self,
        prompts: Sequence[Prompt | Request],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        program: str | RolloutProgram = "flat",
        *,
        seeds: Sequence[int] | None = None,
        contexts: Sequence[Any] | None = None,
        pictures: Sequence[Sequence[Picture]] | None = None,
    ) -> list[Request]:
        """Queue requests; arguments as for `generate`. An aborted `Request` continues where it stopped.

        Either all are queued or none. A later failure of one request ends only that request, with the reason in
        ``request.error``; a step that fails as a whole ends all requests that it computed.

        Raises:
            ValueError: a prompt is empty or too long, or the arguments contradict each other; the message names it.
        """
        with self._lock:
            requests = self._requests_of(prompts, params, program, seeds, contexts, pictures)
            for i, request in enumerate(requests):
                try:
                    self.loop.add(request)
                except BaseException:
                    for queued in requests[:i]:
                        self.loop.abort(queued)
                    raise
        return requests

    def step(self) -> list[Request]:
        """Compute one step of all requests; return those that are done. While paused, compute nothing."""
        with self._lock:
            if self._paused:
                return []
            begin = time.perf_counter()
            with self._computing():
                done = self.loop.step()
            self._counters.seconds += time.perf_counter() - begin
            for request in done:
                if request.tree is not None:
                    self._counters.logical += request.tree.logical_tokens
                    self._counters.unique += request.tree.num_tokens
            return done

    async def stream(
        self,
        prompts: Sequence[Prompt | Request],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        program: str | RolloutProgram = "flat",
        *,
        seeds: Sequence[int] | None = None,
        contexts: Sequence[Any] | None = None,
        pictures: Sequence[Sequence[Picture]] | None = None,
    ) -> AsyncIterator[Request]:
        """Yield requests as they finish, with ``request.tree`` or ``request.error`` set; arguments as for `submit`.

        Several streams may run at the same time. Ending the iteration early aborts the unfinished requests.
        """
        requests = self.submit(prompts, params, program, seeds=seeds, contexts=contexts, pictures=pictures)
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

    def progress(self, request: Request) -> dict[BranchId, Array]:
        """Return the response so far of every branch of a request, finished branches included.

        Returns:
            Records [tokens] with the fields ``token`` (the id), ``logprob``, ``raw_logprob``, ``entropy``, ``version``,
            and for ``SamplingParams.top_logprobs`` likeliest tokens ``top_id``, ``top_logprob`` and ``top_raw``.
        """
        with self._lock:
            branches = [*request.leaves.values(), *request.unfinished]
            return {b.id: self.loop.records_so_far(b) for b in branches if b.id}

    def prompt_logprobs(self, prompt: Prompt, top_logprobs: int = 0, adapter: str | None = None) -> Array:
        """Compute the log-probs of a prompt's own tokens, except the first, by prefill alone.

        Returns:
            Records [P - 1] as in `progress`; ``token``, ``raw_logprob``, ``top_id`` and ``top_raw`` are set.

        Raises:
            ValueError: the prompt is empty or exceeds the model's positions, or the engine does not compute them or has
                no such adapter.
        """
        ids = self._token_ids(0, prompt)
        check_integer("top_logprobs", top_logprobs, 0, min(self.vocabulary, MOST_TOP_LOGPROBS))
        check_prompt(len(ids), self.longest)
        with self._lock, self._computing():
            return self._prompt_logprobs(ids, top_logprobs, adapter)

    def abort(self, requests: Sequence[Request] | None = None) -> list[Request]:
        """Stop requests (None: all) at their present tokens and return them.

        They keep their sampled tokens: ``request.token_tree()`` returns these, and `submit` continues the requests.
        """
        with self._lock:
            here = [*self.loop.requests, *self.loop.queued]
            stopped = here if requests is None else [request for request in requests if request in here]
            for request in stopped:
                self.loop.abort(request)
            return stopped

    def pause(self, mode: Literal["keep", "abort"] = "keep") -> list[Request]:
        """Compute nothing until `resume`. With "abort", also abort all requests and return them."""
        with self._lock:
            self._paused = True
            return self.abort() if mode == "abort" else []

    def resume(self) -> None:
        """Continue after `pause`.

        Raises:
            RuntimeError: the engine is asleep.
        """
        if self._asleep:
            raise RuntimeError("The engine is asleep; call wake() instead of resume().")
        self._paused = False

    # -- weights and memory -----------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Version recorded with every sampled token; `update_weights` raises it, or a trainer of the same module sets
        it."""
        return self.loop.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        check_integer("policy_version", version, 0, INT32)
        self.loop.version = version

    @abstractmethod
    def update_weights(
        self,
        weights: Mapping[str, Tensor | Changes] | None = None,
        *,
        version: int | None = None,
        keep_kv: bool = False,
    ) -> None:
        """Use new weights for every token sampled from now on, also in unfinished responses.

        Args:
            weights: tensors by the names of the model's parameters, copied in place, or `Changes` of them; None if the
                model's own parameters have been changed in place.
            version: version of the policy from now on; None adds one.
            keep_kv: keep the keys that the old weights computed. Otherwise the keys of unfinished responses are
                recomputed.

        Raises:
            ValueError: the model has no parameter of a given name or shape; nothing has changed then.
        """

    @abstractmethod
    def digests(self) -> dict[str, Held]:
        """Return the digests of the weights that the engine computes with, by the names of the model's parameters.

        Weights that the engine keeps in another form (packed, quantised, distributed over devices) are absent.
        """

    @abstractmethod
    def sleep(self, *, weights: bool = False) -> None:
        """Free the memory of the KV cache until `wake`; with ``weights``, also move the model to the host.

        Unfinished requests stay and continue afterwards; their keys are recomputed.
        """

    @abstractmethod
    def wake(self) -> None:
        """Continue after `sleep`."""

    def remember(self, texts: Iterable[Text]) -> None:
        """Draft from texts that were sampled before a restart, or elsewhere; an engine without drafts ignores them.

        This changes no sampled token.
        """
        return

    def let_go(self, owners: Iterable[int]) -> None:
        """Treat the keys of these owners' requests (`Job.owner`) as those of any others; without effect on samples."""
        return

    @abstractmethod
    def forget_prefixes(self) -> None:
        """Drop the cached keys of prefixes.

        A call without cached prefixes gives the same bits every time; with them, log-probs may differ by rounding.
        """

    # -- counters ---------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, float]:
        """Counters since the last `generate` or `reset_stats`; see `Counters.read`."""
        return self._counters.read(self.loop.counts)

    def reset_stats(self) -> None:
        """Set the counters of `stats` to 0."""
        self._counters = Counters(self.loop.counts.copy())

    # -- properties of a backend ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of tokens in the model's vocabulary."""

    @property
    @abstractmethod
    def longest(self) -> int | None:
        """Number of positions of the model; None without a limit."""

    @property
    @abstractmethod
    def generation_config(self) -> Mapping[str, Any]:
        """Settings of the model's generation_config.json, by the names of Transformers' ``GenerationConfig``."""

    def room(self, prompt_tokens: int) -> int | None:
        """Return the maximum length in tokens of a response to a prompt of ``prompt_tokens``; None without a limit.

        The result is not positive if the prompt alone is too long.
        """
        return None if self.longest is None else self.longest - prompt_tokens

    def _check_length(self, index: int, prompt: int, most: int) -> None:
        """Raise TooLongError if prompt ``index`` of ``prompt`` tokens has no room for a response of ``most`` tokens."""
        check_length(index, prompt, most, self.longest)

    @abstractmethod
    def _check(self, index: int, request: Request) -> None:
        """Raise ValueError if the backend cannot serve the request of prompt ``index``."""

    @abstractmethod
    def _score(
        self, prompts: Sequence[Array], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Array]]:  # prompts: each [P] int32
        """See `score`."""

    def _prompt_logprobs(self, ids: Array, top: int, adapter: str | None) -> Array:  # [P] int32 -> [P - 1] records
        raise ValueError(f"{type(self).__name__} does not compute the log-probs of a prompt's own tokens.")

    def _computing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    # -- checks of requests -----------------------------------------------------------------------------------------

    def _requests_of(
        self,
        prompts: Sequence[Prompt | Request],
        params: SamplingParams | Sequence[SamplingParams] | None,
        program: str | RolloutProgram,
        seeds: Sequence[int] | None,
        contexts: Sequence[Any] | None,
        pictures: Sequence[Sequence[Picture]] | None,
    ) -> list[Request]:
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        per_prompt = {"SamplingParams": each, "seeds": seeds, "contexts": contexts, "lists of pictures": pictures}
        for name, values in per_prompt.items():
            if values is not None and len(values) != len(prompts):
                raise ValueError(f"Got {len(values)} {name} for {len(prompts)} prompts; give one a prompt.")
        program = make_program(program) if isinstance(program, str) else program
        requests = []
        for i, (prompt, of_prompt) in enumerate(zip(prompts, each, strict=True)):
            if isinstance(prompt, Request):
                requests.append(prompt)
                continue
            if of_prompt is None:
                raise ValueError("New prompts need SamplingParams; only aborted requests bring their own.")
            shown = () if pictures is None else pictures[i]
            tokens = self._token_ids(i, prompt, shown)
            self._check_length(i, len(tokens), of_prompt.max_new_tokens)
            check_params(of_prompt, self.vocabulary)
            copied = copy.deepcopy(program)
            copied.tokenizer, copied.end_token_ids = self.tokenizer, self.end_token_ids
            copied.context = None if contexts is None else contexts[i]
            if self.tokenizer is None and (of_prompt.stop or copied.segment_stop):
                raise ValueError(
                    "Stops are given as texts but the engine has no tokenizer; pass one, or use stop_token_ids."
                )
            seed = of_prompt.seed if seeds is None else seeds[i]
            check_integer(f"The seed of prompt {i}", seed, *SEEDS)
            request = Request(self._numbers, tokens, signed(seed), of_prompt, copied, media_of(i, tokens, shown))
            self._check(i, request)
            self._numbers += 1
            requests.append(request)
        return requests

    def _token_ids(self, index: int, prompt: Prompt, pictures: Sequence[Picture] = ()) -> Array:
        return token_ids(index, prompt, self.tokenizer, self.vocabulary, self.placeholder_ids, pictures)
