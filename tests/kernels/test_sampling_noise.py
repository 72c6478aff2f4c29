"""The noise of sample_tokens: known answers of Philox, the same bits in every backend, bounds of the race."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from rolltree.kernels.sampling import noise, reference
from rolltree.kernels.sampling import triton as triton_backend
from rolltree.kernels.sampling.noise import uniforms as triton_uniforms
from rolltree.kernels.sampling.noise import words_of
from rolltree.kernels.sampling.reference import philox, uniforms

from .test_sampling import BACKENDS, sample, small_tiles


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


@triton.jit
def uniforms_kernel(seed, step, out, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0)
    for begin in range(0, 2 * BLOCK, BLOCK):
        t = triton_uniforms(words_of(tl.load(seed + n), tl.load(step + n), begin, BLOCK, WIDTH))
        tl.store(out + n * 2 * BLOCK + begin + tl.arange(0, BLOCK), t)


@pytest.mark.parametrize("width", [4, 8])
def test_triton_uniforms_are_bit_equal(device: torch.device, width: int) -> None:
    found = torch.empty(len(SEEDS), 1024, device=device)
    uniforms_kernel[(len(SEEDS),)](SEEDS.to(device), STEPS.to(device), found, BLOCK=512, WIDTH=width)
    assert torch.equal(found.cpu(), uniforms(SEEDS, STEPS, 1024))


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


@triton.jit
def bound_kernel(word, z, d, low, score, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write for each word and log2 weight, d below the row's best, log2 of its own group's bound, and its score."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words, log2_w, shift = tl.load(word + i).to(tl.uint32), tl.load(z + i), tl.load(d + i)
    bound = noise.least_bounds(words, tl.exp2(log2_w), BLOCK // 4)  # groups of four, of one each
    bound = tl.reshape(tl.broadcast_to(bound[None, :], (4, BLOCK // 4)), (BLOCK,))
    tl.store(low + i, noise.log2_bound(bound) - shift)
    tl.store(score + i, noise.arrival(triton_uniforms(words)) * tl.exp2(-(log2_w + shift)))


def test_no_score_lies_below_its_bound(device: torch.device) -> None:
    """Words at powers of two, between them where the bits are furthest below the logarithm, and where t is cut."""
    powers = [2**k + i for k in range(32) for i in (-1, 0, 1)]
    worst = [int(2**k * m) for k in range(24, 32) for m in (1.4427, 1.4426, 1.442695)]
    ends = [0, 1, 2, 3, 0x7FFFFFFF, 0x80000000, 0xFFFFFF7F, 0xFFFFFF80, 0xFFFFFFFF]
    words = torch.tensor([w for w in {*powers, *worst, *ends} if 0 <= w < 2**32])
    exponents = [0.0, -0.5, -0.4427, -0.5288, -0.9999999, -1.0, -7.47, -31.999998, -60.3, -93.47, -120.1, -125.9]
    pairs = torch.cartesian_prod(
        words.double(), torch.tensor(exponents).double(), torch.tensor([0.0, -3.3, -90.2]).double()
    )
    pairs = pairs[pairs[:, 1] + pairs[:, 2] > -126]  # the others have no weight
    pairs = pairs[torch.arange(-(-len(pairs) // 128) * 128) % len(pairs)]
    count = len(pairs)
    # a program's 512 tokens are four times the same 128: a group has one of each four, all alike
    word, z, d = (pairs[:, i].reshape(-1, 1, 128).expand(-1, 4, -1).flatten().to(device) for i in range(3))
    low, score = torch.empty(2, 4 * count, device=device)
    bound_kernel[(count // 128,)](word.long(), z.float(), d.float(), low, score, BLOCK=512)
    gap = score.cpu().double().log2() - low.cpu().double()
    assert gap.min() > 0.01, "what rounding may take, a hundred times over"
    assert gap[word.cpu() > 0].min() < 0.02, "no word comes near the bound: the worst ones are missing"


ADVERSARIAL = (0, 1, 0xFFFFFFFF, 0x80000000, 0xB8AA3B29, 77)


@triton.jit
def few_words(seed, step, counter):  # type: ignore[no-untyped-def]
    """Replace Philox by words that many tokens share, the extreme ones among them, by counter and step."""
    at = (counter.to(tl.int64) * 7 + step) % 6
    word = tl.where(at == 0, 0, tl.where(at == 1, 1, tl.where(at == 2, 0xFFFFFFFF, 0x80000000)))
    word = tl.where(at == 4, 0xB8AA3B29, tl.where(at == 5, 77, word)).to(tl.uint32)
    return word, word, word, word


def test_ties_and_extreme_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that many tokens share, so that scores tie within groups, across groups and across blocks."""

    def few(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
        return [torch.tensor(ADVERSARIAL)[(counter[0] * 7 + counter[2]) % 6] + 0 * key[0]] * 4

    monkeypatch.setattr(noise, "philox", few_words)
    monkeypatch.setattr(reference, "philox", few)
    small_tiles(monkeypatch, BLOCK=128)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randint(-3, 4, (4, 300), generator=generator).float()
    logits[1] = 0
    logits[2, 100:] = -math.inf
    logits[3, :128] -= 120  # a block that has weights only beside its own best
    for rows, options, chosen in ((4, {}, 128), (1, {"top_k": 150}, 128), (1, {"top_k": 150}, 4)):
        monkeypatch.setattr(triton_backend, "CHOSEN", chosen)
        step = torch.tensor([3, 1, 5, 4])[:rows]
        expected, found = (sample(b, logits[:rows], step=step, **options) for b in ("reference", "triton"))
        assert torch.equal(found.token, expected.token)
        assert torch.equal(found.last_kept, expected.last_kept)
