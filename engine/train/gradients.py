"""The gradients of an update: sums over its micro-batches, in fp32 where the model is not, and over the ranks.

Those of a batch-invariant model have the same bits on one rank and on two: micro-batches are added in pairs, and the
sums of pairs one after the other. One process computes both of a pair, and autograd adds the second gradient to the
first; two ranks compute one each, and FSDP adds these. The gradient of the head's weight, which the loss computes and
not autograd, is then added after the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..model.sharding import added, whole_shape


class Gradients:
    """Gradients on their way from the parameters of a model to its ``masters``.

    Args:
        parameters: of the model, those that are trained.
        masters: for each in fp32 the parameter itself, else its fp32 copy.
        head: number of the head's weight among them, if the loss adds its gradient up in fp32.
        ordered: the model is batch-invariant.
        alone: no other rank computes micro-batches of the update.
    """

    def __init__(
        self, parameters: Sequence[Tensor], masters: Sequence[Tensor], head: int | None, *, ordered: bool, alone: bool
    ) -> None:
        self._parameters, self._masters, self._head = parameters, masters, head
        self._ordered, self._in_pairs = ordered, ordered and alone
        self.drop()

    def drop(self) -> None:
        """Forget those that are not on the masters yet."""
        self._of_head: Tensor | None = None  # [V, H] this rank's gradient of a head that is added later
        self._half = False  # a pair lacks its second micro-batch
        self._pair_of_head: Tensor | None = None  # [V, H]
        self._sums: list[Tensor | None] = [None] * len(self._masters)  # of pairs

    def of_head(self) -> Tensor | None:
        """Return the fp32 tensor to add the gradient of the head's weight to; None to leave that to autograd."""
        if self._head is None:
            return None
        master = self._masters[self._head]
        if self._ordered or isinstance(master, DTensor):
            if self._of_head is None:
                self._of_head = torch.zeros(whole_shape(master), dtype=torch.float32, device=master.device)
            return self._of_head
        if master.grad is None and master is not self._parameters[self._head]:
            master.grad = torch.zeros_like(master)
        return master.grad

    def gather(self) -> None:
        """Add those of parameters to those of their fp32 copies."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def end_micro_batch(self) -> None:
        """Add those of a micro-batch, which are on the parameters, to the update's."""
        if not self._in_pairs:
            self.gather()
            if self._ordered:
                self._reduce_head()
            return
        head_gradient, self._of_head = self._of_head, None
        if head_gradient is not None:
            self._pair_of_head = head_gradient if self._pair_of_head is None else self._pair_of_head.add_(head_gradient)
        self._half = not self._half
        if not self._half:
            self._close_pair()

    def finish(self) -> None:
        """Leave those of the update on the masters."""
        if not self._in_pairs:
            self._reduce_head()
            return
        if self._half:
            self._close_pair()
        for master, total in zip(self._masters, self._sums, strict=True):
            master.grad = total
        self.drop()

    def _close_pair(self) -> None:
        self.gather()
        for i, master in enumerate(self._masters):
            for gradient in (master.grad, self._pair_of_head if i == self._head else None):
                total = self._sums[i]
                if gradient is not None:
                    self._sums[i] = gradient if total is None else total.add_(gradient)
            master.grad = None
        self._half, self._pair_of_head = False, None

    def _reduce_head(self) -> None:
        """Add the gradient of a sharded head, which micro-batches have added up on each rank, to the others'."""
        head_gradient, self._of_head = self._of_head, None
        if self._head is None or head_gradient is None:
            return
        master = self._masters[self._head]
        assert isinstance(master, DTensor)
        total = added(head_gradient, master)
        master.grad = total if master.grad is None else master.grad.add_(total)
