"""Makes what `pictures_cpu.toml` starts from: drawn pictures, and a small Qwen3-VL with a vision tower of its own that
was trained for a minute to say how many squares a picture shows.

Three in ten answers of the warm-up count colour by colour and are right; seven in ten name a sum at once, which often
leaves a colour out. The model learns both and prefers the quick answers. Reinforcement learning then has to discover,
from a verifier of the sum alone, that counting colour by colour earns more reward.
"""

from __future__ import annotations

import io
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from rich.progress import track
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rolltree.engine import TokenTree, load_tokenizer, pack
from rolltree.engine.data.media import Picture
from rolltree.engine.prompts.prompts import held_out, pictures_of
from rolltree.engine.prompts.sources import PromptSource
from rolltree.engine.settings import TrainConfig
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.terms import TokenTerm
from rolltree.engine.train.trainer import Trainer, Weighted
from rolltree.kernels import Objective

SEED = 1234
PICTURES = 3072
CELLS, CELL = 3, 8  # a picture has 3 x 3 cells of 8 x 8 pixels; each is a patch of the tower and a token of the prompt
COLOURS = {"red": (220, 70, 70), "green": (70, 200, 70), "blue": (80, 80, 220)}
MOST_SQUARES = 6
WORKED_SHARE = 0.3
GUESSED_SHARE = 0.85  # share of the quick answers that are any number
STEPS = 240
PROBLEMS_PER_STEP = 64
LEARNING_RATE = 3e-3
SPECIAL = ("<|pad|>", "<|end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = (*COLOURS, "count", "sum", *map(str, range(10)))


def create(config: TrainConfig, directory: Path) -> None:
    """Draw `data.path` if it is missing, and write a Hugging Face directory; held-out problems are never trained on."""
    assert config.data.path is not None
    if not Path(config.data.path).exists():
        draw_pictures(Path(config.data.path))
    torch.manual_seed(SEED)
    directory.mkdir(parents=True)
    make_tokenizer().save_pretrained(directory)
    Qwen2VLImageProcessorPil(
        patch_size=CELL, temporal_patch_size=1, merge_size=1, do_resize=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    ).save_pretrained(directory)
    tokenizer = load_tokenizer(directory)
    model = make_model(tokenizer)
    model.config.save_pretrained(directory)  # the pictures are processed as the model's type asks
    source = PromptSource(config.data, tokenizer, SEED, held_out(config.data, config.evaluation.problems, tokenizer))
    train(model, solutions(source, tokenizer))
    model.save_pretrained(directory)


def draw_pictures(path: Path) -> None:
    """Write a parquet file of pictures with one to six squares, and how many of each colour there are."""
    draw = np.random.default_rng(SEED)
    rows = []
    for _ in range(PICTURES):
        pixels = draw.normal(120, 12, (CELLS * CELL, CELLS * CELL, 3))
        colours = draw.choice(list(COLOURS), draw.integers(1, MOST_SQUARES + 1)).tolist()
        cells = draw.permutation(CELLS * CELLS)[: len(colours)]
        for colour, y, x in zip(colours, *np.divmod(cells, CELLS), strict=True):
            size = int(draw.integers(6, CELL + 1))
            top, left = (CELL * np.array([y, x]) + draw.integers(0, CELL - size + 1, 2)).tolist()
            pixels[top : top + size, left : left + size] += np.array(COLOURS[colour]) - 120
        file = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, format="PNG")
        image = {"bytes": file.getvalue(), "path": None}
        counts = [colours.count(colour) for colour in COLOURS]
        rows.append({"prompt": "count", "image": image, "answer": str(len(colours)), "counts": counts})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single words."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, end, *others = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, eos_token=end, extra_special_tokens=others)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Return a random model of half a million parameters that takes a picture as 9 tokens."""
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")
    }
    ids |= {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 4, 4]},
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": CELL,
            "temporal_patch_size": 1,
            "spatial_merge_size": 1,
            "out_hidden_size": 96,
            "num_position_embeddings": CELLS * CELLS,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=False,
        **ids,
    )
    return Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="rolltree")


def worked(counts: list[int]) -> str:
    """Return the answer colour by colour, then the sum."""
    seen = " ".join(f"{colour} {count}" for colour, count in zip(COLOURS, counts, strict=True))
    return f"{seen} sum {sum(counts)}"


def quick(counts: list[int], rng: random.Random) -> str:
    """Return the sum alone, or more often a guess of it."""
    return f"sum {rng.randint(1, MOST_SQUARES) if rng.random() < GUESSED_SHARE else sum(counts)}"


def solutions(source: PromptSource, tokenizer: PreTrainedTokenizerFast) -> Iterator[TokenTree]:
    """Yield prompts without end, each with one solution."""
    rng = random.Random(SEED)
    shown: dict[str, tuple[Picture, ...]] = {}  # kept, as each picture is seen several times
    while True:
        (prompt,) = source.next(1)
        if prompt.id not in shown:
            shown[prompt.id] = pictures_of(prompt, tokenizer)
        counts = prompt.entry["counts"]
        text = worked(counts) if rng.random() < WORKED_SHARE else quick(counts, rng)
        response = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        yield TokenTree.from_sequences(prompt.token_ids, [response], pictures=shown[prompt.id])


def train(model: Qwen3VLForConditionalGeneration, stream: Iterator[TokenTree]) -> None:
    """Train the whole model on the solutions by next-token prediction, with a cosine schedule of the learning rate."""
    config = TrainerConfig(lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, lr_warmup_steps=40)
    trainer = Trainer(model, config)
    term = TokenTerm(Objective(surrogate="nll"))
    for step in track(range(STEPS), description="warm-up of the small model", transient=True):
        trees = [next(stream) for _ in range(PROBLEMS_PER_STEP)]
        trainer.lr_scale = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        terms = [Weighted(term, term.normalizer(trees))]
        tokens = sum(tree.logical_tokens for tree in trees)
        for batch in pack(trees, max_tokens=16384):
            trainer.forward_backward(batch, terms, tokens, temperature=1.0, on_policy=True)
        loss = trainer.optim_step()["actor/loss"][0]
        if step % 50 == 49 and not sys.stdout.isatty():  # where no bar is drawn
            print(f"warm-up of the small model: step {step + 1}/{STEPS}, loss {loss:.3f}", flush=True)
