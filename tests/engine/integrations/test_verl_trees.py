"""verl's FSDP engines on trees against verl's own, through their public methods on a CPU; `make verl` runs this."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
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
from verl.workers.config import (  # noqa: E402
    ActorConfig,
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding  # noqa: E402

from rolltree.engine.errors import UserError  # noqa: E402
from rolltree.engine.integrations import verl as losses  # noqa: E402

LIBRARY = "rolltree.engine.integrations.verl_trees"
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
VOCABULARY, P, R = 97, 7, 6
GROUPS = {"groups": (4, 2, 1, 3), "one group": (6,), "alone": (1,), "nothing shared": (1, 1, 1, 1)}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with on_a_cpu():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        yield
        dist.destroy_process_group()


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """What of verl and FSDP does not run beside this TRL, without flash-attn or without a GPU."""
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


def config(
    path: str, tree: bool, strategy: str = "fsdp2", kind: str = "language_model", **options: Any
) -> TrainingWorkerConfig:
    """What verl makes a worker of a model from; with ``tree`` under `LIBRARY`."""
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
    return partial(ppo_loss, config=ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **more))


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


@pytest.mark.parametrize("groups", [(4, 4, 4, 4), (2, 2, 2, 6)], ids=["of a size", "of several"])
def test_micro_batches_by_tokens_hold_whole_groups(pair: tuple[Any, Any], groups: tuple[int, ...]) -> None:
    """verl cuts by workload and splits groups; on trees they stay together. The sums of an update are the same."""
    data = batch(groups, seed=2, shuffled=True, use_dynamic_bsz=True, max_token_len_per_gpu=P * 4 + R * 4)
    ours, theirs = (done(of, data, actor()) for of in pair)
    assert len(ours.seen) > 1
    assert sum(ours.loss) == pytest.approx(sum(theirs.loss), rel=1e-5)
    for name in ("actor/pg_loss", "actor/entropy_loss", "kl_loss"):  # those that verl sums over micro-batches
        assert sum(ours.metrics[name]) == pytest.approx(sum(theirs.metrics[name]), rel=1e-5)
    same_gradients(ours, theirs)
    for name, output in theirs.outputs.items():  # in the order of the batch
        torch.testing.assert_close(ours.outputs[name], output, rtol=1e-5, atol=1e-5)
    assert sum(theirs.seen) == len(data["input_ids"].values())
    in_order = batch(groups, seed=2)  # the samples of a prompt side by side
    assert sum(ours.seen) <= sum(tokens_of_trees(in_order, list(groups))) + (len(set(groups)) > 1) * P


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "rolltree_dapo", "rolltree_gspo"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_losses(pair: tuple[Any, Any], mode: str, aggregation: str) -> None:
    assert not mode.startswith("rolltree") or mode.removeprefix("rolltree_") in losses.objectives()
    data = batch((4, 3), seed=3)
    loss = actor(policy_loss={"loss_mode": mode}, loss_agg_mode=aggregation)
    same(*(done(of, data, loss) for of in pair))


def test_samples_without_any_response(pair: tuple[Any, Any]) -> None:
    data = batch((3, 1), seed=3)
    data["attention_mask"][:, P:] = 0
    ids = torch.nested.nested_tensor_from_jagged(
        data["prompts"][data["attention_mask"][:, :P].bool()],
        torch.nn.functional.pad(data["attention_mask"].sum(1).cumsum(0), (1, 0)),
    )
    data["input_ids"] = ids
    data["position_ids"] = torch.nested.as_nested_tensor(
        [torch.arange(len(x)) for x in ids.unbind()], layout=torch.jagged
    )
    same(*(done(of, data, actor(loss_agg_mode="token-sum")) for of in pair))


def test_nested_prompts_and_responses(pair: tuple[Any, Any]) -> None:
    """As verl's newer trainer keeps them: without any padding."""
    data = batch((4, 3), seed=10)
    mask = data["attention_mask"].bool()
    for name, kept in (("prompts", mask[:, :P]), ("responses", mask[:, P:])):
        offsets = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
        data[name] = torch.nested.nested_tensor_from_jagged(data[name][kept], offsets)
    ours, theirs = (done(of, data, actor()) for of in pair)
    same(ours, theirs)
    assert ours.seen == tokens_of_trees(data, [7])


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
    chosen = (torch.arange(len(ids.values())) % 3 > 0).long()
    chosen[ids.offsets()[:-1]] = 0  # nothing predicts a first token
    mask = torch.nested.nested_tensor_from_jagged(chosen, ids.offsets())
    data = TensorDict({"input_ids": ids, "position_ids": given["position_ids"], "loss_mask": mask}, batch_size=4)
    tu.assign_non_tensor(data, temperature=1.0, use_dynamic_bsz=False, micro_batch_size_per_gpu=4)
    found = []
    for of in pair:
        with of.train_mode():
            of.optimizer_zero_grad()
            out = of.forward_backward_batch(data.copy(), partial(sft_loss, config=None))
            norm = torch.stack(
                [
                    (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).norm()
                    for p in of.module.parameters()
                ]
            )
        found.append((out["loss"], norm))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options", [{"lora_rank": 4}, {"enable_gradient_checkpointing": True}], ids=["lora", "checkpointing"]
)
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
    ours, theirs = (done(engine(paths[False], tree, strategy, "value_model"), data, loss) for tree in (True, False))
    same(ours, theirs)
    assert set(ours.outputs) == {"values"}
    assert ours.seen == tokens_of_trees(data, [len(data)])


def test_fused_kernels_are_ours(paths: dict[bool, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", Qwen3ForCausalLM.forward)  # which verl replaces for all
    data = batch((4, 3), seed=11, use_fused_kernels=True)
    made = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
    ours, theirs = (done(engine(paths[True], tree, **made), data, actor()) for tree in (True, False))
    same(ours, theirs)


def test_a_worker(paths: dict[bool, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own worker through log-probs and an update of several steps, to the weights that rollouts get."""
    environment = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    data = batch((4, 4, 4, 4), seed=8, micro_batch_size_per_gpu=4)
    found = []
    for tree in (True, False):
        worker = TrainingWorker(config(paths[False], tree))
        worker.reset()
        worker.set_loss_fn(actor())
        given = data.copy()
        tu.assign_non_tensor(given, global_token_num=[10] * 16, compute_loss=False)
        scored = worker.infer_batch(given)
        given = data.copy()
        tu.assign_non_tensor(given, global_batch_size=8, mini_batch_size=8, epochs=2)
        metrics = tu.get(worker.train_mini_batch(given), "metrics")
        weights = dict(worker.engine.get_per_tensor_param()[0])
        found.append((scored, metrics, weights))
    (scored, ours, weights), (expected, theirs, reference) = found
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(
            *(no_padding_2_padding(out[name], data) for out in (scored, expected)), rtol=1e-5, atol=1e-5
        )
    for name in theirs.keys() - {key for key in theirs if key.startswith("perf/") or key == "mfu"}:
        got, wanted = (np.asarray(metrics[name], float) for metrics in (ours, theirs))
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5, err_msg=name)
    assert weights.keys() == reference.keys()
    for name, weight in reference.items():  # Adam takes a whole step along a gradient that is nothing but rounding
        assert ((weights[name] - weight).abs() > 1e-4).float().mean() < 0.01, name


def on_rank(number: int, store: str, path: str) -> None:
    """What each of two ranks does in the test below."""
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


def test_two_ranks(paths: dict[bool, str], tmp_path: Path) -> None:
    given = (str(tmp_path / "store"), paths[False])
    script = (
        f"import torch.multiprocessing as mp, {__name__} as here; "
        f"mp.start_processes(here.on_rank, {given}, nprocs=2, start_method='fork')"
    )
    root = Path(__file__).parents[3]
    environment = {"PYTHONPATH": ":".join([str(root), *sys.path]), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


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
