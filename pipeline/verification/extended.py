"""The encoder layer in extended precision: the oracle of float64 layers.

Written out forward and backward in NumPy's long double, without autograd, so that it is also a second opinion on the
PyTorch reference. Matrix products are split into float64 products that are exact (Ozaki, Ogita, Oishi and Rump,
"Error-free transformations of matrix multiplication", Numerical Algorithms 59, 2012).

Dimension legend: `B` batch, `S` query position, `T` key position, `H` head, `P` head size, `E` embedding,
`U` feed-forward size.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import OptionError
from stepdown.pipeline.verification.draws import OUTPUT, gradient_name

Extended = np.longdouble
Array = NDArray[Any]

_PI = Extended("3.14159265358979323846264338327950288")
_ERF_IS_ONE = 6.6
_ERF_NODES = 32
_ERF_TERMS = 13
_SLICES = 3


def require_extended_precision() -> None:
    """Check that this machine's long double is longer than float64.

    :raises OptionError: when it is not, so that nothing here could judge float64.
    """
    bits = np.finfo(Extended).nmant
    if bits < 60:
        raise OptionError(
            f"a float64 layer was given on a machine whose long double has {bits} bits of fraction; "
            "accepted there are float32, float16 and bfloat16, because float64 needs 60 bits to be verified."
        )


def matmul(a: Array, b: Array) -> Array:
    """`a @ b` for long double `[..., M, K]` and `[..., K, N]`, to about 2^-60 of the largest summands."""
    # Products of one order are added in float64: up to three, which takes two more bits.
    bits = (51 - int(a.shape[-1]).bit_length()) // 2
    (left, left_scale), (right, right_scale) = _slices(a, -1, bits), _slices(b, -2, bits)
    total: Array = np.zeros((), Extended)
    for order in reversed(range(_SLICES)):
        exact = sum(left[place] @ right[order - place] for place in range(order + 1))
        total = total * Extended(2.0**-bits) + exact
    return total * (left_scale * right_scale * Extended(2.0 ** (-2 * bits)))


def _slices(values: Array, axis: int, bits: int) -> tuple[list[Array], Array]:
    """Integers of at most ``bits`` bits as float64, the most significant first, and the scale of each row."""
    scale = np.ldexp(Extended(1), np.frexp(np.abs(values).max(axis, keepdims=True))[1])
    rest, slices = values * (Extended(2.0**bits) / scale), []
    for _ in range(_SLICES):
        integers = np.rint(rest)
        rest = (rest - integers) * Extended(2.0**bits)
        slices.append(integers.astype(np.float64))
    return slices, scale


def erf(x: Array) -> Array:
    """The error function: a Taylor series around the nearest of its tabulated values.

    `erf(c + h) = erf(c) + erf'(c) sum_n a_n h^(n+1) / (n+1)`, where `exp(-2 c h - h^2) = sum_n a_n h^n`.
    """
    near = np.where(np.abs(x) < _ERF_IS_ONE, x, 0)
    place = np.rint(near * _ERF_NODES).astype(np.int64)
    centre = place / Extended(_ERF_NODES)
    step = near - centre
    before, now, power = np.zeros_like(near), np.ones_like(near), step
    total = step
    for order in range(1, _ERF_TERMS):
        before, now = now, (centre * now + before) * (Extended(-2) / order)
        power = power * step
        total = total + now * power / (order + 1)
    table = _erf_table()[place + round(_ERF_IS_ONE * _ERF_NODES) + 1]
    value = table + 2 / np.sqrt(_PI) * np.exp(-centre * centre) * total
    return np.where(np.abs(x) < _ERF_IS_ONE, value, np.sign(x))


@functools.cache
def _erf_table() -> Array:
    """erf at the multiples of 1 / 32, by `2 / sqrt(pi) exp(-x^2) sum_n 2^n x^(2n+1) / (2n+1)!!`: nothing cancels."""
    last = round(_ERF_IS_ONE * _ERF_NODES) + 1
    x = np.arange(-last, last + 1) / Extended(_ERF_NODES)
    term = total = x
    factor, odd = 2 * x * x, 1
    while np.any(np.abs(term) > np.finfo(Extended).eps / 8 * np.abs(total)):
        odd += 2
        term = term * (factor / odd)
        total = total + term
    return 2 / np.sqrt(_PI) * np.exp(-x * x) * total


class ExtendedEncoderLayer:
    """An encoder layer's output and gradients in long double.

    :param definition: the layer.
    :param parameters: by Hugging Face's names.
    :raises OptionError: where long double is no longer than float64.
    """

    def __init__(self, definition: EncoderLayer, parameters: Mapping[str, Array]) -> None:
        require_extended_precision()
        self.definition = definition
        self.parameters = {name: value.astype(Extended) for name, value in parameters.items()}
        self.gradients: dict[str, Array] = {}

    def run(self, x: Array, upstream: Array, allowed: Array | None, keep: Mapping[int, Array]) -> dict[str, Array]:
        """The output and the gradients of `sum(y * upstream)`, by name.

        :param x: `[B, S, E]`
        :param upstream: `[B, S, E]`
        :param allowed: boolean, broadcasts to `[B, H, S, T]`, or None where every query attends to every key.
        :param keep: boolean dropout masks by site number; a site without one drops nothing.
        """
        x, upstream = x.astype(Extended), upstream.astype(Extended)
        first, second = "attention.output.LayerNorm", "output.LayerNorm"
        self.gradients = {}
        if self.definition.norm == "post":
            attended, attend_back = self._attend(x, allowed, keep)
            hidden, first_back = self._normalize(x + attended, first)
            fed, feed_back = self._feed_forward(hidden, keep)
            y, second_back = self._normalize(hidden + fed, second)
            d_sum = second_back(upstream)
            d_sum = first_back(d_sum + feed_back(d_sum))
            dx = d_sum + attend_back(d_sum)
        else:
            normal, first_back = self._normalize(x, first)
            attended, attend_back = self._attend(normal, allowed, keep)
            hidden = x + attended
            inner, second_back = self._normalize(hidden, second)
            fed, feed_back = self._feed_forward(inner, keep)
            y = hidden + fed
            d_hidden = upstream + second_back(feed_back(upstream))
            dx = d_hidden + first_back(attend_back(d_hidden))
        ordered = {gradient_name(name): self.gradients[name] for name in self.parameters}
        return {OUTPUT: y, gradient_name("x"): dx, **ordered}

    def _linear(self, x: Array, name: str) -> tuple[Array, Any]:
        weight, bias = self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias")
        rows = x.reshape(-1, x.shape[-1])
        y = matmul(rows, weight.T)
        if bias is not None:
            y = y + bias

        def back(dy: Array) -> Array:
            d_rows = dy.reshape(-1, dy.shape[-1])
            self.gradients[f"{name}.weight"] = matmul(d_rows.T, rows)
            if bias is not None:
                self.gradients[f"{name}.bias"] = d_rows.sum(0)
            return matmul(d_rows, weight).reshape(x.shape)

        return y.reshape(*x.shape[:-1], -1), back

    def _normalize(self, x: Array, name: str) -> tuple[Array, Any]:
        """`y = (x - mean) * rstd * gamma + beta`"""
        gamma, beta = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        centred = x - x.mean(-1, keepdims=True)
        rstd = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + Extended(self.definition.eps))
        normal = centred * rstd

        def back(dy: Array) -> Array:
            self.gradients[f"{name}.weight"] = (dy * normal).sum((0, 1))
            self.gradients[f"{name}.bias"] = dy.sum((0, 1))
            d_normal = dy * gamma
            along = (d_normal * normal).mean(-1, keepdims=True)
            return rstd * (d_normal - d_normal.mean(-1, keepdims=True) - normal * along)

        return normal * gamma + beta, back

    def _drop(self, x: Array, site: int, keep: Mapping[int, Array]) -> tuple[Array, Any]:
        if site not in keep:
            return x, lambda dy: dy
        factor = keep[site] / (1 - Extended(self.definition.dropout_sites[site]))
        return x * factor, lambda dy: dy * factor

    def _attend(self, x: Array, allowed: Array | None, keep: Mapping[int, Array]) -> tuple[Array, Any]:
        batch, seq, embed = x.shape
        heads, size = self.definition.heads, self.definition.head_size
        scale = 1 / np.sqrt(Extended(size))
        projected = [self._linear(x, f"attention.self.{name}") for name in ("query", "key", "value")]
        query, key, value = (y.reshape(batch, seq, heads, size).swapaxes(1, 2) for y, _ in projected)
        scores = matmul(query, key.swapaxes(2, 3)) * scale
        mask = np.ones_like(scores, bool) if allowed is None else np.broadcast_to(allowed, scores.shape)
        # A query without keys has the maximum 0 and the sum 1, which makes all its weights zero.
        top = np.where(mask, scores, -np.inf).max(-1, keepdims=True)
        powers = np.where(mask, np.exp(np.where(mask, scores - np.where(np.isfinite(top), top, 0), 0)), 0)
        total = powers.sum(-1, keepdims=True)
        weights = powers / np.where(total == 0, 1, total)
        dropped, drop_back = self._drop(weights, 0, keep)
        context = matmul(dropped, value).swapaxes(1, 2).reshape(batch, seq, embed)
        dense, dense_back = self._linear(context, "attention.output.dense")
        output, output_back = self._drop(dense, 1, keep)

        def back(dy: Array) -> Array:
            d_context = dense_back(output_back(dy)).reshape(batch, seq, heads, size).swapaxes(1, 2)
            d_weights = drop_back(matmul(d_context, value.swapaxes(2, 3)))
            d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * scale
            d_heads = (
                matmul(d_scores, key),
                matmul(d_scores.swapaxes(2, 3), query),
                matmul(dropped.swapaxes(2, 3), d_context),
            )
            return sum(
                linear_back(d_head.swapaxes(1, 2).reshape(batch, seq, embed))
                for (_, linear_back), d_head in zip(projected, d_heads, strict=True)
            )

        return output, back

    def _feed_forward(self, x: Array, keep: Mapping[int, Array]) -> tuple[Array, Any]:
        inner, inner_back = self._linear(x, "intermediate.dense")
        active, slope = self._activate(inner)
        dropped, active_back = self._drop(active, 2, keep)
        dense, dense_back = self._linear(dropped, "output.dense")
        output, output_back = self._drop(dense, 3, keep)
        return output, lambda dy: inner_back(active_back(dense_back(output_back(dy))) * slope)

    def _activate(self, x: Array) -> tuple[Array, Array]:
        """The activation and its derivative."""
        if self.definition.activation == "relu":
            return np.maximum(x, 0), (x > 0).astype(Extended)
        if self.definition.activation == "gelu":
            share = (1 + erf(x / np.sqrt(Extended(2)))) / 2
            return x * share, share + x * np.exp(-x * x / 2) / np.sqrt(2 * _PI)
        root, cubic = np.sqrt(2 / _PI), Extended(0.044715)
        bend = np.tanh(root * (x + cubic * x**3))
        slope = (1 - bend * bend) * root * (1 + 3 * cubic * x * x)
        return x * (1 + bend) / 2, (1 + bend) / 2 + x * slope / 2
