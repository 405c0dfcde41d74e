"""``FuseRowOperators``: row and element-wise operators that share data become row groups, one kernel each.

Groups grow along chains and between siblings that read the same data, the pair that saves the most bytes first; what is
legal follows from the dataflow (:class:`stepdown.transformations.fusion.plan_row_groups.RowGroupPlanner`).

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepdown.models.operators import RowGroup
from stepdown.transformations.fusion.plan_row_groups import RowGroupPlanner, containers_of, uses_of
from stepdown.transformations.fusion.replace_members import replace_members
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
                    members = [planner.uses[place].operator for place in group.members]
                    name = f"{members[0].name}__{members[-1].name}"
                    node = RowGroup(name, planner.members(group), planner.outputs(group))
                    replace_members(sdfg, members, node)
        return graph, f"{before} row and element-wise operators in {after} kernels"
