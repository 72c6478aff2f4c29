"""The chat templates that TRL installs, each with a small tokenizer that knows the template's control tokens."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

IM_END = ("<|im_end|>", "<|endoftext|>")
ENDS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>", "<eos>"),
    "glm4": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>", "<|endoftext|>"),
    "idefics3": ("<end_of_utterance>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    "llava": ("</s>",),
    "muse": ("<|eot|>",),
    "phi3": ("<|end|>", "<|endoftext|>"),
    "smolvlm": ("<end_of_utterance>",),
}
"""The end-of-sequence tokens of the models, as their generation_config.json has them, by the beginning of the name."""
CONTROL = re.compile(r"<\|?[A-Za-z_/][^<>\s'\"{}=,]*\|?>|<\|[A-Za-z_/\"]*\|?>|<｜[^<>]*?｜>|\[(?:/?INST|gMASK)\]")


def ends(name: str) -> tuple[str, ...]:
    return next((tokens for beginning, tokens in ENDS.items() if name.startswith(beginning)), IM_END)


def folder() -> Path | None:
    try:
        import trl
    except ImportError:
        return None
    return Path(trl.__file__).parent / "chat_templates"


def names() -> list[str]:
    where = folder()
    return [] if where is None else sorted(path.stem for path in where.glob("*.jinja"))


def template(name: str) -> str:
    where = folder()
    assert where is not None
    return (where / f"{name}.jinja").read_text()


def byte_tokenizer(text: str, eos: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """A token for every byte; what looks like a control token in ``text`` is one, every other not a special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=eos[0], bos_token="<bos>", clean_up_tokenization_spaces=False
    )
    found = sorted(set(CONTROL.findall(text)) | set(eos))
    made.add_tokens([AddedToken(token, special=i % 2 == 0, normalized=False) for i, token in enumerate(found)])
    made.chat_template = text
    return made


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the template ``name``, made anew, as a test may change it."""
    return byte_tokenizer(template(name), ends(name))
