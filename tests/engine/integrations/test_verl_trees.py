"""verl's FSDP engines on trees against verl's own, through their public methods on a CPU; `make verl` runs this."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3ForCausalLM

pytest.importorskip("verl", reason="verl is not installed: `make verl`")
pytestmark = pytest.mark.verl

from tensordict import TensorDict  # noqa: E402

from .verl_tiny import (  # noqa: E402  # before the rest of verl: it sets the platform
    LAYER_OPS,
    LIBRARY,
    P,
    R,
    actor,
    batch,
    config,
    done,
    engine,
    on_a_cpu,
    on_rank,
    same,
    same_gradients,
    save_model,
    tokens_of_trees,
)

from verl.utils import tensordict_utils as tu  # noqa: E402 isort: skip
from verl.workers.config import CriticConfig  # noqa: E402 isort: skip
from verl.workers.engine_workers import TrainingWorker  # noqa: E402 isort: skip
from verl.workers.utils.losses import sft_loss, value_loss  # noqa: E402 isort: skip
from verl.workers.utils.padding import no_padding_2_padding  # noqa: E402 isort: skip

from rolltree.engine.errors import UserError  # noqa: E402
from rolltree.engine.integrations import verl as losses  # noqa: E402
from rolltree.kernels.libraries import log_once  # noqa: E402

GROUPS = {"groups": (4, 2, 1, 3), "one group": (6,), "alone": (1,), "nothing shared": (1, 1, 1, 1)}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with on_a_cpu():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        yield
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Models, by whether their embeddings are tied."""
    return {tied: save_model(tmp_path_factory.mktemp("model"), tied) for tied in (False, True)}


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
    assert (ours.fused, theirs.fused) == (LAYER_OPS, set())
    assert ours.seen == tokens_of_trees(data, [len(data)])
    assert theirs.seen == [len(data["input_ids"].values())]


def test_that_nothing_is_shared_is_said_once(pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level("WARNING", "rolltree"):
        for groups in ((1,), (2, 1), (1, 1, 1), (1, 1)):
            done(pair[0], batch(groups), actor())
    assert [record.message.split(",")[0] for record in caplog.records if record.name.startswith("rolltree")] == [
        "The sequences of a rank's batch have as many prompts"
    ]


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
    """verl's newer trainer keeps prompts and responses so: without any padding."""
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
    assert (ours.fused, theirs.fused) == (LAYER_OPS, set())
    assert ours.seen == tokens_of_trees(data, [len(data)])


@pytest.mark.parametrize("tree", [True, False], ids=["trees", "verl's engine"])
def test_fused_kernels(paths: dict[bool, str], tree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below verl's engine too the head is rolltree's, here one that FSDP2 has sharded."""
    expected = done(engine(paths[False], False), batch((4, 3), seed=11), actor())
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", Qwen3ForCausalLM.forward)  # which verl replaces for all
    made = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "triton"}}
    same(done(engine(paths[False], tree, **made), batch((4, 3), seed=11, use_fused_kernels=True), actor()), expected)


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


def test_two_ranks(paths: dict[bool, str], tmp_path: Path) -> None:
    given = (str(tmp_path / "store"), paths[False])
    script = (
        f"import torch.multiprocessing as mp, {on_rank.__module__} as here; "
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
