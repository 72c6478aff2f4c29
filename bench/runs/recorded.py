"""Drafts over the rollouts of a real run: the time that they would have saved in it.

``rolltree bench speculation --recorded RUN`` reads ``RUN/config.toml`` and ``RUN/rollouts/*.parquet`` and lets the
engine sample them again, with the run's model, parameters, groups and seeds. The model computes every token, but the
sampled tokens are read from the recording, because the weights have changed since. So both providers write exactly the
texts of the run, and a draft is right where it would have been right in the run. A tree is followed fork by fork,
whatever program made it. If that program gave siblings their seeds in another order, as after a rewind, drafts drawn
from disagreeing votes are right less often than they were.

First epochs are the groups whose prompt is new, with nothing to draft from at the start; later epochs are the others,
with the texts of the first ones known. vLLM cannot be made to sample given tokens: it samples from the run's last
weights, with the same prompts and as many responses, so its times compare only with each other.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch

from rolltree.engine import DraftConfig, EngineConfig, NativeEngine, UserError
from rolltree.engine.app.assembly.sampling import sampling_params
from rolltree.engine.app.config import load_config
from rolltree.engine.data.segment import Origin, Text
from rolltree.engine.model.loading import load_model, load_tokenizer
from rolltree.engine.programs import Action, BranchId, Finish, Fork, GroupState, RolloutProgram, SegmentReport
from rolltree.engine.programs.program import WHOLE
from rolltree.engine.rollout.native.assembly import Step
from rolltree.engine.rollout.native.drafts import Drafts
from rolltree.engine.rollout.native.rows import RowTable, Sampled
from rolltree.engine.settings import TrainConfig

from ..runner import Bench, Calls, Case, UnsupportedError
from .speculation import NONE, RULE, count

Array = npt.NDArray[Any]
COLUMNS = ("step", "group", "prompt_ids", "response_ids", "node_ids", "origin")
WIDTHS = (1, 8)  # prompts of a batch; the number in the run's own steps is added


@dataclass(frozen=True)
class Part:
    """A branch's tokens from the start of the response, and the number of its children."""

    tokens: Array  # [T] int64
    forks: int  # 0 for a leaf


@dataclass(frozen=True)
class Group:
    """The responses to one prompt in one step of the run."""

    step: int
    prompt: list[int]
    seed: int
    parts: dict[BranchId, Part]
    again: bool
    """True if an earlier group has the same prompt."""

    @property
    def tokens(self) -> int:
        """The tokens of all responses, each counted in full."""
        return sum(len(part.tokens) for part in self.parts.values() if not part.forks)

    @property
    def texts(self) -> Iterator[Text]:
        """Yields texts that hold every sampled token once."""
        prompt, nothing = np.array(self.prompt, np.int32), np.zeros(0, np.int64)
        for branch, part in self.parts.items():
            above = len(self.parts.get(branch[:-1], Part(nothing, 0)).tokens)
            if len(part.tokens) > above:
                yield Text(prompt, part.tokens[:above].astype(np.int32), part.tokens[above:].astype(np.int32))


@dataclass(frozen=True)
class Inputs:
    model: Any
    tokenizer: Any
    directory: Path
    config: TrainConfig
    history: list[Group]
    """Groups whose texts are known before the first batch."""
    batches: list[list[Group]]
    counts: Counter[str] = field(default_factory=Counter)
    """Drafted and accepted tokens of all calls."""


class Followed(RolloutProgram):
    """Forks and ends as the recording, which is the request's context."""

    def start(self, group: GroupState) -> int:
        self.segment_tokens = self._next((), 0)
        return int(self.context[()].forks)

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterator[Action]:
        for segment in finished:
            part = self.context[segment.branch]
            if segment.status is not None:
                continue  # ended by a token, a text or the limit
            if segment.length < len(part.tokens):
                yield Fork(segment.branch, 1, segment_tokens=len(part.tokens) - segment.length)
            elif part.forks:
                yield Fork(segment.branch, part.forks, segment_tokens=self._next(segment.branch, segment.length))
            else:
                yield Finish(segment.branch)

    def _next(self, branch: BranchId, begin: int) -> int:
        """Return the tokens until the first of the branch's children forks or ends."""
        children = [self.context[(*branch, i)] for i in range(self.context[branch].forks)]
        return min(len(child.tokens) for child in children) - begin


class FollowedToTheEnd(Followed):
    """`Followed` for independent responses, which end at a token, a text or their limit."""

    def _next(self, branch: BranchId, begin: int) -> int:
        return WHOLE


class Reader:
    """Wraps an engine's runner: the model computes, and the sampled tokens are replaced by recorded ones."""

    def __init__(self, engine: NativeEngine) -> None:
        self._run, self._owners = engine.loop.runner.run, engine.loop.equal.owners
        self._order = np.full(0, -1, np.int64)  # by slot: the branch whose text it holds
        self._text: Array = np.zeros((0, 1), np.int64)
        engine.loop.runner.run = self  # type: ignore[method-assign]

    def __call__(self, step: Step, rows: RowTable, samples: Array, seeds: Array) -> Sampled:
        sampled = self._run(step, rows, samples, seeds)
        slots, offset = self._owners(step.sample_slots, samples), np.repeat(step.sample_offset, samples)
        forks = rows.forks[slots]
        if len(self._order) < len(rows.order):
            more = len(rows.order) - len(self._order)
            self._order = np.pad(self._order, (0, more), constant_values=-1)
            self._text = np.pad(self._text, ((0, more), (0, 0)))
        for slot in slots[(forks == 0) & (offset == 0)].tolist():
            if self._order[slot] != rows.order[slot]:
                self._read(rows, slot)
        place = rows.length[slots] + offset
        token = self._text[slots, np.minimum(place, self._text.shape[1] - 1)]
        child = np.arange(len(slots)) - np.repeat(np.cumsum(samples) - samples, samples)
        for i in np.flatnonzero(forks).tolist():
            branch = rows.branch[slots[i]]
            assert branch is not None
            alone = forks[i] == 1 and branch.node.parent is not None
            below = branch.id if alone else (*branch.id, int(child[i]))
            token[i] = branch.request.program.context[below].tokens[place[i]]
        assert (token[offset == 0] >= 0).all(), "the engine goes on where the recording ends"
        return sampled._replace(token=np.maximum(token, 0))  # samples after a wrong draft are dropped

    def _read(self, rows: RowTable, slot: int) -> None:
        branch = rows.branch[slot]
        assert branch is not None
        text = branch.request.program.context[branch.id].tokens
        if len(text) >= self._text.shape[1]:
            self._text = np.pad(self._text, ((0, 0), (0, 1 + len(text))), constant_values=-1)
        self._text[slot, : len(text)] = text
        self._text[slot, len(text) :] = -1
        self._order[slot] = rows.order[slot]


def read_groups(run: Path, config: TrainConfig) -> list[Group]:
    """Return the groups that a run recorded, in order.

    Raises:
        UserError: there are no rollouts, they lack a column, or hold tokens that were not sampled.
    """
    files, groups = sorted((run / "rollouts").glob("step_*.parquet")), []
    seen: set[bytes] = set()
    for file in files:
        table = pq.read_table(file)
        if missing := [name for name in COLUMNS if name not in table.column_names]:
            raise UserError(f"'{file}' has no column {missing[0]}; record the run again with this version.")
        rows = table.select(COLUMNS).to_pylist()
        for ticket, of_group in itertools.groupby(rows, key=lambda row: row["group"]):
            leaves = list(of_group)
            if any(set(leaf["origin"]) - {int(Origin.SAMPLED)} for leaf in leaves):
                raise UserError(
                    f"'{file}' holds tokens that were not sampled, such as a tool's; such runs are not read."
                )
            prompt = np.array(leaves[0]["prompt_ids"], np.int32)
            parts = _parts([leaf["response_ids"] for leaf in leaves], [leaf["node_ids"] for leaf in leaves])
            seed = _seed(config, ticket)
            again = prompt.tobytes() in seen
            seen.add(prompt.tobytes())
            groups.append(Group(leaves[0]["step"], prompt.tolist(), seed, parts, again))
    if not groups:
        raise UserError(f"'{run}' has no rollouts/step_*.parquet; give the directory of a run.")
    return groups


def _seed(config: TrainConfig, ticket: int) -> int:
    """Return the seed of a group that was never restarted; see `Controller._seed`."""
    block, index = divmod(ticket, config.trainer.prompts_per_step)
    state = np.random.SeedSequence([config.seed, block + 1]).generate_state(config.trainer.prompts_per_step, np.uint64)
    return int(state.astype(np.int64)[index])


def _parts(responses: list[list[int]], nodes: list[list[int]]) -> dict[BranchId, Part]:
    """Return a group's tree by branch; leaves are in depth-first order."""
    parts: dict[BranchId, Part] = {}

    def grow(branch: BranchId, leaves: list[int], begin: int) -> None:
        end, first = begin, nodes[leaves[0]]
        while len(leaves) > 1 and all(len(nodes[i]) > end and nodes[i][end] == first[end] for i in leaves):
            end += 1
        if len(leaves) == 1:
            parts[branch] = Part(np.array(responses[leaves[0]], np.int64), 0)
            return
        if any(len(nodes[i]) == end for i in leaves):
            raise UserError("A recorded response ends where another one goes on; such runs are not read.")
        below = [list(members) for _, members in itertools.groupby(leaves, key=lambda i: nodes[i][end])]
        parts[branch] = Part(np.array(responses[leaves[0]][:end], np.int64), len(below))
        for i, members in enumerate(below):
            grow((*branch, i), members, end)

    below = [list(members) for _, members in itertools.groupby(range(len(nodes)), key=lambda i: nodes[i][:1])]
    parts[()] = Part(np.zeros(0, np.int64), len(below))
    for i, members in enumerate(below):
        grow((i,), members, 0)
    return parts


def cases(
    run: Path, config: TrainConfig, groups: list[Group], directory: Path, device: torch.device, quick: bool
) -> Iterator[Case]:
    """Yield batches of one, eight and as many prompts as the run's steps have, in first and later epochs."""
    dtype = getattr(torch, config.model.dtype)
    load = cache(lambda: (load_model(directory, dtype=dtype, device=device).eval(), load_tokenizer(str(directory))))
    n = config.rollout.n
    for width in WIDTHS[:1] if quick else sorted({*WIDTHS, config.trainer.prompts_per_step}):
        for again in (False, True):
            chosen = [group for group in groups if group.again == again]
            before = groups[: groups.index(chosen[0])] if chosen and again else []
            batches = [chosen[i : i + width] for i in range(0, len(chosen) - width + 1, width)]
            make = partial(_inputs, load, directory, config, before, batches)
            yield Case(f"{width} x {n} rows of {run.name}, {'later' if again else 'first'} epochs", make)


def _weights(run: Path, config: TrainConfig) -> Path:
    for path in (run / "export", Path(config.model.path)):
        if (path / "config.json").is_file():
            return path
    raise UserError(f"'{run}' has no model in export, and there is none in '{config.model.path}'.")


def _inputs(
    load: Any, directory: Path, config: TrainConfig, history: list[Group], batches: list[list[Group]]
) -> Inputs:
    if not batches:
        raise UnsupportedError("the run has too few such groups; give one whose prompts come more than once")
    model, tokenizer = load()
    return Inputs(model, tokenizer, directory, config, history, batches)


def _calls(x: Inputs, drafts: DraftConfig | None) -> Calls:
    rollout = x.config.rollout
    engine = NativeEngine(
        x.model,
        x.tokenizer,
        EngineConfig(kv_tokens=rollout.kv_tokens, max_batch_rows=rollout.max_batch_rows, drafts=drafts),
    )
    Reader(engine)
    program = FollowedToTheEnd() if rollout.program == "flat" else Followed()
    params, turns = sampling_params(rollout), itertools.count()

    def begin_again() -> None:
        """Know only what was sampled before the first batch."""
        if drafts is not None:
            engine.loop.scheduler.drafts = Drafts(drafts)
            for group in x.history:
                engine.remember(group.texts)

    def batch() -> None:
        turn = next(turns) % len(x.batches)
        if turn == 0:
            begin_again()
        groups = x.batches[turn]
        engine.forget_prefixes()
        engine.policy_version = groups[0].step - 1
        trees = engine.generate(
            [group.prompt for group in groups],
            params,
            program,
            seeds=[group.seed for group in groups],
            contexts=[group.parts for group in groups],
        )
        assert sum(int(tree.response_length.sum()) for tree in trees) == sum(group.tokens for group in groups)
        count(x.counts, engine)

    return {"generate": batch}


def vllm(x: Inputs, method: str | None = None) -> Calls:
    """Time vLLM as its users call it, with one of its own methods of drafting; none of them needs a draft model."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    if method == "suffix":
        importlib.import_module("arctic_inference")

    from rolltree.engine.rollout.vllm.engine import VllmEngine

    rollout, longest = x.config.rollout, x.config.data.max_prompt_tokens + x.config.rollout.max_new_tokens
    options: dict[str, Any] = {"gpu_memory_utilization": 0.5} if x.model.device.type == "cuda" else {}
    if not options:
        options = {"kv_cache_memory_bytes": 1 << 30, "dtype": x.config.model.dtype, "enable_chunked_prefill": True}
    if method is not None:
        settings = {"num_speculative_tokens": 5, "prompt_lookup_max": 4} if method == "ngram" else {}
        options["speculative_config"] = {"method": method, **settings}
    llm = VllmEngine(str(x.directory), max_model_len=longest, max_num_seqs=rollout.max_batch_rows, **options).llm
    turns = itertools.count()

    def generate(groups: Sequence[Group], turn: int) -> None:
        llm.reset_prefix_cache()
        params = [
            vllm.SamplingParams(
                n=rollout.n,
                max_tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                stop=list(rollout.stop),
                # with drafts vLLM rewinds a seed's generator, which a CPU generator refuses
                seed=(group.seed + turn) % 2**31 if method is None else None,
                logprobs=0,
            )
            for group in groups
        ]
        prompts: list[Any] = [{"prompt_token_ids": group.prompt} for group in groups]
        llm.generate(prompts, params, use_tqdm=False)

    if method is not None and x.history:
        generate(x.history, 0)

    def batch() -> None:
        turn = next(turns)
        generate(x.batches[turn % len(x.batches)], turn)

    return {"generate": batch}


def bench(run: Path, drafts_bench: Bench) -> Bench:
    """Return ``drafts_bench`` over the rollouts of ``run``.

    Raises:
        UserError: the run cannot be read.
    """
    config = load_config(run / "config.toml")
    parts = config, read_groups(run, config), _weights(run, config)
    providers: dict[str, Callable[[Any], Calls]] = {
        "rolltree": partial(_calls, drafts=RULE),
        NONE: partial(_calls, drafts=None),
        "vllm suffix": partial(vllm, method="suffix"),
        "vllm ngram": partial(vllm, method="ngram"),
        "vllm": vllm,
    }
    return replace(drafts_bench, cases=partial(cases, run, *parts), providers=providers)
