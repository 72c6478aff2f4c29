"""A test gets nothing from another: what helpers keep lasts for one test, or is copied."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .support.fresh import copied, forget, once_a_test

TESTS = Path(__file__).parent
READ_ONLY = {
    "engine/integrations/test_trl_grpo.py": ["baseline"],  # a trainer after its run
    "engine/methods/problem_runs.py": ["take"],  # a run after its steps
    "engine/methods/test_recipes_run.py": ["take"],
    "kernels/blackwell_figures.py": ["written"],  # frozen figures
    "support/harbor.py": ["no_podman"],  # a sentence
    "test_docs.py": ["endings"],  # a frozen set
}
"""The functions whose results all tests share: they are dear, have no copies, and tests only read them."""


def test_what_a_test_changes_is_gone_in_the_next() -> None:
    listed, dear = once_a_test(lambda: [1]), copied(lambda: [1])
    listed().append(2)
    dear().append(2)
    assert (listed(), dear()) == ([1, 2], [1])
    forget()
    assert listed() == [1]


def remembering(path: Path) -> list[str]:
    """Return the functions of a file that functools keeps the results of."""
    found: list[str] = []
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "cache" in text else ():
        if isinstance(node, ast.FunctionDef):
            names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
            found += [node.name for name in names if name.rpartition(".")[2] in ("cache", "lru_cache")]
    return found


@pytest.mark.check
def test_no_helper_keeps_what_a_test_can_change() -> None:
    found = {str(path.relative_to(TESTS)): remembering(path) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == READ_ONLY


@pytest.mark.parametrize("line", ["@functools.cache", "@cache", "@lru_cache(maxsize=None)"])
def test_a_cached_helper_is_seen(line: str, tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(f"{line}\ndef model(): ...")
    assert remembering(tmp_path / "test_a.py") == ["model"]
