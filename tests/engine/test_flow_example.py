"""examples/flow_grpo_cpu.py: its gradient to external log-probs is that of the clipped ratio, and its reward rises."""

from __future__ import annotations

import importlib.util
import math
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rolltree.engine import pack
from rolltree.engine.methods.advantages import ADVANTAGES
from rolltree.engine.methods.credit import give_credit

from ..support.tiny import ROOT

PROMPTS, LEAVES, STEPS = 5, 8, 9


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flow_grpo_cpu", ROOT / "examples" / "flow_grpo_cpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gaussian(flow: nn.Module, x: Tensor, time: Tensor, goal: Tensor, after: Tensor) -> Tensor:
    """The log-density of a step of the reverse SDE, whose score is -E[noise | x] / t."""
    v = flow(torch.cat([x, time, goal], 1))
    score, sigma, h = -(x + (1 - time) * v) / time, 0.7 * time.sqrt(), 1 / STEPS
    mean = x - h * (v - sigma**2 / 2 * score)
    return torch.distributions.Normal(mean, sigma * math.sqrt(h)).log_prob(after).sum(1)


def normalised(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (values.std(ddof=1) + 1e-6)


def row(live: list[int], step: int, leaf: int) -> int:
    """The place in the table of a trajectory's step, where ``live`` trajectories of all prompts are at each step."""
    return sum(live[:step]) + leaf * live[step] // (PROMPTS * LEAVES)


@pytest.mark.parametrize("tree", [False, True])
def test_the_gradient_to_external_logprobs_is_that_of_the_clipped_ratio(example: ModuleType, tree: bool) -> None:
    torch.manual_seed(0)
    flow = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 2))
    goals = nn.functional.normalize(torch.randn(PROMPTS, 2))
    table, trees = example.sample(flow, goals, example.TREE if tree else example.FLAT)
    live = [PROMPTS * (LEAVES if not tree else 2 ** (1 + k // 3)) for k in range(STEPS)]
    old = gaussian(flow, *table).detach()
    assert len(old) == sum(live)

    last = table.after[-PROMPTS * LEAVES :]
    reward = ((last * goals.repeat_interleave(LEAVES, 0)).sum(1) - (last.norm(dim=1) - 1) ** 2).double().numpy()
    np.testing.assert_allclose(np.concatenate([tree.rewards["reward"] for tree in trees]), reward, atol=1e-6)
    groups = reward.reshape(PROMPTS, LEAVES)
    credit = np.empty((PROMPTS, LEAVES, STEPS))
    for k in range(STEPS):
        nodes = 2 ** (1 + k // 3) if tree else LEAVES
        of_nodes = [normalised(group.reshape(nodes, -1).mean(1)) for group in groups]
        credit[:, :, k] = np.repeat(of_nodes, LEAVES // nodes, 1)

    name = "depth_norm" if tree else "group_norm"
    give_credit(ADVANTAGES[name], name, trees)
    (batch,) = pack(trees, max_tokens=10**5)
    with torch.no_grad():
        for p in flow.parameters():
            p += 0.15 * torch.randn_like(p)
    lp = example.logprob(flow, table)
    torch.testing.assert_close(lp, gaussian(flow, *table))
    given = lp.detach().requires_grad_()
    loss = example.loss_of(given, batch)
    loss.backward()

    mine = lp.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    clipped = 0
    for leaf in range(PROMPTS * LEAVES):
        for k in range(STEPS):
            i, A = row(live, k, leaf), credit[leaf // LEAVES, leaf % LEAVES, k]
            r = (mine[i] - old[i].double()).exp()
            total = total - torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
            clipped += bool(r * A > r.clamp(0.8, 1.2) * A)
    total = total / (PROMPTS * LEAVES * STEPS)
    total.backward()
    assert 20 < clipped < PROMPTS * LEAVES * STEPS / 2
    torch.testing.assert_close(loss.double(), total, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(given.grad.double(), mine.grad, atol=1e-8, rtol=1e-4)


@pytest.mark.parametrize("splits", [pytest.param("FLAT", marks=pytest.mark.slow), "TREE"])
def test_the_reward_rises(example: ModuleType, splits: str) -> None:
    torch.manual_seed(0)
    rewards = example.train(getattr(example, splits), updates=10, prompts=12, fit=30)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
