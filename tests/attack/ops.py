"""The ops that are attacked: every argument with its kind, right values for it, and the results to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rolltree.kernels import (
    DecodePlan,
    HeadLora,
    LogprobTerm,
    Objective,
    PathIndex,
    PolicyFields,
    PolicyLossOutput,
    Term,
    calm_tokens,
    entropy_quantile,
    gae,
    kept_tokens,
    linear_logprob,
    linear_policy_loss,
    linear_terms_loss,
    logprob_from_logits,
    pair_loss,
    plan_policy_loss,
    policy_loss,
    probability_mask,
    random_share,
    sample_tokens,
    tree_attention,
    tree_decode_attention,
    value_loss,
)

from ..support.arguments import Edges, Floats, Index, Kind, Mask, Number, PerRow, Whole

Given = dict[str, Any]


class Maker:
    """Right arguments from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def size(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.random))

    def floats(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.random) * scale

    def index(self, end: int, *shape: int) -> Tensor:
        return torch.randint(0, max(end, 1), shape, generator=self.random)

    def logprob(self, *shape: int) -> Tensor:
        return -torch.rand(shape, generator=self.random) * 3 - 0.1

    def one_of(self, *values: Any) -> Any:
        return values[self.size(0, len(values) - 1)]

    def edges(self, sequences: int, end: int) -> Tensor:
        inner = torch.randint(0, end + 1, (sequences - 1,), generator=self.random).sort().values
        return torch.cat([inner.new_zeros(1), inner, inner.new_tensor([end])])


@dataclass(frozen=True)
class Op:
    """``make`` gives right arguments and their kinds, ``run`` the tensors that come of them."""

    name: str
    make: Callable[[Maker], tuple[Given, dict[str, Kind]]]
    run: Callable[..., list[Tensor]]
    alike: tuple[str, str] | None = None  # what must have the same strides on a GPU
    backends: tuple[str, ...] = ("",) * 7 + ("triton",)  # "": what runs here; Triton's interpreter takes its time

    def values(self, given: Given, kinds: dict[str, Kind]) -> list[Tensor]:
        """Results, and gradients to what has one."""
        leaves = {n: given[n].detach().requires_grad_() for n, k in kinds.items() if isinstance(k, Floats) and k.grad}
        out = self.run(**given | leaves)
        differentiable = [t for t in out if t.requires_grad]
        if leaves and differentiable:
            total = sum((t * torch.linspace(1, 2, t.numel()).view(t.shape)).nan_to_num().sum() for t in differentiable)
            assert isinstance(total, Tensor)
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
            out = [*out, *(g for g in found if g is not None)]
        return [t.detach() for t in out]


def present(*tensors: Tensor | None) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def head(m: Maker) -> tuple[Given, dict[str, Kind], int, int, int]:
    N, H, V = m.size(1, 9), m.size(1, 12), m.size(2, 40)
    M = m.size(1, 12)
    given = {"hidden": m.floats(N, H), "weight": m.floats(V, H), "target": m.index(V, M), "row": m.index(N, M),
             "bias": m.floats(V), "temperature": m.logprob(N).neg(), "softcap": 5.0}  # fmt: skip
    kinds: dict[str, Kind] = {
        "hidden": Floats(grad=True, size="free", also_wrong=(torch.float64,), message="hidden"),
        "weight": Floats(grad=True, also_wrong=(torch.float64, torch.float16)),
        "target": Index(end=V),
        "row": Index(end=N),
        "bias": Floats(grad=True, also_wrong=(torch.float64,)),
        "temperature": PerRow(),
        "softcap": Number(none=True),
    }
    return given, kinds, N, V, M


def make_linear_logprob(m: Maker) -> tuple[Given, dict[str, Kind]]:
    given, kinds, N, V, _ = head(m)
    given["extra_ids"] = m.index(V, N, 3) - (m.index(5, N, 3) == 0) * 100
    given["extra_ids"] = given["extra_ids"].clamp(min=-1)
    return given, kinds | {"extra_ids": Index(end=V, low=-1), "target": Index(end=V)}


def run_linear_logprob(**given: Any) -> list[Tensor]:
    return present(*linear_logprob(**given, want=("entropy", "sum_p2")))


def make_kept(m: Maker) -> tuple[Given, dict[str, Kind]]:
    given, kinds, N, V, _ = head(m)
    del given["row"], kinds["row"]
    given["target"] = m.index(V, N)
    rest = m.index(V, N, 2)
    ids = torch.cat([given["target"][:, None], rest], 1).flatten()
    given |= {"indptr": torch.arange(N + 1) * 3, "ids": ids}
    kinds |= {"indptr": Edges(message="kept's indptr"), "ids": Index(end=V, size="free", message="kept's i")}
    return given, kinds | {"hidden": Floats(grad=True, also_wrong=(torch.float64,))}


def run_kept(indptr: Tensor, ids: Tensor, **given: Any) -> list[Tensor]:
    return present(*linear_logprob(**given, kept=(indptr, ids), want=("entropy", "sum_p2")))


def make_lora(m: Maker) -> tuple[Given, dict[str, Kind]]:
    given, kinds, _, V, _ = head(m)
    given |= {"a": m.floats(2, given["hidden"].shape[1]), "b": m.floats(V, 2), "scale": 0.7}
    kinds |= {"a": Floats(grad=True, message="lora"), "b": Floats(grad=True, message="lora"),
              "scale": Number(zero="and below", message="lora")}  # fmt: skip
    return given, kinds


def run_lora(a: Tensor, b: Tensor, scale: float, **given: Any) -> list[Tensor]:
    return present(*linear_logprob(**given, lora=HeadLora(a, b, scale), want=("entropy",)))


def make_from_logits(m: Maker) -> tuple[Given, dict[str, Kind]]:
    given, kinds, N, V, _ = head(m)
    names = ("target", "row", "temperature", "softcap")
    logits = {"logits": Floats(grad=True, layout="contiguous", size="free")}
    return {"logits": m.floats(N, V, scale=3)} | {n: given[n] for n in names}, {
        **logits,
        **{n: kinds[n] for n in names},
    }


def run_from_logits(**given: Any) -> list[Tensor]:
    return present(*logprob_from_logits(**given, want=("entropy", "sum_p2")))


FIELDS: dict[str, Kind] = {
    "advantage": Floats(),
    "old_logprob": Floats(),
    "ref_logprob": Floats(),
    "behaviour_logprob": Floats(),
    "mask": Mask(),
    "weight": Floats(),
    "cu_seqlens": Edges(),
}


def make_fields(m: Maker) -> tuple[Given, dict[str, Kind]]:
    M, S = m.size(8, 20), m.size(3, 5)
    given = {
        "advantage": m.floats(M),
        "old_logprob": m.logprob(M),
        "ref_logprob": m.logprob(M),
        "behaviour_logprob": m.logprob(M),
        "mask": m.index(4, M) > 0,
        "weight": m.floats(M).abs(),
        "cu_seqlens": m.edges(S, M),
        "logprob": m.logprob(M),
        "entropy": m.logprob(M).neg(),
        "normalizer": 7.0,
    }
    policy: dict[str, Kind] = {
        "logprob": Floats(grad=True, also_wrong=(torch.bfloat16,), message=""),
        "entropy": Floats(grad=True),
        "normalizer": Number(zero="yes"),
    }
    return given, FIELDS | policy


def run_policy_loss(objective: Objective) -> Callable[..., list[Tensor]]:
    def run(logprob: Tensor, entropy: Tensor, normalizer: float, **of_pairs: Any) -> list[Tensor]:
        fields = PolicyFields.flat(**of_pairs)
        return [policy_loss(logprob, fields, objective, normalizer=normalizer, entropy=entropy).loss]

    return run


def make_sequences(m: Maker) -> tuple[Given, dict[str, Kind]]:
    """Advantages of sequences."""
    given, kinds = make_fields(m)
    sequences = len(given["cu_seqlens"]) - 1
    given |= {"advantage": m.floats(sequences), "weight": m.floats(sequences).abs()}
    return given, kinds


PATHS = ("target_end", "leaf_target", "leaf_start", "leaf_length", "leaf_weight", "leaf_advantage")


def tree_of_pairs(m: Maker) -> Given:
    """The pairs of a random tree, depth-first."""
    M = m.size(3, 24)
    parent = [-1] + [max(i - 1 - m.size(0, 2), -1) for i in range(1, M)]
    for i in range(1, M):  # a parent must still be open
        above = i - 1
        while above >= 0 and above > parent[i]:
            above = parent[above]
        parent[i] = above
    end = list(range(1, M + 1))
    for i in range(M - 1, -1, -1):
        if parent[i] >= 0:
            end[parent[i]] = max(end[parent[i]], end[i])
    leaves = [i for i in range(M) if end[i] == i + 1]
    L = len(leaves)
    depth = [0] * M
    for i in range(M):
        depth[i] = 1 + (depth[parent[i]] if parent[i] >= 0 else 0)
    return {
        "target_end": torch.tensor(end),
        "leaf_target": torch.tensor(leaves),
        "leaf_start": torch.full((L,), -1),
        "leaf_length": torch.tensor([float(depth[i]) for i in leaves]),
        "leaf_weight": torch.ones(L),
        "leaf_advantage": m.floats(L),
    }


def kinds_of_paths(M: int) -> dict[str, Kind]:
    return {
        "target_end": Index(end=M + 1, low=1),
        "leaf_target": Index(end=M, low=-1),
        "leaf_start": Index(end=M, low=-1),
        "leaf_length": Floats(whole_too=True),
        "leaf_weight": Floats(),
        "leaf_advantage": Floats(),
    }


def make_paths(m: Maker) -> tuple[Given, dict[str, Kind]]:
    paths = tree_of_pairs(m)
    M, index, advantage = len(paths["target_end"]), PathIndex(**paths), paths["leaf_advantage"]
    given = paths | {"logprob": m.logprob(M), "old_logprob": m.logprob(M), "normalizer": 3.0,
                     "adv_pos": index.spread(advantage.clamp(min=0)), "adv_neg": index.spread(advantage.clamp(max=0)),
                     "weight": index.spread(torch.ones_like(advantage))}  # fmt: skip
    kinds: dict[str, Kind] = {n: replace(k, message="paths") for n, k in kinds_of_paths(M).items()}
    more: dict[str, Kind] = {
        "logprob": Floats(grad=True), "normalizer": Number(zero="yes"), "old_logprob": Floats(),
        "adv_pos": Floats(message=""), "adv_neg": Floats(), "weight": Floats(),
    }  # fmt: skip
    return given, kinds | more


def run_paths(logprob: Tensor, normalizer: float, **given: Any) -> list[Tensor]:
    paths = PathIndex(**{n: given.pop(n) for n in PATHS})
    fields = PolicyFields(**given, paths=paths, aggregation="seq_mean_token_mean")
    return [policy_loss(logprob, fields, Objective.preset("gspo"), normalizer=normalizer).loss]


def make_linear_policy_loss(m: Maker) -> tuple[Given, dict[str, Kind]]:
    given, kinds, _, _, M = head(m)
    given |= {"advantage": m.floats(M), "old_logprob": m.logprob(M), "normalizer": 5.0,
              "weight_grad": torch.zeros_like(given["weight"])}  # fmt: skip
    kinds |= {"normalizer": Number(zero="yes"), "weight_grad": Floats(layout="written", also_wrong=(torch.float64,))}
    return given, kinds


def run_linear_policy_loss(advantage: Tensor, old_logprob: Tensor, **given: Any) -> list[Tensor]:
    fields = PolicyFields.flat(advantage, old_logprob=old_logprob)
    if isinstance(into := given["weight_grad"], Tensor):
        into.zero_()
    out = linear_policy_loss(**given, fields=fields, objective=Objective.preset("dapo"))
    return [out.loss, into]


def make_terms(m: Maker) -> tuple[Given, dict[str, Kind]]:
    """A term of the policy, one of the entropy alone, and one that sees all log-probs at once."""
    given, kinds, _, _, M = head(m)
    given |= {"advantage": m.floats(M), "old_logprob": m.logprob(M), "normalizer": 5.0, "mask": m.index(3, M) > 0,
              "share": 0.3, "own": 0.7}  # fmt: skip
    of_terms: dict[str, Kind] = {
        "normalizer": Number(zero="yes"), "mask": Mask(), "share": Number(zero="and below", message="weight"),
        "own": Number(zero="and below", message="weight"), "advantage": Floats(message=""),
        "old_logprob": Floats(message=""),
    }  # fmt: skip
    return given, kinds | of_terms


def run_terms(advantage: Tensor, old_logprob: Tensor, **given: Any) -> list[Tensor]:
    fields = PolicyFields.flat(advantage, old_logprob=old_logprob)
    normalizer, mask = given.pop("normalizer"), given.pop("mask")

    def furthest(logprob: Tensor) -> PolicyLossOutput:
        return PolicyLossOutput(logprob.square().sum(), {})

    terms = [
        Term(fields, Objective.preset("dapo"), normalizer, given.pop("share"), "actor"),
        Term(replace(fields, adv_pos=0 * fields.adv_pos, adv_neg=0 * fields.adv_neg), Objective(entropy_coef=0.1), 3.0,
             1.0, "entropy"),
        LogprobTerm(furthest, mask, given.pop("own"), "furthest"),
    ]  # fmt: skip
    alone = linear_terms_loss(terms=terms[:2], **given)  # in one pass of the head
    out = linear_terms_loss(terms=terms, **given)
    return [out.loss, alone.loss, *out.losses.values()]


def make_pair_loss(m: Maker) -> tuple[Given, dict[str, Kind]]:
    paths = tree_of_pairs(m)
    M, L, P = len(paths["target_end"]), len(paths["leaf_target"]), m.size(1, 4)
    given = paths | {"logprob": m.logprob(M), "ref_logprob": m.logprob(M), "mask": m.index(3, M) > 0,
                     "chosen": m.index(L, P), "rejected": m.index(L, P), "beta": 0.3, "margin": 0.1,
                     "label_smoothing": 0.1, "weight": m.floats(P).abs(), "normalizer": 2.0}  # fmt: skip
    kinds: dict[str, Kind] = {n: replace(k, message="paths") for n, k in kinds_of_paths(M).items()}
    kinds["target_end"] = replace(kinds["target_end"], message="pa")
    more: dict[str, Kind] = {
        "logprob": Floats(grad=True, message=""), "ref_logprob": Floats(), "mask": Mask(), "chosen": Index(end=L),
        "rejected": Index(end=L), "beta": Number(), "margin": Number(zero="and below"),
        "label_smoothing": Number(zero="yes"), "weight": Floats(), "normalizer": Number(zero="yes"),
    }  # fmt: skip
    return given, kinds | more


def run_pair_loss(**given: Any) -> list[Tensor]:
    paths = PathIndex(**{n: given.pop(n) for n in PATHS})
    return [pair_loss(given.pop("logprob"), paths, given.pop("chosen"), given.pop("rejected"), **given).loss]


def make_gae(m: Maker) -> tuple[Given, dict[str, Kind]]:
    M, S = m.size(1, 20), m.size(1, 4)
    given = {"reward": m.floats(M), "value": m.floats(M), "cu_seqlens": m.edges(S, M), "gamma": 0.9, "lam": 0.8,
             "mask": m.index(3, M) > 0, "bootstrap": m.floats(S)}  # fmt: skip
    kinds: dict[str, Kind] = {
        "reward": Floats(message=""), "value": Floats(), "cu_seqlens": Edges(message=""), "gamma": Number(zero="yes"),
        "lam": Number(zero="yes"), "mask": Mask(), "bootstrap": Floats(),
    }  # fmt: skip
    return given, kinds


def make_value_loss(m: Maker) -> tuple[Given, dict[str, Kind]]:
    M = m.size(1, 20)
    given = {"value": m.floats(M), "returns": m.floats(M), "old_value": m.floats(M), "mask": m.index(3, M) > 0,
             "clip": 0.4, "normalizer": 3.0}  # fmt: skip
    kinds: dict[str, Kind] = {
        "value": Floats(grad=True, message=""), "returns": Floats(), "old_value": Floats(), "mask": Mask(),
        "clip": Number(none=True), "normalizer": Number(zero="yes"),
    }  # fmt: skip
    return given, kinds


def make_subsets(m: Maker) -> tuple[Given, dict[str, Kind]]:
    M = m.size(1, 20)
    given = {"entropy": m.logprob(M).neg(), "kl": m.logprob(M).neg(), "token": m.index(1000, M), "share": 0.5}
    kinds: dict[str, Kind] = {"entropy": Floats(), "kl": Floats(), "token": Index(), "share": Number(message="")}
    return given, kinds


def run_subsets(entropy: Tensor, kl: Tensor, token: Tensor, share: float) -> list[Tensor]:
    M = len(entropy) if isinstance(entropy, Tensor) and entropy.dim() == 1 else 1
    M = min(M, len(kl)) if isinstance(kl, Tensor) and kl.dim() == 1 else M
    M = min(M, len(token)) if isinstance(token, Tensor) and token.dim() == 1 else M
    fields = PolicyFields.flat(torch.linspace(-1, 1, M), old_logprob=torch.full((M,), -0.5))
    chosen = [
        entropy_quantile(fields, entropy, share),
        random_share(fields, share, token=token, seed=3),
        calm_tokens(fields, entropy, kl, share),
        probability_mask(fields, share),
    ]
    return [t for f in chosen for t in (f.adv_pos, f.adv_neg)]


def make_sample(m: Maker) -> tuple[Given, dict[str, Kind]]:
    N, V = m.size(1, 6), m.size(1, 40)
    given = {"logits": m.floats(N, V, scale=3), "temperature": m.logprob(N).neg(), "top_k": m.index(2 * V, N),
             "top_p": torch.rand(N, generator=m.random), "min_p": torch.rand(N, generator=m.random) / 4,
             "seed": m.index(2**62, N), "step": m.index(1000, N)}  # fmt: skip
    numbers = {n: Floats(message=n, whole_too=True) for n in ("temperature", "top_p", "min_p")}
    kinds: dict[str, Kind] = {
        "logits": Floats(layout="last", size="free", also_wrong=(torch.float64,)),
        "top_k": Index(), "seed": Index(only=(torch.int64,)), "step": Index(), **numbers,
    }  # fmt: skip
    return given, kinds


def run_sample(**given: Any) -> list[Tensor]:
    out = sample_tokens(given.pop("logits"), **given)
    return [out.token, *out[1:]]


def make_kept_tokens(m: Maker) -> tuple[Given, dict[str, Kind]]:
    N, V = m.size(1, 6), m.size(1, 40)
    given = {"logits": m.floats(N, V), "last_kept": m.index(V, N) - m.index(2, N)}
    return given, {"logits": Floats(size="free"), "last_kept": Index(end=V, low=-1)}


def make_attention(m: Maker) -> tuple[Given, dict[str, Kind]]:
    T, P, groups, kv, D = m.size(1, 40), m.size(0, 9), m.size(1, 3), m.size(1, 2), m.size(1, 20)
    N = P + T
    given = {
        "q": m.floats(T, groups * kv, D), "k": m.floats(T, kv, D), "v": m.floats(T, kv, D),
        "keys": m.floats(P, kv, D), "values": m.floats(P, kv, D), "position": torch.arange(N),
        "subtree_end": (torch.arange(N) + 1 + m.index(20, N)).clamp(max=N).int(),
        "scale": m.one_of(0.4, 0.0, -0.4, 1e-30), "softcap": 20.0, "window": m.size(1, 30),
    }  # fmt: skip
    wide = Floats(grad=True, layout="last", also_wrong=(torch.float16,), message="")
    kinds: dict[str, Kind] = {
        **dict.fromkeys(("q", "k", "v"), wide),
        "keys": replace(wide, message="prefix_kv"), "values": replace(wide, message="prefix_kv"),
        "position": Index(), "subtree_end": Index(only=(torch.int32,)), "scale": Number(zero="and below", none=True),
        "softcap": Number(none=True), "window": Whole(),
    }  # fmt: skip
    return given, kinds


def run_attention(keys: Tensor, values: Tensor, **given: Any) -> list[Tensor]:
    return [tree_attention(**given, prefix_kv=(keys, values))]


PLAN = ("page_indptr", "page_ids", "node_offset", "node_length", "node_position", "row_begin", "row_end",
        "query_position")  # fmt: skip


def make_decode(m: Maker) -> tuple[Given, dict[str, Kind]]:
    """A prompt and the branches below it, in pages of a random order."""
    page, kv, groups, D, rows = m.size(1, 5), m.size(1, 2), m.size(1, 2), m.size(1, 12), m.size(1, 5)
    length = [m.size(1, 12)] + [m.size(1, 6) for _ in range(rows)]
    offset = [m.size(0, page - 1) for _ in length]
    count = [-(-(o + n) // page) for o, n in zip(offset, length, strict=True)]
    total = sum(count)
    plan = {
        "page_indptr": torch.tensor([0, *count]).cumsum(0), "page_ids": torch.randperm(total, generator=m.random),
        "node_offset": torch.tensor(offset), "node_length": torch.tensor(length),
        "node_position": torch.tensor([0] + [length[0]] * rows),
        "row_begin": torch.tensor([0, *range(rows)]), "row_end": torch.tensor([rows, *range(1, rows + 1)]),
        "query_position": torch.tensor([length[0] + n - 1 for n in length[1:]]),
    }  # fmt: skip
    given = {n: t.int() for n, t in plan.items()}
    given |= {"q": m.floats(rows, groups * kv, D), "k_pages": m.floats(total, page, kv, D),
              "v_pages": m.floats(total, page, kv, D), "scale": m.one_of(0.5, 0.0, -0.5), "window": 7,
              "softcap": 9.0}  # fmt: skip
    wide = Floats(layout="last", also_wrong=(torch.float16,), message="")
    indices = {n: Index(only=(torch.int32,), layout="contiguous", message="") for n in PLAN}
    kinds: dict[str, Kind] = {
        **indices, "q": wide, "k_pages": wide, "v_pages": wide, "scale": Number(zero="and below", none=True),
        "window": Whole(), "softcap": Number(none=True),
        "page_ids": Index(end=total, only=(torch.int32,), layout="contiguous", message=""),
        "page_indptr": Index(end=total + 1, only=(torch.int32,), layout="contiguous", message=""),
        "row_end": Index(end=rows + 1, only=(torch.int32,), layout="contiguous", message=""),
        "row_begin": Index(end=rows + 1, only=(torch.int32,), layout="contiguous", message=""),
    }  # fmt: skip
    return given, kinds


def run_decode(**given: Any) -> list[Tensor]:
    plan = DecodePlan(**{n: given.pop(n) for n in PLAN})
    return list(tree_decode_attention(given.pop("q"), given.pop("k_pages"), given.pop("v_pages"), plan, **given))


def make_plan(m: Maker) -> tuple[Given, dict[str, Kind]]:
    N, M = m.size(1, 9), m.size(1, 12)
    given = {"advantage": m.floats(M), "row": m.index(N, M), "num_rows": N, "vocabulary": 40, "hidden_size": 8,
             "gradient_share": 0.9}  # fmt: skip
    kinds: dict[str, Kind] = {"row": Index(end=N), "num_rows": Whole(least=0), "vocabulary": Whole(),
                              "hidden_size": Whole(), "gradient_share": Number(zero="yes")}  # fmt: skip
    return given, kinds


def run_plan(advantage: Tensor, **given: Any) -> list[Tensor]:
    plan = plan_policy_loss(PolicyFields.flat(advantage), Objective.preset("dapo"), device="cpu", **given)
    return present(plan.row, plan.place, plan.start)


OPS = [
    Op("linear_logprob", make_linear_logprob, run_linear_logprob),
    Op("linear_logprob, kept", make_kept, run_kept),
    Op("linear_logprob, lora", make_lora, run_lora),
    Op("logprob_from_logits", make_from_logits, run_from_logits),
    Op("policy_loss, tokens", make_fields, run_policy_loss(Objective.preset("dapo", kl_coef=0.1, entropy_coef=0.1))),
    Op("policy_loss, sequences", make_sequences, run_policy_loss(Objective.preset("gspo", kl_coef=0.1))),
    Op("policy_loss, paths", make_paths, run_paths),
    Op("linear_policy_loss", make_linear_policy_loss, run_linear_policy_loss),
    Op("linear_terms_loss", make_terms, run_terms),
    Op("plan_policy_loss", make_plan, run_plan),
    Op("pair_loss", make_pair_loss, run_pair_loss),
    Op("gae", make_gae, lambda **given: list(gae(**given))),
    Op("value_loss", make_value_loss, lambda **given: [value_loss(given.pop("value"), **given).loss]),
    Op("subsets", make_subsets, run_subsets),
    Op("sample_tokens", make_sample, run_sample),
    Op("kept_tokens", make_kept_tokens, lambda **given: list(kept_tokens(**given))),
    Op("tree_attention", make_attention, run_attention),
    Op("tree_decode_attention", make_decode, run_decode, alike=("k_pages", "v_pages")),
]
