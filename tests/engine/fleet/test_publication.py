"""A sampler with a copy of the weights is checked after each update: one that samples another policy ends the run."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rolltree.engine import load_config
from rolltree.engine.app.assembly import run as app_build
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.errors import RunError
from rolltree.engine.rollout.digest import CHUNK, Held, digests
from rolltree.engine.rollout.native import engine as native

from ..loop.test_staleness import QUICK, Run
from ..loop.test_staleness import THREAD as IN_THREAD

SLOW = pytest.mark.slow
FEW = ["--trainer.prompts_per_step=2", "--checkpoint.every=9"]
THREAD = [*IN_THREAD, *FEW]


def copied(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> None:
    """Give the sampler of every run a copy of the model in ``dtype``."""
    monkeypatch.setattr(
        app_build, "sampled_model", lambda config, model: copy.deepcopy(model).to(dtype).requires_grad_(False)
    )


def loads(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Make the native engine load what ``change`` returns for its model and the weights that were sent."""
    right = native._copy_weights
    monkeypatch.setattr(native, "_copy_weights", lambda model, sent: right(model, change(model, dict(sent))))


def ignores(model: Any, sent: dict[str, Tensor]) -> dict[str, Tensor]:
    return {}


def only_some(model: Any, sent: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in sent.items() if "down_proj" not in name}


def swaps_two_layers(model: Any, sent: dict[str, Tensor]) -> dict[str, Tensor]:
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    found = {}
    for name, tensor in sent.items():
        (own,) = [layer for layer in other if layer in name] or [""]
        found[name.replace(own, other[own]) if own else name] = tensor
    return found


class OneLate:
    """Loads the weights of the update before."""

    before: dict[str, Tensor] | None = None

    def __call__(self, model: Any, sent: dict[str, Tensor]) -> dict[str, Tensor]:
        now = {name: tensor.detach().clone() for name, tensor in sent.items()}
        self.before, old = now, self.before
        return old or now


def off_by_a_bit(model: Any, sent: dict[str, Tensor]) -> dict[str, Tensor]:
    changed = sent["model.norm.weight"].detach().clone()
    changed.view(torch.int32)[3] += 1
    return sent | {"model.norm.weight": changed}


def metrics(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.config.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("fault", "update"),
    [
        (ignores, 1),
        pytest.param(only_some, 1, marks=SLOW),
        (swaps_two_layers, 1),
        pytest.param(OneLate(), 2, marks=SLOW),
        (off_by_a_bit, 1),
    ],
    ids=["ignores", "only_some", "swaps_two_layers", "one_late", "off_by_a_bit"],
)
def test_a_sampler_that_holds_other_weights_ends_the_run_at_once(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, update: int
) -> None:
    """The learning rate is so small that the log-probs would not tell."""
    loads(monkeypatch, fault)
    run = Run(toml, tmp_path, *THREAD, "--trainer.lr=1e-6")
    with pytest.raises(RunError, match=rf"^After update {update} the sampler holds other weights than were sent: "):
        run.run()
    assert run.loop.learner.trainer.updates == update
    assert len(metrics(run)) == run.loop.step + 1  # the step is not one of the run


@pytest.mark.check
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=SLOW), torch.bfloat16])
def test_synchronous_runs_with_a_copy(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """A right copy is accepted, also one in bf16; one that ignores an update of 1e-6 is not."""
    copied(monkeypatch, dtype)
    run = Run(toml, tmp_path / "right", *FEW, "--trainer.steps=2", "--trainer.lr=1e-6").run()
    found = run.loop.controller.publication.difference
    assert found is not None
    assert found < (1e-5 if dtype == torch.float32 else 0.02)
    assert dtype == torch.float32 or found > 1e-5  # it is a difference between two precisions
    loads(monkeypatch, ignores)
    with pytest.raises(RunError, match=r"^After update 1 the sampler holds other weights"):
        Run(toml, tmp_path / "wrong", *FEW, "--trainer.steps=2", "--trainer.lr=1e-6").run()


def lies(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Let the sampler claim to hold what was sent."""
    held = lambda: digests(run.loop.learner.weights().tensors())  # noqa: E731
    monkeypatch.setattr(run.loop.sampler, "digests", held)


@pytest.mark.check(but=1)
@pytest.mark.parametrize("fault", [only_some, swaps_two_layers])
def test_the_canary_tells_alone_where_digests_do_not(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    loads(monkeypatch, fault)
    run = Run(toml, tmp_path, *THREAD, "--trainer.lr=0.05")
    lies(monkeypatch, run)
    with pytest.raises(RunError, match=r"^After update 1 the sampler's log-probs of a canary prompt differ .* nats"):
        run.run()


def test_keys_of_an_old_policy_in_the_cache_are_found(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are right, but the canary's prompt is answered with the keys that older ones computed."""
    run = Run(toml, tmp_path, *THREAD, "--trainer.lr=0.05")
    engine = run.loop.sampler.engine
    right = engine.update_weights
    monkeypatch.setattr(engine.loop, "_key", lambda request: 0)  # usually that of the version
    monkeypatch.setattr(engine, "update_weights", lambda w, version, keep_kv: right(w, version=version, keep_kv=True))
    with pytest.raises(RunError, match=r"^After update 1 the sampler's log-probs of a canary prompt differ"):
        run.run()


def test_a_wrong_version_ends_the_run(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(toml, tmp_path, *THREAD)
    engine = run.loop.sampler.engine
    right = engine.update_weights
    monkeypatch.setattr(engine, "update_weights", lambda w, version, keep_kv: right(w, version=7, keep_kv=keep_kv))
    with pytest.raises(RunError, match=r"^After update 1 the sampler records version 7 for its tokens; "):
        run.run()


def test_another_model_is_found_before_the_first_step(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(toml, tmp_path, *THREAD)
    with torch.no_grad():
        run.loop.sampler.engine.model.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    with pytest.raises(RunError, match=r"^After update 0 the sampler holds other weights .*layers\.1\.mlp\.up_proj"):
        run.run()
    assert run.loop.step == 0


@pytest.mark.slow
@pytest.mark.parametrize("keep_keys", ["true", "false"])
def test_a_right_sampler_is_checked_at_each_update_and_goes_on(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_keys: str
) -> None:
    """The check also holds with unfinished responses in flight, whose tokens stay in the ledger, and after a resume."""
    options = [*IN_THREAD, "--trainer.lr=0.05", "--trainer.steps=3", f"--loop.keep_keys={keep_keys}"]
    run = Run(toml, tmp_path, *options)
    asked: list[int] = []
    probe = run.loop.sampler.probe

    def watched(prompts: Any, *, n: int, tokens: int, seed: int) -> Any:
        trees = probe(prompts, n=n, tokens=tokens, seed=seed)
        asked.append(seed)
        assert [tree.num_leaves for tree in trees] == [n]
        assert all((tree.response_length == tokens).all() for tree in trees)
        assert np.isfinite(trees[0].behaviour_logprob[trees[0].loss_mask]).all()
        return trees

    monkeypatch.setattr(run.loop.sampler, "probe", watched)
    run.run()
    updates = run.loop.learner.trainer.updates
    assert asked == list(range(updates + 1))
    assert updates >= 2
    assert run.loop.controller.publication.difference < 1e-5
    loads(monkeypatch, ignores)
    config = load_config(toml, [*QUICK, f"--output_dir={tmp_path}/runs", *options, "--trainer.steps=4"])
    with pytest.raises(RunError, match=rf"^After update {updates} the sampler holds other weights"):
        build(config, console=Console(), resume=True).run()


@pytest.mark.check
def test_a_sampler_of_the_trained_module_is_not_asked(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.NativeEngine, "digests", None)
    assert Run(toml, tmp_path / "a", *FEW, "--trainer.steps=1").run().loop.controller.publication.difference is None
    loads(monkeypatch, ignores)
    off = [*THREAD, "--trainer.steps=1", "--trainer.self_check=false"]
    assert Run(toml, tmp_path / "b", *off).run().loop.step == 1


# -- digests -----------------------------------------------------------------------------------------------------------


def expected(tensor: Tensor) -> int:
    """Compute the digest of a tensor of one chunk in Python's integers."""
    size = tensor.element_size()
    bits = np.frombuffer(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), f"i{size}")
    total = 0
    for i, value in enumerate(bits.tolist(), start=1):
        mixed = value ^ wrapped(i * 0x9E3779B97F4A7C15)
        mixed = wrapped((mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9)
        total += (mixed ^ (mixed >> 31)) * 0x9E3779B97F4A7C15
    return wrapped(total)


def wrapped(value: int) -> int:
    """Return ``value`` modulo 2^64 as a signed number."""
    return (value + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_digests_depend_on_every_bit_and_on_the_order(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(3, 700, dtype=dtype)
    before = tensor.clone()
    (held,) = digests({"a": tensor}).values()
    assert torch.equal(tensor, before)
    assert held == Held(dtype, expected(tensor))
    assert digests({"a": tensor.clone().t().contiguous().t()})["a"] == held  # strides are not its bits
    seen = {held.digest}
    for i in range(0, 2100, 100):
        for bit in range(8 * tensor.element_size()):
            other = tensor.clone()
            integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[other.element_size()]
            other.view(-1).view(integers)[i] ^= (1 << bit) if bit < 8 * other.element_size() - 1 else -(1 << bit)
            seen.add(digests({"a": other})["a"].digest)
    assert len(seen) == 1 + 21 * 8 * tensor.element_size()
    for other in (tensor[[1, 0, 2]], tensor.flip(0), tensor[:2], torch.cat([tensor, tensor.new_zeros(1, 700)])):
        assert digests({"a": other})["a"].digest not in seen


def test_digests_of_tensors_of_several_chunks() -> None:
    bits = torch.arange(2 * CHUNK + 5, dtype=torch.int16)
    held = digests({"a": bits, "b": bits[:0]})
    swapped = torch.cat([bits[CHUNK : 2 * CHUNK], bits[:CHUNK], bits[2 * CHUNK :]])
    swapped[0] += 1  # the first two chunks of `arange` modulo 2^16 are equal
    assert digests({"a": swapped})["a"] != held["a"]
    moved = bits.clone()
    moved[0], moved[CHUNK] = moved[0] + 1, moved[CHUNK] - 1
    assert digests({"a": moved})["a"] != held["a"]
    assert held["b"] == Held(torch.int16, 0)
