"""Users change these, before and after `accelerate`: options, schedules by callbacks, methods of subclasses.

Each change has TRL's result, or a warning that says what is not.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainingArguments, set_seed
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

from rolltree.engine.integrations.trl import parts as parts_of_trl
from rolltree.engine.integrations.trl.groups import GroupTrainer
from rolltree.engine.integrations.trl.objective import objective
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


UNTOUCHED = {
    "__init__", "_calculate_rewards", "_get_eval_sampler", "_get_tool_suffix_ids", "_get_train_sampler",
    "_load_optimizer_and_scheduler", "_log_completion_extra", "_log_metric", "_save_checkpoint",
    "_set_signature_columns_if_needed", "_tokenize_prompts", "get_eval_dataloader", "get_high_entropy_mask",
    "get_train_dataloader", "log", "prediction_step", "training_step",
}  # fmt: skip
"""Methods of TRL's trainers that no part of rolltree replaces or relies on; the high-entropy mask is TRL's loss."""


@pytest.mark.parametrize("cls", [GRPOTrainer, RLOOTrainer])
def test_the_table_has_every_method_of_trls_class(cls: type) -> None:
    listed = {name for part in PARTS for name in part.methods}
    ours = {name for name, value in vars(GroupTrainer).items() if inspect.isfunction(value)}
    theirs = {name for name, value in vars(cls).items() if inspect.isroutine(value) or isinstance(value, staticmethod)}
    assert ours <= listed
    assert not listed & UNTOUCHED
    assert theirs <= listed | UNTOUCHED
    if cls is GRPOTrainer:
        assert theirs == listed | UNTOUCHED
    for name in ours:
        takes, given = (inspect.signature(getattr(owner, name)).parameters for owner in (GroupTrainer, cls))
        named = [p.name for p in takes.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert named == list(given)[: len(named)], name
        assert len(named) == len(given) or len(named) < len(takes), name


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


@pytest.mark.slow(but=1)
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
    """Return a version of `_generate_single_turn` or `_generate` that cuts completions to three tokens."""

    def cut(*args: Any, **kwargs: Any) -> Any:
        sampled = method(*args, **kwargs)
        if isinstance(sampled, list):
            return [ids[:3] for ids in sampled]
        place = 0 if len(sampled) == 2 else 1
        return *sampled[:place], [ids[:3] for ids in sampled[place]], *sampled[place + 1 :]

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


@pytest.mark.slow(but=2)
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
    assert_same(*done, tolerance=1e-4, moves=change is doubling)  # equal completions cancel


VALUES: dict[str, Any] = {
    "loss_type": "bnpo", "importance_sampling_level": "sequence", "scale_rewards": "batch", "delta": 1.5,
    "off_policy_mask_threshold": 0.01, "epsilon": 0.01, "epsilon_low": 0.01, "epsilon_high": 0.03, "beta": 0.5,
    "top_entropy_quantile": 0.5, "pad_to_multiple_of": 8, "multi_objective_aggregation": "normalize_then_sum",
    "eos_token_ids": [1, 7], "max_completion_length": 5, "num_generations": 2, "num_iterations": 1, "min_p": 0.3,
    "ld_alpha": 0.5, "label_smoothing": 0.1, "loss_weights": [0.5], "f_divergence_type": "js_divergence",
    "gradient_accumulation_steps": 2, "reward_clip_range": (0.0, 5.0),
}  # fmt: skip
"""Other values than the defaults for options that are names, or that a number near the default hardly changes."""
OWN_LOSS = {SFTTrainer: "dft", DPOTrainer: ["hinge"]}
ELSEWHERE = ("vllm", "is_", "hub", "deepspeed", "log_", "use_transformers_", "ds3", "trust", "place_model")
"""Beginnings of options of other samplers, files and parts of the process that a tiny run on a CPU does not have."""
COUNTED = {"gradient_accumulation_steps", "steps_per_generation"}


def other(cls: type, name: str, value: Any) -> Any:
    """Return another value of the option, None if there is none to try."""
    if name == "loss_type" and cls in OWN_LOSS:
        return OWN_LOSS[cls]
    if name in VALUES:
        return VALUES[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + type(value)(1)
    return None


def options(cls: type, trainer: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield every public attribute of the trainer and option of its own configuration, with another value."""
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    of_args = [field.name for field in dataclasses.fields(CONFIGS[cls]) if field.name not in inherited - COUNTED]
    for place, names in (("trainer", [n for n in vars(trainer) if not n.startswith("_")]), ("args", of_args)):
        where = trainer if place == "trainer" else trainer.args
        for name in sorted(names):
            value = getattr(where, name)
            if not name.startswith(ELSEWHERE) and (new := other(cls, name, value)) is not None and new != value:
                yield place, name, new


@pytest.mark.slow
@pytest.mark.parametrize(("share", "when"), [(0, "before"), (1, "later"), (2, "before"), (3, "later")])
@pytest.mark.parametrize("cls", [SFTTrainer, GRPOTrainer, RLOOTrainer, DPOTrainer])
def test_options(path: str, cls: type, share: int, when: str) -> None:
    """Every fourth public attribute and option of the trainer has TRL's result, unless TRL fails."""
    tried, wrong = 0, []
    for place, name, value in list(options(cls, make(path, cls)))[share::4]:

        def change(trainer: Any, place: str = place, name: str = name, value: Any = value) -> None:
            setattr(trainer if place == "trainer" else trainer.args, name, value)

        try:
            theirs = result(lambda: make(path, cls), change, when, None)
        except Exception:
            continue  # no option of a run like this one
        tried += 1
        try:
            assert_same(theirs, result(lambda: make(path, cls), change, when, TREE), 1e-3, moves=False)
        except Exception as error:
            wrong.append((place, name, value, repr(error)[:300]))
    assert tried >= 3
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize(("share", "when"), [(0, "later"), (1, "before"), (2, "later"), (3, "before")])
@pytest.mark.parametrize("cls", [SFTTrainer, GRPOTrainer, RLOOTrainer, DPOTrainer])
def test_options_at_the_other_time(path: str, cls: type, share: int, when: str) -> None:
    test_options(path, cls, share, when)


def test_the_temperature_of_the_loss_is_that_of_the_trainers_making(path: str) -> None:
    def change(trainer: Any) -> None:
        trainer.temperature = trainer.args.temperature = 0.5

    assert_same(*(result(lambda: make(path, GRPOTrainer), change, "before", parts) for parts in (None, TREE)))


def test_a_reference_of_a_later_day_is_scored_by_trl(path: str, caplog: pytest.LogCaptureFixture) -> None:
    done = []
    for parts in (None, TREE):
        set_seed(0)
        trainer = make(path, GRPOTrainer)
        other = copy.deepcopy(trainer.ref_model)
        with torch.no_grad():
            other.lm_head.weight.mul_(0.5)
        trainer.add_callback(AtStep(lambda step, t=trainer, m=other: step == 2 and setattr(t, "ref_model", m)))
        done.append(train(trainer, parts))
    assert_same(*done)
    assert "the trainer was given another model after accelerate" in caplog.text


@pytest.mark.parametrize(
    ("change", "term"), [({"kl_coef": 0.1003}, "KL"), ({"eps_low": 0.19}, "policy"), ({"eps_high": 0.3}, "policy")]
)
def test_a_term_that_is_not_trls_is_an_error(
    path: str, change: dict[str, float], term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_of_trl, "objective", lambda trainer: dataclasses.replace(objective(trainer), **change))
    with pytest.raises(RuntimeError, match=f"The terms of the loss 'dapo' are not those of TRL .*{term}"):
        train(make(path, GRPOTrainer), TREE)


@pytest.mark.slow
def test_continuous_batching_is_trls(path: str) -> None:
    """Its attention is not rolltree's, so that the model has its own meanwhile."""
    greedy = {"generation_kwargs": {"do_sample": False}, "max_steps": 1, "use_transformers_continuous_batching": True}
    assert_same(*(train(make(path, GRPOTrainer, **greedy), parts) for parts in (None, {})), moves=False)
