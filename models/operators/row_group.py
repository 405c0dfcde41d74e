"""Groups: several operators as one. A row group holds row and element-wise operators and runs as one kernel.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import dace.library
import torch
from dace import properties

from stepdown.models.dtypes import DataType
from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.activation import Gelu, GeluGradient, Relu, ReluGradient
from stepdown.models.operators.contraction import Contraction
from stepdown.models.operators.dropout import Dropout
from stepdown.models.operators.element_wise import Add, Bias, CausalMask, KeyPaddingMask, Scale, SumRows
from stepdown.models.operators.normalization import (
    LayerNorm,
    LayerNormGradient,
    LayerNormParameterGradient,
    Softmax,
    SoftmaxGradient,
)
from stepdown.models.operators.operator import Operator, OperatorClass
from stepdown.models.operators.statements import Statement

MEMBER_KINDS: dict[str, type[Operator]] = {
    kind.__name__: kind
    for kind in (
        Add, Bias, CausalMask, Dropout, Gelu, GeluGradient, KeyPaddingMask, LayerNorm, LayerNormGradient,
        LayerNormParameterGradient, Relu, ReluGradient, Scale, Softmax, SoftmaxGradient, SumRows,
    )
}  # fmt: skip
"""Operators that a group may hold, by class name."""


@dataclass(frozen=True)
class Member:
    """An operator of a group and the value that each of its connectors reads or writes."""

    operator: Operator
    values: Mapping[str, str]

    @property
    def outputs(self) -> list[str]:
        """Connectors that the member writes and that are used."""
        names = (*self.operator.outputs, *self.operator.extra_outputs)
        return [connector for connector in names if connector in self.values]

    @property
    def inputs(self) -> list[str]:
        """Connectors that the member reads."""
        return [connector for connector in self.values if connector not in self.outputs]


@properties.make_properties
class Group(Operator):
    """Members in order, as one operator. Connectors are named after the values that members read and write: inputs that
    no member writes, and those written values that are asked for.
    """

    kinds: ClassVar[tuple[type[Operator], ...]] = tuple(MEMBER_KINDS.values())
    """Operators that a group of this kind may hold."""

    text = properties.Property(dtype=str, default="[]", desc="Members as JSON: kind, name, options, values")

    def __init__(self, name: str, dims: str, members: Iterable[Member], **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        self.text = members_to_text(members)
        written = self.written_values()
        for value in self.operand_dims():
            if value not in written:
                self.add_in_connector(value)

    @property
    def members(self) -> tuple[Member, ...]:
        """The operators of the group, in order."""
        return members_from_text(self.text, self.kinds)

    def written_values(self) -> set[str]:
        """Values that some member writes."""
        return {member.values[connector] for member in self.members for connector in member.outputs}

    def operand_dims(self) -> dict[str, str]:
        dims: dict[str, str] = {}
        for member in self.members:
            own = member.operator.operand_dims()
            for connector, value in member.values.items():
                dims.setdefault(value, own[connector])
        return dims

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        values = dict(operands)
        for member in self.members:
            results = member.operator.reference({c: values[member.values[c]] for c in member.inputs})
            values |= {member.values[connector]: results[connector] for connector in member.outputs}
        return {name: values[name] for name in self.out_connectors}

    def differentiate(self, rule: Any) -> None:
        raise CanonicalFormError(f'group "{self.name}" has no gradient rule; differentiate before operators are fused')


@dace.library.node
class RowGroup(Group):
    """Row and element-wise operators; a value that one writes and another reads stays in registers or in cache.

    Values inside the group keep the accumulation type, whatever the containers' type.
    """

    operator_class = OperatorClass.STATISTICAL_NORMALIZATION
    implementations: dict[str, Any] = {}

    def __init__(
        self, name: str = "row_group", members: Iterable[Member] = (), outputs: Iterable[str] = (), **kwargs: Any
    ):
        listed = list(members)
        dims = listed[0].operator.dims if listed else "E"
        for member in listed:
            if member.operator.dims != dims:
                raise CanonicalFormError(
                    f'member "{member.operator.name}" of group "{name}" runs over "{member.operator.dims}", '
                    f'the group over "{dims}"'
                )
        super().__init__(name, dims, listed, **kwargs)
        written = self.written_values()
        for value in outputs:
            if value not in written:
                raise CanonicalFormError(f'no member of group "{name}" writes "{value}"')
            self.add_out_connector(value)

    @property
    def main_operand(self) -> str:
        """An input whose scalar type is the group's: what the first member takes its own from."""
        first = self.members[0]
        return first.values[first.operator.main_operand]

    def result_types(self, operand: DataType) -> dict[str, DataType]:
        types: dict[str, DataType] = {}
        for member in self.members:
            own = member.operator.result_types(operand)
            types |= {member.values[connector]: own[connector] for connector in member.outputs}
        return {name: types[name] for name in sorted(self.out_connectors)}

    def statements(self) -> tuple[Statement, ...]:
        statements: list[Statement] = []
        for member in self.members:
            prefix = f"{member.operator.name}_"
            names = dict(member.values)
            for statement in member.operator.statements():
                names.setdefault(statement.target, prefix + statement.target)
            statements += [statement.renamed(names) for statement in member.operator.statements()]
        return tuple(statements)


def members_to_text(members: Iterable[Member]) -> str:
    """Members as JSON: each one's kind, name, options and values."""
    return json.dumps([_to_json(member) for member in members])


def _to_json(member: Member) -> dict[str, Any]:
    operator = member.operator
    base = {prop.attr_name for prop in Operator.__properties__.values()} - {"dims"}
    if isinstance(operator, Contraction):  # its dimensions follow from its einsum
        base.add("dims")
    options = {prop.attr_name: value for prop, value in operator.properties() if prop.attr_name not in base}
    return {"kind": type(operator).__name__, "name": operator.name, "options": options, "values": dict(member.values)}


@lru_cache(maxsize=1024)
def members_from_text(text: str, kinds: tuple[type[Operator], ...]) -> tuple[Member, ...]:
    """The members that :func:`members_to_text` wrote.

    :raises CanonicalFormError: when an operator is not of one of the ``kinds``.
    """
    accepted = {kind.__name__: kind for kind in kinds}
    members = []
    for entry in json.loads(text):
        if entry["kind"] not in accepted:
            raise CanonicalFormError(f'a group may not hold the operator "{entry["kind"]}"')
        operator = accepted[entry["kind"]](name=entry["name"], **entry["options"])
        members.append(Member(operator, entry["values"]))
    return tuple(members)
