"""``make gpu``: tests, figures and profiles of the kernels on a machine with a GPU, which needs no network.

It works from a plain checkout with the packages that such a machine has: nothing is installed, and ``rolltree`` is
found through links. Everything goes into one directory. Begin with ``first``, which takes at most 200 seconds; the
others take at most five minutes each::

    make gpu ARGS="--part first --out build/gpu"

``first``: versions, the native build, each Triton and CUDA kernel against float64 at two shapes, and one row of each op
(gpu_first.py). ``next``: what was written since a GPU was last at hand, in at most eight minutes (runs/gpu_next.py).
``kernels``: the most important rows and the device's limits; ``first`` twice and ``kernels`` fit into
twelve minutes. ``correct``: the tests of tests/gpu. ``tuning``: tiles of each kernel, memory checks, profiles.
``training``: whole steps and rollouts. Two more parts without a time limit are ``tests`` (every test file that a GPU
affects) and ``rows`` (every case of every benchmark).

A part is a list of tasks (gpu_tasks.py), each in its own process. Tasks that passed at this commit are not run again,
except for the build, and cases found in the directory are not measured again, so the same command resumes a part that
was cut off. Without a repository the environment variable ``ROLLTREE_COMMIT`` names the commit. Native parts that load
and are no older than their sources are used as they are; others are built, for this device alone. ``--pack FILE`` also
keeps the directory in one archive, updated during the run; unpacked into the directory, it lets another machine resume.

``--device cpu --rehearse`` runs the same tasks with small cases on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from rolltree.kernels import machine
from rolltree.kernels.libraries import cpu_libraries, load_library

from .cli import OPS
from .gpu_first import KINDS
from .gpu_tasks import LONG, Setting, Task, parts
from .journal import Journal
from .schema import REPOSITORY, append_line, commit, read
from .table import table

PART_SECONDS = {"first": 200.0, "next": 480.0}
OTHER_PART_SECONDS = 300.0
PACK_SECONDS = 20.0
TELL_SECONDS = 0.5
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class Record:
    """The tasks that have passed at this commit, in ``tasks.jsonl`` of the run's directory."""

    def __init__(self, out: Path) -> None:
        self.path, self.commit = out / "tasks.jsonl", commit()
        self.passed: set[str] = set()
        if self.path.exists():
            lines = [json.loads(line) for line in self.path.read_text().splitlines()]
            self.passed = {x["task"] for x in lines if x["commit"] == self.commit and x["status"] == "passed"}

    def add(self, task: str, status: str, seconds: float) -> None:
        line = {"task": task, "status": status, "seconds": round(seconds, 1), "commit": self.commit}
        append_line(line, self.path)
        if status == "passed":
            self.passed.add(task)


def tell(line: str) -> None:
    print(line, flush=True)  # a run that is cut off has printed it


def run_task(task: Task, to: Setting, deadline: float, say: Callable[[str], None] = tell) -> str:
    """Run a task and return "passed", "failed: reason", or "cut off" if the part's time ended; then it can continue.

    A benchmark whose process dies starts again after the provider at which it died.
    """
    if task.needs and not to.rehearse and shutil.which(task.needs) is None:
        return f"failed: there is no {task.needs} on PATH"
    stop = min(deadline, time.monotonic() + task.limit)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if task.op is not None and task.each is not None:
        Journal(task.op, to.out).retry()
    log = to.out / "logs" / f"{re.sub(r'[^a-z0-9_.]+', '-', task.name.lower())}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    while True:
        left = stop - time.monotonic()
        if left <= 0:
            return "cut off"
        with log.open("a") as file:
            file.write(f"$ {' '.join(task.command)}\n")
            file.flush()
            process = subprocess.Popen(
                task.command,
                cwd=REPOSITORY,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            try:
                code, limit = _ended(process, stop, task, to, say), task.limit
            except subprocess.TimeoutExpired as late:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code, limit = None, late.timeout
                if time.monotonic() >= stop >= deadline:
                    return "cut off"
        if code in task.passing:
            return "passed"
        reason = f"it took longer than {limit:.0f} s" if code is None else f"exit code {code}"
        if task.op is None or code in (1, 2):
            return f"failed: {reason}; see {log}"
        journal = Journal(task.op, to.out)
        at = journal.interrupted()
        lost = at is not None and not journal.known(*at)
        if at is not None and lost:
            say(str(journal.record(*at, "stopped", f"its process ended: {reason}")))
        if time.monotonic() >= stop or not (lost or code == 3):
            return f"failed: {reason}; see {log}"


def _die_with_parent() -> None:
    """Make the child process end with its parent: a task that is cut off must release the device."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def pack(to: Setting) -> None:
    """Write all of ``--out`` into a gzipped tar, which is complete at any moment."""
    out, archive = to.out, to.archive
    if archive is None:
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    new = archive.with_name(f".{archive.name}.new")
    with tarfile.open(new, "w:gz") as tar:
        for path in sorted(p for p in out.rglob("*") if p not in (archive, new)):
            try:  # a running task writes and removes files
                content, entry = path.read_bytes(), tarfile.TarInfo(str(path.relative_to(out)))
            except (FileNotFoundError, IsADirectoryError):
                continue
            entry.size, entry.mtime = len(content), time.time()
            tar.addfile(entry, io.BytesIO(content))
    new.replace(archive)


def _ended(process: subprocess.Popen[bytes], stop: float, task: Task, to: Setting, say: Callable[[str], None]) -> int:
    """Wait for the exit code, packing at intervals and telling the outcomes of an op whose providers have a limit.

    Raises:
        subprocess.TimeoutExpired: the process still runs at ``stop``, or one of its providers after its own limit.
    """
    begun, packed = time.time(), time.monotonic()
    journal = None if task.op is None or task.each is None else Journal(task.op, to.out)
    pause = PACK_SECONDS if journal is None else min(PACK_SECONDS, TELL_SECONDS)
    while True:
        code = None
        left = stop - time.monotonic()
        try:
            code = process.wait(max(0.0, min(left, pause)))
        except subprocess.TimeoutExpired:
            if left <= pause:
                raise subprocess.TimeoutExpired(process.args, task.limit) from None
        if journal is not None:
            for outcome in journal.read():
                say(str(outcome))
            since = journal.since()
            if code is None and task.each and since is not None and time.time() - max(since, begun) > task.each:
                raise subprocess.TimeoutExpired(process.args, task.each)
        if code is not None:
            return code
        if time.monotonic() - packed > PACK_SECONDS:
            pack(to)
            packed = time.monotonic()


def run_part(tasks: Sequence[Task], to: Setting, seconds: float, say: Callable[[str], None] = tell) -> list[str]:
    """Run tasks for ``seconds`` at most, and return the names of those that did not pass."""
    record, missed, start = Record(to.out), [], time.monotonic()

    def run(task: Task) -> tuple[str, float]:
        begun = time.monotonic()
        ended = "cut off" if begun - start > seconds - 2 else run_task(task, to, start + seconds, say)
        return ended, time.monotonic() - begun

    def end(task: Task, ended: str, took: float) -> None:
        say(f"== {task.name}: {ended}, {took:.0f} s")
        record.add(task.name, ended.partition(":")[0], took)
        pack(to)
        if ended != "passed":
            missed.append(task.name)

    with ThreadPoolExecutor(1) as background:
        meanwhile: list[tuple[Task, Future[tuple[str, float]]]] = []
        for task in tasks:
            if task.name in record.passed and not task.always:
                say(f"== {task.name}: passed before")
                continue
            if task.background:
                meanwhile.append((task, background.submit(run, task)))
                continue
            while task.joins and meanwhile:
                other, result = meanwhile.pop(0)
                end(other, *result.result())
            end(task, *run(task))
        for other, result in meanwhile:
            end(other, *result.result())
    return missed


def native_parts(device: torch.device) -> dict[str, bool]:
    """Return by native part whether it loads here and is no older than its sources."""
    # found without importing its package, whose requirements a machine for kernels may lack
    host = PathFinder.find_spec("_host", [str(REPOSITORY / "engine" / "rollout" / "native")])
    usable = {"_host": host is not None, "_cpu": load_library("cpu")}
    files = {"_host": [Path(host.origin)] if host and host.origin else []}
    files["_cpu"] = cpu_libraries(REPOSITORY / "kernels")[:1]  # the one that is loaded
    if device.type == "cuda":
        usable["_cuda"] = load_library("cuda")
        files["_cuda"] = [REPOSITORY / "kernels" / "_cuda.so"]
    for name in usable:
        newest = max(path.stat().st_mtime for path in (REPOSITORY / "csrc" / name[1:]).iterdir())
        usable[name] = usable[name] and min(path.stat().st_mtime for path in files[name]) >= newest
    return usable


def architecture(major: int, minor: int) -> str:
    """Return nvcc's name of a compute capability; Hopper's own instructions need the ``a``."""
    return "90a" if (major, minor) == (9, 0) else f"{major}{minor}"


def build(device: torch.device) -> int:
    """Build the native parts that do not load, for this machine alone; return 0 if all parts load afterwards."""
    if all(native_parts(device).values()):
        print("Every native part is there and loads.")
        return 0
    environment = dict(os.environ, ROLLTREE_CPU_ISA="native", ROLLTREE_CUDA="0")
    if device.type == "cuda":
        del environment["ROLLTREE_CUDA"]
        environment["ROLLTREE_CUDA_ARCHS"] = architecture(*machine.real_gpu_capability(device))
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    code = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
    importlib.invalidate_caches()
    load_library.cache_clear()
    print(usable := native_parts(device))
    return code or int(not all(usable.values()))


def versions() -> int:
    """Print the versions of what the machine has."""
    print(f"rolltree {commit()}, python {platform.python_version()}, {platform.platform()}")
    for name in ("torch", "triton", "transformers", "numpy", "numba", "pytest", "pydantic", "plotly", "tomli_w"):
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} is not installed")
    for program in ("nvcc", "g++", "ncu", "compute-sanitizer"):
        print(f"{program}: {shutil.which(program) or 'not on PATH'}")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_properties(0))
        subprocess.run(["nvidia-smi"], check=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make gpu", description="Tests, figures and profiles of a GPU.")
    parser.add_argument("--part", action="append", metavar="NAME", help="first, kernels, ... (default: all short ones)")
    parser.add_argument("--list", action="store_true", help="only list parts and tasks")
    parser.add_argument("--cases", default="", metavar="REGEX", help="cases of benchmarks, instead of the chosen ones")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of timing a case (default 2)")
    parser.add_argument("--part-seconds", type=float, metavar="S", help="default: 200 for first, 300 for others")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "gpu", help="default: build/gpu")
    parser.add_argument(
        "--pack", type=Path, metavar="FILE", help="everything in --out as one .tar.gz, after every task"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rehearse", action="store_true", help="small cases; tools and GPU tests left out")
    parser.add_argument("--versions", action="store_true", help="only print versions")
    parser.add_argument("--build", action="store_true", help="only build the native parts")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every task passed, 1 if one failed or was cut off, 2 for a wrong command line or no GPU."""
    args = _parser().parse_args(argv)
    if args.versions:
        return versions()
    archive = None if args.pack is None else args.pack.resolve()
    to = Setting(args.device, args.rehearse, args.seconds, args.cases, args.out.resolve(), archive)
    task_makers = parts(to)
    chosen = args.part or [name for name in task_makers if name not in LONG]
    if unknown := [name for name in chosen if name not in task_makers]:
        print(f"make gpu has no part '{unknown[0]}'; it has {', '.join(task_makers)}.", file=sys.stderr)
        return 2
    if not (REPOSITORY / "tests").is_dir():
        print(f"make gpu needs a checkout with its tests; there are none in {REPOSITORY / 'tests'}.", file=sys.stderr)
        return 2
    if args.list:
        for name, make in task_makers.items():
            print(name, *(task.name for task in make()), sep="\n  ")
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "make gpu needs a CUDA device and a torch built for it, and finds none; --device cpu --rehearse tries the "
            "commands without.",
            file=sys.stderr,
        )
        return 2
    if args.device == "cpu" and not args.rehearse and not args.build:
        print("make gpu measures a GPU; the CPU only stands in for one, with --rehearse.", file=sys.stderr)
        return 2
    if args.build:
        return build(torch.device(args.device))
    todo = {name: task_makers[name]() for name in chosen}
    if args.cases:
        try:
            todo = {name: [t for t in tasks if t.selects(torch.device(args.device))] for name, tasks in todo.items()}
        except re.error as error:
            print(f"make gpu: --cases {args.cases!r} is not a regular expression: {error}.", file=sys.stderr)
            return 2
        if not any("rolltree.bench" in task.command for tasks in todo.values() for task in tasks):
            print(
                f"make gpu: no case of {', '.join(chosen)} contains --cases {args.cases!r}; rolltree bench --list has "
                "their names.",
                file=sys.stderr,
            )
            return 2
    missed = []
    for name, tasks in todo.items():
        begun = time.monotonic()
        seconds = args.part_seconds or PART_SECONDS.get(name, OTHER_PART_SECONDS)
        missed += run_part(tasks, to, float("inf") if name in LONG else seconds)
        print(f"== part {name}: {time.monotonic() - begun:.0f} s", flush=True)
    rows = [row for op in OPS if (to.out / f"{op}.jsonl").exists() for row in read(to.out / f"{op}.jsonl")]
    if rows:
        print(table([row for row in rows if row.commit == commit()]))
    kept = (*OPS, *(f"first_{kind}" for kind in KINDS))
    problems = [problem for op in kept for problem in Journal(op, to.out).problems]
    if problems:
        print("Failed:", *problems, sep="\n  ")
    if missed:
        print(f"Not passed: {', '.join(missed)}. The same command goes on from here.")
    return 1 if missed or problems else 0


if __name__ == "__main__":
    sys.exit(main())
