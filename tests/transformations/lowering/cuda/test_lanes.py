"""How rows lie on lanes, and the CUDA code that row operators become (generated, not run)."""

from __future__ import annotations

import dace
import pytest
from dace.codegen import codegen
from dace.sdfg import SDFG
from hypothesis import given
from hypothesis import strategies as st

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import LayerNorm, Operator, Softmax, SumRows
from stepdown.models.operators.gradient import connect_operator
from stepdown.pipeline.toolchain import dace_configuration
from stepdown.transformations.lowering.cuda import lower_rows
from stepdown.transformations.lowering.cuda.lanes import ACCESS_BYTES, HELD, plan_lanes
from stepdown.transformations.lowering.lower_operators import lower_operators
from stepdown.transformations.schedule.plan_workspace import plan_workspace


@given(extent=st.integers(1, 16384), item=st.sampled_from([2, 4, 8]), columns=st.booleans())
def test_every_element_has_one_place(extent: int, item: int, columns: bool) -> None:
    plan = plan_lanes(extent, item, columns=columns)
    assert extent % plan.vector == 0
    assert plan.vector * item <= ACCESS_BYTES
    assert plan.lanes & (plan.lanes - 1) == 0
    assert plan.lanes * plan.rows <= 1024
    held = plan.lanes * plan.held
    assert held - plan.lanes * plan.vector < extent <= held
    assert plan.tail == (held != extent)
    assert plan.held <= max(HELD, -(-extent // 1024) * plan.vector, plan.vector)


def code_of(operator: Operator, extents: dict[str, object], dtype: dace.typeclass) -> str:
    """The CUDA code of one operator."""
    lower_rows.register()
    sdfg = SDFG("one_operator")
    state = sdfg.add_state("operators")
    dims = operator.operand_dims()
    names = {c: c for c in (*operator.inputs, *operator.outputs)}
    for name in names:
        sdfg.add_array(name, [extents[letter] for letter in dims[name]], dtype)
    inputs, outputs = ({c: c for c in part} for part in (operator.inputs, operator.outputs))
    connect_operator(sdfg, state, operator, inputs, outputs)
    lowered = lower_operators(sdfg, "cuda")
    plan_workspace(lowered)
    for descriptor in lowered.arrays.values():
        descriptor.storage = dace.StorageType.GPU_Global
    with dace_configuration(compiles=False):
        dace.Config.set("compiler", "cuda", "backend", value="cuda")
        lowered.validate()
        return next(part.code for part in codegen.generate_code(lowered) if part.language == "cu")


ROWS = {"B": dace.symbol("B", dace.int32, positive=True), "S": 3, "E": 1024}


def test_a_row_is_loaded_once_in_vectors_and_reduced_over_lanes() -> None:
    code = code_of(LayerNorm("norm", "BSE", 1e-5), ROWS, dace.bfloat16)
    assert code.count("stepdown::load_vector<8>(in_memory, out_held)") == 3
    assert code.count("stepdown::store_vector<8>(in_held, out_memory)") == 1
    assert code.count("stepdown::over_lanes<stepdown::Sum, 32, 4>") == 2
    assert "atomic" not in code


def test_sums_over_rows_are_partial_rows_and_a_second_kernel() -> None:
    code = code_of(SumRows("sum", "BSE", "E"), ROWS, dace.float32)
    assert code.count("__global__ void") == 2
    assert "stepdown::over_column" in code
    assert "atomic" not in code


def test_rows_of_any_length_are_refused() -> None:
    length = dace.symbol("S", dace.int32, positive=True)
    with pytest.raises(CanonicalFormError, match="a kernel takes a fixed number"):
        code_of(Softmax("softmax", "BHST"), {"B": 2, "H": 2, "S": length, "T": length}, dace.float32)
