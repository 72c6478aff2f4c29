"""linear_topk_divergence: a teacher of whom K log-probs a row are known, against formulas in fp64 and the full op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import DivergenceOutput, linear_divergence, linear_topk_divergence, use_backend
from rolltree.kernels.dispatch import Backend
from rolltree.kernels.linear_divergence import api
from rolltree.kernels.linear_logprob import chunked as tiles

from .test_linear_divergence import OPTIONS, TRAINED, Inputs, kind_name, of_each_kind, on_each_backend
from .test_linear_logprob import COMPILED, DEVICE, errors

with_the_rest = pytest.mark.parametrize("rest", [False, True], ids=["partial", "rest"])


def inputs(N: int, H: int, V: int, K: int, dtype: torch.dtype = torch.float32, **options: Any) -> Inputs:
    """Random rows with a random teacher's K most probable ids in a random order; the last row has one fewer."""
    g = torch.Generator().manual_seed(N + V + K)
    made: Inputs = {
        "hidden": torch.randn(N, H, generator=g).to(DEVICE, dtype),
        "weight": (torch.randn(V, H, generator=g) * 3 * H**-0.5).to(DEVICE, dtype),
        "bias": torch.randn(V, generator=g).to(DEVICE, dtype),
        "weights": torch.rand(N, generator=g).to(DEVICE) * (torch.arange(N, device=DEVICE) % 3 != 1),
    }
    logprob, ids = (2 * torch.randn(N, V, generator=g)).log_softmax(-1).topk(K)
    order = torch.randperm(K, generator=g)
    made |= {"ids": ids[:, order].to(DEVICE), "teacher_logprob": logprob[:, order].to(DEVICE)}
    if 1 < K < V and N:
        made["ids"][-1, 0] = -1
        made["teacher_logprob"][-1, 0] = torch.nan
    return made | options


def plain(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    teacher_logprob: Tensor,
    *,
    bias: Tensor,
    weights: Tensor,
    rest: bool,
    kind: str,
    beta: float = 0.5,
    alpha: float = 0.1,
    temperature: float = 1.0,
) -> DivergenceOutput:
    q_all = (torch.nn.functional.linear(hidden, weight, bias).double() / temperature).log_softmax(-1)
    values = []
    for row in range(len(ids)):
        kept = ids[row] >= 0
        q, p = q_all[row][ids[row][kept]].exp(), teacher_logprob[row][kept].double().exp()
        if rest and kept.sum() < len(weight):
            q, p = (torch.cat([x, 1 - x.sum()[None]]) for x in (q, p))

        def kl(a: Tensor, b: Tensor) -> Tensor:
            return (a * (a / b).log()).sum()

        def mixture(share: float, p: Tensor = p, q: Tensor = q) -> Tensor:
            return share * p + (1 - share) * q

        match kind:
            case "forward_kl":
                value = kl(p, q)
            case "reverse_kl":
                value = kl(q, p)
            case "jsd":
                value = beta * kl(p, mixture(beta)) + (1 - beta) * kl(q, mixture(beta))
            case "skew_forward_kl":
                value = kl(p, mixture(alpha))
            case "skew_reverse_kl":
                value = kl(q, mixture(1 - alpha))
            case _:
                value = (p - q).abs().sum() / 2
        values.append(value)
    divergence = torch.stack(values)
    return DivergenceOutput((weights * divergence).sum(), divergence, -(q_all.exp() * q_all).sum(-1), None)


def run(f: Any, given: Inputs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    given = dict(given)
    for name in TRAINED:
        given[name] = given[name].detach().to(dtype or given[name].dtype, copy=True).requires_grad_()
    out = f(**given)
    out.loss.backward()
    live = given["weights"] != 0
    values = {"loss": out.loss.detach()[None], "divergence": out.divergence.detach()[live]}
    values["entropy"] = out.entropy.detach()[live]
    return values | {f"d_{name}": given[name].grad for name in TRAINED}


@of_each_kind
@with_the_rest
@pytest.mark.parametrize("K", [1, 5])
@on_each_backend
def test_against_fp64(backend: Backend, K: int, rest: bool, kind: Inputs) -> None:
    given = inputs(11, 8, 33, K, temperature=0.8) | kind | {"rest": rest}
    exact = run(plain, given, torch.float64)
    with use_backend(backend):
        got = run(linear_topk_divergence, given)
    for name, error in errors(got, exact).items():
        assert error <= 5e-6, f"{name}: {error:.1e}"


@pytest.mark.slow(but=19)
@pytest.mark.check(but=10)
@pytest.mark.parametrize("kind", OPTIONS, ids=kind_name)
@with_the_rest
@on_each_backend
def test_all_ids_are_the_whole_vocabulary(backend: Backend, rest: bool, kind: Inputs) -> None:
    """With K = V, whether the rest counts or not, it is `linear_divergence` of the teacher."""
    given = inputs(9, 8, 21, 21) | kind
    z = torch.empty(9, 21, device=DEVICE).scatter_(1, given["ids"], given["teacher_logprob"])
    teacher = {"teacher_hidden": z, "teacher_weight": torch.eye(21, device=DEVICE)}
    full = {name: value for name, value in given.items() if name not in ("ids", "teacher_logprob")}
    with use_backend(backend):
        got, want = run(linear_topk_divergence, given | {"rest": rest}), run(linear_divergence, full | teacher)
    for name, values in want.items():
        torch.testing.assert_close(got[name], values, rtol=2e-5, atol=2e-6)


@of_each_kind
def test_the_rest_as_one_class_is_at_most_the_whole(kind: Inputs) -> None:
    """And it grows with K: classes are split (the data processing inequality)."""
    full = inputs(9, 8, 33, 33) | kind
    order = full["teacher_logprob"].argsort(1, descending=True)
    ids, logprob = full["ids"].gather(1, order), full["teacher_logprob"].gather(1, order)
    before = torch.zeros(6, device=DEVICE)
    for K in (1, 4, 12, 33):
        cut = full | {"ids": ids[:, :K], "teacher_logprob": logprob[:, :K], "rest": True}
        value = run(linear_topk_divergence, cut)["divergence"]
        assert (value >= before - 1e-6).all()
        before = value


@with_the_rest
@pytest.mark.parametrize("backend", COMPILED)
def test_rows_chunks_and_masked_rows(backend: Backend, rest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(23, 8, 33, 5) | {"kind": "jsd", "rest": rest}
    row = torch.randint(0, 23, (23,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    mapped = given | {"row": row}
    gathered = {k: v for k, v in mapped.items() if k != "row"} | {"hidden": given["hidden"][row]}
    with use_backend(backend):
        want = run(linear_topk_divergence, gathered)
        got = run(linear_topk_divergence, mapped)
        monkeypatch.setattr(tiles, "chunk_rows", lambda N, V, device: 5)
        pieces = run(linear_topk_divergence, mapped)
        dead = given["weights"] == 0
        spoiled = gathered | {"hidden": torch.where(dead[:, None], torch.nan, gathered["hidden"])}
        spoiled |= {"ids": torch.where(dead[:, None], 10**6, given["ids"])}
        alive = run(linear_topk_divergence, spoiled)
    for name in ("loss", "divergence", "entropy", "d_weight", "d_bias"):
        for values in (got, pieces, alive):
            torch.testing.assert_close(values[name], want[name], rtol=1e-5, atol=2e-6)
    summed = torch.zeros_like(given["hidden"]).index_add(0, row, want["d_hidden"])
    torch.testing.assert_close(got["d_hidden"], summed, rtol=1e-5, atol=2e-6)


@of_each_kind
def test_a_teacher_that_is_sure(kind: Inputs) -> None:
    """The rest counts as the least that fp32 resolves where the K probabilities round to 1."""
    given = inputs(4, 8, 33, 2) | kind | {"weights": torch.ones(4, device=DEVICE), "rest": True}
    given["ids"] = torch.tensor([[3, 5]] * 4, device=DEVICE)
    given["teacher_logprob"] = torch.tensor([[0.0, -40.0]] * 4, device=DEVICE)
    for name, values in run(linear_topk_divergence, given).items():
        assert values.isfinite().all(), name


@pytest.mark.parametrize("wrong", ["weights on other rows", "a shifted teacher", "another temperature", "no rest"])
def test_a_wrong_call_is_seen(wrong: str) -> None:
    given = inputs(12, 8, 33, 5) | {"kind": "reverse_kl", "rest": True}
    changed = {
        "weights on other rows": {"weights": given["weights"].roll(1)},
        "a shifted teacher": {"ids": given["ids"].roll(1, 0), "teacher_logprob": given["teacher_logprob"].roll(1, 0)},
        "another temperature": {"temperature": 1.1},
        "no rest": {"rest": False},
    }[wrong]
    exact = run(plain, given, torch.float64)
    got = run(linear_topk_divergence, given | changed)
    for name in ("loss", "d_hidden", "d_weight"):
        assert errors({name: got[name]}, {name: exact[name]})[name] > 1e-2


@pytest.mark.skipif(DEVICE.type == "cuda", reason="values are checked on a CPU")
@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"ids": torch.tensor([[0, 33]] * 4)}, IndexError, "ids must be in -1..32, got 0..33"),
        ({"ids": torch.tensor([[2, 2]] * 4)}, ValueError, "ids name 2 twice in one row; add up its probabilities"),
        ({"ids": torch.tensor([[0, 1]] * 3)}, ValueError, r"ids must be \[4, K\]"),
        ({"teacher_logprob": torch.zeros(4, 3)}, ValueError, r"teacher_logprob must be \[4, 2\] like ids"),
        ({"teacher_logprob": torch.zeros(4, 2)}, ValueError, "probabilities of teacher_logprob add up to 2.0 in a row"),
        ({"teacher_logprob": torch.full((4, 2), torch.nan)}, ValueError, "teacher_logprob must hold log-probs"),
    ],
)
def test_mistakes_are_named(wrong: Inputs, error: type[Exception], sentence: str) -> None:
    given = inputs(4, 8, 33, 2) | {"ids": torch.tensor([[0, 1]] * 4), "teacher_logprob": torch.full((4, 2), -1.0)}
    given |= {"weights": torch.ones(4)}
    with pytest.raises(error, match=f"^linear_topk_divergence: .*{sentence}"):
        linear_topk_divergence(**given | wrong, rest=True)


@pytest.mark.check
def test_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(9, 8, 33, 5) | {"kind": "jsd", "rest": True}
    calls: list[tuple[Any, ...]] = []
    original = api.linear_topk_divergence_op
    monkeypatch.setattr(api, "linear_topk_divergence_op", lambda *args: calls.append(args) or original(*args))
    run(linear_topk_divergence, given)
    for utils in ("test_schema", "test_faketensor", "test_autograd_registration"):
        torch.library.opcheck(original, calls[-1], test_utils=utils)
