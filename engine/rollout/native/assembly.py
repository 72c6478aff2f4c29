"""The rows of a step as arrays, from the branches and fills that the scheduler chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...batches.cost import Work
from ..branch import Branch
from .cache.kv_cache import KvCache
from .cache.states import StateStep
from .pictures import Shown
from .rows import Fill, RowTable
from .windows import to_come

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Step:
    """Rows of one forward pass, in depth-first order."""

    input_ids: Array  # [N] int64
    position_ids: Array  # [N] int64
    kv_slots: Array  # [N] int64
    plan: tuple[Array, ...]  # see KvTree.plan
    sample_rows: Array  # [S] int64, rows whose logits are sampled
    sample_slots: Array  # [S] int64, their branches in the row table
    sample_offset: Array  # [S] int64, drafted tokens between the branch's last one and the row
    adapter: Array  # [N] int64, numbers of the rows' LoRA adapters, 0 for none
    filled: list[Branch]  # branches whose missing keys the step computes
    work: Work  # of all rows
    held_out: Work  # of those that answer held-out problems
    states: StateStep | None = None  # of a model with recurrent layers
    rotary: Array | None = None  # [3, N] int64, of a model whose rotary positions are not the depth (M-RoPE)
    shown: Shown | None = None  # rows of pictures
    next_slots: Array | None = None  # [steps - 1, N] int64, of the rows' keys in the further steps of a window

    @property
    def steps(self) -> int:
        """Number of steps that the rows take before the host looks at the samples."""
        return 1 if self.next_slots is None else 1 + len(self.next_slots)


class Assembly:
    """Makes steps of branches of ``rows``, whose keys are in ``cache``.

    Args:
        rotary: the model's rotary positions are not the depth (M-RoPE).
        whole_pictures: rows of a picture attend to each other in both directions.
    """

    def __init__(self, rows: RowTable, cache: KvCache, *, rotary: bool, whole_pictures: bool) -> None:
        self.rows, self.cache, self.rotary, self.whole_pictures = rows, cache, rotary, whole_pictures

    def __call__(self, slots: Array, fills: list[Fill], drafts: tuple[Array, Array] | None, steps: int = 1) -> Step:
        """Return a step: one item for each running branch and fill, in depth-first order, expanded to rows.

        Args:
            slots: the running branches in the row table.
            drafts: the number of drafted tokens of each, and the tokens; None for none.
            steps: number of steps of a window; above 1 there are no fills and no drafts.
        """
        rows, tree = self.rows, self.cache.tree
        node, count, sampler = rows.kv_node[slots], np.ones(len(slots), np.int64), slots
        token, position, adapter = rows.last_token[slots], rows.position[slots], rows.adapter[slots]
        if drafts is not None:
            count = 1 + drafts[0]
            drafted = np.ones(int(count.sum()), np.bool_)
            drafted[np.cumsum(count) - count] = False
            last, token = token, np.empty(len(drafted), np.int64)
            token[drafted], token[~drafted] = drafts[1], last
        appended = sampled = count
        tree.extend(node, count * steps, to_come(token, steps))
        if fills:
            node = _extend(node, [fill.node for fill in fills])
            count = _extend(count, [fill.count for fill in fills])
            appended = _extend(appended, [0 if fill.keys_held else fill.count for fill in fills])
            sampled = _extend(sampled, [int(fill.samples) for fill in fills])
            sampler = _extend(sampler, [fill.branch.slot if fill.samples else -1 for fill in fills])
            adapter = np.concatenate([adapter, rows.adapter[[fill.branch.slot for fill in fills]]])
            token = np.concatenate([token, *(tree.tokens(fill.node, fill.begin, fill.count) for fill in fills)])
            position = _extend(position, [tree.position(fill.node) + fill.begin for fill in fills])
        owner = _extend(slots, [fill.branch.slot for fill in fills]) if fills else slots
        computed = count * steps
        items = np.stack([computed, computed * position + computed * (computed + 1) // 2, sampled * steps])
        work, held_out = Work(*items.sum(1).tolist()), Work(*(items @ rows.held_out[owner]).tolist())
        order, kv_slots, plan = tree.arrange(node, count, appended, self.cache.spare_slot, steps - 1)
        states = None if self.cache.states is None else self.cache.states.compose(tree, rows, slots, fills, order)
        sampler, adapter = sampler[order], adapter[order]
        if not fills and drafts is None:
            every = np.arange(len(order))
            input_ids, position_ids = token[order], position[order]
            rotary = np.tile(position_ids + rows.moved[sampler], (3, 1)) if self.rotary else None
            next_slots = None
            if steps > 1:
                kv_slots, next_slots = kv_slots[::steps], kv_slots.reshape(-1, steps)[:, 1:].T
            return Step(
                input_ids, position_ids, kv_slots, plan, every, sampler, every * 0, adapter, [], work, held_out, states,
                rotary, next_slots=next_slots,
            )  # fmt: skip
        begin = (np.cumsum(count) - count)[order]
        count, sampled = count[order], sampled[order]
        end = np.cumsum(count)
        within = np.arange(end[-1]) - np.repeat(end - count, count)
        offset = np.arange(sampled.sum()) - np.repeat(np.cumsum(sampled) - sampled, sampled)
        of_token = np.repeat(begin, count) + within
        before = len(token) - sum(fill.count for fill in fills)
        firsts = [tree.position(fill.node) + fill.begin for fill in fills]
        position = np.repeat(position[order], count) + within
        shown = Shown.of(fills, firsts, of_token, before)
        if shown is not None and self.whole_pictures:
            shown = shown.with_runs(tree, np.repeat(node[order], count), position)
        return Step(
            input_ids=token[of_token].astype(np.int64),
            position_ids=position,
            kv_slots=kv_slots,
            plan=plan,
            sample_rows=np.repeat(end - sampled, sampled) + offset,
            sample_slots=np.repeat(sampler, sampled),
            sample_offset=offset,
            adapter=np.repeat(adapter, count),
            filled=[fill.branch for fill in fills],
            work=work,
            held_out=held_out,
            states=states,
            rotary=self._rotary(slots, drafts, fills, firsts)[:, of_token] if self.rotary else None,
            shown=shown,
        )

    def _rotary(
        self, slots: Array, drafts: tuple[Array, Array] | None, fills: list[Fill], firsts: list[int]
    ) -> Array:  # [3, N] int64
        """Return the rotary positions of a step's tokens: those of running branches, their drafts included, then those
        of fills, whose first tokens have the depths ``firsts``."""
        count = np.ones(len(slots), np.int64) if drafts is None else 1 + drafts[0]
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        parts = [np.tile(np.repeat(self.rows.position[slots] + self.rows.moved[slots], count) + within, (3, 1))]
        for fill, first in zip(fills, firsts, strict=True):
            media = fill.branch.request.media
            text = np.tile(np.arange(first, first + fill.count), (3, 1))
            parts.append(text if media is None else media.rotary_of(first, fill.count))
        return np.concatenate(parts, axis=1)


def _extend(values: Array, more: list[int]) -> Array:
    return np.concatenate([values, np.array(more, np.int64)])
