"""Clients that people use, beside OpenAI's own: litellm, verifiers, and lm_eval with a task of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rolltree.engine.rollout import NativeEngine

from ..support.serving import in_thread, save

CHOICES = ["ab", "cd ef", "xyz"]


@pytest.fixture(scope="module")
def url(engine: NativeEngine) -> Iterator[str]:
    with in_thread(engine) as url:
        yield url


def test_litellm_chats_streams_and_is_refused(url: str) -> None:
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    body: dict[str, Any] = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none", "seed": 1}
    body |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "num_retries": 0}
    whole = litellm.completion(**body, logprobs=True, top_logprobs=2)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    pieces = [part.choices[0].delta.content or "" for part in litellm.completion(**body, stream=True)]
    assert "".join(pieces) == whole.choices[0].message.content
    with pytest.raises(litellm.BadRequestError, match="temperature is -1"):
        litellm.completion(**{**body, "temperature": -1})


def test_verifiers_completes_relays_and_is_refused(url: str) -> None:
    pytest.importorskip("verifiers.v1", reason="needs verifiers")
    import verifiers.v1 as vf
    from verifiers.v1.dialects import ChatDialect

    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    body |= {"max_tokens": 8, "seed": 1}

    async def talk() -> tuple[Any, bytes]:
        client = vf.resolve_client(vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="NONE"))
        dialect = ChatDialect()
        whole = await client.get_response(dialect, body, vf.SamplingConfig())
        stream = await client.relay(dialect, {**body, "stream": True})
        pieces = b"".join([chunk async for chunk in stream.chunks])
        await stream.close()
        with pytest.raises(vf.ProviderError, match="temperature is -1"):
            await client.get_response(dialect, {**body, "temperature": -1}, vf.SamplingConfig())
        await client.close()
        return whole, pieces

    whole, pieces = asyncio.run(talk())
    assert whole.message.content == whole.raw["choices"][0]["message"]["content"]
    assert whole.usage.completion_tokens == whole.raw["usage"]["completion_tokens"]
    assert pieces.endswith(b"data: [DONE]\n\n")
    sent = [json.loads(line[6:]) for line in pieces.decode().splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in sent) == whole.message.content


def test_lm_eval_scores_choices_as_the_engine_does(
    url: str, engine: NativeEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm_eval[api]")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    directory = str(save(tmp_path_factory.mktemp("model")))
    lm = LocalCompletionsAPI(
        model="tiny",
        base_url=f"{url}/v1/completions",
        tokenizer=directory,
        num_concurrent=1,
        max_retries=1,
        batch_size=2,
    )
    questions = [("What?", choice) for choice in CHOICES]
    found = lm.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(questions)])
    assert engine.tokenizer is not None
    for (logprob, greedy), (question, choice) in zip(found, questions, strict=True):
        context, ids = (engine.tokenizer(text)["input_ids"] for text in (question, choice))
        (expected,) = engine.score([context], [[ids]])[0]
        np.testing.assert_allclose(logprob, expected.sum(), rtol=0, atol=1e-4)
        top = engine.prompt_logprobs(context + ids, 1)["top_id"][-len(ids) :, 0].tolist()
        assert greedy == (top == ids)
    (text,) = lm.generate_until([Instance("generate_until", {}, ("What?", {"until": ["\n"], "max_gen_toks": 5}), 0)])
    assert isinstance(text, str)
