"""Requests that come, stop, wait and go on: streams, abort and resume, new weights, sleep, scores, cached prefixes."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine.data.segment import LeafStatus, Origin
from rolltree.engine.programs import (
    Action,
    BranchId,
    Call,
    Finish,
    Fork,
    Given,
    GroupState,
    Prune,
    Rewind,
    RolloutProgram,
    SegmentReport,
)
from rolltree.engine.rollout import EngineConfig, KvExhaustedError, NativeEngine, Request, SamplingParams
from rolltree.kernels import linear_logprob

from .test_native_engine import PROMPTS, TREEPO, assert_all_free, engine, letters, model, responses

PARAMS = SamplingParams(n=4, max_new_tokens=20, ignore_eos=True)


def finish(native: NativeEngine, requests: Sequence[Request]) -> list[list[list[int]]]:
    while not all(request.done for request in requests):
        native.step()
    for request in requests:
        assert request.error is None
    return [responses(request.tree) for request in requests if request.tree is not None]


@pytest.mark.parametrize("program", ["flat", TREEPO], ids=["flat", "treepo"])
def test_aborted_requests_go_on_to_the_same_end(program: Any) -> None:
    seeds = [3 * i for i in range(len(PROMPTS))]
    expected = [responses(tree) for tree in engine().generate(PROMPTS, PARAMS, program, seeds=seeds)]
    native = engine(max_prefill_tokens=16)
    requests = native.submit(PROMPTS, PARAMS, program, seeds=seeds)
    rng = np.random.default_rng(0)
    while not all(request.done for request in requests):
        native.step()
        if rng.random() < 0.4:
            some = [request for request in requests if not request.done and rng.random() < 0.7]
            stopped = native.abort(some)
            assert stopped == some
            for request in stopped:
                partial = request.token_tree()
                for leaf, tree_leaf in zip(request.completions(), partial.flatten(), strict=True):
                    assert leaf.token_ids.tolist() == tree_leaf.response
                    assert leaf.status == tree_leaf.status
            native.cache.tree.check()
            if rng.random() < 0.5:
                native.step()
                native.forget_prefixes()
            native.submit(stopped)
    assert finish(native, requests) == expected
    assert_all_free(native)


def test_requests_that_join_later_sample_what_they_would_alone() -> None:
    native = engine()
    first = native.submit(PROMPTS[:3], PARAMS, seeds=[1, 2, 3])
    for _ in range(5):
        native.step()
    hot = SamplingParams(n=2, temperature=1.3, top_k=30, max_new_tokens=9, ignore_eos=True)
    second = native.submit(PROMPTS[3:], [hot, PARAMS, hot], TREEPO, seeds=[4, 5, 6])
    together = finish(native, [*first, *second])
    alone = [engine().generate([p], PARAMS, seeds=[i + 1])[0] for i, p in enumerate(PROMPTS[:3])]
    alone += [
        engine().generate([p], params, TREEPO, seeds=[seed])[0]
        for p, params, seed in zip(PROMPTS[3:], [hot, PARAMS, hot], [4, 5, 6], strict=True)
    ]
    assert together == [responses(tree) for tree in alone]
    assert_all_free(native)


def test_a_hundred_neighbours_change_nothing() -> None:
    """The same tokens alone, among 200 rows, and after preemptions."""
    rng = np.random.default_rng(1)
    crowd = [rng.integers(10, 211, int(n)).tolist() for n in rng.integers(1, 40, 50)]
    (alone,) = engine().generate([PROMPTS[3]], PARAMS, seeds=[77])
    for kv_tokens in (65536, 800):
        native = engine(kv_tokens=kv_tokens)
        trees = native.generate([*crowd[:25], PROMPTS[3], *crowd[25:]], PARAMS, seeds=[*range(25), 77, *range(25)])
        assert responses(trees[25]) == responses(alone)
        assert (native.stats["preemptions"] > 0) == (kv_tokens == 800)
        for one, other in zip(trees[25].flatten(), alone.flatten(), strict=True):
            # products of more than a few rows are a library's, with another order of summation
            np.testing.assert_allclose(one.behaviour_logprob, other.behaviour_logprob, rtol=1e-6, atol=2e-6)


def test_no_bit_depends_on_neighbours_in_steps_of_few_rows() -> None:
    """Only where a prompt is cut decides in which pieces its shared keys are summed."""
    rng = np.random.default_rng(1)
    crowd = [rng.integers(10, 211, int(n)).tolist() for n in rng.integers(1, 40, 60)]
    crowd = [prompt for prompt in crowd if prompt[0] != PROMPTS[3][0]][:50]
    found = []
    for prompts, seeds, sizes in (
        ([PROMPTS[3]], [77], {"max_prefill_tokens": 7}),
        ([*crowd[:25], PROMPTS[3], *crowd[25:]], [*range(25), 77, *range(25)], {"max_prefill_tokens": 24}),
        ([*crowd[:25], PROMPTS[3]], [*range(25), 77], {"max_prefill_tokens": 24, "kv_tokens": 400}),
    ):
        native = engine(max_batch_rows=40, **sizes)
        tree = native.generate(prompts, PARAMS, seeds=seeds)[seeds.index(77)]
        assert (native.stats["preemptions"] > 0) == ("kv_tokens" in sizes)
        found.append([(leaf.response, leaf.behaviour_logprob.tobytes()) for leaf in tree.flatten()])
    assert found[0] == found[1] == found[2]


def test_streams_run_side_by_side_and_yield_what_is_finished() -> None:
    native = engine()

    async def consume(prompts: list[list[int]], params: SamplingParams) -> list[Request]:
        return [request async for request in native.stream(prompts, params)]

    async def both() -> list[list[Request]]:
        short = SamplingParams(n=1, max_new_tokens=3, ignore_eos=True)
        return await asyncio.gather(consume(PROMPTS, PARAMS), consume(PROMPTS[:2], short))

    first, second = asyncio.run(both())
    assert sorted(len(r.prompt) for r in first) == sorted(map(len, PROMPTS))
    assert all(r.tree is not None and r.tree.num_leaves == 4 for r in first)
    assert [r.tree.response_length.tolist() for r in second if r.tree is not None] == [[3], [3]]

    async def leave() -> None:
        async for _ in native.stream(PROMPTS, PARAMS):
            break

    asyncio.run(leave())
    assert not native.loop.busy
    assert_all_free(native)


@pytest.mark.parametrize("sizes", [{}, {"kv_tokens": 120, "host_kv_tokens": 4096}], ids=["roomy", "tight"])
def test_new_weights_in_the_middle_of_responses(sizes: dict[str, int]) -> None:
    """Each token has the version, and the log-prob, of the weights that sampled it."""
    old, new = copy.deepcopy(model("qwen3")), copy.deepcopy(model("qwen3"))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.05)
    native = NativeEngine(copy.deepcopy(old), config=EngineConfig(**{"page_size": 4, "kv_tokens": 4096, **sizes}))
    native.policy_version = 7
    requests = native.submit(PROMPTS, PARAMS, TREEPO)
    for _ in range(9):
        native.step()
    while sizes and native.stats["restored_tokens"] == 0:
        native.step()
    native.pause()
    assert native.step() == []
    with pytest.raises(RuntimeError, match=r"call resume\(\)"):
        native.generate(PROMPTS, PARAMS)
    native.update_weights(dict(new.named_parameters()))
    native.resume()
    finish(native, requests)
    for request in requests:
        assert request.tree is not None
        for leaf in request.tree.flatten():
            versions = set(leaf.policy_version.tolist())
            assert versions <= {7, 8} if sizes else versions == {7, 8}
            assert (np.diff(leaf.policy_version) >= 0).all()
            ids = torch.tensor([leaf.prompt + leaf.response])
            for version, net in ((7, old), (8, new)):
                with torch.no_grad():
                    logits = net(ids).logits[0, len(leaf.prompt) - 1 : -1]
                expected = logits.log_softmax(-1).gather(1, torch.tensor(leaf.response)[:, None])[:, 0].numpy()
                mine = leaf.policy_version == version
                np.testing.assert_allclose(leaf.behaviour_logprob[mine], expected[mine], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="no parameter 'x'"):
        native.update_weights({"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="has shape"):
        native.update_weights({"lm_head.weight": torch.zeros(1)})
    assert native.policy_version == 8
    assert_all_free(native)


def test_keys_of_old_weights_are_never_found_and_may_be_kept_on_purpose() -> None:
    native = engine()
    native.generate([PROMPTS[3]], PARAMS)
    native.generate([PROMPTS[3]], PARAMS)
    assert native.stats["prefix_hit_tokens"] == len(PROMPTS[3])
    native.update_weights()
    native.generate([PROMPTS[3]], PARAMS)
    assert native.stats["prefix_hit_tokens"] == 0
    requests = native.submit(PROMPTS, PARAMS)
    for _ in range(5):
        native.step()
    computed = native.stats["prefill_tokens"]
    native.update_weights(keep_kv=True)
    finish(native, requests)
    assert native.stats["prefill_tokens"] == computed
    native.policy_version = 0


def test_turns_of_a_conversation_reuse_the_last_ones_keys() -> None:
    native = engine()
    (tree,) = native.generate([PROMPTS[3]], SamplingParams(n=1, max_new_tokens=30, ignore_eos=True))
    turn = tree.flatten()[0]
    conversation = turn.prompt + turn.response + [5, 6, 7]
    (second,) = native.generate([conversation], SamplingParams(n=1, temperature=0, max_new_tokens=8))
    assert native.stats["prefix_hit_tokens"] == len(turn.prompt + turn.response) - 1
    assert native.stats["prefill_tokens"] == 4
    fresh = engine()
    (alone,) = fresh.generate([conversation], SamplingParams(n=1, temperature=0, max_new_tokens=8))
    assert responses(second) == responses(alone)


def test_prompts_of_one_batch_share_their_beginning() -> None:
    native, system = engine(), PROMPTS[3]
    prompts = [[*system, 100 + i] for i in range(5)] + [[*system, 100]]
    trees = native.generate(prompts, PARAMS, seeds=list(range(6)))
    assert native.stats["prefill_tokens"] <= len(system) + 7
    for prompt, seed, tree in zip(prompts, range(6), trees, strict=True):
        assert responses(tree) == responses(engine().generate([prompt], PARAMS, seeds=[seed])[0])
    assert_all_free(native)


def test_sleep_gives_the_pages_back_and_requests_survive_it() -> None:
    expected = [responses(tree) for tree in engine().generate(PROMPTS, PARAMS)]
    native = engine()
    requests = native.submit(PROMPTS, PARAMS)
    for _ in range(7):
        native.step()
    native.sleep(weights=True)
    assert native.cache.tree.free_pages == native.cache.tree.num_pages
    assert not native.cache._pages
    with pytest.raises(RuntimeError, match=r"call wake\(\)"):
        native.resume()
    native.wake()
    assert finish(native, requests) == expected
    assert_all_free(native)


def test_scores_are_the_models_log_probs() -> None:
    native = engine()
    continuations = [[[5, 6, 7], [5, 6, 9, 10], []], [], [[8]]]
    scores = native.score([PROMPTS[3], PROMPTS[0], PROMPTS[1]], continuations)
    assert [len(s) for s in scores] == [3, 0, 1]
    for prompt, some, given in zip([PROMPTS[3], PROMPTS[0], PROMPTS[1]], scores, continuations, strict=True):
        for values, ids in zip(some, given, strict=True):
            with torch.no_grad():
                logits = model("qwen3")(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(ids, dtype=torch.long)[:, None])[:, 0]
            np.testing.assert_allclose(values, expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_completions_tell_all_of_each_token(temperature: float) -> None:
    filters: dict[str, Any] = {"temperature": temperature, "top_k": 10, "logit_bias": {30: 1.0}}
    params = SamplingParams(n=3, max_new_tokens=12, top_logprobs=4, **filters)
    native = engine()
    (request,) = native.submit([PROMPTS[2]], params, TREEPO)
    finish(native, [request])
    for leaf, sequence in zip(request.completions(), request.tree.flatten(), strict=True):  # type: ignore[union-attr]
        assert leaf.token_ids.tolist() == sequence.response
        with torch.no_grad():
            ids = torch.tensor([sequence.prompt + sequence.response])
            logits = model("qwen3")(ids).logits[0, len(sequence.prompt) - 1 : -1]
        target = torch.tensor(sequence.response)[:, None]
        raw = logits.log_softmax(-1).gather(1, target)[:, 0]
        np.testing.assert_allclose(leaf.raw_logprobs, raw.numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(leaf.logprobs, sequence.behaviour_logprob)
        top = logits.log_softmax(-1).topk(4)
        for known, ids_, values in zip(leaf.top, top.indices, top.values, strict=True):
            assert list(known) == ids_.tolist()
            np.testing.assert_allclose(list(known.values()), values.numpy(), rtol=0, atol=1e-5)
        for token, own, known in zip(leaf.token_ids.tolist(), leaf.raw_logprobs.tolist(), leaf.top, strict=True):
            assert known.get(token, own) == own
        assert leaf.error is None


def test_prompts_are_scored_as_the_model_does_it() -> None:
    native = engine()
    for prompt in PROMPTS:
        found = native.prompt_logprobs(prompt, 3)
        with torch.no_grad():
            logprobs = model("qwen3")(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        own, top = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], logprobs.topk(3)
        assert found["token"].tolist() == prompt[1:]
        np.testing.assert_allclose(found["raw_logprob"], own.numpy(), rtol=0, atol=1e-5)
        assert found["top_id"].tolist() == top.indices.tolist()
        np.testing.assert_allclose(found["top_raw"], top.values.numpy(), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="exceeds the model's 512 positions"):
        native.prompt_logprobs([5] * 513)


@pytest.mark.check(but=2)
@pytest.mark.parametrize("sizes", [{}, {"kv_tokens": 120}])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.8},
        {"top_k": 5, "temperature": 0.7},
        {"min_p": 0.05, "logit_bias": {30: 2.0, 31: -math.inf}},
        {"prefix_allowed_tokens_fn": lambda ids: range(20, 40 + len(ids))},
    ],
    ids=["top_p", "top_k", "min_p", "grammar"],
)
def test_kept_tokens_give_the_trainer_the_very_distribution(filters: dict[str, Any], sizes: dict[str, int]) -> None:
    """The head over the ids that were recorded gives the log-probs that were sampled with."""
    params = SamplingParams(n=4, max_new_tokens=20, kept_tokens=True, **filters)
    native, net = engine(**sizes), model("qwen3")
    requests = native.submit(PROMPTS[:4], params, TREEPO)
    finish(native, requests)
    for request in requests:
        for leaf in request.completions():
            assert leaf.kept is not None
            indptr, ids = (torch.from_numpy(x) for x in leaf.kept)
            tokens = torch.from_numpy(np.concatenate([request.prompt, leaf.token_ids])).long()
            with torch.no_grad():
                hidden = net.model(tokens[None]).last_hidden_state[0, len(request.prompt) - 1 : -1]
                bias = torch.zeros(len(net.lm_head.weight))
                bias[30] = filters.get("logit_bias", {}).get(30, 0.0)
                options = {"bias": bias, "temperature": filters.get("temperature", 1.0), "kept": (indptr, ids)}
                out = linear_logprob(hidden, net.lm_head.weight, tokens[len(request.prompt) :], **options)
            np.testing.assert_allclose(leaf.logprobs, out.logprob.numpy(), rtol=0, atol=1e-5)
            assert indptr.diff().max() < 211
    assert (native.stats["preemptions"] > 0) == bool(sizes)


class Asks(RolloutProgram):
    """Every 4 tokens a tool is asked, and its answer appended."""

    segment_tokens = 4
    turns = 2

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if segment.status is None:
                if segment.depth > self.turns:
                    yield Finish(segment.branch)
                else:
                    yield Call(segment.branch, self.tool, (segment.token_ids.tolist(),))

    @staticmethod
    def tool(ids: list[int]) -> list[int]:
        time.sleep(0.01 * (ids[0] % 3))
        if ids[0] == 0:
            raise OSError("no answer")
        return [200, sum(ids) % 200, 201]

    def returned(self, group: GroupState, branch: BranchId, result: Any) -> Iterable[Action]:
        yield Fork(branch, append=Given(result, Origin.OBSERVATION))


@pytest.mark.check(but=1)
@pytest.mark.parametrize("sizes", [{}, {"kv_tokens": 160}])
def test_tools_answer_in_their_own_time_and_are_not_trained_on(sizes: dict[str, int]) -> None:
    native, net = engine(**sizes), model("qwen3")
    trees = native.generate(PROMPTS, SamplingParams(n=3, max_new_tokens=30, ignore_eos=True), Asks())
    for tree in trees:
        for leaf in tree.flatten():
            assert len(leaf.response) == 18
            for start in (4, 11):
                before, answer = leaf.response[start - 4 : start], leaf.response[start : start + 3]
                assert answer == Asks.tool(before)
                assert not leaf.loss_mask[start : start + 3].any()
            with torch.no_grad():
                logits = net(torch.tensor([leaf.prompt + leaf.response])).logits[0, len(leaf.prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(leaf.response)[:, None])[:, 0].numpy()
            mine = leaf.loss_mask
            np.testing.assert_allclose(leaf.behaviour_logprob[mine], expected[mine], rtol=0, atol=1e-5)
            assert np.isnan(leaf.behaviour_logprob[~mine]).all()
        assert (tree.origin == Origin.OBSERVATION).sum() == 3 * 2 * 3
    alone = engine().generate([PROMPTS[3]], SamplingParams(n=3, max_new_tokens=30, ignore_eos=True), Asks())
    assert responses(alone[0]) == responses(trees[3])
    assert_all_free(native)


def test_a_tool_that_raises_and_an_answer_that_is_too_long_end_one_branch() -> None:
    class Broken(Asks):
        @staticmethod
        def tool(ids: list[int]) -> list[int]:
            if ids[0] % 2:
                raise OSError("no answer")
            return [1] * 40

    native = engine()
    (request,) = native.submit([PROMPTS[3]], SamplingParams(n=8, max_new_tokens=30, ignore_eos=True), Broken())
    finish(native, [request])
    for leaf in request.completions():
        assert len(leaf.token_ids) == 4
        odd = leaf.token_ids[0] % 2 == 1
        assert leaf.status == (LeafStatus.FAILED if odd else LeafStatus.LENGTH)
        assert (leaf.error is not None) == odd
        assert leaf.error is None or leaf.error.startswith("a call failed: OSError: no answer (line ")
    assert native.stats["failed_calls"] + native.stats["appends_too_long"] == 8
    assert_all_free(native)


class Picks(RolloutProgram):
    """Rewinds a resting branch to its second token and puts the runner-up there; prunes the other of two branches."""

    segment_tokens = 5
    top_logprobs = 2

    def start(self, group: GroupState) -> int:
        return 2

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if segment.depth == 1 and segment.branch == (0,):
                second = segment.top_ids[1, 1], segment.top_logprobs[1, 1]
                yield Rewind(segment.branch, 1, append=Given([int(second[0])], logprobs=[float(second[1])]))
                yield Fork(segment.branch)
            elif segment.branch == (1,):
                yield Prune(segment.branch)
            else:
                yield Finish(segment.branch)


def test_a_token_among_the_likely_ones_is_chosen_and_a_branch_pruned() -> None:
    native = engine()
    trees = native.generate(PROMPTS, SamplingParams(n=2, max_new_tokens=30, ignore_eos=True), Picks())
    for tree in trees:
        chosen, first = sorted(tree.flatten(), key=lambda leaf: len(leaf.response))
        assert first.response[0] == chosen.response[0]
        assert (len(first.response), len(chosen.response)) == (10, 7)
        for leaf in (first, chosen):
            with torch.no_grad():
                logits = model("qwen3")(torch.tensor([leaf.prompt + leaf.response])).logits
            expected = logits[0, len(leaf.prompt) - 1 : -1].log_softmax(-1)
            expected = expected.gather(1, torch.tensor(leaf.response)[:, None])[:, 0]
            np.testing.assert_allclose(leaf.behaviour_logprob, expected.numpy(), rtol=0, atol=1e-5)
    assert native.stats["pruned"] == len(PROMPTS)
    assert_all_free(native)


def test_one_poisoned_request_fails_alone_with_its_reason() -> None:
    class Raises(RolloutProgram):
        segment_tokens = 3

        def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
            raise KeyError("a mistake")

    def grammar(ids: Any) -> list[int]:
        if len(ids) == 2:
            raise ValueError("cannot parse")
        return [20, 30]

    native = engine(kv_tokens=160)
    (bad,) = native.submit([PROMPTS[1]], PARAMS, Raises())
    good = native.submit(PROMPTS[2:4], PARAMS, seeds=[5, 6])
    strict = SamplingParams(n=2, max_new_tokens=9, ignore_eos=True, prefix_allowed_tokens_fn=grammar)
    (failing,) = native.submit([PROMPTS[4]], strict)
    while not all(request.done for request in [bad, failing, *good]):
        native.step()
    assert isinstance(bad.error, KeyError)
    assert bad.tree is None
    assert {c.error for c in failing.completions()} == {"prefix_allowed_tokens_fn raised ValueError: cannot parse"}
    assert all(set(c.token_ids.tolist()) <= {20, 30} and len(c.token_ids) == 2 for c in failing.completions())
    expected = engine().generate(PROMPTS[2:4], PARAMS, seeds=[5, 6])
    assert [responses(r.tree) for r in good if r.tree] == [responses(tree) for tree in expected]
    assert_all_free(native)


def test_a_request_too_large_for_the_cache_fails_alone() -> None:
    class Shredder(RolloutProgram):  # a page for every token
        segment_tokens = 1

        def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
            for segment in finished:
                if segment.status is None:
                    yield Fork(segment.branch, 2) if segment.depth % 2 else Fork(segment.branch)

    native = engine(kv_tokens=48)
    (bad,) = native.submit([[5]], SamplingParams(n=1, max_new_tokens=24, ignore_eos=True), Shredder())
    (good,) = native.submit([PROMPTS[2]], SamplingParams(n=1, max_new_tokens=8, ignore_eos=True))
    while not (bad.done and good.done):
        native.step()
    assert isinstance(bad.error, KvExhaustedError)
    assert good.tree is not None
    assert_all_free(native)


def test_segments_end_at_texts_and_the_response_goes_on() -> None:
    class Stopping(RolloutProgram):
        def __init__(self, text: str) -> None:
            self.segment_stop = (text,)

        def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
            for segment in finished:
                if segment.status is None:
                    assert segment.stop == self.segment_stop[0]
                    assert self.tokenizer is not None
                    assert self.tokenizer.decode(segment.response_ids).endswith(segment.stop)
                    yield Fork(segment.branch, append=Given([9, 8]))

    native = NativeEngine(model("qwen3"), letters(), EngineConfig(page_size=4, kv_tokens=4096))
    params = SamplingParams(n=3, max_new_tokens=30, ignore_eos=True)
    (free,) = native.generate([PROMPTS[2]], params)
    three = responses(free)[0][4:6]
    stop = "".join(chr(0x100 + t) for t in three)
    (tree,) = native.generate([PROMPTS[2]], params, Stopping(stop))
    leaf = tree.flatten()[0]
    assert leaf.response[:6] == responses(free)[0][:6]
    assert leaf.response[6:8] == [9, 8]
    assert leaf.status == LeafStatus.LENGTH
    with pytest.raises(ValueError, match="no tokenizer"):
        engine().generate([PROMPTS[2]], params, Stopping(stop))


def test_debug_mode_compares_every_layer_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    native = NativeEngine(model("gemma2"), config=EngineConfig(page_size=4, kv_tokens=128, debug=True))
    native.generate(PROMPTS, PARAMS, TREEPO)
    from rolltree.engine.rollout.native.cache import kv_cache

    def wrong(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        out, lse = right(*args, **kwargs)
        return (out * 1.01 if len(calls) % 2 else out), lse

    calls: list[int] = []
    right = kv_cache.tree_decode_attention
    monkeypatch.setattr(kv_cache, "tree_decode_attention", wrong)
    with pytest.raises(RuntimeError, match="Attention of layer 0 differs from the reference"):
        native.generate(PROMPTS, PARAMS, TREEPO)
