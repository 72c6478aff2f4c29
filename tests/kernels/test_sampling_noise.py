"""The noise of sample_tokens: known answers of Philox, the same draws in every backend."""

from __future__ import annotations

import pytest
import torch

from rolltree.kernels.sampling.reference import philox, uniforms

from .test_sampling import BACKENDS, sample


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers of Random123, philox4x32-10
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    found = philox([torch.tensor([c]) for c in counter], [torch.tensor([k]) for k in key])
    assert [int(word) for word in found] == words


SEEDS = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822, 12345])
STEPS = torch.tensor([0, -1, 7, 2**40 + 3, 2**63 - 1, 0x0370734413198A2E, 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits_draw_the_least_uniform(backend: str) -> None:
    """With equal logits the race is won by the smallest t, so tokens show the noise itself."""
    rows = 7 if backend == "triton" else 2100
    seed, step = SEEDS.repeat(rows // 7), STEPS.repeat(rows // 7) + torch.arange(rows)
    found = sample(backend, torch.zeros(rows, 601), seed=seed, step=step)
    assert torch.equal(found.token, uniforms(seed, step, 601).argmin(-1))


def test_uniforms_stay_inside_the_open_interval() -> None:
    t = uniforms(torch.arange(200), torch.arange(200), 4001)
    assert t.min() > 0
    assert t.max() < 1
    assert (t < 2.0**-18).any(), "small values are not rounded away"
    assert abs(t.double().mean() - 0.5) < 0.002
