"""Parts of a text are found among its tokens, whatever way the text is cut into them."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

from rolltree.engine.data.characters import token_that_completes, tokens_between

TEXTS = [
    "<a>one</a> two <a>three</a>",
    "\u00e9<a>\U0001f600</a>\U0001f600<a>",
    "<a></a><a>\u4e2d\u6587</a>",
    "<a>never ends, </ a>",
    "nothing </a> begins",
    "<a>\u00e9",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("begin", "end"), [("<a>", "</a>"), ("", "</a>"), ("<a>", ""), ("a>", "a>")])
def test_a_token_is_between_if_one_of_its_bytes_is(text, begin, end):
    pattern = {"": f"\\A(.*?)(?:{end}|\\Z)"}.get(begin, f"{begin}(.*?)(?:{end or '$^'}|\\Z)")
    spans = [match.span(1) for match in re.finditer(pattern, text, re.DOTALL)]
    inside = [any(a <= i < b for a, b in spans) for i, char in enumerate(text) for _ in char.encode()]
    rng = np.random.default_rng(len(text))
    every = text.encode()
    for _ in range(30):
        cuts = [0, *np.flatnonzero(rng.random(max(len(every) - 1, 0)) < rng.random()) + 1, len(every)]
        pieces = [every[a:b] for a, b in pairwise(cuts)] if every else []
        want = [any(inside[a:b]) for a, b in pairwise(cuts)] if every else []

        def decode(ids, pieces=pieces):
            return b"".join(pieces[i] for i in ids).decode("utf-8", "replace")

        found = np.zeros(len(pieces), bool)
        for part in tokens_between(np.arange(len(pieces)), begin, end, decode):
            found[part] = True
        assert found.tolist() == want, (pieces, found)


def test_the_token_that_completes_a_text():
    words = ["", "one", " two", ""]
    decode = lambda ids: "".join(words[i] for i in ids)  # noqa: E731
    assert [token_that_completes(np.arange(4), end, decode) for end in (1, 3, 4, 7, 9)] == [1, 1, 2, 2, 3]
