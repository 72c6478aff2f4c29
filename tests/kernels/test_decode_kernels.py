"""A layer in ten kernels: the bits of the kernels that it replaces, and their number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rolltree.kernels import DecodePlan, tree_decode_attention, use_backend
from rolltree.kernels.decoder_layer import Decoder, LayerWeights
from rolltree.kernels.layer_ops import rms_norm, rotate, silu_mul

from ..support.launches import launches
from .on_device import needs_interpreter

pytestmark = needs_interpreter
EPS = 1e-6
SHAPES = {  # width, gated, query and key heads of how many numbers, biases, norms of heads
    "qwen3": (48, 80, 4, 2, 16, False, True),
    "qwen2": (64, 96, 6, 1, 8, True, False),
    "llama": (96, 40, 3, 3, 32, False, False),
    "heads of 80 and rows that are not aligned": (50, 36, 20, 4, 80, True, True),
}


def step(rows: int, pages: int = 9, page: int = 4) -> tuple[DecodePlan, Tensor, Tensor]:
    """Return the plan of rows on a prompt of 12 keys, with 1 to 3 keys of their own, their turns and slots."""
    lengths = [1 + row % 3 for row in range(rows)]
    ids = torch.arange(3 + rows, dtype=torch.int32)
    assert 3 + rows <= pages
    indptr = torch.tensor([0, 3, *range(4, 4 + rows)], dtype=torch.int32)
    host = [
        indptr, ids, torch.zeros(1 + rows), torch.tensor([12, *lengths]), torch.tensor([0, *[12] * rows]),
        torch.tensor([0, *range(rows)]), torch.tensor([rows, *range(1, 1 + rows)]), torch.tensor(lengths) + 11,
    ]  # fmt: skip
    plan = DecodePlan.from_host([t.int().numpy() for t in host], torch.device("cpu"), [1, 2, 3, 5, 6])
    slots = torch.tensor([(3 + row) * page + length - 1 for row, length in enumerate(lengths)], dtype=torch.int32)
    return plan, (torch.tensor(lengths) + 11).int(), slots


def layers(shape: Any, dtype: torch.dtype, count: int = 2) -> list[LayerWeights]:
    H, wide, heads, kv_heads, D, biased, normed = shape

    def some(*size: int) -> Tensor:
        return (torch.randn(*size) * 0.3).to(dtype)

    return [
        LayerWeights(
            input_norm=1 + some(H), q=some(heads * D, H), q_bias=some(heads * D) if biased else None,
            k=some(kv_heads * D, H), k_bias=some(kv_heads * D) if biased else None,
            v=some(kv_heads * D, H), v_bias=some(kv_heads * D) if biased else None,
            q_norm=1 + some(D) if normed else None, k_norm=1 + some(D) if normed else None,
            o=some(H, heads * D), o_bias=None, mlp_norm=1 + some(H),
            gate=some(wide, H), up=some(wide, H), down=some(H, wide),
        )
        for _ in range(count)
    ]  # fmt: skip


def made(shape: Any, dtype: torch.dtype, pages: int = 9, page: int = 4) -> tuple[Decoder, Tensor, Tensor]:
    torch.manual_seed(0)
    H, _, _, kv_heads, D, *_ = shape
    of_layers = layers(shape, dtype)
    kv = [tuple((torch.randn(2, pages, page, kv_heads, D) * 0.5).to(dtype)) for _ in of_layers]
    decoder = Decoder(
        torch.randn(30, H).to(dtype), of_layers, 1 + 0.1 * torch.randn(H).to(dtype), kv,
        eps=EPS, scale=D**-0.5, windows=[None, 5],
    )  # fmt: skip
    angle = torch.rand(20, D // 2).repeat(1, 2) * 6
    return decoder, angle.cos().to(dtype), angle.sin().to(dtype)


def added(x: Tensor, y: Tensor) -> Tensor:
    """The sum as Triton's interpreter rounds it: bf16 is cut off."""
    if x.dtype == torch.float32:
        return x + y
    return ((x.float() + y.float()).view(torch.int32) & -65536).view(torch.float32).to(x.dtype)


def one_by_one(model: Decoder, ids: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, plan: DecodePlan) -> Tensor:
    """The same with kernels of one operation each, as modules of Transformers call them."""
    from rolltree.kernels.linear.triton import linear

    residual, D = F.embedding(ids, model.embedding), cos.shape[1]
    for w, (k_pages, v_pages), window in zip(model.layers, model.pages, model.windows, strict=True):
        x = rms_norm(residual, w.input_norm, EPS)
        q, k, v = (linear(x, weight, bias) for weight, bias in ((w.q, w.q_bias), (w.k, w.k_bias), (w.v, w.v_bias)))
        q, k, v = (part.view(len(ids), -1, D) for part in (q, k, v))
        if w.q_norm is not None and w.k_norm is not None:
            q, k = rms_norm(q, w.q_norm, EPS), rms_norm(k, w.k_norm, EPS)
        turned = rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
        q, k = (part[0].transpose(0, 1).contiguous() for part in turned)
        k_pages.view(-1, *k.shape[1:]).index_copy_(0, slots.long(), k)
        v_pages.view(-1, *v.shape[1:]).index_copy_(0, slots.long(), v)
        seen, _ = tree_decode_attention(q, k_pages, v_pages, plan, scale=model.scale, window=window)
        residual = added(residual, F.linear(seen.flatten(1), w.o))
        x = rms_norm(residual, w.mlp_norm, EPS)
        gate, up = linear(x, w.gate, None), linear(x, w.up, None)
        residual = added(residual, F.linear(silu_mul(gate, up), w.down))
    return rms_norm(residual, model.norm, EPS)


@pytest.mark.slow(but=1)
@pytest.mark.check(but=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_decoder_has_the_bits_of_the_kernels_that_it_replaces(rows: int, shape: str, dtype: torch.dtype) -> None:
    plan, turns, slots = step(rows)
    ids = torch.arange(rows, dtype=torch.int32)
    with use_backend("triton"), torch.no_grad():
        decoder, cos, sin = made(SHAPES[shape], dtype)
        expected = one_by_one(decoder, ids, cos[turns], sin[turns], slots, plan)
        pages = [kv.clone() for kv in decoder.every_page]
        decoder, cos, sin = made(SHAPES[shape], dtype)
        found = decoder(ids, cos, sin, slots, plan, turns=turns)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, decoder.every_page, pages))
    assert found.isfinite().all()


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_is_ten_kernels(shape: str) -> None:
    plan, turns, slots = step(5)
    ids = torch.arange(5, dtype=torch.int32)
    decoder, cos, sin = made(SHAPES[shape], torch.float32)
    with use_backend("triton"), torch.no_grad():
        names = launches(lambda: decoder.run(ids, cos, sin, slots, plan, turns))
        replaced = launches(lambda: one_by_one(decoder, ids, cos[turns], sin[turns], slots, plan))
    assert names == [
        "aten::embedding",
        *2 * [
            "add_norm_kernel", "several_kernel", "store_kernel", "partial_kernel", "merge_kernel", "aten::mm",
            "add_norm_kernel", "several_kernel", "gate_kernel", "aten::mm",
        ],
        "add_norm_kernel",
    ]  # fmt: skip
    assert len(replaced) > 2 * 16


def cut_off(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As Triton's interpreter rounds float32 to bf16."""
    return x if dtype == torch.float32 else (x.view(torch.int32) & -65536).view(torch.float32).to(dtype)


@pytest.mark.check(but=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_norm_adds_the_parts_of_a_product(rows: int, dtype: torch.dtype) -> None:
    """In their order, and rounds their sum before it is added to the residual."""
    from rolltree.kernels.decoder_layer.triton import add_rms_norm

    torch.manual_seed(0)
    parts = torch.randn(3, rows, 70) * torch.tensor([1.0, 1e4, 1e4])[:, None, None]
    parts[2] = -parts[1] * (1 + 2**-12)  # what is left depends on the order
    residual, weight = torch.randn(rows, 70).to(dtype), (1 + 0.1 * torch.randn(70)).to(dtype)
    found = []
    for product in (parts, cut_off((parts[0] + parts[1]) + parts[2], dtype), parts.flip(0)):
        total = residual.clone()
        found.append((add_rms_norm(total, product, weight, EPS), total))
    (normed, total), (expected, whole), (_, another) = found
    assert torch.equal(total, whole)
    assert torch.equal(normed, expected)
    assert dtype == torch.bfloat16 or not torch.equal(another, whole)
    assert not torch.equal(total, residual)
