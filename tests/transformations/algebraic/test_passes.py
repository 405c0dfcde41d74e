"""What all algebraic passes have in common: values stay, on layers and random graphs, and a second run changes nothing.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepdown.models.definition import EncoderLayer
from stepdown.models.operators.philox import keep_mask
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline import compile_layer
from stepdown.pipeline.analysis.counts import count_graph
from stepdown.pipeline.stages import OPTIONAL_PASSES
from stepdown.transformations.algebraic.accumulate_into_contractions import AccumulateIntoContractions
from stepdown.transformations.algebraic.fold_scales import FoldScales
from stepdown.transformations.algebraic.recompute import Recompute
from stepdown.transformations.algebraic.remove_dead_work import RemoveDeadWork
from stepdown.transformations.algebraic.stack_projections import StackProjections
from stepdown.transformations.canonical_form import validate
from stepdown.transformations.fusion.fuse_row_operators import FuseRowOperators
from stepdown.transformations.training_graph import TrainingGraph
from tests.transformations.conftest import MakeGraph
from tests.transformations.test_differentiate import compare_layer

from .cases import LAYERS, Pass, draw_graph, names, same_training, same_values

PASSES: dict[str, Pass] = {
    "stack-projections": StackProjections().apply,
    "remove-dead-work": RemoveDeadWork().apply,
    "fold-scales": FoldScales().apply,
    "accumulate-into-contractions": AccumulateIntoContractions().apply,
    "recompute": Recompute().apply,
}
each_pass = pytest.mark.parametrize("name", PASSES)


def state_of(graph: TrainingGraph) -> list[object]:
    """What a pass could change."""
    shown = [(d.transient, n) for _, sdfg in graph.graphs() for n, d in sorted(sdfg.arrays.items())]
    return [shown, graph.kept, [names(sdfg) for _, sdfg in graph.graphs()]]


def test_every_pass_can_be_switched_off() -> None:
    assert set(PASSES) <= set(OPTIONAL_PASSES)


@each_pass
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_keep_every_output_and_gradient(name: str, layer: str, make_graph: MakeGraph) -> None:
    before = make_graph(LAYERS[layer])
    after, _ = PASSES[name](before.copy())
    same_training(before, after, LAYERS[layer])
    again = state_of(after)
    after, _ = PASSES[name](after)
    assert state_of(after) == again


@pytest.mark.parametrize("layer", LAYERS)
def test_all_passes_together_equal_pytorch(layer: str, make_graph: MakeGraph) -> None:
    graph = make_graph(LAYERS[layer]).copy()
    for apply in (*PASSES.values(), FuseRowOperators().apply):
        graph, _ = apply(graph)
        validate(graph)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 2:] = False
    compare_layer(graph, LAYERS[layer], 2, 5, mask)


@pytest.mark.slow
@given(drawn=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_graphs_keep_their_values(drawn: st.DataObject) -> None:
    before, values = draw_graph(drawn)
    torch.manual_seed(drawn.draw(st.integers(0, 99), "seed"))
    graph = before.copy()
    order = drawn.draw(st.permutations(list(PASSES)), "order")
    for name in order:
        graph, _ = PASSES[name](graph)
        same_values(before, graph, values, "y")
        shown = state_of(graph)
        graph, _ = PASSES[name](graph)
        assert state_of(graph) == shown, f"{name} run twice"
    graph, _ = FuseRowOperators().apply(graph)
    same_values(before, graph, values, "y")


def bytes_moved(graph: TrainingGraph) -> int:
    """Bytes moved once row and element-wise operators are grouped, at the nominal sizes."""
    fused, _ = FuseRowOperators().apply(graph.copy())
    return count_graph(fused).total.at(8, 512)["bytes_moved"]


@each_pass
@pytest.mark.parametrize("layer", LAYERS)
def test_no_pass_moves_more_bytes(name: str, layer: str, make_graph: MakeGraph) -> None:
    graph = make_graph(LAYERS[layer])
    after, _ = PASSES[name](graph.copy())
    assert bytes_moved(after) <= bytes_moved(graph)
    kept = [count_graph(g).total.at(8, 512)["kept_bytes"] for g in (graph, after)]
    assert kept[1] <= kept[0]


@pytest.mark.parametrize(
    ("left_out", "words", "kernels"), [("stack-projections", 889_266_200, 38), ("", 855_711_768, 28)]
)
def test_words_moved_by_bert_large(left_out: str, words: int, kernels: int, make_graph: MakeGraph) -> None:
    """The paper's layer at B=8, S=512, attention operator by operator: 36% and 38% less than 1,384 million words."""
    definition = EncoderLayer(embed=1024, heads=16, ffn=4096, activation="relu", activation_dropout=0.1)
    graph = make_graph(definition).copy()
    for apply in (*(own for name, own in PASSES.items() if name != left_out), FuseRowOperators().apply):
        graph, _ = apply(graph)
    counted = count_graph(graph).total.at(8, 512)
    assert counted["words_in"] + counted["words_out"] == words
    assert counted["kernels"] == kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "share", "disable"),
    [
        ("paper", 0.8, ()),
        ("bert", None, ("fuse-attention",)),
    ],
    ids=str,
)
def test_compiled_layers_equal_pytorch(layer: str, share: float | None, disable: tuple[str, ...]) -> None:
    """Whole layers through the compiler, in training, some within a part of the memory that they keep."""
    definition, budget = LAYERS[layer], None
    if share is not None:
        free = compile_layer(definition, batch=2, seq=5, dtype="float64", build=False, disable=disable)
        budget = int(free.manifest["stages"][-1]["kept_bytes"] * share)
    compiled = compile_layer(
        definition, batch=2, seq=5, dtype="float64", optimize="light", disable=disable, memory_budget=budget
    )
    if budget is not None:
        assert compiled.manifest["options"]["memory_budget"] == budget
        assert compiled.manifest["stages"][-1]["kept_bytes"] <= budget
    module = compiled.to_torch().train()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    reference = ReferenceEncoderLayer(definition).double().train()
    reference.load_state_dict(module.state_dict())
    x, upstream = torch.randn(2, 2, 5, definition.embed, dtype=torch.float64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 3:] = False
    found = gradients(module, x, upstream, attention_mask=mask)
    seed, offset = (0, 0) if module.last_rng is None else module.last_rng.tolist()  # None: no dropout
    keep = {
        site: torch.from_numpy(keep_mask(seed, offset, site, definition.dropout_shape(site, 2, 5), probability))
        for site, probability in enumerate(definition.dropout_sites)
    }
    expected = gradients(reference, x, upstream, attention_mask=mask, keep=keep)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-11), name


def gradients(
    module: torch.nn.Module, x: torch.Tensor, upstream: torch.Tensor, **options: Any
) -> dict[str, torch.Tensor]:
    """Output and every gradient."""
    x = x.clone().requires_grad_()
    y = module(x, **options)
    y.backward(upstream)
    found = {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}
