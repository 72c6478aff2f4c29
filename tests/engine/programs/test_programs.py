"""Every rollout program on a tiny model: the shape of its trees, and its leaves scored again by plain Transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine.data.segment import LeafStatus, Origin
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.programs import (
    ARPO,
    CURE,
    LATR,
    MCTS,
    PROGRAMS,
    SGRPO,
    AgentCalls,
    DemoPrefix,
    EarlyStop,
    EPTree,
    Flat,
    Foresee,
    GenerateThenVerify,
    HintLadder,
    PlanExecute,
    PrefixValueProbe,
    RolloutProgram,
    SPOChain,
    SPOTree,
    ToolTurns,
    TreePO,
    TryAgain,
    make_program,
)
from rolltree.engine.programs.treepo import _repeats
from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams

from ...support.thinned import thinned
from ..rollout.test_native_engine import MODELS, PROMPTS, assert_all_free, letters, model, responses


def text(*ids: int) -> str:
    return "".join(chr(0x100 + i) for i in ids)


def engine(name: str = "qwen3", **sizes: int) -> NativeEngine:
    return NativeEngine(model(name), letters(), EngineConfig(**{"page_size": 4, "kv_tokens": 8192, **sizes}))


def tool(call: str, context: Any) -> str:
    return text(200, 10 + len(call) % 50, 201)


def judge(response: str, context: Any) -> float:
    return float(sum(map(ord, response)) % 3 == 0)


def never(response: str, context: Any) -> float:
    return 0.0


PARAMS: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "stop_token_ids": tuple(range(12))}
TURNS: dict[str, Any] = {
    "tool": tool,
    "call_start": text(20),
    "call_end": text(21),
    "observation": text(30) + "{}",
}
CASES: dict[str, tuple[Callable[[], RolloutProgram], int]] = {
    "flat": (lambda: Flat(), 4),
    "treepo": (
        lambda: TreePO(segment_tokens=6, max_depth=6, share="likely", repetition=3, repeats=4, answer=text(40, 41)),
        8,
    ),
    "spo_tree": (lambda: SPOTree((2, 3, 2), segment_tokens=5), 12),
    "spo_chain": (lambda: SPOChain(chains=2, samples=2, cut_after=4, max_cuts=3), 1),
    "eptree": (lambda: EPTree(chains=3, forks=2, rounds=2, continuations=1), 15),
    "cure": (lambda: CURE(branches=2, candidates=5), 6),
    "latr": (lambda: LATR(tau_abs=0.02, tau_rel=0.5, lookahead=5), 6),
    "s_grpo": (lambda: SGRPO(exit_text=text(50, 51)), 5),
    "prefix_value_probe": (
        lambda: PrefixValueProbe(2, segment_tokens=8, stop=[text(20), text(21)], ask=text(50, 51), answer_tokens=5),
        3,
    ),
    "hints": (lambda: HintLadder(never, fractions=(0.3, 0.6)), 3),
    "mcts": (lambda: MCTS(judge, segment_tokens=5, branch=2, expansions=4, max_depth=6), 4),
    "tools": (lambda: ToolTurns(**TURNS, max_turns=2), 4),
    "arpo": (lambda: ARPO(**TURNS, initial=2, probe_tokens=4, probability=0.9), 6),
    "generate_then_verify": (
        lambda: GenerateThenVerify(20, verdicts=2, question=text(30, 31), stop=[text(40), text(41), text(42)]),
        6,
    ),
    "demo_prefix": (lambda: DemoPrefix(members=2), 5),
    "foresee": (lambda: Foresee(text(70, 71), members=2), 5),
    "early_stop": (lambda: EarlyStop("unlikely", {"below": -5.2}, segment_tokens=6, then="mask"), 5),
    "try_again": (lambda: TryAgain(text(72), tries=2, always=True), 4),
    "plan_execute": (lambda: PlanExecute(plans=2, plan_end=text(20)), 6),
    "agent": (lambda: AgentCalls(agent="agent.py:solve"), 4),  # each of its calls
}
CONTEXTS = [{"id": i, "solution": text(*range(60, 70))} for i in range(len(PROMPTS))]


def calling(name: str) -> Any:
    """Calls of tools are as likely as anything else."""
    return {"logit_bias": {20: 3.0, 21: 3.0}} if name in ("tools", "arpo") else {}


def run(name: str, native: NativeEngine, prompts: list[int], **params: Any) -> list[TokenTree]:
    program, n = CASES[name]
    return native.generate(
        [PROMPTS[i] for i in prompts],
        SamplingParams(n=n, **{**PARAMS, **calling(name), **params}),
        program(),
        seeds=[5 + i for i in prompts],
        contexts=[CONTEXTS[i] for i in prompts],
    )


def counted_rows(tree: TokenTree) -> Any:  # [T] bool
    """Return the sampled tokens of the responses that updates count."""
    counted = tree.response_leaves > 0
    if not tree.trained.all():
        counted[tree.path_tokens] = False
        for leaf in np.flatnonzero(tree.trained):
            counted[tree.response_rows(leaf)] = True
    return (tree.origin == Origin.SAMPLED) & counted


def rescored(tree: TokenTree, net: Any, temperature: float, bias: dict[int, float]) -> float:
    """Largest difference between behaviour log-probs and those of the whole path computed at once."""
    worst = 0.0
    for leaf in tree.flatten():
        if not leaf.loss_mask.any():
            continue
        with torch.no_grad():
            logits = net(torch.tensor([leaf.prompt + leaf.response])).logits[0, len(leaf.prompt) - 1 : -1].clone()
        for token, value in bias.items():
            logits[:, token] += value
        if temperature:
            logits /= temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(leaf.response)[:, None])[:, 0].numpy()
        worst = float(np.maximum(worst, np.abs(leaf.behaviour_logprob - expected)[leaf.loss_mask].max()))  # NaN stays
    return worst


def test_every_program_has_a_case() -> None:
    """`environment` needs a chat template (test_environment.py), `annealed` has a temperature for each token
    (tests/engine/methods/test_recipes_of_problems.py)."""
    of_temperatures = {"annealed", "many_temperatures", "greedy_baseline"}  # tests/engine/methods
    assert set(CASES) | {"environment"} | of_temperatures == set(PROGRAMS)


OTHERS = [family for family in MODELS if family != "qwen3"]
QUICK = {(name, "qwen3") for name in CASES} | set(zip(list(CASES)[::3], itertools.cycle(OTHERS)))
OF_EVERY_FAMILY = thinned(itertools.product(CASES, MODELS), lambda _, case: case in QUICK)


@pytest.mark.slow(but=12)
@pytest.mark.check(but=5)
@pytest.mark.parametrize(("name", "family"), OF_EVERY_FAMILY)
def test_leaves_are_what_the_model_says_alone_or_in_a_batch(name: str, family: str) -> None:
    everyone = list(range(len(PROMPTS)))
    native = engine(family)
    trees = run(name, native, everyone)
    for tree in trees:
        assert rescored(tree, model(family), 0.8, calling(name).get("logit_bias", {})) < 1e-5
        assert (tree.loss_mask == counted_rows(tree)).all()
        assert set(tree.temperature[tree.origin == Origin.SAMPLED]) <= {np.float32(0.8)}
    assert_all_free(native)
    if family == "qwen3":
        for i in everyone[::2]:
            assert responses(run(name, engine(family), [i])[0]) == responses(trees[i])
        tight = engine(family, kv_tokens=160)
        assert [responses(tree) for tree in run(name, tight, everyone)] == [responses(tree) for tree in trees]
        assert_all_free(tight)


@pytest.mark.check(but=2)
@pytest.mark.parametrize("name", ["flat", "treepo", "spo_tree", "cure", "eptree"])
def test_greedy_leaves_begin_as_transformers_does(name: str) -> None:
    trees = run(name, engine(), [3, 4], temperature=0.0, stop_token_ids=())
    for tree, prompt in zip(trees, PROMPTS[3:5], strict=True):
        whole = model("qwen3").generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
        for leaf in tree.flatten():
            assert leaf.response == whole[len(prompt) :][: len(leaf.response)]


def test_spo_tree_has_its_factors() -> None:
    (tree,) = run("spo_tree", engine(), [3], stop_token_ids=(), ignore_eos=True)
    depth = tree.node_position - tree.prompt_length
    assert {int(d): int((depth == d).sum()) for d in set(depth.tolist()) if d >= 0} == {0: 2, 5: 6, 10: 12}
    with pytest.raises(ValueError, match=r"makes 12 leaves; set rollout\.n to that"):
        engine().generate([PROMPTS[0]], SamplingParams(n=4), SPOTree((2, 3, 2)))


def test_spo_chain_cuts_behind_unsure_tokens() -> None:
    program = SPOChain(cut_after=2, threshold=0.5)
    likely = np.log([0.9, 0.4, 0.9, 0.3, 0.2, 0.9, 0.1, 0.9])
    assert program.cuts(likely) == [4, 7]
    assert program.cuts(likely[:7]) == [4]  # not at the end
    (tree,) = run("spo_chain", engine(), [3], stop_token_ids=(), ignore_eos=True)
    assert tree.num_leaves == 2 * (1 + (1 + 3) * 2)  # continuations from the beginning too
    assert tree.trained.sum() == 2


def test_eptree_and_cure_branch_where_the_policy_was_unsure() -> None:
    native = engine()
    for name, leaves in (("eptree", 3 * (1 + 2 * 2 * 1)), ("cure", 6)):
        for tree in run(name, native, [2, 3, 4]):
            assert tree.num_leaves == leaves
    (tree,) = run("eptree", native, [3], stop_token_ids=(), ignore_eos=True)
    program = EPTree(chains=1, forks=1, rounds=1, continuations=1)
    params = SamplingParams(n=2, max_new_tokens=30, ignore_eos=True)
    (tree,) = native.generate([PROMPTS[3]], params, program)
    chain = next(leaf for leaf in tree.flatten() if tree.flatten()[0].prompt)
    (alone,) = native.generate([PROMPTS[3]], SamplingParams(n=1, max_new_tokens=30, ignore_eos=True))
    whole = alone.flatten()[0]
    assert whole.response in responses(tree)
    least = int(whole.behaviour_logprob.argmin())
    assert all(leaf.response[:least] == whole.response[:least] for leaf in tree.flatten())
    assert chain.prompt == PROMPTS[3]


def test_s_grpo_exits_early_behind_text_that_is_not_trained_on() -> None:
    (tree,) = run("s_grpo", engine(), [3], stop_token_ids=(), ignore_eos=True)
    assert tree.num_leaves == 5
    assert (tree.origin == Origin.INJECTED).sum() == 4 * 2
    whole = next(leaf for leaf in tree.flatten() if leaf.loss_mask.all())
    for leaf in tree.flatten():
        if not leaf.loss_mask.all():
            cut = int((~leaf.loss_mask).argmax())
            assert leaf.response[:cut] == whole.response[:cut]
            assert leaf.response[cut : cut + 2] == [50, 51]


def test_hints_give_away_more_until_something_is_solved() -> None:
    (tree,) = run("hints", engine(), [3])
    assert tree.num_leaves == 3 * 3
    hints = [int((~leaf.loss_mask).sum()) for leaf in tree.flatten()]
    assert sorted(hints) == [0] * 3 + [3] * 3 + [6] * 3

    def with_a_hint(response: str, context: Any) -> float:
        return float(response.startswith(context["solution"][:3]))

    ladder = HintLadder(with_a_hint, fractions=(0.3, 0.6), keep_failed=False)
    params = SamplingParams(n=3, **PARAMS)
    (tree,) = engine().generate([PROMPTS[3]], params, ladder, contexts=CONTEXTS[:1])
    assert [int((~leaf.loss_mask).sum()) for leaf in tree.flatten()] == [3] * 3
    with pytest.raises(ValueError, match="contexts that are mappings with a 'solution'"):
        engine().generate([PROMPTS[3]], params, ladder)


def test_tools_are_called_with_what_was_written() -> None:
    seen: list[str] = []

    def remember(call: str, context: Any) -> str:
        seen.append(call)
        return text(205)

    program = ToolTurns(**{**TURNS, "tool": remember}, max_turns=2)
    params = SamplingParams(n=6, max_new_tokens=60, ignore_eos=True, logit_bias={20: 3.0, 21: 3.0})
    (tree,) = engine().generate([PROMPTS[3]], params, program)
    assert seen
    for leaf in tree.flatten():
        written = letters().decode(leaf.response)
        answers = written.count(text(30, 205))
        assert answers <= 2
        if leaf.status == LeafStatus.LENGTH and len(leaf.response) < 60:
            assert (answers, written[-1]) == (2, text(21))
    assert all(call in "".join(map(letters().decode, responses(tree))) for call in seen)


def test_arpo_fills_its_group() -> None:
    for tree in run("arpo", engine(), list(range(len(PROMPTS)))):
        assert tree.num_leaves == 6


def test_latr_prunes_what_comes_out_alike() -> None:
    program = LATR(tau_edit=0.5, tau_suffix=0.2, tau_rouge=0.5)
    same = np.arange(10, dtype=np.int32)
    assert program._similar(same, same)
    assert program._similar(same, np.concatenate([[99], same[1:]]).astype(np.int32))  # a long common suffix
    assert not program._similar(same, same + 100)
    assert not program._similar(same, same[::-1].copy())
    native = engine()
    for tree in run("latr", native, list(range(len(PROMPTS)))):
        assert tree.num_leaves == 6
    pruned = native.stats["pruned"]
    native.generate(PROMPTS, SamplingParams(n=6, **PARAMS), LATR(tau_abs=0.02, tau_rel=0.5, lookahead=5, tau_edit=2.0))
    assert native.stats["pruned"] > pruned


def test_mcts_stops_at_a_solution_and_remembers_it() -> None:
    native = engine()
    program = CASES["mcts"][0]()
    params = SamplingParams(n=4, **PARAMS)
    native.policy_version = 7
    first = native.generate(PROMPTS, params, program, contexts=CONTEXTS)
    native.policy_version = 9
    solved = {i for i in range(len(PROMPTS)) if program.shared.find(i) is not None}
    assert solved
    again = native.generate(PROMPTS, params, program, contexts=CONTEXTS, seeds=range(6))
    for i, (before, tree) in enumerate(zip(first, again, strict=True)):
        if i in solved:
            solution = program.shared.find(i)
            assert solution.token_ids in responses(before)
            leaf = next(leaf for leaf in tree.flatten() if leaf.response == solution.token_ids)
            np.testing.assert_allclose(leaf.behaviour_logprob, np.float32(solution.logprobs))
            assert leaf.loss_mask.all()
            assert (leaf.policy_version == 7).all()


def test_treepo_ends_at_answers_and_repetitions_and_shares_by_log_prob() -> None:
    assert _repeats("abababab", 2) == 4
    program = TreePO(share="likely")
    shares = program._shares(10, np.array([-1.0, -3.0, -1.0]))
    assert shares.sum() == 10
    assert shares[0] > shares[1] >= 1
    assert TreePO(share="unlikely")._shares(10, np.array([-1.0, -3.0]))[1] > 5
    assert TreePO()._shares(7, np.array([0.0, 0.0])).tolist() == [3, 4]
    params = SamplingParams(n=4, max_new_tokens=40, ignore_eos=True, logit_bias={60: 6.0})
    (tree,) = engine().generate([PROMPTS[3]], params, TreePO(segment_tokens=5, repetition=2, repeats=4))
    ended = [leaf for leaf in tree.flatten() if len(leaf.response) < 40]
    assert ended
    assert all(_repeats(letters().decode(leaf.response), 2) >= 4 for leaf in ended)
    (tree,) = engine().generate([PROMPTS[3]], params, TreePO(segment_tokens=5, answer=text(60, 60)))
    for leaf in tree.flatten():
        assert (text(60, 60) in letters().decode(leaf.response)) == (leaf.status == LeafStatus.STOP)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("arpo", {"tool": "f.py:x", "beams": 1}, "no option 'beams'; did you mean 'beam'"),
        ("tools", {}, "needs the option 'tool'"),
        ("treepo", {"share": "odd"}, "share of even, likely, unlikely"),
        ("latr", {"top": 1}, "top >= 2"),
        ("spo_tree", {"branch_factors": []}, "branch_factors"),
        ("hints", {"judge": never, "fractions": [0.5, 0.2]}, "rise within"),
        ("prefix_value_probe", {"segment_tokens": 0}, "or texts in stop"),
        ("early_stop", {"rule": "unlikly"}, "did you mean 'unlikely'"),
        ("early_stop", {"rule": "longer"}, r"option 'column'; give it in rollout\.program_options\.rule_options"),
        ("early_stop", {"then": "drop"}, "then of judge, mask, discard"),
        ("prefix_value_probe", {"answer_tokens": -1}, "answer_tokens >= 0"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_program(name, **options)
