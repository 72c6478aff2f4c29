"""Servers to attack: one in a thread of this process, one as a process of its own, of the same tiny model."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rolltree.engine.app.cli import main
from rolltree.engine.app.server import make_app
from rolltree.engine.rollout import EngineConfig, NativeEngine

from .forks import forked

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if c.function %}<tool_call>{{ c.function | tojson }}</tool_call>{% endif %}"
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", clean_up_tokenization_spaces=False)
    made.chat_template = TEMPLATE
    return made


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
    )
    return Qwen3ForCausalLM(config).eval()


def make_engine() -> NativeEngine:
    return NativeEngine(model(), tokenizer(), EngineConfig(page_size=4, kv_tokens=4096))


@contextmanager
def in_thread(engine: NativeEngine, **options: Any) -> Iterator[str]:
    """A server's URL."""
    server = uvicorn.Server(uvicorn.Config(make_app(engine, "tiny", **options), port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


def save(directory: Path) -> Path:
    model().save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def serve(directory: Path, flags: tuple[str, ...] = ()) -> None:
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    command = ["serve", str(directory), "--name", "tiny", "--port", "0", "--dtype", "float32", "--device", "cpu"]
    main([*command, "--kv_tokens", "4096", *flags])


@contextmanager
def as_process(directory: Path, *flags: str) -> Iterator[tuple[Any, str]]:
    """`rolltree serve` of a model, and its URL."""
    with forked(serve, directory, flags) as (process, printed):
        said = ""
        while "serving at " not in said:
            said = printed.readline()
            assert said, "the server ended"
        yield process, said.partition("serving at ")[2].strip().removesuffix("/v1")
