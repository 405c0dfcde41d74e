"""Layer definitions: what is refused, and with which sentence; parameters; the text form."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepdown.models import EncoderLayer, find_preset
from stepdown.models.errors import DefinitionError

VALID: dict[str, Any] = {"embed": 48, "heads": 3, "ffn": 100}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed": 50}, 'embed=50 is not divisible by heads=3; accepted is a multiple of "heads".'),
        ({"embed": 0}, "embed=0 was given; accepted is a positive integer."),
        ({"embed": -48}, "embed=-48 was given; accepted is a positive integer."),
        ({"embed": 48.0}, "embed=48.0 was given; accepted is a positive integer."),
        ({"embed": "48"}, "embed='48' was given; accepted is a positive integer."),
        ({"embed": None}, "embed=None was given; accepted is a positive integer."),
        ({"heads": True}, "heads=True was given; accepted is a positive integer."),
        ({"ffn": 0}, "ffn=0 was given; accepted is a positive integer."),
        ({"activation": "silu"}, """activation='silu' was given; accepted are "gelu", "gelu_tanh", "relu"."""),
        ({"activation": ["gelu"]}, """activation=['gelu'] was given; accepted are "gelu", "gelu_tanh", "relu"."""),
        ({"norm": "rms"}, """norm='rms' was given; accepted are "post", "pre"."""),
        ({"eps": -1e-12}, "eps=-1e-12 was given; accepted is a finite number of at least 0."),
        ({"eps": math.inf}, "eps=inf was given; accepted is a finite number of at least 0."),
        ({"eps": math.nan}, "eps=nan was given; accepted is a finite number of at least 0."),
        ({"eps": False}, "eps=False was given; accepted is a finite number of at least 0."),
        ({"bias": 1}, "bias=1 was given; accepted are True and False."),
        ({"causal": None}, "causal=None was given; accepted are True and False."),
        ({"dropout": 1.0}, "dropout=1.0 was given; accepted is a probability of at least 0 and below 1."),
        ({"dropout": -0.1}, "dropout=-0.1 was given; accepted is a probability of at least 0 and below 1."),
        ({"attention_dropout": math.nan}, "attention_dropout=nan was given; accepted is a probability of at"),
        ({"activation_dropout": "0.1"}, "activation_dropout='0.1' was given; accepted is a probability of at"),
        ({"dropout": True}, "dropout=True was given; accepted is a probability of at least 0 and below 1."),
    ],
)
def test_impossible_layer_is_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        EncoderLayer(**{**VALID, **changes})
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, ValueError)


def test_layer_is_frozen_and_keyword_only() -> None:
    layer = EncoderLayer(**VALID)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.embed = 96  # type: ignore[misc]
    with pytest.raises(TypeError):
        EncoderLayer(48, 3, 100)  # type: ignore[misc]


def test_layers_compare_by_value_whatever_the_number_type() -> None:
    numpy_sizes = EncoderLayer(embed=np.int64(48), heads=np.int32(3), ffn=100, dropout=0)  # type: ignore[arg-type]
    assert numpy_sizes == EncoderLayer(**VALID, dropout=0.0)
    assert hash(numpy_sizes) == hash(EncoderLayer(**VALID, dropout=0.0))
    assert json.dumps(numpy_sizes.to_dict()) == json.dumps(EncoderLayer(**VALID, dropout=0.0).to_dict())
    assert numpy_sizes.head_size == 16


sizes = st.integers(1, 200)
probabilities = st.floats(0, 1, exclude_max=True)
layers = st.builds(
    lambda heads, head_size, **rest: EncoderLayer(embed=heads * head_size, heads=heads, **rest),
    heads=st.integers(1, 16),
    head_size=sizes,
    ffn=sizes,
    activation=st.sampled_from(["gelu", "gelu_tanh", "relu"]),
    norm=st.sampled_from(["pre", "post"]),
    eps=st.floats(0, 1),
    bias=st.booleans(),
    causal=st.booleans(),
    dropout=probabilities,
    attention_dropout=probabilities,
    activation_dropout=probabilities,
)


@given(layers)
def test_text_form_gives_the_same_layer_back(layer: EncoderLayer) -> None:
    assert EncoderLayer.from_dict(json.loads(json.dumps(layer.to_dict()))) == layer


@given(layers)
def test_parameter_shapes_are_views_of_each_other(layer: EncoderLayer) -> None:
    parameters = layer.parameters()
    assert len(parameters) == (16 if layer.bias else 10)
    assert len({parameter.container for parameter in parameters.values()}) == len(parameters)
    for name, parameter in parameters.items():
        assert parameter.name == name
        assert len(parameter.dims) == len(parameter.logical_shape)
        assert parameter.elements == math.prod(parameter.shape) == math.prod(parameter.logical_shape)


def test_parameters_of_bert_large() -> None:
    parameters = find_preset("bert-large").layer.parameters()
    query, dense = parameters["attention.self.query.weight"], parameters["attention.output.dense.weight"]
    assert (query.container, query.dims, query.logical_shape) == ("query_weight", "HPE", (16, 64, 1024))
    assert (dense.container, dense.dims, dense.logical_shape) == ("attention_output_weight", "EHP", (1024, 16, 64))
    assert parameters["intermediate.dense.weight"].shape == (4096, 1024)
    assert parameters["output.dense.weight"].dims == "EU"
    assert [parameter.container for parameter in parameters.values()] == [
        *("query_weight", "query_bias", "key_weight", "key_bias", "value_weight", "value_bias"),
        *("attention_output_weight", "attention_output_bias", "attention_norm_weight", "attention_norm_bias"),
        *("intermediate_weight", "intermediate_bias", "output_weight", "output_bias"),
        *("output_norm_weight", "output_norm_bias"),
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**VALID}, 'layer type "None" is unknown; accepted is "encoder_layer".'),
        ({"type": "decoder", **VALID}, 'layer type "decoder" is unknown; accepted is "encoder_layer".'),
        ({"type": "encoder_layer", **VALID, "gate": True}, 'field "gate" is unknown; accepted are "embed", "heads", '),
        ({"type": "encoder_layer", "embed": 48}, 'field "heads", "ffn" is missing in a layer of "embed".'),
    ],
)
def test_bad_text_form_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        EncoderLayer.from_dict(values)
    assert str(caught.value).startswith(message)


def test_dropout_sites() -> None:
    layer = EncoderLayer(**VALID, dropout=0.1, attention_dropout=0.2, activation_dropout=0.3)
    assert layer.dropout_sites == (0.2, 0.1, 0.3, 0.1)
    assert [layer.dropout_shape(site, 2, 5) for site in range(4)] == [(2, 3, 5, 5), (2, 5, 48), (2, 5, 100), (2, 5, 48)]
