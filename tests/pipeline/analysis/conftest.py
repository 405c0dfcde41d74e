"""A build of a small layer without libraries, for the analysis of stages."""

import pytest

from stepdown.models.definition import EncoderLayer
from stepdown.pipeline import compile_layer
from stepdown.pipeline.build_folder import BuildFolder, read_build


@pytest.fixture(scope="session")
def stages_build(session_cache: object, strict_dace_session: None) -> BuildFolder:
    """Every stage of a small layer with symbolic sizes, every pass on."""
    return read_build(compile_layer(EncoderLayer(embed=32, heads=4, ffn=64), build=False).path)
