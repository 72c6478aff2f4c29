"""Models that trees do not fit are found out: by their layers when loaded, by their log-probs before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig, RwkvConfig

from rolltree.engine import TokenTree, UserError, batch_logprob, load_model, pack
from rolltree.engine.model import self_check
from rolltree.engine.model.invariant.install import make_invariant
from rolltree.engine.model.self_check import TOLERANCE, check_model, own_logprobs, tree_error, trees_fit

from ...kernels.on_device import needs_known_order
from ...support.moe_models import make, routers
from .test_tree_equals_flat import CONFIGS, make_models, random_tree


def mixing_neighbours(model: Any) -> Any:
    """Mix neighbours in the embeddings, as a convolution over packed tokens would."""
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: out + 0.5 * out.roll(1, dims=1))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_models_that_fit(name: str) -> None:
    model, _ = make_models(name)
    error = tree_error(model, [random_tree(1, 3, 9), random_tree(2, 1, 4)])
    assert error is not None
    assert error < 1e-5
    assert trees_fit(error, torch.float32)


def test_a_model_that_mixes_neighbours_does_not_fit() -> None:
    model = mixing_neighbours(make_models("qwen3")[0])
    error = tree_error(model, [random_tree(1, 3, 9)])
    assert not trees_fit(error, torch.float32)
    assert not trees_fit(float("nan"), torch.float32)


def test_nothing_shared_is_nothing_to_check() -> None:
    model, _ = make_models("qwen3")
    assert tree_error(model, [TokenTree.from_sequences([1, 2], [[3, 4]])]) is None
    assert trees_fit(None, torch.float32)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4), "linear_attention"),
        (Mamba2Config(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, state_size=8),
         "linear_attention"),
        (RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32), "Rwkv"),
    ],
    ids=["mamba", "mamba2", "rwkv"],
)  # fmt: skip
def test_layers_with_a_state_are_refused_at_load(tmp_path, config, says) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"(cannot be tree-masked|cannot be loaded).*{says}"):
        load_model(tmp_path)


def test_each_precision_is_checked_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is rounding under autocast must not be held against the model in fp32, nor excuse it there."""
    model, _ = make_models("qwen3")
    error = {True: 0.01, False: 1e-6}
    monkeypatch.setattr(self_check, "_own_error", lambda model, trees: error[torch.is_autocast_enabled("cpu")])
    with torch.autocast("cpu", torch.bfloat16):
        self_check.check_model(model)
    self_check.check_model(model)
    error[False] = 0.01
    model, _ = make_models("qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        self_check.check_model(model)
    with pytest.raises(ValueError, match="other log-probs"):
        self_check.check_model(model)


def test_each_model_of_a_class_is_checked_by_itself() -> None:
    check_model(make_models("qwen3")[0])
    with pytest.raises(ValueError, match="other log-probs"):
        check_model(mixing_neighbours(make_models("qwen3")[0]))
    check_model(make_models("qwen3")[0])


def test_a_model_is_checked_once_whatever_its_weights_become(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = make_models("qwen3")
    batch, *_ = pack([random_tree(1, 3, 9)], max_tokens=4096)
    checked = []
    error = self_check._own_error
    monkeypatch.setattr(self_check, "_own_error", lambda *given: checked.append(given) or error(*given))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        batch_logprob(model, batch).logprob.sum().backward()
        optimizer.step()
    model.load_state_dict(make_models("qwen3")[0].state_dict())
    batch_logprob(model, batch)
    assert len(checked) == 1


def test_a_model_that_was_refused_is_checked_again() -> None:
    model, _ = make_models("qwen3")
    embeddings = mixing_neighbours(model).get_input_embeddings()
    for _ in range(2):
        with pytest.raises(ValueError, match="other log-probs"):
            check_model(model)
    embeddings._forward_hooks.clear()
    check_model(model)


def unsteady(model: Any) -> Any:
    """Let experts 0 to 3 be as good as each other, and 4 to 7, but for an error that is new in each forward: another
    backend's rounding. Which of them a router chooses is chance."""
    draw = torch.Generator().manual_seed(0)

    def round_otherwise(router: Any, args: Any) -> None:
        with torch.no_grad():
            for group in (slice(0, 4), slice(4, 8)):
                router.weight[group] = router.weight[group.start]
            router.weight += 1e-6 * torch.randn(router.weight.shape, generator=draw)

    for router in routers(model):
        router.register_forward_pre_hook(round_otherwise)
    return model


@pytest.mark.parametrize(
    ("attention", "invariant"),
    [("rolltree", False), pytest.param("rolltree", True, marks=needs_known_order), ("sdpa", False)],
)
def test_nearly_equal_experts_are_compared_under_equal_routes(attention: str, invariant: bool) -> None:
    model = unsteady(make("qwen3_moe", vocab_size=97))
    tree = random_tree(1, 3, 9)
    twice = [torch.cat(own_logprobs(model, tree)).detach() for _ in range(2)]
    assert float((twice[0] - twice[1]).abs().mean()) > 10 * TOLERANCE[torch.float32], "the test shows nothing"
    if invariant:
        make_invariant(model)
    error = tree_error(model, [tree])
    assert error is not None
    assert error < 1e-5
    model.set_attn_implementation(attention)
    check_model(model)


def test_other_experts_than_those_that_were_chosen_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3_moe")
    monkeypatch.setattr(self_check.Replay, "choose", lambda self, place, own: own.roll(1, 0))
    with pytest.raises(ValueError, match="other log-probs"):
        check_model(model)


def test_the_check_leaves_routers_as_they_were() -> None:
    model = make("qwen3_moe")
    calls = []
    own = routers(model)[0].forward
    routers(model)[0].forward = lambda *args: calls.append(1) or own(*args)
    before = [vars(router).get("forward") for router in routers(model)]
    check_model(model)
    assert [vars(router).get("forward") for router in routers(model)] == before
    assert len(calls) == 2
