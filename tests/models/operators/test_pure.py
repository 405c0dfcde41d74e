"""The pure expansion: every operator compiled and run in every type, row-major or with reversed strides.

One SDFG for each type holds the operators, so that there are few compilations. Sizes are symbolic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import dace
import pytest
import torch
from dace.config import set_temporary
from dace.sdfg import SDFG

from stepdown.models.dtypes import DTYPES, DataType
from stepdown.models.operators.operator import LEGEND
from stepdown.models.operators.philox import keep_mask

from .cases import CASES, SIZES, Case, draw_operands, shape_of, single_operator

SYMBOLS = {letter: dace.symbol(letter, dace.int32, positive=True) for letter in LEGEND}
ONE_OF_EACH = tuple({type(case.node): case for case in reversed(CASES)}.values())
REVERSED = ("float64", "float16")
"""Types whose containers have the first dimension contiguous instead of the last."""


def strides_of(shape: tuple[Any, ...], dtype: DataType) -> tuple[Any, ...]:
    """Layout of the containers of a type."""
    if dtype.name in REVERSED:
        return tuple(math.prod(shape[:axis]) for axis in range(len(shape)))
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True)
class Compiled:
    """A program with the operators of ``cases``, their containers called ``<case>_<connector>``."""

    dtype: DataType
    cases: tuple[Case, ...]
    program: Any

    def run(
        self, operands: dict[str, dict[str, torch.Tensor]], sizes: dict[str, int]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Outputs of every case from its operands."""
        arguments: dict[str, Any] = dict(sizes)
        outputs: dict[str, dict[str, torch.Tensor]] = {}
        for case in self.cases:
            node = case.node
            types = node.result_types(self.dtype)
            for name, value in operands[case.name].items():
                scalar = name == "p"
                arguments[f"{case.name}_{name}"] = value.item() if scalar else self._laid_out(value)
            outputs[case.name] = {}
            for name in sorted(node.out_connectors):
                shape = shape_of(node.operand_dims()[name], sizes)
                result = self._laid_out(torch.full(shape or (1,), math.nan, dtype=types[name].torch))
                outputs[case.name][name] = result if shape else result.view(())
                arguments[f"{case.name}_{name}"] = result
        wanted = self.program.sdfg.arglist()
        self.program(**{name: value for name, value in arguments.items() if name in wanted})
        return outputs

    def _laid_out(self, value: torch.Tensor) -> torch.Tensor:
        strides = strides_of(tuple(value.shape), self.dtype)
        return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


@pytest.fixture(scope="session", params=DTYPES.values(), ids=str)
def compiled(request: pytest.FixtureRequest, strict_dace_session: None) -> Compiled:
    """All cases in float64, one of each operator in the other types."""
    dtype: DataType = request.param
    cases = CASES if dtype.name == "float64" else ONE_OF_EACH
    sdfg = SDFG(f"every_operator_{dtype.name}")
    sdfg.add_state("operators")
    for case in cases:
        single_operator(
            case.node,
            SYMBOLS,
            dtype,
            sdfg=sdfg,
            prefix=f"{case.name}_",
            strides=lambda shape: strides_of(shape, dtype),
        )
    sdfg.expand_library_nodes()
    sdfg.validate()
    with set_temporary("compiler", "cpu", "args", value="-O0"):
        return Compiled(dtype, cases, sdfg.compile())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Variable-length array:UserWarning")
def test_equals_the_reference(compiled: Compiled) -> None:
    """At two sets of sizes, within a rounding of the type: sums are taken in the accumulation type."""
    dtype = compiled.dtype
    for sizes in (SIZES, {letter: 3 if letter in "ST" else 1 for letter in LEGEND}):
        operands = {case.name: draw_operands(case.node, sizes, dtype) for case in compiled.cases}
        outputs = compiled.run(operands, sizes)
        for case in compiled.cases:
            node = case.node
            wide = {k: v.double() if v.is_floating_point() else v for k, v in operands[case.name].items()}
            expected = node.reference(wide)
            for name, value in outputs[case.name].items():
                close = torch.allclose(
                    value.double(),
                    expected[name],
                    rtol=4 * torch.finfo(value.dtype).eps,
                    atol=16 * torch.finfo(dtype.accumulate.torch).eps,
                )
                assert close, f"{case.name}.{name}: {value} is not {expected[name]}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Variable-length array:UserWarning")
def test_drops_what_the_generator_says(compiled: Compiled) -> None:
    """Bit for bit, whatever the layout and the type; the largest probability below one keeps next to nothing."""
    for seed, offset, probability in ((0, 0, 0.5), (-1, 2**62 + 5, 0.1), (2**63 - 1, -7, 0.0), (5, 5, 1 - 2**-40)):
        operands = {case.name: draw_operands(case.node, SIZES, compiled.dtype) for case in compiled.cases}
        drawn = operands["dropout"]
        drawn["x"] = torch.ones_like(drawn["x"])
        drawn["rng"] = torch.tensor([seed, offset])
        drawn["p"] = torch.tensor(probability, dtype=torch.float64)
        y = compiled.run(operands, SIZES)["dropout"]["y"]
        kept = torch.from_numpy(keep_mask(seed, offset, 2, tuple(y.shape), probability))
        assert torch.equal(y != 0, kept)
        scale = 1.0 / (1.0 - probability)
        narrow = torch.tensor(scale, dtype=compiled.dtype.accumulate.torch).to(compiled.dtype.torch)
        assert torch.equal(y[kept], narrow.expand_as(y[kept]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Variable-length array:UserWarning")
def test_nan_and_infinity_pass_through(compiled: Compiled) -> None:
    """NaN stays NaN where PyTorch's does; a row of minus infinities gives zeros."""
    operands = {case.name: draw_operands(case.node, SIZES, compiled.dtype) for case in compiled.cases}
    for case in compiled.cases:
        for name, value in operands[case.name].items():
            if name in ("x", "a") and value.is_floating_point():
                value.view(-1)[0] = math.nan
    row = operands["softmax"]["x"]
    row[0, 0, 1] = -math.inf
    row[0, 1, 0] = math.nan
    outputs = compiled.run(operands, SIZES)
    for case in compiled.cases:
        wide = {k: v.double() if v.is_floating_point() else v for k, v in operands[case.name].items()}
        expected = case.node.reference(wide)
        for name, value in outputs[case.name].items():
            assert torch.equal(value.isnan(), expected[name].isnan()), f"{case.name}.{name}"
    assert torch.equal(outputs["softmax"]["y"][0, 0, 1], torch.zeros_like(row[0, 0, 1]))
