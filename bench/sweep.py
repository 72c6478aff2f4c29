"""Times tile sizes of the kernels: ``python -m rolltree.bench.sweep attention | decode | sampling``.

A candidate replaces what the kernel's module chooses, must give the default's result, and is timed with the default in
the same rounds. Every candidate is a line of ``sweep.jsonl``; the winner of each shape, which belongs into the module's
table, is printed last. Candidates that are in the file are not tried again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rolltree.kernels import use_backend
from rolltree.kernels.machine import interpreting

from .ops import sample_tokens, tree_attention, tree_decode
from .runner import Calls
from .schema import append_line, commit, device_name
from .timing import interleaved

SECONDS = 0.3  # of timing, a candidate and the default together
TOLERANCE = 2.0**-6  # relative, between two bf16 results of the same inputs

ROWS_KEYS = [(64, 64), (64, 128), (128, 32), (128, 64), (128, 128), (32, 64)]
WARPS, STAGES = (4, 8), (2, 3)


@dataclass(frozen=True)
class Candidate:
    shape: str
    name: str
    module: ModuleType
    attribute: str
    value: Any
    call: Callable[[], Any]


def attention(device: torch.device, small: bool) -> Iterator[Candidate]:
    """Yield tiles of the forward, dQ and dK/dV kernels, one kernel at a time, for D of 64, 128 and 256."""
    from rolltree.kernels.tree_attention import triton as module

    tree = tree_attention.workloads.group(*((8, 4, 2) if small else (4096, 1024, 28)))
    chosen = module.tiles_for
    for dim in (16,) if small else (64, 128, 256):
        dtype = torch.float32 if small else torch.bfloat16
        heads = (2, 1, dim) if small else (32, 8, dim)
        inputs = tree_attention._inputs(tree, heads, dtype, device)
        calls = tree_attention.rolltree(inputs)
        for kernel in ("forward", "dq", "dkdv"):
            call = calls["forward" if kernel == "forward" else "forward+backward"]
            for change in tile_changes(small):

                def tiles(*args: Any, kernel: str = kernel, change: dict[str, int] = change, **options: Any) -> Any:
                    default_tiles = chosen(*args, **options)
                    tile = getattr(default_tiles, kernel)
                    applicable = {k: v for k, v in change.items() if hasattr(tile, k)}
                    return dataclasses.replace(default_tiles, **{kernel: dataclasses.replace(tile, **applicable)})

                shape = f"{kernel} D={dim} heads {heads[0]}/{heads[1]} T={tree.num_tokens}"
                yield Candidate(shape, text(change), module, "tiles_for", tiles, call)


def tile_changes(small: bool) -> Iterator[dict[str, int]]:
    """Yield changes of a tile; ``stages`` only if tiles have it."""
    from rolltree.kernels.tree_attention.blocks import Tile

    stages = STAGES if "stages" in {f.name for f in dataclasses.fields(Tile)} else (0,)
    sizes = [(16, 16), (32, 16)] if small else ROWS_KEYS
    for (rows, keys), warps, stage in itertools.product(sizes, WARPS[: 1 if small else None], stages):
        yield {"rows": rows, "keys": keys, "warps": warps} | ({"stages": stage} if stage else {})


def decode(device: torch.device, small: bool) -> Iterator[Candidate]:
    """Yield keys of a tile and warps, then keys of an item."""
    from rolltree.kernels.tree_decode import schedule
    from rolltree.kernels.tree_decode import triton as module

    shapes = [(32, 16, 2, 1)] if small else [(16384, 128, 16, 1), (4096, 128, 16, 16), (1024, 128, 8, 16)]
    for prefix, unique, group, groups in shapes:
        dtype, heads = (torch.float32, (2, 1, 16)) if small else (torch.bfloat16, (16, 8, 128))
        inputs = tree_decode._inputs(prefix, unique, group, groups, heads, dtype, device)
        shape = f"P={prefix} R={unique} G={group} x {groups}"
        for keys, warps in itertools.product((16, 32) if small else (32, 64, 128), WARPS):
            value = lambda *_, keys=keys, warps=warps, **__: (keys, warps)  # noqa: E731
            name = text({"keys": keys, "warps": warps})
            yield Candidate(f"decode {shape}", name, module, "tile_of", value, fresh(inputs))
        for chunk in (32,) if small else (256, 512, 1024, 2048):
            yield Candidate(f"decode {shape}", text({"chunk": chunk}), schedule, "CHUNK", chunk, fresh(inputs))


def fresh(inputs: tree_decode.Inputs) -> Callable[[], Any]:
    """Return the op with its own plan, whose schedule is made with the candidate."""
    calls: dict[str, Callable[[], Any]] = {}

    def call() -> Any:
        if "forward" not in calls:
            fresh_calls: Calls = tree_decode.rolltree(inputs)
            calls.update(fresh_calls)
        return calls["forward"]()

    return call


def sampling(device: torch.device, small: bool) -> Iterator[Candidate]:
    """Yield the number of logits that a program loads at once."""
    from rolltree.kernels.sampling import triton as module

    rows, vocab = (2, 100) if small else (512, 151936)
    dtype = torch.float32 if small else torch.bfloat16
    for name, filters in {"T=1": (1.0, None, None), "top_k=50 top_p=0.95": (1.0, 50, 0.95)}.items():
        inputs = sample_tokens._inputs(rows, vocab, dtype, device, *filters)
        for block in (1024, 2048) if small else (1024, 2048, 4096, 8192):
            call = sample_tokens.rolltree(inputs)["forward"]
            yield Candidate(f"sampling N={rows} V={vocab} {name}", text({"block": block}), module, "BLOCK", block, call)


KERNELS = {"attention": attention, "decode": decode, "sampling": sampling}


def text(change: dict[str, int]) -> str:
    return " ".join(f"{key}={value}" for key, value in change.items())


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [x for part in result for x in tensors(part)]
    return [x for part in vars(result).values() if part is not None for x in tensors(part)] if result else []


def difference(computed: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative difference; infinite if a number is not finite."""
    worst = 0.0
    for a, b in zip(computed, expected, strict=True):
        a, b = a.double(), b.double()
        ratio = float((a - b).norm() / b.norm().clamp(min=1e-30))
        worst = max(worst, ratio if ratio == ratio else float("inf"))
    return worst


def tried(candidate: Candidate, device: torch.device, seconds: float) -> dict[str, Any]:
    """Return the line of ``sweep.jsonl``: median milliseconds with and without the candidate, or an error."""
    line: dict[str, Any] = {"shape": candidate.shape, "candidate": candidate.name}
    swap = patch.object(candidate.module, candidate.attribute, candidate.value)

    def swapped() -> Any:
        with swap:
            return candidate.call()

    real = device.type == "cuda" or interpreting()  # otherwise the device's own backend runs, which has no tiles
    try:
        with use_backend("triton") if real else nullcontext():
            expected = [x.clone() for x in tensors(candidate.call())]
            wrong = difference(tensors(swapped()), expected)
            if wrong > TOLERANCE:
                return line | {"reason": f"its result differs by {wrong:.2e}"}
            calls = {"default": candidate.call, "candidate": swapped}
            samples = interleaved(calls, device, seconds=seconds)
    except Exception as error:  # too much shared memory or registers, or an unsupported tile
        return line | {"reason": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    times = {name: s.quantiles()[1] for name, s in samples.items()}
    return line | {"ms": times["candidate"], "default_ms": times["default"], "difference": wrong}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if no candidate of a shape ran."""
    parser = argparse.ArgumentParser(prog="rolltree.bench.sweep", description="Times tiles of the kernels.")
    parser.add_argument("kernel", choices=tuple(KERNELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--rehearse", action="store_true", help="one tiny shape, a moment a candidate")
    args = parser.parse_args(argv)
    device, path = torch.device(args.device), args.out / "sweep.jsonl"
    context = {"device": device_name(device), "commit": commit()}
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    lines = [line for line in lines if {k: line.get(k) for k in context} == context]
    recorded = {(line["shape"], line["candidate"]) for line in lines}
    shapes = set()
    for candidate in KERNELS[args.kernel](device, args.rehearse):
        shapes.add(candidate.shape)
        if (candidate.shape, candidate.name) in recorded:
            continue
        line = tried(candidate, device, 0.0 if args.rehearse else SECONDS) | context
        append_line(line, path)
        lines.append(line)
        print(json.dumps(line), flush=True)
        if "CUDA error" in line.get("reason", ""):
            print("rolltree.bench.sweep: the device is lost to this process; run again.", file=sys.stderr)
            return 3
    missing = []
    for shape in sorted(shapes):
        ran = [line for line in lines if line["shape"] == shape and "ms" in line]
        if not ran:
            missing.append(shape)
            continue
        best = min(ran, key=lambda line: line["ms"] / line["default_ms"])
        print(f"{shape}: {best['candidate']}, {best['ms'] / best['default_ms']:.3f} of the default's time")
    if missing:
        print(f"No candidate ran: {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
