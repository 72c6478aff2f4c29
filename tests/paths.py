"""Runs the tests of kernels, models and training on the paths of other machines: ``make paths``.

Each case of :data:`CASES` forces features by environment variables (`rolltree.kernels.machine`) and runs, in processes
of its own, the test files that the features concern. A case that this machine cannot run, because it lacks the level or
the library, is printed as left out, with the reason.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rolltree.kernels import machine

ROOT = Path(__file__).parents[1]
FOLDER = "tests/kernels"
HEAD = tuple(
    f"{FOLDER}/test_{name}.py"
    for name in (
        "machine", "bf16_gemm", "linear_head", "linear_kept", "linear_logprob", "linear_logprob_options",
        "linear_logprob_parallel", "linear_policy_loss", "linear_shared_rows", "linear_terms_loss",
        "logprob_from_logits",
    )
)  # fmt: skip
OTHERS = ("decoder_layer", "layer_ops", "sampling", "tree_attention", "tree_decode")
COMPILED = (*HEAD, *(f"{FOLDER}/test_{name}.py" for name in OTHERS), "tests/engine/model/test_fused_layers.py")
"""The files whose ops csrc/cpu has."""
ROWS = tuple(f"{FOLDER}/test_{name}.py" for name in ("machine", "bf16_gemm", "linear_logprob", "linear_policy_loss"))
WITHOUT = (*COMPILED[1:], "tests/engine/model/test_attention_of_today.py", "tests/engine/train")
TRITON = tuple(f"{FOLDER}/test_{name}.py" for name in ("machine", "tree_attention", "tree_recurrence_triton"))
"""The files of the kernels whose tiles depend on the GPU."""
HOST = ("tests/kernels/test_machine.py", "tests/engine/train/test_trainer.py", "tests/engine/app/test_imports.py")


@dataclass(frozen=True)
class Case:
    """Features that are forced, and the tests that they concern."""

    name: str
    files: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    level: str = "default"
    """The instruction set that the processor must have, with a library built for it."""
    without: str = "triton"
    """Cases of tests that the features do not concern, as ``-k`` names them."""

    def missing(self) -> str:
        """Return why this machine cannot run the case, or nothing."""
        if "_cpu" in self.variables.get("ROLLTREE_WITHOUT", ""):
            return ""
        if self.level not in machine.cpu_levels():
            return f"this machine lacks {self.level}"
        built = (ROOT / "kernels" / f"_cpu_{self.level}.so").exists()
        return "" if built else f"_cpu_{self.level}.so is not built; ROLLTREE_CPU_ISA=all builds it"


CASES = (
    Case("AVX-512", COMPILED, {"ROLLTREE_CPU_LEVEL": "avx512", "ROLLTREE_AMX": "off"}, "avx512"),
    Case("AVX2", COMPILED, {"ROLLTREE_CPU_LEVEL": "avx2", "ROLLTREE_AMX": "off"}, "avx2"),
    Case("neither", COMPILED, {"ROLLTREE_CPU_LEVEL": "default", "ROLLTREE_AMX": "off"}),
    Case("torch without AVX", ROWS, {"ATEN_CPU_CAPABILITY": "default", "ROLLTREE_AMX": "off"}),
    Case("AMX, emulated", HEAD, {"ROLLTREE_AMX": "emulate"}),
    Case("two threads", COMPILED[1:], {"OMP_NUM_THREADS": "2"}),
    Case(
        "few rows", (f"{FOLDER}/test_decoder_layer.py",), {"ROLLTREE_FEW_ROWS": "few"}, without="(triton or reference)"
    ),
    Case(
        "many rows",
        (f"{FOLDER}/test_decoder_layer.py",),
        {"ROLLTREE_FEW_ROWS": "many"},
        without="(triton or reference)",
    ),
    Case("no compiled kernels", WITHOUT, {"ROLLTREE_WITHOUT": "_cpu"}),
    Case("no compiler", HOST, {"ROLLTREE_WITHOUT": "_cpu,_cuda,_host,compiler"}),
    Case("no Triton", ROWS[1:], {"ROLLTREE_WITHOUT": "triton"}),
    Case("an Ampere GPU", TRITON, {"ROLLTREE_GPU_CAPABILITY": "8.0"}, without="cpu"),
    Case("a Blackwell GPU", TRITON, {"ROLLTREE_GPU_CAPABILITY": "10.0"}, without="cpu"),
    Case("no namespaces", ("tests/engine/sandbox",), {"ROLLTREE_SANDBOX_WITHOUT": "namespaces"}),
)


def run(case: Case, workers: int) -> bool:
    """Run a case and print its counts; return whether it passed."""
    words = " ".join(f"{name}={value}" for name, value in case.variables.items())
    if reason := case.missing():
        print(f"{case.name}: left out: {reason}", flush=True)
        return True
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not check", "-k", f"not {case.without}"]
    command += ["-n", str(workers), "--dist", "worksteal"]
    begin = time.monotonic()
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **case.variables}
    done = subprocess.run([*command, *case.files], cwd=ROOT, env=environment, capture_output=True, text=True)
    counts = re.search(r"^=* ?(\d+ .*) in [\d.]+s.*$", done.stdout, re.MULTILINE)
    print(f"{case.name}: {counts[1] if counts else 'no tests'}, {time.monotonic() - begin:.0f} s ({words})", flush=True)
    if done.returncode:
        print(done.stdout[-20000:], done.stderr[-2000:], flush=True)
    return done.returncode == 0


def main() -> int:
    """Return 0 if every case passes that this machine can run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases to run; default: all")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    if unknown := sorted(set(asked.names) - {case.name for case in CASES}):
        parser.error(f"no case '{unknown[0]}'; there are {', '.join(case.name for case in CASES)}")
    chosen = [case for case in CASES if not asked.names or case.name in asked.names]
    failed = [case.name for case in chosen if not run(case, asked.workers)]
    print(f"Failed: {', '.join(failed)}." if failed else "Every case passed.")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
