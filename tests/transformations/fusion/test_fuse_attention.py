"""FuseAttention: what becomes a tiled group, what does not and why, and that values stay."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import Add, Contraction, Member, Operator, Scale, Softmax, TiledGroup
from stepdown.models.operators.gradient import connect_operator
from stepdown.transformations.canonical_form import operators, the_state, validate
from stepdown.transformations.fusion.fuse_attention import FuseAttention, tiled_values
from stepdown.transformations.reference_executor import execute_training
from stepdown.transformations.training_graph import TrainingGraph

MakeGraph = Callable[[EncoderLayer], TrainingGraph]

LAYER = EncoderLayer(embed=12, heads=3, ffn=20)
FORWARD = ["scores", "padding", "attention_weights", "attention_dropped", "context"]


def fused(graph: TrainingGraph) -> tuple[TrainingGraph, str]:
    result, what = FuseAttention().apply(graph.copy())
    validate(result)
    return result, what


def groups(graph: TrainingGraph) -> list[TiledGroup]:
    return [node for _, sdfg in graph.graphs() for node in operators(sdfg) if isinstance(node, TiledGroup)]


def values(graph: TrainingGraph, batch: int, seq: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Arguments of both graphs; of every other row of keys some are padding."""
    generator = torch.Generator().manual_seed(batch * 100 + seq)
    found: dict[str, torch.Tensor] = {}
    for name, descriptor in graph.forward.arrays.items():
        if descriptor.transient or name == "y" or name in graph.kept:
            continue
        shape = [
            int(extent.subs({"B": batch, "S": seq})) if hasattr(extent, "subs") else extent
            for extent in descriptor.shape
        ]
        if name == "rng":
            found[name] = torch.tensor([7, 11])
        elif name == "attention_mask":
            found[name] = torch.rand(shape, generator=generator) > 0.4
        elif name.endswith("dropout") or name == "dropout_p":
            found[name] = torch.tensor(0.25, dtype=torch.float64)
        else:
            found[name] = torch.randn(shape, dtype=torch.float64, generator=generator)
    return found, {"gradient_y": torch.randn(batch, seq, LAYER.embed, dtype=torch.float64, generator=generator)}


def test_the_members_are_what_touches_values_over_two_positions(make_graph: MakeGraph) -> None:
    result, what = fused(make_graph(LAYER))
    forward, backward = groups(result)
    assert [member.operator.name for member in forward.members] == FORWARD
    names = [member.operator.name for member in backward.members]
    assert set(FORWARD[:4]) < set(names)  # computed again
    assert [type(run).__name__ for run in backward.runs()] == ["Member"] * 2 + ["RowGroup"] + ["Member"] * 3
    assert {"context_gradient_a", "context_gradient_b", "scores_gradient_a", "scores_gradient_b"} < set(names)
    assert what == f"{len(FORWARD) + len(names)} operators over two positions in 2 tiled kernels"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_such_value_is_left_in_memory_or_kept(make_graph: MakeGraph, direction: str) -> None:
    graph = make_graph(LAYER)
    result, _ = fused(graph)
    assert tiled_values(graph.forward) & set(graph.kept)
    sdfg = dict(result.graphs())[direction]
    assert not tiled_values(sdfg)
    assert all(
        len(descriptor.shape) < 4 or descriptor.shape[-1] != descriptor.shape[-2] for descriptor in sdfg.arrays.values()
    )
    assert all(not result.forward.arrays[name].transient for name in result.kept)
    assert {"query", "key", "value"} <= set(result.kept)


def test_random_numbers_are_those_of_the_forward_pass(make_graph: MakeGraph) -> None:
    result, _ = fused(make_graph(LAYER))
    forward, backward = groups(result)
    assert {"rng", "attention_dropout", "attention_mask"} <= set(forward.in_connectors) & set(backward.in_connectors)


def test_a_second_run_changes_nothing(make_graph: MakeGraph) -> None:
    once, _ = fused(make_graph(LAYER))
    twice, what = fused(once)
    assert what == "no values over two positions"
    assert [sdfg.hash_sdfg() for _, sdfg in twice.graphs()] == [sdfg.hash_sdfg() for _, sdfg in once.graphs()]


@settings(max_examples=12, deadline=None)
@given(
    causal=st.booleans(),
    bias=st.booleans(),
    norm=st.sampled_from(["post", "pre"]),
    drops=st.booleans(),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 6)),
)
def test_values_stay(
    make_graph: MakeGraph, causal: bool, bias: bool, norm: str, drops: bool, sizes: tuple[int, int]
) -> None:
    definition = EncoderLayer(
        embed=12, heads=3, ffn=20, causal=causal, bias=bias, norm=norm, attention_dropout=0.25 if drops else 0.0
    )
    graph = make_graph(definition)
    result, _ = fused(graph)
    assert len(groups(result)) == 2
    arguments, given_gradients = values(graph, *sizes)
    assert graph.backward is not None
    expected = execute_training(graph, arguments, given_gradients)
    found = execute_training(result, arguments, given_gradients)
    assert torch.equal(found[0]["y"], expected[0]["y"])
    results = [
        name for name, array in graph.backward.arrays.items() if name.startswith("gradient_") and not array.transient
    ]
    assert len(results) > 10
    for name in results:
        assert torch.equal(found[1][name], expected[1][name]), name


def test_a_value_that_leaves_the_layer_is_not_fused_and_said(make_graph: MakeGraph) -> None:
    graph = make_graph(LAYER).copy()
    graph.forward.arrays["scores"].transient = False
    result, what = FuseAttention().apply(graph)
    assert what == 'attention is not fused: "scores" is an argument and must be in memory'
    assert result is graph
    assert not groups(result)


def test_a_kernel_in_the_middle_is_not_fused_and_said(make_graph: MakeGraph) -> None:
    """The context goes through something else and comes back as a factor of the scores."""
    graph = TrainingGraph(make_graph(LAYER).copy().forward)
    sdfg, state = graph.forward, the_state(graph.forward)
    for name in graph.forward.arrays:
        if name in tiled_values(sdfg):
            sdfg.arrays[name].transient = True
    array = sdfg.arrays["context"]
    for name in ("scaled", "again"):
        shape = array.shape if name == "scaled" else sdfg.arrays["scores"].shape
        sdfg.add_array(name, shape, array.dtype, transient=True)
    sdfg.add_array("more", sdfg.arrays["query"].shape, array.dtype)
    sdfg.add_array("sum", sdfg.arrays["scores"].shape, array.dtype, transient=True)
    sdfg.add_array("last", array.shape, array.dtype)
    connect_operator(sdfg, state, Scale("scale", "BSHP", factor=2.0), {"x": "context"}, {"y": "scaled"})
    connect_operator(sdfg, state, Contraction("again", "BSHP,BTHP->BHST"), {"a": "scaled", "b": "key"}, {"d": "again"})
    connect_operator(sdfg, state, Add("sum", "BHST"), {"a": "again", "b": "scores"}, {"y": "sum"})
    connect_operator(sdfg, state, Contraction("last", "BHST,BTHP->BSHP"), {"a": "sum", "b": "value"}, {"d": "last"})
    result, what = FuseAttention().apply(graph)
    assert what == 'attention is not fused: another kernel must run before "again"'
    assert result is graph


def member(operator: Operator, **named: str) -> Member:
    return Member(operator, named)


SCORES = member(Contraction("scores", "BSHP,BTHP->BHST"), a="q", b="k", d="s")
SOFTMAX = member(Softmax("softmax", "BHST"), x="s", y="w")
CONTEXT = member(Contraction("context", "BHST,BTHP->BSHP"), a="w", b="v", d="c")


def test_a_group_counts_and_types_its_members() -> None:
    group = TiledGroup("group", [SCORES, SOFTMAX, CONTEXT], ["c"])
    assert set(group.in_connectors) == {"q", "k", "v"}
    assert group.operand_dims()["v"] == "BTHP"
    sizes = {"B": 2, "H": 3, "S": 5, "T": 5, "P": 4}
    assert group.flop(sizes) == sum(entry.operator.flop(sizes) for entry in (SCORES, SOFTMAX, CONTEXT))
    assert group.words_in(sizes) == 3 * 2 * 5 * 3 * 4
    assert group.words_out(sizes) == 2 * 5 * 3 * 4
    assert [type(run).__name__ for run in group.runs()] == ["Member", "RowGroup", "Member"]


@pytest.mark.parametrize(
    ("members", "outputs", "message"),
    [
        ([SCORES, member(Softmax("softmax", "BSE"), x="e", y="f")], [], "runs over"),
        ([SCORES, SOFTMAX], ["w"], 'gives "w" out of its tiles'),
        ([SCORES, SOFTMAX, CONTEXT], ["q"], 'gives "q" out of its tiles'),
        ([SCORES, member(Contraction("out", "BSHP,EHP->BSE"), a="c", b="o", d="e")], [], "take or give a value over"),
        ([member(Contraction("bad", "BHST,TP->BHSP"), a="s", b="v", d="c")], [], 'lacks a dimension of "BH"'),
        (
            [SCORES, SOFTMAX, CONTEXT, member(Contraction("more", "BSHP,BTHP->BHST"), a="c", b="k", d="m")],
            [],
            "complete only after",
        ),
    ],
)
def test_a_group_refuses_what_no_tile_can_do(members: list[Member], outputs: list[str], message: str) -> None:
    with pytest.raises(CanonicalFormError, match=message):
        TiledGroup("group", members, outputs)
