"""Groups through their states: admits prompts, samples, judges each group as it finishes, and hands out batches.

At staleness 0 all of it happens in the caller's thread while it waits for a batch, and nothing is open between steps.
Above, with `loop.overlap`, a thread samples with a copy of the weights while the caller trains; without it sampling
rests meanwhile, and what is unfinished goes on afterwards. Verdicts are waited for in threads of their own.

The state of a group changes under one lock, in the thread that samples; the caller takes batches and ends steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..data.segment import LeafStatus
from ..data.tree import TokenTree
from ..errors import RunError, UserError
from ..methods.calling import failure
from ..programs import RolloutProgram
from ..rewards import RewardItem, RewardPool, RewardResult
from ..rollout import RolloutEngine, SamplingParams
from ..rollout.branch import Request
from ..settings import TrainConfig
from .buffer import Buffer, Group, State
from .failures import unsampled
from .metrics import Stopwatch
from .progress import Progress
from .sources import Prompt, PromptSource

JUDGED_AT_ONCE = 16
"""Groups whose verdicts are waited for at the same time."""
LOOK_S = 0.05
"""Between looks at the sampling while only verdicts are outstanding."""


class Controller:
    """What a run asks for its batches.

    Args:
        note: told, in a sentence, what the user should know.
    """

    def __init__(
        self,
        config: TrainConfig,
        buffer: Buffer,
        engine: RolloutEngine,
        source: PromptSource,
        tokenizer: PreTrainedTokenizerBase,
        program: RolloutProgram,
        params: SamplingParams,
        watch: Stopwatch,
        console: Progress,
    ) -> None:
        self.config, self.buffer, self.engine, self.source = config, buffer, engine, source
        self.tokenizer, self.program, self.params = tokenizer, program, params
        self.watch, self.console = watch, console
        self._sampling: dict[Group, Request] = {}
        self._judging: dict[Future[list[RewardResult]], Group] = {}
        self._seeds: tuple[int, list[int]] = (-1, [])  # a block of tickets, and theirs

    @contextmanager
    def running(self, rewards: RewardPool) -> Iterator[None]:
        """While it may be asked for batches; ``rewards`` judges."""
        self._rewards = rewards
        with ThreadPoolExecutor(JUDGED_AT_ONCE, "rolltree-judging") as self._judges:
            try:
                yield
            finally:
                self._judges.shutdown(wait=False, cancel_futures=True)

    def next_batch(self) -> list[Group]:
        """The groups of the next update, judged, as soon as they are there."""
        if self.buffer.budget.staleness == 0:
            self.engine.forget_prefixes()  # so that what is sampled follows from this step alone
        while (batch := self.buffer.batch()) is None:
            self._advance()
        return batch

    # -- one round --------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Do what can be done: settle verdicts, admit, and sample a step, or wait a little for a verdict."""
        self._settle()
        self._admit()
        if self._sampling:
            self.console.phase("sampling")
            with self.watch.part("gen"):
                self._sample()
        elif self._judging:
            self.console.phase("waiting for rewards")
            with self.watch.part("reward"):
                wait(self._judging, LOOK_S, FIRST_COMPLETED)

    def _admit(self) -> None:
        """Groups for the room there is, and requests for those that have none."""
        if room := self.buffer.room:
            self.buffer.admit(self.source.next(room))
        if queued := self.buffer.among(State.QUEUED):
            with self.watch.part("gen"), self._errors_told():
                requests = self.engine.submit(
                    [group.prompt.token_ids for group in queued],
                    self.params,
                    self.program,
                    seeds=[self._seed(group) for group in queued],
                    contexts=[group.prompt.entry for group in queued],
                )
            for group, request in zip(queued, requests, strict=True):
                self.buffer.to(group, State.SAMPLING)
                self._sampling[group] = request

    def _sample(self) -> None:
        """One step of the engine; finished groups go to the judges."""
        with self._errors_told():
            self.engine.step()
            for group in [group for group, request in self._sampling.items() if request.done]:
                request = self._sampling.pop(group)
                if request.error is not None:
                    raise request.error
                assert request.tree is not None
                self._judge(group, request.tree)

    def _judge(self, group: Group, tree: TokenTree) -> None:
        """Ask for verdicts on a group's responses; one that could not be sampled is not judged."""
        group.tree, group.texts, group.unsampled = tree, decode(self.tokenizer, tree), unsampled(tree)
        self.buffer.to(group, State.JUDGING)
        items = [
            RewardItem(text, group.prompt.entry) for leaf, text in enumerate(group.texts) if leaf not in group.unsampled
        ]
        self._judging[self._judges.submit(self._rewards.score, items)] = group

    def _settle(self) -> None:
        """Groups whose verdicts have come are ready."""
        for future in [future for future in self._judging if future.done()]:
            group = self._judging.pop(future)
            group.verdicts = future.result()
            self._put_rewards(group)
            self.buffer.to(group, State.READY)

    def _put_rewards(self, group: Group) -> None:
        """Rewards and names on the tree; NaN where there is no verdict."""
        tree, prompt = group.tree, group.prompt
        assert tree is not None
        verdicts = iter(group.verdicts)
        values = [
            float("nan") if leaf in group.unsampled else self._value(next(verdicts), prompt)
            for leaf in range(tree.num_leaves)
        ]
        tree.rewards["reward"] = np.array(values, np.float32)
        tree.status[np.isnan(tree.rewards["reward"])] = LeafStatus.FAILED
        tree.meta |= {"prompt_id": prompt.id, "task": prompt.task, "prompt_text": prompt.text}

    def _value(self, verdict: RewardResult, prompt: Prompt) -> float:
        if verdict.value is not None:
            return verdict.value
        if self.config.reward.on_failure == "raise":
            raise RunError(
                f"The verifier failed on a response to '{prompt.id}' ({verdict.reason}); mend it, or set "
                "reward.on_failure to 'drop' or 'zero'."
            )
        return 0.0 if self.config.reward.on_failure == "zero" else float("nan")

    def _seed(self, group: Group) -> int:
        """What a group samples follows from the run's seed and its ticket."""
        block, index = divmod(group.ticket, self.config.trainer.prompts_per_step)
        if group.attempt:
            sequence = np.random.SeedSequence([self.config.seed, block + 1, index, group.attempt])
            return int(sequence.generate_state(1, np.uint64).astype(np.int64)[0])
        if self._seeds[0] != block:
            sequence = np.random.SeedSequence([self.config.seed, block + 1])
            count = self.config.trainer.prompts_per_step
            self._seeds = block, sequence.generate_state(count, np.uint64).astype(np.int64).tolist()
        return self._seeds[1][index]

    @contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise UserError(f"[rollout] cannot be done: {error}") from error
        except (UserError, RunError, RuntimeError, MemoryError, OSError):
            raise
        except Exception as error:
            program = f"rollout.program = '{self.config.rollout.program}'"
            raise RunError(f"{program} failed: {failure(error, type(self.program))}.") from error


def decode(tokenizer: PreTrainedTokenizerBase, tree: TokenTree) -> list[str]:
    """The text of each leaf's response."""
    responses = [tree.token_id[tree.response_rows(leaf)] for leaf in range(tree.num_leaves)]
    return list(tokenizer.batch_decode(responses, skip_special_tokens=True))
