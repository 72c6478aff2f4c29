"""The rows that a key such as `data.path` names: of a file, of several files, or of a set on the Hugging Face hub."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadRowError, UserError
from ..settings import Place
from .files import READABLE, WILD, form_of, read_file, stem_of
from .harbor import harbor_tasks, is_tasks
from .hub import HF, Address, hub_files, hub_rows
from .problem import Problem
from .rows import problem_of
from .sequences import Row, Rows
from .shards import shards_of
from .stored import Spool

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Table:
    """The rows of one file, or of one split of a set on the hub."""

    where: str
    """Names the table in error messages."""
    name: str
    """Begins the ids of its rows."""
    task: str
    """Task of rows that name none."""
    folder: Path | None
    """Paths of pictures are relative to it."""
    rows: Rows
    has: str = "it has"
    """Introduces the columns in error messages."""

    def problem(self, number: int, row: Row, *keys: Any, **options: Any) -> Problem:
        """Return a row as `problem_of` does; ``keys`` name its columns.

        Raises:
            BadRowError: where `problem_of` raises UserError.
        """
        table_options = {"folder": self.folder, "task": self.task, "has": self.has} | options
        try:
            return problem_of(row, self.where, self.name, number, *keys, **table_options)
        except UserError as error:
            raise BadRowError(str(error)) from error


def read_tables(place: Place) -> list[Table]:
    """Return the rows of ``place``, one table for each file.

    Raises:
        UserError: the place does not exist, cannot be read, is empty or of another kind.
    """
    if not os.path.exists(place.path) and _is_set(place):
        of_hub = hub_rows(place)
        words = [of_hub.subset] * (of_hub.subset != "default") + [of_hub.split]
        name = Address.of(place).repo.rpartition("/")[2]
        return [Table(f"'{place.path}' ({', '.join(words)})", f"{name}/{of_hub.split}", name, None, of_hub.rows)]
    if place.chosen is not None:
        raise UserError(
            f"{place.chosen} chooses a part of a set on the hub, and '{place.path}' ({place.key}) names files; leave "
            f"it out{_or_on_the_hub(place)}."
        )
    if place.format == "harbor" or is_tasks(place.path):
        return _harbor_tables(place)
    return _tables(_files(place), place)


def _harbor_tables(place: Place) -> list[Table]:
    """Return the tables of tasks in Harbor's format, one for each."""
    tasks = harbor_tasks(place.path, place.key)
    of = os.path.basename(os.path.abspath(place.path))
    return [Table(f"the task '{name}'", name, of, task.folder, task) for name, task in tasks.items()]


def _files(place: Place) -> dict[str, Path]:
    """Return the files of a place, by the names by which the user knows them."""
    path = place.path
    if path.startswith("hf://"):
        return hub_files(place)
    if os.path.isdir(path):
        inner = shards_of(list(_below(path, place.key)), path, place.key, _or_on_the_hub(place))
        names = [os.path.join(path, name) for name in inner]
    elif os.path.exists(path):
        names = [path]
    elif WILD.search(path):
        names = [name for name in glob.glob(path, recursive=True) if not os.path.isdir(name)]
    else:
        hub = "; a set on the hub is called OWNER/NAME" if "/" not in path else ""
        raise UserError(f"There is no prompts file '{path}' ({place.key}); give a {READABLE} file{hub}.")
    return {name: Path(name) for name in names}


def _below(folder: str, key: str) -> Iterator[str]:
    """Yield the paths of all files below a folder, relative to it; hidden folders are left out."""

    def refuse(error: OSError) -> None:
        raise UserError(f"The folder '{folder}' ({key}) cannot be read: {error}.") from error

    for above, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.relpath(os.path.join(above, name), folder).replace(os.sep, "/") for name in names)


def _or_on_the_hub(place: Place) -> str:
    return f", or write {HF}{place.path} for the set on the hub" if HUB_NAME.fullmatch(place.path) else ""


def _is_set(place: Place) -> bool:
    """Return whether a place that does not exist here names a whole set on the hub."""
    if place.path.startswith("hf://"):
        return not Address.of(place).inner
    return HUB_NAME.fullmatch(place.path) is not None and form_of(place.path) is None


def _tables(files: dict[str, Path], place: Place) -> list[Table]:
    """Return the tables of files by their names, in the order of these."""
    if not files:
        raise UserError(f"No file matches '{place.path}' ({place.key}); correct the pattern or add files.")
    spool = Spool()
    if list(files) == [place.path]:
        (file,) = files.values()
        stem = stem_of(place.path)
        return [_table(place.path, file, stem, stem, place, spool)]
    for name in files:
        if form_of(name) is None:
            raise UserError(
                f"'{place.path}' ({place.key}) includes '{name}', which is not {READABLE}; give a pattern that leaves "
                "it out."
            )
    forms = sorted({str(form_of(name)) for name in files})
    if len(forms) > 1:
        raise UserError(
            f"'{place.path}' ({place.key}) holds files of several forms, {' and '.join(forms)}; give a pattern for "
            f"those of one form, such as '*{forms[0]}'."
        )
    above = os.path.commonpath([os.path.dirname(os.path.abspath(name)) for name in files])
    task = os.path.basename(above)
    names = {name: f"{task}/{os.path.relpath(os.path.abspath(name), above)}" for name in sorted(files)}
    return [_table(name, files[name], names[name], task, place, spool) for name in names]


def _table(shown: str, file: Path, name: str, task: str, place: Place, spool: Spool) -> Table:
    has = "its first line names" if form_of(shown) == ".csv" else "it has"
    return Table(f"'{shown}'", name, task, file.parent, read_file(file, shown, place.key, spool), has)
