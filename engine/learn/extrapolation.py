"""NExt: extends the weights of a run with a LoRA adapter along the trajectory that they have taken (arXiv 2604.11446).

The adapter is kept every few updates. From these, for each adapted layer W, follow the largest singular triple ``u,
sigma, v`` of three differences: ``W_t - W_0`` (global), ``W_t - W_(t - 1)`` (local) and ``W_(t + h) - W_t`` (target).
Small networks, one for all vectors of one size, learn the target's from the other two; their prediction from the last
update is added: ``W + scale * u sigma v^T`` with u and v of length 1. Networks, loss and optimiser are those of the
authors' code (github.com/RUCAIBox/NExt); the sign of u, by its largest entry, is inferred.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.lora import NAME, adapted_layers

HIDDEN = 256
KEPT = "trajectory"
"""Beginning of the names of kept adapters among the tensors of a checkpoint."""


class Triple(NamedTuple):
    """The largest singular value of a matrix, and its vectors, whose product is the best matrix of rank 1."""

    u: Tensor  # [out]
    sigma: Tensor  # [1]
    v: Tensor  # [in]


class Trajectory:
    """The adapters of a run at regular updates; see the module's description.

    Args:
        every: updates between two kept adapters.
        horizon: kept adapters from one to its target.
        scale: factor of the extension.
        epochs, lr: of the networks, with AdamW and a cosine to a tenth of ``lr``.
        seed: of the networks' first weights.
    """

    def __init__(
        self,
        *,
        every: int = 10,
        horizon: int = 5,
        scale: float = 1.0,
        epochs: int = 1000,
        lr: float = 2e-5,
        seed: int = 0,
    ) -> None:
        self.every, self.horizon, self.scale = every, horizon, scale
        self.epochs, self.lr, self.seed = epochs, lr, seed
        self.kept: list[dict[str, Tensor]] = []  # in the host's memory; the first is the adapter at the start

    def record(self, model: PreTrainedModel, updates: int) -> None:
        """Keep the adapter if ``updates`` says so; the one before the first update is always kept."""
        if updates == len(self.kept) * self.every:
            sides = {
                f"{name}.{side}": getattr(layer, side)[NAME].weight.detach().float().cpu().clone()
                for name, layer in adapted_layers(model)
                for side in ("lora_A", "lora_B")
            }
            self.kept.append(sides)

    def extension(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the matrix to add to each adapted layer's weight, by the layer's name.

        Raises:
            ValueError: fewer adapters were kept than a target needs.
        """
        count = len(self.kept)
        if count < self.horizon + 2:
            raise ValueError(f"{count} adapters were kept, and the first target needs {self.horizon + 2}")
        layers = {name: float(layer.scaling[NAME]) for name, layer in adapted_layers(model)}
        whole = [[self._triple(name, s, t, 0) for name, s in layers.items()] for t in range(1, count)]
        step = [[self._triple(name, s, t, t - 1) for name, s in layers.items()] for t in range(1, count)]
        ahead = [
            [self._triple(name, s, t + self.horizon, t) for name, s in layers.items()]
            for t in range(1, count - self.horizon)
        ]
        predicted_triples = [Triple(t.u.clone(), t.sigma.clone(), t.v.clone()) for t in whole[-1]]
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            for place in range(3):
                for size in sorted({len(triple[place]) for triple in predicted_triples}):
                    same_size = [i for i, triple in enumerate(predicted_triples) if len(triple[place]) == size]

                    def of(triples: list[Triple], place: int = place, same_size: list[int] = same_size) -> Tensor:
                        return torch.stack([triples[i][place] for i in same_size])

                    predicted = self._learned(*([of(one) for one in history] for history in (whole, step, ahead)))
                    for i, value in zip(same_size, predicted, strict=True):
                        predicted_triples[i][place].copy_(value)
        extensions = (self.scale * t.sigma * torch.outer(t.u / t.u.norm(), t.v / t.v.norm()) for t in predicted_triples)
        return dict(zip(layers, extensions, strict=True))

    def _triple(self, name: str, scaling: float, later: int, earlier: int) -> Triple:
        """Return the triple of a layer's change between two kept adapters, in fp64; the change itself is never made."""
        (b, a), (c, d) = ((self.kept[t][f"{name}.lora_B"], self.kept[t][f"{name}.lora_A"]) for t in (later, earlier))
        left, inner = torch.linalg.qr(scaling * torch.cat([b, -c], 1))
        right, outer = torch.linalg.qr(torch.cat([a, d]).T)
        u, sigma, v = torch.linalg.svd(inner @ outer.T)
        u, v = left @ u[:, 0], right @ v[0]
        sign = 1.0 if u[u.abs().argmax()] >= 0 else -1.0
        return Triple((sign * u).float(), sigma[:1].float(), (sign * v).float())

    def _learned(self, whole: list[Tensor], step: list[Tensor], ahead: list[Tensor]) -> Tensor:
        """Train a network on the vectors ``[n, size]`` of the kept adapters; return what it predicts from the last."""
        network = Predictor(whole[0].shape[1])
        optimizer = torch.optim.AdamW(network.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs, eta_min=0.1 * self.lr)
        for _ in range(self.epochs):
            optimizer.zero_grad()
            for first, second, target in zip(whole, step, ahead, strict=False):  # the last ones have no target yet
                ((network(first, second) - target).abs().sum() / len(ahead)).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            predicted: Tensor = network(whole[-1], step[-1])
        return predicted

    def tensors(self) -> dict[str, Tensor]:
        """Return the kept adapters for a checkpoint."""
        return {f"{KEPT}.{i}/{name}": t for i, sides in enumerate(self.kept) for name, t in sides.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `tensors`; other names are passed over."""
        adapters: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            place, _, rest = name.partition("/")
            if place.startswith(f"{KEPT}."):
                adapters.setdefault(int(place.removeprefix(f"{KEPT}.")), {})[rest] = tensor.cpu()
        self.kept = [adapters[i] for i in sorted(adapters)]


class Predictor(nn.Module):
    """Predicts vectors of one size from a global and a local one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.whole, self.step = _layers(size, size), _layers(size, size)
        self.both = _layers(2 * size, size)

    def forward(self, whole: Tensor, step: Tensor) -> Tensor:
        predicted: Tensor = self.both(torch.cat([self.whole(whole), self.step(step)], -1))
        return predicted


def _layers(size: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(size, HIDDEN), nn.Linear(HIDDEN, size), nn.ReLU(), nn.Linear(size, HIDDEN), nn.Linear(HIDDEN, out)
    )
