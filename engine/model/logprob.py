"""Log-probabilities of a batch's targets, by a model that is checked once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rolltree.kernels import LogprobOutput
from rolltree.kernels.checks import shown

from ..batches.batch import TreeBatch
from .decoder import decode, statistics_of_pieces, unchecked_logprob
from .head import target_statistics
from .masks import NAME
from .self_check import check_model


def batch_logprob(
    model: PreTrainedModel, batch: TreeBatch, *, temperature: float | Tensor = 1.0, want: Sequence[str] = ()
) -> LogprobOutput:
    """Compute the log-probability of every target of ``batch``, in nats.

    Args:
        temperature: divides the logits; one for all, or ``[M]`` (`TreeBatch.temperatures`).
        want: further statistics to compute: ``"entropy"``, ``"sum_p2"`` (sum of squared probabilities).

    Returns:
        ``logprob [M]`` fp32, one value per target. ``logsumexp``, ``entropy`` and ``sum_p2`` are per *target* too. The
        values of a batch in pieces have no gradient.

    Raises:
        ValueError: the model was not loaded with ``attn_implementation="rolltree"``, or fails `check_model`; or
            ``temperature`` has another shape.
        TypeError: ``model`` or ``batch`` has another type.
    """
    check_call("batch_logprob", model, batch)
    check_temperature("batch_logprob", batch, temperature)
    return unchecked_logprob(model, batch, temperature, want)


def batch_statistics(
    model: PreTrainedModel,
    batch: TreeBatch,
    *,
    temperature: float | Tensor = 1.0,
    want: Sequence[str] = (),
    extra_ids: Tensor | None = None,  # [M, K]
) -> dict[str, Tensor]:
    """Compute ``logprob [M]`` and the statistics in ``want`` of every target, as `linear_statistics` names them.

    Args, Raises: as for `batch_logprob` and `linear_statistics`. The values of a batch in pieces have no gradient.
    """
    check_call("batch_statistics", model, batch)
    check_temperature("batch_statistics", batch, temperature)
    if batch.pieces:
        return statistics_of_pieces(model, batch, temperature, want, extra_ids)
    hidden = decode(model, batch).hidden
    return target_statistics(
        model, hidden, batch.target, batch.head_row, batch.head_index, temperature, want, extra_ids
    )


def check_call(op: str, model: object, batch: object) -> None:
    """Check ``model``, at its first call, and ``batch``.

    Raises:
        TypeError: they are not a Transformers model and a `TreeBatch`.
        ValueError: the model fails `check_model`.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"{op}: model must be a Transformers model, got {shown(model)}.")
    if not isinstance(batch, TreeBatch):
        raise TypeError(f"{op}: batch must be a TreeBatch, as pack makes them, got {shown(batch)}.")
    checked: Any = model
    if batch.padded is None and checked.config._attn_implementation == NAME:  # others are refused, or plain
        check_model(checked)


def check_temperature(op: str, batch: TreeBatch, temperature: object) -> None:
    """Check the shape of temperatures of targets; numbers are checked where the head uses them.

    Raises:
        ValueError: it is not one a target.
    """
    if isinstance(temperature, Tensor) and temperature.shape != batch.target.shape:
        raise ValueError(
            f"{op}: temperature must be a number or a tensor [{len(batch.target)}], one a target "
            f"(TreeBatch.temperatures), got {shown(temperature)}."
        )
