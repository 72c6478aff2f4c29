"""The rows of a folder of tasks in Harbor's format: a row for each task, its instruction as the prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import BadRowError, UserError
from ..programs.harbor.task import COLUMN, CONFIG, INSTRUCTION, Task, find_tasks
from .sequences import Row, Rows


class HarborTask(Rows):
    """The one row of a task: its ``prompt``, its ``name``, its folder, and an empty ``answer``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 1

    def row(self, number: int) -> Row:
        try:
            task = Task(self.folder)
        except UserError as error:
            raise BadRowError(str(error)) from error
        return {"prompt": task.instruction, "answer": "", "name": task.name, COLUMN: str(self.folder)}

    def scan(self) -> Iterator[Row | BadRowError]:
        try:
            yield self.row(0)
        except BadRowError as error:
            yield error

    def digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for name in (CONFIG, INSTRUCTION):
            file = self.folder / name
            digest.update(file.read_bytes() if file.is_file() else b"")
            digest.update(b"/")
        return digest.digest()


def is_tasks(path: str) -> bool:
    """Return whether a path is a folder with a task in Harbor's format."""
    return Path(path).is_dir() and next(find_tasks(Path(path)), None) is not None


def harbor_tasks(path: str, key: str) -> dict[str, HarborTask]:
    """Return the tasks below a folder, by their paths in it.

    Args:
        key: the configuration key that names the folder, for error messages.

    Raises:
        UserError: it is no folder, or has no task.
    """
    root = Path(path).absolute()
    if not root.is_dir():
        raise UserError(f"There is no folder '{path}' ({key}) of tasks in Harbor's format; fetch the tasks first.")
    folders = list(find_tasks(root))
    if not folders:
        raise UserError(f"The folder '{path}' ({key}) holds no task in Harbor's format; each has a '{CONFIG}'.")
    return {str(folder.relative_to(root.parent)): HarborTask(folder) for folder in folders}
