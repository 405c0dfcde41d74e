"""``stepdown compile``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from stepdown.pipeline.commands.layer import ChosenLayer, with_layer
from stepdown.pipeline.commands.terminal import output, print_json, working
from stepdown.pipeline.compiler import CompiledLayer, compile_layer
from stepdown.pipeline.report import duration, stage_records, stage_table
from stepdown.pipeline.toolchain import Optimize


@with_layer
def compile_command(
    *,
    layer: ChosenLayer,
    batch: Annotated[int | None, typer.Option(help="The only batch size B to accept; any by default.")] = None,
    seq: Annotated[int | None, typer.Option(help="The only sequence length S to accept; any by default.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16, or a short form.")] = "float32",
    target: Annotated[str, typer.Option(help="What to compile for.")] = "cpu",
    disable: Annotated[list[str] | None, typer.Option(metavar="PASS", help="Leave a pass out; repeatable.")] = None,
    layouts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON file with the layouts of containers.")
    ] = None,
    memory_budget: Annotated[
        int | None,
        typer.Option(metavar="BYTES", help="The most to keep for the backward pass; the rest is recomputed."),
    ] = None,
    optimize: Annotated[Optimize, typer.Option(help="For speed, or for quick builds.")] = "release",
    no_build: Annotated[bool, typer.Option("--no-build", help="Stop before the compiler.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Where to write the build; else into the cache."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile a layer's training step into a build, and show what each stage did."""
    start = time.perf_counter()
    with working(f"compiling {layer.name}") as report:
        compiled = compile_layer(
            layer.layer,
            batch=batch,
            seq=seq,
            dtype=dtype,
            target=target,
            disable=disable or (),
            layouts=layouts,
            memory_budget=memory_budget,
            build=not no_build,
            optimize=optimize,
            output=folder,
            progress=lambda stage: report(f"compiling {layer.name}: {stage}"),
        )
        manifest = compiled.manifest
    seconds = time.perf_counter() - start
    if as_json:
        print_json(
            {
                "layer": manifest["layer"],
                "path": str(compiled.path),
                "key": manifest["key"],
                "cached": compiled.cached,
                "seconds": seconds,
                "stages": stage_records(manifest),
            }
        )
        return
    console = output()
    console.print(stage_table(manifest))
    console.print(_conclusion(compiled, seconds, no_build), markup=False, soft_wrap=True)


def _conclusion(compiled: CompiledLayer, seconds: float, no_build: bool) -> str:
    source = "from the cache" if compiled.cached else "without a library" if no_build else "compiled"
    return f"BUILD {compiled.path}\n{source}, {duration(seconds)}"
