"""Training graphs of layers, differentiated once a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.encoder import OUTPUT, encoder_program
from stepdown.pipeline.stages import merge_reads, remove_unused_arguments
from stepdown.transformations.differentiate import differentiate
from stepdown.transformations.training_graph import TrainingGraph

MakeGraph = Callable[[EncoderLayer], TrainingGraph]
"""A layer's training graph with symbolic sizes in float64."""


@pytest.fixture(scope="session")
def make_graph(strict_dace_session: None) -> MakeGraph:
    """Parses and differentiates each definition once; callers change copies only."""
    made: dict[EncoderLayer, TrainingGraph] = {}

    def make(definition: EncoderLayer) -> TrainingGraph:
        if definition not in made:
            sdfg = encoder_program(definition, None, None, resolve_dtype("float64")).to_sdfg(simplify=True)
            sdfg.replace("__return", OUTPUT)
            merge_reads(sdfg)
            remove_unused_arguments(sdfg)
            parameters = [parameter.container for parameter in definition.parameters().values()]
            made[definition] = differentiate(sdfg, OUTPUT, ["x", *parameters])
        return made[definition]

    return make
