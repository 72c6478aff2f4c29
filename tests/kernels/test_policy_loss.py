"""policy_loss: objectives against formulas of their own, backends alike, and what it promises beside the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import Objective, PolicyFields, dispatch, policy_loss, use_backend
from rolltree.kernels.dispatch import Backend
from rolltree.kernels.policy_loss import ALIASES, PRESETS, SUMS, api, elementwise, surrogates
from rolltree.kernels.policy_loss.surrogates import SURROGATES

from ..support.thinned import every, thinned
from .formulas import (
    AGGREGATION,
    BACKENDS,
    DEVICE,
    DIFFER_BY_CONSTANTS,
    FORMULAS,
    NORMALIZER,
    PENALTY,
    STOP_GRADIENT,
    TOKEN_LOSS,
    Tree,
    aggregate,
    batch,
    check,
    flat,
    mean_by,
    sum_by_sequence,
)


@pytest.mark.check(but=29)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_presets(backend: Backend, name: str) -> None:
    objective = Objective.preset(name)
    assert objective.aggregation == AGGREGATION[name]
    assert objective.kl_coef == objective.entropy_coef == 0
    check(backend, objective, TOKEN_LOSS[name])


@pytest.mark.parametrize("kind", NORMALIZER)
@pytest.mark.parametrize("name", ["ppo", "gspo", "sft"])
def test_aggregations(name: str, kind: Any) -> None:
    check("reference", Objective.preset(name, aggregation=kind), TOKEN_LOSS[name])


@pytest.mark.check(but=25)
@pytest.mark.parametrize("estimator", PENALTY)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_kl_and_entropy(name: str, backend: Backend, estimator: Any) -> None:
    objective = Objective.preset(name, kl=estimator, kl_coef=0.3, entropy_coef=0.1)

    def token_loss(b: dict[str, Tensor], lp: Tensor) -> Tensor:
        return TOKEN_LOSS[name](b, lp) + 0.3 * PENALTY[estimator](lp, b["ref"]) - 0.1 * b["entropy"]

    check(backend, objective, token_loss)


@pytest.mark.parametrize("name", ["ppo", "dual_clip", "cispo", "sapo", "reinforce", "on_policy_pg"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_truncated_importance_sampling(backend: Backend, name: str) -> None:
    objective = Objective.preset(name, mismatch="truncate", mismatch_cap=1.3, kl_coef=0.1)

    def token_loss(b: dict[str, Tensor], lp: Tensor) -> Tensor:
        w = (b["old"] - b["behaviour"]).exp().clamp(max=1.3)
        return w * TOKEN_LOSS[name](b, lp) + 0.1 * PENALTY["k3"](lp, b["ref"])

    check(backend, objective, token_loss)


CORRECTED: list[tuple[dict[str, Any], Callable[[dict[str, Tensor]], Tensor]]] = [
    ({"mismatch": "mask", "mismatch_low": 0.6, "mismatch_cap": 1.5},
     lambda b: _outside((b["old"] - b["behaviour"]).exp(), 0.6, 1.5)),
    ({"mismatch": "truncate", "mismatch_level": "sequence", "mismatch_cap": 1.4},
     lambda b: sum_by_sequence(b, b["old"] - b["behaviour"]).exp().clamp(max=1.4)),
    ({"mismatch": "mask", "mismatch_level": "sequence", "mismatch_low": 0.1, "mismatch_cap": 3.0},
     lambda b: _outside(sum_by_sequence(b, b["old"] - b["behaviour"]).exp(), 0.1, 3.0)),
    ({"mismatch": "mask", "mismatch_level": "geometric", "mismatch_low": 0.7, "mismatch_cap": 1.3},
     lambda b: _outside(mean_by(b, "sequence", b["old"] - b["behaviour"]).exp(), 0.7, 1.3)),
]  # fmt: skip


def _outside(w: Tensor, low: float, cap: float) -> Tensor:
    return torch.where((w < low) | (w > cap), 0, w)


@pytest.mark.check(but=25)
@pytest.mark.parametrize("case", range(len(CORRECTED)))
@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo_token", "sft"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mismatch_correction(backend: Backend, name: str, case: int) -> None:
    options, weight = CORRECTED[case]
    objective = Objective.preset(name, **options, kl_coef=0.1)

    def token_loss(b: dict[str, Tensor], lp: Tensor) -> Tensor:
        return weight(b) * TOKEN_LOSS[name](b, lp) + 0.1 * PENALTY["k3"](lp, b["ref"])

    check(backend, objective, token_loss)


@pytest.mark.parametrize("estimator", ["k1", "k3", "low_var+"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kl_by_importance(backend: Backend, estimator: Any) -> None:
    objective = Objective.preset("dapo", kl=estimator, kl_coef=0.3, kl_importance=True)

    def token_loss(b: dict[str, Tensor], lp: Tensor) -> Tensor:
        r = (lp - b["old"]).exp()
        r = r.detach() if estimator.endswith("+") else r
        return TOKEN_LOSS["dapo"](b, lp) + 0.3 * r * PENALTY[estimator](lp, b["ref"])

    check(backend, objective, token_loss)


@pytest.mark.check(but=11)
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("estimator", PENALTY)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kl_of_every_token_of_a_vocabulary(backend: Backend, estimator: Any, importance: bool, on_policy: bool) -> None:
    """With `+` the expected gradient is the KL's, off policy with importance; without `+`, r is differentiated too."""
    exact = torch.float32 if backend == "triton" else torch.float64
    g = torch.Generator().manual_seed(3)
    logits, ref, shift = torch.randn(3, 7, generator=g, dtype=torch.float64).to(DEVICE)
    ref = torch.log_softmax(ref, 0)
    sampler = torch.log_softmax(logits if on_policy else logits + 0.4 * shift, 0)

    def gradient_of(expected: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        x = logits.clone().requires_grad_()
        value = expected(torch.log_softmax(x, 0))
        return value.detach(), torch.autograd.grad(value, x)[0]

    def term(lp: Tensor) -> Tensor:
        none, weight = torch.zeros_like(lp, dtype=exact), sampler.exp().to(exact)
        fields = PolicyFields(none, none, weight, ref_logprob=ref.to(exact), old_logprob=sampler.to(exact))
        objective = Objective(kl=estimator, kl_coef=1.0, kl_importance=importance)
        with use_backend(backend):
            return policy_loss(lp.to(exact), fields, objective, normalizer=1.0).loss.double()

    def wanted(lp: Tensor) -> Tensor:
        penalty = PENALTY[estimator](lp, ref)
        return (lp.exp() * penalty if importance else sampler.exp() * penalty).sum()

    value, gradient = gradient_of(term)
    want, by_definition = gradient_of(wanted)
    if estimator.endswith("+") and (importance or on_policy):
        by_definition = gradient_of(lambda lp: (lp.exp() * (lp - ref)).sum())[1]
    close = {"rtol": 2e-5, "atol": 2e-5} if exact == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(value, want, **close)
    torch.testing.assert_close(gradient, by_definition, **close)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_of_tokens(backend: Backend) -> None:
    for seed in range(2):
        b = batch(torch.float32 if backend == "triton" else torch.float64, seed, spread=0.8)
        g = torch.Generator().manual_seed(seed)
        low, high = (x + 0.3 * torch.rand(26, generator=g).to(b["old"]) for x in (0.5, 1.1))
        A, lp = b["advantage"][b["sequence"]], b["logprob"].clone().requires_grad_()
        r = (lp - b["old"]).exp()
        want = aggregate(b, torch.maximum(-A * r, -A * torch.minimum(torch.maximum(r, low), high)), "token_mean")
        exact = torch.autograd.grad(want, lp)[0]
        with use_backend(backend):
            loss = policy_loss(lp, flat(b, clip_low=low, clip_high=high), Objective(), normalizer=50).loss
        torch.testing.assert_close(loss, want, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(torch.autograd.grad(loss, lp)[0], exact, rtol=2e-5, atol=2e-5)


def test_clip_cov_drops_a_few_tokens_of_high_covariance() -> None:
    options = {"covariance_share": 0.2, "covariance_low": 0.05, "covariance_high": 50.0}
    b = batch(spread=0.05)
    m, A, lp = b["mask"], b["advantage"][b["sequence"]], b["logprob"].requires_grad_()
    cov = ((A - A[m].mean()) * (lp - lp[m].mean())).detach()
    grads = {
        name: torch.autograd.grad(policy_loss(lp, flat(b), objective, normalizer=1.0).loss, lp)[0]
        for name, objective in (("ppo", Objective()), ("clip_cov", Objective.preset("clip_cov", **options)))
    }
    dropped = (grads["clip_cov"] == 0) & (grads["ppo"] != 0)
    assert int(dropped.sum()) == int(0.2 * int(m.sum()))
    assert (cov[dropped] > 0.05).all()
    assert int((m & (cov > 0.05)).sum()) > int(dropped.sum())  # a choice among them
    assert grads["clip_cov"][~dropped].equal(grads["ppo"][~dropped])


def test_advantages_of_tokens_at_the_ratio_of_the_sequence() -> None:
    """gspo_token with an advantage a token: the sequence's ratio, the token's own derivative."""
    b = batch()
    A = torch.randn(26, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(DEVICE)
    lp = b["logprob"].requires_grad_()
    s = (mean_by(b, "sequence", lp - b["old"]).detach() + lp - lp.detach()).exp()
    want = aggregate(b, torch.maximum(-A * s, -A * s.clamp(1 - 3e-4, 1 + 4e-4)), "seq_mean_token_mean")
    fields = PolicyFields.flat(A, old_logprob=b["old"], mask=b["mask"], cu_seqlens=b["cu"])
    loss = policy_loss(lp, fields, Objective.preset("gspo_token"), normalizer=10).loss
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.autograd.grad(loss, lp), torch.autograd.grad(want, lp))


@pytest.mark.parametrize("name", ["ppo", "cispo", "sapo", "gspo"])
def test_without_old_logprob_the_ratio_is_one(name: str) -> None:
    b = batch()
    pair = []
    for old in (None, b["logprob"].clone()):
        lp = b["logprob"].clone().requires_grad_()
        loss = policy_loss(lp, flat(b, old_logprob=old), Objective.preset(name), normalizer=7).loss
        pair.append((loss.detach(), torch.autograd.grad(loss, lp)[0]))
    torch.testing.assert_close(pair[0], pair[1])


@pytest.mark.check(but=2)
@pytest.mark.parametrize(
    "name", thinned([n for n in PRESETS if n not in (*STOP_GRADIENT, *DIFFER_BY_CONSTANTS)], every(3))
)
def test_gradcheck(name: str) -> None:
    """Except where a stop-gradient parts value and derivative; `test_presets` compares the gradients of all with
    autograd's of formulas of their own."""
    b = batch(seed=3)
    objective = Objective.preset(name, kl_coef=0.2, entropy_coef=0.1)

    def f(lp: Tensor, h: Tensor) -> Tensor:
        return policy_loss(lp, flat(b, objective.needs), objective, normalizer=13.0, entropy=h).loss

    assert torch.autograd.gradcheck(f, (b["logprob"].requires_grad_(), b["entropy"].requires_grad_()))


@pytest.mark.slow(but=57)
@pytest.mark.check(but=24)
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_targets_may_hold_anything(backend: Backend, name: str) -> None:
    b = batch(torch.float32)
    options = {} if name == "topr" else {"mismatch": "truncate"}
    objective = Objective.preset(name, kl_coef=0.1, entropy_coef=0.1, **options)
    results: list[Any] = []
    for junk in (0.0, torch.nan, -torch.inf):
        per_token = ["logprob", "old", "ref", "behaviour", "entropy", "teacher", "proximal", "pass_rate"]
        per_token += objective.needs
        c = b | {n: b[n].masked_fill(~b["mask"], junk) for n in per_token}
        lp, h = c["logprob"].requires_grad_(), c["entropy"].requires_grad_()
        with use_backend(backend):
            out = policy_loss(lp, flat(c, objective.needs), objective, normalizer=11.0, entropy=h)
        results.append((out.loss.detach(), *torch.autograd.grad(out.loss, (lp, h)), out.metrics))
    assert all(torch.stack([g[~b["mask"]].abs().max() for r in results for g in r[1:3]]) == 0)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@pytest.mark.slow(but=82)
@pytest.mark.check(but=37)
@pytest.mark.parametrize("normalizer", [0.0, 5.0])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_learn_from_is_a_differentiable_zero(backend: Backend, name: str, normalizer: float) -> None:
    b = batch(torch.float32)
    objective = Objective.preset(name, kl_coef=0.1, off_policy_delta=None)
    masked = flat(b, objective.needs, mask=torch.zeros_like(b["mask"]))
    nothing = torch.zeros(0, device=DEVICE)
    of_targets = ("old", "ref", "behaviour", "teacher", "proximal", "pass_rate", "segment", "mask", *objective.needs)
    cu = torch.zeros(1, dtype=torch.long, device=DEVICE)
    none = flat({**b, **{n: b[n][:0] for n in (*of_targets, "advantage")}, "cu": cu}, objective.needs)
    for logprob, fields in ((b["logprob"], masked), (nothing, none)):
        lp = logprob.clone().requires_grad_()
        with use_backend(backend):
            out = policy_loss(lp, fields, objective, normalizer=normalizer, entropy=logprob.abs())
        out.loss.backward()
        assert out.loss == 0
        assert lp.grad is not None
        assert lp.grad.equal(torch.zeros_like(lp))
        assert all(total == 0 and count == 0 for total, count in out.metrics.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_add_up(backend: Backend) -> None:
    """Elementwise gradients are the same bits however the batch is cut; loss and metrics add up."""
    b = batch(torch.float32, spread=0.8)
    fields, objective = flat(b), Objective.preset("dapo", kl_coef=0.1)
    lp = b["logprob"].requires_grad_()
    with use_backend(backend):
        whole = policy_loss(lp, fields, objective, normalizer=26.0)
        grad = torch.autograd.grad(whole.loss, lp)[0]
        parts = []
        for part in (slice(0, 7), slice(7, 26)):
            cut = {
                n: getattr(fields, n)[part]
                for n in ("adv_pos", "adv_neg", "weight", "mask", "old_logprob", "ref_logprob", "behaviour_logprob")
            }
            parts.append(policy_loss(lp[part], PolicyFields(**cut), objective, normalizer=26.0))
    assert torch.autograd.grad(parts[0].loss + parts[1].loss, lp)[0].equal(grad)
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    for name, (total, count) in whole.metrics.items():
        torch.testing.assert_close(parts[0].metrics[name][0] + parts[1].metrics[name][0], total, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(parts[0].metrics[name][1] + parts[1].metrics[name][1], count)


COMPILED = [
    pytest.param(b, name, marks=pytest.mark.skipif(bool(reason := dispatch._unusable(b, DEVICE)), reason=str(reason)))
    for b in ("triton",)
    for name in PRESETS
]


@pytest.mark.slow(but=18)
@pytest.mark.check(but=6)
@pytest.mark.parametrize(("compiled", "name"), COMPILED)
def test_compiled_equals_reference(compiled: Backend, name: str) -> None:
    """Loss, gradients and every metric, over several blocks."""
    g = torch.Generator().manual_seed(2)
    M = 2500
    columns = [(torch.randn(M, generator=g) * s - 1).to(DEVICE) for s in (0.4, 0.4, 0.4, 0.4, 1.0, 1.0)]
    lp, old, ref, behaviour, entropy, advantage = columns
    behaviour[::7] = torch.nan  # not recorded: weight 1
    options: dict[str, Any] = {} if name == "topr" else {"mismatch": "truncate"}
    if name == "nft":
        options["beta"] = 0.2  # how near 1 - q r may come to 0, which is what amplifies rounding
    if Objective.preset(name).scope == "path":
        advantage = advantage[:50]
    share = torch.rand(M, generator=g).to(DEVICE)
    more = {"token_weight": share, "clip_low": 0.6 + 0.3 * share, "clip_high": 1.1 + 0.3 * share}
    objective = Objective.preset(name, kl_coef=0.1, entropy_coef=0.1, kl="low_var", **options)
    fields = PolicyFields.flat(
        advantage,
        old_logprob=old,
        ref_logprob=ref,
        behaviour_logprob=behaviour,
        teacher_logprob=ref,
        proximal_logprob=old + 0.1 * share,
        **{n: more[n] for n in objective.needs},
        pass_rate=(0.1 + 0.8 * torch.rand(M, generator=g)).to(DEVICE),
        segment=torch.arange(M, device=DEVICE) // 7,
        mask=torch.rand(M, generator=g).to(DEVICE) < 0.9,
        cu_seqlens=torch.arange(51, device=DEVICE) * 50,
    )
    results: list[Any] = []
    backends: tuple[Backend, ...] = ("reference", compiled)
    for backend in backends:
        x, h = lp.clone().requires_grad_(), entropy.clone().requires_grad_()
        with use_backend(backend):
            out = policy_loss(x, fields, objective, normalizer=100.0, entropy=h)
        results.append((out.loss.detach(), out.metrics, torch.autograd.grad(out.loss, (x, h))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert results[0][1]["actor/entropy"][1] > 0


def test_a_backend_that_computes_in_fp32_refuses_fp64() -> None:
    b = batch(torch.float64)
    reason = "its kernel computes in fp32, and the log-probs are fp64"
    match = rf"^Backend 'triton' cannot compute this policy_loss: {reason}; use .*reference\.$"
    with use_backend("triton"), pytest.raises(dispatch.BackendError, match=match):
        policy_loss(b["logprob"], flat(b), Objective(), normalizer=1.0)


def test_metrics() -> None:
    """verl's names and definitions on tokens that are not shared."""
    b = batch(spread=2.0)
    b["behaviour"][3] = torch.nan  # not recorded: left out of the mismatch
    lp, A, m = b["logprob"], b["advantage"][b["sequence"]], b["mask"]
    objective = Objective.preset("dual_clip", kl="k1")
    metrics = policy_loss(lp, flat(b), objective, normalizer=1.0, entropy=b["entropy"]).metrics
    r = (lp - b["old"]).exp()
    known = m & ~b["behaviour"].isnan()
    x = (b["old"] - b["behaviour"]).clamp(-20, 20)
    want = {
        "actor/pg_loss": TOKEN_LOSS["dual_clip"](b, lp)[m].mean(),
        "actor/pg_clipfrac": torch.where(A > 0, r > 1.2, r < 0.8)[m].double().mean(),
        "actor/pg_clipfrac_lower": ((A < 0) & (r > 3))[m].double().mean(),
        "actor/ppo_kl": (b["old"] - lp)[m].mean(),
        "actor/entropy": b["entropy"][m].mean(),
        "actor/kl_loss": (lp - b["ref"])[m].mean(),
        "training/mismatch_k3_kl": (x.exp() - x - 1)[known].mean(),
        "training/rollout_probs_diff_mean": (b["old"].exp() - b["behaviour"].exp())[known].abs().mean(),
    }
    torch.testing.assert_close({n: total / count for n, (total, count) in metrics.items()}, want)
    assert want["actor/pg_clipfrac"] > 0
    assert want["actor/pg_clipfrac_lower"] > 0


def test_flat_weights() -> None:
    b = batch()
    per_sequence = torch.arange(6, device=DEVICE).double()
    per_token = per_sequence[b["sequence"]]
    fields = [flat(b, weight=w) for w in (per_sequence, per_token)]
    for objective in (Objective.preset("ppo"), Objective.preset("grpo")):
        losses = [policy_loss(b["logprob"], f, objective, normalizer=1.0).loss for f in fields]
        torch.testing.assert_close(losses[0], losses[1])
        by_hand = TOKEN_LOSS["ppo"](b, b["logprob"]) * per_token
        want = aggregate(b, by_hand, objective.aggregation)
        torch.testing.assert_close(losses[0] / NORMALIZER[objective.aggregation], want)


def test_opcheck() -> None:
    b = batch(torch.float32)
    f = flat(b)
    lp, h = b["logprob"].requires_grad_(), b["entropy"].requires_grad_()
    objective = Objective.preset("dual_clip", kl_coef=0.1, entropy_coef=0.1, mismatch="truncate")
    torch.library.opcheck(api.policy_loss_op, (lp, h, *f.tensors(), objective.encoded))
    absent = PolicyFields(f.adv_pos, f.adv_neg, f.weight)
    torch.library.opcheck(api.policy_loss_op, (lp, None, *absent.tensors(), Objective.preset("reinforce").encoded))
    gspo = Objective.preset("gspo")
    torch.library.opcheck(api.policy_loss_op, (lp, h, *f.folded(gspo.aggregation).tensors(), gspo.encoded))


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_compile(name: str) -> None:
    b = batch(torch.float32)
    fields, objective = flat(b), Objective.preset(name, entropy_coef=0.1)

    def step(lp: Tensor, h: Tensor) -> Tensor:
        return policy_loss(lp * 1.1, fields, objective, normalizer=9.0, entropy=h).loss

    pair = []
    for f in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        lp, h = b["logprob"].clone().requires_grad_(), b["entropy"].clone().requires_grad_()
        loss = f(lp, h)
        pair.append((loss.detach(), *torch.autograd.grad(loss, (lp, h))))
    torch.testing.assert_close(pair[0], pair[1])


def test_half_precision_logprobs_are_refused() -> None:
    b = batch(torch.float32)
    with pytest.raises(ValueError, match="ratios of rounded log-probs are noise"):
        policy_loss(b["logprob"].bfloat16(), flat(b), Objective.preset("ppo"), normalizer=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"surrogate": "trpo"}, "surrogate 'trpo' is not known; choose one of ppo"),
        ({"ratio_level": "turn"}, "ratio_level 'turn' is not known; choose one of token, segment, sequence"),
        ({"kl": "k4"}, "kl 'k4' is not known"),
        ({"mismatch": "drop"}, "mismatch 'drop' is not known"),
        ({"mismatch": "mask", "mismatch_low": 3.0}, r"mismatch_low must be in \[0, mismatch_cap\)"),
        ({"entropy_share": 0.0}, r"entropy_share must be in \(0, 1\]"),
        ({"aggregation": "mean"}, "aggregation 'mean' is not known"),
        ({"eps_low": 1.5}, r"eps_low must be in \[0, 1\]"),
        ({"eps_high": -0.1}, "eps_high must not be negative"),
        ({"clip_ratio_c": 0.5}, "clip_ratio_c must be above 1"),
        ({"clip_ratio_c": 3.0, "surrogate": "sapo"}, "clip_ratio_c does not combine with surrogate 'sapo'"),
        ({"ratio_level": "sequence", "surrogate": "cispo"}, "ratio_level 'sequence' does not combine with .* 'cispo'"),
        ({"surrogate": "geo_mean"}, "surrogate 'geo_mean' does not combine with ratio_level 'token'"),
        ({"surrogate": "topr", "mismatch": "mask"}, "surrogate 'topr' does not combine with mismatch 'mask'"),
        ({"surrogate": "vespo", "mismatch": "mask", "mismatch_level": "sequence"}, "not combine with mismatch_level"),
        ({"surrogate": "nll", "dynamic_clip": True}, "dynamic_clip does not combine with surrogate 'nll'"),
        ({"ratio_level": "sequence", "dynamic_clip": True}, "'sequence' does not combine with dynamic_clip"),
        ({"ratio_base": "current", "dynamic_clip": True}, "dynamic_clip does not combine with ratio_base 'current'"),
        ({"needs": ("weights",)}, "needs 'weights' is not known; choose one of mask, old_logprob, "),
    ],
)
def test_impossible_objectives(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**options)


def test_preset_mistakes() -> None:
    with pytest.raises(ValueError, match="preset 'gpro' is not known; choose one of ppo, cispo, "):
        Objective.preset("gpro")
    with pytest.raises(ValueError, match="preset 'reinforce_pp' is 'ppo' with advantages of its own; choose 'ppo' and"):
        Objective.preset("reinforce_pp")
    with pytest.raises(ValueError, match="no field is called gamma; there are surrogate, "):
        Objective.preset("grpo", gamma=0.1)


def test_what_is_missing_is_named() -> None:
    b = batch(torch.float32)
    lp, fields = b["logprob"], flat(b)
    cases: list[tuple[Objective, PolicyFields, str]] = [
        (Objective(entropy_coef=0.1), fields, "entropy_coef is not 0, so entropy must be given"),
        (Objective(kl_coef=0.1), replace(fields, ref_logprob=None), "kl_coef is not 0, so the fields must have ref"),
        (
            Objective(mismatch="truncate"),
            replace(fields, behaviour_logprob=None),
            "the fields must have behaviour_logprob",
        ),
        *(
            (Objective.preset(name), fields, "the objective needs token_weight, so the fields must have token_weight")
            for name in ("sft", "weighted_nll", "raft", "aux_nll", "pear")
        ),
        (
            Objective.preset("clip_tensor"),
            replace(fields, clip_low=b["clip_low"]),
            "the objective needs clip_low and clip_high, so the fields must have clip_high",
        ),
        (
            Objective.preset("decoupled_ppo"),
            replace(fields, proximal_logprob=None),
            "ratio_base is 'proximal', so the fields must have proximal_logprob",
        ),
        (Objective.preset("grpo"), replace(fields, paths=None), "needs sequences; give cu_seqlens"),
        (
            Objective.preset("gspo"),
            replace(fields, paths=None, aggregation="seq_mean_token_mean"),
            "give flat\\(\\) cu_seqlens",
        ),
        (Objective(), replace(fields, aggregation="token_sum"), "contain aggregation 'token_sum', the objective wants"),
        (Objective(), PolicyFields.flat(b["advantage"]), r"logprob must be \[6\] like the fields, got \[26\]"),
    ]
    for objective, given, message in cases:
        with pytest.raises(ValueError, match=message):
            policy_loss(lp, given, objective, normalizer=1.0)
    with pytest.raises(ValueError, match="old_logprob is a constant of the loss but requires grad; detach it"):
        flat(b, old_logprob=b["old"].clone().requires_grad_())
    with pytest.raises(ValueError, match="mask must be bool"):
        flat(b, mask=b["mask"].float())


@pytest.mark.slow
def test_no_preset_is_another_one() -> None:
    """Only declared aliases have the same loss and gradient where advantages of tokens tell all definitions apart."""
    found: dict[bytes, set[str]] = {}
    for name, objective in PRESETS.items():
        results = []
        for seed in range(8):
            b = batch(seed=seed, spread=(0.3, 1.5)[seed % 2])
            A = torch.randn(26, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)
            lp, scale = b["logprob"].requires_grad_(), NORMALIZER[objective.aggregation]
            fields = flat(b | {"advantage": A}, objective.needs)
            loss = policy_loss(lp, fields, objective, normalizer=scale, entropy=b["entropy"]).loss
            results += [loss.detach().view(1), torch.autograd.grad(loss, lp)[0]]
        found.setdefault(torch.cat(results).round(decimals=12).cpu().numpy().tobytes(), set()).add(name)
    same = [names for names in found.values() if len(names) > 1]
    declared = {of: {of} | {name for name, (other, _) in ALIASES.items() if other == of} for of, _ in ALIASES.values()}
    assert sorted(map(sorted, same)) == sorted(map(sorted, declared.values()))


def test_weights_of_tokens() -> None:
    """They multiply the surrogate alone, and what they leave out can have no gradient."""
    b = batch()
    objective = Objective.preset("dapo", kl_coef=0.3)
    lp = b["logprob"].requires_grad_()
    surrogate = b["token_weight"] * TOKEN_LOSS["dapo"](b, lp)
    want = aggregate(b, surrogate + 0.3 * PENALTY["k3"](lp, b["ref"]), "token_mean")
    loss = policy_loss(lp, flat(b, ("token_weight",)), objective, normalizer=50).loss
    torch.testing.assert_close((loss, *torch.autograd.grad(loss, lp)), (want, *torch.autograd.grad(want, lp)))
    live = Objective.preset("sft").live(flat(b, ("token_weight",)))
    assert live.equal(b["mask"] & (b["token_weight"] != 0))
    assert objective.live(flat(b, ("token_weight",))).equal(b["mask"])
    tree = Tree(0)
    with pytest.raises(ValueError, match="with weights of tokens needs pair_target"):
        policy_loss(
            tree.logprob,
            tree.fields("seq_mean_token_mean", needs=("token_weight",)),
            Objective.preset("gspo"),
            normalizer=1,
        )


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_declares_what_its_formula_reads_and_gives(name: str) -> None:
    declared = SURROGATES[name]
    reads, functions = set[str](), [declared.formula]
    while functions:
        function = functions.pop()
        reads.update(function.__code__.co_names)
        used = [function.__globals__.get(name) for name in function.__code__.co_names]
        functions += [f for f in used if isinstance(f, FunctionType) and f.__module__ == surrogates.__name__]
    assert declared.reads == reads & {*surrogates.Token._fields, *surrogates.Spec._fields}
    x = torch.full((1,), -1.0)
    terms = declared.formula(surrogates.Token(x, 0 * x, x, x, x), surrogates.Spec(*[1.0] * 10))
    gives = {field for field, value in terms._asdict().items() if isinstance(value, torch.Tensor)}
    assert declared.signed == ("pos" in gives) == ("neg" in gives)
    assert declared.of_all == ("all" in gives)
    assert declared.bounded == any(field.startswith("clipped") for field in gives)


def test_what_a_formula_reads_says_what_it_needs() -> None:
    of_ratios = {"ppo", "unclipped", "cispo", "sapo", "dppo_tv", "dppo_kl", "dro", "kl_cov", "nft"}
    others = {"reinforce", "nll", "distill_reverse", "distill_forward"}
    known = {name: of for name, of in SURROGATES.items() if name in of_ratios | others}
    assert {n for n, s in known.items() if s.of_all} == {"nll", "dro", "kl_cov", "distill_reverse", "distill_forward"}
    assert {n for n, s in known.items() if s.bounded} == {"ppo", "cispo", "dppo_tv", "dppo_kl", "nft"}
    assert {n for n, s in known.items() if s.of_ratio} == {"ppo", "unclipped", "sapo"}
    assert {n for n in known if Objective(surrogate=n).needs_old} == of_ratios
    bases = ("old", "proximal", "current", "self")
    needs = {base: Objective(ratio_base=base, mismatch="truncate").needs_old for base in bases}
    assert needs == {"old": True, "proximal": False, "current": False, "self": True}


@pytest.mark.skipif(bool(reason := dispatch._unusable("triton", DEVICE)), reason=str(reason))
def test_a_formula_uses_elementwise_functions_alone() -> None:
    from rolltree.kernels.policy_loss import triton

    def cosine(x: Any, n: Any) -> Any:
        return torch.cos(x.d)

    with pytest.raises(ValueError, match="cosine uses torch, which kernels/policy_loss/elementwise"):
        triton.compiled(cosine)
    assert set(triton.FUNCTIONS) - {"abs"} <= set(vars(elementwise))


def test_sums_are_named_once() -> None:
    assert len(set(SUMS)) == len(SUMS)
