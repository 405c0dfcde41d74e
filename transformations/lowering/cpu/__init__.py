"""Lowering to OpenMP loops and BLAS calls."""

from stepdown.transformations.lowering.cpu import lower_contraction, lower_rows, lower_tiled


def register() -> None:
    """Attach every expansion of this target, as implementation ``"cpu"``, to its operator; again does nothing."""
    lower_contraction.register()
    lower_rows.register()
    lower_tiled.register()
