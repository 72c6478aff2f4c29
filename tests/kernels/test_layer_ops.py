"""RMSNorm, rotary embedding and SwiGLU with gradients: against float64, in any layout, by any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rolltree.kernels import use_backend
from rolltree.kernels.layer_ops import api, rms_norm, rotate, silu_mul
from rolltree.kernels.layer_ops.op import rms_norm_op, rotate_op, silu_mul_op
from rolltree.kernels.libraries import load_library

from .on_device import device_of, interpret_some, needs_triton

needs_cpp = pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")
BACKENDS = [
    pytest.param("reference"),
    pytest.param("cpu", marks=needs_cpp),
    pytest.param("triton", marks=needs_triton),
]
EPS = 1e-6


def plain_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the norm of Transformers, in the inputs' dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (weight * wide.to(x.dtype),)


def plain_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    def one(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]

    return one(q), one(k)


class Op(NamedTuple):
    run: Callable[..., tuple[Tensor, ...]]
    plain: Callable[..., tuple[Tensor, ...]]
    make: Callable[..., list[Tensor]]
    differentiable: int
    """How many of the inputs, the first ones, have a gradient."""
    shapes: Sequence[tuple[int, ...]]


def of_norm(rows: int, width: int) -> list[Tensor]:
    return [torch.randn(rows, width), 1 + 0.3 * torch.randn(width)]


def of_rotate(batch: int, heads: int, kv_heads: int, tokens: int, dim: int) -> list[Tensor]:
    """Return inputs as attention makes them: heads of rows viewed as rows of heads; angles differ between halves."""
    q, k = (torch.randn(batch, tokens, h * dim).view(batch, tokens, h, dim).transpose(1, 2) for h in (heads, kv_heads))
    angle = 6 * torch.rand(batch, tokens, dim)
    return [q, k, angle.cos(), angle.sin()]


def of_silu_mul(*shape: int) -> list[Tensor]:
    return [3 * torch.randn(shape), torch.randn(shape)]


OPS = {
    "rms_norm": Op(
        lambda x, w: (rms_norm(x, w, EPS),),
        plain_norm,
        of_norm,
        2,
        [(37, 1), (37, 3), (1, 32), (130, 64), (300, 100), (37, 576), (3, 1030)],
    ),
    "rotate": Op(
        rotate, plain_rotate, of_rotate, 2, [(1, 4, 2, 37, 32), (2, 3, 1, 5, 2), (1, 1, 1, 1, 10), (2, 6, 2, 9, 256)]
    ),
    "silu_mul": Op(
        lambda g, u: (silu_mul(g, u),),
        lambda g, u: (F.silu(g) * u,),
        of_silu_mul,
        2,
        [(1,), (37, 3), (5, 7, 33), (37, 576), (64, 600)],
    ),
}
CASES = [(name, shape) for name, op in OPS.items() for shape in op.shapes]
INTERPRETED = [
    i for i, case in enumerate(CASES) if case[1] in ((37, 3), (3, 1030), (2, 3, 1, 5, 2), (2, 6, 2, 9, 256), (5, 7, 33))
]
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter cuts bf16 off


def inputs(op: Op, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Values, and gradients of the outputs; of ``dtype``, so that float64 knows what they were rounded to."""
    torch.manual_seed(sum(shape))
    given = [t.to(dtype) for t in op.make(*shape)]
    return given, [torch.randn(t.shape).to(dtype) for t in op.plain(*given)]


def both(run: Callable[..., tuple[Tensor, ...]], op: Op, given: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of what has one."""
    leaves = [t.detach().requires_grad_(i < op.differentiable) for i, t in enumerate(given)]
    out = run(*leaves)
    grads = torch.autograd.grad(out, leaves[: op.differentiable], upstream)
    return [t.detach() for t in (*out, *grads)]


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double().cpu() - exact).norm() / exact.norm()).item()


@pytest.mark.check(but=36)
@pytest.mark.parametrize(("backend", "name", "shape"), interpret_some(BACKENDS, CASES, INTERPRETED))
def test_no_further_from_float64_than_plain_pytorch(backend: Any, name: str, shape: tuple[int, ...]) -> None:
    op = OPS[name]
    for dtype in (torch.float32, HALF if backend == "triton" else torch.bfloat16)[: 1 if backend == "cpu" else 2]:
        given, upstream = inputs(op, shape, dtype)
        exact = both(op.plain, op, [t.double() for t in given], [t.double() for t in upstream])
        plain = both(op.plain, op, given, upstream)
        where = device_of(backend)
        with use_backend(backend):
            ours = both(op.run, op, [t.to(where) for t in given], [t.to(where) for t in upstream])
        rounding = torch.finfo(dtype).eps / 2
        for i, (got, want, known) in enumerate(zip(ours, plain, exact, strict=True)):
            assert got.dtype == dtype
            assert got.shape == want.shape
            assert error(got, known) <= 2 * error(want, known) + rounding, (i, dtype)


@needs_cpp
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_norms_and_turns_are_those_of_transformers_bit_by_bit(name: str, shape: tuple[int, ...]) -> None:
    op = OPS[name]
    given, _ = inputs(op, shape)
    for got, want in zip(op.run(*given), op.plain(*given), strict=True):
        if name == "silu_mul":  # another e^x
            assert torch.allclose(got, want, rtol=4 * 2**-23, atol=1e-37)
        else:
            assert torch.equal(got, want)
            assert got.movedim(1, -2).is_contiguous() or name == "rms_norm"  # as the heads lie


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "shape"), [("rms_norm", (30, 300)), ("rotate", (1, 6, 2, 9, 32)), ("silu_mul", (9, 600))]
)
def test_a_row_is_the_same_among_others_in_any_layout_and_by_any_thread(
    name: str, shape: tuple[int, ...], backend: Any
) -> None:
    op = OPS[name]
    given, upstream = inputs(op, shape)
    where = device_of(backend)
    given, upstream = [t.to(where) for t in given], [t.to(where) for t in upstream]
    rows = name != "rotate"
    with use_backend(backend):
        whole = both(op.run, op, given, upstream)
        scattered = both(op.run, op, [_scattered(t) for t in given], [_scattered(t) for t in upstream])
        threads = torch.get_num_threads()
        torch.set_num_threads(3)
        again = both(op.run, op, given, upstream)
        torch.set_num_threads(threads)
        one = slice(1, 2)
        alone = both(
            op.run,
            op,
            [t[one] if t.dim() > 1 else t for t in given] if rows else [t[..., one, :] for t in given],
            [t[one] if rows else t[..., one, :] for t in upstream],
        )
    for a, b, c in zip(whole, scattered, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    for a, b in zip(whole, alone, strict=True):
        if a.dim() > 1:  # the gradient of a weight is of all rows
            assert torch.equal(a[one] if rows else a[..., one, :], b)


def _scattered(x: Tensor) -> Tensor:
    """The same values with gaps between them."""
    wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
    wide[..., ::2] = x
    return wide[..., ::2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_weight_is_as_exact_over_many_rows(backend: Any) -> None:
    """It does not depend on the number of threads either: rows are summed in chunks, chunks in their order."""
    op, threads = OPS["rms_norm"], torch.get_num_threads()
    given, upstream = inputs(op, (5000 if backend != "triton" else 700, 48))
    exact = both(op.plain, op, [t.double() for t in given], [t.double() for t in upstream])[2]
    plain = both(op.plain, op, given, upstream)[2]
    where = device_of(backend)
    given, upstream = [t.to(where) for t in given], [t.to(where) for t in upstream]
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            with use_backend(backend):
                found.append(both(op.run, op, given, upstream)[2])
    finally:
        torch.set_num_threads(threads)
    if backend != "reference":  # PyTorch's own sum, whose order is its own affair
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
    assert error(found[0], exact) <= 2 * error(plain, exact) + 2**-24


@pytest.mark.check(but=39)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [0.0, 1e-30, -1e-30, 1e30, -1e30, 88.0, -88.5, torch.inf, -torch.inf, torch.nan])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("name", OPS)
def test_extreme_values_stay_in_their_row(name: str, value: float, backend: Any) -> None:
    """The outputs are plain PyTorch's numbers where these are finite, and nowhere else."""
    op = OPS[name]
    given, upstream = inputs(op, (1, 2, 1, 5, 8) if name == "rotate" else (5, 40))
    ordinary = both(op.plain, op, given, upstream)
    given[0][..., 2, :] = value
    plain = both(op.plain, op, given, upstream)
    where = device_of(backend)
    with use_backend(backend):
        ours = both(op.run, op, [t.to(where) for t in given], [t.to(where) for t in upstream])
    for got, want, before in zip((t.cpu() for t in ours), plain, ordinary, strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())
        finite = want.isfinite()
        size = want[finite].abs().max() if finite.any() else 0.0
        assert torch.allclose(got[finite], want[finite], rtol=1e-5, atol=float(1e-6 * size + 1e-36))
        if got.dim() > 1:
            keep = torch.arange(5) != 2
            assert torch.allclose(got[..., keep, :], before[..., keep, :], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPS)
def test_no_rows(name: str, backend: Any) -> None:
    op = OPS[name]
    given, upstream = inputs(op, (1, 2, 1, 0, 8) if name == "rotate" else (0, 8))
    where = device_of(backend)
    with use_backend(backend):
        ours = both(op.run, op, [t.to(where) for t in given], [t.to(where) for t in upstream])
    for got, want in zip(ours, both(op.plain, op, given, upstream), strict=True):
        assert torch.equal(got.cpu(), want)  # of a weight: zeros


@pytest.mark.check
@pytest.mark.parametrize(("name", "shape"), [("silu_mul", (4, 6)), ("rms_norm", (4, 6)), ("rotate", (2, 3, 1, 4, 6))])
def test_gradients_and_registration(name: str, shape: tuple[int, ...]) -> None:
    op = OPS[name]
    given, _ = inputs(op, shape, torch.float64)
    leaves = [t.requires_grad_(i < op.differentiable) for i, t in enumerate(given)]
    assert torch.autograd.gradcheck(op.run, leaves)
    single = [t.detach().float().requires_grad_(i < op.differentiable) for i, t in enumerate(given)]
    registered: Any = {"rms_norm": rms_norm_op, "rotate": rotate_op, "silu_mul": silu_mul_op}
    torch.library.opcheck(registered[name], (*single, EPS) if name == "rms_norm" else tuple(single))


@pytest.mark.parametrize("name", ["rms_norm", "silu_mul"])
def test_a_second_derivative_is_refused(name: str) -> None:
    op = OPS[name]
    given, upstream = inputs(op, op.shapes[1])
    leaves = [t.requires_grad_() for t in given]
    grads = torch.autograd.grad(op.run(*leaves), leaves, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{name} has no second derivative; call backward"):
        grads[0].sum().backward()


def test_a_turn_has_every_derivative() -> None:
    q, k, cos, sin = (t.double() for t in of_rotate(1, 2, 1, 3, 4))
    assert torch.autograd.gradgradcheck(lambda q, k: rotate(q, k, cos, sin), (q.requires_grad_(), k.requires_grad_()))


def test_what_needs_no_gradient_gets_none_and_keeps_little() -> None:
    x, weight = torch.randn(6, 40, requires_grad=True), torch.randn(40)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        out = rms_norm(x, weight, EPS)
    assert sum(t.numel() for t in kept) == x.numel() + weight.numel() + len(x)
    out.sum().backward()
    assert weight.grad is None
    gate = torch.randn(6, 40)
    assert not silu_mul(gate, gate).requires_grad
    up = gate.clone().requires_grad_()
    silu_mul(gate, up).sum().backward()
    assert torch.allclose(up.grad, F.silu(gate))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[2]])
@pytest.mark.parametrize(
    ("name", "shape"), [("rms_norm", (37, 64)), ("rotate", (1, 4, 2, 5, 32)), ("silu_mul", (37, 30))]
)
def test_half_precision_is_rounded_where_transformers_rounds(name: str, shape: tuple[int, ...], backend: Any) -> None:
    given, _ = inputs(OPS[name], shape, HALF)
    where = device_of(backend)
    with use_backend(backend):
        ours = OPS[name].run(*(t.to(where) for t in given))
    for got, want in zip(ours, OPS[name].plain(*given), strict=True):
        differ = (got.cpu() != want).float().mean()
        assert differ <= (0.01 if backend == "triton" and name != "rotate" else 0)  # sums and e^x are others


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: rms_norm(x, torch.ones(4), EPS),
    "rotate": lambda x: rotate(x[None, None], x[None, None], torch.ones(1, 3, 4), torch.ones(1, 3, 4))[0],
    "silu_mul": lambda x: silu_mul(x, x),
}
AROUND: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "a gradient": lambda f: f(torch.randn(3, 4, requires_grad=True)),
    "grad mode": lambda f: f(torch.randn(3, 4)),
    "a trace": torch.no_grad()(lambda f: make_fx(f)(torch.randn(3, 4))),
    "a transform": torch.no_grad()(lambda f: torch.func.vmap(f)(torch.randn(2, 3, 4))),
    "fakes": torch.no_grad()(lambda f: f(FakeTensorMode().from_tensor(torch.randn(3, 4)))),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("around", [*AROUND, "nothing"])
def test_the_dispatcher_is_left_out_where_nothing_asks_for_it(
    around: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions themselves run where no gradient is recorded and nothing traces, with the same bits."""
    called: list[str] = []
    for function in ("norm", "turned", "gated"):
        own = getattr(api, function)
        monkeypatch.setattr(api, function, lambda *args, own=own: called.append("function") or own(*args))
    if around != "nothing":
        if around != "fakes" or name == "silu_mul":  # the others' weights and angles are no fakes
            AROUND[around](CALLS[name])
        assert called == []
        return
    x = torch.randn(3, 4)
    expected = CALLS[name](x)
    with torch.no_grad():
        assert torch.equal(CALLS[name](x), expected)
    with torch.inference_mode():
        assert torch.equal(CALLS[name](x), expected)
    assert called == ["function"] * 2


WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (rms_norm, {"x": 3.0}, "x must be a tensor"),
    (rms_norm, {"x": torch.randn(())}, "x must be"),
    (rms_norm, {"x": torch.randn(2, 0), "weight": torch.randn(0)}, "x must be"),
    (rms_norm, {"weight": torch.randn(5)}, "weight must be"),
    (rms_norm, {"weight": torch.randn(4).bfloat16()}, "weight must be fp32"),
    (rms_norm, {"eps": -1.0}, "eps"),
    (rotate, {"q": torch.randn(1, 2, 3, 5)}, "even"),
    (rotate, {"k": torch.randn(1, 1, 4, 4)}, "k must be"),
    (rotate, {"cos": torch.randn(1, 3, 2)}, "cos must be"),
    (rotate, {"sin": torch.randn(2, 3, 4)}, "sin must be of 1"),
    (rotate, {"cos": torch.randn(1, 3, 4, requires_grad=True)}, "cos takes no gradient"),
    (silu_mul, {"up": torch.randn(2, 3)}, "up must be"),
    (silu_mul, {"up": torch.randn(2, 4).double()}, "up must be fp32"),
    (silu_mul, {"gate": torch.ones(2, 4, dtype=torch.int64)}, "gate must be"),
]


@pytest.mark.parametrize(("op", "wrong", "message"), WRONG)
def test_wrong_arguments(op: Any, wrong: dict[str, Any], message: str) -> None:
    right: Any = {
        rms_norm: {"x": torch.randn(2, 4), "weight": torch.randn(4), "eps": EPS},
        rotate: dict(zip(("q", "k", "cos", "sin"), of_rotate(1, 2, 1, 3, 4), strict=True)),
        silu_mul: {"gate": torch.randn(2, 4), "up": torch.randn(2, 4)},
    }
    with pytest.raises((ValueError, TypeError), match=message):
        op(**{**right[op], **wrong})
