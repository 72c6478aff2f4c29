"""The parts of trees that an update leaves out: responses that only credit reads, and ends without uncertain tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..data.tree import TokenTree
from ..model.invariant.install import is_invariant
from ..record.metrics import Sums
from ..train.terms import LossTerm, without_certain_ends
from ..train.trainer import Trainer, Weighted
from .live import Live, Prepare
from .micro_batches import MicroBatches
from .utilization import Compute

MEASURED_EVERY = 20
"""Steps between two that measure the gradient of a tree, which takes two more passes over it."""


class Cutting:
    """Leaves out the ends of responses after the last token whose probability was below ``below`` (`algorithm.cut`).

    The gradient of a token's log-prob with respect to the logits is at most sqrt(2) (1 - p), so it is small there.
    """

    def __init__(self, below: float, batches: MicroBatches, trainer: Trainer, compute: Compute) -> None:
        self._below, self._batches, self._trainer, self._compute = below, batches, trainer, compute

    def of(self, terms: Sequence[Weighted]) -> Prepare | None:
        """Return what leaves ends out of updates by these terms; None: nothing does."""
        return (lambda tree: self.part(tree, terms)) if self._below < 1 and terms else None

    def part(self, tree: TokenTree, terms: Sequence[Weighted]) -> TokenTree | None:
        """Return ``tree`` without those ends; None: nothing is left of it."""
        parts = without_certain_ends([tree], [t.term for t in terms], self._below)
        return parts[0] if parts else None

    def describe(
        self,
        live: Live,
        terms: Sequence[Weighted],
        every_term: Sequence[LossTerm],
        step: int,
        sums: Sums,
        *,
        temperature: float,
        on_policy: bool,
    ) -> None:
        """Count the ends that are left out of ``live``; every `MEASURED_EVERY` steps, on one process, also measure on
        its first tree the norm of the gradient's part that is left out, over that of the whole gradient."""
        sums.add("filter/cut_ratio", live.total.read - live.total.left, live.total.read)
        alone = self._batches.group.count == 1 and not is_invariant(self._trainer.model)
        if step % MEASURED_EVERY != 1 or not alone or not live.total.left:
            return

        def add(these: list[TokenTree], sign: float) -> float:
            """Add the gradient of ``these`` to the pending one; return the norm of the sum."""
            signed = [t._replace(weight=sign * t.weight) for t in terms]
            logical, before = sum(tree.logical_tokens for tree in these), self._trainer.pending_head_flop
            shared = [self._batches.shared(tree, every_term) for tree in these]
            for batch in self._batches.packed(shared, every_term):
                self._trainer.forward_backward(
                    batch, signed, logical, temperature=batch.temperatures(temperature), on_policy=on_policy
                )
            head_flop = self._trainer.pending_head_flop - before
            self._compute.train(self._trainer.model, self._batches.work, self._batches.again, head_flop)
            return self._trainer.pending_norm()

        first = live.first_uncut()
        whole, sample = add([first], 1.0), self.part(first, terms)
        left = whole if sample is None else add([sample], -1.0)
        self._trainer.drop_gradients()
        if whole > 0:
            sums.add("filter/cut_gradient", left / whole)


def counted(trees: Sequence[TokenTree], sums: Sums) -> list[TokenTree]:
    """Return the trees without the responses that credit reads and no update counts."""
    trained = [t if t.trained.all() else t.without_leaves(~t.trained) for t in trees]
    left = [tree for tree in trained if tree is not None]
    sums.count("filter/untrained_tokens", sampled(trees) - sampled(left))
    return left


def sampled(trees: Sequence[TokenTree]) -> int:
    """Return the tokens that were sampled for this step."""
    return sum(tree.sampled_tokens for tree in trees if "replayed" not in tree.meta)
