"""The native engine against Transformers' own generate and forward, on tiny random models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rolltree.engine import batch_logprob, pack
from rolltree.engine.data.segment import LeafStatus, Origin
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.programs import Action, Finish, Fork, GroupState, RolloutProgram, SegmentReport, TreePO
from rolltree.engine.rollout import EngineConfig, KvExhaustedError, NativeEngine, SamplingParams
from rolltree.engine.rollout.records import child_seed
from rolltree.kernels.libraries import load_library

from ...support.fresh import once_a_test

EOS = 7
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 211,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
MODELS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
rng = np.random.default_rng(0)
PROMPTS: list[list[int]] = [rng.integers(10, 211, n).tolist() for n in (1, 2, 17, 40, 16, 31)]
TREEPO = TreePO(segment_tokens=5, max_depth=6, branch=2, init=2)


@once_a_test
def model(name: str) -> Any:
    kind, config, extra = MODELS[name]
    torch.manual_seed(0)
    return kind(config(**{**SIZES, **extra})).eval()


def engine(name: str = "qwen3", **sizes: Any) -> NativeEngine:
    return NativeEngine(model(name), config=EngineConfig(**{"page_size": 4, "kv_tokens": 4096, **sizes}))


def responses(tree: TokenTree) -> list[list[int]]:
    return [sequence.response for sequence in tree.flatten()]


def assert_all_free(native: NativeEngine) -> None:
    tree = native.cache.tree
    tree.check()
    native.forget_prefixes()
    tree.check()
    assert (tree.free_pages, tree.nodes) == (tree.num_pages, 0)


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [3, 2048])
def test_greedy_equals_transformers_generate(name: str, chunk: int) -> None:
    native = engine(name, max_prefill_tokens=chunk)
    trees = native.generate(PROMPTS, SamplingParams(n=2, temperature=0, max_new_tokens=24))
    for prompt, tree in zip(PROMPTS, trees, strict=True):
        whole = model(name).generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
        for leaf in tree.flatten():
            assert leaf.prompt == prompt
            assert leaf.response == whole[len(prompt) :]
            assert leaf.status == (LeafStatus.STOP if leaf.response[-1] == EOS else LeafStatus.LENGTH)
    assert_all_free(native)


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("program", ["flat", TREEPO], ids=["flat", "treepo"])
@pytest.mark.parametrize("restricted", [False, True])
def test_behaviour_logprob_equals_a_recomputed_one(name: str, program: str | RolloutProgram, restricted: bool) -> None:
    params = SamplingParams(n=6, temperature=0.8, max_new_tokens=24, top_k=20 if restricted else None)
    native = engine(name, max_prefill_tokens=8)
    native.policy_version = 3
    for tree in native.generate(PROMPTS, params, program):
        assert tree.num_leaves == 6
        for leaf in tree.flatten():
            ids = torch.tensor([leaf.prompt + leaf.response])
            with torch.no_grad():
                logits = model(name)(ids).logits[0, len(leaf.prompt) - 1 : -1].double() / params.temperature
            if restricted:
                logits[logits < logits.topk(20).values[:, -1:]] = -torch.inf
            target = torch.tensor(leaf.response)
            expected = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
            np.testing.assert_allclose(leaf.behaviour_logprob, expected.numpy(), rtol=0, atol=1e-5)
            assert (leaf.policy_version == 3).all()
        sampled = tree.origin == Origin.SAMPLED
        np.testing.assert_array_equal(sampled, tree.loss_mask)
        assert np.isfinite(tree.entropy[sampled]).all()
        assert np.isnan(tree.entropy[~sampled]).all()
    assert_all_free(native)


@pytest.mark.parametrize("program", ["flat", TREEPO], ids=["flat", "treepo"])
def test_a_sample_does_not_depend_on_the_batch(program: str | RolloutProgram) -> None:
    params = SamplingParams(n=5, max_new_tokens=20)
    seeds = [11 * i for i in range(len(PROMPTS))]
    together = [responses(tree) for tree in engine().generate(PROMPTS, params, program, seeds=seeds)]
    for prompt, seed, expected in zip(PROMPTS, seeds, together, strict=True):
        alone = engine().generate([prompt], params, program, seeds=[seed])
        assert responses(alone[0]) == expected
    for sizes in ({"max_batch_rows": 3}, {"max_prefill_tokens": 5}, {"kv_tokens": 96}, {"page_size": 16}):
        native = engine(**sizes)
        again = native.generate(PROMPTS, params, program, seeds=seeds)
        assert [responses(tree) for tree in again] == together, sizes
        assert (native.stats["preemptions"] > 0) == ("kv_tokens" in sizes)
        assert_all_free(native)


def test_seeds_tell_branches_and_prompts_apart() -> None:
    params = SamplingParams(n=4, max_new_tokens=12, seed=5)
    native = engine()
    same, again = native.generate([PROMPTS[2]] * 2, params)
    other = native.generate([PROMPTS[2]], params, seeds=[6])[0]
    assert responses(same) == responses(again)
    assert len({tuple(r) for r in responses(same)}) == 4
    assert responses(same) != responses(other)
    seeds = child_seed(np.arange(100)[:, None], np.arange(100))
    assert len(np.unique(seeds)) == 10_000


def test_behaviour_logprob_of_a_bf16_model() -> None:
    """The policy that trains and the one that samples are one: in bf16 they differ by less than its roundings."""
    net = Qwen3ForCausalLM(Qwen3Config(**SIZES)).to(torch.bfloat16).eval()
    net.load_state_dict(model("qwen3").state_dict())
    native = NativeEngine(net, config=EngineConfig(page_size=4, kv_tokens=4096))
    trees = native.generate(PROMPTS, SamplingParams(n=8, max_new_tokens=40), TREEPO)
    (batch,) = pack(trees, max_tokens=1 << 16)
    with torch.no_grad():
        leaves = batch.to_leaves(batch_logprob(net, batch).logprob)
    order = [trees[i].flatten() for i in batch.tree_index]
    differences = [
        np.abs(values.numpy() - leaf.behaviour_logprob)
        for sequences, some in zip(order, leaves, strict=True)
        for leaf, values in zip(sequences, some, strict=True)
    ]
    assert np.concatenate(differences).mean() <= 5e-3


@pytest.mark.parametrize("new_tokens", [64, 128])
def test_the_cache_holds_little_more_than_the_unique_tokens(new_tokens: int) -> None:
    rng = np.random.default_rng(0)
    long = type(model("qwen3"))(type(model("qwen3").config)(**{**SIZES, "max_position_embeddings": 1024}))
    native = NativeEngine(long.eval(), config=EngineConfig(kv_tokens=32768))
    prompts = [rng.integers(10, 211, 512).tolist() for _ in range(4)]
    trees = native.generate(prompts, SamplingParams(n=16, max_new_tokens=new_tokens, ignore_eos=True))
    unique = sum(tree.num_tokens for tree in trees)
    assert native.stats["peak_pages"] * native.config.page_size <= 1.1 * unique


def test_forks_share_keys_and_leave_none_behind() -> None:
    native = engine(kv_tokens=65536)
    params = SamplingParams(n=16, max_new_tokens=30, ignore_eos=True)
    flat = native.generate(PROMPTS, params)
    nodes = sum(tree.num_nodes for tree in flat)
    assert native.stats["unique_tokens"] == sum(len(p) for p in PROMPTS) + 16 * 30 * len(PROMPTS)
    assert native.stats["logical_tokens"] == 16 * sum(len(p) + 30 for p in PROMPTS)
    assert native.stats["peak_kv_tokens"] <= native.stats["unique_tokens"]
    assert native.stats["peak_pages"] * 4 <= native.stats["unique_tokens"] + 4 * nodes
    assert native.stats["forks"] == len(PROMPTS)
    assert native.stats["prefill_tokens"] == sum(len(p) for p in PROMPTS), "every prompt is computed once"
    assert native.stats["steps"] == 30
    assert_all_free(native)


def test_treepo_returns_n_leaves_that_share_their_segments() -> None:
    native = engine()
    for n in (1, 2, 7, 16):
        for tree in native.generate(PROMPTS, SamplingParams(n=n, max_new_tokens=40), TREEPO, seeds=list(range(6))):
            assert tree.num_leaves == n
            assert tree.response_length.max() <= 30  # max_depth segments
            assert (tree.response_length[tree.status == LeafStatus.LENGTH] == 30).all()
    assert native.stats["logical_tokens"] > 1.3 * native.stats["unique_tokens"]
    assert native.stats["sampled_tokens"] == native.stats["unique_tokens"] - sum(len(p) for p in PROMPTS)
    assert_all_free(native)


def test_treepo_doubles_its_width_until_it_is_wide_enough() -> None:
    params = SamplingParams(n=8, max_new_tokens=30, ignore_eos=True)
    (tree,) = engine().generate([PROMPTS[3]], params, TREEPO)
    depth = tree.node_position - tree.prompt_length
    assert {int(d): int((depth == d).sum()) for d in set(depth.tolist()) if d >= 0} == {0: 2, 5: 4, 10: 8}


@pytest.mark.parametrize("kv_tokens", [4096, 84])
def test_treepo_falls_back_to_rewinding_finished_leaves(kv_tokens: int) -> None:
    """With end tokens everywhere few branches live to fork; the group is filled by rewinding leaves to boundaries."""
    net, native = model("qwen3"), engine(kv_tokens=kv_tokens)
    params = SamplingParams(n=12, max_new_tokens=24, stop_token_ids=range(100))
    trees = native.generate(PROMPTS, params, TreePO(segment_tokens=2, max_depth=12), seeds=list(range(6)))
    assert native.stats["rewinds"] > 0
    for tree in trees:
        assert tree.num_leaves == 12
        for leaf in tree.flatten():
            with torch.no_grad():
                logits = net(torch.tensor([leaf.prompt + leaf.response])).logits[0, len(leaf.prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(leaf.response)[:, None])[:, 0]
            np.testing.assert_allclose(leaf.behaviour_logprob, expected.numpy(), rtol=0, atol=1e-5)
    assert_all_free(native)


def test_pages_run_out_and_everything_still_completes() -> None:
    params = SamplingParams(n=8, max_new_tokens=40, ignore_eos=True)
    roomy = [responses(tree) for tree in engine().generate(PROMPTS, params)]
    tight = engine(kv_tokens=100)
    assert [responses(tree) for tree in tight.generate(PROMPTS, params)] == roomy
    assert tight.stats["preemptions"] > 0
    assert tight.stats["peak_pages"] <= 25
    assert_all_free(tight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "host_tokens"),
    [
        pytest.param("flat", 60, id="flat-60"),
        pytest.param(TREEPO, 4096, id="treepo-4096"),
        pytest.param("flat", 4096, id="flat-4096"),
        pytest.param(TREEPO, 60, id="treepo-60"),
    ],
)
def test_dropped_keys_come_back_from_the_host(program: str | RolloutProgram, host_tokens: int) -> None:
    """The same responses, with fewer tokens computed again; the attention is compared with the reference throughout."""
    params = SamplingParams(n=8, max_new_tokens=40, ignore_eos=True)
    recomputing = engine(kv_tokens=120)
    expected = recomputing.generate(PROMPTS, params, program)
    native = engine(kv_tokens=120, host_kv_tokens=host_tokens, debug=True)
    trees = native.generate(PROMPTS, params, program)
    assert [responses(tree) for tree in trees] == [responses(tree) for tree in expected]
    for tree, other in zip(trees, expected, strict=True):
        np.testing.assert_allclose(tree.behaviour_logprob, other.behaviour_logprob, rtol=1e-6, atol=1e-6)
    assert native.stats["restored_tokens"] > 0
    computed, before = native.stats["prefill_tokens"], recomputing.stats["prefill_tokens"]
    assert computed < (before if host_tokens == 60 else before // 2)
    assert_all_free(native)


class ForkWhenUnsure(RolloutProgram):
    segment_tokens = 4

    def start(self, group: GroupState) -> int:
        return 1

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        room = group.width - group.leaves
        for segment in finished:
            assert len(segment.token_ids) <= 4
            if segment.status is None:
                assert segment.length == 4 * segment.depth
                ways = 2 if segment.entropy > 1.0 and room > 0 else 1
                room -= ways - 1
                yield Finish(segment.branch) if segment.depth == 4 else Fork(segment.branch, ways)


def test_a_program_of_ones_own() -> None:
    params = SamplingParams(n=6, max_new_tokens=40)
    for tree in engine().generate(PROMPTS, params, ForkWhenUnsure()):
        assert 1 < tree.num_leaves <= 6
        assert tree.response_length.max() == 16


class Silent(ForkWhenUnsure):
    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        return ()


def test_a_program_that_forgets_a_branch_is_an_error_and_the_engine_stays_usable() -> None:
    native = engine()
    with pytest.raises(RuntimeError, match="Silent left 1 branches of prompt 0 resting"):
        native.generate(PROMPTS, SamplingParams(n=2), Silent())
    assert len(native.generate(PROMPTS[:1], SamplingParams(n=2, max_new_tokens=3))) == 1
    assert_all_free(native)  # every call starts with an empty tree, so what the broken one left is gone


@pytest.mark.skipif(not load_library("cpu"), reason="the dense reference multiplies the keys a row does not see by 0")
def test_only_rows_with_broken_logits_fail() -> None:
    """A token whose embedding is NaN poisons the prompts that contain it, not their neighbours in the batch."""
    poisoned = type(model("qwen3"))(model("qwen3").config)
    poisoned.load_state_dict(model("qwen3").state_dict())
    poisoned.model.embed_tokens.weight.data[9] = torch.nan
    native = NativeEngine(poisoned, config=EngineConfig(page_size=4, kv_tokens=4096))
    for program in ("flat", TREEPO):
        bad, good = native.generate([[20, 9, 21], PROMPTS[2]], SamplingParams(n=4, max_new_tokens=8), program)
        expected = engine().generate([PROMPTS[2]], SamplingParams(n=4, max_new_tokens=8), program)[0]
        assert bad.num_leaves == 4
        assert (bad.status == LeafStatus.FAILED).all()
        assert (bad.response_length == 0).all()
        assert responses(good) == responses(expected)


def test_train_mode_is_restored_and_gradients_are_left_alone() -> None:
    net = model("qwen3").train()
    try:
        engine().generate(PROMPTS[:1], SamplingParams(n=1, max_new_tokens=2))
        assert net.training
        net(torch.tensor([PROMPTS[2]])).logits.sum().backward()
        assert net.lm_head.weight.grad is not None
    finally:
        net.zero_grad(set_to_none=True)
        net.eval()


def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one letter a token, made anew, as a test may change it."""
    tokenizer = Tokenizer(models.WordLevel({chr(0x100 + i): i for i in range(211)}, unk_token=chr(0x100)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("program", ["flat", TREEPO])
def test_stop_strings_end_a_response_where_they_are_complete(program: Any) -> None:
    """Some have their letters in several nodes; earlier tokens are those that would have been sampled anyway."""
    native = NativeEngine(model("qwen3"), letters(), EngineConfig(page_size=4, kv_tokens=4096))
    params = {"n": 8, "max_new_tokens": 40, "ignore_eos": True}
    (free,) = native.generate([PROMPTS[2]], SamplingParams(**params), program)
    longest = responses(free)[0]
    stop = [chr(0x100 + a) + chr(0x100 + b) for a, b in (longest[3:5], longest[9:11], longest[20:22])]
    (tree,) = native.generate([PROMPTS[2]], SamplingParams(**params, stop=stop), program)
    ended = 0
    for leaf in tree.flatten():
        text = letters().decode(leaf.response)
        assert not any(s in text[:-1] for s in stop)
        assert (leaf.status == LeafStatus.STOP) == any(text.endswith(s) for s in stop)
        ended += leaf.status == LeafStatus.STOP
        if program == "flat":
            assert any(leaf.response == whole[: len(leaf.response)] for whole in responses(free))
    assert ended > 0
    assert_all_free(native)


def test_biased_and_allowed_tokens() -> None:
    """Log-probabilities are those of the distribution sampled from."""
    native, net, allowed = engine(), model("qwen3"), [20, 30, 40, 50]
    params = SamplingParams(
        n=6, max_new_tokens=12, ignore_eos=True, allowed_token_ids=allowed, logit_bias={20: 3.0, 30: -float("inf")}
    )
    (tree,) = native.generate([PROMPTS[2]], params)
    seen = set()
    for leaf in tree.flatten():
        seen |= set(leaf.response)
        with torch.no_grad():
            logits = net(torch.tensor([leaf.prompt + leaf.response])).logits[0, len(leaf.prompt) - 1 : -1]
        bias = torch.full((211,), -torch.inf)
        bias[[20, 40, 50]] = torch.tensor([3.0, 0.0, 0.0])
        expected = (logits + bias).log_softmax(-1).gather(1, torch.tensor(leaf.response)[:, None])[:, 0]
        np.testing.assert_allclose(leaf.behaviour_logprob, expected.numpy(), rtol=0, atol=1e-5)
    assert 20 in seen
    assert seen <= {20, 40, 50}


@pytest.mark.parametrize(
    ("prompts", "params", "sizes", "said"),
    [
        ([[]], {}, {}, "Prompt 0 is empty"),
        ([[5], [500]], {}, {}, "Prompt 1 has token ids outside"),
        ([[5] * 60], {}, {"kv_tokens": 64}, "raise kv_tokens"),
        ([[5] * 400], {}, {}, "512 positions"),
        (["text"], {}, {}, "no tokenizer"),
        ([[5]], {"n": 0}, {}, r"SamplingParams\.n is 0"),
        ([[5]], {"max_new_tokens": 0}, {}, "max_new_tokens is 0"),
        ([[5]], {"temperature": -1.0}, {}, "temperature is -1"),
        ([[5]], {"stop": ("x",)}, {}, "no tokenizer; pass one, or use stop_token_ids"),
        ([[5]], {"stop": "x"}, {}, "stop is 'x'; give a sequence of strings"),
        ([[5]], {"allowed_token_ids": []}, {}, "allowed_token_ids is empty"),
        ([[5]], {"allowed_token_ids": [5, 211]}, {}, "allowed_token_ids names tokens outside .* vocabulary of 211"),
        ([[5]], {"logit_bias": {-1: 2.0}}, {}, "A token of SamplingParams.logit_bias is -1"),
        ([[5]], {"logit_bias": {3: float("nan")}}, {}, "logit_bias holds nan"),
        ([[5]], {"kept_tokens": True}, {}, "kept_tokens needs top_p"),
        ([[5]], {}, {"max_batch_rows": 0}, "max_batch_rows is 0"),
        ([[5]], {}, {"host_kv_tokens": -1}, "host_kv_tokens is -1"),
        ([[5]], {}, {"compile": True, "debug": True}, "debug looks into every layer"),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(
    prompts: list[Any], params: dict[str, Any], sizes: dict[str, int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        engine(**sizes).generate(prompts, SamplingParams(**{"max_new_tokens": 200, **params}))


def test_programs_are_known_by_name() -> None:
    with pytest.raises(UserError, match="'tree' is not known; did you mean 'treepo'"):
        engine().generate(PROMPTS, SamplingParams(), "tree")
    with pytest.raises(ValueError, match="one a prompt"):
        engine().generate(PROMPTS, SamplingParams(), seeds=[1])
    with pytest.raises(ValueError, match="branch >= 1"):
        TreePO(branch=0)


def test_a_response_that_outgrows_the_cache_alone_names_the_remedy() -> None:
    class Shredder(ForkWhenUnsure):  # a node, and so a page, for every token
        segment_tokens = 1

        def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
            for segment in finished:
                if segment.status is None:
                    yield Fork(segment.branch, 2) if segment.depth % 2 else Fork(segment.branch)

    with pytest.raises(KvExhaustedError, match="raise kv_tokens"):
        engine(kv_tokens=32).generate([[5]], SamplingParams(n=1, max_new_tokens=24, ignore_eos=True), Shredder())
