"""Runs the tests of kernels, models and training on the paths of other machines: ``make paths``.

Each case of :data:`CASES` forces features by environment variables (`rolltree.kernels.machine`) and runs, in a process
of its own, the tests that the features concern: of the files named those of `make test`, and of each test a few cases,
or all with ``--most-cases 0``. They run side by side, one thread each. A case that this machine cannot run, because it
lacks the level or the library, or that `make test` runs on this machine anyway, is printed as left out, with the
reason.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from rolltree.kernels import machine
from rolltree.kernels.libraries import load_library

ROOT = Path(__file__).parents[1]


def kernels(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/kernels/test_{name}.py" for name in names)


HEAD = kernels(
    "machine", "bf16_products", "equal_bits", "linear", "linear_head", "linear_kept", "linear_logprob",
    "linear_logprob_options", "linear_logprob_parallel", "linear_policy_loss", "linear_shared_rows",
    "linear_terms_loss", "logprob_from_logits",
)  # fmt: skip
LAYERS = kernels("decoder_layer", "layer_ops")
ROWS = kernels("sampling", "sampling_noise", "tree_attention", "tree_decode")
COMPILED = (*HEAD, *LAYERS, *ROWS)
"""The files whose ops csrc/cpu has."""
FEW = kernels("decoder_layer", "equal_bits", "linear", "linear_head")
"""The files of the products that csrc/cpu makes itself up to some number of rows."""
GPU = kernels("tree_attention", "tree_recurrence_triton")
"""The files of the kernels whose tiles depend on the GPU."""
TRAIN = tuple(f"tests/engine/train/test_{name}.py" for name in ("large_batch", "terms", "trainer", "user_term"))
EXACT = "tests/engine/model/test_invariant.py"
"""The file of models whose products, sampled and trained, have the same bits."""
INTERPRETED = (*kernels("equal_bits_triton"), "tests/engine/model/test_invariant_gpu.py")
"""The files of Triton's kernels of equal bits, some of whose tests take products from csrc/cpu or torch."""
OF_LEVEL = (*kernels("machine", "linear_logprob", "linear_policy_loss"), EXACT, *INTERPRETED)
"""The files whose tests depend on the instruction set of torch, too."""
TODAY = "tests/engine/model/test_attention_of_today.py"
IMPORTS = "tests/engine/app/test_imports.py"

OF_TORCH = "opcheck or custom_op or registration or compile or gradcheck or finite_differences"
"""Tests of how ops are declared to torch, and of their formulas in float64: neither asks the machine."""
OF_EACH_OP = "machine or sampling or tree_decode or test_policy_loss or against_fp64 or wrong or named"
"""A few tests of each op, where what counts is that all files are imported."""
PROCESSES = "forced_level or taken_away or only_named_files"
"""Tests of `machine` that begin processes, in which they set the variables themselves, or that read files alone."""
USUAL = f"not (triton or reference or {OF_TORCH} or {PROCESSES})"
"""The tests of csrc/cpu's kernels."""
WITH_INTERPRETED = f"drawn_tokens or plain_sequences or engine_runs or {USUAL}"
"""Those and the tests of `INTERPRETED` that take products from csrc/cpu or torch."""


@dataclass(frozen=True)
class Case:
    """Features that are forced, and the tests that they concern."""

    name: str
    files: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    level: str = "default"
    """The instruction set that the processor must have, with a library built for it."""
    tests: str = USUAL
    """The tests of the files that the features concern, as ``-k`` names them."""
    usual: Callable[[], bool] = lambda: False
    """Whether this machine has these very features without the variables."""

    def left_out(self) -> str:
        """Return why the case is not run on this machine, or nothing."""
        if "_cpu" in self.variables.get("ROLLTREE_WITHOUT", ""):
            return ""
        if self.level not in machine.cpu_levels():
            return f"this machine lacks {self.level}"
        if not (ROOT / "kernels" / f"_cpu_{self.level}.so").exists():
            return f"_cpu_{self.level}.so is not built; ROLLTREE_CPU_ISA=all builds it"
        return "`make test` runs it on this machine" if self.usual() else ""


def has_level(name: str) -> bool:
    """Return whether the CPU kernels have this level here, and no tiles."""
    return machine.cpu_level() == name and load_library("cpu") and torch.ops.rolltree_cpu.tiles() == 0


def has_few_rows(most: int) -> bool:
    """Return whether the kernels multiply this many rows here."""
    return load_library("cpu") and torch.ops.rolltree_cpu.few_rows() == most


CASES = (
    Case("AVX-512", COMPILED, {"ROLLTREE_CPU_LEVEL": "avx512", "ROLLTREE_AMX": "off"}, "avx512",
         usual=lambda: has_level("avx512")),
    Case("AVX2", (*COMPILED, EXACT), {"ROLLTREE_CPU_LEVEL": "avx2", "ROLLTREE_AMX": "off"}, "avx2",
         usual=lambda: has_level("avx2")),
    Case("neither", COMPILED, {"ROLLTREE_CPU_LEVEL": "default", "ROLLTREE_AMX": "off"},
         usual=lambda: has_level("default")),
    Case("torch without AVX-512", OF_LEVEL, {"ATEN_CPU_CAPABILITY": "avx2", "ROLLTREE_AMX": "off"}, "avx2",
         tests=WITH_INTERPRETED, usual=lambda: has_level("avx2")),
    Case("torch without AVX", OF_LEVEL, {"ATEN_CPU_CAPABILITY": "default", "ROLLTREE_AMX": "off"},
         tests=WITH_INTERPRETED, usual=lambda: has_level("default")),
    Case("AMX, emulated", (*HEAD, *LAYERS[:1], EXACT), {"ROLLTREE_AMX": "emulate"}),
    Case("widened bf16", (*HEAD[:4], *LAYERS[:1], EXACT), {"ROLLTREE_BF16": "widen", "ROLLTREE_AMX": "off"},
         usual=lambda: load_library("cpu") and torch.ops.rolltree_cpu.pairs() == 0),
    Case("two threads", (*COMPILED[1:], EXACT), {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}),
    Case("few rows", FEW, {"ROLLTREE_FEW_ROWS": "few"}, usual=lambda: has_few_rows(64)),
    Case("many rows", FEW, {"ROLLTREE_FEW_ROWS": "many"}, usual=lambda: has_few_rows(384)),
    Case("no compiled kernels", (*COMPILED, *INTERPRETED, TODAY, *TRAIN), {"ROLLTREE_WITHOUT": "_cpu"},
         tests=WITH_INTERPRETED),
    Case("no compiler", (*HEAD[:1], TRAIN[2], IMPORTS), {"ROLLTREE_WITHOUT": "_cpu,_cuda,_host,compiler"},
         tests="not (forced_level or loads_nothing or only_named_files)"),
    Case("no Triton", (*COMPILED, *kernels("policy_loss", "sampling_triton", "tree_attention_triton")),
         {"ROLLTREE_WITHOUT": "triton"}, tests=f"({OF_EACH_OP}) and not ({OF_TORCH} or {PROCESSES})"),
    Case("an Ampere GPU", GPU, {"ROLLTREE_GPU_CAPABILITY": "8.0"}, tests="triton"),
    Case("a Blackwell GPU", GPU, {"ROLLTREE_GPU_CAPABILITY": "10.0"}, tests="triton"),
    Case("no namespaces", ("tests/engine/sandbox",), {"ROLLTREE_SANDBOX_WITHOUT": "namespaces"}, tests=""),
)  # fmt: skip


def run(case: Case, most: int) -> bool:
    """Run a case with at most so many cases of each test, and print its counts; return whether it passed."""
    words = " ".join(f"{name}={value}" for name, value in case.variables.items())
    if reason := case.left_out():
        print(f"{case.name}: left out: {reason}", flush=True)
        return True
    # Files that are named would bring the tests of `make check` too
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", case.tests]
    command += ["-o", f"testpaths={' '.join(case.files)}", "--most-cases", str(most)]
    begin = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **case.variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    counts = re.search(r"^=* ?(\d+ .*) in [\d.]+s.*$", done.stdout, re.MULTILINE)
    lines = [f"{case.name}: {counts[1] if counts else 'no tests'}, {time.monotonic() - begin:.0f} s ({words})"]
    if done.returncode:
        lines += [done.stdout[-20000:], done.stderr[-2000:]]
    print("\n".join(lines), flush=True)
    return done.returncode == 0


def main() -> int:
    """Return 0 if every case passes that this machine can run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases to run; default: all")
    parser.add_argument("--workers", type=int, default=2, help="cases side by side")
    parser.add_argument("--most-cases", type=int, default=2, help="of each test, evenly spaced; 0: all; default: 2")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.names) - {case.name for case in CASES}):
        parser.error(f"no case '{unknown[0]}'; there are {', '.join(case.name for case in CASES)}")
    chosen = [case for case in CASES if not asked.names or case.name in asked.names]
    with ThreadPoolExecutor(asked.workers) as pool:
        failed = [
            case.name
            for case, passed in zip(chosen, pool.map(partial(run, most=asked.most_cases), chosen), strict=True)
            if not passed
        ]
    print(f"Failed: {', '.join(failed)}." if failed else "Every case passed.")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
