"""Finds the part that a name in a configuration stands for.

A built-in part is found by its name in its kind's table; the user's own is named ``file.py:object``. A part's options
are the parameters after those that the run fills in; they are checked against the signature before a run begins. A
class is instantiated with them, a function is returned with them bound. Where the run gives a `Context`, a function, or
an instance that is called, is also filled with the run's values that it names.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from .calling import ask, call, failure
from .context import Changing, Context, Filled, asked

NEEDED = inspect.Parameter.empty
"""The default of an option that must be given."""


def resolve(
    key: str,
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    parts: Mapping[str, Callable[..., Any]],
    inputs: tuple[str, ...] = (),
    options_key: str | None = None,
    context: Context | None = None,
    offers: Sequence[str] = (),
) -> Any:
    """Return the part that ``key`` of the configuration names: an instance of a class, or a function of ``inputs``.

    Args:
        key: the configuration's key, for error messages, such as ``rollout.program``.
        name: a name in ``parts``, or ``file.py:object``.
        options: the part's options.
        parts: the built-in parts of this kind.
        inputs: names of a function's first arguments, which the run fills in; a class gets its options alone.
        options_key: the configuration's key of the options, if it is not ``<key>_options``.
        context: the run's values; needed for options that change with the step.
        offers: names of ``context`` that the part may ask for.

    Raises:
        UserError: there is no such part, file or object, it takes no such inputs, or an option is unknown, missing or
            refused by the part itself.
    """
    options = options or {}
    part = parts[name] if name in parts else _imported(key, name, parts)
    of = f"{key} = '{name}'"
    accepted = options_of(part, inputs, of)
    asks: tuple[str, ...] = ()
    if not inspect.isclass(part):
        asks = tuple(offer for offer in offers if offer in accepted)
        accepted = {option: default for option, default in accepted.items() if option not in asks}
    if unknown := sorted(set(options) - set(accepted)):
        near = difflib.get_close_matches(unknown[0], accepted, 1)
        hint = f"did you mean '{near[0]}'" if near else f"it takes {', '.join(accepted) or 'none'}"
        raise UserError(f"{of} has no option '{unknown[0]}'; {hint}.")
    if missing := [option for option, default in accepted.items() if default is NEEDED and option not in options]:
        raise UserError(f"{of} needs the option '{missing[0]}'; give it in {options_key or f'{key}_options'}.")
    changing = any(isinstance(value, Changing) for value in options.values())
    if not inspect.isclass(part):
        function = part if name in parts else functools.partial(call, of, part)
        if context is not None and (asks or changing):
            return Filled(function, context, asks, options)
        return functools.partial(function, **options) if options else function
    if changing:
        raise UserError(f"{of} is a class, whose options cannot change with the step; let its methods name `step`.")
    instance = ask(of, part, **options)
    if context is not None and offers and callable(instance) and (asks := asked(instance, offers)):
        return Filled(instance, context, asks, {})
    return instance


def options_of(part: Callable[..., Any], inputs: Iterable[str] = (), of: str = "") -> dict[str, Any]:
    """Return names and defaults (`NEEDED` if there is none) of a part's options.

    A class with ``**kwargs`` takes the options of its parents too.

    Args:
        of: names the part in error messages.

    Raises:
        UserError: a function does not take ``inputs`` as its first arguments.
    """
    if not inspect.isclass(part):
        parameters = list(inspect.signature(part).parameters.values())
        names = list(inputs)
        places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(places) < len(names) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise UserError(f"{of or part} must be a function of ({', '.join(names)}).")
        rest = [p for p in parameters if p not in places[: len(names)]]
        return {p.name: p.default for p in rest if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    options: dict[str, Any] = {}
    for cls in part.__mro__[:-1]:
        if "__init__" not in cls.__dict__:
            continue
        parameters = list(inspect.signature(cls.__dict__["__init__"]).parameters.values())[1:]
        for p in parameters:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                options.setdefault(p.name, p.default)
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return options


def import_object(reference: str) -> Callable[..., Any]:
    """Return the function or class named by ``file.py:object``.

    Raises:
        UserError: there is no such file or object, or the file cannot be run.
    """
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise UserError(f"There is no file '{file}', named in '{reference}'; give file.py:object.")
    module = _module(path.resolve())
    member = getattr(module, name, None)
    if not callable(member):
        near = difflib.get_close_matches(name, dir(module), 1)
        hint = f"; did you mean '{near[0]}'" if near else ""
        raise UserError(f"'{file}' defines no function or class '{name}', named in '{reference}'{hint}.")
    return member


def _imported(key: str, name: str, parts: Iterable[str]) -> Callable[..., Any]:
    if ":" in name:
        return import_object(name)
    parts = list(parts)
    near = difflib.get_close_matches(name, parts, 1)
    hint = f"did you mean '{near[0]}', or " if near else f"use one of {', '.join(parts)}, or " if parts else ""
    raise UserError(f"{key} = '{name}' is not known; {hint}name your own as file.py:object.")


def _module(path: Path) -> Any:
    """Import the file as a module, once for as long as it does not change: two names in one file share its state."""
    name = f"rolltree_user_{path.stem}_{hash((path, path.stat().st_mtime_ns)) & 0xFFFFFFFFFFFFFFFF:x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, since dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # sys.exit too
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"'{path}' cannot be imported: {failure(error, path)}.") from error
    return module
