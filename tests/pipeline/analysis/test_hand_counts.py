"""A training step counted by hand: its totals, the paper's forward pass, and the differences to what is compiled.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import pytest

from stepdown.models import bert_large
from stepdown.models.dtypes import resolve_dtype
from stepdown.pipeline.analysis.counts import count_graph
from stepdown.pipeline.analysis.hand_counts import (
    BY_OPERATOR,
    FUSED_ATTENTION,
    HAND_COUNTS,
    PAPER_FORWARD,
    PAPER_GROUPS,
    HandKernel,
    compare_with_hand,
    layer_sizes,
    total_words,
)
from stepdown.pipeline.stages import Compilation, differentiate_stage, parse
from stepdown.pipeline.target import find_target
from stepdown.transformations.fusion.fuse_attention import FuseAttention
from stepdown.transformations.fusion.fuse_row_operators import FuseRowOperators
from stepdown.transformations.training_graph import TrainingGraph

SIZES = layer_sizes(bert_large.layer, 8, 512)


@pytest.fixture(scope="module")
def differentiated(strict_dace_session: None) -> TrainingGraph:
    """BERT-large's training graph before any pass; not to be changed."""
    compilation = Compilation(bert_large.layer, None, None, resolve_dtype("float32"), find_target("cpu"), "hand_counts")
    parse(compilation)
    differentiate_stage(compilation)
    assert compilation.graph is not None
    return compilation.graph


def million(words: float) -> float:
    return round(words / 1e6, 1)


def test_totals_by_hand() -> None:
    totals = {name: round(total_words(kernels, SIZES) / 1e6) for name, kernels in HAND_COUNTS.items()}
    assert totals == {"operator by operator": 1267, "the paper's groups": 914, "fused attention": 453}
    forward = [kernel for kernel in BY_OPERATOR if kernel.direction == "forward"]
    assert round(total_words(forward, SIZES) / 1e6) == 533
    whole = total_words(BY_OPERATOR, SIZES)
    assert round(100 - 100 * total_words(PAPER_GROUPS, SIZES) / whole, 1) == 27.8
    assert round(100 - 100 * total_words(FUSED_ATTENTION, SIZES) / whole, 1) == 64.2


@pytest.mark.parametrize(
    ("name", "words_in", "words_out"),
    [
        ("Q, K and V", 7.34, 12.58),
        ("QK^T", 8.39, 33.55),
        ("gamma", 37.75, 4.19),
        ("attention output", 5.24, 4.19),
        ("FFN 1", 8.39, 16.78),
        ("FFN 2", 20.97, 4.19),
    ],
)
def test_contractions_by_hand_are_the_papers(name: str, words_in: float, words_out: float) -> None:
    (kernel,) = [kernel for kernel in PAPER_GROUPS if kernel.name == name]
    whole = kernel.words(SIZES)
    out = HandKernel(name, "forward", "", kernel.writes, ()).words(SIZES)
    assert (round((whole - out) / 1e6, 2), round(out / 1e6, 2)) == (words_in, words_out)


def test_the_papers_forward_pass_is_the_papers_to_the_digit() -> None:
    """524.3 million words: operator by operator, softmax and its dropout in one kernel, masks written."""
    assert million(total_words(PAPER_FORWARD, SIZES)) == 524.3
    (softmax,) = [kernel for kernel in PAPER_FORWARD if kernel.name == "softmax, dropout"]
    assert (round(softmax.words_in(SIZES) / 1e6, 2), round(softmax.words_out(SIZES) / 1e6, 2)) == (33.55, 100.66)


@pytest.mark.parametrize("kernels", HAND_COUNTS.values(), ids=list(HAND_COUNTS))
def test_every_operator_is_counted_once(kernels: tuple[HandKernel, ...], differentiated: TrainingGraph) -> None:
    named = [name for kernel in kernels for name in kernel.operators]
    assert sorted(named) == sorted(operator.name for operator in count_graph(differentiated).by_operator)


def test_operators_differ_from_the_hand_count_by_stacking_only(differentiated: TrainingGraph) -> None:
    rows = compare_with_hand(BY_OPERATOR, count_graph(differentiated), SIZES)
    different = {
        row.by_hand[0]: million(row.our_words - row.words_by_hand)
        for row in rows
        if million(row.our_words - row.words_by_hand)
    }
    assert different == {"Q, K and V": 8.4, "Q, K and V dX": 33.6, "Q, K and V dW": 8.4}
    assert all(len(row.by_hand) == 1 for row in rows)
    total = count_graph(differentiated).total.at(8, 512)
    assert sum(row.our_words for row in rows) == total["words_in"] + total["words_out"]


def test_groups_are_compared_with_what_they_share(differentiated: TrainingGraph) -> None:
    graph, _ = FuseAttention().apply(differentiated.copy())
    graph, _ = FuseRowOperators().apply(graph)
    counts = count_graph(graph)
    rows = compare_with_hand(FUSED_ATTENTION, counts, SIZES)
    by_hand = {row.by_hand: row for row in rows}
    assert by_hand["attention",].words_by_hand == 4 * 8 * 512 * 1024
    assert million(by_hand["attention",].our_words) == 16.8
    both = by_hand["FFN 1, bias", "GELU"]
    assert both.ours == ("intermediate_product", "intermediate__activation")
    assert sum(row.words_by_hand for row in rows) == total_words(FUSED_ATTENTION, SIZES)
    total = counts.total.at(8, 512)
    assert sum(row.our_words for row in rows) == total["words_in"] + total["words_out"]


def test_operators_without_a_counterpart_are_shown(differentiated: TrainingGraph) -> None:
    rows = compare_with_hand(BY_OPERATOR[1:], count_graph(differentiated), SIZES)
    assert [row.ours for row in rows if not row.by_hand] == [("query_product",), ("key_product",), ("value_product",)]
