"""The CPU lowering of tiled groups, compiled: values at any length, layout, precision and number of threads.

Dimension legend: B batch, S query position, T key position, H head, P head size.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from pathlib import Path

import dace
import numpy as np
import pytest
import torch
from dace.sdfg import SDFG

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import (
    CausalMask,
    Contraction,
    Dropout,
    KeyPaddingMask,
    Member,
    Operator,
    Softmax,
    SoftmaxGradient,
    TiledGroup,
)
from stepdown.models.operators.gradient import connect_operator
from stepdown.pipeline.generate import generate, init_arguments
from stepdown.transformations.canonical_form import the_state
from stepdown.transformations.lowering import cpu
from stepdown.transformations.lowering.cpu.lower_tiled import TILE
from stepdown.transformations.lowering.lower_operators import lower_operators
from stepdown.transformations.reference_executor import execute
from stepdown.transformations.schedule.plan_workspace import plan_workspace
from stepdown.transformations.training_graph import TrainingGraph

HEADS, SIZE = 3, 5
TYPES = {dace.float32: ("f", "BSHP", torch.float32), dace.bfloat16: ("h", "PHSB", torch.bfloat16)}
"""For each precision a tag, the order of the containers in memory, and PyTorch's type."""

RESULTS = ("context", "dq", "dk", "dv")
Values = dict[str, torch.Tensor]


def member(operator: Operator, tag: str, **values: str) -> Member:
    return Member(operator, {c: v if v in ("mask", "rng", "p") else f"{v}_{tag}" for c, v in values.items()})


def forward_members(tag: str) -> list[Member]:
    return [
        member(Contraction(f"scores_{tag}", "BSHP,BTHP->BHST", 0.5), tag, a="q", b="k", d="s"),
        member(CausalMask(f"causal_{tag}", "BHST"), tag, x="s", y="visible"),
        member(KeyPaddingMask(f"padding_{tag}", "BHST"), tag, x="visible", mask="mask", y="masked"),
        member(Softmax(f"softmax_{tag}", "BHST"), tag, x="masked", y="w"),
        member(Dropout(f"dropped_{tag}", "BHST", 3), tag, x="w", rng="rng", p="p", y="kept"),
    ]


def build_graph() -> SDFG:
    """Attention and its gradient at both precisions, symbolic in B and S; containers of one precision are permuted."""
    batch, seq = (dace.symbol(name, dace.int64, positive=True) for name in "BS")
    sizes = {"B": batch, "S": seq, "H": HEADS, "P": SIZE}
    sdfg = SDFG("tiles_on_the_cpu")
    state = sdfg.add_state("operators")
    sdfg.add_array("rng", [2], dace.int64)
    sdfg.add_scalar("p", dace.float64)
    sdfg.add_array("mask", [batch, seq], dace.bool_)
    for dtype, (tag, order, _) in TYPES.items():
        for name in ("q", "k", "v", "dc", *RESULTS):
            strides, step = {}, 1
            for letter in reversed(order):
                strides[letter], step = step, step * sizes[letter]
            shape = [sizes[letter] for letter in "BSHP"]
            sdfg.add_array(f"{name}_{tag}", shape, dtype, strides=[strides[letter] for letter in "BSHP"])
        scores = forward_members(tag)
        context = member(Contraction(f"context_{tag}", "BHST,BTHP->BSHP"), tag, a="kept", b="v", d="context")
        forward = TiledGroup(f"attention_{tag}", [*scores, context], [f"context_{tag}"])
        backward = TiledGroup(
            f"gradient_{tag}",
            [
                member(Contraction(f"dkept_{tag}", "BSHP,BTHP->BHST"), tag, a="dc", b="v", d="dkept"),
                *scores,
                member(Dropout(f"dw_{tag}", "BHST", 3), tag, x="dkept", rng="rng", p="p", y="dw"),
                member(SoftmaxGradient(f"ds_{tag}", "BHST"), tag, dy="dw", y="w", dx="ds"),
                member(Contraction(f"dv_{tag}", "BSHP,BHST->BTHP"), tag, a="dc", b="kept", d="dv"),
                member(Contraction(f"dq_{tag}", "BHST,BTHP->BSHP", 0.5), tag, a="ds", b="k", d="dq"),
                member(Contraction(f"dk_{tag}", "BHST,BSHP->BTHP", 0.5), tag, a="ds", b="q", d="dk"),
            ],
            [f"{name}_{tag}" for name in RESULTS[1:]],
        )
        for node in (forward, backward):
            inputs = {name: name for name in sorted(node.in_connectors)}
            connect_operator(sdfg, state, node, inputs, {name: name for name in sorted(node.out_connectors)})
    return sdfg


Run = Callable[..., tuple[Values, Values]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What the compiled graph computes on drawn values, and what the reference executor does in float64."""
    cpu.register()
    graph = build_graph()
    lowered = lower_operators(copy.deepcopy(graph), "cpu")
    plan_workspace(lowered)
    folder: Path = tmp_path_factory.mktemp("tiles")
    library = ctypes.CDLL(str(generate(TrainingGraph(lowered), folder, "light")["forward"]))
    openmp = ctypes.CDLL("libgomp.so.1")
    init = getattr(library, f"__dace_init_{lowered.name}")
    init.restype = ctypes.c_void_p

    def call(batch: int, seq: int, threads: int = 2, p: float = 0.25) -> tuple[Values, Values]:
        extents = {"B": batch, "S": seq, "H": HEADS, "P": SIZE}
        generator = torch.Generator().manual_seed(seq)
        values: Values = {"rng": torch.tensor([5, 9]), "p": torch.tensor(p, dtype=torch.float64)}
        values["mask"] = torch.rand(batch, seq, generator=generator) > 0.3
        values["mask"][0] = False  # a sequence whose keys are all padding
        for tag, order, dtype in TYPES.values():
            for name in ("q", "k", "v", "dc", *RESULTS):
                memory = torch.randn([extents[x] for x in order], generator=generator).to(dtype)
                values[f"{name}_{tag}"] = memory.permute([order.index(x) for x in "BSHP"])
                if name in RESULTS:
                    memory.fill_(float("nan"))
        wide = {name: value.double() if value.is_floating_point() else value for name, value in values.items()}
        expected = execute(graph, wide)
        hold: list[np.ndarray] = []
        bound: list[object] = []
        for name, descriptor in lowered.arglist().items():
            if name in extents:
                bound.append(ctypes.c_int64(extents[name]))
            elif name == "p":
                bound.append(ctypes.c_double(p))
            elif name in values:
                bound.append(ctypes.c_void_p(values[name].data_ptr()))
            else:
                size = int(
                    dace.symbolic.evaluate(descriptor.total_size, {dace.symbol(k): v for k, v in extents.items()})
                )
                hold.append(np.full(size * descriptor.dtype.bytes, 0xFF, np.uint8))  # NaN in every type
                bound.append(ctypes.c_void_p(hold[-1].ctypes.data))
        openmp.omp_set_num_threads(threads)
        handle = ctypes.c_void_p(init(*(ctypes.c_int64(extents[name]) for name in init_arguments(lowered))))
        getattr(library, f"__program_{lowered.name}")(handle, *bound)
        return values, expected

    return call


@pytest.mark.parametrize("batch, seq", [(1, 1), (2, 2), (3, TILE - 1), (2, TILE), (2, TILE + 1), (1, 2 * TILE + 3)])
@pytest.mark.parametrize(("tag", "limit"), [("f", 2e-6), ("h", 4e-3)])
@pytest.mark.parametrize("name", RESULTS)
def test_values(run: Run, batch: int, seq: int, tag: str, limit: float, name: str) -> None:
    found, expected = run(batch, seq)
    value, right = found[f"{name}_{tag}"].double(), expected[f"{name}_{tag}"]
    assert bool(value.isfinite().all())
    # Of one key the weight is one whatever the score.
    scale = right.norm() if right.norm() > 1e-9 else expected[f"context_{tag}"].norm() + 1
    assert (value - right).norm() <= limit * scale


def test_padded_sequences_give_zeros(run: Run) -> None:
    found, _ = run(2, TILE + 1)
    for name in RESULTS:
        assert not found[f"{name}_f"][0].any()
        assert found[f"{name}_f"][1].any()


@pytest.mark.parametrize("threads", [1, 3, 70])
def test_results_do_not_depend_on_the_number_of_threads(run: Run, threads: int) -> None:
    one, _ = run(2, TILE + 1)
    other, _ = run(2, TILE + 1, threads)
    for name in RESULTS:
        for tag, _, _ in TYPES.values():
            assert torch.equal(one[f"{name}_{tag}"], other[f"{name}_{tag}"])


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (Contraction("context", "BHST,BHPU->BHSTPU"), "lacks|dimension|stands|tile"),
    ],
)
def test_what_no_tile_can_do_is_refused(last: Contraction, message: str) -> None:
    sdfg = SDFG("refused")
    state = sdfg.add_state("operators")
    for name, shape in (("q", [2, 4, 3, 5]), ("v", [2, 3, 5, 6]), ("c", [2, 3, 4, 4, 5, 6])):
        sdfg.add_array(name, shape, dace.float32)
    scores = Member(Contraction("scores", "BSHP,BTHP->BHST"), {"a": "q", "b": "q", "d": "s"})
    node = TiledGroup("group", [scores, Member(last, {"a": "s", "b": "v", "d": "c"})], ["c"])
    connect_operator(sdfg, state, node, {name: name for name in node.in_connectors}, {"c": "c"})
    cpu.register()
    assert the_state(sdfg) is state
    with pytest.raises(CanonicalFormError, match=message):
        lower_operators(sdfg, "cpu")
