"""The first epoch of the benchmark of drafts."""

from __future__ import annotations

from rolltree.bench.runs.speculation import new_prompts


def test_first_epochs_have_prompts_of_their_own() -> None:
    """However many are timed: none is empty, none repeats an earlier one."""
    seen = [tuple(new_prompts([list(range(1000, 1064))], number)[0]) for number in range(2000)]
    assert len(set(seen)) == len(seen)
    assert {len(prompt) for prompt in seen} == set(range(34, 66))
