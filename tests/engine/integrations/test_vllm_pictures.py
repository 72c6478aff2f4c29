"""Prompts with pictures by the real vLLM on the CPU, against plain Transformers: `make vllm`.

vLLM's models with pictures import torchvision, which must be a build that fits torch; without it nothing runs here.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rolltree.engine import batch_logprob, pack
from rolltree.engine.app.cli import main
from rolltree.engine.data.media import Picture
from rolltree.engine.data.segment import LeafStatus
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.programs import TreePO
from rolltree.engine.rollout import SamplingParams
from rolltree.engine.rollout.digest import digests

from ...support.picture_models import IMAGE, KINDS, make_models, plain_logprobs, words
from ...support.picture_run import metrics, write_model, write_run

pytestmark = pytest.mark.vllm
WIDE = "qwen3_vl, wide"
PARAMS = SamplingParams(n=4, max_new_tokens=9, ignore_eos=True)
BOUND = 1e-5
WRONG = 1e-3


def widen() -> None:
    """Add a Qwen3-VL with heads as wide as vLLM's kernels for the CPU take them."""
    kind = KINDS["qwen3_vl"]
    config = copy.deepcopy(kind.config)
    config.text_config.head_dim = 32
    config.text_config.rope_parameters |= {"mrope_section": [8, 4, 4], "mrope_interleaved": True}
    config.vision_config.hidden_size, config.vision_config.num_heads = 32, 1
    KINDS[WIDE] = replace(kind, config=config)


@pytest.fixture(scope="module")
def wide() -> None:
    try:
        import torchvision.transforms.v2  # noqa: F401
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"vLLM's models with pictures need a torchvision that fits torch: {error}")
    widen()


@pytest.fixture(scope="module")
def engine(wide: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from rolltree.engine.rollout.vllm.engine import VllmEngine

    path = str(tmp_path_factory.mktemp("model"))
    write_model(Path(path), WIDE)
    return VllmEngine(
        path,
        AutoTokenizer.from_pretrained(path),
        raw_logprobs=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 28,
    )


def prompts() -> tuple[list[list[int]], list[tuple[Picture, ...]]]:
    """Return prompts whose texts agree and whose pictures differ, one with both, and one without."""
    draw = np.random.default_rng(5)
    first = KINDS[WIDE].picture(draw)
    while (second := KINDS[WIDE].picture(draw)).rows != first.rows:
        pass
    before, after = words(draw, 20), words(draw, 3)
    one, two = ([*before, *picture.ids, *after] for picture in (first, second))
    made = [one, two, [*one, *second.ids, *after], [*before, *after]]
    return made, [(first,), (second,), (first, second), ()]


def without_failed(trees: list[TokenTree]) -> list[TokenTree]:
    """Return the trees without the responses that failed: those with a placeholder, which a random model samples."""
    whole = []
    for tree in trees:
        failed = np.array([not {IMAGE, 123}.isdisjoint(leaf.response) for leaf in tree.flatten()])
        assert ((tree.columns["status"] == LeafStatus.FAILED) == failed).all()
        assert not failed.all()
        kept = tree.without_leaves(failed)
        assert kept is not None
        whole.append(kept)
    return whole


def off(net: Any, trees: list[TokenTree]) -> float:
    """The largest difference of a recorded log-prob from the plain forward of its sequence."""
    with torch.no_grad():
        right = torch.cat([x for tree in trees for x in plain_logprobs(net, WIDE, tree)]).numpy()
    found = np.concatenate([leaf.behaviour_logprob for tree in trees for leaf in tree.flatten()])
    return float(np.abs(found - right).max())


def sample(engine: Any, program: Any = "flat", **params: Any) -> list[TokenTree]:
    ids, pictures = prompts()
    trees: list[TokenTree] = engine.generate(
        ids, replace(PARAMS, **params), program, seeds=[1, 2, 3, 4], pictures=pictures
    )
    return without_failed(trees)


@pytest.mark.parametrize("program", ["flat", TreePO(segment_tokens=3, max_depth=3)], ids=["flat", "treepo"])
def test_log_probs_are_those_of_plain_transformers_and_of_the_trainer(engine: Any, program: Any) -> None:
    """Each segment is a request of its own, whose prefix with its pictures vLLM finds among its keys."""
    ours, theirs = make_models(WIDE)
    trees = sample(engine, program)
    assert [len(tree.pictures) for tree in trees] == [1, 1, 2, 0]
    assert off(theirs, trees) < BOUND
    (batch,) = pack(trees, max_tokens=1 << 16)
    with torch.no_grad():
        values = batch.to_leaves(batch_logprob(ours, batch).logprob)
    for index, leaves in zip(batch.tree_index, values, strict=True):
        for leaf, own in zip(trees[index].flatten(), leaves, strict=True):
            np.testing.assert_allclose(leaf.behaviour_logprob, own.numpy(), rtol=0, atol=BOUND)


def test_greedy_tokens_are_the_likeliest(engine: Any) -> None:
    theirs = make_models(WIDE)[1]
    ids, pictures = prompts()
    requests = engine.submit(ids, replace(PARAMS, n=1, temperature=0.0, top_logprobs=1), pictures=pictures)
    while not all(request.done for request in requests):
        engine.step()
    compared = 0
    for request in requests:
        if request.errors:
            continue
        compared += 1
        assert request.tree is not None
        (leaf,) = request.completions()
        with torch.no_grad():
            (right,) = plain_logprobs(theirs, WIDE, request.tree)
        np.testing.assert_allclose(leaf.raw_logprobs, right.numpy(), rtol=0, atol=BOUND)
        assert [next(iter(top)) for top in leaf.top] == leaf.token_ids.tolist()
    assert compared > 1


def test_new_weights_of_the_tower_encode_pictures_anew(engine: Any) -> None:
    ours, theirs = make_models(WIDE)
    sample(engine)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "visual" in key:
                parameter.mul_(1.2)
    engine.update_weights(dict(theirs.named_parameters()))
    trees = sample(engine)
    held, sent = engine.digests(), digests(dict(theirs.named_parameters()))
    engine.update_weights(dict(ours.named_parameters()))
    assert {"visual", "language_model"} <= {name.split(".")[1] for name in held if name in sent}
    assert all(held[name] == sent[name] for name in held if name in sent)
    assert off(theirs, trees) < BOUND
    assert off(ours, trees) > WRONG
    assert off(ours, sample(engine)) < BOUND


def test_pictures_of_one_hash_get_the_keys_of_the_first(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the hash of the content keeps them apart, and nothing else does."""
    theirs = make_models(WIDE)[1]
    engine.forget_prefixes()
    from rolltree.engine.rollout.vllm import loop

    prompt_of = loop.prompt_of

    def alike(*args: Any) -> Any:
        made = prompt_of(*args)
        if "mm_hashes" in made:
            made["mm_hashes"] = {"image": ["x"] * len(made["mm_hashes"]["image"])}
        return made

    monkeypatch.setattr(loop, "prompt_of", alike)
    trees = sample(engine)
    engine.forget_prefixes()
    engine.llm.llm_engine.reset_encoder_cache()
    assert off(theirs, trees[1:2]) > WRONG


def test_a_run_trains_on_pictures_that_vllm_samples(wide: None, tmp_path: Path) -> None:
    """Weights go to vLLM after each step; the first log-probs of every step are the trainer's."""
    options = '{dtype = "float32", enforce_eager = true, max_model_len = 512, kv_cache_memory_bytes = 67108864}'
    args = ["train", str(write_run(tmp_path, WIDE)), "--rollout.backend=vllm", f"--rollout.vllm_options={options}"]
    assert main([*args, "--evaluation.problems=0", "--evaluation.every=0", "--trainer.steps=2"]) == 0
    rows = [row for row in metrics(tmp_path) if "training/rollout_probs_diff_mean" in row]
    assert len(rows) == 2
    assert all(row["training/rollout_probs_diff_mean"] < 1e-5 for row in rows)
    assert any(row["actor/grad_norm"] > 0 for row in rows)


def test_what_cannot_be_computed_is_refused_or_fails_by_name(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (ids, *_), (shown, *_) = prompts()
    draw = np.random.default_rng(0)
    square = KINDS["gemma3"].picture(draw)
    with pytest.raises(ValueError, match="Prompt 0 has pictures that were made for another model than a qwen3_vl"):
        engine.generate([[5, *square.ids, 6]], PARAMS, pictures=[(square,)])
    (picture,) = shown
    options = engine.llm.model_config.multimodal_config
    with monkeypatch.context() as patch:
        patch.setattr(options, "mm_device_do_normalize", True)
        with pytest.raises(ValueError, match="With mm_device_do_normalize vLLM normalises the pixels that"):
            engine.generate([ids], PARAMS, pictures=[shown])
    grid = np.array(picture.inputs["image_grid_thw"]) * [[1, 2, 1]]
    pixels = np.concatenate([picture.inputs["pixel_values"]] * 2)
    short = Picture.of({"pixel_values": pixels, "image_grid_thw": grid}, picture.rows, picture.grid)
    with pytest.raises(ValueError, match=f"{picture.rows} rows, for which vLLM's tower makes {2 * picture.rows}"):
        engine.generate([[5, *short.ids, 6]], PARAMS, pictures=[(short,)])
    with pytest.raises(ValueError, match="Prompt 0 holds token 120, which stands for a picture"):
        engine.generate([[*ids, IMAGE]], PARAMS, pictures=[shown])
    (request,) = engine.submit([ids], replace(PARAMS, logit_bias={IMAGE: 100.0}), pictures=[shown])
    while not request.done:
        engine.step()
    assert set(request.errors.values()) == {"vLLM sampled token 120, which stands for a picture and is no text"}
    assert len(request.errors) == 4
