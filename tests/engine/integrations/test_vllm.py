"""The vLLM backend against Transformers, with the real vLLM on the CPU: `make vllm`."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rolltree.engine import NativeEngine
from rolltree.engine.data.segment import LeafStatus
from rolltree.engine.programs import PROGRAMS, TreePO
from rolltree.engine.prompts.archive import Archive
from rolltree.engine.rollout import Request, SamplingParams
from rolltree.engine.rollout.local import LocalSampler
from rolltree.engine.rollout.sampler import Job

from ...support.fresh import once_a_test
from ..programs.test_programs import CASES, CONTEXTS, PARAMS, calling, counted_rows, rescored
from ..rollout.test_native_engine import PROMPTS, SIZES, letters, responses
from ..rollout.test_requests import Asks

pytestmark = pytest.mark.vllm
PLAIN = SamplingParams(n=4, max_new_tokens=20, ignore_eos=True)


@once_a_test
def net() -> Any:
    """Return a model with heads as wide as vLLM's kernels for the CPU take them."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 32})).eval()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_engine(tmp_path_factory.mktemp("model"))


def make_engine(directory: Path, **options: Any) -> Any:
    from rolltree.engine.rollout.vllm.engine import VllmEngine

    net().save_pretrained(directory)
    letters().save_pretrained(directory)
    tokenizer = letters()
    tokenizer.name_or_path = str(directory)
    return VllmEngine(
        str(directory),
        tokenizer,
        raw_logprobs=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 28,
        **options,
    )


@pytest.mark.parametrize("program", ["flat", TreePO(segment_tokens=5, max_depth=6)], ids=["flat", "treepo"])
def test_greedy_equals_transformers_generate(engine: Any, program: Any) -> None:
    trees = engine.generate(PROMPTS, SamplingParams(n=2, temperature=0, max_new_tokens=24), program)
    for prompt, tree in zip(PROMPTS, trees, strict=True):
        whole = net().generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
        for leaf in tree.flatten():
            assert leaf.response == whole[len(prompt) :]


@pytest.mark.parametrize("name", [n for n in CASES if not PROGRAMS[n].needs_entropies])
def test_leaves_of_every_program_are_what_the_model_says(engine: Any, name: str) -> None:
    program, n = CASES[name]
    params = SamplingParams(n=n, **PARAMS, **calling(name))
    for tree in engine.generate(PROMPTS, params, program(), seeds=range(6), contexts=CONTEXTS):
        assert rescored(tree, net(), 0.8, calling(name).get("logit_bias", {})) < 1e-5
        assert (tree.loss_mask == counted_rows(tree)).all()
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_more_prompts_than_a_step_of_vllm_takes(engine: Any) -> None:
    """vLLM must not cut a prompt in parts on the CPU: it fails at the seed of one."""
    most = engine.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    prompts = np.random.default_rng(3).integers(10, 211, (most // 190 + 2, 201)).tolist()
    trees = engine.generate(prompts, SamplingParams(n=2, max_new_tokens=4, ignore_eos=True))
    assert [tree.num_leaves for tree in trees] == [2] * len(prompts)


def test_log_probs_processed_and_raw(engine: Any) -> None:
    params = SamplingParams(n=3, temperature=0.7, top_k=10, max_new_tokens=12, ignore_eos=True, top_logprobs=2)
    (request,) = engine.submit([PROMPTS[3]], params, TreePO(segment_tokens=4, max_depth=3))
    while not request.done:
        engine.step()
    for leaf in request.completions():
        ids = torch.tensor([PROMPTS[3] + leaf.token_ids.tolist()])
        with torch.no_grad():
            logits = net()(ids).logits[0, len(PROMPTS[3]) - 1 : -1]
        target = torch.from_numpy(leaf.token_ids).long()[:, None]
        raw = logits.log_softmax(-1).gather(1, target)[:, 0]
        np.testing.assert_allclose(leaf.raw_logprobs, raw.numpy(), rtol=0, atol=1e-5)
        scaled = logits / 0.7
        kept = scaled.masked_fill(scaled < scaled.topk(10).values[:, -1:], -torch.inf)
        processed = kept.log_softmax(-1).gather(1, target)[:, 0]
        np.testing.assert_allclose(leaf.logprobs, processed.numpy(), rtol=0, atol=1e-5)
        assert [next(iter(top)) for top in leaf.top] == logits.argmax(-1).tolist()


def test_prefill_only_scores(engine: Any) -> None:
    (scores,) = engine.score([PROMPTS[3]], [[[5, 6, 7], [], [8]]])
    for values, ids in zip(scores, [[5, 6, 7], [], [8]], strict=True):
        with torch.no_grad():
            logits = net()(torch.tensor([PROMPTS[3] + ids])).logits[0, len(PROMPTS[3]) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids, dtype=torch.long)[:, None])[:, 0]
        np.testing.assert_allclose(values, expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_vllm_judges_the_log_probs_that_the_native_engine_records(engine: Any, temperature: float) -> None:
    """vLLM is given the sampled tokens, as by its `trace_decode_token_ids`, which its runner for the CPU lacks.

    At another temperature than its own 1 it disagrees.
    """
    native = NativeEngine(net(), letters())
    params = SamplingParams(n=4, temperature=temperature, max_new_tokens=16, ignore_eos=True, seed=1)
    requests = native.submit(PROMPTS, params, TreePO(segment_tokens=4, max_depth=4))
    while not all(request.done for request in requests):
        native.step()
    leaves = [request.completions() for request in requests]
    judged = engine.score(PROMPTS, [[leaf.token_ids.tolist() for leaf in some] for some in leaves])
    recorded = np.concatenate([leaf.logprobs for some in leaves for leaf in some])
    difference = np.abs(np.concatenate([values for some in judged for values in some]) - recorded)
    assert len(recorded) > 100
    assert difference.max() < 1e-5 if temperature == 1 else difference.mean() > 1e-3


def finish(engine: Any, requests: list[Request]) -> None:
    while not all(request.done for request in requests):
        engine.step()


def test_aborted_requests_keep_what_they_have_and_go_on(engine: Any) -> None:
    requests = engine.submit(PROMPTS, PLAIN, TreePO(segment_tokens=6, max_depth=4))
    for _ in range(9):
        engine.step()
    assert engine.abort() == requests
    assert not engine.llm.llm_engine.has_unfinished_requests()
    before = [request.token_tree() for request in requests]
    assert all((tree.status == LeafStatus.ABORTED).all() for tree in before)
    assert all(tree.response_length.max() >= 6 for tree in before)
    engine.submit(requests)
    finish(engine, requests)
    for request, partial in zip(requests, before, strict=True):
        assert request.tree is not None
        whole = responses(request.tree)
        assert all(any(w[: len(p)] == p for w in whole) for p in responses(partial))
        assert rescored(request.tree, net(), 1.0, {}) < 1e-5


def test_kept_jobs_go_on_from_plain_values(engine: Any) -> None:
    """Jobs go through the archive of checkpoints to another sampler: tokens so far stay, log-probs are the model's."""
    program = TreePO(segment_tokens=5, max_depth=4)
    jobs = [Job(prompt, PLAIN, seed) for seed, prompt in enumerate(PROMPTS[2:5])]
    first = LocalSampler(engine, program)
    flights = first.submit(jobs)
    for _ in range(8):
        assert first.step(0.0) == []
    archive = Archive()
    packed = json.loads(json.dumps([archive.pack(kept.state) for kept in first.kept(flights)]))
    begun = [engine.progress(request) for request in engine.loop.requests]
    first.drop(flights)
    assert not engine.loop.busy
    second = LocalSampler(engine, program)
    states = [Archive(archive.tensors).unpack(each) for each in packed]
    going = second.submit([replace(job, kept=state) for job, state in zip(jobs, states, strict=True)])
    while not all(flight.done for flight in going):
        second.step(0.0)
    for flight, branches in zip(going, begun, strict=True):
        assert flight.tree is not None
        assert rescored(flight.tree, net(), 1.0, {}) < 1e-5
        responses = [leaf.response for leaf in flight.tree.flatten()]
        sampled = [records["token"].tolist() for records in branches.values()]
        assert all(any(r[: len(tokens)] == tokens for r in responses) for tokens in sampled)
        assert max(map(len, sampled)) >= 5
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_tools_answer_while_others_go_on(engine: Any) -> None:
    params = SamplingParams(n=3, max_new_tokens=30, ignore_eos=True)
    for tree in engine.generate(PROMPTS, params, Asks()):
        for leaf in tree.flatten():
            assert leaf.response[4:7] == Asks.tool(leaf.response[:4])
            assert not leaf.loss_mask[4:7].any()
        assert rescored(tree, net(), 1.0, {}) < 1e-5


def test_new_weights_in_the_middle_of_responses(engine: Any) -> None:
    """Last: it changes the engine's weights. Each token has the version, and the log-prob, of those that sampled it."""
    old, new = net(), copy.deepcopy(net())
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.05)
    engine.policy_version = 7
    requests = engine.submit(PROMPTS, PLAIN)
    for _ in range(8):
        engine.step()
    engine.pause()
    assert engine.step() == []
    engine.update_weights(dict(new.named_parameters()))
    engine.resume()
    finish(engine, requests)
    for request in requests:
        assert request.tree is not None
        for leaf in request.tree.flatten():
            assert set(leaf.policy_version.tolist()) == {7, 8}
            for version, weights in ((7, old), (8, new)):
                with torch.no_grad():
                    logits = weights(torch.tensor([leaf.prompt + leaf.response])).logits[0, len(leaf.prompt) - 1 : -1]
                expected = logits.log_softmax(-1).gather(1, torch.tensor(leaf.response)[:, None])[:, 0].numpy()
                mine = leaf.policy_version == version
                np.testing.assert_allclose(leaf.behaviour_logprob[mine], expected[mine], rtol=0, atol=1e-5)
    assert engine.llm.llm_engine.get_weight_version() == "8"


@pytest.mark.parametrize(
    ("params", "program", "said"),
    [
        ({}, "mcts", "needs entropies, which vLLM does not return"),
        ({"prefix_allowed_tokens_fn": lambda ids: [1]}, "flat", "has no prefix_allowed_tokens_fn"),
        ({"kept_tokens": True, "top_p": 0.9}, "flat", "no kept_tokens"),
        ({"adapter": "a"}, "flat", "no adapters"),
        ({"max_new_tokens": 600}, "flat", "512 positions"),
    ],
)
def test_what_it_cannot_do_is_refused(engine: Any, params: dict[str, Any], program: str, said: str) -> None:
    chosen = CASES[program][0]()
    with pytest.raises(ValueError, match=said):
        engine.generate(PROMPTS, SamplingParams(**params), chosen)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_its_own_drafts_keep_greedy_tokens_and_log_probs(method: str, tmp_path: Path) -> None:
    """The test runs in a process of its own: a second engine of vLLM in one process sampled wrong tokens."""
    if method == "suffix":
        pytest.importorskip("arctic_inference")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(check_its_own_drafts, method, tmp_path).result()


def check_its_own_drafts(method: str, directory: Path) -> None:
    """Log-probs only where they are the logits' own: of others it tells wrong ones where it refused a draft."""
    own = {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1} if method == "ngram" else {}
    engine = make_engine(directory, speculative_config={"method": method, **own}, disable_log_stats=False)
    for temperature in (0.0, 1.0):
        params = SamplingParams(n=4, temperature=temperature, max_new_tokens=24, ignore_eos=True)
        for prompt, tree in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
            assert np.isfinite(tree.behaviour_logprob[tree.loss_mask]).all()
            assert temperature == 0 or rescored(tree, net(), temperature, {}) < 1e-5
            whole = net().generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)[0]
            if temperature == 0:
                assert all(leaf.response == whole[len(prompt) :].tolist() for leaf in tree.flatten())
    counted = {metric.name: metric for metric in engine.llm.get_metrics()}
    drafted, accepted = (counted[f"vllm:spec_decode_num_{name}_tokens"].value for name in ("draft", "accepted"))
    assert drafted > accepted > 0
    for wrong in ({"temperature": 0.8}, {"top_p": 0.9}, {"min_p": 0.1}, {"logit_bias": {3: 1.0}}):
        with pytest.raises(ValueError, match="speculative_config"):
            engine.generate(PROMPTS, SamplingParams(**wrong))
