"""``model.generate`` with ``attn_implementation="rolltree"``: each cache and mode gives what "sdpa" gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CompileConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

import rolltree.engine.integrations.transformers  # noqa: F401

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.5,
}  # fmt: skip
KINDS: dict[str, Any] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "window": lambda: MistralForCausalLM(MistralConfig(sliding_window=4, **SIZES)),
    "softcap": lambda: Gemma2ForCausalLM(Gemma2Config(sliding_window=4, attn_logit_softcapping=2.0, **SIZES)),
}
PADDED = torch.tensor([[5, 6, 7, 9, 11, 3], [0, 0, 4, 4, 5, 2]]), torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
PLAIN = torch.tensor([[5, 6, 7, 9, 11, 3, 8]]), torch.ones(1, 7, dtype=torch.long)
STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}
MODES: dict[str, dict[str, Any]] = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": STATIC,
    "sliding_window": STATIC | {"cache_implementation": "sliding_window"},
    "hybrid": STATIC | {"cache_implementation": "hybrid"},
    "hybrid_chunked": STATIC | {"cache_implementation": "hybrid_chunked"},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "beams, static": STATIC | {"num_beams": 2},
    "samples, static": STATIC | {"do_sample": True, "num_return_sequences": 2},
    "prefill in chunks": {"prefill_chunk_size": 2},
    "prefill in chunks, static": STATIC | {"prefill_chunk_size": 2},
    "guidance": {"guidance_scale": 1.5},
}


@pytest.fixture(scope="module", params=KINDS)
def net(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = KINDS[request.param]().eval()
    return made


def said(net: PreTrainedModel, attention: str, batch: tuple[torch.Tensor, torch.Tensor], mode: dict[str, Any]) -> Any:
    net.set_attn_implementation(attention)
    torch.manual_seed(1)
    out = net.generate(
        batch[0], attention_mask=batch[1], max_new_tokens=8, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, **mode,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


@pytest.mark.check(but=7)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [PADDED, pytest.param(PLAIN, marks=pytest.mark.slow)], ids=["padded", "plain"])
def test_every_cache_and_mode_says_what_the_models_own_attention_says(
    net: PreTrainedModel, mode: str, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    softcap = getattr(net.config, "attn_logit_softcapping", None) is not None  # which sdpa does not compute
    tokens, logits = said(net, "eager" if softcap else "sdpa", batch, MODES[mode])
    mine = said(net, "rolltree", batch, MODES[mode])
    assert torch.equal(mine[0], tokens)
    torch.testing.assert_close(mine[1], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [{"prompt_lookup_num_tokens": 2}, {"assistant_early_exit": 1}], ids=str)
def test_drafts_of_transformers_change_no_token(net: PreTrainedModel, mode: dict[str, Any]) -> None:
    plain = said(net, "rolltree", PLAIN, {})[0]
    net.set_attn_implementation("rolltree")
    assert torch.equal(net.generate(PLAIN[0], max_new_tokens=8, pad_token_id=0, **mode), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "net",
    ["window", "qwen3", "llama", "softcap"],
    indirect=True,
)
def test_a_compiled_step_has_no_graph_break(net: PreTrainedModel) -> None:
    compiled = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True  # else not on a CPU
    torch._dynamo.reset()
    mode = {"cache_implementation": "static", "compile_config": compiled}
    assert torch.equal(said(net, "rolltree", PADDED, mode)[0], said(net, "rolltree", PADDED, {})[0])


@pytest.mark.parametrize("length", [7, 8, 20])
def test_a_static_cache_that_a_prompt_fills(net: PreTrainedModel, length: int) -> None:
    softcap = getattr(net.config, "attn_logit_softcapping", None) is not None
    found = []
    for attention in ("eager" if softcap else "sdpa", "rolltree"):
        net.set_attn_implementation(attention)
        cache = StaticCache(net.config, max_cache_len=length)
        cache.early_initialization(1, 1, 16, torch.float32, torch.device("cpu"))  # its lengths are tensors from now on
        with torch.no_grad():
            found.append(net(PLAIN[0], past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_paged_caches_are_refused_in_one_sentence(net: PreTrainedModel) -> None:
    net.set_attn_implementation("rolltree")
    with pytest.raises(ValueError, match="Implementation rolltree is not supported for continuous batching"):
        net.generate_batch([[5, 6, 7]], max_new_tokens=2)
