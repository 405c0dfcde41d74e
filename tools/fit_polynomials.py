"""Make the polynomial coefficients of ``stepdown/math.h`` again.

Every polynomial is a weighted minimax fit (Remez exchange, 50 digits) whose coefficients are then rounded.

``python tools/fit_polynomials.py`` rewrites the table in the header; ``--check`` compares it and changes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mpmath
import numpy
from mpmath import mpf

HEADER = Path(__file__).resolve().parents[1] / "models" / "operators" / "include" / "stepdown" / "math.h"
BEGIN = "// Table written by tools/fit_polynomials.py."
END = "// End of the table."
DIGITS = 50
EXCHANGES = 30
GRID = 400

Function = Callable[[mpf], mpf]


@dataclass(frozen=True)
class Fit:
    """One polynomial: ``function`` on ``[low, high]`` with the error multiplied by ``weight`` as small as can be.

    :param name: of the array in the header.
    :param degree: of the polynomial.
    :param single: round to float32 instead of float64.
    """

    name: str
    function: Function
    weight: Function
    low: mpf
    high: mpf
    degree: int
    single: bool


def remez(function: Function, weight: Function, low: mpf, high: mpf, degree: int) -> list[mpf]:
    """Coefficients, lowest power first, that make the largest weighted error on ``[low, high]`` least."""
    count = degree + 2
    middle, half = (low + high) / 2, (high - low) / 2
    nodes = [middle - half * mpmath.cos(mpmath.pi * (2 * k + 1) / (2 * count)) for k in range(count)]
    grid = [middle - half * mpmath.cos(mpmath.pi * (k + mpf(1) / 2) / GRID) for k in range(GRID)]
    grid = [low, *grid, high]
    values = [function(x) for x in grid]
    weights = [weight(x) for x in grid]
    coefficients: list[mpf] = []
    for _ in range(EXCHANGES):
        matrix = mpmath.matrix(count, count)
        right = mpmath.matrix(count, 1)
        for row, x in enumerate(nodes):
            for power in range(degree + 1):
                matrix[row, power] = x**power
            matrix[row, count - 1] = (-1) ** row / weight(x)
            right[row] = function(x)
        solution = mpmath.lu_solve(matrix, right)
        coefficients = [solution[k] for k in range(count - 1)]
        errors = [
            w * (sum(c * x**power for power, c in enumerate(coefficients)) - v)
            for x, v, w in zip(grid, values, weights, strict=True)
        ]
        moved = extremes(grid, errors, count)
        if moved == nodes:
            break
        nodes = moved
    return coefficients


def extremes(grid: list[mpf], errors: list[mpf], count: int) -> list[mpf]:
    """The ``count`` alternating extremes of an error curve: the largest of each run of one sign."""
    peaks: list[int] = []
    for k, error in enumerate(errors):
        if peaks and (error > 0) == (errors[peaks[-1]] > 0):
            if abs(error) > abs(errors[peaks[-1]]):
                peaks[-1] = k
        else:
            peaks.append(k)
    while len(peaks) > count:
        peaks.pop(0 if abs(errors[peaks[0]]) < abs(errors[peaks[-1]]) else -1)
    if len(peaks) < count:
        raise ArithmeticError(f"the error curve has {len(peaks)} extremes where a minimax fit has {count}")
    return [grid[k] for k in peaks]


def rounded(value: mpf, single: bool) -> float:
    """The float32 or float64 nearest to ``value``."""
    return float(numpy.float32(float(value))) if single else float(value)


def coefficients_of(fit: Fit) -> list[float]:
    """Coefficients of a fit, lowest power first, each a float32 or float64."""
    return [rounded(c, fit.single) for c in remez(fit.function, fit.weight, fit.low, fit.high, fit.degree)]


def largest_error(fit: Fit, coefficients: list[float]) -> float:
    """Largest weighted error of the rounded polynomial, in exact arithmetic."""
    points = [fit.low + (fit.high - fit.low) * k / GRID for k in range(GRID + 1)]
    return float(
        max(
            abs(fit.weight(x) * (sum(mpf(c) * x**k for k, c in enumerate(coefficients)) - fit.function(x)))
            for x in points
        )
    )


def taylor_safe(function: Function, limit: Callable[[mpf], mpf]) -> Function:
    """``function`` with its removable singularity at zero replaced by a series."""
    return lambda x: limit(x) if abs(x) < mpf(10) ** -8 else function(x)


def fits() -> list[Fit]:
    """All polynomials of the header."""
    half_ln2 = mpmath.log(2) / 2 * mpf("1.0001")
    two_over_root_pi = 2 / mpmath.sqrt(mpmath.pi)

    # exp(r) = 1 + r + r^2 q(r); relative error.
    exp_tail = taylor_safe(lambda r: (mpmath.exp(r) - 1 - r) / r**2, lambda r: mpf(1) / 2 + r / 6 + r**2 / 24)

    def exp_weight(r: mpf) -> mpf:
        return r**2 / mpmath.exp(r) + mpf(10) ** -4

    # erf(x) = x + x q(x^2); relative error.
    def erf_center(y: mpf) -> mpf:
        if y < mpf(10) ** -16:
            return two_over_root_pi * (1 - y / 3) - 1
        x = mpmath.sqrt(y)
        return mpmath.erf(x) / x - 1

    def erf_center_weight(y: mpf) -> mpf:
        return 1 / (1 + erf_center(y))

    # erf(x) = 1 - exp(q(x - 1)) for x >= 1; absolute error.
    def erf_tail(t: mpf) -> mpf:
        return mpmath.log(mpmath.erfc(t + 1))

    def erf_tail_weight(t: mpf) -> mpf:
        return mpmath.erfc(t + 1)

    # tanh(x) = x + x^3 q(x^2); relative error.
    def tanh_center(y: mpf) -> mpf:
        if y < mpf(10) ** -14:
            return -mpf(1) / 3 + 2 * y / 15 - 17 * y**2 / 315
        x = mpmath.sqrt(y)
        return (mpmath.tanh(x) / x - 1) / y

    def tanh_center_weight(y: mpf) -> mpf:
        return y / (1 + y * tanh_center(y)) + mpf(10) ** -3

    one, zero = mpf(1), mpf(0)
    return [
        Fit("exp_tail_float", exp_tail, exp_weight, -half_ln2, half_ln2, 4, True),
        Fit("exp_tail_double", exp_tail, exp_weight, -half_ln2, half_ln2, 10, False),
        Fit("erf_center_float", erf_center, erf_center_weight, zero, one, 6, True),
        Fit("erf_center_double", erf_center, erf_center_weight, zero, one, 13, False),
        Fit("erf_tail_float", erf_tail, erf_tail_weight, zero, 3 * one, 7, True),
        Fit("erf_tail_double", erf_tail, erf_tail_weight, zero, 5 * one, 18, False),
        Fit("tanh_center_float", tanh_center, tanh_center_weight, zero, one, 6, True),
        Fit("tanh_center_double", tanh_center, tanh_center_weight, zero, one, 14, False),
    ]


def table() -> str:
    """The C++ table, lines of at most 120 characters."""
    lines = [BEGIN]
    for fit in fits():
        coefficients = coefficients_of(fit)
        print(f"{fit.name}: degree {fit.degree}, largest weighted error {largest_error(fit, coefficients):.2g}")
        kind, suffix, digits = ("float", "f", 9) if fit.single else ("double", "", 17)
        texts = [f"{c:.{digits - 1}e}{suffix}" for c in coefficients]
        lines.append(f"inline constexpr {kind} {fit.name}[] = {{")
        lines.extend("    " + ", ".join(texts[k : k + 4]) + "," for k in range(0, len(texts), 4))
        lines.append("};")
    lines.append(END)
    return "\n".join(lines)


def main() -> int:
    """Rewrite the header's table, or with ``--check`` say whether it is the one that the fits give."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, change nothing; exit status 1 on a difference")
    check = parser.parse_args().check
    mpmath.mp.dps = DIGITS
    text = HEADER.read_text()
    start, stop = text.index(BEGIN), text.index(END) + len(END)
    wanted = table()
    if text[start:stop] == wanted:
        return 0
    if check:
        print(f'the table in "{HEADER.name}" is not the one that the fits give', file=sys.stderr)
        return 1
    HEADER.write_text(text[:start] + wanted + text[stop:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
