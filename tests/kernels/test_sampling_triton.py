"""Triton's kernels of sample_tokens against the reference: candidates, cuts and searches of hard rows, the noise."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rolltree.kernels.dispatch import use_backend
from rolltree.kernels.sampling import noise, reference, sample_tokens
from rolltree.kernels.sampling import triton as triton_backend
from rolltree.kernels.sampling.filters import BY_COUNT, BY_MASS, DRAWN, JUDGED, PLAIN, RACE
from rolltree.kernels.sampling.noise import uniforms as triton_uniforms
from rolltree.kernels.sampling.noise import words_of
from rolltree.kernels.sampling.reference import uniforms

from .on_device import device_of, needs_interpreter
from .test_sampling import sample, small_tiles
from .test_sampling_noise import SEEDS, STEPS


def watch(monkeypatch: pytest.MonkeyPatch, name: str, see: Callable[..., None]) -> None:
    """Have ``see`` called with what each launch of a kernel was given, when it is done."""

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **constants: Any) -> None:
                kernel[grid](*arguments, **constants)
                see(**dict(zip(kernel.arg_names, arguments, strict=False)), **constants)

            return launch

    kernel = getattr(triton_backend, name)
    monkeypatch.setattr(triton_backend, name, Watched())


@pytest.mark.slow
def test_rows_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties that are cut blocks apart, blocks that weigh nothing beside the best, blocks of forbidden tokens."""
    small_tiles(monkeypatch)
    generator = torch.Generator().manual_seed(8)
    rows, vocab = 8, 301
    logits = (torch.randn(rows, vocab, generator=generator) * 2).bfloat16()
    logits[:3] = logits[:3].round()
    logits[3:5, 64:192] -= 300
    logits[5:7, 64:128] = -math.inf
    logits[7, 3:] -= 90  # nearly nothing is drawn from
    for options in (
        {"temperature": torch.tensor([1.0, 0.5, 1.0, 0.0] * 2)},
        {
            "temperature": torch.tensor([0.7, 1.0, 0.05, 1.0] * 2),
            "min_p": torch.tensor([0.0, 0.2, 1.0, 0.03, 0.3, 0.0, 0.01, 0.0]),
        },
        {
            "top_k": torch.tensor([3, 150, 40, 299, 0, 301, 200, 64]),
            "top_p": torch.tensor([1.0, 0.9, 0.4, 0.999, 0.7, 0.0, 0.99, 0.97]),
        },
    ):
        expected, found = sample("reference", logits, **options), sample("triton", logits, **options)
        assert torch.equal(found.token, expected.token)
        assert torch.equal(found.last_kept, expected.last_kept)
        for name in ("logprob", "raw_logprob", "entropy"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-6, atol=2e-6)


NONE, ALL, NEVER = 0, 1.0, 0.0  # of top_k, top_p, min_p
HARD: list[tuple[str, tuple[int, float, float], tl.constexpr]] = [  # logits, filters, mode
    ("random", (NONE, ALL, NEVER), PLAIN),
    ("random", (7, 0.9, 0.05), DRAWN),
    ("rounded", (150, 0.97, 0.001), BY_COUNT),
    ("random", (NONE, 0.999, NEVER), BY_MASS),
    ("steps", (7, ALL, NEVER), DRAWN),
    ("steps", (9, ALL, NEVER), BY_COUNT),
    ("peaked", (250, 0.5, NEVER), DRAWN),  # what is no candidate weighs nothing
    ("random", (40, 0.999, 0.6), BY_COUNT),  # top_p asks for the mass that top_k leaves
    ("rounded", (100, ALL, NEVER), BY_COUNT),  # the cut goes through a tie
    ("random", (NONE, 0.999, 0.6), DRAWN),  # top_p keeps more than candidates, min_p does not
    ("random", (NONE, ALL, 0.001), RACE),
    ("equal", (NONE, 0.5, NEVER), BY_MASS),
    ("forbidden", (250, 0.9, NEVER), BY_COUNT),  # fewer than that are allowed
    ("zeros", (200, 0.6, NEVER), BY_COUNT),  # of both signs
    ("nan", (40, 0.9, NEVER), PLAIN),
]


def hard_row(kind: str, generator: torch.Generator) -> Tensor:
    row = torch.randn(300, generator=generator) * 2
    if kind == "rounded":
        return row.round()
    if kind == "peaked":
        row[::60] += 200
    if kind == "steps":  # each strip has one token of weight, all of them another one
        row = torch.full((300,), -50.0)
        row[::4] = torch.randperm(75, generator=generator) / 4
    if kind == "equal":
        return torch.full((300,), 1.75)
    if kind == "zeros":
        return torch.where(row > 0, 0.0, -0.0)
    if kind == "forbidden":
        row[60:200] = -math.inf
    if kind == "nan":
        row[17] = math.nan
    return row


@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("dtype", "cases"),
    [
        pytest.param(torch.bfloat16, HARD, marks=pytest.mark.slow),
        (torch.bfloat16, HARD[::3]),
        (torch.float32, HARD[3:9:5]),
        (torch.float16, HARD[3:9:5]),
    ],
)
def test_candidates_and_the_fall_back(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, cases: list[tuple[str, tuple[int, float, float], tl.constexpr]]
) -> None:
    """Rows whose candidates, of eight strips at most, hold the last token that is kept, and rows whose do not."""
    small_tiles(monkeypatch, BLOCK=128, STRIP=4, CHOSEN=8)
    seen: list[list[int]] = []  # how far the candidates brought each row, call by call
    watch(monkeypatch, "select_kernel", lambda mode, **_: seen.append(mode.tolist()))
    generator = torch.Generator().manual_seed(4)
    logits = torch.stack([hard_row(kind, generator) for kind, _, _ in cases]).to(dtype)
    filters = {name: torch.tensor([c[1][i] for c in cases]) for i, name in enumerate(("top_k", "top_p", "min_p"))}
    options = {**filters, "temperature": 0.9, "seed": torch.arange(len(cases)) + 5}
    expected, found = (sample(backend, logits, **options) for backend in ("reference", "triton"))
    assert seen == [[mode.value for _, _, mode in cases]]
    assert torch.equal(found.token, expected.token)
    assert torch.equal(found.last_kept, expected.last_kept)
    for name in ("logprob", "raw_logprob", "entropy"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-6, atol=2e-6, equal_nan=True)


SAMPLED = torch.arange(128) * 1000 // 128 * 4  # where four tokens each are read, of 4000, where 512 are
FLAT: list[tuple[str, tuple[int, float, float], list[bool]]] = [  # logits, filters, whether each search was led well
    ("normal", (1500, ALL, NEVER), [True]),
    ("normal", (NONE, 0.6, 0.3), [True]),
    ("normal", (2500, 0.7, NEVER), [True, True]),
    ("steps", (1500, 0.9, 0.5), [True, True]),  # of a quarter: the cut goes through ties
    ("nearly all", (3999, 0.99999, NEVER), [True, True]),
    ("too high", (1500, ALL, NEVER), [False]),  # the sample, so the cut lies below the bracket
    ("too high", (NONE, 0.6, NEVER), [False]),
    ("too low", (1500, 0.5, NEVER), [False, True]),  # and all that is left has room
    ("too low", (NONE, 0.6, NEVER), [False]),
    ("equal", (1500, 0.25, NEVER), [False, False]),  # more tokens between than there is room for
]


def flat_row(kind: str, generator: torch.Generator) -> Tensor:
    row = torch.randn(4000, generator=generator)
    if kind == "steps":
        return (row * 4).round() / 4
    if kind == "equal":
        return torch.full((4000,), -1.5)
    if kind in ("too high", "too low"):
        row[(SAMPLED[:, None] + torch.arange(4)).flatten()] += 5 if kind == "too high" else -5
    return row


@pytest.mark.check
@pytest.mark.parametrize(
    ("dtype", "cases"),
    [
        pytest.param(torch.bfloat16, FLAT, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, FLAT[::3], marks=pytest.mark.slow),
        (torch.float32, FLAT[2:8:2]),
    ],
)
def test_the_cut_by_a_sample(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, cases: list[tuple[str, tuple[int, float, float], list[bool]]]
) -> None:
    """Flat rows: what is gathered around the cut holds it, or settles nothing and the whole row is searched."""
    tiles = {"BLOCK": 512, "STRIP": 4, "CHOSEN": 8, "SAMPLE": 512, "ROOM": 2048, "ROUND": 512, "WHOLE": 2048}
    small_tiles(monkeypatch, **tiles)
    led: list[list[bool]] = [[] for _ in cases]

    def key(value: Tensor) -> Tensor:  # as the kernels' key_of
        bits = value.to(dtype).view(torch.int16 if dtype == torch.bfloat16 else torch.int32).long()
        return torch.where(bits < 0, bits ^ (0x7FFF if dtype == torch.bfloat16 else 0x7FFFFFFF), bits)

    def settled(cut: Tensor, counts: Tensor, bracket: Tensor, MASS: bool, **_: Any) -> None:
        between = (bracket[:, 0] < key(cut)) & (key(cut) <= bracket[:, 1]) & (counts.amax(1) <= 1024)
        for n, (_, (k, p, _), _) in enumerate(cases):
            if p < ALL if MASS else k > 0:
                led[n].append(bool(between[n]))

    watch(monkeypatch, "settle_kernel", settled)
    watch(
        monkeypatch, "scan_kernel", lambda bound, **_: bound.fill_(2**31 - 1)
    )  # a group that nobody judges never wins
    judged: list[list[bool]] = []
    watch(monkeypatch, "finish_kernel", lambda mode, **_: judged.append((mode == JUDGED.value).tolist()))
    generator = torch.Generator().manual_seed(6)
    logits = torch.stack([flat_row(kind, generator) for kind, _, _ in cases]).to(dtype)
    filters = {name: torch.tensor([c[1][i] for c in cases]) for i, name in enumerate(("top_k", "top_p", "min_p"))}
    expected, found = (sample(backend, logits, **filters) for backend in ("reference", "triton"))
    assert torch.equal(found.token, expected.token)
    assert torch.equal(found.last_kept, expected.last_kept)
    torch.testing.assert_close(found.logprob, expected.logprob, rtol=2e-6, atol=2e-6)
    assert led == [wanted for _, _, wanted in cases]
    # Others are raced: those misled at last, and those of which min-p leaves less than the cut
    assert judged == [[wanted[-1] and min_p == NEVER for _, (_, _, min_p), wanted in cases]]


@pytest.mark.slow  # Triton's interpreter takes a minute for each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [50257, 151669, 151936])
def test_real_vocabularies(vocab: int, dtype: torch.dtype) -> None:
    """Every set of filters, narrow and wide, of rows that are peaked, flat, partly forbidden or full of ties.

    A token before which lies what top-p keeps, to what float32 sums err by (3e-7), may be told apart differently.
    """
    sets = list(itertools.product((NONE, 40, 3000), (ALL, 0.9, 0.99), (NEVER, 0.02)))
    generator = torch.Generator().manual_seed(1)
    each = torch.arange(len(sets))
    logits = torch.randn(len(sets), vocab, generator=generator) * torch.tensor([1.0, 3.0, 0.3, 6.0])[each % 4, None]
    logits[::5, vocab // 3 : vocab // 2] = -math.inf
    logits[1::7] = (logits[1::7] * 4).round() / 4
    filters = {name: torch.tensor([c[i] for c in sets]) for i, name in enumerate(("top_k", "top_p", "min_p"))}
    options = filters | {"temperature": torch.tensor([1.0, 0.7, 1.3])[each % 3]}
    logits = logits.to(dtype)
    expected, found = (sample(backend, logits, **options) for backend in ("reference", "triton"))
    assert torch.equal(found.token, expected.token)
    for n in (found.last_kept != expected.last_kept).nonzero().flatten().tolist():
        ranked, order = logits[n].double().sort(descending=True, stable=True)
        weight = ((ranked - ranked[0]) / options["temperature"][n].double()).exp()[: sets[n][0] or vocab]
        first, second = sorted(int((order == last[n]).nonzero()) for last in (found.last_kept, expected.last_kept))
        assert second == first + 1
        assert abs(float(weight[:second].sum() / weight.sum()) - float(filters["top_p"][n])) < 3e-7
    for name in ("logprob", "raw_logprob", "entropy"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-6, atol=2e-6)


def test_nothing_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With parameters on the device a call only makes room and launches, so that a CUDA graph can hold it."""

    class Launched:
        def __getitem__(self, grid: object) -> Any:
            return lambda *arguments, **options: None

    kernels = [name for name in vars(triton_backend) if name.endswith("_kernel")]
    for name in kernels:  # the interpreter itself reads what it is given
        monkeypatch.setattr(triton_backend, name, Launched())
    assert len(kernels) >= 4

    class Called(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops.add(str(func))
            return func(*args, **(kwargs or {}))

    device = device_of("triton")
    integers, row = torch.arange(3, device=device), torch.full((3,), 0.9, device=device)
    options: dict[str, Any] = {"top_k": integers.int(), "top_p": row, "min_p": row, "seed": integers, "step": integers}
    logits = torch.randn(3, 9, device=device)
    with use_backend("triton"), Called() as called:
        sample_tokens(logits, temperature=row, **options)
    assert called.ops
    room = ("empty", "unbind", "detach", "view", "select")
    assert all(any(name in op for name in room) for op in called.ops), called.ops


# --------------------------------------------------------------------------------------------------------- the noise


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


@needs_interpreter  # a kernel compiled before keeps the function that is replaced
def test_ties_and_extreme_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that many tokens share, so that scores tie within groups, across groups and across blocks."""

    def few(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
        words = torch.tensor(ADVERSARIAL, device=counter[0].device)
        return [words[(counter[0] * 7 + counter[2]) % 6] + 0 * key[0]] * 4

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
