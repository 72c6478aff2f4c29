"""Model, prompts and rollouts: `[model]`, `[data]`, `[rollout]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, PositiveFloat, field_validator
from typing_extensions import TypedDict

from .place import Place
from .section import NonNegativeInt, PositiveInt, Section


class ToolServer(TypedDict):
    """A server of MCP among `data.tools`."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    mcp: str | list[str]
    shared: NotRequired[bool]
    tools: NotRequired[list[str]]
    headers: NotRequired[dict[str, str]]
    env: NotRequired[dict[str, str]]


MOST_ENGINES = 4096
"""Largest number of `rollout.engines`."""
RANGE = "{ least = 2, most = 64 }"
"""An example of `EnginesRange`, for errors."""


class EnginesRange(TypedDict):
    """Bounds of `rollout.engines`, whose number follows the cluster."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    least: int
    most: int


class ExtrapolationConfig(Section):
    every: PositiveInt = 10
    """Updates between two adapters that are kept."""
    horizon: PositiveInt = 5
    """Kept adapters from one to the one that is predicted from it."""
    scale: PositiveFloat = 1.0
    """Factor of the predicted change."""
    epochs: PositiveInt = 1000
    """Epochs in which the predictor is trained."""
    lr: PositiveFloat = 2e-5
    """Learning rate of the predictor."""


class LoraConfig(Section):
    rank: PositiveInt = 64
    """Rank of the adapter."""
    alpha: PositiveFloat = 16.0
    """Numerator of the adapter's scale."""
    rslora: bool = True
    """The scale is alpha / sqrt(rank) (rsLoRA); false: alpha / rank."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers with an adapter, by the last part of their names, such as `["q_proj", "v_proj"]`; `all-linear`: all
    except the head. A vision tower's have none."""
    extrapolate: ExtrapolationConfig | None = None
    """Extend the exported weights along their trajectory in the run (NExt); see docs/models.md. Default: no."""

    @field_validator("targets")
    @classmethod
    def _some_targets(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not targets:
            raise ValueError("it must name at least one linear layer")
        return targets


class ModelConfig(Section):
    path: str
    """Hugging Face model directory (safetensors), or a model name on the Hugging Face hub."""
    create: str | None = None
    """`file.py:function` (relative to the TOML file), called as function(config, directory) if `path` is missing."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number type of the model's weights and activations; the optimiser always keeps fp32 master weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; `auto` is CUDA if it is available, else the CPU."""
    train_tower: bool = False
    """Train all of a model that takes pictures; by default only its decoder and head are trained, and the vision tower
    stays as it is."""
    gradient_checkpointing: bool | Literal["auto"] = False
    """Recompute activations in the backward pass, but for attention; this saves memory and takes up to a third more
    time. `auto`: in as many layers as the free memory asks for when the model is loaded, by an estimate for
    `trainer.max_tokens`."""
    batch_invariant: bool = False
    """Give the log-prob of a token the same bits wherever it is computed: sampled or trained, among any other rows, as
    a tree, a sequence or in pieces. With the native backend, on a CPU or a GPU; what cannot hold it is refused. See
    docs/exactness.md."""
    lora: LoraConfig | None = None
    """Train a LoRA adapter (needs `peft`) and leave the model's own weights as they are; see docs/models.md."""
    replay_routes: bool = False
    """For mixtures of experts: record the experts that every token was given to when it was sampled, and train with the
    same ones; see docs/trees.md."""


class TaskConfig(Section):
    name: str
    """Name of a `reasoning_gym` dataset."""
    weight: PositiveFloat = 1.0
    """Share of the prompts that come from this task, relative to the other tasks' weights."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `reasoning_gym.create_dataset`."""


class DataConfig(Section):
    tasks: tuple[TaskConfig, ...] = ()
    """`reasoning_gym` tasks whose problems are generated during the run. Give one of `tasks`, `path` and `source`."""
    path: str | None = None
    """Problems, one a row: a file (parquet, JSON lines, JSON array or csv), a folder or pattern of files, an `hf://`
    address, the name of a set on the hub such as `openai/gsm8k`, or a folder of tasks in Harbor's format; see
    docs/data.md."""
    format: Literal["harbor"] | None = None
    """`harbor`: `path` and `eval_path` are folders of tasks in Harbor's format; see docs/environments.md. Default: that
    is so where a folder in them holds a `task.toml`."""
    subset: str | None = None
    """Subset (configuration) of a set on the hub. Default: the only one, or what the set declares as default."""
    split: str | None = None
    """Split of a set on the hub, such as `train`, or a part of it, such as `train[:10000]`. Default: the only one."""
    source: str | None = None
    """Source of problems: `games`, `verifiers`, `openenv`, or `file.py:Class` with a method `next(count)` that returns
    rows with the columns below; see docs/environments.md and docs/architecture.md."""
    source_options: dict[str, Any] = Field(default_factory=dict)
    """Options of `source`."""
    curriculum: str | None = None
    """Choice of prompts by the results of earlier ones, over `path` or `tasks`: a name in `rolltree methods`, or
    `file.py:Class`, see `engine/methods/curricula.py`. Default: none; `path` is shuffled and `tasks` are mixed."""
    curriculum_options: dict[str, Any] = Field(default_factory=dict)
    """Options of `curriculum`."""
    eval_path: str | None = None
    """Held-out problems, in any form that `path` takes. Default: the last `evaluation.problems` rows of `path`."""
    eval_subset: str | None = None
    """Subset of the held-out problems. Default: without `eval_path`, that of `path`."""
    eval_split: str | None = None
    """Split of the held-out problems; without `eval_path`, of the set that `path` names."""
    prompt_key: str = "prompt"
    """Column of `path` with the problem: a text or, with `chat`, a list of messages, each with role and content."""
    answer_key: str = "answer"
    """Column of `path` with the reference answer; `a.b` is the field `b` of the column `a`. If the column `answer` is
    missing, verl's `reward_model.ground_truth` is read."""
    image_key: str | None = None
    """Column of `path` or `source` with the pictures of a problem: one or a list, each a path (relative to the file),
    an encoded file, or a dict with `bytes` or `path`; see docs/pictures.md. Default: only parts of messages are
    pictures."""
    n_key: str | None = None
    """Column of `path` or `source` with the number of responses to a problem. Default: `rollout.n` for all problems."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """The treatment of a row that cannot be used (not readable, without a column, too long) and that is met during the
    run: `raise` ends the run with a sentence about it; `skip` draws the next row in its place, and tells and counts it
    (`data/skipped_rows`). At the start only a sample of the rows is tried, all with `--check-data`."""
    disjoint: bool = False
    """Leave out problems whose prompt a demonstration has: the same text before the template, blanks at its ends apart,
    with the same pictures. Held-out problems stay. The plan and the run's first lines count both."""
    template: str = "{prompt}"
    """Text given to the tokenizer; `{prompt}` is replaced by the problem."""
    chat: bool = False
    """Write prompts with the tokenizer's chat template: a text as one message of the user, messages as they are."""
    tools: tuple[str | ToolServer, ...] = ()
    """Tools that the chat template offers, for `rollout.program` = "environment": `calculator`, `python`,
    `file.py:function` with type annotations and a docstring, or those of a server of MCP, `{ mcp = [command...] }` or
    `{ mcp = "http://..." }`, with `shared`, `tools`, `headers` and `env` as docs/environments.md says."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt, in tokens; a longer one is an error and is never cut."""

    @field_validator("template")
    @classmethod
    def _template_has_a_place(cls, template: str) -> str:
        if "{prompt}" not in template:
            raise ValueError("it must contain {prompt}, the place where the problem goes")
        return template

    @property
    def place(self) -> Place | None:
        """Place of the problems to train on, if they are rows."""
        return None if self.path is None else Place(self.path, "data.path", self.subset, self.split, format=self.format)

    @property
    def eval_place(self) -> Place | None:
        """Place of the held-out problems, if they have one of their own."""
        if self.eval_path is not None:
            return Place(self.eval_path, "data.eval_path", self.eval_subset, self.eval_split, "data.eval_", self.format)
        if self.path is None or self.eval_split is None:
            return None
        return Place(
            self.path, "data.path", self.eval_subset or self.subset, self.eval_split, "data.eval_", self.format
        )

    @property
    def is_empty(self) -> bool:
        """True if there are no problems to sample responses to."""
        return not self.tasks and self.path is None and self.source is None


class DraftsConfig(Section):
    rows: NonNegativeInt = 0
    """The native backend drafts tokens from earlier texts in decoding steps of at most this many rows; 0: never. The
    sampled tokens stay the same; their log-probs, and so the trained weights, differ by rounding. Models with recurrent
    layers sample without drafts."""
    tokens: PositiveInt = 4
    """Largest number of drafted tokens of a sequence in one decoding step."""
    remembered: Annotated[int, Field(ge=256, lt=2**31)] = 1 << 20
    """Tokens of earlier texts kept to draft from, 28 bytes each; the oldest texts are dropped first."""


class RolloutConfig(Section):
    backend: Literal["native", "vllm"] = "native"
    """Sampler: `native` uses the trained module itself; `vllm` must be installed and receives the weights each step."""
    vllm_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `vllm.LLM`."""
    engines: int | EnginesRange = 0
    """Processes in which `rolltree train` samples, each with an engine of its own; they need Ray, see docs/scale.md.
    0: the run's own process samples. `{ least = 2, most = 64 }`: as many as the cluster has room for, within these
    bounds; they come and go with its nodes."""
    send_changes: bool = False
    """Send `engines` only the weights whose bits changed in an update, where that is less than all. Those that
    train take longer to compare them, and it pays where the network between machines is slow; see docs/scale.md."""
    python: str = ""
    """Interpreter of the processes of `engines`, such as `/opt/vllm/bin/python` of an environment of its own: with
    rolltree, and with the Python and the Ray of the run. Empty: the run's own."""
    program: str = "flat"
    """Rollout program, which decides where responses branch: a name in `rolltree methods`, or `file.py:Class`."""
    program_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the program."""
    n: Annotated[int, Field(gt=0, le=65536)] = 8
    """Responses to one prompt (leaves of its tree)."""
    temperature: PositiveFloat = 1.0
    """Softmax temperature of sampling and of the log-probs in training."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens whose total probability is at least this; 1: from all tokens."""
    top_k: PositiveInt | None = None
    """Sample from the k most probable tokens. Default: from all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Exclude tokens less probable than this share of the most probable token's probability. Default: none."""
    max_new_tokens: PositiveInt = 256
    """Longest response, in tokens."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response; they stay part of it."""
    max_batch_rows: PositiveInt = 512
    """Largest number of sequences decoded together."""
    kv_tokens: PositiveInt = 65536
    """Capacity of the native backend's paged KV cache, in tokens."""
    kept_states: Annotated[int, Field(ge=0, lt=2**31)] = 64
    """States of recurrent layers that the native backend keeps besides those of running sequences, for branches that
    fork, go back or were preempted; without one, tokens are computed again. No effect on other models."""
    keep_pages: Literal[True, False, "auto"] = "auto"
    """Keep the memory of the native backend's KV cache while the policy is updated. `auto`: on a GPU, if there was room
    for both in the updates before; on a CPU it is freed. CUDA graphs stay either way where CUDA's driver can keep the
    addresses of freed memory; `true` does without these calls of the driver."""
    window: Literal[1, 2, 3, 4, 5, 6, 7, 8, "auto"] = "auto"
    """Most decoding steps that the native backend takes before it looks at the samples, up to 8. The samples are the
    same. `auto`: 8 on a GPU, 1 on a CPU; see docs/rollouts.md."""
    compile: bool = False
    """Decode with torch.compile, after some seconds of compilation; on a CPU this is no faster. Not for models with
    recurrent layers."""
    drafts: DraftsConfig = DraftsConfig()

    @field_validator("engines", mode="before")
    @classmethod
    def _engines_are_a_number_or_a_range(cls, engines: Any) -> Any:
        if type(engines) is int and 0 <= engines <= MOST_ENGINES:
            return engines
        if not isinstance(engines, dict):
            raise ValueError(f"it must be an integer from 0 to {MOST_ENGINES}, or a table such as {RANGE}")
        if engines.keys() != {"least", "most"}:
            raise ValueError(f"`rollout.engines` as a table has the keys `least` and `most`, such as {RANGE}")
        for name, number in engines.items():
            if type(number) is not int or not 1 <= number <= MOST_ENGINES:
                raise ValueError(f"`rollout.engines`: `{name}` must be an integer from 1 to {MOST_ENGINES}")
        if engines["least"] > engines["most"]:
            raise ValueError(
                f"`rollout.engines`: `least` = {engines['least']} exceeds `most` = {engines['most']}; exchange them"
            )
        return engines

    @property
    def most_engines(self) -> int:
        """Largest number of engines; 0: the run's own process samples."""
        return self.engines if isinstance(self.engines, int) else self.engines["most"]

    @property
    def least_engines(self) -> int | None:
        """Smallest number of engines where this follows the cluster; None where it is fixed."""
        return None if isinstance(self.engines, int) else self.engines["least"]
