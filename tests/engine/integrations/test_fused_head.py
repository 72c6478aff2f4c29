"""``model(..., labels=...)`` with the fused head, against Transformers' own loss, gradients and Trainer."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from rolltree.engine.integrations.transformers import patch_model
from rolltree.engine.model import fused_layers
from rolltree.kernels.libraries import load_library

from ..model.test_tree_equals_flat import CONFIGS, make_models

LENGTHS = (11, 7, 3)


def padded() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 97, (len(LENGTHS), max(LENGTHS)))
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    labels = ids.masked_fill(~mask | (torch.rand(ids.shape) < 0.3), -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def gradients(model: nn.Module, **call: Any) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    out = model(**call)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def pair(name: str, *, layers: bool = True) -> tuple[Any, Any]:
    _, model = make_models(name)
    return patch_model(copy.deepcopy(model), layers=layers).train(), model.train()


def check(ours: Any, theirs: Any, **call: Any) -> Any:
    out, grads = gradients(ours, **call)
    expected, expected_grads = gradients(theirs, **call)
    assert out.logits is None
    assert expected.logits is not None
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=2e-5, atol=2e-6, msg=name)
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    ours, theirs = pair(name)
    check(ours, theirs, **padded())


def test_what_else_a_loss_may_be_given() -> None:
    ours, theirs = pair("qwen3")
    batch = padded()
    check(ours, theirs, **batch, num_items_in_batch=torch.tensor(40))
    check(ours, theirs, **batch, num_items_in_batch=7)
    shifted = batch | {"shift_labels": batch["labels"].roll(-1, 1)}
    check(ours, theirs, **shifted)
    odd = batch | {"labels": batch["labels"].masked_fill(batch["labels"] == -100, 96), "ignore_index": 96}
    check(ours, theirs, **odd)
    embeds = {"inputs_embeds": theirs.get_input_embeddings()(batch["input_ids"]).detach(), "labels": batch["labels"]}
    check(ours, theirs, **embeds)
    out = ours(**batch, output_hidden_states=True)
    assert len(out.hidden_states) == theirs.config.num_hidden_layers + 1
    loss, *_ = ours(**batch, return_dict=False)
    torch.testing.assert_close(loss, out.loss)


def test_shifted_labels_alone_ask_for_no_loss() -> None:
    ours, theirs = pair("qwen3", layers=False)
    batch = padded()
    batch["shift_labels"] = batch.pop("labels").roll(-1, 1)
    out, expected = ours(**batch), theirs(**batch)
    assert out.loss is expected.loss is None
    torch.testing.assert_close(out.logits, expected.logits, rtol=0, atol=0)


@pytest.mark.parametrize("layers", [True, False])
def test_a_second_derivative_is_refused_in_a_sentence(layers: bool) -> None:
    ours, _ = pair("qwen3", layers=layers)
    batch = padded()
    with pytest.raises(RuntimeError, match="linear_policy_loss has no second derivative; call backward without"):
        ours(**batch).loss.backward(create_graph=True)
    if layers and load_library("cpu"):
        weight = ours.model.layers[0].mlp.up_proj.weight
        grad = torch.autograd.grad(ours(batch["input_ids"]).logits.sum(), weight, create_graph=True)[0]
        with pytest.raises(RuntimeError, match=r"(rms_norm|silu_mul) has no second derivative"):
            grad.sum().backward()


def test_experts_are_balanced_as_before() -> None:
    ours, theirs = pair("qwen3-moe")
    out = check(ours, theirs, **padded(), output_router_logits=True)
    assert out.aux_loss > 0
    plain = ours(**padded()).loss
    torch.testing.assert_close(out.loss - plain, ours.router_aux_loss_coef * out.aux_loss, rtol=1e-5, atol=1e-6)


def test_without_a_label_the_loss_is_zero() -> None:
    ours, theirs = pair("qwen3")
    none = padded() | {"labels": torch.full((len(LENGTHS), max(LENGTHS)), -100)}
    assert theirs(**none).loss.isnan()
    _, grads = gradients(ours, **none)
    assert ours(**none).loss == 0
    assert not any(grad.any() for grad in grads.values())
    assert ours(**none, num_items_in_batch=5).loss == theirs(**none, num_items_in_batch=5).loss == 0


@pytest.mark.parametrize("layers", [True, False])
def test_layers_are_fused_unless_switched_off(layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    for name in ("rms_norm", "rotate", "silu_mul"):
        op = getattr(fused_layers, name)
        monkeypatch.setattr(fused_layers, name, lambda *given, op=op: passes.append(op) or op(*given))
    ours, theirs = pair("qwen3", layers=layers)
    check(ours, theirs, **padded())
    assert len(set(passes)) == (3 if layers and load_library("cpu") else 0)


@pytest.mark.parametrize("layers", [True, False])
def test_other_calls_are_as_before(layers: bool) -> None:
    ours, theirs = pair("qwen3", layers=layers)
    if layers:
        fused_layers.fuse_layers(theirs)
    batch = padded()
    bits = {"rtol": 0, "atol": 0}
    plain = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    torch.testing.assert_close(ours(**plain).logits, theirs(**plain).logits, **bits)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(**batch).logits, theirs(**batch).logits, **bits)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    torch.testing.assert_close(ours.generate(**plain, **options), theirs.generate(**plain, **options))
    assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)  # the Trainer reads it


def test_no_logits_are_made_and_a_copy_is_patched_too() -> None:
    ours, _ = pair("qwen3")
    rows: list[int] = []
    ours.lm_head.register_forward_hook(lambda module, given, out: rows.append(out.shape[1]))
    check_once = ours(**padded()).loss
    assert rows == [0]
    other = copy.deepcopy(patch_model(ours))
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert other(**padded()).loss != check_once
    torch.testing.assert_close(ours(**padded()).loss, check_once, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("modules", "saved"), [(["q_proj"], None), (["q_proj", "lm_head"], None), (["q_proj"], ["lm_head"])]
)
def test_adapters_and_the_head_they_adapt(modules: list[str], saved: list[str] | None) -> None:
    _, model = make_models("qwen3")
    config = peft.LoraConfig(r=4, target_modules=modules, modules_to_save=saved, init_lora_weights=False)
    torch.manual_seed(2)
    theirs = peft.get_peft_model(model, config).train()
    ours = patch_model(copy.deepcopy(theirs)).train()
    check(ours, theirs, **padded())
    with ours.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(ours(**padded()).loss, theirs(**padded()).loss, rtol=1e-5, atol=1e-6)


def test_gradient_checkpointing() -> None:
    ours, theirs = pair("qwen3")
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    check(ours, theirs, **padded())


class Labelled(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        torch.manual_seed(index)
        ids = torch.randint(0, 97, (9,))
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(9) < index % 4, -100)}


def test_below_transformers_own_trainer(tmp_path: Path) -> None:
    def trained(model: Any) -> tuple[list[float], dict[str, Tensor], float]:
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=True, seed=0, learning_rate=1e-2, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Labelled(), eval_dataset=Labelled())
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return losses, model.state_dict(), trainer.evaluate()["eval_loss"]

    ours, theirs = pair("llama")
    losses, weights, evaluated = trained(ours)
    expected, expected_weights, expected_evaluated = trained(theirs)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert evaluated == pytest.approx(expected_evaluated, rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=1e-3, atol=2e-4, msg=name)


def test_refusals() -> None:
    ours, theirs = pair("qwen3")
    with pytest.raises(ValueError, match="logits_to_keep does not combine with labels"):
        ours(**padded(), logits_to_keep=2)
    theirs.forward = lambda *args: None
    with pytest.raises(ValueError, match="forward of Qwen3ForCausalLM is replaced already"):
        patch_model(theirs)
    _, other = pair("qwen3")
    other.loss_function = lambda **kwargs: None
    with pytest.raises(ValueError, match="has a loss of its own"):
        patch_model(other)
    _, scaled = pair("qwen3")
    scaled.config.logit_scale = 2.0
    with pytest.raises(ValueError, match="other log-probs by the fused head"):
        patch_model(scaled)
    _, plain = pair("qwen3")
    dropped = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.5))
    patch_model(dropped.eval())
    with pytest.raises(ValueError, match="lora_dropout, which the fused head does not support; leave lm_head out"):
        dropped.train()(**padded())
