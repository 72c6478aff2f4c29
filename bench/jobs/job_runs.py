"""The process that `rolltree bench job` starts for one provider: its whole job.

All providers get the configuration's model, its prompts in one order, its verifier, optimiser, learning rate and number
of responses. Each saves its weights at the steps where the held-out problems are due; `job` evaluates them later, with
one program for all. The clock stops while weights are written.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.assembly.sampling import make_run_rewards, rollout_program
from rolltree.engine.loop.evaluation import Evaluation
from rolltree.engine.model.loading import choose_device
from rolltree.engine.parts.context import Context
from rolltree.engine.prompts.prompts import Prompt, held_out
from rolltree.engine.prompts.sources import PromptSource
from rolltree.engine.rewards import RewardItem, Rewards
from rolltree.engine.settings import LoopConfig, RolesConfig, TrainConfig
from rolltree.kernels import Objective

from .. import timing
from ..runner import UnsupportedError
from ..schema import append_line

CONFIG, STEPS, REFUSAL = "config.json", "steps.jsonl", "refusal.txt"
"""Files of a run's directory: its input, one line for each step, and the reason if it does not run."""


class Recorder:
    """The clock of a run, and the files that it writes into ``directory``."""

    def __init__(self, directory: Path, config: TrainConfig) -> None:
        self.directory, self.every, self.last = directory, config.evaluation.every, config.trainer.steps
        self.device = choose_device(config.model.device)
        self._began = self._stood = self._peak = 0.0

    def start(self) -> None:
        """Start the clock: everything is loaded."""
        timing.forget_peak(self.device)
        self._began = time.perf_counter()

    def due(self, step: int) -> bool:
        return step == self.last or (self.every > 0 and step % self.every == 0)

    def step(self, step: int, tokens: int) -> None:
        """Record the end of a step; ``tokens`` were sampled so far."""
        self._append(step, tokens)

    def weights(self, step: int, tokens: int, model: Any) -> None:
        """Save the weights after ``step``."""
        self._append(step, tokens, weights=True)
        with self._standing():
            unfinished = self.directory / "weights.tmp"
            tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
            save_file(tensors, unfinished)
            unfinished.rename(weights_of(self.directory, step))

    def _append(self, step: int, tokens: int, *, weights: bool = False) -> None:
        seconds = time.perf_counter() - self._began - self._stood
        with self._standing():
            self._peak = max(self._peak, timing.resident_peak_mib(self.device))
            line = {"step": step, "seconds": seconds, "tokens": tokens, "peak_memory_mib": self._peak}
            append_line(line | {"weights": weights}, self.directory / STEPS)

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """Exclude what happens in the block from the measured time and peak memory."""
        begin = time.perf_counter()
        yield
        timing.forget_peak(self.device)
        self._stood += time.perf_counter() - begin


def weights_of(directory: Path, step: int) -> Path:
    return directory / f"weights-{step:06d}.safetensors"


# -- rolltree ---------------------------------------------------------------------------------------------------------


class _Kept(Evaluation):
    """Replaces a run's evaluation: saves the weights, which are evaluated later."""

    recorder: Recorder
    model: Any
    engine: Any

    def run(self, step: int, rewards: Rewards) -> dict[str, float]:
        if step == 0:
            self.recorder.start()
        else:
            self.recorder.weights(step, sampled(self.engine), self.model)
            self.recorder.step(step, sampled(self.engine))  # the clock stops here: a checkpoint follows
        return {}


class _Steps:
    """Records the ends of a run's steps. The first and last checkpoints do not belong to the job."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.engine: Any = None

    def phase(self, text: str) -> None:
        if self.engine is not None and sampled(self.engine) == 0:
            self.recorder.start()

    def step(self, step: int, metrics: object) -> None:
        if not self.recorder.due(step):
            self.recorder.step(step, sampled(self.engine))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def sampled(engine: Any) -> int:
    """Return the tokens that a run has sampled; one shared by several responses counts once."""
    return int(engine.stats["sampled_tokens"])


def rolltree(config: TrainConfig, recorder: Recorder, **changes: dict[str, Any]) -> None:
    """Run `rolltree train` with ``changes`` in sections of its configuration."""
    with tempfile.TemporaryDirectory() as directory:
        rest: dict[str, Any] = {"output_dir": directory, "trackers": ()}
        rest["checkpoint"] = config.checkpoint.model_copy(update={"every": config.trainer.steps, "best": None})
        for section, values in changes.items():
            rest[section] = getattr(config, section).model_copy(update=values)
        steps: Any = _Steps(recorder)
        run = build(config.model_copy(update=rest), console=steps)
        old = run.evaluation
        sampler: Any = run.sampler
        learner: Any = run.learner
        kept = _Kept(old.problems, old.params, old.every, sampler, run.tokenizer, steps)
        kept.recorder, kept.model, kept.engine = recorder, learner.model, sampler.engine
        steps.engine = sampler.engine
        run.evaluation = run.checkpoints.evaluation = kept
        run.run()


def flat(config: TrainConfig, recorder: Recorder) -> None:
    rolltree(config, recorder, rollout={"program": "flat", "program_options": {}})


def efficient(config: TrainConfig, recorder: Recorder) -> None:
    """Run the job without branches and with the recipe `efficient`, which no other trainer here has."""
    algorithm = {"advantage": "beta_norm", "cut": 0.97}
    rollout = {"program": "flat", "program_options": {}}
    rolltree(config, recorder, rollout=rollout, algorithm=algorithm, loop={"callback": "prune_majority"})


def tree(config: TrainConfig, recorder: Recorder) -> None:
    rolltree(config, recorder, rollout=branching(config))


def stale(config: TrainConfig, recorder: Recorder) -> None:
    rolltree(config, recorder, rollout=branching(config), loop={"staleness": 1})


def branching(config: TrainConfig) -> dict[str, Any]:
    """Return the job's own program if it branches, else TreePO with six segments in the longest response."""
    if config.rollout.program != "flat":
        return {}
    segment = -(-config.rollout.max_new_tokens // 6)
    options = {"segment_tokens": segment, "max_depth": 6, "branch": 2, "init": max(1, config.rollout.n // 2)}
    return {"program": "treepo", "program_options": options}


# -- TRL --------------------------------------------------------------------------------------------------------------

LOSSES = {"token_mean": "dapo", "seq_mean_token_mean": "grpo", "seq_mean_token_sum_norm": "dr_grpo"}
"""Maps `Objective.aggregation` to TRL's `loss_type`."""
SCALES = {"group_norm": "group", "group_mean": "none"}
"""Maps `algorithm.advantage` to TRL's `scale_rewards`."""


def trl(config: TrainConfig, recorder: Recorder, *, accelerated: bool = False, vllm: bool = False) -> None:
    """Run TRL's `GRPOTrainer` with its defaults except for what the job sets.

    Raises:
        UnsupportedError: the job needs something that TRL does not offer.
    """
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    from rolltree.engine.integrations.trl import accelerate
    from rolltree.engine.integrations.trl.objective import objective

    if vllm and recorder.device.type == "cpu":
        raise UnsupportedError(
            "on a CPU vLLM packs its weights and drops the parameters, into which TRL would load those of every update "
            "(VLLMGeneration.sync_weights); it needs a GPU"
        )
    loss = Objective.preset(config.algorithm.objective, **config.algorithm.objective_options)
    check(config, loss)
    model, tokenizer = load(config)
    source = PromptSource(
        config.data, tokenizer, config.seed, held_out(config.data, config.evaluation.problems, tokenizer)
    )
    prompts = source.next(config.trainer.steps * config.trainer.prompts_per_step)
    for prompt in prompts:
        if tokenizer(prompt.text)["input_ids"] != prompt.token_ids:
            raise UnsupportedError("TRL would give the tokenizer's own special tokens to the prompts")
    sampled_tokens = 0

    class Recorded(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            recorder.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if recorder.due(state.global_step):
                recorder.weights(state.global_step, sampled_tokens, model)
            recorder.step(state.global_step, sampled_tokens)

    def reward(completions: list[str], completion_ids: list[list[int]], number: list[int], **_: Any) -> list[Any]:
        nonlocal sampled_tokens
        sampled_tokens += sum(map(len, completion_ids))
        items = [item(prompts[i], text) for i, text in zip(number, completions, strict=True)]
        return [result.value for result in rewards.score(items)]

    unused: Any = None  # the engine, which only the verifier `policy` uses
    with (
        make_run_rewards(config, rollout_program(config.rollout), unused, tokenizer, Context(tokenizer)) as rewards,
        tempfile.TemporaryDirectory() as directory,
    ):
        longest = max(len(prompt.token_ids) for prompt in prompts) + config.rollout.max_new_tokens
        arguments = grpo_arguments(config, loss, longest, directory, vllm=vllm)
        trainer: Any = GRPOTrainer(
            model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=dataset(prompts),
            processing_class=tokenizer,
            optimizers=optimizer(config, model),
            callbacks=[Recorded()],
        )
        if (trl_loss := objective(trainer)) != loss:
            raise UnsupportedError(f"the job's loss is {loss}, and TRL's would be {trl_loss}")
        if accelerated:
            accelerate(trainer)
        trainer.train()


def load(config: TrainConfig) -> tuple[Any, Any]:
    """Return the model in fp32, as rolltree keeps its weights, with Transformers' own attention, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    return model.to(choose_device(config.model.device)), AutoTokenizer.from_pretrained(config.model.path)


def check(config: TrainConfig, loss: Objective) -> None:
    """
    Raises:
        UnsupportedError: TRL has no such option, or it means something else.
    """
    algorithm, roles = config.algorithm, config.roles != RolesConfig() or bool(config.demonstrations)
    for there, what in (
        (algorithm.advantage not in SCALES or algorithm.advantage_options, "algorithm.advantage"),
        (loss.aggregation not in LOSSES or loss.surrogate != "ppo", "algorithm.objective"),
        (algorithm.select or algorithm.terms or algorithm.weight != 1.0, "algorithm.select, terms or weight"),
        (config.trainer.updates > 1, "trainer.updates_per_step or trainer.epochs"),
        (config.trainer.lr_scale != 1.0, "trainer.lr_scale"),
        (config.rollout.stop, "rollout.stop"),
        (config.data.tools, "data.tools"),
        (config.reward.shaping, "reward.shaping"),
        (config.reward.verifier in ("policy", "program"), f"reward.verifier = '{config.reward.verifier}'"),
        (config.loop != LoopConfig(), "[loop]"),
        (roles, "[roles] or [demonstrations]"),
    ):
        if there:
            raise UnsupportedError(f"TRL has no counterpart to the job's {what}")


def grpo_arguments(config: TrainConfig, loss: Objective, longest: int, directory: str, *, vllm: bool) -> Any:
    """Return TRL's configuration; a micro-batch of whole groups has as many padded tokens as the job's may have.

    Args:
        longest: tokens of the longest prompt and the longest response together.
    """
    from trl import GRPOConfig

    rollout, trainer = config.rollout, config.trainer
    groups = max(1, trainer.max_tokens // (longest * rollout.n))
    groups = max(g for g in range(1, min(groups, trainer.prompts_per_step) + 1) if trainer.prompts_per_step % g == 0)
    colocated = {"vllm_mode": "colocate", "vllm_max_model_length": longest} if vllm else {}
    return GRPOConfig(
        output_dir=directory,
        seed=config.seed,
        max_steps=trainer.steps,
        per_device_train_batch_size=groups * rollout.n,
        gradient_accumulation_steps=trainer.prompts_per_step // groups,
        num_generations=rollout.n,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k or 0,
        min_p=rollout.min_p,
        loss_type=LOSSES[loss.aggregation],
        epsilon=loss.eps_low,
        epsilon_high=loss.eps_high,
        beta=loss.kl_coef,
        scale_rewards=SCALES[config.algorithm.advantage],
        max_grad_norm=trainer.max_grad_norm,
        gradient_checkpointing=bool(config.model.gradient_checkpointing),
        bf16=config.model.dtype == "bfloat16",
        use_cpu=choose_device(config.model.device).type == "cpu",
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_vllm=vllm,
        **colocated,
    )


def optimizer(config: TrainConfig, model: Any) -> Any:
    """Return AdamW and its schedule, with the job's numbers."""
    trainer, warmup = config.trainer, config.trainer.lr_warmup_steps
    adam = torch.optim.AdamW(
        model.parameters(), lr=trainer.lr, betas=trainer.betas, weight_decay=trainer.weight_decay, fused=True
    )
    return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda k: min(1.0, (k + 1) / warmup if warmup else 1.0))


def dataset(prompts: list[Prompt]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [prompt.text for prompt in prompts], "number": list(range(len(prompts)))})


def item(prompt: Prompt, text: str) -> RewardItem:
    return RewardItem(text, prompt.entry, prompt.problem, prompt.text)


PROVIDERS: dict[str, Callable[[TrainConfig, Recorder], None]] = {
    "trl": trl,
    "trl+rolltree": lambda config, recorder: trl(config, recorder, accelerated=True),
    "trl+vllm": lambda config, recorder: trl(config, recorder, vllm=True),
    "rolltree_flat": flat,
    "rolltree_efficient": efficient,
    "rolltree_tree": tree,
    "rolltree_s1": stale,
}


def main() -> None:
    """Run ``python -m rolltree.bench.jobs.job_runs PROVIDER DIRECTORY``; the directory has the configuration."""
    provider, directory = sys.argv[1], Path(sys.argv[2])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    config = TrainConfig.model_validate_json((directory / CONFIG).read_text(encoding="utf-8"))
    try:
        PROVIDERS[provider](config, Recorder(directory, config))
    except UnsupportedError as error:
        (directory / REFUSAL).write_text(str(error), encoding="utf-8")


if __name__ == "__main__":
    main()
