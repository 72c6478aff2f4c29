"""NExt: the exported weights of a run with an adapter are extended along its trajectory, by the formula.

The differences, their singular vectors and the predictors are computed here on whole matrices, from the adapters that
the updates of a real run began with.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ...support.real_step import Steps, take_steps

RANK, ALPHA, HORIZON, SCALE, EPOCHS, LR = 4, 8.0, 2, 3.0, 12, 2e-3
FLAGS = (
    f"--model.lora={{rank={RANK},alpha={ALPHA},extrapolate={{every=1,horizon={HORIZON},scale={SCALE},epochs={EPOCHS},"
    f"lr={LR}}}}}",
    "--trainer.lr=0.05", "--trainer.max_tokens=4096", "--algorithm.objective=dapo", "--trainer.prompts_per_step=6",
    "--trainer.self_check=false",
)  # fmt: skip


def run(toml: Path, folder: Path, steps: int) -> Steps:
    return take_steps(toml, folder, *FLAGS, f"--trainer.steps={steps}", unset=("trainer.steps",))


@pytest.fixture(scope="module")
def five(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Steps, Path]:
    folder = tmp_path_factory.mktemp("five")
    return run(toml, folder, 5), folder / "runs" / "tiny"


def deltas(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``s B A`` of every adapted layer."""
    found = {}
    for name, a in weights.items():
        layer, side, _ = name.partition(".lora_A.")
        if side:
            b = weights[name.replace("lora_A", "lora_B")]
            found[layer] = ALPHA / RANK**0.5 * (b.double() @ a.double())
    return found


def largest(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, sigma, v = torch.linalg.svd(matrix)
    sign = torch.sign(u[u[:, 0].abs().argmax(), 0])
    return (sign * u[:, 0]).float(), sigma[:1].float(), (sign * v[0]).float()


def predict(whole: list[Tensor], step: list[Tensor], ahead: list[Tensor]) -> Tensor:
    """Train the two-branch network with an L1 loss on ``[n, size]`` and return its prediction from the newest pair."""
    size = whole[0].shape[1]

    def chain(first: int, last: int) -> list[nn.Linear]:
        return [nn.Linear(first, 256), nn.Linear(256, first), nn.Linear(first, 256), nn.Linear(256, last)]

    def apply(layers: list[nn.Linear], x: Tensor) -> Tensor:
        return layers[3](layers[2](torch.relu(layers[1](layers[0](x)))))

    one, two, both = chain(size, size), chain(size, size), chain(2 * size, size)

    def forward(t: int) -> Tensor:
        return apply(both, torch.cat([apply(one, whole[t]), apply(two, step[t])], 1))

    parameters = [p for layer in (*one, *two, *both) for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LR)
    for epoch in range(EPOCHS):
        optimizer.param_groups[0]["lr"] = LR * (
            0.1 + 0.9 * (1 + torch.cos(torch.tensor(torch.pi * epoch / EPOCHS))) / 2
        )
        optimizer.zero_grad()
        sum((forward(t) - ahead[t]).abs().sum() for t in range(len(ahead))).div(len(ahead)).backward()  # type: ignore[union-attr]
        optimizer.step()
    with torch.no_grad():
        return forward(len(whole) - 1)


def test_the_export_is_extended_by_what_the_trajectory_predicts(five: tuple[Steps, Path], toml: Path) -> None:
    steps, directory = five
    final = {name: p.detach() for name, p in steps.orchestrator.learner.model.named_parameters()}
    states = [deltas(update.weights) for update in steps.updates] + [deltas(final)]
    assert len(states) == 6
    assert all(not delta.any() for delta in states[0].values())
    layers = list(states[0])
    whole = [[largest(states[t][n] - states[0][n]) for n in layers] for t in range(1, 6)]
    step = [[largest(states[t][n] - states[t - 1][n]) for n in layers] for t in range(1, 6)]
    ahead = [[largest(states[t + HORIZON][n] - states[t][n]) for n in layers] for t in range(1, 6 - HORIZON)]
    found: dict[tuple[str, int], Tensor] = {}
    torch.manual_seed(0)
    for place in range(3):
        for size in sorted({len(triple[place]) for triple in whole[0]}):
            mine = [i for i, triple in enumerate(whole[0]) if len(triple[place]) == size]
            given = [[torch.stack([some[i][place] for i in mine]) for some in of] for of in (whole, step, ahead)]
            for i, value in zip(mine, predict(*given), strict=True):
                found[layers[i], place] = value
    base = load_file(toml.parent / "model" / "model.safetensors")
    exported = load_file(directory / "export" / "model.safetensors")
    extended = 0.0
    for name in layers:
        u, sigma, v = (found[name, place] for place in range(3))
        expected = SCALE * sigma * torch.outer(u / u.norm(), v / v.norm())
        added = exported[f"{name}.weight"] - base[f"{name}.weight"] - states[5][name].float()
        assert (added - expected).norm() <= 2e-3 * expected.norm() + 1e-6, name
        extended += float(expected.norm())
    assert extended > 0.1, "the extension is nothing"
    for name, weight in exported.items():
        if name.removesuffix(".weight") not in layers:
            assert torch.equal(weight, base[name])
