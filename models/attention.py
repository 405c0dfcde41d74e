"""Multi-head self-attention as a DaCe program in the vocabulary.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding.
"""

import math
from typing import Any

import dace
from dace.frontend.python.parser import DaceProgram

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import DataType
from stepdown.models.operators.vocabulary import (
    bias,
    causal_mask,
    contraction,
    dropout,
    key_padding_mask,
    softmax,
)

Extent = Any
"""An integer or a DaCe symbol (mypy does not know DaCe's types)."""


def symbolic_extents(batch: int | None, seq: int | None) -> tuple[Extent, Extent]:
    """Batch and sequence length as they stand in shapes: a number where fixed, the symbol B or S where not."""
    return (
        dace.symbol("B", dace.int64, positive=True) if batch is None else batch,
        dace.symbol("S", dace.int64, positive=True) if seq is None else seq,
    )


def attention_program(definition: EncoderLayer, batch: int | None, seq: int | None, dtype: DataType) -> DaceProgram:
    """Self-attention of ``definition`` without its output's dropout, residual connection and norm.

    ``out = softmax(Q K^T / sqrt(P) + masks, dropped) V W_o + b_o`` with ``Q = x W_q + b_q`` and so on; x and out are
    [B, S, E]. A query whose keys are all masked gets a zero context. Source: Vaswani et al., arXiv 1706.03762.
    """
    B, S = symbolic_extents(batch, seq)
    H, P, E = definition.heads, definition.head_size, definition.embed
    scalar: Any = dtype.dace
    factor = 1.0 / math.sqrt(P)
    biases, causal, drops = definition.bias, definition.causal, definition.attention_dropout > 0

    @dace.program
    def attention(  # type: ignore[no-untyped-def]  # DaCe takes a return annotation for a container
        x: scalar[B, S, E],
        attention_mask: dace.bool_[B, S],
        rng: dace.int64[2],
        attention_dropout: dace.float64,
        query_weight: scalar[H, P, E],
        query_bias: scalar[H, P],
        key_weight: scalar[H, P, E],
        key_bias: scalar[H, P],
        value_weight: scalar[H, P, E],
        value_bias: scalar[H, P],
        attention_output_weight: scalar[E, H, P],
        attention_output_bias: scalar[E],
    ):
        query_product = contraction(x, query_weight, "BSE,HPE->BSHP", name="query_product")
        key_product = contraction(x, key_weight, "BTE,HPE->BTHP", name="key_product")
        value_product = contraction(x, value_weight, "BTE,HPE->BTHP", name="value_product")
        if biases:
            query = bias(query_product, query_bias, "BSHP", "HP", name="query")
            key = bias(key_product, key_bias, "BTHP", "HP", name="key")
            value = bias(value_product, value_bias, "BTHP", "HP", name="value")
        else:
            query = query_product
            key = key_product
            value = value_product
        scores = contraction(query, key, "BSHP,BTHP->BHST", factor, name="scores")
        padded = key_padding_mask(scores, attention_mask, "BHST", name="padding")
        if causal:
            masked = causal_mask(padded, "BHST", name="causal")
        else:
            masked = padded
        weights = softmax(masked, "BHST", name="attention_weights")
        if drops:
            dropped = dropout(weights, rng, attention_dropout, "BHST", 0, name="attention_dropped")
        else:
            dropped = weights
        context = contraction(dropped, value, "BHST,BTHP->BSHP", name="context")
        product = contraction(context, attention_output_weight, "BSHP,EHP->BSE", name="attention_product")
        if biases:
            out = bias(product, attention_output_bias, "BSE", "E", name="attention_output")
        else:
            out = product
        return out

    return attention
