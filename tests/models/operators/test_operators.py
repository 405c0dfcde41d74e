"""What holds for every operator: counts, statements, dtype and shape rules, serialisation.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from pathlib import Path

import dace
import pytest
import torch
from dace import data
from dace.sdfg import SDFG
from hypothesis import given, settings
from hypothesis import strategies as st

from stepdown.models.dtypes import DTYPES, DataType
from stepdown.models.operators import OPERATORS, ROW_OPERATORS, Contraction, Operator, OperatorClass
from stepdown.models.operators.operator import LEGEND, canonical_dims, extent_product
from stepdown.transformations.canonical_form import operators, validate_sdfg

from .cases import CASES, SIZES, Case, draw_operands, evaluate, refused, shape_of, single_operator

ROW_CASES = [case for case in CASES if not isinstance(case.node, Contraction)]
ONE_OF_EACH = list({type(case.node): case for case in CASES}.values())
SYMBOLS = {letter: dace.symbol(letter, dace.int32, positive=True) for letter in LEGEND}


def test_every_operator_has_a_case() -> None:
    assert {type(case.node) for case in CASES} == set(OPERATORS)
    assert len({case.name for case in CASES}) == len(CASES)


def test_classes_are_those_of_the_paper() -> None:
    by_class = {kind: {o.__name__ for o in OPERATORS if o.operator_class is kind} for kind in OperatorClass}
    assert by_class[OperatorClass.CONTRACTION] == {"Contraction"}
    assert by_class[OperatorClass.STATISTICAL_NORMALIZATION] == {
        "LayerNorm", "LayerNormGradient", "LayerNormParameterGradient", "Softmax", "SoftmaxGradient",
    }  # fmt: skip
    assert len(by_class[OperatorClass.ELEMENT_WISE]) == len(OPERATORS) - 6


def test_counts_by_hand() -> None:
    counted = {c.name: (c.node.flop(SIZES), c.node.words_in(SIZES), c.node.words_out(SIZES)) for c in CASES}
    assert counted == {case.name: (case.flop, case.words_in, case.words_out) for case in CASES}


def test_symbolic_counts_become_the_numbers() -> None:
    substitution = {SYMBOLS[letter]: extent for letter, extent in SIZES.items()}
    for case in CASES:
        counts = (case.node.flop(SYMBOLS), case.node.words_in(SYMBOLS), case.node.words_out(SYMBOLS))
        assert [c.subs(substitution) for c in counts] == [case.flop, case.words_in, case.words_out], case.name


@pytest.mark.parametrize("operator", OPERATORS)
def test_documented_by_a_formula(operator: type[Operator]) -> None:
    assert "``" in (operator.__doc__ or "")


@pytest.mark.parametrize("case", ROW_CASES, ids=lambda case: case.name)
@settings(max_examples=15, deadline=None)
@given(drawn=st.data())
def test_statements_equal_the_reference(case: Case, drawn: st.DataObject) -> None:
    """The formulas that kernels are made of against PyTorch's functions, in float64 at drawn sizes."""
    node = case.node
    sizes = {letter: drawn.draw(st.integers(1, 5), letter) for letter in SIZES}
    torch.manual_seed(drawn.draw(st.integers(0, 1000), "seed"))
    operands = draw_operands(node, sizes, probability=drawn.draw(st.sampled_from([0.0, 0.1, 0.5, 0.999]), "p"))
    values, expected = evaluate(node, operands, sizes), node.reference(operands)
    assert set(node.outputs) <= set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, rtol=1e-12, atol=1e-12, equal_nan=False)
        assert tuple(value.shape) == shape_of(node.operand_dims()[name], sizes)


@pytest.mark.parametrize("case", ROW_CASES, ids=lambda case: case.name)
def test_statements_are_well_formed(case: Case) -> None:
    """Every name read is an input or an earlier target, every output is written, dimensions are the operator's own."""
    node = case.node
    known = set(node.in_connectors)
    for statement in node.statements():
        assert set(statement.names()) <= known
        assert set(statement.dims) <= set(node.dims)
        assert statement.target not in node.inputs
        if statement.reduction is not None:
            assert statement.target not in (*node.outputs, *node.extra_outputs), "a reduction's target is a temporary"
        known.add(statement.target)
    assert set(node.outputs) | set(node.extra_outputs) <= known


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_shape_and_dtype_rule(dtype: DataType) -> None:
    for case in CASES:
        node = case.node
        inferred = node.infer(descriptors(node, single_operator(node, SIZES, dtype)))
        assert set(inferred) == set(node.outputs) | set(node.extra_outputs)
        for name, (shape, kind) in inferred.items():
            assert shape == shape_of(node.operand_dims()[name], SIZES), case.name
            assert kind is (dtype.accumulate if name in ("mean", "rstd") else dtype), case.name


def test_shape_rule_keeps_symbols() -> None:
    for case in CASES:
        node = case.node
        inferred = node.infer(descriptors(node, single_operator(node, SYMBOLS)))
        for name, (shape, _) in inferred.items():
            assert shape == tuple(SYMBOLS[letter] for letter in node.operand_dims()[name]), case.name


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.name)
def test_refuses_another_rank(case: Case) -> None:
    node = case.node
    found = descriptors(node, single_operator(node, SIZES))
    name = node.inputs[0]
    rank = len(found[name].shape)
    found[name] = data.Array(dace.float64, (2,) * (rank + 1))
    dims = node.operand_dims()[name]
    with refused(f'operand "{name}" of operator "{node.name}" has {rank + 1} dimensions, "{dims}" takes {rank}'):
        node.infer(found)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.name)
def test_refuses_disagreeing_extents(case: Case) -> None:
    """Every dimension that stands in two operands is compared."""
    dims = case.node.operand_dims()
    inputs = sorted(case.node.in_connectors)
    shared = {letter for letter in case.node.dims if sum(letter in dims[name] for name in inputs) > 1}
    for letter in shared:
        node = case.node
        found = descriptors(node, single_operator(node, SIZES))
        last = [name for name in found if letter in dims[name]][-1]
        changed = SIZES | {letter: SIZES[letter] + 1}
        found[last] = data.Array(dace.float64, shape_of(dims[last], changed))
        extents = f"{SIZES[letter]} in one operand and {changed[letter]} in"
        with refused(f'dimension "{letter}" of operator "{node.name}" is {extents} operand "{last}"'):
            node.infer(found)


@pytest.mark.parametrize("operator", ROW_OPERATORS)
def test_refuses_unknown_and_repeated_dimensions(operator: type[Operator]) -> None:
    with refused('dimension "X" of operator "odd" is not one of "BSTHPEUN"'):
        operator("odd", "BSX")
    with refused('dimensions "BSTB" of operator "odd" name a dimension twice'):
        operator("odd", "BSTB")


def test_valid_in_a_graph() -> None:
    for case in CASES:
        validate_sdfg(single_operator(case.node, SIZES))
        validate_sdfg(single_operator(case.node, SYMBOLS))


def test_saved_and_loaded(tmp_path: Path) -> None:
    """A file keeps classes, properties and connectors, compressed or not; a second trip changes nothing."""
    sdfg = SDFG("saved")
    sdfg.add_state("state")
    for number, case in enumerate(CASES):
        single_operator(case.node, SYMBOLS, sdfg=sdfg, prefix=f"c{number}_")
    for file, compress in ((tmp_path / "graph.sdfg", False), (tmp_path / "graph.sdfgz", True)):
        sdfg.save(str(file), compress=compress)
        loaded = SDFG.from_file(str(file))
        validate_sdfg(loaded)
        for before, after in zip(operators(sdfg), operators(loaded), strict=True):
            assert type(after) is type(before)
            assert properties_of(after) == properties_of(before)
            assert (after.in_connectors, after.out_connectors) == (before.in_connectors, before.out_connectors)
            assert after.statements() == before.statements()
            assert after.operand_dims() == before.operand_dims()


def descriptors(node: Operator, sdfg: SDFG) -> dict[str, data.Data]:
    """Descriptor of every input; a single element is a scalar."""
    return {edge.dst_conn: sdfg.arrays[edge.data.data] for edge in sdfg.nodes()[0].in_edges(node)}


def properties_of(node: Operator) -> dict[str, object]:
    """The operator's own properties by name."""
    ours = {"name", *(set(type(node).__properties__) - set(dace.sdfg.nodes.LibraryNode.__properties__))}
    assert "dims" in ours
    return {name: getattr(node, name) for name in ours}


def test_canonical_dims_and_products() -> None:
    assert canonical_dims("BHST") == "BHSS"
    assert extent_product("", SIZES) == 1
    assert extent_product("2", SIZES) == 2
