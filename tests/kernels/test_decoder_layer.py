"""A decoder layer and the passes between its products: against float64, PyTorch's roundings, and wrong arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rolltree.kernels import DecodePlan, dispatch, tree_decode_attention, use_backend
from rolltree.kernels.decoder_layer import (
    Adapted,
    Decoder,
    DecoderAdapters,
    LayerWeights,
    add_rms_norm_,
    rotate_and_store_,
)
from rolltree.kernels.decoder_layer.weights import PRODUCTS
from rolltree.kernels.libraries import load_library
from rolltree.kernels.linear_logprob.head import Head, few_rows
from rolltree.kernels.low_rank import Adapters, LowRank, Runs

from .on_device import needs_interpreter

FEW_ROWS = few_rows()
BACKENDS = [
    pytest.param("reference"),
    pytest.param("cpu", marks=pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")),
]
ALL = [*BACKENDS, pytest.param("triton", marks=needs_interpreter)]
SHAPES = [(1, 8), (1, 128), (3, 100), (64, 256), (5, 7), (130, 576), (2, 1024), (2, 5000)]


def oracle_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def near(out: Tensor, expected: Tensor, scale: Tensor) -> None:
    """Within four roundings of ``scale``."""
    assert out.dtype == torch.float32
    assert ((out.double() - expected).abs() <= 4 * 2**-23 * scale + 1e-38).all()


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e15])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_norm_of_a_sum(backend: Any, shape: tuple[int, int], magnitude: float) -> None:
    torch.manual_seed(shape[1])
    residual, x = torch.randn(2, *shape) * magnitude
    weight, eps = torch.randn(shape[1]), 1e-6
    total = residual + x
    with use_backend(backend):
        out = add_rms_norm_(residual, x, weight, eps)
        again = add_rms_norm_(residual, None, weight, eps)
    assert torch.equal(residual, total)
    assert torch.equal(again, out)
    expected = oracle_norm(total, weight, eps)
    near(out, expected, expected.abs())


def heads(rows: int, heads: int, kv_heads: int, dim: int, pages: int = 7, page: int = 16) -> dict[str, Any]:
    torch.manual_seed(dim)
    angle = torch.rand(rows, dim // 2).repeat(1, 2) * 6
    return {
        "q": torch.randn(rows, heads, dim),
        "k": torch.randn(rows, kv_heads, dim),
        "v": torch.randn(rows, kv_heads, dim),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "slots": torch.randperm(pages * page)[:rows],
        "k_pages": torch.zeros(pages, page, kv_heads, dim),
        "v_pages": torch.zeros(pages, page, kv_heads, dim),
    }


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 2, 32), (33, 6, 2, 8), (20, 3, 3, 10), (16, 2, 1, 128)])
def test_heads_are_turned_and_stored(backend: Any, shape: tuple[int, int, int, int], normed: bool) -> None:
    given = heads(*shape)
    before = {name: tensor.clone() for name, tensor in given.items()}
    norms: dict[str, Any] = {}
    if normed:
        norms = {"q_weight": torch.randn(shape[3]), "k_weight": torch.randn(shape[3]), "eps": 1e-6}
    with use_backend(backend):
        rotate_and_store_(**given, **norms)
    cos, sin = (given[name].double()[:, None] for name in ("cos", "sin"))
    for name, out in (("q", given["q"]), ("k", given["k_pages"].view(-1, *shape[2:])[given["slots"]])):
        x = before[name].double()
        if normed:
            x = oracle_norm(x, norms[f"{name}_weight"], norms["eps"])
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat((-high, low), -1)
        near(out, x * cos + turned * sin, (x * cos).abs() + (turned * sin).abs())
    values = given["v_pages"].view(-1, *shape[2:])
    assert torch.equal(values[given["slots"]], given["v"])
    assert torch.equal(given["k"], before["k"])
    untouched = torch.ones(len(values), dtype=torch.bool).index_fill_(0, given["slots"], False)
    assert not values[untouched].any()
    assert not given["k_pages"].view(values.shape)[untouched].any()


@pytest.mark.parametrize("backend", ALL)
def test_a_row_is_the_same_in_any_batch(backend: Any) -> None:
    given, many = heads(40, 4, 2, 32), torch.randn(600, 256)
    weight, norms = torch.randn(256), {"q_weight": torch.randn(32), "k_weight": torch.randn(32), "eps": 1e-6}
    alone = {name: t[7:8].clone() if name in ("q", "k", "v", "cos", "sin", "slots") else t for name, t in given.items()}
    with use_backend(backend):
        assert torch.equal(
            add_rms_norm_(many.clone(), many, weight, 1e-6)[7],
            add_rms_norm_(many[7:8].clone(), many[7:8], weight, 1e-6)[0],
        )
        rotate_and_store_(**alone, **norms)
        key = alone["k_pages"].view(-1, 2, 32)[alone["slots"]].clone()
        rotate_and_store_(**given, **norms)
    assert torch.equal(given["q"][7:8], alone["q"])
    assert torch.equal(given["k_pages"].view(-1, 2, 32)[alone["slots"]], key)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_stays_in_its_row(backend: Any) -> None:
    x = torch.randn(3, 64)
    x[1, 5], x[2, 9] = torch.inf, torch.nan
    with use_backend(backend):
        out = add_rms_norm_(x, None, torch.ones(64), 1e-6)
    assert out[0].isfinite().all()
    assert out[1].isnan().any()
    assert out[2].isnan().all()


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="PyTorch sums in eight lanes with AVX"
)
@pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rounding_is_pytorchs(dtype: torch.dtype) -> None:
    """So the layers that generation runs answer the bits of those that are trained."""
    for shape in SHAPES:
        torch.manual_seed(0)
        x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
        results = []
        for backend in ("reference", "cpu"):
            residual = x.clone()
            with use_backend(backend):  # type: ignore[arg-type]
                results.append(torch.cat([add_rms_norm_(residual, x.flip(0), weight, 1e-6), residual]))
        assert shape[1] < 8 or torch.equal(*results), shape
    for dim in (8, 32, 64, 80, 128):
        turned = []
        for backend in ("reference", "cpu"):
            given = in_dtype(heads(9, 4, 2, dim), dtype)
            norms = in_dtype({"q_weight": torch.ones(dim), "k_weight": torch.arange(dim) / 7}, dtype)
            with use_backend(backend):  # type: ignore[arg-type]
                rotate_and_store_(**given, **norms, eps=1e-5)
            turned.append(torch.cat([given[name].flatten() for name in ("q", "k_pages", "v_pages")]))
        assert torch.equal(*turned), dim


WRONG = [
    ("residual", torch.randn(4, 9), "residual"),
    ("residual", torch.randn(8, 4).T, "contiguous"),
    ("residual", torch.randn(4, 8).half(), "bf16"),
    ("residual", torch.randn(4, 8).bfloat16(), "weight must be bf16"),
    ("x", torch.randn(3, 8), "x must be"),
    ("weight", torch.randn(9), "weight must be"),
    ("eps", -1.0, "eps"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_arguments_of_the_norm(name: str, value: Any, message: str) -> None:
    right = {"residual": torch.randn(4, 8), "x": torch.randn(4, 8), "weight": torch.randn(8), "eps": 1e-6}
    with pytest.raises((ValueError, TypeError), match=message):
        add_rms_norm_(**{**right, name: value})


WRONG_HEADS = [
    ("q", torch.randn(4, 4, 31), "even"),
    ("k", torch.randn(4, 2, 16), "k must be"),
    ("v", torch.randn(4, 3, 32), "v must be"),
    ("cos", torch.randn(5, 32), "cos must be"),
    ("slots", torch.tensor([0, 1, 2, 7 * 16]), "slots must be in"),
    ("slots", torch.tensor([0, 1, 2, -1]), "slots must be in"),
    ("slots", torch.tensor([0, 1, 2, 3], dtype=torch.int32), "int64"),
    ("k_pages", torch.zeros(7, 16, 2, 64)[..., :32], "contiguous"),
    ("k_weight", torch.randn(16), "k_weight must be"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_HEADS)
def test_wrong_arguments_of_the_turn(name: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        rotate_and_store_(**{**heads(4, 4, 2, 32), name: value})


def layer(
    H: int, heads: int, kv_heads: int, D: int, F: int, *, biased: bool = False, normed: bool = False, draw: int = 0
) -> dict[str, Tensor | None]:
    """Weights of about unit gain; norms that are not all ones."""
    torch.manual_seed(H + F + 1000 * draw)
    q, k = heads * D, kv_heads * D
    shapes = {"q": (q, H), "k": (k, H), "v": (k, H), "o": (H, q), "gate": (F, H), "up": (F, H), "down": (H, F)}
    some: dict[str, Tensor | None] = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    some |= {name: 1 + 0.3 * torch.randn(H) for name in ("input_norm", "mlp_norm")}
    some |= {f"{name}_norm": 1 + 0.3 * torch.randn(D) if normed else None for name in ("q", "k")}
    some |= {f"{n}_bias": torch.randn(size) if biased else None for n, size in (("q", q), ("k", k), ("v", k), ("o", H))}
    return some


def rows_of_a_prompt(N: int, H: int, kv_heads: int, D: int, page: int = 16, draw: int = 0) -> dict[str, Any]:
    """A prompt of N tokens, each of which sees those before it; no token occurs twice."""
    torch.manual_seed(N + 1000 * draw)
    pages = (N + page - 1) // page + 1
    angle = torch.rand(N, D // 2).repeat(1, 2) * 6
    arrays = [[0, pages - 1], range(1, pages), [0], [N], [0], [0], [N], range(N)]
    return {
        "embedding": torch.randn(N, H),
        "norm": 1 + 0.3 * torch.randn(H),
        "input_ids": torch.arange(N, dtype=torch.int32),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "slots": torch.arange(page, page + N, dtype=torch.int32),
        "k_pages": torch.zeros(pages, page, kv_heads, D),
        "v_pages": torch.zeros(pages, page, kv_heads, D),
        "plan": DecodePlan.from_host([np.array(a, np.int32) for a in arrays], torch.device("cpu")),
    }


def run_layer(weights: Any, window: int | None = None, **given: Any) -> Tensor:
    """A decoder of one layer."""
    pages, options = (
        [(given.pop("k_pages"), given.pop("v_pages"))],
        {name: given.pop(name) for name in ("eps", "scale")},
    )
    embedding, norm = given.pop("embedding"), given.pop("norm")
    return Decoder(embedding, [weights], norm, pages, windows=[window], **options)(**given)


def adapters_of(weights: LayerWeights, ranks: tuple[int, ...]) -> DecoderAdapters:
    """Adapters of the ranks; in their turn, each has no part in one of the products."""
    found = []
    for n, name in enumerate(PRODUCTS):
        weight, own = getattr(weights, name), list[LowRank | None]()
        for g, rank in enumerate(ranks):
            drawn = torch.Generator().manual_seed(10 * n + g)
            shapes = (rank, weight.shape[1]), (len(weight), rank)
            a, b = (torch.randn(*s, generator=drawn) / s[1] ** 0.5 for s in shapes)
            low = LowRank(a.bfloat16().to(weight.dtype), b.bfloat16().to(weight.dtype), 32 / rank)
            own.append(None if (n + g) % len(PRODUCTS) == 0 else low)
        found.append(Adapters(own, weight))
    return DecoderAdapters([found])


def in_dtype(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in given.items()}


LAYERS = [  # N, H, heads, kv_heads, D, F, biased, normed, window
    (1, 48, 4, 2, 16, 80, False, True, None),
    (7, 50, 3, 1, 10, 33, True, False, None),  # nothing is a whole vector
    (64, 64, 4, 4, 16, 96, False, False, 9),
    (FEW_ROWS + 1, 64, 4, 2, 16, 96, True, True, None),
    (20, 129, 5, 1, 6, 257, False, True, None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shape", LAYERS)
def test_a_layer_is_off_at_most_twice_as_far_as_plain_pytorch(shape: Any, magnitude: float, dtype: torch.dtype) -> None:
    N, H, heads, kv_heads, D, wide, biased, normed, window = shape
    weights, options = layer(H, heads, kv_heads, D, wide, biased=biased, normed=normed), {"eps": 1e-6, "window": window}
    outs = {}
    for name in ("oracle", "reference", "cpu"):
        given = rows_of_a_prompt(N, H, kv_heads, D)
        given["embedding"] *= magnitude
        given, own = in_dtype(given, dtype), in_dtype(weights, dtype)
        if name == "oracle":
            given, own = in_dtype(given, torch.float64), in_dtype(own, torch.float64)
        elif name == "cpu" and not load_library("cpu"):
            pytest.skip("the C++ kernels are not built")
        with use_backend("reference" if name == "oracle" else name):  # type: ignore[arg-type]
            out = run_layer(weights=LayerWeights(**own), **given, scale=D**-0.5, **options)  # type: ignore[arg-type]
        outs[name] = torch.cat([part.double().flatten() for part in (out, given["k_pages"], given["v_pages"])])
    scale = outs["oracle"].abs().max()
    plain, ours = ((outs[name] - outs["oracle"]).abs().max() / scale for name in ("reference", "cpu"))
    assert ours <= 2 * plain + torch.finfo(dtype).eps


@pytest.mark.slow(but=5)
@pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")
@pytest.mark.check(but=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", LAYERS)
def test_a_layer_with_adapters_is_off_at_most_twice_as_far_as_plain_pytorch(shape: Any, dtype: torch.dtype) -> None:
    """By the root mean square over several layers and prompts: which of two largest errors is larger is chance."""
    N, H, heads, kv_heads, D, wide, biased, normed, window = shape
    number = np.sort(np.random.default_rng(N).integers(-1, 3, N))
    off = dict.fromkeys(("reference", "cpu", "exchanged"), 0.0)
    draws = 6
    for draw in range(draws):
        weights, outs = layer(H, heads, kv_heads, D, wide, biased=biased, normed=normed, draw=draw), {}
        for name in ("oracle", *off):
            given, own = in_dtype(rows_of_a_prompt(N, H, kv_heads, D, draw=draw), dtype), in_dtype(weights, dtype)
            if name == "oracle":
                given, own = in_dtype(given, torch.float64), in_dtype(own, torch.float64)
            runs = Runs.of((number + 2) % 3 if name == "exchanged" else number)
            exact = LayerWeights(**own)
            with use_backend("cpu" if name == "cpu" else "reference"):
                adapted = Adapted(adapters_of(exact, (8, 3, 17)), runs)
                out = run_layer(exact, **given, scale=D**-0.5, eps=1e-6, window=window, adapted=adapted)
            outs[name] = [part.double() for part in (out, given["k_pages"], given["v_pages"])]
        for name in off:
            for part, true in zip(outs[name], outs["oracle"], strict=True):
                off[name] += float((part - true).square().sum() / true.square().sum()) / (3 * draws)
    off = {name: square**0.5 for name, square in off.items()}
    assert off["cpu"] <= 2 * off["reference"] + torch.finfo(dtype).eps
    assert off["exchanged"] > 0.05  # the bound tells adapters apart


@pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_an_adapter_have_the_bits_of_a_step_without_any(dtype: torch.dtype) -> None:
    weights = LayerWeights(**in_dtype(layer(100, 4, 2, 16, 90, normed=True), dtype))
    plain, given = (in_dtype(rows_of_a_prompt(30, 100, 2, 16), dtype) for _ in range(2))
    options = {"eps": 1e-6, "scale": 0.25}
    runs = Runs.of(np.array([-1] * 20 + [0] * 10))  # the rows after are not seen by those before
    out = run_layer(weights, **given, **options, adapted=Adapted(adapters_of(weights, (8,)), runs))
    expected = run_layer(weights, **plain, **options)
    assert torch.equal(out[:20], expected[:20])
    assert not torch.equal(out[20:], expected[20:])


@pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")
@pytest.mark.parametrize(("dtype", "N"), [(torch.float32, FEW_ROWS), (torch.bfloat16, 500)])
def test_a_row_of_a_layer_is_the_same_in_any_batch(dtype: torch.dtype, N: int) -> None:
    weights = LayerWeights(**in_dtype(layer(100, 4, 2, 16, 90, normed=True), dtype))
    whole, alone = (in_dtype(rows_of_a_prompt(N, 100, 2, 16), dtype) for _ in range(2))
    options = {"eps": 1e-6, "scale": 0.25}
    expected = run_layer(weights=weights, **whole, **options)
    for begin, end in ((0, 1), (1, 6), (6, 13), (13, N)):
        pages = len(whole["k_pages"])
        arrays = [[0, pages - 1], range(1, pages), [0], [end], [0], [0], [end - begin], range(begin, end)]
        plan = DecodePlan.from_host([np.array(a, np.int32) for a in arrays], torch.device("cpu"))
        part = {name: alone[name][begin:end].clone() for name in ("input_ids", "cos", "sin", "slots")}
        rest = {name: alone[name] for name in ("embedding", "norm", "k_pages", "v_pages")}
        assert torch.equal(run_layer(weights=weights, **part, **rest, plan=plan, **options), expected[begin:end]), begin
    assert torch.equal(alone["k_pages"], whole["k_pages"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_take_their_turns_from_a_table(backend: Any) -> None:
    weights, options = LayerWeights(**layer(48, 4, 2, 16, 80)), {"eps": 1e-6, "scale": 0.25}  # type: ignore[arg-type]
    own, shared = (rows_of_a_prompt(9, 48, 2, 16) for _ in range(2))
    turns = torch.randperm(9).int()
    for name in ("cos", "sin"):
        shared[name] = torch.cat([shared[name][turns.argsort()], torch.randn(3, 16)])
    with use_backend(backend):
        expected = run_layer(weights, **own, **options)
        assert torch.equal(run_layer(weights, **shared, **options, turns=turns), expected)


@pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")
@pytest.mark.parametrize("depth", [1, 15, 16, 100, 513])
@pytest.mark.parametrize("width", [1, 3, 50, 5000])
def test_products_of_few_rows(width: int, depth: int) -> None:
    """Logits: a part of a wider tensor, one row as many, what is not finite in its own row and column."""
    torch.manual_seed(depth)
    x, weight = torch.randn(FEW_ROWS, depth), torch.randn(width, depth)
    head, most = Head(weight, None, None, torch.float32), torch.full((FEW_ROWS, width + 5), 7.0)
    out = head.logits(x, most[:, :width])
    exact, size = x.double() @ weight.double().T, x.abs().double() @ weight.abs().double().T
    assert ((out - exact).abs() <= depth * 2**-24 * size).all()
    assert (most[:, width:] == 7).all()
    for rows in (*range(1, 34), FEW_ROWS - 1):  # every mixture of rows in lanes and rows beside them, of up to 16 lanes
        assert torch.equal(head.logits(x[-rows:], torch.empty(rows, width)), out[-rows:]), rows
    x[3, 0], weight[-1, -1] = torch.nan, torch.inf
    with_nan = head.logits(x, torch.empty(FEW_ROWS, width))
    assert with_nan[3].isnan().all()
    keep = torch.arange(FEW_ROWS) != 3
    assert not with_nan[keep, -1].isfinite().any()
    assert torch.equal(with_nan[keep, :-1], out[keep, :-1])


WRONG_LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"embedding": torch.randn(5, 47), "norm": torch.randn(47)}, "rows of 47"),
    ({"embedding": torch.randn(48, 5).T}, "contiguous"),
    ({"norm": torch.randn(47)}, "norm must be"),
    ({"input_ids": torch.arange(1, 6).int()}, "input_ids must be in 0..4, got 1..5"),
    ({"input_ids": torch.arange(5)}, "input_ids must be int32"),
    ({"cos": torch.randn(6, 16)}, "cos must be"),
    ({"turns": torch.tensor([0, 1, 2, 3, 5]).int()}, "turns must be in 0..4"),
    ({"weights": 3}, "LayerWeights"),
    ({"k_pages": torch.zeros(2, 16, 3, 16), "v_pages": torch.zeros(2, 16, 3, 16)}, "keys of 3 x 16"),
    ({"slots": torch.arange(30, 35).int()}, "slots must be in 0..31"),
    ({"slots": torch.arange(5)}, "slots must be int32"),
    ({"plan": rows_of_a_prompt(4, 48, 2, 16)["plan"]}, "4 query positions"),
    ({"plan": rows_of_a_prompt(5, 48, 2, 16, page=32)["plan"], "k_pages": torch.zeros(1, 4, 2, 16)}, "pages must be"),
    ({"eps": -1.0}, "eps"),
    ({"scale": float("nan")}, "scale"),
    ({"window": 0}, "window"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("N", [9, FEW_ROWS + 1])
def test_several_layers_are_one_after_the_other(backend: Any, N: int) -> None:
    """The rows lie between two decoders, and the norm after the first one hides them: here it is the last of both."""
    several = [LayerWeights(**layer(48, 4, 2, 16, 80 + i)) for i in range(3)]  # type: ignore[arg-type]
    given, windows = rows_of_a_prompt(N, 48, 2, 16), [None, 4, None]
    pages = [(torch.zeros_like(given["k_pages"]), torch.zeros_like(given["v_pages"])) for _ in several]
    own = {name: given[name] for name in ("input_ids", "cos", "sin", "slots", "plan")}
    options: dict[str, Any] = {"eps": 1e-6, "scale": 0.25}
    near_enough = {"rtol": 2e-6, "atol": 2e-6}  # the gated unit has an exponential of its own
    with use_backend(backend):
        found = Decoder(given["embedding"], several, given["norm"], pages, windows=windows, **options)(**own)
        residual = F.embedding(given["input_ids"], given["embedding"])
        for w, window, (k_pages, v_pages) in zip(several, windows, pages, strict=True):
            x, kept = add_rms_norm_(residual, None, w.input_norm, 1e-6), (k_pages.clone(), v_pages.clone())
            q, k, v = (product(x, weight).view(N, -1, 16) for weight in (w.q, w.k, w.v))
            rotate_and_store_(q, k, v, given["cos"], given["sin"], given["slots"].long(), k_pages, v_pages)
            torch.testing.assert_close((k_pages, v_pages), kept, **near_enough)
            seen, _ = tree_decode_attention(q, k_pages, v_pages, given["plan"], scale=0.25, window=window)
            x = add_rms_norm_(residual, product(seen.flatten(1), w.o), w.mlp_norm, 1e-6)
            residual += product(F.silu(product(x, w.gate)) * product(x, w.up), w.down)
        expected = add_rms_norm_(residual, None, given["norm"], 1e-6)
    torch.testing.assert_close(found, expected, **near_enough)
    with pytest.raises(ValueError, match="as many layers as pages and windows, not 3, 3 and 1"):
        Decoder(given["embedding"], several, given["norm"], pages, windows=[None], **options)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product as a decoder on the backend in use makes it."""
    if dispatch.current_override() == "reference":
        return F.linear(x, weight)
    return Head(weight, None, None, torch.float32).logits(x, torch.empty(len(x), len(weight)))


@pytest.mark.parametrize(("wrong", "message"), WRONG_LAYERS)
def test_wrong_arguments_of_a_layer(wrong: dict[str, Any], message: str) -> None:
    weights = LayerWeights(**layer(48, 4, 2, 16, 80))  # type: ignore[arg-type]
    right = {**rows_of_a_prompt(5, 48, 2, 16), "weights": weights, "eps": 1e-6, "scale": 0.25}
    with pytest.raises((ValueError, TypeError), match=message):
        run_layer(**{**right, **wrong})


@pytest.mark.parametrize(
    ("name", "value"),
    [("o", torch.randn(48, 63)), ("up", torch.randn(48, 80).T), ("v", None), ("k_bias", torch.randn(3)), ("down", 4)],
)
def test_wrong_weights(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        LayerWeights(**{**layer(48, 4, 2, 16, 80), name: value})  # type: ignore[arg-type]
