"""The configuration of a run: a TOML file, checked by pydantic, with dotted overrides from the command line.

Precedence: defaults < TOML file < ``--section.key value``. Every mistake is a :class:`UserError` of one sentence that
names the file (or the flag), the key, and what is allowed.
"""

from __future__ import annotations

import datetime
import difflib
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeGuard, cast, get_args, get_origin

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from .errors import UserError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


VERIFIERS = ("task", "math", "exact")
Beta = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Section):
    path: str
    """A Hugging Face model directory (safetensors) or a hub name."""
    create: str | None = None
    """`file.py:function` (relative to the TOML file), called as function(config, directory) when `path` is missing."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type the model computes in; the optimiser always keeps fp32 master weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is cuda where there is one, else cpu."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class TaskConfig(Section):
    name: str
    """A `reasoning_gym` dataset name."""
    weight: PositiveFloat = 1.0
    """Share of the prompts that come from this task, relative to the other tasks' weights."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to `reasoning_gym.create_dataset`."""


class DataConfig(Section):
    tasks: tuple[TaskConfig, ...] = ()
    """`reasoning_gym` tasks, generated on the fly; leave empty to read `path`."""
    path: str | None = None
    """A parquet or jsonl file of prompts."""
    eval_path: str | None = None
    """The held-out file; without it the last `evaluation.problems` rows of `path` are held out."""
    prompt_key: str = "prompt"
    """Column of `path` that holds the problem."""
    answer_key: str = "answer"
    """Column of `path` that holds the reference answer."""
    template: str = "{prompt}"
    """Text given to the tokenizer; `{prompt}` is replaced by the problem."""
    chat: bool = False
    """Wrap the text as one user message in the tokenizer's chat template."""
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt is an error, never cut."""

    @field_validator("template")
    @classmethod
    def _template_has_a_place(cls, template: str) -> str:
        if "{prompt}" not in template:
            raise ValueError("it must contain {prompt}, the place where the problem goes")
        return template

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.tasks) == (self.path is not None):
            found = "both are" if self.tasks else "neither is"
            raise ValueError(f"give either `data.tasks` or `data.path`, and {found} given")
        if self.eval_path is not None and self.path is None:
            raise ValueError("`data.eval_path` goes with `data.path`; tasks generate their own held-out problems")
        return self


class RolloutConfig(Section):
    backend: Literal["native", "vllm"] = "native"
    """What samples: the trained module itself, or vLLM, which has to be installed and gets the weights each step."""
    vllm_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `vllm.LLM`."""
    program: str = "flat"
    """Who branches, and where: `flat`, `treepo`, `spo_tree`, ...; `rolltree methods` lists them."""
    program_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the program."""
    n: PositiveInt = 8
    """Responses of one prompt (leaves of its tree)."""
    temperature: PositiveFloat = 1.0
    """Softmax temperature of sampling, and of the log-probs that training compares with."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this much probability."""
    top_k: PositiveInt | None = None
    """Sample from the k most probable tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Leave out tokens less probable than this share of the most probable one."""
    max_new_tokens: PositiveInt = 256
    """Longest response, in tokens."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response, which keeps them."""
    max_batch_rows: PositiveInt = 512
    """Sequences decoded together."""
    kv_tokens: PositiveInt = 65536
    """Capacity of the native backend's paged KV cache, in tokens."""
    compile: bool = False
    """Sample with torch.compile: faster steps after some seconds of compilation."""


class RewardConfig(Section):
    verifier: str = "task"
    """`task` (the dataset's own verifier), `math` (math-verify against the answer), `exact`, or `file.py:function`."""
    timeout_s: PositiveFloat = 10.0
    """Seconds one verification may take before its worker is killed."""
    workers: PositiveInt = 2
    """Verifier processes."""
    on_failure: Literal["drop", "zero", "raise"] = "drop"
    """What becomes of a response whose verifier raised or ran out of time; each one is counted."""

    @field_validator("verifier")
    @classmethod
    def _known_verifier(cls, verifier: str) -> str:
        if verifier not in VERIFIERS and ":" not in verifier:
            raise ValueError(f"it must be one of {', '.join(VERIFIERS)}, or file.py:function")
        return verifier


class AlgorithmConfig(Section):
    objective: str = "grpo"
    """The loss; `rolltree methods` lists the presets."""
    objective_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of the objective to change, such as `eps_high = 0.28`."""
    advantage: str = "group_norm"
    """How rewards become advantages; `rolltree methods` lists the estimators."""
    drop_zero_variance: bool = True
    """Leave groups whose rewards are all equal out of the update; they are counted."""


class TrainerConfig(Section):
    steps: PositiveInt = 100
    """Rounds of rollouts and update."""
    prompts_per_step: PositiveInt = 32
    """Prompts (trees) sampled for each step."""
    updates_per_step: PositiveInt = 1
    """Optimiser steps on each batch of rollouts; above 1 the old log-probs are those of the sampler."""
    lr: PositiveFloat = 1e-6
    """Learning rate of AdamW."""
    lr_warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from zero."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay of the first and second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient is scaled down to this norm."""
    max_tokens: PositiveInt = 16384
    """Packed tokens of one micro-batch."""
    self_check: bool = True
    """Before the first update compare some responses as a tree and one by one; share nothing if they differ."""
    max_bad_steps: PositiveInt = 5
    """Steps in a row with a non-finite loss or gradient after which the run stops."""


class EvaluationConfig(Section):
    problems: NonNegativeInt = 512
    """Held-out problems answered greedily; 0: no evaluation."""
    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before and after."""
    max_new_tokens: PositiveInt | None = None
    """Longest answer; `rollout.max_new_tokens` if not given."""


class CheckpointConfig(Section):
    every: PositiveInt = 50
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 2
    """Newest checkpoints kept on disk."""


class TrainConfig(Section):
    name: str
    """Name of the run, and of its directory."""
    seed: NonNegativeInt = 0
    """Seed of everything random: problems, sampling, order."""
    output_dir: str = "runs"
    """The run lives in `<output_dir>/<name>`."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name

    @field_validator("name")
    @classmethod
    def _name_is_a_directory_name(cls, name: str) -> str:
        if name != name.strip() or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise ValueError("it names a directory, so it must be a plain name without slashes or surrounding blanks")
        return name

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        rollout, trainer, evaluation = self.rollout, self.trainer, self.evaluation
        if rollout.vllm_options and rollout.backend != "vllm":
            raise ValueError('`rollout.vllm_options` are for `rollout.backend` = "vllm"; set it, or leave them out')
        if rollout.compile and rollout.backend == "vllm":
            raise ValueError('`rollout.compile` is for `rollout.backend` = "native"; vLLM compiles by its own options')
        longest = self.data.max_prompt_tokens + max(rollout.max_new_tokens, evaluation.max_new_tokens or 0)
        sequence = f"the longest sequence (`data.max_prompt_tokens` + `max_new_tokens` = {longest} tokens)"
        if rollout.n == 1 and self.algorithm.drop_zero_variance:
            raise ValueError(
                "with `rollout.n` = 1 every group has equal rewards and `algorithm.drop_zero_variance` drops it; "
                "raise `rollout.n` to 2 or more, or set `algorithm.drop_zero_variance` to false"
            )
        if self.data.path is not None and self.reward.verifier == "task":
            raise ValueError(
                '`reward.verifier` is "task", which needs `data.tasks`; '
                'for the prompts of `data.path` set it to "math", "exact" or file.py:function'
            )
        if longest > rollout.kv_tokens:
            raise ValueError(f"{sequence} does not fit in `rollout.kv_tokens` = {rollout.kv_tokens}; raise it")
        if longest > trainer.max_tokens:
            raise ValueError(f"{sequence} does not fit in `trainer.max_tokens` = {trainer.max_tokens}; raise it")
        if trainer.updates_per_step > trainer.prompts_per_step:
            raise ValueError(
                f"`trainer.updates_per_step` = {trainer.updates_per_step} needs at least as many prompts, and "
                f"`trainer.prompts_per_step` is {trainer.prompts_per_step}"
            )
        if evaluation.every and not evaluation.problems:
            raise ValueError("`evaluation.every` is given but `evaluation.problems` is 0; give both or neither")
        return self


# -- loading -----------------------------------------------------------------------------------------------------------


class ConfigKey(NamedTuple):
    """One key of the configuration, as documented."""

    key: str
    """Dotted: ``trainer.lr``; keys of the list `data.tasks` read ``data.tasks.name``."""
    type: str
    default: str
    """As TOML; empty where there is none."""
    doc: str


def load_config(path: str | Path, overrides: Sequence[str] | Sequence[tuple[str, str]] = ()) -> TrainConfig:
    """The checked configuration of TOML file ``path``.

    Args:
        path: the TOML file. `model.create` and a `file.py:function` verifier in it are relative to its directory.
        overrides: ``["--trainer.lr", "1e-6", "--seed=1"]`` or ``[("trainer.lr", "1e-6"), ("seed", "1")]``. Values are
            TOML (numbers, booleans, strings, arrays, inline tables); what is not TOML is taken as a string. Paths in
            them are relative to the working directory.

    Raises:
        UserError: unreadable or broken file, unknown key, wrong type or range, keys that contradict each other.
    """
    path = Path(path)
    data = _read_toml(path)
    _resolve_callables(data, path.parent)
    given = _parse_overrides(overrides)
    types = {k.key: k.type for k in config_keys()}
    for key, text in given.items():
        _put(data, key, _parse_value(text, types.get(key, "any")))
    if given:
        _resolve_callables(data, Path())
    try:
        return _validate(data)
    except ValidationError as error:
        raise UserError(_sentence(error, path, given)) from None


def resolved_toml(config: TrainConfig) -> str:
    """The whole configuration, defaults included, as TOML that :func:`load_config` reads back to an equal one."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def config_keys(section: type[BaseModel] | None = None, prefix: str = "") -> Iterator[ConfigKey]:
    """Every key of the configuration in the order of the models; the tables of the documentation come from here."""
    for name, field in (section or TrainConfig).model_fields.items():
        inner = field.annotation
        if _is_section(inner):
            yield from config_keys(inner, f"{prefix}{name}.")
            continue
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        doc = " ".join((field.description or "").split())
        yield ConfigKey(f"{prefix}{name}", _type_name(inner), "" if default is None else _toml_value(default), doc)
        if get_origin(inner) is tuple and _is_section(item := get_args(inner)[0]):
            yield from config_keys(item, f"{prefix}{name}.")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no configuration file '{path}'; give the path of a TOML file.") from None
    except OSError as error:
        raise UserError(f"The configuration file '{path}' cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"The configuration file '{path}' is not a TOML file: line {line} is not UTF-8 text.") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"The configuration file '{path}' is not valid TOML: {error}.") from None


def _parse_overrides(overrides: Sequence[str] | Sequence[tuple[str, str]]) -> dict[str, str]:
    """``{dotted key: text}``; the last of several values for a key wins, as on any command line."""
    given: dict[str, str] = {}
    waiting: str | None = None
    for item in overrides:
        if isinstance(item, tuple):
            given[_known_override(item[0])] = item[1]
        elif waiting is not None:
            given[waiting], waiting = item, None
        elif not item.startswith("--"):
            raise UserError(f"'{item}' stands alone on the command line; overrides look like --trainer.lr 1e-6.")
        else:
            name, equals, text = item.removeprefix("--").partition("=")
            name = _known_override(name)
            if equals:
                given[name] = text
            else:
                waiting = name
    if waiting is not None:
        raise UserError(f"--{waiting} needs a value, as in --{waiting} VALUE.")
    return given


def _known_override(key: str) -> str:
    tables = [k.key for k in config_keys() if k.type == "table"]
    if key in {k.key for k in config_keys() if not k.key.startswith("data.tasks.")}:
        return key
    if any(key.startswith(f"{table}.") for table in tables):
        return key
    if key.startswith("data.tasks."):
        raise UserError(
            f"--{key} reaches into the list `data.tasks`; give the whole list as --data.tasks '[{{name = \"...\"}}]'."
        )
    raise UserError(f"--{key} is not a key of the configuration; {_nearest(key)}.")


def _nearest(key: str) -> str:
    """'the nearest is `trainer.lr`': the right name in the wrong table first, then the nearest spelling."""
    keys = [k.key for k in config_keys()]
    leaf = key.rpartition(".")[2]
    same_leaf = [k for k in keys if k.rpartition(".")[2] == leaf]
    found = same_leaf or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not found:
        by_leaf = {k.rpartition(".")[2]: k for k in reversed(keys)}
        found = [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.0)]
    return f"the nearest is `{found[0]}`"


def _parse_value(text: str, kind: str) -> Any:
    """``text`` as a TOML value; a string where it is not one, where it is a date, or where the key wants a string."""
    try:
        found = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = found["v"]
    one_value = len(found) == 1 and not isinstance(value, datetime.date | datetime.time)
    wanted = isinstance(value, str) or not (kind == "string" or kind.startswith('"'))
    return value if one_value and wanted else text


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; a table in the way of it that is none is left for the validation to name."""
    *tables, leaf = key.split(".")
    for table in tables:
        inner = data.setdefault(table, {})
        if not isinstance(inner, dict):
            return
        data = inner
    data[leaf] = value


def _resolve_callables(data: dict[str, Any], base: Path) -> None:
    """Make the file of each `file.py:function` absolute, so that worker processes find it wherever they run."""
    for table, key in (("model", "create"), ("reward", "verifier")):
        section = data.get(table)
        value = section.get(key) if isinstance(section, dict) else None
        if isinstance(value, str) and ".py:" in value:
            file, _, function = value.rpartition(":")
            cast(dict[str, Any], section)[key] = f"{(base / file).resolve()}:{function}"


def _validate(data: dict[str, Any]) -> TrainConfig:
    # JSON mode is strict about types ("5" is no number, true is no 1) and yet takes arrays as tuples.
    return TrainConfig.model_validate_json(json.dumps(data, default=str), strict=True)


def _sentence(error: ValidationError, path: Path, given: dict[str, str]) -> str:
    """The most telling of the mistakes in one sentence: an unknown key often explains the missing one."""
    rank = {"extra_forbidden": 0, "missing": 2, "value_error": 3}
    mistakes = sorted(error.errors(), key=lambda e: rank.get(e["type"], 1))
    first, more = mistakes[0], len(mistakes) - 1
    key = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
    flag = next((k for k in given if key and (key == k or key.startswith(f"{k}."))), None)
    where = f"--{flag}" if flag else f"'{path}'"
    rest = f" ({more} more {'mistake' if more == 1 else 'mistakes'} after this one)" if more else ""
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    if first["type"] == "extra_forbidden":
        return f"{where}: there is no key `{key}`; {_nearest(key)}{rest}."
    if first["type"] == "missing":
        needed = [k for k in _required() if k == key or k.startswith(f"{key}.")] or [key]
        return (
            f"{where} lacks {' and '.join(f'`{k}`' for k in needed)}; add {'it' if len(needed) == 1 else 'them'}{rest}."
        )
    if isinstance(first["input"], dict) and first["type"] == "value_error":
        return f"'{path}'{_flags(given)}: {message}{rest}."
    return f"{where}: `{key}` = {_toml_value(first['input'])} is not allowed: {message}{rest}."


def _flags(given: dict[str, str]) -> str:
    return f" with {', '.join(f'--{key}' for key in given)}" if given else ""


def _required(section: type[BaseModel] | None = None, prefix: str = "") -> Iterator[str]:
    for name, field in (section or TrainConfig).model_fields.items():
        if _is_section(field.annotation):
            yield from _required(field.annotation, f"{prefix}{name}.")
        elif field.is_required():
            yield f"{prefix}{name}"


def _is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _toml_value(value: Any) -> str:
    """``value`` as it would stand in the file, on one line."""
    if isinstance(value, BaseModel | dict):
        return "{...}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False, default=str)


def _type_name(annotation: Any) -> str:
    """integer, number, string, boolean, table, list of ..., or the allowed values."""
    plain = {int: "integer", float: "number", str: "string", bool: "boolean"}
    if annotation in plain:
        return plain[annotation]
    origin, args = get_origin(annotation), [a for a in get_args(annotation) if a is not type(None)]
    if origin is Literal:
        return " | ".join(json.dumps(a) for a in args)
    if origin is tuple:
        return "list of tables" if _is_section(args[0]) else f"list of {_type_name(args[0])}s"
    if origin is dict:
        return "table"
    return _type_name(args[0])  # Annotated[...] or ... | None
