"""Builds csrc/cuda as C++ for the CPU, so that its kernels run where there is no GPU; slow, and true to each thread."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "csrc" / "cuda"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-w", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
FLAGS += ["-fexpensive-optimizations", "-ffp-contract=fast"]  # a product and a sum become one operation, as by nvcc
FLAGS += ["-mfma"] if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else []


def translate(source: str) -> str:
    """Rewrite what CUDA adds to the grammar of C++: launches and shared memory."""
    source = re.sub(r"([\w]+(?:<[\w, ]+>)?)<<<(.*?)>>>\(", r"emulator::Launch(\2)(\1, ", source, flags=re.DOTALL)
    source = source.replace("__shared__", "static")  # a block at a time
    return source.replace("rolltree_cuda, CUDA, m", "rolltree_cuda, CPU, m")


def build(directory: Path) -> Path:
    """The library of the ops ``rolltree_cuda`` for tensors on the CPU."""
    include = Path(torch.__file__).parent / "include"
    includes = [f"-I{HERE}", f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]

    headers, bodies = [], []
    for source in sorted(SOURCES.glob("*.cu")):  # in one file, as torch's headers take as long as all of them
        lines = translate(source.read_text()).splitlines()
        headers += [line for line in lines if line.startswith("#include")]
        body = "\n".join(line for line in lines if not line.startswith("#include"))
        bodies.append(f"namespace {source.stem} {{\n{body}\n}}")
    translated, library = directory / "emulated.cpp", directory / "emulated.so"
    translated.write_text("\n".join([*headers, *bodies]))
    home = Path(torch.__file__).parent / "lib"
    command = ["g++", *FLAGS, *includes, "-shared", str(translated), "-o", str(library)]
    subprocess.run([*command, f"-L{home}", "-ltorch_cpu", "-ltorch"], check=True)
    return library


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    build(Path(sys.argv[1]))
