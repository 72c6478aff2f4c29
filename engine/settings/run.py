"""The whole configuration of a run, and the checks of its tables against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from .algorithm import AlgorithmConfig, DemonstrationsConfig, ReplayConfig, RolesConfig, TermConfig
from .policies import METRICS, PolicyConfig, PolicyName
from .rewards import VERIFIERS, RewardConfig
from .sampling import DataConfig, ModelConfig, RolloutConfig
from .section import Section
from .training import CheckpointConfig, EvaluationConfig, LoopConfig, PlacementConfig, TrainerSection

LONGEST_NAME = 200
"""Longest name of a run, in bytes; file systems allow 255, and a run appends suffixes to it."""


class TrainConfig(Section):
    """The configuration of a run, read from its TOML file and the command line."""

    name: str
    """Name of the run and of its directory."""
    recipe: str | None = None
    """Published method by name, see docs/methods.md: its keys apply where neither the file nor the command line gives
    them. Lists of tables are combined by `name`."""
    stages: tuple[dict[str, Any], ...] = ()
    """Runs one after another, each from the model that the one before exported: tables with a `name` and any keys of
    the configuration; see docs/loop.md."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of all random choices: problems, sampling, order."""
    output_dir: str = "runs"
    """Directory of runs; everything that this run writes is in `<output_dir>/<name>`."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that receive the metrics in addition to `metrics.jsonl`; each needs its own library installed."""
    model: ModelConfig
    models: dict[PolicyName, PolicyConfig] = Field(default_factory=dict)
    """Further policies, by name, each trained on the tokens that it samples; see docs/loop.md."""
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    roles: RolesConfig = RolesConfig()
    demonstrations: tuple[DemonstrationsConfig, ...] = ()
    """Given responses, trained on together with the rollouts, or alone with `trainer.prompts_per_step` = 0: a table, or
    several."""
    replay: ReplayConfig | None = None
    """Groups of earlier steps, trained on again together with new ones."""

    @property
    def replayed(self) -> int:
        """Number of groups of a step that `[replay]` draws from the store."""
        return 0 if self.replay is None else round(self.replay.share * self.trainer.prompts_per_step)

    trainer: TrainerSection = TrainerSection()
    loop: LoopConfig = LoopConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    placement: PlacementConfig = PlacementConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def _parts_match(self, tasks: set[str]) -> None:
        for part in self.reward.parts:
            if unknown := sorted(set(part.tasks) - tasks):
                raise ValueError(
                    f"`when` of the part '{part.name}' (`reward.parts`) names '{unknown[0]}', which is not in "
                    f"`data.tasks`; they are {', '.join(sorted(tasks))}"
                )
        left = sorted(t for t in tasks if self.reward.parts and not any(p.judges(t) for p in self.reward.parts))
        if left:
            raise ValueError(f"no part of `reward.parts` judges the task '{left[0]}'; add it to the `when` of one")

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name

    @field_validator("name")
    @classmethod
    def _name_is_a_directory_name(cls, name: str) -> str:
        if name != name.strip() or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise ValueError("it names a directory, so it must be a plain name without slashes or surrounding blanks")
        if len(name.encode("utf-8", "replace")) > LONGEST_NAME or not name.isprintable():
            raise ValueError(f"it names a directory, so it must be printable and {LONGEST_NAME} bytes long at most")
        return name

    @property
    def judges(self) -> bool:
        """True if the run has responses to judge: rollouts, or answers to held-out problems."""
        return self.trainer.prompts_per_step > 0 or self.evaluation.problems > 0

    @model_validator(mode="after")
    def _demonstrations_are_told_apart(self) -> Self:
        names = [table.name for table in self.demonstrations]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two tables of `demonstrations` are called '{twice[0]}'; give each a `name` of its own")
        of_terms: list[AlgorithmConfig | TermConfig] = [self.algorithm, *self.algorithm.terms]
        for term in of_terms:
            options = {"demonstrated": term.select_options} if term.select == "demonstrated" else {}
            if isinstance(term, TermConfig) and term.pairs == "chosen_and_rejected":
                options = {"chosen_and_rejected": term.pairs_options}
            for part, given in options.items():
                if not names:
                    raise ValueError(f"`{part}` chooses demonstrations, and the run has none; give `demonstrations`")
                if given.get("of", names[0]) not in names:
                    raise ValueError(
                        f"`{part}` chooses demonstrations '{given['of']}', and the tables of `demonstrations` are "
                        f"called {', '.join(names)}"
                    )
        return self

    @model_validator(mode="after")
    def _demonstrations_alone(self) -> Self:
        """Check a run without rollouts."""
        if self.trainer.prompts_per_step > 0:
            if self.data.is_empty:
                raise ValueError("give one of `data.tasks`, `data.path` and `data.source`, and none of them is given")
            return self
        if not any(table.per_step for table in self.demonstrations):
            raise ValueError(
                "`trainer.prompts_per_step` = 0 samples nothing, and there are no `demonstrations` to train on; give "
                "one of them"
            )
        if self.data.is_empty and self.evaluation.problems and self.data.eval_path is None:
            raise ValueError(
                "`data` has no problems to hold out; name some in `data.eval_path`, or set `evaluation.problems` to 0"
            )
        refused = {
            "loop.staleness above 0": self.loop.staleness > 0,
            "loop.callback": self.loop.callback is not None,
            "replay": self.replay is not None,
            "data.curriculum": self.data.curriculum is not None,
            "models": bool(self.models),
        }
        for key, given in refused.items():
            if given:
                raise ValueError(
                    f"`trainer.prompts_per_step` = 0 samples nothing, so {key} has no effect; leave it out, or sample"
                )
        return self

    @model_validator(mode="after")
    def _one_process_trains_all_policies(self) -> Self:
        """Refuse what runs of several policies do not have."""
        if not self.models:
            return self
        first, roles = next(iter(self.models)), self.roles
        for name in self.models:
            if name in (*METRICS, *(term.name for term in self.algorithm.terms)):
                raise ValueError(f"`models.{name}` has a name that metrics begin with already; choose another")
        refused = {
            "rollout.engines": self.rollout.engines > 0,
            'rollout.backend = "vllm"': self.rollout.backend == "vllm",
            "rollout.stop, which would end a whole response,": bool(self.rollout.stop),
            "trainer.ranks above 1": self.trainer.ranks > 1,
            "reward.hosts": self.reward.hosts > 0,
            "loop.staleness above 0": self.loop.staleness > 0,
            'loop.train_context = "plain"': self.loop.train_context == "plain",
            "data.image_key": self.data.image_key is not None,
            "model.lora": self.model.lora is not None,
            "model.replay_routes": self.model.replay_routes,
            "replay": self.replay is not None,
            "roles.critic": roles.critic is not None,
            "roles.teacher": roles.teacher is not None,
            "roles.reference.path": roles.reference is not None and roles.reference.path is not None,
        }
        for key, given in refused.items():
            if given:
                raise ValueError(f"`models.{first}` does not go with {key} yet; leave one of them out")
        return self

    @model_validator(mode="after")
    def _backends_agree(self) -> Self:
        rollout = self.rollout
        if self.loop.train_context == "plain" and self.data.image_key is not None:
            raise ValueError(
                '`loop.train_context` = "plain" exchanges no prompts with pictures (`data.image_key`); leave one out'
            )
        if self.model.replay_routes and rollout.backend == "vllm":
            raise ValueError(
                '`model.replay_routes` needs `rollout.backend` = "native", which records routes: vLLM 0.32 has them '
                "on a GPU alone (its model runner V2 needs Triton), and they are not read; set it, or replay none"
            )
        if self.model.replay_routes and rollout.compile:
            raise ValueError("`rollout.compile` does not record routes; leave it or `model.replay_routes` out")
        if self.model.batch_invariant and (rollout.backend == "vllm" or rollout.compile):
            key = "`rollout.compile`" if rollout.compile else '`rollout.backend` = "vllm"'
            raise ValueError(
                f"`model.batch_invariant` does not hold for {key}, whose kernels have orders of sums of their own; "
                "leave one of them out"
            )
        if rollout.vllm_options and rollout.backend != "vllm":
            raise ValueError('`rollout.vllm_options` are for `rollout.backend` = "vllm"; set it, or leave them out')
        return self

    @model_validator(mode="after")
    def _processes_agree(self) -> Self:
        rollout, trainer = self.rollout, self.trainer
        if rollout.python and not rollout.engines:
            raise ValueError("`rollout.python` is for `rollout.engines`; set this, or leave it out")
        if rollout.send_changes and (not rollout.engines or rollout.backend == "vllm"):
            raise ValueError(
                "`rollout.send_changes` is for `rollout.engines` of the native backend: the run's own process shares "
                "the weights, and vLLM loads whole ones; leave it out"
            )
        if self.placement != PlacementConfig() and not rollout.engines and not self.reward.hosts:
            raise ValueError(
                "`placement` is for other processes; set `rollout.engines` or `reward.hosts`, or leave it out"
            )
        if self.placement.per_rank and trainer.ranks == 1:
            raise ValueError("`placement.per_rank` is for `trainer.ranks` above 1; set these, or leave it out")
        if trainer.ranks > 1 and (self.data.image_key is not None or self.model.replay_routes):
            raise ValueError(
                "`data.image_key` and `model.replay_routes` do not go with `trainer.ranks` above 1 yet; set it to 1"
            )
        colocated = self.placement.layout == "colocated"
        if colocated and trainer.ranks > 1:
            raise ValueError('`placement.layout` = "colocated" does not go with `trainer.ranks` above 1; set it to 1')
        if (self.placement.per_engine or colocated) and not rollout.engines:
            raise ValueError(
                "`placement.per_engine` and `placement.layout` are for `rollout.engines`; set these, or leave them out"
            )
        judges = rollout.program in ("hints", "mcts") or ":" in rollout.program
        if rollout.engines and judges and (scheduled := self.reward.scheduled):
            raise ValueError(
                f"the program '{rollout.program}' judges in the processes of `rollout.engines`, which do not know the "
                f"step that the weight of the part '{scheduled[0]}' follows; set `rollout.engines` to 0, or give the "
                "part a number"
            )
        if colocated and self.loop.overlaps(on_cpu=False):
            raise ValueError(
                'engines with `placement.layout` = "colocated" sleep during updates and cannot sample then; set '
                "`loop.overlap` to false"
            )
        if rollout.compile and rollout.backend == "vllm":
            raise ValueError('`rollout.compile` is for `rollout.backend` = "native"; use `rollout.vllm_options`')
        return self

    @model_validator(mode="after")
    def _data_and_judges_agree(self) -> Self:
        if self.judges and not self.data.tasks and "task" in self.reward.verifiers:
            key = "a verifier of `reward.parts`" if self.reward.parts else "`reward.verifier`"
            raise ValueError(
                f'{key} is "task", which needs `data.tasks`; '
                f"for other prompts set it to one of {', '.join(VERIFIERS[1:])}, or file.py:function"
            )
        if self.data.tasks:
            self._parts_match({task.name for task in self.data.tasks})
        if self.data.source is not None and self.data.eval_path is None and self.evaluation.problems:
            raise ValueError(
                "`data.source` has no held-out problems; name a file of them in `data.eval_path`, or set "
                "`evaluation.problems` to 0"
            )
        if self.data.disjoint and not self.demonstrations:
            raise ValueError(
                "`data.disjoint` leaves out prompts of `demonstrations`, and the run has none; give them, with "
                "`demonstrations.per_step` = 0 if they are an earlier stage's, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        rollout, trainer, evaluation = self.rollout, self.trainer, self.evaluation
        longest = self.data.max_prompt_tokens + max(rollout.max_new_tokens, evaluation.max_new_tokens or 0)
        sequence = f"the longest sequence (`data.max_prompt_tokens` + `max_new_tokens` = {longest} tokens)"
        if longest > rollout.kv_tokens:
            raise ValueError(f"{sequence} does not fit in `rollout.kv_tokens` = {rollout.kv_tokens}; raise it")
        if longest > trainer.max_tokens:
            raise ValueError(f"{sequence} does not fit in `trainer.max_tokens` = {trainer.max_tokens}; raise it")
        return self

    @model_validator(mode="after")
    def _updates_agree(self) -> Self:
        trainer, evaluation = self.trainer, self.evaluation
        extrapolate = None if self.model.lora is None else self.model.lora.extrapolate
        if extrapolate is not None and trainer.ranks > 1:
            raise ValueError("`model.lora.extrapolate` does not go with `trainer.ranks` above 1 yet; set it to 1")
        updates = trainer.steps * trainer.updates
        if extrapolate is not None and updates < (needed := extrapolate.every * (extrapolate.horizon + 1)):
            raise ValueError(
                f"`model.lora.extrapolate` learns from every * (horizon + 1) = {needed} updates at least, and the run "
                f"makes {updates}; raise `trainer.steps`, or lower one of them"
            )
        given = sum(table.per_step for table in self.demonstrations)
        if trainer.updates_per_step > (most := max(trainer.prompts_per_step, given)):
            raise ValueError(
                f"`trainer.updates_per_step` = {trainer.updates_per_step} needs at least as many prompts, and "
                f"`trainer.prompts_per_step` is {trainer.prompts_per_step}; set the first to {most} or less, or the "
                f"second to {trainer.updates_per_step} or more"
            )
        if self.replay is not None and not 0 < self.replayed < trainer.prompts_per_step:
            raise ValueError(
                f"`replay.share` = {self.replay.share} of `trainer.prompts_per_step` = {trainer.prompts_per_step} is "
                f"{self.replayed} groups, which leaves none {'to draw' if not self.replayed else 'to sample'}; change "
                "one of them"
            )
        if evaluation.problems and self.reward.by_group:
            raise ValueError(
                "held-out problems are answered once, and a judge of groups cannot judge one response; set "
                "`evaluation.problems` to 0"
            )
        if evaluation.every and not evaluation.problems:
            raise ValueError("`evaluation.every` is given but `evaluation.problems` is 0; give both or neither")
        return self
