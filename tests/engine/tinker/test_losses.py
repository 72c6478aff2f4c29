"""Every loss against its formula in NumPy and a plain forward of Transformers, alone and in a batch with others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from .served import Adapters, Array, Datum, Lora, NativeEngine, adapted, datum

from rolltree.engine.tinker.compute import differentiate, score, shares  # isort: skip
from rolltree.engine.tinker.faults import FaultError  # isort: skip
from rolltree.engine.tinker.losses import loss_of  # isort: skip
from rolltree.engine.tinker.wire import Batch  # isort: skip

VOCABULARY = 257
RNG = np.random.default_rng(0)
PROMPT = RNG.integers(0, VOCABULARY, 9).tolist()
Formula = Callable[[Array, Mapping[str, Array], Mapping[str, float]], float]


def ratio(lp: Array, d: Mapping[str, Array]) -> Array:
    return np.exp(lp - d["logprobs"])


def clipped(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> Array:
    return np.clip(ratio(lp, d), c["clip_low_threshold"], c["clip_high_threshold"])


def cross_entropy(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> float:
    return -(lp * d["weights"]).sum()


def importance_sampling(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> float:
    return -(ratio(lp, d) * d["advantages"]).sum()


def ppo(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> float:
    return -np.minimum(ratio(lp, d) * d["advantages"], clipped(lp, d, c) * d["advantages"]).sum()


def dro(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> float:
    return -(lp * d["advantages"] - 0.5 * c["beta"] * (lp - d["logprobs"]) ** 2).sum()


def cispo_at(held: Array) -> Formula:
    """CISPO with the clipped ratio of the log-probs ``held``, which takes no derivative."""
    return lambda lp, d, c: -(clipped(held, d, c) * lp * d["advantages"]).sum()


def gspo_at(held: Array) -> Formula:
    """GSPO with the sequence ratio of ``held``, and each token's own derivative."""

    def loss(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> float:
        mean = (held - d["logprobs"])[d["sequence_ratio_mask"] != 0].mean()
        r = np.exp(mean + lp - held)
        bounded = np.clip(r, c["clip_low_threshold"], c["clip_high_threshold"])
        return -np.minimum(r * d["advantages"], bounded * d["advantages"]).sum()

    return loss


FORMULAS: dict[str, tuple[Any, dict[str, float]]] = {
    "cross_entropy": (cross_entropy, {}),
    "soft": (cross_entropy, {}),
    "importance_sampling": (importance_sampling, {}),
    "ppo": (ppo, {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
    "cispo": (cispo_at, {"clip_low_threshold": 0.6, "clip_high_threshold": 1.4}),
    "dro": (dro, {"beta": 0.3}),
    "gspo": (gspo_at, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
}


@pytest.fixture(scope="module")
def trained() -> tuple[NativeEngine, Adapters, str]:
    return adapted()


def plain_logprobs(engine: NativeEngine, one: Datum) -> torch.Tensor:
    """The log-probs of a datum's targets by the module's own forward."""
    logits = engine.model(torch.from_numpy(one.tokens).long()[None], use_cache=False).logits[0].float()
    target = torch.from_numpy(one.target)
    return logits.log_softmax(-1).gather(1, target.view(len(one.tokens), -1)).view(target.shape)


def data(kind: str, engine: NativeEngine, count: int, shared: bool) -> list[Datum]:
    """Data of a loss, whose ratios lie on both sides of the bounds."""
    found = []
    for i in range(count):
        head = PROMPT if shared else RNG.integers(0, VOCABULARY, 5 + i).tolist()
        tokens = head + RNG.integers(0, VOCABULARY, 4 + i % 3).tolist()
        n = len(tokens)
        if kind == "soft":
            target = RNG.integers(0, VOCABULARY, (n, 3))
            found.append(datum(tokens, target, weights=RNG.normal(size=(n, 3)).astype(np.float32)))
            continue
        target = np.append(tokens[1:], RNG.integers(0, VOCABULARY)).astype(np.int64)
        if kind == "cross_entropy":
            weights = np.where(np.arange(n) < len(head) - 1, 0, RNG.normal(size=n)).astype(np.float32)
            found.append(datum(tokens, target, weights=weights))
            continue
        one = datum(tokens, target)
        with torch.no_grad():
            logprobs = plain_logprobs(engine, one).numpy() + RNG.normal(scale=0.4, size=n).astype(np.float32)
        answer = np.arange(n) >= len(head) - 1
        inputs = {"logprobs": np.where(answer, logprobs, 0), "advantages": np.where(answer, RNG.normal(size=n), 0)}
        if kind == "gspo":
            inputs |= {"sequence_ratio_mask": answer, "advantages": RNG.normal(size=n)}
        found.append(datum(tokens, target, **{k: v.astype(np.float32) for k, v in inputs.items()}))
    return found


def computed(
    trained: tuple[NativeEngine, Adapters, str], name: str, config: Mapping[str, float], some: list[Datum], rows: int
) -> tuple[float, list[Array], list[torch.Tensor]]:
    """Loss, log-probs and gradients as a request has them."""
    engine, adapters, adapter = trained
    loss = loss_of(Batch("m", 1, name, config, some, False, False), {})
    total, logprobs, sums = 0.0, [np.zeros(0)] * len(some), None
    for part in shares(some, rows):
        with adapters.training(adapter) as parameters:
            found, gradients = differentiate(engine.model, part, loss, some, parameters)
            again = score(engine.model, part, loss, some)
        assert again.loss == pytest.approx(found.loss, rel=1e-5, abs=1e-5)
        total += found.loss
        for i, values, others in zip(part.data, found.logprobs, again.logprobs, strict=True):
            np.testing.assert_allclose(values, others, atol=1e-5)
            logprobs[i] = values
        sums = gradients if sums is None else [a + b for a, b in zip(sums, gradients, strict=True)]
    assert sums is not None
    return total, logprobs, sums


def expected(
    trained: tuple[NativeEngine, Adapters, str], kind: str, config: Mapping[str, float], one: Datum
) -> tuple[float, Array, list[torch.Tensor]]:
    """The same by NumPy: the derivative by each log-prob is a central difference of the formula in float64."""
    engine, adapters, adapter = trained
    formula = FORMULAS[kind][0]
    with adapters.training(adapter) as parameters:
        logprob = plain_logprobs(engine, one)
        lp = logprob.detach().double().numpy()
        if formula in (cispo_at, gspo_at):
            formula = formula(lp)
        slope, step = np.zeros_like(lp), 1e-6
        for place in np.ndindex(lp.shape):
            moved = np.zeros_like(lp)
            moved[place] = step
            slope[place] = (formula(lp + moved, one.inputs, config) - formula(lp - moved, one.inputs, config)) / (
                2 * step
            )
        gradients = torch.autograd.grad((logprob * torch.from_numpy(slope)).sum(), parameters, allow_unused=True)
    zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return formula(lp, one.inputs, config), lp, zeros


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> None:
    """Compare gradients by the largest difference over the largest value."""
    scale = max(float(t.abs().max()) for t in theirs)
    assert scale > 0
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < tolerance * scale


@pytest.mark.slow(but=9)
@pytest.mark.check(but=7)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "flat"])
@pytest.mark.parametrize("kind", FORMULAS)
def test_a_loss_is_its_formula_alone_and_beside_others(
    trained: tuple[NativeEngine, Adapters, str], kind: str, shared: bool
) -> None:
    name, config = "cross_entropy" if kind == "soft" else kind, FORMULAS[kind][1]
    some = data(kind, trained[0], 4, shared)
    judged = [expected(trained, kind, config, one) for one in some]
    alone = [computed(trained, name, config, [one], 8192) for one in some]
    for (loss, (logprob,), gradients), (value, lp, slopes) in zip(alone, judged, strict=True):
        assert loss == pytest.approx(value, rel=1e-5, abs=1e-5)
        np.testing.assert_allclose(logprob, lp, atol=1e-5)
        close(gradients, slopes, 1e-4)
    for rows in (8192, 14):  # 14: some data in a micro-batch of their own
        total, logprobs, together = computed(trained, name, config, some, rows)
        assert total == pytest.approx(sum(loss for loss, _, _ in alone), rel=1e-5, abs=1e-5)
        for ours, (_, (theirs,), _) in zip(logprobs, alone, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        close(together, [sum(g) for g in zip(*(g for _, _, g in alone), strict=True)], 1e-5)


def test_equal_prefixes_are_computed_once(trained: tuple[NativeEngine, Adapters, str]) -> None:
    some = data("cross_entropy", trained[0], 4, shared=True)
    (part,) = shares(some)
    assert part.batch.num_tokens == len(PROMPT) + sum(len(one.tokens) - len(PROMPT) for one in some)
    assert part.batch.num_tokens < sum(len(one.tokens) for one in some)


@pytest.mark.parametrize(
    ("name", "config", "change", "said"),
    [
        ("ppo", {"clip": 1.0}, {}, "has 'clip', and ppo has these keys: clip_low_threshold, clip_high_threshold"),
        ("ppo", {"clip_low_threshold": 2.0}, {}, "bounds 2.0 and 1.2"),
        ("ppo", {"clip_low_threshold": "a"}, {}, "give a finite number"),
        ("dro", {}, {}, r"dro needs loss_fn_config\['beta'\]"),
        ("dro", {"beta": -1.0}, {}, "give 0 or more"),
        ("stable_reinforce", {}, {}, "its formula is not published"),
        ("magic", {}, {}, "There is no loss_fn 'magic'; there are cross_entropy"),
        ("custom", {"loss_id": "x"}, {}, "needs loss_fn_config with the loss_id"),
        ("ppo", {}, {"advantages": None}, "has no 'advantages', which ppo needs"),
        ("ppo", {}, {"mask": np.zeros(4, np.float32)}, "has 'mask', which ppo does not read"),
        ("ppo", {}, {"advantages": np.zeros(3, np.float32)}, r"shape \[3\]; give one number for each target, \[4\]"),
        ("ppo", {}, {"target_tokens": np.zeros((4, 2), np.int64)}, "several ids a position"),
        ("gspo", {}, {"sequence_ratio_mask": np.zeros(4, np.float32)}, "marks no token"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    name: str, config: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    inputs = {"target_tokens": np.zeros(4, np.int64), "logprobs": np.zeros(4, np.float32)}
    inputs |= {"advantages": np.ones(4, np.float32)} | change
    one = Datum(np.zeros(4, np.int32), {key: value for key, value in inputs.items() if value is not None})
    with pytest.raises(FaultError, match=said):
        loss_of(Batch("m", 1, name, config, [one], False, False), {})


def test_bounds_of_tokens_take_the_place_of_the_request_s(trained: tuple[NativeEngine, Adapters, str]) -> None:
    (one,) = data("ppo", trained[0], 1, shared=False)
    n = len(one.tokens)
    own = {"clip_low_threshold": np.full(n, 0.5, np.float32), "clip_high_threshold": np.full(n, 1.5, np.float32)}
    given = Datum(one.tokens, {**one.inputs, **own})
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    assert computed(trained, "ppo", {}, [given], 64)[0] == computed(trained, "ppo", config, [one], 64)[0]
    assert computed(trained, "ppo", {}, [one], 64)[0] != computed(trained, "ppo", config, [one], 64)[0]


def test_a_loss_that_is_not_finite_is_refused(trained: tuple[NativeEngine, Adapters, str]) -> None:
    one = datum([1, 2], np.array([2, 3]), weights=np.array([3e38, 3e38], np.float32))
    with pytest.raises(FaultError, match="not finite"):
        computed(trained, "cross_entropy", {}, [one], 64)


@pytest.mark.parametrize("part", ["attn", "mlp", "unembed"])
def test_an_adapter_trains_exactly_the_parts_that_were_asked_for(part: str) -> None:
    wanted = {f"train_{name}": name == part for name in ("attn", "mlp", "unembed")}
    engine, adapters, name = adapted(Lora(rank=3, seed=1, **wanted))
    words = {"attn": "self_attn", "mlp": ".mlp.", "unembed": "lm_head"}
    found = adapters.parameters(name)
    assert found
    assert all(words[part] in parameter for parameter in found)
    assert {p.shape[0] for n, p in found.items() if "lora_A" in n} == {3}
    sides = len(found)
    assert sides == {"attn": 2 * 4 * 2, "mlp": 2 * 3 * 2, "unembed": 2}[part]
    with adapters.training(name):
        assert {n for n, p in engine.model.named_parameters() if p.requires_grad} == {
            n for n in dict(engine.model.named_parameters()) if f".{name}." in n
        }


def test_the_seed_decides_the_weights() -> None:
    engine, adapters, name = adapted(Lora(rank=2, seed=5))
    same, other = adapters.create(Lora(rank=2, seed=5)), adapters.create(Lora(rank=2, seed=6))
    first = {n: p.clone() for n, p in adapters.parameters(same).items()}
    again = adapters.parameters(adapters.create(Lora(rank=2, seed=5)))
    assert all(torch.equal(first[n], p) for n, p in again.items())
    drawn = [n for n in first if "lora_A" in n]
    assert not any(torch.equal(first[n], adapters.parameters(other)[n]) for n in drawn)
    assert all(not p.any() for n, p in first.items() if "lora_B" in n)
    assert name != same
    assert engine.model is adapters.model
