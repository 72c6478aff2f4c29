"""verl's FSDP engines on trees against verl's own, through their public methods on a CPU; `make verl` runs this."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
pytestmark = pytest.mark.verl

from tensordict import TensorDict  # noqa: E402
from verl.plugin.platform import set_platform  # noqa: E402
from verl.plugin.platform.platform_cuda import PlatformCUDA  # noqa: E402


class Cpu(PlatformCUDA):
    """What verl asks of a platform, of a CPU; its engines are those that it has for CUDA."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        mem_get_info=lambda: (0, 0), memory_allocated=lambda: 0, memory_reserved=lambda: 0, empty_cache=lambda: None,
        max_memory_allocated=lambda: 0, max_memory_reserved=lambda: 0, synchronize=lambda: None, is_available=lambda: True,
    )  # fmt: skip

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
from verl.workers.config import (  # noqa: E402
    ActorConfig,
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding  # noqa: E402

from rolltree.engine.errors import UserError  # noqa: E402

LIBRARY = "rolltree.engine.integrations.verl_trees"
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
VOCABULARY, P, R = 97, 7, 6
GROUPS = {"groups": (4, 2, 1, 3), "one group": (6,), "alone": (1,), "nothing shared": (1, 1, 1, 1)}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # of TRL verl asks for a class that its newer versions do not have; without TRL it does not ask
        patch.setattr(monkey_patch, "is_trl_available", lambda: False)
        # verl's loader of critics demands flash-attn, whatever attention is configured
        patch.setattr(verl_model, "load_valuehead_model", value_model)
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        yield
        dist.destroy_process_group()


def value_model(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Models, by whether their embeddings are tied."""
    found = {}
    for tied in (False, True):
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied, initializer_range=0.2,
        )  # fmt: skip
        torch.manual_seed(0)
        found[tied] = str(tmp_path_factory.mktemp("model"))
        Qwen3ForCausalLM(config).save_pretrained(found[tied])
    return found


def engine(path: str, tree: bool, strategy: str = "fsdp2", kind: str = "language_model", **options: Any) -> Any:
    """verl's engine of a model as its workers make it; with ``tree`` as they make it under `LIBRARY`."""
    of_model = {
        name: options.pop(name)
        for name in ("lora_rank", "enable_gradient_checkpointing", "use_remove_padding", "use_fused_kernels")
        if name in options
    }
    model = HFModelConfig(
        path=path, load_tokenizer=False, external_lib=LIBRARY if tree else None,
        override_config={} if tree else {"attn_implementation": "sdpa"},
        **{"enable_gradient_checkpointing": False} | of_model,
    )  # fmt: skip
    model.model_type = kind
    torch.manual_seed(0)
    made = EngineRegistry.new(
        kind,
        strategy,
        model_config=model,
        engine_config=FSDPEngineConfig(
            **{"strategy": strategy, "mixed_precision": FP32, "use_torch_compile": False} | options
        ),
        optimizer_config=FSDPOptimizerConfig(lr=0.01, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


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
    """Of a forward and backward through an engine."""

    loss: list[float]  # of each micro-batch
    metrics: dict[str, list[float]]
    gradients: dict[str, Tensor]
    seen: list[int]  # tokens that the model was given, of each micro-batch
    outputs: dict[str, Tensor]  # of the same batch, inferred: [B, R]


def done(engine: Any, data: TensorDict, loss: Any) -> Done:
    seen: list[int] = []
    model = next(m for m in engine.module.modules() if hasattr(m, "get_input_embeddings"))
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0].numel()))
    with engine.train_mode():
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
    return Done(out["loss"], metrics, gradients, seen, outputs)


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
    return partial(
        ppo_loss, config=ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **more)
    )


@pytest.fixture(scope="module", params=["fsdp2", "fsdp2 tied", "fsdp"])
def pair(request: pytest.FixtureRequest, paths: dict[bool, str]) -> tuple[Any, Any]:
    """Engines of the same weights: on trees, and verl's."""
    strategy, _, tied = request.param.partition(" ")
    ours, theirs = (engine(paths[bool(tied)], tree, strategy) for tree in (True, False))
    return ours, theirs


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_micro_batch(pair: tuple[Any, Any], groups: tuple[int, ...]) -> None:
    data = batch(groups)
    ours, theirs = (done(of, data, actor()) for of in pair)
    same(ours, theirs)
    assert set(ours.outputs) == {"log_probs", "entropy"}
    assert ours.seen == tokens_of_trees(data, [len(data)])
    assert theirs.seen == [len(data["input_ids"].values())]


def test_prompts_in_several_micro_batches(pair: tuple[Any, Any]) -> None:
    data = batch((4, 2, 1, 5), seed=1, micro_batch_size_per_gpu=3)
    ours, theirs = (done(of, data, actor()) for of in pair)
    same(ours, theirs)
    assert ours.seen == tokens_of_trees(data, [3] * 4)


@pytest.mark.parametrize("groups", [(4, 4, 4), (2, 2, 2, 6)], ids=["of a size", "of several"])
def test_micro_batches_by_tokens_hold_whole_groups(pair: tuple[Any, Any], groups: tuple[int, ...]) -> None:
    """verl cuts by workload and splits groups; on trees they stay together. The sums of an update are the same."""
    data = batch(groups, seed=2, shuffled=True, use_dynamic_bsz=True, max_token_len_per_gpu=52)
    ours, theirs = (done(of, data, actor()) for of in pair)
    assert len(ours.seen) > 1
    assert sum(ours.loss) == pytest.approx(sum(theirs.loss), rel=1e-5)
    for name in ("actor/pg_loss", "actor/entropy_loss", "kl_loss"):  # those that verl sums over micro-batches
        assert sum(ours.metrics[name]) == pytest.approx(sum(theirs.metrics[name]), rel=1e-5)
    same_gradients(ours, theirs)
    for name, output in theirs.outputs.items():  # in the order of the batch
        torch.testing.assert_close(ours.outputs[name], output, rtol=1e-5, atol=1e-5)
    rows = [tuple(ids.tolist()) for ids in data["input_ids"].unbind()]
    shared = len(rows[0])
    assert sum(ours.seen) < 0.8 * sum(theirs.seen) == 0.8 * sum(map(len, rows)), shared


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "rolltree_dapo", "rolltree_gspo"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_losses(pair: tuple[Any, Any], mode: str, aggregation: str) -> None:
    from rolltree.engine.integrations import verl as _  # registers its losses

    data = batch((4, 3), seed=3)
    loss = actor(policy_loss={"loss_mode": mode}, loss_agg_mode=aggregation)
    same(*(done(of, data, loss) for of in pair))


def test_temperatures_of_sequences_and_squared_probabilities(pair: tuple[Any, Any]) -> None:
    temperatures = torch.tensor([0.7, 1.3, 0.7, 0.5, 1.0, 1.0, 2.0])
    data = batch((4, 3), seed=4, calculate_sum_pi_squared=True)
    data["temperature"] = temperatures
    ours, theirs = (done(of, data, actor()) for of in pair)
    same(ours, theirs)
    assert "sum_pi_squared" in ours.outputs
    assert ours.seen == tokens_of_trees(data, [7])


def test_data_without_responses(pair: tuple[Any, Any]) -> None:
    """Supervised fine-tuning: a loss mask over whole sequences that share their beginnings."""
    given = batch((3, 1), seed=5)
    ids = given["input_ids"]
    mask = torch.nested.nested_tensor_from_jagged((torch.arange(len(ids.values())) % 3 > 0).long(), ids.offsets())
    data = TensorDict({"input_ids": ids, "position_ids": given["position_ids"], "loss_mask": mask}, batch_size=4)
    tu.assign_non_tensor(data, temperature=1.0, use_dynamic_bsz=False, micro_batch_size_per_gpu=4)
    found = []
    for of in pair:
        with of.train_mode():
            of.optimizer_zero_grad()
            out = of.forward_backward_batch(data.copy(), partial(sft_loss, config=None))
            norm = torch.stack([(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).norm() for p in of.module.parameters()])
        found.append((out["loss"], norm))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{"lora_rank": 4}, {"enable_gradient_checkpointing": True}], ids=["lora", "checkpointing"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_adapters_and_checkpointing(paths: dict[bool, str], strategy: str, options: dict[str, Any]) -> None:
    data = batch((4, 3), seed=6)
    if "lora_rank" in options and strategy == "fsdp":
        options = options | {"use_orig_params": True}
    ours, theirs = (done(engine(paths[False], tree, strategy, **options), data, actor()) for tree in (True, False))
    same(ours, theirs)
    assert ours.seen == tokens_of_trees(data, [7])


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_critic(paths: dict[bool, str], strategy: str) -> None:
    data = batch((4, 2, 1, 3), seed=7)
    loss = partial(value_loss, config=CriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1))
    ours, theirs = (
        done(engine(paths[False], tree, strategy, "value_model"), data, loss) for tree in (True, False)
    )
    same(ours, theirs)
    assert set(ours.outputs) == {"values"}
    assert ours.seen == tokens_of_trees(data, [len(data)])


def test_a_step_and_the_weights_that_rollouts_get(paths: dict[bool, str]) -> None:
    data = batch((4, 4), seed=8, micro_batch_size_per_gpu=4)
    found = []
    for tree in (True, False):
        made = engine(paths[False], tree)
        with made.train_mode():
            norm = made.train_batch(data.copy(), actor())["metrics"]["grad_norm"]
        weights = {name: w.full_tensor() if hasattr(w, "full_tensor") else w for name, w in made.get_per_tensor_param()[0]}
        found.append((norm, weights))
    (norm, ours), (expected, theirs) = found
    assert norm == pytest.approx(expected, rel=1e-5)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():  # Adam's first step is a sign: tiny gradients may round to either
        assert ((ours[name] - weight).abs() > 1e-4).float().mean() < 0.01, name


def test_half_precision_is_no_worse_than_verls(paths: dict[bool, str]) -> None:
    data = batch((4, 3), seed=9)
    half = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
    exact = done(engine(paths[False], False), data, actor()).outputs
    ours, theirs = (done(engine(paths[False], tree, **half), data, actor()).outputs for tree in (True, False))
    for name, expected in exact.items():
        error, of_verl = ((outputs[name].float() - expected).abs().max() for outputs in (ours, theirs))
        assert error <= 2 * of_verl, name
        assert of_verl > 1e-4, name  # it was in half precision


def test_models_that_do_not_name_it_keep_verls_engine(paths: dict[bool, str]) -> None:
    with_it, without = (engine(paths[False], tree) for tree in (True, False))
    assert type(with_it).__module__ == LIBRARY
    assert type(without).__module__.startswith("verl.")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size > 1"),
        ({"pad_to_length": True}, "pad_to_length"),
        ({"strategy": "fsdp_turbo"}, "batches of the strategy fsdp_turbo"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_options_that_are_refused(paths: dict[bool, str], options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"does not compute {named} on trees; .* {LIBRARY} out of external_lib"):
        engine(paths[False], True, **options)


def test_batches_that_are_refused(pair: tuple[Any, Any]) -> None:
    ours, _ = pair
    cases = {"distillation": {"distillation_use_topk": True}}
    for named, more in cases.items():
        with pytest.raises(UserError, match=named), ours.eval_mode():
            ours.infer_batch(batch((2,), **more))
    data = batch((2,))
    data["position_ids"] = torch.nested.nested_tensor_from_jagged(
        data["position_ids"].values() + 1, data["position_ids"].offsets()
    )
    with pytest.raises(UserError, match="position_ids that do not count from 0"), ours.eval_mode():
        ours.infer_batch(data)
