"""The native rollout engine: prompts in, trees of responses out.

One loop: the scheduler composes a step, the runner executes it, and what was sampled is recorded; where a segment ended
the prompt's program is asked at once, so its answer (fork, rewind, finish) is part of the next step. A fork samples
several tokens from one row of logits and opens a child for each; a prompt is simply a branch that forks first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..integrations import transformers as integration
from ..programs import Finish, Fork, Rewind, RolloutProgram, SegmentReport, make_program
from ..tree import LeafStatus, TokenTree
from .branch import Branch, Group, Node
from .kv_cache import KvCache
from .rows import RowTable
from .runner import Runner
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .seeds import child_seed

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the native engine.

    Raises:
        ValueError: one of them is too small.
    """

    page_size: int = 16
    kv_tokens: int = 65536
    """Capacity of the paged KV cache, in tokens."""
    max_batch_rows: int = 512
    """Branches decoded together."""
    max_prefill_tokens: int = 2048
    """Prompt tokens computed beside them in one step."""

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batch_rows", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineConfig.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.kv_tokens < self.page_size:
            raise ValueError(f"EngineConfig.kv_tokens is {self.kv_tokens}; it must hold a page of {self.page_size}.")


class NativeEngine:
    """Samples with the very module that is trained.

    Args:
        model: a causal language model; its attention implementation is set to "rolltree".
        tokenizer: needed for prompts given as text; its end-of-sequence token ends responses too.

    Attributes:
        policy_version: written to every sampled token; the trainer raises it with each update.
        stats: counters of the last `generate` call. Tokens: ``logical_tokens`` (root-to-leaf paths), ``unique_tokens``
            (of the trees), ``sampled_tokens``, ``prefill_tokens`` (computed beside decoding); ``steps``, ``forks``,
            ``rewinds``, ``preemptions``; ``peak_pages`` and ``peak_kv_tokens`` of the KV cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or EngineConfig()
        self.policy_version = 0
        self.stats: dict[str, int] = {}
        if model.config._attn_implementation != integration.NAME:
            model.set_attn_implementation(integration.NAME)
        device = model.get_output_embeddings().weight.device
        self.cache = KvCache(self.config.kv_tokens, self.config.page_size, device)

    def generate(
        self,
        prompts: Sequence[Sequence[int]] | Sequence[str],
        params: SamplingParams,
        program: str | RolloutProgram = "flat",
        *,
        seeds: Sequence[int] | None = None,
    ) -> list[TokenTree]:
        """Sample responses: one tree a prompt, in their order, leaves in depth-first order.

        Args:
            prompts: token ids, or texts for the tokenizer.
            program: who forks and when; a name of `rolltree.engine.programs` or an object, copied for each prompt.
            seeds: one a prompt, instead of ``params.seed``. What a prompt's branches sample follows from its seed, its
                tokens and the parameters, not from the batch.

        Raises:
            ValueError: a prompt is empty or cannot fit, or the arguments do not go together.
            KvExhaustedError: not even one branch fits into the KV cache.
        """
        tokens = [self._token_ids(i, prompt, params) for i, prompt in enumerate(prompts)]
        if seeds is None:
            seeds = [params.seed] * len(tokens)
        if len(seeds) != len(tokens):
            raise ValueError(f"generate got {len(seeds)} seeds for {len(tokens)} prompts; give one a prompt.")
        if isinstance(program, str):
            program = make_program(program)
        groups = [
            Group(i, prompt, _signed(seed), params.n, copy.copy(program))
            for i, (prompt, seed) in enumerate(zip(tokens, seeds, strict=True))
        ]
        self.cache.tree.reset_peaks()
        try:
            with _evaluating(self.model), torch.inference_mode():
                return _Generation(self, params, groups).run()
        except BaseException:
            self.cache.reset()
            raise

    def _token_ids(self, index: int, prompt: Sequence[int] | str, params: SamplingParams) -> Array:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "generate got prompts as text but the engine has no tokenizer; pass one, or token ids."
                )
            prompt = self.tokenizer(prompt)["input_ids"]
        ids = np.asarray(prompt, np.int64)
        if ids.size == 0:
            raise ValueError(f"Prompt {index} is empty; a prompt needs at least one token.")
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ValueError(f"Prompt {index} has token ids outside the model's vocabulary of {vocabulary}.")
        size = self.config.page_size
        if -(-len(ids) // size) - (-params.max_new_tokens // size) > self.cache.tree.num_pages:
            raise ValueError(
                f"Prompt {index} of {len(ids)} tokens and max_new_tokens={params.max_new_tokens} cannot fit into the KV "
                f"cache; raise kv_tokens (now {self.config.kv_tokens}) or shorten them."
            )
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and len(ids) + params.max_new_tokens > longest:
            raise ValueError(
                f"Prompt {index} of {len(ids)} tokens and max_new_tokens={params.max_new_tokens} exceed the model's "
                f"{longest} positions; shorten them."
            )
        return ids.astype(np.int32)

    def _eos_ids(self) -> set[int]:
        found: set[int] = set()
        for source in (self.model.generation_config, self.model.config.get_text_config(), self.tokenizer):
            eos = getattr(source, "eos_token_id", None)
            found.update([eos] if isinstance(eos, int) else eos or [])
        return found


@dataclass
class _Generation:
    """One call of `NativeEngine.generate`."""

    engine: NativeEngine
    params: SamplingParams
    groups: list[Group]
    rows: RowTable = field(default_factory=RowTable)
    forks: int = 0
    rewinds: int = 0
    steps: int = 0
    sampled_tokens: int = 0

    def run(self) -> list[TokenTree]:
        engine, params = self.engine, self.params
        config, cache = engine.config, engine.cache
        self.tree = cache.tree
        self.scheduler = Scheduler(
            cache,
            self.rows,
            max_batch_rows=config.max_batch_rows,
            max_prefill_tokens=config.max_prefill_tokens,
            max_new_tokens=params.max_new_tokens,
        )
        self.scheduler.queue.extend(self.groups)
        self.trees: list[TokenTree | None] = [None] * len(self.groups)
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else engine._eos_ids())
        runner = Runner(engine.model, cache, params)
        self.is_stop = np.zeros(engine.model.get_output_embeddings().weight.shape[0], np.bool_)
        self.is_stop[[i for i in stop_ids if 0 <= i < len(self.is_stop)]] = True
        while self.scheduler.busy:
            step = self.scheduler.schedule(self._start)
            slots = step.sample_slots
            forks = self.rows.forks[slots]
            samples = np.maximum(forks, 1)
            sampled = runner.run(
                step, samples, self._seeds(slots, forks, samples), np.repeat(self.rows.length[slots], samples)
            )
            self.steps += 1
            self.sampled_tokens += len(sampled.token)
            targets = self._fork(slots, forks) if forks.any() else slots
            self.rows.push(targets, *sampled)
            self.rows.running[targets] = True
            self._end_segments(targets, sampled.token)
        trees = [tree for tree in self.trees if tree is not None]
        self._count(trees)
        return trees

    # -- events of the loop -----------------------------------------------------------------------------------------

    def _start(self, group: Group) -> Branch:
        root = Node(None, self.tree.root(), 0, group.prompt, sealed=True)
        forks = group.program.start(group.state())
        if forks < 1:
            raise RuntimeError(
                f"{type(group.program).__name__}.start answered {forks}; a prompt needs at least one branch."
            )
        return self._add(Branch(group, (), root, group.seed, group.next_order(), (0,)), 0, forks)

    def _add(self, branch: Branch, length: int, forks: int) -> Branch:
        position = len(branch.group.prompt) + length - 1
        branch.slot = self.rows.add(
            branch, position=position, length=length, segment_end=self._segment_end(branch.group, length), forks=forks
        )
        branch.group.sampling[branch.id] = branch
        return branch

    def _segment_end(self, group: Group, length: int) -> int:
        tokens = group.program.segment_tokens
        return self.params.max_new_tokens if tokens is None else min(length + tokens, self.params.max_new_tokens)

    def _seeds(self, slots: Array, forks: Array, samples: Array) -> Array:  # [E] int64
        seeds = self.rows.seed[slots]
        if not forks.any():
            return seeds
        child = np.arange(samples.sum()) - np.repeat(np.cumsum(samples) - samples, samples)
        seeds = np.repeat(seeds, samples)
        return np.where(np.repeat(forks > 0, samples), child_seed(seeds, child), seeds)

    def _fork(self, slots: Array, forks: Array) -> Array:  # [E] int64
        """Replace forking branches by their children; returns the slots the samples belong to."""
        targets: list[int] = []
        for slot, n in zip(slots.tolist(), forks.tolist(), strict=True):
            if n == 0:
                targets.append(slot)
                continue
            parent = self._branch(slot)
            self._seal(parent)
            length = int(self.rows.length[slot])
            start = int(self.rows.position[slot]) + 1
            del parent.group.sampling[parent.id]
            seeds = child_seed(parent.seed, np.arange(n))
            for i, kv in enumerate(self.tree.fork(parent.node.kv, n)):
                node = Node(parent.node, kv, start)
                order = parent.group.next_order()
                child = Branch(parent.group, (*parent.id, i), node, int(seeds[i]), order, parent.boundaries)
                targets.append(self._add(child, length, 0).slot)
            self.rows.remove(slot)
            self.forks += 1
        return np.array(targets, np.int64)

    def _end_segments(self, slots: Array, token: Array) -> None:
        stopped = self.is_stop[token]
        ended = np.flatnonzero(stopped | (self.rows.length[slots] >= self.rows.segment_end[slots]))
        reports: dict[int, list[SegmentReport]] = {}
        for i in ended.tolist():
            branch = self._branch(int(slots[i]))
            status = None
            if stopped[i]:
                status = LeafStatus.STOP
            elif self.rows.length[branch.slot] >= self.params.max_new_tokens:
                status = LeafStatus.LENGTH
            reports.setdefault(branch.group.index, []).append(self._end_segment(branch, status))
        for index, finished in reports.items():
            self._ask(self.groups[index], sorted(finished, key=lambda report: report.branch))

    def _end_segment(self, branch: Branch, status: LeafStatus | None) -> SegmentReport:
        rows, slot = self.rows, branch.slot
        tokens, fill, length = int(rows.segment_tokens[slot]), int(rows.fill[slot]), int(rows.length[slot])
        report = SegmentReport(
            branch=branch.id,
            status=status,
            depth=len(branch.boundaries),
            boundaries=branch.boundaries,
            length=length,
            token_ids=rows.tokens[slot, fill - tokens : fill].copy(),
            mean_logprob=float(rows.logprob_sum[slot]) / tokens,
            entropy=float(rows.entropy_sum[slot]) / tokens,
        )
        rows.running[slot] = False
        del branch.group.sampling[branch.id]
        if status is None:
            branch.boundaries = (*branch.boundaries, length)
            branch.group.resting[branch.id] = branch
        else:
            self._finish(branch, status)
        return report

    def _finish(self, branch: Branch, status: LeafStatus) -> None:
        self._seal(branch)
        branch.status, branch.length = status, int(self.rows.length[branch.slot])
        branch.group.leaves[branch.id] = branch
        self.rows.remove(branch.slot)
        branch.slot = -1
        if not branch.group.program.rewinds:
            self.tree.release(branch.node.kv)

    def _seal(self, branch: Branch) -> None:
        if not branch.node.sealed:
            branch.node.tokens, branch.node.logprobs = self.rows.sampled(branch.slot)
            branch.node.sealed = True

    # -- the program's answers --------------------------------------------------------------------------------------

    def _ask(self, group: Group, finished: list[SegmentReport]) -> None:
        for action in group.program.decide(group.state(), finished):
            match action:
                case Fork(key, n) if n >= 1:
                    self._go_on(self._resting(group, key), n)
                case Finish(key, status):
                    self._finish(self._resting(group, key), status)
                case Rewind(key, length, n) if n >= 1 and group.program.rewinds:
                    self._rewind(group, key, length, n)
                case _:
                    raise RuntimeError(f"{type(group.program).__name__} answered {action}, which cannot be done.")
        if group.done:
            self._complete(group)
        elif not group.sampling:
            raise RuntimeError(
                f"{type(group.program).__name__} left {len(group.resting)} branches of prompt {group.index} resting with "
                "nothing sampling; answer each full segment with Fork or Finish."
            )

    def _go_on(self, branch: Branch, n: int) -> None:
        slot = branch.slot
        branch.group.sampling[branch.id] = branch
        self.rows.start_segment(slot, self._segment_end(branch.group, int(self.rows.length[slot])))
        self.rows.forks[slot] = 0 if n == 1 else n
        self.scheduler.resume(branch)

    def _rewind(self, group: Group, key: tuple[int, ...], length: int, n: int) -> None:
        leaf = group.leaves.get(key)
        if leaf is None or not 0 <= length < leaf.length:
            raise RuntimeError(
                f"{type(group.program).__name__} rewinds branch {key} to {length}, where it has no leaf."
            )
        position = len(group.prompt) + length
        node = next(node for node in leaf.node.path() if node.start < position)
        kv = self.tree.rewind(leaf.node.kv, position)
        keep = position - node.start
        if keep < len(node.tokens):
            node = node.split(keep, kv)
        index = -1 - leaf.rewinds
        leaf.rewinds += 1
        boundaries = tuple(b for b in leaf.boundaries if b <= length)
        seed = int(child_seed(leaf.seed, index))
        branch = Branch(group, (*leaf.id, index), node, seed, group.next_order(), boundaries)
        self.scheduler.resume(self._add(branch, length, n))
        self.rewinds += 1

    def _complete(self, group: Group) -> None:
        self.trees[group.index] = group.token_tree(self.engine.policy_version, self.params.temperature)
        if group.program.rewinds:
            for leaf in group.leaves.values():
                self.tree.release(leaf.node.kv)
        group.leaves.clear()
        self.scheduler.groups.remove(group)

    def _resting(self, group: Group, key: tuple[int, ...]) -> Branch:
        branch = group.resting.pop(key, None)
        if branch is None:
            raise RuntimeError(f"{type(group.program).__name__} answered for branch {key}, which is not resting.")
        return branch

    def _branch(self, slot: int) -> Branch:
        branch = self.rows.branch[slot]
        assert branch is not None
        return branch

    def _count(self, trees: list[TokenTree]) -> None:
        self.engine.stats = {
            "logical_tokens": sum(tree.logical_tokens for tree in trees),
            "unique_tokens": sum(tree.num_tokens for tree in trees),
            "sampled_tokens": self.sampled_tokens,
            "prefill_tokens": self.scheduler.prefill_tokens,
            "steps": self.steps,
            "forks": self.forks,
            "rewinds": self.rewinds,
            "preemptions": self.scheduler.preemptions,
            "peak_pages": self.tree.peak_pages,
            "peak_kv_tokens": self.tree.peak_tokens,
        }


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _signed(seed: int) -> int:
    """The seed modulo 2**64, as an int64."""
    return (int(seed) + 2**63) % 2**64 - 2**63
