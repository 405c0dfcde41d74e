"""A training step of the BERT layer counted by hand, three times, and what a compiled layer moves instead.

Every kernel reads each distinct input once and writes each output once; masks are drawn again. Vectors (biases,
statistics, the generator's pair) are left out: together they are less than 0.1 million words. The layer is post-norm,
with GELU and without dropout after it. Source of the groups: Ivanov et al., arXiv 2007.00072, section 4. A fourth
count, of the forward pass alone, is the paper's own.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepdown.models.definition import EncoderLayer
from stepdown.pipeline.analysis.counts import GraphCounts

QKV = ("query", "key", "value")


@dataclass(frozen=True)
class HandKernel:
    """A kernel: the dimensions of what it reads and writes, separated by spaces, and the operators that it stands for.

    ``operators`` are names of the graph that ``differentiate`` leaves; a stack of Q's, K's and V's goes by a name of
    its own.
    """

    name: str
    direction: str
    reads: str
    writes: str
    operators: tuple[str, ...]

    def words_in(self, sizes: Mapping[str, int]) -> int:
        """Words read."""
        return sum(math.prod(sizes[letter] for letter in dims) for dims in self.reads.split())

    def words_out(self, sizes: Mapping[str, int]) -> int:
        """Words written."""
        return sum(math.prod(sizes[letter] for letter in dims) for dims in self.writes.split())

    def words(self, sizes: Mapping[str, int]) -> int:
        """Words read and written."""
        return self.words_in(sizes) + self.words_out(sizes)

    def names(self) -> set[str]:
        """Names of the operators, and of the stacks of three of them."""
        stacks = {
            name.replace(QKV[0], "_".join(QKV), 1)
            for name in self.operators
            if name.startswith(QKV[0]) and all(name.replace(QKV[0], other, 1) in self.operators for other in QKV)
        }
        return {*self.operators, *stacks}


@dataclass(frozen=True)
class ComparedKernels:
    """Kernels by hand and kernels of a graph that share operators, and the words that each side moves."""

    direction: str
    by_hand: tuple[str, ...]
    ours: tuple[str, ...]
    words_by_hand: int
    our_words: int


def _each(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.format(name) for name in QKV)


def _kernels(direction: str, *listed: tuple[str, str, str, tuple[str, ...]]) -> tuple[HandKernel, ...]:
    return tuple(HandKernel(name, direction, reads, writes, operators) for name, reads, writes, operators in listed)


_PRODUCTS = ("Q, K and V", "BSE HPE HPE HPE", "BSE BSE BSE", _each("{}_product"))
_OUTPUT = ("attention output", "BSE EHP", "BSE", ("attention_product",))
_OUTPUT_GRADIENTS = (
    ("attention output dX", "BSE EHP", "BSE", ("attention_product_gradient_a",)),
    ("attention output dW", "BSE BSE", "EHP", ("attention_product_gradient_b",)),
)
_FFN = (
    ("FFN 1", "BSE UE", "BSU", ("intermediate_product",)),
    ("FFN 2", "BSU EU", "BSE", ("output_product",)),
)
_FFN_GRADIENTS = (
    ("FFN 2 dX", "BSE EU", "BSU", ("output_product_gradient_a",)),
    ("FFN 2 dW", "BSE BSU", "EU", ("output_product_gradient_b",)),
    ("FFN 1 dX", "BSU UE", "BSE", ("intermediate_product_gradient_a",)),
    ("FFN 1 dW", "BSU BSE", "UE", ("intermediate_product_gradient_b",)),
)
_SCORES = (
    ("QK^T", "BSE BSE", "BHST", ("scores",)),
    ("gamma", "BHST BSE", "BSE", ("context",)),
)
_SCORES_GRADIENTS = (
    ("gamma dX1", "BSE BSE", "BHST", ("context_gradient_a",)),
    ("gamma dX2", "BHST BSE", "BSE", ("context_gradient_b",)),
    ("QK^T dX1", "BHST BSE", "BSE", ("scores_gradient_a",)),
    ("QK^T dX2", "BHST BSE", "BSE", ("scores_gradient_b",)),
)
_PRODUCTS_DX = (
    "Q, K and V dX",
    "BSE BSE BSE HPE HPE HPE",
    "BSE",
    (*_each("{}_product_gradient_a"), "gradient_x_accumulation_2", "gradient_x_accumulation_3"),
)
_PRODUCTS_DW = ("Q, K and V dW", "BSE BSE BSE BSE", "HPE HPE HPE", _each("{}_product_gradient_b"))
_PRODUCTS_BIAS = ("Q, K and V bias dW", "BSE BSE BSE", "", _each("{}_gradient"))

BY_OPERATOR = (
    *_kernels(
        "forward",
        _PRODUCTS,
        ("Q, K and V bias", "BSE BSE BSE", "BSE BSE BSE", QKV),
        *_SCORES,
        ("mask", "BHST", "BHST", ("padding",)),
        ("softmax", "BHST", "BHST", ("attention_weights",)),
        ("attention dropout", "BHST", "BHST", ("attention_dropped",)),
        _OUTPUT,
        ("attention output bias", "BSE", "BSE", ("attention_output",)),
        ("attention output dropout", "BSE", "BSE", ("attention_output_dropped",)),
        ("residual 1", "BSE BSE", "BSE", ("attention_residual",)),
        ("LayerNorm 1", "BSE", "BSE", ("attention_norm",)),
        *_FFN,
        ("FFN 1 bias", "BSU", "BSU", ("intermediate",)),
        ("GELU", "BSU", "BSU", ("activation",)),
        ("FFN 2 bias", "BSE", "BSE", ("output",)),
        ("FFN 2 dropout", "BSE", "BSE", ("output_dropped",)),
        ("residual 2", "BSE BSE", "BSE", ("output_residual",)),
        ("LayerNorm 2", "BSE", "BSE", ("output_norm",)),
    ),
    *_kernels(
        "backward",
        ("LayerNorm 2 dX", "BSE BSE", "BSE", ("output_norm_gradient",)),
        ("LayerNorm 2 dW", "BSE BSE", "", ("output_norm_parameter_gradient",)),
        ("FFN 2 dropout dX", "BSE", "BSE", ("output_dropped_gradient",)),
        ("FFN 2 bias dW", "BSE", "", ("output_gradient",)),
        *_FFN_GRADIENTS,
        ("GELU dX", "BSU BSU", "BSU", ("activation_gradient",)),
        ("FFN 1 bias dW", "BSU", "", ("intermediate_gradient",)),
        ("residual 2 dX", "BSE BSE", "BSE", ("gradient_hidden_accumulation_1",)),
        ("LayerNorm 1 dX", "BSE BSE", "BSE", ("attention_norm_gradient",)),
        ("LayerNorm 1 dW", "BSE BSE", "", ("attention_norm_parameter_gradient",)),
        ("attention output dropout dX", "BSE", "BSE", ("attention_output_dropped_gradient",)),
        ("attention output bias dW", "BSE", "", ("attention_output_gradient",)),
        *_OUTPUT_GRADIENTS,
        *_SCORES_GRADIENTS,
        ("attention dropout dX", "BHST", "BHST", ("attention_dropped_gradient",)),
        ("softmax dX", "BHST BHST", "BHST", ("attention_weights_gradient",)),
        ("mask dX", "BHST", "BHST", ("padding_gradient",)),
        _PRODUCTS_BIAS,
        _PRODUCTS_DX,
        _PRODUCTS_DW,
        ("residual 1 dX", "BSE BSE", "BSE", ("gradient_x_accumulation_1",)),
    ),
)
"""One kernel an operator, Q, K and V stacked."""

PAPER_FORWARD = _kernels(
    "forward",
    _PRODUCTS,
    ("Q, K and V bias", "BSE BSE BSE", "BSE BSE BSE", QKV),
    _SCORES[0],
    ("softmax, dropout", "BHST", "BHST BHST BHST", ("padding", "attention_weights", "attention_dropped")),
    _SCORES[1],
    _OUTPUT,
    ("attention output bias", "BSE", "BSE", ("attention_output",)),
    ("attention output dropout", "BSE", "BSE BSE", ("attention_output_dropped",)),
    ("residual 1", "BSE BSE", "BSE", ("attention_residual",)),
    ("LayerNorm 1", "BSE", "BSE", ("attention_norm",)),
    _FFN[0],
    ("FFN 1 bias", "BSU", "BSU", ("intermediate",)),
    ("ReLU", "BSU", "BSU", ("activation",)),
    ("FFN 1 dropout", "BSU", "BSU BSU", ("activation_dropped",)),
    _FFN[1],
    ("FFN 2 bias", "BSE", "BSE", ("output",)),
    ("FFN 2 dropout", "BSE", "BSE BSE", ("output_dropped",)),
    ("residual 2", "BSE BSE", "BSE", ("output_residual",)),
    ("LayerNorm 2", "BSE", "BSE", ("output_norm",)),
)
"""The forward pass of the paper's layer (ReLU, dropout after it, no mask of keys): every dropout writes its mask. For
BERT-large at B=8 and S=512 these are the 524.3 million words of the paper's table."""

_BDRLN = (
    (
        "BDRLN 1",
        "BSE BSE",
        "BSE",
        ("attention_output", "attention_output_dropped", "attention_residual", "attention_norm"),
    ),
    ("BDRLN 2", "BSE BSE", "BSE", ("output", "output_dropped", "output_residual", "output_norm")),
)

PAPER_GROUPS = (
    *_kernels(
        "forward",
        _PRODUCTS,
        ("AIB", "BSE BSE BSE", "BSE BSE BSE", QKV),
        *_SCORES,
        ("SM", "BHST", "BHST BHST", ("padding", "attention_weights", "attention_dropped")),
        _OUTPUT,
        *_BDRLN,
        *_FFN,
        ("BRD", "BSU", "BSU", ("intermediate", "activation")),
    ),
    *_kernels(
        "backward",
        ("BSB", "BSE BSE", "", ("output_norm_parameter_gradient",)),
        ("BLNRD 2", "BSE BSE", "BSE BSE", ("output_norm_gradient", "output_dropped_gradient", "output_gradient")),
        *_FFN_GRADIENTS,
        ("BDRB", "BSU BSU", "BSU", ("activation_gradient", "intermediate_gradient")),
        ("EBSB", "BSE BSE BSE", "BSE", ("gradient_hidden_accumulation_1", "attention_norm_parameter_gradient")),
        ("BLNRD 1", "BSE BSE", "BSE BSE", ("attention_norm_gradient", "attention_output_dropped_gradient")),
        ("BAOB", "BSE", "", ("attention_output_gradient",)),
        *_OUTPUT_GRADIENTS,
        *_SCORES_GRADIENTS,
        (
            "BS",
            "BHST BHST",
            "BHST",
            ("attention_dropped_gradient", "attention_weights_gradient", "padding_gradient"),
        ),
        ("BAIB", *_PRODUCTS_BIAS[1:]),
        _PRODUCTS_DX,
        _PRODUCTS_DW,
        ("BEI", "BSE BSE", "BSE", ("gradient_x_accumulation_1",)),
    ),
)
"""The paper's fused kernels, GELU in the place of ReLU and dropout. LayerNorm writes y alone, from which its gradient
is computed; the gradient of FFN 2's bias is summed where its gradient is written."""

_ATTENTION = ("scores", "padding", "attention_weights", "attention_dropped", "context")

FUSED_ATTENTION = (
    *_kernels(
        "forward",
        ("Q, K and V, bias", *_PRODUCTS[1:3], (*_PRODUCTS[3], *QKV)),
        ("attention", "BSE BSE BSE", "BSE", _ATTENTION),
        _OUTPUT,
        *_BDRLN,
        ("FFN 1, bias", "BSE UE", "BSU", ("intermediate_product", "intermediate")),
        ("GELU", "BSU", "BSU", ("activation",)),
        _FFN[1],
    ),
    *_kernels(
        "backward",
        (
            "LayerNorm 2 backward",
            "BSE BSE",
            "BSE BSE",
            (
                "output_norm_gradient",
                "output_norm_parameter_gradient",
                "output_dropped_gradient",
                "output_gradient",
            ),
        ),
        *_FFN_GRADIENTS[:2],
        ("GELU backward", "BSU BSU", "BSU", ("activation_gradient", "intermediate_gradient")),
        (
            "FFN 1 dX, residual",
            "BSU UE BSE",
            "BSE",
            ("intermediate_product_gradient_a", "gradient_hidden_accumulation_1"),
        ),
        _FFN_GRADIENTS[3],
        (
            "LayerNorm 1 backward",
            "BSE BSE",
            "BSE BSE",
            (
                "attention_norm_gradient",
                "attention_norm_parameter_gradient",
                "attention_output_dropped_gradient",
                "attention_output_gradient",
            ),
        ),
        *_OUTPUT_GRADIENTS,
        (
            "attention backward",
            "BSE BSE BSE BSE BSE",
            "BSE BSE BSE",
            (
                "context_gradient_a",
                "context_gradient_b",
                "attention_dropped_gradient",
                "attention_weights_gradient",
                "padding_gradient",
                "scores_gradient_a",
                "scores_gradient_b",
            ),
        ),
        _PRODUCTS_BIAS,
        (
            "Q, K and V dX, residual",
            f"{_PRODUCTS_DX[1]} BSE",
            "BSE",
            (*_PRODUCTS_DX[3], "gradient_x_accumulation_1"),
        ),
        _PRODUCTS_DW,
    ),
)
"""Attention in one kernel each way, backward reading Q, K, V, the context and its gradient; biases of Q, K, V and FFN 1
and the sums with residual gradients in the contractions; GELU apart; LayerNorm writes y alone."""

HAND_COUNTS = {
    "operator by operator": BY_OPERATOR,
    "the paper's groups": PAPER_GROUPS,
    "fused attention": FUSED_ATTENTION,
}
"""The three counts."""


_SUM_TOO = "the sum in front of LayerNorm is written, too: its gradient reads the sum and not y"
_NO_MASK = "the mask is not written: backward draws it again"
_ONE_KERNEL = "all of it is one kernel here, which reads what they share once"

WHY = {
    ("the paper's forward pass", "Q, K and V"): "three contractions until stack-projections: x is read three times",
    ("the paper's forward pass", "softmax, dropout"): (
        "the mask of keys is an operator (+2 BHST), dropout reads the weights again (+1) and writes no mask (-1)"
    ),
    ("the paper's forward pass", "attention output dropout"): _NO_MASK,
    ("the paper's forward pass", "FFN 1 dropout"): _NO_MASK,
    ("the paper's forward pass", "FFN 2 dropout"): _NO_MASK,
    ("operator by operator", "Q, K and V"): "three contractions until stack-projections: x is read three times",
    ("operator by operator", "Q, K and V dX"): "three contractions, and two operators that add their results",
    ("operator by operator", "Q, K and V dW"): "three contractions until stack-projections: x is read three times",
    ("the paper's groups", "SM"): "the weights before dropout are not written: backward computes them again",
    ("the paper's groups", "BDRLN 1"): _SUM_TOO,
    ("the paper's groups", "BDRLN 2"): _SUM_TOO,
    ("the paper's groups", "BSB"): _ONE_KERNEL,
    ("the paper's groups", "EBSB"): _ONE_KERNEL,
    ("the paper's groups", "Q, K and V dX"): "adds the gradient of residual 1 as its addend",
    ("the paper's groups", "BEI"): "inside Q, K and V dX",
    ("fused attention", "Q, K and V, bias"): "the bias is a kernel of its own",
    ("fused attention", "BDRLN 1"): _SUM_TOO,
    ("fused attention", "BDRLN 2"): _SUM_TOO,
    ("fused attention", "attention backward"): "the context is not read: backward computes its rows' sums again",
}
"""Why a kernel by hand (a count's name and the kernel's) and what a layer has in its place move different words."""


def layer_sizes(layer: EncoderLayer, batch: int, seq: int) -> dict[str, int]:
    """Every dimension of the legend."""
    own = {"H": layer.heads, "P": layer.head_size, "E": layer.embed, "U": layer.ffn}
    return {"B": batch, "S": seq, "T": seq, **own}


def total_words(kernels: Sequence[HandKernel], sizes: Mapping[str, int]) -> int:
    """Words moved by all kernels."""
    return sum(kernel.words(sizes) for kernel in kernels)


def compare_with_hand(
    kernels: Sequence[HandKernel], counts: GraphCounts, sizes: Mapping[str, int]
) -> list[ComparedKernels]:
    """Both sides, kernel by kernel: those that share an operator are in one row, in the order of the hand count.

    Operators of a graph that no kernel by hand stands for have rows of their own at the end.
    """
    rows: list[tuple[list[HandKernel], set[str]]] = []
    for kernel in kernels:
        rows.append(([kernel], kernel.names()))
    ours: list[tuple[str, str, int, set[str]]] = []
    for operator in counts.by_operator:
        at = operator.counts.at(sizes["B"], sizes["S"])
        names = {member.name for member in operator.members} | {operator.name}
        ours.append((operator.direction, operator.name, at["words_in"] + at["words_out"], names))
    for direction, _, _, names in ours:
        touched = [row for row in rows if row[0][0].direction == direction and row[1] & names]
        if not touched:
            continue
        first, *others = touched
        first[1].update(names)
        for row in others:
            first[0].extend(row[0])
            first[1].update(row[1])
            rows.remove(row)
    found = []
    matched: set[tuple[str, str]] = set()
    for own, operators in rows:
        here = [o for o in ours if o[0] == own[0].direction and o[3] & operators]
        matched |= {(direction, name) for direction, name, _, _ in here}
        found.append(
            ComparedKernels(
                own[0].direction,
                tuple(kernel.name for kernel in own),
                tuple(name for _, name, _, _ in here),
                total_words(own, sizes),
                sum(words for _, _, words, _ in here),
            )
        )
    for direction, name, words, _ in ours:
        if (direction, name) not in matched:
            found.append(ComparedKernels(direction, (), (name,), 0, words))
    return found
