"""Tiny engines and batches of the real verl on a CPU, and what a forward and backward through one is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForTokenClassification, Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("verl", reason="verl is not installed: `make verl`")

from tensordict import TensorDict
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA


class Cpu(PlatformCUDA):
    """A CPU as a platform of verl; its engines are those that verl has for CUDA."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        get_device_name=lambda: "CPU",
        empty_cache=lambda: None,
        mem_get_info=lambda: (0, 0),
        **{f"{peak}memory_{kind}": lambda: 0 for peak in ("", "max_") for kind in ("allocated", "reserved")},
    )

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def is_available(self) -> bool:
        return True


os.environ["VERL_ENGINE_DEVICE"] = "cuda"
set_platform(Cpu())

from verl.models.transformers import monkey_patch  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import model as verl_model  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding  # noqa: E402

from rolltree.engine.model import fused_layers  # noqa: E402
from rolltree.kernels.libraries import load_library  # noqa: E402

LIBRARY = "rolltree.engine.integrations.verl_trees"
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
VOCABULARY, P, R = 97, 7, 6


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Replace the parts of verl and FSDP that need flash-attn or a GPU, or do not run together with this TRL."""
    with pytest.MonkeyPatch.context() as patch:
        # of TRL verl asks for a class that its newer versions do not have; without TRL it does not ask
        patch.setattr(monkey_patch, "is_trl_available", lambda: False)
        # verl's loader of critics demands flash-attn, whatever attention is configured
        patch.setattr(verl_model, "load_valuehead_model", value_model)
        # FSDP refuses to send the weights of a CPU from rank to rank
        patch.setattr(torch.distributed.fsdp._init_utils, "_check_module_states_for_sync_module_states", lambda _: None)
        yield


def value_model(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )


def save_model(path: Path, tied: bool = False) -> str:
    made = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(made).save_pretrained(path)
    return str(path)


def config(
    path: str, tree: bool, strategy: str = "fsdp2", kind: str = "language_model", **options: Any
) -> TrainingWorkerConfig:
    """Return the configuration of a worker's model in verl; with ``tree`` under `LIBRARY`."""
    of_model = {"lora_rank", "enable_gradient_checkpointing", "use_fused_kernels", "fused_kernel_options"}
    given = {"enable_gradient_checkpointing": False} | {k: options.pop(k) for k in of_model & options.keys()}
    attention = {} if tree else {"attn_implementation": "sdpa"}
    library = LIBRARY if tree else None
    return TrainingWorkerConfig(
        model_type=kind,
        model_config=HFModelConfig(
            path=path, load_tokenizer=False, external_lib=library, override_config=attention, **given
        ),
        engine_config=FSDPEngineConfig(
            **{"strategy": strategy, "mixed_precision": FP32, "use_torch_compile": False} | options
        ),
        optimizer_config=FSDPOptimizerConfig(lr=0.01, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )


def engine(*args: Any, **options: Any) -> Any:
    """The engine of such a worker."""
    made = config(*args, **options)
    made.model_config.model_type = made.model_type
    torch.manual_seed(0)  # of adapters and of the heads of critics
    found = EngineRegistry.new(
        made.model_type,
        made.engine_config.strategy,
        model_config=made.model_config,
        engine_config=made.engine_config,
        optimizer_config=made.optimizer_config,
        checkpoint_config=made.checkpoint_config,
    )
    found.initialize()
    return found


def batch(groups: tuple[int, ...], seed: int = 0, shuffled: bool = False, **more: Any) -> TensorDict:
    """Samples as verl's trainer hands them to workers: made from prompts padded on the left, responses on the right."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for size in groups:
        prompt = torch.randint(VOCABULARY, (int(torch.randint(1, P + 1, (), generator=rng)),), generator=rng)
        lengths = torch.randint(0, R + 1, (size,), generator=rng)
        rows += [(prompt, torch.randint(0, 3, (int(n),), generator=rng)) for n in lengths]  # some share their begin
    if shuffled:
        rows = [rows[i] for i in torch.randperm(len(rows), generator=rng)]
    B = len(rows)
    prompts, responses = torch.full((B, P), 5), torch.full((B, R), 5)
    mask = torch.zeros(B, P + R, dtype=torch.long)
    for i, (prompt, response) in enumerate(rows):
        prompts[i, P - len(prompt) :] = prompt
        responses[i, : len(response)] = response
        mask[i, P - len(prompt) : P + len(response)] = 1
    of_loss = mask[:, P:].clone()
    of_loss[:, 2] = 0  # a tool's answer
    values = partial(torch.rand, B, R, generator=rng)
    data = TensorDict(
        {
            "prompts": prompts, "responses": responses, "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "response_mask": of_loss,
            "old_log_probs": -5 * values(), "ref_log_prob": -5 * values(), "advantages": values() - 0.5,
            "values": values(), "returns": values(),
        },
        batch_size=B,
    )  # fmt: skip
    data = left_right_2_no_padding(data)
    common = {"temperature": 0.7, "global_batch_size": B, "calculate_entropy": True, "use_dynamic_bsz": False}
    tu.assign_non_tensor(data, **common | {"micro_batch_size_per_gpu": B} | more)
    return data


class Done(NamedTuple):
    """The result of a forward and backward pass through an engine."""

    loss: list[float]  # of each micro-batch
    metrics: dict[str, list[float]]
    gradients: dict[str, Tensor]
    seen: list[int]  # tokens that the model was given, of each micro-batch
    fused: set[str]  # ops of layers that computed
    outputs: dict[str, Tensor]  # of the same batch, inferred: [B, R]


LAYER_OPS = {"rms_norm", "rotate", "silu_mul"} if load_library("cpu") else set()
"""Those that `fuse_layers` puts into a Qwen3 here."""


@contextmanager
def fused() -> Iterator[set[str]]:
    """Return the ops of layers that compute meanwhile."""
    seen: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rms_norm", "rotate", "silu_mul"):
            op = getattr(fused_layers, name)
            patch.setattr(fused_layers, name, lambda *given, op=op, name=name: seen.add(name) or op(*given))
        yield seen


def done(engine: Any, data: TensorDict, loss: Any) -> Done:
    seen: list[int] = []
    model = next(m for m in engine.module.modules() if hasattr(m, "get_input_embeddings"))
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0].numel()))
    with engine.train_mode(), fused() as ops:
        engine.optimizer_zero_grad()
        out = engine.forward_backward_batch(data.copy(), loss)
        gradients = {
            name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
            for name, p in engine.module.named_parameters()
            if p.requires_grad
        }
    hook.remove()
    with engine.eval_mode():
        found = engine.infer_batch(data.copy())["model_output"]
    outputs = {name: no_padding_2_padding(values, data) for name, values in found.items()}
    metrics = {
        name: [float(v) for v in (values.values if hasattr(values, "aggregation") else values)]
        for name, values in out["metrics"].items()
    }
    return Done(out["loss"], metrics, gradients, seen, ops, outputs)


def tokens_of_trees(data: TensorDict, sizes: list[int]) -> list[int]:
    """Distinct prefixes of every micro-batch of the given sizes."""
    rows = [tuple(ids.tolist()) for ids in data["input_ids"].unbind()]
    found, first = [], 0
    for size in sizes:
        some = rows[first : first + size]
        found.append(len({row[: n + 1] for row in some for n in range(len(row))}))
        first += size
    return found


def same(ours: Done, theirs: Done) -> None:
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5, abs=1e-6)
    assert ours.metrics.keys() == theirs.metrics.keys()
    for name, values in theirs.metrics.items():
        assert ours.metrics[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name
    same_gradients(ours, theirs)
    assert ours.outputs.keys() == theirs.outputs.keys()
    for name, output in theirs.outputs.items():
        torch.testing.assert_close(ours.outputs[name], output, rtol=1e-5, atol=1e-5, msg=name)


def same_gradients(ours: Done, theirs: Done) -> None:
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, gradient in theirs.gradients.items():
        bound = 1e-5 * max(float(gradient.abs().max()), 1e-3)
        assert (ours.gradients[name] - gradient).abs().max() <= bound, name


def actor(**options: Any) -> Any:
    more = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "loss_agg_mode": "token-mean"} | options
    return partial(ppo_loss, config=ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **more))


def on_rank(number: int, store: str, path: str) -> None:
    """Run the part of one of two ranks of the test below."""
    dist.init_process_group("gloo", rank=number, world_size=2, store=dist.FileStore(store, 2))
    with on_a_cpu():
        for strategy in ("fsdp2", "fsdp"):
            pair = [engine(path, tree, strategy) for tree in (True, False)]
            groups = ((4, 4), (2, 6))[number]
            data = batch(groups, seed=number, global_batch_size=16, micro_batch_size_per_gpu=4)
            ours, theirs = (done(of, data, actor()) for of in pair)
            same(ours, theirs)
            assert ours.seen == tokens_of_trees(data, [4, 4])
            tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=P * 4 + R * 4)
            same_gradients(*(done(of, data, actor()) for of in pair))
    dist.destroy_process_group()
