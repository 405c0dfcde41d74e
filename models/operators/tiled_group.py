"""Tiled group: contractions and the row operators between them that run tile by tile, as attention does.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import dace.library
import sympy

from stepdown.models.dtypes import DataType
from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.contraction import Contraction
from stepdown.models.operators.operator import OperatorClass
from stepdown.models.operators.row_group import Group, Member, RowGroup


@dace.library.node
class TiledGroup(Group):
    """Members in order; values between them exist for one tile of rows at a time and are never written to memory.

    ``dims`` are those of the values in between: the last one numbers the elements of a row (``T``), the one before it
    the rows, which are cut into tiles (``S``), and the others independent problems (``B``, ``H``). Row operators run
    over all of ``dims``. A contraction takes or gives a value in between; its other operands have every outer
    dimension. One that sums over the rows adds up over the tiles.

    Connectors are named after the values: inputs that no member writes, and those written values that are asked for,
    which are results of contractions. Values in between keep the accumulation type.
    """

    operator_class = OperatorClass.CONTRACTION
    implementations: dict[str, Any] = {}
    kinds = (*Group.kinds, Contraction)

    def __init__(
        self,
        name: str = "tiled_group",
        members: Iterable[Member] = (),
        outputs: Iterable[str] = (),
        dims: str = "BHST",
        **kwargs: Any,
    ):
        listed = list(members)
        super().__init__(name, dims, listed, **kwargs)
        for member in listed:
            self._check(member)
        written = self.written_values()
        values = self.operand_dims()
        for value in outputs:
            if value not in written or values[value] == dims:
                raise CanonicalFormError(f'no contraction of group "{name}" gives "{value}" out of its tiles')
            self.add_out_connector(value)
        for member in listed:
            for connector in member.inputs:
                value = member.values[connector]
                if value in written and values[value] != dims:
                    raise CanonicalFormError(
                        f'member "{member.operator.name}" of group "{name}" reads "{value}", which is complete only '
                        f"after all tiles"
                    )

    def _check(self, member: Member) -> None:
        node = member.operator
        if not isinstance(node, Contraction):
            if node.dims != self.dims:
                raise CanonicalFormError(
                    f'member "{node.name}" of group "{self.name}" runs over "{node.dims}", the group over "{self.dims}"'
                )
            return
        own = node.operand_dims()
        if node.accumulate or self.dims not in own.values():
            raise CanonicalFormError(
                f'contraction "{node.name}" of group "{self.name}" must take or give a value over "{self.dims}" and '
                f"add to nothing"
            )
        for connector, dims in own.items():
            if not set(self.outer) <= set(dims):
                raise CanonicalFormError(
                    f'operand "{connector}" of contraction "{node.name}" lacks a dimension of "{self.outer}", over '
                    f'which group "{self.name}" is independent'
                )

    @property
    def outer(self) -> str:
        """Dimensions that number independent problems."""
        return self.dims[:-2]

    def runs(self) -> tuple[Member | RowGroup, ...]:
        """The members in order, row operators that follow each other together: contractions, and groups of the rest.

        A group's outputs are the values that other members read.
        """
        collected: list[Member | list[Member]] = []
        for member in self.members:
            if isinstance(member.operator, Contraction):
                collected.append(member)
            elif collected and isinstance(collected[-1], list):
                collected[-1].append(member)
            else:
                collected.append([member])
        result: list[Member | RowGroup] = []
        for number, run in enumerate(collected):
            if isinstance(run, Member):
                result.append(run)
                continue
            others = [m for place, other in enumerate(collected) if place != number for m in _flat(other)]
            read = {other.values[connector] for other in others for connector in other.inputs}
            written = {member.values[connector] for member in run for connector in member.outputs}
            result.append(RowGroup(f"{self.name}_rows_{number}", run, sorted(read & written)))
        return tuple(result)

    @property
    def main_operand(self) -> str:
        """The first contraction's first operand, which has the containers' scalar type."""
        first = next((m for m in self.members if isinstance(m.operator, Contraction)), self.members[0])
        return first.values[first.operator.main_operand]

    def result_types(self, operand: DataType) -> dict[str, DataType]:
        return dict.fromkeys(sorted(self.out_connectors), operand)

    def flop(self, sizes: Mapping[str, Any]) -> sympy.Expr:
        """Those of the members."""
        return sympy.Add(*(member.operator.flop(sizes) for member in self.members))


def _flat(run: Member | list[Member]) -> list[Member]:
    return [run] if isinstance(run, Member) else run
