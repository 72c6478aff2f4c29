"""Models with fused layers compute what Transformers computes, and stay what they were to everything around them."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from rolltree.engine import batch_loss, fuse_layers, load_model, pack, skip_check, unfuse_layers
from rolltree.engine.model import fused_layers
from rolltree.kernels import Objective
from rolltree.kernels.libraries import load_library

from .test_tree_equals_flat import random_tree

pytestmark = pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")

LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=12),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}
IDS = torch.randint(97, (3, 20), generator=torch.Generator().manual_seed(0))
TARGET_MODULES = ["q_proj", "gate_proj", "up_proj", "down_proj"]


def made(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    if name == "qwen3_moe":
        options["experts_implementation"] = "eager"  # which has float64
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), **{"attn_implementation": "sdpa"} | options).eval()
    for parameter in model.parameters():  # norms that are not all ones
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def logits_and_gradients(model: Any, ids: Tensor = IDS) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    (logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).mean() * 5).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


def worst(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest error, relative to the whole."""
    assert got.keys() == exact.keys()
    return max(((got[name].double() - t).norm() / t.norm()).item() for name, t in exact.items())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the number of calls of each op."""
    count: Counter[str] = Counter()

    def counted(name: str, op: Any) -> Any:
        def call(*args: Any) -> Any:
            count[name] += 1
            return op(*args)

        return call

    for name in ("rms_norm", "rotate", "silu_mul"):
        monkeypatch.setattr(fused_layers, name, counted(name, getattr(fused_layers, name)))
    return count


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_in_float32(name: str, calls: Counter[str]) -> None:
    """Outputs are as near to float64 as Transformers'; these differ by some roundings of each layer, 1e-6 in all."""
    plain, exact = logits_and_gradients(made(name)), logits_and_gradients(made(name).double())
    assert not calls
    fused = logits_and_gradients(fuse_layers(made(name)))
    normed_heads = name.startswith("qwen3")
    gated = 0 if name == "qwen3_moe" else LAYERS
    norms = (4 if normed_heads else 2) * LAYERS + 1
    assert calls == Counter(rms_norm=norms, rotate=LAYERS) + Counter(silu_mul=gated)
    assert worst(fused, exact) <= 2 * worst(plain, exact)
    assert worst(fused, plain) <= 2e-6
    assert torch.allclose(fused["logits"], plain["logits"], rtol=0, atol=float(1e-6 * plain["logits"].abs().max()))


@pytest.fixture
def of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision by the reference, as a GPU has it by Triton."""
    for dtype in (torch.bfloat16, torch.float16):
        monkeypatch.setitem(fused_layers.BACKENDS, ("cpu", dtype), "reference")


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_is_no_further_from_float64(name: str, of_halves: None, calls: Counter[str]) -> None:
    model = made(name).bfloat16()
    exact = logits_and_gradients(copy.deepcopy(model).double())
    plain = logits_and_gradients(model)
    fused = logits_and_gradients(fuse_layers(model))
    assert calls["rms_norm"] > LAYERS
    assert torch.equal(fused["logits"], plain["logits"])  # it rounds where Transformers does
    for key, t in exact.items():
        assert worst({key: fused[key]}, {key: t}) <= 2 * worst({key: plain[key]}, {key: t}), key


def dtypes(model: Any) -> list[tuple[str, torch.dtype]]:
    """Return the dtypes that the modules of ``model`` make from now on, in their order."""
    seen: list[tuple[str, torch.dtype]] = []
    for name, module in model.named_modules():
        if not name.endswith("act_fn"):  # which a fused unit calls only if somebody listens
            module.register_forward_hook(
                lambda _m, _i, out, n=name: seen.append((n, out.dtype)) if isinstance(out, Tensor) else None
            )
    return seen


def test_autocast_keeps_its_dtypes(of_halves: None, calls: Counter[str]) -> None:
    plain, fused = made("qwen3"), fuse_layers(made("qwen3"))
    seen = dtypes(plain), dtypes(fused)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = logits_and_gradients(plain), logits_and_gradients(fused)
    assert len(seen[0]) > 6 * LAYERS
    assert seen[0] == seen[1]
    assert {n: t.dtype for n, t in expected.items()} == {n: t.dtype for n, t in found.items()}
    assert calls["silu_mul"] == LAYERS
    assert torch.equal(expected["logits"], found["logits"])


def test_adapters_and_checkpointing() -> None:
    found = []
    for fuse in (False, True):
        model = made("qwen3")
        if fuse:
            fuse_layers(model)
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(target_modules=TARGET_MODULES, r=4, init_lora_weights=False))
        found.append(logits_and_gradients(adapted))
        assert len(found[-1]) == 1 + 2 * LAYERS * len(TARGET_MODULES)
        if fuse:
            adapted.train()
            adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            again = logits_and_gradients(adapted)
            assert all(torch.equal(t, again[name]) for name, t in found[-1].items())
    assert worst(found[1], found[0]) <= 2e-6


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_loss_of_trees(name: str, calls: Counter[str]) -> None:
    (batch,) = pack([random_tree(seed, 3, 12) for seed in range(3)], max_tokens=10_000)
    found = []
    for fuse in (False, True):
        model = made(name, attn_implementation="rolltree")
        skip_check(model)  # whose calls would be counted
        if fuse:
            fuse_layers(model)
        out = batch_loss(model, batch, Objective.preset("gspo"), normalizer=5.0, old_logprob=None)
        out.loss.backward()
        found.append({key: p.grad for key, p in model.named_parameters()} | {"loss": out.loss.detach()})
    assert calls["rotate"] == LAYERS
    assert worst(found[1], found[0]) <= 5e-6


def fused_modules(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if "forward" in vars(m)]


def test_a_loaded_model_is_fused_and_saved_as_it_was(tmp_path: Path) -> None:
    plain = made("llama")
    plain.save_pretrained(tmp_path / "plain")
    model = load_model(tmp_path / "plain")
    assert len(fused_modules(model)) == 4 * LAYERS + 1
    model.save_pretrained(tmp_path / "fused")
    for file in ("config.json", "model.safetensors"):
        saved = [(tmp_path / of / file).read_bytes() for of in ("plain", "fused")]
        assert saved[0] == saved[1], file
    assert list(model.state_dict()) == list(plain.state_dict())


def test_undone_it_is_the_model_it_was() -> None:
    model = made("qwen3")
    before = logits_and_gradients(model)
    assert fuse_layers(fuse_layers(model)) is model
    assert len(fused_modules(model)) == 6 * LAYERS + 1
    assert unfuse_layers(model) is model
    assert fused_modules(model) == []
    after = logits_and_gradients(model)
    assert all(torch.equal(t, after[name]) for name, t in before.items())


def test_a_copy_is_fused_and_computes_with_its_own_weights() -> None:
    model = fuse_layers(made("qwen3"))
    other = copy.deepcopy(model)
    assert fused_modules(other) == fused_modules(model)
    before = model(IDS).logits
    for p in other.parameters():
        p.data.mul_(0.5)
    assert torch.equal(model(IDS).logits, before)
    assert torch.equal(other(IDS).logits, unfuse_layers(copy.deepcopy(other))(IDS).logits) is False
    assert torch.allclose(other(IDS).logits, unfuse_layers(other)(IDS).logits, atol=1e-5)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    pickled = torch.load(file, weights_only=False)
    assert torch.allclose(pickled(IDS).logits, before, atol=1e-5)
    assert torch.equal(fuse_layers(pickled)(IDS).logits, before)


def test_weights_are_freed_with_the_model() -> None:
    model = fuse_layers(made("qwen3"))
    parameters = [weakref.ref(p) for p in model.parameters()]
    gc.disable()
    try:
        del model
        assert all(p() is None for p in parameters)
    finally:
        gc.enable()


class OwnNorm(LlamaRMSNorm):
    """A subclass of a user, which may compute anything."""


def test_what_is_not_known_is_left_alone(calls: Counter[str]) -> None:
    model = made("llama")
    own = OwnNorm(48)
    model.model.norm = own
    norm, unit = model.model.layers[0].input_layernorm, model.model.layers[0].mlp
    norm.forward = lambda x: 2 * x
    unit.act_fn = nn.GELU()
    replaced = norm.forward
    fuse_layers(model)
    assert "forward" not in vars(own)
    assert "forward" not in vars(unit)
    assert norm.forward is replaced
    unfuse_layers(model)
    assert norm.forward is replaced
    gemma = AutoModelForCausalLM.from_config(Gemma2Config(**SIZES, head_dim=16))
    fuse_layers(gemma)
    assert fused_modules(gemma) == [f"model.layers.{i}.self_attn" for i in range(LAYERS)]


def test_hooks_are_called() -> None:
    """Hooks of an activation are called too, which a fused unit does not call itself."""
    model = fuse_layers(made("llama"))
    layer, heard = model.model.layers[1], []
    for module in (layer.mlp.act_fn, layer.mlp.gate_proj, layer.mlp, layer.input_layernorm, layer.self_attn):
        module.register_forward_hook(lambda m, _i, _o: heard.append(type(m).__name__))
    hidden = model(IDS, output_hidden_states=True).hidden_states
    assert sorted(heard) == ["Linear", "LlamaAttention", "LlamaMLP", "LlamaRMSNorm", "SiLUActivation"]
    assert len(hidden) == LAYERS + 1
    assert len(fused_modules(model)) >= 4 * LAYERS + 1


@pytest.mark.slow
def test_a_compiled_model_is_transformers_own() -> None:
    """It is fused by the compiler, whose graph a custom op would cut."""
    model = fuse_layers(made("qwen3"))
    expected = unfuse_layers(copy.deepcopy(model))(IDS, use_cache=False).logits
    targets: list[str] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=look)
    assert torch.equal(compiled(IDS, use_cache=False).logits, expected)
    assert any("silu" in target for target in targets)
    assert not any("rolltree" in target for target in targets)


def test_a_weight_of_another_dtype_is_computed_as_before() -> None:
    model: PreTrainedModel = made("llama").bfloat16()
    model.model.norm.float()
    expected = model.model(IDS).last_hidden_state
    assert expected.dtype == torch.float32
    assert torch.equal(fuse_layers(model).model(IDS).last_hidden_state, expected)


def test_a_unit_with_biases() -> None:
    torch.manual_seed(0)
    unit = LlamaMLP(LlamaConfig(**SIZES, mlp_bias=True))
    x = torch.randn(5, 48)
    expected = unit(x)
    assert torch.allclose(fuse_layers(unit)(x), expected, atol=1e-6)
