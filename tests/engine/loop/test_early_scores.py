"""`loop.score_early`: which groups are scored when, that the numbers do not depend on it, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine import load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.loop.budget import Budget
from rolltree.engine.loop.callback import CallbackRule
from rolltree.engine.loop.replay_store import ReplayStore
from rolltree.engine.model.roles import Role
from rolltree.engine.prompts.archive import Archive
from rolltree.engine.prompts.group import Group, Responses
from rolltree.engine.prompts.prompts import Prompt
from rolltree.engine.rewards import RewardItem, RewardResult, Rewards
from rolltree.engine.rollout.sampler import Flight, Job

from ...support.real_step import plain_logprobs
from .test_sampler import Canned, Odd, Tensors, controller

P = 4
WAIT_S = 60.0
"""Seconds after which a test fails that waits for another thread."""
FLAGS = (
    "--loop.score_early=true", "--roles.reference={}", "--algorithm.objective_options={kl_coef=0.1}",
    "--evaluation.problems=0", "--evaluation.every=0", f"--trainer.prompts_per_step={P}", "--trainer.steps=3",
    "--trainer.lr=0.02", "--rollout.program=flat", "--rollout.program_options={}", "--algorithm.advantage=group_norm",
    "--rollout.max_batch_rows=4", "--rollout.max_new_tokens=6", "--checkpoint.every=10",
)  # fmt: skip


# -- the controller ----------------------------------------------------------------------------------------------------


class Waiting(Canned):
    """Answers the newest prompt of a batch of ``P`` only after the others of it were scored."""

    def __init__(self) -> None:
        super().__init__()
        self.scored: list[int] = []
        self.returned: list[int] = []

    def step(self, seconds: float) -> list[Flight]:
        held = {f: left for f, left in self.waiting.items() if f.job.prompt[0] % P == 0 and not self._may(f)}
        self.waiting = {f: left for f, left in self.waiting.items() if f not in held}
        done = super().step(seconds)
        self.waiting |= held
        self.returned += [flight.job.prompt[0] for flight in done]
        return done

    def _may(self, flight: Flight) -> bool:
        token = flight.job.prompt[0]
        return set(range(token - P + 1, token)) <= set(self.scored)


@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize(("staleness", "overlaps"), [(0, False), (1, True), (1, False)])
def test_ready_groups_are_scored_while_others_are_sampled(staleness: int, overlaps: bool) -> None:
    """The sampler waits for the scores, so the run would never end if they waited for the batch."""
    sampler = Waiting()
    made = controller(sampler, Budget(P, staleness), overlaps=overlaps)
    with made.running(Odd()):
        for step in range(3):
            batch = made.next_batch(ahead=lambda tree: sampler.scored.append(int(tree.token_id[0])))
            tokens = [group.prompt.token_ids[0] for group in batch]
            assert tokens == list(range(step * P + 1, (step + 1) * P + 1))
            made.end_step(batch, Tensors(step), step + 1)
    assert len(set(sampler.scored)) == len(sampler.scored)
    assert set(range(1, 3 * P + 1)) - set(sampler.scored) <= {P, 2 * P, 3 * P}  # which complete a batch


class Uneven(Canned):
    """Answers the prompts of a batch of ``P`` one after the other, the newest first."""

    def submit(self, jobs: Sequence[Job]) -> list[Flight]:
        flights = super().submit(jobs)
        self.waiting |= {flight: -flight.job.prompt[0] % P for flight in flights}
        return flights


def test_groups_that_are_ready_first_are_scored_first() -> None:
    scored: list[int] = []
    made = controller(Uneven(), Budget(P))
    with made.running(Odd()):
        made.next_batch(ahead=lambda tree: scored.append(int(tree.token_id[0])))
    assert len(scored) >= 2
    assert scored[0] == P


def test_at_staleness_0_a_callback_is_asked_in_rounds_all_the_same() -> None:
    asked: list[int] = []
    scored: list[int] = []

    def keeps(tree: TokenTree) -> None:
        asked.append(int(tree.token_id[0]))

    made = controller(Uneven(), Budget(P), rule=CallbackRule(keeps, "keeps"))
    with made.running(Odd()):
        batch = made.next_batch(ahead=lambda tree: scored.append(int(tree.token_id[0])))
    assert asked == [1, 2, 3, 4]
    assert scored == []  # all became ready together, so the batch was complete
    assert len(batch) == P


# -- runs --------------------------------------------------------------------------------------------------------------


Wanted = Callable[[int], set[int]]
"""Returns the tickets of the groups that must be scored before a group is judged."""


def others_of(place: int) -> Wanted:
    """Let the group at one place of each batch wait for all others of its batch."""

    def wanted(ticket: int) -> set[int]:
        first = ticket // P * P
        return set(range(first, first + P)) - {ticket} if ticket % P == place else set()

    return wanted


class Late(Rewards):
    """Judges a group, from the second batch on, only after others were scored."""

    at_once = P

    def __init__(self, calls: list[list[int]], wanted: Wanted) -> None:
        self.calls, self.wanted, self.changed = calls, wanted, threading.Condition()

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        for ticket in {item.group for item in items}:
            if ticket >= P:
                self.wait_for(self.wanted(ticket))
        return [RewardResult(float(sum(map(ord, item.response_text)) % 2), None) for item in items]

    def wait_for(self, wanted: set[int]) -> None:
        with self.changed:
            seen = self.changed.wait_for(lambda: wanted <= {t for call in self.calls for t in call}, WAIT_S)
        assert seen, "no group was scored before its batch was complete"


class Run:
    """A run with its scores: ``calls``, the tickets of each call of the reference, and ``trees``."""

    def __init__(self, toml: Path, directory: Path, *flags: str, wanted: Wanted = lambda ticket: set()) -> None:
        config = load_config(toml, [*FLAGS, f"--output_dir={directory}/runs", *flags])
        self.calls: list[list[int]] = []
        self.trees: list[TokenTree] = []
        rewards = Late(self.calls, wanted)
        self.loop = build(config, console=Console())
        self.loop.rewards, self.loop.check_rewards = rewards, str
        (role,) = self.loop.learner.roles  # type: ignore[attr-defined]
        score, update = role.score, self.loop.learner.update

        def scored(trees: Sequence[TokenTree], *given: Any, **options: Any) -> Any:
            models = score(trees, *given, **options)
            with rewards.changed:
                self.calls.append([int(tree.group[0]) for tree in trees])
                rewards.changed.notify_all()
            return models

        def updated(trees: list[TokenTree], *rest: Any) -> bool:
            self.trees += trees
            return update(trees, *rest)

        role.score, self.loop.learner.update = scored, updated  # type: ignore[method-assign]
        self.reference = {name: p.detach().clone() for name, p in self.loop.learner.model.named_parameters()}  # type: ignore[attr-defined]
        self.loop.run()
        self.numbers = [p.detach().numpy().copy() for p in self.loop.learner.model.parameters()]  # type: ignore[attr-defined]
        self.numbers += [tree.ref_logprob for tree in self.trees]


@pytest.fixture(scope="module")
def late(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(toml, tmp_path_factory.mktemp("late"), wanted=others_of(P - 1))


def test_groups_are_scored_while_verdicts_are_outstanding(late: Run) -> None:
    assert late.calls[:P] == [[0], [1], [2], [3]]  # the first batch tells how trees are computed
    assert sorted(late.calls) == [[ticket] for ticket in range(3 * P)]
    for step in (1, 2):
        places = [late.calls.index([step * P + k]) for k in range(P)]
        assert max(places[:-1]) < places[-1]


def test_scores_are_those_of_the_reference(late: Run) -> None:
    model = late.loop.learner.model  # type: ignore[attr-defined]
    moved = max(float((p.detach() - late.reference[name]).abs().max()) for name, p in model.named_parameters())
    assert moved > 0.01, "the policy is the reference still; it shows nothing"
    model.load_state_dict(late.reference, strict=False)
    model.set_attn_implementation("eager")
    for tree in late.trees[-P:]:
        for leaf in range(tree.num_leaves):
            with torch.no_grad():
                want = plain_logprobs(model, tree, leaf).numpy()
            np.testing.assert_allclose(tree.ref_logprob[tree.response_rows(leaf)], want, atol=2e-5)


def test_the_numbers_do_not_depend_on_the_order_of_verdicts(toml: Path, tmp_path: Path, late: Run) -> None:
    other = Run(toml, tmp_path, wanted=others_of(0))
    assert other.calls != late.calls
    for mine, theirs in zip(late.numbers, other.numbers, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_all_groups_are_scored_together_by_default(toml: Path, tmp_path: Path, late: Run) -> None:
    usual = Run(toml, tmp_path, "--loop.score_early=false")
    assert usual.calls == [[step * P + k for k in range(P)] for step in range(3)]
    for mine, theirs in zip(late.numbers, usual.numbers, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-3)


@pytest.mark.slow
def test_a_group_of_a_later_step_keeps_its_scores(toml: Path, tmp_path: Path) -> None:
    """At staleness 1 group 9 is scored while group 4 holds up the second step; it is trained in the third."""
    wanted = {P: {5, 6, 7, 9}}
    flags = ["--recipe=asyncflow", "--loop.overlap=false", "--trainer.steps=2"]
    assert load_config(toml, flags).loop.score_early
    run = Run(toml, tmp_path, *flags, wanted=lambda ticket: wanted.get(ticket, set()))
    tensors, groups = run.loop.controller.state_dict()
    kept = [part.tree for group in groups for part in Archive(tensors).unpack(group)["parts"]]
    (tree,) = (tree for tree in kept if tree.group[0] == 9)
    assert tree.meta["scored"]
    assert np.isfinite(tree.ref_logprob[tree.loss_mask]).all()
    run.loop.learner.score([tree], 1.0)  # type: ignore[attr-defined]
    assert [call for call in run.calls if 9 in call] == [[9]]


def test_a_replayed_group_is_scored_again() -> None:
    """Its file may be of a run with another reference."""
    group = Group(0, Prompt("", "", "", [1], {}, ""), 0)
    tree = TokenTree.from_sequences([1], [[2, 3]])
    tree.meta |= {"scored": True, "entry": {}, "problem": ""}
    group.parts = [Responses(tree, [""], {})]
    ((_, (stored,)),) = ReplayStore.snapshot(None, [group])  # type: ignore[arg-type]
    assert "scored" not in stored.tree.meta
    assert tree.meta["scored"]


def test_a_role_is_fixed_unless_an_update_changes_it() -> None:
    policy, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
    weights = dict(policy.named_parameters())
    made: list[tuple[Any, dict[str, Any], bool]] = [
        (policy, {}, False),  # the policy before the update
        (policy, {"adapted": False}, True),  # the model below an adapter
        (other, {}, True),
        (policy, {"weights": weights}, True),
        (policy, {"weights": weights, "reset_every": 5}, False),
        (policy, {"weights": weights, "ema": 0.9}, False),
    ]
    assert [Role("ref_logprob", model, **options).fixed for model, options, _ in made] == [want for *_, want in made]
