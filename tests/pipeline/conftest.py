"""A build made by hand: small graphs of operators, saved as the compiler saves them, and their manifest."""

import json
import warnings
from pathlib import Path
from typing import Any

import dace
import pytest
from dace.sdfg import SDFG

from stepdown.models.definition import EncoderLayer
from stepdown.models.operators.contraction import Contraction
from stepdown.pipeline import CompiledLayer, compile_layer
from stepdown.pipeline.build_folder import BuildFolder, read_build

KEY = "0123456789abcdef" * 4


def contraction_graph(name: str) -> SDFG:
    """``y[B, S, U] = x[B, S, E] w[U, E]`` with E = 4, U = 8: 64 B S flop, 16 B S + 128 + 32 B S bytes."""
    batch, seq = dace.symbol("B", dace.int32), dace.symbol("S", dace.int32)
    sdfg = SDFG(name)
    sdfg.add_array("x", (batch, seq, 4), dace.float32)
    sdfg.add_array("w", (8, 4), dace.float32)
    sdfg.add_array("y", (batch, seq, 8), dace.float32)
    state = sdfg.add_state()
    node = Contraction("project", "BSE,UE->BSU")
    state.add_node(node)
    for container, connector in (("x", "a"), ("w", "b")):
        memlet = dace.Memlet.from_array(container, sdfg.arrays[container])
        state.add_edge(state.add_read(container), None, node, connector, memlet)
    memlet = dace.Memlet.from_array("y", sdfg.arrays["y"])
    state.add_edge(node, "d", state.add_write("y"), None, memlet)
    return sdfg


def counts(flop: str, moved: str, kept: str, kernels: int = 1, containers: int = 3) -> dict[str, Any]:
    """The counts of one part of a stage."""
    return {
        "kernels": kernels,
        "containers": containers,
        "flop": flop,
        "bytes_moved": moved,
        "kept_bytes": kept,
    }


def manifest(batch: int | None = None, seq: int | None = None) -> dict[str, Any]:
    """The manifest of three stages: parse without a backward pass, differentiate and fuse with one."""
    forward = counts("64*B*S", "48*B*S + 128", "16*B*S")
    backward = counts("128*B*S", "96*B*S + 256", "0", 2, 5)
    both = counts("192*B*S", "144*B*S + 384", "16*B*S", 3, 8)
    parse = counts("64*B*S", "48*B*S + 128", "0")
    fused = {**both, "kernels": 2, "bytes_moved": "72*B*S + 192"}
    return {
        "format": 1,
        "layer": EncoderLayer(embed=4, heads=1, ffn=8).to_dict(),
        "options": {
            "batch": batch,
            "seq": seq,
            "dtype": "float32",
            "target": "cpu",
            "disable": [],
            "optimize": "light",
        },
        "versions": {"dace": "2.0.0b1"},
        "key": KEY,
        "created": "2026-01-02T03:04:05+00:00",
        "sizes": {"B": batch, "S": seq},
        "stages": [
            {
                "name": "parse",
                "seconds": 0.25,
                "validated": True,
                "what": "1 operator from <the program>",
                "passes": [{"name": "simplify", "seconds": 0.125, "what": "2 states became 1"}],
                **parse,
                "forward": parse,
                "backward": None,
            },
            {
                "name": "differentiate",
                "seconds": 1.5,
                "validated": True,
                "what": "2 operators in the backward pass",
                "passes": [],
                **both,
                "forward": forward,
                "backward": backward,
            },
            {
                "name": "fuse",
                "seconds": 0.001,
                "validated": True,
                "what": "one kernel fewer",
                "passes": [
                    {"name": "fuse-first", "seconds": 0.0005, "what": "", **both, "bytes_moved": "108*B*S + 288"},
                    {"name": "fuse-second", "seconds": 0.0005, "what": "", **fused},
                ],
                **fused,
                "forward": forward,
                "backward": {**backward, "kernels": 1, "bytes_moved": "24*B*S + 64"},
            },
        ],
        "abi": {},
    }


@pytest.fixture(scope="session")
def built_layer(session_cache: Path, strict_dace_session: None) -> CompiledLayer:
    """A compiled layer of one kind: post-norm, ReLU, causal, no biases; compiled where every warning is an error."""
    definition = EncoderLayer(
        embed=24, heads=2, ffn=40, activation="relu", activation_dropout=0.1, bias=False, causal=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compile_layer(definition, optimize="light")


@pytest.fixture(scope="session")
def stages_build(session_cache: Path, strict_dace_session: None) -> BuildFolder:
    """Every stage of a small layer with symbolic sizes, every pass on, without libraries."""
    return read_build(compile_layer(EncoderLayer(embed=32, heads=4, ffn=64), build=False).path)


@pytest.fixture(scope="session")
def stage_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder ``stages`` of a build, made once."""
    folder = tmp_path_factory.mktemp("graphs")
    for file in ("00-parse.forward", "01-differentiate.forward", "01-differentiate.backward"):
        graph = contraction_graph(file.split("-")[1].replace(".", "_"))
        graph.save(str(folder / f"{file}.sdfgz"), compress=True)
    return folder


@pytest.fixture
def hand_made_build(tmp_path: Path, stage_graphs: Path) -> Path:
    """A build folder of symbolic sizes; the stage "fuse" has no saved graph."""
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "stages").symlink_to(stage_graphs)
    (folder / "manifest.json").write_text(json.dumps(manifest()))
    return folder


@pytest.fixture
def promised_manifest() -> dict[str, Any]:
    """The manifest of a build for B = 2 only."""
    return manifest(batch=2)
