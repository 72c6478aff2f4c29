"""Samples of a prompt from the base model or saved weights, and the log-probs of the prompt's own tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
from tinker.types import EncodedTextChunk, ImageChunk, ModelInput, SampleRequest

from ..data.media import Picture
from ..data.segment import LeafStatus
from ..fleet.rollouts import Rollouts
from ..rollout import NativeEngine, SamplingParams
from ..rollout.sampling_params import MOST_TOP_LOGPROBS
from .adapters import Lora
from .faults import FaultError
from .images import Images
from .losses import STABLE
from .store import Checkpoint
from .whole import Weights
from .wire import Array, Sampled, Top, check_ids, write_samples

MOST_SAMPLES = 1024
"""Most samples of a request."""


def read_prompt(prompt: ModelInput, vocabulary: int, images: Images) -> tuple[list[int], tuple[Picture, ...]]:
    """Return the ids of a prompt and its pictures.

    Raises:
        FaultError: it is empty, or holds something other than ids of the vocabulary and images of the model.
    """
    parts: list[Array | Picture] = []
    for j, chunk in enumerate(prompt.chunks):
        if isinstance(chunk, EncodedTextChunk):
            parts.append(check_ids("The prompt", np.asarray(chunk.tokens, np.int64), vocabulary))
        elif isinstance(chunk, ImageChunk):
            parts.append(images.read(f"Chunk {j} of the prompt", chunk.data, chunk.expected_tokens))
        else:
            raise FaultError(f"The prompt holds a {type(chunk).__name__}; give token ids and images as chunks.")
    ids, pictures = images.joined("The prompt", parts)
    if not len(ids):
        raise FaultError("The prompt is empty; give at least one token.")
    return ids.tolist(), pictures


def params_of(request: SampleRequest, room: int, prompt_tokens: int, vocabulary: int) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        room: most tokens of a response.
        vocabulary: of the model.

    Raises:
        FaultError: something cannot be done; the message names it.
    """
    sampling = request.sampling_params
    if not 1 <= request.num_samples <= MOST_SAMPLES:
        raise FaultError(f"num_samples is {request.num_samples}; give 1 to {MOST_SAMPLES}.")
    if request.record_stability_info:
        raise FaultError(f"record_stability_info is for what is not here: {STABLE}")
    if request.prompt_alt_tokens_k:
        raise FaultError("prompt_alt_tokens_k is not served; sample after each prefix of the prompt instead.")
    if request.target_prompt_logprobs is not None:
        raise FaultError("target_prompt_logprobs is not served; use forward with cross_entropy and 2-D target_tokens.")
    most = room if sampling.max_tokens is None else sampling.max_tokens
    if most < 1:
        raise FaultError(f"The prompt of {prompt_tokens} tokens leaves room for {most} more; shorten it.")
    for name, k in (("prompt", request.topk_prompt_logprobs), ("sample", request.topk_sample_logprobs)):
        if not 0 <= k <= min(MOST_TOP_LOGPROBS, vocabulary):
            raise FaultError(f"topk_{name}_logprobs is {k}; give 0 to {min(MOST_TOP_LOGPROBS, vocabulary)}.")
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last <= prompt_tokens - 1):
        raise FaultError(
            f"prompt_logprobs_last_n is {last}; give 1 to {prompt_tokens - 1}, and prompt_logprobs with it."
        )
    stop = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop or ())
    texts = [one for one in stop if isinstance(one, str)]
    ids = [one for one in stop if not isinstance(one, str)]
    try:
        return SamplingParams(
            n=request.num_samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=None if sampling.top_k == -1 else sampling.top_k,
            max_new_tokens=most,
            stop=texts,
            stop_token_ids=ids,
            top_logprobs=request.topk_sample_logprobs,
            ignore_eos=sampling.stop is not None and not stop,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        )
    except ValueError as wrong:
        raise FaultError(str(wrong)) from None


class Sampling:
    """Carries out sampling requests.

    Args:
        engine: samples; only its thread may call it.
        rollouts: submits to the engine.
        adapters: the saved adapters.
    """

    def __init__(self, engine: NativeEngine, rollouts: Rollouts, adapters: Weights) -> None:
        self._engine, self._rollouts, self._adapters = engine, rollouts, adapters

    async def sample(
        self,
        request: SampleRequest,
        ids: Sequence[int],
        pictures: Sequence[Picture],
        params: SamplingParams,
        weights: Checkpoint | None,
    ) -> bytes:
        """Return the samples of a request in the client's protobuf.

        Args:
            ids: the prompt.
            pictures: whose rows are in the prompt.
            weights: the adapter to sample with; None: the base model.

        Raises:
            FaultError: the engine refuses the request.
        """
        scoring = bool(request.prompt_logprobs or request.topk_prompt_logprobs)
        if pictures and scoring:
            raise FaultError("Log-probs of a prompt with images are not served; use forward with cross_entropy.")
        lora = None if weights is None else Lora(**weights.meta["lora"])
        with ExitStack() as held:
            name, give_back = await self._adapters.lend(None if weights is None else weights.place, lora)
            held.callback(give_back)
            scored = None
            if scoring:
                top = request.topk_prompt_logprobs
                scored = await self._rollouts.call(partial(self._engine.prompt_logprobs, ids, top, name))
            sequences = await self._sampled(ids, pictures, replace(params, adapter=name))
        logprobs, likeliest = _of_prompt(scored, request)
        return write_samples(sequences, logprobs, likeliest, request.topk_sample_logprobs, request.topk_prompt_logprobs)

    async def _sampled(self, ids: Sequence[int], pictures: Sequence[Picture], params: SamplingParams) -> list[Sampled]:
        try:
            job = await self._rollouts.submit([ids], [params], [params.seed], pictures=[pictures], watched=False)
        except ValueError as wrong:
            raise FaultError(str(wrong)) from None
        try:
            while not job.done:
                await job.changed.wait()
        finally:
            self._rollouts.finished(job)
        failed = job.error or next((rollout.error for rollout in job.rollouts if rollout.error is not None), None)
        if failed is not None:
            raise failed
        completions = job.rollouts[0].completions()
        if broken := next((one.error for one in completions if one.error is not None), None):
            raise RuntimeError(broken)
        return [
            Sampled(
                one.token_ids,
                one.raw_logprobs,
                one.status == LeafStatus.STOP,
                one.top if params.top_logprobs else None,
            )
            for one in completions
        ]


def _of_prompt(scored: Array | None, request: SampleRequest) -> tuple[Array | None, Top | None]:
    """Return the log-probs of the prompt's tokens, NaN where there are none, and the likeliest tokens."""
    if scored is None:
        return None, None
    logprobs = np.concatenate([[np.nan], scored["raw_logprob"]]).astype(np.float32)
    k = request.topk_prompt_logprobs
    top: list[dict[int, float]] = [{}]
    for record in scored if k else ():
        top.append(dict(zip(record["top_id"].tolist(), record["top_raw"].tolist(), strict=True)))
    if request.prompt_logprobs_last_n is not None:
        logprobs[: -request.prompt_logprobs_last_n] = np.nan
        first = len(logprobs) - request.prompt_logprobs_last_n
        top = [{} if i < first else likeliest for i, likeliest in enumerate(top)]
    return (logprobs if request.prompt_logprobs else None), (top if k else None)
