"""The engine's loop: steps of many requests at once, and the events that forks, ends of segments and answers are.

The scheduler composes a step, the runner executes it, and what was sampled is recorded. Where a segment ended the
prompt's program is asked at once, so its answer (fork, rewind, append, finish) is part of the next step: no branch
waits for the rest of the batch. A fork samples several tokens from one row of logits and opens a child for each; a
prompt is simply a branch that forks first, and a rewind makes another one in the middle of the tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from ..programs import Action, BranchId, Call, Finish, Fork, Given, Prune, Rewind, SegmentReport
from ..tree import LeafStatus, Origin
from .branch import Branch, Node, Request, given
from .kv_cache import KvCache
from .rows import RowTable
from .runner import Runner
from .scheduler import Scheduler, TooLargeError
from .seeds import child_seed
from .stops import END_RESPONSE, Stops

Array = npt.NDArray[Any]
WAIT_S = 0.05  # between looks at the requests while only calls are outstanding


class Loop:
    """The requests in flight, from prompts to finished trees.

    Attributes:
        version: of the policy, written to every token sampled.
        counts: steps, sampled_tokens, forks, rewinds, failed calls, ``row_steps`` (branches that sampled, summed over
            the steps) and ``idle_row_steps`` (unfinished branches that did not).
    """

    def __init__(self, cache: KvCache, runner: Runner, stops: Stops, *, max_batch_rows: int, max_prefill_tokens: int):
        self.cache = cache
        self.tree = cache.tree
        self.runner = runner
        self.stops = stops
        self.rows = RowTable()
        self.scheduler = Scheduler(
            cache, self.rows, max_batch_rows=max_batch_rows, max_prefill_tokens=max_prefill_tokens
        )
        self.version = 0
        self.counts: Counter[str] = Counter()
        self._forks: dict[int, int] = {}  # of requests that wait in the queue
        self._calling: list[Request] = []
        self._done: list[Request] = []
        self._threads: ThreadPoolExecutor | None = None

    # -- requests ---------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or bool(self._done)

    def add(self, request: Request) -> None:
        """Queue a new request, or take up an aborted one where it was."""
        if request.started:
            self._attach(request)
            return
        forks = request.program.start(request.state())
        if forks < 1:
            raise RuntimeError(f"{_name(request)}.start answered {forks}; a prompt needs at least one branch.")
        self._forks[request.number] = forks
        self.scheduler.queue.append(request)

    def step(self) -> list[Request]:
        """One forward pass, if there is anything to compute; the requests that are done since the last call."""
        self._collect()
        try:
            step = self.scheduler.schedule(self._start)
        except TooLargeError as error:
            self._fail(error.request, error)
            return self._hand_out()
        if step is None:
            if self._calling:
                wait([request.calls[0][1] for request in self._calling], WAIT_S, FIRST_COMPLETED)
            return self._hand_out()
        slots = step.sample_slots
        forks = self.rows.forks[slots]
        samples = np.maximum(forks, 1)
        sampled = self.runner.run(step, self.rows, samples, self._seeds(slots, forks, samples))
        targets = self._fork(slots, forks) if forks.any() else slots
        self.rows.push(targets, sampled, self.version)
        self.rows.running[targets] = True
        self.counts["steps"] += 1
        self.counts["sampled_tokens"] += len(targets)
        self.counts["row_steps"] += len(slots)
        unfinished = sum(len(request.sampling) + len(request.resting) for request in self.scheduler.requests)
        self.counts["idle_row_steps"] += unfinished - len(targets)
        self._end_segments(targets, sampled.token)
        return self._hand_out()

    def abort(self, request: Request) -> None:
        """Stop a request where it is; `add` takes it up again."""
        if request in self.scheduler.queue:
            self.scheduler.queue.remove(request)
            return
        for branch in request.unfinished:
            branch.saved = self.rows.save(branch.slot)
            if not branch.node.sealed:
                branch.node.records = branch.saved["records"]
        self._let_go(request)

    def preempt_all(self) -> None:
        """Drop every key: the weights have changed, or the memory is wanted. Branches in flight wait for theirs."""
        for slot in np.flatnonzero(self.rows.running).tolist():
            self.scheduler.preempt(self._branch(slot))
        self.tree.evict_others(np.zeros(0, np.int64), self.tree.num_pages)

    def _attach(self, request: Request) -> None:
        self.scheduler.requests.append(request)
        for branch in request.unfinished:
            assert branch.saved is not None
            tokens = branch.node.column("token")
            if branch.node.sealed:
                branch.kv = self.tree.insert(self._key(request), tokens)
            else:  # the last node is open: it goes on
                above = self.tree.insert(self._key(request), tokens[:-1])
                (branch.kv,) = self.tree.fork(above, 1)
                self.tree.extend_by(branch.kv, tokens[-1:])
            branch.slot = self.rows.restore(branch, branch.saved)
            branch.saved = None
            if branch.id in request.sampling:
                self.scheduler.resume(branch)
        if request.calls:
            self._calling.append(request)

    def _let_go(self, request: Request) -> None:
        """Give up all that a started request holds here."""
        for branch in request.unfinished:
            self.scheduler.suspend(branch)
            self.rows.remove(branch.slot)
            branch.slot = -1
        for branch in [*request.unfinished, *request.leaves.values()]:
            self._release(branch)
        if request in self._calling:
            self._calling.remove(request)
        self.scheduler.requests.remove(request)

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = error
        self._let_go(request)
        self._done.append(request)

    def _hand_out(self) -> list[Request]:
        done, self._done = self._done, []
        return done

    def _key(self, request: Request) -> int:
        """Keys computed by other weights are other keys."""
        return self.version << 16 | request.adapter

    # -- events of the loop -----------------------------------------------------------------------------------------

    def _start(self, request: Request) -> Branch:
        request.started = True
        root = Node(None, 0, given(request.prompt), Origin.PROMPT, sealed=True)
        branch = Branch(request, (), root, request.seed, request.next_order(), (0,))
        branch.kv = self.tree.insert(self._key(request), request.prompt)
        return self._add(branch, 0, self._forks.pop(request.number))

    def _add(self, branch: Branch, length: int, forks: int) -> Branch:
        request, params, program = branch.request, branch.request.params, branch.request.program
        branch.slot = self.rows.add(
            branch,
            position=len(request.prompt) + length - 1,
            last_token=branch.node.records["token"][-1] if branch.node.sealed else 0,
            length=length,
            limit=params.max_new_tokens,
            segment_end=self._segment_end(request, length),
            forks=forks,
            temperature=params.temperature,
            top_k=params.top_k or 0,
            top_p=params.top_p,
            min_p=params.min_p or 0.0,
            top=max(params.top_logprobs, program.top_logprobs),
            stop_table=self.stops.table(request),
            stops_at_text=bool(params.stop or program.segment_stop),
            constrained=params.constrained,
            adapter=request.adapter,
        )
        request.sampling[branch.id] = branch
        return branch

    def _segment_end(self, request: Request, length: int) -> int:
        tokens, most = request.program.segment_tokens, request.params.max_new_tokens
        return most if tokens is None else min(length + tokens, most)

    def _seeds(self, slots: Array, forks: Array, samples: Array) -> Array:  # [E] int64
        seeds = self.rows.seed[slots]
        if not forks.any():
            return seeds
        child = np.arange(samples.sum()) - np.repeat(np.cumsum(samples) - samples, samples)
        seeds = np.repeat(seeds, samples)
        own = forks > 1
        own[forks == 1] = [self._branch(slot).node.parent is None for slot in slots[forks == 1].tolist()]
        return np.where(np.repeat(own, samples), child_seed(seeds, child), seeds)

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
            del parent.request.sampling[parent.id]
            seeds = child_seed(parent.seed, np.arange(n))
            for i, kv in enumerate(self.tree.fork(parent.kv, n)):
                node = Node(parent.node, start)
                if n == 1 and parent.node.parent is not None:  # the same branch, in a node of its own
                    child = Branch(parent.request, parent.id, node, parent.seed, parent.order, parent.boundaries, kv)
                    child.rewinds = parent.rewinds
                else:
                    order = parent.request.next_order()
                    id_ = (*parent.id, i)
                    child = Branch(parent.request, id_, node, int(seeds[i]), order, parent.boundaries, kv)
                targets.append(self._add(child, length, 0).slot)
            self.rows.remove(slot)
            self.counts["forks"] += 1
        return np.array(targets, np.int64)

    def _end_segments(self, slots: Array, token: Array) -> None:
        rows = self.rows
        failed = token < 0  # the logits were not finite; only this branch is lost
        ends = self.stops.tokens(rows.stop_table[slots], token)
        ends[failed] = END_RESPONSE
        texts = self.stops.texts(rows, slots)
        for i, (what, _) in texts.items():
            ends[i] = max(ends[i], what)
        full = rows.length[slots] >= rows.segment_end[slots]
        reports: dict[int, tuple[Request, list[SegmentReport]]] = {}
        for i in np.flatnonzero((ends > 0) | full).tolist():
            branch = self._branch(int(slots[i]))
            status = None
            if failed[i]:
                status = LeafStatus.FAILED
                errors, id_ = branch.request.errors, branch.id
                known = next((why for key, why in errors.items() if id_[: len(key)] == key), None)
                errors[id_] = known or "the model's logits were not finite"
            elif ends[i] == END_RESPONSE:
                status = LeafStatus.STOP
            elif rows.length[branch.slot] >= rows.limit[branch.slot]:
                status = LeafStatus.LENGTH
            report = self._end_segment(branch, status, texts[i][1] if i in texts else None)
            reports.setdefault(branch.request.number, (branch.request, []))[1].append(report)
        for request, finished in reports.values():
            finished.sort(key=lambda report: report.branch)
            self._ask(request, lambda r=request, f=finished: r.program.decide(r.state(), f))

    def _end_segment(self, branch: Branch, status: LeafStatus | None, stop: str | None) -> SegmentReport:
        rows, slot, request = self.rows, branch.slot, branch.request
        records = rows.sampled(slot)
        above = branch.node.parent.column("token") if branch.node.parent else np.zeros(0, np.int32)
        segment = records[len(records) - int(rows.segment_tokens[slot]) :]
        report = SegmentReport(
            branch=branch.id,
            status=status,
            stop=stop,
            depth=len(branch.boundaries),
            boundaries=branch.boundaries,
            length=int(rows.length[slot]),
            response_ids=np.concatenate([above, records["token"]])[len(request.prompt) :],
            token_ids=segment["token"],
            logprobs=segment["logprob"],
            entropies=segment["entropy"],
            top_ids=segment["top_id"],
            top_logprobs=segment["top_logprob"],
        )
        rows.running[slot] = False
        del request.sampling[branch.id]
        if status is None:
            branch.boundaries = (*branch.boundaries, report.length)
            request.resting[branch.id] = branch
        else:
            self._finish(branch, status)
        return report

    def _finish(self, branch: Branch, status: LeafStatus) -> None:
        self._seal(branch)
        branch.status, branch.length = status, int(self.rows.length[branch.slot])
        branch.request.resting.pop(branch.id, None)
        branch.request.leaves[branch.id] = branch
        self.rows.remove(branch.slot)
        branch.slot = -1
        if not branch.request.program.rewinds:
            self._release(branch)

    def _seal(self, branch: Branch) -> None:
        if not branch.node.sealed:
            branch.node.records = self.rows.sampled(branch.slot)
            branch.node.sealed = True

    def _release(self, branch: Branch) -> None:
        if branch.kv >= 0:
            self.tree.release(branch.kv)
            branch.kv = -1

    # -- the program's answers --------------------------------------------------------------------------------------

    def _ask(self, request: Request, question: Any) -> None:
        """Put a question to the program and do what it answers. A program that errs ends its own request only."""
        try:
            self._act(request, question())
        except Exception as error:
            self._fail(request, error)

    def _act(self, request: Request, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Fork(key, n, append) if n >= 1:
                    self._go_on(self._resting(request, key), n, append)
                case Finish(key, status):
                    self._finish(self._resting(request, key), status)
                case Rewind(key, length, n, append) if n >= 1:
                    self._rewind(request, key, length, n, append)
                case Prune(key):
                    self._prune(request, key)
                case Call(key, function, arguments) if key in request.resting:
                    self._call(request, key, function, arguments)
                case _:
                    raise RuntimeError(f"{_name(request)} answered {action}, which cannot be done.")
        if request.finished:
            self._complete(request)
        elif not request.sampling and not request.calls:
            raise RuntimeError(
                f"{_name(request)} left {len(request.resting)} branches of prompt {request.number} resting with "
                "nothing sampling; answer each full segment with Fork or Finish."
            )

    def _go_on(self, branch: Branch, n: int, append: Given | None) -> None:
        slot = branch.slot
        if append is not None and len(append.token_ids):
            if int(self.rows.length[slot]) + len(append.token_ids) >= self.rows.limit[slot]:
                self.counts["appends_too_long"] += 1
                self._finish(branch, LeafStatus.LENGTH)  # no room to sample behind it
                return
            self._append(branch, append)
        branch.request.sampling[branch.id] = branch.request.resting.pop(branch.id)
        self.rows.start_segment(slot, self._segment_end(branch.request, int(self.rows.length[slot])))
        self.rows.forks[slot] = n if n > 1 or branch.node.sealed else 0
        self.scheduler.resume(branch)

    def _append(self, branch: Branch, append: Given) -> None:
        """Put tokens behind a resting branch, in a node of their own."""
        slot, tokens = branch.slot, np.asarray(append.token_ids, np.int32)
        self.runner.check_tokens(tokens)
        self._tell_last(branch)
        (branch.kv,) = self.tree.fork(branch.kv, 1)
        self.tree.extend_by(branch.kv, tokens)
        logprobs: Any = np.nan if append.logprobs is None else append.logprobs
        origin = append.origin if append.logprobs is None else Origin.SAMPLED
        start = int(self.rows.position[slot]) + 1
        branch.node = Node(branch.node, start, given(tokens, self.version, logprobs), origin, sealed=True)
        self.rows.kv_node[slot] = branch.kv
        self.rows.position[slot] += len(tokens)
        self.rows.length[slot] += len(tokens)
        self.rows.last_token[slot] = tokens[-1]

    def _tell_last(self, branch: Branch) -> None:
        """Seal the node of a resting branch, and let the KV tree know its last token."""
        self._seal(branch)
        if self.tree.end(branch.kv) == self.rows.position[branch.slot]:
            self.tree.extend_by(branch.kv, [self.rows.last_token[branch.slot]])

    def _rewind(self, request: Request, key: BranchId, length: int, n: int, append: Given | None) -> None:
        source = request.leaves.get(key) or request.resting.get(key)
        if source is not None and source.status is None:
            self._tell_last(source)
            source.length = int(self.rows.length[source.slot])
        if source is None or not 0 <= length < max(source.length, 1):
            raise RuntimeError(f"{_name(request)} rewinds branch {key} to {length}, where it has no tokens.")
        position = len(request.prompt) + length
        node = next(node for node in source.node.path() if node.start < position)
        if source.kv >= 0:
            kv = self.tree.rewind(source.kv, position)
        else:
            kv = self.tree.insert(self._key(request), source.node.column("token")[:position])
        keep = position - node.start
        if keep < len(node.records):
            node = node.split(keep)
        index = -1 - source.rewinds
        source.rewinds += 1
        boundaries = tuple(b for b in source.boundaries if b <= length)
        seed = int(child_seed(source.seed, index))
        branch = Branch(request, (*source.id, index), node, seed, request.next_order(), boundaries, kv)
        self._add(branch, length, n)
        del request.sampling[branch.id]
        request.resting[branch.id] = branch
        self._go_on(self._resting(request, branch.id), n, append)
        self.counts["rewinds"] += 1

    def _prune(self, request: Request, key: BranchId) -> None:
        for place in (request.leaves, request.resting, request.sampling):
            if (branch := place.pop(key, None)) is not None:
                if branch.slot >= 0:
                    self.scheduler.suspend(branch)
                    self.rows.remove(branch.slot)
                self._release(branch)
                self.counts["pruned"] += 1
                return
        raise RuntimeError(f"{_name(request)} prunes branch {key}, which there is not.")

    def _complete(self, request: Request) -> None:
        if not request.leaves:
            raise RuntimeError(f"{_name(request)} pruned every branch of prompt {request.number}.")
        request.tree = request.token_tree()
        self._let_go(request)
        self._done.append(request)

    def _resting(self, request: Request, key: BranchId) -> Branch:
        branch = request.resting.get(key)
        if branch is None:
            raise RuntimeError(f"{_name(request)} answered for branch {key}, which is not resting.")
        return branch

    def _branch(self, slot: int) -> Branch:
        branch = self.rows.branch[slot]
        assert branch is not None
        return branch

    # -- calls ------------------------------------------------------------------------------------------------------

    def _call(self, request: Request, key: BranchId, function: Any, arguments: tuple[Any, ...]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(thread_name_prefix="rolltree-call")
        request.calls.append((key, self._threads.submit(function, *arguments)))
        if request not in self._calling:
            self._calling.append(request)

    def _collect(self) -> None:
        """Hand over the results that are there, those of one request in the order of its calls."""
        for request in list(self._calling):
            while request.calls and request.calls[0][1].done() and not request.done:
                key, future = request.calls.popleft()
                if not request.calls:
                    self._calling.remove(request)
                if key not in request.resting:
                    continue  # pruned meanwhile
                error = future.exception()
                if error is None:
                    result = future.result()
                    self._ask(request, lambda r=request, k=key, v=result: r.program.returned(r.state(), k, v))
                else:
                    request.errors[key] = f"{type(error).__name__}: {error}"
                    self.counts["failed_calls"] += 1
                    self._ask(request, lambda k=key: [Finish(k, LeafStatus.FAILED)])


def _name(request: Request) -> str:
    return type(request.program).__name__
