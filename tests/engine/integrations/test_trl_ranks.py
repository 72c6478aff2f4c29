"""GRPO on two ranks under DDP, with and without `accelerate`."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from ...support.ranks import run_ranks
from .trl_tiny import WHOLE, grpo, save_model

RANKS = 2
PARTS: dict[str, dict[str, bool] | None] = {
    "TRL": None,
    "tree": {"rollouts": False},
    "flat": {"tree": False, "rollouts": False},
}
OPTIONS = dict(num_iterations=2, learning_rate=0.5, per_device_train_batch_size=4, gradient_accumulation_steps=2)


def free_port() -> int:
    with socket.socket() as of:
        of.bind(("127.0.0.1", 0))
        return int(of.getsockname()[1])


def work(rank: int, path: str, directory: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    GradientState._reset_state()  # of the process that this one is a fork of
    AcceleratorState._reset_state(reset_partial_state=True)
    for name, parts in PARTS.items():
        done = grpo(path, parts, beta=0.1, **OPTIONS)
        assert done.accelerator.num_processes == RANKS
        assert isinstance(done.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        if rank == 0:
            weights = {key: weight.tolist() for key, weight in done.model.named_parameters()}
            Path(directory, name).write_text(json.dumps([done.state.log_history, weights]))
    dist.barrier()
    os._exit(0)  # runs no destructor: the trainer's process group would join threads of gloo that wait for the GIL


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a run logged and its weights, by the run's parts."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(work, (save_model(directory / "model"), str(directory), free_port()), RANKS)
    return {name: json.loads((directory / name).read_text()) for name in PARTS}


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["tree", "flat"])
def test_two_ranks(found: dict[str, Any], parts: str) -> None:
    (theirs, weights), (ours, own) = found["TRL"], found[parts]
    for a, b in zip(theirs, ours, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - WHOLE - {"entropy", "kl"} - {key for key in a if key.startswith("clip_ratio")}:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name
    assert own.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(torch.tensor(own[name]), torch.tensor(weight), rtol=1e-4, atol=1e-5, msg=name)
