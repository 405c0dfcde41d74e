# mypy: disable-error-code="arg-type"
"""The attention program: which operators it is made of, and its values by the reference executor."""

from __future__ import annotations

import math

import dace
import pytest
import torch
from dace.sdfg import SDFG

from stepdown.models.attention import attention_program, symbolic_extents
from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.operators import CausalMask, Contraction, Dropout
from stepdown.models.operators.philox import keep_mask
from stepdown.transformations.canonical_form import operators, validate_sdfg
from stepdown.transformations.reference_executor import execute

B, S = 2, 5


def parsed(definition: EncoderLayer, batch: int | None = None, seq: int | None = None, dtype: str = "float64") -> SDFG:
    sdfg = attention_program(definition, batch, seq, resolve_dtype(dtype)).to_sdfg(simplify=True)
    for name in [n for n in sdfg.arrays if n not in {node.data for node in sdfg.nodes()[0].data_nodes()}]:
        sdfg.remove_data(name)
    return sdfg


def draw_values(definition: EncoderLayer) -> dict[str, torch.Tensor]:
    values = {
        p.container: torch.randn(p.logical_shape, dtype=torch.float64)
        for p in definition.parameters().values()
        if "norm" not in p.container and not p.container.startswith(("intermediate", "output"))
    }
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[0, 3:] = False
    mask[1] = False
    x = torch.randn(B, S, definition.embed, dtype=torch.float64)
    probability = torch.tensor(definition.attention_dropout, dtype=torch.float64)
    return values | {"x": x, "attention_mask": mask, "rng": torch.tensor([3, 9]), "attention_dropout": probability}


def by_hand(definition: EncoderLayer, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """Head by head, query by query, as in the paper's equation (1)."""
    x, heads, size = values["x"], definition.heads, definition.head_size
    keep = keep_mask(3, 9, 0, (B, heads, S, S), definition.attention_dropout)
    out = torch.zeros(B, S, definition.embed, dtype=torch.float64)
    for b in range(B):
        for h in range(heads):
            q, k, v = (
                x[b] @ values[f"{name}_weight"][h].T + values.get(f"{name}_bias", torch.zeros(heads, size).double())[h]
                for name in ("query", "key", "value")
            )
            for s in range(S):
                keys = [t for t in range(S) if values["attention_mask"][b, t] and (not definition.causal or t <= s)]
                if not keys:
                    continue
                weights = torch.softmax(q[s] @ k[keys].T / math.sqrt(size), 0)
                kept = torch.from_numpy(keep[b, h, s, keys]) / (1 - definition.attention_dropout)
                out[b, s] += values["attention_output_weight"][:, h] @ ((weights * kept) @ v[keys])
    return out + values.get("attention_output_bias", torch.zeros(definition.embed).double())


@pytest.mark.parametrize(
    "definition",
    [
        EncoderLayer(embed=6, heads=2, ffn=1),
        EncoderLayer(embed=6, heads=3, ffn=1, causal=True, attention_dropout=0.4),
        EncoderLayer(embed=5, heads=1, ffn=1, bias=False, attention_dropout=0.0),
        EncoderLayer(embed=4, heads=4, ffn=1, bias=False, causal=True),
    ],
    ids=str,
)
def test_equals_the_formula(definition: EncoderLayer) -> None:
    sdfg = parsed(definition)
    validate_sdfg(sdfg)
    values = draw_values(definition)
    torch.testing.assert_close(execute(sdfg, values)["__return"], by_hand(definition, values))


def test_operators_of_the_options() -> None:
    def kinds(**options: bool | float) -> list[str]:
        fields = {"attention_dropout": 0.0} | options
        return sorted(
            type(node).__name__ for node in operators(parsed(EncoderLayer(embed=6, heads=2, ffn=1, **fields)))
        )

    bare = ["Contraction"] * 6 + ["KeyPaddingMask", "Softmax"]
    assert kinds(bias=False) == bare
    assert kinds() == sorted([*bare, *["Bias"] * 4])
    assert kinds(bias=False, causal=True) == sorted([*bare, "CausalMask"])
    assert kinds(bias=False, attention_dropout=0.1) == sorted([*bare, "Dropout"])


def test_scale_is_the_factor_of_the_scores_alone() -> None:
    factors = {
        n.name: n.alpha for n in operators(parsed(EncoderLayer(embed=32, heads=2, ffn=1))) if type(n) is Contraction
    }
    assert factors.pop("scores") == 0.25
    assert set(factors.values()) == {1.0}


def test_dropout_site_and_causal_mask() -> None:
    nodes = operators(parsed(EncoderLayer(embed=6, heads=2, ffn=1, causal=True)))
    assert [n.site for n in nodes if isinstance(n, Dropout)] == [0]
    assert [n.gradient for n in nodes if isinstance(n, CausalMask)] == [False]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_every_value_has_the_layers_type(dtype: str) -> None:
    sdfg = parsed(EncoderLayer(embed=6, heads=2, ffn=1), dtype=dtype)
    given = {"attention_mask": dace.bool_, "rng": dace.int64, "attention_dropout": dace.float64}
    assert {name: d.dtype for name, d in sdfg.arrays.items()} == {
        name: given.get(name, resolve_dtype(dtype).dace) for name in sdfg.arrays
    }


def test_extents_are_symbols_or_numbers() -> None:
    assert symbolic_extents(8, 512) == (8, 512)
    batch, seq = symbolic_extents(None, None)
    assert (str(batch), str(seq)) == ("B", "S")
    assert isinstance(batch, dace.symbol) and isinstance(seq, dace.symbol)
    assert (batch.dtype, seq.dtype) == (dace.int64, dace.int64), "the index of a large tensor needs 64 bits"
    assert parsed(EncoderLayer(embed=6, heads=2, ffn=1), 2, 5).arrays["x"].shape == (2, 5, 6)
    assert [str(n) for n in parsed(EncoderLayer(embed=6, heads=2, ffn=1), None, 5).arrays["x"].shape] == ["B", "5", "6"]
