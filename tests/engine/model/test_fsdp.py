"""Training on trees with the model sharded over two processes (FSDP2 on gloo), its layers fused: the gradients of one
process, with Transformers' own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rolltree.engine import batch_loss, fuse_layers, pack
from rolltree.engine.batches.cost import CostModel
from rolltree.engine.batches.distribute import distribute
from rolltree.engine.model import fused_layers
from rolltree.engine.model.sharding import shard
from rolltree.kernels import Objective
from rolltree.kernels.libraries import load_library

from ...support.ranks import run_ranks
from .test_tree_equals_flat import make_models, random_tree

RANKS = 2
OBJECTIVE = Objective.preset("gspo", entropy_coef=0.01)
CASES = {"qwen3": False, "gemma2-window-softcap": True}  # with and without activation checkpointing


def trees() -> list[Any]:
    return [random_tree(seed, 3, leaves) for seed, leaves in enumerate((12, 25, 3, 2))]


def work(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    for name, checkpointing in CASES.items():
        model, _ = make_models(name)
        mine = distribute(trees(), RANKS, CostModel.of(model), max_tokens=90)[rank]
        fuse_layers(model).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        shard(model)
        with mock.patch.object(fused_layers, "rotate", wraps=fused_layers.rotate) as fused:
            for batch in mine:
                out = batch_loss(model, batch, OBJECTIVE, normalizer=5.0, old_logprob=None)
                out.loss.backward()
        assert fused.called or not load_library("cpu")
        grads = {key: p.grad.full_tensor() for key, p in model.named_parameters()}
        save_file(grads, f"{directory}/{name}-{rank}.safetensors")
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    run_ranks(work, (str(tmp_path),), RANKS)
    for name in CASES:
        model, _ = make_models(name)
        (batch,) = pack(trees(), max_tokens=10_000)
        batch_loss(model, batch, OBJECTIVE, normalizer=5.0, old_logprob=None).loss.backward()
        for rank in range(RANKS):
            grads = load_file(tmp_path / f"{name}-{rank}.safetensors")
            assert len(grads) == len(list(model.parameters()))
            for key, p in model.named_parameters():
                assert (grads[key] - p.grad).norm() <= 2e-5 * p.grad.norm(), key
