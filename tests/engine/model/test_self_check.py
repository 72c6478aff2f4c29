"""Models that trees do not fit are found out: by their layers when loaded, by their log-probs before training."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig, RwkvConfig

from rolltree.engine import TokenTree, UserError, load_model
from rolltree.engine.model import self_check
from rolltree.engine.model.self_check import tree_error, trees_fit

from .test_tree_equals_flat import CONFIGS, make_models, random_tree


@pytest.mark.parametrize("name", CONFIGS)
def test_models_that_fit(name: str) -> None:
    model, _ = make_models(name)
    error = tree_error(model, [random_tree(1, 3, 9), random_tree(2, 1, 4)])
    assert error is not None
    assert error < 1e-5
    assert trees_fit(error, torch.float32)


def test_a_model_that_mixes_neighbours_does_not_fit() -> None:
    """Hooks on the embeddings mix neighbours as a convolution over packed tokens would."""
    model, _ = make_models("qwen3")
    hook = lambda module, args, out: out + 0.5 * out.roll(1, dims=1)  # noqa: E731
    model.get_input_embeddings().register_forward_hook(hook)
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
    """An error that is rounding under autocast must not be held against the model in fp32."""
    monkeypatch.setattr(self_check, "_found", {})
    monkeypatch.setattr(
        self_check, "_own_error", lambda model, trees: 0.01 if torch.is_autocast_enabled("cpu") else 1e-6
    )
    with torch.autocast("cpu", torch.bfloat16):
        self_check.check_model(make_models("qwen3")[0])
    self_check.check_model(make_models("qwen3")[0])
    monkeypatch.setattr(self_check, "_found", {})
    monkeypatch.setattr(self_check, "_own_error", lambda model, trees: 0.01)
    with pytest.raises(ValueError, match="other log-probs"):
        self_check.check_model(make_models("qwen3")[0])
