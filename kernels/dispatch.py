"""Which backend runs an op: flash | cute | cuda | triton | cpu | reference.

An op keeps one table ``{backend name: function}`` and calls :func:`choose`. In order of precedence the backend is the
one named by :func:`use_backend`, by the environment variable ``ROLLTREE_BACKEND``, or the best for the tensors' device.
A forced backend that the op or the device lacks is an error; falling back from a missing compiled one is logged once.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args

import torch

Backend = Literal["flash", "cute", "cuda", "triton", "cpu", "reference"]
BACKENDS: tuple[str, ...] = get_args(Backend)
_PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "cuda": ("flash", "cute", "triton", "cuda", "reference"),
    "cpu": ("cpu", "reference"),
}

_forced: ContextVar[str | None] = ContextVar("rolltree_backend", default=None)
_log = logging.getLogger("rolltree.kernels")
Fn = TypeVar("Fn", bound=Callable[..., object])


class BackendError(RuntimeError):
    """The backend asked for cannot run this op on these tensors."""


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Run every op inside the ``with`` block on backend ``name``.

    Raises:
        ValueError: ``name`` is not one of flash, cute, cuda, triton, cpu, reference.
    """
    token = _forced.set(_known(name, "use_backend"))
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    """The backend of the innermost :func:`use_backend`, for the backward of an op: on a GPU it runs in a thread of its
    own, to which the ``with`` block does not reach.
    """
    return _forced.get()


@contextmanager
def again(name: str | None) -> Iterator[None]:
    """Force what :func:`forced` said, or nothing."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(op: str, table: Mapping[str, Fn], device: torch.device) -> Fn:
    """The function of ``table`` that runs ``op`` on ``device``.

    Raises:
        BackendError: the forced backend has no implementation of ``op``, or is not usable on ``device``.
    """
    name = _forced.get() or os.environ.get("ROLLTREE_BACKEND") or ""
    if name:
        name = _known(name, "ROLLTREE_BACKEND")
        if name not in table:
            raise BackendError(f"{op} has no '{name}' backend; it has {', '.join(table)}.")
        if reason := _unusable(name, device):
            raise BackendError(f"Backend '{name}' cannot run {op} on a {device.type} tensor: {reason}.")
        return table[name]
    preference = _PREFERENCE.get(device.type, ("reference",))
    usable = [b for b in preference if b in table and not _unusable(b, device)]
    if not usable:
        raise BackendError(f"No backend of {op} runs on a {device.type} tensor; it has {', '.join(table)}.")
    for name in preference[: preference.index(usable[0])]:
        if name in table and name in HOPPER:
            _say_missing(op, usable[0], name, device)
    if usable[0] == "reference":
        missing = "; ".join(f"{b}: {_unusable(b, device) or 'not written for this op'}" for b in preference[:-1])
        log_once(f"{op} runs on the slow reference backend ({missing}).")
    return table[usable[0]]


def usable(name: str, device: torch.device) -> bool:
    """Whether backend ``name`` can run on ``device``, and no other is forced."""
    return (_forced.get() or os.environ.get("ROLLTREE_BACKEND") or name) == name and not _unusable(name, device)


def _known(name: str, where: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{where} names '{name}', which is not a backend; use one of {', '.join(BACKENDS)}.")
    return name


def _unusable(name: str, device: torch.device) -> str | None:
    """Why backend ``name`` cannot run on ``device``, or None."""
    if name == "reference":
        return None
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if device.type == "cpu" and not interpreting():
            return "triton runs on the CPU only in its interpreter (TRITON_INTERPRET=1)"
        return None
    if name in HOPPER:
        return _package_unusable(name, device)
    if device.type != name:
        return f"it needs a {name} tensor"
    return None if load_library(name) else f"the compiled {name} library is missing; see `rolltree doctor`"


class Package(NamedTuple):
    """Of another project, whose kernels a backend launches."""

    name: str
    version: str  # that the backend is made for


MAJORS = (9, 10)
"""Of the compute capabilities that they are for: Hopper and Blackwell."""

HOPPER: Mapping[str, Package] = {
    "flash": Package("flash-attn-4", "4.0.0b36"),
    "cute": Package("quack-kernels", "0.6.5"),
}


@functools.cache
def _package_unusable(name: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it needs a cuda tensor"
    if torch.cuda.get_device_capability(device)[0] not in MAJORS:
        return "it needs a Hopper or Blackwell GPU"
    if _installed(name) is None:
        return f"{HOPPER[name].name} is not installed; `pip install --pre rolltree[hopper]` brings it"
    return None


def _installed(name: str) -> str | None:
    """Version of the package of backend ``name``, asked by its own name: flash-attn 2 has the same module."""
    try:
        return importlib.metadata.version(HOPPER[name].name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _say_missing(op: str, chosen: str, name: str, device: torch.device) -> None:
    """Once, on a GPU that backend ``name`` is for: that its package is missing."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in MAJORS:
        log_once(f"{op} runs on '{chosen}' instead of '{name}': {_unusable(name, device)}.")


def failed(name: str, error: Exception) -> str:
    """What is said of kernels of backend ``name`` whose first use ends in ``error``, whatever it is: their package is
    another project's."""
    package, version = HOPPER[name], _installed(name)
    other = f", and {package.name} is {version}, not {package.version}" if version != package.version else ""
    first_line = (str(error).splitlines() or [""])[0][:200]
    return f"its kernels fail at their first use ({type(error).__name__}: {first_line}){other}"


def fall_back(op: str, name: str, other: str, reason: str) -> None:
    """Say once that backend ``other`` runs what ``name`` was chosen for, and why.

    Raises:
        BackendError: ``name`` is forced.
    """
    if name in (_forced.get(), os.environ.get("ROLLTREE_BACKEND")):
        raise BackendError(f"Backend '{name}' cannot run {op}: {reason}.")
    log_once(f"{op} runs on '{other}' instead of '{name}': {reason}.")


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@functools.cache
def load_library(name: str) -> bool:
    """Load the compiled ops (``torch.ops.rolltree_cpu`` or ``torch.ops.rolltree_cuda``); False where not built."""
    here = Path(__file__).parent
    if name == "cuda":
        libraries = [here / "_cuda.so"] if torch.cuda.is_available() and (here / "_cuda.so").exists() else []
    else:
        libraries = cpu_libraries(here)
        if not libraries and (others := sorted(path.name for path in here.glob("_cpu_*.so"))):
            log_once(f"{', '.join(others)} is for another machine; build rolltree here, or with ROLLTREE_CPU_ISA=all.")
    for library in libraries:
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            log_once(f"{library.name} was built but cannot be loaded ({error}); rebuild it beside this torch.")
            return False
        return True
    return False


def cpu_libraries(folder: Path) -> list[Path]:
    """Those of ``folder`` whose instruction sets this machine has, the best first."""
    isa = torch.backends.cpu.get_cpu_capability().lower()
    levels = ("avx512", "avx2", "default")
    best = next((i for i, level in enumerate(levels) if isa.startswith(level)), len(levels) - 1)
    return [path for level in levels[best:] if (path := folder / f"_cpu_{level}.so").exists()]


@functools.cache
def log_once(message: str) -> None:
    """Warn the first time ``message`` comes up in this process."""
    _log.warning(message)
