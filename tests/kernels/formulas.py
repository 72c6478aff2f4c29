"""Losses of tokens as their papers write them, random batches and trees to compute them on, and the comparison with
policy_loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import Objective, PathIndex, PolicyFields, dispatch, policy_loss, use_backend
from rolltree.kernels.dispatch import Backend
from rolltree.kernels.policy_loss import PRESETS, aggregation_weight

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = [
    pytest.param(b, marks=pytest.mark.skipif(bool(reason := dispatch._unusable(b, DEVICE)), reason=str(reason)))
    for b in (("triton", "reference") if HAS_GPU else ("cpu", "triton", "reference"))
]
LENGTHS = (5, 0, 1, 9, 3, 8)  # a sequence without tokens among them


def batch(dtype: torch.dtype = torch.float64, seed: int = 0, spread: float = 0.3) -> dict[str, Tensor]:
    """Flat sequences whose ratios reach both sides of every bound."""
    g = torch.Generator().manual_seed(seed)
    M, S = sum(LENGTHS), len(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    old = -normal(M).abs() - 0.1
    made = {
        "logprob": old + spread * normal(M),
        "old": old,
        "ref": old + 0.5 * normal(M),
        "behaviour": old + 0.6 * normal(M),
        "entropy": normal(M).abs(),
        "advantage": normal(S),
        "cu": torch.tensor([0, *LENGTHS]).cumsum(0),
        "mask": torch.rand(M, generator=g) < 0.8,
        "teacher": old + 0.4 * normal(M),
        "proximal": old + 0.2 * normal(M),
        "token_weight": torch.rand(M, generator=g, dtype=torch.float64),
        "clip_low": 0.5 + 0.3 * torch.rand(M, generator=g, dtype=torch.float64),
        "clip_high": 1.1 + 0.3 * torch.rand(M, generator=g, dtype=torch.float64),
        "pass_rate": torch.rand(S, generator=g, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS)),
        "segment": torch.arange(M) // 4,
    }
    made["token_weight"][::5] = 0
    made["mask"][5] = False  # the sequence of one token: nothing left of it
    made["sequence"] = torch.repeat_interleave(torch.arange(S), torch.tensor(LENGTHS))
    return {n: t.to(DEVICE, dtype if t.is_floating_point() else t.dtype) for n, t in made.items()}


def flat(b: dict[str, Tensor], needs: tuple[str, ...] = (), **changes: Any) -> PolicyFields:
    """Fields with what objectives take where they want it, and with what ``needs`` names, which all would take."""
    given = {
        **{name: b[name] for name in needs},
        "old_logprob": b["old"],
        "ref_logprob": b["ref"],
        "behaviour_logprob": b["behaviour"],
        "proximal_logprob": b["proximal"],
        "teacher_logprob": b["teacher"],
        "pass_rate": b["pass_rate"],
        "segment": b["segment"],
        "mask": b["mask"],
        "cu_seqlens": b["cu"],
    }
    return PolicyFields.flat(b["advantage"], **(given | changes))


# The independent formulas: per-token losses as published, differentiated by autograd. A is the token's advantage.
def ppo(b: dict[str, Tensor], lp: Tensor, low: float, high: float, c: float | None = None) -> Tensor:
    A, r = b["advantage"][b["sequence"]], (lp - b["old"]).exp()
    loss = torch.maximum(-A * r, -A * r.clamp(1 - low, 1 + high))
    return loss if c is None else torch.where(A < 0, torch.minimum(-c * A, loss), loss)


def cispo(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    r = (lp - b["old"]).exp().detach()
    return -r.clamp(0.8, 1.2) * b["advantage"][b["sequence"]] * lp


def sapo(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    A, r = b["advantage"][b["sequence"]], (lp - b["old"]).exp()
    tau = torch.where(A > 0, torch.ones_like(A), torch.full_like(A, 1.05))
    return -A * torch.sigmoid(tau * (r - 1)) * 4 / tau


def gspo(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    A = b["advantage"][b["sequence"]]
    kept = b["mask"].to(lp.dtype)
    length = torch.zeros_like(b["advantage"]).index_add(0, b["sequence"], kept).clamp(min=1)
    mean = torch.zeros_like(b["advantage"]).index_add(0, b["sequence"], kept * (lp - b["old"])) / length
    s = (mean[b["sequence"]].detach() + lp - lp.detach()).exp()
    return torch.maximum(-A * s, -A * s.clamp(1 - 3e-4, 1 + 4e-4))


def reinforce(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    return -b["advantage"][b["sequence"]] * lp


def mean_by(b: dict[str, Tensor], label: str, values: Tensor) -> Tensor:
    """The mean over the masked tokens of each sequence or segment, at its tokens."""
    kept, size = b["mask"].to(values.dtype), int(b[label].max()) + 1
    zero = values.new_zeros(size)
    count = zero.index_add(0, b[label], kept).clamp(min=1)
    return (zero.index_add(0, b[label], kept * values) / count)[b[label]]


def gmpo(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    A, d = b["advantage"][b["sequence"]], lp - b["old"]
    acting = A.sign() * torch.minimum(A.sign() * d, A.sign() * d.clamp(-0.4, 0.4))
    return -A * mean_by(b, "sequence", acting).exp()


def segment_ratio(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    A, r = b["advantage"][b["sequence"]], mean_by(b, "segment", lp - b["old"]).exp()
    return torch.maximum(-A * r, -A * r.clamp(0.8, 1.2))


def dppo(b: dict[str, Tensor], lp: Tensor, moved_up: Tensor, moved_down: Tensor) -> Tensor:
    A, r = b["advantage"][b["sequence"]], (lp - b["old"]).exp().clamp(max=20)
    ok = torch.where(A > 0, ~moved_up, ~moved_down)
    return -A * r.detach() * lp * ok


def dppo_tv(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    moved = (lp.exp() - b["old"].exp()).detach()
    return dppo(b, lp, moved > 0.2, moved < -0.2)


def dppo_kl(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    p, q = lp.exp().detach(), b["old"].exp()
    kl = q * (q.log() - p.log()) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    return dppo(b, lp, (kl > 0.2) & (p > q), (kl > 0.2) & (p < q))


def kl_cov(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    A, d, m = b["advantage"][b["sequence"]], lp - b["old"], b["mask"]
    cov = ((A - A[m].mean()) * (lp - lp[m].mean())).detach()
    top = torch.where(m, cov, -torch.inf).topk(max(1, int(2e-4 * int(m.sum())))).indices
    extra = torch.zeros_like(lp).index_fill(0, top, 0.1)
    return -A * d.exp() + extra * d.abs()


def sum_by_sequence(b: dict[str, Tensor], values: Tensor) -> Tensor:
    kept = torch.where(b["mask"], values, 0)
    return torch.zeros_like(b["advantage"]).index_add(0, b["sequence"], kept)[b["sequence"]]


def vespo(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    A = b["advantage"][b["sequence"]]
    w = sum_by_sequence(b, lp - b["old"]).clamp(torch.tensor(1e-8).log().item(), 20).exp().detach()
    k, lam = torch.where(A >= 0, 2.0, 3.0), torch.where(A >= 0, 3.0, 2.0)
    return -(lam.exp() * w**k * (-lam * w).exp()) * A * lp


def topr(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    A = b["advantage"][b["sequence"]]
    w = sum_by_sequence(b, lp - b["old"]).exp().clamp(max=1).detach()
    return -torch.where(A > 0, A, A * w) * lp


def off_policy_mask(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    A = b["advantage"][b["sequence"]]
    far = mean_by(b, "sequence", b["behaviour"] - lp.detach()) > 0.1
    return torch.where((A < 0) & far, 0, ppo(b, lp, 0.2, 0.2))


def dcpo(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    A, q, r = b["advantage"][b["sequence"]], b["old"].exp(), (lp - b["old"]).exp()
    high = ((1 + (1 + 0.8 / q).sqrt()) / 2).clamp(max=10)
    low = (1 + (1 - 0.8 / q).clamp(min=0).sqrt()) / 2
    return torch.maximum(-A * r, -A * torch.minimum(torch.maximum(r, low), high))


def nft(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    A, q, R = b["advantage"][b["sequence"]], b["pass_rate"], (lp - b["old"]).exp()
    return torch.where(A > 0, -A * R.log(), A * ((1 - q * R) / (1 - q)).clamp(min=1e-2).log())


def entropy_mask(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    H = b["entropy"].detach()
    return torch.where(H[b["mask"]].quantile(0.8) <= H, ppo(b, lp, 0.2, 0.28), 0)


def weighted_nll(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    return -b["token_weight"] * lp


def pear(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    nearness = sum_by_sequence(b, lp.detach() - b["behaviour"]).clamp(-20, 20).exp().clamp(max=2)
    return nearness * weighted_nll(b, lp)


def decoupled_ppo(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    A, r = b["advantage"][b["sequence"]], (lp - b["proximal"]).exp()
    return (b["proximal"] - b["behaviour"]).exp().clamp(max=2) * torch.maximum(-A * r, -A * r.clamp(0.8, 1.2))


def clip_tensor(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    A, r = b["advantage"][b["sequence"]], (lp - b["old"]).exp()
    return torch.maximum(-A * r, -A * torch.minimum(torch.maximum(r, b["clip_low"]), b["clip_high"]))


def truncated_ppo(b: dict[str, Tensor], lp: Tensor) -> Tensor:
    return (b["old"] - b["behaviour"]).exp().clamp(max=2) * ppo(b, lp, 0.2, 0.2)


TOKEN_LOSS: dict[str, Callable[[dict[str, Tensor], Tensor], Tensor]] = {
    **dict.fromkeys(("ppo", "grpo", "bnpo", "dr_grpo"), lambda b, lp: ppo(b, lp, 0.2, 0.2)),
    "clip_tensor": clip_tensor,
    "dapo": lambda b, lp: ppo(b, lp, 0.2, 0.28),
    "ngrpo": lambda b, lp: ppo(b, lp, 0.16, 0.24),
    "dual_clip": lambda b, lp: ppo(b, lp, 0.2, 0.2, c=3.0),
    "dcpo_clip": dcpo,
    "cispo": cispo,
    "sapo": sapo,
    **dict.fromkeys(("gspo", "gspo_token", "luspo"), gspo),
    "gmpo": gmpo,
    "segment_ratio": segment_ratio,
    **dict.fromkeys(("reinforce", "gpg", "rloo"), reinforce),
    "w_reinforce": lambda b, lp: reinforce(b, lp) * torch.where(b["advantage"][b["sequence"]] > 0, 0.1, 1.0),
    "topr": topr,
    "vespo": vespo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "kl_cov": kl_cov,
    "dro": lambda b, lp: reinforce(b, lp) + 0.05 * (lp - b["old"]).square(),
    "decoupled_ppo": decoupled_ppo,
    "rollout_is": truncated_ppo,
    "off_policy_mask": off_policy_mask,
    "on_policy_pg": lambda b, lp: -b["advantage"][b["sequence"]] * (lp - lp.detach()).exp(),
    "nft": nft,
    "prob_shaping": lambda b, lp: b["token_weight"] * -b["advantage"][b["sequence"]] / (1 + 0.1 * (-lp).exp()),
    "token_entropy_mask": entropy_mask,
    **dict.fromkeys(("sft", "weighted_nll", "raft", "aux_nll"), weighted_nll),
    "pear": pear,
    "opd": lambda b, lp: -(b["teacher"] - lp).detach() * lp,
    "opd_forward": lambda b, lp: -(b["teacher"] - lp).exp().clamp(max=10).detach() * lp,
}
STOP_GRADIENT = ("cispo", "on_policy_pg", "vespo", "topr", "dppo_tv", "dppo_kl", "opd", "opd_forward", "pear")
DIFFER_BY_CONSTANTS = (  # and by aggregation: from ppo, gspo_token, reinforce and sft
    "grpo", "dapo", "ngrpo", "bnpo", "dr_grpo", "luspo", "gspo", "rloo", "w_reinforce", "gpg", "weighted_nll", "raft",
    "aux_nll",
)  # fmt: skip
BY_CHANCE = ("clip_cov",)  # has tests of its own
FORMULAS = [name for name in PRESETS if name not in BY_CHANCE]
AGGREGATION = {
    **dict.fromkeys(PRESETS, "token_mean"),
    **dict.fromkeys(("grpo", "gspo", "gspo_token", "gmpo", "sapo", "ngrpo"), "seq_mean_token_mean"),
    **dict.fromkeys(("luspo", "rloo"), "seq_mean_token_sum"),
    "dr_grpo": "seq_mean_token_sum_norm",
    "bnpo": "batch_token_mean",
}
PENALTY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda lp, ref: lp - ref,
    "k2": lambda lp, ref: 0.5 * (lp - ref).square(),
    "k3": lambda lp, ref: (ref - lp).exp() - (ref - lp) - 1,
    "low_var": lambda lp, ref: ((ref - lp).clamp(-20, 20).exp() - (ref - lp).clamp(-20, 20) - 1).clamp(-10, 10),
    "abs": lambda lp, ref: (lp - ref).abs(),
}
PENALTY |= {
    f"{name}+": lambda lp, ref, value=PENALTY[name]: (
        value(lp, ref).detach() + PENALTY["k2"](lp, ref) - PENALTY["k2"](lp, ref).detach()
    )
    for name in ("k1", "k3", "low_var", "abs")
}


def aggregate(b: dict[str, Tensor], token_loss: Tensor, kind: str) -> Tensor:
    """Return the mean as trainers write it: masked, per sequence or over tokens; 10 sequences, 50 tokens, L_max 7."""
    loss = torch.where(b["mask"], token_loss, 0)
    kept = b["mask"].to(loss.dtype)
    zero = loss.new_zeros(len(LENGTHS))
    sums, counts = zero.index_add(0, b["sequence"], loss), zero.index_add(0, b["sequence"], kept)
    return {
        "token_mean": lambda: loss.sum() / 50,
        "batch_token_mean": lambda: loss.sum() / 40,  # two micro-batches of 20 tokens, say
        "token_sum": lambda: loss.sum(),
        "seq_mean_token_mean": lambda: (sums / counts.clamp(min=1)).sum() / 10,
        "seq_mean_token_sum": lambda: sums.sum() / 10,
        "seq_mean_token_sum_norm": lambda: sums.sum() / (10 * 7),
    }[kind]()


NORMALIZER = {
    "token_mean": 50,
    "batch_token_mean": 40,
    "token_sum": 1,
    "seq_mean_token_mean": 10,
    "seq_mean_token_sum": 10,
    "seq_mean_token_sum_norm": 70,
}


def check(backend: Backend, objective: Objective, token_loss: Callable[[dict[str, Tensor], Tensor], Tensor]) -> None:
    """Loss and gradients equal those of ``token_loss`` aggregated by hand; in fp64 where the backend has it."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    for seed, spread in ((0, 0.3), (1, 1.5)):
        b = batch(seed=seed, spread=spread)
        lp, h = b["logprob"].clone().requires_grad_(), b["entropy"].clone().requires_grad_()
        want = aggregate(b | {"entropy": h}, token_loss(b | {"entropy": h}, lp), objective.aggregation)
        exact = (want, *torch.autograd.grad(want, (lp, h), allow_unused=True, materialize_grads=True))

        b = batch(dtype, seed, spread)
        lp, h = b["logprob"].clone().requires_grad_(), b["entropy"].clone().requires_grad_()
        with use_backend(backend):
            fields = flat(b, objective.needs)
            out = policy_loss(lp, fields, objective, normalizer=NORMALIZER[objective.aggregation], entropy=h)
            got = (out.loss, *torch.autograd.grad(out.loss, (lp, h), allow_unused=True, materialize_grads=True))
        tolerance = 1e-9 if dtype == torch.float64 else 2e-5
        for x, y in zip(got, exact, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


class Tree:
    """A random tree of targets in depth-first order: ``target_end``, the path of each leaf, its advantage."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=g))

        self.ends: list[int] = []
        self.paths: list[list[int]] = []

        def grow(path: list[int], depth: int) -> None:
            first = len(self.ends)
            own = list(range(first, first + draw(0 if depth else 1, 4)))
            self.ends += [0] * len(own)
            children = draw(2, 4) if depth < 3 and len(self.ends) < 60 else 0
            for _ in range(children):
                grow(path + own, depth + 1)
            if not children:
                self.paths.append(path + own)
            for i in own:
                self.ends[i] = len(self.ends)

        grow([], 0)
        M, L = len(self.ends), len(self.paths)

        def normal(n: int) -> Tensor:
            return torch.randn(n, generator=g, dtype=torch.float64).to(DEVICE)

        self.old = -normal(M).abs() - 0.1
        self.logprob, self.ref = self.old + 0.6 * normal(M), self.old + normal(M)
        self.behaviour, self.entropy = self.old + 0.4 * normal(M), normal(M).abs()
        self.teacher, self.pass_rate = self.old + 0.4 * normal(M), torch.full_like(self.old, 0.4)
        self.mask = normal(M) > -0.8
        self.more = {
            "proximal_logprob": self.old + 0.2 * normal(M),
            "token_weight": normal(M).abs(),
            "clip_low": 0.9 - 0.2 * normal(M).abs(),
            "clip_high": 1.1 + 0.2 * normal(M).abs(),
        }
        self.advantage = normal(L)
        self.length = torch.tensor([int(self.mask[p].sum()) for p in self.paths], device=DEVICE)

    def fields(
        self, aggregation: str, merge: Callable[[Tensor], Tensor] | None = None, needs: tuple[str, ...] = ()
    ) -> PolicyFields:
        """S-form fields; ``merge`` puts another advantage in the place of the split by sign (to show it wrong)."""
        w = aggregation_weight(aggregation, self.length.double())
        last = torch.tensor([p[-1] if p else -1 for p in self.paths], device=DEVICE)
        paths = PathIndex(torch.tensor(self.ends, device=DEVICE), last, self.length, w, self.advantage)
        pos, neg = (paths.spread(w * self.advantage.clamp(**c)) for c in ({"min": 0}, {"max": 0}))
        if merge is not None:
            pos, neg = merge(pos + neg).clamp(min=0), merge(pos + neg).clamp(max=0)
        one = paths.spread(w)
        of_targets = (self.mask, self.old, self.ref, self.behaviour, self.teacher)
        sides = {} if merge else {"pos_weight": self.advantage > 0, "neg_weight": self.advantage < 0}
        more = {name: paths.spread(w * side) for name, side in sides.items()}
        more |= {"pass_rate": self.pass_rate} | {name: self.more[name] for name in ("proximal_logprob", *needs)}
        return PolicyFields(pos, neg, one, *of_targets, **more, paths=paths, aggregation=aggregation)

    def expanded(self, needs: tuple[str, ...] = ()) -> tuple[Tensor, PolicyFields]:
        """Every leaf as a sequence of its own: the index of each flat target, and flat fields."""
        index = torch.tensor([i for p in self.paths for i in p], device=DEVICE)
        cu = torch.tensor([0, *(len(p) for p in self.paths)], device=DEVICE).cumsum(0)
        fields = PolicyFields.flat(
            self.advantage,
            old_logprob=self.old[index],
            ref_logprob=self.ref[index],
            behaviour_logprob=self.behaviour[index],
            teacher_logprob=self.teacher[index],
            pass_rate=self.pass_rate[index],
            mask=self.mask[index],
            cu_seqlens=cu,
            **{name: self.more[name][index] for name in ("proximal_logprob", *needs)},
        )
        return index, fields


# a choice among all tokens is another one where shared tokens stand several times; segments need labels of their own
