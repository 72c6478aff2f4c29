"""One `generate` call: the loop, and the events that forks, ends of segments and a program's answers are.

The scheduler composes a step, the runner executes it, and what was sampled is recorded. Where a segment ended the
prompt's program is asked at once, so its answer (fork, rewind, finish) is part of the next step: no branch waits for
the rest of the batch. A fork samples several tokens from one row of logits and opens a child for each; a prompt is
simply a branch that forks first, and a rewind makes another one in the middle of the tree.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..programs import BranchId, Finish, Fork, Rewind, SegmentReport
from ..tree import LeafStatus, TokenTree
from .branch import Branch, Group, Node
from .rows import RowTable
from .runner import Runner
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .seeds import child_seed
from .stop_strings import StopStrings

Array = npt.NDArray[Any]


class Generation:
    """The groups of one call, from prompts to finished trees."""

    def __init__(
        self,
        groups: list[Group],
        params: SamplingParams,
        scheduler: Scheduler,
        runner: Runner,
        *,
        is_stop: Array,  # [V] bool, tokens that end a response
        stop_strings: StopStrings | None,
        policy_version: int,
    ) -> None:
        self.groups = groups
        self.params = params
        self.scheduler = scheduler
        self.runner = runner
        self.rows: RowTable = scheduler.rows
        self.tree = scheduler.cache.tree
        self.is_stop = is_stop
        self.stop_strings = stop_strings
        self.policy_version = policy_version
        self.counts: Counter[str] = Counter()
        self._trees: dict[int, TokenTree] = {}

    def run(self) -> list[TokenTree]:
        """The trees of all groups, in order."""
        self.scheduler.queue.extend(self.groups)
        while self.scheduler.busy:
            step = self.scheduler.schedule(self._start)
            slots = step.sample_slots
            forks = self.rows.forks[slots]
            samples = np.maximum(forks, 1)
            seeds = self._seeds(slots, forks, samples)
            sampled = self.runner.run(step, samples, seeds, np.repeat(self.rows.length[slots], samples))
            targets = self._fork(slots, forks) if forks.any() else slots
            self.rows.push(targets, *sampled)
            self.rows.running[targets] = True
            self._end_segments(targets, sampled.token)
            self.counts["steps"] += 1
            self.counts["sampled_tokens"] += len(targets)
        return [self._trees[group.index] for group in self.groups]

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
            self.counts["forks"] += 1
        return np.array(targets, np.int64)

    def _end_segments(self, slots: Array, token: Array) -> None:
        failed = token < 0  # the logits were not finite; only this branch is lost
        if failed.any():
            self.rows.take_back(slots[failed])
        stopped = self.is_stop[token] & ~failed
        if self.stop_strings is not None:
            stopped |= self.stop_strings.found(self.rows, slots) & ~failed
        ended = np.flatnonzero(stopped | failed | (self.rows.length[slots] >= self.rows.segment_end[slots]))
        reports: dict[int, list[SegmentReport]] = {}
        for i in ended.tolist():
            branch = self._branch(int(slots[i]))
            status = None
            if failed[i]:
                status = LeafStatus.FAILED
            elif stopped[i]:
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
            mean_logprob=float(rows.logprob_sum[slot]) / max(tokens, 1),
            entropy=float(rows.entropy_sum[slot]) / max(tokens, 1),
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
                f"{type(group.program).__name__} left {len(group.resting)} branches of prompt {group.index} resting "
                "with nothing sampling; answer each full segment with Fork or Finish."
            )

    def _go_on(self, branch: Branch, n: int) -> None:
        slot = branch.slot
        branch.group.sampling[branch.id] = branch
        self.rows.start_segment(slot, self._segment_end(branch.group, int(self.rows.length[slot])))
        self.rows.forks[slot] = 0 if n == 1 else n
        self.scheduler.resume(branch)

    def _rewind(self, group: Group, key: BranchId, length: int, n: int) -> None:
        leaf = group.leaves.get(key)
        if leaf is None or not 0 <= length < max(leaf.length, 1):
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
        self.counts["rewinds"] += 1

    def _complete(self, group: Group) -> None:
        self._trees[group.index] = group.token_tree(self.policy_version, self.params.temperature)
        if group.program.rewinds:
            for leaf in group.leaves.values():
                self.tree.release(leaf.node.kv)
        group.leaves.clear()
        self.scheduler.groups.remove(group)

    def _resting(self, group: Group, key: BranchId) -> Branch:
        branch = group.resting.pop(key, None)
        if branch is None:
            raise RuntimeError(f"{type(group.program).__name__} answered for branch {key}, which is not resting.")
        return branch

    def _branch(self, slot: int) -> Branch:
        branch = self.rows.branch[slot]
        assert branch is not None
        return branch
