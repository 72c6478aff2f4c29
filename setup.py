"""Builds the native parts; the rest of the packaging is in pyproject.toml.

Three parts, each optional: without a compiler (or without nvcc for the last) the package installs, runs on its slower
backends, and `rolltree doctor` says what is missing.

* ``csrc/host``  pybind11 module ``rolltree.engine.rollout.native._host``: node table and page allocator, without torch.
* ``csrc/cpu``   ``kernels/_cpu_<isa>.so`` for the instruction set of this machine, and on request for all of them; the
  best that a machine has is loaded at run time.
* ``csrc/cuda``  ``kernels/_cuda.so``; the CUDA toolkit suffices, torch itself may be a CPU build.

The last two use only libtorch's stable ABI, so one binary serves several torch and Python versions.
Environment: ``ROLLTREE_CPU_ISA=all`` builds for every instruction set, for wheels that go to other machines: one that
does not has this machine's in its name (``rolltree-0.1.0-1avx512-...``); ``ROLLTREE_CUDA_ARCHS=80,90a,100`` builds for
these GPUs instead of those that the machine has; ``ROLLTREE_CUDA=0`` leaves CUDA out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # libtorch 2.10, where stable::parallel_for appeared
TORCH_HEADERS = "".join(f"#include <torch/csrc/stable/{name}.h>\n" for name in ("library", "ops", "tensor"))
"""The headers with which most files of csrc/cpu begin. They take three seconds, so they are compiled once for all."""
X86_LEVELS = {"default": "x86-64-v2", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}


def machine_module() -> ModuleType:
    """Return kernels/machine.py, whose package is not there before it is built."""
    spec = importlib.util.spec_from_file_location("rolltree_machine", ROOT / "kernels" / "machine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


machine = machine_module()
if refused := machine.platform_refused():
    sys.exit(refused)


def say(message: str) -> None:
    print(f"rolltree: {message}", file=sys.stderr, flush=True)


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def cpp_compiler() -> str:
    """Return the C++ compiler; raises RuntimeError where there is none."""
    if not machine.has("compiler"):
        raise RuntimeError(f"no C++ compiler '{machine.compiler()}' on PATH (Debian: apt-get install g++)")
    return str(machine.compiler())


def compile_all(jobs: list[list[str]]) -> None:
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(run, jobs))


def torch_flags() -> tuple[list[str], list[str]]:
    """Include and link flags of the installed torch; raises ImportError where there is none."""
    import torch

    home = Path(torch.__file__).parent
    includes = [f"-I{home / 'include'}", f"-I{home / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    return includes, [f"-L{home / 'lib'}", "-ltorch_cpu", "-ltorch"]


def cpu_levels() -> list[str]:
    """The instruction sets to build for; raises ImportError where there is no torch."""
    asked = os.environ.get("ROLLTREE_CPU_ISA", "native")
    if asked not in ("native", "all"):
        sys.exit(f"ROLLTREE_CPU_ISA is '{asked}'; it must be native (this machine's instruction set) or all.")
    if not machine.is_x86():
        return ["default"]
    return list(X86_LEVELS) if asked == "all" else [machine.cpu_level()]


def gpus_here() -> list[str]:
    """nvcc's names of this machine's GPUs, by the driver's own program; Hopper's own instructions want the ``a``."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return sorted({"90a" if of == "9.0" else of.replace(".", "") for of in found.split()})


class NativeParts(build_ext):
    """Builds what this machine can build and says what it cannot."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = True  # the host's part has one long file, beside which the kernels compile

    def build_extension(self, ext: Extension) -> None:
        part = {"_host": self.build_host, "_cpu": self.build_cpu, "_cuda": self.build_cuda}[ext.name.rpartition(".")[2]]
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        temp = Path(self.build_temp, ext.name)
        temp.mkdir(parents=True, exist_ok=True)
        try:
            part(target, temp)
        except (ImportError, RuntimeError, OSError) as error:
            lost = "rollouts need it" if ext.name.endswith("_host") else "slower backends stand in"
            say(f"{ext.name} was NOT built ({lost}): {error}")

    def build_host(self, target: Path, temp: Path) -> None:
        from sysconfig import get_paths

        import pybind11

        includes = [f"-I{pybind11.get_include()}", f"-I{get_paths()['include']}"]
        flags = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", *includes]
        self.compile_and_link(sorted(ROOT.glob("csrc/host/*.cpp")), flags, [], target, temp)

    def build_cpu(self, target: Path, temp: Path) -> None:
        includes, libs = torch_flags()
        for other in target.parent.glob("_cpu_*.so"):  # of an earlier build, maybe for other machines
            other.unlink()
        for level in cpu_levels():
            flags = [
                "-O3",
                "-std=c++20",
                "-fPIC",
                "-fno-math-errno",
                "-ffp-contract=fast",
                "--param=avoid-fma-max-bits=0",  # where tuned so, GCC contracts some loops and not others
                "-Wall",
                STABLE_ABI,
                *includes,
            ]
            if machine.is_x86():
                flags += [f"-march={X86_LEVELS[level]}"]
            own = {}
            if level == "avx512":
                flags += ["-mprefer-vector-width=512"]
                own["few_rows_dots.cpp"] = ["-mavx512bf16"]  # called where the processor has it
            where = temp / level
            where.mkdir(exist_ok=True)
            headers = where / "headers.h"
            headers.write_text(TORCH_HEADERS)
            run([cpp_compiler(), *flags, "-x", "c++-header", str(headers), "-o", f"{headers}.gch"])
            usual = ["-include", str(headers)]
            self.compile_and_link(
                sorted(ROOT.glob("csrc/cpu/**/*.cpp")),
                flags,
                libs,
                target.with_name(f"_cpu_{level}.so"),
                where,
                usual,
                own,
            )

    def build_cuda(self, target: Path, temp: Path) -> None:
        nvcc = shutil.which("nvcc")
        if os.environ.get("ROLLTREE_CUDA") == "0":
            return say("the CUDA kernels are left out (ROLLTREE_CUDA=0).")
        if nvcc is None:
            return say("the CUDA kernels are left out: no nvcc on PATH. Triton serves CUDA tensors without them.")
        asked = os.environ.get("ROLLTREE_CUDA_ARCHS")
        wanted = asked.split(",") if asked else gpus_here()
        if not wanted:
            return say(
                "the CUDA kernels are left out: no GPU here; ROLLTREE_CUDA_ARCHS=80,90a,100 builds them for others."
            )
        includes, libs = torch_flags()
        archs = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in wanted]
        flags = [
            "-O3",
            "-std=c++20",
            "--use_fast_math",
            "-lineinfo",
            "-Xcompiler=-fPIC",
            "-DUSE_CUDA",
            STABLE_ABI,
            *archs,
            *includes,
        ]
        sources = sorted(ROOT.glob("csrc/cuda/*.cu"))
        objects = [temp / f"{s.stem}.o" for s in sources]
        compile_all([[nvcc, *flags, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)])
        run(
            [
                nvcc,
                "-shared",
                "-cudart=shared",
                "-Xlinker=--no-as-needed",
                *map(str, objects),
                "-o",
                str(target.with_name("_cuda.so")),
                *libs,
            ]
        )

    @staticmethod
    def compile_and_link(
        sources: list[Path],
        flags: list[str],
        libs: list[str],
        target: Path,
        temp: Path,
        usual: Sequence[str] = (),
        own: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Compile ``sources`` and link them; ``own`` has flags of files by name, in place of the ``usual`` ones."""
        compiler = cpp_compiler()
        objects = [temp / f"{s.stem}.o" for s in sources]
        compile_all(
            [
                [compiler, *flags, *own.get(s.name, usual), "-c", str(s), "-o", str(o)]
                for s, o in zip(sources, objects, strict=True)
            ]
        )
        # macOS: what Python and torch define is found when the library is loaded
        late = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        run([compiler, "-shared", *late, *map(str, objects), "-o", str(target), *libs])

    def libraries_of(self, ext: Extension) -> list[Path]:
        *package, name = ext.name.split(".")
        return sorted(Path(self.build_lib, *package).glob(f"{name}[._]*so"))

    def copy_extensions_to_source(self) -> None:
        """Editable installs: put what was built beside the sources."""
        packages = self.get_finalized_command("build_py")
        for ext in self.extensions:
            folder = packages.get_package_dir(ext.name.rpartition(".")[0])
            for library in self.libraries_of(ext):
                self.copy_file(str(library), os.path.join(folder, library.name))

    def get_outputs(self) -> list[str]:
        return [str(library) for ext in self.extensions for library in self.libraries_of(ext)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Package(build_py):
    """What is installed is a package with an ``__init__.py``, which the repository has no place for.

    Where a script lies beside a clone, the clone would else be found before it, without native parts.
    """

    @property
    def marker(self) -> Path:
        return Path(self.build_lib, "rolltree", "__init__.py")

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.marker.write_text('"""Reinforcement learning of language models on trees of rollouts."""\n')

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return super().get_outputs(include_bytecode) + ([] if self.editable_mode else [str(self.marker)])


class Wheel(bdist_wheel):
    """Names the instruction set in the file's name where the wheel is for one alone: it is no wheel to hand on."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.build_number is None and os.environ.get("ROLLTREE_CPU_ISA") != "all":
            with contextlib.suppress(ImportError):  # without torch there are no CPU kernels in it
                self.build_number = f"1{cpu_levels()[0]}"


setup(
    ext_modules=[
        Extension("rolltree.engine.rollout.native._host", []),
        Extension("rolltree.kernels._cpu", []),
        Extension("rolltree.kernels._cuda", []),
    ],
    cmdclass={"build_ext": NativeParts, "build_py": Package, "bdist_wheel": Wheel},
)
