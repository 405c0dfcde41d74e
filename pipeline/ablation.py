"""What each optional pass is worth: a layer compiled without it, timed beside the full pipeline in one run.

Dimension legend: `B` batch, `S` sequence length, `E` embedding.

Repetitions are interleaved as in :mod:`stepdown.pipeline.compare`: every variant runs once, then all again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.errors import OptionError
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline.compare import (
    WARM_UP,
    Measured,
    common_fields,
    measure_interleaved,
    spread_weights,
    timed_row,
)
from stepdown.pipeline.compiler import CompiledLayer, compile_layer
from stepdown.pipeline.results import Row, rounded
from stepdown.pipeline.stages import OPTIONAL_PASSES, refuse_other_passes

EVERY_PASS = "every pass"

Report = Callable[[str], None]


@dataclass(frozen=True)
class Variant:
    """A compiled variant: what it is called, what was switched off, and what it moves, keeps and takes."""

    name: str
    disable: tuple[str, ...]
    counts: dict[str, int]
    measured: Measured


@dataclass(frozen=True)
class Ablation:
    """What :func:`ablate_layer` measured; the first variant is the full pipeline."""

    name: str
    layer: EncoderLayer
    batch: int
    seq: int
    dtype: str
    threads: int
    variants: tuple[Variant, ...]

    def slowdown(self, variant: Variant, case: str) -> float:
        """How many times as long as the full pipeline a variant takes: the median over repetitions."""
        full = self.variants[0].measured.seconds[case]
        return median(own / other for own, other in zip(variant.measured.seconds[case], full, strict=True))

    def rows(self) -> list[Row]:
        """One row for each variant and case."""
        common = common_fields(self.name, self.layer, self.batch, self.seq, self.dtype, self.threads)
        rows = []
        for variant in self.variants:
            for case, seconds in variant.measured.seconds.items():
                values = {"against_every_pass": rounded(self.slowdown(variant, case)), **variant.counts}
                rows.append(timed_row(variant.name, case, seconds, values, common))
        return rows


def variants_of(passes: Sequence[str] | None = None) -> dict[str, tuple[str, ...]]:
    """Names of variants and what they switch off: nothing, then each pass in turn, then all of them.

    :param passes: optional passes; all by default.
    :raises OptionError: when one is not the name of an optional pass.
    """
    names = OPTIONAL_PASSES if passes is None else tuple(dict.fromkeys(passes))
    refuse_other_passes(names)
    found: dict[str, tuple[str, ...]] = {EVERY_PASS: ()}
    found |= {f"without {name}": (name,) for name in names}
    if passes is None:
        found["without any"] = names
    return found


def step_count(passes: Sequence[str] | None, repeats: int) -> int:
    """How often :func:`ablate_layer` calls ``report``."""
    return len(variants_of(passes)) + WARM_UP + repeats


def ablate_layer(
    name: str,
    layer: EncoderLayer,
    *,
    batch: int,
    seq: int,
    dtype: str = "float32",
    target: str = "cpu",
    passes: Sequence[str] | None = None,
    repeats: int = 20,
    report: Report = lambda step: None,
) -> Ablation:
    """Measure ``layer`` compiled with every optional pass, without each of ``passes``, and, for all, without any.

    All have the same weights and read the same input. Uses the threads that PyTorch is set to.

    :param passes: optional passes to switch off in turn; all by default.
    :param repeats: measured repetitions of each variant, after two that are not.
    :param report: called with a word before each step of :func:`step_count`.
    :raises OptionError: when a name, size or number is not accepted.
    :raises BuildError: when the compiler fails.
    """
    for what, value in (("batch", batch), ("seq", seq), ("repeats", repeats)):
        if value < 1:
            raise OptionError(f'"{what}" is {value}; accepted is a positive integer.')
    chosen = variants_of(passes)
    kind = resolve_dtype(dtype)
    reference = ReferenceEncoderLayer(layer).to(kind.torch)
    spread_weights(reference)
    x, gradient = (torch.randn(batch, seq, layer.embed).to(kind.torch) for _ in range(2))
    modules: dict[str, nn.Module] = {}
    variants = []
    for variant, disable in chosen.items():
        report(f"compiling {variant}")
        compiled = compile_layer(layer, batch=batch, seq=seq, dtype=kind.name, target=target, disable=disable)
        modules[variant] = compiled.to_torch()
        modules[variant].load_state_dict(reference.state_dict())
        variants.append(Variant(variant, disable, _counts(compiled), Measured(variant)))
    measure_interleaved([variant.measured for variant in variants], modules, x, gradient, repeats, report)
    return Ablation(name, layer, batch, seq, kind.name, torch.get_num_threads(), tuple(variants))


def _counts(compiled: CompiledLayer) -> dict[str, int]:
    """Words moved and bytes kept as the manifest has them for fixed sizes, and the kernels that run."""
    last = compiled.manifest["stages"][-1]
    return {
        "words": int(last["words_in"]) + int(last["words_out"]),
        "kept_bytes": int(last["kept_bytes"]),
        "kernels": int(last["kernels"]),
    }
