"""Where a backend's tests run: Triton and CUDA on a GPU where there is one, else Triton in its interpreter."""

from __future__ import annotations

import pytest
import torch

from rolltree.kernels import dispatch

needs_triton = pytest.mark.skipif(
    not (dispatch.interpreting() or torch.cuda.is_available()), reason="neither a GPU nor Triton's interpreter"
)
needs_interpreter = pytest.mark.skipif(not dispatch.interpreting(), reason="Triton runs on the CPU in its interpreter")


def device_of(backend: str) -> torch.device:
    return torch.device("cuda" if backend in ("triton", "cuda") and torch.cuda.is_available() else "cpu")
