"""`TreeBatch.fields`: which log-probs an objective compares with, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from rolltree.engine import TokenTree, TreeBatch, batch_loss, pack
from rolltree.engine.train.terms import TokenTerm
from rolltree.kernels import Objective

from ..model.test_tree_equals_flat import make_models

PPO = Objective.preset("ppo")


def batch(*, proximal: bool, behaviour: bool = True, mask: bool = True) -> TreeBatch:
    tree = TokenTree.from_sequences(
        [1, 2],
        [[3, 4], [3, 5]],
        advantages=[1.0, -1.0],
        behaviour_logprobs=[[-1.0, -2.0], [-1.0, -3.0]] if behaviour else None,
        loss_masks=[[mask] * 2] * 2,
    )
    if proximal:
        tree.set("proximal_logprob", np.arange(5) / -8)
    (made,) = pack([tree], max_tokens=10)
    return made


def test_the_example_of_the_docstring_is_the_batch_of_its_tree() -> None:
    (packed,) = pack([TokenTree.from_sequences([5, 6], [[7, 8], [7, 9, 4]])], max_tokens=10)
    lines = re.findall(r"^ {8}(\w+) +(\d[\d ]*)$", TreeBatch.__doc__ or "", re.MULTILINE)
    assert len(lines) == 7
    assert {name: getattr(packed, name).tolist() for name, _ in lines} == {
        name: [int(number) for number in numbers.split()] for name, numbers in lines
    }


def test_a_name_means_the_column_of_that_name() -> None:
    given = batch(proximal=True)
    recorded = {"behaviour": [-1.0, -2.0, -3.0], "proximal": [-2 / 8, -3 / 8, -4 / 8]}
    for name, values in recorded.items():
        assert given.fields(PPO, old_logprob=name).old_logprob.tolist() == values
    tensor = torch.tensor([-5.0, -6.0, -7.0])
    assert given.fields(PPO, old_logprob=tensor).old_logprob is tensor
    assert given.fields(PPO, old_logprob=None).old_logprob is None


@pytest.mark.parametrize("name", ["behaviour", "proximal"])
def test_a_missing_column_is_an_error_and_no_other_column(name: str) -> None:
    lacks = batch(proximal=name == "behaviour", behaviour=name == "proximal")
    with pytest.raises(ValueError, match=rf"A token in the loss has no recorded log-prob \({name}_logprob\)"):
        lacks.fields(PPO, old_logprob=name)
    assert lacks.fields(Objective(surrogate="nll"), old_logprob=name).old_logprob is None  # it has no ratio
    nothing = batch(proximal=name == "behaviour", behaviour=name == "proximal", mask=False)
    nothing.fields(PPO, old_logprob=name)
    with pytest.raises(ValueError, match="must be 'behaviour', 'proximal', a tensor or None, got 'old'"):
        lacks.fields(PPO, old_logprob="old")


def test_batch_loss_compares_with_the_sampler_also_where_the_policy_was_scored() -> None:
    model, _ = make_models("qwen3")
    given = batch(proximal=True)
    loss = {
        name: float(batch_loss(model, given, PPO, normalizer=1.0, old_logprob=name).loss.detach())
        for name in ("behaviour", "proximal")
    }
    assert loss["behaviour"] == float(batch_loss(model, batch(proximal=False), PPO, normalizer=1.0).loss.detach())
    assert abs(loss["behaviour"] - loss["proximal"]) > 0.01


def test_a_term_compares_with_the_scored_policy_and_else_with_the_sampler() -> None:
    def compared(objective: str, *, on_policy: bool = False, **given: bool) -> list[float] | None:
        term = TokenTerm(Objective.preset(objective)).on(batch(**given), 1.0, on_policy=on_policy, weight=1.0)
        old = term.fields.old_logprob
        return None if old is None else old.tolist()

    assert compared("ppo", proximal=False) == [-1.0, -2.0, -3.0]
    assert compared("ppo", proximal=True) == [-0.25, -0.375, -0.5]
    assert compared("topr", proximal=True) == [-1.0, -2.0, -3.0]  # by definition against the sampler
    assert compared("ppo", proximal=True, on_policy=True) is None
