"""The statement language: counting, names, renaming, printing as C++, refusals."""

import math

import pytest
import torch

from stepdown.models.operators import Statement
from stepdown.models.operators.statements import is_dimension_name, to_cpp

from .cases import evaluate_formula, refused


def printed(expression: str, scalar: str = "float") -> str:
    return to_cpp(expression, scalar, lambda d: f"N{d}", lambda d: f"i_{d}", lambda name: f"in_{name}")


@pytest.mark.parametrize(
    ("statement", "flop"),
    [
        (Statement("y", "E", "x"), 0),
        (Statement("y", "E", "-x"), 0),
        (Statement("y", "E", "x + 1.0"), 1),
        (Statement("y", "E", "exp(x - shift)"), 2),
        (Statement("y", "E", "maximum(a, b)"), 1),
        (Statement("y", "E", "0.0 if x <= 0.0 else x"), 1),
        (Statement("y", "", "x", "sum"), 1),
        (Statement("y", "", "x", "max"), 1),
        (Statement("y", "", "x * x", "sum"), 2),
        (Statement("y", "E", "", kind="word", random=1), 0),
    ],
)
def test_flop(statement: Statement, flop: int) -> None:
    """Arithmetic, functions, maxima and selections one each, comparisons and signs nothing, a reduction one more."""
    assert statement.flop() == flop


def test_names_leave_out_functions_and_dimensions() -> None:
    statement = Statement("y", "E", "exp(x) * scale if position_T <= position_S else NEGATIVE_INFINITY / size_E + x")
    assert sorted(statement.names()) == ["scale", "x"]
    assert Statement("w", "E", "", kind="word", random=0).names() == ["rng"]


def test_renaming() -> None:
    statement = Statement("y", "BS", "exp(x - y_max) * size_E", "sum")
    renamed = statement.renamed({"x": "u", "y": "v", "exp": "exp"})
    assert renamed == Statement("v", "BS", "exp(u - y_max) * size_E", "sum")
    word = Statement("w", "E", "", kind="word", random=3)
    assert word.renamed({"w": "word_1"}) == Statement("word_1", "E", "", kind="word", random=3)


def test_dimension_names() -> None:
    assert is_dimension_name("size_E") and is_dimension_name("position_T")
    assert not is_dimension_name("size_of") and not is_dimension_name("size") and not is_dimension_name("x_E")


@pytest.mark.parametrize(
    ("expression", "cpp"),
    [
        ("x * 2", "(in_x * float(2))"),
        ("-x", "(-in_x)"),
        ("a - b - c", "((in_a - in_b) - in_c)"),
        ("a - (b - c)", "(in_a - (in_b - in_c))"),
        ("a if m else 0.0", "(in_m ? in_a : float(0.0))"),
        ("a if a >= b else b", "((in_a >= in_b) ? in_a : in_b)"),
        ("exp(x) / size_E", "(stepdown::exp(in_x) / float(NE))"),
        ("x if position_T <= position_S else NEGATIVE_INFINITY",
         "(((i_T) <= (i_S)) ? in_x : stepdown::negative_infinity<float>())"),
        ("dropout_scale(p)", "stepdown::dropout_scale<float>(in_p)"),
        ("dropout_threshold(p)", "stepdown::dropout_threshold(in_p)"),
        ("1e-12", "float(1e-12)"),
    ],
)  # fmt: skip
def test_printed_as_cpp(expression: str, cpp: str) -> None:
    assert printed(expression) == cpp


def test_constants_have_the_type_of_the_arithmetic() -> None:
    """A bare 0.5 would turn float arithmetic into double."""
    assert printed("0.5 * x", "double") == "(double(0.5) * in_x)"


@pytest.mark.parametrize("expression", ["x ** 2", "x // 2", "~x", "f(x)", "x < y < z", "x and y", "x[0]", "'a'", "x.y"])
def test_refuses_what_is_not_in_the_language(expression: str) -> None:
    with refused(
        f'formula "{expression}" is not in the statement language; it takes arithmetic, comparisons, conditional '
        "expressions and exp, erf, tanh, sqrt, maximum, dropout_threshold, dropout_scale"
    ):
        printed(expression)


def test_the_tests_evaluator() -> None:
    """What the other tests judge formulas by."""
    x = torch.tensor([-1.0, 2.0])
    assert evaluate_formula("0.0 if x <= 0.0 else x * 2", {"x": x}).tolist() == [0.0, 4.0]
    assert evaluate_formula("maximum(x, 0.0) if x > NEGATIVE_INFINITY else x", {"x": x}).tolist() == [0.0, 2.0]
    assert evaluate_formula("exp(x)", {"x": x})[1].item() == pytest.approx(math.exp(2))
