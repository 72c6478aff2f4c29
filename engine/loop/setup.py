"""From a configuration to the parts of a run: model, rollout engine, sampling parameters, objective."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rolltree.kernels import Objective

from ..errors import UserError
from ..methods.calling import ask, call
from ..methods.credit import ADVANTAGES, CreditFunction
from ..methods.resolve import import_object, resolve
from ..model.decoder import load_model, load_tokenizer
from ..programs import RolloutProgram, make_program
from ..rollout import EngineConfig, NativeEngine, RolloutEngine, SamplingParams
from ..settings import RolloutConfig, TrainConfig


def choose_device(name: str) -> torch.device:
    """The device of `model.device`.

    Raises:
        UserError: cuda is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "model.device is 'cuda' but torch sees no CUDA device; set it to 'auto' or see `rolltree doctor`."
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def prepare_model(config: TrainConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and its tokenizer; `model.create` makes the directory first where it is missing."""
    path = Path(config.model.path)
    if config.model.create is not None and not path.exists():
        what = f"model.create = '{config.model.create}'"
        unfinished = path.with_name(f"{path.name}.tmp")  # renamed when whole: a killed run leaves no half a model
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            call(what, import_object(config.model.create), config, unfinished)
            if not unfinished.is_dir():
                raise UserError(
                    f"{what} made no directory '{unfinished}'; it must write a model to its second argument."
                )
            unfinished.rename(path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    model = load_model(
        config.model.path, dtype=getattr(torch, config.model.dtype), device=choose_device(config.model.device)
    )
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, load_tokenizer(config.model.path)


def check_backend(config: RolloutConfig) -> None:
    """
    Raises:
        UserError: vLLM is asked for and not installed.
    """
    if config.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError("rollout.backend is 'vllm', which is not installed; install it, or set it to 'native'.")


def make_engine(config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """What samples for a run.

    Raises:
        UserError: vLLM is asked for and not installed.
    """
    rollout = config.rollout
    if rollout.backend == "native":
        own = EngineConfig(kv_tokens=rollout.kv_tokens, max_batch_rows=rollout.max_batch_rows, compile=rollout.compile)
        return NativeEngine(model, tokenizer, own)
    check_backend(rollout)
    from ..integrations.vllm import VllmEngine

    longest = config.data.max_prompt_tokens + max(rollout.max_new_tokens, config.evaluation.max_new_tokens or 0)
    options = {"dtype": config.model.dtype, "max_model_len": longest, "max_num_seqs": rollout.max_batch_rows}
    return VllmEngine(config.model.path, tokenizer, **(options | rollout.vllm_options))


def sampling_params(config: RolloutConfig) -> SamplingParams:
    return SamplingParams(
        n=config.n,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_new_tokens=config.max_new_tokens,
        stop=tuple(config.stop),
    )


def greedy_params(config: TrainConfig) -> SamplingParams:
    """Sampling of the evaluation: the most likely token, one answer a problem."""
    longest = config.evaluation.max_new_tokens or config.rollout.max_new_tokens
    return SamplingParams(n=1, temperature=0.0, max_new_tokens=longest)


def rollout_program(config: RolloutConfig) -> RolloutProgram:
    return make_program(config.program, **config.program_options)


def credit(config: TrainConfig) -> CreditFunction:
    """How rewards become credit: `algorithm.advantage`.

    Raises:
        UserError: there is no such estimator, file or function, or it has no such option.
    """
    algorithm = config.algorithm
    found: CreditFunction = resolve(
        "algorithm.advantage", algorithm.advantage, algorithm.advantage_options, known=ADVANTAGES, inputs=("trees",)
    )
    return found


def objective(config: TrainConfig) -> Objective:
    """The loss of `algorithm.objective`.

    Raises:
        UserError: an unknown name or option, or one that needs what a run does not have.
    """
    named = config.algorithm
    chosen = ask(
        f"algorithm.objective = '{named.objective}'", Objective.preset, named.objective, **named.objective_options
    )
    assert isinstance(chosen, Objective)
    for field, why in chosen.needs_fields.items():
        if field != "behaviour_logprob":
            raise UserError(
                f"algorithm.objective = '{config.algorithm.objective}' needs {field} ({why}), which a run does not "
                "have; choose another objective or leave the option out."
            )
    return chosen
