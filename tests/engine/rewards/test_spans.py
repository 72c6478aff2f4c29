"""Rewards of parts of a text reach the tokens that complete them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.rewards import RewardItem, RewardPool
from rolltree.engine.rewards.spans import put_spans
from rolltree.engine.settings import RewardConfig

WORDS = ["", "one", " two", "", " three"]  # the fourth is special and has no text

CODE = """
def judge(text, entry):
    return {"reward": 1, "length": len(text), "spans": entry["spans"]}
"""


def test_a_span_ends_with_the_token_that_completes_it() -> None:
    tree = TokenTree.from_sequences([0], [[1, 2, 3, 4], [1, 2], []])
    put_spans(
        tree, [[(0, 2, 1.0), (3, 7, 2.0), (7, 13, 4.0), (8, 12, 8.0)], [(0, 7, 16.0)], []],
        lambda ids: "".join(WORDS[i] for i in ids),
    )  # fmt: skip
    np.testing.assert_array_equal(tree.token_reward, [1.0, 2.0, np.nan, 12.0, np.nan, 16.0])


def test_verifiers_answer_with_spans(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    given = [[(0, 2, 0.5)], [], [(1, 4, 1.0)], [(0, 1, float("inf"))], "none"]
    with RewardPool(RewardConfig(verifier=f"{tmp_path}/mine.py:judge", workers=1)) as pool:
        found = pool.score([RewardItem("abc", {"spans": spans}) for spans in given])
    assert [(r.value, r.named, r.spans) for r in found[:2]] == [
        (1.0, {"length": 3.0}, [[0, 2, 0.5]]),
        (1.0, {"length": 3.0}, []),
    ]
    assert [r.reason is None for r in found] == [True, True, False, False, False]
    assert "the span (1, 4) is not within a text of 3 characters" in str(found[2].reason)
    assert "inf, which is not finite in fp32" in str(found[3].reason)
