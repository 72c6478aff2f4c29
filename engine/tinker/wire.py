"""Requests and results in the client's protobuf: data of a training request, its outputs, and sampled sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from ..data.media import Picture
from .faults import FaultError
from .images import Images

Array = npt.NDArray[Any]
MOST_VALUES = 1 << 23
"""Most values of one tensor, also of a sparse one whose listed values are few."""
NO_TOP = -99999.0
"""Log-prob that fills up the places of a position with fewer likeliest tokens than asked for."""
DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
}


@dataclass(frozen=True)
class Datum:
    """One example: ``tokens [N] int32`` that the model reads, and the tensors of the loss by name.

    The rows of ``pictures`` are among the tokens.
    """

    tokens: Array
    inputs: Mapping[str, Array]
    pictures: tuple[Picture, ...] = ()

    @property
    def target(self) -> Array:
        """The ids to score, ``[N]`` or ``[N, K]`` int64."""
        return self.inputs["target_tokens"]


@dataclass(frozen=True)
class Batch:
    """A request to compute a loss, and its gradients unless ``forward_only``."""

    model_id: str
    seq_id: int
    loss: str
    config: Mapping[str, float | str]
    data: Sequence[Datum]
    forward_only: bool
    spans: bool  # some datum says which sampled sequences its tokens are of


@dataclass(frozen=True)
class Envelope:
    """The part of a request that tells where it belongs, which is read before its data are checked."""

    model_id: str
    seq_id: int
    message: Any


def read_envelope(raw: bytes) -> Envelope:
    """Read the body of ``forward_backward``.

    Raises:
        FaultError: it is no such message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError:
        raise FaultError("The body is no ForwardBackwardRequest of the client's protobuf.", 422) from None
    return Envelope(message.model_id, message.seq_id, message)


def read_batch(envelope: Envelope, vocabulary: int, longest: int | None, images: Images) -> Batch:
    """Read the data of a request and check what no loss needs to know.

    Args:
        vocabulary: ids must be below it.
        longest: most tokens of a datum; None for any number.
        images: makes the pictures of the model.

    Raises:
        FaultError: a datum cannot be used; the message names it.
    """
    message = envelope.message
    newer = message.loss_fn_config_v2
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name in newer:
        kind = newer[name].WhichOneof("value")
        if kind is None:
            raise FaultError(f"loss_fn_config['{name}'] has no value; give a number or a text.")
        config[name] = getattr(newer[name], kind)
    if not message.data:
        raise FaultError("The request has no data; give at least one datum.")
    data = [_datum(i, each, vocabulary, longest, images) for i, each in enumerate(message.data)]
    spans = any(each.model_input_spans or each.loss_fn_input_spans for each in message.data)
    return Batch(envelope.model_id, envelope.seq_id, message.loss_fn, config, data, message.forward_only, spans)


def _datum(i: int, message: Any, vocabulary: int, longest: int | None, images: Images) -> Datum:
    parts: list[Array | Picture] = []
    for j, chunk in enumerate(message.model_input):
        where, kind = f"data[{i}].model_input[{j}]", chunk.WhichOneof("chunk")
        if kind == "encoded_text":
            parts.append(check_ids(where, _values(where, chunk.encoded_text.tokens, np.dtype(np.int32)), vocabulary))
        elif kind == "image" and not chunk.image.HasField("override_dimensions"):
            expected = chunk.image.expected_tokens if chunk.image.HasField("expected_tokens") else None
            parts.append(images.read(where, chunk.image.data, expected))
        else:
            raise FaultError(f"{where} is a chunk of kind '{kind}'; give token ids and images of their own dimensions.")
    tokens, pictures = images.joined(f"data[{i}].model_input", parts)
    if not len(tokens):
        raise FaultError(f"data[{i}].model_input is empty; give at least one token.")
    if longest is not None and len(tokens) > longest:
        raise FaultError(f"data[{i}] has {len(tokens)} tokens, more than the model's {longest} positions; shorten it.")
    inputs = {
        name: read_tensor(f"data[{i}].loss_fn_inputs['{name}']", message.loss_fn_inputs[name])
        for name in message.loss_fn_inputs
    }
    target = inputs.get("target_tokens")
    if target is None:
        raise FaultError(f"data[{i}] has no loss_fn_inputs['target_tokens']; give the id to score at each position.")
    where = f"data[{i}].loss_fn_inputs['target_tokens']"
    if target.dtype != np.int64 or target.ndim not in (1, 2) or len(target) != len(tokens) or not target.size:
        raise FaultError(
            f"{where} is {target.dtype} {list(target.shape)}; give int64 of [{len(tokens)}] or [{len(tokens)}, K], as "
            "the datum has that many tokens."
        )
    check_ids(where, target, vocabulary)
    return Datum(tokens, inputs, pictures)


def check_ids(where: str, ids: Array, vocabulary: int) -> Array:
    """Return ids; raise FaultError if one is outside of the vocabulary."""
    wrong = (ids < 0) | (ids >= vocabulary)
    if wrong.any():
        raise FaultError(f"{where} holds the id {int(ids[wrong][0])}; the model has ids 0 to {vocabulary - 1}.")
    return ids


def read_tensor(where: str, message: Any) -> Array:
    """Return a tensor as an array of float32 or int64, a sparse one with zeros where it lists nothing.

    Raises:
        FaultError: bytes, shape and dtype do not fit, a number is not finite, or it is too large.
    """
    if message.dtype not in DTYPES:
        raise FaultError(f"{where} has the dtype {message.dtype}; give float32 or int64.")
    dtype = DTYPES[message.dtype]
    shape = list(message.shape)
    size = math.prod(shape) if all(n >= 0 for n in shape) else -1
    if not 0 <= size <= MOST_VALUES:
        raise FaultError(f"{where} has the shape {shape}; a tensor has at most {MOST_VALUES} values.")
    if message.HasField("sparse_csr"):
        values = _dense(where, message.sparse_csr, shape, dtype)
    else:
        values = _values(where, message.dense, dtype)
        if shape:
            if len(values) != size:
                raise FaultError(f"{where} has {len(values)} values, not those of its shape {shape}.")
            values = values.reshape(shape)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise FaultError(f"{where} holds a number that is not finite.")
    return values if values.dtype.kind == "f" else values.astype(np.int64)


def _values(where: str, raw: bytes, dtype: np.dtype[Any]) -> Array:
    if len(raw) % dtype.itemsize or len(raw) > MOST_VALUES * dtype.itemsize:
        raise FaultError(f"{where} has {len(raw)} bytes, which are no {dtype.name} numbers, or too many.")
    return np.frombuffer(raw, dtype)


def _dense(where: str, csr: Any, shape: list[int], dtype: np.dtype[Any]) -> Array:
    values = _values(where, csr.values, dtype)
    crow, col = (_values(where, raw, np.dtype(np.int64)) for raw in (csr.crow_indices, csr.col_indices))
    fits = (
        len(shape) == 2
        and len(crow) == shape[0] + 1
        and crow[0] == 0
        and crow[-1] == len(col) == len(values)
        and bool((np.diff(crow) >= 0).all())
        and bool(((col >= 0) & (col < shape[1])).all())
    )
    if not fits:
        raise FaultError(f"{where} is sparse, and its indices do not fit its shape {shape}.")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(crow)), col] = values
    return dense


def write_outputs(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Return the result of a training request.

    Args:
        logprobs: of each datum, ``[N]`` or ``[N, K]`` float32, in the order of the request.
        metrics: numbers of the request by ``name:reduction``.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    for trailing, group in groupby(logprobs, key=lambda values: values.shape[1:]):  # a record is rectangular
        arrays = [np.ascontiguousarray(values, np.float32) for values in group]
        record = message.loss_fn_outputs.add(num_datums=len(arrays))
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(values.tobytes() for values in arrays)
        tensor.offsets = np.cumsum([0, *(values.nbytes for values in arrays)]).astype(np.int64).tobytes()
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.trailing_shape.extend(trailing)
    written: bytes = message.SerializeToString()
    return written


Top = Sequence[Mapping[int, float]]
"""Likeliest tokens at each position with their log-probs, likeliest first; none where a position has none."""


@dataclass(frozen=True)
class Sampled:
    """One sampled sequence."""

    tokens: Array
    logprobs: Array
    stopped: bool  # by a stop token or text, and not by its length
    top: Top | None


def write_samples(
    sequences: Sequence[Sampled], prompt_logprobs: Array | None, prompt_top: Top | None, k_sampled: int, k_prompt: int
) -> bytes:
    """Return the result of a sampling request.

    Args:
        prompt_logprobs: ``[P] float32``, NaN where a token of the prompt has none; None if they were not asked for.
        prompt_top: likeliest tokens at each position of the prompt.
        k_sampled, k_prompt: the numbers of likeliest tokens asked for.
    """
    message = pb.SampleResponse()
    for one in sequences:
        written = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if one.stopped else pb.STOP_REASON_LENGTH,
            tokens=one.tokens.astype(np.int32).tobytes(),
            logprobs=one.logprobs.astype(np.float32).tobytes(),
        )
        if one.top is not None:
            written.topk_sampled_logprobs.CopyFrom(_top(one.top, k_sampled))
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    if prompt_top is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(prompt_top, k_prompt))
    raw: bytes = message.SerializeToString()
    return raw


def _top(top: Top, k: int) -> Any:
    ids, values = np.zeros((len(top), k), np.int32), np.full((len(top), k), NO_TOP, np.float32)
    for row, likeliest in enumerate(top):
        for column, (token, logprob) in enumerate(list(likeliest.items())[:k]):
            ids[row, column], values[row, column] = token, logprob
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=values.tobytes(), k=k, length=len(top))
