"""Losses that the client traces: their numbers, and what a graph may not do."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from .served import datum

from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss  # isort: skip
from tinker.types.custom_loss_graph import CustomLossGraph  # isort: skip

from rolltree.engine.tinker.faults import FaultError  # isort: skip
from rolltree.engine.tinker.graph import Graph  # isort: skip

Traced = tuple[torch.Tensor, dict[str, torch.Tensor]]


def policy(logprobs: Any, logprobs_old: Any, advantages: Any) -> Traced:
    ratio = torch.exp(logprobs - logprobs_old)
    inside = (ratio > 0.8) & (ratio < 1.2)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return loss, {"custom/inside:mean": inside.float().mean(), "custom/loss:sum": loss.detach()}


def odd(logprobs: Any, logprobs_old: Any, advantages: Any) -> Traced:
    margin = (logprobs - logprobs_old)[1:] * 0.5 / logprobs.shape[0]
    kept = torch.where(advantages[1:] > 0, functional.logsigmoid(margin), functional.softplus(margin))
    return -(kept.mean() ** 2) + torch.logsumexp(logprobs, 0), {}


def one() -> Any:
    rng = np.random.default_rng(1)
    old, advantages = (rng.normal(size=5).astype(np.float32) for _ in range(2))
    return datum([1, 2, 3, 4, 5], np.arange(5), logprobs_old=old, advantages=advantages)


def sent(function: Callable[..., Traced], **ranks: int) -> Graph:
    """A loss as the client traces and sends it."""
    handle = trace_loss(function, {"logprobs": 1, **ranks}, "session")
    raw = encode_graph(handle).model_dump_json()
    inputs = [(loss_input.name, loss_input.rank) for loss_input in handle.inputs]
    return Graph(handle.name, inputs, CustomLossGraph.model_validate_json(raw))


@pytest.mark.parametrize("function", [policy, odd])
def test_a_traced_loss_has_the_numbers_of_its_function(function: Callable[..., Traced]) -> None:
    ours = torch.linspace(-3, -0.1, 5, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    example = one()
    loss, metrics = sent(function, logprobs_old=1, advantages=1).run(ours, example)
    wanted, wanted_metrics = function(
        theirs, *(torch.from_numpy(example.inputs[k]) for k in ("logprobs_old", "advantages"))
    )
    assert float(loss.detach()) == float(wanted.detach())
    assert metrics == {name: float(value.detach()) for name, value in wanted_metrics.items()}
    (a,), (b,) = torch.autograd.grad(loss, [ours]), torch.autograd.grad(wanted, [theirs])
    assert torch.equal(a, b)


def graph(*nodes: dict[str, Any], output: Any = None) -> CustomLossGraph:
    first = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
    last = {
        "op": "output",
        "name": "output",
        "target": "output",
        "args": [output or [{"ref": nodes[-1]["name"]}, {"dict": {}}]],
    }
    return CustomLossGraph.model_validate({"nodes": [first, *nodes, last]})


def call(target: str, *args: Any, op: str = "call_function", name: str = "x", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


LP = {"ref": "logprobs"}


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (call("os.system", "true"), "calls os.system, which this server does not allow"),
        (call("builtins.eval", "1"), "calls builtins.eval"),
        (call("torch.load", "file"), "calls torch.load"),
        (call("torch.ops.aten.add", LP, LP), "calls torch.ops"),
        (call("torch.zeros", 10**12), "calls torch.zeros"),
        (call("backward", LP, op="call_method"), "calls the method backward"),
        (call("__class__", LP, op="call_method"), "calls the method __class__"),
        (call("numpy", LP, op="call_method"), "calls the method numpy"),
        (call("resize_", LP, [10**9], op="call_method"), "calls the method resize_"),
        (call("layer", LP, op="call_module"), "has a node 'call_module'"),
        (call("weight", op="get_attr"), "has a node 'get_attr'"),
        (call("torch.exp", {"ref": "later"}), "uses 'later' before it is computed"),
    ],
)
def test_an_operation_that_is_not_allowed_is_refused_when_the_loss_is_created(node: dict[str, Any], said: str) -> None:
    with pytest.raises(FaultError, match=said):
        Graph("bad", [("logprobs", 1)], graph(node))


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([call("getattr", LP, "__class__")], "reads the attribute '__class__'"),
        ([call("getattr", LP, "grad_fn")], "reads the attribute 'grad_fn'"),
        ([call("operator.mul", "a", 10**9)], "on what are no tensors or numbers"),
        ([call("operator.mul", [1], 10**9)], "on what are no tensors or numbers"),
        ([call("operator.pow", 10, 10**9)], "fails at x = operator.pow"),
        (
            [
                call("unsqueeze", LP, 0, op="call_method", name="a"),
                call("unsqueeze", LP, 1, op="call_method", name="b"),
                call("operator.mul", {"ref": "a"}, {"ref": "b"}),
            ],
            "would have 36000000 values",
        ),
        ([call("torch.exp", LP)], "must return a tensor of one number"),
        ([call("torch.sum", LP, dim=7)], "fails at x = torch.sum"),
        ([call("sum", "text", op="call_method")], "calls sum on what is no tensor"),
        ([call("torch.sum", LP, {"layout": "strided"})], "argument of kind 'layout'"),
    ],
)
def test_what_a_graph_may_not_do_fails_with_a_sentence(nodes: list[dict[str, Any]], said: str) -> None:
    made = Graph("bad", [("logprobs", 1)], graph(*nodes))
    with pytest.raises(FaultError, match=said):
        made.run(torch.zeros(6000, requires_grad=True), datum([1], np.zeros(1, np.int64)))


def test_a_result_that_grows_node_by_node_is_stopped() -> None:
    nodes = [call("torch.cat", [{"ref": "logprobs" if i == 0 else f"x{i - 1}"}] * 2, name=f"x{i}") for i in range(60)]
    with pytest.raises(FaultError, match="have over 16777216 values"):
        Graph("bomb", [("logprobs", 1)], graph(*nodes)).run(torch.zeros(1000), datum([1], np.zeros(1, np.int64)))


def test_every_operator_of_the_list_is_python_s_own() -> None:
    from rolltree.engine.tinker.graph import FUNCTIONS, METHODS

    assert FUNCTIONS["operator.add"] is operator.add
    assert not {name for name in METHODS if name.endswith("_")}
    assert not {name for name in FUNCTIONS if name.rpartition(".")[2] in ("eval", "exec", "load", "save", "from_file")}
