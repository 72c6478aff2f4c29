"""The native loop: steps of many requests at once.

The scheduler composes a step, the runner executes it, and the loop records the samples. When a segment ends, the
prompt's program is called at once, so its actions (fork, rewind, append, finish) are part of the next step: no branch
waits for the rest of the batch. A fork samples several tokens from one row of logits and opens a child for each. A
prompt is a branch that forks first, and a rewind opens such a branch in the middle of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...batches.cost import CostModel
from ...data.segment import LeafStatus, Origin
from ..branch import Branch, Node, Request
from ..failing import NOT_FINITE
from ..records import child_seed, join, unsampled
from ..steering import Steering
from .assembly import Step
from .cache.kv_cache import KvCache
from .drafts import Drafts, on_path, up_to_end
from .equal_rows import EqualRows
from .filling import TooLargeError
from .rows import RowTable, Samples
from .runner import Runner
from .scheduler import Scheduler
from .stops import END_RESPONSE, END_SEGMENT, GO_ON, Stops
from .windows import samples_of

Array = npt.NDArray[Any]
MOST_LOGITS_BYTES = 4 << 30  # of logits of one fork, whose children are sampled in one step
LOST = -1  # marks a sample whose request has failed


class NativeLoop(Steering):
    """Steers requests whose branches are rows of a table and nodes of the KV tree.

    Attributes:
        merges: branches that have sampled the same tokens so far are one row of a step, where that is possible
            (`equal_rows`); False to compare with engines that compute each.
    """

    def __init__(
        self,
        cache: KvCache,
        runner: Runner,
        stops: Stops,
        cost: CostModel,
        *,
        max_batch_rows: int,
        prefill: Callable[[int], int],
        drafts: Drafts | None = None,
        window: int = 1,
        positions: int | None = None,
    ) -> None:
        super().__init__(runner.vocabulary)
        self.cache = cache
        self.runner = runner
        self.stops = stops
        self.cost = cost
        self.rows = RowTable()
        self.equal, self.merges = EqualRows(self.rows, cache), True
        self.scheduler = Scheduler(
            cache,
            self.rows,
            stops,
            self.requests,
            drafts,
            max_batch_rows=max_batch_rows,
            prefill=prefill,
            rotary=runner.rotary,
            whole_pictures=runner.both_ways is not None,
            window=window,
            positions=positions,
        )

    @property
    def queued(self) -> Iterable[Request]:
        return self.scheduler.queue

    def add(self, request: Request) -> None:
        if request.started:
            self._attach(request)
            return
        request.forks = self.first_branches(request)
        self._check_forks(request.forks)
        self.scheduler.queue.append(request)

    def _check_forks(self, n: int) -> None:
        most = MOST_LOGITS_BYTES // (4 * self.vocabulary)
        if n > most:
            raise ValueError(
                f"{n} branches of one fork need the logits of as many rows of {self.vocabulary} tokens at once; ask "
                f"for {most} at most."
            )

    def step(self) -> list[Request]:
        self._collect_calls()
        self._collect_others()
        step = None
        try:
            while (request := self.scheduler.admit()) is not None:
                self._start(request)
            step = self.scheduler.schedule(windows=self.others is None)
            if step is not None:
                self._compute(step)
        except TooLargeError as error:
            self._fail(error.request, error)
        except BaseException as error:
            self._give_up(step, error)
            if not isinstance(error, Exception):
                raise
        else:
            if step is None:
                self._await_calls()
        return self._hand_out()

    def _compute(self, step: Step) -> None:
        samples = self._sample_rows(step)
        several = bool(samples.offset.any())
        queries = np.bincount(samples.slot) if several else None
        drafted = 0 if step.steps > 1 else int(np.count_nonzero(samples.offset))
        if drafted:
            samples = samples.only(on_path(samples.sampled.token, step.input_ids[samples.row], samples.offset))
        effect, stop_texts = self._effects(samples)
        samples = samples._replace(effect=effect)
        if several or stop_texts is not None:
            samples = samples.only(up_to_end(effect != GO_ON, samples.offset) & (effect != LOST))
        if step.steps > 1:
            samples = self.scheduler.windows.cut(samples)
            self.scheduler.windows.name_tokens(samples)
        if queries is not None:
            self._rewind_rejected(samples.slot, queries)
        if self.merges and self._can_merge:
            self.equal.settle(samples)
        self.rows.push(samples.slot, samples.offset, samples.sampled, self.version)
        self.rows.running[samples.slot] = self.rows.kv_node[samples.slot] >= 0  # followers do not run
        self._count(step, samples, drafted)
        self._end_segments(samples, stop_texts or {})

    def _count(self, step: Step, samples: Samples, drafted: int) -> None:
        accepted = int(np.count_nonzero(samples.offset)) if drafted else 0
        branches = len(samples.slot) - accepted
        unfinished = sum(len(request.sampling) + len(request.resting) for request in self.requests)
        self.counts.update(
            steps=step.steps, sampled_tokens=len(samples.slot), drafted_tokens=drafted, accepted_tokens=accepted,
            row_steps=branches, idle_row_steps=step.steps * unfinished - branches,
            flop=round(self.cost.forward(step.work)), held_out_flop=round(self.cost.forward(step.held_out)),
        )  # fmt: skip

    def _rewind_rejected(self, slots: Array, queries: Array) -> None:
        """Drop the keys of rejected drafted tokens: ``slots`` has one entry for each sample, and ``queries`` counts the
        queries of each slot."""
        accepted = np.bincount(slots, minlength=len(queries))
        rejecting = np.flatnonzero((accepted > 0) & (accepted < queries))
        self.cache.truncate(self.rows.kv_node[rejecting], self.rows.position[rejecting] + accepted[rejecting])

    def _give_up(self, step: Step | None, error: BaseException) -> None:
        """Fail all requests of a failed step, and drop every key, because some may not have been computed."""
        self.counts["failed_steps"] += 1
        if not isinstance(error, Exception):
            error = RuntimeError(f"The step that computed this request was ended by {type(error).__name__}.")
        if step is None:
            failed = list(self.requests)
        else:
            branches = [*step.filled, *(self.rows.branch[slot] for slot in step.sample_slots.tolist())]
            failed = list({branch.request.number: branch.request for branch in branches if branch}.values())
        for request in failed:
            self._fail(request, error)
        self.preempt_all()
        self.cache.forget_dropped()

    def abort(self, request: Request) -> None:
        if request in self.scheduler.queue:
            self.scheduler.queue.remove(request)
            return
        for branch in request.unfinished:
            branch.saved = self.rows.save(branch.slot)
            if not branch.node.sealed:
                branch.node.records = branch.saved["records"]
        self._let_go(request)

    def preempt_all(self) -> None:
        for slot in np.flatnonzero(self.rows.running).tolist():
            self.scheduler.preempt(self._branch(slot))
        self.cache.evict_all()

    def _attach(self, request: Request) -> None:
        self.requests.append(request)
        for branch in request.unfinished:
            assert branch.saved is not None
            tokens = branch.node.column("token")
            find = self.cache.start if branch.node.sealed else self.cache.resume  # an open node continues
            branch.kv = find(self._key(request), tokens)
            table = self.stops.table(request, self.rows)
            branch.slot = self.rows.restore(branch, {**branch.saved, "stop_table": table})
            branch.saved = None
            if self.others is not None and branch.away is not None:
                self.others.ask(branch, tokens, self._length(branch))
            elif branch.id in request.sampling:
                self.scheduler.resume(branch)
        self._resume_calls(request)

    def _key(self, request: Request) -> int:
        """Return a number that identifies the weights of a request's keys; different weights share no keys."""
        return self.version << 16 | request.adapter

    # -- events of the loop -----------------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        with self._alone(request):
            self.scheduler.resume(self._first(request))

    def _first(self, request: Request) -> Branch:
        request.started = True
        root = Node(None, 0, unsampled(request.prompt), Origin.PROMPT, sealed=True)
        branch = Branch(request, (), root, request.seed, request.next_order(), (0,), request.params.temperature)
        branch.kv = self.cache.start(self._key(request), request.prompt)
        request.sampling[branch.id] = branch
        end = self.segment_end(request, 0, request.program.segment_tokens)
        return self._add(branch, 0, end, request.forks)

    def _add(self, branch: Branch, length: int, segment_end: int, forks: int) -> Branch:
        request, params, program = branch.request, branch.request.params, branch.request.program
        branch.slot = self.rows.add(
            branch,
            position=len(request.prompt) + length - 1,
            last_token=branch.node.records["token"][-1] if branch.node.sealed else 0,
            length=length,
            drawn=program.drawn,
            limit=params.max_new_tokens,
            segment_end=segment_end,
            forks=forks,
            temperature=branch.temperature,
            top_k=params.top_k or 0,
            top_p=params.top_p,
            min_p=params.min_p or 0.0,
            top=max(params.top_logprobs, program.top_logprobs),
            keeps=params.kept_tokens,
            stop_table=self.stops.table(request, self.rows),
            stops_at_text=bool(params.stop or program.segment_stop),
            constrained=params.constrained,
            independent=program.independent,
            adapter=request.adapter,
            moved=0 if request.media is None else request.media.moved,
            held_out=request.held_out,
        )
        return branch

    def _sample_rows(self, step: Step) -> Samples:
        """Run a step and return its samples, those of a fork as its children's; requests that failed have none."""
        forks = self.rows.forks[step.sample_slots]
        if not forks.any() and not self.equal:
            sampled = self.runner.run(step, self.rows, np.ones_like(forks), self.rows.seed[step.sample_slots])
            return samples_of(step.sample_slots, step.sample_offset, step.sample_rows, step.steps, sampled)
        each = np.maximum(forks, self.equal.counts(step.sample_slots))  # samples of each row
        sampled = self.runner.run(step, self.rows, each, self._seeds(step.sample_slots, forks, each))
        owners = self._fork(step.sample_slots, forks)
        slot = np.array([branch.slot for branch in owners], np.int64)
        samples = Samples(slot, np.repeat(step.sample_offset, each), np.repeat(step.sample_rows, each), sampled)
        return samples.only(np.array([not branch.request.done for branch in owners]))

    @property
    def _can_merge(self) -> bool:
        """Each step has one sample of each branch, and nothing is kept for each row."""
        scheduler, cache = self.scheduler, self.cache
        single = scheduler.drafts is None and scheduler.windows.most == 1 and self.runner.graphs is None
        return single and cache.states is None and cache.routes is None and self.others is None

    def _seeds(self, slots: Array, forks: Array, each: Array) -> Array:  # [E] int64
        """Return the seeds of the ``each`` samples of each slot: those that the branches of `children` will have."""
        child = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        seeds = self.rows.seed[self.equal.owners(slots, each)]
        reseeded = forks > 1
        reseeded[forks == 1] = [self._branch(slot).node.parent is None for slot in slots[forks == 1].tolist()]
        return np.where(np.repeat(reseeded, each), child_seed(seeds, child), seeds)

    def _fork(self, slots: Array, forks: Array) -> list[Branch]:
        """Replace forking branches by their children; return the branch of each sample."""
        owners: list[Branch] = []
        parents = [self._branch(slot) for slot in slots.tolist()]
        for parent, n in zip(parents, forks.tolist(), strict=True):
            children = [parent] * n if n > 0 else [parent, *self.equal.of(parent.slot)]
            if n > 0 and not parent.request.done:
                with self._alone(parent.request):
                    children = self._split(parent, n)
            owners += children
        return owners

    def _split(self, parent: Branch, n: int) -> list[Branch]:
        sampling = parent.request.sampling
        if not parent.node.sealed:
            self._take_records(parent)
        children = self.children(parent, n)
        self.scheduler.keep_state(parent)
        below = self.cache.fork(parent.kv, n)
        del sampling[parent.id]
        for child, kv in zip(children, below, strict=True):
            child.kv = kv
            sampling[child.id] = child
        self.rows.divide(parent.slot, children)
        return children

    def _effects(self, samples: Samples) -> tuple[Array, dict[int, str] | None]:
        """Return the effect of each sample if it is the last of its branch ([E] int8: `GO_ON`, `END_SEGMENT`,
        `END_RESPONSE` or `LOST`), and the stop texts by slot; None if no branch stops at texts."""
        rows, slots, offset, token = self.rows, samples.slot, samples.offset, samples.sampled.token
        effect = self.stops.tokens(rows.stop_table[slots], token)
        effect[(effect == GO_ON) & (rows.length[slots] + offset + 1 >= rows.segment_end[slots])] = END_SEGMENT
        effect[token < 0] = END_RESPONSE  # the logits were not finite; only this branch fails
        if not (rows.stops_at_text.any() and (at_text := rows.stops_at_text[slots]).any()):
            return effect, None
        texts: dict[int, str] = {}
        for i in np.flatnonzero(at_text).tolist():
            branch, begin = rows.branch[slots[i]], i - int(offset[i])
            if branch is not None and token[i] >= 0 and not (effect[begin:i] != GO_ON).any():
                with self._alone(branch.request):
                    if (hit := self.stops.text(rows, branch, token[begin : i + 1])) is not None:
                        of_text, texts[branch.slot] = hit
                        effect[i] = max(effect[i], of_text)
        # a failing tokenizer fails the request with all of its branches
        effect[[rows.branch[slot] is None for slot in slots.tolist()]] = LOST
        return effect, texts

    def _end_segments(self, samples: Samples, stop_texts: dict[int, str]) -> None:
        """Stop the branches whose samples end a segment or a response, and report them to their programs."""
        rows, sampled, effect = self.rows, samples.sampled, samples.effect
        assert effect is not None
        if not effect.any():
            return
        if self.scheduler.drafts is not None:
            self.scheduler.drafts.sampled(rows, samples.slot[effect != GO_ON])
        ended = []
        for i in np.flatnonzero(effect != GO_ON).tolist():
            slot = int(samples.slot[i])
            branch = rows.branch[slot]
            if branch is None:
                continue
            with self._alone(branch.request):
                status = None
                if sampled.token[i] < 0:
                    status = LeafStatus.FAILED
                    self._name_failure(branch, None if sampled.why is None else sampled.why[i])
                elif effect[i] == END_RESPONSE:
                    status = LeafStatus.STOP
                elif rows.length[slot] >= rows.limit[slot]:
                    status = LeafStatus.LENGTH
                self.scheduler.stop(branch)
                records = rows.sampled(slot)
                segment = records[len(records) - int(rows.segment_tokens[slot]) :]
                ended.append(self._end_segment(branch, segment, status, stop_texts.get(slot)))
        self._report(ended)

    @staticmethod
    def _name_failure(branch: Branch, why: str | None) -> None:
        """Record the reason why a branch has no sampled token."""
        branch.request.errors[branch.id] = why or NOT_FINITE

    # -- operations of `Steering` -----------------------------------------------------------------------------------

    def _length(self, branch: Branch) -> int:
        return int(self.rows.length[branch.slot])

    def path_so_far(self, branch: Branch) -> Array:  # [prompt + response] int32
        if branch.node.sealed or branch.slot < 0:
            return branch.node.column("token")
        assert branch.node.parent is not None  # the prompt's node is sealed
        above = branch.node.parent.column("token")
        return np.concatenate([above, self.rows.records["token"][branch.slot, : self.rows.fill[branch.slot]]])

    def records_so_far(self, branch: Branch) -> Array:  # [response] records
        nodes = [node for node in branch.node.path() if node.parent is not None][::-1]
        unsealed = [] if branch.node.sealed or branch.slot < 0 else [self.rows.sampled(branch.slot)]
        return join([*(node.records for node in nodes), *unsealed])

    def _take_records(self, branch: Branch) -> None:
        branch.node.records = self.rows.sampled(branch.slot)
        branch.node.sealed = True

    def _seal(self, branch: Branch) -> None:
        if branch.node.sealed:
            return
        self._take_records(branch)
        if branch.status is None and self.cache.length(branch.kv) == self.rows.position[branch.slot]:
            self.cache.extend(branch.kv, [self.rows.last_token[branch.slot]])

    def _append(self, branch: Branch, node: Node) -> None:
        slot, tokens = branch.slot, node.records["token"]
        branch.kv = self.cache.append(branch.kv, tokens)
        self.rows.kv_node[slot] = branch.kv
        self.rows.position[slot] += len(tokens)
        self.rows.length[slot] += len(tokens)
        self.rows.last_token[slot] = tokens[-1]

    def _open(self, branch: Branch, source: Branch, length: int) -> None:
        position = len(branch.request.prompt) + length
        if source.kv >= 0:
            branch.kv = self.cache.rewind(source.kv, position)
        else:
            branch.kv = self.cache.start(self._key(branch.request), source.node.column("token")[:position])
        self._add(branch, length, 0, 0)

    def _sample(self, branch: Branch, n: int, segment_end: int) -> None:
        self._check_forks(n)
        slot = branch.slot
        self.rows.temperature[slot] = branch.temperature
        self.rows.start_segment(slot, segment_end)
        self.rows.forks[slot] = n if n > 1 or branch.node.sealed else 0
        self.scheduler.resume(branch)

    def _retire(self, branch: Branch) -> None:
        """Free the row of a leaf; its keys stay in the cache, and are held if the program may rewind it."""
        self.rows.remove(branch.slot)
        branch.slot = -1
        if not branch.request.program.rewinds:
            if branch.request.owner and branch.kv >= 0:
                self.cache.tree.keep(branch.kv, branch.request.owner)
            self._drop(branch)

    def _drop(self, branch: Branch) -> None:
        if branch.slot >= 0:
            if self.equal:
                self.scheduler.replace(branch, self.equal.leave(branch))
            self.scheduler.suspend(branch)
            self.rows.remove(branch.slot)
            branch.slot = -1
        if branch.kv >= 0:
            self.cache.release(branch.kv)
            branch.kv = -1

    def _branch(self, slot: int) -> Branch:
        branch = self.rows.branch[slot]
        assert branch is not None
        return branch
