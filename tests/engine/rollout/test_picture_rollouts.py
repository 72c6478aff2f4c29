"""Prompts with pictures in the native engine: answers of Transformers' generate and log-probs of its plain forward,
which gets placeholders and pixels itself, whatever happens to keys and features on the way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine import batch_logprob, pack
from rolltree.engine.data.media import FIRST_ID, Picture, PromptMedia
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.model.pictures import placeholders
from rolltree.engine.programs import RolloutProgram, TreePO
from rolltree.engine.prompts.archive import Archive
from rolltree.engine.rollout import DraftConfig, EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.local import LocalSampler
from rolltree.engine.rollout.native import filling
from rolltree.engine.rollout.native.drafts import Drafts
from rolltree.engine.rollout.native.filling import PREFILL_TOKENS
from rolltree.engine.rollout.native.pictures import Shown, Towers
from rolltree.engine.rollout.sampler import Flight, Job

from ...support.fresh import copied, once_a_test
from ...support.picture_models import IMAGE, KINDS, make_models, plain_inputs, plain_logprobs, prompt_with, words
from .test_graphs import Uncaptured
from .test_native_engine import assert_all_free, responses
from .test_native_engine import model as text_model

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "gemma3", "gemma4", "smolvlm")
BOUND = 1e-5
ROUNDED = {"qwen3_5": 1e-4, "gemma4": 3e-5}
"""Bounds of families that round more, as in tests/engine/model/test_pictures.py: the delta rule of Qwen3.5, Gemma 4."""
WRONG = 1e-3  # least difference that an error makes
NEVER = (IMAGE, 123, 126)  # pictures, videos, sounds
PARAMS = SamplingParams(n=3, max_new_tokens=13, ignore_eos=True)
TREEPO = TreePO(segment_tokens=4, max_depth=5, branch=2, init=2)
TIGHT = {"kv_tokens": 96, "max_prefill_tokens": 5}
SEEDS = [0, 1, 2, 3, 4]


@once_a_test
def models(name: str) -> tuple[Any, Any]:
    return make_models(name)


@once_a_test
def prompts(name: str) -> tuple[list[list[int]], list[tuple[Picture, ...]]]:
    """Return five prompts: two whose texts agree and whose pictures differ, both pictures in one, the first prompt's
    beginning with other text, and one without a picture."""
    draw = np.random.default_rng(5)
    first = KINDS[name].picture(draw)
    while (second := KINDS[name].picture(draw)).rows != first.rows or first.rows < 4:
        first = second
    before, after, more = words(draw, 5), words(draw, 3), words(draw, 4)
    made = [
        [*before, *first.ids, *after],
        [*before, *second.ids, *after],
        [*before, *first.ids, *after, *second.ids, *more],
        [*before, *first.ids, *more],
        [*before, *more],
    ]
    return made, [(first,), (second,), (first, second), (first,), ()]


def engine(name: str = "qwen3_vl", net: Any = None, **sizes: Any) -> NativeEngine:
    config = EngineConfig(**{"page_size": 4, "kv_tokens": 4096, **sizes})
    return NativeEngine(models(name)[0] if net is None else net, config=config)


def sample(native: NativeEngine, name: str, params: SamplingParams = PARAMS, program: Any = "flat") -> list[TokenTree]:
    ids, pictures = prompts(name)
    return native.generate(ids, params, program, seeds=SEEDS, pictures=pictures)


@copied
def expected(name: str = "qwen3_vl", program: RolloutProgram | str = "flat") -> list[list[list[int]]]:
    return [responses(tree) for tree in sample(engine(name), name, program=program)]


def off(net: Any, name: str, trees: Sequence[TokenTree]) -> float:
    """The largest difference of a recorded log-prob from the plain forward of its sequence."""
    with torch.no_grad():
        right = torch.cat([x for tree in trees for x in plain_logprobs(net, name, tree)]).numpy()
    found = np.concatenate([leaf.behaviour_logprob for tree in trees for leaf in tree.flatten()])
    return float(np.abs(found - right).max())


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers_generate(name: str) -> None:
    theirs = models(name)[1]
    params = SamplingParams(n=2, temperature=0, max_new_tokens=12, ignore_eos=True)
    whole, chunked = (sample(engine(name, max_prefill_tokens=chunk), name, params) for chunk in (2048, 3))
    theirs.generation_config.eos_token_id = None
    never = [t for t in NEVER if t in placeholders(theirs)]
    assert len(never) == {"smolvlm": 1, "gemma3": 1, "gemma4": 3}.get(name, 2)
    answers = set()
    for ids, pictures, tree, other in zip(*prompts(name), whole, chunked, strict=True):
        inputs = plain_inputs(name, ids, pictures)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        with torch.no_grad():
            answer = theirs.generate(**inputs, max_new_tokens=12, do_sample=False, suppress_tokens=never)
        for leaf in [*tree.flatten(), *other.flatten()]:
            assert leaf.response == answer[0, len(ids) :].tolist()
        answers.add(tuple(leaf.response))
    assert len(answers) == 5  # each prompt has its own


@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", [pytest.param(f, marks=pytest.mark.slow) if f == "gemma3" else f for f in FAMILIES])
def test_log_probs_are_those_of_the_trainer_and_of_plain_transformers(name: str) -> None:
    """Forks, prefill cut in the middle of pictures, preemption; each picture is encoded once."""
    ours, theirs = models(name)
    native = engine(name, **TIGHT)
    trees = sample(native, name, program=TREEPO)
    assert native.stats["preemptions"] > 0
    assert native.stats["encoded_pictures"] == 2
    bound = ROUNDED.get(name, BOUND)
    assert off(theirs, name, trees) < bound
    assert [len(tree.pictures) for tree in trees] == [1, 1, 2, 1, 0]
    (batch,) = pack(trees, max_tokens=1 << 16)
    with torch.no_grad():
        of_trainer = batch.to_leaves(batch_logprob(ours, batch).logprob)
    for index, leaves in zip(batch.tree_index, of_trainer, strict=True):
        for leaf, values in zip(trees[index].flatten(), leaves, strict=True):
            np.testing.assert_allclose(leaf.behaviour_logprob, values.numpy(), rtol=0, atol=bound)
    assert_all_free(native)


@pytest.mark.slow
def test_a_sample_depends_neither_on_the_batch_nor_on_sizes_nor_on_preemption() -> None:
    for sizes in ({"max_batch_rows": 3}, TIGHT, {"host_kv_tokens": 4096, "kv_tokens": 96}, {"page_size": 16}):
        native = engine(**sizes)
        trees = sample(native, "qwen3_vl", program=TREEPO)
        assert [responses(tree) for tree in trees] == expected(program=TREEPO), sizes
        assert_all_free(native)
    ids, pictures = prompts("qwen3_vl")
    (alone,) = engine().generate(ids[2:3], PARAMS, TREEPO, seeds=SEEDS[2:3], pictures=pictures[2:3])
    assert responses(alone) == expected(program=TREEPO)[2]


@pytest.mark.parametrize("sizes", [{}, TIGHT], ids=["roomy", "tight"])
def test_aborted_requests_go_on_to_the_same_end(sizes: dict[str, int]) -> None:
    native, draw = engine(**{"max_prefill_tokens": 8, **sizes}), np.random.default_rng(0)
    ids, pictures = prompts("qwen3_vl")
    requests = native.submit(ids, PARAMS, TREEPO, seeds=SEEDS, pictures=pictures)
    aborted = 0
    while not all(request.done for request in requests):
        native.step()
        if draw.random() < 0.3:
            some = [request for request in requests if not request.done and draw.random() < 0.7]
            aborted += len(native.abort(some))
            native.step()
            native.submit(some)
    assert aborted > 5
    assert [responses(r.tree) for r in requests if r.tree] == expected(program=TREEPO)
    assert_all_free(native)


def test_unfinished_jobs_cross_processes_and_checkpoints_with_their_pictures() -> None:
    """A job is pickled to its engine; a checkpoint has its state and its pictures; another engine ends it."""
    ids, pictures = prompts("qwen3_vl")
    jobs = [Job(p, PARAMS, seed, pictures=shown) for p, seed, shown in zip(ids, SEEDS, pictures, strict=True)]
    first = LocalSampler(engine(), "flat")
    flights = first.submit(pickle.loads(pickle.dumps(jobs)))
    for _ in range(5):
        first.step(0.0)
    archive = Archive()
    packed = archive.pack(
        [(kept.state, list(shown)) for kept, shown in zip(first.kept(flights), pictures, strict=True)]
    )
    again = [
        replace(job, kept=state, pictures=tuple(shown))
        for job, (state, shown) in zip(jobs, Archive(archive.tensors).unpack(packed), strict=True)
    ]
    pixels = sum(tensor.nbytes for name, tensor in archive.tensors.items() if "pixel_values" in name)
    assert pixels == sum(p.inputs["pixel_values"].nbytes for p in pictures[2])  # each picture is stored once
    assert again[0].pictures[0].digest == pictures[0][0].digest
    second = LocalSampler(engine(), "flat")
    done: list[Flight] = second.submit(again)
    while not all(flight.done for flight in done):
        second.step(0.0)
    trees = [flight.tree for flight in done if flight.tree is not None]
    assert [responses(tree) for tree in trees] == expected()
    assert off(models("qwen3_vl")[1], "qwen3_vl", trees) < BOUND


def test_new_weights_encode_pictures_anew() -> None:
    """Each token has the log-prob of the weights that sampled it, those of the tower included."""
    ours, theirs = models("qwen3_vl")
    new, plain = copy.deepcopy(ours), copy.deepcopy(theirs)
    with torch.no_grad():
        for net in (new, plain):
            for key, parameter in net.named_parameters():
                if "visual" in key:
                    parameter.mul_(1.2)
    native = engine(net=copy.deepcopy(ours))
    ids, pictures = prompts("qwen3_vl")
    requests = native.submit(ids, PARAMS, TREEPO, seeds=SEEDS, pictures=pictures)
    for _ in range(6):
        native.step()
    native.update_weights(dict(new.named_parameters()), version=1)
    while not all(request.done for request in requests):
        native.step()
    trees = [request.tree for request in requests if request.tree is not None]
    assert native.stats["encoded_pictures"] == 4
    with torch.no_grad():
        right = [
            torch.cat([x for t in trees for x in plain_logprobs(n, "qwen3_vl", t)]).numpy() for n in (theirs, plain)
        ]
    leaves = [leaf for tree in trees for leaf in tree.flatten()]
    version = np.concatenate([leaf.policy_version for leaf in leaves])
    found = np.concatenate([leaf.behaviour_logprob for leaf in leaves])
    assert set(version.tolist()) == {0, 1}
    assert np.abs(found - np.where(version == 1, right[1], right[0])).max() < BOUND
    assert np.abs(right[1] - right[0]).max() > WRONG


def test_prompts_that_are_known_are_neither_prefilled_nor_encoded_again() -> None:
    native = engine()
    sample(native, "qwen3_vl")
    computed, encoded = native.stats["prefill_tokens"], native.stats["encoded_pictures"]
    ids = prompts("qwen3_vl")[0]
    shared = len(ids[0]) - 3 + len(ids[0]) + 5 + 5  # the first prompt's beginning twice more, and its text twice
    assert computed == sum(map(len, ids)) - shared
    trees = sample(native, "qwen3_vl")  # counts from 0
    assert [responses(tree) for tree in trees] == expected()
    assert native.stats["prefill_tokens"] == len(ids)  # the last token of each
    assert (encoded, native.stats["encoded_pictures"]) == (2, 0)


def test_padded_steps_have_the_same_positions() -> None:
    native = engine()
    runner = native.loop.runner
    runner.graphs = Uncaptured(native.cache, runner.decode_logits, torch.device("cpu"), runner._never)
    trees = sample(native, "qwen3_vl", program=TREEPO)
    assert runner.graphs.steps > 0
    assert [responses(tree) for tree in trees] == expected(program=TREEPO)
    assert off(models("qwen3_vl")[1], "qwen3_vl", trees) < BOUND


def test_a_step_of_one_picture_row_replays_no_graph() -> None:
    """A known prompt that ends with a picture: its last row alone is computed and sampled."""
    (picture,) = prompts("qwen3_vl")[1][0]
    native = engine()
    runner = native.loop.runner
    runner.graphs = Uncaptured(native.cache, runner.decode_logits, torch.device("cpu"), runner._never)
    for _ in range(2):
        trees = native.generate([[5, 6, *picture.ids]], replace(PARAMS, n=1), pictures=[(picture,)])
        assert off(models("qwen3_vl")[1], "qwen3_vl", trees) < BOUND
    assert native.stats["prefill_tokens"] == 1
    assert runner.graphs.steps > 0


# -- placeholders and drafts -----------------------------------------------------------------------------------------


@once_a_test
def eager() -> tuple[Any, Any]:
    """Models that answer with a placeholder wherever they may."""
    both = copy.deepcopy(models("qwen3_vl"))
    with torch.no_grad():
        for net in both:
            net.lm_head.weight[IMAGE] = 3 * net.lm_head.weight[7]
    return both


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_placeholders_are_never_sampled_and_log_probs_stay_the_models(temperature: float) -> None:
    ours, theirs = eager()
    with torch.no_grad():
        inputs = plain_inputs("qwen3_vl", prompts("qwen3_vl")[0][0], prompts("qwen3_vl")[1][0])
        share = theirs(**inputs).logits[0, -1].softmax(-1)[IMAGE]
    params = SamplingParams(n=64, max_new_tokens=6, temperature=temperature, ignore_eos=True)
    native = engine(net=ours)
    requests = native.submit(prompts("qwen3_vl")[0][:1], params, seeds=[0], pictures=prompts("qwen3_vl")[1][:1])
    while not requests[0].done:
        native.step()
    assert not any(set(c.token_ids.tolist()) & set(placeholders(ours)) for c in requests[0].completions())
    assert share > 0.01  # they would be
    tree = requests[0].tree
    assert tree is not None
    with torch.no_grad():
        right = torch.cat(plain_logprobs(theirs, "qwen3_vl", tree)).numpy()
    raw = np.concatenate([c.raw_logprobs for c in requests[0].completions()])
    np.testing.assert_allclose(raw, right, rtol=0, atol=BOUND)
    (batch,) = pack([tree], max_tokens=1 << 16)
    with torch.no_grad():
        of_trainer = batch.to_leaves(batch_logprob(ours, batch, temperature=temperature).logprob)[0]
    for leaf, values in zip(tree.flatten(), of_trainer, strict=True):
        np.testing.assert_allclose(leaf.behaviour_logprob, values.numpy(), rtol=0, atol=BOUND)


def test_drafts_are_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts whose text before a picture comes again in responses: drafts end before the picture's rows."""
    (first, *_), shown = prompts("qwen3_vl")
    picture, (a, b) = shown[0][0], first[:2]
    before = [a, b, a, a, b, b]
    ids = [*before, *picture.ids, *before, *picture.ids, *before]
    proposed: list[int] = []
    offered: list[int] = []
    propose = Drafts.propose

    def recorded(self: Drafts, *args: Any) -> Any:
        counts, tokens = propose(self, *args)
        proposed.extend(tokens.tolist())
        return counts, tokens

    monkeypatch.setattr(Drafts, "propose", recorded)
    native = engine(drafts=DraftConfig(rows=8, tokens=4))
    drafts = native.loop.scheduler.drafts
    assert drafts is not None
    inner = drafts.index

    class Offering:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def propose(self, *args: Any) -> Any:
            counts, tokens = inner.propose(*args)
            offered.extend(tokens.tolist())
            return counts, tokens

    drafts.index = Offering()
    params = replace(PARAMS, n=2, max_new_tokens=40, allowed_token_ids=[a, b])
    (tree,) = native.generate([ids], params, seeds=[3], pictures=[(picture,)])
    assert proposed
    assert max(offered) >= FIRST_ID > max(proposed)
    (plain,) = engine().generate([ids], params, seeds=[3], pictures=[(picture,)])
    assert responses(tree) == responses(plain)
    assert native.stats["accepted_tokens"] > 0


# -- attention in both directions -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_two_way_pictures_survive_chunks_preemption_and_the_host(name: str) -> None:
    """A chunk is smaller than a picture; pages run short; keys of a picture come back from the host."""
    draw = np.random.default_rng(0)
    ids, pictures = prompts(name)
    for sizes in ({"max_prefill_tokens": 2, "page_size": 16}, TIGHT, {"host_kv_tokens": 4096, "kv_tokens": 96}):
        native = engine(name, **sizes)
        requests = native.submit(ids, PARAMS, TREEPO, seeds=SEEDS, pictures=pictures)
        most = max(PREFILL_TOKENS, *(shown.rows for (shown, *_) in pictures[:2]))
        while not all(request.done for request in requests):
            before = native.stats["prefill_tokens"]
            native.step()
            assert native.stats["prefill_tokens"] - before <= most  # a picture alone may exceed the budget
            some = [r for r in requests if not r.done and draw.random() < 0.3] if "page_size" in sizes else []
            native.abort(some)
            native.submit(some)
        trees = [request.tree for request in requests if request.tree is not None]
        assert [responses(tree) for tree in trees] == expected(name, TREEPO), sizes
        assert off(models(name)[1], name, trees) < ROUNDED.get(name, BOUND)
        assert (native.stats["preemptions"] > 0) == ("kv_tokens" in sizes)
        assert (native.stats["restored_tokens"] > 0) == ("host_kv_tokens" in sizes)
        assert_all_free(native)


@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gemma3", "one way"),
        ("gemma3", "a cut"),
        ("gemma4", "other layers"),
        pytest.param("gemma4", "one way", marks=pytest.mark.slow),
        pytest.param("gemma4", "a cut", marks=pytest.mark.slow),
        pytest.param("gemma3", "other layers", marks=pytest.mark.slow),
    ],
)
def test_wrong_attention_of_pictures_shows_in_the_log_probs(
    name: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = engine(name, max_prefill_tokens=5)
    if wrong == "one way":
        monkeypatch.setattr(Shown, "with_runs", lambda self, *args: self)
    elif wrong == "a cut":
        monkeypatch.setattr(filling, "whole_part", lambda fill, first, budget, whole: min(fill.count, budget))
    else:
        native.loop.runner.both_ways = "sliding" if name == "gemma3" else "all"
    assert off(models(name)[1], name, sample(native, name)) > 10 * WRONG


@pytest.mark.slow
def test_a_model_of_gemma_4_without_two_way_pictures() -> None:
    kind = KINDS["gemma4"]
    config = copy.deepcopy(kind.config)
    config.text_config.use_bidirectional_attention = None
    ours, theirs = (kind.cls(copy.deepcopy(config)).eval() for _ in range(2))
    for mine, plain in zip(models("gemma4"), (ours, theirs), strict=True):
        plain.load_state_dict(mine.state_dict())
    theirs.set_attn_implementation("sdpa")
    trees = sample(engine(net=ours, max_prefill_tokens=3), "gemma4")
    assert off(theirs, "gemma4", trees) < ROUNDED["gemma4"]
    assert off(models("gemma4")[1], "gemma4", trees) > 10 * WRONG


# -- what these tests would show -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("where", ["prompt", "response"])
def test_depth_as_position_shows_in_the_log_probs(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "prompt":

        def depth(self: PromptMedia, begin: int, count: int) -> Any:
            return np.tile(np.arange(begin, begin + count), (3, 1))

        monkeypatch.setattr(PromptMedia, "rotary_of", depth)
    native = engine(name)
    if where == "response":
        add = native.loop.rows.add
        monkeypatch.setattr(native.loop.rows, "add", lambda branch, **columns: add(branch, **{**columns, "moved": 0}))
    assert off(models(name)[1], name, sample(native, name)) > WRONG


@pytest.mark.parametrize("wrong", ["the first picture", "rows from the end", "the tower's last level"])
def test_wrong_features_show_in_the_log_probs(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Towers.inputs

    def changed(self: Towers, decoder: Any, ids: Any, shown: Any) -> Any:
        if wrong == "the first picture":
            shown = shown._replace(which=np.zeros_like(shown.which))
        elif wrong == "rows from the end":
            shown = shown._replace(inside=shown.inside[::-1].copy())
        found = inputs(self, decoder, ids, shown)
        if wrong == "the tower's last level":
            found["deepstack_visual_embeds"][-1].zero_()
        return found

    monkeypatch.setattr(Towers, "inputs", changed)
    assert off(models("qwen3_vl")[1], "qwen3_vl", sample(engine(), "qwen3_vl")) > WRONG


def test_a_picture_swapped_between_two_prompts_changes_log_probs() -> None:
    trees = sample(engine(), "qwen3_vl")[:2]
    swapped = []
    for tree, other in zip(trees, trees[::-1], strict=True):
        ids = tree.token_id.copy()
        ids[ids >= FIRST_ID] = other.pictures[0].ids
        swapped.append(replace(tree, token_id=ids, pictures=other.pictures))
    assert off(models("qwen3_vl")[1], "qwen3_vl", swapped) > WRONG


def test_two_pictures_of_equal_ids_are_refused_as_the_second_would_get_keys_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative: placeholder ids are used as they are."""
    ids, pictures = prompts("qwen3_vl")
    monkeypatch.setattr(Picture, "first_id", FIRST_ID + 7)
    equal = [[*ids[0][:5], *range(FIRST_ID + 7, FIRST_ID + 7 + p[0].rows), *ids[0][-3:]] for p in pictures[:2]]
    assert equal[0] == equal[1]
    with pytest.raises(ValueError, match="Prompt 1 has a picture whose token ids are by chance those of an earlier"):
        engine().generate(equal, PARAMS, pictures=pictures[:2])
    native = engine()
    monkeypatch.setattr(native, "_check_pictures", lambda *args: None)
    trees = native.generate(equal, PARAMS, seeds=[1, 2], pictures=pictures[:2])
    monkeypatch.undo()
    for tree in trees:
        tree.token_id[tree.token_id >= FIRST_ID] = tree.pictures[0].ids
    right = models("qwen3_vl")[1]
    assert off(right, "qwen3_vl", trees[:1]) < BOUND
    assert off(right, "qwen3_vl", trees[1:]) > WRONG


def test_what_cannot_be_computed_is_refused() -> None:
    (ids, *_), (shown, other, *_) = prompts("qwen3_vl")
    native = engine()

    def refused(why: str, prompt: list[int], pictures: Sequence[Picture], of: NativeEngine = native) -> None:
        with pytest.raises(ValueError, match=why):
            of.generate([prompt], PARAMS, pictures=[pictures])
        assert not of.loop.busy

    refused("token ids outside the model's vocabulary of 128", ids, ())
    refused("Prompt 0: Token .* is a row of a picture that is not among", ids, other)
    refused("Prompt 0: A picture's rows are not complete", [t for t in ids if t != shown[0].ids[2]], shown)
    refused("Prompt 0 does not hold the rows of 1 of its 2 pictures", ids, (*shown, *other))
    refused("Prompt 0 holds token 120, which stands for a picture", [*ids, IMAGE], shown)
    refused("Prompt 0 holds token 123, which stands for a picture", [5, 123], ())
    refused("token ids outside", [*ids, 128], shown)
    with pytest.raises(ValueError, match="Got 2 lists of pictures for 1 prompts"):
        native.generate([ids], PARAMS, pictures=[shown, shown])
    refused("Qwen3ForCausalLM takes no pictures", ids, shown, NativeEngine(text_model("qwen3")))
    draw = np.random.default_rng(0)
    squares = [KINDS["gemma3"].picture(draw)]
    refused("pictures that were made for another model", prompt_with(squares, draw), squares)
    two = [KINDS["gemma3"].picture(draw) for _ in range(2)]
    refused(
        "Two pictures follow one another with no token between, and Gemma3ForConditionalGeneration",
        [5, *two[0].ids, *two[1].ids, 6],
        two,
        engine("gemma3"),
    )
    native = engine("gemma3")  # without pictures it samples
    assert off(models("gemma3")[1], "gemma3", native.generate([words(draw, 9)], PARAMS)) < BOUND
