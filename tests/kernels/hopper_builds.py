"""The kernels of flash-attn 4 compiled for GPUs that are not there, by `ahead`, in processes of their own.

One process imports CuTe DSL, which takes as long as a kernel or two, and forks another for each job, as CuTe DSL and
flash-attn 4 ask once in a process which GPU it has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

PROGRAM = """
import gc, json, os, pathlib, sys
gc.disable()  # a kernel's program is made of millions of objects, which go with the process
from rolltree.kernels import ahead
from rolltree.kernels.tree_attention import flash_kernels, triton  # imported once, for all jobs
from cutlass.cutlass_dsl import CuTeDSL

def build(name, arch, dim, softcap, window, steps, everything, code):
    target = ahead.TARGETS[arch]
    model = ahead.Model(heads=8, kv_heads=4, head_dim=dim, vocab=1, softcap=softcap, window=window)
    os.environ["CUTE_DSL_ARCH"] = settings.arch = target.arch
    if code is not None:
        settings.keep_cubin, settings.dump_dir = True, code + "/written"
        pathlib.Path(settings.dump_dir).mkdir(parents=True)
    all_kernels = ahead.build(target, model, flash=True, filters=[(), ("top_k", "top_p")])
    for built in all_kernels if everything else ahead.build_hopper(target, model, steps):
        print(json.dumps({"job": name} | built._asdict()), flush=True)
        if code is not None:  # the next step may write another kernel of this name
            step = pathlib.Path(code, built.name)
            step.mkdir()
            for file in pathlib.Path(settings.dump_dir).glob("*.cubin"):
                file.rename(step / file.name)

settings = CuTeDSL._get_dsl().envar
for job in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        build(**job)
        sys.stdout.flush()
        os._exit(0)
    if status := os.waitpid(child, 0)[1]:
        sys.exit(f"job {job['name']} ended with status {status}")
"""


@dataclass(frozen=True)
class Job:
    """Kernels to compile for one GPU, and for one model."""

    name: str
    arch: str
    dim: int  # of attention's heads
    softcap: float | None = None  # of attention
    window: bool = False  # some of its layers have one
    steps: tuple[str, ...] = ()  # of `ahead.build_hopper`; none: all
    everything: bool = False  # Triton's kernels too
    code: str | None = None  # where to leave the machine code, in a folder for each step


SOFTCAP = ("attention, flash, forward, window", "attention, flash, backward, window")


def all_jobs(code: Path) -> list[Job]:
    """Attention in all head dimensions, without and with softcap and window, for both GPUs; with one of them Triton's
    kernels too. Machine code goes below ``code``."""
    # imports Triton, which not every machine has
    from rolltree.kernels.tree_attention.flash_lists import TILES as FLASH_TILES

    jobs = []
    for arch, dims in (("90a", FLASH_TILES[9]), ("100a", FLASH_TILES[10])):
        jobs += [Job(f"{arch}-{dim}", arch, dim, everything=(arch, dim) == ("90a", 128)) for dim in dims]
        jobs += [Job(f"{arch}-{dim}-softcap", arch, dim, softcap=30.0, window=True, steps=SOFTCAP) for dim in dims]
    return [replace(job, code=str(code / job.name)) for job in jobs]


def build(jobs: list[Job], cache: Path) -> dict[str, dict[str, int]]:
    """Job -> step -> kernels that it compiled, as they were not in a cache below ``cache``."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"ROLLTREE_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    command = [sys.executable, "-c", PROGRAM, json.dumps([asdict(job) for job in jobs])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = {job.name: {} for job in jobs}
    for row in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
        found[row["job"]][row["name"]] = row["compiled"]
    return found


class Hopper:
    """Every kernel, compiled by one process and asked for by a second."""

    def __init__(self, root: Path) -> None:
        self.cache, self.code = root / "cache", root / "code"
        jobs = all_jobs(self.code)
        self.first = build(jobs, self.cache)
        self.second = build([replace(job, code=None) for job in jobs], self.cache)
