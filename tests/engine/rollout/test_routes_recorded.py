"""Routes that the native engine records: those of plain Transformers, whatever happens to keys on the way; replayed,
they give the sampler's log-probs even where the router's choice would flip."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine import batch_logprob, pack
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.programs import (
    Action,
    Finish,
    Fork,
    Given,
    GroupState,
    RolloutProgram,
    SegmentReport,
    make_program,
)
from rolltree.engine.rollout import DraftConfig, EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.saving import request_state, restore_request

from ...support.fresh import once_a_test
from ...support.moe_models import VOCAB, make, routers
from .test_native_engine import TREEPO, assert_all_free
from .test_native_engine import model as dense_model
from .test_saving import through_json

EXACT = 2e-5  # nats
rng = np.random.default_rng(0)
PROMPTS: list[list[int]] = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 17, 26)]
PROMPTS.append([*PROMPTS[2][:11], 5, 6])  # leaves another in its middle
PARAMS = SamplingParams(n=3, max_new_tokens=13, ignore_eos=True)
TIGHT = {"kv_tokens": 96, "max_prefill_tokens": 5}


@once_a_test
def model() -> Any:
    return make("qwen3_moe")


def engine(net: Any = None, **sizes: Any) -> NativeEngine:
    config = EngineConfig(**{"page_size": 4, "kv_tokens": 4096, "record_routes": True, **sizes})
    return NativeEngine(model() if net is None else net, config=config)


@once_a_test
def plain(net: Any) -> tuple[Any, list[torch.Tensor]]:
    """A copy under plain Transformers, and a list that gets the experts that its routers choose."""
    net, found = copy.deepcopy(net), []
    net.set_attn_implementation("eager")
    for router in routers(net):
        router.register_forward_hook(lambda module, inputs, output: found.append(output[2]))
    return net, found


@torch.no_grad()
def plain_routes(net: Any, ids: Sequence[int]) -> np.ndarray[Any, Any]:  # [n, layers, k], sorted
    """Routes of the tokens of one sequence under plain Transformers."""
    copied, found = plain(net)
    found.clear()
    copied(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return torch.stack(found, 1).sort(-1).values.numpy()


def assert_recorded(tree: TokenTree, net: Any = None) -> None:
    """Every token has the experts of plain Transformers, but for the last of a leaf, which nothing follows."""
    for leaf in range(tree.num_leaves):
        rows = tree.path_rows(leaf)
        expected = plain_routes(model() if net is None else net, tree.token_id[rows].tolist())
        np.testing.assert_array_equal(np.sort(tree.routes[rows[:-1]], -1), expected[:-1])


def off(trees: Sequence[TokenTree], net: Any = None, *, replay: bool = True) -> float:
    """The largest difference of a log-prob of the sampler from that of the trainer."""
    worst = 0.0
    for batch in pack(trees, max_tokens=4096, replay_routes=replay):
        with torch.no_grad():
            now = batch_logprob(model() if net is None else net, batch).logprob[batch.loss_mask]
        known = torch.cat([torch.from_numpy(t.behaviour_logprob[t.prompt_length :]) for t in batch.trees])
        worst = max(worst, float((now - known[batch.loss_mask]).abs().max()))
    return worst


class Asks(RolloutProgram):
    """Reads three given tokens in the middle of each response, and ends it after a second segment."""

    segment_tokens = 5

    def start(self, group: GroupState) -> int:
        return group.width

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if segment.status is None:
                yield Fork(segment.branch, append=Given([4, 5, 6])) if segment.depth == 1 else Finish(segment.branch)


WAYS: dict[str, tuple[RolloutProgram | str, dict[str, Any], str | None]] = {
    "flat": ("flat", {}, None),
    "forks": (TREEPO, {}, "forks"),
    "rewinds": (make_program("spo_chain", chains=2, samples=1, cut_after=4), {}, "rewinds"),
    "given tokens": (Asks(), {}, None),
    "prompts in chunks": ("flat", {"max_prefill_tokens": 3}, None),
    "preemption": (TREEPO, TIGHT, "preemptions"),
    "keys on the host": (TREEPO, TIGHT | {"host_kv_tokens": 4096}, "restored_tokens"),
    "drafts": ("flat", {"drafts": DraftConfig(rows=64)}, "accepted_tokens"),
}


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("way", WAYS)
def test_every_token_has_the_experts_that_computed_it(way: str) -> None:
    program, sizes, happened = WAYS[way]
    native = engine(**sizes)
    trees = native.generate(PROMPTS, PARAMS, program, seeds=[1, 1, 2, 3, 4])
    if way == "drafts":  # of what was sampled before
        trees = native.generate(PROMPTS, PARAMS, program, seeds=[1, 1, 2, 3, 4])
    assert happened is None or native.stats[happened] > 0, "the test shows nothing"
    for tree in trees:
        assert_recorded(tree)
    assert off(trees) < EXACT
    assert_all_free(native)
    without = engine(record_routes=False, **sizes).generate(PROMPTS, PARAMS, program, seeds=[1, 1, 2, 3, 4])
    assert [t.token_id.tolist() for t in without] == [t.token_id.tolist() for t in trees]
    assert not any("routes" in t.columns for t in without)


@pytest.mark.parametrize(
    "family",
    ["qwen3_next", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt_oss", "deepseek_v3", "mixtral", "olmoe"))],
)
def test_other_families(family: str) -> None:
    net = make(family)
    trees = engine(net, kv_tokens=160, max_prefill_tokens=7).generate(PROMPTS, PARAMS, TREEPO)
    for tree in trees:
        assert_recorded(tree, net)
    assert off(trees, net) < EXACT


def test_a_prompt_found_in_the_cache_has_the_routes_of_its_keys() -> None:
    native = engine()
    native.generate(PROMPTS[2:3], PARAMS)
    (tree,) = native.generate([[*PROMPTS[2], 7, 8]], PARAMS, seeds=[9])
    assert native.stats["prefix_hit_tokens"] >= 16
    assert_recorded(tree)


def test_an_unfinished_group_goes_on_in_another_engine_with_its_routes() -> None:
    for steps in (3, 9):
        first, second = engine(), engine()
        requests = first.submit(PROMPTS, PARAMS, TREEPO, seeds=range(5))
        for _ in range(steps):
            first.step()
        going = [request for request in requests if not request.done]
        first.abort(going)
        assert all(len(b.node.routes) or len(b.node.records) < 2 for r in going for b in r.unfinished)
        known = {(r.number, b.id): b.node.routes for r in going for b in r.unfinished if len(b.node.routes)}
        states = [through_json(request_state(request, TREEPO)) for request in going]
        fresh = second.submit([r.prompt.tolist() for r in going], PARAMS, TREEPO, seeds=[r.seed for r in going])
        second.abort(fresh)
        for request, state in zip(fresh, states, strict=True):
            restore_request(request, state)
        for old, request in zip(going, fresh, strict=True):
            for branch in request.unfinished:
                if (old.number, branch.id) in known:
                    np.testing.assert_array_equal(branch.node.routes, known.pop((old.number, branch.id)))
        assert not known
        second.submit(fresh)
        while not all(request.done for request in fresh):
            second.step()
        for request in fresh:
            assert request.tree is not None
            assert_recorded(request.tree)


def test_keys_that_come_back_from_the_host_bring_their_routes() -> None:
    native = engine(kv_tokens=96, host_kv_tokens=4096)
    requests = native.submit(PROMPTS[3:4], replace(PARAMS, n=2), seeds=[3])
    for _ in range(5):
        native.step()
    native.loop.preempt_all()
    native.cache.save_dropped()
    assert native.cache.routes is not None
    assert native.cache.routes.pages is not None
    with torch.inference_mode():
        native.cache.routes.pages.fill_(-1)  # as after other requests have used the pages
    while not all(request.done for request in requests):
        native.step()
    assert native.stats["restored_tokens"] >= len(PROMPTS[3])
    (tree,) = native.generate(PROMPTS[3:4], PARAMS, seeds=[7])
    assert native.stats["prefix_hit_tokens"] >= 24
    assert_recorded(tree)


def ties(net: Any) -> Any:
    """A copy in which experts 0 to 3 are as good as each other, and 4 to 7: the choice is by rounding alone."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for router in routers(net):
            for group in (slice(0, 4), slice(4, 8)):
                router.weight[group] = router.weight[group.start]
    return net


def test_log_probs_are_the_samplers_where_the_choice_flips() -> None:
    sampler = ties(model())
    trainer = copy.deepcopy(sampler)
    trainer.set_attn_implementation("rolltree")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in routers(trainer):
            router.weight += 1e-6 * torch.randn(router.weight.shape, generator=generator)
    trees = engine(sampler).generate(PROMPTS, PARAMS, TREEPO)
    assert off(trees, trainer, replay=False) > 0.5
    assert off(trees, trainer) < EXACT


def test_tokens_keep_the_routes_under_which_the_next_were_sampled() -> None:
    net = copy.deepcopy(model())
    before = copy.deepcopy(net)
    native = engine(net)
    requests = native.submit(PROMPTS, PARAMS)
    for _ in range(6):
        native.step()
    with torch.no_grad():
        for router in routers(net):
            router.weight.copy_(router.weight.flip(0))
    native.update_weights(version=1)  # keys are computed again, by other experts
    while not all(request.done for request in requests):
        native.step()
    for request in requests:
        tree = request.tree
        assert tree is not None
        for leaf in range(tree.num_leaves):
            rows = tree.path_rows(leaf)
            old = rows[: -np.count_nonzero(tree.policy_version[rows])][:-1]
            assert len(old) > tree.prompt_length
            expected = plain_routes(before, tree.token_id[old].tolist())
            np.testing.assert_array_equal(np.sort(tree.routes[old], -1), expected)
            assert (tree.routes[rows[:-1]] >= 0).all()


def test_models_whose_routes_are_not_known_are_refused() -> None:
    with pytest.raises(UserError, match="'Qwen3ForCausalLM' has no mixture of experts"):
        engine(dense_model("qwen3"))
    with pytest.raises(UserError, match=r"'PhimoeForCausalLM' are neither recorded nor replayed \(Phimoe"):
        engine(make("phimoe"))
    with pytest.raises(UserError, match=r"DeepseekV2TopkRouter with groups"):
        engine(make("deepseek_v2", topk_method="group_limited_greedy"))
    with pytest.raises(ValueError, match="record_routes looks into routers"):
        EngineConfig(record_routes=True, compile=True)
