"""Small graphs for the tests of algebraic passes: built by hand, drawn at random, and whole layers.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from dace.sdfg import SDFG
from hypothesis import strategies as st

from stepdown.models.definition import EncoderLayer
from stepdown.models.operators import Gelu, Operator, Scale
from stepdown.models.operators.gradient import connect_operator
from stepdown.transformations.canonical_form import kept_containers, operators, the_state, validate
from stepdown.transformations.differentiate import differentiate
from stepdown.transformations.reference_executor import execute_training
from stepdown.transformations.training_graph import TrainingGraph
from tests.transformations.fusion.test_fuse_row_operators import Builder
from tests.transformations.test_differentiate import SIZES, RandomGraph, layer_values, masks

Pass = Callable[[TrainingGraph], tuple[TrainingGraph, str]]

LAYERS = {
    "bert": EncoderLayer(embed=12, heads=3, ffn=10),
    "paper": EncoderLayer(embed=12, heads=3, ffn=10, activation="relu", activation_dropout=0.2),
    "pre-norm, causal": EncoderLayer(embed=12, heads=2, ffn=9, norm="pre", causal=True, activation="gelu_tanh"),
    "causal": EncoderLayer(embed=12, heads=2, ffn=9, causal=True, activation="relu", dropout=0.0),
    "no biases, no dropout": EncoderLayer(
        embed=12, heads=3, ffn=10, bias=False, dropout=0.0, attention_dropout=0.0, norm="pre"
    ),
    "no biases": EncoderLayer(embed=12, heads=3, ffn=10, bias=False, dropout=0.0, attention_dropout=0.3),
}
"""Layers in which every pass meets something else."""

__all__ = ["LAYERS", "Builder", "Pass", "draw_graph", "hand_built", "names", "same_training", "same_values"]


def names(sdfg: SDFG) -> list[str]:
    """Names of the operators, in topological order."""
    return [node.name for node in operators(sdfg)]


def hand_built(forward: Builder, backward: Builder) -> TrainingGraph:
    """A training graph of two graphs built by hand; what backward reads of forward's is kept."""
    for name in kept_containers(forward.sdfg, backward.sdfg):
        forward.sdfg.arrays[name].transient = False
    graph = TrainingGraph(forward.sdfg, backward.sdfg, kept_containers(forward.sdfg, backward.sdfg))
    validate(graph)
    return graph


def same_values(before: TrainingGraph, after: TrainingGraph, values: dict[str, torch.Tensor], output: str) -> None:
    """The output and every gradient that is an argument are the same to rounding."""
    validate(after)
    assert before.backward is not None and after.backward is not None
    given = {f"gradient_{output}": torch.randn(values["given"].shape, dtype=torch.float64)}
    arguments = {name: value for name, value in values.items() if name != "given"}
    expected, found = execute_training(before, arguments, given), execute_training(after, arguments, given)
    torch.testing.assert_close(found[0][output], expected[0][output], rtol=1e-12, atol=1e-12)
    gradients = results(before)
    assert gradients == results(after)
    for name in sorted(gradients):
        torch.testing.assert_close(found[1][name], expected[1][name], rtol=1e-12, atol=1e-12)


def results(graph: TrainingGraph) -> set[str]:
    """Gradients that backward writes for its caller, those of stacked parameters one by one."""
    sdfg = graph.backward
    assert sdfg is not None
    state = the_state(sdfg)
    found = {n.data for n in state.data_nodes() if state.in_degree(n) > 0 and not sdfg.arrays[n.data].transient}
    members = {f"gradient_{stack}": {f"gradient_{name}" for name in names} for stack, names in graph.stacks.items()}
    return set().union(*(members.get(name, {name}) for name in found))


def same_training(before: TrainingGraph, after: TrainingGraph, definition: EncoderLayer) -> None:
    """A layer's output and gradients are the same, with padding, holes and rows without keys."""
    for batch, seq in ((2, 5), (1, 3)):
        for mask in masks(batch, seq).values():
            values = layer_values(definition, batch, seq) | {"attention_mask": mask}
            same_values(before, after, values | {"given": values["x"]}, "y")


def draw_graph(drawn: st.DataObject) -> tuple[TrainingGraph, dict[str, torch.Tensor]]:
    """A random training graph, with some copies and some dead operators in it, and values for its arguments."""
    random = RandomGraph(drawn.draw)  # type: ignore[arg-type]  # Hypothesis has two types for it
    for _ in range(drawn.draw(st.integers(1, 9), "operators")):
        random.step()
    leaves = random.finish()
    for node in operators(random.sdfg):
        if isinstance(node, Scale) and drawn.draw(st.booleans(), "copy"):
            node.factor = 1.0
    required = drawn.draw(st.lists(st.sampled_from(leaves), min_size=1, unique=True), "required")
    graph = differentiate(random.sdfg, "y", required)
    for _, sdfg in graph.graphs():
        for number in range(drawn.draw(st.integers(0, 2), "dead operators")):
            add_dead(sdfg, number, drawn)
    validate(graph)
    values = {name: torch.randn([SIZES[d] for d in random.leaves[name]], dtype=torch.float64) for name in leaves}
    values |= {"rng": torch.tensor([3, 4]), "p": torch.tensor(0.4, dtype=torch.float64)}
    return graph, values | {"given": torch.zeros(SIZES["S"], SIZES["E"])}


def add_dead(sdfg: SDFG, number: int, drawn: st.DataObject) -> None:
    """An operator whose result nobody reads, and one more that reads only that."""
    sources = [name for name, d in sdfg.arrays.items() if tuple(d.shape) == (SIZES["S"], SIZES["E"])]
    if not sources:
        return
    source = drawn.draw(st.sampled_from(sources), "source")
    nodes: list[Operator] = [Gelu(f"dead_{number}", "SE"), Scale(f"dead_scale_{number}", "SE", 3.0)]
    for node in nodes:
        target = f"{node.name}_value"
        sdfg.add_transient(target, (SIZES["S"], SIZES["E"]), sdfg.arrays[source].dtype)
        connect_operator(sdfg, the_state(sdfg), node, {"x": source}, {"y": target})
        source = target
