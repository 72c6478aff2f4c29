"""The packages import one way: an arrow up or sideways, a circle of files or folders, or a crowded room fails here.

Every import statement is read from the source, at the top of a module, in a function and under ``TYPE_CHECKING``, and
every ``importlib.import_module`` of a constant name.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..support.tiny import ROOT

FLOORS = (
    {"data"},
    {"batches"},
    {"methods", "programs", "model"},
    {"train", "rollout", "rewards", "tasks"},
    {"prompts", "protocols", "record"},
    {"learn"},
    {"fleet"},
    {"agents", "tinker"},
    {"loop"},
    {"plan"},
    {"app"},
)
"""The folders of engine from the lowest floor up; an import goes to a lower floor, never sideways or up."""
FLOOR_OF = {folder: number for number, folders in enumerate(FLOORS) for folder in folders}
FLOOR_OF["integrations"] = FLOOR_OF["app"]  # above loop as app is, and neither imports the other
SHARED = {"chat", "errors", "freed_memory", "openmp", "parts", "registration", "sandbox", "settings"}
"""Parts that every folder may import, and that import only each other."""
EXCEPTIONS = {
    ("engine.settings.training", "engine.train.config"),  # a dataclass without imports
    ("engine.registration", "engine.model.attention"),  # by name, after Transformers was imported
    ("engine.app.cli", "bench.cli"),  # by name, for `rolltree bench`
}
"""The only imports that may break a rule."""
MODULES_OF_A_ROOM = 20
LINES_OF_THE_PATH = 6000


@dataclass(frozen=True)
class Import:
    source: str
    """Importing module, without ``rolltree.``."""
    target: str
    """Imported module, without ``rolltree.``."""
    place: str
    """``file:line`` relative to the root."""


def imports(root: Path) -> list[Import]:
    """Return the imports between modules of rolltree below ``root``.

    Raises:
        AssertionError: an import names a module of rolltree that is not there.
    """
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for package in ("engine", "kernels", "bench")
        for path in sorted((root / package).rglob("*.py"))
    }
    stubs = {".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*/native/*.pyi")}
    found = []
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _names(node, package):
                place = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
                target = name
                while target and target not in files and target not in stubs:  # what is left over is a name in it
                    target = target.rpartition(".")[0]
                assert target or not name, f"{place} imports '{name}', which is not there"
                assert name.count(".") <= target.count(".") + 1, f"{place} imports '{name}', which is not there"
                found.append(Import(module, target, place))
    return found


def _names(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the modules of rolltree, or names in them, that a statement or call imports, without ``rolltree.``."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        home = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*(["rolltree"] if node.level else []), *home, *([node.module] if node.module else [])])
        names = [f"{base}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
        first = node.args[0] if node.args else None
        names = [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
        names = [f"rolltree.{package}{name}" if name.startswith(".") else name for name in names]
    yield from (name.removeprefix("rolltree.") for name in names if name.startswith("rolltree."))


def part_of(module: str) -> str:
    """Return the folder of engine, or the module directly in it, that holds ``module``; a package outside of engine."""
    names = module.split(".")
    return names[0] if names[0] != "engine" or len(names) == 1 else names[1]


def wrong(found: list[Import]) -> list[str]:
    """Return a sentence for each import against the order."""
    complaints = []
    for each in found:
        here, there = part_of(each.source), part_of(each.target)
        if here == there or (each.source, each.target) in EXCEPTIONS:
            continue
        if not _allowed(here, there):
            complaints.append(f"{each.place}: {each.source} must not import {each.target}")
    return complaints


def _allowed(here: str, there: str) -> bool:
    if there == "bench" or here == "kernels":
        return False
    if here in ("bench", "engine") or there == "kernels":  # engine/__init__.py holds the public names
        return True
    if here in SHARED or there in SHARED:
        return there in SHARED
    return there in FLOOR_OF and FLOOR_OF[there] < FLOOR_OF[here]


def circles(found: list[Import], place_of: Callable[[str], str] = part_of) -> list[tuple[str, ...]]:
    """Return the sets of places that import each other, on whatever way.

    Args:
        place_of: gives a module's place: its folder of engine, itself, or its package.
    """
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for each in found:
        here, there = place_of(each.source), place_of(each.target)
        if here != there and (each.source, each.target) not in EXCEPTIONS:
            edges[here].add(there)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reach = {part: reached(part) for part in list(edges)}
    return sorted({tuple(sorted(o for o in reach if o in reach[p] and p in reach[o])) for p in reach if p in reach[p]})


def rooms(root: Path) -> Counter[str]:
    """Return the number of modules directly in each folder, its ``__init__`` aside."""
    files = [path for top in ("bench", "engine", "kernels") for path in (root / top).rglob("*.py")]
    return Counter(str(path.parent.relative_to(root)) for path in files if path.name != "__init__.py")


def path_to_read(page: str) -> list[str]:
    """Return the files that the numbered list of docs/architecture.md names in bold, in order."""
    steps = page.partition("## From prompt to gradient")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. \*\*`([^`]+)`\*\*", steps, re.M)


@pytest.fixture(scope="module")
def found() -> list[Import]:
    return imports(ROOT)


def test_every_import_goes_down(found: list[Import]) -> None:
    assert len(found) > 500
    assert wrong(found) == []


def test_no_folders_import_each_other(found: list[Import]) -> None:
    assert circles(found) == []


def test_no_files_import_each_other(found: list[Import]) -> None:
    assert circles(found, lambda module: module) == []


def test_no_room_is_crowded() -> None:
    assert {room: count for room, count in rooms(ROOT).items() if count > MODULES_OF_A_ROOM} == {}


def test_every_room_is_described() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = set(re.findall(r"`([\w/]+)/`", page.partition("| folder |")[2].partition("\n\n")[0]))
    inside = {room.removeprefix("engine/") for room in rooms(ROOT) if room.startswith("engine/")}
    assert inside - table == set()


def test_the_path_from_prompt_to_gradient_can_be_read_in_a_day() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    files = path_to_read(page)
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files}
    assert len(files) >= 15
    assert sum(lines.values()) <= LINES_OF_THE_PATH, lines
    assert not [file for file in files if file.startswith(("engine/fleet/", "engine/plan/"))]


def test_every_part_of_engine_has_a_place() -> None:
    parts = {
        path.stem
        for path in (ROOT / "engine").iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    }
    assert parts - {"__init__"} == SHARED | set(FLOOR_OF)


def test_every_exception_is_needed(found: list[Import]) -> None:
    """The registration names its module by a variable, which no statement shows."""
    pairs = {(each.source, each.target) for each in found}
    assert pairs >= EXCEPTIONS - {("engine.registration", "engine.model.attention")}


def tree(root: Path, **files: str) -> Path:
    """Make a tree of packages, each with a module ``a`` that holds the text in ``files``, or nothing."""
    for name in ("kernels", "bench", *(f"engine.{part}" for part in (*FLOOR_OF, "parts", "sandbox"))):
        folder = root / name.replace(".", "/")
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "a.py").write_text(files.get(name.removeprefix("engine."), ""))
    for name in ("__init__", "settings", "errors"):
        (root / "engine" / f"{name}.py").write_text(files.get(name, ""))
    return root


def test_a_made_up_tree_that_keeps_the_order_passes(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        app="from ..loop import a\nfrom ..settings import X\n",
        loop="import rolltree.engine.train.a\nfrom ..rollout.a import x\nfrom ...kernels import a\n",
        train="from ..model.a import x",
        integrations="from ..loop.a import x",
        bench="from rolltree.engine import app",
        __init__="from .app.a import x",
    )
    assert len(imports(root)) == 9
    assert wrong(imports(root)) == circles(imports(root)) == []


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("data", "from ..model.a import x"),  # up
        ("rollout", "from ..train import a"),  # sideways
        ("programs", "def f():\n    from ..integrations.a import x\n"),
        ("model", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..rollout.a import x\n"),
        ("loop", "import rolltree.engine.app.a"),
        ("app", "from .. import integrations"),
        ("methods", "import importlib\nimportlib.import_module('rolltree.engine.loop.a')"),
        ("kernels", "from ..engine.data.a import x"),
        ("app", "from ...bench import a"),
        ("settings", "from .train.a import x"),
        ("parts", "from ..data.a import x"),
        ("model", "from rolltree.engine import TokenTree"),  # the public names are above everything
    ],
)
def test_one_wrong_import_fails(place: str, text: str, tmp_path: Path) -> None:
    root = tree(tmp_path, **{place: text})
    [complaint] = wrong(imports(root))
    number = len(text.splitlines())  # the import is the last line
    assert f"/a.py:{number}: " in complaint or complaint.startswith(f"engine/settings.py:{number}: ")


def test_a_circle_is_found_on_any_way(tmp_path: Path) -> None:
    """Three folders of one floor, of which no two import each other."""
    root = tree(
        tmp_path, train="from ..rollout import a", rollout="from ..rewards import a", rewards="from ..train import a"
    )
    assert circles(imports(root)) == [("rewards", "rollout", "train")]
    assert circles(imports(tree(tmp_path / "b", train="from ..rollout import a"))) == []


def test_a_circle_of_two_files_of_one_folder_is_found(tmp_path: Path) -> None:
    """One of the two imports only a type."""
    root = tree(tmp_path, loop="from . import b")
    (root / "engine/loop/b.py").touch()
    assert circles(imports(root), lambda module: module) == []
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import X\n"
    (root / "engine/loop/b.py").write_text(hidden)
    assert circles(imports(root), lambda module: module) == [("engine.loop.a", "engine.loop.b")]
    assert circles(imports(root)) == []


def test_a_crowded_room_is_found(tmp_path: Path) -> None:
    root = tree(tmp_path)
    for number in range(MODULES_OF_A_ROOM):
        (root / f"engine/loop/m{number}.py").touch()
    assert [room for room, count in rooms(root).items() if count > MODULES_OF_A_ROOM] == ["engine/loop"]


def test_an_import_of_a_module_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"engine/loop/a.py:1 imports 'engine.cluster.ranks.x'"):
        imports(tree(tmp_path, loop="from ..cluster.ranks import x"))
