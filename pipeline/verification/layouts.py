"""Drawn layouts: every container of a training graph in any order, some padded.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stepdown.models.operators import Relayout
from stepdown.transformations.canonical_form import operators, the_state
from stepdown.transformations.layout.layouts import logical_dims
from stepdown.transformations.training_graph import TrainingGraph

PADS = (1, 2, 3, 8, 16)


def draw_layouts(
    graph: TrainingGraph, generator: np.random.Generator, *, share: float = 1.0, padded: float = 0.3
) -> dict[str, Any]:
    """A configuration of layouts, as ``AssignLayouts`` reads it.

    :param share: how many of the containers get a layout; ``padded``: how many strides of those are padded.
    """
    dims: dict[str, str] = {}
    for _, sdfg in graph.graphs():
        made = {
            edge.data.data
            for node in operators(sdfg)
            if isinstance(node, Relayout)
            for edge in the_state(sdfg).all_edges(node)
        }
        dims |= {name: found for name, found in logical_dims(sdfg).items() if found and name not in made}
    containers: dict[str, Any] = {}
    for name in sorted(dims):
        if generator.random() >= share:
            continue
        order = "".join(generator.permutation(list(dims[name])))
        pad = {letter: int(generator.choice(PADS)) for letter in order[:-1] if generator.random() < padded}
        containers[name] = {"order": order, "pad": pad} if pad else order
    return {"containers": containers}
