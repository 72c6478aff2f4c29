"""Checks of the public ops' arguments.

An op begins with an :class:`Arguments`, which checks types, shapes, dtypes and devices: host work of a few
microseconds. Values are checked too, where that needs no wait. On a CPU that is everywhere, and a mistake is one
sentence. On a GPU wrong *indices* stop the program by an assertion on the device, before memory out of range is read;
other values (temperatures, normalizers) are not checked there. Inside `torch.compile` the same assertions are part of
the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
WITHOUT_VALUES = ("meta",)
"""Types of devices whose tensors are refused."""
Size = int | str | None
"""A dimension: a number, or the letter of one that may have any size."""


class Arguments:
    """Checks the arguments of ``op``, all of them on the device of ``first``.

    Every check raises ValueError for a value that does not fit and TypeError for one that is no tensor or no number at
    all; the message begins with ``op`` and names the argument.
    """

    def __init__(self, op: str, name: str, first: object) -> None:
        self.op = op
        if not isinstance(first, Tensor):
            self.wrong_type(name, "a tensor", first)
        self._whole(name, first)
        self.device = first.device
        self.require(
            first.device.type not in WITHOUT_VALUES,
            f"{name} is on the meta device and has no values; give a real tensor",
        )

    def require(self, condition: bool, message: str | Callable[[], str]) -> None:
        """Check that ``condition`` holds.

        A message with sizes is a function: a compiler that formats a size makes a graph for that size alone.
        """
        if not condition:
            raise ValueError(f"{self.op}: {message if isinstance(message, str) else message()}.")

    def wrong_type(self, name: str, expected: str, value: object) -> NoReturn:
        raise TypeError(f"{self.op}: {name} must be {expected}, got {shown(value)}.")

    def tensor(self, name: str, value: object, shape: Sequence[Size] | None = None, like: str = "") -> Tensor:
        """Return ``value``, a tensor on the device; ``like`` says, after the shape, which argument it comes from."""
        if not isinstance(value, Tensor):
            self.wrong_type(name, "a tensor", value)
        if shape is not None:
            fits = value.dim() == len(shape) and all(
                not isinstance(want, int) or size == want for size, want in zip(value.shape, shape, strict=True)
            )
            if not fits:
                sizes = ", ".join(map(str, shape))
                self.require(False, f"{name} must be [{sizes}]{like}, got {list(value.shape)}")
        self._whole(name, value)
        if value.device != self.device:
            self.require(False, f"{name} is on {value.device} and the rest on {self.device}; move one of them")
        return value

    def _whole(self, name: str, value: Tensor) -> None:
        # by name: the import of torch.distributed.tensor takes a second
        if not torch.compiler.is_compiling() and type(value).__name__ == "DTensor":
            self.require(
                False,
                f"{name} is sharded (a DTensor), and the ops read whole tensors; call unshard() of its FSDP module "
                "before, or compute the loss in that module's forward",
            )

    def floats(
        self,
        name: str,
        value: object,
        shape: Sequence[Size] | None = None,
        like: str = "",
        dtypes: Sequence[torch.dtype] = FLOATS,
    ) -> Tensor:
        tensor = self.tensor(name, value, shape, like)
        if tensor.dtype not in dtypes:
            *most, last = (NAMES[d] for d in dtypes)
            dtypes_named = f"{', '.join(most)} or {last}" if most else last
            self.require(False, f"{name} must be {dtypes_named}, got {tensor.dtype}")
        return tensor

    def integers(self, name: str, value: object, shape: Sequence[Size] | None = None, like: str = "") -> Tensor:
        tensor = self.tensor(name, value, shape, like)
        self.require(tensor.dtype in INTEGERS, f"{name} must hold integers, got {tensor.dtype}")
        return tensor

    def numbers(self, name: str, value: object, shape: Sequence[Size] | None = None, like: str = "") -> Tensor:
        """Check that ``value`` holds floats or integers."""
        tensor = self.tensor(name, value, shape, like)
        is_number = tensor.dtype in FLOATS or tensor.dtype in INTEGERS
        self.require(is_number, f"{name} must hold numbers, got {tensor.dtype}")
        return tensor

    def mask(self, name: str, value: object, shape: Sequence[Size] | None = None, like: str = "") -> Tensor:
        tensor = self.tensor(name, value, shape, like)
        self.require(tensor.dtype == torch.bool, f"{name} must be bool, got {tensor.dtype}")
        return tensor

    def number(
        self, name: str, value: object, *, least: float = -math.inf, above: float = -math.inf, expected: str = "finite"
    ) -> float:
        """Return ``value``, a finite number of at least ``least`` and more than ``above``; no bool."""
        if isinstance(value, bool) or not isinstance(value, Real | torch.SymInt | torch.SymFloat):
            self.wrong_type(name, "a number", value)
        number: Any = value
        if not (least <= number < math.inf and number > above):  # a compiler traces no message with numbers
            self.require(False, f"{name} must be {expected}, got {value}")
        return cast(float, number)

    def size(self, name: str, value: object, *, least: int = 0) -> None:
        """Check that ``value`` is an integer of at least ``least``; no bool."""
        if isinstance(value, bool) or not isinstance(value, Integral | torch.SymInt):
            self.wrong_type(name, "an integer", value)
        number: Any = value
        if not number >= least:
            self.require(False, f"{name} must be at least {least}, got {value}")

    def names(self, name: str, values: object, allowed: Sequence[str]) -> None:
        """Check that ``values`` is a list or set of ``allowed`` names."""
        if not isinstance(values, list | tuple | set | frozenset):
            self.wrong_type(name, f"a list of {', '.join(allowed)}", values)
        for value in values:
            self.require(value in allowed, f"{name} names {shown(value)}; it knows {', '.join(allowed)}")

    def scale_of_rows(self, name: str, value: float | Tensor, rows: int) -> None:
        """Check a positive number, or a constant tensor of one or one a row; `positive` checks its values."""
        if not isinstance(value, Tensor):
            self.number(name, value, above=0, expected="positive and finite")
            return
        fits = value.dim() == 0 or (value.dim() == 1 and value.shape[0] == rows)
        self.require(fits, lambda: f"{name} must be a number or [{rows}], got {list(value.shape)}")
        self.numbers(name, self._here(value))
        if value.requires_grad:
            self.require(False, f"{name} takes no gradient; detach it")

    def constant(self, name: str, value: object) -> None:
        """Check that ``value`` is not a tensor that requires a gradient."""
        if isinstance(value, Tensor) and value.requires_grad:
            self.require(False, f"{name} is a constant of the loss but requires grad; detach it")

    def last_contiguous(self, name: str, value: Tensor) -> None:
        self.require(
            value.shape[-1] <= 1 or value.stride(-1) == 1,
            lambda: (
                f"{name} must be contiguous in its last dimension, got strides {value.stride()}; call .contiguous() on "
                "it"
            ),
        )

    def softcap(self, value: object, name: str = "softcap") -> None:
        if value is not None:
            self.number(name, value, above=0, expected="positive and finite, or None for no cap")

    def window(self, value: object) -> None:
        if value is not None:
            self.size("window", value, least=1)

    def normalizer(self, value: float | Tensor) -> None:
        if not isinstance(value, Tensor):
            self.number("normalizer", value, least=0, expected="finite and not negative")
            return
        self.numbers("normalizer", self._here(value), ())
        self.constant("normalizer", value)
        self.look("normalizer must be finite and not negative", value, lambda: (value >= 0) & (value < math.inf))

    def _here(self, value: Tensor) -> Tensor:
        """Return ``value`` on the device; a tensor of a single number may be on the host."""
        return value.to(self.device, non_blocking=True) if value.dim() == 0 and value.device.type == "cpu" else value

    # -- values -------------------------------------------------------------------------------------------------------

    def index(self, name: str, index: Tensor, end: int, *, low: int = 0, remedy: str = "") -> None:
        """Check ``low <= index < end`` everywhere.

        Raises:
            IndexError: an index is out of range (on a GPU the program stops).
        """
        if not _readable(index):
            inside = ((index >= low) & (index < end)).all()
            compiled = torch.compiler.is_compiling()
            _assert_on_device(inside, f"{self.op}: {name} must be {'in range' if compiled else f'in {low}..{end - 1}'}")
            return
        if not index.numel():
            return
        first, last = (int(x) for x in torch.aminmax(index))
        if first < low or last >= end:
            raise IndexError(
                f"{self.op}: {name} must be in {low}..{end - 1}, got {first}..{last}{remedy and '; ' + remedy}."
            )

    def edges(self, name: str, edges: Tensor, end: int, of: str) -> None:
        """Check that boundaries rise from 0 to ``end``, the number of ``of``."""
        if not _readable(edges):
            rises = (edges[0] == 0) & (edges[-1] == end) & (edges[1:] >= edges[:-1]).all()
            _assert_on_device(rises, f"{self.op}: {name} must rise from 0 to its number of {of}")
            return
        good = bool(edges[0] == 0) and bool(edges[-1] == end) and bool((edges[1:] >= edges[:-1]).all())
        self.require(good, lambda: f"{name} must rise from 0 to its {end} {of}, got {_few(edges)}")

    def boundaries(self, cu_seqlens: object, end: int) -> Tensor:
        """Return ``cu_seqlens`` [S + 1] in int64: the boundaries of sequences that hold ``end`` tokens in all."""
        cu = self.integers("cu_seqlens", cu_seqlens, ("S + 1",))
        self.require(len(cu) > 0, "cu_seqlens must begin with 0, got no number")
        self.edges("cu_seqlens", cu, end, "tokens")
        return cu.long().contiguous()

    def look(self, message: str, got: Tensor, good: Callable[[], Tensor], *, on_device: bool = False) -> None:
        """Check that ``good()`` holds everywhere in ``got``; with ``on_device``, for indices that a GPU must not
        follow, on a GPU too."""
        if _readable(got):
            if not bool((holds := good()).all()):
                where = f", got {_few(got[~holds])}" if holds.shape == got.shape else ""
                self.require(False, f"{message}{where}")
        elif on_device:
            _assert_on_device(good().all(), f"{self.op}: {message}")

    def holds(self, condition: Tensor, message: str) -> None:
        """Check ``condition [] bool``; on a GPU the program stops if it is False."""
        if _readable(condition):
            self.require(bool(condition), message)
        else:
            _assert_on_device(condition, f"{self.op}: {message}")

    def positive(self, name: str, value: Tensor) -> None:
        """Check that values are finite and above 0, if they are on a CPU."""
        if _readable(value) and value.numel():
            low, high = (float(x) for x in torch.aminmax(value))
            self.require(low > 0 and high < math.inf, lambda: f"{name} must be positive and finite, got {low}..{high}")


def check_first_derivative(op: str) -> None:
    """Check, in the backward of an op that can be differentiated once, that no second derivative will be asked for.

    Raises:
        RuntimeError: the backward runs with create_graph.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        refuse_second_derivative(op)


def refuse_second_derivative(op: str) -> NoReturn:
    """Raise the RuntimeError of an op that can be differentiated once."""
    raise RuntimeError(
        f"{op} has no second derivative; call backward without create_graph, or compute the loss in plain PyTorch "
        "(a model without patch_model)."
    )


def _readable(t: Tensor) -> bool:
    """Return whether values can be read without waiting for a device or breaking a compiled graph."""
    return t.device.type == "cpu" and not torch.compiler.is_compiling()


def _assert_on_device(condition: Tensor, message: str) -> None:
    torch._assert_async(condition, message)


def _few(t: Tensor) -> str:
    values = t.flatten()[:8].tolist()
    return f"{values[0]}" if t.dim() == 0 else f"[{', '.join(map(str, values))}{', ...' if t.numel() > 8 else ''}]"


def shown(value: object) -> str:
    if isinstance(value, bool | int | float | str | None):
        text = repr(value)
        return text if len(text) < 40 else f"{text[:36]}..."
    return f"a {type(value).__name__}"
