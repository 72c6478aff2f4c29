"""RMSNorm, rotary embedding and SwiGLU with gradients, against the modules of Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers.models.llama import modeling_llama as llama

from rolltree.kernels.layer_ops import rms_norm, rotate, silu_mul

from ..runner import Bench, Calls, Case, UnsupportedError

EPS = 1e-6
Op = Callable[..., "Tensor | tuple[Tensor, ...]"]


@dataclass(frozen=True)
class Inputs:
    op: str
    tensors: tuple[Tensor, ...]
    """The op's tensors; the first two require a gradient."""
    upstream: tuple[Tensor, ...]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield sizes of SmolLM2-135M on a CPU, of Llama-3-8B on a GPU."""
    if device.type == "cpu":
        rows, width, wide, heads, kv_heads, dim, dtype = 1024 if quick else 8192, 576, 1536, 9, 3, 64, torch.float32
    else:
        rows, width, wide, heads, kv_heads, dim, dtype = 8192, 4096, 14336, 32, 8, 128, torch.bfloat16
    yield from shaped(device, N=rows, H=width, I=wide, Hq=heads, Hkv=kv_heads, D=dim, dtype=dtype)


def shaped(
    device: torch.device,
    *,
    N: int,
    H: int,
    I: int,
    Hq: int,
    Hkv: int,
    D: int,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Case]:
    shapes: dict[str, tuple[int, ...]] = {"rms_norm": (N, H), "rotate": (N, Hq, Hkv, D), "silu_mul": (N, I)}
    for op, shape in shapes.items():
        name = f"{op} {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
        yield Case(name, partial(_inputs, op, shape, dtype, device))


def _inputs(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    def heads(count: int) -> Tensor:  # the strides that attention makes
        return random(1, shape[0], count * shape[3]).view(1, shape[0], count, shape[3]).transpose(1, 2)

    if op == "rotate":
        angle = random(1, shape[0], shape[3] // 2).float().repeat(1, 1, 2)
        turn = (
            angle.cos().to(dtype),
            angle.sin().to(dtype),
        )  # Liger's kernel rotates its inputs in place, which keeps their lengths
        tensors: tuple[Tensor, ...] = heads(shape[1]), heads(shape[2]), *turn
        upstream: tuple[Tensor, ...] = heads(shape[1]), heads(shape[2])
    else:
        tensors = random(*shape), random(*(shape[1:] if op == "rms_norm" else shape))
        upstream = (random(*shape),)
    return Inputs(op, tuple(t.requires_grad_(i < 2) for i, t in enumerate(tensors)), upstream)


def both_directions(x: Inputs, run: Op) -> Calls:
    def forward() -> object:
        with torch.no_grad():
            return run(*x.tensors)

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(*x.tensors), x.tensors[:2], x.upstream)

    return {"forward": forward, "forward+backward": forward_backward}


def rolltree(x: Inputs) -> Calls:
    ops: dict[str, Op] = {"rms_norm": lambda h, w: rms_norm(h, w, EPS), "rotate": rotate, "silu_mul": silu_mul}
    return both_directions(x, ops[x.op])


def _modules(x: Inputs) -> Op:
    if x.op == "rms_norm":
        norm = llama.LlamaRMSNorm(len(x.tensors[1]), EPS)
        return lambda h, w: torch.func.functional_call(norm, {"weight": w}, (h,))
    return {"rotate": llama.apply_rotary_pos_emb, "silu_mul": _gated}[x.op]


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def transformers(x: Inputs) -> Calls:
    return both_directions(x, _modules(x))


def torch_compile(x: Inputs) -> Calls:
    return both_directions(x, torch.compile(_modules(x)))


def liger(x: Inputs) -> Calls:
    if x.tensors[0].device.type == "cpu":
        raise UnsupportedError("liger-kernel's functions are Triton kernels, which need CUDA")
    from liger_kernel.transformers import functional

    ops: dict[str, Op] = {
        "rms_norm": lambda h, w: functional.liger_rms_norm(h, w, EPS, in_place=False),
        "rotate": functional.liger_rope,
        "silu_mul": functional.liger_swiglu,
    }
    return both_directions(x, ops[x.op])


def copies(x: Inputs) -> Calls:
    """The traffic by ``copy_``, whose every two passes are a read and a write: forwards read the rows that have a
    gradient and write the result; backwards read these and the result's gradient, and write theirs; of a turn they
    read the gradient alone."""
    rows = x.tensors[:1] if x.op == "rms_norm" else x.tensors[:2]
    number = sum(t.numel() for t in rows)
    result = sum(t.numel() for t in x.upstream)
    kept = 0 if x.op == "rotate" else number
    passes = {"forward": number + result, "forward+backward": number + result + kept + result + number}
    source = torch.empty(max(passes.values()) // 2, dtype=rows[0].dtype, device=rows[0].device)
    target = torch.empty_like(source)

    def copy(numbers: int) -> Callable[[], object]:
        return lambda: target[: numbers // 2].copy_(source[: numbers // 2])

    return {direction: copy(numbers) for direction, numbers in passes.items()}


BENCH = Bench(
    op="layer_ops",
    directions=("forward", "forward+backward"),
    cases=cases,
    shaped=shaped,
    providers={
        "rolltree": rolltree,
        "transformers": transformers,
        "torch.compile": torch_compile,
        "liger": liger,
    },
    ceiling=copies,
    ceiling_is="copies of as many bytes as are read and written once",
)
