"""Compile a layer and verify it by the 1.1 rule: what `stepdown verify` does."""

from collections.abc import Callable

import torch

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import DataType, resolve_dtype
from stepdown.pipeline.compiler import compile_layer
from stepdown.pipeline.toolchain import Optimize
from stepdown.pipeline.verification.cases import make_mask
from stepdown.pipeline.verification.report import Report
from stepdown.pipeline.verification.rule import DRAWS, verify_layer


def verify_definition(
    definition: EncoderLayer,
    dtype: str | torch.dtype | DataType,
    batch: int,
    seq: int,
    *,
    mask: str = "right",
    draws: int = DRAWS,
    seed: int = 0,
    dropout: bool = True,
    masks: bool = True,
    target: str = "cpu",
    optimize: Optimize = "release",
    on_draw: Callable[[int], None] | None = None,
) -> Report:
    """Compile a layer for any batch and length, and verify its output and every gradient.

    :param definition: the layer.
    :param dtype: what it computes in.
    :param batch: `B`
    :param seq: `S`
    :param mask: the kind of key mask, one of ``cases.MASK_KINDS``.
    :param draws: how many draws errors are pooled over.
    :param seed: everything is drawn from it.
    :param dropout: training mode with dropout, or evaluation mode without.
    :param masks: whether to read the dropout masks out of the layer and compare them bit for bit.
    :param target: what to compile for.
    :param optimize: "release" or "light".
    :param on_draw: called with the number of finished draws.
    :raises StepdownError: when an option is unknown or the layer cannot be compiled.
    """
    dtype = resolve_dtype(dtype)
    key_mask = make_mask(mask, batch, seq, seed)
    module = compile_layer(definition, dtype=dtype, target=target, optimize=optimize).to_torch()
    return verify_layer(
        module,
        definition,
        dtype,
        batch,
        seq,
        mask=key_mask,
        draws=draws,
        seed=seed,
        dropout=dropout,
        masks=masks,
        mask_name=mask,
        on_draw=on_draw,
    )
