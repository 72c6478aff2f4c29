"""The real controller, driven by a sampler of canned answers: what any further engine has to provide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import RunError
from rolltree.engine.fleet.publication import Publication
from rolltree.engine.loop.budget import Budget
from rolltree.engine.loop.buffer import Buffer
from rolltree.engine.loop.callback import CallbackRule
from rolltree.engine.loop.controller import Controller
from rolltree.engine.loop.sampling import SamplingParts
from rolltree.engine.programs import make_program
from rolltree.engine.prompts.archive import Archive
from rolltree.engine.prompts.group import State
from rolltree.engine.prompts.prompts import Prompt
from rolltree.engine.record.metrics import Stopwatch
from rolltree.engine.rewards import RewardItem, RewardResult, Rewards
from rolltree.engine.rollout import SamplingParams
from rolltree.engine.rollout.sampler import Flight, Job, Kept, LostError, Sampler, WeightSource


class Canned:
    """Answers a prompt of one token t with [t, k] for each of its n responses, ``late`` steps after it was asked."""

    longest: int | None = None
    end_token_ids = frozenset({0})

    def __init__(self, late: int = 0) -> None:
        self.tally: Counter[str] = Counter()
        self.late, self.version, self.loaded = late, 0, []  # type: ignore[var-annotated]
        self.waiting: dict[Flight, int] = {}
        self.loses: set[int] = set()

    def submit(self, jobs: Sequence[Job]) -> list[Flight]:
        flights = [Flight(job) for job in jobs]
        self.waiting |= {f: f.job.kept["left"] if f.job.kept else self.late for f in flights}
        return flights

    def step(self, seconds: float) -> list[Flight]:
        self.tally["steps"] += 1
        done = [flight for flight, left in self.waiting.items() if left == 0]
        for flight in done:
            (token,) = flight.job.prompt
            if token in self.loses:
                self.loses.remove(token)
                flight.error = LostError("gone")
                continue
            answers = [[token, k] for k in range(flight.job.params.n)]
            known = [np.full(2, -1.0) for _ in answers]
            flight.tree = TokenTree.from_sequences(
                [token], answers, behaviour_logprobs=known, policy_version=self.version
            )
        self.waiting = {flight: left - 1 for flight, left in self.waiting.items() if left}
        return done

    def kept(self, flights: Sequence[Flight]) -> list[Kept]:
        return [Kept({"left": self.waiting[f], "n": f.job.params.n, "program": {}}, None) for f in flights]

    def drop(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            del self.waiting[flight]

    def load(self, weights: WeightSource | None, version: int, *, keep_keys: bool) -> None:
        self.version = version
        self.loaded.append((None if weights is None else dict(weights.tensors()), version, keep_keys))

    def generate(self, jobs: Sequence[Job]) -> list[TokenTree]:
        return [TokenTree.from_sequences(list(job.prompt), [[1]]) for job in jobs]

    def score(self, prompts: Any, continuations: Any) -> list[list[np.ndarray]]:
        return [[np.zeros(len(c), np.float32) for c in some] for some in continuations]

    def forget_prefixes(self) -> None: ...

    def remember(self, texts: Any) -> None: ...

    def in_thread(self) -> Any:
        return nullcontext()

    def settle(self) -> None: ...

    def close(self) -> None: ...


# -- other parts of a controller ---------------------------------------------------------------------------------------


class Prompts:
    """Prompts of one token each: 1, 2, 3 and so on."""

    given = 0

    def next(self, count: int) -> list[Prompt]:
        self.given += count
        numbers = range(self.given - count + 1, self.given + 1)
        return [Prompt(str(i), "", str(i), [i], {"answer": "1"}, str(i)) for i in numbers]

    def observe(self, trees: Sequence[TokenTree]) -> None: ...


class Words:
    """Writes token ids as numbers."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    all_special_ids: ClassVar[list[int]] = []
    all_special_tokens: ClassVar[list[str]] = []
    eos_token_id = pad_token_id = bos_token_id = chat_template = None

    def __len__(self) -> int:
        return 1000

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return " ".join(map(str, ids))

    def batch_decode(self, rows: Sequence[Sequence[int]], **options: Any) -> list[str]:
        return [self.decode(row) for row in rows]


class Odd(Rewards):
    """Rewards responses that end with an odd number."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [RewardResult(float(int(item.response_text.split()[-1]) % 2), None) for item in items]


class Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@dataclass
class Tensors:
    value: float

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor(self.value)}


def controller(sampler: Canned, budget: Budget, rule: CallbackRule | None = None, **options: Any) -> Controller:
    checked: Sampler = sampler
    parts = SamplingParts(
        sampler=checked,
        tokenizer=Words(),  # type: ignore[arg-type]
        source=Prompts(),  # type: ignore[arg-type]
        program=make_program("flat"),
        program_name="flat",
        params=SamplingParams(n=3, max_new_tokens=2),
        seed=0,
        **options,
    )
    silent: Any = Silent()
    return Controller(parts, Buffer(budget), Publication(checked, silent.note), Stopwatch(), silent, rule)


def test_batches_are_sampled_judged_and_handed_out_in_order() -> None:
    made = controller(Canned(), Budget(batch=2))
    with made.running(Odd()):
        for step in range(3):
            batch = made.next_batch()
            assert [group.prompt.token_ids for group in batch] == [[2 * step + 1], [2 * step + 2]]
            assert [group.tree.rewards["reward"].tolist() for group in batch] == [[0, 1, 0]] * 2
            assert all(group.tree.policy_version.max() == step for group in batch)
            made.end_step(batch, Tensors(step), step + 1)
    assert [(tensors["w"].item(), version) for tensors, version, _ in made.sampler.loaded] == [(0, 1), (1, 2), (2, 3)]


def test_the_parameters_of_a_step_reach_its_jobs() -> None:
    made = controller(Canned(), Budget(batch=1))
    with made.running(Odd()):
        (first,) = made.next_batch()
        made.end_step([first], None, 0)
        (second,) = made.next_batch(replace(made.parts.params, n=5))
    assert (first.tree.num_leaves, second.tree.num_leaves) == (3, 5)
    assert made.sampler.loaded == []  # no weights where nothing changed


def test_a_lost_job_begins_anew() -> None:
    sampler = Canned(late=1)
    sampler.loses = {2}
    made = controller(sampler, Budget(batch=3))
    with made.running(Odd()):
        batch = made.next_batch()
    assert [group.prompt.token_ids for group in batch] == [[1], [2], [3]]
    assert made.restarted == {"lost": 1}


def test_an_error_of_a_job_ends_the_run_and_is_told() -> None:
    class Fails(Canned):
        def step(self, seconds: float) -> list[Flight]:
            for flight in self.waiting:
                flight.error = ZeroDivisionError("of the program")
            return list(self.waiting)

    made = controller(Fails(), Budget(batch=1))
    with made.running(Odd()), pytest.raises(RunError, match=r"rollout\.program = 'flat' failed"):
        made.next_batch()


def test_unfinished_jobs_are_kept_as_plain_values_and_go_on() -> None:
    made = controller(Canned(late=3), Budget(batch=1, staleness=1))
    with made.running(Odd()):
        made.advance()
        tensors, groups = made.state_dict()
        assert made.buffer.among(State.SAMPLING)
        (unfinished, *_) = [Archive(tensors).unpack(packed) for packed in groups]
        assert unfinished["request"] == {"left": 2, "n": 3, "program": {}}
    again = controller(Canned(late=3), Budget(batch=1, staleness=1))
    again.buffer.load_state_dict(made.buffer.state_dict())
    again.load_state_dict(tensors, groups)
    assert set(again.sampler.waiting.values()) == {2}
    with again.running(Odd()):
        (group,) = again.next_batch()
    assert group.tree.num_leaves == 3
    assert again.sampler.tally["steps"] == 3  # the one before is not repeated


def test_state_that_no_checkpoint_holds_begins_anew() -> None:
    class Unkept(Canned):
        def kept(self, flights: Sequence[Flight]) -> list[Kept]:
            return [Kept({"n": 3, "program": {"open": Silent()}}, None) for _ in flights]

    made = controller(Unkept(late=3), Budget(batch=1, staleness=1))
    with made.running(Odd()):
        made.advance()
        tensors, groups = made.state_dict()
    again = controller(Canned(), Budget(batch=1, staleness=1))
    again.load_state_dict(tensors, groups)
    assert again.restarted == {"state": len(groups)}
    assert again.sampler.waiting == {}


class Events:
    """Writes down when weights are gathered and loaded, and when the groups of the step are released."""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[str] = []
        self.error = error

    def source(self, value: float) -> Any:
        events = self

        class Source(Tensors):
            def tensors(self) -> dict[str, torch.Tensor]:
                events.seen.append("gather")
                return super().tensors()

        return Source(value)

    def sampler(self) -> Canned:
        events = self

        class Loads(Canned):
            def load(self, weights: WeightSource | None, version: int, *, keep_keys: bool) -> None:
                super().load(weights, version, keep_keys=keep_keys)
                events.seen.append("load")
                if events.error is not None:
                    raise events.error

        return Loads()


def test_weights_are_gathered_then_loaded_then_the_groups_are_released() -> None:
    events = Events()
    made = controller(events.sampler(), Budget(batch=5, staleness=1))
    end_step = made.buffer.end_step
    made.buffer.end_step = lambda batch: (events.seen.append("release"), end_step(batch))[1]  # type: ignore[method-assign]
    with made.running(Odd()):
        batch = made.next_batch()
        room = made.buffer.room
        made.end_step(batch, events.source(1.0), 7)
    assert events.seen == ["gather", "load", "release"]
    assert made.buffer.room == room + 5


def test_each_version_comes_with_its_own_weights() -> None:
    made = controller(Canned(), Budget(batch=1))
    with made.running(Odd()):
        assert made.sampler.loaded == []  # nothing before the first step ends
        for version in (10, 20, 42):
            made.end_step(made.next_batch(), Tensors(float(version)), version)
        (group,) = made.next_batch()
    assert [(held["w"].item(), version) for held, version, _ in made.sampler.loaded] == [(10, 10), (20, 20), (42, 42)]
    assert group.tree.policy_version.max() == 42


def test_an_error_of_the_transfer_ends_the_step_and_releases_nothing() -> None:
    events = Events(RuntimeError("the transfer failed"))
    made = controller(events.sampler(), Budget(batch=2))
    with made.running(Odd()):
        batch = made.next_batch()
        room = made.buffer.room
        with pytest.raises(RuntimeError, match="the transfer failed"):
            made.end_step(batch, events.source(1.0), 1)
    assert made.buffer.room == room
