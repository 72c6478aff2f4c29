"""Objectives of whole paths in one pass: rows on paths of several chunks are multiplied once more, no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import Objective, PathIndex, PolicyFields, linear_logprob, plan_policy_loss, use_backend
from rolltree.kernels.dispatch import Backend
from rolltree.kernels.linear_logprob import chunked
from rolltree.kernels.linear_policy_loss import plan

from .test_linear_logprob import BACKENDS, COMPILED, DEVICE, Inputs, inputs
from .test_linear_policy_loss import cast, composed, fused, run

GSPO = Objective(ratio_level="sequence", eps_low=0.05, eps_high=0.05)
Nodes = list[tuple[int, int]]  # in preorder: parent (-1: below a prompt of its own), tokens


def group(members: int, tokens: int, at: int = 0) -> Nodes:
    """Responses to one prompt, which is node ``at``."""
    return [(-1, 0), *[(at, tokens)] * members]


def forest(nodes: Nodes, V: int = 65, H: int = 16) -> tuple[Inputs, PolicyFields]:
    """Head inputs and fields of trees: a row for the end of each prompt, and one for every token, which is a target."""
    row: list[int] = []  # of each target
    final: list[int] = []  # row at the end of each node
    first: list[int] = []  # target of each node
    path: list[int] = []  # tokens on the way to the end of each node
    rows = 0
    for parent, tokens in nodes:
        first.append(len(row))
        before = final[parent] if parent >= 0 else rows
        new = range(rows + (parent < 0), rows + (parent < 0) + tokens)
        row += [before, *new][:tokens]
        rows = new.stop
        final.append(new[-1] if tokens else before)
        path.append(tokens + (path[parent] if parent >= 0 else 0))
    end = [first[k] + tokens for k, (_, tokens) in enumerate(nodes)]
    for k in reversed(range(len(nodes))):
        if (parent := nodes[k][0]) >= 0:
            end[parent] = max(end[parent], end[k])
    leaves = sorted(set(range(len(nodes))) - {parent for parent, _ in nodes})
    g = torch.Generator().manual_seed(5)

    def noise(size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(size, generator=g, dtype=torch.float64)).to(DEVICE)

    given = inputs(rows, H, V)
    target = torch.randint(0, V, (len(row),), generator=g).to(DEVICE)
    given |= {"row": torch.tensor(row, device=DEVICE), "target": target}
    weight, advantage = noise(len(leaves)).abs(), noise(len(leaves))
    paths = PathIndex(
        target_end=torch.tensor([end[k] for k, (_, n) in enumerate(nodes) for _ in range(n)], device=DEVICE),
        leaf_target=torch.tensor([first[k] + nodes[k][1] - 1 for k in leaves], device=DEVICE),
        leaf_length=torch.tensor([float(path[k]) for k in leaves], dtype=torch.float64, device=DEVICE),
        leaf_weight=weight,
        leaf_advantage=advantage,
    )
    with torch.no_grad():
        now = linear_logprob(**{k: v.double() if v.is_floating_point() else v for k, v in given.items()}).logprob
    S_pos, S_neg = (paths.spread(weight * side) for side in (advantage.clamp(min=0), advantage.clamp(max=0)))
    old, ref, behaviour = (now + noise(len(row), 0.1) for _ in range(3))
    return given, PolicyFields(
        S_pos, S_neg, paths.spread(weight), paths=paths, old_logprob=old, ref_logprob=ref, behaviour_logprob=behaviour
    )


def planned(given: Inputs, fields: PolicyFields, objective: Objective, **options: Any) -> plan.HeadPlan:
    return plan_policy_loss(
        fields, objective, num_rows=len(given["hidden"]), vocabulary=len(given["weight"]),
        hidden_size=given["hidden"].shape[1], device="cpu", row=given["row"], **options,
    )  # fmt: skip


def widened(given: Inputs) -> Inputs:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}


DEEP: Nodes = [(-1, 3), (0, 4), (1, 5), (1, 2), (3, 6), (3, 1), (0, 7), (-1, 0), (7, 4), (7, 4), (-1, 9)]
TREES = {
    "groups": [*group(3, 4), *group(3, 4, at=4), *group(2, 6, at=8)],
    "deep": DEEP,
    "a path longer than a chunk": [(-1, 23)],
}
OBJECTIVES = {
    "gspo": GSPO,
    "kl and entropy": Objective(ratio_level="sequence", eps_low=0.05, eps_high=0.05, kl_coef=0.3, entropy_coef=0.2),
    "sequence mismatch": Objective(mismatch="truncate", mismatch_level="sequence"),
    "vespo": Objective.preset("vespo"),
    "topr": Objective.preset("topr"),
}
CASES = [
    pytest.param(b.values[0], name, tree, chunk, marks=b.marks, id=f"{b.values[0]}-{name}-{tree}-{chunk}")
    for b in BACKENDS
    for name in OBJECTIVES
    for tree in TREES
    for chunk in (3, 7, 1000)
    if b.values[0] in COMPILED or (name, tree, chunk) == ("kl and entropy", "groups", 7)
]


@pytest.mark.slow(but=40)
@pytest.mark.check(but=13)
@pytest.mark.parametrize("trained", [("hidden", "weight"), ("hidden",)])
@pytest.mark.parametrize(("backend", "name", "tree", "chunk"), CASES)
def test_equals_the_two_ops_in_fp64(
    backend: Backend, name: str, tree: str, chunk: int, trained: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, fields = forest(TREES[tree])
    fields, objective = cast(fields, torch.float32, "token_mean"), OBJECTIVES[name]
    exact = run(composed, widened(given), cast(fields, torch.float64, "token_mean"), objective, trained)
    for module in (plan, chunked):
        monkeypatch.setattr(module, "chunk_rows", lambda N, V, device: chunk)
    made = planned(given, fields, objective)
    assert made.schedule == "sequence_aligned"
    assert (made.shared == 0) == (chunk == 1000)
    sizes = [b - a for a, b in zip(made.row_cuts, made.row_cuts[1:], strict=False)]
    assert max(sizes) <= chunk
    assert made.shared + sum(sizes) == made.row_cuts[-1]
    with use_backend(backend):
        usual = run(composed, given, fields, objective, trained)
        got = run(fused, given | {"plan": made}, fields, objective, trained)
    of = {key: [r[key].double() for r in (got, usual, exact)] for key in ("loss", *(f"d_{name}" for name in trained))}
    of |= {key: [torch.stack(r["metrics"][key]) for r in (got, usual, exact)] for key in exact["metrics"]}
    for key, (value, of_two_ops, expected) in of.items():
        error, theirs = ((v - expected).abs().max() for v in (value, of_two_ops))
        scale = expected.abs().max().clamp(min=1e-3 if key.startswith("d_") else 0.05)
        assert error <= max(2 * theirs, 3e-6 * scale), key


def test_groups_share_one_row_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 groups of 8 x 128: 1024 targets a group in 1017 rows, of which only the prompt's last is shared."""
    nodes = [node for g in range(8) for node in group(8, 128, at=9 * g)]
    given, fields = forest(nodes, V=7, H=4)
    monkeypatch.setattr(plan, "chunk_rows", lambda N, V, device: 2048)
    made = planned(given, cast(fields, torch.float32, "token_mean"), GSPO)
    rows = 8 * (1 + 8 * 127)
    assert made.schedule == "sequence_aligned"
    assert made.shared <= 8
    assert made.products() == 6 + 2 * made.shared / rows <= 6.5
    assert f"{made.products():.2f} N H V of the rows computed" in made.explain()
    monkeypatch.setattr(plan, "chunk_rows", lambda N, V, device: 700)  # less than a group
    made = planned(given, cast(fields, torch.float32, "token_mean"), GSPO)
    assert made.shared == 8
    assert made.products() == 6 + 2 * 8 / rows
    assert made.flop() == pytest.approx((6 * rows + 2 * 8) * 7 * 4)


def test_the_products_are_the_planned_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("the count is of rows that a CPU leaves out")
    given, fields = forest(TREES["groups"])
    objective = Objective(ratio_level="sequence", eps_low=1.0, eps_high=9.0)  # nothing is clipped
    for module in (plan, chunked):
        monkeypatch.setattr(module, "chunk_rows", lambda N, V, device: 7)
    made = planned(given, cast(fields, torch.float32, "token_mean"), objective)
    multiplied: list[int] = []
    original = chunked.Head.logits
    monkeypatch.setattr(
        chunked.Head, "logits", lambda self, h, out: multiplied.append(len(h)) or original(self, h, out)
    )
    run(fused, given, cast(fields, torch.float32, "token_mean"), objective, ("hidden", "weight"))
    assert made.shared > 0
    assert sum(multiplied) == made.row_cuts[-1] + made.shared


def test_a_cut_lies_where_fewest_rows_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts lie between trees if these fit, and between leaves of a group rather than within one."""
    monkeypatch.setattr(plan, "chunk_rows", lambda N, V, device: 16)
    given, fields = forest([(-1, 10), (-1, 11), (-1, 10)])
    assert planned(given, cast(fields, torch.float32, "token_mean"), GSPO).shared == 0
    given, fields = forest(group(4, 8))
    assert planned(given, cast(fields, torch.float32, "token_mean"), GSPO).shared == 1
