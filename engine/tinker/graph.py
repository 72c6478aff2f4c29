"""A loss that a client traced with torch.fx, rebuilt from a list of allowed operations; nothing of it is executed.

The client sends nodes as data (`CustomLossGraph`): names of functions and methods, and arguments that refer to earlier
nodes. A node whose operation is not on the lists here is refused when the loss is created. What is on them computes on
tensors and numbers alone, and cannot reach files, processes or Python's objects. The size of every result is bounded.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tinker.types.custom_loss_graph import CustomLossGraph, CustomLossNode
from torch import Tensor
from torch.nn import functional

from .faults import FaultError
from .wire import Datum

MOST_NODES = 2000
MOST_VALUES = 1 << 24
"""Most values of a tensor in a graph, and of all tensors of a datum's loss together."""
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}

_OPERATORS = "add sub mul truediv neg pos abs lt le gt ge eq ne and_ or_ xor invert getitem"
_TORCH = (
    "abs add amax amin cat clamp clip cumsum detach div eq exp expm1 ge gt isfinite isinf isnan le lerp log log1p "
    "logaddexp logical_and logical_not logical_or logical_xor logsumexp lt max maximum mean min minimum mul nan_to_num "
    "ne neg ones_like prod relu rsqrt sigmoid sign softmax log_softmax sqrt square stack std sub sum tanh var where "
    "zeros_like flip diff std_mean masked_fill atan sin cos erf trunc round floor ceil"
)
_FUNCTIONAL = (
    "elu gelu hardtanh huber_loss leaky_relu logsigmoid mse_loss relu silu smooth_l1_loss softplus softmax log_softmax"
)
_METHODS = (
    "abs add all amax amin any bool clamp clamp_max clamp_min clip cumsum detach dim div double eq exp expm1 flatten "
    "float ge gt isfinite isinf isnan le log log1p logical_and logical_not logical_or logsumexp lt long masked_fill "
    "max maximum mean min minimum mul ne neg nan_to_num numel prod relu reshape rsqrt sigmoid sign size softmax "
    "log_softmax sqrt square squeeze std sub sum tanh t to transpose unsqueeze var view where diff flip"
)
_MATH = "exp log sqrt log1p expm1"
ATTRIBUTES = {"shape", "ndim", "dtype", "device"}


def _functions() -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {}
    functions |= {f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()}
    functions |= {f"torch.{name}": getattr(torch, name) for name in _TORCH.split() if hasattr(torch, name)}
    functions |= {f"math.{name}": getattr(math, name) for name in _MATH.split()}
    for name in _FUNCTIONAL.split():
        function = getattr(functional, name)
        functions |= {f"torch.nn.functional.{name}": function, f"torch._C._nn.{name}": function}
    functions["torch._C._nn.log_sigmoid"] = functional.logsigmoid
    # a power of numbers could have as many digits as memory holds; one of tensors is a tensor
    functions |= {"operator.pow": _power, "torch.pow": _power, "getattr": _attribute, "builtins.getattr": _attribute}
    return functions


def _power(base: Any, exponent: Any) -> Any:
    if not isinstance(base, Tensor) and not isinstance(exponent, Tensor):
        return float(base) ** float(exponent)
    return base**exponent


def _attribute(value: Any, name: Any) -> Any:
    if not isinstance(value, Tensor) or name not in ATTRIBUTES:
        raise FaultError(f"A custom loss reads the attribute '{name}'; of tensors it may read {_listed(ATTRIBUTES)}.")
    return getattr(value, name)


FUNCTIONS = _functions()
METHODS = {name: getattr(Tensor, name) for name in _METHODS.split()} | {"pow": _power}


class Graph:
    """A checked graph.

    Args:
        name: of the loss, for messages.
        inputs: name and rank of each input, ``logprobs`` first.
        graph: the nodes in execution order.

    Raises:
        FaultError: an operation is not allowed, or the graph is no loss.
    """

    def __init__(self, name: str, inputs: Sequence[tuple[str, int]], graph: CustomLossGraph) -> None:
        self.name, self.inputs = name, list(inputs)
        self._nodes = graph.nodes
        if not self.inputs or self.inputs[0][0] != "logprobs" or self.inputs[0][1] == 0:
            raise FaultError(f"The custom loss '{name}' must read logprobs [T] or [T, K] first.")
        if not 0 < len(self._nodes) <= MOST_NODES:
            raise FaultError(f"The custom loss '{name}' has {len(self._nodes)} nodes; give 1 to {MOST_NODES}.")
        defined: set[str] = set()
        for node in self._nodes:
            self._check(node, defined)
            defined.add(node.name)
        read = [node.target for node in self._nodes if node.op == "placeholder"]
        if read != [key for key, _ in self.inputs] or len(defined) != len(self._nodes):
            raise FaultError(f"The inputs of the custom loss '{name}' are not those that its graph reads.")
        if self._nodes[-1].op != "output" or sum(node.op == "output" for node in self._nodes) != 1:
            raise FaultError(f"The graph of the custom loss '{name}' must end with its one output.")

    def _check(self, node: CustomLossNode, defined: set[str]) -> None:
        if node.op == "call_function" and node.target not in FUNCTIONS:
            raise FaultError(
                f"The custom loss '{self.name}' calls {node.target}, which this server does not allow; it allows "
                f"{_listed(n for n in FUNCTIONS if not n.startswith('torch._C'))}."
            )
        if node.op == "call_method" and node.target not in METHODS:
            raise FaultError(
                f"The custom loss '{self.name}' calls the method {node.target}, which this server does not allow; it "
                f"allows {_listed(METHODS)}."
            )
        if node.op not in ("placeholder", "call_function", "call_method", "output"):
            raise FaultError(f"The custom loss '{self.name}' has a node '{node.op}', which this server does not allow.")
        for value in (*node.args, *node.kwargs.values()):
            for name in _refs(value):
                if name not in defined:
                    raise FaultError(f"The custom loss '{self.name}' uses '{name}' before it is computed.")

    def check(self, i: int, datum: Datum) -> None:
        """Raise FaultError if a datum lacks an input, or has one of another rank."""
        for key, rank in [("target_tokens", self.inputs[0][1]), *self.inputs[1:]]:
            if key not in datum.inputs:
                raise FaultError(f"data[{i}].loss_fn_inputs has no '{key}', which the loss '{self.name}' reads.")
            values = datum.inputs[key]
            if values.ndim != rank and not (rank == 0 and values.size == 1):
                raise FaultError(
                    f"data[{i}].loss_fn_inputs['{key}'] has the shape {list(values.shape)}, and the loss "
                    f"'{self.name}' declares the rank {rank}."
                )

    def run(self, logprob: Tensor, datum: Datum) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a datum, ``[]`` and differentiable, and its metrics.

        Args:
            logprob: ``[T]`` or ``[T, K]``.

        Raises:
            FaultError: an operation fails, a tensor becomes too large, or the result is no loss.
        """
        inputs = {"logprobs": logprob}
        for key, rank in self.inputs[1:]:
            tensor = torch.from_numpy(datum.inputs[key].copy()).to(logprob.device)
            inputs[key] = tensor.reshape(()) if rank == 0 else tensor
        values: dict[str, Any] = {}
        size = 0
        for node in self._nodes:
            try:
                if node.op == "placeholder":
                    values[node.name] = inputs[node.target]
                    continue
                args = [_value(arg, values) for arg in node.args]
                kwargs = {key: _value(arg, values) for key, arg in node.kwargs.items()}
                if node.op == "output":
                    return self._result(args[0])
                function = (FUNCTIONS if node.op == "call_function" else METHODS)[node.target]
                if node.op == "call_method" and not (args and isinstance(args[0], Tensor)):
                    raise FaultError(f"The custom loss '{self.name}' calls {node.target} on what is no tensor.")
                _check_arguments(node.target, args, kwargs)
                result = values[node.name] = function(*args, **kwargs)
                size += result.numel() if isinstance(result, Tensor) else 0
                if size > MOST_VALUES:
                    raise FaultError(f"The tensors of the custom loss '{self.name}' have over {MOST_VALUES} values.")
            except FaultError:
                raise
            except Exception as error:
                said = " ".join(str(error).split())[:200].rstrip(".")
                raise FaultError(
                    f"The custom loss '{self.name}' fails at {node.name} = {node.target}: {said}."
                ) from None
        raise AssertionError("a checked graph ends with its output")

    def _result(self, output: Any) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = output if isinstance(output, list | tuple) and len(output) == 2 else (None, None)
        if not isinstance(loss, Tensor) or loss.shape != () or not isinstance(metrics, dict):
            raise FaultError(f"The custom loss '{self.name}' must return a tensor of one number and a dict of metrics.")
        results = {}
        for name, value in metrics.items():
            if not METRIC.fullmatch(name) or not isinstance(value, Tensor) or value.numel() != 1:
                raise FaultError(
                    f"The metric '{name}' of the custom loss '{self.name}' must be one number named "
                    "custom/<name>:sum or custom/<name>:mean."
                )
            results[name] = float(value.detach())
        return loss, results


def _refs(value: Any) -> list[str]:
    """Return the nodes that an encoded argument refers to, in depth bounded by the parser of JSON."""
    if isinstance(value, list):
        return [name for each in value for name in _refs(each)]
    if isinstance(value, dict):
        if set(value) == {"ref"}:
            return [str(value["ref"])]
        return [name for each in value.values() for name in _refs(each)]
    return []


def _value(value: Any, values: Mapping[str, Any]) -> Any:
    """Return the argument that an encoded one stands for."""
    if isinstance(value, list):
        return [_value(each, values) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "ref":
        return values[inner]
    if kind == "tuple":
        return tuple(_value(each, values) for each in inner)
    if kind == "dict":
        return {key: _value(each, values) for key, each in inner.items()}
    if kind == "slice":
        return slice(*(_value(each, values) for each in inner))
    if kind == "ellipsis":
        return ...
    if kind == "float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if kind == "dtype" and inner in DTYPES:
        return DTYPES[inner]
    if kind == "device":
        return torch.device("cpu")
    raise FaultError(f"A custom loss has an argument of kind '{kind}' ({inner}), which this server does not take.")


def _check_arguments(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise FaultError if a result could be too large, or Python's own objects would be computed with."""
    flat = list(_leaves([*args, *kwargs.values()]))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    if target.startswith("operator.") and target != "operator.getitem":  # Python's would repeat a list or a text
        if not all(isinstance(v, Tensor) or (isinstance(v, int | float) and abs(v) < 2**53) for v in args):
            raise FaultError(f"A custom loss calls {target} on what are no tensors or numbers.")
    elif any(isinstance(value, str) for value in flat) and "getattr" not in target and "reduction" not in kwargs:
        raise FaultError(f"A custom loss gives {target} a text, which this server does not take.")
    if target in ("torch.cat", "torch.stack"):
        size = sum(tensor.numel() for tensor in tensors)
    else:
        shapes = [tensor.shape for tensor in tensors]
        try:
            size = math.prod(torch.broadcast_shapes(*shapes)) if shapes else 0
        except RuntimeError:
            size = max(tensor.numel() for tensor in tensors)  # the operation itself says what does not fit
    if size > MOST_VALUES:
        raise FaultError(f"A tensor of a custom loss would have {size} values; at most {MOST_VALUES} are allowed.")


def _leaves(values: Sequence[Any]) -> list[Any]:
    leaves: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            leaves += _leaves(value)
        elif isinstance(value, dict):
            leaves += _leaves(list(value.values()))
        elif isinstance(value, slice):
            leaves += _leaves([value.start, value.stop, value.step])
        elif value is not None:
            leaves.append(value)
    return leaves


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))
