"""The device of a backend's tests: Triton and CUDA on a GPU if there is one, else Triton in its interpreter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from rolltree.kernels import machine
from rolltree.kernels.linear_logprob.head import has_equal_bits

_interpreted = machine.has("triton") and machine.interpreting()
needs_triton = pytest.mark.skipif(
    not (_interpreted or (machine.has("triton") and torch.cuda.is_available())),
    reason="neither Triton on a GPU nor its interpreter",
)
known_order = has_equal_bits(torch.empty(97, 48))
needs_known_order = pytest.mark.skipif(
    not known_order,
    reason="fp32 products are those of the C++ kernels, which are not built here, or of torch, whose order of sums is "
    "not known on this processor",
)
needs_interpreter = pytest.mark.skipif(not _interpreted, reason="needs Triton's interpreter, which runs it on a CPU")


def device_of(backend: str) -> torch.device:
    on_gpu = backend in ("flash", "invariant", "triton", "cuda") and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


def interpret_some(backends: Sequence[ParameterSet], cases: Sequence[Any], kept: Collection[int]) -> list[ParameterSet]:
    """Every case on every backend, for ``parametrize``; a case that is a tuple gives several arguments.

    The interpreter takes seconds for a case that a GPU runs in microseconds: without a GPU the cases of Triton's
    kernels other than ``kept`` (by index) are marked slow.
    """
    found = []
    for backend in backends:
        (name,) = backend.values
        for i, case in enumerate(cases):
            late = name in ("triton", "invariant") and not torch.cuda.is_available() and i not in kept
            marks = [*backend.marks, *([pytest.mark.slow] if late else [])]
            values = case if isinstance(case, tuple) else (case,)
            found.append(pytest.param(name, *values, marks=marks, id="-".join([str(name), *map(str, values)])))
    return found
