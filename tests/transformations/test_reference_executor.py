"""The reference executor: values, precision, parts of stacked containers, missing arguments."""

import re

import dace
import pytest
import torch
from dace.sdfg import SDFG

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import InputError
from stepdown.models.operators import Add, Contraction, LayerNorm, Scale
from stepdown.models.operators.gradient import connect_operator
from stepdown.models.operators.operator import make_memlet
from stepdown.transformations.reference_executor import execute, execute_training
from stepdown.transformations.training_graph import TrainingGraph

from .conftest import MakeGraph


def chain(dtype: dace.typeclass = dace.float32) -> SDFG:
    """y = 3 (a + b), the sum in a temporary."""
    sdfg = SDFG("chain")
    state = sdfg.add_state()
    for name in ("a", "b", "sum", "y"):
        sdfg.add_array(name, (4,), dtype, transient=name == "sum")
    connect_operator(sdfg, state, Add("sum", "E"), {"a": "a", "b": "b"}, {"y": "sum"})
    connect_operator(sdfg, state, Scale("y", "E", 3.0), {"x": "sum"}, {"y": "y"})
    return sdfg


def test_every_container_has_its_value() -> None:
    values = {"a": torch.arange(4.0), "b": torch.ones(4)}
    results = execute(chain(), values)
    assert {name: value.tolist() for name, value in results.items()} == {
        "a": [0.0, 1.0, 2.0, 3.0],
        "b": [1.0] * 4,
        "sum": [1.0, 2.0, 3.0, 4.0],
        "y": [3.0, 6.0, 9.0, 12.0],
    }
    assert set(values) == {"a", "b"}, "the given values are not written to"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_keep_the_precision_they_are_given_in(dtype: torch.dtype) -> None:
    """A float64 oracle of a bfloat16 graph."""
    results = execute(chain(dace.bfloat16), {"a": torch.ones(4, dtype=dtype), "b": torch.ones(4, dtype=dtype)})
    assert results["y"].dtype == dtype


def test_extra_outputs_are_there() -> None:
    sdfg = SDFG("norm")
    state = sdfg.add_state()
    for name, shape in (("x", (3, 4)), ("w", (4,)), ("b", (4,)), ("y", (3, 4)), ("r", (3,))):
        sdfg.add_array(name, shape, dace.float64)
    inputs = {"x": "x", "weight": "w", "bias": "b"}
    connect_operator(sdfg, state, LayerNorm("norm", "SE", 0.0), inputs, {"y": "y", "rstd": "r"})
    x = torch.randn(3, 4, dtype=torch.float64)
    results = execute(sdfg, {"x": x, "w": torch.ones(4).double(), "b": torch.zeros(4).double()})
    torch.testing.assert_close(results["r"], 1 / x.std(-1, correction=0))


def test_constant_indices_choose_a_part() -> None:
    """One of a stack of three, as an edge's subset says."""
    sdfg = SDFG("packed")
    state = sdfg.add_state()
    sdfg.add_array("stack", (3, 2, 4), dace.float64)
    sdfg.add_array("y", (2, 2), dace.float64)
    node = Contraction("scores", "SE,TE->ST")
    state.add_node(node)
    stack = state.add_read("stack")
    state.add_edge(stack, None, node, "a", dace.Memlet("stack[2, 0:2, 0:4]"))
    state.add_edge(stack, None, node, "b", dace.Memlet("stack[0, 0:2, 0:4]"))
    state.add_edge(node, "d", state.add_write("y"), None, make_memlet(sdfg, "y"))
    value = torch.randn(3, 2, 4, dtype=torch.float64)
    torch.testing.assert_close(execute(sdfg, {"stack": value})["y"], value[2] @ value[0].T)


def test_refuses_a_missing_argument() -> None:
    message = re.escape('argument "b" of graph "chain" was not given')
    with pytest.raises(InputError, match=f"^{message}$"):
        execute(chain(), {"a": torch.ones(4)})


def test_refuses_training_without_a_backward_pass() -> None:
    with pytest.raises(InputError, match=r'^graph "chain" has no backward pass$'):
        execute_training(TrainingGraph(chain()), {"a": torch.ones(4), "b": torch.ones(4)}, {})


def test_backward_gets_what_is_kept_and_nothing_else(make_graph: MakeGraph) -> None:
    """Run backward by hand from arguments, kept containers and the output alone."""
    definition = EncoderLayer(embed=4, heads=2, ffn=3, dropout=0.2)
    graph = make_graph(definition)
    assert graph.backward is not None
    values = {p.container: torch.randn(p.logical_shape, dtype=torch.float64) for p in definition.parameters().values()}
    values |= {"x": torch.randn(2, 3, 4, dtype=torch.float64), "attention_mask": torch.ones(2, 3, dtype=torch.bool)}
    values |= {"rng": torch.tensor([1, 2])}
    values |= {name: torch.tensor(0.2, dtype=torch.float64) for name in ("attention_dropout", "dropout_p")}
    upstream = {"gradient_y": torch.randn(2, 3, 4, dtype=torch.float64)}
    forward, backward = execute_training(graph, values, upstream)
    alone = execute(graph.backward, values | {name: forward[name] for name in (*graph.kept, "y")} | upstream)
    assert torch.equal(alone["gradient_x"], backward["gradient_x"])
    for missing in graph.kept:
        fewer = {name: forward[name] for name in graph.kept if name != missing}
        with pytest.raises(InputError, match=rf'^argument "{missing}" of graph ".*" was not given$'):
            execute(graph.backward, values | fewer | upstream)
