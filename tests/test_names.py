"""Variables, parameters and fields are named by what they are: none by a word that fits every value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .support.tiny import ROOT

VAGUE = frozenset(["its", "found", "own", "given", "known", "some", "made", "asked", "wanted", "mine", "theirs"])
PACKAGES = ("engine", "bench", "kernels")
IN_CHECKPOINTS = "checkpoints hold the attributes of the programs of open groups by their names"
OPTION = "an option that configurations give"
ALLOWED = {
    ("engine/methods/schedules.py", "own"): OPTION,
    ("engine/methods/selections.py", "given"): OPTION,
    ("engine/programs/again.py", "_asked"): IN_CHECKPOINTS,
    ("engine/programs/generate_then_verify.py", "_asked"): IN_CHECKPOINTS,
    ("engine/programs/latr.py", "_known"): IN_CHECKPOINTS,
    ("engine/programs/mcts.py", "_asked"): IN_CHECKPOINTS,
    ("engine/programs/mcts.py", "_known"): IN_CHECKPOINTS,
    ("engine/programs/prefix_value_probe.py", "_made"): IN_CHECKPOINTS,
    ("engine/programs/tools.py", "_asked"): IN_CHECKPOINTS,
}
"""The names that stay, by file, with the reason."""


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything that a module binds: variables, parameters, fields, and local functions."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from ((inner.lineno, inner.name) for inner in node.body if isinstance(inner, ast.FunctionDef))


def vague(root: Path) -> list[tuple[str, int, str]]:
    """Return file, line and name of each vague name in the product below ``root``."""
    paths = {str(path.relative_to(root)): path for package in PACKAGES for path in (root / package).rglob("*.py")}
    return sorted(
        (file, line, name)
        for file, path in paths.items()
        for line, name in names(ast.parse(path.read_text(encoding="utf-8")))
        if name.strip("_") in VAGUE
    )


@pytest.mark.check
def test_no_name_fits_every_value() -> None:
    present = vague(ROOT)
    places = [f"{file}:{line}: {name}" for file, line, name in present if (file, name) not in ALLOWED]
    assert not places, "name the thing instead: " + ", ".join(places)
    assert {(file, name) for file, _, name in present} == set(ALLOWED), "an entry that no file needs"


@pytest.mark.parametrize(
    "code",
    [
        "found = 1",
        "a, found = 1, 2",
        "found: int = 1",
        "a.found = 1",
        "self._found: int = 1",
        "found += 1",
        "for found in a: pass",
        "with a as found: pass",
        "(found := 1)",
        "[found for found in a]",
        "def f(found): pass",
        "def f(*, found=1): pass",
        "def f(*found): pass",
        "def f(**found): pass",
        "lambda found: 1",
        "class A:\n    found: int",
        "def f():\n    def found(): pass",
        "try: pass\nexcept A as found: pass",
        "match a:\n    case B(found): pass",
    ],
)
def test_each_kind_of_name_is_read(code: str, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text(code)
    assert {name.strip("_") for _, _, name in vague(tmp_path)} == {"found"}


@pytest.mark.parametrize("code", ["a = 'found'", "a = b.found", "f(found=1)", "def found(): pass", "founded = 1"])
def test_nothing_else_is(code: str, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text(code)
    assert not vague(tmp_path)


def test_each_noun_is_defined_in_the_file_that_the_page_names() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = " ".join(page.partition("## Nouns")[2].partition("\n## ")[0].split())
    nouns = re.findall(r"\*\*(\w+)\*\* \(`([^`]+)`", section) + re.findall(r"\*\*(\w+)\*\* of `([^`]+)`", section)
    assert len(nouns) > 20
    for noun, file in nouns:
        lines = (ROOT / file).read_text(encoding="utf-8")
        singular = {noun, noun.removesuffix("s"), noun.removesuffix("es")}
        assert any(re.search(rf"^class {name}\b", lines, re.MULTILINE) for name in singular), f"{noun} in {file}"
