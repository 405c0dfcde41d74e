"""What a verification found: a row for the output and for every gradient, as a table and as JSON."""

import json
import math
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from stepdown.models.definition import EncoderLayer
from stepdown.pipeline.verification.masks import MaskRow

SITE_NAMES = ("attention weights", "attention output", "activation", "feed-forward output")
"""What the dropout numbers stand for."""


@dataclass(frozen=True)
class Row:
    """One result of a layer: its relative error against the oracle, PyTorch's, and the limit.

    ``vanishing``: the gradient is zero by mathematics, so that errors are relative to the size of its summands.
    """

    name: str
    error: float
    torch_error: float
    limit: float
    passed: bool
    vanishing: bool = False

    @property
    def share(self) -> float:
        """The error as a share of the limit: passed at 1 or below."""
        if self.error == 0:
            return 0.0
        return self.error / self.limit if self.limit > 0 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; an error that is not a finite number is null."""
        return {
            "name": self.name,
            "error": _finite(self.error),
            "torch_error": _finite(self.torch_error),
            "limit": _finite(self.limit),
            "passed": self.passed,
            "vanishing": self.vanishing,
        }


@dataclass(frozen=True)
class Report:
    """A verification of one layer at one dtype and shape.

    ``mask`` says in words which keys were masked; ``dropout`` whether the layer was in training mode; ``masks`` is
    empty where dropout masks were not read out. ``skipped`` says why nothing was compared, or is None.
    """

    definition: EncoderLayer
    dtype: str
    batch: int
    seq: int
    mask: str
    draws: int
    seed: int
    dropout: bool
    rows: tuple[Row, ...] = ()
    masks: tuple[MaskRow, ...] = ()
    skipped: str | None = None

    @property
    def passed(self) -> bool:
        """Whether everything was compared and nothing was beyond its limit."""
        return self.skipped is None and all(self._outcomes())

    @property
    def worst(self) -> Row | None:
        """The row closest to its limit, or furthest beyond it."""
        return max(self.rows, key=lambda row: row.share if math.isfinite(row.share) else math.inf, default=None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "layer": self.definition.to_dict(),
            "dtype": self.dtype,
            "batch": self.batch,
            "seq": self.seq,
            "mask": self.mask,
            "draws": self.draws,
            "seed": self.seed,
            "dropout": self.dropout,
            "passed": self.passed,
            "skipped": self.skipped,
            "rows": [row.to_dict() for row in self.rows],
            "masks": [{**vars(row), "passed": row.passed} for row in self.masks],
        }

    def to_json(self) -> str:
        """The report as one JSON object."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __rich__(self) -> RenderableType:
        """The report for the terminal: a table of errors, and one of dropout masks where they were compared."""
        size = f"batch {self.batch}, length {self.seq}, {self.dtype}"
        mode = "dropout on" if self.dropout else "dropout off"
        errors = Table(
            title=f"Relative error against the oracle: {size}, mask: {self.mask}, {mode}, {self.draws} draws",
            box=box.SIMPLE_HEAD,
        )
        errors.add_column("result", overflow="fold")
        for heading in ("error", "PyTorch's", "limit", "share"):
            errors.add_column(heading, justify="right")
        errors.add_column("")
        for row in self.rows:
            name = f"{row.name} *" if row.vanishing else row.name
            numbers = (f"{row.error:.1e}", f"{row.torch_error:.1e}", f"{row.limit:.1e}", f"{row.share:.2f}")
            errors.add_row(name, *numbers, _verdict(row.passed))
        parts: list[RenderableType] = [errors] if self.rows else []
        if self.masks:
            masks = Table(title="Dropout masks against the reference generator", box=box.SIMPLE_HEAD)
            masks.add_column("after", overflow="fold")
            for heading in ("probability", "bits", "observable", "different"):
                masks.add_column(heading, justify="right")
            masks.add_column("")
            for mask in self.masks:
                counts = (f"{count:,}" for count in (mask.elements, mask.observable, mask.different))
                masks.add_row(SITE_NAMES[mask.site], f"{mask.probability:g}", *counts, _verdict(mask.passed))
            parts.append(masks)
        return Group(*parts, self._caption())

    def _outcomes(self) -> list[bool]:
        return [row.passed for row in self.rows] + [row.passed for row in self.masks]

    def _caption(self) -> str:
        if self.skipped is not None:
            return f"Skipped: {self.skipped}"
        lines = []
        if any(row.vanishing for row in self.rows):
            lines.append("* zero by mathematics: relative to the size of its summands")
        outcomes = self._outcomes()
        lines.append(f"{sum(outcomes)} of {len(outcomes)} results are within their limits")
        return "\n".join(lines)


def _verdict(passed: bool) -> str:
    return "[green]ok[/]" if passed else "[bold red]FAILED[/]"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
