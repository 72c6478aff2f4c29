"""``make gpu``: goes on where it stopped, loses only what failed, and needs no more than such a machine has."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from rolltree.bench import gpu, gpu_checks, gpu_first, gpu_tasks, runner, schema
from rolltree.bench.cli import OPS, load
from rolltree.bench.jobs import next_profiles
from rolltree.bench.journal import Journal
from rolltree.bench.runner import Bench, Calls, Case, Choice, DeviceLostError
from rolltree.bench.runs import gpu_next
from rolltree.kernels.machine import cpu_levels

from ..support.forks import Forks, forked

CPU = torch.device("cpu")
QUICK = Choice(seconds=0.0)


def counted(calls: list[str], fails: str = "") -> Bench:
    """Two cases by two providers; `calls` is what was made."""

    def cases(device: torch.device, quick: bool) -> Iterator[Case]:
        for name in ("one", "two"):
            yield Case(name, lambda name=name: calls.append(f"inputs {name}") or name)  # type: ignore[misc]

    def provider(who: str, inputs: str) -> Calls:
        calls.append(f"{who} {inputs}")
        if f"{who} {inputs}" == fails:
            raise RuntimeError("out of luck\nat length")
        return {"forward": lambda: None}

    both = {who: (lambda inputs, who=who: provider(who, inputs)) for who in ("ours", "theirs")}
    return Bench("made_up", cases, both)


def rows_of(bench: Bench, out: Path | None, choice: Choice = QUICK) -> tuple[set[tuple[str, str]], Journal, list[str]]:
    journal, said = Journal(bench.op, out), list[str]()
    rows = list(runner.run(bench, CPU, choice, journal, said.append))
    return {(row.case, row.provider) for row in rows if row.metric == "time_ms"}, journal, said


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    first: list[str] = []
    whole = runner.run(counted(first), CPU, QUICK, Journal("made_up", tmp_path), print)
    assert next(whole).case == "one"
    del whole  # cut off in the second case or before
    again: list[str] = []
    assert rows_of(counted(again), tmp_path)[0] == {("two", "ours"), ("two", "theirs")}
    assert again == ["inputs two", "ours two", "theirs two"]
    assert len({(r.case, r.provider) for r in schema.read(tmp_path / "made_up.jsonl")}) == 4
    assert rows_of(counted(again), tmp_path)[0] == set()


def test_records_of_another_commit_count_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of(counted([]), tmp_path)
    monkeypatch.setattr("rolltree.bench.journal.commit", lambda: "another")
    assert len(rows_of(counted([]), tmp_path)[0]) == 4


def test_a_provider_that_fails_loses_its_rows_alone(tmp_path: Path) -> None:
    rows, journal, said = rows_of(counted([], "ours one"), tmp_path)
    assert rows == {("one", "theirs"), ("two", "ours"), ("two", "theirs")}
    assert [str(p) for p in journal.problems] == ["made_up / one / ours: failed: RuntimeError: out of luck"] == said
    assert [str(p) for p in Journal("made_up", tmp_path).problems] == said, "the next process knows"


@pytest.mark.parametrize("alone", [False, True])
def test_a_failure_while_it_is_timed(alone: bool) -> None:
    left = {"ours": 4, "theirs": 1000}

    def provider(who: str) -> Calls:
        def call() -> None:
            left[who] -= 1
            if left[who] < 0:
                raise ValueError("late")

        return {"forward": call}

    providers = {who: (lambda inputs, who=who: provider(who)) for who in left}
    bench = Bench("late", lambda device, quick: iter([Case("one", lambda: 1)]), providers, alone=alone)
    rows, journal, _ = rows_of(bench, None)
    assert rows == {("one", "theirs")}
    assert [(p.provider, p.reason) for p in journal.problems] == [("ours", "ValueError: late")]


def test_inputs_that_cannot_be_made_lose_their_case(tmp_path: Path) -> None:
    def too_large() -> None:
        raise torch.OutOfMemoryError("429 GiB")

    bench = counted([])
    bench = Bench("made_up", lambda *_: iter([Case("huge", too_large), *counted([]).cases(CPU, True)]), bench.providers)
    rows, journal, _ = rows_of(bench, tmp_path)
    assert len(rows) == 4
    assert [(p.case, p.status) for p in journal.problems] == [("huge", "failed")]


def test_a_provider_that_takes_too_long_is_stopped() -> None:
    def slow(inputs: object) -> Calls:
        def call() -> None:
            try:
                time.sleep(20)
            except Exception as error:  # as a compiler does with what is raised inside it
                raise RuntimeError("wrapped") from error

        return {"forward": call}

    bench = counted([])
    bench = Bench("made_up", bench.cases, {"slow": slow, **bench.providers})
    start = time.monotonic()
    rows, journal, _ = rows_of(bench, None, Choice(seconds=0.0, limit=0.2))
    assert time.monotonic() - start < 10
    assert len(rows) == 4
    assert {(p.provider, p.status) for p in journal.problems} == {("slow", "stopped")}


def test_a_lost_device_ends_the_process_and_the_next_leaves_the_provider_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(device: torch.device) -> None:
        raise DeviceLostError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "check_device", lost)
        with pytest.raises(DeviceLostError):
            rows_of(counted([], "ours one"), tmp_path)
    calls: list[str] = []
    assert rows_of(counted(calls, "ours one"), tmp_path)[0] == {("one", "theirs"), ("two", "ours"), ("two", "theirs")}
    assert "ours one" not in calls


def setting(out: Path) -> gpu_tasks.Setting:
    return gpu_tasks.Setting("cpu", True, 0.0, "", out)


def task(name: str, code: str, **options: object) -> gpu_tasks.Task:
    return gpu_tasks.Task(name, [sys.executable, "-c", code], **options)  # type: ignore[arg-type]


@pytest.mark.check
def test_parts_go_on_where_they_stopped(tmp_path: Path) -> None:
    mark = f"open({str(tmp_path / 'ran')!r}, 'a').write('x')"
    tasks = [task("good", mark), task("bad", f"{mark}; raise SystemExit(4)"), task("other", mark)]
    assert gpu.run_part(tasks, setting(tmp_path), 60.0, lambda line: None) == ["bad"]
    assert (tmp_path / "ran").read_text() == "xxx"
    assert gpu.run_part(tasks, setting(tmp_path), 60.0, lambda line: None) == ["bad"]
    assert (tmp_path / "ran").read_text() == "xxxx", "only what had not passed"
    tasks = [task("good", mark, always=True)]
    assert gpu.run_part(tasks, setting(tmp_path), 60.0, lambda line: None) == []
    assert (tmp_path / "ran").read_text() == "xxxxx", "and what another machine lacks"


def test_time_limits_of_tasks_and_parts(tmp_path: Path) -> None:
    said: list[str] = []
    sleepers = [task("long", "import time; time.sleep(60)", limit=0.5), task("next", "pass")]
    assert gpu.run_part(sleepers, setting(tmp_path), 60.0, said.append) == ["long"]
    assert "failed: it took longer than 0 s" in said[0]
    start = time.monotonic()
    cut = [task("over", "import time; time.sleep(60)"), task("after", "pass")]
    assert gpu.run_part(cut, setting(tmp_path), 1.5, said.append) == ["over", "after"]
    assert time.monotonic() - start < 20
    assert all("cut off" in line for line in said[-2:])


def test_a_benchmark_goes_on_behind_the_provider_that_killed_its_process(tmp_path: Path) -> None:
    """The first process says whose turn it is and dies of a signal; the second finds that on record."""
    Journal("made_up", tmp_path).begin("one", "ours")
    running = tmp_path / "made_up.running"
    running.rename(tmp_path / "begun")
    code = f"""
import os, pathlib, resource
if not pathlib.Path({str(tmp_path / "made_up.outcomes.jsonl")!r}).exists():
    pathlib.Path({str(tmp_path / "begun")!r}).rename({str(running)!r})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()
"""
    said: list[str] = []
    assert (
        gpu.run_task(task("rows", code, op="made_up"), setting(tmp_path), time.monotonic() + 60, said.append)
        == "passed"
    )
    assert said == ["made_up / one / ours: stopped: its process ended: exit code -6"]


def test_the_archive_is_whole_all_the_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive is whole after every task, and in the middle of one."""
    monkeypatch.setattr(gpu, "PACK_SECONDS", 0.1)
    out, archive = tmp_path / "out", tmp_path / "away" / "all.tar.gz"
    seen = f"""
import tarfile, time
for _ in range(200):
    names = sorted(tarfile.open({str(archive)!r}).getnames())
    if "logs/second.log" in names:
        break
    time.sleep(0.1)
print(names)
"""
    tasks = [task("first", "print('said')"), task("second", seen), task("third", "raise SystemExit(4)")]
    assert gpu.run_part(tasks, replace(setting(out), archive=archive), 60.0, lambda line: None) == ["third"]
    assert "['logs/first.log', 'logs/second.log', 'tasks.jsonl']" in (out / "logs" / "second.log").read_text()
    names = {"tasks.jsonl", *(f"logs/{name}.log" for name in ("first", "second", "third"))}
    with tarfile.open(archive) as tar:
        assert set(tar.getnames()) == names
        tar.extraction_filter = lambda member, path: member  # Python 3.11.2 knows no filters
        tar.extractall(tmp_path / "elsewhere")
    said: list[str] = []
    assert gpu.run_part(tasks[:2], setting(tmp_path / "elsewhere"), 60.0, said.append) == []
    assert said == ["== first: passed before", "== second: passed before"]
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]


PLANTED = """
import ctypes, os, pathlib, resource, sys, time
import torch
from rolltree.bench import gpu_first
from rolltree.bench.gpu_checks import Check, Compared

def check(name, do=lambda: None, error=0.5):
    def compare(backend, device):
        ran.open("a").write(name + " ")
        do()
        return [Compared("out", error, 1.0)]
    return Check(name, ("triton",), compare)

def repaired(do):
    return (lambda: None) if fixed.exists() else do

ran, fixed = pathlib.Path(sys.argv[1], "ran"), pathlib.Path(sys.argv[1], "fixed")
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
gpu_first.checks = lambda small: [
    check("good"),
    check("wrong", error=0.5 if fixed.exists() else float("nan")),
    check("crash", repaired(lambda: ctypes.string_at(0))),
    check("hang", repaired(lambda: ctypes.PyDLL(None).sleep(100))),
    check("slow", lambda: time.sleep(1)),
    check("last"),
]
sys.exit(gpu_first.main(["triton", "--device", "cpu", "--out", sys.argv[1]]))
"""


@pytest.mark.check
def test_a_check_that_hangs_ends_alone(tmp_path: Path) -> None:
    """Its process is killed after the check's own limit, and the next goes on after it."""
    running, outcomes = (str(tmp_path / f"made_up.{name}") for name in ("running", "outcomes.jsonl"))
    code = f"""
import os, time
if not os.path.exists({outcomes!r}):
    open({running!r}, "w").write('["one", "ours"]')
    time.sleep(60)
"""
    said: list[str] = []
    hanging = task("rows", code, op="made_up", each=0.5)
    assert gpu.run_task(hanging, setting(tmp_path), time.monotonic() + 60, said.append) == "passed"
    assert said == ["made_up / one / ours: stopped: its process ended: it took longer than 0 s"]


@pytest.mark.slow  # six processes import torch
def test_what_fails_first_stops_no_other_check(tmp_path: Path) -> None:
    """Wrong numbers, a segmentation fault and a hang in C are told; a second call repeats these alone, a third none."""
    command = [sys.executable, "-c", PLANTED, str(tmp_path)]
    planted = gpu_tasks.Task("first triton", command, 120.0, "first_triton", each=3.0)
    said: list[str] = []
    ran = tmp_path / "ran"
    with forked(gpu.run_part, [planted], setting(tmp_path), 90.0):
        wait_for(lambda: ran.exists() and "slow" in ran.read_text())
    assert ran.read_text().split() == ["good", "wrong", "crash", "hang", "slow"], "killed within the fifth"
    assert gpu.run_part([planted], setting(tmp_path), 90.0, said.append) == ["first triton"]
    again = ["wrong", "crash", "hang", "slow", "last"]
    assert ran.read_text().split()[5:] == again, "what passed is not repeated, what was cut off and what failed is"
    told = [line.partition("first_triton / ")[2] for line in said[:-1]]
    assert [line for line in told if "again" not in line] == [
        "wrong / triton: failed: WrongError: out is off by nan (1 is allowed)",
        f"crash / triton: stopped: its process ended: exit code {-signal.SIGSEGV}",
        "hang / triton: stopped: its process ended: it took longer than 3 s",
        "slow / triton: finished: out 5.0e-01 of 1.0e+00",
        "last / triton: finished: out 5.0e-01 of 1.0e+00",
    ]
    (tmp_path / "fixed").touch()
    assert gpu.run_part([planted], setting(tmp_path), 90.0, said.append) == []
    assert ran.read_text().split()[10:] == ["wrong", "crash", "hang"]
    assert Journal("first_triton", tmp_path).problems == []
    assert gpu.run_part([planted], setting(tmp_path), 90.0, said.append) == []
    assert said[-1] == "== first triton: passed before"


def test_the_next_tasks_run_while_one_is_built(tmp_path: Path) -> None:
    """Up to the one that needs it; a build that fails stops none."""
    ran = tmp_path / "ran"

    def mark(name: str, before: str = "pass") -> str:
        return f"import time; {before}; open({str(ran)!r}, 'a').write('{name} ')"

    await_triton = f"[time.sleep(0.05) for _ in range(400) if 'triton' not in (open({str(ran)!r}).read())]"
    tasks = [
        task("versions", mark("versions")),
        task("build", mark("build", await_triton) + "; raise SystemExit(1)", background=True),
        task("triton", mark("triton")),
        task("cuda", mark("cuda"), joins=True),
    ]
    assert gpu.run_part(tasks, setting(tmp_path), 60.0, lambda line: None) == ["build"]
    assert ran.read_text().split() == ["versions", "triton", "build", "cuda"]


def test_every_kernel_is_checked_first_at_two_shapes() -> None:
    """In the order of their worth; each Triton and CUDA kernel that an op has."""
    for small in (False, True):
        found = [(check.name.split()[0], tuple(check.backends)) for check in gpu_checks.checks(small)]
        assert ("logprob_from_logits", ("triton", "cuda")) in found
        heads = "linear_logprob", "linear_policy_loss", "linear_divergence", "logprob_from_logits", "policy_loss"
        ops = (*heads, "tree_attention", "tree_decode", "sample_tokens", "tree_recurrence")
        assert [op for op, _ in found] == [op for op in ops for _ in range(2)]
        assert all(backends == ("triton",) for op, backends in found if op != "logprob_from_logits")
    cases = {op: [case.name for case in load(op).cases(torch.device("cuda"), False)] for op in gpu_first.ROWS}
    assert all(any(re.search(gpu_first.ROWS[op], name) for name in names) for op, names in cases.items())


def test_a_check_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's own check passes; with a gradient off by five hundredths it names that output alone."""
    check = next(check for check in gpu_checks.checks(True) if check.name.startswith("policy_loss"))
    assert all(x.error <= x.bound for x in check.compare("reference", CPU))

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * (1.05 if gradient.dtype == torch.float32 else 1.0)

    right = gpu_checks.policy_loss
    monkeypatch.setattr(gpu_checks, "policy_loss", lambda x, *given, **options: right(Off.apply(x), *given, **options))
    assert [x.name for x in check.compare("reference", CPU) if x.error > x.bound] == ["d_logprob"]


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen in time")


def test_a_task_ends_with_the_process_that_runs_it(tmp_path: Path) -> None:
    """Else it would hold the device when the command is given again."""
    sleeper = task("sleeper", "import os, time; print(os.getpid(), flush=True); time.sleep(100)")
    log = tmp_path / "logs" / "sleeper.log"
    with forked(gpu.run_part, [sleeper], setting(tmp_path), 90.0):
        for _ in range(600):
            if log.exists() and len(lines := log.read_text().splitlines()) > 1:
                break
            time.sleep(0.1)
    status = Path("/proc", lines[-1], "stat")
    for _ in range(100):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the task went on")


def test_what_some_cases_passed_is_not_passed_by_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, some = (
        {task.name for task in gpu_tasks.parts(gpu_tasks.Setting("cpu", True, 0.0, cases, tmp_path))["kernels"]()}
        for cases in ("", "T=1")
    )
    assert whole & some == {"build"}
    request = ["--device", "cpu", "--rehearse", "--part", "kernels", "--out", str(tmp_path / "out")]
    assert gpu.main([*request, "--cases", "no such case"]) == 2
    assert "no case of kernels contains --cases 'no such case'; rolltree bench --list" in capsys.readouterr().err
    assert gpu.main([*request, "--cases", "T=("]) == 2
    assert "'T=(' is not a regular expression" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    chosen = [
        t.name for t in gpu_tasks.kernels(gpu_tasks.Setting("cpu", True, 0.0, "T=1$", tmp_path)) if t.selects(CPU)
    ]
    assert chosen == ["build", "rows sample_tokens of T=1$"]


def test_a_tool_that_is_missing_is_said(tmp_path: Path) -> None:
    to = gpu_tasks.Setting("cuda", False, 0.0, "", tmp_path)
    assert gpu.run_part([task("watched", "", needs="no-such-tool")], to, 9.0, lambda line: None) == ["watched"]
    assert json.loads((tmp_path / "tasks.jsonl").read_text())["status"] == "failed"


def test_every_task_is_listed_once(tmp_path: Path) -> None:
    for to in (setting(tmp_path), gpu_tasks.Setting("cuda", False, 2.0, "", tmp_path)):
        known = gpu_tasks.parts(to)
        short = [name for name in known if name not in gpu_tasks.LONG]
        assert short == ["first", "next", "kernels", "correct", "tuning", "training"]
        assert all("build" in {task.name for task in known[part]()} for part in short)
        assert 2 * gpu.PART_SECONDS["first"] + gpu.OTHER_PART_SECONDS <= 12 * 60
        for name, tasks in known.items():
            names = [task.name for task in tasks()]
            assert len(names) == len(set(names))
            if name not in gpu_tasks.LONG:
                seconds = gpu.PART_SECONDS.get(name, 2 * gpu.OTHER_PART_SECONDS / 4)
                assert all(task.limit <= seconds for task in tasks()), name


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize(
    ("kind", "lines"), [("decode", 11), ("profiles", 4), ("products", 3), ("steps", 9), ("runs", 2)]
)
def test_what_comes_next_runs_without_a_gpu(kind: str, lines: int, tmp_path: Path) -> None:
    """Each line has an outcome, and none is measured twice."""
    options = [kind, "--device", "cpu", "--rehearse", "--out", str(tmp_path)]
    for _ in range(2):
        assert gpu_next.main(options) == 0
        outcomes = (tmp_path / f"next_{kind}.outcomes.jsonl").read_text().splitlines()
        assert len(outcomes) == lines
        assert {json.loads(line)["status"] for line in outcomes} == {"finished"}


def test_a_profile_has_kernels_alone() -> None:
    """On a GPU what the host does is left out; on a CPU an operator has its time without that of those it calls."""
    launch, kernel = (
        SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(elapsed_us=lambda: 3000.0))
        for name, device in (("launch", DeviceType.CPU), ("kernel", DeviceType.CUDA))
    )
    assert next_profiles.by_kernel([launch, kernel, kernel], True) == {"kernel": 6.0 / next_profiles.STEPS}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        torch.ones(2, 2) @ torch.ones(2, 2)
    times, whole = next_profiles.by_kernel(seen.events(), False), seen.key_averages().self_cpu_time_total
    assert {"aten::mm", "aten::matmul"} <= set(times)
    assert sum(times.values()) == pytest.approx(whole / 1000 / next_profiles.STEPS)


def test_the_chosen_cases_and_providers_exist(tmp_path: Path) -> None:
    """Each pattern chooses something that exists on a GPU; a pattern that fits nothing would measure nothing."""
    cuda = torch.device("cuda")
    to = gpu_tasks.Setting("cuda", False, 2.0, "", tmp_path)
    benches = [
        task
        for part in ("kernels", "tuning", "training")
        for task in gpu_tasks.parts(to)[part]()
        if "rolltree.bench" in task.command
    ]
    assert len(benches) > 10
    for task in benches:
        words = task.command[task.command.index("rolltree.bench") + 1 :]
        bench, quick = load(words[0]), "--quick" in words
        names = [case.name for case in bench.cases(cuda, quick)]
        assert any(re.search(words[words.index("--cases") + 1], name) for name in names), task.name
        assert any(re.search(words[words.index("--providers") + 1], name) for name in bench.providers), task.name


def test_the_rows_that_matter_most(tmp_path: Path) -> None:
    """Each row's pattern chooses so many cases and compares these providers; an alternative in it may fit nothing."""
    to = gpu_tasks.Setting("cuda", False, 2.0, "", tmp_path)
    chosen = {}
    for task in (*gpu_tasks.kernels(to), *gpu_tasks.training(to)):
        if task.op is not None:
            bench = load(task.op)
            cases, providers = (task.command[task.command.index(word) + 1] for word in ("--cases", "--providers"))
            names = [case.name for case in bench.cases(torch.device("cuda"), False) if re.search(cases, case.name)]
            chosen[task.name] = len(names), {name for name in bench.providers if re.search(providers, name)}
    every = {op: set(load(op).providers) for op in OPS}
    assert chosen == {
        "rows linear_policy_loss": (
            4,
            {"rolltree", "torch", "liger", "liger, CuTe", "quack", "quack, mean log-prob"},
        ),
        "rows tree_attention": (1, {"rolltree", "rolltree, flash", "flex_attention", "flex_attention, FLASH"}),
        "rows tree_decode": (2, every["tree_decode"]),
        "rows sample_tokens": (6, every["sample_tokens"]),
        "rows logprob_from_logits": (1, every["logprob_from_logits"]),
        "rows policy_loss": (2, every["policy_loss"]),
        "rows ceilings": (2, every["ceilings"]),
        "rows tree_step": (1, {"rolltree, tree", "flat, transformers sdpa", "flex_attention, transformers"}),
        "rows rl_step": (1, every["rl_step"]),
        "rows rollout forced rolltree": (1, {"rolltree"}),
        "rows rollout natural rolltree": (1, {"rolltree"}),
        "rows rollout forced continuous": (1, {"transformers continuous batching"}),
        "rows rollout forced rolltree compiled": (1, {"rolltree compiled"}),
        "frozen head": (1, {"rolltree", "torch"}),
    }


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "90a"), ((8, 0), "80"), ((10, 0), "100"), ((12, 0), "120")])
def test_architecture(capability: tuple[int, int], name: str) -> None:
    assert gpu.architecture(*capability) == name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_wrong_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert gpu.main(["--part", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert gpu.main(["--device", "cpu"]) == 2
    assert "--rehearse" in capsys.readouterr().err


BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pydantic", "plotly", "tomli_w"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
import torch
import rolltree.kernels
from rolltree.bench import gpu, sweep
from rolltree.bench.cli import OPS, load
from rolltree.bench.schema import commit
for op in ("tree_attention", "tree_decode", "tree_step", "rollout"):
    bench = load(op)
    inputs = next(bench.cases(torch.device("cpu"), True)).make()
    own = next(name for name in bench.providers if name.startswith("rolltree"))
    for call in bench.providers[own](inputs).values():
        call()
print(len([load(op) for op in OPS]) == len(OPS), commit())
"""


@pytest.mark.slow
def test_a_plain_checkout_without_repository_and_packages(tmp_path: Path) -> None:
    """Kernels, a step and a rollout run by links alone, without .git and without what a GPU machine lacks."""
    (tmp_path / "rolltree").mkdir()
    for name in ("engine", "kernels", "bench"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(schema.REPOSITORY / name, tmp_path / name, ignore=ignore)
        (tmp_path / "rolltree" / name).symlink_to(tmp_path / name)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "ROLLTREE_COMMIT": "carried"}
    command = [sys.executable, "-c", BARE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["True carried"], done.stderr


@pytest.mark.slow
def test_the_tests_of_kernels_need_no_package_of_developers(torch_forks: Forks) -> None:
    """Such a machine has pytest, without any of its plugins."""
    blocked = dict.fromkeys(("hypothesis", "xdist", "pytest_timeout", "pydantic", "plotly", "tomli_w"))
    program = (
        f"import os, sys; sys.modules.update({blocked!r}); os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'\n"
        "import pytest\n"
        "sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', 'tests/gpu/test_kernels_gpu.py']))"
    )
    code, said = torch_forks.run(program, directory=schema.REPOSITORY)
    assert code == 0, said
    assert "test_tree_attention" in said


def test_native_parts_older_than_their_sources_are_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, source = tmp_path / "kernels" / f"_cpu_{cpu_levels()[0]}.so", tmp_path / "csrc" / "cpu" / "op.cpp"
    host = tmp_path / "engine" / "rollout" / "native" / f"_host{EXTENSION_SUFFIXES[0]}"
    host_source = tmp_path / "csrc" / "host" / "module.cpp"
    for path in (library, source, host, host_source):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1000, 1000))
    monkeypatch.setattr(gpu, "REPOSITORY", tmp_path)
    monkeypatch.setattr(gpu, "load_library", lambda name: True)
    assert gpu.native_parts(CPU) == {"_host": True, "_cpu": True}
    os.utime(source, (2000, 2000))
    assert gpu.native_parts(CPU) == {"_host": True, "_cpu": False}
    os.utime(host_source, (2000, 2000))
    assert gpu.native_parts(CPU) == {"_host": False, "_cpu": False}
    host.unlink()
    assert gpu.native_parts(CPU) == {"_host": False, "_cpu": False}


def test_native_parts_are_found_without_the_packages_of_the_engine(torch_forks: Forks) -> None:
    """Else the build fails on a machine that has what kernels need and no more."""
    blocked = dict.fromkeys(("numba", "transformers", "pydantic", "plotly", "tomli_w"))
    program = (
        f"import sys; sys.modules.update({blocked!r})\nimport torch\nfrom rolltree.bench import gpu\n"
        "print(sorted(gpu.native_parts(torch.device('cpu')).items()))"
    )
    code, said = torch_forks.run(program)
    assert (code, said.strip()) == (0, str(sorted(gpu.native_parts(CPU).items())))
