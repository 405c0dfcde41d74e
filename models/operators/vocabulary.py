"""The vocabulary as functions: what a layer's ``@dace.program`` calls.

Each function adds one operator to the SDFG that DaCe's Python frontend is building and returns the container of its
result; shapes and types follow from the operands by the operator's own rules. Outside a program there is nothing to
call: the functions refuse.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from dace.frontend.common import op_repository
from dace.frontend.python.common import StringLiteral
from dace.sdfg import SDFG, SDFGState

from stepdown.models.errors import StepdownError
from stepdown.models.operators.activation import Gelu, Relu
from stepdown.models.operators.contraction import Contraction
from stepdown.models.operators.dropout import Dropout
from stepdown.models.operators.element_wise import Add, Bias, CausalMask, KeyPaddingMask, Scale
from stepdown.models.operators.normalization import LayerNorm, Softmax
from stepdown.models.operators.operator import Operator, add_container, make_memlet


def _only_in_programs(name: str) -> NoReturn:
    raise StepdownError(f'operator "{name}" was called from Python; it is accepted inside a @dace.program only')


def contraction(a: Any, b: Any, einsum: str, alpha: float = 1.0, name: str = "contraction") -> Any:
    """``alpha * einsum(a, b)``, for example ``contraction(x, weight, "BSE,UE->BSU")``."""
    _only_in_programs(name)


def bias(x: Any, b: Any, dims: str, bias_dims: str, name: str = "bias") -> Any:
    """``x + b`` with ``b`` broadcast over the dimensions it lacks."""
    _only_in_programs(name)


def add(a: Any, b: Any, dims: str, name: str = "add") -> Any:
    """``a + b``: a residual connection."""
    _only_in_programs(name)


def scale(x: Any, factor: float, dims: str, name: str = "scale") -> Any:
    """``factor * x``."""
    _only_in_programs(name)


def key_padding_mask(x: Any, mask: Any, dims: str, name: str = "key_padding_mask") -> Any:
    """``x`` where the boolean ``mask`` over (B, T) is true, minus infinity elsewhere."""
    _only_in_programs(name)


def causal_mask(x: Any, dims: str, name: str = "causal_mask") -> Any:
    """``x`` where the key position is at most the query position, minus infinity elsewhere."""
    _only_in_programs(name)


def softmax(x: Any, dims: str, name: str = "softmax") -> Any:
    """Softmax over the last dimension; a row of minus infinities gives zeros."""
    _only_in_programs(name)


def layer_norm(x: Any, weight: Any, b: Any, dims: str, eps: float, name: str = "layer_norm") -> Any:
    """LayerNorm over the last dimension."""
    _only_in_programs(name)


def gelu(x: Any, dims: str, approximate: str = "none", name: str = "gelu") -> Any:
    """GELU, by erf (``"none"``) or in its tanh form (``"tanh"``)."""
    _only_in_programs(name)


def relu(x: Any, dims: str, name: str = "relu") -> Any:
    """ReLU."""
    _only_in_programs(name)


def dropout(x: Any, rng: Any, p: Any, dims: str, site: int, name: str = "dropout") -> Any:
    """Dropout with probability ``p`` and the random stream of ``site`` from the pair ``rng``."""
    _only_in_programs(name)


def _register(function: Callable[..., Any], operator: type[Operator], connectors: dict[str, str]) -> None:
    """Let the frontend turn calls of ``function`` into ``operator``; ``connectors`` names the operands' arguments."""

    def replacement(visitor: Any, sdfg: SDFG, state: SDFGState, *arguments: Any, **options: Any) -> str:
        code = function.__code__
        values = dict(zip(code.co_varnames[: code.co_argcount], arguments, strict=False)) | options
        operands = {connectors[key]: values.pop(key) for key in list(values) if key in connectors}
        values = {key: value.value if isinstance(value, StringLiteral) else value for key, value in values.items()}
        values.setdefault("name", function.__name__)
        node = operator(**values)
        shapes = node.infer({connector: sdfg.arrays[name] for connector, name in operands.items()})
        output = node.outputs[0]
        shape, dtype = shapes[output]
        result = add_container(sdfg, f"{node.name}_out", shape, dtype)
        state.add_node(node)
        for connector, name in operands.items():
            state.add_edge(state.add_read(name), None, node, connector, make_memlet(sdfg, name))
        state.add_edge(node, output, state.add_write(result), None, make_memlet(sdfg, result))
        return result

    op_repository.replaces(f"{function.__module__}.{function.__qualname__}")(replacement)


_register(contraction, Contraction, {"a": "a", "b": "b"})
_register(bias, Bias, {"x": "x", "b": "bias"})
_register(add, Add, {"a": "a", "b": "b"})
_register(scale, Scale, {"x": "x"})
_register(key_padding_mask, KeyPaddingMask, {"x": "x", "mask": "mask"})
_register(causal_mask, CausalMask, {"x": "x"})
_register(softmax, Softmax, {"x": "x"})
_register(layer_norm, LayerNorm, {"x": "x", "weight": "weight", "b": "bias"})
_register(gelu, Gelu, {"x": "x"})
_register(relu, Relu, {"x": "x"})
_register(dropout, Dropout, {"x": "x", "rng": "rng", "p": "p"})
