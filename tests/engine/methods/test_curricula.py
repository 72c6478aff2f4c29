"""Curricula in runs: the order of prompts is that of a formula written here, also across a resumption."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltree.engine import UserError, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.methods.candidates import Candidate, Store
from rolltree.engine.methods.curricula import Ucb
from rolltree.engine.prompts.curriculum import Curriculum

from ...support.real_step import Steps, take_steps
from ...support.tiny import as_toml, tiny_job

MINE = """
def by_level(text, entry):
    return {"easy": 1.0, "hard": 0.0}.get(entry.get("level"), float(sum(map(ord, text)) % 2))


class Least:
    "Those taken least, by id; two or three responses for each; keeps what it observed."

    def __init__(self, skip=""):
        self.skip, self.seen = skip, []

    def order(self, store):
        return sorted(store.problems, key=lambda name: (store.problems[name].taken, name))

    def gate(self, problem):
        return problem.id != self.skip and problem.mean_reward not in (0.0, 1.0)

    def wanted(self, problem):
        return 2 + len(problem.id) % 2

    def observe(self, group):
        self.seen.append([
            group.problem.id, group.problem.mean_reward, group.dropped, group.tree.rewards["reward"].tolist(),
            group.tree.advantage.tolist(),
        ])


class Wrong:
    def order(self, store):
        return ["nothing"]


class Refusing:
    def gate(self, problem):
        return False


class Nothing:
    def observe(self, group):
        pass
"""
LEVELS = ("easy", "hard", "mixed")
UCB = {"by": "level", "window": 2, "c": 0.3, "temperature": 0.2}


ROWS = [{"prompt": f"{k} + 2 =", "answer": "1", "level": LEVELS[k % 3]} for k in range(18)]
toml = tiny_job({"mine.py": MINE, "rows.jsonl": ROWS})


def given(toml: Path, curriculum: str, options: str = "{}") -> list[str]:
    folder = toml.parent
    return [
        f"--reward.verifier={folder}/mine.py:by_level", "--data.tasks=[]", f"--data.path={folder}/rows.jsonl",
        f"--data.curriculum={curriculum}", f"--data.curriculum_options={options}",
    ]  # fmt: skip


def batches(steps: Steps) -> list[list[Any]]:
    """Return the trees of each step in the order of their tickets."""
    return [steps.judged[i : i + 6] for i in range(0, len(steps.judged), 6)]


def ids(steps: Steps) -> list[list[str]]:
    return [[tree.meta["prompt_id"] for tree in batch] for batch in batches(steps)]


def mean_size(rewards: Any) -> float:
    """Return the mean absolute advantage of `group_norm`."""
    R = np.asarray(rewards, np.float64)
    return float(np.abs((R - R.mean()) / (R.std(ddof=1) + 1e-6)).mean()) if np.ptp(R) else 0.0


def dump(
    problems: dict[str, list[str]],
    seen: list[tuple[str, float]],
    seed: list[int],
    count: int,
    options: dict[str, Any] = UCB,
) -> list[str]:
    """Return the prompts that DUMP draws; ``problems`` are the ids of each arm in order, ``seen`` arms and mean |A|."""
    arms = sorted(problems)
    score = []
    for arm in arms:
        sizes = [size for of, size in seen if of == arm]
        mean = float(np.mean(sizes[-options["window"] :])) if sizes else 0.0
        score.append(mean + options["c"] * math.sqrt(2 * math.log(len(seen) + 1) / (len(sizes) + 1)))
    weights = [math.exp(value / options["temperature"]) for value in score]
    chances = np.array(weights) / sum(weights)
    rng, place, found = np.random.default_rng(seed), Counter[str](), []
    for _ in range(count):
        arm = arms[rng.choice(len(arms), p=chances)]
        found.append(problems[arm][place[arm]])
        place[arm] += 1
    return found


def expected(found: list[list[Any]], *, observes: bool = True) -> list[list[str]]:
    """Return the order of the file's prompts by the formula, given the rewards that the run's groups got."""
    taken, seen, made = Counter[int](), [], []
    for step, batch in enumerate(found):
        place = [np.random.default_rng([0, taken[k]]).permutation(18).tolist().index(k) for k in range(18)]
        rows = sorted(range(18), key=lambda k: (taken[k], place[k]))
        of = {level: [f"rows/{k}" for k in rows if LEVELS[k % 3] == level] for level in LEVELS}
        made.append(dump(of, seen, [0, 6 * step], 6))
        taken.update(int(name.removeprefix("rows/")) for name in made[-1])
        if observes:
            seen += [
                (LEVELS[int(tree.meta["prompt_id"].removeprefix("rows/")) % 3], mean_size(tree.rewards["reward"]))
                for tree in batch
            ]
    return made


@pytest.mark.check
def test_ucb_draws_the_prompts_of_the_formula(toml: Path, tmp_path: Path) -> None:
    flags = given(toml, "ucb", as_toml(UCB))
    whole = take_steps(toml, tmp_path / "whole", *flags, "--trainer.steps=4")
    assert ids(whole) == expected(batches(whole))
    assert ids(whole) != expected(batches(whole), observes=False)  # a run that observes nothing is told apart
    levels = Counter(LEVELS[int(name.removeprefix("rows/")) % 3] for batch in ids(whole)[1:] for name in batch)
    assert levels["mixed"] > levels["easy"] + levels["hard"]


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"window": 32, "c": 1.0, "temperature": 0.5}, (1, 2, 3)),
        ({"window": 1, "c": 2.0, "temperature": 1.0}, (0, 1, 5)),
        ({"window": 4, "c": 0.0, "temperature": 0.3}, (7, 2, 0)),
    ],
)
def test_two_thousand_draws_are_those_of_the_formula(options: dict[str, Any], groups: tuple[int, ...]) -> None:
    sizes = np.random.default_rng(1).random(16).tolist()
    seen = [(level, sizes.pop()) for level, n in zip(LEVELS, groups, strict=True) for _ in range(n)]
    arms = {level: [f"{level}/{k}" for k in range(2000)] for level in LEVELS}
    known = {name: Candidate(name, level, "", {}, 0, 0, None) for level, names in arms.items() for name in names}
    curriculum = Ucb(**options)
    curriculum.load_state_dict(
        {
            "seen": dict(zip(LEVELS, groups, strict=True)),
            "recent": {arm: [size for of, size in seen if of == arm][-options["window"] :] for arm in LEVELS},
        }
    )
    drawn = list(islice(curriculum.order(Store(known, np.random.default_rng([3, 4]))), 2000))
    assert drawn == dump(arms, seen, [3, 4], 2000, options)


@pytest.mark.check
def test_a_run_whose_curriculum_observes_nothing_is_another(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Curriculum, "observe", lambda *_: None)
    blind = take_steps(toml, tmp_path, *given(toml, "ucb", as_toml(UCB)), "--trainer.steps=3")
    assert ids(blind) != expected(batches(blind))
    assert ids(blind) == expected(batches(blind), observes=False)


@pytest.mark.slow
def test_ucb_draws_generated_problems_of_tasks(toml: Path, tmp_path: Path) -> None:
    """Each task has its own numbers: problem k of the task at index i is ``k * tasks + i``."""
    tasks = (
        "[{name='chain_sum', options={min_terms=2,max_terms=2,min_digits=1,max_digits=1}},"
        "{name='basic_arithmetic', options={min_terms=2,max_terms=2,min_digits=1,max_digits=1}}]"
    )
    options = as_toml(UCB | {"by": "task"})
    flags = (
        f"--reward.verifier={toml.parent}/mine.py:by_level", f"--data.tasks={tasks}", "--data.curriculum=ucb",
        f"--data.curriculum_options={options}", "--data.template={prompt}",
    )  # fmt: skip
    whole = take_steps(toml, tmp_path / "whole", *flags, "--trainer.steps=3")
    seen: list[tuple[str, float]] = []
    used = Counter[str]()
    for step, batch in enumerate(batches(whole)):
        arms = {
            name: [f"{name}/{(used[name] + k) * 2 + index}" for k in range(6)]
            for index, name in enumerate(("chain_sum", "basic_arithmetic"))
        }
        found = dump(arms, seen, [0, 6 * step], 6)
        assert [tree.meta["prompt_id"] for tree in batch] == found
        used.update(name.partition("/")[0] for name in found)
        seen += [(tree.meta["task"], mean_size(tree.rewards["reward"])) for tree in batch]
    take_steps(toml, tmp_path / "parts", *flags, "--trainer.steps=1")
    resumed = take_steps(toml, tmp_path / "parts", *flags, "--trainer.steps=3", resume=True)
    assert ids(resumed) == ids(whole)[1:]


@pytest.mark.check
def test_difficulty_passes_over_prompts_that_are_too_easy_or_too_hard(toml: Path, tmp_path: Path) -> None:
    flags = given(toml, "difficulty", "{low = 0.3, high = 0.8}")
    whole = take_steps(toml, tmp_path / "whole", *flags, "--trainer.steps=5")
    rewards: dict[str, list[float]] = {}
    order = [f"rows/{k}" for turn in range(40) for k in np.random.default_rng([0, turn]).permutation(18)]
    for batch in batches(whole):
        for tree in batch:
            while not 0.3 <= np.mean(rewards.get(order[0], 0.5)) <= 0.8:
                order.pop(0)
            assert tree.meta["prompt_id"] == order.pop(0)
        for tree in batch:
            rewards.setdefault(tree.meta["prompt_id"], []).extend(tree.rewards["reward"].tolist())
    assert len(rewards) == 18
    assert not {name for batch in ids(whole)[3:] for name in batch if int(name.removeprefix("rows/")) % 3 < 2}


def test_an_own_class_orders_gates_sizes_and_sees_dropped_groups(toml: Path, tmp_path: Path) -> None:
    flags = given(toml, f"{toml.parent}/mine.py:Least", "{skip = 'rows/2'}")
    steps = take_steps(toml, tmp_path, *flags, "--loop.callback=dynamic_sampling", "--trainer.prompts_per_step=2",
                       "--trainer.steps=2")  # fmt: skip
    seen = steps.orchestrator.source.curriculum._part.seen
    assert {why for _, _, why, *_ in seen} == {None, "equal_rewards"}
    first = 2 + int(steps.rows[0]["group/dropped_equal_rewards"])
    assert len(seen) == first + 2 + steps.rows[1]["group/dropped_equal_rewards"]
    names = [name for name, *_ in seen]
    assert names[:first] == [name for name in sorted(f"rows/{k}" for k in range(18)) if name != "rows/2"][:first]
    refused = {name for name, *_, rewards, _ in seen[:first] if np.mean(rewards) in (0, 1)}
    assert refused
    assert not refused & set(names[first:])
    assert "rows/2" not in names
    for name, mean, why, rewards, advantage in seen:
        assert len(rewards) == 2 + len(name) % 2
        assert (np.ptp(rewards) == 0) == (why is not None)
        assert np.abs(advantage).mean() == pytest.approx(mean_size(rewards), abs=1e-5)
        if names.count(name) == 1:
            assert mean == pytest.approx(np.mean(rewards))


@pytest.mark.parametrize(
    ("curriculum", "options", "said"),
    [
        ("ucbb", "{}", "data.curriculum = 'ucbb' is not known; did you mean 'ucb'"),
        ("ucb", "{windw = 3}", "has no option 'windw'; did you mean 'window'"),
        ("ucb", "{window = 0}", "'ucb': window must be at least 1"),
        ("ucb", "{by = 'levels'}", "has no column 'levels' .data.curriculum_options.by.; name one of answer, level"),
        ("ucb", "{}", "has one arm, 'rows', and nothing to choose"),
        ("difficulty", "{low = 0.9, high = 0.1}", "'difficulty': low must not be above high"),
        ("mine.py:Nothing", "{}", "must be a class with a method order"),
        ("mine.py:Wrong", "{}", "named 'nothing', which is not the id of a problem"),
        ("mine.py:Refusing", "{}", "chooses no prompt any more"),
    ],
)
def test_mistakes_are_named(toml: Path, curriculum: str, options: str, said: str) -> None:
    named = f"{toml.parent}/{curriculum}" if ":" in curriculum else curriculum
    config = load_config(toml, [*given(toml, named, options), "--evaluation.problems=0", "--evaluation.every=0"])
    with pytest.raises(UserError, match=said):
        build(config, console=Console())
