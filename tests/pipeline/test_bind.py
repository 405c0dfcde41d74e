"""The interface in the manifest: the generated C++ has the same arguments, and each has the role that it plays."""

import re
from pathlib import Path
from typing import Any

import dace
import pytest
import sympy
from dace.sdfg import SDFG

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import CanonicalFormError
from stepdown.pipeline import CompiledLayer
from stepdown.pipeline.bind import interface
from stepdown.pipeline.runtime.manifest import BACKWARD_ROLES
from stepdown.transformations.schedule.plan_workspace import Lifetime
from stepdown.transformations.training_graph import TrainingGraph

DIRECTIONS = ("forward", "backward")
C_TYPES = {
    "float32": "float",
    "float64": "double",
    "int64": "int64_t",
    "int32": "int",
    "uint32": "dace::uint",
    "bool": "bool",
}
LAYER = EncoderLayer(embed=4, heads=1, ffn=8)


# ---- of a compiled layer ----


@pytest.fixture(scope="module")
def abi(built_layer: CompiledLayer) -> dict[str, Any]:
    """The interface of a layer for any batch and length, with dropout everywhere and without biases."""
    return built_layer.manifest["abi"]


def arguments(side: dict[str, Any], *roles: str) -> dict[str, dict[str, Any]]:
    """The arguments of these roles by name."""
    return {entry["name"]: entry for entry in side["arguments"] if entry["role"] in roles}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_arguments_are_those_of_the_generated_function(
    built_layer: CompiledLayer, abi: dict[str, Any], direction: str
) -> None:
    side = abi[direction]
    (source,) = (built_layer.path / "src" / direction).rglob("*.cpp")
    pattern = rf"DACE_EXPORTED void {side['program']}\((?P<parameters>[^)]*)\)"
    text = source.read_text()
    found = re.search(pattern, text)
    assert found is not None
    handle, *declared = (parameter.strip() for parameter in found["parameters"].split(","))
    assert handle.endswith("*__state")
    expected = []
    for entry in side["arguments"]:
        by_value = entry["role"] in ("probability", "symbol")
        expected.append((C_TYPES[entry["dtype"]], "" if by_value else "*", entry["name"]))
    parsed = [re.fullmatch(r"(?:const )?([\w:]+) ?(\*?) ?(?:__restrict__ )?(\w+)", parameter) for parameter in declared]
    assert [match.groups() for match in parsed if match is not None] == expected
    for name in ("call", "program", "init", "exit"):
        assert f" {side[name]}(" in text.replace("*", " ")
    assert (built_layer.path / side["library"]).is_file()
    assert side["init_arguments"] == ["B", "S"]


def test_every_parameter_comes_in_and_has_one_gradient(built_layer: CompiledLayer, abi: dict[str, Any]) -> None:
    parameters = built_layer.definition.parameters()
    assert "attention.self.query.bias" not in parameters
    for side, role in (("forward", "parameter"), ("backward", "gradient_parameter")):
        found = arguments(abi[side], role)
        members = {name: entry.get("parameters", [entry.get("parameter")]) for name, entry in found.items()}
        assert sorted(name for names in members.values() for name in names) == sorted(parameters)
        for container, entry in found.items():
            shape = [str(extent) for extent in parameters[members[container][0]].logical_shape]
            assert entry["shape"] == ([str(len(members[container]))] if "parameters" in entry else []) + shape
            assert entry["dtype"] == "float32"
    read = arguments(abi["backward"], "parameter").values()
    assert {name for entry in read for name in entry.get("parameters", [entry.get("parameter")])} <= set(parameters)


def test_a_stack_names_its_parameters_in_order(abi: dict[str, Any]) -> None:
    (entry,) = (e for e in abi["forward"]["arguments"] if "parameters" in e)
    names = [f"attention.self.{name}.weight" for name in ("query", "key", "value")]
    assert (entry["name"], entry["role"], entry["parameters"]) == ("query_key_value_weight", "parameter", names)
    (entry,) = (e for e in abi["backward"]["arguments"] if "parameters" in e and e["role"] != "parameter")
    assert (entry["name"], entry["role"]) == ("gradient_query_key_value_weight", "gradient_parameter")
    assert entry["parameters"] == names


def test_every_role_has_its_arguments(built_layer: CompiledLayer, abi: dict[str, Any]) -> None:
    forward, backward = abi["forward"], abi["backward"]
    embed = str(built_layer.definition.embed)
    for side, role, dtype, shape in (
        (forward, "input", "float32", ["B", "S", embed]),
        (forward, "output", "float32", ["B", "S", embed]),
        (forward, "mask", "bool", ["B", "S"]),
        (forward, "rng", "int64", ["2"]),
        (backward, "rng", "int64", ["2"]),
        (backward, "gradient_output", "float32", ["B", "S", embed]),
        (backward, "gradient_input", "float32", ["B", "S", embed]),
    ):
        (entry,) = arguments(side, role).values()
        assert (entry["dtype"], entry["shape"]) == (dtype, shape), role
    for side in (forward, backward):
        fields = {entry["field"] for entry in arguments(side, "probability").values()}
        assert fields == {"dropout", "attention_dropout", "activation_dropout"}
        assert set(arguments(side, "symbol")) == {"B", "S"}
        assert {entry["role"] for entry in side["arguments"]} <= set(BACKWARD_ROLES)


def test_what_forward_keeps_is_what_backward_reads(built_layer: CompiledLayer, abi: dict[str, Any]) -> None:
    kept = arguments(abi["forward"], "kept")
    assert kept
    assert kept == arguments(abi["backward"], "kept")
    assert set(kept) <= set(built_layer.stage("schedule").kept)


def test_sizes_are_expressions_in_b_and_s(abi: dict[str, Any]) -> None:
    symbols = {letter: sympy.Symbol(letter, integer=True, positive=True) for letter in "BS"}
    for direction in DIRECTIONS:
        for entry in abi[direction]["arguments"]:
            assert len(entry["shape"]) == len(entry["strides"])
            if entry["role"] in ("probability", "symbol"):
                continue
            total = sympy.sympify(entry["bytes"], locals=symbols)
            assert total.free_symbols <= set(symbols.values())
            extents = [sympy.sympify(extent, locals=symbols) for extent in entry["shape"]]
            assert total.subs({"B": 2, "S": 3}) >= sympy.prod(extents).subs({"B": 2, "S": 3})


def test_temporaries_are_the_workspace_and_live_within_the_kernels(
    built_layer: CompiledLayer, abi: dict[str, Any]
) -> None:
    graph = built_layer.stage("schedule")
    for direction, sdfg in graph.graphs():
        last = sdfg.number_of_nodes() - 1
        workspace = arguments(abi[direction], "workspace")
        assert workspace
        for entry in workspace.values():
            first, end = entry["live"]
            assert 0 <= first <= end <= last, entry["name"]
        assert not [name for name, array in sdfg.arrays.items() if array.transient and name in workspace]


# ---- by hand ----


def small_graph(*names: str) -> TrainingGraph:
    """A graph that reads containers ``x`` and ``names``, each [B, 4], and writes ``y``."""
    sdfg = SDFG("by_hand")
    state = sdfg.add_state()
    batch = dace.symbol("B", dace.int32)
    for name in ("x", "y", *names):
        sdfg.add_array(name, (batch, 4), dace.float32, strides=(6, 1), total_size=6 * batch)
    inputs = {f"i_{name}": dace.Memlet(f"{name}[0, 0]") for name in ("x", *names)}
    tasklet = state.add_tasklet("sum", list(inputs), ["o"], f"o = {' + '.join(inputs)}")
    for connector, memlet in inputs.items():
        state.add_edge(state.add_read(memlet.data), None, tasklet, connector, memlet)
    state.add_edge(tasklet, "o", state.add_write("y"), None, dace.Memlet("y[B - 1, 0]"))
    return TrainingGraph(sdfg, None, ())


def test_strides_and_bytes_are_those_of_the_container() -> None:
    side = interface(small_graph(), LAYER, {"forward": {}})
    assert list(side) == ["forward"]
    names = {entry["name"]: entry for entry in side["forward"]["arguments"]}
    assert list(names) == ["x", "y", "B"], "arrays in the order of their names, then values"
    assert names["x"] == {
        "name": "x",
        "dtype": "float32",
        "shape": ["B", "4"],
        "strides": ["6", "1"],
        "bytes": "24*B",
        "role": "input",
    }
    assert names["B"] == {"name": "B", "dtype": "int32", "shape": [], "strides": [], "role": "symbol"}
    assert side["forward"]["program"] == "__program_by_hand"


def test_a_temporary_is_workspace_and_tells_how_long_it_lives() -> None:
    side = interface(small_graph("temporary"), LAYER, {"forward": {"temporary": Lifetime(2, 5)}})["forward"]
    (entry,) = arguments(side, "workspace").values()
    assert (entry["name"], entry["live"]) == ("temporary", [2, 5])


def test_what_is_kept_is_named_so() -> None:
    graph = small_graph("hidden")
    side = interface(TrainingGraph(graph.forward, None, ("hidden",)), LAYER, {"forward": {}})["forward"]
    assert list(arguments(side, "kept")) == ["hidden"]


def test_an_argument_without_a_role_is_refused() -> None:
    with pytest.raises(CanonicalFormError, match='argument "stranger" of graph "by_hand" has no role'):
        interface(small_graph("stranger"), LAYER, {"forward": {}})


def test_a_bias_of_a_layer_without_biases_has_no_role() -> None:
    bare = EncoderLayer(embed=4, heads=1, ffn=8, bias=False)
    assert arguments(interface(small_graph("output_bias"), LAYER, {"forward": {}})["forward"], "parameter")
    with pytest.raises(CanonicalFormError, match='"output_bias"'):
        interface(small_graph("output_bias"), bare, {"forward": {}})


def test_the_library_is_named_by_direction(built_layer: CompiledLayer, abi: dict[str, Any]) -> None:
    for direction in DIRECTIONS:
        assert Path(abi[direction]["library"]) == Path("lib") / f"{direction}.so"
        assert built_layer.manifest["key"][:16] in abi[direction]["program"]
