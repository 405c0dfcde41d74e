"""Dropout masks read out of a layer, whatever its dtype, and compared bit for bit with the reference generator's.

A layer does not return its masks. But its output is a function of them: with `J` the derivative of the output by the
elements of a mask, in float64 and taken at the reference generator's masks, an element that the layer kept otherwise
moves its output by about `J_i`. So the difference `r` between the layer's output and the oracle's, projected on `J_i`,

    c_i = <J_i, r> / <J_i, J_i>,

is about 1 (in absolute value) if bit `i` differs, and rounding error otherwise. One backward pass gives every
`<J_i, r>`; the lengths of all `J_i` are estimated with random signs `z`, as means of `<J_i, z>^2` (Bekas, Kokiopoulou
and Saad, "An estimator for the diagonal of a matrix", Applied Numerical Mathematics 57, 2007). A bit counts as
observable if its length is well above PyTorch's own rounding error at that dtype; others, such as the weights of masked
keys or what follows a ReLU's zeros, have no effect on the output.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stepdown.models.reference import ReferenceEncoderLayer

PROBES = 48
"""Random sign vectors: lengths are known to about sqrt(2 / PROBES), 20 %."""

MOST_SUSPECTS = 32
"""Up to this many suspected bits of one dropout are tried one by one."""

SEPARATION = 16
"""A bit is observable if its effect is this many times the rounding error along the same direction."""


@dataclass(frozen=True)
class MaskRow:
    """What was read out of one dropout: of ``elements`` bits, ``observable`` could be told and ``different`` differ."""

    site: int
    probability: float
    elements: int
    observable: int
    different: int

    @property
    def passed(self) -> bool:
        """Whether every observable bit is the reference generator's; where all keys are masked, none is observable."""
        return self.different == 0


def compare_masks(
    oracle: ReferenceEncoderLayer,
    x: Tensor,
    attention_mask: Tensor | None,
    keep: Mapping[int, Tensor],
    output: Tensor,
    torch_output: Tensor,
    seed: int = 0,
) -> tuple[MaskRow, ...]:
    """Compare a layer's masks with those of the reference generator.

    :param oracle: the layer in float64, in training mode, with the same parameters.
    :param x: the input, `[B, S, E]`, in float64.
    :param keep: the reference generator's masks by site.
    :param output: of the layer under test.
    :param torch_output: of PyTorch's layer at the same dtype with the masks of ``keep``: how large rounding errors are.
    """
    sites = sorted(keep)
    bits = {site: keep[site].double().requires_grad_() for site in sites}
    y = oracle(x, attention_mask, bits)
    sources = [bits[site] for site in sites]

    def project(vector: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, sources, vector, retain_graph=True)

    rounding = (torch_output.double() - y.detach()).square().mean().sqrt()
    rounding = rounding.clamp(min=torch.finfo(torch_output.dtype).eps / 16 * y.detach().square().mean().sqrt())
    generator = torch.Generator().manual_seed(seed)
    squares = [torch.zeros_like(source) for source in sources]
    for _ in range(PROBES):
        signs = torch.randint(0, 2, y.shape, generator=generator).to(y.device, torch.float64) * 2 - 1
        for square, projection in zip(squares, project(signs), strict=True):
            square += projection.square() / PROBES
    residual = output.double() - y.detach()
    rows = []
    for site, square, projection in zip(sites, squares, project(residual), strict=True):
        observable = square.sqrt() > SEPARATION * rounding
        # Written so that a NaN counts as a difference.
        equal = projection.abs() < square / 2
        different = confirmed(oracle, x, attention_mask, keep, output, site, observable & ~equal)
        rows.append(
            MaskRow(site, oracle.definition.dropout_sites[site], square.numel(), int(observable.sum()), different)
        )
    return tuple(rows)


def confirmed(
    oracle: ReferenceEncoderLayer,
    x: Tensor,
    attention_mask: Tensor | None,
    keep: Mapping[int, Tensor],
    output: Tensor,
    site: int,
    suspects: Tensor,
) -> int:
    """How many of the suspected bits differ: those whose flip in the oracle brings it closer to the layer's output.

    A 16-bit output rounds its largest elements far beyond the mean rounding error, so that a projection alone suspects
    one bit in some millions wrongly. Where there are more than ``MOST_SUSPECTS`` that is no chance, and all count.
    """
    places = suspects.nonzero().tolist()
    if len(places) > MOST_SUSPECTS:
        return len(places)

    def distance(masks: Mapping[int, Tensor]) -> Tensor:
        return (output.double() - oracle(x, attention_mask, masks).detach()).norm()

    masks = {number: mask.double().requires_grad_() for number, mask in keep.items()}
    unchanged = distance(masks)
    different = 0
    for place in places:
        flipped = masks[site].detach().clone()
        flipped[tuple(place)] = 1 - flipped[tuple(place)]
        # Written so that a NaN counts as a difference.
        different += not bool(distance(masks | {site: flipped.requires_grad_()}) >= unchanged)
    return different
