"""The end of a step: Triton's kernel against the definition."""

from __future__ import annotations

import pytest
import torch

from rolltree.kernels import use_backend
from rolltree.kernels.advance import Turns, advance

from .on_device import device_of, needs_triton

STEPS = 3


def window(rows: int, rising: int, device: torch.device) -> Turns:
    """A window whose vector has the ids, the slots and the step after ``rising`` numbers that may grow."""
    random = torch.Generator().manual_seed(rows)
    numbers = torch.arange(4 * rising + 4, dtype=torch.int32)
    places = torch.randperm(4 * rising, generator=random)[:rising].int()
    next_slots = torch.randint(0, 99, (STEPS, rows), generator=random).int()
    ids, slots = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 7, dtype=torch.int32)
    step = torch.arange(rows) + (1 << 33)
    turn, drawn = torch.zeros(1, dtype=torch.int32), torch.zeros(STEPS, 4, rows)
    return Turns(*(t.to(device) for t in (numbers, places, turn, ids, slots, next_slots, step, drawn)))


@needs_triton
@pytest.mark.parametrize(("rows", "rising"), [(1, 2), (8, 40), (1500, 3100)])
def test_the_kernel_does_what_the_definition_says(rows: int, rising: int) -> None:
    """Rows beyond a block of the kernel, a row without a token, and steps beyond 32 bits."""
    found, expected = window(rows, rising, device_of("triton")), window(rows, rising, torch.device("cpu"))
    for turn in range(STEPS):
        token = (torch.arange(rows) * 7 + turn) % 50 - 1
        drawn = [torch.full((rows,), turn + x) for x in (0.5, float("nan"), 0.25)]
        with use_backend("reference"):
            advance(expected, token, *drawn)
        with use_backend("triton"):
            advance(found, token.to(found.step.device), *(x.to(found.step.device) for x in drawn))
        for one, two in zip(found, expected, strict=True):
            assert one.cpu().numpy().tobytes() == two.numpy().tobytes()
    assert expected.turn.item() == STEPS
    assert expected.step[0] == (1 << 33) + STEPS
    assert expected.input_ids.min() >= 0
    assert expected.numbers[0, 0].view(torch.int32).tolist() == [x % 50 - 1 for x in range(0, 7 * rows, 7)]
