"""A directory with a tiny model that takes pictures, its tokenizer and image processor, drawn pictures, and a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from .picture_models import GRID_TOWER, SQUARE_TOWER, make_models

SPECIAL = {0: "<|pad|>", 1: "<|begin|>", 2: "<|end|>", 120: "<|image_pad|>", 121: "<|vision_start|>"} | {
    122: "<|vision_end|>",
    123: "<|video_pad|>",
    124: "<fake_token_around_image>",
    125: "<global-img>",
}
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
CHAT = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}" + SHOWN + "{% else %} {{ p.text }}{% endif %}{% endfor %}{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
MARKS = {"gemma3": "<|vision_start|>", "gemma4": "<|image_pad|>", "smolvlm": "<|image_pad|>"}
"""The text that chat templates write for a picture and processors replace by `SHOWN`, by model."""
REWARD = """
import io
from PIL import Image

def judge(text, entry):
    image = Image.open(io.BytesIO(entry["image"]["bytes"]))
    return float((len(text) + image.size[0]) % 3 == 0)  # any rule that a random model meets now and then
"""
RUN = """
name = "tiny"
output_dir = "{directory}/runs"

[model]
path = "{directory}/model"

[data]
path = "{directory}/problems.parquet"
image_key = "image"
chat = true
max_prompt_tokens = 64

[rollout]
program = "treepo"
program_options = {{ segment_tokens = 3, init = 2 }}
n = 4
max_new_tokens = 8
kv_tokens = 1024

[reward]
verifier = "reward.py:judge"
workers = 1
on_failure = "raise"

[algorithm]
objective = "dapo"

[trainer]
steps = 2
prompts_per_step = 3
lr = 1e-2
max_tokens = 256

[evaluation]
problems = 2

[checkpoint]
every = 1
"""


def encoded(draw: np.random.Generator, kind: str = "PNG") -> bytes:
    """Return a random picture of 8 to 16 pixels a side as an encoded file."""
    high, wide = 4 * draw.integers(2, 5, 2)
    file = io.BytesIO()
    Image.fromarray(draw.integers(0, 256, (high, wide, 3), dtype=np.uint8)).save(file, format=kind)
    return file.getvalue()


def write_model(directory: Path, name: str = "qwen3_vl") -> Any:
    """Write a model with its tokenizer and image processor; return it under plain Transformers."""
    ours, theirs = make_models(name)
    ours.save_pretrained(directory)
    vocabulary = {SPECIAL.get(i, f"w{i}"): i for i in range(128)} | {"user": 100, "assistant": 101}
    vocabulary = {word: i for word, i in vocabulary.items() if word not in ("w100", "w101")}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        extra_special_tokens=list(SPECIAL.values())[3:],
        chat_template=CHAT.replace(SHOWN, MARKS.get(name, SHOWN)),
    )
    tokenizer.save_pretrained(directory)
    side = GRID_TOWER["patch_size"]
    processor: Any = Qwen2VLImageProcessorPil(
        patch_size=side, temporal_patch_size=1, merge_size=2, size={"shortest_edge": 64, "longest_edge": 256}
    )
    if name == "gemma3":
        edge = SQUARE_TOWER["image_size"]
        processor = Gemma3ImageProcessorPil(size={"height": edge, "width": edge}, do_pan_and_scan=False)
    elif name == "gemma4":
        processor = Gemma4ImageProcessorPil(patch_size=side, max_soft_tokens=70, pooling_kernel_size=2)
    elif name == "smolvlm":
        edge = {"longest_edge": SQUARE_TOWER["image_size"]}
        processor = SmolVLMImageProcessorPil(max_image_size=edge, do_image_splitting=False, do_resize=False)
    processor.save_pretrained(directory)
    return theirs


def write_run(directory: Path, name: str = "qwen3_vl") -> Path:
    """Write model, pictures, verifier and configuration; return the configuration's path."""
    write_model(directory / "model", name)
    draw = np.random.default_rng(0)
    rows = [{"prompt": "w7 w8", "answer": "w9", "image": {"bytes": encoded(draw), "path": None}} for _ in range(9)]
    pq.write_table(pa.Table.from_pylist(rows), directory / "problems.parquet")
    (directory / "reward.py").write_text(REWARD)
    path = directory / "tiny.toml"
    path.write_text(RUN.format(directory=directory))
    return path


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
