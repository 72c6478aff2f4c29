"""Drafts change the speed and never a token: right, wrong and random ones against none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.rollout import NativeEngine, SamplingParams
from rolltree.engine.rollout.rows import RowTable

from .test_native_engine import PROMPTS, TREEPO, assert_all_free, engine, responses


class Told:
    """Drafts what it is told of each branch: the right tokens, made wrong with some probability.

    Args:
        known: the branch's response by (prompt, seed).
    """

    def __init__(self, known: dict[tuple[bytes, int], list[int]], wrong: float, most: int = 7, seed: int = 0) -> None:
        self.known, self.wrong, self.most = known, wrong, most
        self.rng = np.random.default_rng(seed)

    def propose(self, rows: RowTable, slots: np.ndarray, others: int, room: int) -> tuple[np.ndarray, np.ndarray]:
        drafts = []
        for slot in slots.tolist():
            branch = rows.branch[slot]
            assert branch is not None
            draft = self.known.get((branch.request.prompt.tobytes(), int(rows.seed[slot])), [])
            draft = draft[int(rows.length[slot]) :][: self.rng.integers(self.most + 1)]
            off = self.rng.random(len(draft)) < self.wrong
            drafts.append(np.where(off, self.rng.integers(0, 211, len(draft)), draft).astype(np.int64))
        return np.array([len(d) for d in drafts]), np.concatenate(drafts)

    def sampled(
        self, rows: RowTable, slots: np.ndarray, offset: np.ndarray, token: np.ndarray, version: int
    ) -> None: ...

    def took(self, queries: int, seconds: float) -> None: ...


class Watched(Told):
    """Drafts nothing, and learns what each branch samples."""

    def __init__(self) -> None:
        super().__init__({}, 0.0)

    def sampled(self, rows: RowTable, slots: np.ndarray, offset: np.ndarray, token: np.ndarray, version: int) -> None:
        for slot in slots.tolist():
            branch = rows.branch[slot]
            assert branch is not None
            above = branch.node.parent.column("token") if branch.node.parent else np.zeros(0, np.int32)
            path = np.concatenate([above, rows.records["token"][slot, : rows.fill[slot]]])
            key = branch.request.prompt.tobytes(), int(rows.seed[slot])
            self.known[key] = path[len(branch.request.prompt) :].tolist()


def drafting(native: NativeEngine, drafter: Any) -> NativeEngine:
    native.loop.drafter = drafter
    return native


def assert_same(trees: Sequence[TokenTree], expected: Sequence[TokenTree], atol: float = 2e-6) -> None:
    for tree, other in zip(trees, expected, strict=True):
        assert responses(tree) == responses(other)
        assert tree.status.tolist() == other.status.tolist()
        np.testing.assert_allclose(tree.behaviour_logprob, other.behaviour_logprob, rtol=0, atol=atol)


@pytest.mark.parametrize("program", ["flat", TREEPO], ids=["flat", "treepo"])
@pytest.mark.parametrize("sizes", [{}, {"kv_tokens": 120}], ids=["roomy", "tight"])
def test_right_wrong_and_mixed_drafts_sample_the_same(program: Any, sizes: dict[str, int]) -> None:
    params = SamplingParams(n=4, max_new_tokens=24)
    watched = Watched()
    expected = drafting(engine(), watched).generate(PROMPTS, params, program)
    steps = {}
    for wrong in (0.0, 0.3, 1.0):
        native = drafting(engine(**sizes), Told(watched.known, wrong))
        assert_same(native.generate(PROMPTS, params, program), expected)
        assert native.stats["drafted_tokens"] > 0
        steps[wrong] = native.stats["steps"]
        if wrong == 0.0:
            assert native.stats["accepted_tokens"] == native.stats["drafted_tokens"]
        assert_all_free(native)
    assert steps[0.0] < steps[0.3] < steps[1.0]
