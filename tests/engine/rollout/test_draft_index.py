"""The index of texts against a search through all of them, its bound on memory, and its noise against the sampler's."""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.rollout.native._host import DraftIndex
from rolltree.kernels import sample_tokens
from rolltree.kernels.sampling.reference import uniforms

LONG, SHORT, SHARED = 6, 2, 5  # tokens of context
FEW = 4
Text = tuple[int, list[int], list[int]]  # scope, context before it, its own tokens


def propose(
    index: DraftIndex,
    slot: int,
    most: int,
    *,
    seed: int = 0,
    step: int = 0,
    greedy: bool = True,
    room: int | None = None,
) -> list[int]:
    """Return the tokens drafted for a slot whose segment has ``room`` tokens left after the next one."""
    end = step + 1 + (most if room is None else room)
    ends, length, forks, own = (np.full(slot + 1, value) for value in (end, step, 0, seed))
    temperature = np.full(slot + 1, 0.0 if greedy else 1.0, np.float32)
    count, token = index.propose(np.array([slot]), ends, length, forks, own, temperature, most)
    assert count.tolist() == [len(token)]
    tokens: list[int] = token.tolist()
    return tokens


class Searched:
    """All results that the index must find: every place of every text, the latest written first."""

    def __init__(self, written: list[tuple[int, list[int], int]], vocabulary: int) -> None:
        self.written = written  # text, what stands before, token; in order of writing
        self.vocabulary = vocabulary

    def places(self, texts: list[Text], scope: int, context: list[int], found: list[list[int]]) -> None:
        for order, across in ((LONG, False), (SHORT, False), (SHARED, True)):
            if len(context) < order or (found if across else len(found) >= FEW):
                continue
            for at in range(len(self.written) - 1, -1, -1):
                text, before, _ = self.written[at]
                if not across and texts[text][0] != scope:
                    continue
                agrees = 0
                while agrees < min(len(before), len(context)) and before[-1 - agrees] == context[-1 - agrees]:
                    agrees += 1
                if agrees >= order and at not in [place for place, _ in found]:
                    found.append([at, min(agrees, DraftIndex.CONTEXT)])

    def draft(self, texts: list[Text], own: int, most: int, seed: int, step: int, greedy: bool) -> list[int]:
        scope, before, tokens = texts[own]
        context = [*before, *tokens][-DraftIndex.CONTEXT :]
        following = {}
        last: dict[int, int] = {}
        for at, (text, _, _) in enumerate(self.written):
            if text in last:
                following[last[text]] = at
            last[text] = at
        drafted: list[int] = []
        found: list[list[int]] = []
        for j in range(most):
            if len(found) < FEW:
                self.places(texts, scope, context, found)
            if not found:
                break
            votes: dict[int, float] = {}
            for at, agrees in found:
                token = self.written[at][2]
                votes[token] = votes.get(token, 0.0) + 1.5 ** min(agrees, 16)
            if not greedy:
                t = uniforms(torch.tensor([seed]), torch.tensor([step + j]), self.vocabulary)[0].double().numpy()
                votes = {token: vote / -np.log1p(-t[token]) for token, vote in votes.items()}
            won = max(votes, key=lambda token: votes[token])
            drafted.append(won)
            found = [
                [following[at], min(agrees + 1, DraftIndex.CONTEXT)]
                for at, agrees in found
                if self.written[at][2] == won and at in following
            ]
            context.append(won)
        return drafted


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12), st.integers(1, 40)), min_size=1, max_size=12),
    alphabet=st.integers(4, 9),
    noise=st.integers(0, 3),
    greedy=st.booleans(),
)
def test_drafts_are_those_of_a_search_through_all_texts(
    events: list[tuple[int, int, int]], alphabet: int, noise: int, greedy: bool
) -> None:
    """Texts repeat parts of each other; two scopes, branches that write in turns, and texts that are added at once."""
    rng = np.random.default_rng(noise)
    index, texts, written = DraftIndex(1 << 18), [], []
    slots: dict[int, int] = {}

    def write(text: int, tokens: list[int]) -> None:
        for token in tokens:
            _, before, own = texts[text]
            written.append((text, [*before, *own], token))
            own.append(token)

    for pick, copied, length in events:
        source = [*texts[pick % len(texts)][1], *texts[pick % len(texts)][2]] if texts else []
        tokens = [*source[copied : copied + length // 2], *rng.integers(0, alphabet, length // 2 + 1).tolist()]
        if pick in slots and rng.random() < 0.6:
            index.append(np.full(len(tokens), pick), tokens)
            write(slots[pick], tokens)
            continue
        before = source[: rng.integers(0, len(source) + 1)][-DraftIndex.CONTEXT :]
        texts.append((pick % 2, before, []))
        if rng.random() < 0.3:
            index.add(pick % 2, before, tokens)
        else:
            slots[pick] = len(texts) - 1
            index.begin([pick], pick % 2, [len(texts)], 0, before)
            index.append(np.full(len(tokens), pick), tokens)
        write(len(texts) - 1, tokens)
        index.check()
    assert index.tokens == sum(len(before) + len(own) for _, before, own in texts)
    chains = Counter((texts[text][0], *before[-SHORT:]) for text, before, _ in written)
    few = max(chains.values()) <= DraftIndex.WALK  # else the index looks at the latest places only
    for slot, text in slots.items():
        drafted = propose(index, slot, 8, seed=noise, step=5, greedy=greedy)
        expected = Searched(written, alphabet).draft(texts, text, 8, noise, 5, greedy)
        if few:
            assert drafted == expected
        else:
            assert bool(drafted) <= bool(expected)


def test_long_texts_that_are_copied_are_drafted_to_their_end() -> None:
    """The copies go over many blocks, from the same scope and another one, to the limit and to the segment's end."""
    rng = np.random.default_rng(0)
    earlier = rng.integers(0, 5000, 300).tolist()
    for scope in (7, 8):
        index = DraftIndex(1 << 12)
        index.begin([0], 7, [1], 0, [])
        index.append(np.zeros(300, np.int64), earlier)
        index.begin([3], scope, [2], 0, [])
        index.append(np.full(6, 3), earlier[10:16])
        assert propose(index, 3, 400) == earlier[16:]
        assert propose(index, 3, 9, room=400) == earlier[16:25]
        assert propose(index, 3, 400, room=5) == earlier[16:21]
        assert propose(index, 3, 400, room=0) == propose(index, 3, 400, room=-1) == []
        index.check()


def test_what_branches_sampled_is_appended_from_their_records() -> None:
    """Records that stand as expected are written; others are named: another branch in the slot, tokens that came
    in between, a fork to come."""
    rng = np.random.default_rng(0)
    index, one_by_one = DraftIndex(1 << 12), DraftIndex(1 << 12)
    branch, position = np.array([10, 11, 12, 13]), np.array([4, 7, 2, 5])
    forks, fill = np.zeros((2, 4), np.int64)
    records = np.zeros((4, 200), np.dtype([("token", np.int32), ("logprob", np.float32)]))
    for slot in (0, 1, 2):
        for each in (index, one_by_one):
            each.begin([slot], 0, [int(branch[slot])], int(position[slot]), [])

    def follow(*slots: int) -> list[int]:
        return index.follow(np.array(slots), branch, position, forks, fill, records["token"])

    def sample(slot: int, *tokens: int) -> None:
        records["token"][slot, fill[slot] : fill[slot] + len(tokens)] = tokens
        fill[slot] += len(tokens)
        position[slot] += len(tokens)

    assert follow(0, 1, 2, 3) == [3]
    for step in range(60):
        for slot, count in zip((2, 0, 1), rng.integers(0, 3, 3).tolist(), strict=True):
            sample(slot, *rng.integers(0, 3, count).tolist())
        if step % 4 == 3:  # some steps at once
            for slot in (2, 0, 1):
                new = records["token"][
                    slot, fill[slot] + one_by_one.position(slot, 10 + slot) - position[slot] : fill[slot]
                ]
                one_by_one.append(np.full(len(new), slot), new)
            assert follow(2, 0, 1) == []
            for slot in (0, 1, 2):
                assert propose(index, slot, 5) == propose(one_by_one, slot, 5)
    assert index.tokens == one_by_one.tokens
    before = index.tokens
    sample(1, 2, -1)  # the second one failed
    assert follow(1) == []
    assert index.tokens == before + 1
    branch[1] = 14
    fill[0] = 1  # a node of its own, behind two tokens of somebody else
    position += [3, 1, 0, 0]
    sample(2, 1)
    forks[2] = 1
    assert follow(0, 1, 2) == [0, 1, 2]
    assert index.tokens == before + 1
    forks[2] = 0
    assert follow(0, 1, 2) == [0, 1]
    assert index.tokens == before + 2
    assert [index.position(slot, int(branch[slot])) for slot in range(4)] == [position[0] - 3, -1, position[2], -1]
    with pytest.raises(ValueError, match="needs its columns"):
        follow(4)
    fill[2] = 201
    with pytest.raises(ValueError, match="as long as its branch has filled it"):
        follow(2)


def test_what_is_kept_is_bounded_and_the_first_begun_goes_first() -> None:
    rng = np.random.default_rng(0)
    index = DraftIndex(640)
    first = rng.integers(0, 999, 100)
    index.add(1, [], first)
    index.begin([0], 1, [1], 0, first[:10])
    assert propose(index, 0, 5) == first[10:15].tolist()
    for i in range(300):
        index.begin([int(rng.integers(5))], 1, [i], 0, rng.integers(0, 999, rng.integers(0, 50)))
        index.append(rng.integers(0, 9, 40), rng.integers(0, 999, 40))
        index.check()
        assert index.tokens <= index.capacity == 640
    index.begin([6], 1, [1], 0, first[:10])
    assert propose(index, 6, 5) == []
    index.append(np.full(2000, 6), rng.integers(0, 999, 2000))  # longer than all there is
    index.check()
    assert not index.knows(6)
    assert propose(index, 6, 5) == []
    with pytest.raises(ValueError, match="has room for"):
        DraftIndex(100)


def test_memory_is_as_stated() -> None:
    def resident() -> int:
        _, pages, mapped, *_ = (int(count) for count in Path("/proc/self/statm").read_text().split())
        return (pages - mapped) * resource.getpagesize()

    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc")
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 50, 1 << 14).astype(np.int32) for _ in range(64)]
    before = resident()
    index = DraftIndex(1 << 19)
    for i, tokens in enumerate(texts):  # twice as many as there is room for
        index.add(i, [], tokens)
    assert index.tokens > 0.9 * index.capacity
    assert resident() - before < 1.1 * DraftIndex.BYTES_A_TOKEN * index.capacity + (1 << 20)


def test_votes_are_drawn_with_the_sampler_s_own_noise() -> None:
    """Where the votes are as the probabilities are, nearly all drafts are right, though the likeliest token is not."""
    logits = torch.tensor([1.0, 0.9, 0.8, 0.5, 0.2, 0.0])
    n, context = 400, [90, 91, 92, 93, 94, 95, 96]

    def draw(seeds: range) -> np.ndarray:
        seed = torch.tensor(list(seeds))
        return sample_tokens(logits.expand(n, -1), temperature=1.0, seed=seed, step=torch.full((n,), 3)).token.numpy()

    earlier, later = draw(range(n)), draw(range(n, 2 * n))
    right = likeliest = 0
    for i in range(n):  # the last places are as many as are looked at
        index = DraftIndex(1 << 14)
        for token in earlier[np.arange(i, i + DraftIndex.WALK) % n].tolist():
            index.add(0, context, [token])
        index.begin([0], 0, [0], 0, context)
        right += propose(index, 0, 1, seed=n + i, step=3, greedy=False) == [later[i]]
        likeliest += propose(index, 0, 1) == [later[i]]
    assert right > 0.7 * n
    assert likeliest < 0.4 * n
