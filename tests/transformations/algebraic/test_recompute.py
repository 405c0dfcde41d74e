"""Recompute: what is computed again, what is kept for it, budgets, and that the counts are those of the fused graph.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import re

import dace
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.errors import OptionError
from stepdown.models.operators import Bias, Contraction, Dropout, Gelu, GeluGradient, LayerNorm
from stepdown.models.presets import find_preset
from stepdown.pipeline.analysis.counts import count_graph
from stepdown.pipeline.stages import Compilation, differentiate_stage, parse
from stepdown.pipeline.target import find_target
from stepdown.transformations.algebraic.recompute import Recompute
from stepdown.transformations.canonical_form import operators, validate
from stepdown.transformations.fusion.fuse_row_operators import FuseRowOperators
from stepdown.transformations.training_graph import TrainingGraph
from tests.transformations.conftest import MakeGraph

from .cases import LAYERS, Builder, draw_graph, hand_built, names, same_training, same_values

BERT = EncoderLayer(embed=16, heads=2, ffn=24)


def counts(graph: TrainingGraph) -> dict[str, int]:
    """Counts at B=8, S=512 once row and element-wise operators are grouped."""
    fused, _ = FuseRowOperators().apply(graph.copy())
    return count_graph(fused).total.at(8, 512)


def again(graph: TrainingGraph) -> list[str]:
    """Operators that backward computes again."""
    assert graph.backward is not None
    return [name.removesuffix("_again") for name in names(graph.backward) if name.endswith("_again")]


# ---- by hand --------------------------------------------------------------------------------------------------------


def chain(*, dropout: bool = False) -> TrainingGraph:
    """``y = gelu(x w + b) m``; backward reads the operands of GELU and of the second product."""
    forward, backward = Builder(), Builder()
    forward.add(Contraction("first", "BSE,UE->BSU"), {"a": "x", "b": "w"}, "product")
    forward.add(Bias("bias", "BSU", "U"), {"x": "product", "bias": "b"}, "biased")
    forward.add(Gelu("gelu", "BSU"), {"x": "biased"}, "active")
    last = "active"
    if dropout:
        forward.sdfg.add_array("rng", [2], dace.int64)
        forward.sdfg.add_scalar("p", dace.float64)
        last = forward.add(Dropout("dropout", "BSU", 3), {"x": "active", "rng": "rng", "p": "p"}, "dropped")
    forward.add(Contraction("second", "BSU,EU->BSE"), {"a": last, "b": "m"}, "y", argument=True)
    backward.add(Contraction("gradient_a", "BSE,EU->BSU"), {"a": "gradient_y", "b": "m"}, "gradient_active")
    backward.add(Contraction("gradient_b", "BSE,BSU->EU"), {"a": "gradient_y", "b": last}, "gradient_m", argument=True)
    inputs = {"dy": "gradient_active", "x": "biased"}
    backward.add(GeluGradient("gelu_gradient", "BSU"), inputs, "gradient_b", argument=True)
    return hand_built(forward, backward)


def test_a_product_that_is_written_anyway_is_kept_instead_of_its_sum_with_a_bias() -> None:
    before = chain()
    assert before.kept == ("active", "biased")
    after, what = Recompute().apply(before.copy())
    validate(after)
    assert after.kept == ("active", "product") and again(after) == ["bias"]
    assert after.forward.arrays["biased"].transient and not after.forward.arrays["product"].transient
    saved = counts(before)["bytes_moved"] - counts(after)["bytes_moved"]
    assert saved == 8 * (2 * 3 * 5 - 5), "biased is not written; the bias is read again"
    assert "computed again" in what


def test_a_budget_makes_backward_compute_the_activation_again() -> None:
    after, _ = Recompute(8 * 2 * 3 * 5).apply(chain())
    validate(after)
    assert after.kept == ("product",) and again(after) == ["bias", "gelu"]


def test_dropout_is_drawn_again_from_the_same_numbers() -> None:
    after, _ = Recompute(8 * 2 * 3 * 5).apply(chain(dropout=True))
    validate(after)
    assert after.kept == ("product",) and again(after) == ["bias", "gelu", "dropout"]
    assert after.backward is not None
    (clone,) = (node for node in operators(after.backward) if isinstance(node, Dropout))
    assert clone.site == 3


def test_a_contraction_is_never_computed_again() -> None:
    message = re.escape(
        f'"memory_budget" is 239 bytes; accepted are at least {8 * 2 * 3 * 5}, what forward keeps when backward '
        "computes again all that it can."
    )
    with pytest.raises(OptionError, match=f"^{message}$"):
        Recompute(239).apply(chain())


def test_statistics_come_from_the_clone_that_writes_the_result() -> None:
    """LayerNorm's result, mean and reciprocal deviation: kept or computed again together."""
    forward, backward = Builder(), Builder()
    inputs = {"x": "x", "weight": "w", "bias": "b"}
    forward.add(LayerNorm("norm", "BSE", 1e-5), inputs, "normal")
    forward.add(Contraction("product", "BSE,UE->BSU"), {"a": "normal", "b": "m"}, "y", argument=True)
    backward.container("gradient_y", "BSU")
    backward.add(
        Contraction("gradient", "BSU,BSE->UE"), {"a": "gradient_y", "b": "normal"}, "gradient_m", argument=True
    )
    graph = hand_built(forward, backward)
    unchanged, what = Recompute().apply(graph.copy())
    assert unchanged.kept == ("normal",) and again(unchanged) == [], "it would be written a second time"
    assert what == "192 bytes kept, nothing computed again"
    graph, _ = Recompute(0).apply(graph)
    validate(graph)
    assert graph.kept == () and again(graph) == ["norm"]
    assert graph.backward is not None
    (clone,) = (node for node in operators(graph.backward) if isinstance(node, LayerNorm))
    assert set(clone.out_connectors) == {"y"}


def test_a_name_that_backward_uses_otherwise_is_left_alone() -> None:
    graph = chain()
    assert graph.backward is not None
    graph.backward.replace("gradient_active", "product")
    validate(graph)
    with pytest.raises(OptionError, match=f"accepted are at least {8 * 2 * 3 * 5}, "):
        Recompute(1).apply(graph.copy())
    graph, _ = Recompute(8 * 2 * 3 * 5).apply(graph)
    validate(graph)
    assert graph.kept == ("biased",) and again(graph) == ["gelu"], "the product cannot be kept under its name"


def test_without_a_backward_pass_nothing_is_kept(make_graph: MakeGraph) -> None:
    graph, what = Recompute(0).apply(TrainingGraph(make_graph(BERT).forward))
    assert graph.kept == () and what == "nothing is kept"


# ---- layers ---------------------------------------------------------------------------------------------------------


def test_what_bert_computes_again_for_nothing(make_graph: MakeGraph) -> None:
    """Scores instead of weights, and the first product of the feed-forward part without its bias."""
    before = make_graph(BERT)
    after, _ = Recompute().apply(before.copy())
    assert set(again(after)) == {"padding", "intermediate", "attention_weights"}
    assert set(after.kept) == set(before.kept) - {"weights", "intermediate"} | {"scores", "intermediate_product"}
    saved = counts(before)["bytes_moved"] - counts(after)["bytes_moved"]
    weights, intermediate = 8 * 2 * 512 * 512, 8 * 512 * 24
    assert saved == 8 * (weights + intermediate - 24), "neither is written; the bias is read again, and the mask anyway"


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["paper", "pre-norm, causal", "no biases"])
def test_layers_keep_what_the_budget_allows(layer: str, make_graph: MakeGraph) -> None:
    before = make_graph(LAYERS[layer])
    kept = count_graph(before).total.at(8, 512)["kept_bytes"]
    with pytest.raises(OptionError) as refused:
        Recompute(1).apply(before.copy())
    least = int(re.findall(r"at least (\d+)", str(refused.value))[0])
    assert least < kept and " at B=8 and S=512 " in str(refused.value)
    moved = 0
    for budget in ((kept + least) // 2, least):
        after, _ = Recompute(budget).apply(before.copy())
        assert count_graph(after).total.at(8, 512)["kept_bytes"] <= budget
        same_training(before, after, LAYERS[layer])
        assert counts(after)["bytes_moved"] >= moved, "more memory never costs more bytes moved"
        moved = counts(after)["bytes_moved"]
        shown = (after.kept, again(after))
        after, _ = Recompute(budget).apply(after)
        assert (after.kept, again(after)) == shown
    with pytest.raises(OptionError, match=str(least)):
        Recompute(least - 1).apply(before.copy())


def bert_base() -> TrainingGraph:
    definition = find_preset("bert-base").layer
    compilation = Compilation(definition, 8, 128, resolve_dtype("float32"), find_target("cpu"), "base")
    parse(compilation)
    differentiate_stage(compilation)
    assert compilation.graph is not None
    return compilation.graph


def test_bert_base_keeps_at_most_70_percent_of_what_pytorch_keeps() -> None:
    """PyTorch's eager layer with SDPA saves 75.5 MB at B=8, S=128 in float32; the input x is among them."""
    x = 4 * 8 * 128 * 768
    budget = int(0.7 * 75.5e6) - x
    before = bert_base()
    after, _ = Recompute(budget).apply(before.copy())
    kept = count_graph(after).total.at(8, 128)["kept_bytes"]
    assert kept <= budget < count_graph(before).total.at(8, 128)["kept_bytes"]
    assert counts(after)["bytes_moved"] <= counts(before)["bytes_moved"], "and moves no more than when nothing is"


@given(drawn=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.slow
def test_random_graphs_within_random_budgets(drawn: st.DataObject) -> None:
    before, values = draw_graph(drawn)
    kept = count_graph(before).total.at(8, 512)["kept_bytes"]
    budget = drawn.draw(st.integers(0, kept), "budget")
    try:
        after, what = Recompute(budget).apply(before.copy())
    except OptionError as error:
        budget = int(re.findall(r"at least (\d+)", str(error))[0])
        after, what = Recompute(budget).apply(before.copy())
    assert count_graph(after).total.at(8, 512)["kept_bytes"] <= budget
    same_values(before, after, values, "y")
    for moved in re.findall(r"(\d+) moved instead", what):
        assert counts(after)["bytes_moved"] == int(moved), "what the search counts is what the fused graph moves"
    shown = (after.kept, again(after))
    after, _ = Recompute(budget).apply(after)
    assert (after.kept, again(after)) == shown
