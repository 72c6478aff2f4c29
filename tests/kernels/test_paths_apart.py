"""No value of one path, row or tree reaches another: -inf, inf, NaN and huge values in every place of every op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from rolltree.kernels import (
    Objective,
    PathIndex,
    PolicyFields,
    gae,
    linear_logprob,
    linear_policy_loss,
    pair_loss,
    policy_loss,
    sample_tokens,
    tree_attention,
    tree_decode_attention,
    use_backend,
)
from rolltree.kernels.policy_loss import PRESETS
from rolltree.kernels.policy_loss.pairs import WITHOUT_REFERENCE, PairLoss
from rolltree.kernels.tree_recurrence import RecurrencePlan, find_segments, tree_convolution, tree_recurrence

from .formulas import BACKENDS, LENGTHS, Tree, batch, flat
from .on_device import interpret_some
from .test_tree_decode import BACKENDS as DECODE_BACKENDS
from .test_tree_decode import forest

SPOILED = (-torch.inf, torch.inf, torch.nan, -3e38)
M = sum(LENGTHS)
OF_TARGETS = (
    "logprob", "old", "ref", "behaviour", "proximal", "teacher", "entropy", "token_weight", "clip_low", "clip_high",
    "pass_rate",
)  # fmt: skip


def check(
    f: Callable[..., list[Tensor]],
    inputs: list[Tensor],
    path: list[Tensor],
    of: list[Tensor],
    values: tuple[float, ...] = SPOILED,
) -> None:
    """Results ``f(*inputs)`` of other paths keep their bits whatever one value of a path is.

    ``path`` has the path of each row of the inputs, ``of`` that of each row of the results.
    """
    want = f(*inputs)
    for k, x in enumerate(inputs):
        for row in range(len(x)):
            for value in values:
                changed = x.clone()
                changed[row].view(-1)[-1] = value
                got = f(*inputs[:k], changed, *inputs[k + 1 :])
                for n, (a, b) in enumerate(zip(got, want, strict=True)):
                    others = of[n] != path[k][row]
                    assert torch.equal(a[others], b[others]), (f"input {k}", row, value, f"result {n}")


QUICK = ("gspo", "gmpo", "grpo")
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.check)
    for name, objective in PRESETS.items()
    if objective.scope != "batch" and name != "segment_ratio"  # whose segments cross sequences in these batches
]


@pytest.mark.slow(but=7)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", NAMES)
def test_policy_loss(name: str) -> None:
    objective = Objective.preset(name, kl_coef=0.1, entropy_coef=0.1)
    check_policy(objective)
    if name == "grpo":
        check_policy(replace(objective, mismatch="truncate", mismatch_level="sequence"))
        check_policy(replace(objective, off_policy_delta=0.1))


def check_policy(objective: Objective) -> None:
    b = batch(torch.float32)
    names = [n for n in OF_TARGETS if n not in ("token_weight", "clip_low", "clip_high") or n in objective.needs]
    few = torch.tensor([0, 6, 14])  # of the sequences of 5, 9 and 3 tokens

    def f(*values: Tensor) -> list[Tensor]:
        some = {n: b[n].index_copy(0, few, v) for n, v in zip(names, values, strict=True)}
        lp, h = some["logprob"].requires_grad_(), some["entropy"].requires_grad_()
        out = policy_loss(lp, flat(b | some, objective.needs), objective, normalizer=10, entropy=h)
        return list(torch.autograd.grad(out.loss, (lp, h)))

    sequence = b["sequence"]
    check(f, [b[n][few] for n in names], [sequence[few]] * len(names), [sequence] * 2)


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov", "token_entropy_mask"])
def test_a_choice_of_the_whole_batch_leaves_out_what_is_not_finite(name: str) -> None:
    objective, b = Objective.preset(name), batch(torch.float32)
    for value in SPOILED[:3]:
        with_mask, spoiled = (b | {n: b[n].clone() for n in ("mask", "logprob", "entropy")} for _ in range(2))
        with_mask["mask"][0] = False
        spoiled["logprob"][0] = spoiled["entropy"][0] = value
        grads = []
        for c in (with_mask, spoiled):
            lp = c["logprob"].requires_grad_()
            out = policy_loss(lp, flat(c, objective.needs), objective, normalizer=10, entropy=c["entropy"])
            grads.append(torch.autograd.grad(out.loss, lp)[0][1:])
        torch.testing.assert_close(*grads)


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", ["gspo", "gmpo", "vespo", "grpo"])
def test_policy_loss_on_trees(name: str) -> None:
    """A target reaches the leaves below it, and through these the targets on their paths, and no others."""
    objective, t = Objective.preset(name), Tree(3)
    below = torch.zeros(len(t.paths), len(t.ends), dtype=torch.bool)
    for leaf, path in enumerate(t.paths):
        below[leaf, path] = True
    met = below.float().T @ below.float() > 0  # [M, M]: on a path with each other
    fields = t.fields(objective.aggregation)

    def grad(logprob: Tensor) -> Tensor:
        lp = logprob.clone().requires_grad_()
        return torch.autograd.grad(policy_loss(lp, fields, objective, normalizer=10).loss, lp)[0]

    want = grad(t.logprob)
    for place in range(len(t.ends)):
        for value in SPOILED:
            got = grad(t.logprob.index_fill(0, torch.tensor([place]), value))
            assert torch.equal(got[~met[place]], want[~met[place]]), (place, value)


@pytest.mark.slow
def test_sums_of_paths_that_begin_within_the_tree() -> None:
    """Sums and their gradients are those of a product with a dense matrix, and each of its own targets alone."""
    for seed in range(4):
        t = Tree(seed)
        end = torch.tensor(t.ends)
        starts = [len(p) // 2 - 1 for p in t.paths]
        of = torch.zeros(len(t.paths), len(end), dtype=torch.float64)
        for leaf, (path, start) in enumerate(zip(t.paths, starts, strict=True)):
            of[leaf, path[start + 1 :]] = 1
        last = torch.tensor([p[-1] if p else -1 for p in t.paths])
        first = torch.tensor([p[i] if i >= 0 else -1 for p, i in zip(t.paths, starts, strict=True)])
        index = PathIndex(end, last, t.length, None, None, leaf_start=first)
        x = torch.randn(len(end), dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(index.sum(x), of @ x)
        torch.testing.assert_close(index.spread(of @ x.detach()), of.T @ (of @ x.detach()))
        assert torch.autograd.gradcheck(index.sum, (x,))
        assert torch.autograd.gradgradcheck(index.sum, (x,))
        for place in range(len(end)):
            for value in SPOILED:
                spoiled = index.sum(x.detach().index_fill(0, torch.tensor([place]), value))
                apart = of[:, place] == 0
                assert torch.equal(spoiled[apart], index.sum(x.detach())[apart])
        for leaf in range(len(last)):
            g = torch.ones(len(last), dtype=torch.float64)
            for value in SPOILED:
                spoiled = index.spread(g.index_fill(0, torch.tensor([leaf]), value))
                apart = of[leaf] == 0
                assert torch.equal(spoiled[apart], index.spread(g)[apart])


@pytest.mark.parametrize("kind", get_args(PairLoss))
def test_pair_loss(kind: PairLoss) -> None:
    paths = PolicyFields.flat(torch.ones(6), cu_seqlens=torch.arange(0, 13, 2)).paths
    assert paths is not None
    pair = torch.tensor([0] * 4 + [1] * 4 + [2, 2, 3, 3])

    def f(logprob: Tensor, ref: Tensor) -> list[Tensor]:
        lp = logprob.clone().requires_grad_()
        given = {} if kind in WITHOUT_REFERENCE else {"ref_logprob": ref}
        out = pair_loss(lp, paths, torch.tensor([0, 2]), torch.tensor([1, 3]), kind, normalizer=2, **given)
        return [torch.autograd.grad(out.loss, lp)[0]]

    check(f, [-torch.rand(12) - 0.1 for _ in range(2)], [pair] * 2, [pair])


def test_gae() -> None:
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    path = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def f(reward: Tensor, value: Tensor, bootstrap: Tensor) -> list[Tensor]:
        return list(gae(reward, value, cu, bootstrap=bootstrap, gamma=0.9, lam=0.8))

    of_sequences = torch.arange(len(LENGTHS))
    check(f, [torch.randn(M), torch.randn(M), torch.randn(len(LENGTHS))], [path, path, of_sequences], [path] * 2)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_linear_logprob(backend: str) -> None:
    row, weight = torch.tensor([0, 0, 1, 2, 2, 2, 3]), torch.randn(33, 8)
    target, each = torch.arange(7), torch.arange(4)

    def f(hidden: Tensor, of_targets: Tensor, of_rows: Tensor) -> list[Tensor]:
        h = hidden.clone().requires_grad_()
        with use_backend(backend):
            out = linear_logprob(h, weight, target, row=row, want=("entropy",))
            grad = torch.autograd.grad((out.logprob, out.entropy), h, (of_targets, of_rows))[0]
        return [grad, out.logprob.detach(), out.logsumexp.detach()]

    check(f, [torch.randn(4, 8), torch.randn(7), torch.randn(4)], [each, row, each], [each, row, each])


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", ["dapo", "gspo", "gmpo"])
def test_linear_policy_loss(name: str) -> None:
    weight, target, cu = torch.randn(33, 8), torch.arange(12), torch.tensor([0, 4, 8, 12])
    objective, path = Objective.preset(name, kl_coef=0.1), torch.arange(12) // 4

    def f(hidden: Tensor, old: Tensor, ref: Tensor) -> list[Tensor]:
        h = hidden.clone().requires_grad_()
        fields = PolicyFields.flat(torch.tensor([1.0, -1, 0.5]), old_logprob=old, ref_logprob=ref, cu_seqlens=cu)
        return list(torch.autograd.grad(linear_policy_loss(h, weight, target, fields, objective, normalizer=3).loss, h))

    check(f, [torch.randn(12, 8), -3 - torch.rand(12), -3 - torch.rand(12)], [path] * 3, [path])


ROOT = torch.tensor([0] * 7 + [1] * 5 + [2, 3] + [4] * 4)  # two trees, two rows of padding and a sequence
END = torch.tensor([7, 7, 4, 4, 7, 7, 7, *[12] * 5, 13, 14, *[18] * 4], dtype=torch.int32)
DEPTH = torch.tensor([0, 1, 2, 3, 2, 3, 4, *range(5), 0, 0, *range(4)])


ATTENTION = [{}, {"window": 2, "position": DEPTH}, {"sink": torch.ones(2)}]


@pytest.mark.parametrize(("backend", "options"), interpret_some(BACKENDS, ATTENTION, ()))
def test_tree_attention(backend: str, options: dict[str, Any]) -> None:
    few = torch.tensor([3, 12])

    def f(*rows: Tensor) -> list[Tensor]:
        x = [whole.index_copy(0, few, some) for whole, some in zip(given, rows, strict=True)]
        leaves = [t.requires_grad_() for t in x[:3]]
        with use_backend(backend):
            out = tree_attention(*leaves, END, **options)
            return [out.detach(), *torch.autograd.grad(out, leaves, x[3])]

    given = [torch.randn(18, 2, 16) for _ in range(4)]
    check(f, [x[few] for x in given], [ROOT[few]] * 4, [ROOT] * 4, SPOILED[:3])
    spoiled = given[2].index_fill(0, torch.tensor([4]), torch.nan)
    with use_backend(backend):
        nan = tree_attention(*given[:2], spoiled, END, **options).isnan().flatten(1).all(1)
    assert nan.nonzero().flatten().tolist() == ([4, 5] if "window" in options else [4, 5, 6])


def test_attention_takes_no_gradient_from_rows_without_one() -> None:
    """A row that is NaN and out of the loss leaves the gradients of the keys that it sees as they are."""
    q, k, v, grad = (torch.randn(18, 2, 16) for _ in range(4))
    sink = torch.ones(2, requires_grad=True)
    grad[5:7] = 0
    found = []
    for value in (0.0, torch.nan):
        leaves = [x.clone().index_fill_(0, torch.tensor([5]), value).requires_grad_() for x in (q, k, v)]
        out = tree_attention(*leaves, END, sink=sink)
        found.append([*torch.autograd.grad(out, (*leaves, sink), grad)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", DECODE_BACKENDS[:2])  # the others read each tile as these do
def test_tree_decode(backend: str) -> None:
    step = forest(0, longest=20)
    plan, rows = step.plan, len(step.keys)
    q, k, v = torch.randn(rows, 4, 16), *torch.randn(2, 2000, step.page, 2, 16)
    for row in range(0, rows, 4):
        own = torch.zeros(2000, dtype=torch.bool)
        for n, (first, last) in enumerate(zip(plan.row_begin, plan.row_end, strict=True)):
            if first <= row < last:
                own[plan.page_ids[plan.page_indptr[n] : plan.page_indptr[n + 1]].long()] = True
        with use_backend(backend):
            want = tree_decode_attention(q, k, v, plan)
            for value in SPOILED[:3]:
                others = [x.masked_fill(~own[:, None, None, None], value) for x in (k, v)]
                spoiled = torch.where(torch.arange(rows)[:, None, None] == row, q, value)
                got = tree_decode_attention(spoiled, *others, plan)
                assert all(torch.equal(a[row], b[row]) for a, b in zip(got, want, strict=True))


def test_tree_recurrence() -> None:
    end = np.array([7, 7, 7, 5, 5, 7, 7, 10, 10, 10])
    plan, path = RecurrencePlan.make(find_segments(end)), torch.tensor([0] * 7 + [1] * 3)
    kernel = torch.randn(6, 4)

    def f(*values: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in values]
        out, _ = tree_recurrence(*leaves[:5], plan)
        mixed, _ = tree_convolution(leaves[5], kernel, None, plan)
        return [out.detach(), mixed.detach(), *torch.autograd.grad((out.sum(), mixed.sum()), leaves)]

    q, k, v = torch.randn(3, 10, 2, 8)
    given = [q, torch.nn.functional.normalize(k, dim=-1), v, -torch.rand(10, 2), torch.rand(10, 2), torch.randn(10, 6)]
    check(f, given, [path] * 6, [path] * 8)


def test_sample_tokens() -> None:
    rows = torch.arange(4)

    def f(logits: Tensor) -> list[Tensor]:
        given = {"temperature": 0.9, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": rows, "step": rows}
        return [x for x in sample_tokens(logits, **given) if x is not None]

    logits = torch.randn(4, 50)
    check(f, [logits], [rows], [rows] * len(f(logits)))
