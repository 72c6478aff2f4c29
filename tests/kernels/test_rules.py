"""Rules of objectives that look beyond a token: each is one function with its options, and no other file names it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import Objective, PolicyFields, linear_policy_loss, policy_loss
from rolltree.kernels.policy_loss import PRESETS, RECONSTRUCTED
from rolltree.kernels.policy_loss.rules import (
    RULES,
    LeafFactors,
    Side,
    Targets,
    leaf_weight,
    path_ratio,
    token_choice,
)
from rolltree.kernels.policy_loss.subsets import only
from rolltree.kernels.policy_loss.surrogates import SURROGATES

from .formulas import DEVICE, Tree, batch, flat

KERNELS = Path(__file__).parents[2] / "kernels"


@dataclass(frozen=True)
class FactorOptions:
    factor: float
    eps_high: float = 0.0  # of `Objective`, which always has a value

    def __post_init__(self) -> None:
        if self.factor < 0:
            raise ValueError(f"factor must not be negative, got {self.factor}")


@dataclass(frozen=True)
class LimitOptions:
    limit: float = -1.0


@pytest.fixture(autouse=True)
def own_rules() -> Iterator[None]:
    """Three rules that no other file knows, one of each kind, taken out again after the test."""
    before = dict(RULES)

    @leaf_weight(on="reinforce", options=FactorOptions)
    def scaled_failures(x: Targets, n: FactorOptions) -> LeafFactors:
        return LeafFactors(1.0, torch.full_like(x.total(x.logprob), n.factor))

    @token_choice(on="ppo", options=LimitOptions, needs=("ref_logprob",))
    def likely_tokens(x: Targets, n: LimitOptions) -> PolicyFields:
        return only(x.fields, x.logprob > n.limit)

    @path_ratio(on="unclipped", levels=("sequence", "segment"))
    def halved(x: Targets, n: None) -> Iterator[Side]:
        yield Side(x.fields, x.log_ratio / 2, torch.ones_like(x.log_ratio, dtype=torch.bool))

    yield
    RULES.clear()
    RULES.update(before)


def loss_and_gradient(lp: Tensor, fields: PolicyFields, objective: Objective) -> tuple[Tensor, Tensor]:
    lp = lp.detach().requires_grad_()
    loss = policy_loss(lp, fields, objective, normalizer=7.0).loss
    return loss.detach(), torch.autograd.grad(loss, lp)[0]


def test_a_leaf_weight_with_an_option_of_its_own() -> None:
    objective = Objective(surrogate="scaled_failures", options={"factor": 0.25})
    assert (objective.scope, objective.elementwise, objective.needs_old) == ("path", "reinforce", False)
    same = Objective(surrogate="reinforce", neg_weight=0.25)
    b, tree = batch(), Tree(1)
    for lp, fields in ((b["logprob"], flat(b)), (tree.logprob, tree.fields("token_mean"))):
        got, want = (loss_and_gradient(lp, fields, o) for o in (objective, same))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        plain = loss_and_gradient(lp, fields, replace(same, neg_weight=1.0))
        assert not got[1].equal(plain[1])


def test_a_token_choice_and_the_field_that_it_needs() -> None:
    b = batch()
    objective = Objective(surrogate="likely_tokens", options={"limit": -0.7})
    assert objective.scope == "batch"
    assert Objective(surrogate="likely_tokens").rule_options == LimitOptions(-1.0)
    chosen = (b["logprob"] > -0.7).double()
    assert 0 < chosen.sum() < len(chosen)
    want = loss_and_gradient(b["logprob"], flat(b, token_weight=chosen), Objective())
    torch.testing.assert_close(loss_and_gradient(b["logprob"], flat(b), objective), want, rtol=0, atol=0)
    with pytest.raises(ValueError, match="surrogate is 'likely_tokens', so the fields must have ref_logprob"):
        policy_loss(b["logprob"], flat(b, ref_logprob=None), objective, normalizer=1.0)


def test_a_ratio_of_paths_allows_its_levels_alone() -> None:
    b = batch()
    with pytest.raises(ValueError, match="surrogate 'halved' does not combine with ratio_level 'token'"):
        Objective(surrogate="halved")
    objective = Objective(surrogate="halved", ratio_level="sequence")
    plain = Objective(surrogate="unclipped", ratio_level="sequence")
    half = flat(b, old_logprob=(b["logprob"].detach() + b["old"]) / 2)
    got, want = loss_and_gradient(b["logprob"], flat(b), objective), loss_and_gradient(b["logprob"], half, plain)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    assert objective.needs_old


@pytest.mark.parametrize(
    ("surrogate", "options"), [("scaled_failures", {"factor": 0.25}), ("likely_tokens", {"limit": -3.3})]
)
def test_options_reach_the_head(surrogate: str, options: dict[str, float]) -> None:
    """Options reach it through ``encoded``, and the loss equals that of the log-probs that the head gives."""
    torch.manual_seed(0)
    b = batch()
    M = len(b["logprob"])
    hidden, weight = (torch.randn(rows, 6, dtype=torch.float64).to(DEVICE) for rows in (M, 23))
    target = torch.randint(23, (M,)).to(DEVICE)
    objective = Objective(surrogate=surrogate, options=options)
    assert Objective.decode(objective.encoded) == objective
    assert hash(objective) == hash(Objective.decode(objective.encoded))
    h = hidden.clone().requires_grad_()
    got = linear_policy_loss(h, weight, target, flat(b), objective, normalizer=7.0).loss
    (d_got,) = torch.autograd.grad(got, h)
    h = hidden.clone().requires_grad_()
    lp = (h @ weight.T).log_softmax(-1).gather(1, target[:, None]).squeeze(1)
    want = policy_loss(lp, flat(b), objective, normalizer=7.0).loss
    torch.testing.assert_close((got, d_got), (want, *torch.autograd.grad(want, h)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"surrogate": "scaled_failures"}, "surrogate 'scaled_failures' needs options factor"),
        ({"surrogate": "scaled_failures", "options": {"factor": -1.0}}, "factor must not be negative, got -1.0"),
        (
            {"surrogate": "scaled_failures", "options": {"factor": 1.0, "eps_high": 0.3}},
            "surrogate 'scaled_failures' has no option 'eps_high'; it has factor",
        ),
        ({"surrogate": "likely_tokens", "options": {"limit": None}}, "option 'limit' must be a number, a text, True"),
        ({"options": {"tau": 1.0}}, "surrogate 'ppo' has no option 'tau'; it has none of its own"),
        ({"options": 3}, "options must be a mapping, got 3"),
        ({"options": (1.0, 2.0)}, "options must be a mapping, got a tuple"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**options)


def literals(file: Path) -> Iterator[tuple[int, str]]:
    """The strings in ``file`` that are no docstrings, with their lines."""
    tree = ast.parse(file.read_text())
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.lineno, node.value


def test_no_machinery_knows_a_method_by_its_name() -> None:
    """The exception is the default of `Objective`."""
    names = set(SURROGATES | RULES) | set(PRESETS)
    own = {"rules.py", "surrogates.py", "presets.py", "pairs.py"}
    files = [
        f for f in (*KERNELS.glob("policy_loss/*.py"), *KERNELS.glob("linear_policy_loss/*.py")) if f.name not in own
    ]
    assert len(files) > 15
    found = [(file.name, text) for file in files for _, text in literals(file) if text in names]
    assert found == [("objective.py", "ppo")]


def test_reconstructed_options_are_those_of_presets() -> None:
    for name, options in RECONSTRUCTED.items():
        for option in options:
            assert hasattr(PRESETS[name], option), (name, option)
