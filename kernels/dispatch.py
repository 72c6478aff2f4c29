"""Chooses the backend that runs an op: flash | invariant | cuda | triton | cpu | reference.

An op keeps one table ``{backend name: function}`` and calls :func:`choose`. In order of precedence the backend is the
one that :func:`use_backend` names, the one that the environment variable ``ROLLTREE_BACKEND`` names, the one that
:func:`set_backend` has named for the process, or the best one for the tensors' device. A named backend that the op or
the device lacks is an error. If nothing faster than the reference is there, it runs, and that is logged once.

``flash`` is never chosen by default: its backward pass adds up dq in the order in which blocks arrive. It belongs to
tree attention alone. ``invariant`` is Triton's kernels with one order of sums for sampling and training; attention, the
head and the decoder of `kernels/decoder_layer` have it. The other ops run on their default backend while one of these
two is named.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, get_args

import torch

from . import machine
from .libraries import load_library, log_once

Backend = Literal["flash", "invariant", "cuda", "triton", "cpu", "reference"]
BACKENDS: tuple[str, ...] = get_args(Backend)
OPT_IN = ("flash", "invariant")
"""Backends that run only where they are named, and that only some ops have."""
# CUDA C++ exists where it was measured to be faster than Triton: linear_logprob/logits.py has the rows.
_PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "cuda": ("cuda", "triton", "reference"),
    "cpu": ("cpu", "reference"),
}
FLASH_PACKAGE, FLASH_VERSION = "flash-attn-4", "4.0.0b36"
FLASH_MAJORS = (9, 10)
"""Major compute capabilities that flash-attn 4's kernels are for: Hopper and Blackwell."""

_override: ContextVar[str | None] = ContextVar("rolltree_backend", default=None)
_of_process: list[str] = []  # the backend that `set_backend` has named, if one
Fn = TypeVar("Fn", bound=Callable[..., object])


class BackendError(RuntimeError):
    """The named backend cannot run this op on these tensors."""


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Run every op inside the ``with`` block on backend ``name``.

    Args:
        name: one of flash, invariant, cuda, triton, cpu, reference. ``flash`` runs tree attention on flash-attn 4's
            kernels (Hopper and Blackwell; its gradients depend on the order in which blocks arrive), ``invariant``
            attention and the products of the head in one order of sums; both leave all other ops on their default
            backend.

    Raises:
        ValueError: ``name`` is not one of these.
    """
    token = _override.set(_known(name, "use_backend"))
    try:
        yield
    finally:
        _override.reset(token)


def set_backend(name: Backend | None) -> None:
    """Run every op of the process on backend ``name`` where nothing else names one, in all threads; None ends it.

    Raises:
        ValueError: ``name`` is not a backend.
    """
    _of_process[:] = [] if name is None else [_known(name, "set_backend")]


def current_override() -> str | None:
    """Return the backend that the innermost :func:`use_backend` names, or None.

    Ops save it in the forward pass for :func:`restored_backend`: a GPU's backward pass runs in another thread, in which
    the ``with`` block has no effect.
    """
    return _override.get()


@contextmanager
def restored_backend(name: str | None) -> Iterator[None]:
    """Name the backend that :func:`current_override` returned earlier; None names none."""
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def choose(op: str, table: Mapping[str, Fn], device: torch.device, unfit: Mapping[str, str] | None = None) -> Fn:
    """Return the function of ``table`` that runs ``op`` on ``device``.

    ``unfit`` says of backends of the table why they cannot compute this call, whatever the device.

    Raises:
        BackendError: the named backend has no implementation of ``op``, cannot compute this call or is not usable on
            ``device``, or no backend of the table is.
    """
    unfit = unfit or {}
    if name := _named(table):
        if name not in table:
            raise BackendError(f"{op} has no '{name}' backend; it has {', '.join(table)}.")
        if name in unfit:
            others = ", ".join(b for b in table if b not in unfit and not _unusable(b, device))
            raise BackendError(f"Backend '{name}' cannot compute this {op}: {unfit[name]}; use {others}.")
        if reason := _unusable(name, device):
            raise BackendError(f"Backend '{name}' cannot run {op} on a {device.type} tensor: {reason}.")
        return table[name]
    missing = []
    for name in _PREFERENCE.get(device.type, ("reference",)):
        reason = unfit.get(name) or _unusable(name, device) if name in table else "not written for this op"
        if not reason:
            break
        missing.append(f"{name}: {reason}")
    else:
        raise BackendError(f"No backend of {op} runs on a {device.type} tensor; it has {', '.join(table)}.")
    if name == "reference":
        log_once(f"{op} runs on the slow reference backend ({'; '.join(missing)}).")
    return table[name]


def usable(name: str, device: torch.device) -> bool:
    """Return whether backend ``name`` can run on ``device`` and no other backend is named."""
    return _named((name,)) in (None, name) and not _unusable(name, device)


def named(name: str, device: torch.device) -> bool:
    """Return whether the caller, the environment or the process names backend ``name``, which runs on ``device``."""
    return _named((name,)) == name and not _unusable(name, device)


def _named(available: Container[str]) -> str | None:
    """Return the backend that is named for an op that has the ``available`` ones."""
    name = _override.get() or os.environ.get("ROLLTREE_BACKEND") or next(iter(_of_process), None)
    if not name or (name in OPT_IN and name not in available):
        return None
    return _known(name, "ROLLTREE_BACKEND")


def _known(name: str, where: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{where} names '{name}', which is not a backend; use one of {', '.join(BACKENDS)}.")
    return name


def _unusable(name: str, device: torch.device) -> str | None:
    """Return why backend ``name`` cannot run on ``device``, or None if it can."""
    if name == "reference":
        return None
    if name in ("triton", "invariant"):
        if not machine.has("triton"):
            return "triton is not installed"
        if device.type == "cpu" and not machine.interpreting():
            return f"{name} runs on the CPU only in its interpreter (TRITON_INTERPRET=1)"
        return None
    if name == "flash":
        return _flash_unusable(device)
    if device.type != name:
        return f"it needs a {name} tensor"
    return None if load_library(name) else f"the compiled {name} library is missing; see `rolltree doctor`"


@functools.cache
def _flash_unusable(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it needs a cuda tensor"
    if machine.gpu_capability(device)[0] not in FLASH_MAJORS:
        return "it needs a Hopper or Blackwell GPU"
    if flash_version() is None:
        return f"{FLASH_PACKAGE} is not installed; `pip install --pre rolltree[hopper]` brings it"
    return None


def flash_version() -> str | None:
    """Return the installed version of flash-attn 4, looked up by package name: flash-attn 2 has the same module."""
    try:
        return importlib.metadata.version(FLASH_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiled_op(library: Literal["cpu", "cuda"], name: str) -> Callable[..., Any]:
    """Return a function that passes its arguments on to ``torch.ops.rolltree_<library>.<name>``; tuples are flattened.

    The op is looked up when it is called, because its library is loaded when the backend is chosen. The arguments, with
    their shapes, are those of the op's reference.
    """

    def call(*arguments: Any) -> Any:
        flat: list[Any] = []
        for argument in arguments:
            flat += argument if isinstance(argument, tuple) else (argument,)
        return getattr(getattr(torch.ops, f"rolltree_{library}"), name)(*flat)

    return call


def imported(package: str, module: str, name: str) -> Callable[..., Any]:
    """Return a function that calls ``name`` of ``package.module``, which it imports at its first call.

    For modules that need an optional dependency, such as Triton.
    """

    def call(*arguments: Any) -> Any:
        return getattr(importlib.import_module(f"{package}.{module}"), name)(*arguments)

    return call
