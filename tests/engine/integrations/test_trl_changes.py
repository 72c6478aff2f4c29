"""What users change, before and after `accelerate`: options, schedules by callbacks, methods of subclasses.

Each change has TRL's result, or a warning that says what is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback, set_seed
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from rolltree.engine.integrations.trl.groups import GroupTrainer
from rolltree.engine.integrations.trl.replaced import PARTS

from .test_trl_others import ONES, TEXTS
from .trl_tiny import arguments, assert_same, dataset, reward, save_model, train

TREE = {"rollouts": False}
CONFIGS: dict[type, type] = {
    GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig, DPOTrainer: DPOConfig, SFTTrainer: SFTConfig,
}  # fmt: skip
PAIRS = {"prompt": ["abc ", "q ", "hello ", "x y "] * 4, "chosen": TEXTS * 4, "rejected": ONES * 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("trl"))


def make(path: str, cls: type, base: type | None = None, **options: Any) -> Any:
    """Return a trainer of class ``cls``, TRL's ``base`` or a subclass of it."""
    base = base or cls
    given: dict[str, Any] = dict(max_steps=4, learning_rate=0.1, lr_scheduler_type="constant")
    rows: dict[str, list[str]] = {"text": TEXTS * 4} if base is SFTTrainer else PAIRS
    trainer: dict[str, Any] = {"train_dataset": Dataset.from_dict(rows)}
    if base in (GRPOTrainer, RLOOTrainer):
        given |= dict(num_generations=4, max_completion_length=8, num_iterations=2, beta=0.1)
        trainer = {"train_dataset": dataset(), "reward_funcs": reward}
    return cls(path, args=CONFIGS[base](**arguments(Path(path), **given | options)), **trainer)


class AtStep(TrainerCallback):
    """Calls ``change`` at the beginning of each step with its number."""

    def __init__(self, change: Callable[[int], object]) -> None:
        self.change = change

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.change(state.global_step)


def result(make: Callable[[], Any], change: Callable[[Any], object], when: str, parts: dict[str, bool] | None) -> Any:
    """Return the trainer after training, changed before `accelerate` or in the third step."""
    set_seed(0)
    trainer = make()
    if when == "before":
        change(trainer)
    else:
        trainer.add_callback(AtStep(lambda step: step == 2 and change(trainer)))
    return train(trainer, parts)


def test_every_replaced_method_is_in_the_table() -> None:
    listed = {name for part in PARTS for name in part.methods}
    ours = {name for name, value in vars(GroupTrainer).items() if inspect.isfunction(value)}
    assert ours <= listed
    for name in listed:
        assert name in vars(GRPOTrainer), name
    for name in ours:
        for cls in (GRPOTrainer, RLOOTrainer):
            takes, given = (inspect.signature(getattr(c, name)).parameters for c in (GroupTrainer, cls))
            assert list(takes)[: len(given)] == list(given)[: len(takes)] or "images" in takes, (name, cls)
    for cls in (DPOTrainer, SFTTrainer):
        assert not isinstance(cls, GroupTrainer)


SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[Any, int], object]]] = {
    "beta up": ({"learning_rate": 0.002}, lambda t, step: setattr(t, "beta", [0.04, 0.04, 0.15, 0.4][step])),
    "beta to 0": ({}, lambda t, step: setattr(t, "beta", [0.1, 0.1, 0.0, 0.0][step])),
    "bounds": ({}, lambda t, step: (setattr(t, "epsilon_low", 0.1 * step), setattr(t, "epsilon_high", 0.3 * step))),
    "quantile": ({}, lambda t, step: setattr(t, "top_entropy_quantile", [1.0, 1.0, 0.2, 1.0][step])),
    "loss": ({}, lambda t, step: setattr(t, "loss_type", ["dapo", "grpo", "bnpo", "sapo"][step])),
    "level": ({}, lambda t, step: setattr(t, "importance_sampling_level", ["token", "sequence"][step % 2])),
    "delta": ({}, lambda t, step: setattr(t.args, "delta", [None, 1.3, 1.25, None][step])),
    "bias of the KL": ({}, lambda t, step: setattr(t.args, "use_bias_correction_kl", step % 2 == 0)),
    "a tensor": ({}, lambda t, step: setattr(t, "beta", torch.tensor(0.1 + 0.1 * step))),
}  # fmt: skip


@pytest.mark.check(but=3)
@pytest.mark.parametrize("case", SCHEDULES)
def test_schedules(path: str, case: str) -> None:
    options, change = SCHEDULES[case]
    done = []
    for parts in (None, TREE):
        set_seed(0)
        trainer = make(path, GRPOTrainer, **options)
        trainer.add_callback(AtStep(lambda step, trainer=trainer: change(trainer, step)))
        done.append(train(trainer, parts))
    assert_same(*done, moves="learning_rate" not in options)


def double(value: Any) -> Any:
    """Return ``value`` with its floats doubled, of a micro-batch those of the advantages."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value * 2
    if isinstance(value, tuple):
        return tuple(double(each) for each in value)
    if isinstance(value, dict):
        return value | {name: double(value[name]) for name in ("advantages",) if name in value}
    return value


def doubling(method: Any) -> Any:
    return lambda *args, **kwargs: double(method(*args, **kwargs))


def short(method: Any) -> Any:
    """Return a version of `_generate_single_turn` that cuts completions to three tokens."""

    def cut(*args: Any, **kwargs: Any) -> Any:
        sampled = method(*args, **kwargs)
        if isinstance(sampled, tuple):
            return [ids[:3] for ids in sampled[0]], sampled[1]
        return [ids[:3] for ids in sampled]

    return cut


METHODS: dict[type, tuple[str, ...]] = {
    GRPOTrainer: (
        "_get_per_token_logps_and_entropies", "_prepare_inputs", "_compute_loss", "compute_loss", "get_off_policy_mask",
        "get_gamma_weights", "get_high_entropy_mask", "_generate_and_score_completions", "_calculate_rewards",
        "training_step", "_generate_single_turn", "_generate",
    ),
    RLOOTrainer: (
        "_get_per_token_logps_and_entropies", "_prepare_inputs", "_compute_loss", "compute_loss", "_calculate_rewards",
        "training_step", "_generate_single_turn",
    ),
    DPOTrainer: ("compute_loss", "_compute_loss", "compute_ref_log_probs", "training_step"),
    SFTTrainer: ("compute_loss", "training_step"),
}  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {
    "get_off_policy_mask": {"off_policy_mask_threshold": 1e-3},
    "get_gamma_weights": {"loss_type": "vespo"},
    "get_high_entropy_mask": {"top_entropy_quantile": 0.5},
    "_generate_single_turn": {"generation_kwargs": {"do_sample": False}},
    "_generate": {"generation_kwargs": {"do_sample": False}},
    "compute_ref_log_probs": {"precompute_ref_log_probs": True},
}
"""Options by which the trainer calls a method; greedy sampling, so that two trainers sample alike."""
WAYS = ("subclass", "instance", "instance, later", "class")


@pytest.mark.check(but=4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, names in METHODS.items() for name in names])
def test_methods(path: str, cls: type, name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method of the user's has the effect that it has on TRL's trainer."""
    change = short if name in ("_generate_single_turn", "_generate") else doubling
    own: Any = cls
    if way == "subclass":
        own = type("Own", (cls,), {})
        static = isinstance(vars(cls)[name], staticmethod)
        method = change(getattr(cls, name))
        setattr(own, name, staticmethod(method) if static else lambda self, *a, **k: method(self, *a, **k))
    if way == "class":
        whole = change(vars(cls)[name].__func__ if isinstance(vars(cls)[name], staticmethod) else vars(cls)[name])
        static = isinstance(vars(cls)[name], staticmethod)
        monkeypatch.setattr(cls, name, staticmethod(whole) if static else lambda self, *a, **k: whole(self, *a, **k))

    def patch(trainer: Any) -> None:
        if way.startswith("instance"):
            setattr(trainer, name, change(getattr(trainer, name)))

    done = []
    parts = {} if name in ("_generate_single_turn", "_generate") or cls in (DPOTrainer, SFTTrainer) else TREE
    when = "later" if way == "instance, later" else "before"
    for given in (None, parts):
        done.append(result(lambda: make(path, own, cls, **NEEDED.get(name, {})), patch, when, given))
    assert_same(*done, tolerance=1e-4)
