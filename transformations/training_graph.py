"""The object that passes take and return: two graphs and what the first keeps for the second."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from dace.sdfg import SDFG


@dataclass(frozen=True)
class TrainingGraph:
    """A layer's forward graph, its backward graph, and the containers kept between them (canonical form, rule 4).

    ``backward`` is None before differentiation and for inference. ``kept`` names containers that forward writes and
    backward reads; the layer's own inputs and outputs are not among them. ``stacks`` says which parameters, in order,
    an argument holds that was made of several of equal shape; its gradient, where backward has it, holds theirs.
    """

    forward: SDFG
    backward: SDFG | None = None
    kept: tuple[str, ...] = ()
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def graphs(self) -> Iterator[tuple[str, SDFG]]:
        """The graphs by direction."""
        yield "forward", self.forward
        if self.backward is not None:
            yield "backward", self.backward

    def copy(self) -> TrainingGraph:
        """A deep copy, so that a stage's graph stays as it was when later passes change theirs."""
        return replace(self, forward=copy.deepcopy(self.forward), backward=copy.deepcopy(self.backward))
