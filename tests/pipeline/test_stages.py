"""Stages: their order and records, passes that are switched off, validation between passes, and equal results."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import dace
import pytest
import torch
from dace.sdfg import SDFG
from hypothesis import given, settings
from hypothesis import strategies as st

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.errors import CanonicalFormError, OptionError
from stepdown.models.operators import Contraction, Dropout, Operator, RowGroup, Scale, TiledGroup
from stepdown.models.operators.gradient import connect_operator
from stepdown.pipeline import stages as stages_module
from stepdown.pipeline.stages import (
    OPTIONAL_PASSES,
    STAGES,
    Compilation,
    Stage,
    StageRecord,
    lower,
    merge_reads,
    parse,
    remove_unused_arguments,
    run_stages,
    schedule,
)
from stepdown.pipeline.target import find_target
from stepdown.transformations.canonical_form import operators, the_state, validate
from stepdown.transformations.lowering import cpu
from stepdown.transformations.reference_executor import execute_training
from stepdown.transformations.training_graph import TrainingGraph

LAYER = EncoderLayer(embed=8, heads=2, ffn=12)
CANONICAL = tuple(stage for stage in STAGES if stage.canonical)


def compilation(graph: TrainingGraph | None = None, layer: EncoderLayer = LAYER, **options: Any) -> Compilation:
    settings_: dict[str, Any] = {"batch": None, "seq": None, **options}
    dtype, target = resolve_dtype("float64"), find_target("cpu")
    return Compilation(layer, dtype=dtype, target=target, name="staged", graph=graph, **settings_)


def run(given: Compilation, stages: tuple[Stage, ...], finished: Callable[[StageRecord], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages_module, "STAGES", stages)
        run_stages(given, finished=finished)


def run_canonical(stages: tuple[Stage, ...] = CANONICAL) -> dict[str, TrainingGraph]:
    """A copy of the graph after each stage that leaves the canonical form."""
    found: dict[str, TrainingGraph] = {}
    run(compilation(), stages, lambda record: found.update({record.name: record.graph.copy()}))
    return found


@pytest.fixture(scope="module")
def stage_graphs(strict_dace_session: None) -> dict[str, TrainingGraph]:
    return run_canonical()


def optimized(differentiated: TrainingGraph, *disable: str) -> tuple[TrainingGraph, list[StageRecord]]:
    """What the stages after differentiation make of a copy of the graph."""
    records: list[StageRecord] = []
    given = compilation(differentiated.copy(), disable=disable)
    run(given, CANONICAL[2:], records.append)
    assert given.graph is not None
    return given.graph, records


def nodes(graph: TrainingGraph) -> list[Operator]:
    return [node for _, sdfg in graph.graphs() for node in operators(sdfg)]


def hashes(graph: TrainingGraph) -> list[str]:
    return [sdfg.hash_sdfg() for _, sdfg in graph.graphs()]


# ---- the stages as they are ----


def test_the_order_of_the_stages() -> None:
    assert [stage.name for stage in STAGES] == [
        "parse",
        "differentiate",
        "algebraic",
        "fuse",
        "layout",
        "lower",
        "schedule",
    ]
    names = [name for stage in STAGES for name, _ in stage.passes]
    assert len(set(names)) == len(names), "a pass is switched off by its name"
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)


def test_the_same_layer_gives_the_same_graphs(stage_graphs: dict[str, TrainingGraph]) -> None:
    again = run_canonical(CANONICAL[:2])
    graph, _ = optimized(again["differentiate"])
    for name, other in (again | {"layout": graph}).items():
        assert hashes(other) == hashes(stage_graphs[name]), name
        assert other.kept == stage_graphs[name].kept, name


def test_graphs_are_named_after_the_compilation(stage_graphs: dict[str, TrainingGraph]) -> None:
    assert [[sdfg.name for _, sdfg in graph.graphs()] for graph in stage_graphs.values()] == [
        ["staged_forward"],
        *([["staged_forward", "staged_backward"]] * 4),
    ]


def test_parsing_keeps_promised_sizes_and_drops_what_nobody_reads() -> None:
    given = compilation(layer=EncoderLayer(embed=8, heads=2, ffn=12, bias=False), batch=3)
    parse(given)
    assert given.graph is not None
    forward = given.graph.forward
    assert str(forward.arrays["x"].shape) == str((3, dace.symbol("S"), 8))
    expected = {parameter.container for parameter in given.definition.parameters().values()}
    assert {name for name in forward.arrays if name.endswith(("_weight", "_bias"))} == expected
    state = the_state(forward)
    reads = [node.data for node in state.data_nodes() if state.in_degree(node) == 0]
    assert len(set(reads)) == len(reads)


# ---- passes that are switched off ----

SPARED: dict[str, Callable[[Operator], bool]] = {
    "accumulate-into-contractions": lambda node: isinstance(node, Contraction) and node.accumulate,
    "fuse-attention": lambda node: isinstance(node, TiledGroup),
    "fuse-row-operators": lambda node: isinstance(node, RowGroup),
}
"""What only one pass makes."""


def values() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Arguments of forward, and the upstream gradient."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    found = {parameter.container: normal(*parameter.logical_shape) for parameter in LAYER.parameters().values()}
    found |= {"x": normal(2, 3, 8), "attention_mask": torch.tensor([[True] * 3, [True, True, False]])}
    found |= {"rng": torch.tensor([5, 7])}
    found |= {name: torch.tensor(0.25, dtype=torch.float64) for name in ("attention_dropout", "dropout_p")}
    return found, {"gradient_y": normal(2, 3, 8)}


@pytest.fixture(scope="module")
def expected(stage_graphs: dict[str, TrainingGraph]) -> dict[str, torch.Tensor]:
    """The output and every gradient before any optional pass."""
    forward, backward = execute_training(stage_graphs["differentiate"], *values())
    return {"y": forward["y"]} | {name: backward[name] for name in argument_gradients()}


def argument_gradients() -> list[str]:
    return [f"gradient_{name}" for name in ("x", *(p.container for p in LAYER.parameters().values()))]


@pytest.mark.parametrize("disable", [(), *((name,) for name in OPTIONAL_PASSES), OPTIONAL_PASSES], ids="-".join)
def test_a_pass_that_is_switched_off_is_off_and_values_stay(
    disable: tuple[str, ...], stage_graphs: dict[str, TrainingGraph], expected: dict[str, torch.Tensor]
) -> None:
    graph, records = optimized(stage_graphs["differentiate"], *disable)
    validate(graph)
    ran = {record.name: record for stage in records for record in stage.passes}
    assert list(ran) == list(OPTIONAL_PASSES)
    for name, record in ran.items():
        assert (record.what == f"{name} switched off") == (name in disable)
        assert (record.seconds > 0) == (name not in disable)
    for name, made in SPARED.items():
        assert any(map(made, nodes(graph))) == (name not in disable), name
    if disable == OPTIONAL_PASSES:
        assert hashes(graph) == hashes(stage_graphs["differentiate"])
    forward, backward = execute_training(graph, *values())
    found = {"y": forward["y"]} | {name: backward[name] for name in argument_gradients()}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("name", ["lower-operators", "plan-workspace", "parse", "fuse", "fuse_attention", "", 3])
def test_other_names_are_refused_before_anything_runs(name: Any) -> None:
    accepted = ", ".join(f'"{known}"' for known in OPTIONAL_PASSES)
    message = re.escape(f'pass "{name}" cannot be switched off; optional passes are: {accepted}.')
    given = compilation(disable=(OPTIONAL_PASSES[0], name))
    with pytest.raises(OptionError, match=f"^{message}$"):
        run_stages(given)
    assert given.graph is None


# ---- the driver, with stages made for it ----


def scaled(name: str = "hand_made") -> SDFG:
    """y = 2 x."""
    sdfg = SDFG(name)
    state = sdfg.add_state()
    for container in ("x", "y"):
        sdfg.add_array(container, [3, 4], dace.float64)
    connect_operator(sdfg, state, Scale("double", "SE", 2.0), {"x": "x"}, {"y": "y"})
    return sdfg


@settings(max_examples=30)
@given(st.data())
def test_every_pass_runs_once_and_in_order_unless_it_is_switched_off(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1))
    disable = tuple(data.draw(st.lists(st.sampled_from(names), unique=True)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(names)))) | {0, len(names)})
    events: list[str] = []

    def make(name: str) -> Callable[[Compilation], str]:
        return lambda compilation: events.append(name) or f"did {name}"  # type: ignore[func-returns-value]

    parts = [names[start:end] for start, end in itertools.pairwise(cuts)]
    stages = tuple(
        Stage(f"stage {n}", tuple((name, make(name)) for name in part), True) for n, part in enumerate(parts)
    )
    records: list[StageRecord] = []

    def finished(record: StageRecord) -> None:
        events.append(f"end of {record.name}")
        records.append(record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages_module, "STAGES", stages)
        patch.setattr(stages_module, "OPTIONAL_PASSES", tuple(names))
        run_stages(compilation(TrainingGraph(scaled()), disable=disable), events.append, finished)
    order: list[str] = []
    for number, part in enumerate(parts):
        order += [f"stage {number}", *(name for name in part if name not in disable), f"end of stage {number}"]
    assert events == order
    for record, part in zip(records, parts, strict=True):
        assert [p.name for p in record.passes] == part
        assert record.seconds == pytest.approx(sum(p.seconds for p in record.passes))
        assert record.what == "; ".join(f"{n} switched off" if n in disable else f"did {n}" for n in part)


def second_state(compilation: Compilation) -> str:
    assert compilation.graph is not None
    compilation.graph.forward.add_state("second")
    return "broke it"


def test_a_pass_that_breaks_the_form_is_stopped_there() -> None:
    """Validation runs after every pass, not after the stage: a later one may not repair it."""

    def repair(compilation: Compilation) -> str:
        raise AssertionError("runs on a broken graph")

    stage = Stage("broken", (("break", second_state), ("repair", repair)), True)
    records: list[StageRecord] = []
    with pytest.raises(CanonicalFormError, match=r'^graph "hand_made" has 2 states, .* \(rule 3\)$'):
        run(compilation(TrainingGraph(scaled())), (stage, stage), records.append)
    assert records == []


def test_lowered_graphs_are_validated_by_dace_at_the_end() -> None:
    def dangling(compilation: Compilation) -> str:
        assert compilation.graph is not None
        state = the_state(compilation.graph.forward)
        state.add_nedge(state.add_read("x"), state.add_write("y"), dace.Memlet("x[0:99]"))
        return "reads past the end"

    stage = Stage("schedule", (("dangle", dangling),), False)
    with pytest.raises(dace.sdfg.InvalidSDFGError):
        run(compilation(TrainingGraph(scaled())), (stage,), lambda record: None)


# ---- single stages on graphs made by hand ----


def test_lowering_and_scheduling_keep_the_form_of_a_training_graph() -> None:
    """Both directions lowered, the kept container stays kept, and each direction has its own lifetimes."""
    cpu.register()
    seq = dace.symbol("S", dace.int32)
    forward, backward = SDFG("forward"), SDFG("backward")
    for sdfg, containers in ((forward, "x t y"), (backward, "gradient_y t gradient_x")):
        for name in containers.split():
            sdfg.add_array(name, [seq, 4], dace.float32)
        sdfg.add_array("rng", [2], dace.int64)
        sdfg.add_scalar("p", dace.float64)
    state = forward.add_state()
    connect_operator(forward, state, Scale("keep", "SE", 2.0), {"x": "x"}, {"y": "t"})
    connect_operator(forward, state, Dropout("drop", "SE", 1), {"x": "t", "rng": "rng", "p": "p"}, {"y": "y"})
    backward.add_array("temporary", [seq, 4], dace.float32, transient=True)
    state = backward.add_state()
    connect_operator(backward, state, Scale("first", "SE", 2.0), {"x": "t"}, {"y": "temporary"})
    connect_operator(backward, state, Scale("second", "SE", 2.0), {"x": "temporary"}, {"y": "gradient_x"})
    given = compilation(TrainingGraph(forward, backward, ("t",)))
    lower(given)
    what = schedule(given)
    assert given.graph is not None
    assert given.graph.kept == ("t",)
    assert given.graph.backward is not None
    for sdfg in (given.graph.forward, given.graph.backward):
        assert sdfg.number_of_nodes() == 2
        assert not any(descriptor.transient for descriptor in sdfg.arrays.values())
    temporary = given.lifetimes["backward"]["temporary"]
    assert (temporary.first, temporary.last) == (0, 1)
    assert "t" not in given.lifetimes["forward"], "what is kept outlives the call"
    words = [name for name in given.lifetimes["forward"] if "words" in name]
    assert len(words) == 1, "the random words of a row"
    total = sum(len(lifetimes) for lifetimes in given.lifetimes.values())
    assert what == f"{total} temporaries placed in the workspace"


def test_reads_of_a_container_share_an_access_node_and_writes_stay() -> None:
    sdfg = SDFG("reads")
    state = sdfg.add_state()
    for name in ("x", "y", "z", "unused"):
        sdfg.add_array(name, [3, 4], dace.float64)
    for target in ("y", "z"):
        node = Scale(f"scale_{target}", "SE", 2.0)
        state.add_node(node)
        whole = dace.Memlet("x[0:3, 0:4]")
        state.add_edge(state.add_read("x"), None, node, "x", whole)
        state.add_edge(node, "y", state.add_write(target), None, dace.Memlet(f"{target}[0:3, 0:4]"))
    merge_reads(sdfg)
    assert sorted(node.data for node in state.data_nodes()) == ["x", "y", "z"]
    (read,) = (node for node in state.data_nodes() if node.data == "x")
    assert sorted(edge.dst.name for edge in state.out_edges(read)) == ["scale_y", "scale_z"]
    assert all(edge.dst_conn == "x" for edge in state.out_edges(read))
    remove_unused_arguments(sdfg)
    assert set(sdfg.arrays) == {"x", "y", "z"}
    validate(TrainingGraph(sdfg))
