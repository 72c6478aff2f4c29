"""The table of rows: its columns as numpy names their types, tokens that are pushed, and what is kept between steps."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rolltree.engine import DraftConfig, SamplingParams
from rolltree.engine.rollout.branch import Branch, Node, Request
from rolltree.engine.rollout.native._host import push_tokens
from rolltree.engine.rollout.native.draws import DTYPES, Draws
from rolltree.engine.rollout.native.rows import RowTable, Sampled, element_type
from rolltree.engine.rollout.native.step_buffer import StepVector
from rolltree.engine.rollout.records import sample_dtype

from .test_native_engine import PROMPTS, TREEPO, engine


def test_element_types_before_and_after_numpy_2_5() -> None:
    before = types.GenericAlias(np.ndarray, (tuple[int, ...], types.GenericAlias(np.dtype, (np.int64,))))
    after = types.GenericAlias(np.ndarray, (np.int64,))
    for array in (before, after, npt.NDArray[np.int64]):
        assert element_type(array) is np.int64


def table(*tops: int) -> RowTable:
    """A row for each number of likely tokens that are kept; each has sampled three tokens before."""
    rows = RowTable(capacity=2, width=2)
    request: Any = Request(0, np.zeros(1, np.int32), 0, SamplingParams(), TREEPO)
    for top in tops:
        branch = Branch(request, (), Node(None, 0), 5, 0, (0,))
        rows.add(branch, position=9, length=2, segment_tokens=1, top=top, keeps=top > 0)
    return rows


def sampled(tokens: list[int], top: int = 0) -> Sampled:
    n = len(tokens)
    numbers = [np.arange(n, dtype=np.float32) + 100 * i for i in (1, 2, 3)]
    tops: list[Any] = []
    if top:
        kept = np.empty(n, object)
        kept[:] = [np.arange(i + 1, dtype=np.int32) for i in range(n)]
        tops = [
            np.arange(n * top).reshape(n, top),
            *np.random.default_rng(n).random((2, n, top)).astype(np.float32),
            kept,
        ]
    return Sampled(np.array(tokens), *numbers, *tops)


@pytest.mark.parametrize("top", [0, 2])
def test_tokens_are_pushed_to_their_rows(top: int) -> None:
    """Several to a row, which grows; a failed one changes nothing; each is where `sampled` reads it."""
    rows = table(top, 0, top)
    rows.push(np.array([2, 0, 1]), np.zeros(3, np.int64), sampled([7, 8, -1], top), version=4)
    rows.push(np.array([0, 0, 0, 2]), np.array([0, 1, 2, 0]), sampled([1, 2, 3, 4], top), version=5)
    first, second, third = (rows.sampled(slot) for slot in range(3))
    assert first["token"].tolist() == [8, 1, 2, 3]
    assert second["token"].tolist() == []
    assert third["token"].tolist() == [7, 4]
    assert first["logprob"].tolist() == [101, 100, 101, 102]
    assert first["raw_logprob"].tolist() == [201, 200, 201, 202]
    assert third["entropy"].tolist() == [300, 303]
    assert first["version"].tolist() == [4, 5, 5, 5]
    for name, begin in (("fill", 0), ("position", 9), ("length", 2), ("segment_tokens", 1)):
        assert getattr(rows, name)[:3].tolist() == [begin + 4, begin, begin + 2]
    assert rows.last_token[:3].tolist() == [3, 0, 4]
    if top:
        assert first["top_id"].tolist() == [[2, 3], [0, 1], [2, 3], [4, 5]]
        assert third["top_id"].tolist() == [[0, 1], [6, 7]]
        branch = rows.branch[0]
        assert branch is not None
        assert [len(branch.request.kept[i - 1]) for i in first["kept"].tolist()] == [2, 1, 2, 3]
        assert [len(branch.request.kept[i - 1]) for i in third["kept"].tolist()] == [1, 4]


def test_wrong_tokens_to_push() -> None:
    rows, one = np.zeros(2, np.dtype("5i8")), np.zeros(1)
    right: list[Any] = [rows.view("V40").ravel(), [0, 8, 16, 24, 32], np.zeros((2, 3), sample_dtype(0)), *[one] * 6, 0]
    assert push_tokens(*right)
    for place, value, message in (
        (3, np.array([2]), "no slot 2"),
        (3, np.array([-1]), "no slot -1"),
        (4, np.zeros(2), "one length"),
        (5, np.zeros(2), "its token and its numbers"),
        (2, np.zeros((3, 3), sample_dtype(0)), "contiguous"),
        (2, np.zeros((2, 3), np.int64), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            push_tokens(*right[:place], value, *right[place + 1 :])
    assert not push_tokens(*right[:4], np.array([2]), *right[5:])  # no room behind the one there is


@pytest.mark.parametrize("drafts", [None, DraftConfig(rows=4096, remembered=4096)])
def test_what_is_kept_from_step_to_step_is_what_would_be_made_anew(
    monkeypatch: pytest.MonkeyPatch, drafts: DraftConfig | None
) -> None:
    """Forks, rewinds, rows that end and pages that run out; rows that draw alike and otherwise."""
    draws_of, vector_of, kept = Draws.of, StepVector.of, [0, 0]

    def same_draws(step: Any, rows: Any, samples: Any, seeds: Any, before: Any = None) -> Draws:
        found, fresh = draws_of(step, rows, samples, seeds, before), draws_of(step, rows, samples, seeds)
        kept[0] += before is not None and found.columns["seed"] is before.columns["seed"]
        for name in DTYPES:
            np.testing.assert_array_equal(found.columns[name], fresh.columns[name], err_msg=name)
        for name in ("slots", "offset", "head_row", "constrained", "keeping"):
            np.testing.assert_array_equal(getattr(found, name), getattr(fresh, name), err_msg=name)
        assert (found.filters, found.most_top) == (fresh.filters, fresh.most_top)
        return found

    def same_vector(*args: Any, before: Any = None, **kwargs: Any) -> StepVector:
        found, fresh = vector_of(*args, before=before, **kwargs), vector_of(*args, **kwargs)
        kept[1] += found is before
        assert found.positions == fresh.positions
        for name, column in fresh.plan.tensors().items():
            used = int(fresh.plan.page_indptr[-1]) if name == "page_ids" else len(column)
            assert found.view(name)[:used].tolist() == column[:used].tolist(), name
        for name in ("input_ids", "slots", "sample_rows", "head_row", *DTYPES):
            assert found.view(name).tolist() == fresh.view(name).tolist(), name
        return found

    monkeypatch.setattr(Draws, "of", staticmethod(same_draws))
    monkeypatch.setattr(StepVector, "of", staticmethod(same_vector))
    native = engine(kv_tokens=160, drafts=drafts)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 7}, {"temperature": 0.5}, {"logit_bias": {5: 4.0}}]
    params = [SamplingParams(n=4, max_new_tokens=20, **kinds[i % 4]) for i in range(len(PROMPTS))]
    native.generate(PROMPTS, params, TREEPO)
    assert native.stats["preemptions"] > 0
    assert min(kept) > 10
