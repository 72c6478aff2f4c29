"""The Triton kernels of recurrences on trees against a loop over tokens in float64: sizes, gates, neighbours, memory.

Chunks have 32 rows here, two blocks of the inverse, as the interpreter takes its time by operation; slow cases have 64.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import threading
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rolltree.kernels import BackendError, use_backend
from rolltree.kernels.tree_recurrence import (
    RecurrencePlan,
    find_segments,
    op,
    tree_convolution,
    tree_recurrence,
)
from rolltree.kernels.tree_recurrence import triton as backend

from ..support.trees import random_trees
from .on_device import device_of, needs_triton
from .recurrences import by_token, convolved, states_by_token

pytestmark = needs_triton
DEVICE = device_of("triton")
TILES_FOR = backend.tiles_for
NAMES = ("out", "ends", "query", "key", "value", "decay", "beta")


class Case(NamedTuple):
    rule: str
    lengths: tuple[int, ...]  # of segments
    parents: tuple[int, ...]
    heads: tuple[int, int] = (1, 1)  # value heads, key heads
    dim: int = 7
    values: int = 5
    gate: float = 0.2  # decays are up to this
    chunk: int = 32

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    def subtree_end(self) -> np.ndarray[Any, Any]:
        stop = np.cumsum(self.lengths)
        last = list(range(len(stop)))
        for s in reversed(range(len(last))):
            if self.parents[s] >= 0:
                last[self.parents[s]] = max(last[self.parents[s]], last[s])
        return np.repeat(stop[last], self.lengths)

    def plan(self, **options: Any) -> RecurrencePlan:
        segments = find_segments(self.subtree_end())
        assert (segments.length.tolist(), segments.parent.tolist()) == (list(self.lengths), list(self.parents))
        return RecurrencePlan.make(segments, device=DEVICE, **options)

    def parent_rows(self) -> list[int]:
        start = np.cumsum(self.lengths) - self.lengths
        found = np.arange(-1, self.rows - 1)
        found[start] = [start[p] + self.lengths[p] - 1 if p >= 0 else -1 for p in self.parents]
        return found.tolist()

    def inputs(self, seed: int = 0) -> list[Any]:
        torch.manual_seed(seed)
        (heads, groups), rows, wide = self.heads, self.rows, torch.float64
        query, key = (torch.randn(rows, groups, self.dim, dtype=wide) for _ in range(2))
        decay = torch.rand(rows, heads, *([self.dim] if self.rule == "kimi" else []), dtype=wide)
        value, beta = torch.randn(rows, heads, self.values, dtype=wide), torch.rand(rows, heads, dtype=wide)
        return [query, F.normalize(key, dim=-1), value, -self.gate * decay, None if self.rule == "mamba" else beta]


ROOTS = ((2, 40, 1, 33), (-1, -1, 1, 1))  # a small tree; a prompt and two responses, which begin first
DEEP = ((3, 5, 70, 1, 32, 9), (-1, 0, 1, 1, 0, -1))
CASES = [
    Case("delta", *ROOTS, heads=(2, 1)),
    Case("delta", *DEEP, dim=20, values=18),
    Case("mamba", *ROOTS, heads=(4, 2), dim=19),
    Case("kimi", (36, 1, 2), (-1, 0, 0)),
    Case("kimi", *DEEP, heads=(2, 1), dim=20, values=18),
    Case("delta", (64, 65, 128, 17, 63), (-1, 0, 0, 2, 2), dim=96, values=33, chunk=64),
    Case("mamba", (64, 65, 128, 17, 63), (-1, 0, 0, 2, 2), heads=(6, 2), dim=48, values=64, chunk=64),
    Case("kimi", (64, 65, 128, 17, 63), (-1, 0, 0, 2, 2), heads=(2, 2), dim=40, values=70, chunk=64),
]
QUICK = [0, 1, 2, 3]


def some(cases: list[Any], kept: list[int]) -> list[Any]:
    """The cases but ``kept`` are slow without a GPU."""
    late = DEVICE.type == "cpu"
    marks = [[pytest.mark.slow] if late and i not in kept else [] for i in range(len(cases))]
    return [
        pytest.param(*c, marks=m) if type(c) is tuple else pytest.param(c, marks=m)
        for c, m in zip(cases, marks, strict=True)
    ]


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_chunks(32, monkeypatch)


def use_chunks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "tiles_for", lambda *sizes, major: TILES_FOR(*sizes, major=major)._replace(chunk=rows))


def found(
    given: list[Any], plan: RecurrencePlan, dtype: torch.dtype, initial: Tensor | None = None, name: Any = "triton"
) -> list[Tensor]:
    """Outputs, end states and gradients of all inputs, by a backend; upstream gradients are sines."""
    inputs = [None if x is None else x.detach().to(DEVICE, dtype).requires_grad_() for x in (*given, initial)]
    with use_backend(name):
        outs = tree_recurrence(*inputs[:5], plan, initial=inputs[5], scale=0.7)
        grads = torch.autograd.grad(outs, [x for x in inputs if x is not None], [upstream(o) for o in outs])
    return [x.detach().cpu() for x in (*outs, *grads)]


def wanted(
    given: list[Any], case: Case, ends: list[int], dtype: torch.dtype, first: Tensor | None = None
) -> list[Tensor]:
    """The same by a loop over tokens; ``first`` is the state with which every root begins."""
    inputs = [None if x is None else x.detach().to(dtype).requires_grad_() for x in (*given, first)]
    states = states_by_token(inputs[:5], case.parent_rows(), inputs[5])
    out = by_token(inputs[:5], case.parent_rows(), 0.7, states)
    outs = out, torch.stack([states[t] for t in ends]) if ends else out.new_empty(0, *states[0].shape)
    pairs = [(o, upstream(o)) for o in outs if o.requires_grad]
    asked = [x for x in inputs if x is not None]
    grads = torch.autograd.grad([o for o, _ in pairs], asked, [g for _, g in pairs])
    return [x.detach() for x in (*outs, *grads)]


def upstream(x: Tensor) -> Tensor:
    return torch.sin(torch.arange(x.numel(), dtype=torch.float64) * 0.7).view(x.shape).to(x)


def errors(got: list[Tensor], right: list[Tensor]) -> list[float]:
    return [float((g.double() - r).norm() / r.norm()) if r.numel() else 0.0 for g, r in zip(got, right, strict=True)]


@pytest.mark.check(but=2)
@pytest.mark.parametrize("case", some(CASES, QUICK))
def test_error_is_at_most_twice_plain_pytorchs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    use_chunks(case.chunk, monkeypatch)
    given, last = case.inputs(), np.cumsum(case.lengths) - 1
    ends = [2, 1]  # in any order; a leaf and a branch point
    right, plain = (wanted(given, case, last[ends].tolist(), dtype) for dtype in (torch.float64, torch.float32))
    ours, theirs = errors(found(given, case.plan(ends=np.array(ends)), torch.float32), right), errors(plain, right)
    for name, mine, other in zip(NAMES, ours, theirs, strict=False):
        assert mine <= 2 * other + 4 * torch.finfo(torch.float32).eps, f"{name}: {mine:.1e}, plain PyTorch {other:.1e}"


@pytest.mark.parametrize("rule", ["delta", "mamba", pytest.param("kimi", marks=pytest.mark.slow)])
def test_products_in_half_precision(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 stands for bfloat16, which the interpreter cannot multiply; plain PyTorch multiplies in the same way."""
    monkeypatch.setattr(backend, "_multiplied_in", lambda *_: torch.float16)
    case = Case(rule, (20, 14), (-1, -1))
    given = case.inputs()
    for i in (0, 1, 2):
        given[i] = given[i].half().double()
    right, plain = (wanted(given, case, [], dtype) for dtype in (torch.float64, torch.float16))
    ours, theirs = errors(found(given, case.plan(), torch.float32), right), errors(plain, right)
    for name, mine, other in zip(NAMES, ours, theirs, strict=False):
        assert mine <= 2 * other + 4 * torch.finfo(torch.float16).eps, f"{name}: {mine:.1e}, plain PyTorch {other:.1e}"
    assert max(ours) > 1e-5  # products were rounded


def hard_gates(given: list[Any], keys: str) -> None:
    """Decays near 0 and near 1 side by side, in place; equal keys with beta 1 make the largest inverse."""
    decay = given[3]
    decay[...] = torch.tensor([-1e-7, -300.0, -1e-6, -2.0, -0.0, -80.0], dtype=torch.float64)[
        torch.arange(decay.numel()) % 6
    ].view(decay.shape)
    if keys == "equal":
        decay[...] = -1e-4
        given[1][...] = given[1][:1]
        given[4][...] = 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "keys"),
    some([("delta", "any"), ("delta", "equal"), ("kimi", "any"), ("kimi", "equal"), ("mamba", "any")], [2]),
)
def test_decays_near_0_and_near_1(rule: str, keys: str) -> None:
    case = Case(rule, (40, 3), (-1, -1))
    given = case.inputs()
    hard_gates(given, keys)
    right = wanted(given, case, [], torch.float64)
    got = found(given, case.plan(), torch.float32)
    # decays are summed up within a chunk, so their roundings are of the sum, here as in the definition
    plain = [wanted(given, case, [], torch.float32), found(given, case.plan(), torch.float32, name="reference")]
    for name, mine, truth, *others in zip(NAMES, got, right, *plain, strict=False):
        if truth.numel():
            assert bool(mine.isfinite().all()), name
            most, eps = float(truth.abs().max()), torch.finfo(torch.float32).eps
            off, *allowed = (float((x.double() - truth).abs().max()) for x in (mine, *others))
            assert off <= 2 * max(allowed) + 8 * eps * most, f"{name}: {off:.1e}, others {allowed}"


def test_given_states_and_their_gradients() -> None:
    """Two roots begin with one given state and one with zero; one end is asked for twice."""
    case = Case("delta", (18, 2, 3, 2, 20), (-1, 0, 0, -1, -1))
    given, first = case.inputs(), torch.randn(1, 1, 7, 5, dtype=torch.float64)
    segments = find_segments(case.subtree_end())._replace(initial=np.array([0, -1, -1, 0, -1]))
    ends = [1, 3, 1]
    plan = RecurrencePlan.make(segments, ends=np.array(ends), states=1, device=DEVICE)
    got, right = found(given, plan, torch.float32, first), []
    for rows, state in ((slice(0, 25), first[0]), (slice(25, 45), None)):
        alone = [x[rows].requires_grad_() for x in given]
        start = None if state is None else state.clone().requires_grad_()
        parents = case.parent_rows()[rows] if state is not None else list(range(-1, 19))
        states = states_by_token(alone, parents, start)
        right.append((alone, start, by_token(alone, parents, 0.7, states), states))
    out = torch.cat([r[2] for r in right])
    last = torch.stack([right[0][3][t] for t in (19, 24, 19)])
    asked = [x for x, *_ in right[:1] for x in (*x, right[0][1])]
    grads = torch.autograd.grad([out, last], asked, [upstream(out), upstream(last)])
    for name, mine, truth in zip((*NAMES, "initial"), got, (out, last, *grads[:-1], grads[-1][None]), strict=True):
        torch.testing.assert_close(mine[: len(truth)].double(), truth, rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["delta", "mamba", "kimi"])
def test_order_of_siblings_and_neighbours_change_no_bit(rule: str) -> None:
    """The bits are those of outputs, and for neighbours of gradients too; the sum over children goes in their rows'
    order."""
    lengths, prompt = (1, 33, 16), 35
    whole = Case(rule, (prompt, *lengths), (-1, 0, 0, 0))
    given = whole.inputs()

    def run(order: list[int], before: int) -> list[Tensor]:
        rows = [torch.arange(n) + prompt + sum(lengths[:i]) for i, n in enumerate(lengths)]
        place = torch.cat([torch.arange(prompt), *(rows[i] for i in order)])
        other = Case(rule, (before,), (-1,)).inputs(1) if before else [None] * 5
        packed = [
            x if x is None else torch.cat([x[place]] if y is None else [y, x[place]])
            for x, y in zip(given, other, strict=True)
        ]
        case = Case(rule, (*([before] if before else []), prompt, *(lengths[i] for i in order)),
                    (-1, 0, 0, 0) if not before else (-1, -1, 1, 1, 1))  # fmt: skip
        weight = torch.zeros(case.rows, 1, 5, dtype=torch.float64)
        weight[before:] = upstream(torch.empty(whole.rows, 1, 5, dtype=torch.float64))[place]
        inputs = [None if x is None else x.to(DEVICE, torch.float32).requires_grad_() for x in packed]
        with use_backend("triton"):
            out, _ = tree_recurrence(*inputs, case.plan())
            grads = torch.autograd.grad(out, [x for x in inputs if x is not None], weight.to(out))
        back = torch.argsort(place)
        return [x.detach()[before:][back] for x in (out, *grads)]

    first = run([0, 1, 2], 0)
    moved, beside = run([2, 0, 1], 0), run([0, 1, 2], 11)
    assert torch.equal(first[0], moved[0])
    assert all(torch.equal(a, b) for a, b in zip(first, beside, strict=True))
    assert not torch.equal(first[1][:prompt], torch.zeros_like(first[1][:prompt]))


@pytest.mark.slow
def test_depth_and_many_leaves_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comb of depth 100 with a leaf at each node, and 20 leaves below one prompt: every row has its own segment."""
    use_chunks(16, monkeypatch)
    depth, leaves = 100, 20
    comb = [2 * depth if row % 2 == 0 else row + 1 for row in range(2 * depth)]
    star = [2 * depth + 1 + leaves, *(2 * depth + 2 + i for i in range(leaves))]
    parents = [row - 1 if row % 2 else row - 2 for row in range(2 * depth)] + [-1] + [2 * depth] * leaves
    parents[0] = -1
    given = Case("mamba", (len(parents),), (-1,)).inputs()
    plan = RecurrencePlan.make(find_segments(np.array(comb + star)), device=DEVICE)
    with use_backend("triton"):
        out, _ = tree_recurrence(*(x if x is None else x.to(DEVICE, torch.float32) for x in given), plan)
    torch.testing.assert_close(out.cpu().double(), by_token(given, parents, 1.0), rtol=1e-5, atol=1e-5)


def test_a_run_is_a_whole_tree_and_the_longest_begins_first() -> None:
    lists = Case("mamba", (2, 40, 1, 33, 50), (-1, -1, 1, 1, -1)).plan(ends=np.array([3, 3])).lists(16)
    assert [x.tolist() for x in (lists.run_begin, lists.run_end)] == [[1, 4, 0], [4, 5, 1]]
    assert lists.source.tolist() == [-1, -1, 1, 1, -1]
    assert lists.slot.tolist() == [-1, 1, -1, 0, -1]  # what is asked for comes first
    assert lists.ends is not None
    assert lists.ends.tolist() == [0, 0]
    assert lists.chunk_row.tolist() == [0, 2, 18, 34, 42, 43, 59, 75, 76, 92, 108, 124]
    assert lists.chunk_rows.tolist() == [2, 16, 16, 8, 1, 16, 16, 1, 16, 16, 16, 2]


class _Largest(TorchDispatchMode):
    """Notes how many states [Dk, Dv] the largest tensor of states holds."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.most = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else [made]:
            if isinstance(x, Tensor) and tuple(x.shape[1:]) == self.shape:
                self.most = max(self.most, len(x))
        return made


def test_states_in_memory_are_those_of_branch_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass keeps so many, whatever the number of rows; what it saves are its inputs."""
    use_chunks(16, monkeypatch)
    kept = list[int]()
    for length in (1, 20):
        kept.clear()
        case = Case("delta", (length, length, 2, 2, length, 1), (-1, 0, 1, 1, 0, -1))
        given, plan = [x.float().to(DEVICE).requires_grad_() for x in case.inputs()], case.plan()
        largest, backend_ = _Largest((1, 7, 5)), use_backend("triton")
        with largest, backend_, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, id):
            tree_recurrence(*given, plan)
        assert largest.most == plan.lists(16).slots == 2  # the prompt, and its first response
        assert set(kept) == {x.data_ptr() for x in given}


@pytest.mark.parametrize("wrong", ["nothing", "a parent", "an order"])
def test_a_wrong_tree_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("delta", (20, 3, 18), (-1, 0, 0))
    given, segments = case.inputs(), find_segments(case.subtree_end())
    parent = {"a parent": [-1, 0, -1], "an order": [-1, 0, 1]}.get(wrong, [-1, 0, 0])
    plan = RecurrencePlan.make(segments._replace(parent=np.array(parent)), device=DEVICE)
    with use_backend("triton"):
        out, _ = tree_recurrence(*(x.to(DEVICE, torch.float32) for x in given), plan)
    off = (out.cpu().double() - by_token(given, case.parent_rows(), 1.0)).abs().max()
    assert bool(off > 0.1) == (wrong != "nothing")


# -- convolutions


@pytest.mark.parametrize(("taps", "width", "biased"), some([(4, 20, True), (1, 130, False), (3, 513, True)], [0]))
def test_convolutions_follow_the_path(taps: int, width: int, biased: bool) -> None:
    """Segments shorter than the window, and inputs given before some roots; gradients of all."""
    end, _, parents = random_trees(30, 2, close=0.6)
    segments = find_segments(end.numpy())
    roots = segments.parent < 0
    assert roots.sum() == 1
    plan = RecurrencePlan.make(
        segments._replace(initial=np.where(roots, 0, -1)), ends=np.array([0, 3]), states=1, device=DEVICE
    )
    torch.manual_seed(0)
    shapes = (30, width), (width, taps), (1, taps - 1, width), (width,)
    x, w, history, bias = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    before = list(range(-1, taps - 2))  # the history is a path above the root
    joined = convolved(torch.cat([history[0], x]), w, before + [taps - 2 if p < 0 else p + taps - 1 for p in parents])
    right = joined[taps - 1 :] + (bias if biased else 0)
    asked = [x, w, *([history] if taps > 1 else []), *([bias] if biased else [])]
    truth = [right, *torch.autograd.grad(right, asked, upstream(right))]
    single = [t.detach().to(DEVICE, torch.float32).requires_grad_() for t in asked]
    of = dict(zip(map(id, asked), single, strict=True))
    given = of.get(id(history), torch.empty(1, 0, width, device=DEVICE))
    with use_backend("triton"):
        out, _ = tree_convolution(of[id(x)], of[id(w)], of.get(id(bias)), plan, history=given)
        grads = torch.autograd.grad(out, single, upstream(out))
    for mine, other in zip((out, *grads), truth, strict=True):
        torch.testing.assert_close(mine.detach().cpu().double(), other.detach(), rtol=1e-5, atol=1e-5)


def test_a_convolution_depends_on_its_path_alone() -> None:
    """Bit by bit, when siblings change places and with a neighbour; gradients of inputs with a neighbour."""
    x, w = torch.randn(9, 6), torch.randn(6, 4)

    def run(order: list[int], ends: list[int], ours: slice) -> tuple[Tensor, Tensor]:
        rows = x[order].to(DEVICE).requires_grad_()
        with use_backend("triton"):
            out, _ = tree_convolution(
                rows, w.to(DEVICE), None, RecurrencePlan.make(find_segments(np.array(ends)), device=DEVICE)
            )
            (grad,) = torch.autograd.grad(out[ours], rows, upstream(out[ours]))
        return out[ours].detach(), grad[ours]

    first, grad = run([0, 1, 2, 3, 4, 5], [6, 6, 4, 4, 6, 6], slice(0, 6))
    moved, _ = run([0, 1, 4, 5, 2, 3], [6, 6, 4, 4, 6, 6], slice(0, 6))
    assert torch.equal(first, moved[[0, 1, 4, 5, 2, 3]])
    beside, again = run([6, 7, 8, 0, 1, 2, 3, 4, 5], [3, 3, 3, 9, 9, 7, 7, 9, 9], slice(3, 9))
    assert torch.equal(first, beside)
    assert torch.equal(grad, again)


# -- the choice of the backend


def test_the_backend_is_chosen_as_for_other_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference runs on a CPU, Triton where it is named; its backward pass runs on it in another thread too."""
    called = list[str]()
    for name in ("tree_recurrence_forward", "tree_recurrence_backward"):
        original = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *a, f=original, n=name: called.append(n) or f(*a))
    case = Case("delta", (2,), (-1,))

    def run(dtype: torch.dtype, named: Any = None, where: Any = "cpu") -> list[str]:
        given = [x.to(where, dtype).requires_grad_() for x in case.inputs()]
        plan = RecurrencePlan.make(find_segments(case.subtree_end()), device=where)
        with use_backend(named) if named else nullcontext():
            out, _ = tree_recurrence(*given, plan)
        worker = threading.Thread(target=out.sum().backward)
        worker.start()
        worker.join()
        assert all(x.grad is not None for x in given)
        found, called[:] = list(called), []
        return found

    both = ["tree_recurrence_forward", "tree_recurrence_backward"]
    assert run(torch.float32) == []
    assert run(torch.float32, "triton", DEVICE) == both
    monkeypatch.setenv("ROLLTREE_BACKEND", "triton")
    assert run(torch.float32, where=DEVICE) == both
    assert run(torch.float64, where=DEVICE) == []  # the definition alone has it
    monkeypatch.setenv("ROLLTREE_BACKEND", "reference")
    assert run(torch.float32) == []
    monkeypatch.delenv("ROLLTREE_BACKEND")
    plan = case.plan()
    with use_backend("cuda"), pytest.raises(BackendError, match="tree_recurrence has no 'cuda' backend"):
        tree_recurrence(*(x.to(DEVICE, torch.float32) for x in case.inputs()), plan)
    with use_backend("cuda"), pytest.raises(BackendError, match="tree_convolution has no 'cuda' backend"):
        tree_convolution(torch.zeros(2, 3, device=DEVICE), torch.zeros(3, 2, device=DEVICE), None, plan)
    table = op._FORWARD
    monkeypatch.setattr(op.dispatch, "_unusable", lambda name, device: None)
    assert op.dispatch.choose("tree_recurrence", table, torch.device("cuda")) is table["triton"]
    assert op.dispatch.choose("tree_recurrence", table, torch.device("cpu")) is table["cpu"]
