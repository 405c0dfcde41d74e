"""The training graph: what it holds, and that copies are copies."""

import dataclasses

import pytest
from dace.sdfg import SDFG

from stepdown.models.definition import EncoderLayer
from stepdown.transformations.canonical_form import operators, validate
from stepdown.transformations.training_graph import TrainingGraph

from .conftest import MakeGraph

SMALL = EncoderLayer(embed=4, heads=1, ffn=4, bias=False, dropout=0.0, attention_dropout=0.0)


def test_graphs_by_direction() -> None:
    forward, backward = SDFG("a"), SDFG("b")
    assert list(TrainingGraph(forward).graphs()) == [("forward", forward)]
    assert list(TrainingGraph(forward, backward).graphs()) == [("forward", forward), ("backward", backward)]


def test_fields_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainingGraph(SDFG("a")).kept = ("x",)  # type: ignore[misc]


def test_a_copy_is_apart(make_graph: MakeGraph) -> None:
    graph = make_graph(SMALL)
    copied = graph.copy()
    validate(copied)
    assert copied.kept == graph.kept
    for (direction, before), (other, after) in zip(graph.graphs(), copied.graphs(), strict=True):
        assert direction == other and before is not after
        assert [node.name for node in operators(before)] == [node.name for node in operators(after)]
        count = len(operators(before))
        after.nodes()[0].remove_node(operators(after)[0])
        assert (len(operators(before)), len(operators(after))) == (count, count - 1)


def test_a_copy_of_an_inference_graph_has_no_backward_pass(make_graph: MakeGraph) -> None:
    copied = TrainingGraph(make_graph(SMALL).forward).copy()
    assert copied.backward is None and copied.kept == ()
