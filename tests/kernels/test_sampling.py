"""sample_tokens: every backend against the definition, the definition against formulas of its own."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rolltree.kernels.dispatch import use_backend
from rolltree.kernels.libraries import load_library
from rolltree.kernels.sampling import SampleOutput, kept_tokens, sample_tokens
from rolltree.kernels.sampling import triton as triton_backend
from rolltree.kernels.sampling.filters import BY_COUNT, BY_MASS, DRAWN, JUDGED, PLAIN, RACE

NATIVE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["reference", "triton"] + (["cpu"] if load_library("cpu") else [])


def sample(backend: str, logits: Tensor, **options: Any) -> SampleOutput:
    """Run on the backend's device; results on the CPU."""
    device = "cpu" if backend == "cpu" else NATIVE
    rows = len(logits)
    options = {"temperature": 1.0, "seed": torch.arange(rows), "step": torch.zeros(rows, dtype=torch.int64)} | options
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    with use_backend(backend):  # type: ignore[arg-type]
        return SampleOutput(*(value.cpu() for value in sample_tokens(logits.to(device), **options)))


def draws(backend: str, row: Tensor, count: int, **options: Any) -> SampleOutput:
    """``count`` draws from one row's distribution."""
    return sample(backend, row.expand(count, -1), seed=torch.full((count,), 5), step=torch.arange(count), **options)


def expected_distribution(row: list[float], temperature: float, k: int, p: float, min_p: float) -> list[float]:
    """Probability of each token by a Python sort; independent of the reference's tensors."""
    best = max(row)
    weight = [math.exp((x - best) / temperature) for x in row]
    order = sorted(range(len(row)), key=lambda v: (-row[v], v))
    if k >= 1:
        order = order[:k]
    total, before, kept = math.fsum(weight[v] for v in order), 0.0, []
    for v in order:
        if not kept or p >= 1 or before < p * total:
            kept.append(v)
        before += weight[v]
    kept = [v for v in kept if weight[v] >= min_p]
    total = math.fsum(weight[v] for v in kept)
    return [weight[v] / total if v in kept else 0.0 for v in range(len(row))]


# --------------------------------------------------------------------------------------------------- the distribution

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.08},
    {"temperature": 1.4, "top_k": 9, "top_p": 0.7, "min_p": 0.05},
]


def as_arguments(options: dict[str, Any]) -> tuple[float, int, float, float]:
    return (
        options.get("temperature", 1.0),
        options.get("top_k", 0),
        options.get("top_p", 1.0),
        options.get("min_p", 0.0),
    )


@pytest.mark.parametrize("options", FILTERS)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "triton"])
def test_frequencies(backend: str, options: dict[str, Any]) -> None:
    row = torch.randn(17, generator=torch.Generator().manual_seed(3)) * 1.5
    count = 20000
    expected = torch.tensor(expected_distribution(row.tolist(), *as_arguments(options)), dtype=torch.float64) * count
    found = torch.bincount(draws(backend, row, count, **options).token, minlength=17).double()
    support = expected > 0
    assert found[~support].sum() == 0
    statistic = ((found - expected)[support] ** 2 / expected[support]).sum()
    p_value = torch.special.gammaincc((support.sum() - 1).double() / 2, statistic / 2)
    assert p_value > 1e-4, f"chi-square {float(statistic):.1f} over {int(support.sum())} tokens"


@pytest.mark.parametrize("backend", BACKENDS)
def test_support_is_exact(backend: str) -> None:
    """Log-prob, which is log(w / mass of the support), for random settings a row, ties among the logits included."""
    generator = torch.Generator().manual_seed(11)
    rows, vocab = (8, 37) if backend == "triton" else (400, 37)
    logits = torch.randn(rows, vocab, generator=generator) * 2
    logits[::2] = logits[::2].round()  # many equal values: the cut goes through a tie
    options = {
        "temperature": torch.rand(rows, generator=generator) * 2 + 0.1,
        "top_k": torch.randint(0, 45, (rows,), generator=generator),
        "top_p": torch.rand(rows, generator=generator) * 1.1,
        "min_p": torch.rand(rows, generator=generator) * 0.3,
    }
    found = sample(backend, logits, **options)
    indptr, ids = kept_tokens(logits, found.last_kept)
    for n in range(rows):
        settings = [float(options[name][n]) for name in ("temperature", "top_k", "top_p", "min_p")]
        expected = expected_distribution(logits[n].tolist(), settings[0], int(settings[1]), *settings[2:])
        assert expected[int(found.token[n])] > 0, (n, settings)
        assert ids[indptr[n] : indptr[n + 1]].tolist() == [v for v in range(vocab) if expected[v] > 0], (n, settings)
        assert math.isclose(math.log(expected[int(found.token[n])]), float(found.logprob[n]), abs_tol=3e-6), n


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lower_index(backend: str) -> None:
    row = torch.tensor([1.0, 2.0, 2.0, -0.0, 0.0, 2.0, 2.0])
    count = 2 if backend == "triton" else 200
    for options, kept in (
        ({"top_k": 3}, {1, 2, 5}),
        ({"top_p": 0.5}, {1, 2, 5}),  # each 2.0 weighs 0.21
        ({"top_p": 0.0}, {1}),
        ({"top_k": 6}, {0, 1, 2, 3, 5, 6}),  # -0.0 equals 0.0
        ({"temperature": 0.0}, {1}),
        ({"min_p": 2.0}, {1, 2, 5, 6}),  # as likely as the best, at most
    ):
        drawn = draws(backend, row, count, **options)
        _, ids = kept_tokens(row.expand(count, -1), drawn.last_kept)
        assert ids.tolist() == sorted(kept) * count
        found = set(drawn.token.tolist())
        assert found <= kept, options
        assert backend == "triton" or found == kept, options


@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(1, torch.float32), (3, torch.bfloat16), (1021, torch.float16), (1021, torch.bfloat16), (4099, torch.float32)],
)
def test_backends_agree(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows = 5
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
    options = {
        "temperature": torch.tensor([1.0, 0.0, 0.7, 1.3, 1.0]),
        "top_k": torch.tensor([0, 4, 50, 3000, 7]),
        "top_p": torch.tensor([1.0, 0.5, 0.9, 0.99, 0.8]),
        "min_p": torch.tensor([0.0, 0.0, 0.01, 0.0, 0.1]),
        "seed": torch.arange(rows) + 77,
        "step": torch.arange(rows) * 1000,
    }
    expected = sample("reference", logits, **options)
    for backend in BACKENDS[1:]:
        found = sample(backend, logits, **options)
        assert torch.equal(found.token, expected.token), backend
        assert torch.equal(found.last_kept, expected.last_kept), backend
        for name in ("logprob", "raw_logprob", "entropy"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-6, atol=2e-6)


@pytest.mark.check
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


def small_tiles(monkeypatch: pytest.MonkeyPatch, **more: int) -> None:
    """Make Triton's tiles small: rows of a few hundred tokens have several blocks, and two programs in each pass."""
    tiles = {"BLOCK": 64, "GROUPS": 2, "STRIP": 8, "SPLITS": 2, "SAMPLE": 64, "ROOM": 64, "ROUND": 32, "WHOLE": 128}
    for name, value in (tiles | more).items():
        monkeypatch.setattr(triton_backend, name, value)


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
        (torch.bfloat16, FLAT[::3]),
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
    from rolltree.kernels.sampling import triton as backend

    class Launched:
        def __getitem__(self, grid: object) -> Any:
            return lambda *arguments, **options: None

    kernels = [name for name in vars(backend) if name.endswith("_kernel")]
    for name in kernels:  # the interpreter itself reads what it is given
        monkeypatch.setattr(backend, name, Launched())
    assert len(kernels) >= 4

    class Called(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops.add(str(func))
            return func(*args, **(kwargs or {}))

    integers, row = torch.arange(3), torch.full((3,), 0.9)
    options: dict[str, Any] = {"top_k": integers.int(), "top_p": row, "min_p": row, "seed": integers, "step": integers}
    logits = torch.randn(3, 9)
    with use_backend("triton"), Called() as called:
        sample_tokens(logits, temperature=row, **options)
    assert called.ops
    room = ("empty", "unbind", "detach", "view", "select")
    assert all(any(name in op for name in room) for op in called.ops), called.ops


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the C++ library was not built")
def test_cpu_agrees_on_many_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3000, 515, generator=generator) * 2
    options = {"top_p": torch.rand(3000, generator=generator), "temperature": 0.9, "seed": torch.arange(3000) ** 3}
    assert torch.equal(sample("cpu", logits, **options).token, sample("reference", logits, **options).token)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_errors_are_those_of_fp32(backend: str) -> None:
    """Against float64, no value errs more than twice as much as plain float32 PyTorch's worst."""
    logits = torch.randn(6, 5003, generator=torch.Generator().manual_seed(2)) * 4 + 30
    found = sample(backend, logits)

    def statistics(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        logprob = logits.to(dtype).log_softmax(-1)
        return logprob.gather(1, found.token[:, None])[:, 0].double(), -(logprob.exp() * logprob).sum(-1).double()

    for plain, exact, values in zip(
        statistics(torch.float32),
        statistics(torch.float64),
        ((found.raw_logprob, found.logprob), (found.entropy,)),
        strict=True,
    ):
        bound = 2 * (plain - exact).abs().max()
        for value in values:
            assert (value.double() - exact).abs().max() <= bound


# --------------------------------------------------------------------------------------------------------- invariance


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_the_batch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch, CHOSEN=4)  # some rows are drawn from their candidates, others are not
    rows, vocab = (3, 301) if backend == "triton" else (300, 301)
    generator = torch.Generator().manual_seed(4)
    storage = torch.randn(rows, vocab + 5, generator=generator)
    logits = storage[:, :vocab]  # strided rows
    options = {
        "temperature": torch.rand(rows, generator=generator) + 0.3,
        "top_p": torch.rand(rows, generator=generator),
        "seed": torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        "step": torch.arange(rows) * 31,
    }
    together = sample(backend, logits, **options)
    for n in (0, rows // 2, rows - 1):
        alone = sample(backend, logits[n : n + 1].clone(), **{k: v[n : n + 1] for k, v in options.items()})
        for name, value in alone._asdict().items():
            assert torch.equal(value, getattr(together, name)[n : n + 1]), name


def test_seed_and_step_change_the_sample() -> None:
    row = torch.zeros(1, 997)
    one = torch.ones(200, dtype=torch.int64)
    by_seed = sample(BACKENDS[-1], row.expand(200, -1), seed=torch.arange(200), step=one).token
    by_step = sample(BACKENDS[-1], row.expand(200, -1), seed=one, step=torch.arange(200)).token
    assert len(by_seed.unique()) > 150
    assert len(by_step.unique()) > 150
    assert (by_seed != by_step).sum() > 190


# --------------------------------------------------------------------------------------------------- extremes, misuse


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_rows(backend: str) -> None:
    inf, vocab = math.inf, 65
    rows = torch.zeros(6, vocab)
    rows[0] = -1e4
    rows[1, 40] = 1e30
    rows[2] = -inf
    rows[2, [3, 64]] = torch.tensor([-1e4, -1e4])  # only two tokens are allowed
    rows[3, 1:] = -3e38
    rows[4] = torch.linspace(-1.6e38, 1.6e38, vocab)
    found = sample(backend, rows, top_k=torch.tensor([0, 0, 10, 0, 3, 0]), top_p=torch.tensor([1.0, 1, 1, 0.5, 1, 1]))
    assert found.token[1] == 40
    assert found.token[2] in (3, 64)
    assert found.token[3] == 0
    assert found.token[4] == 64
    expected = torch.tensor([-math.log(65), 0.0, -math.log(2), 0.0, 0.0, -math.log(65)])
    for name in ("logprob", "raw_logprob"):
        torch.testing.assert_close(getattr(found, name), expected)
    torch.testing.assert_close(found.entropy, -expected)
    for temperature in (1e-6, 1e6):
        assert sample(backend, rows, temperature=temperature).logprob.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_rows_fail_alone(backend: str) -> None:
    nan, inf, vocab = math.nan, math.inf, 70
    rows = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0))
    good = sample(backend, rows, top_p=torch.full((8,), 0.9))
    bad = rows.clone()
    bad[1, 69] = nan
    bad[2, 0] = inf
    bad[3] = -inf
    found = sample(
        backend,
        bad,
        temperature=torch.tensor([1.0, 1, 1, 1, -1, nan, inf, 1]),
        top_p=torch.tensor([0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, nan]),
    )
    assert found.token.tolist() == [int(good.token[0])] + [-1] * 7
    assert found.last_kept.tolist() == [int(good.last_kept[0])] + [-1] * 7
    indptr, ids = kept_tokens(bad, found.last_kept)
    assert indptr.tolist() == [0] + [len(ids)] * 8
    for name in ("logprob", "raw_logprob", "entropy"):
        value = getattr(found, name)
        assert value[0] == getattr(good, name)[0]
        assert value[1:].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_rows(backend: str) -> None:
    logits = torch.randn(4, 333, generator=torch.Generator().manual_seed(9))
    found = sample(backend, logits, temperature=0.0, top_k=2)
    assert torch.equal(found.token, logits.argmax(-1))
    assert torch.equal(found.last_kept, found.token)
    assert found.logprob.tolist() == found.entropy.tolist() == [0.0] * 4
    torch.testing.assert_close(found.raw_logprob, logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str) -> None:
    found = sample(backend, torch.zeros(0, 9), top_k=3)
    assert [tuple(value.shape) for value in found] == [(0,)] * 5
    assert found.token.dtype == torch.int64


def test_wrong_arguments() -> None:
    seed = step = torch.zeros(2, dtype=torch.int64)
    good: dict[str, Any] = {"logits": torch.zeros(2, 5), "temperature": 1.0, "seed": seed, "step": step}
    for change, message in (
        ({"logits": torch.zeros(5)}, r"\[N, V\]"),
        ({"logits": torch.zeros(2, 0)}, r"V > 0"),
        ({"logits": torch.zeros(2, 5, dtype=torch.float64)}, "fp16 or fp32, got torch.float64"),
        ({"logits": torch.zeros(5, 2).t()}, "contiguous"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": torch.ones(3)}, r"temperature must be \[2\], got \[3\]"),
        ({"top_k": torch.ones(2)}, "top_k must hold integers"),
        ({"top_p": math.nan}, "top_p"),
    ):
        arguments = good | change
        with pytest.raises(ValueError, match=message):
            sample_tokens(arguments.pop("logits"), **arguments)


def test_custom_op(device: torch.device) -> None:
    row = torch.tensor([0.5, 0.9], device=device)
    integers = torch.arange(2, device=device)
    arguments = (torch.randn(2, 9, device=device), row, integers.int(), row, None, integers, integers)
    torch.library.opcheck(torch.ops.rolltree.sample_tokens.default, arguments)


def test_interpreter_is_on_without_a_gpu() -> None:
    assert (os.environ.get("TRITON_INTERPRET") == "1") is (NATIVE == "cpu")
