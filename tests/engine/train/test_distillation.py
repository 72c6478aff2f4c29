"""Terms of whole distributions: on trees as on flat paths of plain Transformers, and what a wrong teacher changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.engine import backward, pack
from rolltree.engine.methods.selections import SELECTIONS
from rolltree.engine.model.roles import Role
from rolltree.engine.train.distillation import COUNTED, DivergenceTerm
from rolltree.engine.train.terms import TokenTerm
from rolltree.kernels import Objective

from ...kernels.test_linear_divergence import OPTIONS, kind_name
from ..model.test_tree_equals_flat import close, make_models
from .test_terms import RESPONSES, gradients, group

Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any, Any]:
    """The policy on trees and as plain Transformers computes it, and a teacher: the policy with other weights."""
    ours, theirs = make_models("qwen3")
    teacher, _ = make_models("qwen3")
    with torch.no_grad():
        for p in teacher.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return ours, theirs, teacher.requires_grad_(False)


def term(teacher: Any, options: dict[str, Any], **more: Any) -> DivergenceTerm:
    made = DivergenceTerm(COUNTED, "distill", options=options, **more)
    made.teacher.role = Role("teacher_logprob", teacher, scores=False)
    return made


def run(models: Any, terms: list[Any], max_tokens: int = 1000, temperature: float = 1.0) -> tuple[Any, list[Tensor]]:
    ours, _, _ = models
    tree = group()
    for t in terms:
        t.prepare([tree])
    outs = []
    for batch in pack([tree], max_tokens=max_tokens, in_pieces=True):
        on = [t.on(batch, t.normalizer([tree]), True, 0.5) for t in terms]
        outs.append(backward(ours, batch, on, temperature=temperature))
    (out,) = outs
    return out, gradients(ours)


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp() * (a - b)).sum(-1)


def divergence(p: Tensor, q: Tensor, kind: str, beta: float = 0.5, alpha: float = 0.1) -> Tensor:
    def mixture(share: float) -> Tensor:
        return (share * p.exp() + (1 - share) * q.exp()).log()

    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, mixture(beta)) + (1 - beta) * kl(q, mixture(beta)),
        "skew_forward_kl": lambda: kl(p, mixture(alpha)),
        "skew_reverse_kl": lambda: kl(q, mixture(1 - alpha)),
        "total_variation": lambda: (p.exp() - q.exp()).abs().sum(-1) / 2,
    }[kind]()


def flat(
    models: Any,
    options: dict[str, Any],
    temperature: float = 1.0,
    shift: int = 0,
    leaves: Any = None,
    prompt: list[int] | None = None,
) -> Tensor:
    """The mean over the tokens of all responses, each a sequence of its own, by plain Transformers."""
    _, theirs, teacher = models
    plain, _ = make_models("qwen3")
    plain.load_state_dict(teacher.state_dict())
    plain.set_attn_implementation("eager")
    total, count = torch.zeros(()), 0
    for leaf, s in enumerate(group().flatten()):
        if leaves is not None and leaf not in leaves:
            continue
        ids = torch.tensor([s.prompt + s.response])
        at = slice(len(s.prompt) - 1, ids.shape[1] - 1)
        q = (theirs(ids).logits[0, at] / temperature).log_softmax(-1)
        read = s.prompt if prompt is None else prompt
        with torch.no_grad():
            logits = plain(torch.tensor([read + s.response])).logits[0, len(read) - 1 : -1]
            p = (logits.roll(shift, 0) / temperature).log_softmax(-1)
        total, count = total + divergence(p, q, **options).sum(), count + len(s.response)
    return total / count


@pytest.mark.parametrize("max_tokens", [1000, 6])
@pytest.mark.parametrize("options", OPTIONS, ids=kind_name)
def test_a_tree_equals_its_flat_paths(models: Any, options: dict[str, Any], max_tokens: int) -> None:
    """Also in pieces of six tokens; a row that siblings share is compared once, with the sum of their weights."""
    out, ours = run(models, [term(models[2], options)], max_tokens, temperature=0.8)
    want = 0.5 * flat(models, options, temperature=0.8)
    want.backward()
    assert float(out.loss) == pytest.approx(float(want), rel=1e-6, abs=1e-7)
    total, count = out.metrics["distill/divergence"]
    assert float(total / count) == pytest.approx(2 * float(want), rel=1e-6, abs=1e-7)
    assert float(count) == sum(map(len, RESPONSES))
    for a, b in zip(ours, gradients(models[1]), strict=True):
        close(a, b, 2e-5)


@pytest.mark.parametrize("max_tokens", [1000, 7])
def test_a_teacher_that_reads_another_prompt(models: Any, max_tokens: int) -> None:
    """A longer one: rows of the teacher stand at other positions than the policy's."""
    options, prompt = {"kind": "jsd", "beta": 0.3}, [1, 2, 9, 9, 4, 3, 3]
    out, ours = run(models, [term(models[2], options, reads=lambda tree: prompt)], max_tokens)
    want = 0.5 * flat(models, options, prompt=prompt)
    want.backward()
    assert float(out.loss) == pytest.approx(float(want), rel=1e-6, abs=1e-7)
    for a, b in zip(ours, gradients(models[1]), strict=True):
        close(a, b, 2e-5)
    shifted = flat(models, options, prompt=prompt, shift=1)
    assert abs(2 * float(out.loss) / float(shifted) - 1) > 1e-3


def test_a_selection_of_responses(models: Any) -> None:
    options = {"kind": "forward_kl"}
    out, ours = run(models, [term(models[2], options, select=SELECTIONS["best"])])
    (best,) = [leaf for leaf, weight in enumerate(SELECTIONS["best"](group())) if weight]
    want = 0.5 * flat(models, options, leaves=[best])
    want.backward()
    assert float(out.loss) == pytest.approx(float(want), rel=1e-6)
    for a, b in zip(ours, gradients(models[1]), strict=True):
        close(a, b, 2e-5)


@pytest.mark.parametrize("max_tokens", [1000, 6])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_beside_an_objective(models: Any, name: str, max_tokens: int) -> None:
    """The sum of both, also where the objective reads whole paths and the tree is in pieces."""
    of_policy = TokenTerm(Objective.preset(name))
    distilled = term(models[2], {"kind": "jsd", "beta": 0.3})
    both, grads = run(models, [of_policy, distilled], max_tokens)
    (one, first), (two, second) = (run(models, [t], max_tokens) for t in (of_policy, distilled))
    assert float(both.loss) == pytest.approx(float(one.loss + two.loss), rel=1e-6, abs=1e-7)
    assert both.metrics.keys() == one.metrics.keys() | two.metrics.keys()
    assert both.losses.keys() == {"actor", "distill"}
    for a, b, c in zip(grads, first, second, strict=True):
        close(a, b + c, 2e-5)


def test_a_teacher_of_other_rows_or_temperature_is_seen(models: Any) -> None:
    out, _ = run(models, [term(models[2], {"kind": "reverse_kl"})])
    for changes in ({"shift": 1}, {"temperature": 1.1}):
        assert abs(2 * float(out.loss) / float(flat(models, {"kind": "reverse_kl"}, **changes)) - 1) > 1e-3


def test_the_policy_is_no_teacher_of_itself(models: Any) -> None:
    """Its divergence from its own weights is 0, and those stay in place; from a copy of others it is that of these."""
    ours, _, teacher = models
    before = {name: p.clone() for name, p in ours.named_parameters()}
    alike = DivergenceTerm(COUNTED, "distill", options={"kind": "forward_kl"})
    alike.teacher.role = Role("teacher_logprob", ours, Role.snapshot(ours), scores=False)
    out, grads = run(models, [alike])
    assert abs(float(out.loss)) < 1e-9
    assert all(g.abs().max() < 1e-6 for g in grads)
    alike.teacher.role = Role("teacher_logprob", ours, Role.snapshot(teacher), scores=False)
    got, _ = run(models, [alike])
    want, _ = run(models, [term(teacher, {"kind": "forward_kl"})])
    assert float(got.loss) == pytest.approx(float(want.loss), rel=1e-6)
    assert all(torch.equal(p, before[name]) for name, p in ours.named_parameters())
