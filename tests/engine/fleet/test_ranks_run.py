"""Runs on several ranks: the driver's side with ranks in threads, and real ranks in forked processes.

A rank in a thread trains the whole model alone (`Replica`), as torch.distributed has one group a process; so such a run
must give the bits of one process, whatever is lost on the way.
"""

from __future__ import annotations

import copy
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from rolltree.engine import UserError
from rolltree.engine.app.assembly import run as build
from rolltree.engine.app.assembly import sampling as build_sampling
from rolltree.engine.app.assembly import workers as build_workers
from rolltree.engine.errors import RunError
from rolltree.engine.fleet import rank as rank_module
from rolltree.engine.fleet.hosted import HostedRewards, RewardHost
from rolltree.engine.fleet.rank import Rank
from rolltree.engine.fleet.ranks import Ranks
from rolltree.engine.fleet.workers import GoneError, InThreads, LostError, Worker
from rolltree.engine.learn.learning import RanksLostError
from rolltree.engine.loop.orchestrator import Orchestrator
from rolltree.engine.train.checkpoint import Saved, read_tensors
from rolltree.engine.train.group import ALONE, Group

from ...support.forked import Forked
from ...support.scale import assert_close, train
from ..loop.test_durability import assert_same_run, audit, rows

SHORT = ["--evaluation.problems=4", "--evaluation.every=2", "--trainer.steps=4", "--checkpoint.every=2"]
TWO = ["--rollout.engines=1", "--trainer.ranks=2"]
WITHIN = 2e-5


@pytest.fixture(scope="module")
def alone(toml: Path) -> Path:
    """The directory of the run of one process."""
    config, _ = train(toml, [f"--output_dir={toml.parent}/alone", *SHORT])
    return config.run_dir


# -- ranks in threads -------------------------------------------------------------------------------------------------

act: Callable[[Replica, str, int], object] = lambda rank, method, step: None  # noqa: E731
"""Called before every update and save of a replica, and replaced by tests."""


class Replica(Rank):
    """A rank that trains everything itself."""

    def _joined(self, store: str) -> Group:
        return ALONE

    def update(self, stored: Any, step: int, sums: Any) -> Any:
        act(self, "update", step)
        found = super().update(stored, step, copy.deepcopy(sums))  # threads share it
        act(self, "updated", step)
        return found

    def save(self, directory: str) -> Saved:
        act(self, "save", 0)
        return super().save(directory) if self._rank == 0 else Saved({}, {})

    def export(self, directory: str) -> None:
        if self._rank == 0:
            super().export(directory)


class Started(InThreads):
    """Threads that remember the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[Worker] = []

    def start(self, role: Any, index: int, make: Callable[..., object], *args: Any) -> Worker:
        worker = super().start(role, index, make, *args)
        if role == "rank":
            self.ranks.append(worker)
        return worker


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads load models one after the other: transformers changes torch's functions meanwhile."""
    lock, load_model = threading.Lock(), build_sampling.load_model

    def load(*args: Any, **options: Any) -> Any:
        with lock:
            return load_model(*args, **options)

    monkeypatch.setattr(build_sampling, "load_model", load)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, one_at_a_time: None) -> Started:
    made = Started()
    monkeypatch.setattr(build, "make_workers", lambda config: made)
    monkeypatch.setattr(build_workers, "Rank", Replica)
    return made


def does(monkeypatch: pytest.MonkeyPatch, what: Callable[[Replica, str, int], object]) -> None:
    monkeypatch.setitem(globals(), "act", what)


def once(rank: int, method: str, step: int, strike: Callable[[], object]) -> Callable[[Replica, str, int], None]:
    """Return what strikes rank ``rank`` the first time that it begins ``method`` in ``step``."""
    left = [strike]

    def what(replica: Replica, now: str, at: int) -> None:
        if (replica._rank, now, at) == (rank, method, step) and left:
            left.pop()()

    return what


def lost() -> None:
    raise LostError("it was lost in the test.")


def told(run: Orchestrator) -> str:
    return " ".join(run.console.rich.file.getvalue().split())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_replicas_give_the_bits_of_one_process(toml: Path, alone: Path, threads: Started, tmp_path: Path) -> None:
    config, run = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO])
    assert_same_run(config.run_dir, alone)
    assert isinstance(run.learner, Ranks)
    assert len(threads.ranks) == 2
    assert any(pq.read_table(config.run_dir / "rollouts/step_000001.parquet")["advantage"].to_pylist())
    assert load_file(config.run_dir / "export/model.safetensors").keys()
    last = rows(config.run_dir)[-1]
    assert last["timing_s/forward_backward"] > 0
    assert last["timing_s/pack"] > 0


@pytest.mark.check
def test_ranks_engines_and_a_reward_host_give_the_tokens_of_one_process(
    toml: Path, alone: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, two engines and a host, in threads; the log-probs of two engines are rounded otherwise."""
    hosts: list[RewardHost] = []

    class Kept(RewardHost):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            hosts.append(self)

    monkeypatch.setattr(build_workers, "HostedRewards", partial(HostedRewards, make=Kept))
    all_of_them = ["--rollout.engines=2", "--trainer.ranks=2", "--reward.hosts=1"]
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *all_of_them])
    assert_learned_alike(config.run_dir, alone)
    assert len(threads.ranks) == 2
    for host in hosts:  # a thread cannot be killed; a process ends and takes them along
        host.rewards.close()


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize(
    ("method", "step", "again"),
    [("update", 3, 2), ("updated", 1, 0), ("save", 0, 0)],
)
def test_a_lost_rank_takes_the_run_back(
    toml: Path,
    alone: Path,
    threads: Started,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    step: int,
    again: int,
) -> None:
    """The checkpoint is that of step 2 or 0, or there is none yet; the engine stays."""
    does(monkeypatch, once(1, method, step, lost))
    config, run = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO])
    assert len(threads.ranks) == 4
    assert len(threads._started) == 5
    assert_same_run(config.run_dir, alone)
    assert "The ranks are started anew because it was lost in the test." in told(run)
    assert (f"Resuming after step {again}." in told(run)) == (method != "save")
    audit(config)


class Gone:
    """A reference to what a rank had stored that has ended."""

    def get(self) -> Any:
        raise GoneError("its rank has ended in the test.")


OVERLAP = ["--loop.staleness=1", "--algorithm.advantage=group_norm"]


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize(
    ("overlap", "mirror", "rank_ends"),
    list(itertools.product([False, True], repeat=3)),
)
def test_weights_that_are_gone_are_stored_once_more_or_take_the_run_back(
    toml: Path, alone: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool,
    mirror: bool, rank_ends: bool,
) -> None:  # fmt: skip
    """With a sampling thread that thread sees it. A rank may be found to have ended with what it had stored; its state
    is in memory with a mirror."""
    ship, shipped = Replica.ship, list[int]()

    def loses_one(self: Replica, version: int, since: int | None) -> Any:
        if rank_ends and shipped == [1, 2, 3] and self._rank:
            shipped.append(0)
            lost()
        shipment = ship(self, version, since)
        shipped.extend([version] * self._rank)
        return shipment._replace(whole=[Gone()]) if shipped == [1, 2, 3] and self._rank else shipment

    monkeypatch.setattr(Replica, "ship", loses_one)
    options = ["--trainer.self_check=false", *OVERLAP * overlap, *["--trainer.mirror=true"] * mirror]
    config, run = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO, *options])
    goes_back = rank_ends and not mirror
    assert shipped == [1, 2, 3, *[0] * rank_ends, *[2] * goes_back, 3, 4]
    assert ("Resuming after step 2" in told(run)) == goes_back
    again = "The weights of version 3 are stored once more because its rank has ended in the test."
    assert (again in told(run)) == (not goes_back)
    assert len(threads._started) == (5 if rank_ends else 3)
    audit(config)
    if not overlap:
        assert_same_run(config.run_dir, alone)


@pytest.mark.slow
def test_a_rank_that_is_lost_while_the_run_goes_back(
    toml: Path, alone: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load = [0], Replica.load

    def loses_once(self: Replica, directory: str, state: Any) -> int:
        loads[0] += self._rank == 0
        if self._rank == 0 and loads[0] == 1:
            lost()
        return load(self, directory, state)

    monkeypatch.setattr(Replica, "load", loses_once)
    does(monkeypatch, once(0, "update", 4, lost))
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO])
    assert loads[0] == 2
    assert_same_run(config.run_dir, alone)


@pytest.mark.slow
def test_engines_forget_weights_that_the_run_went_back_from(
    toml: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some groups stay open over steps: each is trained once, and no token is of weights newer than the policy."""
    does(monkeypatch, once(0, "update", 4, lost))
    ages: list[tuple[int, int]] = []

    def watch(run: Orchestrator) -> None:
        update = run.learner.update

        def noting(trees: Any, *rest: Any) -> bool:
            newest = max(int(tree.policy_version[tree.loss_mask].max()) for tree in trees)
            ages.append((newest, run.learner.updates))
            return update(trees, *rest)

        monkeypatch.setattr(run.learner, "update", noting)

    stale = ["--loop.staleness=1", "--evaluation.problems=0", "--evaluation.every=0", "--rollout.max_new_tokens=40"]
    arguments = [*stale, "--algorithm.advantage=group_norm", "--trainer.steps=6", "--checkpoint.every=2"]
    config, run = train(toml, [f"--output_dir={tmp_path}", *arguments, *TWO], watch)
    assert len(ages) == 8  # steps 3 and 4 twice
    assert all(newest <= updates for newest, updates in ages)
    assert len(audit(config)) == 6 * config.trainer.prompts_per_step
    assert run.buffer.summary() is not None  # every token is accounted for


@pytest.mark.slow
def test_too_many_losses_end_the_run(
    toml: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends even if the steps between the checkpoint and the loss succeed each time."""

    def what(replica: Replica, method: str, step: int) -> None:
        if (replica._rank, method, step) == (1, "update", 2):
            lost()

    does(monkeypatch, what)
    with pytest.raises(RunError, match=r"^Ranks were lost 3 times without a new step \(placement.restarts = 2\)"):
        train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO, "--placement.restarts=2"])
    assert len(threads.ranks) == 6


@pytest.mark.slow
def test_a_rank_out_of_memory_halves_the_micro_batches_of_all(
    toml: Path, alone: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("of the test")

    does(monkeypatch, once(1, "update", 3, full))
    config, run = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO])
    assert run.learner.max_tokens == config.trainer.max_tokens // 2  # type: ignore[attr-defined]
    assert "micro-batches have 128 tokens from now on" in told(run)
    assert [row.get("actor/out_of_memory") for row in rows(config.run_dir)[1:]] == [None, None, 1, None]
    assert_close(config.run_dir, alone, WITHIN)
    does(monkeypatch, lambda replica, method, step: full() if method == "update" else None)
    with pytest.raises(torch.OutOfMemoryError, match="of the test"):  # not even a sequence fits
        train(toml, [f"--output_dir={tmp_path}", "--name=full", *SHORT, *TWO])


def test_ranks_that_differ_end_the_run(
    toml: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = rank_module.Digest

    def unequal(*values: str) -> Any:
        mine = threading.current_thread() not in seen and len(seen) == 1
        seen.add(threading.current_thread())
        return digest(*values)._replace(loss="7.0") if mine else digest(*values)

    seen: set[threading.Thread] = set()
    monkeypatch.setattr(rank_module, "Digest", unequal)
    unequal._fields = digest._fields  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"^In step 1 the ranks learned differently: loss is .*7\.0"):
        train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO])


def test_an_error_of_a_rank_is_told_as_it_is(
    toml: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is reported even if the other ranks fail because of it."""

    def what(replica: Replica, method: str, step: int) -> None:
        if method == "update":
            if replica._rank == 0:
                raise LostError("the other ranks do not answer (gloo)")
            time.sleep(0.2)
            raise UserError("A schedule is out of range.")

    does(monkeypatch, what)
    with pytest.raises(UserError, match="A schedule is out of range"):
        train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO])
    assert len(threads.ranks) == 2


# -- the driver's side alone -------------------------------------------------------------------------------------------


class Silent:
    """A rank that answers when the test lets it."""

    made: list[Silent] = []  # noqa: RUF012
    go_on = threading.Event()

    def __init__(self, put: Any, index: int, count: int, max_tokens: int) -> None:
        self.index, self.generation = index, len(self.made) // count
        self.made.append(self)

    def address(self) -> None:
        return None

    def join(self, store: str) -> Any:
        return rank_module.Facts({"w": (torch.Size([1]), torch.float32)}, np.arange(2), 1)

    def load(self, directory: str, state: Any) -> int:
        if self.generation == 0 and self.index == 1:
            self.go_on.wait(20)
            return 100
        return 3 + self.generation


@pytest.fixture
def silent() -> Iterator[Ranks]:
    Silent.made.clear()
    Silent.go_on.clear()
    workers = InThreads()
    yield Ranks(workers, 2, Silent, max_tokens=8, timeout_s=0.1, start_s=20.0, restarts=3, note=lambda text: None)  # type: ignore[arg-type]
    Silent.go_on.set()
    workers.close()


def test_a_rank_that_keeps_the_others_waiting_is_lost_and_its_late_answer_discarded(silent: Ranks) -> None:
    silent.ready()
    begin = time.monotonic()
    with pytest.raises(RanksLostError, match=r"rank 1 gave no answer to 'load' \(trainer.timeout_s\)"):
        silent.load(Path(), {})
    assert 0.1 <= time.monotonic() - begin < 5
    assert silent.updates == 0
    Silent.go_on.set()  # now the killed rank answers
    time.sleep(0.05)
    silent.load(Path(), {})
    assert silent.updates == 4
    assert [made.generation for made in Silent.made] == [0, 0, 1, 1]


def test_ranks_need_engines(toml: Path) -> None:
    with pytest.raises(UserError, match=r"`trainer\.ranks` = 2 needs engines in other processes.*at least 1"):
        train(toml, [f"--output_dir={toml.parent}/none", "--trainer.ranks=2"])
    assert not (toml.parent / "none").exists()


# -- real ranks, in processes -----------------------------------------------------------------------------------------


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, one_at_a_time: None) -> Forked:
    made = Forked()
    monkeypatch.setattr(build, "make_workers", lambda config: made)
    return made


def struck_at(strikes: dict[int, signal.Signals], monkeypatch: pytest.MonkeyPatch) -> Callable[[Orchestrator], None]:
    """Return what lets the last rank get a signal in the updates of some steps."""

    def watch(run: Orchestrator) -> None:
        learn = run.learner._learn  # type: ignore[attr-defined]

        def struck(method: str, trees: Any, given: Any, step: int, *rest: Any) -> Any:
            if (number := strikes.pop(step, None)) is not None:
                os.kill(run.learner.pids[-1], number)  # type: ignore[attr-defined]
            return learn(method, trees, given, step, *rest)

        monkeypatch.setattr(run.learner, "_learn", struck)

    return watch


def assert_learned_alike(ours: Path, theirs: Path) -> None:
    """The same tokens, checkpoints, metrics and exports, within the bound."""
    assert_close(ours, theirs, WITHIN)
    for one, other in zip(rows(ours), rows(theirs), strict=True):
        for name in ("actor/loss", "actor/grad_norm", "reward/mean", "eval/accuracy", "replay/groups"):
            assert one.get(name) == pytest.approx(other.get(name), abs=WITHIN), name
    files = sorted(file.relative_to(theirs) for file in (theirs / "export").rglob("*.safetensors"))
    assert files
    for file in files:
        exported, expected = load_file(ours / file), load_file(theirs / file)
        assert exported.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(exported[name], tensor, rtol=0, atol=WITHIN)


KEEPING = """
from rolltree.engine.methods.credit import Credit

class Running:
    def __init__(self):
        self.seen, self.total = 0, 0.0

    def __call__(self, trees):
        for tree in trees:
            self.seen += tree.num_leaves
            self.total += float(tree.rewards["reward"].sum())
        return Credit("leaf", [tree.rewards["reward"] - self.total / self.seen for tree in trees])

    def state_dict(self):
        return {"seen": self.seen, "total": self.total}

    def load_state_dict(self, state):
        self.seen, self.total = state["seen"], state["total"]
"""


@pytest.mark.slow
def test_two_processes_train_an_adapter_with_replay_and_credit_that_remembers(
    toml: Path, processes: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed, so that the run goes back to its checkpoint, with the state of the credit; one process goes on."""
    (tmp_path / "keeping.py").write_text(KEEPING)
    given = [
        "--model.lora={rank=4,alpha=8.0}", "--replay={share=0.34}", "--trainer.lr=0.01", "--checkpoint.every=2",
        f"--algorithm.advantage={tmp_path}/keeping.py:Running", "--evaluation.problems=0", "--evaluation.every=0",
        "--roles.reference={ema=0.9}", "--algorithm.objective_options={kl_coef=0.1}",
    ]  # fmt: skip
    one, _ = train(toml, [f"--output_dir={tmp_path}/one", *given, "--trainer.steps=3"])
    watch = struck_at({3: signal.SIGKILL}, monkeypatch)
    two, _ = train(toml, [f"--output_dir={tmp_path}/two", *given, *TWO, "--trainer.steps=3"], watch)
    assert len(processes.ranks) == 4
    assert rows(one.run_dir)[-1]["replay/groups"] == 2
    assert_learned_alike(two.run_dir, one.run_dir)
    assert any("lora_B" in name for name in load_file(two.run_dir / "export/adapter/adapter_model.safetensors"))
    for config in (one, two):
        train(toml, [f"--output_dir={config.output_dir}", *given, "--trainer.steps=4"], resume=True)
    assert_learned_alike(two.run_dir, one.run_dir)


def test_a_loss_with_a_state_is_refused_by_name(toml: Path, threads: Started, tmp_path: Path) -> None:
    own = "class Own:\n    def loss(self, logprob):\n        return logprob.sum()\n"
    own += "    def state_dict(self):\n        return {}\n    def load_state_dict(self, state):\n        pass\n"
    (tmp_path / "own.py").write_text(own)
    term = f'--algorithm.terms=[{{name="own",loss="{tmp_path}/own.py:Own"}}]'
    with pytest.raises(UserError, match=r"^'algorithm.terms.own' has a state, .* trainer.ranks = 2 .* of a share"):
        train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO, term])


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(
    toml: Path, alone: Path, processes: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed in an update and one stopped in another, which exceeds the time; both times the run goes back."""
    watch = struck_at({2: signal.SIGKILL, 3: signal.SIGSTOP}, monkeypatch)
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO, "--trainer.timeout_s=8"], watch)
    assert len(processes.ranks) == 6
    assert_learned_alike(config.run_dir, alone)
    audit(config)
    arguments = [f"--output_dir={tmp_path}", *SHORT, "--trainer.steps=5"]  # one process continues what two have saved
    again, _ = train(toml, arguments, resume=True)
    longer, _ = train(toml, [f"--output_dir={tmp_path}/longer", *arguments[1:]])
    assert_close(again.run_dir, longer.run_dir, WITHIN)


MINE = """
import numpy as np
import torch.distributed as dist
from rolltree.engine.batches import distribute
from rolltree.engine.methods.advantages import ADVANTAGES
from rolltree.engine.methods.credit import Credit

assigned = distribute.assigned

def first_share(costs, ranks):
    return [assigned(costs, ranks)[0]] * ranks

def same_share(trees):
    if dist.is_initialized():  # in a rank
        distribute.assigned = first_share
    return ADVANTAGES["group_norm"](trees)

def random(trees):
    return Credit("leaf", [np.random.default_rng().normal(size=tree.num_leaves) for tree in trees])
"""


@pytest.mark.slow
def test_credit_that_differs_between_the_ranks_ends_the_run(toml: Path, processes: Forked, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    few = [*SHORT, "--trainer.steps=2", f"--output_dir={tmp_path}"]
    with pytest.raises(RunError, match=r"^In step 1 the ranks learned differently: credit is "):
        train(toml, [*few, *TWO, f"--algorithm.advantage={tmp_path}/mine.py:random"])


@pytest.mark.slow
def test_one_share_for_all_ranks_gives_other_weights(toml: Path, processes: Forked, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    few = [*SHORT, "--trainer.steps=2", f"--output_dir={tmp_path}"]
    of = f"--algorithm.advantage={tmp_path}/mine.py:same_share"
    (one, _), (two, _) = train(toml, [*few, "--name=one", of]), train(toml, [*few, "--name=two", *TWO, of])
    with pytest.raises(AssertionError):
        assert_close(two.run_dir, one.run_dir, WITHIN)


@pytest.mark.slow
def test_batch_invariant_processes_learn_the_same_bits(toml: Path, processes: Forked, tmp_path: Path) -> None:
    """Two engines and two ranks, against one process: tokens, their log-probs, weights and moments of the optimiser."""
    exact = [*SHORT, "--model.batch_invariant=true", "--trainer.max_tokens=96", "--trainer.max_grad_norm=0.01"]
    one, _ = train(toml, [f"--output_dir={tmp_path}/one", *exact])
    two, _ = train(toml, [f"--output_dir={tmp_path}/two", *exact, "--rollout.engines=2", "--trainer.ranks=2"])
    assert len(processes.ranks) == 2
    assert_close(two.run_dir, one.run_dir, 0)
    for file in sorted((one.run_dir / "rollouts").glob("*.parquet")):
        ours, theirs = (pq.read_table(run.run_dir / "rollouts" / file.name).to_pydict() for run in (two, one))
        assert repr(ours) == repr(theirs), file.name
    last = max((one.run_dir / "checkpoints").glob("step_*")).name
    got, expected = (read_tensors(run.run_dir / "checkpoints" / last / "learner") for run in (two, one))
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
