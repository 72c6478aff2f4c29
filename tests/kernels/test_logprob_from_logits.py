"""logprob_from_logits on every backend against plain PyTorch in fp64, its in-place backward, and what it refuses."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rolltree.kernels import dispatch, linear_logprob, logprob_from_logits, use_backend
from rolltree.kernels.dispatch import Backend
from rolltree.kernels.linear_logprob import LogprobOutput, op
from rolltree.kernels.linear_logprob import logits as module

from ..support.thinned import every, thinned
from .test_linear_logprob import BACKENDS, DEVICE, HAS_GPU, ROW_KERNELS

HALF = (torch.bfloat16, torch.float16)
CUDA = ["cuda"] if dispatch.usable("cuda", DEVICE) else []  # beside the others in tests with a dtype


@pytest.fixture(autouse=True)
def half_precision_alone(request: pytest.FixtureRequest) -> None:
    case = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if case.get("backend") == "cuda" and case.get("dtype") == torch.float32:
        pytest.skip("CUDA C++ is for half precision")


def made(N: int, V: int, M: int | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {"logits": (torch.randn(N, V, generator=g) * 4).to(DEVICE, dtype)}
    given["target"] = torch.randint(0, V, (N if M is None else M,), generator=g).to(DEVICE)
    if M is not None:
        given["row"] = torch.randint(0, N, (M,), generator=g).to(DEVICE)
    if options.get("temperature") == "rows":
        options["temperature"] = (0.5 + torch.rand(N, generator=g)).to(DEVICE)
    return given | options


def plain(
    logits: Tensor,
    target: Tensor,
    row: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
) -> LogprobOutput:
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    logp = logits.log_softmax(-1)
    row = torch.arange(len(target), device=target.device) if row is None else row
    p = logp.exp()
    return LogprobOutput(logp[row, target], logits.logsumexp(-1), -(p * logp).sum(-1), (p * p).sum(-1), None)


def run(f: Any, given: dict[str, Any], dtype: torch.dtype | None = None, **more: Any) -> dict[str, Tensor]:
    """Outputs, and the gradient of a weighted sum of them all."""
    leaf = given["logits"].to(dtype or given["logits"].dtype).clone().requires_grad_()
    out = f(**(given | {"logits": leaf * 1}), **more)
    g = torch.Generator().manual_seed(7)
    loss = torch.zeros((), device=DEVICE, dtype=torch.float64)
    values = {n: getattr(out, n) for n in ("logprob", "logsumexp", "entropy", "sum_p2")}
    for value in values.values():
        loss = loss + (value.double() * torch.randn(len(value), generator=g, dtype=torch.float64).to(DEVICE)).sum()
    loss.backward()
    assert leaf.grad is not None
    return {n: v.detach() for n, v in values.items()} | {"d_logits": leaf.grad}


def fused(**given: Any) -> LogprobOutput:
    return logprob_from_logits(**given, want=("entropy", "sum_p2"))


CASES = {
    "plain": made(37, 97),
    "vocabulary of one": made(5, 1),
    "one row": made(1, 33),
    "temperature": made(19, 65, temperature=0.7),
    "everything": made(23, 131, M=60, temperature="rows", softcap=5.0),
    "several blocks": made(3, 5003, M=40, temperature="rows"),
    "several blocks, capped": made(3, 5003, M=40, temperature="rows", softcap=3.0),
}


@pytest.mark.parametrize(
    ("case", "dtype", "inplace"), thinned(product(CASES, [torch.float32, *HALF], [False, True]), every(5))
)
@pytest.mark.parametrize("backend", [*BACKENDS, *CUDA])
def test_against_fp64(backend: Backend, case: str, dtype: torch.dtype, inplace: bool) -> None:
    """Twice the error of plain PyTorch in fp32 on the same, already rounded logits; a half-precision gradient is
    rounded once more, by half a unit of its dtype (a whole one where Triton's interpreter truncates to bf16)."""
    truncated = backend == "triton" and dtype == torch.bfloat16 and not HAS_GPU
    given = CASES[case] | {"logits": CASES[case]["logits"].to(dtype)}
    exact, usual = run(plain, given, torch.float64), run(plain, given, torch.float32)
    with use_backend(backend):
        got = run(fused, given, inplace_backward=inplace)
    for name, value in exact.items():
        bound = 2 * (usual[name] - value).abs() + 1e-6 * value.abs().max().clamp(min=1e-30)
        bound = bound.max().expand_as(value)
        if name == "d_logits" and dtype in HALF:
            unit = torch.finfo(dtype).eps * (1.01 if truncated else 0.505)
            bound = bound + value.abs() * unit + torch.finfo(dtype).smallest_normal * 2**-7
            assert got[name].dtype == dtype
        worst = ((got[name].double() - value).abs() - bound).max()
        assert worst <= 0, f"{name}: {worst:.2e} above the bound"


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("backend", [*BACKENDS, *CUDA])
def test_in_place_is_the_same_gradient_in_the_memory_of_the_logits(backend: Backend, dtype: torch.dtype) -> None:
    given = made(7, 65, dtype=dtype)
    leaf = given["logits"].clone().requires_grad_()
    with use_backend(backend):
        want = run(fused, given)["d_logits"]
        got = run(fused, given, inplace_backward=True)["d_logits"]
        logits = leaf * 1
        logprob_from_logits(logits, given["target"], inplace_backward=True).logprob.sum().backward()
    assert leaf.grad is not None
    assert got.equal(want)
    assert leaf.grad.equal(logits.detach())


def test_in_place_backward_runs_once() -> None:
    logits = (torch.randn(4, 17, device=DEVICE, requires_grad=True)) * 1
    loss = logprob_from_logits(logits, torch.arange(4, device=DEVICE), inplace_backward=True).logprob.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already hold their gradient from the first backward; leave inplace"):
        loss.backward()


@pytest.mark.parametrize("inplace", [False, True])
def test_logits_changed_before_backward_are_noticed(inplace: bool) -> None:
    logits = torch.randn(4, 17, device=DEVICE, requires_grad=True) * 1
    loss = logprob_from_logits(logits, torch.arange(4, device=DEVICE), inplace_backward=inplace).logprob.sum()
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_whoever_else_saved_the_logits_notices_the_overwriting() -> None:
    logits = torch.randn(4, 17, device=DEVICE, requires_grad=True) * 1
    other = logits.square().sum()
    logprob_from_logits(logits, torch.arange(4, device=DEVICE), inplace_backward=True).logprob.sum().backward(
        retain_graph=True
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradcheck(backend: Backend) -> None:
    if reason := dispatch._unusable(backend, torch.device("cpu")):
        pytest.skip(reason)
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(5, 11, generator=g, dtype=torch.float64).requires_grad_()
    target, row = torch.tensor([3, 3, 0, 10, 7, 3]), torch.tensor([1, 0, 1, 4, 1, 1])
    temperature = 0.5 + torch.rand(5, generator=g, dtype=torch.float64)

    def f(logits: Tensor) -> tuple[Tensor, ...]:
        out = logprob_from_logits(
            logits, target, row=row, temperature=temperature, softcap=2.0, want=("entropy", "sum_p2")
        )
        assert out.entropy is not None
        assert out.sum_p2 is not None
        return out.logprob, out.logsumexp, out.entropy, out.sum_p2

    with use_backend(backend):
        assert torch.autograd.gradcheck(f, [logits])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [*ROW_KERNELS, *CUDA])
def test_rows_do_not_see_the_batch(backend: Backend, dtype: torch.dtype) -> None:
    """Bitwise: alone, permuted, and padded with other rows."""
    given = made(6, 4500, dtype=dtype, temperature="rows")

    def of(which: Tensor) -> tuple[Tensor, ...]:
        logits = given["logits"][which].clone().requires_grad_()
        out = fused(logits=logits, target=given["target"][which], temperature=given["temperature"][which])
        assert out.entropy is not None
        assert out.sum_p2 is not None
        (d_logits,) = torch.autograd.grad((out.logprob + out.entropy + out.sum_p2).sum(), logits)
        return out.logprob, out.logsumexp, out.entropy, out.sum_p2, d_logits

    with use_backend(backend):
        everything = of(torch.arange(6, device=DEVICE))
        for which in (torch.tensor([4, 1, 5, 0, 3, 2]), torch.tensor([2]), torch.tensor([5, 2])):
            for part, whole in zip(of(which.to(DEVICE)), everything, strict=True):
                assert part.equal(whole[which.to(DEVICE)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", [*BACKENDS, *CUDA])
def test_a_bad_row_stays_alone(backend: Backend, poison: float, dtype: torch.dtype) -> None:
    given = made(7, 65, dtype=dtype)
    bad = given | {"logits": given["logits"].clone()}
    bad["logits"][3, 5] = poison
    with use_backend(backend):
        clean, got = run(fused, given), run(fused, bad)
    others = torch.arange(7, device=DEVICE) != 3
    for name, value in clean.items():
        assert got[name][3].isnan().any()
        assert got[name][others].equal(value[others])


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("backend", [*BACKENDS, *CUDA])
def test_logits_far_below_zero_and_forbidden_tokens(backend: Backend, dtype: torch.dtype) -> None:
    given = made(5, 4500, dtype=torch.float32)
    given["logits"] = (given["logits"] - 3000).to(dtype)
    given["target"].fill_(4400)
    masked = given | {"logits": given["logits"].clone()}
    masked["logits"][:, :4200] = -torch.inf
    cut = given | {"logits": given["logits"][:, 4200:].contiguous(), "target": given["target"] - 4200}
    exact = run(plain, cut, torch.float64)
    with use_backend(backend):
        got = run(fused, masked)
    assert (got["d_logits"][:, :4200] == 0).all()
    for name in ("logprob", "entropy", "sum_p2"):
        torch.testing.assert_close(got[name].double(), exact[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("V", [50257, 129920] if not HAS_GPU else [129920, 151669])
@pytest.mark.parametrize("backend", [p for p in BACKENDS if p.values[0] != "triton" or HAS_GPU])
def test_wide_vocabularies(backend: Backend, V: int) -> None:
    given = made(3, V, dtype=torch.bfloat16)
    exact = run(plain, given, torch.float64)
    with use_backend(backend):
        got = run(fused, given)
    for name in ("logprob", "logsumexp", "entropy", "sum_p2"):
        torch.testing.assert_close(got[name].double(), exact[name], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", ROW_KERNELS)
def test_the_same_numbers_as_linear_logprob(backend: Backend) -> None:
    hidden, weight = torch.randn(9, 16, device=DEVICE), torch.randn(65, 16, device=DEVICE)
    target = torch.arange(9, device=DEVICE)
    with use_backend(backend):
        want = linear_logprob(hidden, weight, target, want=("entropy",))
        got = logprob_from_logits(hidden @ weight.T, target, want=("entropy",))
    torch.testing.assert_close(got.logprob, want.logprob)
    torch.testing.assert_close(got.entropy, want.entropy)


@pytest.mark.parametrize(("N", "M"), [(0, None), (5, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend: Backend, N: int, M: int | None) -> None:
    with use_backend(backend):
        got = run(fused, made(N, 33, M=M))
    assert got["logprob"].shape == (0,)
    assert got["entropy"].shape == (N,)
    assert got["d_logits"].isfinite().all()


CHOSEN = {torch.bfloat16: "cuda", torch.float16: "cuda", torch.float32: "triton", torch.float64: "reference"}


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("dtype", CHOSEN)
def test_cuda_tensors_choose_what_was_measured_to_be_faster(
    dtype: torch.dtype, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ops of the head have no CUDA C++."""
    monkeypatch.delenv("ROLLTREE_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "load_library", lambda name: built and name == "cuda")
    monkeypatch.setattr(dispatch.machine, "has", lambda name: name == "triton")
    chosen = CHOSEN[dtype] if built or CHOSEN[dtype] != "cuda" else "triton"
    asked: list[str] = []
    monkeypatch.setattr(module, "row_kernels", lambda name: asked.append(name))
    with FakeTensorMode():
        logits = torch.empty(3, 8, dtype=dtype, device="cuda")
        module._row_kernels(logits)
        others = [op.backend_of(name, logits) for name in ("linear_logprob", "linear_policy_loss")]
    assert asked == [chosen]
    assert others == ["reference" if dtype == torch.float64 else "triton"] * 2


def test_cuda_is_refused_for_what_its_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, and by `score_rows`, which promises the bits of `linear_logprob`."""
    monkeypatch.setattr(dispatch, "load_library", lambda name: name == "cuda")
    reason = (
        r"cannot compute this logprob_from_logits: its kernels take bfloat16 and float16, .*; use triton, reference"
    )
    with FakeTensorMode(), use_backend("cuda"):
        logits, of_rows = torch.empty(3, 8, device="cuda"), torch.empty(3, device="cuda")
        with pytest.raises(dispatch.BackendError, match=reason):
            module._row_kernels(logits)
        with pytest.raises(dispatch.BackendError, match="linear_logprob has no 'cuda' backend; it has triton, cpu"):
            module.score_rows(logits.bfloat16(), of_rows.long(), of_rows)


def test_opcheck() -> None:
    given = made(6, 33, M=9)
    T = torch.ones(6, device=DEVICE)
    args = (given["logits"].requires_grad_(), given["target"], given["row"], T, 2.0, True, True, False)
    torch.library.opcheck(module._logprob_from_logits, args)


def test_opcheck_in_place() -> None:
    given, T, none = made(4, 33), torch.ones(4, device=DEVICE), torch.empty(0, device=DEVICE)
    args = (given["logits"], given["target"], None, T, 0.0, T, T * 0, none, none, T, T, none, none)
    torch.library.opcheck(module._backward_in_place, args)


@pytest.mark.check
def test_compile() -> None:
    def step(logits: Tensor, target: Tensor) -> Tensor:
        out = logprob_from_logits(logits * 2, target, temperature=0.9, want=("entropy",))
        assert out.entropy is not None
        return out.logprob.sum() - 0.1 * out.entropy.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for N in (7, 12):
        given = made(N, 33)
        pair = []
        for f in (step, compiled):
            leaf = given["logits"].clone().requires_grad_()
            loss = f(leaf, given["target"])
            pair.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
        torch.testing.assert_close(pair[0], pair[1])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"want": ("variance",)}, ValueError, "want names 'variance'; it knows entropy, sum_p2"),
        ({"logits": torch.zeros(4)}, ValueError, r"logits must be \[N, V\], got \[4\]"),
        ({"logits": torch.zeros(17, 4).T}, ValueError, r"logits must be contiguous, .* call .contiguous\(\)"),
        ({"logits": torch.zeros(4, 17, dtype=torch.long)}, ValueError, "logits must be bf16, fp16, fp32 or fp64"),
        ({"target": torch.zeros(3, dtype=torch.long)}, ValueError, "3 targets for 4 rows; give row="),
        ({"target": torch.zeros(4)}, ValueError, "target must hold integers"),
        ({"row": torch.zeros(3, dtype=torch.long)}, ValueError, r"row must be \[4\] like target"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive"),
        ({"temperature": torch.ones(3)}, ValueError, r"temperature must be a number or \[4\]"),
        ({"temperature": torch.ones(4, requires_grad=True)}, ValueError, "temperature takes no gradient"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive"),
        ({"target": torch.tensor([0, 1, 17, 2])}, IndexError, r"logprob_from_logits: target must be in 0..16"),
        (
            {"logits": torch.zeros(4, 17, requires_grad=True), "inplace_backward": True},
            ValueError,
            "logits that are a leaf of the graph; leave it out",
        ),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"logits": torch.zeros(4, 17), "target": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(error, match=message):
        logprob_from_logits(**{**given, **change})
