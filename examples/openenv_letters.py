"""Makes the small model that `openenv_letters_cpu.toml` starts from: a random Qwen3 decoder over bytes that mostly ends
its turn at once."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rolltree.engine.settings import TrainConfig

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def create(config: TrainConfig, directory: Path) -> None:
    """Write a Hugging Face directory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=256, pad_token_id=256,
        )
    )  # fmt: skip
    with torch.no_grad():  # about half of all tokens end the turn, so that a message has about one letter
        model.model.embed_tokens.weight[:, 0] = 0.2
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[256, 0] = 0.9
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
