"""The tasks of ``make gpu``: what each part runs on a machine with a GPU, as commands. `gpu.py` runs them."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .cli import OPS, load
from .schema import REPOSITORY

NOTHING_COLLECTED = 5  # pytest's exit code
LONG = ("tests", "rows")  # parts without a time limit


@dataclass(frozen=True)
class Task:
    """A command, run in a process of its own."""

    name: str
    command: list[str]
    limit: float = 240.0  # seconds
    op: str | None = None
    """The op of a benchmark, whose journal has what has run; None for other tasks."""
    needs: str | None = None
    """A program that the machine must have; a rehearsal runs the command without it."""
    passing: tuple[int, ...] = (0,)
    always: bool = False
    """True if it runs again although it has passed, because its result may be lost with the machine."""
    each: float | None = None
    """Seconds that one provider of ``op`` may take: then its process ends, and another goes on after it."""
    background: bool = False
    """True if the next tasks run meanwhile, up to one with ``joins``, and its result is told in the end."""
    joins: bool = False
    """True if it begins when those in the background have ended."""

    def selects(self, device: torch.device) -> bool:
        """Return whether it measures any case; True if it is not a benchmark."""
        if "rolltree.bench" not in self.command:
            return True
        op, *words = self.command[self.command.index("rolltree.bench") + 1 :]
        cases = re.compile(words[words.index("--cases") + 1])
        return any(cases.search(case.name) for case in load(op).cases(device, "--quick" in words))


@dataclass(frozen=True)
class Setting:
    """The options of ``make gpu`` that its commands depend on."""

    device: str
    rehearse: bool
    seconds: float
    cases: str
    out: Path
    archive: Path | None = None

    def python(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", *arguments]

    def bench(
        self,
        op: str,
        cases: str = "",
        providers: str = "",
        *,
        limit: float = 240.0,
        under: Sequence[str] = (),
        quick: bool = False,
        name: str = "",
    ) -> Task:
        """Return a benchmark; with ``under`` it runs under this tool, and its figures are dropped."""
        command = self.python("rolltree.bench", op, "--device", self.device, "--seconds", str(self.seconds))
        if self.rehearse or quick:
            command.append("--quick")
        pattern = self.cases or ("" if self.rehearse or quick else cases)
        command += ["--cases", pattern, "--providers", providers]
        name = (name or f"rows {op}") + (f" of {self.cases}" if self.cases else "")  # other cases are another task
        if not under:
            command += ["--out", str(self.out), "--limit", str(min(limit / 2, 120.0))]
            return Task(name, command, limit, op)
        command[command.index("--seconds") + 1] = "0"
        return Task(name, [*([] if self.rehearse else under), *command], limit, needs=under[0])

    @property
    def build(self) -> Task:
        command = self.python("rolltree.bench.gpu", "--build", "--device", self.device)
        return Task("build", command, 140.0, always=True)

    def pytest(self, name: str, *arguments: str, limit: float = 240.0, passing: tuple[int, ...] = (0,)) -> Task:
        parallel = ["-n", "4"] if importlib.util.find_spec("xdist") and not self.rehearse else []
        command = [*self.python("pytest", "-q", "-p", "no:cacheprovider"), *parallel, *arguments]
        return Task(name, command, limit, passing=passing)


def parts(to: Setting) -> dict[str, Callable[[], list[Task]]]:
    return {
        "first": lambda: first(to),
        "next": lambda: upcoming(to),
        "kernels": lambda: kernels(to),
        "correct": lambda: [to.build, to.pytest("correct", "tests/gpu/test_kernels_gpu.py", limit=140.0)],
        "tuning": lambda: tuning(to),
        "training": lambda: training(to),
        "tests": lambda: all_tests(to),
        "rows": lambda: [to.bench(op, limit=3600.0) for op in OPS],
    }


def first(to: Setting) -> list[Task]:
    """Return the first look at a machine: kernels against float64, Triton's while the others are built, then rows."""
    emulated = to.out / "emulated"
    built = [replace(to.build, background=True)]
    options = ["--device", to.device, "--out", str(to.out)]
    if to.rehearse:
        command = to.python("tests.kernels.emulation.build", str(emulated))
        built.append(Task("emulated kernels", command, 150.0, background=True))
        options += ["--rehearse", "--emulated", str(emulated / "emulated.so")]

    def task(kind: str, **more: Any) -> Task:
        command = to.python("rolltree.bench.gpu_first", kind, *options)
        return Task(f"first {kind}", command, 190.0, f"first_{kind}", each=40.0, **more)

    return [
        Task("versions", to.python("rolltree.bench.gpu", "--versions"), 60.0),
        *built,
        task("triton"),
        task("cuda", joins=True),
        task("rows"),
    ]


def upcoming(to: Setting) -> list[Task]:
    """Return what was written since a GPU was last at hand: figures of decoding, kernels of steps, products, steps and
    whole runs, and the tests that need a GPU."""
    options = ["--device", to.device, "--out", str(to.out), *(["--rehearse"] if to.rehearse else [])]
    decode = Task(
        "next decode", to.python("rolltree.bench.runs.gpu_next", "decode", *options), 240.0, "next_decode", each=90.0
    )
    profiles, products, steps, runs = (
        Task(
            f"next {kind}", to.python("rolltree.bench.runs.gpu_next", kind, *options), limit, f"next_{kind}", each=each
        )
        for kind, limit, each in (
            ("profiles", 150.0, 60.0),
            ("products", 90.0, 60.0),
            ("steps", 200.0, 60.0),
            ("runs", 280.0, 140.0),
        )
    )
    graphs, kernels = "tests/engine/rollout/test_graphs.py", "tests/kernels/test_advance.py"
    return [
        to.build,
        decode,
        to.pytest("next graphs", graphs, "-m", "gpu", limit=120.0, passing=(0, NOTHING_COLLECTED)),
        to.pytest("next advance", kernels, limit=60.0),
        to.pytest("next scores of 3e37", "tests/kernels/test_tree_attention.py", "-k", "huge", limit=60.0),
        profiles,
        products,
        to.pytest("next rows alone", "tests/kernels/test_equal_bits_triton.py", limit=90.0),
        to.pytest("next paths", "tests/kernels/test_path_chunks.py", "-m", "check or not check", limit=90.0),
        to.pytest(
            "next equal bits",
            "tests/engine/model/test_invariant_gpu.py",
            "-m",
            "gpu",
            limit=150.0,
            passing=(0, NOTHING_COLLECTED),
        ),
        steps,
        runs,
    ]


def kernels(to: Setting) -> list[Task]:
    """Return the most important rows first."""
    head = r"N=8192 H=(4096 V=131072|1024 V=151936) (all live|36 % live)$"
    return [
        to.build,
        to.bench("linear_policy_loss", head, "^(rolltree|torch$|liger|quack)", limit=150.0),
        to.bench("tree_attention", r"^4096\+28x1024 ", "^(rolltree|flex_attention)", limit=90.0),
        to.bench("tree_decode", r"^P=(16384 R=128 G=16 x 1|4096 R=128 G=16 x 16) ", limit=60.0),
        to.bench("sample_tokens", "V=151936", limit=60.0),
        to.bench("logprob_from_logits", "V=151936", limit=40.0),
        to.bench("policy_loss", limit=40.0),
        to.bench("ceilings", limit=40.0),
    ]


def tuning(to: Setting) -> list[Task]:
    sweep = [*to.python("rolltree.bench.sweep"), "--device", to.device, "--out", str(to.out)]
    small = ["--rehearse"] if to.rehearse else []
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    profiler = ["ncu", "--clock-control", "none", "--set", "full", "--launch-skip", "2", "--launch-count", "1"]

    def checked(op: str, providers: str) -> Task:
        return to.bench(op, "", providers, under=sanitizer, quick=True, limit=100.0, name=f"memory {op} {providers}")

    def profiled(op: str, cases: str, kernel: str) -> Task:
        under = [*profiler, "--kernel-name", f"regex:{kernel}"]
        return to.bench(op, cases, "^rolltree$", under=under, limit=60.0, name=f"profile {op} {kernel}")

    return [
        to.build,
        *(Task(f"sweep {kernel}", [*sweep, kernel, *small], 80.0) for kernel in ("attention", "decode", "sampling")),
        checked("tree_decode", "^rolltree$"),
        checked("logprob_from_logits", "^cuda"),
        checked("tree_attention", "^rolltree$"),
        profiled("tree_attention", r"^4096\+28x1024 ", "forward_kernel"),
        profiled("tree_attention", r"^4096\+28x1024 ", "dkdv_kernel"),
        profiled("tree_decode", "^P=16384 R=128 G=16 x 1 ", "partial_kernel"),
        profiled("sample_tokens", "N=512 V=151936 T=1$", "scan_kernel"),
    ]


def training(to: Setting) -> list[Task]:
    """Return whole steps and rollouts; with natural lengths the decoder has few rows in the end.

    Each engine is timed by itself: the rows of a case are written when its last engine has been timed, and one compiles
    for a minute.
    """

    def rollouts(lengths: str, engine: str, limit: float) -> Task:
        cases = f"{lengths} lengths"
        return to.bench("rollout", cases, engine, limit=limit, name=f"rows rollout {lengths} {engine.strip('^$')}")

    return [
        to.build,
        to.bench(
            "tree_step", r"^4096\+8x1024 Qwen3 0.6B", "tree$|^flat, transformers|^flex.*transformers", limit=120.0
        ),
        to.bench("rl_step", limit=120.0),
        rollouts("forced", "^rolltree$", 90.0),
        rollouts("natural", "^rolltree$", 90.0),
        rollouts("forced", "continuous", 110.0),
        *([] if to.rehearse else [rollouts("forced", "^rolltree compiled$", 150.0)]),
        to.bench(
            "linear_policy_loss",
            "N=8192 H=4096 V=131072 .*frozen",
            "^(rolltree|torch)$",
            limit=60.0,
            name="frozen head",
        ),
    ]


def all_tests(to: Setting) -> list[Task]:
    """Return all kernel tests, since Triton and CUDA are real here, and the other tests marked gpu."""
    tasks = []
    for path in sorted((REPOSITORY / "tests").glob("*/test_*.py")):
        name = str(path.relative_to(REPOSITORY))
        if path.parent.name == "kernels":
            tasks.append(to.pytest(name, name, limit=900.0, passing=(0, NOTHING_COLLECTED)))
        elif "mark.gpu" in path.read_text():
            tasks.append(to.pytest(name, name, "-m", "gpu", limit=900.0))
    return tasks
