"""Windows of steps: whatever number of steps the rows take by themselves, every bit of every tree is the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.programs import Action, Finish, Fork, GroupState, RolloutProgram, SegmentReport
from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.native.assembly import Assembly
from rolltree.engine.rollout.native.cache.kv_cache import KvCache
from rolltree.engine.rollout.native.draws import Draws
from rolltree.engine.rollout.native.rows import RowTable
from rolltree.engine.rollout.native.step_buffer import StepVector
from rolltree.engine.rollout.native.windows import MOST_STEPS, Windows
from rolltree.kernels import SampleOutput, use_backend
from rolltree.kernels.tree_decode.items import CHUNK, FIELDS

from ...kernels.on_device import needs_interpreter
from ..programs.test_programs import CASES as OF_PROGRAMS
from ..programs.test_programs import engine as with_texts
from ..programs.test_programs import run
from .test_drafts import ACTIONS, CASES, PROGRAMS, assert_same, come_between, finished, misread
from .test_graphs import Uncaptured
from .test_native_engine import PROMPTS, TREEPO, assert_all_free, engine, letters, model
from .test_recurrent_rollouts import model as recurrent_model
from .test_row_adapters import make as adapted_engine
from .test_row_adapters import together

LOOKED_AT = ("tools", "arpo", "latr", "prefix_value_probe", "generate_then_verify", "plan_execute")
"""Programs with texts that stop or with likely tokens, whose every step the host sees."""
SIZES: list[dict[str, int]] = [{}, {"kv_tokens": 120}, {"max_prefill_tokens": 5}, {"max_batch_rows": 4}]


def all_of(tree: TokenTree) -> dict[str, Any]:
    """Everything that a tree holds, as bytes where it is an array."""
    parts = {each.name: getattr(tree, each.name) for each in fields(tree)}
    flat = {**parts, **parts.pop("columns")} if "columns" in parts else parts
    return {name: value.tobytes() if isinstance(value, np.ndarray) else repr(value) for name, value in flat.items()}


def assert_equal(trees: Sequence[TokenTree], others: Sequence[TokenTree]) -> None:
    for tree, other in zip(trees, others, strict=True):
        assert all_of(tree) == all_of(other)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of steps that were taken at once."""
    taken: list[int] = []
    steps = Windows.steps

    def counted(self: Windows, slots: Any) -> int:
        taken.append(steps(self, slots))
        return taken[-1]

    monkeypatch.setattr(Windows, "steps", counted)
    return taken


@pytest.mark.slow(but=3)
@pytest.mark.check(but=4)
@pytest.mark.parametrize("name", OF_PROGRAMS)
def test_every_program_makes_the_same_trees(name: str, windows: list[int]) -> None:
    everyone = range(len(PROMPTS))
    expected = run(name, with_texts(), list(everyone))
    for window in (2, 4, 8):
        windows.clear()
        native = with_texts(window=window)
        assert_equal(run(name, native, list(everyone)), expected)
        assert (max(windows) > 1) == (name not in LOOKED_AT)
        native.cache.tree.check()
        assert_all_free(native)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_every_model_makes_the_same_trees(name: str, windows: list[int]) -> None:
    """With sliding windows of attention, and decoders that are not fused."""
    params = SamplingParams(n=5, max_new_tokens=20)
    expected = engine(name).generate(PROMPTS, params, TREEPO, seeds=range(6))
    windows.clear()
    assert_equal(engine(name, window=8).generate(PROMPTS, params, TREEPO, seeds=range(6)), expected)
    assert max(windows) == 5  # a segment


@pytest.mark.slow
@settings(max_examples=16, deadline=None)
@given(
    program=st.sampled_from(list(PROGRAMS)),
    case=st.sampled_from(list(CASES)),
    window=st.sampled_from([2, 3, 8]),
    seed=st.integers(0, 10**6),
    actions=ACTIONS,
    pages=st.sampled_from([1, 4, 7]),
    sizes=st.sampled_from(SIZES),
)
def test_anything_may_come_between(
    program: str, case: str, window: int, seed: int, actions: list[str], pages: int, sizes: dict[str, int]
) -> None:
    params = SamplingParams(**{"n": 3, "max_new_tokens": 16, **CASES[case]})
    prompts = PROMPTS[seed % 3 : seed % 3 + 3]
    seeds = [seed + i for i in range(len(prompts))]
    plain = NativeEngine(model("qwen3"), letters(), EngineConfig(page_size=4, kv_tokens=4096))
    expected = finished(plain, plain.submit(prompts, params, PROGRAMS[program], seeds=seeds))
    config = EngineConfig(**{"page_size": pages, "kv_tokens": 4096, "window": window, **sizes})
    native = NativeEngine(model("qwen3"), letters(), config)
    requests = native.submit(prompts, params, PROGRAMS[program], seeds=seeds)
    for action in actions:
        come_between(native, requests, action, seed)
        native.cache.tree.check()
    assert_same(finished(native, requests), expected, 0.0)
    assert_all_free(native)
    misread.clear()  # a program appends what the grammar cannot read


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_requests_of_different_lengths(sizes: dict[str, int], windows: list[int]) -> None:
    params = [SamplingParams(n=1 + i % 3, max_new_tokens=5 + 7 * i, top_p=0.9, temperature=1 + i % 2) for i in range(6)]
    expected = engine().generate(PROMPTS, params, seeds=range(6))
    windows.clear()
    native = engine(window=8, **sizes)
    assert_equal(native.generate(PROMPTS, params, seeds=range(6)), expected)
    assert max(windows) > 1
    assert (native.stats["preemptions"] > 0) == ("kv_tokens" in sizes)
    assert_all_free(native)


@pytest.mark.parametrize("window", [2, 8])
def test_rows_with_adapters(window: int) -> None:
    assert_equal(together(adapted_engine(window=window)), together(adapted_engine()))


@pytest.mark.parametrize("program", ["flat", TREEPO], ids=["flat", "treepo"])
def test_padded_steps_and_items_advance(program: Any) -> None:
    """As for CUDA graphs, with and without windows; steps that are taken one by one have the same vector."""
    trees = []
    for window in (1, 8):
        native = NativeEngine(model("qwen3"), letters(), EngineConfig(page_size=4, kv_tokens=4096, window=window))
        runner = native.loop.runner
        runner.graphs = Uncaptured(native.cache, runner.decode_logits, torch.device("cpu"), window=window)
        params = [SamplingParams(n=5, max_new_tokens=20, stop=["x"] * (i == 5)) for i in range(6)]
        requests = native.submit(PROMPTS, params, program, seeds=range(6))
        trees.append([request.tree for request in finished(native, requests)])
        assert runner.graphs.steps > 0
    assert_equal(*trees)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("backend", ["triton", "invariant"])
def test_the_kernels_of_a_gpu_read_what_advanced(backend: Any) -> None:
    trees = []
    with use_backend(backend):
        for window in (1, 4):
            native = engine(window=window)
            runner = native.loop.runner
            runner._fused = None
            runner.graphs = Uncaptured(native.cache, runner.decode_logits, torch.device("cpu"), window=window)
            trees.append(native.generate(PROMPTS[2:4], SamplingParams(n=2, max_new_tokens=6), seeds=range(2)))
    assert_equal(*trees)


def rows_of(own: int, branches: int = 3) -> tuple[RowTable, KvCache]:
    """Branches with ``own`` tokens each, in groups below two prompts."""
    cache = KvCache(8192, 4, torch.device("cpu"))
    cache.groups += [1, 4]
    rows, tree, rng = RowTable(), cache.tree, np.random.default_rng(own)
    for group, length in enumerate((40, CHUNK + 90)):
        root = cache.start(1, rng.integers(0, 99, length).astype(np.int32))
        tree.append(np.array([root]), np.array([length]))
        for node in cache.fork(root, branches):
            tree.extend_by(node, rng.integers(0, 99, own))
            tree.append(np.array([node]), np.array([own]))
            branch: Any = SimpleNamespace(kv=node, order=group, seed=node)
            rows.add(branch, position=length + own, last_token=7 + node, running=True)
    return rows, cache


def loaded(rows: RowTable, cache: KvCache, steps: int) -> StepVector:
    slots = np.flatnonzero(rows.running)
    step = Assembly(rows, cache, rotary=True, whole_pictures=False)(slots, [], None, steps)
    draws = Draws.of(step, rows, np.ones(len(slots), np.int64), rows.seed[step.sample_slots])
    sizes: Any = len(slots), 1024, 2 * cache.tree.num_pages, cache.groups, torch.device("cpu")
    vector = StepVector(*sizes, samples=len(slots), rotary=True, window=8 if steps > 1 else 1)
    vector.load(step, draws, cache.spare_slot, None)
    return vector


@pytest.mark.parametrize("backend", ["invariant", "reference"])
@pytest.mark.parametrize("own", [0, 3, CHUNK - 5])
def test_what_a_step_leaves_is_what_the_host_would_load(backend: Any, own: int) -> None:
    """Each number of the next steps, with items of both kinds of chunks; items may stand in another order."""
    with use_backend(backend):
        steps_of_a_window(own)


def steps_of_a_window(own: int) -> None:
    (ahead, ahead_cache), (rows, cache) = rows_of(own), rows_of(own)
    vector = loaded(ahead, ahead_cache, 4)
    slots, number = np.flatnonzero(rows.running), len(rows.branch)
    for turn in range(4):
        expected = loaded(rows, cache, 1)
        names = set(expected._views) - {"page_ids", "page_indptr", "parent"}  # pages are taken at once
        for name in names:
            one, two = (each.view(name) for each in (vector, expected))
            if name.startswith("items"):
                one, two = ({tuple(item) for item in each.view(-1, FIELDS)[:, 2:].tolist()} for each in (one, two))
            assert one == two if isinstance(one, set) else torch.equal(one[: len(two)], two), (turn, name)
        token = torch.arange(len(slots)) + 10 * turn
        out = SampleOutput(token, *(torch.full((len(slots),), turn + x) for x in (0.1, 0.2, 0.3)), token)
        drawn = vector.advance(out)
        order = ahead_cache.tree.depth_first(rows.kv_node[slots])
        rows.last_token[slots[order]] = token.numpy()
        for column in (rows.position, rows.length):
            column[slots] += 1
    got, *numbers = drawn.fetch(len(slots), 4)
    assert got.reshape(-1, 4).T.tolist() == [list(range(10 * turn, 10 * turn + len(slots))) for turn in range(4)]
    assert numbers[2].reshape(-1, 4)[0].tolist() == torch.arange(4).add(0.3).tolist()
    assert number == len(ahead.branch)


@pytest.mark.parametrize(
    ("column", "value"), [("forks", 2), ("constrained", True), ("stops_at_text", True), ("keeps", True), ("top", 1)]
)
def test_rows_that_the_host_must_see_are_taken_one_by_one(column: str, value: Any) -> None:
    rows, table = RowTable(), SimpleNamespace(lengths=lambda nodes: np.zeros(len(nodes), np.int64), free_pages=100)
    table.pages_needed = lambda nodes, counts: 0
    rows.segment_end[:4] = 100
    slots = np.arange(4)
    assert Windows(rows, table, 8).steps(slots) == 8  # type: ignore[arg-type]
    getattr(rows, column)[2] = value
    assert Windows(rows, table, 8).steps(slots) == 1  # type: ignore[arg-type]
    assert Windows(rows, table, 8).steps(slots[:2]) == 8  # type: ignore[arg-type]


def test_a_window_ends_before_pages_chunks_positions_and_known_ends() -> None:
    rows, table = RowTable(), SimpleNamespace(lengths=lambda nodes: nodes, free_pages=100)
    table.pages_needed = lambda nodes, counts: 30 * int(counts[0])
    rows.segment_end[:64] = 100
    rows.independent[:64] = True
    slots = np.arange(64)

    def steps(of: Any = slots, **options: Any) -> int:
        return Windows(rows, table, 8, **options).steps(of)  # type: ignore[arg-type]

    assert steps() == 3
    table.free_pages = 1000
    assert steps() == 8
    assert steps(drafted_rows=64) == 1
    assert steps(slots[:63], drafted_rows=62) == 8
    rows.position[5] = 95
    assert steps(positions=100) == 5
    rows.position[5] = CHUNK - 2
    assert steps() == 2
    rows.position[5] = 0
    rows.kv_node[5] = CHUNK - 3  # also the keys of its node here
    assert steps() == 3
    rows.kv_node[5] = 0
    rows.segment_end[:64] = 2
    assert steps() == 2
    rows.segment_end[1:64] = 100
    assert steps() == 8  # one of 64 rows idles
    rows.independent[:64] = False
    assert steps() == 2  # all are of one request


class Timed(RolloutProgram):
    """Forks by how many branches are sampling when a segment ends, which a program may look at."""

    segment_tokens = 7

    def start(self, group: GroupState) -> int:
        return 3

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if segment.status is None and group.leaves < 9:
                yield Fork(segment.branch, 1 + (group.sampling + len(finished)) % 2)
            elif segment.status is None:
                yield Finish(segment.branch)


def test_a_program_sees_each_end_at_its_step() -> None:
    """The rows of its request are put back to that step; no sample counts twice."""
    params = SamplingParams(n=6, max_new_tokens=30, stop_token_ids=tuple(range(10, 20)))
    one, eight = engine(), engine(window=8)
    expected = one.generate(PROMPTS, params, Timed(), seeds=range(6))
    assert_equal(eight.generate(PROMPTS, params, Timed(), seeds=range(6)), expected)
    assert eight.stats["sampled_tokens"] == one.stats["sampled_tokens"]
    assert eight.stats["bubble"] > 0


def test_a_row_that_fails_within_a_window_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    params, trees = SamplingParams(n=3, max_new_tokens=12, ignore_eos=True), []
    for window in (1, 8):
        native = engine(window=window)
        logits = native.loop.runner.logits

        def spoiled(hidden: torch.Tensor, runs: Any, logits: Any = logits) -> torch.Tensor:
            out = logits(hidden, runs)
            out[out[:, 5] > 1.5] = torch.nan
            return out

        monkeypatch.setattr(native.loop.runner, "logits", spoiled)
        trees.append(native.generate(PROMPTS, params, seeds=range(6)))
        assert_all_free(native)
    failed = sum("not finite" in str(tree.meta.get("errors")) for tree in trees[0])
    assert failed > 0
    assert_equal(*trees)


def test_a_window_that_fails_leaves_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(n=3, max_new_tokens=20, ignore_eos=True)
    expected = engine().generate(PROMPTS, params, seeds=range(6))
    native = engine(window=8)
    requests = native.submit(PROMPTS, params, seeds=range(6))
    native.step()
    advance, calls = StepVector.advance, []

    def failing(self: StepVector, out: Any) -> Any:
        calls.append(out)
        return advance(self, out) if len(calls) < 3 else 1 / 0

    monkeypatch.setattr(StepVector, "advance", failing)
    while not requests[0].done:
        native.step()
    assert all(isinstance(request.error, ZeroDivisionError) for request in requests)
    monkeypatch.undo()
    native.cache.tree.check()
    assert_equal(native.generate(PROMPTS, params, seeds=range(6)), expected)


def test_what_windows_do_not_go_with_is_refused() -> None:
    for bad in (0, MOST_STEPS + 1, 2.0, "8"):
        with pytest.raises((ValueError, TypeError), match=r"EngineConfig\.window"):
            EngineConfig(window=bad)  # type: ignore[arg-type]
    for other in ("debug", "record_routes"):
        with pytest.raises(ValueError, match=rf"{other} looks at every step; set EngineConfig\.window"):
            EngineConfig(window=2, **{other: True})
        assert EngineConfig(**{other: True}).window == "auto"
    with pytest.raises(UserError, match=r'has recurrent layers.*rollout\.window to "auto"'):
        NativeEngine(recurrent_model("nemotron_h"), config=EngineConfig(window=2))
