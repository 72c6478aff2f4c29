"""The values of a run that a function or a method of the user's may ask for, by naming an argument:

- ``step``: number of the step in progress, from 1 on;
- ``metrics``: the last step's metrics by name, empty in the first;
- ``tokenizer``: the policy's;
- ``entry``: the problem's row of the data;
- ``texts``: the responses' texts, one a leaf;
- ``policy``: samples and scores with the present weights (`loop.policy_handle.Policy`), for callbacks and sources.

A function of several trees gets a list of entries, and a list of lists of texts.

An option whose value changes with the step (`Changing`) is filled in the same way, at each call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..chat.marks import response_text
from ..errors import UserError
from .calling import call

ALWAYS = ("step", "metrics", "tokenizer")
"""The names that any part of a run may ask for."""
OF_TREES = (*ALWAYS, "entry", "texts")
"""The names that a function of a tree, or of trees, may ask for."""
SAMPLING = ("policy",)
"""The names that parts may ask for in addition that work beside the sampler."""


class NotReadyError(UserError):
    """A part asks for something that a made-up group does not have."""


@dataclass
class Context:
    """The values that parts may ask for, kept up to date by the run.

    Args:
        tokenizer: the policy's; None before it is loaded.
        policy: None before the run begins, and where nothing is sampled.
    """

    tokenizer: Any = None
    policy: Any = None
    step: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    schedules: dict[str, Changing] = field(default_factory=dict)
    """Options that change with the step, by the name under which ``schedule/NAME`` records them."""

    def at(self, step: int, metrics: Mapping[str, float]) -> None:
        """Begin ``step``, after one with ``metrics``."""
        self.step, self.metrics = step, metrics

    def values(self, names: Iterable[str], of: Any = None) -> dict[str, Any]:
        """Return the values of ``names``.

        Args:
            of: the tree, or the list of trees, that the part gets.

        Raises:
            NotReadyError: the run does not know one of them yet.
        """
        return {name: self._value(name, of) for name in names}

    def call(self, what: str, method: Callable[..., Any], *inputs: Any, offers: Sequence[str] = ALWAYS) -> Any:
        """Call a method of the user's with ``inputs`` and what it asks for; see `calling.call`."""
        return call(what, method, *inputs, **self.values(asked(method, offers), inputs[0] if inputs else None))

    def _value(self, name: str, of: Any) -> Any:
        if name in ("step", "metrics"):
            return getattr(self, name)
        if name == "policy":
            if self.policy is None:
                raise NotReadyError("'policy' is known to parts of a run alone, once it samples.")
            return self.policy
        if self.tokenizer is None:
            raise NotReadyError(f"'{name}' is not known before the run has loaded its model.")
        if name == "tokenizer":
            return self.tokenizer
        if isinstance(of, Sequence):
            return [self._value(name, tree) for tree in of]
        if name == "entry":
            if "entry" in of.meta:
                return of.meta["entry"]
            if "replayed" in of.meta:
                raise UserError(
                    "A part asks for 'entry', which groups in parquet files of `replay.paths` do not have; record them "
                    "with `rolltree rollout --record`, or leave the argument out."
                )
            raise NotReadyError("A made-up group has no entry.")
        ids = (of.token_id[of.response_rows(leaf)] for leaf in range(of.num_leaves))
        return [response_text(self.tokenizer, token_ids) for token_ids in ids]


@dataclass(frozen=True)
class Changing:
    """An option whose value follows from the step and the last step's metrics."""

    value: Callable[[int, Mapping[str, float]], float]
    context: Context

    def now(self) -> float:
        return self.value(self.context.step, self.context.metrics)


def now(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with the present values of those that change."""
    return {name: value.now() if isinstance(value, Changing) else value for name, value in options.items()}


def asked(function: Callable[..., Any], names: Iterable[str]) -> tuple[str, ...]:
    """Return those of ``names`` that ``function`` has as parameters."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return ()
    return tuple(name for name in names if name in parameters)


class Filled:
    """A function, or an instance with ``__call__``, that gets what it asks for at each call.

    Args:
        part: the function or instance; its attributes are this object's too.
        asks: names of `OF_TREES`.
        options: options of a function, some of which change.
    """

    def __init__(self, part: Any, context: Context, asks: Sequence[str], options: Mapping[str, Any]) -> None:
        self._part, self._context, self._asks, self._options = part, context, asks, options
        functools.update_wrapper(self, part, updated=())

    def __call__(self, *inputs: Any) -> Any:
        values = self._context.values(self._asks, inputs[0] if inputs else None)
        return self._part(*inputs, **now(self._options), **values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_part"], name)
