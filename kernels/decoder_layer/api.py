"""Public entry of a decoder for generation, and of the passes between its products.

The passes change tensors in place, as their names say, and have no gradient. Their arithmetic is that of
:mod:`.reference`, rounding by rounding; they save passes over the rows and calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .. import dispatch
from ..checks import Arguments
from ..tree_decode import DecodePlan
from ..tree_decode.api import check_plan
from ..tree_decode.schedule import Nodes, Work
from . import reference
from .weights import DTYPES, Adapted, LayerWeights, check_contiguous

_ADD_RMS_NORM: Mapping[str, Callable[..., Tensor]] = {
    "cpu": dispatch.compiled_op("cpu", "add_rms_norm"),
    "triton": dispatch.imported(__package__, "triton", "add_rms_norm"),
    "reference": reference.add_rms_norm,
}
_ROTATE_AND_STORE: Mapping[str, Callable[..., None]] = {
    "cpu": dispatch.compiled_op("cpu", "rotate_and_store"),
    "triton": dispatch.imported(__package__, "triton", "rotate_and_store"),
    "reference": reference.rotate_and_store,
}
LONGEST_HEAD = 1024


def add_rms_norm_(
    residual: Tensor,  # [N, H] float32, bfloat16
    x: Tensor | None,  # [N, H]
    weight: Tensor,  # [H]
    eps: float,
) -> Tensor:  # [N, H]
    """Add ``x`` to ``residual`` in place, if given, and return the sum's RMSNorm: ``weight * sum / sqrt(mean(sum^2) +
    eps)``.

    A row's result does not depend on the other rows. (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. 4)

    Args:
        residual: [N, H] float32 or bfloat16 (float64 runs on the reference), changed in place.
        x: [N, H], of the same dtype.
        weight: [H], of the same dtype.
        eps: at least 0.

    Raises:
        ValueError, TypeError: a shape, dtype, device or number that does not fit, or rows that are not contiguous.
    """
    check = Arguments("add_rms_norm_", "residual", residual)
    N, H = check.floats("residual", residual, ("N", "H"), dtypes=DTYPES).shape
    check.floats("weight", weight, (H,), " like residual", (residual.dtype,))
    arguments = {"residual": residual, "weight": weight}
    if x is not None:
        arguments["x"] = check.floats("x", x, (N, H), " like residual", (residual.dtype,))
    check_contiguous(check, arguments)
    run = _choose("add_rms_norm_", _ADD_RMS_NORM, residual)
    return run(residual, x, weight, check.number("eps", eps, least=0.0))


def rotate_and_store_(
    q: Tensor,  # [N, Hq, D] float32, bfloat16
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    cos: Tensor,  # [N, D]
    sin: Tensor,  # [N, D]
    slots: Tensor,  # [N] int64
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    *,
    q_weight: Tensor | None = None,  # [D]
    k_weight: Tensor | None = None,  # [D]
    eps: float = 0.0,
) -> None:
    """Rotate queries by their positions in place; write keys, rotated alike, and values to their slots of the pages.

    With ``x = (low, high)``, its halves, the rotated head is ``x * cos + (-high, low) * sin``. Heads go through RMSNorm
    before where weights are given. (Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. 34, with pairs D/2 apart)

    Args:
        q: [N, Hq, D] float32 or bfloat16 (float64 runs on the reference), changed in place.
        k, v: [N, Hkv, D]; k is not changed.
        cos, sin: [N, D], one row a query.
        slots: [N] int64, the place of each row: page times page size plus the place within. If two rows have the same
            one, it is not defined which of them stays.
        k_pages, v_pages: [P, page, Hkv, D], changed in place.
        q_weight, k_weight: [D], of the RMSNorm of heads, with ``eps``.

    Raises:
        ValueError, TypeError: a shape, dtype, device or number that does not fit, a tensor that is not contiguous, or
            slots outside of the pages.
    """
    check = Arguments("rotate_and_store_", "q", q)
    N, _, D = check.floats("q", q, ("N", "Hq", "D"), dtypes=DTYPES).shape
    check.require(
        D % 2 == 0 and D <= LONGEST_HEAD, f"heads must be even and of at most {LONGEST_HEAD} numbers, not {D}"
    )
    same = (q.dtype,)
    _, heads, _ = check.floats("k", k, (N, "Hkv", D), " like q", same).shape
    P, page, _, _ = check.floats("k_pages", k_pages, ("P", "page", heads, D), " like k", same).shape
    arguments = {"q": q, "k": k, "k_pages": k_pages}
    for name, tensor, shape, like in (
        ("v", v, (N, heads, D), " like k"),
        ("v_pages", v_pages, (P, page, heads, D), " like k_pages"),
        ("cos", cos, (N, D), " like q"),
        ("sin", sin, (N, D), " like q"),
        ("q_weight", q_weight, (D,), " like q"),
        ("k_weight", k_weight, (D,), " like q"),
    ):
        if tensor is not None or not name.endswith("weight"):
            arguments[name] = check.floats(name, tensor, shape, like, same)
    arguments["slots"] = check.tensor("slots", slots, (N,))
    check.require(slots.dtype == torch.int64, f"slots must be int64, got {slots.dtype}")
    check_contiguous(check, arguments)
    _below(check, "slots", slots, P * page)
    run = _choose("rotate_and_store_", _ROTATE_AND_STORE, q)
    run(q, k, v, q_weight, k_weight, check.number("eps", eps, least=0.0), cos, sin, slots, k_pages, v_pages)


class Decoder:
    """A decoder of the Llama family for generation: from token ids to the last hidden states of a step's rows.

    Every layer writes the rows' keys and values to its pages, attends over them, and adds the attention and its gated
    unit to the rows; the last norm follows the last layer. Norms are :func:`add_rms_norm_`'s, rotating and storing
    :func:`rotate_and_store_`'s, attention is `rolltree.kernels.tree_decode_attention`. On a CPU
    csrc/cpu/products/few_rows.cpp makes the products in bfloat16, and in float32 those of up to 384 rows (64 on Intel's
    processors with AVX-512, and without AVX2); with it a row's result does not depend on the other rows. In bfloat16
    sums are fp32, and every operation rounds its result as PyTorch's does.
    (Touvron et al. 2023, https://arxiv.org/abs/2302.13971)

    Args:
        embedding: [V, H] float32 or bfloat16 (float64 runs on the reference).
        layers: weights of each layer.
        norm: [H], of the norm after the last layer.
        pages: each layer's keys and values, [P, page, Hkv, D].
        eps: of all norms.
        scale: factor of attention scores.
        windows: of each layer, as in `tree_decode_attention`.
        library: let a library multiply more rows of float32 than csrc/cpu/products/few_rows.cpp is fastest for.

    Raises:
        ValueError, TypeError: a shape, dtype, device or number that does not fit, or a tensor that is not contiguous.
    """

    def __init__(
        self,
        embedding: Tensor,  # [V, H] float32, bfloat16
        layers: Sequence[LayerWeights],
        norm: Tensor,  # [H]
        pages: Sequence[tuple[Tensor, Tensor]],
        *,
        eps: float,
        scale: float,
        windows: Sequence[int | None],
        library: bool = True,
    ) -> None:
        check = Arguments("Decoder", "embedding", embedding)
        check.require(
            0 < len(layers) == len(pages) == len(windows),
            f"there must be as many layers as pages and windows, not {len(layers)}, {len(pages)} and {len(windows)}",
        )
        _, H = check.floats("embedding", embedding, ("V", "H"), dtypes=DTYPES).shape
        same = (embedding.dtype,)
        check.floats("norm", norm, (H,), " like embedding", same)
        shape = check.floats("pages", pages[0][0], ("P", "page", "Hkv", "D"), " like embedding", same).shape
        heads, D = shape[2:]
        check.require(
            D % 2 == 0 and D <= LONGEST_HEAD, f"heads must be even and of at most {LONGEST_HEAD} numbers, not {D}"
        )
        check_contiguous(check, {"embedding": embedding, "norm": norm})
        for weights, layer_pages, window in zip(layers, pages, windows, strict=True):
            if not isinstance(weights, LayerWeights):
                check.wrong_type("layers", "LayerWeights", weights)
            wrong = weights.does_not_fit(H, heads, D, embedding)
            check.require(wrong is None, wrong or "")
            for tensor in layer_pages:
                check.floats("pages", tensor, shape, " like the first", same)
                check_contiguous(check, {"pages": tensor})
            check.window(window)
        self.embedding, self.norm = embedding, norm
        self.layers, self.pages, self.windows = tuple(layers), tuple(pages), tuple(windows)
        self.eps, self.scale = check.number("eps", eps, least=0.0), check.number("scale", scale)
        self.every_weight = [tensor for weights in layers for tensor in weights.tensors]
        self.every_page = [tensor for layer_pages in pages for tensor in layer_pages]
        self.window_numbers = [window or 0 for window in windows]
        self.library = library

    def __call__(
        self,
        input_ids: Tensor,  # [N] int32
        cos: Tensor,  # [T, D]
        sin: Tensor,  # [T, D]
        slots: Tensor,  # [N] int32
        plan: DecodePlan,
        *,
        turns: Tensor | None = None,  # [N] int32
        adapted: Adapted | None = None,
    ) -> Tensor:  # [N, H]
        """Return the normed last hidden states of a step, [N, H]; its keys and values are in the pages afterwards.

        Args:
            input_ids: [N] int32.
            cos, sin: [T, D], of the rotations.
            slots: [N] int32, the place of each row: page times page size plus the place within.
            plan: the keys that the rows see, their own included.
            turns: [N] int32, the row of ``cos`` and ``sin`` for each row; None: there is one a row.
            adapted: low-rank adapters of rows, added as by `rolltree.kernels.low_rank.add_low_rank_`.

        Raises:
            ValueError, TypeError: a shape, dtype or device that does not fit, a tensor that is not contiguous, ids
                outside of the vocabulary, slots outside of the pages, or turns outside of ``cos``.
        """
        check = Arguments("Decoder", "embedding", self.embedding)
        P, page, _, D = self.pages[0][0].shape
        N = len(check.tensor("input_ids", input_ids, ("N",)))
        T = len(check.floats("cos", cos, ("T" if turns is not None else N, D), " like embedding", (self.norm.dtype,)))
        check.floats("sin", sin, (T, D), " like cos", (self.norm.dtype,))
        within = {"input_ids": (input_ids, len(self.embedding)), "slots": (slots, P * page)}
        if turns is not None:
            within["turns"] = turns, T
        for name, (tensor, end) in within.items():
            check.tensor(name, tensor, (N,))
            check.require(tensor.dtype == torch.int32, f"{name} must be int32, got {tensor.dtype}")
            _below(check, name, tensor, end)
        check_contiguous(check, {"cos": cos, "sin": sin, **{name: tensor for name, (tensor, _) in within.items()}})
        check_plan(check, plan, N, P, page)
        if adapted is not None:
            wrong = adapted.adapters.does_not_fit(self.layers)
            check.require(wrong is None, wrong or "")
            check.require(adapted.runs.rows == N, f"the adapters are of {adapted.runs.rows} rows, not {N}")
        return self.run(input_ids, cos, sin, slots, plan, turns, adapted)

    def run(
        self,
        input_ids: Tensor,  # [N] int32
        cos: Tensor,  # [T, D]
        sin: Tensor,  # [T, D]
        slots: Tensor,  # [N] int32
        plan: DecodePlan,
        turns: Tensor | None,  # [N] int32
        adapted: Adapted | None = None,
    ) -> Tensor:  # [N, H]
        """Run like `__call__` with arguments that are known to be right; they are not checked."""
        run = _choose("Decoder", _DECODER, self.embedding)
        work = plan.work(len(self.layers[0].q) // len(self.layers[0].k))
        return run(self, input_ids, cos, sin, turns, slots, Nodes(*plan.tensors().values()), work, adapted)


def _compiled_decoder(
    model: Decoder,
    input_ids: Tensor,  # [N] int32
    cos: Tensor,  # [T, D]
    sin: Tensor,  # [T, D]
    turns: Tensor | None,  # [N] int32
    slots: Tensor,  # [N] int32
    nodes: Nodes,
    work: Work,  # not used here
    adapted: Adapted | None,
) -> Tensor:  # [N, H]
    """Like `reference.decoder` in csrc/cpu/decoder_layer.cpp."""
    low_rank: tuple[Tensor | None, Tensor | None, Sequence[int]] = None, None, ()
    if adapted is not None:
        low_rank = adapted.adapters.matrices, adapted.adapters.scales, adapted.runs.numbers
    step = (cos, sin, turns, slots, *nodes, model.eps, model.scale, model.window_numbers, model.library, *low_rank)
    out: Tensor = torch.ops.rolltree_cpu.decoder(
        input_ids, model.embedding, model.every_weight, model.norm, model.every_page, *step
    )
    return out


_DECODER: Mapping[str, Callable[..., Tensor]] = {
    "cpu": _compiled_decoder,
    "triton": dispatch.imported(__package__, "triton", "decoder"),
    "invariant": dispatch.imported(__package__, "invariant", "decoder"),
    "reference": reference.decoder,
}


def _below(check: Arguments, name: str, index: Tensor, end: int) -> None:
    if len(index) and index.device.type == "cpu":
        least, most = (int(value) for value in index.aminmax())
        check.require(least >= 0 and most < end, f"{name} must be in 0..{end - 1}, got {least}..{most}")


def _choose(op: str, table: Mapping[str, dispatch.Fn], first: Tensor) -> dispatch.Fn:
    # Only the reference has float64; it exists for checks.
    return table["reference"] if first.dtype == torch.float64 else dispatch.choose(op, table, first.device)
