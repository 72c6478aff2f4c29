"""``import rolltree.engine`` registers ``attn_implementation="rolltree"`` with Hugging Face Transformers.

This imports neither torch nor Transformers. If Transformers has been imported already, the attention is registered at
once; otherwise as soon as ``transformers.modeling_utils``, which holds the registry, has been imported.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REGISTER = "transformers.modeling_utils"
ATTENTION = f"{__package__}.model.attention"
"""The module that registers the attention when it is imported."""


def register_attention() -> None:
    """Register the attention now if Transformers has been imported, else when it is. Repeated calls are harmless."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # never removed, as a failed import may be retried
    if REGISTER in sys.modules:
        importlib.import_module(REGISTER)  # waits if another thread is importing it
        _register()


class _Finder(MetaPathFinder):
    """Finds the module `REGISTER` with the other finders, and replaces its loader by `_Loader`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != REGISTER:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Loads a module with ``loader``, restores this as the module's loader, and then registers the attention."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register()


def _register() -> None:
    """Import the module `ATTENTION`. A failure is a warning, so that importing Transformers itself still succeeds."""
    try:
        importlib.import_module(ATTENTION)
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        warnings.warn(
            f"attn_implementation='rolltree' could not be registered with Transformers ({why}); see `rolltree doctor`, "
            f"or `import {ATTENTION}` for the whole error.",
            stacklevel=2,
        )
