"""Public entry of a decoder layer, and of the passes between its products.

All change tensors in place, as their names say, and have no gradient: they are for generation. Between the products
their arithmetic is that of :mod:`.reference`, rounding by rounding; what they save is passes over the rows, and calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import dispatch
from ..checks import Arguments
from ..tree_decode import DecodePlan
from ..tree_decode.api import check_plan
from ..tree_decode.schedule import Nodes
from . import reference

_ADD_RMS_NORM: Mapping[str, Callable[..., Tensor]] = {
    "cpu": dispatch.compiled_op("cpu", "add_rms_norm"),
    "reference": reference.add_rms_norm,
}
_ROTATE_AND_STORE: Mapping[str, Callable[..., None]] = {
    "cpu": dispatch.compiled_op("cpu", "rotate_and_store"),
    "reference": reference.rotate_and_store,
}
DTYPES = (torch.float32, torch.float64)
LONGEST_HEAD = 1024


def add_rms_norm_(
    residual: Tensor,  # [N, H] float32
    x: Tensor | None,  # [N, H]
    weight: Tensor,  # [H]
    eps: float,
) -> Tensor:  # [N, H]
    """``residual += x`` where there is an ``x``; the sum's RMSNorm: ``weight * sum / sqrt(mean(sum^2) + eps)``.

    A row's result does not depend on the other rows. (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. 4)

    Raises:
        ValueError, TypeError: a shape, dtype, device or number that does not fit, or rows that are not contiguous.
    """
    check = Arguments("add_rms_norm_", "residual", residual)
    N, H = check.floats("residual", residual, ("N", "H"), dtypes=DTYPES).shape
    check.floats("weight", weight, (H,), " like residual", (residual.dtype,))
    given = {"residual": residual, "weight": weight}
    if x is not None:
        given["x"] = check.floats("x", x, (N, H), " like residual", (residual.dtype,))
    _contiguous(check, given)
    run = _choose("add_rms_norm_", _ADD_RMS_NORM, residual)
    return run(residual, x, weight, check.number("eps", eps, least=0.0))


def rotate_and_store_(
    q: Tensor,  # [N, Hq, D] float32
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
    """Turn queries by their positions in place; write keys, turned alike, and values to their slots of the pages.

    With ``x = (low, high)``, its halves, the turned head is ``x * cos + (-high, low) * sin``. Heads go through RMSNorm
    before where weights are given. (Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. 34, with pairs D/2 apart)

    Args:
        slots: the place of each row, page times its size plus the place within; where two rows have the same one,
            which of them stays is not said.

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
    given = {"q": q, "k": k, "k_pages": k_pages}
    for name, tensor, shape, like in (
        ("v", v, (N, heads, D), " like k"),
        ("v_pages", v_pages, (P, page, heads, D), " like k_pages"),
        ("cos", cos, (N, D), " like q"),
        ("sin", sin, (N, D), " like q"),
        ("q_weight", q_weight, (D,), " like q"),
        ("k_weight", k_weight, (D,), " like q"),
    ):
        if tensor is not None or not name.endswith("weight"):
            given[name] = check.floats(name, tensor, shape, like, same)
    given["slots"] = check.tensor("slots", slots, (N,))
    check.require(slots.dtype == torch.int64, f"slots must be int64, got {slots.dtype}")
    _contiguous(check, given)
    _below(check, "slots", slots, P * page)
    run = _choose("rotate_and_store_", _ROTATE_AND_STORE, q)
    run(q, k, v, q_weight, k_weight, check.number("eps", eps, least=0.0), cos, sin, slots, k_pages, v_pages)


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """What a layer of the Llama family multiplies with and norms by; of one dtype, contiguous.

    H is the width of the residual, D that of a head, F that of the gated unit.

    Raises:
        ValueError, TypeError: a shape, dtype or device that does not fit, or a weight that is not contiguous.
    """

    input_norm: Tensor  # [H]
    q: Tensor  # [Hq D, H]
    q_bias: Tensor | None  # [Hq D]
    k: Tensor  # [Hkv D, H]
    k_bias: Tensor | None  # [Hkv D]
    v: Tensor  # [Hkv D, H]
    v_bias: Tensor | None  # [Hkv D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Tensor  # [H, Hq D]
    o_bias: Tensor | None  # [H]
    mlp_norm: Tensor  # [H]
    gate: Tensor  # [F, H]
    up: Tensor  # [F, H]
    down: Tensor  # [H, F]

    def __post_init__(self) -> None:
        check = Arguments("LayerWeights", "input_norm", self.input_norm)
        (H,) = check.floats("input_norm", self.input_norm, ("H",), dtypes=DTYPES).shape
        same = (self.input_norm.dtype,)
        queries, keys = (len(check.floats(name, t, ("*", H), "", same)) for name, t in (("q", self.q), ("k", self.k)))
        wide = len(check.floats("gate", self.gate, ("F", H), "", same))
        shapes: dict[str, tuple[int | str, ...]] = {
            "v": (keys, H),
            "o": (H, queries),
            "mlp_norm": (H,),
            "up": (wide, H),
            "down": (H, wide),
            "q_bias": (queries,),
            "k_bias": (keys,),
            "v_bias": (keys,),
            "o_bias": (H,),
            "q_norm": ("D",),
            "k_norm": ("D",),
        }
        for name, shape in shapes.items():
            if (tensor := getattr(self, name)) is not None or not name.endswith(("_bias", "q_norm", "k_norm")):
                check.floats(name, tensor, shape, " like input_norm", same)
        _contiguous(check, {name: tensor for name, tensor in vars(self).items() if tensor is not None})

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(vars(self).values())

    def does_not_fit(self, H: int, heads: int, D: int, rows: Tensor) -> str | None:
        """Why they are not those of a layer of rows like ``rows`` and pages of as many heads, if they are not."""
        if self.q.shape[1] != H or self.q.dtype != rows.dtype or self.q.device != rows.device:
            return f"layers must take rows of {H} {rows.dtype} numbers on {rows.device} like the embedding's"
        queries, keys = len(self.q), len(self.k)
        if keys != heads * D or queries % keys:
            return (
                f"layers must make keys of {heads} x {D} numbers and a multiple for queries, not {keys} and {queries}"
            )
        if any(norm is not None and len(norm) != D for norm in (self.q_norm, self.k_norm)):
            return f"norms of heads must have {D} numbers"
        return None


class Decoder:
    """A decoder of the Llama family where it generates: from token ids to the last hidden states of a step's rows.

    Every layer attends over its pages, which get the rows' keys and values before, and adds that and its gated unit to
    the rows; the last norm is behind them. Norms are :func:`add_rms_norm_`'s, turning and storing
    :func:`rotate_and_store_`'s, attention is `rolltree.kernels.tree_decode_attention`. On a CPU the products of up to
    384 rows with AVX2, and 64 otherwise, are made by a kernel of our own, by which a row's result does not depend on
    the rows beside it.
    (Touvron et al. 2023, https://arxiv.org/abs/2302.13971)

    Args:
        embedding: [V, H] float32.
        norm: [H], of what leaves the last layer.
        pages: each layer's keys and values, [P, page, Hkv, D].
        eps: of all norms.
        scale, windows: as of `tree_decode_attention`, the window of each layer.

    Raises:
        ValueError, TypeError: a shape, dtype, device or number that does not fit, or a tensor that is not contiguous.
    """

    def __init__(
        self,
        embedding: Tensor,  # [V, H] float32
        layers: Sequence[LayerWeights],
        norm: Tensor,  # [H]
        pages: Sequence[tuple[Tensor, Tensor]],
        *,
        eps: float,
        scale: float,
        windows: Sequence[int | None],
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
        _contiguous(check, {"embedding": embedding, "norm": norm})
        for weights, own, window in zip(layers, pages, windows, strict=True):
            if not isinstance(weights, LayerWeights):
                check.wrong_type("layers", "LayerWeights", weights)
            wrong = weights.does_not_fit(H, heads, D, embedding)
            check.require(wrong is None, wrong or "")
            for tensor in own:
                check.floats("pages", tensor, shape, " like the first", same)
                _contiguous(check, {"pages": tensor})
            check.window(window)
        self.embedding, self.norm = embedding, norm
        self.layers, self.pages, self.windows = tuple(layers), tuple(pages), tuple(windows)
        self.eps, self.scale = check.number("eps", eps, least=0.0), check.number("scale", scale)
        self.every_weight = [tensor for weights in layers for tensor in weights.tensors]
        self.every_page = [tensor for own in pages for tensor in own]
        self.window_numbers = [window or 0 for window in windows]

    def __call__(
        self,
        input_ids: Tensor,  # [N] int32
        cos: Tensor,  # [T, D]
        sin: Tensor,  # [T, D]
        slots: Tensor,  # [N] int32
        plan: DecodePlan,
        *,
        turns: Tensor | None = None,  # [N] int32
    ) -> Tensor:  # [N, H]
        """The normed last hidden states of a step; its keys and values are in the pages then.

        Args:
            cos, sin: by which heads are turned.
            slots: the place of each row, page times its size plus the place within.
            plan: what the rows see, their own keys included.
            turns: which of ``cos`` and ``sin`` each row has; None: there is one a row.

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
        _contiguous(check, {"cos": cos, "sin": sin, **{name: tensor for name, (tensor, _) in within.items()}})
        check_plan(check, plan, N, P, page)
        return self.run(input_ids, cos, sin, slots, plan, turns)

    def run(
        self,
        input_ids: Tensor,  # [N] int32
        cos: Tensor,  # [T, D]
        sin: Tensor,  # [T, D]
        slots: Tensor,  # [N] int32
        plan: DecodePlan,
        turns: Tensor | None,  # [N] int32
    ) -> Tensor:  # [N, H]
        """The same of arguments that are right, for who has made them: they are not looked at."""
        run = _choose("Decoder", _DECODER, self.embedding)
        return run(self, input_ids, cos, sin, turns, slots, Nodes(*plan.tensors().values()))


def _compiled_decoder(
    of: Decoder,
    input_ids: Tensor,  # [N] int32
    cos: Tensor,  # [T, D]
    sin: Tensor,  # [T, D]
    turns: Tensor | None,  # [N] int32
    slots: Tensor,  # [N] int32
    nodes: Nodes,
) -> Tensor:  # [N, H]
    """Like `reference.decoder` in csrc/cpu/decoder_layer.cpp."""
    step = (cos, sin, turns, slots, *nodes, of.eps, of.scale, of.window_numbers)
    out: Tensor = torch.ops.rolltree_cpu.decoder(
        input_ids, of.embedding, of.every_weight, of.norm, of.every_page, *step
    )
    return out


_DECODER: Mapping[str, Callable[..., Tensor]] = {"cpu": _compiled_decoder, "reference": reference.decoder}


def _below(check: Arguments, name: str, index: Tensor, end: int) -> None:
    if len(index) and index.device.type == "cpu":
        least, most = (int(value) for value in index.aminmax())
        check.require(least >= 0 and most < end, f"{name} must be in 0..{end - 1}, got {least}..{most}")


def _choose(op: str, table: Mapping[str, dispatch.Fn], first: Tensor) -> dispatch.Fn:
    # Only the reference has float64; it exists for checks.
    return table["reference"] if first.dtype == torch.float64 else dispatch.choose(op, table, first.device)


def _contiguous(check: Arguments, given: Mapping[str, Tensor]) -> None:
    for name, tensor in given.items():
        if not tensor.is_contiguous():
            check.require(False, f"{name} must be contiguous, got strides {list(tensor.stride())}")
