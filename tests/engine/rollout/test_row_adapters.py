"""Rows of different LoRA adapters in one batch, against each adapter alone and against peft itself."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import peft
import pytest
import torch

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.model.invariant.check import differing
from rolltree.engine.model.invariant.install import make_invariant
from rolltree.engine.model.lora import use_adapter
from rolltree.engine.programs import TreePO
from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.native.adapters import RowAdapters
from rolltree.engine.rollout.native.drafts import DraftConfig
from rolltree.engine.rollout.native.loop import NativeLoop
from rolltree.kernels.decoder_layer import Decoder
from rolltree.kernels.libraries import load_library
from rolltree.kernels.low_rank import api as low_rank_api

from ...kernels.on_device import needs_known_order, needs_triton
from ..programs.test_programs import rescored
from .test_graphs import Uncaptured
from .test_native_engine import PROMPTS, assert_all_free, model, responses

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "red": {"r": 8, "lora_alpha": 12, "target_modules": [*ATTENTION, *MLP, "lm_head"]},
    "blue": {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"]},
    "green": {"r": 17, "lora_alpha": 20, "target_modules": [*MLP, "lm_head"]},
}
NAMES: list[str | None] = ["blue", None, "red", "green", "blue", "red"]


def adapted(net: Any, only: str | None = None) -> Any:
    """The model with adapters, both sides of which differ from zero; or with one alone, and that on."""
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        config = peft.LoraConfig(**options, init_lora_weights=False)
        if only in (None, name):
            peft.inject_adapter_in_model(config, net, name)
    use_adapter(net, only)
    return net


def make(name: str = "qwen3", dtype: torch.dtype = torch.float32, **config: Any) -> NativeEngine:
    net = copy.deepcopy(model(name)).to(dtype)
    native = NativeEngine(adapted(net), config=EngineConfig(**{"page_size": 4, "kv_tokens": 4096, **config}))
    for each in ADAPTERS:
        native.add_adapter(each)
    return native


def params(names: list[str | None] = NAMES, **options: Any) -> list[SamplingParams]:
    given = {"n": 3, "max_new_tokens": 14, "ignore_eos": True, **options}
    return [SamplingParams(adapter=name, **given) for name in names]


def together(native: NativeEngine, **options: Any) -> list[TokenTree]:
    return native.generate(PROMPTS, params(**options), seeds=range(len(NAMES)))


def alone(native: NativeEngine, **options: Any) -> list[TokenTree]:
    found = []
    for i, (prompt, own) in enumerate(zip(PROMPTS, params(**options), strict=True)):
        native.forget_prefixes()
        found += native.generate([prompt], own, seeds=[i])
    return found


def assert_same(trees: list[TokenTree], others: list[TokenTree], off: float) -> None:
    for tree, other in zip(trees, others, strict=True):
        assert responses(tree) == responses(other)
        np.testing.assert_allclose(tree.behaviour_logprob, other.behaviour_logprob, rtol=0, atol=off)


@pytest.mark.slow(but=2)
@pytest.mark.check(but=3)
@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("config", [{}, {"debug": True}, {"max_prefill_tokens": 5}, {"kv_tokens": 256}])
def test_rows_of_a_batch_are_those_of_each_adapter_alone(name: str, config: dict[str, Any]) -> None:
    """Layers as one call and as modules, chunks of prompts, and preemption."""
    native = make(name, **config)
    trees = together(native)
    preempted = native.stats["preemptions"]
    assert (preempted > 0) == ("kv_tokens" in config)
    if not config:
        assert native.stats["steps"] <= 16  # one after the other takes 6 times 14
    for who, tree in zip(NAMES, trees, strict=True):
        net = copy.deepcopy(model(name))
        net.set_attn_implementation("eager")
        assert rescored(tree, net if who is None else adapted(net, who), 1.0, {}) < 1e-5
    assert_same(trees, alone(native), 1e-5)
    assert_all_free(native)


def test_the_layers_are_one_call_with_and_without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    if not load_library("cpu"):
        pytest.skip("the C++ kernels are not built")
    runs: list[bool] = []
    run = Decoder.run

    def seen(self: Decoder, *arguments: Any) -> Any:
        runs.append(arguments[-1] is not None)
        return run(self, *arguments)

    monkeypatch.setattr(Decoder, "run", seen)
    native = make()
    steps = native.stats["steps"]
    together(native)
    assert runs == [True] * int(native.stats["steps"] - steps)
    runs.clear()
    native.generate(PROMPTS, params([None])[0])
    assert runs
    assert not any(runs)


@pytest.mark.check
def test_a_tree_of_each_adapter_with_drafts() -> None:
    native = make(drafts=DraftConfig(rows=4096, remembered=4096))
    program = TreePO(segment_tokens=5, max_depth=4, branch=2, init=2)
    for _ in range(2):  # the second time there are texts to draft from
        trees = native.generate(PROMPTS, params(), program, seeds=range(len(NAMES)))
    assert native.stats["accepted_tokens"] > 0
    for who, tree in zip(NAMES, trees, strict=True):
        net = copy.deepcopy(model("qwen3"))
        assert rescored(tree, net if who is None else adapted(net, who), 1.0, {}) < 1e-5
    assert_all_free(native)


def test_padded_steps_have_the_same_rows() -> None:
    native = make()
    expected = together(native)
    native.forget_prefixes()
    runner = native.loop.runner
    runner.graphs = Uncaptured(native.cache, runner.decode_logits, torch.device("cpu"))
    assert_same(together(native), expected, 1e-5)
    assert runner.graphs.steps > 0


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("graphs", [True, False])
def test_tiles_of_a_step_give_triton_the_same_rows(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's products, which read the tiles of the step's vector, in place of the CPU's; padded and as they are."""
    some: dict[str, Any] = {"n": 1, "max_new_tokens": 3}
    expected = together(make(debug=True), **some)
    launches = []

    def by_triton(out: Any, x: Any, adapters: Any, runs: Any) -> None:
        launches.append(len(runs.tiles))
        low_rank_api._BACKENDS["triton"](out, x, adapters, runs)

    monkeypatch.setitem(low_rank_api._BACKENDS, "cpu", by_triton)  # type: ignore[arg-type]
    native = make(debug=True)
    runner = native.loop.runner
    if graphs:
        runner.graphs = Uncaptured(native.cache, runner.decode_logits, torch.device("cpu"))
    assert_same(together(native, **some), expected, 1e-5)
    assert len(launches) >= 3 * (2 * len([*ATTENTION, *MLP]) + 1)  # of steps, layers and the head


def test_samples_in_bf16_are_as_near_as_bf16_is() -> None:
    """To the model of the same bf16 numbers in fp32, compared with Transformers and peft in bf16."""
    native = make(dtype=torch.bfloat16)
    for who, tree in zip(NAMES, together(native), strict=True):
        net = copy.deepcopy(native.model)
        use_adapter(net, who)
        net.set_attn_implementation("eager")
        plain = [logprobs(net, leaf) for leaf in tree.flatten()]
        exact = [logprobs(net.float(), leaf) for leaf in tree.flatten()]
        ours = [leaf.behaviour_logprob for leaf in tree.flatten()]
        assert distance(ours, exact) <= 1.5 * distance(plain, exact) + 1e-3, who


def logprobs(net: Any, leaf: Any) -> Any:
    with torch.no_grad():
        logits = net(torch.tensor([leaf.prompt + leaf.response])).logits[0, len(leaf.prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(leaf.response)[:, None])[:, 0].numpy()


def distance(some: list[Any], others: list[Any]) -> float:
    return float(np.sqrt(np.mean((np.concatenate(some) - np.concatenate(others)) ** 2)))


# -- keys --------------------------------------------------------------------------------------------------------------


def one_prompt(native: NativeEngine, names: list[str | None]) -> list[TokenTree]:
    return native.generate([PROMPTS[3]] * len(names), params(names), seeds=range(len(names)))


def worst(trees: list[TokenTree], names: list[str | None]) -> float:
    """Largest difference from the log-probs of each adapter's model."""
    nets = [adapted(copy.deepcopy(model("qwen3")), name) if name else model("qwen3") for name in names]
    return max(rescored(tree, net, 1.0, {}) for tree, net in zip(trees, nets, strict=True))


def test_adapters_share_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt with each adapter, at once and one after the other; then the negative: keys without the adapter."""
    names: list[str | None] = ["red", None, "blue", "green"]
    native = make()
    assert worst(one_prompt(native, names), names) < 1e-5
    again = native.stats["prefix_hit_tokens"]
    assert worst(one_prompt(native, names), names) < 1e-5
    assert native.stats["prefix_hit_tokens"] - again >= 4 * (len(PROMPTS[3]) - 4)  # each finds its own
    monkeypatch.setattr(NativeLoop, "_key", lambda self, request: self.version << 16)
    wrong = make()
    assert worst(one_prompt(wrong, names), names) > 0.01


def test_another_adapter_leaves_the_keys_of_the_others() -> None:
    native = make()
    native.drop_adapter("green")
    one_prompt(native, ["red", None])
    native.add_adapter("green")
    one_prompt(native, ["green"])
    native.drop_adapter("blue")
    found = native.stats["prefix_hit_tokens"]
    assert worst(one_prompt(native, ["red", None]), ["red", None]) < 1e-5
    assert native.stats["prefix_hit_tokens"] - found >= 2 * (len(PROMPTS[3]) - 4)


def test_an_adapter_dropped_and_added_again_has_new_keys() -> None:
    native = make()
    one_prompt(native, ["red"])
    native.drop_adapter("red")
    with torch.no_grad():
        for name, parameter in native.model.named_parameters():
            if ".lora_B.red." in name:
                parameter.neg_()
    native.add_adapter("red")
    net = adapted(copy.deepcopy(model("qwen3")), "red")
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if ".lora_B.red." in name:
                parameter.neg_()
    (tree,) = one_prompt(native, ["red"])
    assert rescored(tree, net, 1.0, {}) < 1e-5


@pytest.mark.parametrize("moves", ["update_weights", "sleep"])
def test_tensors_that_move_are_found_again(moves: str) -> None:
    native = make(dtype=torch.bfloat16 if moves == "sleep" else torch.float32)
    before = [responses(tree) for tree in together(native)]
    if moves == "sleep":
        native.sleep(weights=True)
        for parameter in native.model.parameters():
            parameter.data = parameter.data.clone()
        native.wake()
        assert [responses(tree) for tree in together(native)] == before
        return
    changed = {n: -p for n, p in native.model.named_parameters() if ".lora_B.red." in n}
    native.update_weights(changed)
    after = [responses(tree) for tree in together(native)]
    assert [a == b for a, b in zip(after, before, strict=True)] == [name != "red" for name in NAMES]


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=needs_known_order), torch.bfloat16])
def test_batch_invariant_rows_have_the_bits_of_training_and_of_each_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch-invariant models refuse an adapter on the head; "blue" has none, and "green" gets none here."""
    monkeypatch.setitem(ADAPTERS, "green", {"r": 17, "lora_alpha": 20, "target_modules": MLP})
    monkeypatch.setitem(ADAPTERS, "red", {"r": 8, "lora_alpha": 32, "target_modules": [*ATTENTION, *MLP]})
    net = copy.deepcopy(model("qwen3")).to(dtype)
    net.set_attn_implementation("rolltree")
    make_invariant(net)
    native = NativeEngine(adapted(net), config=EngineConfig(page_size=4, kv_tokens=4096))
    for each in ADAPTERS:
        native.add_adapter(each)
    trees = together(native)
    for tree, other in zip(trees, alone(native), strict=True):
        assert tree.token_id.tolist() == other.token_id.tolist()
        assert tree.behaviour_logprob.tobytes() == other.behaviour_logprob.tobytes()
    for who, tree in zip(NAMES, trees, strict=True):
        with native.changing_adapters():
            use_adapter(net, who)
            assert differing(net, [tree]) is None


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "has a LoRA variant"),
        ({"lora_bias": True}, "has lora_bias"),
        ({"target_modules": ["embed_tokens"]}, "has an adapter of the kind Embedding"),
        ({"target_modules": ["experts.0"]}, "has a part in an expert"),
    ],
)
def test_adapters_that_are_no_two_matrices_are_refused(options: dict[str, Any], message: str) -> None:
    net = copy.deepcopy(model("qwen3"))
    net.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    peft.inject_adapter_in_model(peft.LoraConfig(**{"target_modules": ["q_proj"], **options}), net, "odd")
    use_adapter(net, None)
    with pytest.raises(ValueError, match=message):
        RowAdapters(net).add("odd")


def test_an_unknown_adapter_is_refused_for_scores_of_a_prompt_too() -> None:
    native = make()
    with pytest.raises(ValueError, match="no adapter 'violet'; load_adapter has been called for: red, blue, green"):
        native.prompt_logprobs(PROMPTS[3], adapter="violet")
    base, red = (native.prompt_logprobs(PROMPTS[3], adapter=name)["raw_logprob"] for name in (None, "red"))
    assert np.abs(base - red).max() > 0.1
    net = adapted(copy.deepcopy(model("qwen3")), "red")
    with torch.no_grad():
        ids = torch.tensor([PROMPTS[3]])
        expected = net(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(red, expected, rtol=0, atol=1e-5)
