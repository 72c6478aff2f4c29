"""Triton's interpreter without the work whose outcome it drops, half of its time.

* Every operation of integers is computed again in int64 for an overflow check, which only debug builds look at.
* A launch exchanges the language's functions for interpreted ones; every call of a kernel's function by another looks
  for them again among all members, in vain.
"""

from __future__ import annotations

import dataclasses
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class Launch:
    """Stands in for ``interpreter._patch_lang``: what is exchanged stays so until the launch ends."""

    def __init__(self) -> None:
        self.exchange = interpreter._patch_lang
        self.exchanged = set[int]()
        self.scope: Any = None

    def __call__(self, fn: FunctionType) -> Launch:
        modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if not modules <= self.exchanged or not modules:
            scope = self.exchange(fn)
            self.scope = self.scope or scope  # of what a launch calls, nothing was ever put back
            self.exchanged |= modules
        return self

    def restore(self) -> None:
        self.exchanged.clear()
        scope, self.scope = self.scope, None
        scope.restore()


def leave_out_what_is_dropped() -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = Launch()
