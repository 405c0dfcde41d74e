"""The encoder layer as a DaCe program in the vocabulary.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from typing import Any

import dace
from dace.frontend.python.parser import DaceProgram

from stepdown.models.attention import attention_program, symbolic_extents
from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import DataType
from stepdown.models.operators.vocabulary import add, bias, contraction, dropout, gelu, layer_norm, relu

INPUT = "x"
MASK = "attention_mask"
RNG = "rng"
PROBABILITIES = ("attention_dropout", "dropout_p", "activation_dropout")
"""Arguments that carry the dropout probabilities of a call; zero in evaluation."""

PROBABILITY_FIELDS = dict(zip(PROBABILITIES, ("attention_dropout", "dropout", "activation_dropout"), strict=True))
"""Field of the definition that each of them takes its value from in training."""

OUTPUT = "y"


def encoder_program(definition: EncoderLayer, batch: int | None, seq: int | None, dtype: DataType) -> DaceProgram:
    """The layer of ``definition`` as a program that writes ``y`` [B, S, E] from ``x`` [B, S, E].

    Post-norm: ``h = LN1(x + attention(x)); y = LN2(h + ffn(h))``. Pre-norm: ``h = x + attention(LN1(x));
    y = h + ffn(LN2(h))``. Sources: Devlin et al., arXiv 1810.04805; Xiong et al., arXiv 2002.04745.

    :param batch: fixed batch size, or None for a symbolic one; likewise ``seq``.
    """
    B, S = symbolic_extents(batch, seq)
    H, P, E, U = definition.heads, definition.head_size, definition.embed, definition.ffn
    scalar: Any = dtype.dace
    attention = attention_program(definition, batch, seq, dtype)
    biases, eps, pre = definition.bias, definition.eps, definition.norm == "pre"
    drops, activation_drops = definition.dropout > 0, definition.activation_dropout > 0
    is_relu = definition.activation == "relu"
    approximate = "tanh" if definition.activation == "gelu_tanh" else "none"

    @dace.program
    def encoder(  # type: ignore[no-untyped-def]  # DaCe takes a return annotation for a container
        x: scalar[B, S, E],
        attention_mask: dace.bool_[B, S],
        rng: dace.int64[2],
        attention_dropout: dace.float64,
        dropout_p: dace.float64,
        activation_dropout: dace.float64,
        query_weight: scalar[H, P, E],
        query_bias: scalar[H, P],
        key_weight: scalar[H, P, E],
        key_bias: scalar[H, P],
        value_weight: scalar[H, P, E],
        value_bias: scalar[H, P],
        attention_output_weight: scalar[E, H, P],
        attention_output_bias: scalar[E],
        attention_norm_weight: scalar[E],
        attention_norm_bias: scalar[E],
        intermediate_weight: scalar[U, E],
        intermediate_bias: scalar[U],
        output_weight: scalar[E, U],
        output_bias: scalar[E],
        output_norm_weight: scalar[E],
        output_norm_bias: scalar[E],
    ):
        if pre:
            attention_input = layer_norm(
                x, attention_norm_weight, attention_norm_bias, "BSE", eps, name="attention_norm"
            )
        else:
            attention_input = x
        attended = attention(
            attention_input,
            attention_mask,
            rng,
            attention_dropout,
            query_weight,
            query_bias,
            key_weight,
            key_bias,
            value_weight,
            value_bias,
            attention_output_weight,
            attention_output_bias,
        )
        if drops:
            attention_branch = dropout(attended, rng, dropout_p, "BSE", 1, name="attention_output_dropped")
        else:
            attention_branch = attended
        attention_sum = add(attention_branch, x, "BSE", name="attention_residual")
        if pre:
            hidden = attention_sum
            ffn_input = layer_norm(hidden, output_norm_weight, output_norm_bias, "BSE", eps, name="output_norm")
        else:
            hidden = layer_norm(
                attention_sum, attention_norm_weight, attention_norm_bias, "BSE", eps, name="attention_norm"
            )
            ffn_input = hidden
        intermediate_product = contraction(ffn_input, intermediate_weight, "BSE,UE->BSU", name="intermediate_product")
        if biases:
            intermediate = bias(intermediate_product, intermediate_bias, "BSU", "U", name="intermediate")
        else:
            intermediate = intermediate_product
        if is_relu:
            activated = relu(intermediate, "BSU", name="activation")
        else:
            activated = gelu(intermediate, "BSU", approximate, name="activation")
        if activation_drops:
            activation_branch = dropout(activated, rng, activation_dropout, "BSU", 2, name="activation_dropped")
        else:
            activation_branch = activated
        output_product = contraction(activation_branch, output_weight, "BSU,EU->BSE", name="output_product")
        if biases:
            output = bias(output_product, output_bias, "BSE", "E", name="output")
        else:
            output = output_product
        if drops:
            output_branch = dropout(output, rng, dropout_p, "BSE", 3, name="output_dropped")
        else:
            output_branch = output
        output_sum = add(output_branch, hidden, "BSE", name="output_residual")
        if pre:
            out = output_sum
        else:
            out = layer_norm(output_sum, output_norm_weight, output_norm_bias, "BSE", eps, name="output_norm")
        return out

    return encoder
