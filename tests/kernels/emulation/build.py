"""Builds csrc/cuda as C++ for the CPU, so that its kernels run where there is no GPU; slow, and true to each thread."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "csrc" / "cuda"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-w", "-DTORCH_TARGET_VERSION=0x020a000000000000"]


def translate(source: str) -> str:
    """Rewrite what CUDA adds to the grammar of C++: launches and shared memory."""
    source = re.sub(r"([\w]+(?:<[\w, ]+>)?)<<<(.*?)>>>\(", r"emulator::Launch(\2)(\1, ", source, flags=re.DOTALL)
    source = re.sub(r"extern __shared__ \S+ unsigned char (\w+)\[\];", r"auto* \1 = emulator::shared_memory();", source)
    source = source.replace("__shared__", "static")  # a block at a time
    return source.replace("rolltree_cuda, CUDA, m", "rolltree_cuda, CPU, m")


def build(directory: Path) -> Path:
    """The library of the ops ``rolltree_cuda`` for tensors on the CPU."""
    include = Path(torch.__file__).parent / "include"
    includes = [f"-I{HERE}", f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]

    def compile_one(source: Path) -> Path:
        translated = directory / f"{source.stem}.cpp"
        translated.write_text(translate(source.read_text()))
        target = translated.with_suffix(".o")
        subprocess.run(["g++", *FLAGS, *includes, "-c", str(translated), "-o", str(target)], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.cu"))))
    library = directory / "emulated.so"
    home = Path(torch.__file__).parent / "lib"
    subprocess.run(
        ["g++", "-shared", *map(str, objects), "-o", str(library), f"-L{home}", "-ltorch_cpu", "-ltorch"], check=True
    )
    return library
