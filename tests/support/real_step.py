"""Takes steps of the tiny run and keeps, of each update, the trees, the weights before it and the gradient.

A test computes the loss of its method from the formula, on plain sequences and with a plain model, and compares:
nothing of the loss, the credit or the trees' packing is used twice.
"""

from __future__ import annotations

import atexit
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rolltree.engine import Orchestrator, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.rewards import RewardItem, RewardResult, Rewards
from rolltree.engine.settings import RewardConfig

FIXED = (
    "--trainer.steps=1", "--evaluation.problems=0", "--evaluation.every=0", "--rollout.program=flat",
    "--rollout.program_options={}", "--checkpoint.every=1", "--algorithm.advantage=group_norm",
)  # fmt: skip


@dataclass
class Update:
    """One optimiser step."""

    trees: list[TokenTree]
    given: list[TokenTree]
    weights: dict[str, Tensor]
    gradient: dict[str, Tensor]
    loss: float


@dataclass
class Steps:
    """The updates of a run, its rows of metrics and its notes."""

    updates: list[Update]
    rows: list[dict[str, float]]
    orchestrator: Orchestrator
    notes: list[str]
    judged: list[TokenTree]
    """The trees of all steps as they were judged, with responses that no update counts."""

    @property
    def trees(self) -> list[TokenTree]:
        return [tree for update in self.updates for tree in update.trees]


STARTED: dict[str, Rewards] = {}


class Shared(Rewards):
    """A started pool that outlives its run: the next run with the same verifier does not start processes again."""

    def __init__(self, verifier: str, pool: Rewards) -> None:
        if verifier not in STARTED:
            STARTED[verifier] = pool.__enter__()
            atexit.register(pool.close)
        self.pool, self.by_group = STARTED[verifier], pool.by_group

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return self.pool.score(items)


def share_rewards(run: Orchestrator, reward: RewardConfig) -> None:
    """Let a run use the started pool of its verifier, if its parts do not follow the run's step."""
    if all(isinstance(part.weight, int | float) for part in reward.parts):
        shared = Shared(reward.model_dump_json(exclude={"shaping"}), run.rewards)
        verify: Any = run.sampling.program.verify
        verify._rewards = shared
        run.rewards, run.check_rewards = shared, str


def take_steps(toml: Path, directory: Path, *overrides: str, unset: Sequence[str] = (), resume: bool = False) -> Steps:
    """Run ``toml`` with `FIXED` and ``overrides``, without the keys in ``unset`` of either."""
    fixed = [flag for flag in FIXED if flag.partition("=")[0].removeprefix("--") not in unset]
    config = load_config(toml, [*fixed, f"--output_dir={directory}/runs", *overrides])
    console = Console()
    notes: list[str] = []
    console.note = notes.append  # type: ignore[method-assign,assignment]
    run = build(config, console=console, resume=resume)
    share_rewards(run, config.reward)
    learner, trainer = run.learner, run.learner.trainer
    updates: list[Update] = []
    judged: list[TokenTree] = []
    update, one_update, optim_step = learner.update, learner._one_update, trainer.optim_step

    def wrapped(trees: list[TokenTree], *rest: Any) -> bool:
        judged.extend(trees)
        return update(trees, *rest)

    def wrapped_update(members: list[TokenTree], *rest: Any, **options: Any) -> bool:
        given = next(some for some in rest if isinstance(some, list) and all(isinstance(t, TokenTree) for t in some))
        updates.append(Update(members, given, {}, {}, float("nan")))
        return one_update(members, *rest, **options)

    def wrapped_step() -> Any:
        mine = updates[-1]
        named = list(run.learner.model.named_parameters())
        mine.weights = {name: p.detach().clone() for name, p in named}
        mine.gradient = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}
        metrics = optim_step()
        mine.loss = metrics["actor/loss"][0]
        return metrics

    learner._one_update, trainer.optim_step = wrapped_update, wrapped_step  # type: ignore[method-assign]
    learner.update = wrapped  # type: ignore[method-assign]
    run.run()
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return Steps(updates, rows[1:], run, notes, judged)


def leaves_of(trees: Sequence[TokenTree]) -> list[tuple[TokenTree, int]]:
    return [(tree, leaf) for tree in trees for leaf in range(tree.num_leaves)]


def plain_logprobs(
    model: Any, tree: TokenTree, leaf: int, temperature: float = 1.0, *, vocabulary: bool = False
) -> Tensor:
    """Return the log-probs of a response's tokens ``[n]`` (or of every token ``[n, V]``) by a plain forward."""
    path = tree.path_rows(leaf)
    ids = torch.from_numpy(tree.token_id[path].astype(np.int64))
    first = int(tree.leaf_prompt[leaf])
    logits = model(input_ids=ids[None]).logits[0, first - 1 : -1] / temperature
    every = torch.log_softmax(logits.float(), -1)
    return every if vocabulary else every.gather(1, ids[first:, None])[:, 0]


def along(tree: TokenTree, leaf: int, column: str) -> Tensor:
    """Return the values ``[n]`` of a token column along a response."""
    return torch.from_numpy(np.array(getattr(tree, column)[tree.response_rows(leaf)]))


def plain_model(steps: Steps, update: Update) -> Any:
    """Return the model before ``update``, with the attention of transformers."""
    config = copy.deepcopy(steps.orchestrator.learner.model.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(update.weights, strict=False)
    model.tie_weights()
    return model.eval()


def check_gradient(steps: Steps, loss_of: Callable[[Any], Tensor], update: int = 0, tolerance: float = 2e-4) -> float:
    """Check that an update's loss and gradient are those of ``loss_of(model)``; return the loss."""
    mine = steps.updates[update]
    model = plain_model(steps, mine)
    loss = loss_of(model)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    off = torch.stack([(mine.gradient[name] - g).norm() for name, g in expected.items()]).norm()
    assert norm > 0, "the formula itself has no gradient, so nothing was compared"
    assert off <= tolerance * norm, f"gradient off by {off / norm:.2e} of its norm"
    assert abs(mine.loss - loss.item()) <= 2e-4 * max(1.0, abs(loss.item())), (mine.loss, loss.item())
    return loss.item()
