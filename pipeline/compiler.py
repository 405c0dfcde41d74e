"""``compile_layer``: from a layer's definition to a folder with its libraries and every stage's graph."""

from __future__ import annotations

import datetime
import gzip
import json
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import dace
import torch
from dace.sdfg import SDFG

import stepdown
from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import DataType, resolve_dtype
from stepdown.models.errors import OptionError
from stepdown.models.presets import Preset
from stepdown.pipeline.analysis.counts import count_kernels
from stepdown.pipeline.analysis.listing import load_graph
from stepdown.pipeline.bind import interface
from stepdown.pipeline.build_folder import FORMAT, MANIFEST, BuildFolder, read_build
from stepdown.pipeline.cache import BuildCache, content_key, sources_digest
from stepdown.pipeline.generate import generate
from stepdown.pipeline.runtime import StepdownLayer
from stepdown.pipeline.runtime.extension import build_extension
from stepdown.pipeline.runtime.manifest import MOST_ELEMENTS
from stepdown.pipeline.stages import (
    OPTIONAL_PASSES,
    Compilation,
    PassRecord,
    StageRecord,
    refuse_other_passes,
    run_stages,
)
from stepdown.pipeline.target import find_target
from stepdown.pipeline.toolchain import Optimize, compile_flags, dace_configuration, toolchain_identity
from stepdown.transformations.layout.configuration import LayoutConfiguration, read_layouts
from stepdown.transformations.lowering import cpu
from stepdown.transformations.lowering.cpu.blas import blas_version
from stepdown.transformations.training_graph import TrainingGraph

Progress = Callable[[str], None]


@dataclass(frozen=True)
class CompiledLayer:
    """A compiled layer: a build folder and what its manifest says.

    :ivar path: the build folder.
    :ivar cached: whether the build was found in the cache.
    """

    definition: EncoderLayer
    dtype: DataType
    batch: int | None
    seq: int | None
    target: str
    path: Path
    cached: bool = False

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The build's manifest."""
        return self._folder.manifest

    @cached_property
    def _folder(self) -> BuildFolder:
        return read_build(self.path)

    def stage(self, name: str) -> TrainingGraph:
        """The graphs after stage ``name``, loaded from the build folder.

        :raises OptionError: when the build has no such stage.
        """
        forward = self._folder.graph_file(name, "forward")
        backward = self._folder.graph_file(name, "backward")
        if forward is None:
            raise OptionError(f'stage "{name}" of the build "{self.path}" has no saved graph.')
        entry = self._folder.stage(name)
        stacks = {stack: tuple(members) for stack, members in entry.get("stacks", {}).items()}
        kept = tuple(entry.get("kept", ()))
        return TrainingGraph(load_graph(forward), None if backward is None else load_graph(backward), kept, stacks)

    def to_torch(self, **options: Any) -> StepdownLayer:
        """A PyTorch module that runs the libraries; several modules share them.

        :param options: as for :class:`stepdown.pipeline.runtime.StepdownLayer`.
        :raises BuildError: when the build holds no libraries.
        """
        return StepdownLayer(self.path, **options)


def compile_layer(
    layer: EncoderLayer | Preset,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | torch.dtype | DataType = "float32",
    target: str = "cpu",
    disable: Iterable[str] = (),
    layouts: LayoutConfiguration | Mapping[str, Any] | str | Path | None = None,
    memory_budget: int | None = None,
    stack: int | None = None,
    build: bool = True,
    optimize: Optimize = "release",
    cache: BuildCache | None = None,
    output: str | Path | None = None,
    progress: Progress = lambda stage: None,
) -> CompiledLayer:
    """Compile a layer's training step.

    :param layer: the definition, or a preset, whose layer is taken.
    :param batch: the batch size that the code may rely on; None takes any. Likewise ``seq``, the sequence length.
    :param dtype: element type of data and parameters; sums and statistics are taken in float32, or float64.
    :param disable: names of optional passes to leave out.
    :param layouts: layouts by container, a mapping or the path of a JSON file
        (:mod:`stepdown.transformations.layout.configuration`); the default ones by default.
    :param memory_budget: most bytes that the forward pass may keep for the backward pass, which computes again what
        does not fit; counted at B=8 and S=512 where a size is not fixed. None recomputes only what costs no memory
        traffic.
    :param stack: at most so many projections of one input (Q, K and V) become one contraction; None for all, 2 for Q
        and K only. Switch off the pass "stack-projections" for none.
    :param build: False stops before the compiler: the folder holds the stages' graphs only.
    :param optimize: "release" for speed, "light" for quick builds.
    :param cache: where builds are kept and found again; the user's own by default.
    :param output: write the build into this folder, which must be new, empty or a build, instead of the cache. Only a
        complete build gets there; a build that is there stays until then.
    :param progress: called with the name of each stage that begins, and with "extension" when the runtime's part in C++
        is compiled, once on a machine.
    :returns: the build, from the cache where it holds one of the same content.
    :raises OptionError: for an unknown dtype, target or pass, impossible sizes, layouts that do not fit the layer, or
        a memory budget that no choice can meet.
    :raises BuildError: when the compiler is missing or fails.
    :raises CacheError: when the cache's folder cannot be written.
    """
    definition = layer.layer if isinstance(layer, Preset) else layer
    if not isinstance(definition, EncoderLayer):
        raise OptionError(f'layer {layer!r} was given; accepted are an "EncoderLayer" or a "Preset".')
    options = _Options(
        definition,
        _size("batch", batch),
        _size("seq", seq),
        resolve_dtype(dtype),
        find_target(target).name,
        _passes(disable),
        read_layouts(layouts),
        _budget(memory_budget),
        _stack(stack),
        build,
        optimize,
    )
    _refuse_uncallable(definition, batch, seq)
    if options.layouts and "assign-layouts" in options.disable:
        raise OptionError('layouts were given and the pass "assign-layouts" was switched off; accepted is one of both.')
    if options.memory_budget is not None and "recompute" in options.disable:
        raise OptionError(
            'a memory budget was given and the pass "recompute" was switched off; accepted is one of both.'
        )
    if options.stack is not None and "stack-projections" in options.disable:
        raise OptionError(
            '"stack" was given and the pass "stack-projections" was switched off; accepted is one of both.'
        )
    compile_flags(optimize)  # refuses an unknown value before anything is done
    compiled = CompiledLayer(definition, options.dtype, options.batch, options.seq, options.target, Path())
    key = options.key()
    built = False

    def fill(folder: Path) -> None:
        nonlocal built
        built = True
        _build(options, key, folder, progress)

    if output is not None:
        folder = _output_folder(Path(output))
        with tempfile.TemporaryDirectory(prefix="stepdown-output-") as work:
            fill(Path(work))
            _move_build(Path(work), folder)
    else:
        with _lock_of(key):  # threads of one process; processes are kept apart by the cache
            folder = (cache or BuildCache()).entry(key, fill)
    if build:
        build_extension(progress=progress)
    return CompiledLayer(definition, compiled.dtype, compiled.batch, compiled.seq, compiled.target, folder, not built)


@dataclass(frozen=True)
class _Options:
    """Everything that a build's content depends on besides sources and versions."""

    definition: EncoderLayer
    batch: int | None
    seq: int | None
    dtype: DataType
    target: str
    disable: tuple[str, ...]
    layouts: LayoutConfiguration
    memory_budget: int | None
    stack: int | None
    build: bool
    optimize: Optimize

    def to_dict(self) -> dict[str, Any]:
        """The options as the manifest shows them."""
        return {
            "batch": self.batch,
            "seq": self.seq,
            "dtype": self.dtype.name,
            "target": self.target,
            "disable": list(self.disable),
            "layouts": self.layouts.to_dict(),
            "memory_budget": self.memory_budget,
            "stack": self.stack,
            "optimize": self.optimize,
            "build": self.build,
        }

    def versions(self) -> dict[str, str]:
        """Versions of what takes part in the build."""
        found = {"stepdown": stepdown.__version__, "dace": dace.__version__, "python": platform.python_version()}
        if self.build:
            found |= toolchain_identity(self.optimize) | {"openblas": blas_version()}
        return found

    def key(self) -> str:
        """The build's key in the cache."""
        return content_key(
            layer=self.definition.to_dict(), options=self.to_dict(), versions=self.versions(), sources=sources_digest()
        )


_LOCKS: dict[str, threading.Lock] = {}
_LOCKS_GUARD = threading.Lock()


def _lock_of(key: str) -> threading.Lock:
    with _LOCKS_GUARD:
        return _LOCKS.setdefault(key, threading.Lock())


def _size(name: str, value: int | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f'"{name}" is {value!r}; accepted are a positive integer, or None for any size.')
    return value


def _refuse_uncallable(definition: EncoderLayer, batch: int | None, seq: int | None) -> None:
    """Refuse promised sizes at which the runtime takes no input, before the work."""
    elements = (batch or 1) * (seq or 1) * definition.embed
    if elements > MOST_ELEMENTS:
        given = " and ".join(f'"{name}" {size}' for name, size in (("batch", batch), ("seq", seq)) if size is not None)
        raise OptionError(
            f"{given} was given, at which the input has {elements} elements or more; accepted are at most "
            f"{MOST_ELEMENTS}."
        )


def _budget(value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise OptionError(f'"memory_budget" is {value!r}; accepted are a number of bytes, or None for no limit.')
    return value


def _stack(value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 2):
        raise OptionError(f'"stack" is {value!r}; accepted are a number of projections from 2, or None for all.')
    return value


def _passes(names: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(names, Iterable):
        accepted = ", ".join(f'"{known}"' for known in OPTIONAL_PASSES)
        raise OptionError(f'"disable" is {names!r}; accepted are names of optional passes: {accepted}.')
    given = (names,) if isinstance(names, str) else tuple(names)
    refuse_other_passes(given)
    return tuple(sorted(set(given)))


def _output_folder(folder: Path) -> Path:
    """``folder``, made where it is missing; refuses one that holds anything but a build."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / MANIFEST).is_file():
            raise OptionError(f'output "{folder}" holds other files; accepted is a new or empty folder, or a build.')
    except OSError as error:
        raise OptionError(f'output "{folder}" cannot be written ({error.strerror}).') from error
    return folder


def _move_build(source: Path, folder: Path) -> None:
    """Put a complete build in the place of what is in ``folder``, which may be on another file system.

    The manifest, by which a folder is known to be a build, goes last and comes last.
    """
    try:
        for old in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
        for new in sorted(source.iterdir(), key=lambda path: path.name == MANIFEST):
            shutil.move(new, folder / new.name)
    except OSError as error:
        raise OptionError(f'output "{folder}" cannot be written ({error.strerror}).') from error


def _build(options: _Options, key: str, folder: Path, progress: Progress) -> None:
    """Run every stage and write the build folder; the manifest comes last."""
    cpu.register()
    compilation = Compilation(
        options.definition,
        options.batch,
        options.seq,
        options.dtype,
        find_target(options.target),
        f"layer_{key[:16]}",
        options.disable,
        options.layouts,
        options.memory_budget,
        options.stack,
    )
    stages: list[dict[str, Any]] = []
    with dace_configuration(options.optimize, compiles=options.build):
        run_stages(compilation, progress, lambda record: stages.append(_describe(record, stages, folder)))
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "layer": options.definition.to_dict(),
        "options": options.to_dict(),
        "versions": options.versions(),
        "key": key,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "sizes": {"B": options.batch, "S": options.seq},
        "stages": stages,
    }
    if options.build and compilation.graph is not None:
        start = time.perf_counter()  # before the generator, which rewrites the sizes of containers for C++
        manifest["abi"] = interface(compilation.graph, options.definition, compilation.lifetimes)
        arguments = sum(len(side["arguments"]) for side in manifest["abi"].values())
        bound = PassRecord("bind", time.perf_counter() - start, f"{arguments} arguments described")
        progress("generate")
        start = time.perf_counter()
        libraries = generate(compilation.graph, folder, options.optimize)
        generated = PassRecord("generate", time.perf_counter() - start, f"{len(libraries)} libraries compiled")
        for record in (generated, bound):
            entry = {"name": record.name, "seconds": record.seconds, "validated": True, "what": record.what}
            manifest["stages"].append({**stages[-1], **entry, "passes": [record.to_manifest()]})
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _save(sdfg: SDFG, file: Path) -> None:
    """What ``sdfg.save(file, compress=True)`` writes, in half the time: in one piece, not word by word."""
    text = dace.serialize.dumps(sdfg.to_json(hash=True))
    file.write_bytes(gzip.compress(text.encode(), compresslevel=6, mtime=0))


def _with_kernels(counts: dict[str, Any], graph: TrainingGraph) -> dict[str, Any]:
    """``counts`` with kernels and containers counted anew."""
    result = dict(counts)
    kernels = containers = 0
    for direction, sdfg in graph.graphs():
        own = {"kernels": count_kernels(sdfg), "containers": len(sdfg.arrays)}
        result[direction] = {**counts[direction], **own}
        kernels += own["kernels"]
        containers += own["containers"]
    return {**result, "kernels": kernels, "containers": containers}


def _describe(record: StageRecord, before: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Save a stage's graphs and describe it for the manifest.

    A lowered graph moves what the canonical graph before it moved; its kernels and containers are counted anew.
    """
    last = record.passes[-1].counts
    counts = _with_kernels(before[-1], record.graph) if last is None else last.to_manifest()
    (folder / "stages").mkdir(exist_ok=True)
    for direction, sdfg in record.graph.graphs():
        _save(sdfg, folder / "stages" / f"{len(before):02d}-{record.name}.{direction}.sdfgz")
    return {
        **counts,
        "name": record.name,
        "seconds": record.seconds,
        "validated": True,
        "what": record.what,
        "passes": [one.to_manifest() for one in record.passes],
        "canonical": record.canonical,
        "kept": list(record.graph.kept),
        "stacks": {stack: list(members) for stack, members in record.graph.stacks.items()},
    }
