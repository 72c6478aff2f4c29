"""Parts of weights, their digests and changes, as processes store them and engines put them together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.engine.fleet import shipping
from rolltree.engine.fleet.shipping import Shipment, Shipper, owned
from rolltree.engine.fleet.workers import InThreads
from rolltree.engine.rollout import digest, packed
from rolltree.engine.rollout.digest import digests, part_digests, whole_digest
from rolltree.engine.rollout.packed import (
    Part,
    pack_changes,
    pack_weights,
    unpack_changes,
    unpack_weights,
)

SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (5, 3), (1, 9), (4, 6, 2), (3, 1, 5)]


def weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {f"w{shape}": torch.randn(shape).to(dtype) for shape in SHAPES}


def blocks(tensors: dict[str, Tensor], by: tuple[int, int]) -> Iterator[list[Part]]:
    """Yield the parts of each of the processes that divide the first two dimensions, as torch chunks them."""
    for row, column in itertools.product(*map(range, by)):
        parts = []
        for name, tensor in tensors.items():
            part, first = tensor, [0] * tensor.dim()
            for dim, (number, count) in enumerate(zip((row, column), by, strict=True)):
                if dim < tensor.dim():
                    step = -(-tensor.shape[dim] // count)
                    begin = min(number * step, tensor.shape[dim])
                    part, first[dim] = part.narrow(dim, begin, min(step, tensor.shape[dim] - begin)), begin
                elif number:
                    part = tensor[:0] if tensor.dim() else None  # type: ignore[assignment]
            if part is not None:
                parts.append(Part(name, part, tuple(first), tuple(tensor.shape)))
        yield parts


@pytest.mark.parametrize("by", [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_make_whole_tensors_and_their_digests(
    by: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "BUCKET_BYTES", 12)
    monkeypatch.setattr(digest, "CHUNK", 8)
    tensors = weights(dtype)
    parts = list(blocks(tensors, by))
    buckets = [bucket for of_process in parts for bucket in pack_weights(of_process)]
    assert all(sum(p.nbytes for p in bucket) <= 12 or len(bucket) == 1 for bucket in buckets)
    whole = unpack_weights(buckets)
    for name, tensor in tensors.items():
        assert whole[name].dtype == dtype
        assert torch.equal(whole[name], tensor), name
    for held in (dtype, torch.bfloat16):
        shares = [part_digests(of_process, dict.fromkeys(tensors, held)) for of_process in parts]
        expected = digests({name: tensor.to(held) for name, tensor in tensors.items()})
        for name in tensors:
            assert whole_digest(share.get(name, 0) for share in shares) == expected[name].digest, name
    assert "w(5, 3)" not in part_digests(parts[0], {"w(7,)": dtype})


def test_a_part_that_is_missing_or_there_twice_is_found() -> None:
    first, second = (list(pack_weights(parts)) for parts in blocks(weights(), (2, 1)))
    for wrong in (first, [*first, *second, *second]):
        with pytest.raises(ValueError, match=r"^The parts of 'w.*' that were sent have \d+ of \d+ elements"):
            unpack_weights(wrong)
        with pytest.raises(ValueError, match="that were sent have"):
            unpack_changes(wrong)


def test_weights_travel_in_buckets_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "BUCKET_BYTES", 64)
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(5, 3),
        "b": torch.randn(30, 2).bfloat16(),
        "c": torch.randn(4, 4).t(),
        "d": torch.tensor(2.0),
        "e": torch.empty(0, 3),
    }
    buckets = list(pack_weights(owned(tensors)))
    assert [[one.name for one in bucket] for bucket in buckets] == [["a"], ["b"], ["b"], ["c"], ["d"]]
    tensors["a"].zero_()  # the buckets are copies
    whole = unpack_weights(buckets)
    assert whole["a"].abs().min() > 0
    for name in "bcd":
        assert whole[name].dtype == tensors[name].dtype
        assert torch.equal(whole[name], tensors[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_changes_of_weights_restore_every_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    old = {
        "some": torch.randn(50, 4).to(dtype),
        "most": torch.randn(50, 4).to(dtype),
        "none": torch.randn(7).to(dtype).t(),
        "one": torch.tensor(1.0).to(dtype),
        "shape": torch.randn(3, 2).to(dtype),
    }
    old["some"][0] = torch.tensor([0.0, float("nan"), -0.0, float("inf")])
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["some"][0] = torch.tensor([-0.0, 1.0, 0.0, float("nan")])  # equal numbers with other bits count
    new["most"][:40] += 1
    new["one"] += 1
    new["shape"] = new["shape"].reshape(2, 3)
    new["added"] = torch.randn(2).to(dtype)
    ((before,), (after,)) = (list(pack_weights(owned(tensors))) for tensors in (old, new))
    changes = pack_changes(before, after)
    assert [one.name for one in changes if one.places is None] == ["most", "one", "shape", "added"]
    assert changes[0].places is not None
    assert changes[0].places.tolist() == [0, 1, 2, 3]
    assert changes[0].nbytes == 4 * (4 + old["some"].element_size())
    for name, change in unpack_changes([changes]).items():
        held = old[name].clone() if name in old and name != "shape" else torch.empty_like(new[name])
        change.apply(held)
        assert change.shape == new[name].shape
        assert digests({name: held}) == digests({name: new[name]})


def test_changes_of_blocks_are_applied_in_their_places() -> None:
    old, new = weights(torch.bfloat16), weights(torch.bfloat16)
    new["w(4, 6, 2)"][1, 3:5, 1] += 1
    new["w(5, 3)"] += 1
    changes = [
        pack_changes(*(next(pack_weights(parts)) for parts in pair))
        for pair in zip(blocks(old, (2, 2)), blocks(new, (2, 2)), strict=True)
    ]
    for name, change in unpack_changes(changes).items():
        change.apply(old[name])
        assert torch.equal(old[name], new[name]), name


def read(shipment: Shipment) -> dict[str, Any]:
    return unpack_weights(bucket.get() for bucket in shipment.whole)


def test_a_shipper_compares_with_the_version_that_engines_have() -> None:
    shipper = Shipper(InThreads.put)
    first = shipper.ship(owned(weights()), 1, None)
    assert first.changes is None
    assert first.nbytes == first.sent_nbytes == sum(tensor.nbytes for tensor in weights().values())
    same = shipper.ship(owned(weights()), 2, 1)
    assert same.sent_nbytes == 0
    assert same.nbytes == first.nbytes
    assert shipper.ship(owned(weights()), 3, 1).changes is None  # engines have an older version than it compares with
    assert shipper.ship(owned(weights(seed=1)), 4, 3).changes is not None
    assert torch.equal(read(same)["w(5, 3)"], weights()["w(5, 3)"])
    for others in ([first], [same, first]):  # a rank that was started anew has nothing to compare with
        joined = Shipment.joined([same, *others])
        assert joined.changes is None
        assert joined.sent_nbytes == joined.nbytes == first.nbytes * (1 + len(others))
    joined = Shipment.joined([same, same])
    assert joined.changes == [*same.changes, *same.changes]  # type: ignore[misc]
    assert joined.sent_nbytes == 0


def test_whole_tensors_of_ranks_are_published_by_one_each() -> None:
    tensors = weights()
    of_ranks = [[part.name for part in owned(tensors, rank, 3)] for rank in range(3)]
    assert sorted(name for names in of_ranks for name in names) == sorted(tensors)
    assert [len(names) for names in of_ranks] == [3, 2, 2]
    assert shipping.digests_of(Source(), {"w(7,)": torch.float32}) == {
        "w(7,)": digests({"w": tensors["w(7,)"]})["w"].digest
    }


class Source:
    def tensors(self) -> dict[str, Tensor]:
        return weights()
