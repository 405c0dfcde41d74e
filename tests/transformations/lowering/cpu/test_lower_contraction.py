"""Contractions as BLAS calls: the plan executed in NumPy as BLAS would read it, and compiled code, against ``einsum``.

Drawn contractions: einsums over any letters, operands in any order of memory, padded, broadcast, symbolic in B and S.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import random
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dace
import numpy as np
import pytest
import sympy
from dace.symbolic import int_ceil
from hypothesis import given, settings
from hypothesis import strategies as st

from stepdown.models.errors import BuildError, CanonicalFormError
from stepdown.models.operators import Contraction
from stepdown.transformations.lowering.cpu import blas, register
from stepdown.transformations.lowering.cpu.contraction_plan import (
    ContractionPlan,
    Index,
    at_least,
    normalise,
    plan_contraction,
)

B, S = dace.symbol("B", dace.int32), dace.symbol("S", dace.int32)
SYMBOLS = {"B": B, "S": S, "T": S}
FIXED = {"H": 3, "P": 5, "E": 17, "U": 2}


@dataclass
class Case:
    """One contraction with the layouts of its operands (``c`` as in ``strides`` where ``accumulate``)."""

    einsum: str
    sizes: Mapping[str, object]
    strides: Mapping[str, tuple[object, ...]]
    dtype: str = "float32"
    alpha: float = 1.0
    accumulate: bool = False
    in_place: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def terms(self) -> tuple[str, str, str]:
        a, b, d = self.einsum.replace("->", ",").split(",")
        return a, b, d

    def dims(self, name: str) -> str:
        return dict(zip("abdc", (*self.terms, self.terms[2]), strict=True))[name]

    def shape(self, name: str, values: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(evaluate(self.sizes[letter], values) for letter in self.dims(name))

    def numeric_strides(self, name: str, values: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(evaluate(stride, values) for stride in self.strides[name])


def evaluate(expression: object, values: Mapping[str, int]) -> int:
    """The value of a size or stride for sizes of B and S."""
    found = sympy.sympify(expression)
    return int(found.subs({symbol: values[symbol.name] for symbol in found.free_symbols}))


def draw_case(draw: random.Random, dtype: str = "float32") -> Case:
    """A contraction; every kind of letter has 0 to 3 of them."""
    letters = list("BSTHPEU")
    draw.shuffle(letters)
    kinds: dict[str, list[str]] = {"abd": [], "ad": [], "bd": [], "ab": []}
    for letter in letters[: draw.randint(1, 7)]:
        kinds[draw.choice([kind for kind, found in kinds.items() if len(found) < 3])].append(letter)
    terms = {}
    for name in "abd":
        dims = [letter for kind, found in kinds.items() if name in kind for letter in found]
        draw.shuffle(dims)
        terms[name] = "".join(dims)
    sizes: dict[str, object] = {}
    for letter in letters:
        sizes[letter] = SYMBOLS.get(letter, FIXED.get(letter))
        if draw.random() < 0.15:
            sizes[letter] = 1
        elif letter in SYMBOLS and draw.random() < 0.3:
            sizes[letter] = 4
    if "S" in sizes:
        sizes["T"] = sizes["S"]
    accumulate = draw.random() < 0.4
    strides = {name: draw_strides(draw, terms[name], sizes, broadcast=name != "d") for name in "abd"}
    in_place = accumulate and draw.random() < 0.4
    if accumulate:
        strides["c"] = strides["d"] if in_place else draw_strides(draw, terms["d"], sizes, broadcast=True)
    alpha = draw.choice([1.0, 0.125, -1.5])
    return Case(f"{terms['a']},{terms['b']}->{terms['d']}", sizes, strides, dtype, alpha, accumulate, in_place)


def draw_strides(draw: random.Random, dims: str, sizes: Mapping[str, object], *, broadcast: bool) -> tuple[object, ...]:
    """A layout of ``dims``: often the letters' own order, else any; sometimes padded, or constant along a letter."""
    order = list(dims)
    if draw.random() < 0.6:
        draw.shuffle(order)
    strides: dict[str, object] = {}
    distance: object = draw.choice([1, 1, 1, 1, 1, 2])
    for letter in reversed(order):
        if broadcast and draw.random() < 0.06:
            strides[letter] = 0
            continue
        strides[letter] = distance
        distance = distance * sizes[letter]  # type: ignore[operator]
        if draw.random() < 0.15:
            distance = distance + 3  # type: ignore[operator]
    return tuple(strides[letter] for letter in dims)


def strided(
    buffer: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], *, writeable: bool = True
) -> np.ndarray:
    """A view of a flat buffer by strides in elements."""
    item = buffer.itemsize
    return np.lib.stride_tricks.as_strided(buffer, shape, tuple(s * item for s in strides), writeable=writeable)


def buffer_size(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Number of elements that a layout spans."""
    if 0 in shape:
        return 1
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


# ---- the plan ------------------------------------------------------------------------------------------------------


def plan_of(case: Case, copied: tuple[str, ...] = ()) -> ContractionPlan:
    return plan_contraction(case.terms, case.sizes, {name: case.strides[name] for name in "abd"}, copied)


def positions(index: Index | None, values: Mapping[str, int]) -> range:
    return range(1 if index is None else evaluate(index.extent, values))


def execute(
    plan: ContractionPlan, case: Case, operands: Mapping[str, np.ndarray], values: Mapping[str, int]
) -> np.ndarray:
    """The product alone, as calls on flat memory that BLAS would accept."""
    memory: dict[str, np.ndarray] = {}
    for name in "abd":
        shape = case.shape(name, values)
        if name not in plan.packed:
            memory[name] = np.zeros(buffer_size(shape, case.numeric_strides(name, values)))
            strided(memory[name], shape, case.numeric_strides(name, values))[...] = operands.get(name, 0)
            continue
        packing = plan.packed[name]
        memory[name] = np.zeros(max(1, int(np.prod([evaluate(case.sizes[x], values) for x in packing.letters]))))
        if name != "d" and 0 not in shape:
            dims = case.dims(name)
            strides = tuple(evaluate(packing.strides.get(letter, 0), values) for letter in dims)
            strided(memory[name], shape, strides)[...] = operands[name]
    row, column, inner = (len(positions(index, values)) for index in (plan.rows, plan.columns, plan.sums))
    shapes = {"a": (row, inner), "b": (inner, column), "d": (row, column)}
    for at in itertools.product(*(positions(index, values) for index in (*plan.loops, *plan.sum_loops))):
        views = {}
        for name, shape in shapes.items():
            offset = sum(
                position * evaluate(index.strides[name], values)
                for position, index in zip(at, (*plan.loops, *plan.sum_loops), strict=True)
                if name in index.strides
            )
            if plan.swapped:
                shape = shape[::-1]
            leading = evaluate(plan.matrices[name].leading, values)
            transposed = plan.matrices[name].transposed
            assert leading >= max(1, shape[0] if transposed else shape[1])
            if 0 in shape:
                view = np.zeros(shape)
            else:
                strides = (1, leading) if transposed else (leading, 1)
                assert offset + buffer_size(shape, strides) <= memory[name].size
                view = strided(memory[name][offset:], shape, strides)
            views[name] = view.T if plan.swapped else view
        views["d"] += views["a"] @ views["b"]
    shape = case.shape("d", values)
    if "d" in plan.packed:
        strides = tuple(evaluate(plan.packed["d"].strides.get(letter, 0), values) for letter in case.dims("d"))
        return strided(memory["d"], shape, strides)
    return strided(memory["d"], shape, case.numeric_strides("d", values))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), copied=st.sampled_from([(), ("a", "b", "d"), ("b",)]))
def test_plan_computes_the_einsum(seed: int, copied: tuple[str, ...]) -> None:
    case = draw_case(random.Random(seed))
    plan = plan_of(case, copied)
    assert set(copied) <= set(plan.packed)
    for values in ({"B": 2, "S": 3}, {"B": 1, "S": 1}, {"B": 3, "S": 1}):
        generator = np.random.default_rng(seed)
        operands = {}
        for name in "ab":
            shape, strides = case.shape(name, values), case.numeric_strides(name, values)
            operands[name] = strided(generator.standard_normal(buffer_size(shape, strides)), shape, strides)
        expected = np.einsum(case.einsum, operands["a"], operands["b"])
        assert np.allclose(execute(plan, case, operands, values), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("larger", "smaller", "certain"),
    [
        (B * S, S, True),
        (S, B, False),
        (768 * S, 768, True),
        (S, 2, False),
        (sympy.Max(B, S), 1, False),
        (5, 5, True),
        (16 * int_ceil(S, 16), S, True),
        (16 * int_ceil(S, 16), S + 1, False),
        (15 * int_ceil(S, 16), S, False),
        (S + 15, 16 * int_ceil(S, 16), False),
        (8 * int_ceil(16 * B * int_ceil(S, 16), 8), B * S, True),
        (16 * int_ceil(S, 16), 16 * int_ceil(S, 16), True),
    ],
)
def test_certainty_for_all_sizes(larger: Any, smaller: Any, certain: bool) -> None:
    assert at_least(normalise(larger), normalise(smaller)) is certain


def bert(einsum: str, batch: Any = B, seq: Any = S, **layouts: str) -> Case:
    """A contraction of a BERT-base layer; operands lie in the order of the term unless a letter order is given."""
    sizes = {"B": batch, "S": seq, "T": seq, "H": 12, "P": 64, "E": 768, "U": 3072}
    strides = {}
    for name, dims in zip("abd", einsum.replace("->", ",").split(","), strict=True):
        distance, found = sympy.Integer(1), {}
        for letter in reversed(layouts.get(name, dims)):
            found[letter] = distance
            distance = distance * sizes[letter]
        strides[name] = tuple(found[letter] for letter in dims)
    return Case(einsum, sizes, strides)


@pytest.mark.parametrize(
    ("einsum", "layouts", "rows", "columns", "sums", "loops"),
    [
        ("BSE,UE->BSU", {}, "BS", "U", "E", 0),
        ("BSE,HPE->BHSP", {"d": "BSHP"}, "BS", "HP", "E", 0),
        ("BSU,UE->BSE", {}, "BS", "E", "U", 0),
        ("BSU,BSE->UE", {}, "U", "E", "BS", 0),
        ("BHSP,BHTP->BHST", {}, "S", "T", "P", 1),
        ("BHSP,BHTP->BHST", {"a": "BSHP", "b": "BSHP".replace("S", "T")}, "S", "T", "P", 2),
        ("BHST,BHTP->BHSP", {"d": "BSHP"}, "S", "P", "T", 2),
        ("BHST,BHSP->BHTP", {}, "T", "P", "S", 1),
        ("BHSP,EHP->BSE", {"a": "BSHP"}, "BS", "E", "HP", 0),
    ],
)
def test_products_of_a_layer_need_no_copies(
    einsum: str, layouts: dict[str, str], rows: str, columns: str, sums: str, loops: int
) -> None:
    plan = plan_of(bert(einsum, **layouts))
    assert not plan.packed
    assert not plan.sum_loops
    found = [index.letters for index in (plan.rows, plan.columns, plan.sums) if index is not None]
    assert found == [rows, columns, sums]
    assert len(plan.loops) == loops


def test_operand_without_unit_stride_is_packed() -> None:
    case = bert("SE,UE->SU", seq=128)
    case.strides = {**case.strides, "a": (1536, 2)}
    assert set(plan_of(case).packed) == {"a"}


def test_letters_that_do_not_merge_become_a_loop() -> None:
    case = Case(
        "BSE,UE->BSU", bert("BSE,UE->BSU").sizes, {"a": (768, 768 * B, 1), "b": (768, 1), "d": (3072 * S, 3072, 1)}
    )
    plan = plan_of(case)
    assert not plan.packed
    assert [index.letters for index in plan.loops] == ["B"]


def test_short_sums_that_do_not_merge_are_added_up() -> None:
    sizes = {"H": 2, "E": 512, "S": 512, "U": 512}
    strides = {"a": (512, 512 * 512, 1), "b": (512 * 512, 512, 1), "d": (512, 1)}
    plan = plan_contraction(("SHE", "HUE", "SU"), sizes, strides)
    assert not plan.packed
    assert [index.letters for index in plan.sum_loops] == ["H"]


def test_result_whose_elements_share_memory_is_refused() -> None:
    with pytest.raises(CanonicalFormError, match='stride 0 along dimension "S"'):
        plan_contraction(("SE", "UE", "SU"), {"S": 3, "E": 4, "U": 5}, {"a": (4, 1), "b": (4, 1), "d": (0, 1)})


# ---- compiled code -------------------------------------------------------------------------------------------------


def special_cases() -> list[Case]:
    """What drawing seldom meets: sums added up over a loop, in every manner of starting; large enough for blocks."""
    sizes = {"S": S, "H": 2, "E": 33, "U": 40}
    strides = {"a": (33, 33 * S, 1), "b": (33 * 40, 33, 1), "d": (40, 1), "c": (1, S)}
    same = {**strides, "c": strides["d"]}
    wide = {"B": B, "S": S, "E": 24, "U": 700}
    rows = {"a": (24 * S, 24, 1), "b": (24, 1), "d": (700 * S, 700, 1)}
    columns = {**rows, "d": (S, 1, B * S)}
    return [
        Case("SHE,HUE->SU", sizes, strides),
        Case("SHE,HUE->SU", sizes, strides, "float64", 0.5, accumulate=True),
        Case("SHE,HUE->SU", sizes, same, alpha=2.0, accumulate=True, in_place=True),
        Case("SHE,HUE->SU", sizes, strides, "bfloat16", 0.5, accumulate=True),
        Case("SHE,HUE->SU", sizes, {**same, "d": (2, 2 * S), "c": (2, 2 * S)}, accumulate=True, in_place=True),
        Case("BSE,UE->BSU", wide, rows),
        Case("BSE,UE->BSU", wide, columns),
        Case("E,E->", {"E": 33}, {"a": (1,), "b": (2,), "d": ()}),
        *long_sums(),
    ]


def long_sums() -> list[Case]:
    """Sums of many terms, with either operand transposed in memory or not; few rows where S is small."""
    sizes = {"S": S, "E": 500, "U": 40}
    rows, columns = {"a": (500, 1), "b": (1, 500)}, {"a": (1, S), "b": (40, 1)}
    cases = [
        Case("SE,EU->SU", sizes, {"a": a["a"], "b": b["b"], "d": (40, 1)})
        for a in (rows, columns)
        for b in (rows, columns)
    ]
    added = {"a": rows["a"], "b": rows["b"], "d": (40, 1), "c": (40, 1)}
    return [*cases, Case("SE,EU->SU", sizes, added, alpha=0.5, accumulate=True)]


@dataclass
class Compiled:
    """Every case in one library; container ``d`` of case 7 is ``d7``."""

    cases: list[Case]
    program: Any
    library: Path

    def run(self, values: Mapping[str, int]) -> list[tuple[Case, dict[str, np.ndarray]]]:
        """Random operands for every case, and what the library wrote."""
        generator = np.random.default_rng(11)
        arguments: dict[str, np.ndarray] = {}
        views: list[np.ndarray] = []
        results = []
        for number, case in enumerate(self.cases):
            operands = {}
            for name in operand_names(case):
                dtype = getattr(dace, case.dtypes.get(name, case.dtype)).type
                shape, strides = case.shape(name, values), case.numeric_strides(name, values)
                memory = generator.standard_normal(buffer_size(shape, strides)).astype(dtype)
                if name == "d" and not case.in_place:
                    memory[:] = np.nan
                arguments[f"{name}{number}"] = memory
                view = strided(memory, shape, strides)
                operands[name] = view.astype(np.float64)
                if name == "d":
                    views.append(view)
                    used = np.zeros(memory.size, np.int8)
                    strided(used, shape, strides)[...] = 1
                    operands["unused"] = used == 0
            if case.in_place:
                operands["c"] = operands["d"]
            results.append((case, operands))
        self.program(**arguments, **values)
        for number, (_, operands) in enumerate(results):
            operands["result"] = views[number].astype(np.float64)
            operands["gaps"] = arguments[f"d{number}"].astype(np.float64)[operands["unused"]]
        return results


def operand_names(case: Case) -> str:
    return "abdc" if case.accumulate and not case.in_place else "abd"


def build(cases: list[Case], name: str) -> dace.SDFG:
    sdfg = dace.SDFG(name)
    sdfg.add_symbol("B", dace.int32)
    sdfg.add_symbol("S", dace.int32)
    state: dace.SDFGState | None = None
    for number, case in enumerate(cases):
        state = sdfg.add_state(f"case_{number}") if state is None else sdfg.add_state_after(state, f"case_{number}")
        node = Contraction(f"contraction_{number}", case.einsum, case.alpha, case.accumulate)
        node.implementation = "cpu"
        state.add_node(node)
        for operand in operand_names(case):
            sizes = [case.sizes[letter] for letter in case.dims(operand)] or [1]
            dtype = getattr(dace, case.dtypes.get(operand, case.dtype))
            sdfg.add_array(f"{operand}{number}", sizes, dtype, strides=case.strides[operand] or (1,))
        for operand in "abdc" if case.accumulate else "abd":
            container = f"d{number}" if operand == "c" and case.in_place else f"{operand}{number}"
            memlet = dace.Memlet.from_array(container, sdfg.arrays[container])
            if operand == "d":
                state.add_edge(node, "d", state.add_write(container), None, memlet)
            else:
                state.add_edge(state.add_read(container), None, node, operand, memlet)
    return sdfg


@pytest.fixture(scope="session")
def compiled(strict_dace_session: None) -> Compiled:
    register()
    draw = random.Random(2)
    cases = special_cases()
    cases += [draw_case(draw, dtype) for dtype in ["float32"] * 40 + ["float64"] * 16]
    cases += [draw_case(draw, dtype) for dtype in ["bfloat16"] * 8 + ["float16"] * 8]
    mixed = draw_case(draw, "bfloat16")
    mixed.dtypes = {"d": "float32"}
    cases.append(mixed)
    sdfg = build(cases, "contractions_" + hashlib.sha256(repr(cases).encode()).hexdigest()[:16])
    sdfg.expand_library_nodes()
    sdfg.validate()
    program = sdfg.compile()
    return Compiled(cases, program, Path(program.filename))


@pytest.mark.parametrize("values", [{"B": 3, "S": 5}, {"B": 1, "S": 1}, {"B": 2, "S": 98}, {"B": 0, "S": 2}])
def test_compiled_contractions_agree_with_einsum(compiled: Compiled, values: dict[str, int]) -> None:
    for number, (case, operands) in enumerate(compiled.run(values)):
        expected = case.alpha * np.einsum(case.einsum, operands["a"], operands["b"])
        bound = abs(case.alpha) * np.einsum(case.einsum, abs(operands["a"]), abs(operands["b"]))
        if case.accumulate:
            expected, bound = expected + operands["c"], bound + abs(operands["c"])
        summands = 4 + np.prod([evaluate(case.sizes[x], values) for x in set(case.terms[0]) - set(case.terms[2])])
        dtype = case.dtypes.get("d", case.dtype)
        tolerance = bound * summands * {"float64": 2.0**-53}.get(case.dtype, 2.0**-24)
        tolerance += abs(expected) * {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(dtype, 0.0)
        tolerance += 2.0**-24 if dtype == "float16" else 0.0
        assert np.all(abs(operands["result"] - expected) <= tolerance * 1.01), f"case {number}: {case}"


@pytest.mark.parametrize("seq", [1, 6, 12, 16])
def test_few_rows_are_summed_as_well_as_by_many_accumulators(compiled: Compiled, seq: int) -> None:
    """One after the other, 500 terms lose 2.3e-7 to 2.8e-7; libraries with many accumulators about 1e-7."""
    for case, operands in compiled.run({"B": 1, "S": seq}):
        if case.sizes.get("E") == 500 and not case.accumulate:
            expected = np.einsum(case.einsum, operands["a"], operands["b"])
            assert np.linalg.norm(operands["result"] - expected) <= 1.6e-7 * np.linalg.norm(expected)


def test_results_do_not_depend_on_the_number_of_threads(compiled: Compiled) -> None:
    set_threads = ctypes.CDLL(str(compiled.library)).stepdown_set_num_threads
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        results.append([operands["result"] for _, operands in compiled.run({"B": 3, "S": 70})])
    set_threads(2)
    for other in results[1:]:
        assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(results[0], other, strict=True))


def test_nothing_outside_the_results_is_written(compiled: Compiled) -> None:
    """Memory between the elements of a result (padding, every second element) keeps its value."""
    padded = 0
    for number, (case, operands) in enumerate(compiled.run({"B": 2, "S": 3})):
        assert case.in_place or np.all(np.isnan(operands["gaps"])), f"case {number}: {case}"
        padded += operands["gaps"].size > 0
    assert padded > 5


def test_library_finds_blas_by_itself(compiled: Compiled) -> None:
    listing = subprocess.run(["ldd", str(compiled.library)], capture_output=True, text=True, check=True, env={})
    assert str(blas.blas_library()) in listing.stdout


def test_blas_runs_on_the_calling_thread_only(compiled: Compiled) -> None:
    compiled.run({"B": 1, "S": 1})
    assert ctypes.CDLL(str(blas.blas_library())).scipy_openblas_get_num_threads() == 1


def test_containers_are_transients_at_the_top() -> None:
    """Copies are ordinary transients of the expansion, none inside a map."""
    register()
    sdfg = build([Case("SE,UE->SU", {"S": S, "E": 4, "U": 8}, {"a": (8, 2), "b": (4, 1), "d": (8, 1)})], "one")
    sdfg.expand_library_nodes()
    nested = [node for node, _ in sdfg.all_nodes_recursive() if isinstance(node, dace.nodes.NestedSDFG)]
    assert [sorted(name for name, found in n.sdfg.arrays.items() if found.transient) for n in nested] == [["a_packed"]]


def test_expansion_survives_saving_and_becomes_one_state(tmp_path: Path) -> None:
    register()
    case = Case("SE,UE->SU", {"S": S, "E": 4, "U": 8}, {"a": (8, 2), "b": (4, 1), "d": (8, 1)})
    sdfg = build([case], "one")
    sdfg.expand_library_nodes()
    sdfg.save(str(tmp_path / "one.sdfg"))
    loaded = dace.SDFG.from_file(str(tmp_path / "one.sdfg"))
    loaded.validate()
    loaded.simplify()
    assert loaded.number_of_nodes() == 1
    assert not [node for node, _ in loaded.all_nodes_recursive() if isinstance(node, dace.nodes.NestedSDFG)]


@pytest.fixture
def without_blas() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blas, "scipy_openblas32", None)
        yield


def test_missing_blas_is_one_sentence(without_blas: None) -> None:
    for call in (blas.blas_library, blas.blas_version, blas.OpenBLAS.cmake_includes, blas.OpenBLAS.cmake_libraries):
        with pytest.raises(BuildError, match=r'need the package "scipy-openblas32", which is not installed'):
            call()


def test_result_that_is_an_operand_is_refused() -> None:
    register()
    sdfg = dace.SDFG("aliased")
    state = sdfg.add_state()
    for name in "xy":
        sdfg.add_array(name, (4, 4), dace.float32)
    node = Contraction("product", "SE,UE->SU")
    sizes = dace.Memlet("x[0:4, 0:4]")
    state.add_node(node)
    node.implementation = "cpu"
    state.add_edge(state.add_read("x"), None, node, "a", sizes)
    state.add_edge(state.add_read("y"), None, node, "b", dace.Memlet("y[0:4, 0:4]"))
    state.add_edge(node, "d", state.add_write("x"), None, dace.Memlet("x[0:4, 0:4]"))
    with pytest.raises(CanonicalFormError, match=r'operand "a" of contraction "product" is the container "x"'):
        sdfg.expand_library_nodes()


def test_types_that_do_not_go_together_are_refused() -> None:
    register()
    case = Case("SE,UE->SU", {"S": 2, "E": 4, "U": 8}, {"a": (4, 1), "b": (4, 1), "d": (8, 1)}, dtypes={"b": "float64"})
    with pytest.raises(CanonicalFormError, match=r'"float64" goes with "float64" only'):
        build([case], "mixed").expand_library_nodes()
