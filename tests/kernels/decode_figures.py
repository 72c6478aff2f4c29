"""Figures of the machine code of decode kernels that are not Triton's, in the rows of `aot.harness`.

They are our CUDA C++ kernel, and flash-attn 4's forward with pages of 16 keys, which nothing launches.

``python -m tests.kernels.decode_figures FOLDER`` writes bench/results/static-sm_90/decode.jsonl, in the environment of
`make hopper` with nvcc on PATH. Clocks are modelled, for the warps that multiply.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from .aot import harness, machine_code

TABLE = harness.STATIC / "decode.jsonl"
SOURCE = Path(__file__).parents[2] / "csrc" / "cuda" / "tree_decode.cu"
FLASH_TILES = ((64, 128), (128, 128))
FLASH = """
import sys
import cutlass, torch

class Absent:
    def __init__(self, device=0): ...
    def get_device_multiprocessor_count(self): return 132
    def get_max_active_clusters(self, cluster_size): return 132 // cluster_size

cutlass.utils.HardwareInfo = Absent
from flash_attn.cute import interface
from torch._subclasses.fake_tensor import FakeTensorMode

dim, rows, keys = map(int, sys.argv[1:])
with FakeTensorMode():
    q = torch.empty(300, 16, dim, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.empty(4096, 16, 8, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    begins, used, pages = (torch.empty(n, dtype=torch.int32, device="cuda") for n in (49, 48, 48 * 32))
    options = dict(cu_seqlens_q=begins, seqused_k=used, max_seqlen_q=64, page_table=pages.view(48, 32))
    interface._flash_attn_fwd(q, k, v, return_lse=True, tile_mn=(rows, keys), **options)
"""


def cuda_kernels(folder: Path) -> list[machine_code.Kernel]:
    """Every variant of the C++ kernel for sm_90a."""
    cubin, home = folder / "tree_decode.cubin", Path(torch.__file__).parent / "include"
    flags = ["-O3", "-std=c++20", "--use_fast_math", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    includes = [f"-I{home}", f"-I{home / 'torch' / 'csrc' / 'api' / 'include'}"]
    subprocess.run(["nvcc", *flags, *includes, "-arch=sm_90a", "-cubin", str(SOURCE), "-o", str(cubin)], check=True)
    return machine_code.read(cubin.read_bytes())


def cuda_figures(kernels: list[machine_code.Kernel]) -> Iterator[harness.AotResult]:
    """Return the figures of the kernels in bf16 without window and softcap; D = 64 and 128."""
    for dim in (64, 128):
        (kernel,) = (k for k in kernels if f"partial_kernelI13__nv_bfloat16Li{dim}ELb0ELb0E" in k.name)
        shared = 3 * 64 * (2 * (dim + 8) * 2 + 8)
        yield _figures(f"decode cuda D{dim} bf16", kernel, 4, 2 * 64 * 64 * dim, shared)


def flash_figures(folder: Path) -> Iterator[harness.AotResult]:
    """Return the figures of flash-attn 4, with a process for each tile."""
    for dim in (64, 128):
        for rows, keys in FLASH_TILES:
            dump = folder / f"{dim}-{rows}x{keys}"
            dump.mkdir()
            environment = os.environ | {
                "CUTE_DSL_ARCH": "sm_90a",
                "FLASH_ATTENTION_ARCH": "sm_90a",
                "FLASH_ATTENTION_NUM_SMS": "132",
                "CUTE_DSL_KEEP_CUBIN": "1",
                "CUTE_DSL_DUMP_DIR": str(dump),
            }
            command = [sys.executable, "-W", "ignore", "-c", FLASH, str(dim), str(rows), str(keys)]
            subprocess.run(command, env=environment, check=True)
            (cubin,) = dump.glob("*flash_fwd_sm90*.cubin")
            (kernel,) = machine_code.read(cubin.read_bytes())
            shared = 2 * dim * (rows + 2 * 2 * keys)  # queries, two stages of keys and of values
            yield _figures(
                f"decode flash {rows}x{keys} D{dim} bf16", kernel, rows // 16, 2 * rows * keys * dim, shared, 4
            )


def _figures(
    name: str, kernel: machine_code.Kernel, warps: int, multiply_adds: int, shared: int, copying_warps: int = 0
) -> harness.AotResult:
    case = harness.AotCase(name, None, {}, num_warps=warps, multiply_adds=multiply_adds)
    loop = max(kernel.main_loops, key=lambda loop: loop.count)
    return harness.AotResult(
        name, 90, kernel.registers, kernel.stack, shared, any(s.startswith("HGMMA") for s in loop.tensor),
        machine_code.ctas_per_sm(kernel.registers, shared, warps + copying_warps), len(kernel.instructions),
        (harness.loop_figures(loop, case, modelled=True),),
    )  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    rows = [*cuda_figures(cuda_kernels(folder)), *flash_figures(folder)]
    TABLE.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


if __name__ == "__main__":
    main()
