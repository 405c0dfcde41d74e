"""Every layout of every container, compiled: the contractions of attention, and all row operators of a layer.

Row operators are compiled once with strides that are symbols, and called with every order of every container.
Contractions choose their matrix products by the strides: each is compiled once for every order of its containers.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dace
import numpy as np
import pytest
import torch
from dace.sdfg import SDFG

from stepdown.models.definition import EncoderLayer
from stepdown.models.operators import Contraction
from stepdown.models.operators.gradient import connect_operator
from stepdown.pipeline.generate import generate, init_arguments
from stepdown.transformations.canonical_form import operators, the_state
from stepdown.transformations.fusion.fuse_row_operators import FuseRowOperators
from stepdown.transformations.layout.layouts import Layout, logical_dims
from stepdown.transformations.lowering import cpu
from stepdown.transformations.lowering.lower_operators import lower_operators
from stepdown.transformations.reference_executor import execute
from stepdown.transformations.schedule.plan_workspace import plan_workspace
from stepdown.transformations.training_graph import TrainingGraph

MakeGraph = Callable[[EncoderLayer], TrainingGraph]

LAYER = EncoderLayer(embed=6, heads=2, ffn=5, dropout=0.2, attention_dropout=0.3, activation_dropout=0.1)
EXTENTS = {"B": 4, "S": 7}
"""No two dimensions but S and T have one extent: none passes for another (the layer's are 2, 3, 5 and 6)."""
GAP = 7.25
"""What stands between the elements of a padded container, and must stay there."""


class Program:
    """A compiled graph that is called with tensors in any layout."""

    def __init__(self, sdfg: SDFG, library: Path) -> None:
        self.sdfg = sdfg
        loaded = ctypes.CDLL(str(library))
        self.program = getattr(loaded, f"__program_{sdfg.name}")
        init = getattr(loaded, f"__dace_init_{sdfg.name}")
        init.restype = ctypes.c_void_p
        symbols = init_arguments(sdfg)
        self.handle = ctypes.c_void_p(init(*(ctypes.c_int64(EXTENTS.get(name, 1)) for name in symbols)))
        self.arguments = sdfg.arglist()
        self.shapes = {
            name: [int(dace.symbolic.evaluate(extent, EXTENTS)) for extent in descriptor.shape]
            for name, descriptor in self.arguments.items()
            if isinstance(descriptor, dace.data.Array)
        }

    def call(
        self, values: Mapping[str, torch.Tensor], layouts: Mapping[str, tuple[str, Layout]], strides_are_symbols: bool
    ) -> dict[str, torch.Tensor]:
        """Every container's value; those in ``layouts`` (by name: logical dimensions, layout) lie as these say."""
        memory: dict[str, torch.Tensor] = {}
        views: dict[str, torch.Tensor] = {}
        numbers = dict(EXTENTS)
        for name, descriptor in self.arguments.items():
            if name not in self.shapes:
                continue
            shape = self.shapes[name]
            dtype = {dace.bool_: torch.bool, dace.int64: torch.int64, dace.uint32: torch.int32}
            kind = dtype.get(descriptor.dtype, torch.float64)
            if name not in layouts:
                given = values.get(name)
                memory[name] = views[name] = torch.zeros(shape, dtype=kind) if given is None else given.contiguous()
                continue
            strides, total = layouts[name][1].strides(layouts[name][0], shape)
            memory[name] = torch.full((total,), GAP).to(kind)
            views[name] = memory[name].as_strided(shape, strides)
            if name in values:
                views[name].copy_(values[name])
            if strides_are_symbols:
                numbers |= {stride_symbol(name, axis): stride for axis, stride in enumerate(strides)}
        bound: list[Any] = []
        for name, descriptor in self.arguments.items():
            if name in memory:
                bound.append(ctypes.c_void_p(memory[name].data_ptr()))
            elif descriptor.dtype == dace.float64:
                bound.append(ctypes.c_double(float(values[name])))
            else:
                bound.append(ctypes.c_int64(numbers[name]))
        self.program(self.handle, *bound)
        for name, (_, layout) in layouts.items():
            if layout.pad and views[name].is_floating_point():
                inside = torch.zeros(memory[name].shape, dtype=torch.bool)
                inside.as_strided(views[name].shape, views[name].stride()).fill_(True)
                assert torch.all(memory[name][~inside] == GAP), f'gaps of "{name}"'
        return views


def stride_symbol(name: str, axis: int) -> str:
    return f"stride_{axis}_of_{name}"


def lowered(sdfg: SDFG) -> SDFG:
    cpu.register()
    result = lower_operators(sdfg, "cpu")
    plan_workspace(result)
    return result


def draw_values(sdfg: SDFG) -> dict[str, torch.Tensor]:
    """Values of everything that no operator writes."""
    state = the_state(sdfg)
    written = {node.data for node in state.data_nodes() if state.in_degree(node) > 0}
    values: dict[str, torch.Tensor] = {}
    for name, descriptor in sdfg.arrays.items():
        if isinstance(descriptor, dace.data.Scalar):
            values[name] = torch.tensor(0.25, dtype=torch.float64)
        elif name not in written:
            shape = [int(dace.symbolic.evaluate(extent, EXTENTS)) for extent in descriptor.shape]
            values[name] = torch.randn(shape, dtype=torch.float64)
            if name.endswith("_rstd"):
                values[name] = values[name].abs()
    values["attention_mask"] = torch.rand(EXTENTS["B"], EXTENTS["S"]) > 0.3
    values["rng"] = torch.tensor([5, 6])
    return {name: value for name, value in values.items() if name in sdfg.arrays}


# ---- row operators -------------------------------------------------------------------------------------------------


def row_operators(sdfg: SDFG) -> SDFG:
    """The graph without its contractions; every container is an argument whose strides are symbols."""
    state = the_state(sdfg)
    state.remove_nodes_from([node for node in operators(sdfg) if isinstance(node, Contraction)])
    state.remove_nodes_from([node for node in state.data_nodes() if state.degree(node) == 0])
    used = {node.data for node in state.data_nodes()}
    for name in [name for name in sdfg.arrays if name not in used]:
        sdfg.remove_data(name)
    for name, dims in logical_dims(sdfg).items():
        descriptor = sdfg.arrays[name]
        descriptor.transient = False
        if dims:
            names = [stride_symbol(name, axis) for axis in range(len(dims))]
            descriptor.strides = tuple(dace.symbol(symbol, dace.int64, positive=True) for symbol in names)
            for symbol in names:
                sdfg.add_symbol(symbol, dace.int64)
    return sdfg


@dataclass
class Rows:
    """The row groups of one graph: their library, every container's dimensions, drawn values and those expected."""

    program: Program
    dims: dict[str, str]
    values: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def rows(make_graph: MakeGraph, tmp_path_factory: pytest.TempPathFactory) -> list[Rows]:
    """Those of a layer, forward and backward."""
    torch.manual_seed(0)
    graph, _ = FuseRowOperators().apply(make_graph(LAYER).copy())
    assert graph.backward is not None
    canonical = [row_operators(graph.forward), row_operators(graph.backward)]
    low = [lowered(sdfg) for sdfg in canonical]
    libraries = generate(TrainingGraph(*low), tmp_path_factory.mktemp("rows"), "light")
    programs = [Program(sdfg, library) for sdfg, library in zip(low, libraries.values(), strict=True)]
    found = []
    for sdfg, program in zip(canonical, programs, strict=True):
        values = draw_values(sdfg)
        dims = {name: letters for name, letters in logical_dims(sdfg).items() if letters}
        found.append(Rows(program, dims, values, execute(sdfg, values)))
    return found


def check_rows(rows: Rows, layouts: Mapping[str, Layout]) -> None:
    """Compare every value with the reference, with the named containers in layouts and the others row-major."""
    chosen = {name: (dims, layouts.get(name, Layout(dims))) for name, dims in rows.dims.items()}
    found = rows.program.call(rows.values, chosen, True)
    for name in rows.dims:
        assert torch.allclose(found[name], rows.expected[name], rtol=1e-12, atol=1e-12), f"{name} in {layouts}"


@pytest.mark.parametrize("direction", [0, 1])
def test_every_order_of_every_container_of_row_operators(rows: list[Rows], direction: int) -> None:
    checked = 0
    for name, dims in rows[direction].dims.items():
        for order in itertools.permutations(dims):
            check_rows(rows[direction], {name: Layout("".join(order))})
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("direction", [0, 1])
def test_drawn_and_padded_layouts_of_row_operators(rows: list[Rows], direction: int) -> None:
    draw = random.Random(direction)
    for _ in range(60):
        layouts = {}
        for name, dims in rows[direction].dims.items():
            order = "".join(draw.sample(dims, len(dims)))
            layouts[name] = Layout(order, tuple((x, draw.choice([1, 2, 5, 16])) for x in order[:-1]))
        check_rows(rows[direction], layouts)


# ---- contractions --------------------------------------------------------------------------------------------------

EINSUMS = {
    "projection": "BSE,HPE->BSHP",
    "scores": "BSHP,BTHP->BHST",
    "context": "BHST,BTHP->BSHP",
    "output": "BSHP,EHP->BSE",
    "key_gradient": "BHST,BSHP->BTHP",
    "weight_gradient": "BSHP,BSE->HPE",
}
"""The products of attention; its other gradients are these with the operands exchanged or S and T."""

VARIANTS = 24


def orders(einsum: str) -> list[dict[str, Layout]]:
    """Layouts of the three operands in which each of them takes every order: of each other, independent ones."""
    draw = random.Random(einsum)
    columns: dict[str, list[Layout]] = {}
    for operand, dims in zip("abd", einsum.replace("->", ",").split(","), strict=True):
        every = ["".join(order) for order in itertools.permutations(dims)]
        draw.shuffle(every)
        repeated = (every * VARIANTS)[:VARIANTS]
        columns[operand] = [Layout(order, ((order[-2], draw.choice([1, 1, 1, 4])),)) for order in repeated]
    return [{operand: columns[operand][variant] for operand in "abd"} for variant in range(VARIANTS)]


def contractions(names: list[str]) -> tuple[SDFG, dict[str, tuple[str, Layout]]]:
    """A graph with every variant of the named products, and the layout of every container."""
    batch, seq = (dace.symbol(name, dace.int64, positive=True) for name in "BS")
    sizes = {"B": batch, "S": seq, "T": seq, "H": 2, "P": 3, "E": 6}
    sdfg = SDFG("products_" + "_".join(names))
    state = sdfg.add_state("operators")
    layouts: dict[str, tuple[str, Layout]] = {}
    for name in names:
        for variant, chosen in enumerate(orders(EINSUMS[name])):
            node = Contraction(f"{name}_{variant}", EINSUMS[name], 0.5)
            for operand, dims in node.operand_dims().items():
                shape = [sizes[letter] for letter in dims]
                strides, total = chosen[operand].strides(dims, shape)
                container = f"{operand}_{name}_{variant}"
                sdfg.add_array(container, shape, dace.float64, strides=strides, total_size=total)
                layouts[container] = dims, chosen[operand]
            ends = {operand: f"{operand}_{name}_{variant}" for operand in "abd"}
            connect_operator(sdfg, state, node, {"a": ends["a"], "b": ends["b"]}, {"d": ends["d"]})
    return sdfg, layouts


def test_orders_are_all_there() -> None:
    for einsum in EINSUMS.values():
        for operand, dims in zip("abd", einsum.replace("->", ",").split(","), strict=True):
            found = {variant[operand].order for variant in orders(einsum)}
            assert found == {"".join(order) for order in itertools.permutations(dims)}


def test_every_order_of_every_container_of_contractions(tmp_path: Path) -> None:
    halves = [list(EINSUMS)[:3], list(EINSUMS)[3:]]
    built = [contractions(names) for names in halves]
    low = [lowered(sdfg) for sdfg, _ in built]
    libraries = generate(TrainingGraph(*low), tmp_path, "light")
    for (sdfg, layouts), small, library in zip(built, low, libraries.values(), strict=True):
        values = draw_values(sdfg)
        found = Program(small, library).call(values, layouts, False)
        for name, expected in execute(sdfg, values).items():
            error = np.abs(found[name].numpy() - expected.numpy()).max()
            assert error < 1e-12, f"{name} {layouts[name]}"
