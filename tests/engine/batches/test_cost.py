"""The cost model against the published ratios and counted products; distribution over ranks."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rolltree.engine import TokenTree, batch_loss, pack
from rolltree.engine.batches.cost import CostModel
from rolltree.engine.batches.distribute import Share, deal, distribute, own_share
from rolltree.engine.model import varlen
from rolltree.kernels import Objective, tree_attention

from ...support import moe_models, recurrent_models
from ..model.test_tree_equals_flat import SMALL, close, make_models, random_tree


def group(prompt: int, response: int, count: int) -> TokenTree:
    ids = np.arange(count * response).reshape(count, response) + 10
    return TokenTree.from_sequences(np.arange(prompt).tolist(), list(ids))


@pytest.mark.parametrize(
    ("shape", "ratio"), [((1024, 1024, 8), 1.72), ((4096, 1024, 8), 3.05), ((4096, 1024, 32), 3.91)]
)
def test_ratios_of_a_4b_model(shape: tuple[int, int, int], ratio: float) -> None:
    """Shapes of Qwen3 4B without its head, as the table of ceilings has them."""
    projections = 2 * 2560 * (2 * 32 * 128 + 2 * 8 * 128 + 3 * 9728)
    cost = CostModel(token=36 * projections, attention=36 * 4 * 32 * 128, scored=0)
    tree = group(*shape)
    assert cost.flat(tree) / cost.shared(tree) == pytest.approx(ratio, rel=0.02)  # the table is of a model "like" it


def test_products_of_a_real_model() -> None:
    """Counted by torch, where attention is a dense product of all rows and keys."""
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL, attn_implementation="eager"))
    cost, length = CostModel.of(model), 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, length, dtype=torch.long))
    expected = cost.token * length + cost.attention * length * length + cost.scored * length
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)


def delta_rule(query, key, value, g, beta, **_: Any) -> tuple[torch.Tensor, None]:
    """The recurrence, step by step: three products of the state for each token and head."""
    ways = value.shape[2] // key.shape[2]
    state = value.new_zeros(value.shape[2], key.shape[-1], value.shape[-1])
    out = []
    for t in range(value.shape[1]):
        q, k = (x[0, t].repeat_interleave(ways, 0) for x in (query, key))
        state = state * g[0, t].exp().reshape(len(q), -1, 1)
        new = beta[0, t, :, None] * (value[0, t] - torch.bmm(k[:, None], state)[:, 0])
        state = state + torch.bmm(k[:, :, None], new[:, None])
        out.append(torch.bmm(q[:, None], state)[:, 0])
    return torch.stack(out)[None], None


def scan(hidden_states, dt, A, B, C, *_: Any, **__: Any) -> torch.Tensor:
    ways = hidden_states.shape[2] // B.shape[2]
    state = hidden_states.new_zeros(hidden_states.shape[2], B.shape[-1], hidden_states.shape[-1])
    out = []
    for t in range(hidden_states.shape[1]):
        b, c = (x[0, t].repeat_interleave(ways, 0) for x in (B, C))
        x = hidden_states[0, t] * dt[0, t, :, None]
        state = state * (dt[0, t] * A).exp()[:, None, None] + torch.bmm(b[:, :, None], x[:, None])
        out.append(torch.bmm(c[:, None], state)[:, 0])
    return torch.stack(out)[None]


STEPS = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": scan,
    "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,
}


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "nemotron_h", "lfm2", "deepseek_v3", "glm4_moe_lite"])
def test_products_of_hybrids_and_latent_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by torch, with recurrences that this file computes step by step."""
    model = (recurrent_models.make if family in recurrent_models.FAMILIES else moe_models.make)(family)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # torch does not count grouped products
    home = sys.modules[type(model).__module__]
    for name, step in STEPS.items():
        if hasattr(home, name):
            monkeypatch.setattr(home, name, step)
    cost, length = CostModel.of(model), 100
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(length)[None] % 48, use_cache=False)
    expected = cost.token * length + cost.attention * length * length + cost.scored * length
    assert counter.get_total_flops() == pytest.approx(expected, rel=2e-3)  # convolutions compute some rows of padding


def test_only_active_experts_count() -> None:
    def cost(active: int) -> float:
        config = Qwen3MoeConfig(**SMALL, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=active)
        return CostModel.of(Qwen3MoeForCausalLM(config)).token

    assert cost(2) - cost(1) == pytest.approx(2 * 2 * 3 * 32 * 24)  # layers x three matrices of one expert


def test_ranks_get_equal_work_and_equally_many_batches() -> None:
    model, _ = make_models("qwen3")
    cost = CostModel.of(model)
    rng = np.random.default_rng(0)
    trees = [group(int(rng.integers(5, 60)), int(rng.integers(1, 30)), int(rng.integers(1, 9))) for _ in range(60)]
    of_ranks = distribute(trees, 4, cost, max_tokens=600)
    assert len({len(batches) for batches in of_ranks}) == 1
    real = [[b for b in batches if b.trees] for batches in of_ranks]
    assert sorted(i for batches in real for b in batches for i in b.tree_index) == list(range(60))
    work = [sum(cost.shared(t) for b in batches for t in b.trees) for batches in real]
    assert max(work) <= 1.02 * min(work)
    few = distribute(trees[:3], 4, cost, max_tokens=600)
    assert [sorted(i for b in batches for i in b.tree_index) for batches in few if batches[0].trees] == [[0], [1], [2]]
    assert len({len(batches) for batches in few}) == 1
    assert distribute([], 4, cost, max_tokens=600) == [[], [], [], []]


@pytest.mark.parametrize("count", [0, 2, 3, 30])
def test_the_share_that_a_rank_packs_alone_is_that_of_the_whole_batch(count: int) -> None:
    """The same batches and totals; a rank without a tree has fillers. No rank reads more than its costs and its own."""
    model, _ = make_models("qwen3")
    cost, ranks = CostModel.of(model), 4
    rng = np.random.default_rng(count)
    trees = [group(int(rng.integers(5, 60)), int(rng.integers(1, 30)), int(rng.integers(1, 9))) for _ in range(count)]
    of_ranks = distribute(trees, ranks, cost, max_tokens=90)
    told: dict[int, list[Any]] = {}
    meet = threading.Barrier(ranks)
    read: list[set[int]] = [set() for _ in range(ranks)]

    class Seen(list):
        def __init__(self, rank: int) -> None:
            super().__init__(trees)
            self.rank = rank

        def __getitem__(self, i: Any) -> Any:
            read[self.rank].add(i)
            return super().__getitem__(i)

    def share(rank: int) -> Share:
        def gather(value: Any) -> list[Any]:
            told[rank] = value
            meet.wait(10)
            values = [told[other] for other in range(ranks)]
            meet.wait(10)
            return values

        return own_share(Seen(rank), rank, ranks, cost, gather, max_tokens=90)

    with ThreadPoolExecutor(ranks) as threads:
        shares = list(threads.map(share, range(ranks)))
    for rank, (mine, whole) in enumerate(zip(shares, of_ranks, strict=True)):
        assert len(mine.batches) == len(whole)
        assert [b.tree_index for b in mine.batches] == [b.tree_index for b in whole]
        for one, other in zip(mine.batches, whole, strict=True):
            if one.trees:
                assert torch.equal(one.input_ids, other.input_ids)
                assert torch.equal(one.target, other.target)
            assert one.trees or not one.loss_mask.any()
        own = {i for batch in mine.batches for i in batch.tree_index}
        smallest = {min(range(count), key=lambda i: (cost.shared(trees[i]), i))} if count and not own else set()
        assert read[rank] <= own | set(range(rank, count, ranks)) | smallest
    real = [batch for batches in of_ranks for batch in batches if batch.trees]
    assert {mine.real for mine in shares} == {len(real)}
    parts = [part for b in real for part in zip(b.tree_index, b.leaf_index, strict=True)]
    assert {mine.whole for mine in shares} == {all(len(leaves) == trees[i].num_leaves for i, leaves in parts)}
    assert len({mine.work for mine in shares}) == 1


def test_ranks_take_the_batches_of_one_process_in_turn() -> None:
    trees = [group(10 + i, 5, 3) for i in range(9)]
    batches = pack(trees, max_tokens=40)
    assert len(batches) % 2 == 1
    first, second = deal(trees, 2, max_tokens=40)
    assert [b.tree_index for b in first] == [b.tree_index for b in batches[::2]]
    assert [b.tree_index for b in second] == [*(b.tree_index for b in batches[1::2]), ()]
    assert not second[-1].loss_mask.any()
    assert deal([], 2, max_tokens=40) == [[], []]


def test_the_ranks_together_learn_what_one_would() -> None:
    model, _ = make_models("qwen3")
    trees = [random_tree(seed, 3, leaves) for seed, leaves in enumerate((2, 25, 3, 2, 4))]
    objective = Objective.preset("gspo", entropy_coef=0.01)

    def gradients(batches: list) -> list[torch.Tensor]:
        model.zero_grad()
        for batch in batches:
            batch_loss(model, batch, objective, normalizer=3.0, old_logprob=None).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    of_ranks = distribute(trees, 3, CostModel.of(model), max_tokens=75)
    fillers = [b for batches in of_ranks for b in batches if not b.trees]
    assert fillers, "no rank was short of a batch"
    assert not any(b.loss_mask.any() for b in fillers)
    together = gradients([b for batches in of_ranks for b in batches])
    for got, want in zip(together, gradients(pack(trees, max_tokens=10_000)), strict=True):
        close(got, want, 2e-5)


def test_trees_that_save_little_are_packed_as_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in batches of its own kind, for a kernel of plain sequences; together they teach what the trees do."""
    model, _ = make_models("mistral-window")
    cost = CostModel.of(model)
    sharing, lone = group(60, 5, 6), group(3, 40, 2)
    for tree in (sharing, lone):
        tree.token_id %= 97
        tree.advantage[:] = np.arange(tree.num_leaves) - 1.0
    assert cost.flat(lone) < 1.1 * cost.shared(lone)
    objective = Objective.preset("grpo")
    calls = []

    def plain_attention(q, k, v, cu, longest, scale, window):  # type: ignore[no-untyped-def]
        calls.append((cu.tolist(), longest, window))
        end = torch.repeat_interleave(cu[1:], cu.diff()).int()
        position = torch.arange(len(q)) - torch.repeat_interleave(cu[:-1], cu.diff())
        return tree_attention(q, k, v, end, scale=scale, position=position, window=window)

    monkeypatch.setattr(varlen, "kernel", lambda: plain_attention)
    monkeypatch.setattr(varlen, "fits", lambda query, softcap: True)
    results = []
    for batches in (pack([sharing, lone], max_tokens=300), pack([sharing, lone], max_tokens=300, unshare=cost)):
        model.zero_grad()
        for batch in batches:
            batch_loss(model, batch, objective, normalizer=8.0, old_logprob=None).loss.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert [b.cu_seqlens is None for b in batches] == [True, False]
    assert batches[1].tree_index == (1, 1)
    assert calls == [([0, 43, 86], 43, 7)] * 2  # both layers, once
    for got, want in zip(*results, strict=True):
        close(got, want, 2e-5)
