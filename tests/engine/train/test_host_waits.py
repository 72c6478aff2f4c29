"""An update makes the host wait for its device once, when it fetches the metrics. A meta device stands for a GPU."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
import torch

from rolltree.engine import pack
from rolltree.engine.methods.credit import give_credit
from rolltree.engine.methods.estimators import gae
from rolltree.engine.methods.selections import every_unequal
from rolltree.engine.model import loss
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.critic import Critic
from rolltree.engine.train.terms import LossTerm, PairTerm, TokenTerm
from rolltree.engine.train.trainer import Trainer, Weighted
from rolltree.kernels import Objective, checks

from ...support.host_waits import waits
from ...support.tiny import train_step
from .test_trainer import make_model, make_trees

ONCE = ["aten::_to_copy"]
POLICY = TokenTerm(Objective.preset("dapo"))
SEQUENCES = TokenTerm(Objective.preset("gspo"))
PAIRS = PairTerm(every_unequal, options={"kind": "simpo", "beta": 1.0, "margin": 0.1})


@pytest.fixture(autouse=True)
def meta_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "WITHOUT_VALUES", ())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # neither knows the meta device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    optimizers = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["meta"])


def of_step(terms: list[LossTerm], max_tokens: int = 10_000, on_policy: bool = False) -> list[str]:
    """Return the calls in which the host waits in an update on batches of the host."""
    trainer = Trainer(make_model().to("meta"), TrainerConfig(lr=1e-3))
    trees = make_trees()
    for tree in trees:
        tree.rewards["reward"] = tree.advantage
    for term in terms:
        term.prepare(trees)
    batches = pack(trees, max_tokens=max_tokens, in_pieces=True)
    weighted = [Weighted(term, term.normalizer(trees)) for term in terms]
    done: list[float] = []

    def step() -> None:
        metrics = train_step(trainer, batches, weighted, temperature=0.9, on_policy=on_policy)
        done.append(metrics["actor/loss"][0])

    seen = waits(step, value=1.0)
    assert done == [1.0]
    assert trainer.updates == 1
    return seen


@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("terms", "max_tokens"),
    [
        ([POLICY], 10_000), ([POLICY], 30), ([SEQUENCES], 10_000), ([POLICY, PAIRS], 10_000), ([POLICY], 10),
        pytest.param([SEQUENCES], 10, marks=pytest.mark.slow), ([POLICY, PAIRS], 10),
    ],
    ids=["tokens", "three batches", "sequences", "pairs", "pieces", "sequences in pieces", "pairs in pieces"],
)  # fmt: skip
def test_a_step_waits_once(terms: list[LossTerm], max_tokens: int) -> None:
    """The first update, before which no share of clipped tokens is known, as much as any."""
    assert of_step(terms, max_tokens) == ONCE


def test_on_policy_too() -> None:
    assert of_step([POLICY], on_policy=True) == ONCE


def test_the_critic_waits_once() -> None:
    learner = Critic(make_model(), TrainerConfig(lr=1e-3))
    trees = make_trees()
    for tree in trees:
        tree.rewards["reward"] = tree.advantage
    learner.score(trees, pack(trees, max_tokens=10_000))
    give_credit(gae, "gae", trees)
    learner.model.to("meta")
    learner.trainer = Trainer(learner.model, TrainerConfig(lr=1e-3))
    tokens = sum(tree.loss_tokens for tree in trees)
    assert waits(lambda: learner.learn(pack(trees, max_tokens=10_000), tokens), value=1.0) == ONCE


def test_without_a_plan_of_the_host_it_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltree.engine.train.trainer.with_plan", lambda model, batch, terms, **_: batch)
    with pytest.raises(AssertionError):  # it cannot go on: nothing is known of the targets
        of_step([POLICY])


def test_a_second_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    head_pass = loss._head_pass

    def waiting(*arguments):
        out = head_pass(*arguments)
        float(out.loss.detach().cpu())
        return out

    monkeypatch.setattr(loss, "_head_pass", waiting)
    assert of_step([POLICY]) == 2 * ONCE
