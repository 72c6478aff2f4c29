"""EKSFT: entropy and exact KL of demonstrations, the tokens left out, and the loss, against logits of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rolltree.engine import UserError, load_config
from rolltree.engine.app.assembly.checks import tried_methods
from rolltree.engine.data.segment import LeafStatus, Origin, Segment
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.methods.selections import Calm
from rolltree.engine.model.divergence import divergence
from rolltree.engine.model.head import Head
from rolltree.kernels import HeadLora

from ...support.real_step import Steps, check_gradient, leaves_of, plain_logprobs, plain_model, take_steps
from ...support.tiny import NO_METHOD, tiny_job

MINE = """
import numpy as np

def moved(tree):  # a selection of sampled tokens by the divergence
    return tree.loss_mask & (tree.policy_kl > 0.1)

moved.reads = ("policy_kl",)

class Broken:
    def prepare(self, trees):
        raise ValueError("no batch today")

    def __call__(self, tree):
        return tree.loss_mask
"""
T = 0.5
COMMON = (
    "--recipe=eksft", "--trainer.steps=2", "--trainer.lr=0.02", "--trainer.self_check=false", "--rollout.n=4",
    f"--rollout.temperature={T}", "--trainer.prompts_per_step=3", "--loop.temperature_scale=0.8", "--seed=1",
    "--rollout.program=treepo", "--rollout.program_options={segment_tokens=3,init=2}",
)  # fmt: skip


ROWS = [{"prompt": f"{a} + 2 =", "response": f"{a} + 2 + {a} - {a} = {a + 2} = {a} + 2 ."} for a in range(9)]
toml = tiny_job({"mine.py": MINE, "given.jsonl": ROWS}, **NO_METHOD)


def demonstrations(toml: Path) -> str:
    return f"--demonstrations={{path='{toml.parent}/given.jsonl',per_step=4}}"


@pytest.fixture(scope="module", params=[4096, pytest.param(80, marks=pytest.mark.methods)], ids=["whole", "in pieces"])
def steps(request, toml, tmp_path_factory) -> Steps:
    return take_steps(
        toml, tmp_path_factory.mktemp("steps"), *COMMON, demonstrations(toml), f"--trainer.max_tokens={request.param}",
        f"--algorithm.select={toml.parent}/mine.py:moved", "--algorithm.weight=0.1",
        unset=("rollout.program", "rollout.program_options", "algorithm.advantage"),
    )  # fmt: skip


def entropy_and_kl(policy, start, tree, leaf) -> tuple[np.ndarray, np.ndarray]:
    """Return ``[n]`` each, in fp64, from the logits of transformers over the whole vocabulary."""
    with torch.no_grad():
        p, q = (plain_logprobs(m, tree, leaf, 0.8 * T, vocabulary=True).double().numpy() for m in (policy, start))
    return -(np.exp(p) * p).sum(1), (np.exp(p) * (p - q)).sum(1)


@pytest.mark.check
@pytest.mark.parametrize("step", [0, 1])
def test_demonstrations_and_rollouts_have_exact_statistics(steps, step):
    update = steps.updates[step]
    policy, start = plain_model(steps, update), plain_model(steps, steps.updates[0])
    largest = 0.0
    for tree, leaf in leaves_of([*update.given, *update.trees]):
        rows, (entropy, kl) = tree.response_rows(leaf), entropy_and_kl(policy, start, tree, leaf)
        np.testing.assert_allclose(tree.policy_kl[rows], kl, atol=2e-5, rtol=1e-3)
        if tree in update.given:
            np.testing.assert_allclose(tree.policy_entropy[rows], entropy, atol=2e-4)
        largest = max(largest, kl.max())
    assert largest > 0.02 if step else all((tree.policy_kl[tree.prompt_length :] < 1e-6).all() for tree in update.given)


def left_out(values: np.ndarray, share: float) -> np.ndarray:
    """Return the ``int(share n)`` largest of all tokens of the step, without those that are 0."""
    found = np.zeros(len(values), bool)
    found[np.argsort(-values)[: int(share * len(values))]] = True
    return found


def selected(steps: Steps, step: int) -> np.ndarray:
    """Return which tokens of the step's demonstrations are imitated, one after the other."""
    update = steps.updates[step]
    policy, start = plain_model(steps, update), plain_model(steps, steps.updates[0])
    found = [entropy_and_kl(policy, start, tree, 0) for tree in update.given]
    entropy, kl = (np.concatenate(values) for values in zip(*found, strict=True))
    assert len(entropy) > 40
    out = left_out(entropy, 0.2)
    return ~(out | left_out(kl, 0.2)) if step else ~out  # at first the policy is its own reference


@pytest.mark.parametrize("step", [0, 1])
def test_the_tokens_left_out_are_those_of_the_formula(steps, step):
    want, given = selected(steps, step), steps.updates[step].given
    found = np.concatenate([tree.columns["select_token/eksft"][tree.response_rows(0)] for tree in given])
    np.testing.assert_array_equal(found, want)
    counts = [int((tree.columns["select_token/eksft"] == 0)[tree.response_rows(0)].sum()) for tree in given]
    assert len(set(counts)) > 1, "every demonstration loses as many tokens, as if thresholds were its own"
    if step:
        assert int(0.2 * len(want)) < (~want).sum() <= 2 * int(0.2 * len(want))  # a union of two fifths


def test_the_loss_is_the_mean_nll_of_the_tokens_that_are_left(steps):
    update = steps.updates[0]
    want, plain = torch.from_numpy(selected(steps, 0)), [tree for tree in update.trees if tree.loss_mask.any()]
    assert plain
    assert steps.rows[0]["eksft/pg_loss"] > 0
    assert all(row[name] is not None for row in steps.rows for name in row if name.startswith("eksft/"))

    def loss(model):
        nll = torch.cat([-plain_logprobs(model, tree, 0, 0.8 * T) for tree in update.given])
        return nll[want].mean()  # no token of the rollouts has moved from the reference yet

    check_gradient(steps, loss, tolerance=2e-3)


def test_a_selection_of_rollouts_reads_the_divergence(steps):
    chosen = [tree.columns["select_token/actor"] != 0 for tree in steps.updates[1].trees]
    assert 0 < sum(some.sum() for some in chosen) < sum(tree.loss_mask.sum() for tree in steps.updates[1].trees)
    for tree, some in zip(steps.updates[1].trees, chosen, strict=True):
        np.testing.assert_array_equal(some, tree.loss_mask & (tree.policy_kl > 0.1) & (tree.response_leaves > 0))


def _softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(1, keepdims=True)
    return np.exp(z) / np.exp(z).sum(1, keepdims=True)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_divergence_of_two_heads(softcap):
    """A bias, an adapter, a temperature for each row and a factor of the logits."""
    draw = np.random.default_rng(0)
    M, H, V, r = 10, 6, 33, 2

    def some(*shape: int) -> torch.Tensor:
        return torch.from_numpy(2 * draw.normal(size=shape)).float()

    x, y, temperature = some(M, H), some(M, H), 0.5 + torch.from_numpy(draw.random(M)).float()
    scale = 1.0 if softcap else 0.5
    mine = Head(some(V, H), some(V), softcap, HeadLora(some(r, H), some(V, r), 0.7), scale)
    theirs = Head(some(V, H), None, softcap, None, scale)

    def logits(hidden: torch.Tensor, of: Head) -> np.ndarray:
        weight = of.weight.double()
        if of.lora is not None:
            weight = weight + of.lora.scale * of.lora.b.double() @ of.lora.a.double()
        z = scale * (hidden.double() @ weight.T + (0 if of.bias is None else of.bias.double()))
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        return (z / temperature[:, None]).numpy()

    p, q = _softmax(logits(x, mine)), _softmax(logits(y, theirs))
    want = (p * (np.log(p) - np.log(q))).sum(1)
    assert want.min() > 0.1
    mine = mine.frozen()
    np.testing.assert_allclose(divergence(x, mine, y, theirs, temperature), want, rtol=2e-5)
    assert (divergence(x, mine, x, mine, 0.3) == 0).all()
    half = mine._replace(weight=mine.weight.bfloat16(), bias=mine.bias.bfloat16())
    assert (divergence(x.bfloat16(), half, x.bfloat16(), half, 1.0) == 0).all()


def _given(entropy: list[float], kl: list[float]) -> TokenTree:
    segments = [Segment.prompt([0]), Segment.make(list(range(1, 1 + len(kl))), origin=Origin.INJECTED)]
    tree = TokenTree.from_nodes([-1, 0], segments, [1], [LeafStatus.STOP])
    for name, values in (("policy_entropy", entropy), ("policy_kl", kl)):
        tree.set(name, np.array([np.nan, *values], np.float32))
    return tree


def test_thresholds_are_of_all_given_tokens_and_values_of_0_are_never_left_out():
    trees = [_given([5, 6, 7], [0, 0, 0]), _given([1, 2], [0, 9])]
    calm = Calm(entropy_share=0.4, kl_share=0.4)
    calm.prepare(trees)
    assert calm(trees[0]).tolist() == [False, True, False, False]
    assert calm(trees[1]).tolist() == [False, True, False]  # of the two highest KL one is 0
    calm = Calm(entropy_share=0.0, kl_share=0.19)  # less than one token of five
    calm.prepare(trees)
    assert sum(calm(tree).sum() for tree in trees) == 5
    calm.prepare([])
    with pytest.raises(UserError, match="'calm' reads the column policy_entropy, which some given token does not have"):
        Calm().prepare([_given([1, float("nan")], [0, 0])])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--algorithm.terms=[{name='a',objective='sft',select='calm'}]"], r"give the run a \[roles.ref"),
        (
            [
                "--roles.reference={}",
                "--algorithm.terms=[{name='a',objective='sft',select='calm',select_options={kl_share=1.0}}]",
            ],
            r"`kl_share` must be in \[0, 1\)",
        ),
        (
            ["--algorithm.terms=[{name='a',objective='sft',select='{folder}/mine.py:Broken'}]"],
            "The selection of the loss term 'a'.*no batch today",
        ),
    ],
)
def test_what_is_missing_is_one_sentence(toml, options, said):
    options = [option.replace("{folder}", str(toml.parent)) for option in options]
    config = load_config(toml, [demonstrations(toml), *options])
    with pytest.raises(UserError, match=said):
        tried_methods(config)
