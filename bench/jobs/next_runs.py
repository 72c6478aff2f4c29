"""Lines of gpu_next.py about whole runs of ``rolltree train``, with and without `model.batch_invariant`."""

from __future__ import annotations

import json
import random
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rolltree.engine.app.cli import main as rolltree

from ..gpu_first import Run
from ..schema import Row
from .run_bits import DIFFERENT

STEPS = 3
JUDGE = """
import zlib

def judge(text, entry):
    return zlib.crc32(text.encode()) / 2**32  # differs within a group, so that all responses are trained
"""


class Measured(Protocol):
    """`gpu_next.Decoding`, as far as it is needed here."""

    @property
    def device(self) -> torch.device: ...
    @property
    def small(self) -> bool: ...
    @property
    def model(self) -> Any: ...
    def row(self, case: str, provider: str, metric: str, values: Sequence[float]) -> Row: ...


def whole_runs(x: Measured) -> Iterator[tuple[str, Run]]:
    """Yield a run with equal bits and one without."""
    for invariant in (True, False):
        yield f"rolltree train, batch_invariant = {invariant}", partial(_train, x, invariant)


def _train(x: Measured, invariant: bool) -> tuple[list[Row], str]:
    """Return the time of the steps after the first, which compiles, and the bits of the last step's log-probs, which
    another process computes again by the weights that sampled them.

    Raises:
        RuntimeError: the run failed, or has no log-probs to compare.
        AssertionError: the run is to have equal bits, and a log-prob has others.
    """
    with tempfile.TemporaryDirectory(prefix="rolltree-bench-") as folder:
        if code := rolltree(["train", str(write_job(x, Path(folder), invariant))]):
            raise RuntimeError(f"rolltree train ended with exit code {code}; its own message is above")
        run = Path(folder) / "runs" / "next"
        lines = (run / "metrics.jsonl").read_text().splitlines()
        bits = recorded_bits(run)
    steps = [step for step in map(json.loads, lines) if step["step"]]  # row 0 is of the start
    case, provider = "small run" if x.small else "16 x (2048 + 16x128), whole run", f"batch_invariant={invariant}"
    times = [1e3 * (step["timing_s/step"] - step["timing_s/checkpoint"]) for step in steps[1:]]
    rows = [x.row(case, provider, "time_ms", times)]
    for way, counts in bits.items():
        rows += [x.row(f"{case}, bits as {way}", provider, name, [count]) for name, count in counts.items()]
    told = ", ".join(f"{n['differing']} of {n['tokens']} log-probs have other bits as {way}" for way, n in bits.items())
    if invariant and any(counts["differing"] for counts in bits.values()):
        raise AssertionError(told)
    return rows, f"{rows[0].value:.4g} ms a step; {told}"


def recorded_bits(run: Path, step: int = STEPS) -> dict[str, dict[str, int]]:
    """Return what `run_bits` finds, in a process of its own.

    Raises:
        RuntimeError: it cannot compare the run.
    """
    command = [sys.executable, "-m", "rolltree.bench.jobs.run_bits", str(run), "--step", str(step)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, DIFFERENT):
        raise RuntimeError((done.stderr.strip().splitlines() or [f"run_bits ended with {done.returncode}"])[-1])
    bits: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return bits


def write_job(x: Measured, folder: Path, invariant: bool) -> Path:
    """Write model, tokenizer, problems, verifier and the configuration of a run; return the configuration's path."""
    prompts, tokens, responses, new_tokens = (2, 24, 2, 12) if x.small else (16, 2048, 16, 128)
    x.model.save_pretrained(folder / "model")
    letter_tokenizer(x.model.config.vocab_size).save_pretrained(folder / "model")
    draw = random.Random(0)
    texts = ["".join(draw.choices(string.ascii_letters, k=tokens)) for _ in range(STEPS * prompts)]
    (folder / "problems.jsonl").write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts))
    (folder / "judge.py").write_text(JUDGE)
    path = folder / "next.toml"
    path.write_text(f"""
name = "next"
output_dir = {json.dumps(str(folder / "runs"))}

[model]
path = {json.dumps(str(folder / "model"))}
dtype = "{"float32" if x.small else "bfloat16"}"
device = "{x.device.type}"
batch_invariant = {json.dumps(invariant)}

[data]
path = {json.dumps(str(folder / "problems.jsonl"))}
max_prompt_tokens = {tokens}

[rollout]
n = {responses}
max_new_tokens = {new_tokens}
kv_tokens = {1024 if x.small else 131072}

[reward]
verifier = "judge.py:judge"
workers = 1

[algorithm]
objective = "grpo"

[trainer]
steps = {STEPS}
prompts_per_step = {prompts}
lr = 1e-6
max_tokens = {256 if x.small else 16384}

[evaluation]
problems = 0

[checkpoint]
every = {STEPS - 1}
""")
    return path


def letter_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of ``size`` tokens that gives a prompt as many as it has letters; each token has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"<{number}>" for number in range(len(alphabet), size - 1)), "<end>"]
    inner = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", clean_up_tokenization_spaces=False)
