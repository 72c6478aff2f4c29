"""The fused head of TRL's trainers on a head with an adapter, against peft's own layer."""

from __future__ import annotations

import peft
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("trl", reason="TRL is not installed: pip install rolltree[trl]")

from rolltree.engine.integrations.trl.fused_head import FusedHead

TEMPERATURE = 0.7


@torch.no_grad()
def test_an_adapter_on_the_head_counts_in_every_output() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_hidden_layers=1, head_dim=16, **sizes))
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    ).get_base_model()
    hidden, target = torch.randn(9, 32), torch.randint(0, 64, (9,))
    outputs = ("log_probs", "entropy", "mean_logits", "log_sum_sq_probs", "is_top1")
    got = FusedHead(TEMPERATURE, False, outputs)._score(adapted.eval(), hidden, target, None)
    logits = adapted.lm_head(hidden) / TEMPERATURE
    assert (logits - adapted.lm_head.base_layer(hidden) / TEMPERATURE).abs().max() > 1
    log_p = logits.log_softmax(-1)
    expected = {
        "log_probs": log_p.gather(1, target[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "mean_logits": logits.mean(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "is_top1": logits.argmax(-1) == target,
    }
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(got[name], values, rtol=1e-5, atol=1e-5, msg=name)
