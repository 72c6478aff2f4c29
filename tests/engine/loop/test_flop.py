"""The FLOP of a run against products that torch counts, and what a run had spent when it reached its targets."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from rolltree.engine import NativeEngine, SamplingParams, TokenTree, load_config, pack
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.batches.cost import CostModel, Work
from rolltree.engine.learn.utilization import Compute
from rolltree.engine.record.spent import Spent, of_targets, reached
from rolltree.engine.rollout.native.engine import DraftConfig, EngineConfig

from ...support.resumed import stop_and_resume
from ...support.tiny import beside, tiny_job
from ..model.test_tree_equals_flat import make_models

FAMILIES = ("qwen3", "qwen2", "llama", "mistral-window", "qwen3-moe")

toml = tiny_job(
    rollout={"program": "flat", "program_options": None},
    algorithm={"advantage": "group_norm"},
    trainer={"steps": 2, "prompts_per_step": 3},
    evaluation={"problems": 4, "every": 2},
)


def countable(plain: Any) -> None:
    """Let ``plain`` compute by products that torch counts."""
    plain.set_attn_implementation("eager")
    if hasattr(plain.config, "num_experts"):
        plain.set_experts_implementation("eager")


def counted(plain: Any, tokens: list[int], cache: Any, heads: int) -> int:
    """Return the FLOP that torch counts while ``plain`` computes ``tokens`` one after the other, and the logits of
    ``heads`` of them."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for token in tokens:
            out = plain.model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        for _ in range(heads):
            plain.lm_head(out.last_hidden_state)
    return int(counter.get_total_flops())


def first_difference(ids: list[int], others: list[int]) -> int:
    return next((i for i, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), len(ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_costs_the_products_of_its_rows(family: str) -> None:
    """The prompt once, then each distinct beginning of a response but the whole, whose last token no row computes."""
    ours, plain = make_models(family)
    countable(plain)
    engine = NativeEngine(ours)
    prompt, n = [5, 6, 7], 3
    (tree,) = engine.generate([prompt], SamplingParams(n=n, max_new_tokens=4, ignore_eos=True, seed=1))
    cache = DynamicCache(config=plain.config)
    expected = counted(plain, prompt, cache, heads=1)
    begun: list[list[int]] = []
    for leaf in range(tree.num_leaves):
        ids = tree.token_id[tree.path_rows(leaf)][len(prompt) : -1].tolist()
        shared = max((first_difference(ids, other) for other in begun), default=0)
        begun.append(ids)
        for sign, part in ((1, ids), (-1, ids[:shared])):
            expected += sign * (counted(plain, part, copy.deepcopy(cache), heads=len(part)) if part else 0)
    assert engine.stats["flop"] == pytest.approx(expected, rel=1e-6)
    assert engine.stats["held_out_flop"] == engine.stats["scored_flop"] == 0
    engine.generate([prompt], SamplingParams(n=n, max_new_tokens=4, ignore_eos=True, seed=1), held_out=True)
    assert engine.stats["held_out_flop"] == engine.stats["flop"] > 0  # counted anew by each call
    before = engine.stats["flop"]
    engine.score([prompt], [[[1, 2], [1, 3]]])
    scored = CostModel.of(ours).forward(Work(6, 1 + 2 + 3 + 4 + 5 + 5, 2))
    assert (engine.stats["scored_flop"], engine.stats["flop"]) == (round(scored), before)


def test_rejected_drafts_are_computed_too() -> None:
    ours, _ = make_models("llama")
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    flop = []
    for drafts in (None, DraftConfig()):
        engine = NativeEngine(ours, config=EngineConfig(drafts=drafts))
        engine.generate([prompt], SamplingParams(n=2, max_new_tokens=30, ignore_eos=True, seed=3))
        flop.append(engine.stats["flop"])
        rejected = engine.stats["drafted_tokens"] - engine.stats["accepted_tokens"]
    assert rejected > 0
    per_row = CostModel.of(ours).forward(Work(1, len(prompt), 1))
    assert flop[1] >= flop[0] + rejected * per_row


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_costs_the_products_of_both_passes(family: str, checkpointing: bool) -> None:
    """One sequence, as torch counts dense products of all rows and keys: its pairs are then their square."""
    _, plain = make_models(family)
    countable(plain)
    plain.train()
    if checkpointing:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
    n, vocabulary, hidden = 24, plain.config.vocab_size, plain.config.hidden_size
    with FlopCounterMode(display=False) as counter:
        plain(input_ids=torch.arange(n)[None], use_cache=False).logits.square().mean().backward()
    compute = Compute(peak=None)
    flop = compute.train(plain, Work(n, n * n, n), Work(), 6.0 * n * vocabulary * hidden)
    assert flop == pytest.approx(counter.get_total_flops(), rel=1e-6)
    assert compute.read({})["perf/flop_trained"] == flop
    assert compute.read({}) == {"perf/flop_trained": 0.0, "perf/flop_scored": 0.0}


def test_weights_that_are_not_trained_have_no_gradient() -> None:
    _, plain = make_models("llama")
    whole = Compute(None).train(plain, Work(10), Work(), 0.0)
    plain.model.requires_grad_(False)
    assert Compute(None).train(plain, Work(10), Work(), 0.0) == pytest.approx(whole * 2 / 3)


def test_rows_of_pieces_that_are_seen_later_count_twice() -> None:
    tree = TokenTree.from_sequences(list(range(20)), [list(range(30, 40)), list(range(50, 60))])
    whole, pieces = pack([tree], max_tokens=64), pack([tree], max_tokens=24, in_pieces=True)
    assert Work.of(whole) == Work.of(pieces) == Work(40, 20 * 21 / 2 + 2 * (10 * 20 + 55), 19)
    assert Work.again(whole) == Work()
    assert 20 <= Work.again(pieces).rows < 40


def rows_of(toml: Path, name: str, *flags: str) -> list[dict[str, float]]:
    run = build(load_config(toml, [f"--output_dir={toml.parent / name}", *flags]), console=Console())
    run.run()
    return run.log.rows()


@pytest.mark.check
def test_the_account_of_a_run(toml: Path) -> None:
    start, first, second = rows_of(toml, "account")
    for row in (start, first, second):
        parts = [row[f"perf/flop_{part}"] for part in ("sampled", "scored", "trained", "evaluated")]
        assert row["perf/flop"] == sum(parts)
    assert start["perf/flop_evaluated"] > 0 == start["perf/flop_sampled"] == start["perf/flop_so_far"]
    assert first["perf/flop_evaluated"] == 0 < second["perf/flop_evaluated"]
    assert first["perf/flop_trained"] > first["perf/flop_sampled"] > 0 == first["perf/flop_scored"]
    assert second["perf/flop_so_far"] == first["perf/flop_so_far"] + second["perf/flop"] - second["perf/flop_evaluated"]
    assert first["perf/flop_so_far"] == first["perf/flop"]

    _, with_reference, _ = rows_of(toml, "reference", "--roles.reference={}", "--algorithm.objective=grpo")
    assert with_reference["perf/flop_sampled"] == first["perf/flop_sampled"]
    assert 0 < with_reference["perf/flop_scored"] < with_reference["perf/flop_trained"]
    _, again, _ = rows_of(toml, "checkpointed", "--model.gradient_checkpointing=true")
    assert 1.15 < again["perf/flop_trained"] / first["perf/flop_trained"] < 4 / 3


@pytest.mark.check
def test_a_resumed_run_goes_on_with_its_account(toml: Path, tmp_path: Path) -> None:
    both = stop_and_resume(toml, tmp_path)
    whole, resumed = both.whole.log.rows()[-1], both.resumed.log.rows()[-1]
    flop = [name for name in whole if name.startswith("perf/flop")]
    assert len(flop) == 6
    assert {name: resumed[name] for name in flop} == {name: whole[name] for name in flop}


# -- targets ---------------------------------------------------------------------------------------------------------


def made(*accuracies: float | None) -> list[dict[str, float]]:
    """Rows of a run whose steps compute 10 FLOP, sample 2 tokens and take 3 seconds, one of them to evaluate."""
    rows = []
    for step, accuracy in enumerate(accuracies):
        row = {"step": step, "perf/flop_so_far": 10.0 * step, "timing_s/step": 3.0, "timing_s/eval": 1.0}
        row |= {"rollout/sampled_tokens": 2.0} if step else {}
        rows.append(row if accuracy is None else row | {"eval/accuracy": accuracy})
    return rows


@pytest.mark.parametrize(
    ("accuracies", "ended", "flop"),
    [
        ((0.2, 0.4, 0.6, 0.7), False, 15.0),
        ((0.2, None, 0.6, 0.7), False, 2 * 10 * 0.3 / 0.4),
        ((0.2, 0.4, 0.6), False, None),  # the next evaluation may be lower
        ((0.2, 0.4, 0.6), True, 15.0),
        ((0.2, 0.6, 0.4, 0.6, 0.6), False, 25.0),  # did not hold
        ((0.2, 0.6, 0.48, 0.6), False, 10 * 0.3 / 0.4),  # a little below holds
        ((0.6, 0.6), False, 0.0),
        ((0.2, 0.3, 0.45), True, None),
        ((0.2, 0.5, 0.5), False, 10.0),
    ],
)
def test_a_target_is_reached_where_it_is_held(accuracies: tuple[float | None, ...], ended: bool, flop: Any) -> None:
    then = reached(made(*accuracies), 0.5, ended=ended)
    assert (then and then.flop) == (flop and pytest.approx(flop))
    if then is not None:
        assert then == Spent(then.flop, pytest.approx(then.flop / 5), pytest.approx(then.flop / 5))


def test_a_run_records_its_targets(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    easy = beside(toml, "easy", evaluation={"problems": 4, "every": 1, "targets": [0.001, 1.0]})
    rows = rows_of(easy, "targets")
    recorded = {name: row[name] for row in rows for name in row if name.startswith("eval/target/")}
    said: list[str] = []
    assert recorded == of_targets([0.001, 1.0], rows, said.append, ended=True)
    assert not said  # the rows have told of them
    told = capsys.readouterr().out.count("of the held-out problems took")
    assert told == sum(name.endswith("/flop") for name in recorded)
