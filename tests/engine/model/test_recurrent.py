"""Hybrids on packed trees against each sequence by plain Transformers: log-probs and every parameter's gradient."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import Mamba2Config, Mamba2ForCausalLM

from rolltree.engine.batches import batch as batches
from rolltree.engine.batches.cost import CostModel
from rolltree.engine.batches.distribute import distribute
from rolltree.engine.batches.pack import pack
from rolltree.engine.batches.pieces import PieceStore, depth_first
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.model import recurrent
from rolltree.engine.model.decoder import Decoded, decode
from rolltree.engine.model.head import target_logprob
from rolltree.engine.model.logprob import batch_logprob
from rolltree.engine.model.self_check import skip_check
from rolltree.engine.train.checkpointing import checkpointing_layers
from rolltree.kernels.tree_recurrence import RecurrencePlan, Segments, find_segments, op

from ...support.recurrent_models import FAMILIES, flat, gradients, make, random_trees, weights, worst

QUICK = ("qwen3_5", "nemotron_h", "lfm2")
EVERY = [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES]


def packed(model: Any, trees: Sequence[TokenTree], **options: Any) -> list[Tensor]:
    """Log-probs of each response by trees packed together."""
    found = {}
    for batch in pack(trees, **({"max_tokens": 1 << 20} | options)):
        values = batch.to_leaves(batch_logprob(model, batch).logprob)
        for tree, leaves, of_tree in zip(batch.tree_index, batch.leaf_index, values, strict=True):
            found |= {(tree, int(leaf)): v for leaf, v in zip(leaves, of_tree, strict=True)}
    return [found[key] for key in sorted(found)]


def loss(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([(w * v).sum() for w, v in zip(weights(values), values, strict=True)]).sum()


def off(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return max(float((x.detach() - y.detach()).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.check(but=1)
@pytest.mark.parametrize("family", EVERY)
def test_log_probs_and_gradients_equal_the_flat_ones(family: str) -> None:
    model, trees = make(family), random_trees(0)
    right = flat(model, trees)
    loss(right).backward()
    expected = gradients(model)
    found = packed(model, trees)
    loss(found).backward()
    relative, name = worst(expected, gradients(model))
    print(f"{family}: log-probs {off(right, found):.1e}, gradients {relative:.1e} ({name})")
    assert off(right, found) < 1e-5
    assert relative < 1e-5, name


@pytest.mark.check(but=1)
@pytest.mark.parametrize("family", EVERY)
def test_prompts_that_begin_alike_share_their_states(family: str) -> None:
    """Two prompts below one system prompt, and the batch without trees that another rank of two computes meanwhile."""
    model, begin = make(family), list(range(3, 40))
    trees = [
        TokenTree.from_sequences(begin + prompt, [[5, 6, 7], [5, 9]], advantages=[1.0, -1.0])
        for prompt in ([1, 2], [4], [4, 4, 8])
    ]
    right = flat(model, trees)
    loss(right).backward()
    expected = gradients(model)
    (batch,) = pack(trees, max_tokens=1 << 20)
    assert batch.num_tokens < 0.6 * sum(tree.num_tokens for tree in trees)
    found = packed(model, trees)
    loss(found).backward()
    relative, name = worst(expected, gradients(model))
    assert off(right, found) < 1e-5
    assert relative < 1e-5, name
    filler = distribute(trees[:1], 2, CostModel.of(model), max_tokens=1 << 20)[1][0]
    assert not filler.trees
    assert batch_logprob(model, filler).logprob.isfinite().all()


@pytest.mark.parametrize("family", QUICK)
def test_checkpoints_and_adapters_keep_the_tree(family: str) -> None:
    """Recomputation in the backward pass, also in another thread, takes the same tree: equal bit for bit."""
    trees = random_trees(1, 1)
    targets = ["in_proj_qkv", "in_proj", "q_proj"]
    model = get_peft_model(make(family), LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    base = model.get_base_model()
    loss(flat(base, trees)).backward()
    expected = gradients(model)
    model.train()
    loss(packed(model, trees)).backward()
    plain = gradients(model)
    assert worst(expected, plain)[0] < 1e-5
    part = next(checkpointing_layers(base)[0].children())
    computed: list[Any] = []
    part.register_forward_hook(lambda *_: computed.append(part))
    for reentrant in (False, True):
        computed.clear()
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        base.enable_input_require_grads()
        worker = threading.Thread(target=loss(packed(model, trees)).backward)
        worker.start()
        worker.join()
        found = gradients(model)
        assert len(computed) == 2  # in the forward, and again in the backward
        assert all(torch.equal(plain[name], found[name]) for name in plain)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*QUICK, "kimi_linear"])
def test_whole_models_by_the_triton_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in Triton's interpreter, called as a GPU's tensors would be; the rest of the model runs as always."""
    for name in ("_FORWARD", "_BACKWARD", "_CONVOLUTION", "_CONVOLUTION_BACKWARD"):
        table = getattr(op, name)
        monkeypatch.setattr(op, name, dict.fromkeys(table, table["triton"]))
    model, trees = make(family), random_trees(0, 1, 8)
    right = flat(model, trees)
    loss(right).backward()
    expected = gradients(model)
    found = packed(model, trees)
    loss(found).backward()
    assert off(right, found) < 1e-5
    assert worst(expected, gradients(model))[0] < 1e-5


@pytest.mark.parametrize("family", QUICK[:2])
def test_only_on_a_gpu_are_products_of_rows_in_bfloat16(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decays and states are float32 there too; the log-probs move within the model's own roundings."""
    model, trees, seen = make(family).bfloat16(), random_trees(5, 1, 30), list[tuple[torch.dtype, ...]]()
    original = recurrent.tree_recurrence

    def noted(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, ends = original(*given, **options)
        seen.append((*(x.dtype for x in given[:4]), ends.dtype))
        return out, ends

    monkeypatch.setattr(recurrent, "tree_recurrence", noted)
    with torch.no_grad():
        usual = packed(model, trees)
        assert set(seen) == {(torch.float32,) * 5}
        seen.clear()
        monkeypatch.setattr(recurrent, "_in_half", lambda dtype, device: dtype == torch.bfloat16)
        half = packed(model, trees)
    assert set(seen) == {(*[torch.bfloat16] * 3, torch.float32, torch.float32)}
    assert 0 < off(usual, half) < 0.1


def alone(subtree_end: Any) -> Segments:
    return find_segments(subtree_end)._replace(parent=np.full(len(find_segments(subtree_end).start), -1))


def in_row_order(subtree_end: Any) -> Segments:
    return find_segments(np.full_like(subtree_end, len(subtree_end)))


def test_log_probs_show_a_wrong_state_and_a_wrong_history(monkeypatch: pytest.MonkeyPatch) -> None:
    model, trees = make("qwen3_5"), random_trees(0)
    skip_check(model)  # which would find them
    made = RecurrencePlan.make
    with torch.no_grad():
        right = flat(model, trees)
        for wrong in (alone, in_row_order):
            monkeypatch.setattr(batches, "find_segments", wrong)
            assert off(right, packed(model, trees)) > 0.1
        monkeypatch.undo()

        def without(what: str) -> Any:
            def make_plan(segments: Segments, **given: Any) -> Any:
                cut = made(segments._replace(parent=np.full(len(segments.start), -1)), **given)
                plan = made(segments, **given)
                object.__setattr__(plan, what, getattr(cut, what))
                return plan

            return staticmethod(make_plan)

        for what, plan in (("parent_row", without("parent_row")), ("nothing", staticmethod(made))):
            monkeypatch.setattr(RecurrencePlan, "make", plan)
            assert (off(right, packed(model, trees)) > 0.1) == (what != "nothing")


def test_results_do_not_depend_on_neighbours_or_the_order_of_siblings() -> None:
    model, (tree, other, third) = make("nemotron_h"), random_trees(3)
    prompt = tree.token_id[: tree.prompt_length].tolist()
    responses = [tree.token_id[tree.response_rows(leaf)].tolist() for leaf in range(tree.num_leaves)]
    order = np.random.default_rng(0).permutation(len(responses)).tolist()
    permuted = TokenTree.from_sequences(prompt, [responses[i] for i in order])
    with torch.no_grad():
        alone, beside = packed(model, [tree]), packed(model, [other, tree, third])
        moved = packed(model, [permuted])
    first = other.num_leaves
    assert all(off([a], [beside[first + i]]) < 1e-5 for i, a in enumerate(alone))
    assert all(off([alone[i]], [moved[j]]) < 1e-5 for j, i in enumerate(order))


@pytest.mark.slow(but=3)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("family", QUICK)
@pytest.mark.parametrize("most", [7, 40])
def test_pieces_hand_their_states_on(family: str, most: int) -> None:
    """The test uses float64, which shows more than float32: sums of many small pieces cancel."""
    model, (tree,) = make(family).double(), random_trees(4, 1, 60)
    (whole,) = pack([tree], max_tokens=1 << 20)
    (weight,) = weights([torch.empty(len(whole.target))])
    right = batch_logprob(model, whole).logprob
    (right * weight).sum().backward()
    expected = gradients(model)
    (batch,) = pack([tree], max_tokens=most, in_pieces=True)
    assert len(batch.pieces) > 3
    with torch.no_grad():
        assert off([right], [batch_logprob(model, batch).logprob]) < 1e-5

    def use(store: PieceStore, decoded: Decoded) -> None:
        p = store.piece
        if len(p.target):
            found = target_logprob(model, decoded.hidden, batch.target[p.target], p.head_row, p.head_index, 1.0, ())
            values = (found.logprob * weight[p.target]).sum()
        else:
            values = 0 * decoded.hidden.sum()
        values.backward()

    run = partial(decode, model, batch)
    depth_first(batch.trees[0], batch.pieces, torch.device("cpu"), run=run, use=use, gradients=True)
    relative, name = worst(expected, gradients(model))
    assert relative < 1e-6, name  # Transformers casts the decays and some norms to float32


def test_a_mixer_that_does_not_take_the_tree_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (tree,) = make("lfm2"), random_trees(0, 1)
    (batch,) = pack([tree], max_tokens=1 << 20)
    batch_logprob(model, batch)
    import transformers.models.lfm2.modeling_lfm2 as module

    monkeypatch.setattr(module, "causal_conv1d_fn", module.causal_conv1d_fn.__wrapped__)
    with pytest.raises(RuntimeError, match="Lfm2ShortConv did not call causal_conv1d_fn"):
        batch_logprob(model, batch)
    inputs = dict(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None])
    with pytest.raises(ValueError, match="computes trees only with `recurrence`"):
        model(**inputs, subtree_end=batch.subtree_end)


def test_other_recurrent_layers_are_refused_by_name() -> None:
    model = Mamba2ForCausalLM(
        Mamba2Config(vocab_size=48, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, state_size=8)
    )
    with pytest.raises(UserError, match=r"cannot be tree-masked \(Mamba2Mixer\)"):
        recurrent.install(model)


class Uncast(TorchFunctionMode):
    """Leaves float64 tensors as they are where Transformers casts them to float32; ``but`` names casts to make."""

    def __init__(self, but: str = "") -> None:
        super().__init__()
        self.but = but

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args[0] if args else None
        kind = {torch.Tensor.float: "float", torch.Tensor.to: "to", torch.nn.functional.softmax: "softmax"}.get(func)
        if kind in (None, self.but) or not isinstance(given, Tensor) or given.dtype != torch.float64:
            return func(*args, **kwargs)
        if kind == "float":
            return given
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()})


@pytest.mark.parametrize(
    ("but", "least", "most"),
    [("", 0.0, 1e-11), ("float", 1e-7, 1.0), pytest.param("to", 1e-7, 1.0, marks=pytest.mark.slow)],
    ids=["no casts", "scan and A_log cast", "norms cast"],
)
def test_what_nemotron_lacks_in_float64_is_casts_of_transformers(but: str, least: float, most: float) -> None:
    """The scan, `A_log`, norms and softmax are cast to float32; without casts trees equal sequences to rounding."""
    model, trees = make("nemotron_h").double(), random_trees(0, 1, 40)
    by = weights([torch.empty(int(n)) for tree in trees for n in tree.response_length])
    found = []
    with Uncast(but):
        for on_trees in (True, False):
            values = []
            if on_trees:
                (batch,) = pack(trees, max_tokens=1 << 20)
                hidden = decode(model, batch).hidden[batch.row]
                logprob = model.lm_head(hidden).log_softmax(-1).gather(1, batch.target[:, None])[:, 0]
                values = batch.to_leaves(logprob)[0]
            else:
                model.set_attn_implementation("eager")
                for leaf in range(trees[0].num_leaves):
                    ids = torch.from_numpy(trees[0].token_id[trees[0].path_rows(leaf)].astype(np.int64))
                    hidden = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
                    every = model.lm_head(hidden).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                    values.append(every[trees[0].prompt_length - 1 :])
            torch.stack([(v * w).sum() for v, w in zip(values, by, strict=True)]).sum().backward()
            found.append(gradients(model))
    assert least <= worst(found[1], found[0])[0] < most
