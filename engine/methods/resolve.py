"""Functions that a configuration names as `file.py:function`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError


def import_function(reference: str) -> Callable[..., Any]:
    """The function named by `file.py:function`.

    Raises:
        UserError: there is no such file or function, or the file cannot be run.
    """
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise UserError(f"There is no file '{file}', named in '{reference}'; give file.py:function.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"'{file}' cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"'{file}' defines no function '{name}', named in '{reference}'.")
    return function
