"""linear_logprob on every backend against plain PyTorch in fp64, and what it promises beside the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import dispatch, linear_logprob, use_backend
from rolltree.kernels.dispatch import Backend
from rolltree.kernels.linear_logprob import LogprobOutput, chunked, op

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = [
    pytest.param(b, marks=pytest.mark.skipif(bool(reason := dispatch._unusable(b, DEVICE)), reason=str(reason)))
    for b in (("triton", "reference") if HAS_GPU else ("cpu", "triton", "reference"))
]
ROW_KERNELS = [p for p in BACKENDS if p.values[0] != "reference"]
COMPILED = ("triton",) if HAS_GPU else ("cpu",)  # quick enough for every case
Inputs = dict[str, Any]


def inputs(
    N: int, H: int, V: int, M: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> Inputs:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(DEVICE, dtype)

    made: Inputs = {"hidden": normal(N, H), "weight": normal(V, H, scale=4 * H**-0.5)}
    made["target"] = torch.randint(0, V, (N if M is None else M,), generator=g).to(DEVICE)
    if M is not None:
        made["row"] = torch.randint(0, N, (M,), generator=g).to(DEVICE)
    if options.pop("bias", False):
        made["bias"] = normal(V)
    if options.get("temperature") == "rows":
        options["temperature"] = (0.5 + torch.rand(N, generator=g)).to(DEVICE)
    return made | options


def plain(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    row: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
) -> LogprobOutput:
    """Return the log-probs as a trainer would write it: logits in the inputs' dtype, the rest in fp32 (fp64)."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    logp = logits.log_softmax(-1)
    row = torch.arange(len(target), device=target.device) if row is None else row
    p = logp.exp()
    entropy = -(p * logp.clamp(min=-1e4)).sum(-1)
    return LogprobOutput(logp[row, target], logits.logsumexp(-1), entropy, (p * p).sum(-1), None)


def run(f: Callable[..., LogprobOutput], given: Inputs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Outputs, and gradients of a weighted sum of them all."""
    given = dict(given)
    leaves = [name for name in ("hidden", "weight", "bias") if name in given]
    for name in leaves:
        given[name] = given[name].to(dtype or given[name].dtype).detach().requires_grad_()
    if dtype and isinstance(given.get("temperature"), Tensor):
        given["temperature"] = given["temperature"].to(dtype)
    out = f(**given)
    assert out.entropy is not None
    assert out.sum_p2 is not None
    g = torch.Generator().manual_seed(7)
    loss = torch.zeros((), device=DEVICE, dtype=torch.float64)
    for value in (out.logprob, out.entropy, out.logsumexp, out.sum_p2):
        upstream = torch.randn(len(value), generator=g, dtype=torch.float64).to(DEVICE)
        loss = loss + (value.double() * upstream).sum()
    loss.backward()
    result = {n: getattr(out, n).detach() for n in ("logprob", "logsumexp", "entropy", "sum_p2")}
    return result | {f"d_{name}": given[name].grad for name in leaves}


def fused(**given: Any) -> LogprobOutput:
    return linear_logprob(**given, want=("entropy", "sum_p2"))


def errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Largest error, relative to the largest exact value."""
    return {n: ((got[n].double() - e).abs().max() / e.abs().max().clamp(min=1e-30)).item() for n, e in exact.items()}


def compare(backend: Backend, given: Inputs, floor: float = 1e-6) -> None:
    """``err(backend) <= 2 x err(plain PyTorch of the same dtype)``, and never worse than a few fp32 roundings."""
    exact = run(plain, given, torch.float64)
    usual = errors(run(plain, given), exact)
    with use_backend(backend):
        got = errors(run(fused, given), exact)
    half = given["hidden"].dtype in (torch.bfloat16, torch.float16)
    for name, error in got.items():
        rounding = 4e-3 if half and name.startswith("d_") else floor
        assert error <= max(2 * usual[name], rounding), f"{name}: {error:.2e}, plain PyTorch {usual[name]:.2e}"


CASES = {
    "plain": inputs(37, 16, 97),
    "narrow vocabulary": inputs(37, 64, 13),
    "vocabulary of one": inputs(5, 8, 1),
    "one row": inputs(1, 8, 33),
    "bias": inputs(19, 16, 65, bias=True),
    "temperature": inputs(19, 16, 65, temperature=0.7),
    "temperature of rows": inputs(19, 16, 65, temperature="rows"),
    "softcap": inputs(19, 16, 65, softcap=3.0),
    "pairs": inputs(11, 16, 65, M=70),
    "everything": inputs(23, 16, 131, M=60, bias=True, temperature="rows", softcap=5.0),
    "several blocks": inputs(3, 16, 5003, M=40),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_fp64(backend: Backend, case: str) -> None:
    compare(backend, CASES[case])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision(backend: Backend, dtype: torch.dtype) -> None:
    compare(backend, inputs(40, 32, 129, M=90, dtype=dtype, bias=True, temperature="rows"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_never_rounded_to_half_precision(backend: Backend) -> None:
    given = inputs(40, 32, 129, dtype=torch.bfloat16)
    exact, fp32 = run(plain, given, torch.float64), run(plain, given, torch.float32)
    with use_backend(backend):
        got = run(fused, given)
    assert errors(got, exact)["logprob"] <= 2 * errors(fp32, exact)["logprob"] + 5e-7


@pytest.mark.check(but=4)
@pytest.mark.parametrize("V", [50257, 151669])
@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_vocabularies(backend: Backend, V: int) -> None:
    compare(backend, inputs(2 if backend == "triton" and not HAS_GPU else 5, 8, V, M=9), floor=2e-6)


@pytest.mark.parametrize("offset", [-200.0, -3000.0, 500.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_far_from_zero(backend: Backend, offset: float) -> None:
    """A maximum that starts at 0, or a log-sum-exp kept in plain fp32, fails here."""
    given = inputs(9, 16, 4500)
    given["bias"] = torch.full((4500,), offset, device=DEVICE)
    compare(backend, given, floor=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forbidden_tokens(backend: Backend) -> None:
    """Logits of -inf and of the lowest fp32 number: probability zero, no NaN, whether they come first or last."""
    given = inputs(6, 16, 9000)
    given["target"].fill_(5000)
    bias = torch.zeros(9000, device=DEVICE)
    bias[:4400], bias[8000:8500], bias[8500:] = -torch.inf, torch.finfo(torch.float32).min, -torch.inf
    allowed = slice(4400, 8000)
    cut = given | {"weight": given["weight"][allowed], "target": given["target"] - 4400}
    with use_backend(backend):
        got, want = run(fused, given | {"bias": bias}), run(fused, cut)
    for name in ("logprob", "logsumexp", "entropy", "sum_p2", "d_hidden"):
        torch.testing.assert_close(got[name], want[name], rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(got["d_weight"][allowed], want["d_weight"], rtol=2e-5, atol=2e-6)
    assert got["d_weight"][:4400].abs().max() == 0


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_row_stays_alone(backend: Backend, poison: float) -> None:
    given = inputs(7, 16, 65)
    bad = given | {"hidden": given["hidden"].clone()}
    bad["hidden"][3] = poison
    with use_backend(backend):
        clean, got = (linear_logprob(**x, want=("entropy", "sum_p2")) for x in (given, bad))
    others = torch.arange(7, device=DEVICE) != 3
    for a, b in zip(clean[:4], got[:4], strict=True):
        assert a is not None
        assert b is not None
        assert b[3].isnan()
        assert b[others].equal(a[others])


@pytest.mark.parametrize("backend", ROW_KERNELS)
def test_rows_without_gradient_are_zero_whatever_their_logits(backend: Backend) -> None:
    rows = op.row_kernels(backend)
    logits, nothing = torch.full((1, 40), torch.nan, device=DEVICE), torch.zeros(0, device=DEVICE)
    zero, out = torch.zeros(1, device=DEVICE), torch.empty_like(logits)
    index = torch.tensor([0, 1], device=DEVICE)
    given = chunked.RowInputs(logits, nothing, zero + 1, 0.0, index, index[:1])
    rows.gradient(given, zero, zero, zero, zero, nothing, nothing, out)
    assert out.equal(torch.zeros_like(out))


@pytest.mark.parametrize("backend", ROW_KERNELS)
def test_what_lies_between_the_rows_of_a_tile_does_not_matter(backend: Backend) -> None:
    """Bitwise: rows that begin at multiples, with NaN after each or a number; an odd vocabulary.

    Rows end to end have the same numbers to rounding: Triton loads by other widths there, which sums follow.
    """
    rows, C, V = op.row_kernels(backend), 3, 4500 + 37
    head = chunked.Head(torch.empty(V, 4, device=DEVICE), None, None, torch.float32)
    assert (16 if backend == "triton" else 1) == rows.ROW_MULTIPLE
    whole = torch.randn(C, V, generator=torch.Generator().manual_seed(3)).to(DEVICE)

    def padded(between: float) -> Tensor:
        tile, _ = chunked.new_tiles(rows, head, C)
        assert tile.stride(0) % rows.ROW_MULTIPLE == 0
        tile.as_strided((C, tile.stride(0)), (tile.stride(0), 1)).fill_(between)
        return tile.copy_(whole)

    start, target = torch.arange(C + 1, device=DEVICE), torch.tensor([0, V - 1, 7], device=DEVICE)
    one, absent = torch.ones(C, device=DEVICE), torch.zeros(0, device=DEVICE)
    results = []
    for logits in (padded(torch.nan), padded(3e4), whole):
        outputs = [torch.empty(C, device=DEVICE) for _ in range(5)]
        given = chunked.RowInputs(logits, absent, one, 0.0, start, target)
        rows.statistics(given, *outputs)
        rows.gradient(given, *outputs[1:3], one, one, one, one, logits)
        results.append([*outputs, logits])
    for number, (found, again, dense) in enumerate(zip(*results, strict=True)):
        assert found.isfinite().all()
        assert found.equal(again)
        if number != 2:  # the correction is itself a rounding
            assert (found - dense).abs().max() <= 1e-6 * dense.abs().max()


@pytest.mark.parametrize("backend", ROW_KERNELS)
def test_a_row_of_a_larger_tensor_is_written_alone(backend: Backend) -> None:
    rows, wide = op.row_kernels(backend), torch.ones(2, 50, device=DEVICE)
    logits, one, absent = wide[:1, :37], torch.ones(1, device=DEVICE), torch.zeros(0, device=DEVICE)
    index = torch.tensor([0, 1], device=DEVICE)
    given = chunked.RowInputs(logits, absent, one, 0.0, index, index[:1])
    rows.gradient(given, one, one, 2 * one, one, absent, absent, logits)
    assert wide[:, 37:].eq(1).all()
    assert wide[:1, :37].ne(1).all()


@pytest.mark.parametrize("backend", ROW_KERNELS)
def test_row_kernels_do_not_see_the_batch(backend: Backend) -> None:
    """Bitwise: a row's statistics and gradient are the same alone, permuted, and among other rows."""
    rows, C, V = op.row_kernels(backend), 6, 4500
    g = torch.Generator().manual_seed(3)
    logits = (torch.randn(C, V, generator=g) * 5).to(DEVICE)
    values = torch.rand(6, C, generator=g).to(DEVICE)

    def compute(which: Tensor) -> list[Tensor]:
        n = len(which)
        start, target = torch.arange(n + 1, device=DEVICE), (which * 700).to(DEVICE)
        outputs = [torch.empty(n, device=DEVICE) for _ in range(5)]
        T, a, b, c, q = (values[k, which].contiguous() for k in range(5))
        bias = torch.zeros(0, device=DEVICE)
        tile = logits[which].contiguous()
        given = chunked.RowInputs(tile, bias, T, 0.0, start, target)
        rows.statistics(given, *outputs)
        d = torch.empty_like(tile)
        rows.gradient(given, outputs[1], outputs[2], a, c, b, q, d)
        return [*outputs, d]

    everything = compute(torch.arange(C, device=DEVICE))
    for which in (torch.tensor([4, 1, 5, 0, 3, 2]), torch.tensor([2]), torch.tensor([5, 2])):
        for part, whole in zip(compute(which.to(DEVICE)), everything, strict=True):
            assert part.equal(whole[which.to(DEVICE)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_of_targets_does_not_matter(backend: Backend) -> None:
    given = inputs(11, 16, 65, M=50)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    shuffled = given | {"row": given["row"][order], "target": given["target"][order]}
    with use_backend(backend):
        assert linear_logprob(**shuffled).logprob.equal(linear_logprob(**given).logprob[order])


@pytest.mark.parametrize("backend", ROW_KERNELS)
def test_chunks(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(23, 16, 131, M=60, bias=True, temperature="rows")
    with use_backend(backend):
        whole = run(fused, given)
        monkeypatch.setattr(chunked, "chunk_rows", lambda N, V, device: 5)
        pieces = run(fused, given)
    for name, value in whole.items():  # sums of other orders: roundings of the largest terms
        assert (pieces[name] - value).abs().max() <= 1e-6 * value.abs().max(), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("V", [100, 50257, 262145])
@pytest.mark.parametrize("N", [0, 1, 127, 4096, 100_003])
def test_the_tile_fits_its_budget(device: str, V: int, N: int) -> None:
    floor, budget = {"cpu": (256, 2**27), "cuda": (2048, 2**30)}[device]
    C = chunked.chunk_rows(N, V, torch.device(device))
    assert max(budget + 512 * V, 4 * floor * V) >= 4 * C * V
    assert min(N, floor) // 2 <= C
    covered = [i for c in chunked.chunks(N, C) for i in range(N)[c]]
    assert covered == list(range(N))


@pytest.mark.parametrize(("N", "M"), [(0, 0), (5, 0), (0, None)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend: Backend, N: int, M: int | None) -> None:
    with use_backend(backend):
        got = run(fused, inputs(N, 8, 33, M=M) if N else inputs(0, 8, 33))
    assert got["logprob"].shape == (0,)
    assert got["logsumexp"].shape == got["entropy"].shape == (N,)
    assert got["d_hidden"].shape == (N, 8)
    assert got["d_weight"].isfinite().all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradcheck(backend: Backend) -> None:
    if reason := dispatch._unusable(backend, torch.device("cpu")):
        pytest.skip(reason)
    g = torch.Generator().manual_seed(5)
    hidden, weight, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((5, 3), (11, 3), (11,)))
    target, row = torch.tensor([3, 3, 0, 10, 7, 3]), torch.tensor([1, 0, 1, 4, 1, 1])
    temperature = 0.5 + torch.rand(5, generator=g, dtype=torch.float64)

    def f(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out = linear_logprob(
            hidden, weight, target, row=row, bias=bias, temperature=temperature, softcap=2.0, want=("entropy", "sum_p2")
        )
        assert out.entropy is not None
        assert out.sum_p2 is not None
        return out.logprob, out.logsumexp, out.entropy, out.sum_p2

    with use_backend(backend):
        assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in (hidden, weight, bias)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_head_and_frozen_body(backend: Backend) -> None:
    given = inputs(9, 16, 65)
    full = run(fused, given)
    with use_backend(backend):
        for name in ("hidden", "weight"):
            one = given | {name: given[name].clone().requires_grad_()}
            out = fused(**one)
            g = torch.Generator().manual_seed(7)
            loss = sum(
                (v.double() * torch.randn(len(v), generator=g, dtype=torch.float64).to(DEVICE)).sum()
                for v in (out.logprob, out.entropy, out.logsumexp, out.sum_p2)
                if v is not None
            )
            loss.backward()  # type: ignore[union-attr]
            torch.testing.assert_close(one[name].grad, full[f"d_{name}"], rtol=1e-4, atol=1e-6)


def test_backward_twice_gives_the_same() -> None:
    given = inputs(9, 64, 33)  # a narrow vocabulary, whose logits are kept
    hidden = given["hidden"].requires_grad_()
    loss = linear_logprob(**given).logprob.sum()
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.autograd.grad(loss, hidden)[0].equal(first)


def test_only_what_is_wanted() -> None:
    out = linear_logprob(**inputs(4, 8, 17))
    assert out.entropy is None
    assert out.sum_p2 is None
    assert out.extra_logprob is None


@pytest.mark.slow
def test_opcheck() -> None:
    given = inputs(6, 8, 33, M=9, bias=True)
    for name in ("hidden", "weight", "bias"):
        given[name].requires_grad_()
    T = torch.ones(6, device=DEVICE)
    hidden, weight, bias, target, row = (given[n] for n in ("hidden", "weight", "bias", "target", "row"))
    a, b = torch.randn(2, 8, device=DEVICE, requires_grad=True), torch.randn(33, 2, device=DEVICE, requires_grad=True)
    check = torch.library.opcheck
    check(op.linear_logprob_op, (hidden, weight, bias, None, None, 0.0, target, row, T, 0.0, True, True, False, None))
    check(op.linear_logprob_op, (hidden, weight, bias, a, b, 0.5, target, row, T, 0.0, True, False, False, None))
    weight, bias = weight.detach(), bias.detach()
    check(op.linear_logprob_op, (hidden, weight, bias, None, None, 0.0, target, row, T, 0.0, False, False, True, None))
    narrow = inputs(6, 64, 33)
    hidden, weight, target = narrow["hidden"], narrow["weight"], narrow["target"]
    check(
        op.linear_logprob_op, (hidden, weight, None, None, None, 0.0, target, None, T, 2.0, False, False, False, None)
    )


@pytest.mark.check
def test_compile() -> None:
    def step(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        out = linear_logprob(hidden * 2, weight, target, temperature=0.9, want=("entropy",))
        assert out.entropy is not None
        return out.logprob.sum() - 0.1 * out.entropy.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for N in (7, 12, 19):
        given = inputs(N, 8, 33, seed=N)
        pair = []
        for f in (step, compiled):
            hidden = given["hidden"].clone().requires_grad_()
            loss = f(hidden, given["weight"], given["target"])
            pair.append((loss.detach(), torch.autograd.grad(loss, hidden)[0]))
        torch.testing.assert_close(pair[0], pair[1])


def test_autocast_casts_like_a_linear_layer() -> None:
    given = inputs(12, 16, 65)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        got = linear_logprob(**given).logprob
    rounded = given | {n: given[n].bfloat16() for n in ("hidden", "weight")}
    assert got.dtype == torch.float32
    assert got.equal(linear_logprob(**rounded).logprob)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kept": (torch.zeros(4), torch.zeros(1))}, ValueError, r"kept's indptr must be \[5\]"),
        ({"kept": (torch.zeros(5), torch.zeros(1)), "tp_group": 1}, ValueError, "kept does not combine with tp_group"),
        ({"want": ("variance",)}, ValueError, "want names 'variance'; it knows entropy, sum_p2"),
        ({"hidden": torch.zeros(4)}, ValueError, r"hidden must be \[N, H\], got \[4\]"),
        ({"weight": torch.zeros(17, 9)}, ValueError, r"weight must be \[V, 8\] to fit hidden"),
        ({"weight": torch.zeros(17, 8).double()}, ValueError, "cast one of them"),
        ({"target": torch.zeros(3, dtype=torch.long)}, ValueError, "3 targets for 4 rows; give row="),
        ({"target": torch.zeros(4)}, ValueError, "target must hold integers"),
        ({"row": torch.zeros(3, dtype=torch.long)}, ValueError, r"row must be \[4\] like target"),
        ({"bias": torch.zeros(3)}, ValueError, r"bias must be \[17\]"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive"),
        ({"temperature": torch.ones(3)}, ValueError, r"temperature must be a number or \[4\]"),
        ({"temperature": torch.ones(4, requires_grad=True)}, ValueError, "temperature takes no gradient"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive"),
        ({"target": torch.tensor([0, 1, 17, 2])}, IndexError, r"target must be in 0..16, got 0..17"),
        ({"target": torch.tensor([0, 1, -100, 2])}, IndexError, "leave out targets that are not to be scored"),
        ({"row": torch.tensor([0, 1, 4, 2])}, IndexError, r"row must be in 0..3"),
    ],
)
def test_mistakes_are_named(change: Inputs, error: type[Exception], message: str) -> None:
    given = {"hidden": torch.zeros(4, 8), "weight": torch.zeros(17, 8), "target": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(error, match=message):
        linear_logprob(**{**given, **change})
