"""Layouts from the configuration to the module: options and keys, compiled layers in drawn layouts, the command line.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.errors import OptionError
from stepdown.models.operators.philox import keep_mask
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline import compiler
from stepdown.pipeline.analysis.expressions import evaluate
from stepdown.pipeline.cli import app
from stepdown.pipeline.compiler import CompiledLayer, compile_layer
from stepdown.pipeline.runtime import StepdownLayer
from stepdown.pipeline.stages import STAGES, Compilation
from stepdown.pipeline.target import find_target
from stepdown.pipeline.verification.layouts import draw_layouts
from stepdown.transformations.canonical_form import validate
from stepdown.transformations.layout.assign_layouts import conversions

LAYER = EncoderLayer(embed=12, heads=2, ffn=10, dropout=0.2, attention_dropout=0.3, activation_dropout=0.1)
OTHER = EncoderLayer(
    embed=8, heads=2, ffn=6, norm="pre", causal=True, bias=False, activation="relu", dropout=0.0, attention_dropout=0.0
)
LAYOUTS = {"containers": {"hidden": {"order": "ESB", "pad": 16}, "x": "SBE", "output_weight": "UE", "y": "ESB"}}


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> CompiledLayer:
    """A build without libraries, and the layouts of four containers."""
    return compile_layer(LAYER, layouts=LAYOUTS, build=False, output=tmp_path_factory.mktemp("laid_out"))


def drawn(definition: EncoderLayer, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Layouts of every container that the layer has before ``layout``."""
    sizes = (options.get("batch"), options.get("seq"))
    compilation = Compilation(definition, *sizes, resolve_dtype("float64"), find_target("cpu"), "drawn")
    for stage in STAGES[: [stage.name for stage in STAGES].index("layout")]:
        for name, run in stage.passes:
            if name not in options.get("disable", ()):
                run(compilation)
    assert compilation.graph is not None
    return draw_layouts(compilation.graph, np.random.default_rng(seed))


# ---- compiled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("definition", "options", "sizes"),
    [
        (LAYER, {}, [(2, 5), (1, 1), (3, 17)]),
        (OTHER, {"batch": 2, "seq": 5}, [(2, 5)]),
    ],
    ids=["every pass", "fixed sizes"],
)
def test_a_layer_in_drawn_layouts_computes_what_pytorch_does(
    definition: EncoderLayer, options: dict[str, Any], sizes: list[tuple[int, int]], tmp_path: Path
) -> None:
    layouts = drawn(definition, 3, options)
    compiled = compile_layer(definition, dtype="float64", layouts=layouts, optimize="light", output=tmp_path, **options)
    layer = compiled.to_torch()
    reference = ReferenceEncoderLayer(definition).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.4)
    reference.load_state_dict(layer.state_dict())
    for batch, seq in sizes:
        for training in (False, True):
            compare(layer.train(training), reference.train(training), definition, batch, seq)


def compare(layer: StepdownLayer, reference: torch.nn.Module, definition: EncoderLayer, batch: int, seq: int) -> None:
    """Output and every gradient at one batch and length, with the layer's own dropout masks."""
    x = torch.randn(batch, seq, definition.embed, dtype=torch.float64)
    given = torch.randn_like(x)
    mask = torch.rand(batch, seq) > 0.3
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = layer(first, mask)
    keep = None
    if layer.training and layer.last_rng is not None:
        shapes = {
            0: ((batch, definition.heads, seq, seq), definition.attention_dropout),
            1: (x.shape, definition.dropout),
            2: ((batch, seq, definition.ffn), definition.activation_dropout),
            3: (x.shape, definition.dropout),
        }
        draw, offset = layer.last_rng.tolist()
        keep = {n: torch.from_numpy(keep_mask(draw, offset, n, tuple(shape), p)) for n, (shape, p) in shapes.items()}
    expected = reference(second, mask, keep=keep)
    pairs = [(y, expected)]
    parameters = list(layer.parameters())
    found = torch.autograd.grad(y, [first, *parameters], given)
    pairs += zip(found, torch.autograd.grad(expected, [second, *reference.parameters()], given), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


# ---- options -------------------------------------------------------------------------------------------------------


def test_layouts_are_options_of_a_build(laid_out: CompiledLayer) -> None:
    pads = {"order": "ESB", "pad": {"S": 16}}
    expected = {"containers": {**LAYOUTS["containers"], "hidden": pads}}
    assert laid_out.manifest["options"]["layouts"] == expected
    stages = {stage["name"]: stage for stage in laid_out.manifest["stages"]}
    names = list(stages)
    assert names[names.index("layout") + 1] == "lower"
    assert stages["layout"]["passes"][0]["name"] == "assign-layouts"
    assert "4 containers in chosen layouts, 5 conversions that move" in stages["layout"]["what"]
    assert stages["layout"]["kernels"] == stages[names[names.index("layout") - 1]]["kernels"] + 5


def test_layouts_are_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal layouts have one key, however they are spelled."""
    keys: list[str] = []

    def note_key(options: object, key: str, folder: Path, progress: object) -> None:
        keys.append(key)
        (folder / "manifest.json").write_text("{}")

    monkeypatch.setattr(compiler, "_build", note_key)
    file = tmp_path / "layouts.json"
    spelled = {"containers": {**LAYOUTS["containers"], "hidden": {"order": "ESB", "pad": {"S": 16, "E": 1}}}}
    file.write_text(json.dumps(spelled))
    sources: tuple[dict[str, Any] | Path | None, ...] = (LAYOUTS, file, None, {"containers": {}})
    for number, layouts in enumerate(sources):
        compile_layer(LAYER, layouts=layouts, build=False, output=tmp_path / str(number))
    given, same, none, empty = keys
    assert given == same != none == empty


def test_the_saved_graph_has_the_layouts(laid_out: CompiledLayer) -> None:
    graph = laid_out.stage("layout")
    validate(graph)
    assert str(graph.forward.arrays["hidden"].strides) == "(1, 16*int_ceil(B, 16), 16*S*int_ceil(B, 16))"
    assert {found.source for found in conversions(graph.forward)} == {"x", "output_weight", "y_converted"}


def test_padding_counts_as_memory_that_is_kept(laid_out: CompiledLayer) -> None:
    """The B elements at each position of "hidden" take a multiple of 16: what is kept is the span."""
    graph = laid_out.stage("layout")
    assert "hidden" in graph.kept
    assert str(graph.forward.arrays["hidden"].total_size) == "192*S*int_ceil(B, 16)"
    names = laid_out.manifest["stages"]
    place = [stage["name"] for stage in names].index("layout")
    sizes = {"B": 2, "S": 5}
    before, after = (evaluate(names[number]["kept_bytes"], sizes) for number in (place - 1, place))
    assert isinstance(before, int)
    assert after == before + 4 * 12 * 5 * (16 - 2)


def test_layouts_without_their_pass_are_refused() -> None:
    with pytest.raises(OptionError, match='the pass "assign-layouts" was switched off; accepted is one of both'):
        compile_layer(LAYER, layouts=LAYOUTS, disable=["assign-layouts"], build=False)


def test_a_container_that_passes_removed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match='layout of container "padded" was given; the layer accepts layouts of "'):
        compile_layer(LAYER, layouts={"containers": {"padded": "THSB"}}, build=False, output=tmp_path)


# ---- the command line ----------------------------------------------------------------------------------------------


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2
    return result.stderr


def test_compile_reads_a_file_of_layouts(tmp_path: Path) -> None:
    layer = ("--embed", 8, "--heads", 2, "--ffn", 6, "--no-build", "-o", tmp_path / "build")
    file = tmp_path / "layouts.json"
    assert "cannot be read" in refused("compile", *layer, "--layouts", file)
    file.write_text('{"containers": {"hidden": "BHST"}}')
    message = refused("compile", *layer, "--layouts", file)
    assert message == 'stepdown: order "BHST" of container "hidden" was given; accepted is any order of "BSE".\n'
    file.write_text('{"containers": {"hidden": "ESB"}}')
    assert "1 containers in chosen layouts" in call("compile", *layer, "--layouts", file)


def test_inspect_shows_layouts_and_conversions(laid_out: CompiledLayer) -> None:
    shown = call("inspect", laid_out.path, "--layouts", "--batch", 2, "--seq", 5)
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert rows["hidden"][1:7] == ["both", "kept", "BSE", "ESB", "S:", "14"]
    assert rows["x"][1:5] == ["both", "argument", "BSE", "BSE"]
    assert rows["x_converted"][2:5] == ["temporary", "BSE", "SBE"]
    assert rows["output_weight_relayout"][1:] == [
        *("backward", "output_weight", "EU", "output_weight_converted", "UE"),
        *("960", "B"),
    ]
    assert rows["5"][:2] == ["5", "conversions,"]
    before = call("inspect", laid_out.path, "--layouts", "--stage", "differentiate")
    assert "No conversions." in before


def test_inspect_gives_layouts_as_json(laid_out: CompiledLayer) -> None:
    printed = json.loads(call("inspect", laid_out.path, "--layouts", "--json", "--batch", 2, "--seq", 5))
    layouts = printed["layouts"]
    (hidden,) = [container for container in layouts["containers"] if container["name"] == "hidden"]
    assert {
        name: hidden[name] for name in ("graphs", "kind", "dtype", "dims", "order", "strides", "padding", "bytes")
    } == {
        "graphs": ["forward", "backward"],
        "kind": "kept",
        "dtype": "float32",
        "dims": "BSE",
        "order": "ESB",
        "strides": [1, 16, 80],
        "padding": {"S": 14},
        "bytes": 4 * 16 * 5 * 12,
    }
    assert hidden["written_by"]
    assert hidden["read_by"]
    moved = {(found["name"], found["graph"]): found["bytes_moved"] for found in layouts["conversions"]}
    activations, weight = 2 * 4 * 2 * 5 * 12, 2 * 4 * 120
    assert moved == {
        ("x_relayout", "forward"): activations,
        ("x_relayout", "backward"): activations,
        ("y_relayout", "forward"): activations,
        ("output_weight_relayout", "forward"): weight,
        ("output_weight_relayout", "backward"): weight,
    }
    assert layouts["conversion_bytes"] == sum(moved.values())
    assert "layouts" not in json.loads(call("inspect", laid_out.path, "--json"))


def test_lowered_stages_have_no_layouts_to_show(laid_out: CompiledLayer) -> None:
    message = refused("inspect", laid_out.path, "--layouts", "--stage", "lower")
    assert "the canonical form takes one" in message
