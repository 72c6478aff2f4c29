"""Programs that look at segments of independent responses: probes of their ends, and responses that are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolltree.engine.data.segment import LeafStatus, Origin
from rolltree.engine.programs import EarlyStop, Flat, Foresee, PrefixValueProbe, make_program
from rolltree.engine.programs.early_stop import RULES
from rolltree.engine.rollout import SamplingParams

from ..rollout.test_native_engine import PROMPTS, assert_all_free
from .test_programs import engine, text


def test_every_segment_end_but_the_last_is_probed_by_short_answers() -> None:
    ask, params = [50, 51], {"max_new_tokens": 40, "temperature": 0.8, "ignore_eos": True}
    program = PrefixValueProbe(2, segment_tokens=12, stop=[text(20)], ask=text(*ask), answer_tokens=5)
    (tree,) = engine().generate([PROMPTS[3]], SamplingParams(n=3, logit_bias={20: 2.0}, **params), program, seeds=[8])
    leaves = tree.flatten()
    chains = [leaf.response for leaf, mine in zip(leaves, tree.trained, strict=True) if mine]
    assert [len(chain) for chain in chains] == [40] * 3
    assert any(20 in chain for chain in chains)
    places = []  # prefixes that have to be probed, twice each
    for chain in chains:
        at = [0]
        while at[-1] < 40:
            stops = [i + 1 for i in range(at[-1], min(at[-1] + 12, 40)) if chain[i] == 20]
            at.append(stops[0] if stops else min(at[-1] + 12, 40))
        places += [tuple(chain[:cut]) for cut in at[1:-1] if cut + len(ask) < 40]
    probes = []
    for leaf, mine in zip(leaves, tree.trained, strict=True):
        if not mine:
            assert not leaf.loss_mask[~np.isnan(leaf.behaviour_logprob)][-1]
            cut = next(i for i, known in enumerate(leaf.behaviour_logprob) if np.isnan(known))
            assert leaf.response[cut : cut + 2] == ask
            assert len(leaf.response) == min(cut + 2 + 5, 40)
            assert leaf.status == LeafStatus.LENGTH
            probes.append(tuple(leaf.response[:cut]))
    assert sorted(probes) == sorted([(), *places] * 2)
    assert any(20 in leaf.response[-5:] for leaf, mine in zip(leaves, tree.trained, strict=True) if not mine)


def test_free_probes_of_steps_go_on_to_their_end() -> None:
    program = PrefixValueProbe(1, segment_tokens=0, stop=[text(20)], ask="", answer_tokens=0)
    params = SamplingParams(n=2, max_new_tokens=30, temperature=0.8, ignore_eos=True, logit_bias={20: 2.0})
    (tree,) = engine().generate([PROMPTS[3]], params, program, seeds=[8])
    assert (tree.origin != Origin.INJECTED).all()
    assert {len(leaf.response) for leaf in tree.flatten()} == {30}
    chains = [leaf.response for leaf, mine in zip(tree.flatten(), tree.trained, strict=True) if mine]
    assert (~tree.trained).sum() == 1 + sum(chain[:-1].count(20) for chain in chains)


@pytest.mark.parametrize("then", ["judge", "mask", "discard"])
def test_a_rule_cuts_responses_at_segment_ends(then: str) -> None:
    params = SamplingParams(n=6, max_new_tokens=30, temperature=0.8, ignore_eos=True)
    (plain,) = engine().generate([PROMPTS[3]], params, Flat(), seeds=[8])
    native = engine()
    program = EarlyStop("unlikely", {"below": -5.2}, segment_tokens=6, then=then)
    (tree,) = native.generate([PROMPTS[3]], params, program, seeds=[8])
    assert_all_free(native)
    want, cut = [], []  # the whole responses, each up to the first segment of low log-probs
    for leaf in plain.flatten():
        means = [np.float64(leaf.behaviour_logprob[k : k + 6]).mean() for k in range(0, 24, 6)]
        low = [6 * (k + 1) for k, mean in enumerate(means) if mean < -5.2]
        cut.append(bool(low))
        want.append(leaf.response[: low[0]] if low else leaf.response)
    assert 0 < sum(cut) < 6
    kept = [k for k in range(6) if then != "discard" or not cut[k]]
    assert [leaf.response for leaf in tree.flatten()] == [want[k] for k in kept]
    assert tree.trained.tolist() == [then == "judge" or not cut[k] for k in kept]
    assert all(leaf.status == LeafStatus.LENGTH for leaf in tree.flatten())
    lengths = [len(response) for response, its in zip(want, cut, strict=True) if its]
    assert tree.meta["counts"] == {"cut": len(lengths), "cut_tokens": sum(lengths)}
    every = EarlyStop("unlikely", {"below": 0.0}, segment_tokens=6, then=then)
    (tree,) = native.generate([PROMPTS[3]], params, every, seeds=[8])
    assert [len(leaf.response) for leaf in tree.flatten()] == [6] * 6  # a group is not left empty
    assert tree.trained.any() == (then == "judge")


def test_the_keys_of_a_cut_response_are_free_at_once() -> None:
    """A pool with room for four of six responses has to preempt none if half of them are cut."""

    def preempted(rule: Any) -> int:
        native = engine(kv_tokens=len(PROMPTS[3]) + 4 * 52)
        program = EarlyStop(segment_tokens=6, then="discard")
        program.rule = rule
        params = SamplingParams(n=6, max_new_tokens=48, ignore_eos=True)
        native.generate([PROMPTS[3]], params, program, seeds=[8])
        return native.stats["preemptions"]

    assert preempted(lambda segment, entry: False) > 0
    assert preempted(lambda segment, entry: segment.branch[0] % 2) == 0


def test_rules_of_early_stop(tmp_path: Any) -> None:
    def report(ids: list[int]) -> Any:
        return SimpleNamespace(response_ids=np.array(ids, np.int32), length=len(ids))

    assert RULES["repetition"](report([1, 2, 3, 1, 2, 3, 9, 1, 2, 3]), {}, size=3, times=3)
    assert not RULES["repetition"](report([1, 2, 3, 1, 2, 3, 9, 1, 2]), {}, size=3, times=3)
    assert not RULES["repetition"](report([1, 2]), {}, size=3, times=1)
    assert RULES["longer"](report([1] * 7), {"tokens": 3}, column="tokens")
    assert not RULES["longer"](report([1] * 6), {"tokens": 3}, column="tokens")
    with pytest.raises(ValueError, match="needs a column 'tokens'"):
        RULES["longer"](report([1]), {"tokens": "3"}, column="tokens")
    (tmp_path / "mine.py").write_text("def even(segment, entry, most=3):\n    return segment.length > most\n")
    program = make_program("early_stop", rule=f"{tmp_path}/mine.py:even", rule_options={"most": 5})
    assert isinstance(program, EarlyStop)
    assert [program.rule(report([1] * n), {}) for n in (5, 6)] == [False, True]


@pytest.mark.parametrize("cut", [0.5, 0.0])
def test_responses_longer_than_foreseen_are_cut(cut: float, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["0.5 of 30 tokens", "0.9 of 10 tokens", "none"])
    monkeypatch.setattr(Foresee, "_said", lambda self, segment: next(answers))
    params = SamplingParams(n=8, max_new_tokens=30, temperature=0.8, ignore_eos=True)
    program = Foresee(text(70, 71), members=3, cut=cut, gate=not cut)
    (tree,) = engine().generate([PROMPTS[3]], params, program, seeds=[8])
    asked = [leaf.response[:2] == [70, 71] for leaf in tree.flatten()]
    lengths = [len(leaf.response) for leaf, its in zip(tree.flatten(), asked, strict=True) if not its]
    assert lengths == [30, *[10 if cut else 30] * 4]  # half of the mean of 30 and 10
    assert sum(asked) == 3
    assert tree.meta.get("counts") == ({"cut": 4, "cut_tokens": 40} if cut else None)
