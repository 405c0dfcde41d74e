"""Contraction: the only matrix product of the canonical form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dace.library
import sympy
import torch
from dace import properties
from dace.sdfg import SDFG, SDFGState
from dace.transformation.transformation import ExpandTransformation

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.gradient import GradientRule
from stepdown.models.operators.operator import LEGEND, Operator, OperatorClass, check_number, data_type, extent_product
from stepdown.models.operators.scratch import operator_sdfg


def split_einsum(einsum: str) -> tuple[str, str, str]:
    """The dimensions of both operands and of the result.

    :raises CanonicalFormError: unless ``einsum`` is ``"A,B->D"`` in legend letters, no letter twice in one term, every
        letter of an operand in another term and every letter of the result in an operand.
    """
    terms = einsum.replace("->", ",").split(",")
    if einsum.count("->") != 1 or len(terms) != 3:
        raise CanonicalFormError(f'einsum "{einsum}" is not of the form "A,B->D" with two operands')
    a, b, d = terms
    for term in terms:
        if len(set(term)) != len(term) or any(letter not in LEGEND for letter in term):
            raise CanonicalFormError(
                f'term "{term}" of einsum "{einsum}" must name each dimension of "{LEGEND}" at most once'
            )
    for first, others in ((a, b + d), (b, a + d), (d, a + b)):
        for letter in first:
            if letter not in others:
                raise CanonicalFormError(f'dimension "{letter}" of einsum "{einsum}" stands in one term only')
    return a, b, d


@dace.library.node
class Contraction(Operator):
    """``d = alpha * einsum(a, b) [+ c]``.

    Shapes follow the letters of ``einsum``; sums are taken in the accumulation type. ``c`` (with ``accumulate``) is an
    input of its own with the dimensions of ``d``. Gradients are two contractions (and the gradient of ``d`` for ``c``).
    """

    operator_class = OperatorClass.CONTRACTION
    inputs = ("a", "b")
    outputs = ("d",)
    implementations: dict[str, Any] = {}
    default_implementation = "pure"

    einsum = properties.Property(dtype=str, default="", desc='Two operands and the result, "BSE,UE->BSU"')
    alpha = properties.Property(dtype=float, default=1.0, desc="Factor of the product")
    accumulate = properties.Property(dtype=bool, default=False, desc="Add operand c")

    def __init__(
        self,
        name: str = "contraction",
        einsum: str = "E,E->",
        alpha: float = 1.0,
        accumulate: bool = False,
        **kwargs: Any,
    ) -> None:
        a, b, d = split_einsum(einsum)
        super().__init__(name, "".join(dict.fromkeys(d + a + b)), **kwargs)
        self.einsum = einsum
        self.alpha = check_number(name, "alpha", alpha)
        self.accumulate = accumulate
        if accumulate:
            self.add_in_connector("c")

    def operand_dims(self) -> dict[str, str]:
        a, b, d = split_einsum(self.einsum)
        return {"a": a, "b": b, "d": d} | ({"c": d} if self.accumulate else {})

    def flop(self, sizes: Mapping[str, Any]) -> sympy.Expr:
        """One multiplication and one addition for every element of the iteration space."""
        return 2 * extent_product(self.dims, sizes)

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        product = torch.einsum(self.einsum, operands["a"], operands["b"]) * self.alpha
        return {"d": product + operands["c"] if self.accumulate else product}

    def differentiate(self, rule: GradientRule) -> None:
        a, b, d = split_einsum(self.einsum)
        given = rule.given("d")
        if "a" in rule.required:
            node = Contraction(f"{self.name}_gradient_a", f"{d},{b}->{a}", self.alpha)
            rule.add(node, {"a": given, "b": rule.operand("b")}, {"d": rule.gradient_of("a")})
        if "b" in rule.required:
            node = Contraction(f"{self.name}_gradient_b", f"{d},{a}->{b}", self.alpha)
            rule.add(node, {"a": given, "b": rule.operand("a")}, {"d": rule.gradient_of("b")})
        if self.accumulate and "c" in rule.required:
            rule.forward(given, "c")


@dace.library.register_expansion(Contraction, "pure")
class ExpandContractionPure(ExpandTransformation):
    """Maps over the result and, sequentially, over the summed dimensions: right for every layout, slow."""

    environments: list[Any] = []

    @staticmethod
    def expansion(node: Contraction, parent_state: SDFGState, parent_sdfg: SDFG) -> SDFG:
        sdfg = operator_sdfg(node, parent_state, parent_sdfg)
        state = sdfg.add_state("contract")
        sizes = node.sizes(parent_sdfg, parent_state)
        a, b, d = split_einsum(node.einsum)
        summed = [letter for letter in node.dims if letter not in d]
        scalar = data_type(sdfg.arrays["d"]).accumulate.dace
        index = {letter: f"i_{letter}" for letter in node.dims}
        sdfg.add_scalar("total", scalar, transient=True)

        entry, exit_ = state.add_map("elements", {index[letter]: f"0:{sizes[letter]}" for letter in d} or {"i_": "0:1"})
        body = SDFG(f"{node.name}_element")
        initial = body.add_state("zero")
        product = body.add_state_after(initial, "product")
        final = body.add_state_after(product, "store")
        body.add_scalar("total", scalar, transient=True)
        operands = ["a", "b"] + (["c"] if node.accumulate else [])
        for name in [*operands, "d"]:
            descriptor = sdfg.arrays[name].clone()
            descriptor.transient = False
            body.add_datadesc(name, descriptor)

        def element(name: str, dims: str) -> dace.Memlet:
            return dace.Memlet(f"{name}[{', '.join(index[letter] for letter in dims) or '0'}]")

        zero = initial.add_tasklet("zero", {}, {"out"}, "out = 0", language=dace.Language.CPP)
        zero.code.as_string = f"out = {scalar.ctype}(0);"
        initial.add_edge(zero, "out", initial.add_write("total"), None, dace.Memlet("total[0]"))
        product.add_mapped_tasklet(
            "sum",
            {index[letter]: f"0:{sizes[letter]}" for letter in summed} or {"i_": "0:1"},
            {"left": element("a", a), "right": element("b", b)},
            f"out = {scalar.ctype}(left) * {scalar.ctype}(right);",
            {"out": dace.Memlet("total[0]", wcr="lambda x, y: x + y")},
            language=dace.Language.CPP,
            schedule=dace.ScheduleType.Sequential,
            external_edges=True,
        )
        code = f"out = {scalar.ctype}({node.alpha!r}) * value" + (
            f" + {scalar.ctype}(addend);" if node.accumulate else ";"
        )
        store = final.add_tasklet(
            "store", {"value"} | ({"addend"} if node.accumulate else set()), {"out"}, code, dace.Language.CPP
        )
        final.add_edge(final.add_read("total"), None, store, "value", dace.Memlet("total[0]"))
        if node.accumulate:
            final.add_edge(final.add_read("c"), None, store, "addend", element("c", d))
        final.add_edge(store, "out", final.add_write("d"), None, element("d", d))

        for symbol in sorted(map(str, body.free_symbols)):
            if symbol not in body.symbols:
                body.add_symbol(symbol, sdfg.symbols.get(symbol, dace.int32))
        nested = state.add_nested_sdfg(
            body, set(operands), {"d"}, symbol_mapping={s: s for s in map(str, body.free_symbols)}
        )
        for name in operands:
            memlet = dace.Memlet.from_array(name, sdfg.arrays[name])
            state.add_memlet_path(state.add_read(name), entry, nested, dst_conn=name, memlet=memlet)
        memlet = dace.Memlet.from_array("d", sdfg.arrays["d"])
        state.add_memlet_path(nested, exit_, state.add_write("d"), src_conn="d", memlet=memlet)
        del sdfg.arrays["total"]
        return sdfg
