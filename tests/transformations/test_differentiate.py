# mypy: disable-error-code="misc,arg-type"
"""Differentiation: whole layers and random graphs against PyTorch's autograd, the graph's form, refusals.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import copy
import re
from contextlib import AbstractContextManager
from typing import Any

import dace
import pytest
import torch
from dace.sdfg import SDFG
from hypothesis import given, settings
from hypothesis import strategies as st

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import (
    OPERATORS,
    Add,
    Bias,
    Contraction,
    Dropout,
    Gelu,
    LayerNorm,
    Operator,
    Relu,
    Scale,
    Softmax,
)
from stepdown.models.operators.gradient import connect_operator
from stepdown.models.operators.philox import keep_mask
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.transformations.canonical_form import kept_containers, operators, the_state, validate
from stepdown.transformations.differentiate import differentiate
from stepdown.transformations.reference_executor import execute, execute_training
from stepdown.transformations.training_graph import TrainingGraph

from .conftest import MakeGraph

LAYERS = {
    "bert": EncoderLayer(embed=12, heads=3, ffn=10),
    "paper": EncoderLayer(embed=12, heads=3, ffn=10, activation="relu", activation_dropout=0.2),
    "pre-norm": EncoderLayer(embed=12, heads=3, ffn=10, norm="pre", eps=1e-5),
    "gpt-2": EncoderLayer(embed=12, heads=2, ffn=9, norm="pre", causal=True, activation="gelu_tanh", eps=1e-5),
    "causal": EncoderLayer(embed=12, heads=2, ffn=9, causal=True, activation="relu"),
    "one head": EncoderLayer(embed=6, heads=1, ffn=4),
    "heads of one": EncoderLayer(embed=3, heads=3, ffn=1),
    "no biases": EncoderLayer(embed=12, heads=3, ffn=10, bias=False),
    "no biases, pre-norm": EncoderLayer(embed=12, heads=3, ffn=10, bias=False, norm="pre", activation="relu"),
    "no dropout": EncoderLayer(embed=12, heads=3, ffn=10, dropout=0.0, attention_dropout=0.0),
    "attention dropout alone": EncoderLayer(embed=12, heads=3, ffn=10, dropout=0.0, attention_dropout=0.5),
    "activation dropout alone": EncoderLayer(
        embed=12, heads=3, ffn=10, dropout=0.0, attention_dropout=0.0, activation_dropout=0.3
    ),
    "nothing": EncoderLayer(
        embed=4, heads=1, ffn=4, bias=False, dropout=0.0, attention_dropout=0.0, norm="pre", activation="relu"
    ),
}
each_layer = pytest.mark.parametrize("layer", LAYERS)


def masks(batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Full, padded on the right, with holes, and with batch entries that have no key at all."""
    full = torch.ones(batch, seq, dtype=torch.bool)
    right, holes, none = full.clone(), full.clone(), full.clone()
    right[0, seq // 2 :] = False
    holes[:, ::2] = False
    holes[-1] = True
    none[0] = False
    return {"full": full, "right": right, "holes": holes, "none": none}


def layer_values(definition: EncoderLayer, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Arguments of the forward graph besides the mask, in float64; weights at fan-in scale."""
    values = {"x": torch.randn(batch, seq, definition.embed, dtype=torch.float64), "rng": torch.tensor([5, -7])}
    for parameter in definition.parameters().values():
        fan_in = parameter.shape[-1] if len(parameter.shape) > 1 else 1
        values[parameter.container] = torch.randn(parameter.logical_shape, dtype=torch.float64) / fan_in**0.5
    attention, other, activation, _ = definition.dropout_sites
    probabilities = {"attention_dropout": attention, "dropout_p": other, "activation_dropout": activation}
    return values | {name: torch.tensor(p, dtype=torch.float64) for name, p in probabilities.items()}


def compare_layer(graph: TrainingGraph, definition: EncoderLayer, batch: int, seq: int, mask: torch.Tensor) -> None:
    """Output and every gradient against the PyTorch layer with the same dropout masks."""
    values = layer_values(definition, batch, seq) | {"attention_mask": mask}
    upstream = torch.randn(batch, seq, definition.embed, dtype=torch.float64)
    forward, backward = execute_training(graph, values, {"gradient_y": upstream})
    reference = ReferenceEncoderLayer(definition).double().train()
    parameters = definition.parameters()
    reference.load_state_dict({name: values[p.container].reshape(p.shape) for name, p in parameters.items()})
    keep = {
        site: torch.from_numpy(keep_mask(5, -7, site, definition.dropout_shape(site, batch, seq), probability))
        for site, probability in enumerate(definition.dropout_sites)
    }
    x = values["x"].clone().requires_grad_()
    y = reference(x, attention_mask=mask, keep=keep)
    expected = torch.autograd.grad(y, [x, *(reference.get_parameter(name) for name in parameters)], upstream)
    torch.testing.assert_close(forward["y"], y.detach(), rtol=1e-11, atol=1e-11)
    containers = ["x", *(p.container for p in parameters.values())]
    for name, gradient in zip(containers, expected, strict=True):
        found = backward[f"gradient_{name}"].reshape(gradient.shape)
        torch.testing.assert_close(
            found, gradient, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


@each_layer
def test_layers_equal_pytorch(layer: str, make_graph: MakeGraph) -> None:
    for batch, seq in ((2, 5), (3, 1), (1, 4)):
        for mask in masks(batch, seq).values():
            compare_layer(make_graph(LAYERS[layer]), LAYERS[layer], batch, seq, mask)


@each_layer
def test_layers_are_in_canonical_form(layer: str, make_graph: MakeGraph) -> None:
    """One state of operators without write-conflict resolution; every gradient is an argument of its own name."""
    graph = make_graph(LAYERS[layer])
    validate(graph)
    assert graph.backward is not None
    for _, sdfg in graph.graphs():
        assert {type(node) for node in operators(sdfg)} <= set(OPERATORS)
        assert all(edge.data.wcr is None for edge in the_state(sdfg).edges())
    arguments = {name for name, d in graph.backward.arrays.items() if not d.transient and name.startswith("gradient_")}
    containers = [parameter.container for parameter in LAYERS[layer].parameters().values()]
    assert arguments == {"gradient_y", "gradient_x", *(f"gradient_{name}" for name in containers)}
    for name in containers:
        assert graph.backward.arrays[f"gradient_{name}"].shape == graph.forward.arrays[name].shape


@each_layer
def test_kept_is_minimal(layer: str, make_graph: MakeGraph) -> None:
    """Each kept container is read by a backward operator; without any one of them the form is refused."""
    graph = make_graph(LAYERS[layer])
    assert graph.backward is not None
    read = {e.data.data for n in operators(graph.backward) for e in the_state(graph.backward).in_edges(n)}
    assert set(graph.kept) <= read
    assert kept_containers(graph.forward, graph.backward) == graph.kept
    for name in graph.kept:
        with pytest.raises(CanonicalFormError, match=r"\(rule 4\)$"):
            validate(TrainingGraph(graph.forward, graph.backward, tuple(k for k in graph.kept if k != name)))


def test_what_bert_keeps(make_graph: MakeGraph) -> None:
    """Operands of contractions, inputs of norms and activation, the softmax's output, four statistics; no masks."""
    assert set(make_graph(LAYERS["bert"]).kept) == {
        "query", "key", "value", "weights", "dropped", "context", "attention_sum", "attention_norm_mean",
        "attention_norm_rstd", "hidden", "intermediate", "activated", "output_sum", "output_norm_mean",
        "output_norm_rstd",
    }  # fmt: skip


def test_the_number_of_operators(make_graph: MakeGraph) -> None:
    """BERT backward: two contractions for each of eight, six sums for biases, and so on; nothing is left over."""
    graph = make_graph(LAYERS["bert"])
    assert graph.backward is not None
    kinds = [type(node).__name__ for node in operators(graph.backward)]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "LayerNormGradient": 2,
        "LayerNormParameterGradient": 2,
        "Dropout": 3,
        "SumRows": 6,
        "Contraction": 16,
        "GeluGradient": 1,
        "SoftmaxGradient": 1,
        "KeyPaddingMask": 1,
        "Add": 4,
    }


def test_the_given_graph_stays_as_it_was() -> None:
    sdfg, _ = small()
    before = sdfg.to_json()
    graph = differentiate(sdfg, "y", ["x"])
    assert json_without_time(sdfg.to_json()) == json_without_time(before)
    assert graph.forward is not sdfg


def test_only_what_is_required_is_computed() -> None:
    sdfg, _ = small()
    everything, only = differentiate(sdfg, "y", ["x", "w", "b"]), differentiate(sdfg, "y", ["b"])
    assert everything.backward is not None and only.backward is not None
    assert [node.name for node in operators(only.backward)] == ["gelu_gradient", "bias_gradient"]
    assert only.kept == everything.kept == ("hidden",)
    assert set(only.backward.arrays) == {"gradient_y", "hidden", "gradient_hidden", "gradient_b"}


def test_a_gradient_that_is_the_given_one_is_copied() -> None:
    """Both operands of the last addition have the given gradient: as results they are containers of their own."""
    sdfg = SDFG("sum")
    state = sdfg.add_state()
    for name in ("a", "b", "y"):
        sdfg.add_array(name, (3,), dace.float64)
    connect_operator(sdfg, state, Add("sum", "E"), {"a": "a", "b": "b"}, {"y": "y"})
    graph = differentiate(sdfg, "y", ["a", "b"])
    validate(graph)
    values = {"a": torch.randn(3).double(), "b": torch.randn(3).double()}
    upstream = torch.randn(3).double()
    _, backward = execute_training(graph, values, {"gradient_y": upstream})
    assert torch.equal(backward["gradient_a"], upstream) and torch.equal(backward["gradient_b"], upstream)


def test_one_container_as_both_operands() -> None:
    """y = x x^T + x x^T reads x four times; its gradient is the sum of four parts."""
    sdfg = SDFG("square")
    state = sdfg.add_state()
    sdfg.add_array("x", (3, 4), dace.float64)
    sdfg.add_transient("square", (3, 3), dace.float64)
    sdfg.add_array("y", (3, 3), dace.float64)
    connect_operator(sdfg, state, Contraction("square", "SE,TE->ST"), {"a": "x", "b": "x"}, {"d": "square"})
    connect_operator(sdfg, state, Add("twice", "ST"), {"a": "square", "b": "square"}, {"y": "y"})
    compare_with_autograd(sdfg, {"x": torch.randn(3, 4, dtype=torch.float64)}, ["x"])


# ---- random graphs --------------------------------------------------------------------------------------------------

SIZES = {"S": 3, "E": 4, "U": 2}


class RandomGraph:
    """Draws operators over containers of dimensions SE, SU, E, U and EU until told to stop."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.sdfg = SDFG("random")
        self.state = self.sdfg.add_state()
        self.pool: dict[str, list[str]] = {"SE": [], "SU": [], "E": [], "U": [], "EU": []}
        self.leaves: dict[str, str] = {}
        self.read: set[str] = set()
        for number, dims in enumerate(("SE", "SE", "SU", "E", "U", "EU")):
            self.leaves[self.container(f"leaf_{number}", dims, transient=False)] = dims
        self.sdfg.add_array("rng", (2,), dace.int64)
        self.sdfg.add_scalar("p", dace.float64)

    def container(self, name: str, dims: str, *, transient: bool = True) -> str:
        self.sdfg.add_array(name, [SIZES[d] for d in dims], dace.float64, transient=transient)
        self.pool[dims].append(name)
        return name

    def pick(self, dims: str) -> str:
        return self.draw(st.sampled_from(self.pool[dims]))

    def add(self, node: Operator, dims: str, **inputs: str) -> str:
        name = self.container(f"value_{len(self.state.nodes())}", dims)
        node.name = f"{node.name}_{len(self.state.nodes())}"
        connect_operator(self.sdfg, self.state, node, inputs, {node.outputs[0]: name})
        self.read |= set(inputs.values())
        return name

    def step(self) -> None:
        """One drawn operator."""
        dims = self.draw(st.sampled_from(["SE", "SU"]))
        last = dims[-1]
        kind = self.draw(st.sampled_from(
            ["add", "scale", "gelu", "gelu_tanh", "relu", "softmax", "norm", "bias", "dropout", "map", "gram", "onto"]
        ))  # fmt: skip
        x = self.pick(dims)
        if kind == "add":
            self.add(Add("add", dims), dims, a=x, b=self.pick(dims))
        elif kind == "scale":
            self.add(Scale("scale", dims, self.draw(st.sampled_from([-1.5, 0.25]))), dims, x=x)
        elif kind in ("gelu", "gelu_tanh"):
            self.add(Gelu("gelu", dims, "tanh" if kind == "gelu_tanh" else "none"), dims, x=x)
        elif kind == "relu":
            self.add(Relu("relu", dims), dims, x=x)
        elif kind == "softmax":
            self.add(Softmax("softmax", dims), dims, x=x)
        elif kind == "norm":
            self.add(LayerNorm("norm", dims, 1e-3), dims, x=x, weight=self.pick(last), bias=self.pick(last))
        elif kind == "bias":
            self.add(Bias("bias", dims, last), dims, x=x, bias=self.pick(last))
        elif kind == "dropout":
            self.add(Dropout("dropout", dims, self.draw(st.integers(0, 3))), dims, x=x, rng="rng", p="p")
        elif kind == "map":
            other = "SU" if dims == "SE" else "SE"
            self.add(Contraction("map", f"{dims},EU->{other}", 0.5), other, a=x, b=self.pick("EU"))
        elif kind == "gram":
            self.add(Contraction("gram", "SE,SU->EU", 0.5), "EU", a=self.pick("SE"), b=self.pick("SU"))
        else:
            node = Contraction("onto", "SU,EU->SE", 0.5, accumulate=True)
            self.add(node, "SE", a=self.pick("SU"), b=self.pick("EU"), c=self.pick("SE"))

    def finish(self) -> list[str]:
        """Gathers every value that nobody reads in y; the leaves that y depends on."""
        ends = {dims: [n for n in names if n not in self.read] for dims, names in self.pool.items()}
        total = self.pick("SE")
        for name in ends["EU"]:
            total = self.add(
                Contraction("end", "SU,EU->SE", 1.0, accumulate=True), "SE", a=self.pick("SU"), b=name, c=total
            )
        for name in ends["SU"]:
            total = self.add(
                Contraction("end", "SU,EU->SE", 1.0, accumulate=True), "SE", a=name, b=self.pick("EU"), c=total
            )
        for name in [name for name in ends["SE"] if name != total]:
            total = self.add(Add("end", "SE"), "SE", a=total, b=name)
        self.sdfg.add_array("y", (3, 4), dace.float64)
        connect_operator(self.sdfg, self.state, Scale("y", "SE", 2.0), {"x": total}, {"y": "y"})
        used = {node.data for node in self.state.data_nodes()}
        for name in [name for name in self.sdfg.arrays if name not in used]:
            self.sdfg.remove_data(name)
        return [name for name in self.leaves if name in used]


def compare_with_autograd(sdfg: SDFG, values: dict[str, torch.Tensor], required: list[str]) -> TrainingGraph:
    """Differentiate, execute, and compare with PyTorch differentiating the same composition of references."""
    graph = differentiate(sdfg, "y", required)
    validate(graph)
    leaves = values | {name: values[name].clone().requires_grad_() for name in required}
    y = execute(sdfg, leaves)["y"]
    upstream = torch.randn_like(y)
    expected = torch.autograd.grad(y, [leaves[name] for name in required], upstream)
    forward, backward = execute_training(graph, values, {"gradient_y": upstream})
    torch.testing.assert_close(forward["y"], y.detach(), rtol=0, atol=0)
    for name, gradient in zip(required, expected, strict=True):
        torch.testing.assert_close(backward[f"gradient_{name}"], gradient, rtol=1e-8, atol=1e-9)
    return graph


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(drawn=st.data())
def test_random_graphs_equal_autograd(drawn: st.DataObject) -> None:
    random = RandomGraph(drawn.draw)
    for _ in range(drawn.draw(st.integers(1, 9), "operators")):
        random.step()
    leaves = random.finish()
    required = drawn.draw(st.lists(st.sampled_from(leaves), min_size=1, unique=True), "required")
    torch.manual_seed(drawn.draw(st.integers(0, 99), "seed"))
    values = {name: torch.randn([SIZES[d] for d in random.leaves[name]], dtype=torch.float64) for name in leaves}
    values |= {"rng": torch.tensor([3, 4]), "p": torch.tensor(0.4, dtype=torch.float64)}
    compare_with_autograd(random.sdfg, values, required)


# ---- refusals -------------------------------------------------------------------------------------------------------


def refused(message: str) -> AbstractContextManager[Any]:
    """Expects the block to be refused with exactly this sentence."""
    return pytest.raises(CanonicalFormError, match="^" + re.escape(message) + "$")


def small() -> tuple[SDFG, Any]:
    """y = gelu(x w + b), with a scalar and a mask that nothing differentiates."""
    sdfg = SDFG("small")
    state = sdfg.add_state()
    for name, shape in (("x", (3, 4)), ("w", (4, 2)), ("b", (2,)), ("y", (3, 2))):
        sdfg.add_array(name, shape, dace.float64)
    for name in ("product", "hidden", "dropped"):
        sdfg.add_transient(name, (3, 2), dace.float64)
    sdfg.add_array("rng", (2,), dace.int64)
    sdfg.add_scalar("p", dace.float64)
    connect_operator(sdfg, state, Contraction("product", "SE,EU->SU"), {"a": "x", "b": "w"}, {"d": "product"})
    connect_operator(sdfg, state, Dropout("dropout", "SU"), {"x": "product", "rng": "rng", "p": "p"}, {"y": "dropped"})
    connect_operator(sdfg, state, Bias("bias", "SU", "U"), {"x": "dropped", "bias": "b"}, {"y": "hidden"})
    connect_operator(sdfg, state, Gelu("gelu", "SU"), {"x": "hidden"}, {"y": "y"})
    return sdfg, state


@pytest.mark.parametrize("name", ["nothing", "hidden", "y", "p", "rng"])
def test_refuses_gradients_that_do_not_exist(name: str) -> None:
    """Of unknown containers, of temporaries, of the output itself, of probabilities and of integers."""
    with refused(f'the gradient of "{name}" was asked for; "y" of graph "small" has gradients of "b", "w", "x"'):
        differentiate(small()[0], "y", ["x", name])


def test_refuses_gradients_of_what_the_output_does_not_depend_on() -> None:
    sdfg, state = small()
    sdfg.add_array("u", (3, 2), dace.float64)
    sdfg.add_array("v", (3, 2), dace.float64)
    connect_operator(sdfg, state, Scale("aside", "SU", 2.0), {"x": "u"}, {"y": "v"})
    with refused('the gradient of "u" was asked for; "y" of graph "small" has gradients of "b", "w", "x"'):
        differentiate(sdfg, "y", ["u"])


@pytest.mark.parametrize("name", ["nothing", "x"])
def test_refuses_an_output_that_is_not_computed(name: str) -> None:
    with refused(f'graph "small" computes no container "{name}"'):
        differentiate(small()[0], name, ["x"])


def test_refuses_an_operator_without_a_rule() -> None:
    """An operator that belongs to backward graphs, in the middle of a forward graph."""
    graph = differentiate(small()[0], "y", ["x"])
    assert graph.backward is not None
    backward = copy.deepcopy(graph.backward)
    with refused('operator "gelu_gradient" belongs to a backward graph and has no gradient rule'):
        differentiate(backward, "gradient_x", ["gradient_y"])


def json_without_time(value: Any) -> Any:
    """A graph's JSON less what changes from one call to the next."""
    if isinstance(value, dict):
        return {k: json_without_time(v) for k, v in value.items() if k not in ("timestamp", "hash", "start", "end")}
    return [json_without_time(v) for v in value] if isinstance(value, list) else value
