"""Verifiers in killable processes: order, time limits, crashes, clean ends."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import connection
from pathlib import Path

import pytest

from rolltree.engine.errors import UserError
from rolltree.engine.rewards import RewardItem, RewardPool, RewardResult, extract_answer
from rolltree.engine.settings import RewardConfig, TaskConfig

from ...support.forks import forked

USER_CODE = """
import os, sys, time

def length(text, entry):
    return len(text) + entry["answer"]

def moody(text, entry):
    print("a verifier may print")
    if text == "hang":
        while True: pass
    if text == "sleep":
        time.sleep(60)
    if text == "raise":
        raise ValueError("no\\nanswer")
    if text == "die":
        os._exit(3)
    if text == "nan":
        return float("nan")
    if text == "nothing":
        return None
    return float(text)

def modules(text, entry):
    return float("torch" in sys.modules or "rolltree" in sys.modules)

def pid(text, entry):
    return os.getpid()
"""


@pytest.fixture
def user_code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER_CODE)
    return path


def config(verifier: str, **options: object) -> RewardConfig:
    return RewardConfig(verifier=verifier, **options)  # type: ignore[arg-type]


def items(*texts: str, answer: object = "0") -> list[RewardItem]:
    return [RewardItem(text, {"answer": answer}) for text in texts]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1 + 1 = 2\nAnswer: 2", "2"),
        ("Answer: 1\nno, wait\nAnswer: 2 \nbye", "2"),
        ("Answer:\n 2", "2"),
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("Answer: 3 or rather \\boxed{4}", "4"),
        ("<answer> 5\n6 </answer> done", "5\n6"),
        ("<answer>5</answer> Answer: 6", "6"),
        ("work #### 72", "72"),
        ("Answer: 7 <answer>8", "7 <answer>8"),
        ("\\boxed{9} and \\boxed{1 <answer>", "9"),
        ("Answer: \\boxed{8}", "8"),
        ("<answer>Answer: 5</answer>", "5"),
        ("\\boxed{1", None),
        ("Answer:", None),
        ("**Answer:** 2", "2"),
        ("**Final Answer**\n\n2 clips", "2 clips"),
        ("\\boxed{2}\n\n#### Check\nfine", "2"),
        ("#### Step 1\nso\n#### Result\nThe answer is 2. Good", "2"),
        ("so \\boxed{2} or \\boxed{3}", "2, 3"),
        ("\\boxed{2} and later, after much more thought, \\boxed{3}", "3"),
        ("\\boxed 2.", "2."),
        ("答案：2", "2"),
        ("The answer is 2. Answer: 3", "3"),
        ("Answer: 3. The answer is 2.", "3. The answer is 2."),
        ("2", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_order_is_kept_and_short_answers_take_milliseconds(user_code: Path) -> None:
    with RewardPool(config(f"{user_code}:length")) as pool:
        many = [RewardItem("x" * (i % 7), {"answer": 10 * i}) for i in range(512)]
        begin = time.perf_counter()
        results = pool.score(many)
        seconds = time.perf_counter() - begin
        assert [r.value for r in results] == [i % 7 + 10 * i for i in range(512)]
        assert all(r.reason is None for r in results)
        assert seconds < 1.0  # about 20 ms on a quiet machine
        assert pool.score([]) == []


@pytest.mark.check
def test_failures_concern_only_their_item(user_code: Path) -> None:
    texts = ["1", "hang", "2", "raise", "3", "die", "4", "nan", "5", "nothing", "sleep", "6", "7", "8"]
    with RewardPool(config(f"{user_code}:moody", timeout_s=0.5)) as pool:
        results = dict(zip(texts, pool.score(items(*texts)), strict=True))
        again = pool.score(items("9", "die", "10"))
    assert [results[t].value for t in "12345678"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert results["hang"] == results["sleep"] == RewardResult(None, "timeout")
    assert results["die"] == RewardResult(None, "died")
    assert results["raise"] == RewardResult(None, "ValueError: no answer (line 14 of 'mine.py')")
    assert results["nan"].value is None
    assert "nan" in str(results["nan"].reason)
    assert results["nothing"] == RewardResult(None, None, skipped="no_verdict")
    assert [r.value for r in again] == [9, None, 10]


@pytest.mark.slow
def test_one_slow_item_does_not_fail_its_neighbours(user_code: Path) -> None:
    """The time limit is an item's, not its batch's."""
    user_code.write_text("import time\ndef f(text, entry):\n    time.sleep(0.1)\n    return 1\n")
    with RewardPool(config(f"{user_code}:f", timeout_s=0.6, workers=1)) as pool:
        assert all(r.value == 1 for r in pool.score(items(*"abcdefgh" * 4)))  # batches of 8: 0.8 s each


def test_answers_given_before_a_death_count(user_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool may see a worker's answers and its end in one go."""
    wait = connection.wait

    def late(connections: list[connection.Connection], timeout: float) -> object:
        time.sleep(0.3)
        return wait(connections, timeout)

    with RewardPool(config(f"{user_code}:moody", workers=1)) as pool:
        monkeypatch.setattr(connection, "wait", late)
        results = pool.score(items("1", "2", "die", "3", *"4567" * 3))  # batches of 4
    assert [r.value for r in results] == [1, 2, None, 3, *[4, 5, 6, 7] * 3]


def test_workers_import_neither_torch_nor_rolltree(user_code: Path) -> None:
    with RewardPool(config(f"{user_code}:modules")) as pool:
        assert pool.score(items("a", "b", "c"))[0].value == 0


@pytest.mark.slow
def test_task_verifier_scores_each_task_by_its_own_rule() -> None:
    tasks = (TaskConfig(name="chain_sum"), TaskConfig(name="spell_backward"))
    with RewardPool(config("task", workers=1), tasks) as pool:
        sums = {"answer": "12", "task_index": 0}
        word = {"answer": "sun", "task_index": 1}
        results = pool.score(
            [
                RewardItem("5 + 7 = 12\nAnswer: 12", sums),
                RewardItem("Answer: +012.0", sums),
                RewardItem("Answer: 13", sums),
                RewardItem("12", sums),
                RewardItem("Answer: sun", word),
                RewardItem("Answer: nus", word),
            ]
        )
    values = [r.value for r in results]
    assert values[:4] == [1, 1, 0, 0]
    assert values[4] == 1
    assert values[5] is not None
    assert values[5] < 1


@pytest.mark.check
def test_math_and_exact_verifiers() -> None:
    with RewardPool(config("math", workers=1)) as pool:
        results = pool.score(
            [
                RewardItem("so it is \\boxed{\\frac{2}{4}}", {"answer": "0.5"}),
                RewardItem("Answer: 72", {"answer": "24 + 48 = 72\n#### 72"}),
                RewardItem("Answer: 1,234", {"answer": "1234"}),
                RewardItem("Answer: 71", {"answer": "#### 72"}),
                RewardItem("no idea", {"answer": "72"}),
                RewardItem("Answer: 1", {"answer": ""}),
            ]
        )
    assert [r.value for r in results] == [1, 1, 1, 0, 0, None]
    assert "reference answer" in str(results[-1].reason)
    with RewardPool(config("exact", workers=1)) as pool:
        assert [r.value for r in pool.score(items("Answer: yes", " yes ", "no", answer="yes"))] == [1, 1, 0]


@pytest.mark.parametrize(
    ("verifier", "needle"),
    [
        ("nowhere.py:f", "no file nowhere.py"),
        ("mine.py:absent", "no function absent"),
        ("broken.py:f", "SyntaxError"),
        ("crash.py:f", "died"),
    ],
)
def test_a_verifier_that_cannot_be_loaded_is_the_users_mistake(
    verifier: str, needle: str, user_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(user_code.parent)
    Path("broken.py").write_text("def f(:")
    Path("crash.py").write_text("import os\nos._exit(1)")
    with pytest.raises(UserError, match=r"reward\.verifier") as error:
        RewardPool(config(verifier, workers=1)).__enter__()
    assert needle in str(error.value)


def test_close_leaves_no_process(user_code: Path) -> None:
    with RewardPool(config(f"{user_code}:pid")) as pool:
        pids = {int(r.value or 0) for r in pool.score(items(*"abcdefgh" * 4))}
    assert pids
    assert not any(_alive(pid) for pid in pids)
    with pytest.raises(ValueError, match="closed"):
        pool.score(items("a"))


def test_workers_end_when_the_parent_is_killed(user_code: Path) -> None:
    """Both the one inside a hanging verifier and the idle one."""

    def judge() -> None:
        pool = RewardPool(RewardConfig(verifier=f"{user_code}:moody", workers=2, timeout_s=30)).__enter__()
        print(*[w.process.pid for w in pool._workers])
        pool.score([RewardItem("hang", {})])

    with forked(judge) as (parent, printed):
        pids = [int(word) for word in printed.readline().split()]
        assert len(pids) == 2
        time.sleep(0.3)
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    """Return True if the process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_pool_judges_only_while_it_is_started() -> None:
    pool = RewardPool(config("exact", workers=1))
    items = [RewardItem("1", {"answer": "1"})]
    with pytest.raises(ValueError, match="not started; use it in a `with` statement"):
        pool.score(items)
    with pool:
        assert [result.value for result in pool.score(items)] == [1.0]
        with pytest.raises(ValueError, match="starts once"):
            pool.__enter__()
    with pytest.raises(ValueError, match="closed; make another one"):
        pool.score(items)
    with pytest.raises(ValueError, match="starts once"):
        pool.__enter__()
