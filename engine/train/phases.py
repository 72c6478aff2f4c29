"""Measures which part of an update a device computes when: by clock readings on a CPU, by events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

MODEL, HEAD, OPTIMIZER = "forward_backward", "head", "optimizer"


class Span(NamedTuple):
    """The phase ``name`` lasted from ``begin`` to ``end``, in seconds of `time.perf_counter`."""

    name: str
    begin: float
    end: float


class _Clock:
    """A moment on a device that computes synchronously."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def seconds_since(self, other: _Clock) -> float:
        return self.at - other.at


class _Event:
    """The moment at which a GPU reaches this place of the current stream; recording it does not block the host."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def seconds_since(self, other: _Event) -> float:
        return float(other.event.elapsed_time(self.event)) / 1e3


class Phases:
    """Records the phases of updates: each lasts until the next is entered, or until the update is left.

    A GPU runs asynchronously to the host: `met`, called after a synchronisation, relates its time to the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._moment: Callable[[], Any] = _Event if device.type == "cuda" else _Clock
        self._marks: list[tuple[str | None, Any]] = []
        self._met: tuple[Any, float] | None = None  # a moment, and the host's time at that moment

    def enter(self, name: str | None) -> None:
        """Begin the phase ``name``; None: leave the update."""
        self._marks.append((name, self._moment()))

    def met(self) -> None:
        """Note that the device has just reached the last mark: the host has waited for it."""
        self._met = self._marks[-1][1], time.perf_counter()

    def read(self) -> list[Span]:
        """Return the phases since the last call, in order. Waits until the device has finished them."""
        marks, self._marks = self._marks, []
        if not marks:
            return []
        last = marks[-1][1]
        if isinstance(last, _Event):
            last.event.synchronize()
        moment, host = self._met if self._met is not None else (last, time.perf_counter())
        if isinstance(moment, _Clock):
            moment, host = marks[0][1], marks[0][1].at
        at = [host + mark.seconds_since(moment) for _, mark in marks]
        return [
            Span(name, begin, end)
            for (name, _), begin, end in zip(marks, at, at[1:], strict=False)
            if name is not None and end > begin
        ]

    @contextmanager
    def following(self, model: PreTrainedModel) -> Iterator[None]:
        """Enter the phase of the model while the decoder runs, and that of the head until its gradient is computed."""

        def back(gradient: Tensor) -> None:
            self.enter(MODEL)

        def forward_ended(decoder: object, arguments: object, output: Any) -> None:
            self.enter(HEAD)
            if output.last_hidden_state.requires_grad:
                output.last_hidden_state.register_hook(back)

        decoder = model.get_decoder()
        hooks = [
            decoder.register_forward_pre_hook(lambda *_: self.enter(MODEL)),
            decoder.register_forward_hook(forward_ended),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
