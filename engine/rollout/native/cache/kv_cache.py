"""The KV cache: the node table on the host, the pages on the device, and the attention that reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltree.kernels import use_backend
from rolltree.kernels.machine import has
from rolltree.kernels.tree_decode import DecodePlan, tree_decode_attention

from ....batches.kv_store import AttentionRule
from ....errors import UserError
from ....model.both_ways import Block, attend_both_ways
from ..routes import RouteCache
from .addresses import PageMemory
from .host_keys import HostKeys
from .states import StateCache

try:
    if not has("_host"):
        raise ImportError("ROLLTREE_WITHOUT names _host")
    from .._host import KvExhaustedError, KvTree

    BUILT = True
except ImportError:  # installed without a compiler: only rollouts do not work
    BUILT = False

    class KvExhaustedError(RuntimeError):  # type: ignore[no-redef]
        """Replaces the class of the compiled module."""


Array = npt.NDArray[Any]

__all__ = ["KvCache", "KvExhaustedError", "KvTree"]


@dataclass(frozen=True)
class LayerPages:
    """The pages of one layer and the present step: a `KVStore` that ignores the layer's number."""

    k: Tensor  # [P + 1, page, Hkv, D]
    v: Tensor
    slots: Tensor  # [N] int64
    plan: DecodePlan

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [N, Hq, D]
        key: Tensor,  # [N, Hkv, D]
        value: Tensor,  # [N, Hkv, D]
        rule: AttentionRule,
    ) -> Tensor:  # [N, Hq, D]
        """Store the new keys and values, then attend over every row's path."""
        self.k.view(-1, *key.shape[1:]).index_copy_(0, self.slots, key)
        self.v.view(-1, *value.shape[1:]).index_copy_(0, self.slots, value)
        if rule.chunk is not None:
            raise ValueError("Chunked attention is not supported by the native engine; use another rollout backend.")
        return decode_attention(query, self.k, self.v, self.plan, rule)


def decode_attention(query: Tensor, k: Tensor, v: Tensor, plan: DecodePlan, rule: AttentionRule) -> Tensor:
    """Return the attention [N, Hq, D] of a step's rows over the pages of a layer."""
    out, _ = tree_decode_attention(
        query, k, v, plan, scale=rule.scale, window=rule.window, softcap=rule.softcap, sink=rule.sink
    )
    return out


class KvCache:
    """Pages of keys and values for every layer, and the tree that owns them.

    `begin_step` sets the slots of a step's new keys and the nodes that its rows read; then the model's attention calls
    `attend` once for each layer. The pages of a layer are made at its first `attend`, or before by `make_pages`.

    Args:
        kv_tokens: capacity in tokens.
        page_size: tokens of a page.
        host_tokens: tokens whose keys are kept in host memory after preemption dropped them.
        states: the states of recurrent layers, for a model that has them.
        record_routes: keep the experts that computed each key too.
        memory: where pages are made that keep their addresses without their memory; None: PyTorch's allocator.
        debug: compare the attention of every layer and step with the reference.

    Raises:
        UserError: the compiled module is missing.
    """

    def __init__(
        self,
        kv_tokens: int,
        page_size: int,
        device: torch.device,
        *,
        host_tokens: int = 0,
        states: StateCache | None = None,
        record_routes: bool = False,
        memory: PageMemory | None = None,
        debug: bool = False,
    ) -> None:
        if not BUILT:
            raise UserError(
                "Rollouts need the compiled module rolltree.engine.rollout.native._host; install a C++ compiler, "
                "reinstall rolltree, and see `rolltree doctor`."
            )
        self.tree = KvTree(kv_tokens // page_size, page_size)
        self.spare_slot = self.tree.num_pages * page_size
        """A slot that no node reads: keys of tokens that are only queried again are written here."""
        self.states = states
        self.memory = memory
        self.routes = RouteCache(self.tree.num_pages + 1, page_size) if record_routes else None
        self.groups: list[int] = []
        """Distinct numbers of query heads for each key head, of the layers with pages."""
        self._device = device
        self._debug = debug
        self._host = HostKeys(host_tokens) if host_tokens else None
        if self._host is not None:
            self.tree.record_drops()
        self._pages: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> k, v: [P + 1, page, Hkv, D]
        self._slots: Tensor | None = None  # [N] int64
        self._plan: DecodePlan | None = None
        self._blocks: tuple[Block, ...] = ()
        self._attended: set[int] = set()  # layers, in the present step

    @property
    def ready(self) -> bool:
        """True if the layers have their pages."""
        return bool(self._pages)

    @property
    def pages(self) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Keys and values by layer, [P + 1, page, Hkv, D] each; `free` replaces the mapping by a new object."""
        return self._pages

    # -- keys of branches -------------------------------------------------------------------------------------------

    def start(self, key: int, tokens: Array) -> int:  # [n] int32
        """Return the node that ends a path of ``tokens``, found or made, and count a new holder for it.

        Args:
            key: number of the weights that compute the keys; paths of different weights share no nodes.
        """
        return int(self.tree.insert(key, tokens))

    def resume(self, key: int, tokens: Array) -> int:  # [n] int32
        """Return an open node that holds the last token of a path, below the node that ends the rest of it."""
        return self.append(self.start(key, tokens[:-1]), tokens[-1:])

    def fork(self, node: int, n: int) -> list[int]:
        """Return ``n`` open nodes below ``node``; they replace one holder of it."""
        return list(self.tree.fork(node, n))

    def append(self, node: int, tokens: Array) -> int:  # [n] int32
        """Return an open node below ``node`` that holds ``tokens``; a step computes their keys."""
        (below,) = self.tree.fork(node, 1)
        self.tree.extend_by(below, tokens)
        return int(below)

    def extend(self, node: int, tokens: Sequence[int]) -> None:
        """Add tokens to an open node; their keys are missing."""
        self.tree.extend_by(node, tokens)

    def length(self, node: int) -> int:
        """Return the number of tokens on the path to the end of ``node``."""
        return int(self.tree.end(node))

    def rewind(self, node: int, position: int) -> int:
        """Return a node that ends the first ``position`` tokens of the path of ``node``, and count a new holder."""
        return int(self.tree.rewind(node, position))

    def truncate(self, nodes: Array, positions: Array) -> None:  # [n] int64 each
        """Drop the tokens of open nodes from ``positions`` on."""
        self.tree.truncate(nodes, positions)

    def release(self, node: int) -> None:
        """Remove a holder; the keys stay until their pages are needed."""
        self.tree.release(node)

    def evict_all(self) -> None:
        """Drop every key that can be computed again."""
        self.tree.evict_others(np.zeros(0, np.int64), self.tree.num_pages)

    def forget_prefixes(self) -> None:
        """Drop the keys, and the recurrent states, that are kept for later prompts."""
        self.tree.forget()
        if self.states is not None:
            self.states.forget()

    # -- steps ------------------------------------------------------------------------------------------------------

    def record_routes(self, routes: Tensor) -> None:  # [N, layers, k] int16
        """Store the experts of the present step's rows."""
        assert self.routes is not None
        assert self._slots is not None
        self.routes.write(self._slots, routes)

    def begin_step(self, slots: Tensor, plan: DecodePlan, blocks: tuple[Block, ...] = ()) -> None:  # slots: [N] int64
        """Begin a step, some of whose rows see the rest of their picture too: ``seen`` of ``blocks`` are slots."""
        self._slots, self._plan, self._blocks = slots, plan.located(self.tree.page_size), blocks
        self._attended.clear()

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [N, Hq, D]
        key: Tensor,  # [N, Hkv, D]
        value: Tensor,  # [N, Hkv, D]
        rule: AttentionRule,
    ) -> Tensor:  # [N, Hq, D]
        """Store the new keys and values of a layer, then attend over every row's path.

        Raises:
            RuntimeError: with ``debug``, the attention differs from the reference.
            ValueError: a layer attends twice in a step, and a layer has pages for one.
        """
        if layer_idx in self._attended:
            raise ValueError(
                f"Layer {layer_idx} attends twice in a step, which the native engine does not support; use another "
                "rollout backend."
            )
        self._attended.add(layer_idx)
        self.make_pages(layer_idx, key, query.shape[1] // key.shape[1])
        out = self.layer(layer_idx).attend(layer_idx, query, key, value, rule)
        if self._debug:
            assert self._plan is not None
            with use_backend("reference"):
                expected = decode_attention(query, *self._pages[layer_idx], self._plan, rule)
            _compare(layer_idx, out, expected)
        if self._blocks:
            k, v = (pages.flatten(0, 1) for pages in self._pages[layer_idx])
            out = attend_both_ways(out, query, k, v, self._blocks, rule)
        return out

    def make_pages(self, layer_idx: int, like: Tensor, group: int) -> None:  # [N, Hkv, D]
        """Make pages for a layer without any: for keys ``like`` these, each read by ``group`` query heads.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory; no layer has pages then.
        """
        if layer_idx not in self._pages:
            try:
                self._pages[layer_idx] = (self._new_pages(like), self._new_pages(like))
            except RuntimeError:
                self._pages = {}  # no step has used those of the other layers
                raise
            if group not in self.groups:
                self.groups.append(group)

    def layer(self, layer_idx: int) -> LayerPages:
        """Return the pages of a layer with the slots and the plan of the present step."""
        assert self._slots is not None
        assert self._plan is not None
        return LayerPages(*self._pages[layer_idx], self._slots, self._plan)

    def save_dropped(self) -> None:
        """Copy dropped keys to the host; must precede the next writes to their pages."""
        if self._host is not None:
            self._host.save(self.tree.take_dropped(), self._kept_on_host())

    def restore(self, node: int, begin: int, count: int) -> int:
        """Append a node's missing keys [begin, begin + count) from the host, up to the first that it lacks.

        Returns:
            The number of restored keys. There must be pages for all.
        """
        if self._host is None:
            return 0
        self.save_dropped()
        serial, position, done = self.tree.serial(node), self.tree.position(node) + begin, 0
        while done < count and (run := self._host.find(serial, position + done)) is not None:
            restored = min(count - done, run.end - position - done)
            slots = self.tree.append(np.array([node]), np.array([restored]))
            self._host.restore(run, position + done, torch.from_numpy(slots).to(self._device), self._kept_on_host())
            done += restored
        return done

    def _kept_on_host(self) -> Mapping[int, tuple[Tensor, ...]]:
        """Return everything that is kept by slot: keys and values by layer, and the routes as layer -1."""
        if self.routes is None or self.routes.pages is None:
            return self._pages
        return {**self._pages, -1: (self.routes.pages,)}

    def forget_dropped(self) -> None:
        """Discard the keys on the host and the kept states, which old weights computed."""
        if self.states is not None:
            self.states.clear()
        if self._host is not None:
            self.tree.take_dropped()
            self._host.clear()

    @property
    def bytes(self) -> int:
        """Number of bytes of the pages that have memory."""
        if self.memory is not None and not self.memory.mapped:
            return 0
        return sum(pages.numel() * pages.element_size() for kv in self._pages.values() for pages in kv)

    def free(self, *, keep_pages: bool = False) -> None:
        """Free the memory of the pages; the next `attend` of a layer makes empty ones, or, where the addresses stay,
        `map_pages` does. With ``keep_pages`` the memory stays too, and is emptied."""
        self.forget_dropped()
        if keep_pages and self.bytes:
            with torch.inference_mode():  # in which they were made
                for kv in self._pages.values():
                    for pages in kv:
                        pages.zero_()  # as new ones
        elif self.memory is not None:
            self.memory.unmap()
        else:
            self._pages = {}
        if self.states is not None:
            self.states.free()
        if self.routes is not None:
            self.routes.free()

    def map_pages(self) -> None:
        """Give the pages whose addresses stayed empty memory again.

        Raises:
            torch.OutOfMemoryError: the device has not enough; none of the pages has any then.
        """
        if self.memory is not None:
            self.memory.map()

    def _new_pages(self, like: Tensor) -> Tensor:  # [N, Hkv, D]
        # zeros keep masked values past a node's keys finite in kernels; the additional page has the spare slot
        shape = (self.tree.num_pages + 1, self.tree.page_size, *like.shape[1:])
        if self.memory is not None:
            return self.memory.zeros(shape, like.dtype)
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _compare(layer: int, out: Tensor, expected: Tensor) -> None:
    """Raise RuntimeError if attention differs from the reference by more than a few roundings of the dtype."""
    allowed = 8 * torch.finfo(out.dtype).eps * expected.abs().amax().clamp(min=1.0) + 1e-5
    worst = (out - expected).abs().nan_to_num(0.0).amax()
    if worst > allowed or (out.isfinite() != expected.isfinite()).any():
        raise RuntimeError(f"Attention of layer {layer} differs from the reference by {worst:.3g}; report this.")
