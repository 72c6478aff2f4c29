"""linear_logprob with the vocabulary split over gloo processes equals the unsharded op, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rolltree.kernels import Objective, PolicyFields, linear_logprob, linear_policy_loss, plan_policy_loss
from rolltree.kernels.linear_logprob import linear_statistics
from rolltree.kernels.linear_logprob.parallel import VocabShards

from ..support.ranks import run_ranks

N, H, K = 9, 16, 3


def given(V: int, M: int | None, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    made: dict[str, Any] = {
        "hidden": torch.randn(N, H, generator=g).to(dtype),
        "weight": torch.randn(V, H, generator=g).to(dtype),
        "target": torch.randint(0, V, (M or N,), generator=g),
        "extra_ids": torch.randint(0, V, (N, K), generator=g),
    }
    made["extra_ids"][0, 0] = -1
    if M is not None:
        made["row"] = torch.randint(0, N, (M,), generator=g)
    if "softcap" in options:
        made["bias"] = torch.randn(V, generator=g).to(dtype)
        made["temperature"] = 0.5 + torch.rand(N, generator=g)
    if options.get("forbidden"):  # the whole first shard, and the last id
        bias = torch.zeros(V, dtype=dtype)
        bias[: options["forbidden"]], bias[-1] = -torch.inf, -torch.inf
        made |= {"bias": bias, "target": made["target"].clamp(options["forbidden"], V - 2), "extra_ids": None}
    return made | {k: v for k, v in options.items() if k == "softcap"}


def run(inputs: dict[str, Any], **more: Any) -> dict[str, Tensor]:
    leaves = {n: inputs[n].clone().requires_grad_() for n in ("hidden", "weight", "bias") if n in inputs}
    out = linear_logprob(**(inputs | leaves), want=("entropy", "sum_p2"), **more)
    values = {n: v for n, v in out._asdict().items() if v is not None}
    g = torch.Generator().manual_seed(1)
    loss = sum((v.nan_to_num().double() * torch.randn(v.shape, generator=g)).sum() for v in values.values())
    grads = torch.autograd.grad(loss, list(leaves.values()))  # type: ignore[arg-type]
    return {n: v.detach() for n, v in values.items()} | {f"d_{n}": d for n, d in zip(leaves, grads, strict=True)}


def policy_loss_of(inputs: dict[str, Any], **more: Any) -> dict[str, Tensor]:
    """linear_policy_loss on the same inputs: loss and gradients, without and with a plan and an accumulator."""
    leaves = {n: inputs[n].clone().requires_grad_() for n in ("hidden", "weight", "bias") if n in inputs}
    rest = {n: inputs[n] for n in ("row", "temperature", "softcap") if n in inputs} | {"bias": leaves.get("bias")}
    advantage = torch.linspace(-1, 1, len(inputs["target"]))
    mask = torch.arange(len(advantage)) % 3 != 1
    fields = PolicyFields.flat(advantage, old_logprob=torch.full_like(advantage, -4.0), mask=mask)
    objective = Objective.preset("dapo", entropy_coef=0.1)
    args = (leaves["hidden"], leaves["weight"], inputs["target"], fields, objective)
    loss = linear_policy_loss(*args, normalizer=9.0, **rest, **more).loss
    grads = torch.autograd.grad(loss, list(leaves.values()))
    found = {"policy_loss": loss.detach()} | {f"policy_d_{n}": d for n, d in zip(leaves, grads, strict=True)}
    V, H = inputs["weight"].shape
    plan = plan_policy_loss(
        fields, objective, num_rows=N, vocabulary=V, hidden_size=H, device="cpu", row=inputs.get("row")
    )
    total = torch.zeros(V, H, dtype=torch.promote_types(inputs["weight"].dtype, torch.float32))
    loss = linear_policy_loss(*args, normalizer=9.0, plan=plan, weight_grad=total, **rest, **more).loss
    loss.backward()
    assert leaves["weight"].grad is None
    found |= {"planned_loss": loss.detach(), "planned_d_hidden": leaves["hidden"].grad, "planned_d_weight": total}
    return found


def mean_of(inputs: dict[str, Any], **more: Any) -> dict[str, Tensor]:
    """The mean log-prob of each target, and its gradients."""
    leaves = {n: inputs[n].clone().requires_grad_() for n in ("hidden", "weight", "bias") if n in inputs}
    rest = {n: inputs[n] for n in ("row", "temperature") if n in inputs}
    args = (leaves["hidden"], leaves["weight"], inputs["target"])
    values = linear_statistics(*args, bias=leaves.get("bias"), want=("mean_logprob",), **rest, **more)["mean_logprob"]
    grads = torch.autograd.grad((values * torch.linspace(-1, 1, len(values))).sum(), list(leaves.values()))
    return {"mean": values.detach()} | {f"mean_d_{n}": d for n, d in zip(leaves, grads, strict=True)}


def everything(inputs: dict[str, Any], **more: Any) -> dict[str, Tensor]:
    finite = "bias" not in inputs or bool(inputs["bias"].isfinite().all())
    return policy_loss_of(inputs, **more) | (mean_of(inputs, **more) if finite else {})


class Case(NamedTuple):
    sizes: list[int]  # of the shards; a rank without one looks on
    M: int | None
    dtype: torch.dtype
    options: dict[str, Any]

    def inputs(self) -> dict[str, Any]:
        return given(sum(self.sizes), self.M, self.dtype, self.options)


CASES = {
    "plain": Case([33, 32], None, torch.float32, {}),
    "everything": Case([7, 50, 20], 30, torch.float32, {"softcap": 5.0}),
    "bf16": Case([40, 25], 20, torch.bfloat16, {"softcap": 5.0}),
    "fp64": Case([12, 21, 3], 20, torch.float64, {"softcap": 5.0}),
    "a shard without probability": Case([20, 30], None, torch.float32, {"forbidden": 20}),
}
RANKS = 3


def rank(r: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=r, world_size=RANKS)
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3)}
    for name, case in CASES.items():
        group, sizes, inputs = groups[len(case.sizes)], case.sizes, case.inputs()
        if r >= len(sizes):
            continue
        begin = sum(sizes[:r])
        mine = inputs | {n: inputs[n][begin : begin + sizes[r]] for n in ("weight", "bias") if n in inputs}
        shards = VocabShards.gather(group, sizes[r], torch.device("cpu")) if case.M is None else group
        got = [run(mine, tp_group=shards) for _ in range(2)]
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*(x.values() for x in got), strict=True))
        wrong = VocabShards(group, [0, *(begin + 1 for begin in range(len(sizes)))])
        with pytest.raises(ValueError, match=rf"weight has {sizes[r]} rows and tp_group says 1 for rank {r}"):
            run(mine, tp_group=wrong)
        torch.save(got[0] | everything(mine, tp_group=shards), f"{results}/{name}.{r}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of all ranks' results for every case: NAME.RANK.pt."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(rank, (str(directory / "store"), str(directory)), RANKS)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_shards_equal_the_whole(results: Path, name: str) -> None:
    case = CASES[name]
    inputs, dtype = case.inputs(), case.dtype
    want = run(inputs) | everything(inputs)
    got = [torch.load(results / f"{name}.{r}.pt") for r in range(len(case.sizes))]
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 5e-6}
    rounded = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else tolerance
    for name, value in want.items():
        if name.endswith(("d_weight", "d_bias")):
            whole = torch.cat([g[name] for g in got])
            torch.testing.assert_close(whole, value, **rounded, equal_nan=True)
            continue
        for one in got:
            bound = rounded if name.endswith("d_hidden") else tolerance
            torch.testing.assert_close(one[name], value, **bound, equal_nan=True)
            assert one[name].nan_to_num().equal(got[0][name].nan_to_num()), f"{name} differs between ranks"
