"""The base of the vocabulary: an operator is a DaCe library node with dimensions, counts, semantics and a gradient.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
N projection in a stack. S and T of self-attention are one extent under two names; ``2`` is the pair (seed, offset) of
the dropout generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

import dace
import sympy
import torch
from dace import data, properties, subsets
from dace.sdfg import SDFG, SDFGState
from dace.sdfg.nodes import LibraryNode

from stepdown.models.dtypes import DataType, resolve_dtype
from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.statements import Statement

LEGEND = "BSTHPEUN"
STACK = "N"
"""The dimension that numbers the members of a stack; an edge may fix it to one of them."""

PAIR = "2"
SAME_EXTENT = {"T": "S"}


class OperatorClass(Enum):
    """The paper's three classes (Table 1)."""

    CONTRACTION = "contraction"
    STATISTICAL_NORMALIZATION = "statistical normalization"
    ELEMENT_WISE = "element-wise"


def canonical_dims(dims: str) -> str:
    """``dims`` with key positions written as query positions: what two operators must agree on for one container."""
    return "".join(SAME_EXTENT.get(letter, letter) for letter in dims)


BOOLEAN = DataType("bool", "bool", torch.bool, dace.bool_, 1)
"""The type of masks. No layer is computed in it; where a mask passes through arithmetic, 0 and 1 stay exact."""


def data_type(descriptor: data.Data) -> DataType:
    """The project's name of a container's scalar type."""
    return BOOLEAN if descriptor.dtype == dace.bool_ else resolve_dtype(descriptor.dtype.to_string())


@properties.make_properties
class Operator(LibraryNode):
    """A node of the canonical form (``docs/canonical_form.md``, rule 1).

    Subclasses give ``operand_dims``, ``infer``, ``reference``, ``differentiate``, and either ``statements`` (row and
    element-wise operators) or counts of their own (the contraction).
    """

    operator_class: ClassVar[OperatorClass]
    inputs: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ()
    extra_outputs: ClassVar[tuple[str, ...]] = ()
    implementations: dict[str, Any] = {}
    default_implementation: str | None = "pure"

    dims = properties.Property(dtype=str, default="", desc="Dimensions that the operator iterates over, legend letters")

    def __init__(self, name: str, dims: str = "", **kwargs: Any) -> None:
        super().__init__(name, inputs=set(self.inputs), outputs=set(self.outputs), **kwargs)
        for letter in dims:
            if letter not in LEGEND:
                raise CanonicalFormError(f'dimension "{letter}" of operator "{name}" is not one of "{LEGEND}"')
        if len(set(dims)) != len(dims):
            raise CanonicalFormError(f'dimensions "{dims}" of operator "{name}" name a dimension twice')
        self.dims = dims

    # ---- what a subclass says -------------------------------------------------------------------------------------

    def operand_dims(self) -> dict[str, str]:
        """Dimensions of every connector's container, in the container's logical order."""
        raise NotImplementedError(type(self).__name__)

    def result_types(self, operand: DataType) -> dict[str, DataType]:
        """Scalar type of each output when the main operand has type ``operand``.

        Outputs have the operand's type and extra outputs (statistics kept for the gradient) the accumulation type,
        unless overridden.
        """
        types = dict.fromkeys(self.outputs, operand)
        return types | dict.fromkeys(self.extra_outputs, operand.accumulate)

    def statements(self) -> tuple[Statement, ...]:
        """The operator as scalar formulas; empty for a contraction."""
        return ()

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every output in plain PyTorch, at the precision of the operands, written apart from the formulas."""
        raise NotImplementedError(type(self).__name__)

    def differentiate(self, rule: Any) -> None:
        """Write the gradient of each required input as operators (see :mod:`stepdown.models.operators.gradient`)."""
        raise NotImplementedError(type(self).__name__)

    # ---- what follows from it -------------------------------------------------------------------------------------

    @property
    def main_operand(self) -> str:
        """The connector whose scalar type decides the operator's."""
        return self.inputs[0]

    def sizes(self, sdfg: SDFG, state: SDFGState) -> dict[str, Any]:
        """Extent of every dimension, read off the connected containers.

        :raises CanonicalFormError: when two containers disagree, or a container's rank is not its operand's.
        """
        found: dict[str, Any] = {}
        for connector, subset_shape in self.connected_shapes(sdfg, state).items():
            self.match_sizes(found, connector, subset_shape)
        return found

    def match_sizes(self, found: dict[str, Any], connector: str, shape: tuple[Any, ...]) -> None:
        """Add the extents of one operand to ``found`` and refuse disagreement."""
        dims = self.operand_dims()[connector]
        if len(shape) != len(dims):
            raise CanonicalFormError(
                f'operand "{connector}" of operator "{self.name}" has {len(shape)} dimensions, "{dims}" takes '
                f"{len(dims)}"
            )
        for letter, extent in zip(dims, shape, strict=True):
            if found.setdefault(letter, extent) != extent:
                raise CanonicalFormError(
                    f'dimension "{letter}" of operator "{self.name}" is {found[letter]} in one operand and {extent} in '
                    f'operand "{connector}"'
                )

    def connected_shapes(self, sdfg: SDFG, state: SDFGState) -> dict[str, tuple[Any, ...]]:
        """Logical shape that each connector sees: its container's, less the dimensions its edge fixes to an index."""
        shapes: dict[str, tuple[Any, ...]] = {}
        for edge in state.all_edges(self):
            connector = edge.dst_conn if edge.dst is self else edge.src_conn
            if connector is None or edge.data.is_empty():
                continue
            descriptor = sdfg.arrays[edge.data.data]
            if isinstance(descriptor, data.Scalar):
                shapes[connector] = ()
                continue
            extents = edge.data.subset.size()
            dims = self.operand_dims()[connector]
            fixed = fixed_axes(extents, descriptor.shape, len(dims))
            if fixed is None:
                raise CanonicalFormError(
                    f'operand "{connector}" of operator "{self.name}" has {len(extents)} dimensions, "{dims}" '
                    f"takes {len(dims)} and a constant index for each further one"
                )
            shapes[connector] = tuple(extent for axis, extent in enumerate(extents) if axis not in fixed)
        return shapes

    def infer(self, operands: Mapping[str, data.Data]) -> dict[str, tuple[tuple[Any, ...], DataType]]:
        """Shape rule and dtype rule: logical shape and scalar type of every output from the inputs' descriptors.

        :raises CanonicalFormError: when the operands' shapes or types do not fit the operator.
        """
        found: dict[str, Any] = {}
        for connector, descriptor in operands.items():
            shape = () if isinstance(descriptor, data.Scalar) else tuple(descriptor.shape)
            self.match_sizes(found, connector, shape)
        types = self.result_types(data_type(operands[self.main_operand]))
        dims = self.operand_dims()
        return {
            name: (tuple(2 if letter == PAIR else found[letter] for letter in dims[name]), types[name])
            for name in types
        }

    def flop(self, sizes: Mapping[str, Any]) -> sympy.Expr:
        """Floating-point operations (counting rule: ``docs/counting.md``)."""
        total = sympy.Integer(0)
        for statement in self.statements():
            over = self.dims if statement.reduction is not None else statement.dims
            total += statement.flop() * extent_product(over, sizes)
        return total

    def words(self, sizes: Mapping[str, Any], connectors: tuple[str, ...]) -> sympy.Expr:
        """Words (elements, whatever their width) in the containers of ``connectors``."""
        dims = self.operand_dims()
        return sum((extent_product(dims[name], sizes) for name in connectors), start=sympy.Integer(0))

    def words_in(self, sizes: Mapping[str, Any]) -> sympy.Expr:
        """Words read, each distinct input once."""
        return self.words(sizes, tuple(sorted(self.in_connectors)))

    def words_out(self, sizes: Mapping[str, Any]) -> sympy.Expr:
        """Words written, each output once."""
        return self.words(sizes, tuple(sorted(self.out_connectors)))


def fixed_axes(extents: Sequence[Any], shape: Sequence[Any], rank: int) -> tuple[int, ...] | None:
    """The dimensions of a container that a subset fixes to an index, so that an operand of ``rank`` is left.

    :param extents: extents of the subset; ``shape``: those of the container.
    :returns: their places in order; None where more or fewer dimensions than ``rank`` are left.
    """
    excess = len(shape) - rank
    if excess <= 0:
        return ()
    single = [axis for axis, extent in enumerate(extents) if extent == 1]
    fixed = [axis for axis in single if shape[axis] != 1]
    fixed += [axis for axis in single if axis not in fixed][: max(excess - len(fixed), 0)]
    return tuple(sorted(fixed)) if len(fixed) == excess else None


def check_number(name: str, field: str, value: float, *, least: float = -math.inf) -> float:
    """Refuse a constant that no formula can hold: its text must be a number.

    :raises CanonicalFormError: unless ``value`` is finite and at least ``least``.
    """
    if not math.isfinite(value) or value < least:
        limit = "" if least == -math.inf else f" of at least {least:g}"
        raise CanonicalFormError(f'{field}={value} of operator "{name}" is not a finite number{limit}')
    return float(value)


def extent_product(dims: str, sizes: Mapping[str, Any]) -> sympy.Expr:
    """Number of elements of a container with dimensions ``dims``."""
    total = sympy.Integer(1)
    for letter in dims:
        total *= 2 if letter == PAIR else sizes[letter]
    return sympy.sympify(total)


def broadcast(tensor: torch.Tensor, dims: str, over: str) -> torch.Tensor:
    """``tensor`` with dimensions ``dims`` made broadcastable against one with dimensions ``over``."""
    order = [dims.index(letter) for letter in over if letter in dims]
    index = tuple(slice(None) if letter in dims else None for letter in over)
    return tensor.permute(order)[index]


def add_container(sdfg: SDFG, name: str, shape: tuple[Any, ...], dtype: DataType, *, transient: bool = True) -> str:
    """Add a container in the default layout (row-major) under ``name`` or the next free name."""
    name, _ = sdfg.add_array(name, shape, dtype.dace, transient=transient, find_new_name=True)
    return name


def make_memlet(sdfg: SDFG, name: str) -> dace.Memlet:
    """The whole container."""
    return dace.Memlet.from_array(name, sdfg.arrays[name])


def part_memlet(sdfg: SDFG, name: str, axis: int, index: int) -> dace.Memlet:
    """The part of a container at one index of a dimension."""
    whole = make_memlet(sdfg, name)
    ranges = list(whole.subset.ranges)
    ranges[axis] = (index, index, 1)
    return dace.Memlet(data=name, subset=subsets.Range(ranges))
