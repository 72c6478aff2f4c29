"""Files of Python as modules: verifiers of the user's, and files of rolltree that import nothing else of it.

Imports nothing of rolltree, like `verifiers.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def user_verifier(name: str) -> Any:
    """Return the function that ``file.py:function`` names.

    Raises:
        FileNotFoundError, AttributeError: there is no such file or function.
    """
    file, _, function = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent.resolve()))
    module = load_file(path.stem, path)
    verify = getattr(module, function, None)
    if not callable(verify):
        raise AttributeError(f"{path} has no function {function}")
    return verify


def load_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
