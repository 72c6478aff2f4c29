"""How much of a draft is worth its rows, how right drafts were and what of them stands, beside plain ways to say so."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rolltree.engine.rollout.native._host import (
    Acceptance,
    Drafted,
    DraftIndex,
    Fit,
    cut_drafts,
    on_path,
    up_to_end,
)

SOURCES, MATCHES, SHARES = DraftIndex.KINDS
KINDS = SOURCES * MATCHES * SHARES
GUESS, PRIOR, UNTRIED, MEMORY, MARGIN, LEAD = (0.3, 0.5, 0.7), 4.0, 16, 2000, 1.1, 0.6


def drafted(rng: np.random.Generator, branches: int, most: int = 6) -> Drafted:
    slot, count = rng.permutation(2 * branches)[:branches], rng.integers(0, most, branches)
    survival = np.concatenate([np.sort(rng.random(n, np.float32))[::-1] for n in count] or [np.zeros(0)])
    total = int(count.sum())
    return Drafted(slot, count, rng.integers(0, 3, total), rng.integers(0, KINDS, total), survival)


def known(acceptance: Acceptance, kinds: np.ndarray, right: int, wrong: int) -> None:
    """So many drafted tokens of each of the kinds."""
    kind = np.repeat(kinds, right + wrong)
    token = np.tile(np.arange(right + wrong) < right, len(kinds)).astype(np.int64)
    draft = Drafted(np.zeros(1, np.int64), np.array([len(kind)]), np.ones_like(kind), kind, np.ones(len(kind)))
    acceptance.count(draft, np.zeros(len(kind), np.int64), np.arange(len(kind)), token)


def test_rates_are_counted_by_kind_and_shared_where_little_is_known() -> None:
    rng = np.random.default_rng(0)
    acceptance = Acceptance()
    tries, hits = np.zeros((2, KINDS))
    source_tries, source_hits = np.zeros((2, SOURCES), np.int64)
    per_source = MATCHES * SHARES
    for _ in range(400):
        draft = drafted(rng, 8)
        slot, count, first = draft.slot, draft.count, np.cumsum(draft.count) - draft.count
        samples = [
            (s, j) for s in range(20) for j in range(rng.integers(0, 5))
        ]  # of other slots too, and behind a draft
        token = rng.integers(-1, 3, len(samples))
        acceptance.count(draft, *np.array(samples, np.int64).reshape(-1, 2).T, token)
        for (s, j), sampled in zip(samples, token.tolist(), strict=True):
            if sampled < 0 or s not in slot or j >= count[i := int(np.flatnonzero(slot == s)[0])]:
                continue
            kind = draft.kind[first[i] + j]
            tries[kind] += 1
            source_tries[kind // per_source] += 1
            hits[kind] += draft.token[first[i] + j] == sampled
            source_hits[kind // per_source] += draft.token[first[i] + j] == sampled
    assert acceptance.drafted.tolist() == source_tries.tolist()
    assert acceptance.right.tolist() == source_hits.tolist()
    by_kind = tries.reshape(SOURCES, MATCHES, SHARES), hits.reshape(SOURCES, MATCHES, SHARES)
    all_tries, all_hits = (counts.sum(1, keepdims=True) for counts in by_kind)
    alike = (all_hits + PRIOR * np.array(GUESS)) / (all_tries + PRIOR)
    np.testing.assert_allclose(
        acceptance.rates, ((by_kind[1] + PRIOR * alike) / (by_kind[0] + PRIOR)).ravel(), rtol=1e-6
    )
    assert min(tries) > UNTRIED
    assert (acceptance.limits > MEMORY).all()


def test_what_was_counted_long_ago_is_forgotten_and_what_is_new_is_limited() -> None:
    acceptance = Acceptance()
    np.testing.assert_allclose(acceptance.rates.reshape(-1, SHARES), np.tile(GUESS, (KINDS // SHARES, 1)), rtol=1e-6)
    assert (acceptance.limits == UNTRIED).all()
    known(acceptance, np.array([7]), UNTRIED, 0)
    assert np.flatnonzero(acceptance.limits != UNTRIED).tolist() == [7]
    known(acceptance, np.array([7]), MEMORY, 0)  # then their number is halved
    known(acceptance, np.array([7]), 0, 500)
    right, tries = (UNTRIED + MEMORY) / 2, (UNTRIED + MEMORY) / 2 + 500
    assert acceptance.rates[7] == pytest.approx(right / tries, rel=5e-3)
    assert acceptance.right.sum() == UNTRIED + MEMORY


@pytest.mark.parametrize("seed", range(200))
def test_the_choice_gives_the_most_tokens_a_second(seed: int) -> None:
    rng = np.random.default_rng(seed)
    branches, others, room = int(rng.integers(1, 9)), int(rng.integers(0, 9)), int(rng.integers(1, 40))
    fit = Fit(*rng.random(3) * (1.0, 0.1, 10 ** rng.uniform(-3, 0)))
    look, acceptance = float(rng.choice([0.0, 0.1, 1.0])), Acceptance()
    tried = np.flatnonzero(rng.random(KINDS) < 0.5)
    known(acceptance, tried, UNTRIED, 0)
    draft, length = drafted(rng, branches), rng.integers(0, 100, 2 * branches)
    if not len(draft):
        return
    slot, count, token, kind, survival = draft.slot, draft.count, draft.token, draft.kind, draft.survival
    saved = acceptance.choose(draft, length, fit, others, room, look)

    owner, first = np.repeat(np.arange(branches), count), np.cumsum(count) - count
    plain = fit.seconds(branches, branches + others)
    share = branches * fit.row / plain
    worth = share + (1 - share) * (LEAD + (1 - LEAD) / branches) * np.count_nonzero(count) / branches
    value = survival.astype(np.float64) * (1 + length[slot] / max(length[slot].max(), 1))[owner]
    ranked = np.argsort(-value, kind="stable")[:room]
    sampled = branches + worth * np.cumsum(survival[ranked].astype(np.float64))
    took = np.array([fit.seconds(branches, branches + others + i + 1) for i in range(len(ranked))])
    best = int(np.argmax(sampled / (took + look)))
    assert saved == pytest.approx(plain * sampled[best] / branches / MARGIN - took[best])
    if saved > look:
        chosen = np.sort(ranked[: best + 1])
    else:
        new = ~np.isin(kind, tried)
        chosen = np.array([i for i in range(len(token)) if new[first[owner[i]] : i + 1].all()][:room], np.int64)
    assert draft.count.tolist() == np.bincount(owner[chosen], minlength=branches).tolist()
    assert draft.token.tolist() == token[chosen].tolist()
    assert draft.kind.tolist() == kind[chosen].tolist()
    assert draft.survival.tolist() == survival[chosen].tolist()


@pytest.mark.parametrize("seed", range(50))
def test_what_of_a_draft_stands(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 6, int(rng.integers(0, 6)))
    tokens, ends = rng.integers(0, 9, counts.sum()), rng.random(counts.sum()) < 0.2
    most, room = rng.integers(-1, 6, len(counts)), int(rng.integers(0, 20))
    kept: list[list[int]] = []
    begin = np.cumsum(counts) - counts
    for b, n, limit in zip(begin.tolist(), counts.tolist(), most.tolist(), strict=True):
        kept.append([])
        for i in range(b, b + n):
            if len(kept[-1]) >= limit or sum(map(len, kept)) == room or ends[i]:
                break
            kept[-1].append(int(tokens[i]))
    count, token = cut_drafts(counts, tokens, ends, most, room)
    assert count.tolist() == [len(each) for each in kept]
    assert token.tolist() == list(itertools.chain(*kept))

    # samples of a step: a branch's first, and one behind each of its drafted tokens
    offset = np.concatenate([np.arange(n + 1) for n in counts] or [np.zeros(0, np.int64)])
    first = np.arange(len(offset)) - offset
    token, behind, ends = (
        rng.integers(0, 2, len(offset)),
        rng.integers(0, 2, len(offset)),
        rng.random(len(offset)) < 0.3,
    )
    right = [all(token[j - 1] == behind[j] for j in range(first[i] + 1, i + 1)) for i in range(len(offset))]
    assert on_path(token, behind, offset).tolist() == right
    assert up_to_end(ends, offset).tolist() == [not ends[first[i] : i].any() for i in range(len(offset))]


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    ones, two = np.ones(1, np.int64), np.ones(2, np.int64)
    with pytest.raises(ValueError, match="a slot and a count for each branch"):
        Drafted(ones, two, two, two, np.ones(2))
    with pytest.raises(ValueError, match="a kind and a survival for each token"):
        Drafted(ones, ones, ones, KINDS * ones, np.ones(1))
    with pytest.raises(ValueError, match="as many tokens as the counts"):
        cut_drafts(two, ones, ones, two, 4)
    with pytest.raises(ValueError, match="Every slot needs its columns"):
        Acceptance().choose(Drafted(4 * ones, ones, ones, ones, np.ones(1)), two, Fit(1, 0, 1), 0, 1, 0.0)
    with pytest.raises(ValueError, match="one length"):
        on_path(two, ones, two)
