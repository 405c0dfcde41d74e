"""The CPU lowering of row and element-wise operators, compiled: values, accuracy of long sums, threads, infinities.

Dimension legend: B batch, S query position, T key position, H head, E embedding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import dace
import numpy as np
import pytest
import torch
from dace.sdfg import SDFG
from numpy.typing import NDArray

from stepdown.models.operators import (
    Dropout,
    KeyPaddingMask,
    LayerNorm,
    LayerNormParameterGradient,
    Member,
    Operator,
    RowGroup,
    Softmax,
    SumRows,
)
from stepdown.models.operators.gradient import connect_operator
from stepdown.models.operators.philox import keep_mask
from stepdown.pipeline.generate import generate, init_arguments
from stepdown.transformations.lowering import cpu
from stepdown.transformations.lowering.lower_operators import lower_operators
from stepdown.transformations.schedule.plan_workspace import plan_workspace
from stepdown.transformations.training_graph import TrainingGraph

HEADS, EMBED = 3, 40
TYPES = {dace.float32: "f", dace.float64: "d"}
Values = dict[str, NDArray[np.generic]]


def build_graph() -> SDFG:
    """Operators at both precisions, each with containers of its own, symbolic in B and S."""
    batch, seq = (dace.symbol(name, dace.int64, positive=True) for name in "BS")
    sizes = {"B": batch, "S": seq, "T": seq, "H": HEADS, "E": EMBED, "2": 2}
    sdfg = SDFG("rows_on_the_cpu")
    state = sdfg.add_state("operators")
    sdfg.add_array("rng", [2], dace.int64)
    sdfg.add_scalar("p", dace.float64)
    sdfg.add_array("mask", [batch, seq], dace.bool_)

    def add(operator: Operator, inputs: dict[str, str], outputs: dict[str, str], dtype: dace.typeclass) -> None:
        dims = operator.operand_dims()
        for connector, name in (inputs | outputs).items():
            if name not in sdfg.arrays:
                sdfg.add_array(name, [sizes[letter] for letter in dims[connector]], dtype)
        connect_operator(sdfg, state, operator, inputs, outputs)

    for dtype, tag in TYPES.items():
        group = RowGroup(
            f"attention_{tag}",
            [
                Member(KeyPaddingMask("padding", "BHST"), {"x": f"scores_{tag}", "mask": "mask", "y": f"padded_{tag}"}),
                Member(Softmax("softmax", "BHST"), {"x": f"padded_{tag}", "y": f"weights_{tag}"}),
                Member(
                    Dropout("dropped", "BHST", 5), {"x": f"weights_{tag}", "rng": "rng", "p": "p", "y": f"kept_{tag}"}
                ),
            ],
            [f"weights_{tag}", f"kept_{tag}"],
        )
        inputs = {name: name for name in (f"scores_{tag}", "mask", "rng", "p")}
        add(group, inputs, {name: name for name in (f"weights_{tag}", f"kept_{tag}")}, dtype)
        norm = {"x": f"x_{tag}", "weight": f"w_{tag}", "bias": f"b_{tag}"}
        add(LayerNorm(f"norm_{tag}", "BSE", 1e-5), norm, {c: f"{c}_{tag}" for c in ("y", "mean", "rstd")}, dtype)
        add(SumRows(f"columns_{tag}", "BSE", "E"), {"x": f"dy_{tag}"}, {"y": f"sum_{tag}"}, dtype)
        operands = {c: f"{c}_{tag}" for c in ("dy", "x", "mean", "rstd")}
        outputs = {"dweight": f"dw_{tag}", "dbias": f"db_{tag}"}
        add(LayerNormParameterGradient(f"parameters_{tag}", "BSE"), operands, outputs, dtype)
    return sdfg


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Values]]:
    """Calls the compiled graph at a batch size and length on drawn values, with changes, and a number of threads."""
    cpu.register()
    lowered = lower_operators(build_graph(), "cpu")
    plan_workspace(lowered)
    folder: Path = tmp_path_factory.mktemp("rows")
    library = ctypes.CDLL(str(generate(TrainingGraph(lowered), folder, "light")["forward"]))
    openmp = ctypes.CDLL("libgomp.so.1")
    arguments, symbols = lowered.arglist(), init_arguments(lowered)
    init = getattr(library, f"__dace_init_{lowered.name}")
    init.restype = ctypes.c_void_p

    def call(batch: int, seq: int, p: float = 0.0, threads: int = 2, seed: int = 0, **changed: NDArray) -> Values:
        values = draw(lowered, batch, seq, seed) | changed
        extents = {"B": batch, "S": seq}
        bound: list[object] = []
        for name in arguments:
            if name in extents:
                bound.append(ctypes.c_int64(extents[name]))
            elif name == "p":
                bound.append(ctypes.c_double(p))
            else:
                bound.append(ctypes.c_void_p(values[name].ctypes.data))
        openmp.omp_set_num_threads(threads)
        handle = ctypes.c_void_p(init(*(ctypes.c_int64(extents[name]) for name in symbols)))
        getattr(library, f"__program_{lowered.name}")(handle, *bound)
        return values

    yield call


def draw(sdfg: SDFG, batch: int, seq: int, seed: int) -> Values:
    """Values for every array: normal inputs, and what is to be written poisoned with NaN."""
    generator = np.random.default_rng(seed)
    inputs = {f"{name}_{tag}" for name in ("scores", "x", "w", "b", "dy") for tag in TYPES.values()}
    values: Values = {}
    for name, descriptor in sdfg.arrays.items():
        if isinstance(descriptor, dace.data.Scalar):
            continue
        shape = [int(dace.symbolic.evaluate(e, {"B": batch, "S": seq})) for e in descriptor.shape]
        dtype = np.dtype(descriptor.dtype.as_numpy_dtype())
        if name in inputs:
            values[name] = generator.standard_normal(shape).astype(dtype)
        elif dtype.kind == "f":
            values[name] = np.full(shape, np.nan, dtype)
        else:
            values[name] = np.zeros(shape, dtype)
    values["mask"] = np.ones((batch, seq), bool)
    values["rng"] = np.array([11, 3], np.int64)
    return values


def double(values: Values, name: str) -> torch.Tensor:
    return torch.from_numpy(values[name]).double()


@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (1, 7), (3, 1), (2, 33), (5, 70)])
@pytest.mark.parametrize("tag", TYPES.values())
def test_equals_the_reference(run: Callable[..., Values], batch: int, seq: int, tag: str) -> None:
    mask = np.ones((batch, seq), bool)
    mask[0, seq // 2 :] = seq == 1  # a row of one key keeps it
    values = run(batch, seq, mask=mask)
    tolerance = {"f": 2e-6, "d": 1e-14}[tag]
    scores = double(values, f"scores_{tag}").masked_fill(~torch.from_numpy(mask)[:, None, None], -torch.inf)
    expected = torch.nan_to_num(torch.softmax(scores, -1), 0.0)
    torch.testing.assert_close(double(values, f"weights_{tag}"), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(values[f"kept_{tag}"], values[f"weights_{tag}"])
    x, dy = double(values, f"x_{tag}"), double(values, f"dy_{tag}")
    weight, bias = double(values, f"w_{tag}").requires_grad_(), double(values, f"b_{tag}").requires_grad_()
    y = torch.nn.functional.layer_norm(x, (EMBED,), weight, bias, 1e-5)
    gradients = torch.autograd.grad(y, (weight, bias), dy)
    for name, value in (("y", y.detach()), ("dw", gradients[0]), ("db", gradients[1]), ("sum", dy.sum((0, 1)))):
        torch.testing.assert_close(double(values, f"{name}_{tag}"), value, rtol=20 * tolerance, atol=20 * tolerance)


@pytest.mark.parametrize("seq", [3, 7, 12])  # rows that begin within a block of four words
def test_dropout_drops_what_the_generator_says(run: Callable[..., Values], seq: int) -> None:
    values = run(2, seq, p=0.3)
    keep = keep_mask(11, 3, 5, (2, HEADS, seq, seq), 0.3)
    np.testing.assert_array_equal(values["kept_f"] != 0, keep)
    np.testing.assert_array_equal(
        values["kept_f"], values["weights_f"] * np.where(keep, np.float32(1 / 0.7), np.float32(0))
    )


def test_a_row_without_keys_is_zero_and_nan_stays(run: Callable[..., Values]) -> None:
    mask = np.ones((2, 5), bool)
    mask[1] = False
    scores = np.random.default_rng(1).standard_normal((2, HEADS, 5, 5)).astype(np.float32)
    scores[0, 0, 0, 1] = np.nan
    values = run(2, 5, mask=mask, scores_f=scores)
    assert (values["weights_f"][1] == 0).all()
    assert np.isnan(values["weights_f"][0, 0, 0]).all()
    assert np.isfinite(values["weights_f"][0, 0, 1:]).all()


def test_results_do_not_depend_on_threads(run: Callable[..., Values]) -> None:
    one, two = (run(3, 50, p=0.2, threads=threads) for threads in (1, 2))
    for name in ("kept", "y", "sum", "dw", "db"):
        for tag in TYPES.values():
            np.testing.assert_array_equal(one[f"{name}_{tag}"], two[f"{name}_{tag}"])


@pytest.mark.parametrize(("batch", "seq"), [(4, 31), (8, 64), (40, 1000)])
@pytest.mark.parametrize("tag", TYPES.values())
def test_long_sums_over_rows_are_as_accurate_as_pytorchs(
    run: Callable[..., Values], batch: int, seq: int, tag: str
) -> None:
    """By the 1.5 rule of float32 and float64, on the gradient of a bias: up to 40,000 rows."""
    ours = theirs = size = 0.0
    dtype = {"f": torch.float32, "d": torch.float64}[tag]
    for seed in range(16 if batch * seq < 10_000 else 2):
        dy = np.random.default_rng(seed).standard_normal((batch, seq, EMBED)).astype({"f": "f4", "d": "f8"}[tag])
        exact = dy.astype(np.longdouble).sum((0, 1))
        if seq > 100:  # the scores of 1,000 positions are not what this is about
            values = sums_alone(run, batch * seq // 100, 100, tag, dy)
        else:
            values = run(batch, seq, **{f"dy_{tag}": dy})[f"sum_{tag}"]
        torchs = torch.from_numpy(dy).to(dtype).sum((0, 1)).numpy()
        ours += float(((values.astype(np.longdouble) - exact) ** 2).sum())
        theirs += float(((torchs.astype(np.longdouble) - exact) ** 2).sum())
        size += float((exact**2).sum())
    epsilon = torch.finfo(dtype).eps
    assert (ours / size) ** 0.5 <= 1.5 * (theirs / size) ** 0.5 + epsilon / 32


def sums_alone(run: Callable[..., Values], batch: int, seq: int, tag: str, dy: NDArray) -> NDArray:
    """The same rows under a batch and a length whose scores are small."""
    return run(batch, seq, **{f"dy_{tag}": np.ascontiguousarray(dy.reshape(batch, seq, EMBED))})[f"sum_{tag}"]


def test_an_infinite_sum_is_infinite(run: Callable[..., Values]) -> None:
    dy = np.ones((2, 70, EMBED), np.float32)
    dy[0, 3, 1] = np.inf
    dy[1, 3, 2] = np.nan
    total = run(2, 70, dy_f=dy)["sum_f"]
    assert total[1] == np.inf
    assert np.isnan(total[2])
    assert total[0] == 140
