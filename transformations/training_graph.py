"""The object that passes take and return: two graphs and what the first keeps for the second."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

from dace.sdfg import SDFG


@dataclass(frozen=True)
class TrainingGraph:
    """A layer's forward graph, its backward graph, and the containers kept between them (canonical form, rule 4).

    ``backward`` is None before differentiation and for inference. ``kept`` names containers that forward writes and
    backward reads; the layer's own inputs and outputs are not among them.
    """

    forward: SDFG
    backward: SDFG | None = None
    kept: tuple[str, ...] = ()

    def graphs(self) -> Iterator[tuple[str, SDFG]]:
        """The graphs by direction."""
        yield "forward", self.forward
        if self.backward is not None:
            yield "backward", self.backward

    def copy(self) -> TrainingGraph:
        """A deep copy, so that a stage's graph stays as it was when later passes change theirs."""
        return TrainingGraph(copy.deepcopy(self.forward), copy.deepcopy(self.backward), self.kept)
