"""Mixtures of experts: records the experts of each token when sampling, and replays them in training.

A router's choice may flip where two experts are nearly equal: by rounding, in another batch, with other kernels. The
token is then computed by other weights, and its log-prob is not the sampler's. Replayed, a token goes to the experts
that the sampler chose; their weights are computed from the current logits of the router, through which it is trained
(Ma et al. 2025, "R3", arXiv 2510.11370; verl, slime and Megatron compute the same).

A router of Transformers chooses by one ``topk`` over the scores of all experts, and computes weights from the scores of
the chosen ones. Its forward is left as it is: while it runs, `_Choosing` puts the given experts in place of those that
``topk`` found, with their scores. Decoder layers get the routes as the keyword argument ``routes``: activation
checkpointing computes a layer again with its keyword arguments, in whichever thread runs the backward pass.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

from ..data.columns import Array
from ..data.segment import Origin
from ..data.tree import TokenTree
from ..errors import UserError
from .fused_layers import replace_forward

ROUTERS = frozenset(
    {
        "AXK1TopkRouter",
        "AfmoeTokenChoiceRouter",
        "Cohere2MoeTopKRouter",
        "DeepseekV2TopkRouter",
        "DeepseekV3TopkRouter",
        "Dots1TopkRouter",
        "Ernie4_5_MoeTopKRouter",
        "ExaoneMoeTopkRouter",
        "FlexOlmoTopKRouter",
        "Gemma4TextRouter",
        "Glm4MoeLiteTopkRouter",
        "Glm4MoeTopkRouter",
        "GptOssTopKRouter",
        "GraniteMoeHybridTopKRouter",
        "GraniteMoeSWATopKRouter",
        "GraniteMoeSharedTopKRouter",
        "GraniteMoeTopKRouter",
        "HunYuanMoEV1Gate",
        "KimiLinearTopkRouter",
        "LagunaTopKRouter",
        "Lfm2MoeTopKRouter",
        "MellumTopKRouter",
        "MiniMaxM2TopKRouter",
        "MixtralTopKRouter",
        "NemotronHTopkRouter",
        "OlmoeTopKRouter",
        "Qwen2MoeTopKRouter",
        "Qwen3MoeTopKRouter",
        "Qwen3NextTopKRouter",
        "Qwen3_5MoeTopKRouter",
        "SolarOpenTopkRouter",
    }
)
"""Classes of routers that choose and weigh experts as described."""
EXPERTS = re.compile(r"Experts$|SparseMoe|MoE$|Moe$|MoeBlock$|Router$|TopK")
"""Names of classes of Transformers that a mixture of experts has."""


class Routes(Protocol):
    """Given to a decoder layer as ``routes``: asked by each router for the experts of its tokens."""

    def choose(self, place: int, router_choice: Tensor) -> Tensor | None:  # [N, k] int64
        """Return the experts that router number ``place`` is to use; None for ``router_choice``, its own."""
        ...


class Replay:
    """Gives the routers recorded experts.

    Args:
        routes: ``[N, layers, k]``, -1 where the router chooses.
    """

    def __init__(self, routes: Tensor) -> None:
        self._routes = routes

    def choose(self, place: int, router_choice: Tensor) -> Tensor:
        recorded = self._routes[:, place].long()
        if recorded.shape != router_choice.shape:
            raise ValueError(
                f"Routes of {list(recorded.shape)} tokens and experts do not fit a router of "
                f"{list(router_choice.shape)}."
            )
        return torch.where(recorded < 0, router_choice, recorded)


class Record:
    """Takes down what the routers of one forward choose."""

    def __init__(self) -> None:
        self._chosen: dict[int, Tensor] = {}

    def choose(self, place: int, router_choice: Tensor) -> None:
        self._chosen[place] = router_choice

    @property
    def empty(self) -> bool:
        """No router was asked."""
        return not self._chosen

    def routes(self) -> Tensor:  # [N, layers, k] int16
        """Return the experts that every router chose."""
        return torch.stack([self._chosen[place] for place in sorted(self._chosen)], dim=1).to(torch.int16)


class Routed(NamedTuple):
    """The routers of a model."""

    layers: int
    k: int
    experts: int


_running: ContextVar[Routes | None] = ContextVar("rolltree_routes", default=None)
_places: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # of routers, in their model
_prepared: weakref.WeakKeyDictionary[nn.Module, Routed] = weakref.WeakKeyDictionary()


def install(model: nn.Module) -> Routed:
    """Prepare the classes of a model's routers and decoder layers, once for the process.

    Raises:
        UserError: the model has no mixture of experts, or one whose routers are not known.
    """
    decoder = _decoder(model)
    if decoder not in _prepared:
        _prepared[decoder] = _prepare(decoder, type(model).__name__)
    return _prepared[decoder]


def replay(model: nn.Module, routes: Tensor) -> Replay:  # [N, layers, k] int16
    """Return what a forward of the model gets as ``routes`` to replay these.

    Raises:
        ValueError: they are those of another model.
    """
    mixture = install(model)
    if tuple(routes.shape[1:]) != (mixture.layers, mixture.k) or (
        routes.numel() and int(routes.max()) >= mixture.experts
    ):
        layers, k = routes.shape[1:]
        raise ValueError(
            f"The recorded routes name {k} experts, up to number {int(routes.max())}, in each of {layers} layers, and "
            f"{type(model).__name__} has {mixture.layers} layers with {mixture.k} of {mixture.experts}; sample with "
            "this model."
        )
    return Replay(routes)


@contextmanager
def asking(model: nn.Module, routes: Routes) -> Iterator[None]:
    """Let the routers of ``model`` ask ``routes`` within the block, under its own forward too, and change no class.

    Nothing is asked by a model without a mixture of experts, with routers that are not known, or with kernels in their
    place.
    """
    try:
        routers = _routers(_decoder(model), type(model).__name__)
    except UserError:
        routers = []
    forwards = [vars(router).get("forward") for router in routers]
    for place, router in enumerate(routers):
        vars(router)["forward"] = functools.partial(_ask, router.forward, _Choosing(routes, place, router))
    try:
        yield
    finally:
        for router, forward in zip(routers, forwards, strict=True):
            del vars(router)["forward"]
            if forward is not None:
                vars(router)["forward"] = forward


def _ask(forward: Any, choosing: _Choosing, *args: Any, **kwargs: Any) -> Any:
    with choosing:
        return forward(*args, **kwargs)


def _decoder(model: nn.Module) -> nn.Module:
    decoder: nn.Module = getattr(model, "get_decoder", lambda: model)()
    return decoder


def _layers(decoder: nn.Module) -> list[nn.Module]:
    return [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]


def _routers(decoder: nn.Module, what: str) -> list[nn.Module]:
    """Return the routers of a model, first layer first.

    Raises:
        UserError: as `install`.
    """
    routers: list[nn.Module] = []
    for layer in _layers(decoder):
        of_layer = [m for m in layer.modules() if _name(m) in ROUTERS]
        unknown = (
            {_name(m) for m in layer.modules() if m is not layer and EXPERTS.search(_name(m))}
            if not of_layer
            else set()
        )
        if unknown or any(getattr(m, "topk_method", None) == "group_limited_greedy" for m in of_layer):
            names = ", ".join(sorted(unknown or {f"{_name(m)} with groups" for m in of_layer}))
            raise UserError(
                f"Routes of '{what}' are neither recorded nor replayed ({names}); set model.replay_routes = false."
            )
        routers += of_layer
    if not routers:
        raise UserError(f"'{what}' has no mixture of experts; set model.replay_routes = false.")
    if len({(_top_k(router), _experts(router)) for router in routers}) > 1:
        raise UserError(f"The layers of '{what}' differ in their number of experts; set model.replay_routes = false.")
    return routers


def _prepare(decoder: nn.Module, what: str) -> Routed:
    routers = _routers(decoder, what)
    for layer in _layers(decoder):
        _wrap(next(c for c in type(layer).__mro__ if c.__module__.startswith("transformers.models.")), _layer_forward)
    for place, router in enumerate(routers):
        _places[router] = place
        _wrap(next(c for c in type(router).__mro__ if c.__name__ in ROUTERS), _router_forward)
    return Routed(len(routers), _top_k(routers[0]), _experts(routers[0]))


def _name(module: nn.Module) -> str:
    """Return the class's name in Transformers, which sharding may have subclassed."""
    return next((c.__name__ for c in type(module).__mro__ if c.__module__.startswith("transformers.models.")), "")


def _experts(router: nn.Module) -> int:
    return next(p.shape[0] for p in router.parameters() if p.dim() == 2)


def _top_k(router: nn.Module) -> int:
    untyped: Any = router
    return int(untyped.top_k if hasattr(untyped, "top_k") else untyped.config.top_k_experts)


def _wrap(cls: Any, forward: Any) -> None:
    """Replace the class's forward by ``forward``, which gets the original, once."""
    if hasattr(cls.forward, "with_routes"):
        return

    def around(original: Any) -> Any:
        @functools.wraps(original)
        def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(original, self, *args, **kwargs)

        wrapped.with_routes = True  # type: ignore[attr-defined]
        return wrapped

    replace_forward(cls, around)


def _layer_forward(original: Any, self: nn.Module, *args: Any, routes: Routes | None = None, **kwargs: Any) -> Any:
    token = _running.set(routes)
    try:
        return original(self, *args, **kwargs)
    finally:
        _running.reset(token)


def _router_forward(original: Any, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    routes = _running.get()
    if routes is None:
        return original(self, *args, **kwargs)
    choosing = _Choosing(routes, _places[self], self)
    with choosing:
        out = original(self, *args, **kwargs)
    if not choosing.used:
        raise RuntimeError(
            f"{_name(self)} did not choose its experts by topk, so no routes were recorded or replayed; load the model "
            "without use_kernels."
        )
    return out


class _Choosing(TorchFunctionMode):
    """Lets ``routes`` choose in place of ``topk`` over the scores of all experts of each token."""

    def __init__(self, routes: Routes, place: int, router: nn.Module) -> None:
        super().__init__()
        self._routes, self._place, self._experts, self._k = routes, place, _experts(router), _top_k(router)
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return out
        scores, router_choice = args[0], out[1]
        if router_choice.shape[-1] != self._k or scores.shape[-1] != self._experts or scores.dim() != 2:
            return out  # groups of experts are chosen first
        self.used = True
        chosen = self._routes.choose(self._place, router_choice)
        return out if chosen is None else torch.return_types.topk((scores.gather(-1, chosen), chosen))


def unknown_routes(tree: TokenTree) -> Array:  # [n] bool
    """Tell of each sampled token in the loss if the experts that computed its predictor are unknown."""
    before = tree.parent_row[tree.loss_mask & (tree.origin == Origin.SAMPLED)]
    return (tree.routes[before] < 0).any((1, 2)) if "routes" in tree.columns else np.ones(len(before), bool)
