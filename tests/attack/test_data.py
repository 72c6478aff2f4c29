"""The attack on what trees are built from and how responses are asked for: kept exactly, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rolltree.engine import SamplingParams, TokenTree, pack
from rolltree.engine.batches.cost import CostModel
from rolltree.engine.batches.distribute import distribute
from rolltree.engine.data.segment import LeafStatus, Segment

from ..support.arguments import refusal

PHASES = (Phase.explicit, Phase.generate)
TOKENS = st.lists(st.integers(0, 9), max_size=6)
PROMPT = st.lists(st.integers(0, 9), min_size=1, max_size=3)

BAD_IDS: list[Any] = [
    [1.5, 2.0], [2**32 + 5], [-1], [2**31], [[1, 2], [3, 4]], [True, False], "12", ["1"], [None], [math.nan], 7,
    [1, [2, 3]], torch.ones(2), torch.ones(2, dtype=torch.int64, device="meta"), torch.tensor([2**40]), [1j], [10**30],
]  # fmt: skip
BAD_NUMBERS: list[Any] = [math.inf, -math.inf, 1e39, "1", None, [0.5, 0.5], 1j]
BAD_FLAGS: list[Any] = [[2], [0.5], "x", [None], [math.nan]]
BAD_VERSIONS: list[Any] = [1.5, 2**31, "1", True, None, math.nan, [2**40]]
BAD_STATUSES: list[Any] = [9, -1, "stop", 0.5, None, 300]
NO_LISTS: list[Any] = [7, 0.5, "ab", b"ab", {}, {0: [1]}, {1, 2}, object(), iter([[1]]), np.array(3), torch.tensor(3)]
BAD_SIZES: list[Any] = [0, -1, 2.5, math.nan, math.inf, True, "8", None]


@dataclass(frozen=True)
class Builder:
    """``right`` draws arguments, ``wrong`` lists a mistake for each of those named."""

    name: str
    right: Callable[[st.DataObject], dict[str, Any]]
    wrong: dict[str, Callable[[dict[str, Any], Any], Any]]
    mistakes: dict[str, list[Any]]
    call: Callable[..., Any]


def sequences(data: st.DataObject) -> dict[str, Any]:
    responses = data.draw(st.lists(TOKENS.filter(len), min_size=1, max_size=5))
    return {
        "prompt": data.draw(PROMPT),
        "responses": responses,
        "advantages": data.draw(st.lists(st.floats(-9, 9, width=32), min_size=len(responses), max_size=len(responses))),
        "behaviour_logprobs": [[-0.5] * len(r) for r in responses],
        "loss_masks": [[True] * len(r) for r in responses],
        "policy_version": 3,
        "statuses": [LeafStatus.STOP] * len(responses),
    }


def first(values: list[Any], bad: Any) -> list[Any]:
    return [bad, *values[1:]]


def in_first(values: list[Any], bad: Any) -> list[Any]:
    """A bad number among the first response's."""
    return [[bad, *values[0][1:]], *values[1:]]


def itself(_: Any, bad: Any) -> Any:
    return bad


def forest(**given: Any) -> Any:
    version = given.pop("policy_version")
    prompts = [given.pop("prompt")] * len(given["responses"])
    return TokenTree.forest(prompts, policy_version=[version] * len(prompts), **given)


FROM_SEQUENCES: dict[str, Any] = {
    "wrong": {"prompt": itself, "responses": first, "advantages": first, "behaviour_logprobs": in_first,
              "loss_masks": first, "policy_version": itself, "statuses": first},
    "mistakes": {"prompt": BAD_IDS, "responses": BAD_IDS, "advantages": [*BAD_NUMBERS, math.nan],
                 "behaviour_logprobs": BAD_NUMBERS, "loss_masks": BAD_FLAGS, "policy_version": BAD_VERSIONS,
                 "statuses": BAD_STATUSES},
}  # fmt: skip


def nodes(data: st.DataObject) -> dict[str, Any]:
    segments = [Segment.prompt([1, 2]), Segment.sampled([3], [-1.0]), Segment.sampled([4, 5], [-1.0, -2.0])]
    return {"parents": [-1, 0, 0], "segments": segments, "leaf_nodes": [1, 2], "statuses": [LeafStatus.STOP] * 2}


def last(values: list[Any], bad: Any) -> list[Any]:
    return [*values[:-1], bad]


def segment(data: st.DataObject) -> dict[str, Any]:
    ids = data.draw(TOKENS.filter(len))
    return {"token_ids": ids, "behaviour_logprob": -0.5, "policy_version": 1, "loss_mask": True, "origin": 1}


TREE = TokenTree.from_sequences([1, 2, 3], [[4, 5, 6], [4, 7]])
COST = CostModel(token=2.0, attention=1.0, scored=3.0)


def budget(data: st.DataObject) -> dict[str, Any]:
    return {"trees": [TREE] * 2, "max_tokens": data.draw(st.integers(6, 40))}


BUILDERS = [
    Builder("from_sequences", sequences, call=TokenTree.from_sequences, **FROM_SEQUENCES),
    Builder("forest", sequences, call=forest, **FROM_SEQUENCES),
    Builder(
        "from_nodes", nodes, {"parents": last, "leaf_nodes": last, "statuses": last, "segments": last},
        {"parents": [2, 5, -1, -2, 0.5, None, "0"], "leaf_nodes": [3, -1, 2**40, 0.5, None, "1", [1]],
         "statuses": BAD_STATUSES, "segments": [None, [3], "x"]}, TokenTree.from_nodes,
    ),
    Builder(
        "Segment.make", segment,
        dict.fromkeys(("token_ids", "behaviour_logprob", "policy_version", "loss_mask"), itself),
        {"token_ids": BAD_IDS, "behaviour_logprob": [math.inf, -math.inf, 1e39, "1", None, 1j],
         "policy_version": [1.5, 2**31, "1", None, math.nan], "loss_mask": [2, 0.5, "x", None, math.nan]}, Segment.make,
    ),
    Builder("pack", budget, {"max_tokens": itself, "trees": last},
            {"max_tokens": BAD_SIZES, "trees": [None, "t", [TREE]]}, pack),
    Builder("pack, in pieces", budget, {"max_tokens": itself}, {"max_tokens": BAD_SIZES},
            lambda **given: pack(**given, in_pieces=True)),
    Builder("pack, flat", budget, {"max_tokens": itself}, {"max_tokens": BAD_SIZES},
            lambda **given: pack(**given, flat=True)),
    Builder("distribute", lambda data: budget(data) | {"ranks": 2}, {"max_tokens": itself, "ranks": itself},
            {"max_tokens": BAD_SIZES, "ranks": BAD_SIZES}, lambda **given: distribute(**given, cost=COST)),
    Builder(
        "SamplingParams", lambda data: {"n": data.draw(st.integers(1, 64))},
        dict.fromkeys(("n", "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop", "stop_token_ids",
                       "logit_bias", "allowed_token_ids", "top_logprobs", "seed"), itself),
        {"n": [*BAD_SIZES, 2**31], "temperature": [math.nan, math.inf, -1.0, "1", True, 1j],
         "top_p": [0, -0.5, 1.5, math.nan, "1", True], "top_k": [0, -1, 3_000_000_000, 2.5, True, "5"],
         "min_p": [-0.1, 1.0, math.nan, "0"], "max_new_tokens": [*BAD_SIZES, 2**31],
         "stop": ["end", [""], [3], [chr(0xD800)]],
         "stop_token_ids": [[-1], [2**31], [0.5], ["1"], [True]], "allowed_token_ids": [[], [-1], [2**31], [0.5]],
         "logit_bias": [{1: math.nan}, {1: math.inf}, {1: "2"}, {-1: 1.0}, {2**31: 1.0}, {"1": 1.0}],
         "top_logprobs": [-1, 2.5, True, "3"], "seed": [0.5, 2**64, -(2**63) - 1, True, "1", None]}, SamplingParams,
    ),
]  # fmt: skip


LISTS = [
    ("from_sequences", ("prompt", "responses", "advantages", "behaviour_logprobs", "loss_masks", "statuses")),
    ("forest", ("prompts", "responses", "advantages", "behaviour_logprobs", "loss_masks", "statuses")),
    ("from_nodes", ("parents", "segments", "leaf_nodes", "statuses")),
    ("pack", ("trees",)),
    ("distribute", ("trees",)),
]


@pytest.mark.parametrize(("of", "names"), LISTS, ids=[of for of, _ in LISTS])
def test_what_is_no_list_is_refused(of: str, names: tuple[str, ...]) -> None:
    """The wrong value replaces a whole argument, not an entry."""
    builder = next(b for b in BUILDERS if b.name == of)
    right = {
        "prompt": [1], "prompts": [[1], [1]], "responses": [[2], [3]], "advantages": [0.5, 1.0], "max_tokens": 9,
        "behaviour_logprobs": [[-1.0], [-2.0]], "loss_masks": [[True], [True]], "trees": [TREE], "ranks": 1,
        "statuses": [LeafStatus.STOP] * 2, "parents": [-1, 0, 0], "leaf_nodes": [1, 2],
        "segments": [Segment.prompt([1]), Segment.sampled([3], [-1.0]), Segment.sampled([4], [-1.0])],
    }  # fmt: skip
    call = TokenTree.forest if of == "forest" else builder.call
    given: dict[str, Any] = {name: right[name] for name in (*names, *builder.wrong) if name in right}
    if of == "forest":
        given.pop("prompt", None)
    call(**given)
    for name in names:
        for bad in NO_LISTS:
            said = refusal(lambda: call(**given | {name: bad}))  # noqa: B023
            assert name in said, (name, bad, said)


@pytest.mark.check(but=7)
@pytest.mark.parametrize("builder", BUILDERS, ids=[b.name for b in BUILDERS])
def test_wrong_arguments_are_refused(builder: Builder, cases: int) -> None:
    mistakes = [(name, bad) for name, some in builder.mistakes.items() for bad in some]

    @settings(max_examples=max(cases, len(mistakes)), phases=PHASES)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        right = builder.right(data)
        builder.call(**right)
        name, bad = data.draw(st.sampled_from(mistakes))
        refusal(lambda: builder.call(**right | {name: builder.wrong[name](right.get(name), bad)}))

    attack()


def test_sequences_come_back_as_they_were(cases: int) -> None:
    """Sequences go through lists, arrays and tensors of any integer dtype that holds them."""
    kinds = [list, np.array, torch.tensor, lambda r: np.array(r, np.uint8), lambda r: torch.tensor(r).short()]

    @settings(max_examples=cases, phases=PHASES)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        right = sequences(data)
        kind = data.draw(st.sampled_from(kinds))
        tree = TokenTree.from_sequences(**right | {"responses": [kind(r) for r in right["responses"]]})
        for found, response, advantage in zip(tree.flatten(), right["responses"], right["advantages"], strict=True):
            assert found.prompt == right["prompt"]
            assert found.response == response
            assert found.advantage == advantage
            assert (found.policy_version == 3).all()

    attack()


def test_small_budgets_end(cases: int) -> None:
    """Any budget packs or says why not; pieces cover every row once."""

    @settings(max_examples=cases, phases=PHASES)
    @given(st.data(), st.integers(1, 12))
    def attack(data: st.DataObject, most: int) -> None:
        tree = TokenTree.from_sequences(**sequences(data))
        (batch,) = pack([tree], max_tokens=most, in_pieces=True)
        pieces = [(p.begin, p.end) for p in batch.pieces] or [(0, tree.num_tokens)]
        assert [row for begin, end in pieces for row in range(begin, end)] == list(range(tree.num_tokens))
        try:
            parts = pack([tree], max_tokens=most)
        except ValueError as error:
            assert tree.path_length.max() > most, error  # noqa: PT017
        else:
            assert sum(p.num_leaves for p in parts) == tree.num_leaves
            assert all(p.num_tokens <= most for p in parts)

    attack()
