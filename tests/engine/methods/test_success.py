"""Curricula that estimate success rates, and callbacks that spend responses where a group has signal."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import numpy as np
import pytest

from rolltree.engine import TokenTree, UserError
from rolltree.engine.methods.candidates import Candidate, Observed, Store
from rolltree.engine.methods.estimators import beta_norm
from rolltree.engine.methods.groups import Accept, Drop, More, prune_majority, screening
from rolltree.engine.methods.knapsack import Knapsack
from rolltree.engine.methods.success import Greso, Posterior, Sgpo, SuccessRates
from rolltree.engine.prompts.curriculum import Curriculum
from rolltree.engine.prompts.prompts import Prompt
from rolltree.engine.settings import DataConfig


def candidate(name: str, taken: int = 0, **entry: Any) -> Candidate:
    return Candidate(name, "task", name, entry, taken, 0, None)


def store(*problems: Candidate, seed: int = 0) -> Store:
    return Store({problem.id: problem for problem in problems}, np.random.default_rng(seed))


def tree(*rewards: float, attempt: int = 0) -> TokenTree:
    made = TokenTree.from_sequences([1], [[2 + i] for i in range(len(rewards))])
    made.rewards["reward"] = np.array(rewards, np.float32)
    made.meta["attempt"] = attempt
    return made


def group(problem: Candidate, *rewards: float) -> Observed:
    return Observed(problem, tree(*rewards), None)


def reloaded(part: Any, fresh: Any) -> Any:
    fresh.load_state_dict(copy.deepcopy(part.state_dict()))
    return fresh


def test_the_posterior_pools_decays_and_is_saved() -> None:
    rates = SuccessRates("kind", decay=0.5, prior=2.0, pool=4.0)
    a, b = candidate("a", kind="x"), candidate("b", kind="x")
    assert rates.posterior(a) == (1.0, 1.0)
    rates.observe(group(a, 1, 1, 1, 0, 0, 0, 0, 0, np.nan), step=1)  # NaN has no verdict
    right, wrong = 0.5 + 3, 0.5 + 5  # a step has passed since the first counts
    prior = (2 * right / 9, 2 * wrong / 9)
    assert rates.posterior(b) == pytest.approx((prior[0] + 4 * 3 / 8, prior[1] + 4 * 5 / 8))
    assert rates.posterior(a) == pytest.approx((prior[0] + 4 * 3 / 8 + 3, prior[1] + 4 * 5 / 8 + 5))
    assert rates.posterior(candidate("c", kind="y")) == pytest.approx(prior)
    assert reloaded(rates, SuccessRates("kind", 0.5, 2.0, 4.0)).posterior(a) == rates.posterior(a)
    rates.observe(group(b, 1), step=3)  # two steps later the old counts are a quarter
    assert rates._of_problem["a"] == [0.75, 1.25]


def test_the_table_tells_what_was_tried_and_how_well_it_is_solved() -> None:
    curriculum = Posterior(by="kind", decay=1.0)
    a, b = candidate("a" * 500, kind="x"), candidate("b", kind=2)
    curriculum.observe(group(a, 1, 1, 0, np.nan), step=1)
    curriculum.observe(Observed(a, tree(1, 1), "equal_rewards"), step=3)
    curriculum.observe(group(b, 0, 0), step=2)
    table = reloaded(curriculum, Posterior(by="kind", decay=1.0)).success_table()
    first, second = table["problems"]
    right, wrong = curriculum._rates.posterior(a)
    assert first["mean"] == pytest.approx(right / (right + wrong))
    assert first["deviation"] == pytest.approx(np.random.default_rng(0).beta(right, wrong, 100_000).std(), rel=0.02)
    del first["mean"], first["deviation"]
    about = {"id": "a" * 500, "text": "a" * 160, "value": "x"}
    assert first == about | {"tries": 5, "groups": 2, "dropped": 1, "step": 3}
    assert [second[name] for name in ("value", "tries", "groups", "dropped", "step")] == ["2", 2, 1, 0, 2]
    by_value = {row.pop("value"): row for row in table["values"]}
    assert by_value["2"]["mean"] < 0.5 < by_value["x"]["mean"] < right / (right + wrong)
    assert [by_value["x"][name] for name in ("problems", "tries", "groups", "dropped")] == [1, 5, 2, 1]
    assert json.loads(json.dumps(table)) == table


def test_a_column_may_lie_within_another_and_must_be_there() -> None:
    rates = SuccessRates("about.terms", decay=1.0, prior=2.0, pool=8.0)
    short, long = (candidate(name, about={"terms": n}) for name, n in (("short", 2), ("long", 9)))
    rates.observe(group(short, 1, 1, 1, 1), step=1)
    assert np.divide(*rates.posterior(candidate("other", about={"terms": 2}))) > np.divide(*rates.posterior(long))
    with pytest.raises(UserError, match=r"reads the column 'about.terms', and a problem has \['kind'\]"):
        rates.posterior(candidate("else", kind="x"))


def test_problems_with_signal_come_first() -> None:
    curriculum = Posterior(by="kind", prior=0.5)
    kinds = {kind: candidate(kind, kind=kind) for kind in ("solved", "even", "never")}
    for kind, rewards in (("solved", [1] * 8), ("even", [1, 0] * 4), ("never", [0] * 8)):
        for _ in range(5):
            curriculum.observe(group(kinds[kind], *rewards), step=1)
    pool = [candidate(f"{kind}{i}", kind=kind) for i in range(20) for kind in kinds]
    order = curriculum.order(store(*pool))
    assert sorted(order) == sorted(problem.id for problem in pool)
    first = [name.rstrip("0123456789") for name in order[:20]]
    assert first.count("even") >= 17
    assert order != curriculum.order(store(*pool, seed=1))  # drawn, not computed
    assert order == reloaded(curriculum, Posterior(by="kind", prior=0.5)).order(store(*pool))


def test_greso_passes_over_what_had_no_signal() -> None:
    curriculum = Greso(begin=0.5, rate=0.1)
    problems = [candidate(name) for name in ("equal", "mixed", "new")]
    for step in range(1, 5):
        curriculum.observe(group(problems[0], 0, 0), step)
        curriculum.observe(group(problems[1], 0, 1), step)
    assert curriculum._equal["equal"] == ("hard", 4)
    assert curriculum._explore == {"hard": pytest.approx(0.2), "easy": pytest.approx(0.8)}  # a half is hard, none easy
    first = [next(iter(curriculum.order(store(*problems, seed=seed)))) for seed in range(50)]
    assert first.count("equal") <= 3  # 0.2 ** 4
    order = list(curriculum.order(store(*problems)))
    assert sorted(order) == ["equal", "mixed", "new"]  # what is passed over comes later
    curriculum.observe(group(problems[0], 1, 0), 5)
    assert curriculum._equal["equal"] == ("", 0)
    assert reloaded(curriculum, Greso())._explore == curriculum._explore
    curriculum.observe(group(problems[0], np.nan, np.nan), 5)  # no verdict, nothing learnt
    assert curriculum._seen == [""]


@pytest.mark.parametrize("name", ["posterior", "greso", "sgpo"])
def test_a_run_draws_every_problem_from_them(name: str) -> None:
    """By the object that a run calls, which notes each problem as it comes."""
    curriculum = Curriculum(DataConfig(path="rows.jsonl", curriculum=name))
    problems = [Prompt(str(i), "", "", [1], {}, "") for i in range(6)]
    assert sorted(curriculum.order(problems, {}, [1, 2])) == [str(i) for i in range(6)]


def spread(curriculum: Knapsack, *problems: Candidate) -> list[int]:
    return curriculum.spread(problems)


def worth(right: float, wrong: float, n: int) -> float:
    """V(n), the mean over the posterior by the sum of many p."""
    p = (np.arange(20_000) + 0.5) / 20_000
    weight = p ** (right - 1) * (1 - p) ** (wrong - 1)
    return float((weight * p * (1 - p) ** 2 * (1 - p**n - (1 - p) ** n)).sum() / weight.sum())


def test_knapsack_takes_the_best_sizes_of_a_fixed_budget() -> None:
    """The best sum among all ways to spread the responses."""
    curriculum = Knapsack(n=4, least=2, most=9, decay=1.0)
    problems = [candidate(name) for name in ("hard", "even", "easy", "never")]
    for problem, rewards in zip(problems, ([1] + [0] * 5, [1, 0] * 3, [1] * 5 + [0], [0] * 12), strict=True):
        curriculum.observe(group(problem, *rewards), step=1)
    betas = [curriculum._rates.posterior(problem) for problem in problems]
    value = {(i, n): worth(*beta, n) for i, beta in enumerate(betas) for n in range(2, 10)}
    ways = [way for way in itertools.product(range(2, 10), repeat=4) if sum(way) == 16]
    best = max(ways, key=lambda way: sum(value[i, n] for i, n in enumerate(way)))
    assert spread(curriculum, *problems) == list(best)
    assert len(set(best)) > 2
    assert spread(reloaded(curriculum, Knapsack(n=4, least=2, most=9, decay=1.0)), *problems) == list(best)


def test_knapsack_keeps_the_budget_and_gives_all_a_try() -> None:
    curriculum = Knapsack(n=8, least=2, most=32, by="kind")
    new = [candidate(str(i), kind=i % 3) for i in range(10)]
    assert spread(curriculum, *new) == [8] * 10  # nothing is known
    assert spread(curriculum, new[0]) == [8]
    assert spread(curriculum) == []
    for i, right in enumerate((0, 4, 8)):  # the values of the column: never, half, always
        for _ in range(5):
            curriculum.observe(group(candidate(f"old{i}", kind=i), *([1] * right + [0] * (8 - right))), step=1)
    sizes = spread(curriculum, *new)
    assert sum(sizes) == 80
    assert min(sizes) >= 2
    never, half, always = (sizes[i::3] for i in range(3))
    assert min(never) > max(half) >= min(half) > max(always)
    assert max(never) - min(never) <= 1  # alike, but for what is left over

    def adds(problem: Candidate, n: int) -> float:
        beta = curriculum._rates.posterior(problem)
        return worth(*beta, n) - worth(*beta, n - 1)

    pairs = list(zip(new, sizes, strict=True))
    assert max(adds(p, n + 1) for p, n in pairs) <= min(adds(p, n) for p, n in pairs if n > 2) + 1e-9


def test_knapsack_counts_long_responses_for_more() -> None:
    curriculum = Knapsack(n=8, least=2, most=64)
    short, long = candidate("short"), candidate("long")
    for problem, tokens in ((short, 10), (long, 40)):
        made = TokenTree.from_sequences([1], [[2 + i] * tokens for i in range(4)])
        made.rewards["reward"] = np.array([1, 0, 1, 0], np.float32)
        curriculum.observe(Observed(problem, made, None), step=1)
    few, many = spread(curriculum, long, short)
    assert few < 8 < many
    assert 0 <= 8 * 50 - (few * 40 + many * 10) < 10  # less than any response costs is left
    third = spread(curriculum, long, short, candidate("new"))  # of the mean length
    assert 0 <= 8 * 75 - np.dot(third, [40, 10, 25]) < 10


@pytest.mark.parametrize("options", [{"n": 1}, {"least": 0}, {"n": 80}])
def test_knapsack_refuses_bounds_that_leave_no_spread(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="least <= n <= most"):
        Knapsack(**options)


def test_sizes_of_a_users_curriculum_are_checked() -> None:
    curriculum = Curriculum(DataConfig(path="rows.jsonl", curriculum="knapsack"))
    prompts = [Prompt(str(i), "", "", [1], {}, "") for i in range(2)]
    assert [prompt.n for prompt in curriculum.sized(prompts, {})] == [8, 8]
    for sizes, why in (([8], "for 2 problems"), ([8, None], "for 2 problems"), ([8, 0], "answered 0")):
        curriculum._part.spread = lambda problems, sizes=sizes: sizes
        with pytest.raises(UserError, match=why):
            curriculum.sized(prompts, {})


def test_sgpo_profiles_then_goes_from_easy_to_hard() -> None:
    curriculum = Sgpo(profile=4, scale=2.0, least=2, most=16, unsolved=0.0)
    rates = {"easy": (1, 1, 1, 0), "half": (1, 1, 0, 0), "hard": (1, 0, 0, 0), "solved": (1,) * 4, "never": (0,) * 4}
    problems = {name: candidate(name) for name in rates}
    assert {curriculum.wanted(problem) for problem in problems.values()} == {4}
    for name, rewards in rates.items():
        curriculum.observe(group(problems[name], *rewards))
    assert list(curriculum.order(store(*problems.values(), candidate("new")))) == ["new", "easy", "half", "hard"]
    assert [curriculum.wanted(problems[name]) for name in ("easy", "half", "hard", "never")] == [3, 4, 8, 16]
    curriculum.observe(group(problems["easy"], 0, 0, 0, 0))  # the first pass alone is the profile
    assert reloaded(curriculum, Sgpo()).wanted(problems["easy"]) == 3
    half = reloaded(curriculum, Sgpo(unsolved=0.25))
    kept = [name for seed in range(40) for name in half.order(store(problems["never"], seed=seed))]
    assert 3 <= len(kept) <= 20


@pytest.mark.parametrize(
    ("rewards", "attempt", "answer"),
    [
        ((1, 0), 0, More(6)),
        ((1, 1), 0, Drop("equal_rewards")),
        ((0, 0), 0, Drop("equal_rewards")),
        ((1, 0, 0, 0, 0, 0, 0, 0), 1, None),
        ((np.nan, np.nan), 0, Drop("equal_rewards")),
    ],
)
def test_screening(rewards: tuple[float, ...], attempt: int, answer: Any) -> None:
    assert screening(tree(*rewards, attempt=attempt), n=8) == answer


def test_screening_needs_room() -> None:
    with pytest.raises(UserError, match=r"needs `n` above rollout.n = 8"):
        screening(tree(*[1, 0] * 4), n=8)


@pytest.mark.parametrize(
    ("rewards", "attempt", "ratio", "answer"),
    [
        ((1, 0, 0, 0, np.nan), 0, 1.0, Accept([0, 1])),
        ((0, 1, 1, 1, 1, 0), 0, 1.5, Accept([0, 1, 2, 3, 5])),
        ((0, 0), 0, 1.0, More(4)),
        ((0, 0, 0, 0), 1, 1.0, None),
        ((np.nan,), 0, 1.0, None),
    ],
)
def test_the_larger_side_is_pruned(rewards: tuple[float, ...], attempt: int, ratio: float, answer: Any) -> None:
    assert prune_majority(tree(*rewards, attempt=attempt), ratio=ratio) == answer


def test_a_posterior_mean_leaves_no_group_without_advantages() -> None:
    (credit,) = beta_norm([tree(1, 1, 1)]).values
    mean = 4 / 5
    assert credit == pytest.approx([(1 - mean) / np.sqrt(mean * (1 - mean))] * 3)
    (mixed,) = beta_norm([tree(1, 0)]).values
    assert mixed == pytest.approx([1, -1])
    with pytest.raises(UserError, match="rewards from 0 to 1"):
        beta_norm([tree(2, 0)])
