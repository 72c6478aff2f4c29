"""Kernels compiled for a GPU that is not there, by the launch code itself, and found again by another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolltree.kernels import ahead

from .on_device import needs_triton

ASKED = """
import sys
import numpy as np, torch
from triton.runtime.jit import JITFunction
from rolltree.engine.app import compile as command
from rolltree.engine.train.terms import TokenTerm
from rolltree.kernels import Objective, ahead
from rolltree.kernels.sampling import sample_tokens
from rolltree.kernels.tree_attention import triton as attention
from rolltree.kernels.tree_attention.reference import Scoring
from rolltree.kernels.tree_decode import DecodePlan, tree_decode_attention

asked = set()

# in the compiler's place: for a `jit_cache_hook` Triton 3.6 writes arguments as JSON, and functions are none
def note(self, key, *_):
    asked.add((self.fn.__qualname__, str(key)))

def asks(step):
    before = set(asked)
    step()
    return sorted(name for name, _ in asked - before)

def attend(rows, window):
    q, k = torch.empty(rows, 4, 64).bfloat16(), torch.empty(rows, 2, 64).bfloat16()
    ends, position = torch.full((rows,), rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    scoring = Scoring(ends, position if window else None, 1.0, window, None)
    out, lse = attention.tree_attention_forward(q, k, k, scoring)
    attention.tree_attention_backward(q, q, k, k, out, lse, scoring)

def decode(rows, window):
    numbers = [0, 40], range(40), [3], [600], [0], [0], [rows], [700] * rows
    plan = DecodePlan.from_host([np.array(x, np.int32) for x in numbers], torch.device("cpu"), [2])
    q, pages = torch.empty(rows, 4, 64).bfloat16(), torch.empty(40, 16, 2, 64).bfloat16()
    tree_decode_attention(q, pages, pages, plan, window=window)

def sample(rows, filtered):
    ids, some = torch.zeros(rows, dtype=torch.long), torch.ones(rows)
    filters = {"top_k": some.int(), "top_p": some} if filtered else {}
    sample_tokens(torch.empty(rows, 5003), temperature=some, seed=ids, step=ids, **filters)

JITFunction._do_compile = note
def train(rows, _):
    ahead._layers(model, rows)

def recur(rows, given):
    ahead._recurrent(model.recurrent, model.dtype, bool(given), rows)

target = ahead.TARGETS["90a"]
model = ahead.Model(heads=4, kv_heads=2, head_dim=64, vocab=5003, window=True, hidden=576,
                    recurrent=ahead.Recurrent("kimi", 4, 4, 40, 24, 4, 112))
with ahead.launching_nothing(target):
    for objective in sys.argv[1:]:
        job = command.Job(model, [TokenTerm(Objective.preset(objective))], frozenset(), ("top_k", "top_p"))
        everything = ahead.steps(target, model, flash=False, **command.launched(job))
        for name, launch in command.losses(job) if asked else everything:
            print(name, *asks(launch))
        # a chunk of one row alone is another kernel where V is no multiple of 16
        for number in [(length, *flags) for length in (2, 5, 130) for flags in ((0, 0), (0, 1), (1, 0), (1, 1))]:
            length, forked, on_policy = number
            print("again", *asks(lambda: command.update(job, command.tree(forked, length), on_policy)))
    few, many = (1, 3, 4, 6), (257, 640, 1000, 2048, 9000)
    for step, sizes in ((train, (1, 37, 256)), (recur, (2, 37, 256)), (sample, few), (decode, few), (attend, many)):
        for size in sizes:
            for option in (None, 100):
                print("again", *asks(lambda: step(size, option)))
"""
BUILD = """
import json, sys
from pathlib import Path
from rolltree.engine.app import compile as command
from rolltree.engine.train.terms import TokenTerm
from rolltree.kernels import Objective, ahead
model = ahead.Model(heads=2, kv_heads=1, head_dim=16, vocab=300)
job = command.Job(model, [TokenTerm(Objective.preset("gspo"))], frozenset(), ("top_p",))
for built in ahead.build(ahead.TARGETS["90a"], model, flash=False, **command.launched(job)):
    print(json.dumps(built._asdict()))
"""


def run(program: str, *arguments: str, **environment: str) -> list[str]:
    """The lines that ``program`` prints, in a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("objectives", [("gspo",), ("grpo", "cispo")], ids="+".join)
def test_no_batch_asks_for_another_kernel(objectives: tuple[str, ...]) -> None:
    """Rollout and update of other sizes than those built for, whose tensors begin at other places, odd ones among
    them, take the kernels that were built; nothing is compiled to see it."""
    lines = [line.split() for line in run(ASKED, *objectives)]
    assert {name for line in lines for name in line if name.endswith("_kernel")} == {
        "list_blocks_kernel", "forward_kernel", "dq_kernel", "dkdv_kernel", "add_kernel", "partial_kernel",
        "norm_kernel", "norm_gradient_kernel", "rotate_kernel", "silu_mul_kernel", "silu_mul_gradient_kernel",
        "merge_kernel", "scan_kernel", "select_kernel", "bracket_kernel", "gather_kernel", "settle_kernel",
        "race_kernel", "finish_kernel", "convolution_kernel", "convolution_input_kernel", "convolution_weight_kernel",
        "channel_pairs_kernel", "inverse_kernel", "state_scan_kernel", "state_scan_back_kernel", "weights_kernel",
        "channel_sums_kernel", "gradients_kernel",
    }  # fmt: skip
    assert sum("_terms" in line for line in lines) >= len(objectives)
    again = [line[1:] for line in lines if line[0] == "again"]
    assert len(again) == len(objectives) * 12 + 2 * (3 + 3 + 4 + 4 + 5)
    assert not any(again), again


@needs_triton
@pytest.mark.slow
def test_a_second_process_finds_every_kernel(tmp_path: Path) -> None:
    """These are kernels of sampling, decoding, scoring, attention and the loss; `make hopper` tests flash-attn's and
    quack's."""
    counts = []
    for _ in range(2):
        rows = map(json.loads, run(BUILD, TRITON_CACHE_DIR=str(tmp_path)))
        counts.append({row["name"]: row["compiled"] for row in rows})
    assert list(counts[0]) == list(counts[1])
    assert all(counts[0][name] for name in ("head", "decode attention", "sampling", "sampling, top_p"))
    assert sum(n for name, n in counts[0].items() if "loss" in name) > 1
    assert set(counts[1].values()) == {0}


def test_an_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        next(ahead.build(ahead.TARGETS["90a"], ahead.Model(2, 1, 16, 300), flash=False))
