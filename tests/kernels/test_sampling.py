"""sample_tokens: every backend against the definition, the definition against formulas of its own."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import machine
from rolltree.kernels.dispatch import use_backend
from rolltree.kernels.libraries import load_library
from rolltree.kernels.sampling import SampleOutput, kept_tokens, sample_tokens

NATIVE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["reference"] + (["triton"] if machine.has("triton") else []) + (["cpu"] if load_library("cpu") else [])
FAST = "cpu" if load_library("cpu") else "reference"


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


@pytest.mark.check(but=3)
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(1, torch.float32), (3, torch.bfloat16), (1021, torch.bfloat16), (1021, torch.float16), (4099, torch.float32)],
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


def small_tiles(monkeypatch: pytest.MonkeyPatch, **more: int) -> None:
    """Make Triton's tiles small: rows of a few hundred tokens have several blocks, and two programs in each pass."""
    from rolltree.kernels.sampling import triton as triton_backend  # which not every machine has

    tiles = {"BLOCK": 64, "GROUPS": 2, "STRIP": 8, "SPLITS": 2, "SAMPLE": 64, "ROOM": 64, "ROUND": 32, "WHOLE": 128}
    for name, value in (tiles | more).items():
        monkeypatch.setattr(triton_backend, name, value)


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
    if backend == "triton":
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
    by_seed = sample(FAST, row.expand(200, -1), seed=torch.arange(200), step=one).token
    by_step = sample(FAST, row.expand(200, -1), seed=one, step=torch.arange(200)).token
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
