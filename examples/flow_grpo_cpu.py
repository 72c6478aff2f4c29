"""GRPO on a flow model of points in a plane: log-probs come from Gaussian denoising steps, not from tokens.

    python examples/flow_grpo_cpu.py           # Flow-GRPO: 8 trajectories a prompt, one advantage each
    python examples/flow_grpo_cpu.py --tree    # BranchGRPO: they share their first steps, with credit by depth

A prompt is a direction. The flow first learns to draw points on a circle, whatever the prompt; the reward then asks for
the point in the prompt's direction. To rolltree a denoising step is a token: its id is the step's number in a table of
all steps, a `TokenTree` holds which steps follow which, and `policy_loss` takes log-probs from any source.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from rolltree.engine import LeafStatus, Segment, TokenTree, TreeBatch, pack
from rolltree.engine.methods.advantages import ADVANTAGES
from rolltree.engine.methods.credit import give_credit
from rolltree.kernels import Objective, policy_loss

STEPS, NOISE = 9, 0.7  # denoising steps of a trajectory, and the size of their noise
FLAT, TREE = {0: 8}, {0: 2, 3: 2, 6: 2}  # at each of these steps every trajectory goes on as so many
OBJECTIVE = Objective(eps_low=0.2, eps_high=0.2, aggregation="token_mean")


class Table(NamedTuple):
    x: Tensor  # [N, 2] before the step
    time: Tensor  # [N, 1] from 1 (noise) down to 1 / STEPS
    goal: Tensor  # [N, 2] the prompt, a unit vector
    after: Tensor  # [N, 2]


def step(flow: nn.Module, x: Tensor, time: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean ``[N, 2]`` and deviation ``[N, 1]`` of the next point: a step of the reverse SDE that has the flow's
    marginals (Flow-GRPO, Liu et al. 2025, arXiv 2505.05470), with noise ``sigma = NOISE sqrt(t)``."""
    v = flow(torch.cat([x, time, goal], 1))
    drift = v + NOISE**2 / 2 * (x + (1 - time) * v)  # sigma^2 / (2 t) is NOISE^2 / 2
    return x - drift / STEPS, NOISE * (time / STEPS).sqrt()


def logprob(flow: nn.Module, table: Table) -> Tensor:  # [N]
    """Return the log-densities of the Gaussian steps."""
    mean, s = step(flow, table.x, table.time, table.goal)
    return (-(table.after - mean).square() / (2 * s**2) - s.log() - math.log(2 * math.pi) / 2).sum(1)


@torch.no_grad()
def sample(flow: nn.Module, goals: Tensor, splits: dict[int, int]) -> tuple[Table, list[TokenTree]]:
    """Sample a tree of trajectories for each of ``goals [P, 2]``, from one point of noise each, and judge them."""
    x, prompt, node = torch.randn_like(goals), torch.arange(len(goals)), [0] * len(goals)
    parents, ids = [[-1] for _ in goals], [[[0]] for _ in goals]  # of each tree: its nodes, and their tokens
    rows = list[Table]()
    for k in range(STEPS):
        x, prompt = (values.repeat_interleave(splits.get(k, 1), 0) for values in (x, prompt))
        node = [parent for parent in node for _ in range(splits.get(k, 1))]
        time, goal, count = torch.full((len(x), 1), 1 - k / STEPS), goals[prompt], sum(len(row.x) for row in rows)
        mean, s = step(flow, x, time, goal)
        rows.append(Table(x, time, goal, mean + s * torch.randn_like(mean)))
        x = rows[-1].after
        for i, tree in enumerate(prompt.tolist()):
            if k in splits:  # a new node below the present one
                parents[tree].append(node[i])
                ids[tree].append([])
                node[i] = len(ids[tree]) - 1
            ids[tree][node[i]].append(count + i)
    table, trees = Table(*map(torch.cat, zip(*rows, strict=True))), list[TokenTree]()
    old = logprob(flow, table).numpy()
    reward = ((x * goals[prompt]).sum(1) - (x.norm(dim=1) - 1).square()).numpy()
    for p, (first, *others) in enumerate(ids):
        segments = [Segment.prompt(first), *(Segment.sampled(some, old[some]) for some in others)]
        mine = np.flatnonzero(prompt.numpy() == p)
        trees.append(TokenTree.from_nodes(parents[p], segments, [node[i] for i in mine], [LeafStatus.STOP] * len(mine)))
        trees[p].rewards["reward"] = reward[mine]
    return table, trees


def loss_of(lp: Tensor, batch: TreeBatch) -> Tensor:
    """Return the clipped loss of the log-probs ``lp [N]`` of a table, with its gradient to them."""
    fields = batch.fields(OBJECTIVE, old_logprob="behaviour")
    return policy_loss(lp[batch.target], fields, OBJECTIVE, normalizer=batch.loss_tokens).loss


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(splits: dict[int, int], updates: int = 60, prompts: int = 64, fit: int = 500) -> list[float]:
    """Train a new flow; return the mean reward before each of ``updates``, of two optimiser steps each."""
    flow = nn.Sequential(nn.Linear(5, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    optimizer, rewards = torch.optim.Adam(flow.parameters(), lr=2e-3), []
    for _ in range(fit):  # learn the circle: v = noise - x_0 at x_t = (1 - t) x_0 + t noise
        (data, goal), noise, time = normalize(torch.randn(2, 256, 2), dim=2), torch.randn(256, 2), torch.rand(256, 1)
        v = flow(torch.cat([(1 - time) * data + time * noise, time, goal], 1))
        update(optimizer, (v - (noise - data)).square().mean())
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
    for _ in range(updates):
        table, trees = sample(flow, normalize(torch.randn(prompts, 2)), splits)
        rewards.append(float(np.mean([tree.rewards["reward"].mean() for tree in trees])))
        name = "depth_norm" if len(splits) > 1 else "group_norm"
        give_credit(ADVANTAGES[name], name, trees)
        (batch,) = pack(trees, max_tokens=len(table.x) + len(trees))
        for _ in range(2):
            update(optimizer, loss_of(logprob(flow, table), batch))
    return rewards


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    torch.manual_seed(0)
    for number, reward in enumerate(train(TREE if "--tree" in sys.argv else FLAT)):
        print(f"update {number}: reward {reward:.3f}")  # at most 1.25
