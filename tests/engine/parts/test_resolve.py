"""Names, files and options of parts, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltree.engine import UserError
from rolltree.engine.parts.resolve import NEEDED, options_of, resolve


def scale(values, *, by=2.0, offset):
    return [by * v + offset for v in values]


class Made:
    def __init__(self, size: int = 3) -> None:
        if size < 0:
            raise ValueError("size must not be negative")
        self.size = size


KNOWN = {"scale": scale, "made": Made}


def find(name, **options):
    return resolve("part.name", name, options, parts=KNOWN, inputs=("values",))


def test_a_function_gets_its_options_and_a_class_is_made_with_them():
    assert find("scale", by=3.0, offset=1.0)([1, 2]) == [4.0, 7.0]
    assert find("made", size=5).size == 5
    assert options_of(scale, ("values",)) == {"by": 2.0, "offset": NEEDED}
    assert options_of(Made) == {"size": 3}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("scal", {}, "did you mean 'scale'"),
        ("other", {}, "use one of scale, made, or name your own as file.py:object"),
        ("scale", {"offst": 1.0}, "has no option 'offst'; did you mean 'offset'"),
        ("scale", {"values": [1]}, "has no option 'values'"),
        ("scale", {}, "needs the option 'offset'"),
        ("made", {"size": -1}, "size must not be negative"),
        ("made", {"colour": 1}, "it takes size"),
    ],
)
def test_mistakes_are_named(name, options, said):
    with pytest.raises(UserError, match=said):
        find(name, **options)


def test_files(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("count = []\ndef first(values): return count\ndef second(values): return count\ndef none(): ...\n")
    assert find(f"{file}:first")([]) is find(f"{file}:second")([])  # one module
    for name, said in [
        ("frist", "defines no function or class 'frist'.*did you mean 'first'"),
        ("count", "defines no function or class 'count'"),
        ("none", "must be a function of .values."),
    ]:
        with pytest.raises(UserError, match=said):
            find(f"{file}:{name}")
    with pytest.raises(UserError, match="There is no file"):
        find(f"{tmp_path}/other.py:first")
    file.write_text("import nothing_of_that_name\n")
    with pytest.raises(UserError, match="cannot be imported: ModuleNotFoundError"):
        find(f"{file}:first")
