"""The head of linear_logprob: frozen, with an adapter, and with rows that have no gradient."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rolltree.kernels import HeadLora, linear_logprob, use_backend
from rolltree.kernels.dispatch import Backend
from rolltree.kernels.linear_logprob import chunked, frozen, op
from rolltree.kernels.linear_logprob.head import Head, HeadGradient
from rolltree.kernels.linear_policy_loss import op as policy_op

from .test_linear_logprob import BACKENDS, DEVICE, ROW_KERNELS, Inputs, errors, inputs, plain


def gradients(given: Inputs, trained: tuple[str, ...], upstream: dict[str, Tensor], f: Any = None) -> dict[str, Tensor]:
    """Outputs and gradients of sum(upstream * output), where `trained` of the inputs take one."""
    given = {
        k: v.detach().clone().requires_grad_(k in trained) if isinstance(v, Tensor) else v for k, v in given.items()
    }
    for name in ("a", "b"):
        if name in given:
            given[name].requires_grad_(name in trained)
    call = dict(given)
    if "a" in given:
        call["lora"] = HeadLora(call.pop("a"), call.pop("b"), call.pop("scale"))
    want = tuple(n for n in ("entropy", "sum_p2") if n in upstream)
    out = plain_head(**call) if f is plain_head else linear_logprob(**call, want=want)
    loss = sum((getattr(out, n).double() * u).sum() for n, u in upstream.items())
    loss.backward()  # type: ignore[union-attr]
    result = {n: getattr(out, n).detach() for n in upstream}
    return result | {f"d_{n}": given[n].grad for n in trained}


def plain_head(lora: HeadLora | None = None, **given: Any) -> Any:
    weight = given.pop("weight")
    return plain(weight=weight if lora is None else weight + lora.scale * lora.b @ lora.a, **given)


def upstream_of(given: Inputs, names: tuple[str, ...], zero_rows: float = 0.0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(11)
    result = {}
    for name in names:
        n = len(given["target"]) if name == "logprob" else len(given["hidden"])
        u = torch.randn(n, generator=g, dtype=torch.float64)
        u[torch.rand(n, generator=g) < zero_rows] = 0
        result[name] = u.to(DEVICE)
    return result


def exact(given: Inputs, trained: tuple[str, ...], upstream: dict[str, Tensor]) -> dict[str, Tensor]:
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    return gradients(wide, trained, upstream, plain_head)


def compare(backend: Backend, given: Inputs, trained: tuple[str, ...], upstream: dict[str, Tensor]) -> None:
    truth = exact(given, trained, upstream)
    usual = errors(gradients(given, trained, upstream, plain_head), truth)
    with use_backend(backend):
        got = errors(gradients(given, trained, upstream), truth)
    half = given["hidden"].dtype == torch.bfloat16
    for name, error in got.items():
        rounding = 4e-3 if half and name.startswith("d_") else 1e-6
        assert error <= max(2 * usual[name], rounding), f"{name}: {error:.2e}, plain PyTorch {usual[name]:.2e}"


HEADS = {
    "plain": inputs(19, 16, 97),
    "pairs": inputs(11, 16, 65, M=40),  # rows with none, one and many pairs
    "softcap": inputs(13, 16, 65, M=40, softcap=3.0, temperature="rows", bias=True),
    "narrow": inputs(9, 64, 33, M=20),
    "bf16": inputs(19, 16, 97, dtype=torch.bfloat16),
}


@pytest.mark.check(but=39)
@pytest.mark.parametrize(
    "outputs", [("logprob",), ("logprob", "logsumexp"), ("logprob", "logsumexp", "entropy", "sum_p2")]
)
@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_head(backend: Backend, case: str, outputs: tuple[str, ...]) -> None:
    compare(backend, HEADS[case], ("hidden",), upstream_of(HEADS[case], outputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_of_a_frozen_head_never_forms_logits(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("the backward recomputed the logits")

    monkeypatch.setattr(op.chunked, "backward", forbidden)
    monkeypatch.setattr(op, "reference", SimpleNamespace(forward=op.reference.forward, backward=forbidden))
    given = inputs(13, 16, 65, M=40, softcap=3.0)
    compare(backend, given, ("hidden",), upstream_of(given, ("logprob", "logsumexp")))


def test_a_sure_policy_keeps_its_small_gradient() -> None:
    """p of the target is close to 1: weight[target] - E_p weight all but cancels, also rounded to bf16."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, generator=g)
    hidden = (weight[:8] * 0.6).bfloat16().to(DEVICE)
    weight = weight.bfloat16().to(DEVICE)
    given = {"hidden": hidden, "weight": weight, "target": torch.arange(8, device=DEVICE)}
    upstream = {"logprob": torch.ones(8, dtype=torch.float64, device=DEVICE)}
    truth = exact(given, ("hidden",), upstream)
    assert truth["logprob"].mean() > -0.05
    got = gradients(given, ("hidden",), upstream)["d_hidden"].double()
    error = (got - truth["d_hidden"]).norm(dim=1)
    assert (error <= 6e-3 * truth["d_hidden"].norm(dim=1) + 2e-6).all()  # 1 - p in fp32; 1e-2 if E_p weight were kept


def with_adapter(dtype: torch.dtype = torch.float32, **options: Any) -> Inputs:
    given = inputs(13, 16, 65, M=40, dtype=dtype, **options)
    g = torch.Generator().manual_seed(2)
    a, b = torch.randn(3, 16, generator=g) / 4, torch.randn(65, 3, generator=g)
    return given | {"a": a.to(DEVICE, dtype), "b": b.to(DEVICE, dtype), "scale": 0.7}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "trained", [("hidden", "a", "b"), ("a", "b"), ("hidden",), ("hidden", "weight", "bias", "a", "b")]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_adapter(backend: Backend, trained: tuple[str, ...], dtype: torch.dtype) -> None:
    given = with_adapter(dtype, bias=True, softcap=4.0)
    compare(backend, given, trained, upstream_of(given, ("logprob", "logsumexp", "entropy")))


@pytest.mark.slow
def test_adapter_and_frozen_head_by_finite_differences() -> None:
    given = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in with_adapter().items()}
    leaves = [given[n].requires_grad_() for n in ("hidden", "a", "b")]

    def f(hidden: Tensor, a: Tensor, b: Tensor) -> Tensor:
        lora = HeadLora(a, b, 0.7)
        return linear_logprob(hidden, given["weight"], given["target"], row=given["row"], lora=lora).logprob

    assert torch.autograd.gradcheck(f, leaves)
    frozen_adapter = [t.detach() for t in leaves[1:]]
    assert torch.autograd.gradcheck(lambda hidden: f(hidden, *frozen_adapter), leaves[:1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_gradient_are_left_out(backend: Backend) -> None:
    given = inputs(40, 16, 65, M=70, bias=True)
    for outputs in (("logprob",), ("logprob", "entropy", "sum_p2", "logsumexp")):
        compare(backend, given, ("hidden", "weight", "bias"), upstream_of(given, outputs, zero_rows=0.8))


@pytest.mark.parametrize("backend", ROW_KERNELS)
def test_only_rows_with_a_gradient_are_multiplied(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("a GPU would have to be waited for")
    given = inputs(40, 16, 65)
    upstream = {"logprob": torch.zeros(40, dtype=torch.float64)}
    upstream["logprob"][[3, 17, 18]] = 1.0
    multiplied = []
    original = chunked.Head.logits
    monkeypatch.setattr(
        chunked.Head, "logits", lambda self, h, out: multiplied.append(len(h)) or original(self, h, out)
    )
    with use_backend(backend):
        gradients(given, ("hidden", "weight"), upstream)
    assert multiplied == [40, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_runs_on_the_backend_of_the_forward(backend: Backend) -> None:
    """The backward runs outside the `with` block and in another thread, as on a GPU."""
    given = inputs(9, 16, 65)
    leaves = [given[n].requires_grad_() for n in ("hidden", "weight")]
    with use_backend(backend):
        loss = linear_logprob(*leaves, given["target"]).logprob.sum()
        expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    other: Backend = "reference" if backend != "reference" else "triton" if DEVICE.type == "cuda" else "cpu"
    with use_backend(other), ThreadPoolExecutor(1) as pool:
        got = pool.submit(torch.autograd.grad, loss, leaves).result()
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


def test_targets_of_a_frozen_head_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = HEADS["pairs"]
    upstream = upstream_of(given, ("logprob", "logsumexp"))
    whole = gradients(given, ("hidden",), upstream)["d_hidden"]
    monkeypatch.setattr(frozen, "TARGETS_AT_ONCE", 7)
    torch.testing.assert_close(gradients(given, ("hidden",), upstream)["d_hidden"], whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(2, 9), torch.zeros(17, 2), r"lora.a must be \[r, 8\] to fit hidden"),
        (torch.zeros(2, 8), torch.zeros(17, 3), r"lora.b must be \[17, 2\]"),
        (torch.zeros(2, 8).double(), torch.zeros(17, 2).double(), "lora.a is torch.float64 and hidden"),
    ],
)
def test_mistakes_are_named(a: Tensor, b: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_logprob(
            torch.zeros(4, 8), torch.zeros(17, 8), torch.zeros(4, dtype=torch.long), lora=HeadLora(a, b, 1.0)
        )


class Kernels(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_the_first_product_of_a_gradient_is_its_sum() -> None:
    """Nothing is filled with zeros, unless there is no chunk."""
    given = inputs(12, 16, 65)
    head = Head(given["weight"], None, None, torch.float32)
    d_logits = torch.randn(12, 65, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    need = HeadGradient(head, True, True, False)
    with Kernels() as ran:
        for some in (slice(0, 5), slice(5, 12)):
            need.add(d_logits[some], given["hidden"][some])
    assert not {"zeros", "new_zeros", "zero_", "fill_", "full"} & set(ran.names)
    assert (ran.names.count("mm"), ran.names.count("addmm_")) == (1, 1)
    weight, bias, a, b = need.results()
    torch.testing.assert_close(weight, d_logits.T @ given["hidden"])
    torch.testing.assert_close(bias, d_logits.sum(0))
    assert len(a) == len(b) == 0
    weight, bias, _, _ = HeadGradient(head, True, True, False).results()
    assert weight.shape == (65, 16)
    assert bias.shape == (65,)
    assert not weight.any()
    assert not bias.any()


def test_a_gradient_is_scaled_and_cast_by_one_kernel() -> None:
    gradient, upstream = torch.randn(65, 16, device=DEVICE), torch.tensor(0.3, device=DEVICE)
    expected = (gradient * upstream).bfloat16()
    ctx = SimpleNamespace(
        gradients=[None, gradient], needs_input_grad=[False, True], dtype=torch.bfloat16, weight_grad=None, constants=[]
    )
    with torch.no_grad(), Kernels() as ran:  # as in a backward
        _, found = policy_op._autograd_backward(ctx, upstream)
    assert [name for name in ran.names if not name.startswith(("empty", "view"))] == ["mul"]
    assert found.equal(expected)


@pytest.mark.parametrize("V", [1023, 1024, 1025, 2500])
@pytest.mark.parametrize("C", [3, 70])
def test_logits_by_parts_of_the_vocabulary_are_the_whole_product(C: int, V: int) -> None:
    """More rows than our own product takes, and fewer; parts that end anywhere; an output wider than its rows."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 24, generator=g).to(DEVICE) for n in (C, V))
    tile = torch.full((C, V + 8), torch.nan, device=DEVICE)
    found = Head(weight, None, None, torch.float32).logits(hidden, tile[:, :V])
    exact = hidden.double() @ weight.double().T
    assert (found.double() - exact).abs().max() <= 2 * (hidden @ weight.T - exact).abs().max() + 1e-6
    assert found.data_ptr() == tile.data_ptr()
    assert tile[:, V:].isnan().all()
