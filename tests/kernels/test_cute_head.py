"""The head's cute backend up to its kernels: what is combined between the products, objectives, fall backs.

`Rounded` is the kernels in plain PyTorch, rounding where they round; test_cute_compiles.py compiles the kernels.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import HeadLora, Objective, PolicyFields, PolicyLossOutput, dispatch, linear_logprob, policy_loss
from rolltree.kernels.linear_logprob import chunked, cpu, cute, entropy_factor, exponentials, reference
from rolltree.kernels.linear_logprob.exponentials import TILES, Exponentials, tile_of
from rolltree.kernels.linear_logprob.head import Head
from rolltree.kernels.linear_logprob.targets import group_by_row
from rolltree.kernels.linear_policy_loss import plan
from rolltree.kernels.policy_loss import PRESETS

from .on_device import needs_interpreter
from .test_linear_logprob import DEVICE, Inputs, inputs, plain
from .test_linear_policy_loss import LENGTHS, TREE_OBJECTIVES, batch, cast, composed, fused, run
from .test_linear_shared_rows import TREES, forest, widened

WIDTH, VOCABULARY = 16, 384
PRODUCT = 2**-7  # of a gradient: the error of a product of bf16 operands


class Rounded:
    """`exponentials.Products`. ``wrong`` spoils one thing; ``hopper``: operands are scaled on their way."""

    def __init__(self, wrong: str = "", *, hopper: bool = True) -> None:
        self.hopper = hopper
        self.wrong, self.calls = wrong, dict.fromkeys(("exponentials", "to_hidden", "to_weight"), 0)
        self.rows: list[int] = []
        self.tiles: list[int] = []
        self.factored = False  # whether `e` holds gradients of an entropy too

    def scale_operands(self, device: torch.device) -> bool:
        return self.hopper

    def exponentials(
        self, x: Tensor, weight: Tensor, inverse: Tensor, target: Tensor, tile: int, e: Tensor | None,
        exponent: Tensor, total: Tensor, weighted: Tensor, at_target: Tensor,
    ) -> None:  # fmt: skip
        self.calls["exponentials"] += 1
        self.rows.append(len(x))
        self.tiles.append(tile)
        self.factored = False
        if self.wrong == "raises":
            raise RuntimeError("no such kernel\nin two lines")
        given = x, weight, inverse, target, e, exponent, total, weighted, at_target
        tensors = [t for t in given if t is not None]
        assert all(t.is_contiguous() for t in tensors)
        assert len(x) % 128 == 0
        assert len(weight) % tile == 0
        assert (x.dtype, target.dtype, exponent.dtype) == (torch.bfloat16, torch.int32, torch.float32)
        z = (x.float() @ weight.float().T * inverse[:, None]).unflatten(1, (-1, tile))
        largest = torch.where(z.isnan(), -torch.inf, z).amax(2)  # as fmax
        exponent.copy_((largest * 1.4426950408889634).round())
        d = (z.double() * torch.tensor(1.4426950408889634).double() - exponent[..., None]).float()  # one FMA
        each = d.exp2()
        total.copy_(each.sum(2))
        weighted.copy_((each * d).sum(2))
        if e is not None:
            e.copy_(torch.where(each < 2.0, each, 2.0).flatten(1))  # as fmin
        has = target >= 0
        at_target[has] = d.flatten(1)[has, target[has].long()]
        if self.wrong == "target":
            at_target += 1e-4

    def apply_entropy(self, e: Tensor, at_one: Tensor, slope: Tensor, tile: int) -> None:
        self.factored = True
        assert all(t.is_contiguous() for t in (e, at_one, slope))
        assert at_one.dtype == slope.dtype == torch.float32
        each = e.float().unflatten(1, (-1, tile))
        factor = at_one[..., None] + slope[..., None] * each.clamp(min=2.0**-126).log2()
        e.copy_((each * factor).flatten(1) * (1.02 if self.wrong == "entropy" else 1))

    def _scaled(self, e: Tensor, scale: Tensor | None) -> Tensor:
        assert (scale is not None) == (self.hopper and not self.factored)
        if scale is None:
            return e
        assert scale.is_contiguous()
        assert (scale.shape, scale.dtype) == ((e.shape[1] // 64, len(e)), torch.bfloat16)
        return e * scale.T.repeat_interleave(64, 1)  # rounded to bf16

    def to_hidden(self, e: Tensor, scale: Tensor | None, weight: Tensor, v: Tensor, out: Tensor) -> None:
        self.calls["to_hidden"] += 1
        assert all(t.is_contiguous() for t in (e, v, out))
        out.copy_((self._scaled(e, scale).float() @ weight.float()) * v[:, None])

    def to_weight(self, e: Tensor, scale: Tensor | None, x: Tensor, out: Tensor, add: bool) -> None:
        self.calls["to_weight"] += 1
        assert all(t.is_contiguous() for t in (e, x, out))
        product = self._scaled(e, scale).float().T @ x.float()
        out.copy_(out + product if add and self.wrong != "add" else product)


def install(monkeypatch: pytest.MonkeyPatch, products: Rounded, *, checked: bool = False) -> Rounded:
    """The cute backend chosen for CPU tensors, on ``products``; what they do not take runs on the CPU's row kernels.
    ``checked``: past the check at first use."""
    if DEVICE.type == "cuda":
        pytest.skip("the kernels' place is taken on the CPU")
    monkeypatch.setattr(cute, "kernels", lambda: products)
    monkeypatch.setattr(cute, "portable", lambda: cpu if dispatch.load_library("cpu") else reference)
    every = itertools.product([torch.device("cpu")], TILES, (False, True)) if checked else ()
    monkeypatch.setattr(cute, "_checked", dict.fromkeys(every))
    monkeypatch.setattr(dispatch, "_package_unusable", lambda name, device: None)
    monkeypatch.setitem(dispatch._PREFERENCE, "cpu", ("cute", "cpu", "reference"))  # type: ignore[index]
    dispatch.log_once.cache_clear()
    return products


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> Rounded:
    return install(monkeypatch, Rounded(), checked=True)


def chunks_of(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (plan, chunked):
        monkeypatch.setattr(module, "chunk_rows", lambda N, V, device: size)


def usual(fields: PolicyFields, objective: Objective, normalizer: float, **given: Any) -> PolicyLossOutput:
    """Plain PyTorch: logits in the dtype of the inputs, the rest left to autograd."""
    row = given.get("row")
    out = plain(**given)
    assert out.entropy is not None
    entropy = out.entropy if row is None else out.entropy[row]
    with dispatch.use_backend("reference"):
        return policy_loss(out.logprob, fields, objective, normalizer=normalizer, entropy=entropy)


def compare(
    given: Inputs, fields: PolicyFields, objective: Objective, trained: tuple[str, ...], floor: float = 1e-6
) -> None:
    """Loss and gradients err at most twice as plain PyTorch's in bf16, all against fp64; where bf16 logits flip what is
    clipped, which is much, no more than a bf16 product's."""
    wide = cast(fields, torch.float64, "token_mean")
    narrow = cast(fields, torch.float32, "token_mean")
    with dispatch.use_backend("reference"):
        exact = run(composed, widened(given), wide, objective, trained)
    theirs = run(usual, given, narrow, objective, trained)
    got = run(fused, given, narrow, objective, trained)
    for name in ("loss", *(f"d_{leaf}" for leaf in trained)):
        want = exact[name].double()
        error, allowed = ((r[name].double() - want).norm() for r in (got, theirs))
        most = max(min(2 * allowed, PRODUCT * want.norm()), floor * want.norm())
        assert error <= most, (name, error / want.norm(), allowed / want.norm())
    for name in ("actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        mine, want = (torch.stack(r["metrics"][name]).double() for r in (got, exact))
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-6)


ONE_PASS = {o.encoded: name for name, o in PRESETS.items() if o.scope != "batch" and not o.needs_entropy}
"""Names of all objectives but those that are composed, or fall back."""


WITH_ENTROPY = [(name, 0.2) for name in ("dapo", "cispo", "gspo", "reinforce")]


@pytest.mark.parametrize(
    ("name", "entropy_coef"), [*((name, 0.0) for name in sorted(ONE_PASS.values())), *WITH_ENTROPY]
)
def test_every_objective_errs_at_most_twice_as_plain_pytorch(
    name: str, entropy_coef: float, rounded: Rounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, fields = batch(dtype=torch.bfloat16, V=VOCABULARY, temperature="rows")
    share = torch.linspace(0, 1, sum(LENGTHS), dtype=torch.float64)
    needed = {"token_weight": share, "clip_low": 0.6 + 0.3 * share, "clip_high": 1.1 + 0.3 * share}
    chunks_of(monkeypatch, 10)
    objective = Objective.preset(name, kl_coef=0.3, entropy_coef=entropy_coef)
    fields = replace(fields, **{n: needed[n] for n in objective.needs})
    compare(given, fields, objective, ("hidden", "weight"))
    assert rounded.calls["to_weight"] >= 4
    assert rounded.factored == (entropy_coef > 0)


@pytest.mark.parametrize(("name", "chunk", "frozen"), [
    (name, chunk, frozen) for name in TREE_OBJECTIVES
    for chunk, frozen in ((3, False), (8, True), (1000, False))
])  # fmt: skip
def test_trees(name: str, chunk: int, frozen: bool, rounded: Rounded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with several targets, rows without one, rows on paths of several chunks."""
    given, fields = batch("tree", dtype=torch.bfloat16, V=VOCABULARY)
    chunks_of(monkeypatch, chunk)
    compare(given, fields, TREE_OBJECTIVES[name], ("hidden",) if frozen else ("hidden", "weight"))
    assert rounded.calls["to_hidden"] > 0
    assert (rounded.calls["to_weight"] == 0) == frozen


@pytest.mark.parametrize("shape", ["flat", "tree"])
def test_exponentials_scaled_before_their_products_give_the_same_bits(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sure rows, whose tiles lie far apart, and rows that take no part."""
    given, fields = batch(shape, dtype=torch.bfloat16, V=VOCABULARY)
    given["hidden"] = given["hidden"] * torch.linspace(0, 60, len(given["hidden"]))[:, None].bfloat16()
    narrow = cast(fields, torch.float32, "token_mean")
    chunks_of(monkeypatch, 10)
    found = []
    for hopper in (True, False):
        install(monkeypatch, Rounded(hopper=hopper), checked=True)
        found.append(run(fused, given, narrow, Objective.preset("reinforce"), ("hidden", "weight")))
    for name in ("loss", "d_hidden", "d_weight"):
        assert found[0][name].isfinite().all()
        assert torch.equal(found[0][name], found[1][name])
    assert found[0]["d_weight"].any()


@pytest.mark.parametrize("tree", ["groups", "deep"])
def test_aligned_to_leaves(tree: str, rounded: Rounded, monkeypatch: pytest.MonkeyPatch) -> None:
    given, fields = forest(TREES[tree], V=VOCABULARY)
    given = {n: t.bfloat16() if t.is_floating_point() else t for n, t in given.items()}
    chunks_of(monkeypatch, 7)
    compare(given, fields, Objective(ratio_level="sequence", eps_low=0.05, eps_high=0.05), ("hidden", "weight"))
    assert rounded.calls["to_weight"] > 1


def exact_and_found(given: Inputs, *want: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of every output: fp64's, ours, and what fp32 logits of plain PyTorch give."""
    theirs = plain(**{n: t.float() if t.is_floating_point() else t for n, t in given.items()})
    exact, got = plain(**widened(given)), linear_logprob(**given, want=want)
    return [tuple(getattr(o, n) for o in (exact, got, theirs)) for n in ("logprob", "logsumexp", *want)]  # type: ignore[misc]


@pytest.mark.parametrize("V", [384, 256, 128, 4224])
@pytest.mark.parametrize("M", [None, 60])
def test_scores_are_those_of_fp32_logits(
    V: int, M: int | None, rounded: Rounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks_of(monkeypatch, 16)
    given = inputs(23, 24, V, M=M, dtype=torch.bfloat16, temperature="rows")
    for exact, got, theirs in exact_and_found(given, "entropy"):
        assert got.dtype == torch.float32
        allowed = 2 * (theirs.double() - exact).abs().max() + 1e-6 * exact.abs().max()
        assert (got.double() - exact).abs().max() <= allowed
    assert rounded.calls == {"exponentials": 2, "to_hidden": 0, "to_weight": 0}
    assert set(rounded.rows) == {128}


@pytest.mark.parametrize("row", [None, [0, 0, 2, 2, 2]], ids=["a target a row", "several"])
def test_targets_out_of_range_score_nan(row: list[int] | None, rounded: Rounded) -> None:
    """As on a GPU, where looking for them would make the host wait."""
    given = inputs(5, WIDTH, VOCABULARY, dtype=torch.bfloat16)
    target = torch.tensor([3, -100, VOCABULARY, 7, 2**40])
    targets = group_by_row(target, None if row is None else torch.tensor(row), 5)
    head = Head(given["weight"], None, None, torch.float32)
    logprob, logsumexp, *_ = cute.forward(given["hidden"], head, targets, torch.ones(5), 0.0, True, False, False)
    assert logprob.isnan().tolist() == [False, True, True, False, True]
    assert logsumexp.isfinite().all()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 30.0, 3e3])
def test_extreme_logits(scale: float, rounded: Rounded) -> None:
    """Uniform rows, and rows so sure that exponentials of other tiles and of the target leave fp32's range."""
    given, fields = batch(dtype=torch.bfloat16, V=VOCABULARY)
    given["hidden"] = given["hidden"] * scale
    largest = (given["hidden"].double() @ given["weight"].double().T).abs().max()
    for exact, got, theirs in exact_and_found(given, "entropy"):
        allowed = 2 * (theirs.double() - exact).abs().max() + torch.finfo(torch.float32).eps * largest.clamp(min=8)
        assert (got.double() - exact).abs().max() <= allowed
    bf16 = torch.finfo(torch.bfloat16).eps  # alike rows are rounded alike, here or there
    for objective in (Objective.preset("reinforce"), Objective.preset("reinforce", entropy_coef=0.2)):
        compare(given, fields, objective, ("hidden", "weight"), floor=bf16)


def test_sure_tokens_have_gradients_as_precise_as_others() -> None:
    """Relative to 1 - p, which is 4e-4 here: bf16 holds the difference, not its two terms."""
    twin, V = Rounded(), 384
    weight = torch.zeros(V, 8).bfloat16()
    weight[5] = 2.0
    weight[9] = 1.0
    both = Exponentials(twin, weight, 3, store=True)
    x = torch.ones(3, 8).bfloat16()
    logprob = both.form(x, torch.ones(3), torch.tensor([5, 9, 5])).logprob
    both.gradient(torch.tensor([1.0, -2.0, 0.0]))
    d_hidden = torch.empty_like(x)
    both.to_hidden(d_hidden)
    p = (weight.double() @ torch.ones(8, dtype=torch.float64)).softmax(0)
    torch.testing.assert_close(logprob.double(), p[[5, 9, 5]].log(), rtol=1e-3, atol=0)
    expected = torch.stack([weight[5].double() - p @ weight.double(), -2 * (weight[9].double() - p @ weight.double())])
    torch.testing.assert_close(d_hidden[:2].double(), expected, rtol=1e-2, atol=0)
    assert not d_hidden[2].any()

    both.form(x, torch.ones(3), torch.tensor([5, 5, 5]))
    both.gradient(torch.zeros(3), torch.tensor([1.0, 0.0, -2.0]))
    both.to_hidden(d_hidden)
    of_entropy = -(p * (p.log() - (p * p.log()).sum())) @ weight.double()
    expected = torch.stack([of_entropy, 0 * of_entropy, -2 * of_entropy])
    torch.testing.assert_close(d_hidden.double(), expected, rtol=1e-2, atol=0)


@needs_interpreter
@pytest.mark.parametrize(("V", "tile"), [(5 * 384, 192), (256, 256), (17 * 128, 128)])
def test_the_factor_of_an_entropy_in_triton_is_the_twins(V: int, tile: int) -> None:
    """In place, up to the last column; where an exponential is 0 the gradient is."""
    generator = torch.Generator().manual_seed(3)
    e = (torch.rand(3, V, generator=generator) * 1.4).bfloat16()
    e[:, ::7] = torch.tensor([0.0, 2.0**-126, 2.0**-60]).bfloat16()[:, None]
    at_one, slope = torch.randn(2, 3, V // tile, generator=generator)
    at_one[1], slope[1] = 0, 0
    expected = e.clone()
    Rounded().apply_entropy(expected, at_one, slope, tile)
    entropy_factor.apply_entropy(e, at_one, slope, tile)
    torch.testing.assert_close(e, expected, rtol=2**-7, atol=2**-20)
    assert not e[0, ::7].any()
    assert not e[1].any()


@pytest.mark.parametrize("entropy_coef", [0.0, 0.2])
def test_rows_without_gradient_take_no_part_whatever_they_hold(entropy_coef: float, rounded: Rounded) -> None:
    given, fields = batch(dtype=torch.bfloat16, V=VOCABULARY)
    off = torch.zeros(len(given["hidden"]), dtype=torch.bool)
    off[[2, 7, 20]] = True
    fields = replace(fields, mask=~off)
    objective = Objective.preset("on_policy_pg", entropy_coef=entropy_coef)
    narrow = cast(fields, torch.float32, "token_mean")
    spoiled = dict(given, hidden=given["hidden"].clone(), target=given["target"].clone())
    for row, value in ((2, torch.nan), (7, torch.inf), (20, 3e38)):
        spoiled["hidden"][row] = value
    everything = plan.plan_everything(len(off), VOCABULARY, WIDTH, torch.device("cpu"), False, [])
    runs = [run(fused, x | {"plan": everything}, narrow, objective, ("hidden", "weight")) for x in (given, spoiled)]
    assert torch.equal(runs[0]["d_weight"], runs[1]["d_weight"])
    assert torch.equal(runs[0]["d_hidden"], runs[1]["d_hidden"])
    assert not runs[0]["d_hidden"][off].any()
    assert rounded.calls["to_weight"] == 2


@pytest.mark.parametrize(("N", "M", "chunk"), [(23, None, 16), (23, 60, 16), (256, None, 128)])
def test_a_frozen_head(N: int, M: int | None, chunk: int, rounded: Rounded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The direction of hidden's gradient is made in the forward; rows without a target have one too."""
    chunks_of(monkeypatch, chunk)
    given = inputs(N, 24, VOCABULARY, M=M, dtype=torch.bfloat16)
    upstream = torch.randn(M or N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for of, f in ((widened(given), plain), (given, plain), (given, linear_logprob)):
        hidden = of["hidden"].clone().requires_grad_()
        out = f(**of | {"hidden": hidden})
        loss = (out.logprob.double() * upstream).sum() + 0.3 * out.logsumexp.double().sum()
        found.append(torch.autograd.grad(loss, hidden)[0].double())
    exact, theirs, got = found
    assert (got - exact).norm() <= max(2 * (theirs - exact).norm(), 4e-3 * exact.norm())
    assert rounded.calls == {"exponentials": 2, "to_hidden": 2, "to_weight": 0}


def test_what_the_kernels_do_not_take_runs_on_triton_and_is_said(
    rounded: Rounded, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = HeadLora(torch.zeros(2, WIDTH).bfloat16(), torch.zeros(VOCABULARY, 2).bfloat16(), 1.0)
    half = {"dtype": torch.bfloat16}
    for case, said in (
        (inputs(5, WIDTH, VOCABULARY), "not torch.float32"),
        (inputs(5, WIDTH, VOCABULARY, bias=True, **half), "do not take a bias"),
        (inputs(5, WIDTH, VOCABULARY, softcap=3.0, **half), "do not take a softcap"),
        (inputs(5, WIDTH, VOCABULARY, lora=adapter, **half), "do not take an adapter"),
        (inputs(5, WIDTH, 50257, **half), "a multiple of 128, not 50257: pad the head's weight"),
        (inputs(5, WIDTH, 151669, **half), "a multiple of 128, not 151669: pad the head's weight"),
        (inputs(5, 20, VOCABULARY, **half), "a width that is a multiple of 8, not 20"),
        (inputs(5, 136, 128, **half), "no wider than hidden are kept"),
        (inputs(5, WIDTH, VOCABULARY, want=("sum_p2",), **half), "the sum of squared probabilities"),
    ):
        before = len(caplog.records)
        for _ in range(2):
            linear_logprob(**case)
        (record,) = caplog.records[before:]
        assert record.message.startswith("linear_logprob runs on 'triton' instead of 'cute': ")
        assert said in record.message
    given, fields = batch(dtype=torch.bfloat16, V=50257)
    narrow = cast(fields, torch.float32, "token_mean")
    before = len(caplog.records)
    for _ in range(2):
        assert run(fused, given, narrow, Objective(), ("hidden", "weight"))["d_weight"].any()
    assert [r.message for r in caplog.records[before:]] == [
        "linear_policy_loss runs on 'triton' instead of 'cute': its kernels take a vocabulary that is a multiple of "
        "128, not 50257: pad the head's weight."
    ]
    assert rounded.calls["exponentials"] == 0
    refused = pytest.raises(dispatch.BackendError, match="'cute' cannot run linear_logprob: its kernels take bfloat16")
    with refused, dispatch.use_backend("cute"):
        linear_logprob(**inputs(5, WIDTH, VOCABULARY))


def test_why_it_cannot_run_here() -> None:
    given, fields = batch(dtype=torch.bfloat16, V=VOCABULARY)
    for step in (
        lambda: linear_logprob(**inputs(2, WIDTH, VOCABULARY, dtype=torch.bfloat16)),
        lambda: fused(cast(fields, torch.float32, "token_mean"), Objective(), 7.0, **given),
    ):
        refused = pytest.raises(
            dispatch.BackendError, match="'cute' cannot run linear_logprob on a cpu tensor: it needs"
        )
        with refused, dispatch.use_backend("cute"):
            step()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("target", "its logprob is off by"),
        ("add", "its d_weight is off by"),
        ("raises", "(RuntimeError: no such kernel), and quack-kernels is 0.7, not 0.6.5"),
        ("is another version", "(ImportError: no such name), and quack-kernels is 0.7, not 0.6.5"),
    ],
)
def test_kernels_that_disagree_are_not_used(
    wrong: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    products = install(monkeypatch, Rounded(wrong))
    monkeypatch.setattr(dispatch.importlib.metadata, "version", lambda name: "0.7")
    if wrong == "is another version":

        def fail() -> None:
            raise ImportError("no such name")

        monkeypatch.setattr(cute, "kernels", fail)
    given, fields = batch(dtype=torch.bfloat16, V=VOCABULARY)
    narrow = cast(fields, torch.float32, "token_mean")
    step = (given, narrow, Objective.preset("dapo"), ("hidden", "weight"))
    got, calls = run(fused, *step), dict(products.calls)
    linear_logprob(**given)
    assert products.calls == calls  # never again
    assert [r.message.split(": ")[0] for r in caplog.records] == [
        "linear_policy_loss runs on 'triton' instead of 'cute'",
        "linear_logprob runs on 'triton' instead of 'cute'",
    ]
    assert all(said in r.message for r in caplog.records)
    with dispatch.use_backend("cpu" if dispatch.load_library("cpu") else "reference"):
        assert torch.equal(run(fused, *step)["d_weight"], got["d_weight"])


def test_gradients_of_entropies_have_a_check_of_their_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    products = install(monkeypatch, Rounded("entropy"))
    given, fields = batch(dtype=torch.bfloat16, V=VOCABULARY)
    narrow = cast(fields, torch.float32, "token_mean")
    for entropy_coef in (0.2, 0.0):
        run(fused, given, narrow, Objective.preset("dapo", entropy_coef=entropy_coef), ("hidden", "weight"))
    other, own = (r.message for r in caplog.records)
    assert other.startswith("linear_policy_loss runs on 'triton' instead of 'cute': its d_hidden is off by 0.0")
    assert own == "linear_policy_loss runs on quack's GEMMs."
    assert products.calls["to_weight"] == 2 + 2 + 1  # of a check two


def test_kernels_that_agree_are_used_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    products = install(monkeypatch, Rounded())
    given, fields = batch(dtype=torch.bfloat16, V=VOCABULARY)
    narrow = cast(fields, torch.float32, "token_mean")
    for _ in range(2):
        run(fused, given, narrow, Objective.preset("dapo"), ("hidden", "weight"))
    assert products.calls == {
        "exponentials": 2 + 2,
        "to_hidden": 2 + 2,
        "to_weight": 2 + 2,
    }  # the check takes two chunks
    assert [r.message for r in caplog.records] == ["linear_policy_loss runs on quack's GEMMs."]


def test_the_plan_knows_them(rounded: Rounded, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is multiplied is what is; other objectives and sizes are not expected to run on them."""
    chunks_of(monkeypatch, 8)
    given, fields = batch("tree", dtype=torch.bfloat16, V=VOCABULARY)
    narrow, sizes = cast(fields, torch.float32, "token_mean"), {"num_rows": 12, "hidden_size": WIDTH, "device": "cpu"}

    def of(objective: Objective, vocabulary: int = VOCABULARY, **options: Any) -> plan.HeadPlan:
        return plan.plan_policy_loss(
            narrow, objective, vocabulary=vocabulary, row=given["row"], **sizes | options
        )  # fmt: skip

    made = of(Objective())
    assert made.exponentials
    assert "bf16 exponentials (backend cute), 247 rows for further targets and to full tiles" in made.explain()
    run(fused, given | {"plan": made}, narrow, Objective(), ("hidden", "weight"))
    assert sum(rounded.rows) == made.row_cuts[-1] + made.padding() == 256
    assert made.flop() == 6 * 256 * VOCABULARY * WIDTH
    assert made.traffic() == 2 * 256 * VOCABULARY + 8 * VOCABULARY * WIDTH * 2
    assert made.memory(2) == 2 * 128 * VOCABULARY + 2 * WIDTH * len(made.row)
    monkeypatch.setattr(plan, "rescaled", lambda device: True)  # as on Blackwell
    blackwell = of(Objective())
    assert "(backend cute), scaled in a pass of their own, 247 rows" in blackwell.explain()
    assert blackwell.traffic() - made.traffic() == 4 * 256 * VOCABULARY
    assert of(Objective(), gradient=False).traffic() == 0
    monkeypatch.setattr(plan, "rescaled", lambda device: False)
    assert of(Objective(), frozen=True).flop() == 4 * 256 * VOCABULARY * WIDTH
    scored = of(Objective(), gradient=False)
    assert (scored.exponentials, scored.traffic()) == (True, 0)
    with_entropy = of(Objective(entropy_coef=0.1))
    assert "(backend cute), scaled in a pass of their own, 247 rows" in with_entropy.explain()
    assert with_entropy.traffic() == blackwell.traffic()
    others = [of(Objective(), vocabulary=200), of(Objective(), hidden_size=20)]
    with dispatch.use_backend("reference"):
        others.append(of(Objective()))
    assert [other.exponentials for other in others] == [False] * 3
    assert all("tiles of fp32 logits" in other.explain() for other in others)
    assert all(other.padding() == 0 for other in others)


@pytest.mark.parametrize(("V", "tile"), [(384, 192), (256, 256), (128, 128)])
def test_every_tile_is_checked_before_its_first_result(V: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    products = install(monkeypatch, Rounded())
    linear_logprob(**inputs(5, WIDTH, V, dtype=torch.bfloat16))
    assert products.tiles == [tile] * 3
    assert cute._checked == {(torch.device("cpu"), tile, False): None}


def test_tiles() -> None:
    of = {V: tile_of(V) for V in (49152, 131072, 151936, 128256, 32000, 50257, 128)}
    assert of == {49152: 192, 131072: 256, 151936: 128, 128256: 192, 32000: 256, 50257: None, 128: 128}
    assert all(tile % exponentials.BLOCK == 0 for tile in TILES)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [49152, 32000, 896])
def test_the_kernels_err_at_most_twice_as_plain_pytorch(V: int) -> None:
    if reason := dispatch._unusable("cute", torch.device("cuda")):
        pytest.skip(reason)
    given, fields = batch(dtype=torch.bfloat16, V=V, temperature="rows")
    with dispatch.use_backend("cute"):
        for name in ("dapo", "gspo"):
            compare(given, fields, Objective.preset(name), ("hidden", "weight"))
        for exact, got, theirs in exact_and_found(inputs(300, 24, V, M=400, dtype=torch.bfloat16), "entropy"):
            allowed = 2 * (theirs.double() - exact).abs().max() + 1e-6 * exact.abs().max()
            assert (got.double() - exact).abs().max() <= allowed


def test_the_forward_adds_to_an_accumulator(rounded: Rounded, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(monkeypatch, 10)
    given, fields = batch(V=VOCABULARY, dtype=torch.bfloat16)
    fields = cast(fields, torch.float32, "token_mean")
    sums = []
    for in_forward in (False, True):
        leaves = {k: given[k].detach().clone().requires_grad_() for k in ("hidden", "weight")}
        accumulator = torch.ones(leaves["weight"].shape)
        of_sums = {"weight_grad": accumulator, "in_forward": in_forward}
        fused(fields, Objective.preset("dapo"), 7.0, **given | leaves | of_sums).loss.backward()
        assert leaves["weight"].grad is None
        assert leaves["hidden"].grad is not None
        sums.append((accumulator - 1, leaves["hidden"].grad.float()))
    assert rounded.calls["to_weight"] == 2 * 2  # chunks
    for apart, together in zip(*sums, strict=True):
        assert (apart - together).norm() <= 2**-7 * apart.norm()  # both rounded to bf16, one of them twice
