"""Scores the rollouts of a step of a run anew, by the weights that sampled them, and compares the bits.

    python -m rolltree.bench.jobs.run_bits RUN --step 3

For runs with ``loop.staleness = 0`` that have a checkpoint of the step before. A process of its own computes the tokens
in batches that the run has not had: few trees at once, in pieces, and every response as a padded sequence. How many
sampled tokens were compared in each, and how many recorded log-probs have other bits, is printed as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rolltree.engine import UserError, load_config, pack
from rolltree.engine.batches.batch import TreeBatch
from rolltree.engine.data.store import read_rollouts
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.model.invariant.check import rescored
from rolltree.engine.model.loading import choose_device, load_model
from rolltree.engine.train import checkpoint

DIFFERENT = 3
"""The exit code where a log-prob has other bits; 1 is Python's own."""
PIECES = 6
"""Pieces of the largest tree."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all bits are equal, `DIFFERENT` if not, 2 if the run does not have what is compared."""
    parser = argparse.ArgumentParser(prog="python -m rolltree.bench.jobs.run_bits")
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, required=True)
    args = parser.parse_args(argv)
    try:
        bits = compared(args.run, args.step)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(bits))
    return DIFFERENT if any(counts["differing"] for counts in bits.values()) else 0


def compared(run: Path, step: int) -> dict[str, dict[str, int]]:
    """Return the tokens that were compared and those that differ, for each way in which they were batched.

    Raises:
        UserError: there is no checkpoint of the step before, it holds other weights than those that sampled ``step``,
            or the step has no sampled token.
    """
    trees = read_rollouts(run / "rollouts" / f"step_{step:06d}.parquet")
    model = model_of(run, step - 1, trees)
    bits = {name: rescored(model, trees, batches)._asdict() for name, batches in batched(trees, model.device).items()}
    if not all(counts["tokens"] for counts in bits.values()):
        raise UserError(f"The rollouts of step {step} in '{run}' have no sampled token to compare.")
    return bits


def batched(trees: Sequence[TokenTree], device: torch.device) -> dict[str, list[TreeBatch]]:
    """Return ``trees`` in batches of other tokens than a run's."""
    largest = max(tree.num_tokens for tree in trees)
    return {
        "trees": pack(trees, max_tokens=largest, device=device),
        "pieces": pack(trees, max_tokens=max(largest // PIECES, 1), in_pieces=True, device=device),
        "sequences": pack(trees, max_tokens=largest, device=device, flat=True),
    }


def model_of(run: Path, step: int, trees: Sequence[TokenTree]) -> Any:
    """Return the model of a run with the weights after ``step``, which have sampled all of ``trees``."""
    config = load_config(run / "config.toml").model
    saved = checkpoint.load(run / "checkpoints" / f"step_{step:06d}")
    updates = saved.state["learner"]["trainer"]["updates"]
    versions = {int(v) for tree in trees for v in np.unique(tree.policy_version[tree.loss_mask])}
    if versions - {updates}:
        raise UserError(
            f"Step {step + 1} of '{run}' was sampled by the weights of updates {sorted(versions)}, and the checkpoint "
            f"before it has those of update {updates}; compare a run with loop.staleness = 0."
        )
    model = load_model(
        config.path,
        dtype=getattr(torch, config.dtype),
        device=choose_device(config.device),
        batch_invariant=config.batch_invariant,
    )
    stored = checkpoint.read_tensors(saved.learner)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(stored[f"weight.{name}"])
    return model


if __name__ == "__main__":
    sys.exit(main())
