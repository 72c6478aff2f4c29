"""Every test is in one tier, and each command runs its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from .support.tiers import thin

ROOT = Path(__file__).parents[1]
CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.tiers import select
def pytest_collection_modifyitems(config, items):
    select(config, items)
"""
TESTS = """
import pytest
def test_quick(): pass
@pytest.mark.check
def test_long(): pass
@pytest.mark.check(but=2)
@pytest.mark.parametrize("case", range(9))
def test_grid(case): pass
@pytest.mark.slow(but=3)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("case", range(8))
def test_large(case): pass
@pytest.mark.check
class TestLong:
    @pytest.mark.slow
    def test_slow(self): pass
    @pytest.mark.slow
    @pytest.mark.vllm
    def test_slow_with_vllm(self): pass
"""
MARKERS = "[pytest]\nmarkers =\n  check\n  slow\n  vllm\ntestpaths = ."


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for name, text in (("conftest.py", CONFTEST), ("test_a.py", TESTS), ("pytest.ini", MARKERS)):
        (tmp_path / name).write_text(text)
    return tmp_path


def collected(suite: Path, *arguments: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=suite, capture_output=True, text=True)
    return {line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.slow
def test_every_test_is_in_one_tier(suite: Path) -> None:
    quick, long = collected(suite), collected(suite, "-m", "check")
    assert quick > {"test_quick"}
    assert long > {"test_long"}
    assert len(quick) == 1 + 2 + 1
    assert len(long) == 1 + 7 + 2
    assert not quick & long
    assert collected(suite, "test_a.py") == collected(suite, "-m", "check or not check") == quick | long
    slow = collected(suite, "-m", "slow")
    assert slow > {"test_slow"}
    assert len(slow - quick) == 1 + 5
    assert not slow & long
    assert collected(suite, "-m", "slow and vllm") == {"test_slow_with_vllm"}


@pytest.mark.parametrize(("expression", "whole"), [("", []), ("check or not check", ["quick"])])
def test_of_each_test_a_few_cases_are_kept(expression: str, whole: list[str]) -> None:
    class Case(NamedTuple):
        originalname: str
        number: int
        parent: str = ""

    items: Any = [Case(name, i) for name, count in (("quick", 9), ("long", 9), ("small", 3)) for i in range(count)]
    left: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression), hook=hook)
    before = set(items)
    thin(config, items, {item: {"test" if item.originalname == "quick" else "check"} for item in items}, 4)
    few = {name: range(9) if name in whole else [0, 2, 4, 6] for name in ("quick", "long")} | {"small": range(3)}
    assert [(item.originalname, item.number) for item in items] == [(name, i) for name in few for i in few[name]]
    assert before == {*items, *left}
