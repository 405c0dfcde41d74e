"""FuseRowOperators: what it fuses, what it refuses, and that values stay."""

import copy
from collections.abc import Mapping

import dace
import pytest
import torch
from dace.sdfg import SDFG
from hypothesis import given, settings
from hypothesis import strategies as st

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.operators import (
    Add,
    Bias,
    Contraction,
    Dropout,
    Gelu,
    LayerNorm,
    Member,
    Operator,
    RowGroup,
    Scale,
    SumRows,
)
from stepdown.models.operators.gradient import connect_operator
from stepdown.pipeline.analysis.counts import count_graph
from stepdown.pipeline.stages import Compilation, differentiate_stage, parse
from stepdown.pipeline.target import find_target
from stepdown.transformations.algebraic.stack_projections import StackProjections
from stepdown.transformations.canonical_form import operators, validate, validate_sdfg
from stepdown.transformations.fusion.fuse_row_operators import FuseRowOperators
from stepdown.transformations.reference_executor import execute, execute_training
from stepdown.transformations.training_graph import TrainingGraph

SHAPES = {"B": 2, "S": 3, "E": 4, "U": 5}


class Builder:
    """A graph of operators over fixed small sizes; containers appear as they are named."""

    def __init__(self) -> None:
        self.sdfg = SDFG("built")
        self.state = self.sdfg.add_state("operators")

    def container(self, name: str, dims: str, *, transient: bool = False) -> str:
        if name not in self.sdfg.arrays:
            self.sdfg.add_array(name, [SHAPES[letter] for letter in dims], dace.float64, transient=transient)
        return name

    def add(self, operator: Operator, inputs: Mapping[str, str], output: str, *, argument: bool = False) -> str:
        dims = operator.operand_dims()
        for connector, name in inputs.items():
            self.container(name, dims[connector])
        connector = operator.outputs[0]
        self.container(output, dims[connector], transient=not argument)
        connect_operator(self.sdfg, self.state, operator, dict(inputs), {connector: output})
        return output

    def fused(self, **options: bool) -> SDFG:
        sdfg = copy.deepcopy(self.sdfg)
        FuseRowOperators(**options).apply(TrainingGraph(sdfg))
        validate_sdfg(sdfg)
        return sdfg

    def values(self, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(tuple(map(int, descriptor.shape)), dtype=torch.float64, generator=generator)
            for name, descriptor in self.sdfg.arrays.items()
            if not descriptor.transient
        }


def names(sdfg: SDFG) -> list[list[str]]:
    """Members of every group, and the other operators alone."""
    found = []
    for node in operators(sdfg):
        found.append([m.operator.name for m in node.members] if isinstance(node, RowGroup) else [node.name])
    return found


def test_a_chain_becomes_one_group_and_its_inner_containers_go() -> None:
    builder = Builder()
    builder.add(Bias("bias", "BSE", "E"), {"x": "x", "bias": "b"}, "biased")
    builder.add(Add("residual", "BSE"), {"a": "biased", "b": "r"}, "sum")
    builder.add(LayerNorm("norm", "BSE", 1e-5), {"x": "sum", "weight": "w", "bias": "c"}, "y", argument=True)
    fused = builder.fused()
    assert names(fused) == [["bias", "residual", "norm"]]
    assert set(fused.arrays) == {"x", "b", "r", "w", "c", "y"}
    values = builder.values()
    torch.testing.assert_close(execute(fused, values)["y"], execute(builder.sdfg, values)["y"], rtol=0, atol=0)


def test_a_container_that_others_read_stays() -> None:
    builder = Builder()
    builder.add(Bias("bias", "BSE", "E"), {"x": "x", "bias": "b"}, "biased")
    builder.add(Gelu("gelu", "BSE"), {"x": "biased"}, "active", argument=True)
    builder.add(Contraction("product", "BSE,UE->BSU"), {"a": "biased", "b": "w"}, "y", argument=True)
    fused = builder.fused()
    assert names(fused) == [["bias", "gelu"], ["product"]]
    assert "biased" in fused.arrays


def test_siblings_that_read_the_same_data_fuse_unless_told_not_to() -> None:
    builder = Builder()
    builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "active", argument=True)
    builder.add(SumRows("columns", "BSE", "E"), {"x": "x"}, "total", argument=True)
    assert names(builder.fused()) == [["gelu", "columns"]]
    assert names(builder.fused(siblings=False)) == [["gelu"], ["columns"]]


def test_sharing_a_parameter_alone_is_no_reason_to_fuse() -> None:
    builder = Builder()
    builder.add(Bias("one", "BSE", "E"), {"x": "x", "bias": "b"}, "y", argument=True)
    builder.add(Bias("two", "BSE", "E"), {"x": "z", "bias": "b"}, "v", argument=True)
    assert names(builder.fused()) == [["one"], ["two"]]


def test_different_dimensions_are_refused() -> None:
    builder = Builder()
    builder.add(SumRows("columns", "BSE", "SE"), {"x": "x"}, "total")
    builder.add(Scale("scale", "SE", 2.0), {"x": "total"}, "y", argument=True)
    assert names(builder.fused()) == [["columns"], ["scale"]]


def test_a_path_through_another_kernel_is_refused() -> None:
    builder = Builder()
    builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "active")
    builder.add(Contraction("product", "BSE,UE->BSU"), {"a": "active", "b": "w"}, "hidden")
    builder.add(Contraction("back", "BSU,EU->BSE"), {"a": "hidden", "b": "v"}, "out")
    builder.add(Add("residual", "BSE"), {"a": "out", "b": "active"}, "y", argument=True)
    assert names(builder.fused()) == [["gelu"], ["product"], ["back"], ["residual"]]


def test_a_path_through_another_group_is_refused() -> None:
    # The sum over B between the two can be in no group with its reader, nor may a group close around it.
    builder = Builder()
    builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "active", argument=True)
    builder.add(SumRows("rows", "BSE", "SE"), {"x": "active"}, "total")
    builder.add(Bias("again", "BSE", "SE"), {"x": "active", "bias": "total"}, "y", argument=True)
    for group in names(builder.fused()):
        assert not {"gelu", "again"} <= set(group)
        assert not {"rows", "again"} <= set(group)


def test_rows_that_need_a_sum_over_all_rows_are_refused() -> None:
    builder = Builder()
    builder.add(SumRows("columns", "BSE", "E"), {"x": "x"}, "total")
    builder.add(Bias("shift", "BSE", "E"), {"x": "x", "bias": "total"}, "y", argument=True)
    assert names(builder.fused()) == [["columns"], ["shift"]]


def test_reductions_over_different_rows_are_refused() -> None:
    builder = Builder()
    builder.add(SumRows("one", "BSE", "E"), {"x": "x"}, "a", argument=True)
    builder.add(SumRows("two", "BSE", "SE"), {"x": "x"}, "b", argument=True)
    assert names(builder.fused()) == [["one"], ["two"]]


def test_a_second_run_changes_nothing() -> None:
    graph = training_graph(EncoderLayer(embed=8, heads=2, ffn=12))
    FuseRowOperators().apply(graph)
    before = [names(sdfg) for _, sdfg in graph.graphs()]
    FuseRowOperators().apply(graph)
    assert [names(sdfg) for _, sdfg in graph.graphs()] == before


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_random_graphs_keep_their_values(data: st.DataObject) -> None:
    builder = Builder()
    live = [builder.container("x", "BSE")]
    for number in range(data.draw(st.integers(2, 9))):
        source = data.draw(st.sampled_from(live))
        name, kind = f"v{number}", data.draw(st.integers(0, 6))
        argument = data.draw(st.booleans())
        if kind == 0:
            builder.add(Bias(f"n{number}", "BSE", "E"), {"x": source, "bias": f"b{number}"}, name, argument=argument)
        elif kind == 1:
            builder.add(Gelu(f"n{number}", "BSE"), {"x": source}, name, argument=argument)
        elif kind == 2:
            other = data.draw(st.sampled_from(live))
            builder.add(Add(f"n{number}", "BSE"), {"a": source, "b": other}, name, argument=argument)
        elif kind == 3:
            inputs = {"x": source, "weight": f"w{number}", "bias": f"c{number}"}
            builder.add(LayerNorm(f"n{number}", "BSE", 1e-5), inputs, name, argument=argument)
        elif kind == 4:
            builder.add(SumRows(f"n{number}", "BSE", "E"), {"x": source}, name, argument=True)
            continue
        elif kind == 5:
            builder.add(Contraction(f"n{number}", "BSE,UE->BSU"), {"a": source, "b": f"m{number}"}, f"h{number}")
            builder.add(
                Contraction(f"o{number}", "BSU,EU->BSE"),
                {"a": f"h{number}", "b": f"k{number}"},
                name,
                argument=argument,
            )
        else:
            builder.add(Scale(f"n{number}", "BSE", 0.5), {"x": source}, name, argument=argument)
        live.append(name)
    builder.add(Scale("last", "BSE", 2.0), {"x": live[-1]}, "y", argument=True)
    unread = [n.data for n in builder.state.data_nodes() if builder.state.out_degree(n) == 0]
    for name in unread:
        builder.sdfg.arrays[name].transient = False
    arguments = {name: value for name, value in builder.values().items() if name not in written(builder.sdfg)}
    fused = builder.fused()
    expected, found = execute(builder.sdfg, arguments), execute(fused, arguments)
    for name in written(builder.sdfg):
        if not builder.sdfg.arrays[name].transient:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
    assert len(operators(fused)) <= len(operators(builder.sdfg))


def written(sdfg: SDFG) -> set[str]:
    state = sdfg.nodes()[0]
    return {node.data for node in state.data_nodes() if state.in_degree(node) > 0}


def training_graph(definition: EncoderLayer, dtype: str = "float64") -> TrainingGraph:
    compilation = Compilation(definition, None, None, resolve_dtype(dtype), find_target("cpu"), "fusion")
    parse(compilation)
    differentiate_stage(compilation)
    assert compilation.graph is not None
    return compilation.graph


LAYERS = {
    "bert": EncoderLayer(embed=8, heads=2, ffn=12),
    "paper": EncoderLayer(embed=8, heads=2, ffn=12, activation="relu", activation_dropout=0.1),
    "pre-norm, causal": EncoderLayer(embed=8, heads=2, ffn=12, norm="pre", causal=True, activation="gelu_tanh"),
    "bare": EncoderLayer(embed=8, heads=1, ffn=4, bias=False, dropout=0.0, attention_dropout=0.0),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_keep_every_output_and_gradient(layer: str) -> None:
    definition = LAYERS[layer]
    graph = training_graph(definition)
    fused = graph.copy()
    FuseRowOperators().apply(fused)
    validate(fused)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    values = {p.container: normal(*p.logical_shape) for p in definition.parameters().values()}
    values |= {"x": normal(2, 5, 8), "rng": torch.tensor([3, 4]), "attention_mask": torch.ones(2, 5, dtype=torch.bool)}
    values["attention_mask"][1, 3:] = False
    values |= {
        "attention_dropout": torch.tensor(definition.attention_dropout),
        "dropout_p": torch.tensor(definition.dropout),
        "activation_dropout": torch.tensor(definition.activation_dropout),
    }
    given_gradient = {"gradient_y": normal(2, 5, 8)}
    expected = execute_training(graph, values, given_gradient)
    found = execute_training(fused, values, given_gradient)
    torch.testing.assert_close(found[0]["y"], expected[0]["y"], rtol=0, atol=0)
    for name in ("x", *(p.container for p in definition.parameters().values())):
        gradient = f"gradient_{name}"
        torch.testing.assert_close(found[1][gradient], expected[1][gradient], rtol=0, atol=0)
    before, after = count_graph(graph).total.at(8, 512), count_graph(fused).total.at(8, 512)
    assert after["bytes_moved"] < before["bytes_moved"]
    assert after["kernels"] < before["kernels"]
    assert after["flop"] == before["flop"]
    assert fused.kept == graph.kept


PAPER_KERNELS = {
    "SM (softmax, dropout)": {"attention_weights", "attention_dropped"},
    "BRD (bias, ReLU, dropout)": {"intermediate", "activation", "activation_dropped"},
    "BDRLN (bias, dropout, residual, LayerNorm)": {"output", "output_dropped", "output_residual", "output_norm"},
    "BSB (LayerNorm scale and bias)": {"output_norm_parameter_gradient"},
    "BLNRD (LayerNorm dX, residual, dropout)": {"output_norm_gradient", "output_dropped_gradient"},
    "BDRB (dropout, ReLU, bias)": {"activation_dropped_gradient", "activation_gradient", "intermediate_gradient"},
    "EBSB (residual, LayerNorm scale and bias)": {
        "gradient_hidden_accumulation_1",
        "attention_norm_parameter_gradient",
    },
    "BS (softmax, dropout)": {"attention_dropped_gradient", "attention_weights_gradient"},
    "BAOB (attention output bias)": {"attention_output_gradient"},
    "BEI (encoder input)": {"gradient_x_accumulation_1", "gradient_x_accumulation_3"},
}
"""The paper's fused kernels and the operators that they hold here."""

STACKED_KERNELS = {
    "AIB (attention input bias)": {"query_key_value"},
    "BAIB (attention input bias)": {"query_key_value_gradient"},
}
"""Those of them that need stacked projections."""


@pytest.mark.parametrize("stacked", [False, True], ids=["", "stacked projections"])
@pytest.mark.parametrize("kernel", [*PAPER_KERNELS, *STACKED_KERNELS])
def test_the_papers_kernels_come_out_of_the_general_rule(kernel: str, stacked: bool) -> None:
    graph = training_graph(LAYERS["paper"])
    if stacked:
        graph, _ = StackProjections().apply(graph)
    FuseRowOperators().apply(graph)
    groups = [set(group) for _, sdfg in graph.graphs() for group in names(sdfg)]
    wanted = PAPER_KERNELS.get(kernel, STACKED_KERNELS.get(kernel, set()))
    if stacked:  # three of the sum's parts are one
        wanted = wanted - {"gradient_x_accumulation_1"}
    assert any(wanted <= group for group in groups) == (stacked or kernel in PAPER_KERNELS), groups


def test_words_moved_by_bert_large() -> None:
    graph = training_graph(
        EncoderLayer(embed=1024, heads=16, ffn=4096, activation="relu", activation_dropout=0.1), "fp32"
    )
    before = count_graph(graph).total.at(8, 512)
    FuseRowOperators().apply(graph)
    after = count_graph(graph).total.at(8, 512)
    words = [counts["words_in"] + counts["words_out"] for counts in (before, after)]
    assert words == [1_384_206_360, 947_982_360]
    assert (before["kernels"], after["kernels"]) == (62, 39)


def test_a_group_is_the_same_after_it_was_saved() -> None:
    sdfg = SDFG("saved")
    state = sdfg.add_state("operators")
    for name, shape in (("x", [2, 3, 4]), ("b", [4]), ("pair", [2]), ("y", [2, 3, 4])):
        sdfg.add_array(name, shape, dace.int64 if name == "pair" else dace.float64)
    sdfg.add_scalar("p", dace.float64)
    group = RowGroup("group", groups_members(), ["y"])
    connect_operator(sdfg, state, group, {name: name for name in ("x", "b", "pair", "p")}, {"y": "y"})
    validate_sdfg(sdfg)
    loaded = operators(SDFG.from_json(sdfg.to_json()))[0]
    assert isinstance(loaded, RowGroup)
    assert loaded.statements() == group.statements()
    assert [m.operator.site for m in loaded.members if isinstance(m.operator, Dropout)] == [7]


def groups_members() -> list[Member]:
    return [
        Member(Bias("bias", "BSE", "E"), {"x": "x", "bias": "b", "y": "v"}),
        Member(Dropout("drop", "BSE", 7), {"x": "v", "rng": "pair", "p": "p", "y": "y"}),
    ]
