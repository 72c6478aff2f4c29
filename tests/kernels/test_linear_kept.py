"""linear_logprob over kept sets equals a softmax over these alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import linear_logprob
from rolltree.kernels.linear_logprob import kept as module

from .test_linear_logprob import DEVICE, inputs

NAMES = ("logprob", "logsumexp", "entropy", "sum_p2")


def kept_sets(given: dict[str, Any], V: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random sets of random sizes, in random order, that hold the targets; some ids twice."""
    g = torch.Generator().manual_seed(seed)
    sets = []
    rows = given.get("row", torch.arange(len(given["target"])))
    for i in range(len(given["hidden"])):
        own = given["target"].cpu()[rows.cpu() == i].tolist()
        more = torch.randint(0, V, (int(torch.randint(0, 9, (), generator=g)),), generator=g).tolist()
        ids = torch.tensor(own + more + more[:1], dtype=torch.int64)
        sets.append(ids[torch.randperm(len(ids), generator=g)])
    lengths = torch.tensor([0, *(len(s) for s in sets)])
    return lengths.cumsum(0).to(DEVICE), torch.cat(sets).to(DEVICE)


def dense(given: dict[str, Any], kept: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    z = given["hidden"] @ given["weight"].T + given.get("bias", 0)
    if cap := given.get("softcap"):
        z = cap * torch.tanh(z / cap)
    temperature = given.get("temperature", 1.0)
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    mask = torch.zeros_like(z, dtype=torch.bool)
    rows = torch.repeat_interleave(torch.arange(len(z), device=z.device), kept[0].diff())
    mask[rows, kept[1]] = True
    logp = z.masked_fill(~mask, -torch.inf).log_softmax(-1)
    p = logp.exp().nan_to_num(0)
    row = given.get("row", torch.arange(len(given["target"]), device=z.device))
    return {
        "logprob": logp[row, given["target"]],
        "logsumexp": z.masked_fill(~mask, -torch.inf).logsumexp(-1),
        "entropy": -(p * logp.masked_fill(~mask, 0).nan_to_num(0)).sum(-1),
        "sum_p2": (p * p).sum(-1),
    }


def gradients(out: dict[str, Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for value in out.values():
        upstream = torch.randn(len(value), generator=g, dtype=torch.float64).to(DEVICE)
        loss = loss + torch.where(value.isfinite(), value.double() * upstream, 0).sum()
    return torch.autograd.grad(loss, leaves)


CASES = {
    "one a row": inputs(9, 16, 65),
    "pairs": inputs(9, 16, 65, M=25),  # some rows keep nothing but chance ids
    "everything": inputs(9, 16, 65, M=25, bias=True, softcap=3.0, temperature="rows"),
    "large vocabulary": inputs(5, 16, 50257),
    "bf16": inputs(9, 16, 65, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_a_softmax_over_the_kept(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(CASES[case])
    kept = kept_sets(given, len(given["weight"]))
    names = [n for n in ("hidden", "weight", "bias") if n in given]
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    for n in names:
        given[n] = given[n].clone().requires_grad_()
        wide[n] = wide[n].requires_grad_()
    exact = dense(wide, kept)
    truth = gradients(exact, [wide[n] for n in names])
    for size in (module.ELEMENTS_AT_ONCE, 48):  # in parts of three rows of the weight
        monkeypatch.setattr(module, "ELEMENTS_AT_ONCE", size)
        out = linear_logprob(**given, kept=kept, want=("entropy", "sum_p2"))
        got = {n: getattr(out, n) for n in NAMES}
        half = given["hidden"].dtype == torch.bfloat16
        for n in NAMES:
            torch.testing.assert_close(got[n].double(), exact[n], rtol=1e-5, atol=1e-5)
        for a, b in zip(gradients(got, [given[n] for n in names]), truth, strict=True):
            assert (a.double() - b).abs().max() <= (4e-3 if half else 2e-6) * b.abs().max()


def test_gradcheck() -> None:
    given = inputs(5, 3, 11, M=8)
    kept = kept_sets(given, 11)
    hidden, weight = (given[n].double().requires_grad_() for n in ("hidden", "weight"))

    def f(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        rest = {"target": given["target"], "row": given["row"], "kept": kept, "softcap": 2.0}
        out = linear_logprob(hidden, weight, **rest, want=("entropy", "sum_p2"))
        assert out.entropy is not None
        assert out.sum_p2 is not None
        return out.logprob, out.entropy, out.sum_p2

    assert torch.autograd.gradcheck(f, (hidden, weight))


def test_a_row_does_not_see_the_batch() -> None:
    given = inputs(9, 16, 65)
    indptr, ids = kept_sets(given, 65)
    whole = linear_logprob(**given, kept=(indptr, ids), want=("entropy",))
    for i in (0, 4, 8):
        alone = linear_logprob(
            given["hidden"][i : i + 1], given["weight"], given["target"][i : i + 1], want=("entropy",),
            kept=(torch.tensor([0, int(indptr[i + 1] - indptr[i])], device=DEVICE), ids[indptr[i] : indptr[i + 1]]),
        )  # fmt: skip
        assert alone.logprob[0] == whole.logprob[i]
        assert alone.entropy is not None
        assert whole.entropy is not None
        assert alone.entropy[0] == whole.entropy[i]


def test_all_kept_is_the_whole_softmax() -> None:
    given = inputs(7, 16, 33)
    kept = (torch.arange(8, device=DEVICE) * 33, torch.arange(33, device=DEVICE).repeat(7))
    got, want = (linear_logprob(**given, **o, want=("entropy",)) for o in ({"kept": kept}, {}))
    for n in ("logprob", "logsumexp", "entropy"):
        torch.testing.assert_close(getattr(got, n), getattr(want, n), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU would have to be waited for")
@pytest.mark.parametrize(
    ("indptr", "ids", "error", "message"),
    [
        ([0, 1, 2], [3, 4], ValueError, "target 5 in place 1 is not among the kept ids of row 1; keep every sampled"),
        ([0, 1, 3], [3, 5], ValueError, "indptr must rise from 0 to its 2 ids"),
        ([0, 1, 2], [3, 17], IndexError, r"kept's ids must be in 0..16, got 3..17"),
        ([0, 2], [3, 5], ValueError, r"kept's indptr must be \[3\]"),
    ],
)
def test_mistakes_are_named(indptr: list[int], ids: list[int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_logprob(
            torch.zeros(2, 8), torch.zeros(17, 8), torch.tensor([3, 5]), kept=(torch.tensor(indptr), torch.tensor(ids))
        )
