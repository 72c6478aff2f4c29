"""``rolltree doctor``: lists what is installed on this machine, what is missing, and the command that installs it.

Every check is made anew, and the package's native parts are not imported, so the doctor also works in a broken
installation.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..sandbox import Sandbox
from ..sandbox.sandbox import taken_away

_spec = importlib.util.spec_from_file_location(
    "rolltree_machine", Path(__file__).parents[2] / "kernels" / "machine.py"
)  # by its path: its package imports torch, which may be broken
assert _spec is not None
assert _spec.loader is not None
machine = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(machine)

REBUILD = "pip install --no-build-isolation -e . (in the source directory)"

Level = Literal["ok", "optional", "slow", "bad"]
MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "optional": ("absent", "dim"),
    "slow": ("slower", "yellow"),
    "bad": ("MISSING", "bold red"),
}
"""Label and colour of each level: ``bad`` makes rolltree unusable, ``slow`` costs speed, ``optional`` is an extra."""


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    group: str
    name: str
    level: Level
    state: str
    remedy: str = ""


Version = tuple[int, ...]

PYTHON: tuple[Version, Version] = (3, 11), (3, 14)
"""First supported version, first unsupported version: `requires-python` of pyproject.toml."""

REQUIRED: tuple[tuple[str, Version, Version | None], ...] = (
    ("torch", (2, 11), (2, 15)),
    ("triton", (3, 6), (3, 10)),
    ("numpy", (1, 26), None),
    ("transformers", (5, 16), (5, 25)),
    ("pyarrow", (17,), None),
)
"""Package, first supported version, first unsupported version: the ranges of pyproject.toml."""

OPTIONAL_RANGES: dict[str, tuple[Version, Version]] = {
    "vllm": ((0, 32), (0, 34)),
    "trl": ((1, 16), (1, 17)),
    "datasets": ((5,), (6,)),
}
"""First supported and first unsupported version of optional packages with a range in pyproject.toml."""

OPTIONAL: tuple[tuple[str, str, str], ...] = (
    ("reasoning_gym", "procedural tasks with verifiers", "pip install 'rolltree[tasks]'"),
    ("math_verify", 'reward.verifier = "math"', "pip install 'rolltree[tasks]'"),
    ("datasets", "sets on the Hugging Face hub in data.path", "pip install 'rolltree[hub]'"),
    ("vllm", "rollouts by vLLM", "pip install 'rolltree[vllm]'"),
    ("fastapi", "rolltree serve", "pip install 'rolltree[serve]'"),
    ("peft", "LoRA adapters", "pip install 'rolltree[lora]'"),
    ("trl", "accelerate(trainer)", "pip install 'rolltree[trl]'"),
    ("pynvml", "utilisation, memory and power of the GPU in a run's metrics", "pip install 'rolltree[monitor]'"),
    ("cutlass", "attention by flash-attn 4 on Hopper and Blackwell", "pip install --pre 'rolltree[hopper]'"),
    ("flash_attn", "a peer in the benchmarks", "pip install flash-attn --no-build-isolation"),
)
"""Module, its purpose, the command that installs it."""


def run(console: Console | None = None) -> int:
    """Print the findings. Returns 0 if rolltree is usable, else 1."""
    console = console or Console(highlight=False)
    findings = list(examine())
    table = Table(box=None, pad_edge=False, header_style="bold", title="rolltree doctor", title_justify="left")
    for column in ("", "what", "", "found"):
        table.add_column(column)
    group = ""
    for finding in findings:
        mark, style = MARKS[finding.level]
        shown = finding.group if finding.group != group else ""
        group = finding.group
        table.add_row(f"[bold]{shown}", finding.name, f"[{style}]{mark}", escape(finding.state))
    console.print(table)
    for level, title in (("bad", "Needed"), ("slow", "For speed"), ("optional", "If wanted")):
        lines = [f for f in findings if f.level == level and f.remedy]
        if lines:
            console.print(f"\n[bold]{title}")
        for finding in lines:
            console.print(f"  {finding.name}: {finding.remedy}", markup=False, soft_wrap=True)
    bad = [f.name for f in findings if f.level == "bad"]
    verdict = f"Not usable yet: {', '.join(bad)}." if bad else "Usable."
    console.print(f"\n{verdict}", style="bold red" if bad else "bold green", markup=False, soft_wrap=True)
    return 1 if bad else 0


def examine() -> Iterable[Finding]:
    """Yield all findings, in the order of the table; only one where rolltree does not run at all."""
    yield (platform_finding := platform_found())
    if platform_finding.level == "bad":
        return
    yield python_version(sys.version_info[:3])
    for package, low, high in REQUIRED:
        if package != "triton" or sys.platform == "linux":
            yield required_package(package, low, high)
    yield from devices()
    yield from compiled_parts(Path(__file__).parents[2])
    yield from compilers()
    yield sandbox()
    yield from forced_paths()
    for module, purpose, command in OPTIONAL:
        yield optional_package(module, purpose, command)


def platform_found() -> Finding:
    refused = machine.platform_refused()
    return Finding("versions", "platform", "bad" if refused else "ok", machine.platform_state(), refused)


def python_version(version: Version) -> Finding:
    text = ".".join(map(str, version))
    if PYTHON[0] <= version < PYTHON[1]:
        return Finding("versions", "python", "ok", text)
    return Finding("versions", "python", "bad", f"{text} is not supported", "use Python 3.11, 3.12 or 3.13")


def sandbox() -> Finding:
    """Report how untrusted code would be contained."""
    try:
        with Sandbox() as opened:
            return Finding("rewards", "code", "ok", opened.containment)
    except OSError as error:
        return Finding(
            "rewards", "code", "optional", f'reward.verifier = "code": {error}', "Linux on x86_64 or aarch64"
        )


def required_package(package: str, low: Version, high: Version | None) -> Finding:
    supported = _range(low, high)
    remedy = f"pip install '{package}{supported}'"
    installed = _version(package)
    if installed is None:
        return Finding("versions", package, "bad", f"not installed (supported: {supported})", remedy)
    version = parse_version(installed)
    if version < low or (high and version >= high):
        return Finding("versions", package, "bad", f"{installed} is outside {supported}", remedy)
    return Finding("versions", package, "ok", installed)


def optional_package(module: str, purpose: str, command: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding("optional", module, "optional", purpose, command)
    installed = _version(module)
    if installed and module in OPTIONAL_RANGES:
        low, high = OPTIONAL_RANGES[module]
        if not low <= parse_version(installed) < high:
            text = f"{installed} is outside {_range(low, high)}: {purpose}"
            return Finding("optional", module, "optional", text, command)
    return Finding("optional", module, "ok", f"{installed or 'installed'}: {purpose}")


def devices() -> Iterable[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a broken torch fails in many ways; report any of them
        text = " ".join(str(error).split())[:120]
        yield Finding("devices", "torch", "bad", f"cannot be imported: {text}", "reinstall torch")
        return
    yield Finding("devices", "cpu", "ok", f"{platform.machine()}, {cores} cores, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        summary = f"torch is built for CUDA {built} but sees no device" if built else "this torch is a CPU build"
        has_driver = shutil.which("nvidia-smi") is not None
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES" if built else "pip install --force-reinstall torch"
        yield Finding("devices", "cuda", "slow" if has_driver else "optional", summary, remedy if has_driver else "")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        summary = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
        )
        yield Finding("devices", f"cuda:{index}", "ok", summary)


def compiled_parts(package: Path) -> Iterable[Finding]:
    """Yield a finding for each library of setup.py; ``package`` is the directory with kernels/ and engine/."""
    kernels = package / "kernels"
    compile_cpp = REBUILD if machine.has("compiler") else f"apt-get install g++, then {REBUILD}"
    compile_cuda = REBUILD if shutil.which("nvcc") else f"put nvcc on PATH, then {REBUILD}"
    yield _library("_host (KV tree)", package / "engine" / "rollout" / "native", "_host*.so", "bad", compile_cpp)
    yield _cpu_library(kernels, compile_cpp)
    yield _library("_cuda (CUDA kernels)", kernels, "_cuda*.so", "optional", compile_cuda)


def compilers() -> Iterable[Finding]:
    yield _program(machine.compiler(), "apt-get install g++", _last_word)
    yield _program("nvcc", "install the CUDA toolkit and put its bin directory on PATH", _nvcc_release)


def forced_paths() -> Iterable[Finding]:
    """Yield the environment variables that decide which path runs, with the present value of each."""
    values: dict[str, Callable[[], str]] = dict(machine.SETTINGS)
    values["ROLLTREE_SANDBOX_WITHOUT"] = lambda: ", ".join(taken_away()) or "nothing"
    for name, value in values.items():
        try:
            summary = f"{value()} ({name} is set)" if os.environ.get(name) else value()
            yield Finding("paths", name, "ok", summary)
        except ValueError as error:
            yield Finding("paths", name, "bad", str(error), f"unset {name}")
        except ImportError:  # `devices` reports a broken torch
            yield Finding("paths", name, "optional", "not known without torch")


def parse_version(text: str) -> Version:
    """Parse the leading numbers of a version: '2.13.0+cpu' -> (2, 13, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _library(name: str, folder: Path, pattern: str, level: Level, remedy: str) -> Finding:
    files = sorted(folder.glob(pattern))
    if not files:
        return Finding("build", name, level, "not built", remedy)
    return Finding("build", name, "ok", ", ".join(f.name for f in files))


def _cpu_library(folder: Path, remedy: str) -> Finding:
    finding = _library("_cpu (CPU kernels)", folder, "_cpu_*.so", "slow", remedy)
    if finding.level == "ok":
        with contextlib.suppress(Exception):  # `devices` and `forced_paths` report it
            libraries = importlib.import_module("rolltree.kernels.libraries")
            if not libraries.cpu_libraries(folder):
                return replace(finding, level="slow", state=f"{finding.state}: for another machine", remedy=remedy)
    return finding


def _program(name: str, remedy: str, describe: Callable[[str], str]) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding("build", name, "optional", "not on PATH", remedy)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    return Finding("build", name, "ok", f"{describe(done.stdout)} ({path})")


def _last_word(version: str) -> str:
    """Return the last word of the first line: 'g++ (Debian 12.2.0-14) 12.2.0\\n...' -> '12.2.0'."""
    first = version.splitlines()[:1]
    return first[0].split()[-1] if first and first[0].split() else "unknown version"


def _nvcc_release(version: str) -> str:
    """Find the release in nvcc's output: 'Cuda compilation tools, release 13.0, V13.0.88' -> '13.0'."""
    _, separator, rest = version.partition("release ")
    return rest.split(",")[0] if separator else "unknown version"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _range(low: Version, high: Version | None) -> str:
    return f">={_dotted(low)}" + (f",<{_dotted(high)}" if high else "")


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
