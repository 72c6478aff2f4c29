"""The gradient of a bf16 head from stored exponentials, as on a GPU: products of bf16 operands with sums in fp32.

The row kernels run in Triton's interpreter, and by their definition; the products are emulated.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels.linear_logprob import head as heads
from rolltree.kernels.linear_logprob import reference
from rolltree.kernels.linear_logprob.chunked import RowInputs
from rolltree.kernels.linear_logprob.head import Head, HeadGradient
from rolltree.kernels.linear_logprob.targets import Targets
from rolltree.kernels.linear_policy_loss import fused
from rolltree.kernels.linear_policy_loss.exponentials import fits

from .on_device import needs_interpreter

BACKENDS = ["reference", pytest.param("triton", marks=needs_interpreter)]


class EmulatedHead(Head):
    """A bf16 head as a GPU multiplies it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.float(), None, None, torch.float32)
        self.weight, self.dtype, self.bf16 = weight, torch.bfloat16, False

    def _operand(self, t: Tensor) -> Tensor:
        return t

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        return out.copy_(hidden.float() @ self.weight.float().T)

    def to_hidden(self, d_logits: Tensor, out: Tensor) -> None:
        out.copy_(self.times_weight(d_logits))

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        assert left.dtype == right.dtype == torch.bfloat16
        return left.float() @ right.float()

    def _add(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        out += self._product(left, right)


class Given:
    """A loss with derivatives ``a`` [P] by the log-probs."""

    def __init__(self, a: Tensor, needs_entropy: bool) -> None:
        self.a, self.needs_entropy = a, needs_entropy

    def derivatives(self, targets: slice, *_: Any, add_paths: bool = True) -> tuple[Tensor, Tensor | None]:
        return self.a[targets], torch.zeros_like(self.a[targets]) if self.needs_entropy else None


def kernels(backend: str) -> Any:
    if backend == "reference":
        return reference
    from rolltree.kernels.linear_logprob import triton

    return triton


def made(R: int, H: int, V: int, counts: Tensor | None = None, sharp: float = 1.0) -> tuple[fused.Inputs, Tensor]:
    random = torch.Generator().manual_seed(R + H + V)
    hidden = torch.randn(R, H, generator=random).bfloat16()
    weight = (sharp * H**-0.5 * torch.randn(V, H, generator=random)).bfloat16()
    counts = torch.ones(R, dtype=torch.int64) if counts is None else counts
    start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    P = int(start[-1])
    targets = Targets(start, torch.randint(0, V, (P,), generator=random), None, bool((counts == 1).all()))
    temperature = 0.5 + torch.rand(R, generator=random)
    return fused.Inputs(hidden, EmulatedHead(weight), targets, temperature, 0.0), torch.randn(P, generator=random)


def gradients(rows: Any, inputs: fused.Inputs, a: Tensor, *, entropy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden and weight, and the scores; ``entropy``: by the gradient of the logits."""
    need = HeadGradient(inputs.head, True, False, False)
    R, P = len(inputs.hidden), len(a)
    middle = R // 3
    cuts = fused.Cuts([0, middle, R], [0, int(inputs.targets.start[middle]), P], [])
    assert fits(rows, inputs.head, 0.0, need, inputs.targets)
    d_hidden, scores = fused.one_pass(rows, inputs, Given(a, entropy), cuts, True, need)
    return d_hidden, need.results()[0], scores


def exact(inputs: fused.Inputs, a: Tensor) -> list[Tensor]:
    hidden, weight = (t.double().requires_grad_() for t in (inputs.hidden, inputs.head.weight))
    row = inputs.targets.row
    logp = (hidden @ weight.T / inputs.temperature[:, None].double()).log_softmax(-1)
    return list(torch.autograd.grad(logp[row, inputs.targets.target], (hidden, weight), a.double()))


def errors(got: tuple[Tensor, ...], want: list[Tensor]) -> list[float]:
    return [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=False)]


SEVERAL = torch.tensor([0, 1, 3, 1, 2, 0, 1, 1, 4, 1, 1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("R", "H", "V", "counts", "sharp"),
    [
        (13, 16, 97, None, 1.0),
        (11, 24, 333, SEVERAL, 4.0),
        pytest.param(40, 64, 5003, None, 1.0, marks=pytest.mark.check),
        pytest.param(40, 64, 2048, None, 12.0, marks=pytest.mark.check),
    ],
)
def test_gradients_are_nearer_than_those_of_rounded_logits(
    backend: str, R: int, H: int, V: int, counts: Tensor | None, sharp: float
) -> None:
    """Those by the gradient of the logits in bf16, whose one-hot part is rounded too."""
    rows, (inputs, a) = kernels(backend), made(R, H, V, counts, sharp)
    found, before = (gradients(rows, inputs, a, entropy=entropy) for entropy in (False, True))
    assert torch.equal(found[2], before[2])  # log-probs and entropies, bit by bit
    want = exact(inputs, a)
    for now, then in zip(errors(found, want), errors(before, want), strict=True):
        assert now <= 1.05 * then
    assert max(errors(found, want)) < 4e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_beyond_the_range_are_stored_again(backend: str) -> None:
    """Targets with probabilities of e^-29 to e^-200, logits of -inf and equal ones, and rows that are left out."""
    rows = kernels(backend)
    logits = torch.zeros(7, 50)
    logits[0, 3], logits[1, 3], logits[2, 3], logits[3, 3] = 29.0, 31.0, 70.0, 200.0
    logits[4, 10:] = -torch.inf
    logits[5, 7] = torch.nan
    logits[6, 0] = -torch.inf  # of the target
    targets = torch.arange(8)
    row_inputs = RowInputs(logits, torch.zeros(0), torch.ones(7), 0.0, targets, torch.zeros(7, dtype=torch.int64))
    logprob, logsumexp, correction, entropy, base = (torch.zeros(7) for _ in range(5))
    out = torch.full((7, 64), 9.0, dtype=torch.float32)[:, :50]
    rows.exponentials(row_inputs, logprob, logsumexp, correction, entropy, base, out)
    assert base[:5].tolist() == [0.0, 31.0, 70.0, 200.0, 0.0]
    assert not out[5].any()
    assert base[5:].tolist() == [0.0, 0.0]
    sound = [0, 1, 2, 3, 4, 6]
    share = (out.double() * (base - logsumexp - correction).double().exp()[:, None])[sound]
    torch.testing.assert_close(share, logits.double().softmax(-1)[sound], rtol=1e-5, atol=1e-30)
    again = [torch.zeros(7) for _ in range(4)]
    rows.statistics(row_inputs, *again, torch.zeros(0))
    for got, want in zip((logprob, logsumexp, correction, entropy), again, strict=True):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_gradient_are_zero_whatever_they_hold(backend: str) -> None:
    rows, (inputs, a) = kernels(backend), made(9, 16, 80)
    inputs.hidden[4] = torch.nan
    a[[2, 4]] = 0.0
    d_hidden, d_weight, _ = gradients(rows, inputs, a)
    assert d_hidden.isfinite().all()
    assert d_weight.isfinite().all()
    assert not d_hidden[[2, 4]].any()
    a[4] = 1.0
    d_hidden, d_weight, _ = gradients(rows, inputs, a)
    assert d_hidden[4].isnan().all()
    assert d_hidden[:4].isfinite().all()
    assert d_weight.isnan().any()
    inputs.targets.target[3] = 80  # outside of the vocabulary: a GPU cannot check it, and scores NaN
    a[4] = 0.0
    scores = gradients(rows, inputs, a)[2] if backend == "triton" else None
    assert scores is None or (scores[0, 3].isnan() and scores[0, :3].isfinite().all())


def test_other_heads_keep_the_gradient_of_their_logits() -> None:
    inputs, _ = made(9, 16, 80)
    need = HeadGradient(inputs.head, True, False, False)
    assert fits(reference, inputs.head, 0.0, need, inputs.targets)
    assert not fits(reference, inputs.head, 30.0, need, inputs.targets)
    assert not fits(object(), inputs.head, 0.0, need, inputs.targets)
    assert not fits(reference, inputs.head, 0.0, HeadGradient(inputs.head, True, True, False), inputs.targets)
    many = inputs.targets._replace(target=torch.zeros(50, dtype=torch.int64))
    assert not fits(reference, inputs.head, 0.0, need, many)
    adapted = heads.HeadLora(torch.ones(2, 16).bfloat16(), torch.ones(80, 2).bfloat16(), 1.0)
    inputs.head.lora = adapted
    assert not fits(reference, inputs.head, 0.0, need, inputs.targets)
    plain = Head(torch.ones(80, 16), None, None, torch.float32)
    assert not fits(reference, plain, 0.0, need, inputs.targets)
