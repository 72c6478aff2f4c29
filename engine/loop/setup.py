"""From a configuration to the parts of a run: model, rollout engine, sampling parameters, objective."""

from __future__ import annotations

import copy
import importlib.util
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rolltree.kernels import Objective
from rolltree.kernels.policy_loss import WITHOUT_REFERENCE

from ..data.columns import COLUMNS
from ..data.store import read_texts
from ..errors import UserError
from ..methods.calling import ask, call
from ..methods.credit import ADVANTAGES, CreditFunction
from ..methods.groups import GROUP_CALLBACKS, GroupCallback
from ..methods.resolve import import_object, resolve
from ..methods.schedules import Schedule, find_schedule
from ..methods.selections import PAIRINGS, SELECTIONS
from ..methods.shaping import SHAPINGS, Shaping
from ..model.decoder import load_model, load_tokenizer
from ..model.roles import Role
from ..programs import RolloutProgram, make_program
from ..rewards import Rewards, make_rewards
from ..rollout import EngineConfig, NativeEngine, RolloutEngine, SamplingParams
from ..settings import RolloutConfig, TrainConfig
from ..train.critic import Critic
from ..train.terms import LossTerm, PairTerm, Selection, TokenTerm
from .budget import Budget
from .sources import Demonstrations


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
        UserError: vLLM is asked for, and drafts of the native backend, or it is not installed.
    """
    if config.backend == "vllm" and config.drafts:
        raise UserError(
            "rollout.drafts is of the native backend; set it to 0, and give vLLM its own speculative_config in "
            "rollout.vllm_options."
        )
    if config.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError("rollout.backend is 'vllm', which is not installed; install it, or set it to 'native'.")


def make_engine(config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """What samples for a run.

    Raises:
        UserError: vLLM is asked for and not installed.
    """
    rollout = config.rollout
    if rollout.backend == "native":
        own = EngineConfig(
            kv_tokens=rollout.kv_tokens,
            max_batch_rows=rollout.max_batch_rows,
            compile=rollout.compile,
            drafts=rollout.drafts,
        )
        return NativeEngine(model, tokenizer, own)
    check_backend(rollout)
    from ..rollout.vllm.engine import VllmEngine

    longest = config.data.max_prompt_tokens + max(rollout.max_new_tokens, config.evaluation.max_new_tokens or 0)
    options = {"dtype": config.model.dtype, "max_model_len": longest, "max_num_seqs": rollout.max_batch_rows}
    return VllmEngine(config.model.path, tokenizer, **(options | rollout.vllm_options))


def sampled_model(config: TrainConfig, model: PreTrainedModel) -> PreTrainedModel:
    """The weights that sample: the trained ones, or a copy of them where both work at the same time."""
    if config.rollout.backend != "native" or not config.loop.overlaps(on_cpu=model.device.type == "cpu"):
        return model
    return copy.deepcopy(model).requires_grad_(False)


def group_callback(config: TrainConfig) -> GroupCallback | None:
    """What decides about judged groups, if there is any.

    Raises:
        UserError: there is no such callback, file or function, or it has no such option.
    """
    loop = config.loop
    if loop.callback is None:
        return None
    found: GroupCallback = resolve(
        "loop.callback", loop.callback, loop.callback_options, known=GROUP_CALLBACKS, inputs=("tree",)
    )
    return found


def corrects(config: TrainConfig) -> bool:
    """Whether the loss is corrected for the lag of what it learns from."""
    return config.loop.staleness > 0 and config.loop.correction != "none"


def rescores(config: TrainConfig) -> bool:
    """Whether the policy scores the rollouts before it is updated; a batch's only update begins with that policy."""
    asked = config.algorithm.old_logprob == "recompute"
    return asked or (corrects(config) and config.trainer.updates_per_step > 1)


def budget(config: TrainConfig) -> Budget:
    """How many groups may be open, and how old they may become."""
    loop = config.loop
    return Budget(config.trainer.prompts_per_step, loop.staleness, loop.window, loop.over_sampling)


def remember_rollouts(config: TrainConfig, engine: RolloutEngine, step: int) -> None:
    """Let a resumed run draft from what it sampled up to ``step``: the latest files that fit."""
    room, files = config.rollout.drafts, []
    while isinstance(engine, NativeEngine) and room > 0 and step > 0:
        path = config.run_dir / "rollouts" / f"step_{step:06d}.parquet"
        texts = list(read_texts(path)) if path.exists() else []
        room -= sum(len(text.before) + len(text.tokens) for text in texts)
        files.append((step, texts))
        step -= 1
    for version, texts in reversed(files):
        assert isinstance(engine, NativeEngine)
        engine.remember(texts, version)


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
    if (algorithm.advantage == "gae") != (config.roles.critic is not None):
        raise UserError('algorithm.advantage = "gae" and [roles.critic] need each other; give the run both or neither.')
    found: CreditFunction = resolve(
        "algorithm.advantage", algorithm.advantage, algorithm.advantage_options, known=ADVANTAGES, inputs=("trees",)
    )
    return found


FROM_ROLES = {"ref_logprob": "reference", "teacher_logprob": "teacher", "value": "critic"}
"""Fields of objectives, and the role that scores them."""


def objective(
    config: TrainConfig, key: str, name: str, options: dict[str, Any], select: str | None = None
) -> Objective:
    """The objective that ``key`` names.

    Raises:
        UserError: an unknown name or option, or one that needs what the run does not have.
    """
    chosen = ask(f"{key} = '{name}'", Objective.preset, name, **options)
    assert isinstance(chosen, Objective)
    if corrects(config):
        chosen = corrected(chosen, config)
    for field, why in chosen.needs_fields.items():
        if field == "token_weight":
            if select is None:
                raise UserError(f"{key} = '{name}' learns from chosen tokens; say which with `select` ({why}).")
            continue
        if field == "proximal_logprob" and not rescores(config):
            raise UserError(
                f"{key} = '{name}' needs the policy's own log-probs before the update ({why}); set "
                'algorithm.old_logprob to "recompute".'
            )
        role = FROM_ROLES.get(field)
        if role is not None and getattr(config.roles, role) is None:
            raise UserError(f"{key} = '{name}' needs {field} ({why}); give the run a [roles.{role}].")
        if role is None and field not in COLUMNS:
            raise UserError(
                f"{key} = '{name}' needs {field} ({why}), which a run does not have; choose another objective or leave "
                "the option out."
            )
    return chosen


def corrected(objective: Objective, config: TrainConfig) -> Objective:
    """Decoupled (Hilton et al. 2021): ratios against the policy before the update, weights exp(proximal - behaviour).

    Where ratios are those of sequences, so are the weights: geometric means. An objective with a correction of its own
    keeps it, as does one that does not look at old log-probs. Where nobody has scored the policy before the update, it
    is the current one: all ratios are 1, which no bounds exclude.
    """
    loop, level = config.loop, objective.mismatch_level
    if objective.mismatch == "none" and objective.needs_old and "token_weight" not in objective.needs_fields:
        if objective.ratio_level in ("sequence", "sequence_token"):
            level = "geometric"
        with suppress(ValueError):  # it weighs by the sampler's log-probs itself
            objective = replace(
                objective, mismatch=loop.correction, mismatch_level=level, mismatch_cap=loop.correction_cap
            )
    if objective.mismatch == "none" or rescores(config):
        return objective
    return replace(objective, ratio_base="current", dynamic_clip=False)


def loss_terms(config: TrainConfig) -> list[tuple[LossTerm, Schedule]]:
    """The summands of the loss, `algorithm.objective` first, each with its weight.

    Raises:
        UserError: a part is not known, or needs what the run does not have.
    """
    algorithm = config.algorithm
    main = TokenTerm(
        objective(config, "algorithm.objective", algorithm.objective, algorithm.objective_options, algorithm.select),
        select=_selection("algorithm.select", algorithm.select, algorithm.select_options),
        length_limit=config.rollout.max_new_tokens,
    )
    weight = find_schedule("algorithm.weight", algorithm.weight, algorithm.weight_options)
    terms: list[tuple[LossTerm, Schedule]] = [(main, weight)]
    for term in algorithm.terms:
        key = f"algorithm.terms.{term.name}"
        weight = find_schedule(f"{key}.weight", term.weight, term.weight_options)
        if term.pairs is not None:
            choose = resolve(f"{key}.pairs", term.pairs, term.pairs_options, known=PAIRINGS, inputs=("tree",))
            if term.loss_options.get("kind", "sigmoid") not in WITHOUT_REFERENCE and config.roles.reference is None:
                raise UserError(f"{key} compares with a reference; give the run a [roles.reference].")
            terms.append((PairTerm(choose, term.name, term.loss_options), weight))
            continue
        assert term.objective is not None
        of_tokens = TokenTerm(
            objective(config, f"{key}.objective", term.objective, term.objective_options, term.select),
            term.name,
            _selection(f"{key}.select", term.select, term.select_options),
            config.rollout.max_new_tokens,
        )
        terms.append((of_tokens, weight))
    names = [term.name for term, _ in terms]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"Two loss terms are called '{min(twice)}'; give each in [[algorithm.terms]] a name of its own."
        )
    return terms


def shapings(config: TrainConfig) -> list[tuple[str, Shaping]]:
    """What is done with rewards before they become credit, each with the words that name it.

    Raises:
        UserError: there is no such function, or it has no such option.
    """
    key = "reward.shaping"
    return [
        (f"{key} '{given.name}'", resolve(key, given.name, given.options, known=SHAPINGS, inputs=("tree",)))
        for given in config.reward.shaping
    ]


def rewards(config: TrainConfig, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> Rewards:
    """Who judges the run's responses: `reward.verifier`.

    Raises:
        UserError: it cannot be used.
    """

    def score(prompts: list[str], continuations: list[str]) -> list[Any]:
        ids = [tokenizer(text, add_special_tokens=not config.data.chat)["input_ids"] for text in prompts]
        wanted = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in continuations]
        found = engine.score(ids, [[some] if some else [] for some in wanted])
        return [some[0] if some else [] for some in found]

    return make_rewards(config.reward, config.data.tasks, score)


def _selection(key: str, name: str | None, options: dict[str, Any]) -> Selection | None:
    if name is None:
        return None
    found: Selection = resolve(key, name, options, known=SELECTIONS, inputs=("tree",))
    return found


def roles(config: TrainConfig, model: PreTrainedModel) -> list[Role]:
    """The models that score log-probs for the loss.

    Raises:
        UserError: one cannot be loaded or has another vocabulary or other parameters than the policy.
    """
    found = []
    if rescores(config):
        found.append(Role("proximal_logprob", model))
    if (reference := config.roles.reference) is not None:
        if reference.path is None:
            weights = Role.snapshot(model)
        else:
            weights = _weights(reference.path, "roles.reference.path", model)
        found.append(
            Role(
                "ref_logprob",
                model,
                weights,
                reset_every=reference.reset_every,
                ema=reference.ema,
                initial=reference.path is None,
            )
        )
    if config.roles.teacher is not None:
        teacher = (
            load_model(config.roles.teacher.path, dtype=model.dtype, device=model.device).eval().requires_grad_(False)
        )
        if len(teacher.get_output_embeddings().weight) != len(model.get_output_embeddings().weight):
            raise UserError(
                f"roles.teacher.path = '{config.roles.teacher.path}' has another vocabulary than the policy; choose a "
                "teacher with the policy's tokenizer."
            )
        found.append(Role("teacher_logprob", teacher))
    return found


def _weights(path: str, key: str, model: PreTrainedModel) -> dict[str, Tensor]:
    other = load_model(path, dtype=model.dtype)
    weights = Role.snapshot(other)
    ours = {name: p.shape for name, p in model.named_parameters()}
    if {name: w.shape for name, w in weights.items()} != ours:
        raise UserError(f"{key} = '{path}' is a model of another shape than the policy; give one of the same.")
    return weights


def critic(config: TrainConfig) -> Critic | None:
    """The critic of `[roles.critic]`, if there is one."""
    chosen = config.roles.critic
    if chosen is None:
        return None
    device = choose_device(config.model.device)
    model = load_model(chosen.path or config.model.path, dtype=getattr(torch, config.model.dtype), device=device)
    return Critic(model, config.trainer.model_copy(update={"lr": chosen.lr}), clip=chosen.clip)


def demonstrations(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Demonstrations | None:
    """What `[demonstrations]` names, if there is any."""
    chosen = config.demonstrations
    return None if chosen is None else Demonstrations(chosen, config.data, tokenizer, config.seed)
