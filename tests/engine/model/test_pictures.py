"""Trees with pictures: log-probs, losses and gradients against plain Transformers, which gets the pixels itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from rolltree.engine import (
    TokenTree,
    Trainer,
    TrainerConfig,
    backward,
    batch_logprob,
    load_model,
    pack,
    tree_error,
)
from rolltree.engine.batches.rows import distinct_rows
from rolltree.engine.data.concat import join, side_by_side
from rolltree.engine.data.media import FIRST_ID, Picture, expand
from rolltree.engine.model import decoder
from rolltree.engine.train.terms import TokenTerm
from rolltree.engine.train.trainer import Weighted
from rolltree.kernels import Objective, Term

from ...support.picture_models import (
    IMAGE,
    KINDS,
    conversation,
    make_models,
    plain_logprobs,
    prompt_with,
    random_tree,
    words,
)
from .test_tree_equals_flat import make_models as make_text_models

BOUND = 1e-5
REINFORCE = Objective.preset("reinforce")


class Known(NamedTuple):
    """Trees, and what plain Transformers computes of them."""

    name: str
    ours: Any
    theirs: Any
    trees: list[TokenTree]
    logprobs: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module", params=KINDS)
def known(request: pytest.FixtureRequest) -> Known:
    name = request.param
    ours, theirs = make_models(name)
    if name == "gemma4":  # whose plain gradients in fp32 are 1e-5 from those in fp64
        ours, theirs = ours.double(), theirs.double()
    trees = trees_of(name)
    logprobs, loss = plain_loss(theirs, name, trees)
    loss.backward()
    return Known(name, ours, theirs, trees, logprobs, float(loss.detach()), gradients(theirs))


def trees_of(name: str, seed: int = 0) -> list[TokenTree]:
    draw = np.random.default_rng(seed)
    return [
        random_tree(name, draw, 1, 6),
        random_tree(name, draw, 2, 3),
        conversation(name, draw),
        random_tree(name, draw, 0, 2),
    ]


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))


def plain_loss(model: Any, name: str, trees: list[TokenTree]) -> tuple[list[Tensor], Tensor]:
    logprobs = [plain_logprobs(model, name, tree) for tree in trees]
    loss = -sum(
        float(tree.advantage[i]) * values.sum()
        for tree, own in zip(trees, logprobs, strict=True)
        for i, values in enumerate(own)
    )
    return [values.detach() for own in logprobs for values in own], loss


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal_gradients(name: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Compare each tensor, relative to its own norm or a hundredth of the whole gradient's.

    Qwen3.5's delta rule rounds more, as under plain Transformers: there relative to the whole gradient.
    """
    whole = float(torch.cat([g.flatten() for g in theirs.values()]).norm())
    least = whole if name == "qwen3_5" else 1e-2 * whole
    for key in theirs.keys() | ours.keys():
        if key not in ours or key not in theirs:  # no path to the loss, as for a bias that a softmax cancels
            assert float((ours | theirs)[key].norm()) < BOUND * whole, key
            continue
        assert float((ours[key] - theirs[key]).norm()) < BOUND * max(float(theirs[key].norm()), least), key


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("how", ["at once", "checkpointing", "in pieces"])
def test_logprobs_loss_and_all_gradients(known: Known, how: str) -> None:
    ours = known.ours
    if how == "in pieces" and known.name in ("gemma3", "gemma4"):
        with pytest.raises(ValueError, match="attend in both directions"):
            batch_logprob(ours, pack(known.trees[:1], max_tokens=8, in_pieces=True)[0])
        return
    if how == "in pieces":
        batches = pack(known.trees, max_tokens=8, in_pieces=True)
        spans = [(span, piece) for b in batches if b.media for span in b.media.spans for piece in b.pieces]
        assert known.name == "smolvlm" or any(begin < piece.end < end for (begin, end), piece in spans)
    else:
        batches = pack(known.trees, max_tokens=100_000)
        assert len(batches) == 1
    if how == "checkpointing":
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ours.train()
    else:
        got = {}
        for batch in batches:
            logprob = batch_logprob(ours, batch).logprob.detach()
            got |= dict(zip(batch.tree_index, batch.to_leaves(logprob), strict=True))
        for mine, flat in zip([leaf for index in sorted(got) for leaf in got[index]], known.logprobs, strict=True):
            assert relative(mine, flat) < BOUND
    loss = sum(float(backward(ours, b, [Term(b.fields(REINFORCE), REINFORCE, 1.0)]).loss.detach()) for b in batches)
    ours.gradient_checkpointing_disable()
    ours.eval()
    assert abs(loss - known.loss) < BOUND * max(1.0, abs(known.loss))
    tower = [key for key in known.gradients if "visual" in key or "vision" in key]
    assert len(tower) > 10
    assert max(float(known.gradients[key].norm()) for key in tower) > 1e-2
    assert_equal_gradients(known.name, gradients(ours), known.gradients)


def logprobs_of(model: Any, batch: Any) -> list[Tensor]:
    with torch.no_grad():
        found = dict(zip(batch.tree_index, batch.to_leaves(batch_logprob(model, batch).logprob), strict=True))
    return [leaf for index in sorted(found) for leaf in found[index]]


def largest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.check(but=2)
def test_depth_as_position_is_found_out(known: Known) -> None:
    """The bound of the tests above tells M-RoPE from plain depth, also on Qwen2.5-VL, where they differ little."""
    (batch,) = pack(known.trees, max_tokens=100_000)
    assert batch.media is not None
    if not hasattr(known.theirs.model, "get_rope_index"):
        assert batch.media.rotary is None
        return
    rotary = batch.media.rotary
    assert rotary is not None
    assert largest(logprobs_of(known.ours, batch), known.logprobs) < 1e-4
    for row in range(3):  # each of the three rows counts
        wrong = rotary.clone()
        wrong[row] = batch.position_ids
        changed = replace(batch, media=replace(batch.media, rotary=wrong))
        if row:
            assert largest(logprobs_of(known.ours, changed), known.logprobs) > 1e-3
    changed = replace(batch, media=replace(batch.media, rotary=batch.position_ids.expand(3, -1)))
    assert largest(logprobs_of(known.ours, changed), known.logprobs) > 1e-2


def test_positions_are_those_of_transformers(known: Known) -> None:
    if not hasattr(known.theirs.model, "get_rope_index"):
        return
    (batch,) = pack(known.trees, max_tokens=100_000)
    assert batch.media is not None
    assert batch.media.rotary is not None
    begin = 0
    for tree in batch.trees:
        rows = distinct_rows(tree)
        for leaf in range(tree.num_leaves):
            path = tree.path_rows(leaf)
            ids = tree.token_id[path]
            grids = [p.inputs["image_grid_thw"] for i in ids for p in tree.pictures if p.first_id == i]
            want, _ = known.theirs.model.get_rope_index(
                torch.from_numpy(np.where(ids >= FIRST_ID, IMAGE, ids).astype(np.int64))[None],
                mm_token_type_ids=torch.from_numpy((ids >= FIRST_ID).astype(np.int64))[None],
                image_grid_thw=torch.from_numpy(np.concatenate(grids)) if grids else None,
            )
            assert torch.equal(batch.media.rotary[:, begin + rows.of_token[path]], want[:, 0])
        begin += rows.num_rows


def test_a_picture_changes_its_own_tree_alone(known: Known) -> None:
    draw = np.random.default_rng(3)
    shape = known.trees[0].pictures[0]
    while ((other := KINDS[known.name].picture(draw)).grid, other.rows) != (shape.grid, shape.rows):
        pass
    ids = known.trees[0].token_id.copy()
    ids[(ids >= FIRST_ID)] = other.ids
    changed = replace(known.trees[0], token_id=ids, pictures=(other,))
    trees = [changed, *known.trees[1:]]
    (batch,) = pack(trees, max_tokens=100_000)
    got, count = logprobs_of(known.ours, batch), known.trees[0].num_leaves
    assert largest(got[:count], known.logprobs[:count]) > 1e-2
    assert largest(got[count:], known.logprobs[count:]) < 1e-4


def test_the_tower_runs_once_for_a_batch_and_once_a_picture(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tree's picture is in the second tree too, and each has many leaves."""
    draw = np.random.default_rng(4)
    shared = known.trees[0].pictures[0]
    again = TokenTree.from_sequences(
        prompt_with([shared], draw), [words(draw, 3), words(draw, 2)], advantages=[1.0, -1.0], pictures=[shared]
    )
    calls: list[int] = []
    inner = known.ours.model
    own = inner.get_image_features

    def counted(pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(pixel_values.shape[0] * (pixel_values.shape[1] if pixel_values.ndim == 5 else 1))
        return own(pixel_values, *args, **kwargs)

    monkeypatch.setattr(inner, "get_image_features", counted)
    (batch,) = pack([known.trees[0], again], max_tokens=100_000)
    backward(known.ours, batch, [Term(batch.fields(REINFORCE), REINFORCE, 1.0)])
    known.ours.zero_grad()
    assert calls == [len(shared.inputs["pixel_values"])]
    pieces = pack([known.trees[1]], max_tokens=8, in_pieces=True)
    if known.name not in ("gemma3", "gemma4"):
        calls.clear()
        backward(known.ours, pieces[0], [Term(pieces[0].fields(REINFORCE), REINFORCE, 1.0)])
        known.ours.zero_grad()
        assert len(calls) == 1


def test_two_pictures_of_equal_placeholders_share_nothing_after_them() -> None:
    draw = np.random.default_rng(5)
    first, second = (Picture.of({"pixel_values": draw.normal(size=(4, 3))}, 4, (1, 2, 2)) for _ in range(2))
    text = [5, 6, IMAGE, 7, 8]
    prompts = [expand(text, [p], IMAGE) for p in (first, second, first)]
    tree = TokenTree.from_sequences(prompts, [[9], [9], [10]], pictures=[first, second])
    assert tree.num_tokens == 2 + 2 * (4 + 2) + 3
    (batch,) = pack([tree], max_tokens=100)
    assert batch.num_tokens == tree.num_tokens
    assert batch.media is not None
    assert batch.media.sizes == (4, 4)
    apart = [pack([TokenTree.from_sequences(p, [[9]], pictures=[first, second])], max_tokens=99)[0] for p in prompts]
    kept = [int((batch.input_ids == picture.first_id).sum()) for picture in (first, second)]
    assert kept == [1, 1]
    assert not torch.equal(apart[0].input_ids, apart[1].input_ids)
    assert torch.equal(apart[0].input_ids, apart[2].input_ids)


def test_a_content_is_an_id() -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    picture = Picture.of({"pixel_values": values}, 4, (1, 2, 2))
    same = Picture.of({"pixel_values": values.copy()}, 4, (1, 2, 2))
    assert picture.ids == same.ids
    assert min(picture.ids) >= FIRST_ID
    assert max(picture.ids) < 2**31
    changed = values.copy()
    changed[3, 2] += 1
    others = [
        Picture.of({"pixel_values": changed}, 4, (1, 2, 2)),
        Picture.of({"pixel_values": values}, 4, (1, 1, 4)),
        Picture.of({"pixel_values": values.reshape(2, 6)}, 4, (1, 2, 2)),
        Picture.of({"other": values}, 4, (1, 2, 2)),
    ]
    assert len({p.first_id for p in [picture, *others]}) == 5
    collided = replace(changed_digest := others[0], digest=f"{int(picture.digest, 16) + 2**31 - FIRST_ID - 4:x}")
    assert collided.first_id == picture.first_id
    with pytest.raises(ValueError, match="same token ids by chance"):
        TokenTree.from_sequences([1, *picture.ids], [[2]], pictures=[picture, collided])
    assert changed_digest.first_id != picture.first_id


def test_trees_keep_their_pictures(known: Known) -> None:
    tree = known.trees[0]
    drop = np.zeros(tree.num_leaves, bool)
    drop[1:] = True
    cut = tree.without_leaves(drop)
    assert cut is not None
    for made in (cut, tree.chain(0), join([tree, tree]), side_by_side([tree, known.trees[1]])):
        assert tree.pictures[0] in made.pictures
    most = int(tree.path_length.max())
    parts = pack([tree], max_tokens=most)
    assert len(parts) > 1
    got = {}
    for batch in parts:
        for leaves, own in zip(
            batch.leaf_index, batch.to_leaves(batch_logprob(known.ours, batch).logprob.detach()), strict=True
        ):
            got |= dict(zip(leaves.tolist(), own, strict=True))
    assert largest([got[i] for i in range(tree.num_leaves)], known.logprobs[: tree.num_leaves]) < 1e-4


def test_what_cannot_be_computed_is_an_error(known: Known) -> None:
    draw = np.random.default_rng(6)
    tree, picture = known.trees[0], known.trees[0].pictures[0]
    with pytest.raises(ValueError, match="not among the tree's"):
        pack([replace(tree, pictures=())], max_tokens=1000)
    cut = TokenTree.from_sequences([5, *picture.ids[:-1]], [[6]], pictures=[picture]) if picture.rows > 1 else None
    if cut is not None:
        with pytest.raises(ValueError, match="not complete"):
            pack([cut], max_tokens=1000)
    with pytest.raises(ValueError, match="without flat"):
        pack([tree], max_tokens=1000, flat=True)
    with pytest.raises(ValueError, match="in the loss"):
        pack([TokenTree.from_sequences([5], [[6, *picture.ids, 7]], pictures=[picture])], max_tokens=1000)
    foreign = random_tree("gemma3" if picture.grid else "qwen3_vl", draw, 1, 2)
    with pytest.raises(ValueError, match="made for another model"):
        batch_logprob(known.ours, pack([foreign], max_tokens=1000)[0])


def test_a_text_model_refuses_pictures() -> None:
    model, _ = make_text_models("qwen3")
    tree = random_tree("qwen3_vl", np.random.default_rng(0), 1, 2)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM takes no pictures"):
        batch_logprob(model, pack([tree], max_tokens=1000)[0])


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([5, IMAGE, 6], "1 placeholders"),
        ([5, *[IMAGE] * 5, 6, *[IMAGE] * 2], "7 placeholders"),
        ([5, *[IMAGE] * 3, 6, *[IMAGE] * 3], "do not follow one another"),
    ],
)
def test_placeholders_are_counted(ids: list[int], says: str) -> None:
    pictures = [Picture.of({"pixel_values": np.full((n, 1), n)}, n, (1, 1, n)) for n in (4, 2)]
    with pytest.raises(ValueError, match=says):
        expand(ids, pictures, IMAGE)


def test_placeholders_are_replaced_once() -> None:
    pictures = [Picture.of({"pixel_values": np.full((n, 1), n)}, n, (1, 1, n)) for n in (4, 2)]
    want = [5, *pictures[0].ids, 6, *pictures[1].ids]
    assert expand([5, IMAGE, 6, IMAGE], pictures, IMAGE) == want
    assert expand([5, *[IMAGE] * 4, 6, *[IMAGE] * 2], pictures, IMAGE) == want
    assert expand([5, *[IMAGE] * 6], pictures, IMAGE) == [5, *pictures[0].ids, *pictures[1].ids]
    with pytest.raises(ValueError, match="0 placeholders"):
        expand(want, pictures, IMAGE)


def test_gemma_3_attends_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """With causal pictures the log-probs differ: the rows of blocks count."""
    ours, theirs = make_models("gemma3")
    trees = trees_of("gemma3")
    (batch,) = pack(trees, max_tokens=100_000)
    with torch.no_grad():
        want = [values for tree in trees for values in plain_logprobs(theirs, "gemma3", tree)]
    assert largest(logprobs_of(ours, batch), want) < 1e-4
    monkeypatch.setattr(decoder, "_blocks", lambda model, batch: ())
    assert largest(logprobs_of(ours, batch), want) > 1e-2


def test_the_check_before_training_uses_the_models_own_positions(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    error = tree_error(known.ours, known.trees[:1])
    assert error is not None
    assert error < 1e-5
    if known.trees[0].pictures[0].grid is not None:
        monkeypatch.setattr(decoder, "rotary_input", lambda depth, rotary: depth.expand(4, -1)[:, None])
        wrong = tree_error(known.ours, known.trees[:1])
        assert wrong is not None
        assert wrong > 1e-3


@pytest.mark.parametrize("trained", [False, True])
def test_a_loaded_model_trains_its_tower_only_if_asked(tmp_path: Path, trained: bool) -> None:
    make_models("qwen3_vl")[1].save_pretrained(tmp_path)
    model = load_model(tmp_path, train_tower=trained)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trees = trees_of("qwen3_vl")[:2]
    trainer = Trainer(model, TrainerConfig(lr=1e-2))
    (batch,) = pack(trees, max_tokens=1000)
    term = [Weighted(TokenTerm(REINFORCE), 1.0)]
    tokens = sum(tree.logical_tokens for tree in trees)
    trainer.forward_backward(batch, term, tokens, temperature=1.0, on_policy=True)
    trainer.optim_step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any(name.startswith("model.language_model") for name in changed)
    assert any(name.startswith("model.visual") for name in changed) == trained
