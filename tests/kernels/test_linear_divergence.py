"""linear_divergence on every backend against published formulas in fp64, and what it promises beside the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import DivergenceOutput, HeadLora, linear_divergence, use_backend
from rolltree.kernels.dispatch import Backend
from rolltree.kernels.linear_divergence import api, chunked, op
from rolltree.kernels.linear_divergence.kinds import KINDS
from rolltree.kernels.linear_logprob import chunked as tiles

from .test_linear_logprob import BACKENDS, COMPILED, DEVICE, HAS_GPU, ROW_KERNELS, errors

Inputs = dict[str, Any]
MIXED = {"jsd": {"beta": 0.3}, "skew_forward_kl": {"alpha": 0.2}, "skew_reverse_kl": {"alpha": 0.2}}
OPTIONS = [{"kind": kind, **MIXED.get(kind, {})} for kind in KINDS]
TRAINED = ("hidden", "weight", "bias")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bounds are multiples of plain PyTorch's error, whose sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def kind_name(options: Inputs) -> str:
    return "-".join(map(str, options.values()))


of_each_kind = pytest.mark.parametrize("kind", OPTIONS, ids=kind_name)
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)


def inputs(
    N: int, H: int, V: int, *, wide: int = 0, dtype: torch.dtype = torch.float32, near: bool = False, **options: Any
) -> Inputs:
    """Random rows of both models, with weights of which a third is 0; ``near``: the models are almost one."""
    g = torch.Generator().manual_seed(N + V)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(DEVICE, dtype)

    Ht = H + wide
    made = {
        "hidden": normal(N, H),
        "weight": normal(V, H, scale=3 * H**-0.5),
        "teacher_hidden": normal(N, Ht),
        "teacher_weight": normal(V, Ht, scale=3 * Ht**-0.5),
        "weights": torch.rand(N, generator=g).to(DEVICE) * (torch.arange(N, device=DEVICE) % 3 != 1),
    }
    if near:
        made["teacher_hidden"] = made["hidden"] + normal(N, H, scale=1e-3)
        made["teacher_weight"] = made["weight"].clone()
    if options.pop("bias", False):
        made |= {"bias": normal(V), "teacher_bias": normal(V)}
    for name in ("temperature", "teacher_temperature"):
        if options.get(name) == "rows":
            options[name] = (0.5 + torch.rand(N, generator=g)).to(DEVICE)
    return made | options


def plain(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: str,
    weights: Tensor,
    beta: float = 0.5,
    alpha: float = 0.1,
    normalizer: float = 1.0,
    row: Tensor | None = None,
    teacher_row: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> DivergenceOutput:
    """Return the loss as a trainer would write it: logits in the inputs' dtype, the rest in fp32 (fp64)."""

    def logprob(hidden: Tensor, weight: Tensor, bias: Tensor | None, T: Any, cap: float | None) -> Tensor:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return (logits / (T[:, None] if isinstance(T, Tensor) else T)).log_softmax(-1)

    def at(values: Any, row: Tensor | None) -> Any:
        return values if row is None or not isinstance(values, Tensor) else values[row]

    t = at(temperature, row) if teacher_temperature is None else at(teacher_temperature, teacher_row)
    q = logprob(at(hidden, row), weight, bias, at(temperature, row), softcap)
    p = logprob(at(teacher_hidden, teacher_row), teacher_weight, teacher_bias, t, teacher_softcap).detach()

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    def mixture(share: float) -> Tensor:
        return (share * p.exp() + (1 - share) * q.exp()).log()

    divergence = {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, mixture(beta)) + (1 - beta) * kl(q, mixture(beta)),
        "skew_forward_kl": lambda: kl(p, mixture(alpha)),
        "skew_reverse_kl": lambda: kl(q, mixture(1 - alpha)),
        "total_variation": lambda: (p.exp() - q.exp()).abs().sum(-1) / 2,
    }[kind]()
    loss = (weights * divergence).sum() / normalizer
    return DivergenceOutput(loss, divergence, -(q.exp() * q).sum(-1), -(p.exp() * p).sum(-1))


def run(f: Any, given: Inputs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Values of the pairs that count, the loss, and its gradients."""
    given = dict(given)
    for name, value in given.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            given[name] = value.detach().to(dtype or value.dtype, copy=True)
        if name in TRAINED:
            given[name].requires_grad_()
    out = f(**given)
    out.loss.backward()
    live = (given["weights"] != 0).to(DEVICE)
    result = {"loss": out.loss.detach()[None]}
    for name in ("divergence", "entropy", "teacher_entropy"):
        result[name] = getattr(out, name).detach()[live]
    return result | {f"d_{name}": given[name].grad for name in TRAINED if name in given}


def compare(backend: Backend, given: Inputs, floor: float = 2e-6) -> None:
    """``err(backend) <= 2 x err(plain PyTorch of the same dtype)``, and never worse than a few fp32 roundings."""
    exact = run(plain, given, torch.float64)
    usual = errors(run(plain, given), exact)
    with use_backend(backend):
        got = errors(run(linear_divergence, given), exact)
    half = given["hidden"].dtype in (torch.bfloat16, torch.float16)
    for name, error in got.items():
        rounding = 4e-3 if half and name.startswith("d_") else floor
        assert error <= max(2 * usual[name], rounding), f"{name}: {error:.2e}, plain PyTorch {usual[name]:.2e}"


CASES = {
    "plain": inputs(31, 16, 97),
    "another width": inputs(7, 16, 65, wide=8),
    "one row": inputs(1, 8, 33),
    "biases": inputs(13, 16, 65, bias=True),
    "temperature": inputs(13, 16, 65, temperature=0.7),
    "both temperatures": inputs(13, 16, 65, temperature=0.7, teacher_temperature=1.6),
    "softcaps": inputs(13, 16, 65, softcap=3.0, teacher_softcap=4.0),
    "almost equal": inputs(13, 16, 65, near=True),
    "everything": inputs(
        14, 16, 131, wide=3, bias=True, temperature="rows", teacher_temperature="rows", softcap=5.0,
        teacher_softcap=7.0, normalizer=9.0,
    ),
    "several blocks": inputs(3, 16, 5003),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@of_each_kind
@pytest.mark.parametrize("backend", [*COMPILED, "reference"])
def test_against_fp64(backend: Backend, kind: Inputs, case: str) -> None:
    compare(backend, CASES[case] | kind, floor=3e-6)


@of_each_kind
@pytest.mark.skipif(HAS_GPU, reason="compiled there")
def test_triton_against_fp64(kind: Inputs) -> None:
    """In its interpreter, which is slow: a case with every option, and one of two blocks."""
    compare("triton", CASES["everything"] | kind, floor=3e-6)
    compare("triton", inputs(2, 8, 4500) | kind, floor=3e-6)


@of_each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", COMPILED)
def test_half_precision(backend: Backend, dtype: torch.dtype, kind: Inputs) -> None:
    compare(backend, inputs(20, 32, 129, dtype=dtype, bias=True, temperature="rows") | kind)


@of_each_kind
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_finite_differences(backend: Backend, kind: Inputs) -> None:
    given = inputs(5, 4, 11, wide=2, dtype=torch.float64, bias=True, temperature="rows", softcap=4.0) | kind
    row, teacher_row = torch.tensor([4, 1, 1, 0, 4, 2]), torch.tensor([0, 3, 4, 4, 2, 1])
    weights = torch.tensor([0.5, 2.0, 0.0, -1.0, 0.7, 1.1], dtype=torch.float64)
    given |= {"row": row, "teacher_row": teacher_row, "weights": weights}

    def loss(trained: list[Tensor]) -> Tensor:
        with use_backend(backend):
            return linear_divergence(**given | dict(zip(TRAINED, trained, strict=True))).loss

    leaves = [given[name].requires_grad_() for name in TRAINED]
    gradients = torch.autograd.grad(loss(leaves), leaves)
    g = torch.Generator().manual_seed(3)
    for _ in range(4):
        steps = [torch.randn(leaf.shape, generator=g, dtype=torch.float64) for leaf in leaves]
        moved = [loss([leaf + size * step for leaf, step in zip(leaves, steps, strict=True)]) for size in (1e-6, -1e-6)]
        slope = sum(float((d * step).sum()) for d, step in zip(gradients, steps, strict=True))
        assert slope == pytest.approx(float(moved[0] - moved[1]) / 2e-6, rel=1e-6, abs=1e-8)


@of_each_kind
@on_each_backend
def test_equal_models(backend: Backend, kind: Inputs) -> None:
    """No divergence and no gradient, of any vocabulary, and never less than 0 where the models are almost one."""
    for V in (1, 33):
        given = inputs(5, 8, V) | kind
        given |= {"teacher_hidden": given["hidden"], "teacher_weight": given["weight"]}
        with use_backend(backend):
            got = run(linear_divergence, given)
        assert not got["divergence"].abs().gt(1e-12).any()
        assert not got["d_weight"].abs().gt(1e-6).any()
        near = given | {"teacher_hidden": given["hidden"] * (1 + 1e-4)}
        with use_backend(backend):
            assert (run(linear_divergence, near)["divergence"] > (0 if V > 1 else -1e-12)).all()


@pytest.mark.check(but=9)
@of_each_kind
@on_each_backend
def test_weighed_pairs_of_rows(backend: Backend, kind: Inputs) -> None:
    """A row map with repeats on both sides, and temperatures that follow the rows."""
    given = inputs(9, 8, 33, wide=4, temperature="rows", teacher_temperature="rows") | kind
    g = torch.Generator().manual_seed(2)
    row, teacher_row = (torch.randint(0, 9, (14,), generator=g).to(DEVICE) for _ in range(2))
    weights = (torch.rand(14, generator=g) * (torch.arange(14) % 4 != 2)).to(DEVICE)
    compare(backend, given | {"row": row, "teacher_row": teacher_row, "weights": weights}, floor=4e-6)
    shared = {n: v for n, v in given.items() if n != "teacher_temperature"}
    compare(backend, shared | {"row": row, "teacher_row": teacher_row, "weights": weights}, floor=4e-6)


@of_each_kind
@on_each_backend
def test_pairs_without_weight_reach_nothing(backend: Backend, kind: Inputs) -> None:
    """Rows of NaN and indices out of range, where the weight is 0 or the mask False, leave everything as it is."""
    given = inputs(9, 8, 33) | kind
    mask = torch.arange(9, device=DEVICE) % 4 != 2
    with use_backend(backend):
        clean = run(linear_divergence, given | {"weights": torch.where(mask, given["weights"], 0)})
    alive = mask & (given["weights"] != 0)
    spoiled = given | {name: given[name].clone() for name in ("hidden", "teacher_hidden", "weights")}
    spoiled["hidden"][~alive], spoiled["teacher_hidden"][~alive] = torch.nan, torch.inf
    spoiled["weights"][~mask] = torch.nan
    rows = torch.where(alive, torch.arange(9, device=DEVICE), -7)
    for options in ({"mask": mask}, {"mask": mask, "row": rows, "teacher_row": rows}):
        trained = {name: spoiled[name].clone().requires_grad_() for name in ("hidden", "weight")}
        with use_backend(backend):
            out = linear_divergence(**spoiled | options | trained)
            out.loss.backward()
        assert out.divergence.isnan().equal(~alive)
        assert out.divergence[alive].equal(clean["divergence"])
        assert out.loss.equal(clean["loss"][0])
        grad = trained["hidden"].grad
        assert grad is not None
        assert grad.equal(clean["d_hidden"])
        assert grad[~alive].eq(0).all()
        assert trained["weight"].grad.equal(clean["d_weight"])


def test_pairs_without_weight_leave_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    logits = tiles.Head.logits
    monkeypatch.setattr(tiles.Head, "logits", lambda self, x, out: rows.append(len(x)) or logits(self, x, out))
    given = inputs(9, 8, 33)
    linear_divergence(**given)
    assert rows == [6, 6]  # one product for either model


@on_each_backend
@pytest.mark.parametrize("count", [0, 4])
def test_no_pair_counts(backend: Backend, count: int) -> None:
    given = inputs(count, 8, 33) if count else inputs(0, 8, 33)
    given["weights"] = torch.zeros(count, device=DEVICE)
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    with use_backend(backend):
        out = linear_divergence(**given, normalizer=0.0)
        out.loss.backward()
    assert out.loss == 0
    assert out.divergence.shape == (count,)
    for leaf in (hidden, weight):
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


@on_each_backend
def test_vocabularies_of_different_padding(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(api, "log_once", said.append)
    given = inputs(7, 8, 40, bias=True)
    for longer in ("weight", "teacher_weight"):
        shorter = {"weight": "teacher_weight", "teacher_weight": "weight"}[longer]
        cut = {name: given[name][:33] for name in (shorter, shorter.replace("weight", "bias"))}
        spoiled = given | {name: given[name].clone() for name in (longer, longer.replace("weight", "bias"))}
        for name in (longer, longer.replace("weight", "bias")):
            spoiled[name][33:] = 1e4
        with use_backend(backend):
            got = run(linear_divergence, spoiled | cut)
            both = {name: given[name][:33] for name in ("weight", "teacher_weight", "bias", "teacher_bias")}
            want = run(linear_divergence, given | both)
        for name, values in want.items():
            assert got[name][: len(values)].equal(values), name
            assert not got[name][len(values) :].any()
        sizes = "40 and 33" if longer == "weight" else "33 and 40"
        assert said[-1] == f"linear_divergence: vocabularies of {sizes} are compared on 33 ids."


# -- extreme values ---------------------------------------------------------------------------------------------------


@pytest.mark.check(but=9)
@of_each_kind
@on_each_backend
@pytest.mark.parametrize("scale", [3e2, 1e4])
def test_large_logits(backend: Backend, kind: Inputs, scale: float) -> None:
    """One-hot distributions, which agree in some rows: finite, and right where fp64 is."""
    eye, tokens = torch.eye(8, device=DEVICE), torch.eye(33, 8, device=DEVICE)
    agree = torch.arange(8, device=DEVICE) < 4
    given: Inputs = {"hidden": scale * eye, "weight": tokens, "teacher_weight": tokens.clone()}
    given["teacher_hidden"] = scale * torch.where(agree[:, None], eye, eye.roll(1, 1))
    given["weights"] = torch.ones(8, device=DEVICE)
    with use_backend(backend):
        got = run(linear_divergence, given | kind)
    q, p = ((given[f"{side}hidden"] @ given["weight"].T).double().log_softmax(-1) for side in ("", "teacher_"))
    most = {"forward_kl": scale, "reverse_kl": scale, "total_variation": 1.0}.get(kind["kind"], 2.0)
    assert (q[:4] == p[:4]).all()
    torch.testing.assert_close(got["divergence"][:4], torch.zeros(4, device=DEVICE), rtol=0, atol=1e-6 * most)
    exact = run(plain, given | {"kind": kind["kind"]}, torch.float64) if most in (1.0, scale) else None
    for name, values in got.items():
        assert values.isfinite().all(), name
        if exact is not None:
            torch.testing.assert_close(values.double(), exact[name], rtol=1e-5, atol=1e-5 * scale)
    assert (got["divergence"][4:] > 0.1).all()


@of_each_kind
@on_each_backend
def test_forbidden_tokens(backend: Backend, kind: Inputs) -> None:
    """Tokens that neither model can draw, by -inf, change nothing; whether they come first or last."""
    given = inputs(5, 8, 70) | kind
    bias = torch.zeros(70, device=DEVICE)
    bias[:20], bias[60:] = -torch.inf, -torch.inf
    cut = {name: given[name][20:60] for name in ("weight", "teacher_weight")}
    with use_backend(backend):
        got = run(linear_divergence, given | {"bias": bias, "teacher_bias": bias})
        want = run(linear_divergence, given | cut)
    for name in ("divergence", "entropy", "teacher_entropy", "d_hidden"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["d_weight"][20:60], want["d_weight"], rtol=1e-5, atol=1e-6)
    assert not got["d_weight"][:20].any()


@on_each_backend
def test_tokens_that_one_model_cannot_draw(backend: Backend) -> None:
    """A KL is inf where it averages over them, and every other divergence is finite."""
    given = inputs(4, 8, 33) | {"weights": torch.ones(4, device=DEVICE)}
    bias = torch.zeros(33, device=DEVICE)
    bias[3] = -torch.inf
    for side, infinite in (("bias", "forward_kl"), ("teacher_bias", "reverse_kl")):
        for kind in OPTIONS:
            with use_backend(backend):
                out = linear_divergence(**given | kind | {side: bias})
            assert (out.divergence.isinf() if kind["kind"] == infinite else out.divergence.isfinite()).all()


@pytest.mark.slow(but=36)
@pytest.mark.check(but=18)
@of_each_kind
@on_each_backend
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["hidden", "teacher_hidden"])
def test_a_bad_row_stays_alone(backend: Backend, kind: Inputs, poison: float, name: str) -> None:
    given = inputs(7, 8, 33) | kind | {"weights": torch.ones(7, device=DEVICE)}
    bad = given | {name: given[name].clone()}
    bad[name][3] = poison
    with use_backend(backend):
        clean, got = run(linear_divergence, given), run(linear_divergence, bad)
    others = torch.arange(7, device=DEVICE) != 3
    assert got["divergence"][3].isnan()
    for values in ("divergence", "d_hidden", "entropy", "teacher_entropy"):
        assert got[values][others].equal(clean[values][others])


@pytest.mark.parametrize("backend", COMPILED)
def test_a_teacher_of_another_dtype(backend: Backend) -> None:
    """The fp32 policy of a bf16 teacher: as the teacher's numbers, widened."""
    given = inputs(9, 8, 33, wide=4)
    names = "teacher_hidden", "teacher_weight"
    narrow = given | {name: given[name].bfloat16() for name in names}
    with use_backend(backend):
        got = run(linear_divergence, narrow)
        want = run(linear_divergence, narrow | {name: narrow[name].float() for name in names})
    for name, values in want.items():
        torch.testing.assert_close(got[name], values, rtol=1e-5, atol=1e-6)


# -- what the result does not depend on -------------------------------------------------------------------------------


@pytest.mark.slow(but=5)
@pytest.mark.check(but=2)
@of_each_kind
@pytest.mark.parametrize("backend", ROW_KERNELS)
def test_row_kernels_do_not_see_the_batch(backend: Backend, kind: Inputs) -> None:
    """Bitwise: a row alone, permuted, and among other rows; and with NaN between the rows of a tile."""
    rows, C, V = op.divergence_rows(backend), 5, 4500 + 37
    g = torch.Generator().manual_seed(3)
    logits, teacher = ((torch.randn(C, V, generator=g) * 5).to(DEVICE) for _ in range(2))
    T, Tt, factor = torch.rand(3, C, generator=g).to(DEVICE)
    code, absent = KINDS.index(kind["kind"]), torch.zeros(0, device=DEVICE)

    def tile(values: Tensor, between: float) -> Tensor:
        made = tiles.new_tile(rows, values, len(values), V)
        made.as_strided((len(values), made.stride(0)), (made.stride(0), 1)).fill_(between)
        return made.copy_(values)

    def compute(which: Tensor, between: float) -> list[Tensor]:
        made = [tile(x[which], between) for x in (logits, teacher)]
        out = [torch.empty(len(which), device=DEVICE) for _ in range(3)]
        sides = [chunked.RowLogits(x, absent, t[which], 0.0) for x, t in zip(made, (T, Tt), strict=True)]
        rows.divergence(*sides, code, 0.3, factor[which], *out, made[0])
        return [*out, made[0]]

    everything = compute(torch.arange(C, device=DEVICE), 0.0)
    for which in (torch.tensor([4, 1, 0, 3, 2]), torch.tensor([2]), torch.tensor([4, 2])):
        for part, whole in zip(compute(which.to(DEVICE), torch.nan), everything, strict=True):
            assert part.isfinite().all()
            assert part.equal(whole[which.to(DEVICE)])


@of_each_kind
@pytest.mark.parametrize("backend", COMPILED)
def test_chunks_and_the_order_of_rows(backend: Backend, kind: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(23, 16, 131, bias=True, temperature="rows") | kind
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mapped = {"row": order, "teacher_row": order, "weights": given["weights"][order]}
    with use_backend(backend):
        whole = run(linear_divergence, given)
        monkeypatch.setattr(tiles, "chunk_rows", lambda *_, **__: 5)
        pieces, shuffled = run(linear_divergence, given), run(linear_divergence, given | mapped)
    for name, value in whole.items():  # sums of other orders: roundings of the largest terms
        assert (pieces[name] - value).abs().max() <= 2e-6 * value.abs().max(), name
        if name.startswith("d_") or name == "loss":
            assert (shuffled[name] - value).abs().max() <= 2e-6 * value.abs().max(), name
    live = given["weights"][order] != 0
    placed = torch.full((23,), torch.nan, device=DEVICE).index_copy(0, order[live], shuffled["divergence"])
    torch.testing.assert_close(placed[given["weights"] != 0], whole["divergence"], rtol=1e-6, atol=1e-6)


def test_no_tensor_is_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "chunk_rows", lambda *_, **__: 16)
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            leaves = torch.utils._pytree.tree_leaves(out)
            sizes.extend(t.untyped_storage().nbytes() // t.itemsize for t in leaves if isinstance(t, Tensor))
            return out

    given = inputs(640, 8, 512)
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    with use_backend(COMPILED[0]), Sizes():
        linear_divergence(**given).loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert max(sizes) <= 16 * 512


# -- the head's other options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", COMPILED)
def test_an_adapter_is_the_weight_that_it_stands_for(backend: Backend) -> None:
    given = inputs(9, 8, 33) | {"kind": "jsd"}
    g = torch.Generator().manual_seed(4)
    a, b = torch.randn(3, 8, generator=g).to(DEVICE), torch.randn(33, 3, generator=g).to(DEVICE)
    merged = given | {"weight": given["weight"] + 0.5 * b @ a}
    with use_backend(backend):
        want = run(linear_divergence, merged)
        leaves = a.requires_grad_(), b.requires_grad_(), given["hidden"].requires_grad_()
        out = linear_divergence(**given, lora=HeadLora(a, b, 0.5))
        out.loss.backward()
    torch.testing.assert_close(out.loss[None], want["loss"], rtol=1e-5, atol=1e-6)
    expected = 0.5 * b.T @ want["d_weight"], 0.5 * want["d_weight"] @ a.T, want["d_hidden"]
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("V", [33, 40])
def test_an_accumulator_gets_the_gradient_of_the_weight(in_forward: bool, V: int) -> None:
    given = inputs(9, 8, V, normalizer=3.0)
    given["teacher_weight"] = given["teacher_weight"][:33]
    want = run(linear_divergence, given)
    into = torch.ones(V, 8, device=DEVICE)
    weight = given["weight"].requires_grad_()
    hidden = given["hidden"].requires_grad_()
    out = linear_divergence(**given, weight_grad=into, in_forward=in_forward)
    out.loss.backward()
    assert weight.grad is None or not weight.grad.any()
    torch.testing.assert_close(into - 1, want["d_weight"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad, want["d_hidden"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.loss[None], want["loss"], rtol=1e-6, atol=0)


def test_gradients_are_made_for_what_needs_them() -> None:
    given = inputs(9, 8, 33)
    with torch.no_grad():
        assert not linear_divergence(**given | {"hidden": given["hidden"].requires_grad_()}).loss.requires_grad
    want = run(linear_divergence, given)
    hidden = given["hidden"].detach().requires_grad_()
    frozen = linear_divergence(**given | {"hidden": hidden, "teacher_weight": given["teacher_weight"].requires_grad_()})
    frozen.loss.backward()
    assert given["weight"].grad is None
    assert given["teacher_weight"].grad is None
    assert hidden.grad is not None
    assert hidden.grad.equal(want["d_hidden"])
    out = linear_divergence(**given | {"hidden": hidden})
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="an earlier backward has used its gradients"):
        out.loss.backward()


def test_small_weights_do_not_vanish_in_fp16() -> None:
    given = inputs(9, 8, 33, dtype=torch.float16)
    small = given | {"weights": given["weights"] * 1e-9}
    large, tiny = run(linear_divergence, given), run(linear_divergence, small | {"normalizer": 1e-9})
    torch.testing.assert_close(tiny["d_weight"], large["d_weight"], rtol=1e-2, atol=1e-4)


@pytest.mark.check
def test_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(9, 8, 33, bias=True, temperature="rows") | {"kind": "jsd"}
    calls: list[tuple[Any, ...]] = []
    original = api.linear_divergence_op
    monkeypatch.setattr(api, "linear_divergence_op", lambda *args: calls.append(args) or original(*args))
    run(linear_divergence, given)
    for utils in ("test_schema", "test_faketensor", "test_autograd_registration"):
        torch.library.opcheck(original, calls[-1], test_utils=utils)


# -- the negative: what a wrong call changes --------------------------------------------------------------------------


MISTAKES = (
    "weights on other rows", "a shifted teacher", "another temperature", "the teacher's temperature", "models exchanged"
)  # fmt: skip


@of_each_kind
@pytest.mark.parametrize("wrong", MISTAKES)
def test_a_wrong_call_is_seen(kind: Inputs, wrong: str) -> None:
    given = inputs(30, 16, 97, temperature="rows", teacher_temperature="rows") | kind
    exact = run(plain, given, torch.float64)
    mistaken = dict(given)
    if wrong == "weights on other rows":
        mistaken["weights"] = given["weights"].roll(1)
    elif wrong == "a shifted teacher":
        mistaken["teacher_row"] = torch.arange(30, device=DEVICE).roll(1)
    elif wrong == "another temperature":
        mistaken["temperature"] = given["temperature"].roll(1)
    elif wrong == "the teacher's temperature":
        del mistaken["teacher_temperature"]
    else:
        for name in ("hidden", "weight", "temperature"):
            mistaken[name], mistaken[f"teacher_{name}"] = given[f"teacher_{name}"], given[name]
    got, right = run(linear_divergence, mistaken), run(linear_divergence, given)
    for name in ("d_hidden", "d_weight"):
        assert errors({name: right[name]}, {name: exact[name]})[name] < 1e-5
        assert errors({name: got[name]}, {name: exact[name]})[name] > 1e-2
    if wrong != "models exchanged":  # the sum over all rows may be almost the same
        assert abs(float(got["loss"] / exact["loss"]) - 1) > 1e-3


def test_the_ends_of_the_mixtures() -> None:
    """As in TRL, beta 0 and 1 of the JSD are the two KLs; alpha 0 of a skewed KL is the KL."""
    given = inputs(9, 8, 33)
    ends = {
        "forward_kl": ({"kind": "jsd", "beta": 0}, {"kind": "skew_forward_kl", "alpha": 0.0}),
        "reverse_kl": ({"kind": "jsd", "beta": 1.0}, {"kind": "skew_reverse_kl", "alpha": 0}),
    }
    for kind, others in ends.items():
        want = run(linear_divergence, given | {"kind": kind})
        for other in others:
            got = run(linear_divergence, given | other)
            assert all(got[name].equal(values) for name, values in want.items())


WRONG: list[tuple[Inputs, str]] = [
    ({"kind": "kl"}, "kind must be one of forward_kl, .*total_variation, got 'kl'"),
    ({"kind": "forward_kl", "beta": 0.5}, "beta belongs to kind='jsd', and kind is 'forward_kl'"),
    ({"kind": "jsd", "alpha": 0.5}, "alpha belongs to the skewed KLs, and kind is 'jsd'"),
    ({"kind": "jsd", "beta": 1.5}, "beta must be in 0..1, got 1.5"),
    ({"kind": "jsd", "beta": -0.1}, "beta must be in 0..1, got -0.1"),
    ({"kind": "skew_forward_kl", "alpha": 1.0}, "alpha must be below 1"),
    ({"teacher_hidden": torch.randn(8, 8)}, "9 rows of hidden and 8 of teacher_hidden; pair them by row, teacher_row"),
    ({"teacher_weight": torch.randn(33, 9)}, r"teacher_weight must be \[V, 8\] to fit teacher_hidden"),
    ({"teacher_weight": torch.randn(33, 8).half()}, "teacher_weight is torch.float16 and teacher_hidden torch.float32"),
    (
        {"teacher_hidden": torch.randn(9, 8).double(), "teacher_weight": torch.randn(33, 8).double()},
        "fp64 goes with fp64",
    ),
    ({"teacher_bias": torch.randn(32)}, r"teacher_bias must be \[33\] to fit teacher_weight"),
    ({"teacher_hidden": torch.randn(9, 8).requires_grad_()}, "teacher_hidden is a constant of the loss"),
    ({"teacher_softcap": 0.0}, "teacher_softcap must be positive"),
    ({"temperature": 0.0}, "temperature must be positive"),
    ({"teacher_temperature": torch.zeros(9)}, "teacher_temperature must be positive"),
    ({"weights": torch.ones(8)}, r"weights must be \[9\]"),
    ({"weights": torch.full((9,), torch.nan)}, "weights must be finite"),
    ({"mask": torch.ones(9)}, "mask must be bool"),
    ({"normalizer": -1.0}, "normalizer must be finite and not negative"),
    ({"in_forward": True}, "in_forward adds to weight_grad in the forward; give weight_grad"),
    ({"row": torch.arange(8)}, "8 rows of hidden and 9 of teacher_hidden"),
]


@pytest.mark.skipif(HAS_GPU, reason="values are checked on a CPU")
@pytest.mark.parametrize(("wrong", "sentence"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_mistakes_are_named(wrong: Inputs, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^linear_divergence: .*{sentence}"):
        linear_divergence(**inputs(9, 8, 33) | wrong)


def test_a_missing_teacher_is_named() -> None:
    for name in ("teacher_hidden", "teacher_weight"):
        with pytest.raises(TypeError, match=f"linear_divergence: {name} must be a tensor, got None"):
            linear_divergence(**inputs(9, 8, 33) | {name: None})


@pytest.mark.skipif(HAS_GPU, reason="values are checked on a CPU")
def test_rows_out_of_range_are_named() -> None:
    given = inputs(9, 8, 33) | {"weights": torch.ones(9)}
    for name in ("row", "teacher_row"):
        with pytest.raises(IndexError, match=f"linear_divergence: {name} must be in 0..8, got 1..9"):
            linear_divergence(**given | {name: torch.arange(1, 10)})
