"""The loop of a run: prompts, rollouts, rewards, advantages, one update, and again.

Synchronous: every batch is sampled by the weights it updates. Whatever is random follows from (seed, step, prompt),
never from time or order, so a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, set_seed

from ..data.store import write_rollouts
from ..data.tree import TokenTree
from ..errors import RunError, UserError
from ..methods.calling import failure
from ..rewards import RewardItem, RewardPool, RewardResult
from ..rewards.judge import PoolJudge
from ..rewards.verdicts import put_rewards
from ..settings import TrainConfig, resolved_toml
from ..train import checkpoint
from . import early, setup
from .failures import Failures, unsampled
from .learner import Learner
from .metrics import MetricsLog, Stopwatch, Sums
from .progress import Progress
from .sources import Prompt, PromptSource, held_out

SOLVED = 1.0 - 1e-6
"""A reward from here on counts as a correct answer in the evaluation."""


@dataclass(frozen=True)
class RunSummary:
    """What a run achieved."""

    steps: int
    accuracy_before: float | None
    accuracy_after: float | None
    problems: int
    seconds: float
    export: Path
    failures: list[str]
    """What could not be sampled or judged, a line each."""


class Orchestrator:
    """A training run in its directory; see the module's description.

    Raises:
        UserError: the directory holds another run, there is nothing to resume, or a part of the configuration names
            something that does not exist.
    """

    def __init__(self, config: TrainConfig, *, console: Progress, resume: bool = False) -> None:
        self.config = config
        self.console = console
        self.program = setup.rollout_program(config.rollout)
        self.judge = self.program.verify = PoolJudge()
        self.params = setup.sampling_params(config.rollout)
        early.check_credit(config, setup.credit(config))
        _check_old_logprobs(config)
        self._saved = self._check_directory(resume)
        set_seed(config.seed)

        console.phase("loading the model")
        self.model, self.tokenizer = setup.prepare_model(config)
        self.engine = setup.make_engine(config, self.model, self.tokenizer)
        self.problems = held_out(config, self.tokenizer)
        self.source = PromptSource(config.data, self.tokenizer, config.seed, self.problems)
        early.check_lengths(config, self.engine.longest)
        early.check_program(config, self.program, self.tokenizer, self.source.peek(early.TRIED))
        self.log = MetricsLog(config.run_dir / "metrics.jsonl")
        self.watch = Stopwatch()
        self.failures = {
            "rollout": Failures(
                "rollout",
                "responses could not be sampled",
                limit=config.trainer.max_bad_steps,
                key="trainer.max_bad_steps",
                remedy="look into the weights and the last rollouts",
            ),
            "reward": Failures(
                "reward",
                "responses could not be judged",
                limit=config.reward.max_failed_steps,
                key="reward.max_failed_steps",
                remedy="mend the verifier, or raise reward.timeout_s if it needs longer",
            ),
        }
        self.learner = Learner(config, self.model, self.watch, console.note)
        self.demonstrations = setup.demonstrations(config, self.tokenizer)
        self.step = 0
        self.first_accuracy: float | None = None
        self.last_accuracy: float | None = None

    def run(self) -> RunSummary:
        """Train to the last step, then evaluate and export."""
        begin = time.perf_counter()
        steps = self.config.trainer.steps
        self.console.start(steps)
        # The directory is made not before everything has loaded: an early mistake leaves nothing behind.
        with RewardPool(self.config.reward, self.config.data.tasks) as self.rewards, _held(self.config.run_dir):
            self.judge.pool = self.rewards
            if self._saved is None:
                self._begin()
            else:
                self._restore(self._saved)
            self.watch.restart()
            while self.step < steps:
                self._step()
            self.console.phase("exporting")
            export = self._export()
        return RunSummary(
            steps=self.step,
            accuracy_before=self.first_accuracy,
            accuracy_after=self.last_accuracy,
            problems=len(self.problems),
            seconds=time.perf_counter() - begin,
            export=export,
            failures=[line for failures in self.failures.values() if (line := failures.summary())],
        )

    def _begin(self) -> None:
        (self.config.run_dir / "config.toml").write_text(resolved_toml(self.config), encoding="utf-8")
        self.watch.restart()
        row = self._evaluate() | self.watch.read()
        self._save(row)  # from here on there is something to resume
        self.log.append(0, row)

    # -- one step ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        step = self.step + 1
        sums = Sums()
        prompts = self.source.next(self.config.trainer.prompts_per_step)
        self.console.phase("sampling")
        self.engine.forget_prefixes()  # so that what is sampled follows from this step alone
        with self.watch.part("gen"):
            trees = self._generate(prompts, self._seeds(step, len(prompts)))
        self.console.phase("waiting for rewards")
        with self.watch.part("reward"):
            texts = self._score(trees, prompts, sums)
        self.source.observe(trees)
        _describe(trees, self.config.rollout.max_new_tokens, sums)
        self.console.phase("updating")
        given = self.demonstrations.next() if self.demonstrations is not None else []
        if self.learner.update(trees, given, step, sums):
            self._renew_policy()
        write_rollouts(self.config.run_dir / "rollouts" / f"step_{step:06d}.parquet", step, trees, texts)
        self.step = step
        metrics = sums.means()
        if self._due(self.config.evaluation.every):
            metrics |= self._evaluate()
        times = self.watch.read()
        self.watch.restart()
        metrics["perf/throughput"] = sum(t.logical_tokens for t in trees) / times["timing_s/step"]
        metrics["perf/unique_tokens_per_s"] = sum(t.num_tokens for t in trees) / times["timing_s/step"]
        row = metrics | times
        if step % self.config.checkpoint.every == 0 or step == self.config.trainer.steps:
            self.console.phase("saving a checkpoint")
            with self.watch.part("checkpoint"):  # its time is the next step's: this row is part of what is saved
                self._save(row)
        self.log.append(step, row)
        self.console.step(step, row)

    def _generate(self, prompts: Sequence[Prompt], seeds: list[int]) -> list[TokenTree]:
        try:
            return self.engine.generate(
                [p.token_ids for p in prompts],
                self.params,
                self.program,
                seeds=seeds,
                contexts=[p.entry for p in prompts],
            )
        except ValueError as error:
            raise UserError(f"[rollout] cannot be done: {error}") from error
        except (UserError, RunError, RuntimeError, MemoryError, OSError):
            raise
        except Exception as error:
            program = f"rollout.program = '{self.config.rollout.program}'"
            raise RunError(f"{program} failed: {failure(error, type(self.program))}.") from error

    def _renew_policy(self) -> None:
        """Let the engine sample with the trainer's weights."""
        self.engine.update_weights(dict(self.model.named_parameters()), version=self.learner.trainer.updates)

    def _due(self, every: int) -> bool:
        if not self.problems:
            return False
        return self.step == self.config.trainer.steps or (every > 0 and self.step % every == 0)

    def _seeds(self, step: int, count: int) -> list[int]:
        sequence = np.random.SeedSequence([self.config.seed, step])
        return sequence.generate_state(count, np.uint64).astype(np.int64).tolist()

    def _score(self, trees: list[TokenTree], prompts: Sequence[Prompt], sums: Sums) -> list[list[str]]:
        """Put rewards and names on the trees; the leaves' texts. A response that could not be sampled is not judged."""
        texts = [_decode(self.tokenizer, tree) for tree in trees]
        failed_leaves = [unsampled(tree) for tree in trees]
        items = [
            RewardItem(text, prompt.entry)
            for prompt, leaves, failed in zip(prompts, texts, failed_leaves, strict=True)
            for leaf, text in enumerate(leaves)
            if leaf not in failed
        ]
        verdicts = self.rewards.score(items)
        results = iter(verdicts)
        for tree, prompt, failed in zip(trees, prompts, failed_leaves, strict=True):
            of_leaves = [None if leaf in failed else next(results) for leaf in range(tree.num_leaves)]
            for verdict in of_leaves:
                self._note(verdict, prompt, sums)
            decode = partial(self.tokenizer.decode, skip_special_tokens=True)
            put_rewards(tree, of_leaves, decode, failed=0.0 if self.config.reward.on_failure == "zero" else np.nan)
            tree.meta |= {"prompt_id": prompt.id, "task": prompt.task, "prompt_text": prompt.text}
        reasons = [reason for failed in failed_leaves for reason in failed.values()]
        self.failures["rollout"].record(reasons, sum(map(len, texts)), sums, self.console)
        reasons = [verdict.reason for verdict in verdicts if verdict.reason is not None]
        self.failures["reward"].record(reasons, len(items), sums, self.console)
        return texts

    def _note(self, verdict: RewardResult | None, prompt: Prompt, sums: Sums) -> None:
        if verdict is not None and verdict.value is not None:
            sums.add("reward/mean", verdict.value)
        elif verdict is not None and self.config.reward.on_failure == "raise":
            raise RunError(
                f"The verifier failed on a response to '{prompt.id}' ({verdict.reason}); mend it, or set "
                "reward.on_failure to 'drop' or 'zero'."
            )

    # -- evaluation -------------------------------------------------------------------------------------------------

    def _evaluate(self) -> dict[str, float]:
        if not self.problems:
            return {}
        self.console.phase("evaluating")
        with self.watch.part("eval"):
            trees = self.engine.generate([p.token_ids for p in self.problems], setup.greedy_params(self.config))
            items = [
                RewardItem(_decode(self.tokenizer, tree)[0], p.entry)
                for tree, p in zip(trees, self.problems, strict=True)
                if not unsampled(tree)
            ]
            results = self.rewards.score(items)
        solved = [r.value is not None and r.value >= SOLVED for r in results]
        accuracy = sum(solved) / len(self.problems)
        failed = [reason for tree in trees for reason in unsampled(tree).values()]
        failed += [r.reason for r in results if r.reason is not None]
        if failed:
            self.console.note(f"{len(failed)} of {len(trees)} held-out problems could not be answered: {failed[0]}.")
        self.last_accuracy = accuracy
        if self.first_accuracy is None:
            self.first_accuracy = accuracy
        self.console.evaluation(self.step, accuracy, len(self.problems))
        return {
            "eval/accuracy": accuracy,
            "eval/response_length": float(np.mean([tree.response_length.sum() for tree in trees])),
            "eval/failed": float(len(failed)),
        }

    # -- directory, checkpoints -------------------------------------------------------------------------------------

    def _check_directory(self, resume: bool) -> checkpoint.Checkpoint | None:
        """What is to be resumed; without ``resume``, refuse a directory that holds another run."""
        directory = self.config.run_dir
        if resume:
            return checkpoint.load_latest(directory / "checkpoints", self.config)
        early.check_writable(directory)
        if early.holds_a_run(directory):
            raise UserError(
                f"'{directory}' already holds a run; continue it with --resume, or choose another --name or "
                "--output_dir."
            )
        return None

    def _save(self, row: dict[str, float]) -> None:
        tensors, learner = self.learner.state_dict()
        state: dict[str, Any] = {
            "learner": learner,
            "demonstrations": None if self.demonstrations is None else self.demonstrations.cursor,
            "prompts": self.source.state_dict(),
            "metrics": row,
            "first_accuracy": self.first_accuracy,
            "last_accuracy": self.last_accuracy,
            "failures": {name: failures.state_dict() for name, failures in self.failures.items()},
        }
        checkpoint.save(
            self.config.run_dir / "checkpoints",
            self.step,
            tensors=tensors,
            state=state,
            config=self.config,
            keep=self.config.checkpoint.keep,
        )

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        state = saved.state
        self.learner.load_state_dict(saved.tensors, state["learner"])
        if self.demonstrations is not None:
            self.demonstrations.cursor = state["demonstrations"]
        self.source.load_state_dict(state["prompts"])
        self.step = saved.step
        self._renew_policy()
        for name, failures in self.failures.items():
            failures.load_state_dict(state["failures"][name])
        self.first_accuracy, self.last_accuracy = state["first_accuracy"], state["last_accuracy"]
        stamp = time.strftime("%Y%m%d-%H%M%S")
        there = self.log.rewind(saved.step, self.config.run_dir / f"metrics.before-resume-{stamp}.jsonl")
        if saved.step not in there:
            self.log.append(saved.step, state["metrics"])  # killed between the checkpoint and its row
        if lost := set(range(saved.step)) - there:
            self.console.note(f"'{self.log.path}' lacks the rows of {len(lost)} steps before step {saved.step}.")
        checkpoint.restore_generators(*saved.generators)
        self.console.note(f"Resuming after step {saved.step}.")

    def _export(self) -> Path:
        """A Hugging Face directory that plain transformers loads."""
        target = self.config.run_dir / "export"
        temporary = target.with_name("export.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        self.model.save_pretrained(temporary)
        self.tokenizer.save_pretrained(temporary)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        return target


@contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Make the run's directory and hold it against other processes; the lock goes with the process, however it ends.

    Raises:
        UserError: it cannot be made, or another process holds it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"The run directory '{directory}' cannot be made: {error.strerror}; choose another --output_dir."
        ) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"Another process is writing the run '{directory}'; wait for it, or choose another --name."
            ) from None
        yield


def _check_old_logprobs(config: TrainConfig) -> None:
    """With several updates the sampler's log-probs are the old ones, so they must be those of the whole softmax.

    Raises:
        UserError: sampling leaves tokens out.
    """
    rollout = config.rollout
    if config.trainer.updates_per_step > 1 and (rollout.top_p < 1 or rollout.top_k or rollout.min_p):
        raise UserError(
            f"`trainer.updates_per_step` = {config.trainer.updates_per_step} compares with the sampler's log-probs, "
            "which top_p, top_k and min_p change; leave these out of [rollout] or set updates_per_step to 1."
        )


def _decode(tokenizer: PreTrainedTokenizerBase, tree: TokenTree) -> list[str]:
    """The text of each leaf's response."""
    responses = [tree.token_id[tree.response_rows(leaf)] for leaf in range(tree.num_leaves)]
    return list(tokenizer.batch_decode(responses, skip_special_tokens=True))


def _describe(trees: Sequence[TokenTree], max_new_tokens: int, sums: Sums) -> None:
    """Lengths, reward spread and what the tree saved."""
    for tree in trees:
        length = tree.response_length
        sums.add_values("response_length/mean", length)
        sums.maximum("response_length/max", float(length.max()))
        sums.add_values("response_length/clip_ratio", length >= max_new_tokens)
        sums.add("prompt_length/mean", float(tree.prompt_length))
        rewards = tree.rewards["reward"]
        if not np.isnan(rewards).any():
            sums.add("reward/group_std", float(rewards.std()))
    logical, unique = sum(t.logical_tokens for t in trees), sum(t.num_tokens for t in trees)
    sums.add("tree/token_ratio", float(logical), float(unique))
