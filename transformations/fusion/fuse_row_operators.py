"""``FuseRowOperators``: row and element-wise operators that share data become row groups, one kernel each.

Groups grow along chains and between siblings that read the same data, the pair that saves the most bytes first; what is
legal follows from the dataflow (:class:`stepdown.transformations.fusion.plan_row_groups.RowGroupPlanner`).

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from dataclasses import dataclass

from dace.sdfg import SDFG

from stepdown.models.operators import RowGroup
from stepdown.models.operators.operator import make_memlet
from stepdown.transformations.canonical_form import the_state
from stepdown.transformations.fusion.plan_row_groups import Group, RowGroupPlanner, containers_of, uses_of
from stepdown.transformations.training_graph import TrainingGraph


@dataclass(frozen=True)
class FuseRowOperators:
    """The pass; ``fuse-row-operators`` on the command line.

    :ivar siblings: also fuse operators that only read the same data.
    """

    siblings: bool = True

    def apply(self, graph: TrainingGraph) -> tuple[TrainingGraph, str]:
        """Fuse in place; returns the graph and a line about what changed."""
        before = after = 0
        for _, sdfg in graph.graphs():
            containers = containers_of(sdfg)
            planner = RowGroupPlanner(uses_of(sdfg, containers), containers, self.siblings)
            before += sum(len(group.members) for group in planner.groups)
            after += len(planner.groups)
            for group in planner.groups:
                if len(group.members) > 1:
                    _write(sdfg, planner, group)
        return graph, f"{before} row and element-wise operators in {after} kernels"


def _write(sdfg: SDFG, planner: RowGroupPlanner, group: Group) -> None:
    """Replace the members of a group by one node."""
    state = the_state(sdfg)
    members = [planner.uses[place].operator for place in group.members]
    node = RowGroup(f"{members[0].name}__{members[-1].name}", planner.members(group), planner.outputs(group))
    access = {n.data: n for n in state.data_nodes() if n.data in group.reads | group.writes}
    outputs = set(node.out_connectors)
    state.remove_nodes_from(members)
    state.add_node(node)
    for value in node.in_connectors:
        state.add_edge(access[value], None, node, value, make_memlet(sdfg, value))
    for value in sorted(group.writes):
        if value in outputs:
            state.add_edge(node, value, access[value], None, make_memlet(sdfg, value))
        else:
            state.remove_node(access[value])
            sdfg.remove_data(value)
