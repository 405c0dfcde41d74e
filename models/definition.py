"""The definition of an encoder layer: its sizes and options, validated, and the parameters that follow from them.

Dimension legend: `H` head, `P` head size, `E` embedding (`E = H * P`), `U` feed-forward size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from stepdown.models.errors import DefinitionError

LAYER_TYPE = "encoder_layer"
"""What :meth:`EncoderLayer.to_dict` says under ``"type"``."""

ACTIVATIONS = ("gelu", "gelu_tanh", "relu")
"""Accepted activations: GELU through erf, GELU through tanh, and ReLU."""

NORMS = ("post", "pre")
"""Accepted places of the layer normalization: after the residual connection (BERT) or before each block (GPT-2)."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a layer.

    ``name`` and ``shape`` are those of Hugging Face's ``BertLayer``. ``container`` is the parameter's name in the SDFG,
    where it has the logical dimensions ``dims`` (a letter each, after the legend) of sizes ``logical_shape``. Both
    shapes list the same elements in the same order, so that one is a reshaped view of the other.
    """

    name: str
    container: str
    logical_shape: tuple[int, ...]
    dims: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class EncoderLayer:
    """A transformer encoder layer: self-attention and a feed-forward network, each with a residual connection.

    With `norm="post"` (BERT) it computes `h = LN1(x + attention(x)); y = LN2(h + ffn(h))`, with `norm="pre"`
    `h = x + attention(LN1(x)); y = h + ffn(LN2(h))`. LN1 is Hugging Face's `attention.output.LayerNorm` and LN2 its
    `output.LayerNorm` in both.

    :param embed: embedding size `E`.
    :param heads: number of attention heads `H`; it must divide `embed`.
    :param ffn: size `U` of the feed-forward network's hidden vector.
    :param activation: "gelu" (erf), "gelu_tanh" or "relu".
    :param norm: "post" or "pre".
    :param eps: what layer normalization adds to the variance.
    :param bias: whether the six linear maps have biases; layer normalization always has its weight and bias.
    :param causal: whether a position attends to itself and earlier positions only.
    :param dropout: probability of dropping an element of the attention's and of the feed-forward network's output.
    :param attention_dropout: probability of dropping an attention weight.
    :param activation_dropout: probability of dropping an element after the activation.
    :raises DefinitionError: when no such layer exists.
    """

    embed: int
    heads: int
    ffn: int
    activation: str = "gelu"
    norm: str = "post"
    eps: float = 1e-12
    bias: bool = True
    causal: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("embed", "heads", "ffn"):
            self._set(name, _positive_integer(name, getattr(self, name)))
        if self.embed % self.heads:
            raise DefinitionError(
                f'embed={self.embed} is not divisible by heads={self.heads}; accepted is a multiple of "heads".'
            )
        _one_of("activation", self.activation, ACTIVATIONS)
        _one_of("norm", self.norm, NORMS)
        self._set("eps", _real("eps", self.eps, "a finite number of at least 0"))
        if not 0 <= self.eps < math.inf:
            raise DefinitionError(f"eps={self.eps} was given; accepted is a finite number of at least 0.")
        for name in ("bias", "causal"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise DefinitionError(f"{name}={value!r} was given; accepted are True and False.")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            accepted = "a probability of at least 0 and below 1"
            probability = _real(name, getattr(self, name), accepted)
            if not 0 <= probability < 1:
                raise DefinitionError(f"{name}={probability} was given; accepted is {accepted}.")
            self._set(name, probability)

    def _set(self, name: str, value: float) -> None:
        """Normalise a field (NumPy's numbers become Python's), so that equal layers have equal text."""
        object.__setattr__(self, name, value)

    @property
    def head_size(self) -> int:
        """The size `P` of one head: `embed / heads`."""
        return self.embed // self.heads

    @property
    def dropout_sites(self) -> tuple[float, float, float, float]:
        """The dropout probabilities by operator number.

        0: attention weights `[B, H, S, T]`; 1: attention output `[B, S, E]`; 2: after the activation `[B, S, U]`;
        3: feed-forward output `[B, S, E]`.
        """
        return self.attention_dropout, self.dropout, self.activation_dropout, self.dropout

    def dropout_shape(self, site: int, batch: int, seq: int) -> tuple[int, ...]:
        """The logical shape of the values that dropout number ``site`` works on."""
        return (
            (batch, self.heads, seq, seq),
            (batch, seq, self.embed),
            (batch, seq, self.ffn),
            (batch, seq, self.embed),
        )[site]

    def parameters(self) -> dict[str, Parameter]:
        """The parameters by Hugging Face's name, in the order of its ``BertLayer``."""
        size = {"H": self.heads, "P": self.head_size, "E": self.embed, "U": self.ffn}
        found: dict[str, Parameter] = {}

        def add(name: str, container: str, dims: str, shape: tuple[int, ...]) -> None:
            found[name] = Parameter(name, container, tuple(size[dim] for dim in dims), dims, shape)

        def linear(name: str, container: str, dims: str, outputs: str, shape: tuple[int, int]) -> None:
            add(f"{name}.weight", f"{container}_weight", dims, shape)
            if self.bias:
                add(f"{name}.bias", f"{container}_bias", outputs, shape[:1])

        def norm(name: str, container: str) -> None:
            add(f"{name}.weight", f"{container}_weight", "E", (self.embed,))
            add(f"{name}.bias", f"{container}_bias", "E", (self.embed,))

        square = (self.embed, self.embed)
        for projection in ("query", "key", "value"):
            linear(f"attention.self.{projection}", projection, "HPE", "HP", square)
        linear("attention.output.dense", "attention_output", "EHP", "E", square)
        norm("attention.output.LayerNorm", "attention_norm")
        linear("intermediate.dense", "intermediate", "UE", "U", (self.ffn, self.embed))
        linear("output.dense", "output", "EU", "E", (self.embed, self.ffn))
        norm("output.LayerNorm", "output_norm")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The fields, with ``"type": "encoder_layer"`` before them, as JSON can hold them."""
        return {"type": LAYER_TYPE, **{field.name: getattr(self, field.name) for field in fields(self)}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EncoderLayer":
        """The layer that :meth:`to_dict` described.

        :raises DefinitionError: when the type or a field is unknown, a size is missing, or no such layer exists.
        """
        values = dict(values)
        kind = values.pop("type", None)
        if kind != LAYER_TYPE:
            raise DefinitionError(f'layer type "{kind}" is unknown; accepted is "{LAYER_TYPE}".')
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise DefinitionError(f"field {_quoted(unknown)} is unknown; accepted are {_quoted(known)}.")
        missing = [name for name in ("embed", "heads", "ffn") if name not in values]
        if missing:
            raise DefinitionError(f"field {_quoted(missing)} is missing in a layer of {_quoted(values)}.")
        return cls(**values)


def _quoted(names: Mapping[str, Any] | list[str] | tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _positive_integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value <= 0:
        raise DefinitionError(f"{name}={value!r} was given; accepted is a positive integer.")
    return int(value)


def _real(name: str, value: object, accepted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DefinitionError(f"{name}={value!r} was given; accepted is {accepted}.")
    return float(value)


def _one_of(name: str, value: object, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise DefinitionError(f"{name}={value!r} was given; accepted are {_quoted(accepted)}.")
