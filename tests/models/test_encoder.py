"""The encoder's program: its operators for every option, its arguments, its values in evaluation."""

from __future__ import annotations

import itertools

import pytest
import torch
from dace.sdfg import SDFG

from stepdown.models.definition import ACTIVATIONS, NORMS, EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.encoder import PROBABILITIES, PROBABILITY_FIELDS, encoder_program
from stepdown.models.operators import Dropout, Gelu, LayerNorm
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.transformations.canonical_form import operators, the_state
from stepdown.transformations.reference_executor import execute


def parsed(definition: EncoderLayer, dtype: str = "float64") -> SDFG:
    return encoder_program(definition, None, None, resolve_dtype(dtype)).to_sdfg(simplify=True)


def used(sdfg: SDFG) -> set[str]:
    """Arguments that some operator reads."""
    return {n.data for n in the_state(sdfg).data_nodes() if not sdfg.arrays[n.data].transient} - {"__return"}


@pytest.mark.parametrize(("norm", "activation", "bias"), list(itertools.product(NORMS, ACTIVATIONS, [True, False])))
def test_values_in_evaluation(norm: str, activation: str, bias: bool) -> None:
    """With every probability at zero the program is the PyTorch layer in evaluation, dropout operators and all."""
    definition = EncoderLayer(
        embed=6, heads=2, ffn=5, norm=norm, activation=activation, bias=bias, eps=1e-5, activation_dropout=0.3
    )
    reference = ReferenceEncoderLayer(definition).double().eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_()
    values = {
        p.container: reference.get_parameter(name).detach().reshape(p.logical_shape)
        for name, p in definition.parameters().items()
    }
    mask = torch.tensor([[True, True, True, False], [False, True, False, True]])
    values |= {"x": torch.randn(2, 4, 6, dtype=torch.float64), "attention_mask": mask, "rng": torch.tensor([1, 2])}
    values |= {name: torch.zeros((), dtype=torch.float64) for name in PROBABILITIES}
    y = execute(parsed(definition), values)["__return"]
    torch.testing.assert_close(y, reference(values["x"], attention_mask=mask).detach())


def test_arguments_are_the_layers_parameters_and_what_a_call_needs() -> None:
    definition = EncoderLayer(embed=6, heads=2, ffn=5, activation_dropout=0.1)
    sdfg = parsed(definition)
    containers = {p.container: p for p in definition.parameters().values()}
    assert used(sdfg) == {"x", "attention_mask", "rng", *PROBABILITIES, *containers}
    for name, parameter in containers.items():
        assert sdfg.arrays[name].shape == parameter.logical_shape


def test_without_biases_none_is_read() -> None:
    definition = EncoderLayer(embed=6, heads=2, ffn=5, bias=False)
    biases = {name for name in used(parsed(definition)) if name.endswith("_bias")}
    assert biases == {"attention_norm_bias", "output_norm_bias"}


@pytest.mark.parametrize(
    ("attention", "other", "activation"), list(itertools.product([0.0, 0.1], [0.0, 0.2], [0.0, 0.3]))
)
def test_dropout_sites(attention: float, other: float, activation: float) -> None:
    """Operators for the sites with a probability, each with its own number and the argument of its field."""
    definition = EncoderLayer(
        embed=6, heads=2, ffn=5, attention_dropout=attention, dropout=other, activation_dropout=activation
    )
    sdfg = parsed(definition)
    state = the_state(sdfg)
    found = {}
    for node in operators(sdfg):
        if isinstance(node, Dropout):
            (edge,) = (e for e in state.in_edges(node) if e.dst_conn == "p")
            found[node.site] = getattr(definition, PROBABILITY_FIELDS[edge.data.data])
    assert found == {site: p for site, p in enumerate(definition.dropout_sites) if p > 0}


@pytest.mark.parametrize("norm", NORMS)
def test_norms_have_the_layers_eps_and_weights(norm: str) -> None:
    sdfg = parsed(EncoderLayer(embed=6, heads=2, ffn=5, norm=norm, eps=3e-4))
    norms = [node for node in operators(sdfg) if isinstance(node, LayerNorm)]
    assert [node.name for node in norms] == ["attention_norm", "output_norm"]
    assert [node.eps for node in norms] == [3e-4, 3e-4]
    for node in norms:
        weights = {e.data.data for e in the_state(sdfg).in_edges(node) if e.dst_conn in ("weight", "bias")}
        assert weights == {f"{node.name}_weight", f"{node.name}_bias"}


def test_gelu_has_the_definitions_form() -> None:
    for activation, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        nodes = operators(parsed(EncoderLayer(embed=6, heads=2, ffn=5, activation=activation)))
        assert [node.approximate for node in nodes if isinstance(node, Gelu)] == [approximate]
