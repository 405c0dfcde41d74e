"""The vocabulary's functions: inside a program each call is one operator, outside it is refused."""

from __future__ import annotations

import inspect

import dace
import pytest

from stepdown.models.errors import StepdownError
from stepdown.models.operators import OPERATORS, Operator, vocabulary
from stepdown.models.operators.vocabulary import (
    add,
    bias,
    causal_mask,
    contraction,
    dropout,
    gelu,
    key_padding_mask,
    layer_norm,
    relu,
    scale,
    softmax,
)
from stepdown.transformations.canonical_form import operators, validate_sdfg

FUNCTIONS = (add, bias, causal_mask, contraction, dropout, gelu, key_padding_mask, layer_norm, relu, scale, softmax)

B = dace.symbol("B", dace.int32, positive=True)
S = dace.symbol("S", dace.int32, positive=True)


@dace.program
def everything(  # type: ignore[no-untyped-def]
    x: dace.float32[B, S, 6],
    weight: dace.float32[2, 3, 6],
    mask: dace.bool_[B, S],
    rng: dace.int64[2],
    p: dace.float64,
    b: dace.float32[6],
):
    normalized = layer_norm(x, b, b, "BSE", 1e-5, name="normalized")
    query = contraction(normalized, weight, "BSE,HPE->BSHP", name="query")
    scores = contraction(query, query, "BSHP,BTHP->BHST", 0.5)
    visible = causal_mask(key_padding_mask(scores, mask, "BHST"), "BHST")
    weights = dropout(softmax(visible, "BHST"), rng, p, "BHST", 7)
    context = contraction(weights, query, "BHST,BTHP->BSHP")
    back = contraction(context, weight, "BSHP,HPE->BSE", name="back")
    left = gelu(bias(back, b, "BSE", "E"), "BSE", "tanh")
    right = scale(relu(back, "BSE"), 0.25, "BSE")
    return add(left, right, "BSE")


def test_every_call_is_one_operator() -> None:
    sdfg = everything.to_sdfg(simplify=True)
    validate_sdfg(sdfg)
    found = {node.name: node for node in operators(sdfg)}
    assert {type(node).__name__ for node in found.values()} == {
        "Add", "Bias", "CausalMask", "Contraction", "Dropout", "Gelu", "KeyPaddingMask", "LayerNorm", "Relu", "Scale",
        "Softmax",
    }  # fmt: skip
    assert len(operators(sdfg)) == 14
    assert found["query"].einsum == "BSE,HPE->BSHP" and found["query"].alpha == 1.0
    assert found["normalized"].eps == 1e-5
    assert found["gelu"].approximate == "tanh"
    assert found["scale"].factor == 0.25
    assert found["dropout"].site == 7
    assert found["bias"].bias_dims == "E"


def test_results_have_the_operands_type_and_symbolic_extents() -> None:
    sdfg = everything.to_sdfg(simplify=True)
    (query,) = (n for n in operators(sdfg) if n.name == "query")
    descriptor = sdfg.arrays[sdfg.nodes()[0].out_edges(query)[0].data.data]
    assert descriptor.dtype == dace.float32
    assert [str(extent) for extent in descriptor.shape] == ["B", "S", "2", "3"]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_refuses_a_call_from_python(function: object) -> None:
    assert callable(function)
    arguments = [None] * sum(
        p.default is inspect.Parameter.empty for p in inspect.signature(function).parameters.values()
    )
    name = getattr(function, "__name__", "")
    with pytest.raises(StepdownError) as caught:
        function(*arguments)
    message = f'operator "{name}" was called from Python; it is accepted inside a @dace.program only'
    assert str(caught.value) == message


def test_there_is_a_function_for_every_forward_operator() -> None:
    def words(operator: type[Operator]) -> str:
        return "".join("_" + c.lower() if c.isupper() else c for c in operator.__name__).lstrip("_")

    written_by_passes = ("SumRows", "Relayout")
    forward = {
        words(o) for o in OPERATORS if not o.__name__.endswith("Gradient") and o.__name__ not in written_by_passes
    }
    assert forward == {function.__name__ for function in FUNCTIONS}
    assert all(hasattr(vocabulary, name) for name in forward)
