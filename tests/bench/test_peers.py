"""Peers of the heads compute what rolltree does, as far as PyTorch can stand in for their kernels, which need a GPU.

The stand-ins have the signatures of liger-kernel 0.8.2 and quack-kernels 0.6.5, and refuse what these refuse.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.bench.ops import linear_logprob, linear_policy_loss
from rolltree.bench.runner import UnsupportedError

CPU = torch.device("cpu")


def nll(x: Tensor, weight: Tensor, target: Tensor, reduction: str = "none") -> Tensor:
    return torch.nn.functional.cross_entropy((x @ weight.T).float(), target, reduction=reduction)


def apply(
    _input: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0, ignore_index: int = -100,
    m_tiles_per_cluster: int = 1, return_entropy: bool = False,
) -> Tensor:  # fmt: skip
    assert not return_entropy
    return nll(_input, weight, target)


def linear_cross_entropy_func(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int = -100, reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:  # fmt: skip
    assert bias is None
    return nll(x, weight, target, reduction)


def chunked_linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, chunk_size: int = 4096, ignore_index: int = -100,
    reduction: str = "mean", tuned: bool = True, use_scaled_exp: bool | None = None,
) -> Tensor:  # fmt: skip
    if reduction not in ("mean", "sum"):
        raise ValueError(f"Invalid reduction: {reduction}")
    return nll(x, weight, target, reduction)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the packages seem installed on a Hopper GPU."""
    contents: dict[str, dict[str, Any]] = {
        "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90": {
            "LigerFusedScaledCrossEntropySM90Function": SimpleNamespace(apply=apply)
        },
        "liger_kernel.ops.fused_linear_scaled_cross_entropy": {
            "LigerFusedLinearScaledCrossEntropyFunction": SimpleNamespace(apply=apply)
        },
        "quack.linear_cross_entropy": {
            "linear_cross_entropy_func": linear_cross_entropy_func,
            "chunked_linear_cross_entropy": chunked_linear_cross_entropy,
        },
    }
    for name, members in contents.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(parts[length - 1]))
        vars(sys.modules[name]).update(members)
    for module in (linear_logprob, linear_policy_loss):
        monkeypatch.setattr(module, "needs_cuda", lambda x: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def gradients(provider: str, x: linear_policy_loss.Inputs) -> Any:
    return linear_policy_loss.BENCH.providers[provider](x)["forward+backward"]()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("provider", ["liger, CuTe", "quack", "quack, mean log-prob"])
@pytest.mark.parametrize("kind", ["all live", "36 % live", "all live, head frozen"])
def test_gradients_of_a_peer_are_those_of_the_loss(provider: str, kind: str) -> None:
    cases = linear_policy_loss.shaped(CPU, N=64, H=16, V=50)
    x = next(case for case in cases if case.name.endswith(f"V=50 {kind}")).make()
    expected = gradients("torch", x)
    if provider == "quack, mean log-prob":
        expected = torch.autograd.grad(nll(x.hidden[x.mask], x.weight, x.target[x.mask], "mean"), x.trained)
    for ours, wanted in zip(gradients(provider, x), expected, strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("provider", ["liger", "quack"])
def test_log_probs_of_a_peer_are_those_of_each_token(provider: str) -> None:
    x = next(linear_logprob.shaped(CPU, N=6, H=16, V=50)).make()
    peer, plain = (linear_logprob.BENCH.providers[name](x) for name in (provider, "torch"))
    torch.testing.assert_close(peer["forward"](), plain["forward"]())
    torch.testing.assert_close(peer["forward+backward"](), plain["forward+backward"]())


@pytest.mark.usefixtures("installed")
def test_a_peer_says_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    x = next(linear_policy_loss.shaped(CPU, N=64, H=16, V=50)).make()
    grouped = replace(x, row=torch.arange(64))
    for provider in ("liger, CuTe", "quack", "quack, mean log-prob"):
        with pytest.raises(UnsupportedError, match="an objective of tokens only"):
            gradients(provider, grouped)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    with pytest.raises(UnsupportedError, match="for Hopper"):
        gradients("liger, CuTe", x)
